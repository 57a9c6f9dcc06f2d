//! Scenarios of many at once at the birth of a group, and of its end and second life (protocol 3, 6, 8).

mod support;

use std::collections::{BTreeMap, BTreeSet};

use reqwest::StatusCode;
use rsc_protocol::admin::{GroupResponse, GroupState};
use rsc_protocol::keys::shard_key;
use rsc_protocol::{ErrorCode, GroupKey, HeartbeatResponse, Status};
use serde_json::{Value, json};
use support::{
    Answer, Api, Daemon, Member, RedisServer, beat_until_stable, group_path, monitored_path, wait_until,
};
use tokio::task::JoinSet;

/// Sends all of these at once; the answers in no particular order.
async fn post_at_once(requests: Vec<(Api, String, Value)>) -> Vec<Answer> {
    let mut running = JoinSet::new();
    for (api, path, body) in requests {
        running.spawn(async move { api.post(&path, &body).await });
    }
    running.join_all().await
}

#[tokio::test]
async fn fifty_parallel_first_heartbeats_all_become_members_with_one_holder_per_shard() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).long_lease().start();
    let api = daemon.api();
    let group = api.create_stream("orders", 120).await;
    let mut joining = JoinSet::new();
    for index in 0..50 {
        let mut member = Member::new(&api, &group, &format!("m{index}"));
        joining.spawn(async move {
            let answer = member.beat().await;
            (member, answer)
        });
    }
    let (mut members, answers): (Vec<Member>, Vec<HeartbeatResponse>) =
        joining.join_all().await.into_iter().unzip();
    assert!(answers.iter().all(|answer| answer.status == Status::Ok), "{answers:?}");
    let shown = api.group(&group).await;
    assert_eq!(shown.live_members, 50);

    beat_until_stable(&api, &group, &mut members).await;
    let mut owners: BTreeMap<u32, &str> = BTreeMap::new();
    for member in &members {
        assert!((2..=3).contains(&member.owned.len()), "{}: {:?}", member.id(), member.owned);
        for &shard in &member.owned {
            assert_eq!(owners.insert(shard, member.id()), None, "shard {shard} has two owners");
        }
    }
    assert_eq!(owners.len(), 120);
}

#[tokio::test]
async fn two_parallel_creates_on_an_empty_redis_make_one_group() {
    let redis = RedisServer::start();
    let daemons = [Daemon::redis(&redis).long_lease().start(), Daemon::redis(&redis).long_lease().start()];
    let apis = daemons.each_ref().map(Daemon::api);
    // The same stream twice, through one coordinator and through two; the same group of it likewise.
    for (index, (first, second)) in [(0, 0), (0, 1), (1, 0), (1, 1)].into_iter().enumerate() {
        let prefix = format!("orders{index}");
        let stream = format!("/coord/v1/streams/{prefix}");
        let late_group = GroupKey::new(prefix.as_str(), "late").unwrap();
        let paths = [
            (stream, ErrorCode::StreamPrefixAlreadyExists),
            (group_path(&late_group), ErrorCode::GroupAlreadyExists),
        ];
        for (path, refused) in paths {
            let body = json!({"initialShardCount": 3, "requestedBy": "test"});
            let request = |which: usize| (apis[which].clone(), path.clone(), body.clone());
            let mut answers = post_at_once(vec![request(first), request(second)]).await;
            answers.sort_by_key(|answer| answer.status);
            assert_eq!(answers[0].status, StatusCode::CREATED, "{answers:?}");
            answers[1].expect_error(refused);
        }
        for shard in 0..3 {
            let key = shard_key(&prefix, shard);
            let groups: Vec<BTreeMap<String, redis::Value>> = redis.command(&["XINFO", "GROUPS", &key]).await;
            let names: BTreeSet<String> =
                groups.iter().map(|group| redis::from_redis_value(group["name"].clone()).unwrap()).collect();
            assert_eq!(names, BTreeSet::from([prefix.clone(), "late".to_owned()]));
        }
    }
}

#[tokio::test]
async fn twenty_parallel_creates_with_different_counts_on_a_new_prefix_end_with_one_count() {
    let redis = RedisServer::start();
    let daemons = [Daemon::redis(&redis).long_lease().start(), Daemon::redis(&redis).long_lease().start()];
    let apis = daemons.each_ref().map(Daemon::api);
    let group = |index: usize| GroupKey::new("orders", format!("g{index}")).unwrap();
    // Counts 1 to 8, each twice, and four groups that take what there is.
    let asked = |index: usize| (index < 16).then_some(index % 8 + 1);
    let requests = (0..20).map(|index| {
        let body = json!({"initialShardCount": asked(index), "requestedBy": "test"});
        (apis[index % 2].clone(), group_path(&group(index)), body)
    });
    let answers = post_at_once(requests.collect()).await;
    let created: Vec<GroupResponse> =
        answers.iter().filter(|answer| answer.status == StatusCode::CREATED).map(Answer::read).collect();
    for refused in answers.iter().filter(|answer| answer.status != StatusCode::CREATED) {
        refused.expect_error(ErrorCode::ShardCountMismatch);
    }
    let counts: BTreeSet<u32> = created.iter().map(|group| group.shard_count).collect();
    assert_eq!(counts.len(), 1, "{created:?}");
    let count = *counts.first().unwrap();
    // Whoever asked for that very count, or for none, has got it.
    for index in 0..20 {
        let exists = created.iter().any(|created| created.consumer_group == format!("g{index}"));
        let fits = asked(index).is_none_or(|asked| asked == count as usize);
        assert_eq!(exists, fits, "g{index}, {count} shards");
        match fits {
            true => assert_eq!(apis[0].group(&group(index)).await.shard_count, count),
            false => {
                drop(apis[1].get(&group_path(&group(index))).await.expect_error(ErrorCode::GroupNotFound))
            }
        }
    }
    let mut shards: Vec<String> = redis.command(&["KEYS", "orders:*"]).await;
    shards.sort();
    assert_eq!(shards.len(), count as usize, "{shards:?}");
}

#[tokio::test]
async fn group_deleted_and_created_again_starts_above_the_old_numbers() {
    let redis = RedisServer::start();
    let daemons = [Daemon::redis(&redis).long_lease().start(), Daemon::redis(&redis).long_lease().start()];
    let apis = daemons.each_ref().map(Daemon::api);
    let api = &apis[0];
    let group = api.create_stream("orders", 4).await;
    let mut members = vec![Member::new(api, &group, "a"), Member::new(api, &group, "b")];
    beat_until_stable(api, &group, &mut members).await;
    for member in &mut members {
        assert_eq!(member.leave().await.status, Status::Ok);
    }
    let mut old = api.group(&group).await;
    assert_eq!(old.state, GroupState::Empty);
    // Through one and the other: a tombstone is in Redis, not in anybody's memory.
    for (index, creator) in [(0, &apis[1]), (1, &apis[0])] {
        let body = json!({"requestedBy": "test", "reason": "to begin again"});
        let snapshot: GroupResponse = apis[index].delete(&group_path(&group), &body).await.read();
        assert_eq!(snapshot.metadata_version, old.metadata_version);
        apis[index].get(&group_path(&group)).await.expect_error(ErrorCode::GroupNotFound);
        let new = creator.create_group(&group, 4).await;
        assert!(new.metadata_version > old.metadata_version, "{new:?} after {old:?}");
        assert!(new.group_epoch > old.group_epoch, "{new:?} after {old:?}");
        assert!(new.store_revision > old.store_revision, "{new:?} after {old:?}");
        old = new;
    }
    // Nobody's memory of the old group is taken for anything.
    let answer = members[0].beat_unheard().await;
    assert_eq!(answer.status, Status::UnknownMemberId);
    let mut members = vec![Member::new(api, &group, "a"), Member::new(&apis[1], &group, "b")];
    beat_until_stable(api, &group, &mut members).await;
}

#[tokio::test]
async fn group_with_live_members_is_deleted_by_force_only_and_its_members_are_unknown() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).long_lease().start();
    let api = daemon.api();
    let group = api.create_stream("orders", 4).await;
    let mut members = vec![Member::new(&api, &group, "a"), Member::new(&api, &group, "b")];
    beat_until_stable(&api, &group, &mut members).await;
    let path = group_path(&group);
    let gentle = json!({"requestedBy": "test", "reason": "not needed"});
    api.delete(&path, &gentle).await.expect_error(ErrorCode::GroupHasActiveMembers);
    // Nothing has happened by that.
    for member in &mut members {
        assert_eq!((member.beat().await.status, member.owned.len()), (Status::Ok, 2));
    }
    let forced = json!({"requestedBy": "test", "reason": "not needed", "force": true});
    let snapshot: GroupResponse = api.delete(&path, &forced).await.read();
    assert_eq!((snapshot.live_members, snapshot.state), (2, GroupState::Stable));
    for member in &mut members {
        let answer = member.beat().await;
        assert_eq!(answer.status, Status::UnknownMemberId);
        assert!(member.owned.is_empty());
        // Nor does a join bring it back.
        assert_eq!(member.beat().await.status, Status::UnknownMemberId);
    }
    api.get(&path).await.expect_error(ErrorCode::GroupNotFound);
    wait_until("the actor has let go", async || {
        api.get(&format!("{}/actor", monitored_path(&group))).await.status == StatusCode::NOT_FOUND
    })
    .await;
}
