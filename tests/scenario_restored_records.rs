//! Scenarios of records that vanish in the middle of a turn, come back from an old dump, or belong to a group that
//! was deleted and created again (protocol 3 and 5).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::time::{Duration, Instant};

use rsc_protocol::keys::Keys;
use rsc_protocol::{ErrorCode, GroupKey, Status};
use serde_json::json;
use support::{
    Api, Daemon, Member, Proxy, RedisServer, beat_until_stable, group_path, monitored_path, wait_until,
};

const LEASE: Duration = Duration::from_secs(2);
/// What every commit contains and no other command.
const COMMIT: &str = "memberLeaseExpiresAt";

fn lease_ms() -> u64 {
    LEASE.as_millis() as u64
}

fn metadata_key(group: &GroupKey) -> String {
    Keys::default().metadata(group)
}

/// Nobody has synchronising to do any more.
async fn recovers(redis: &RedisServer, api: &Api, group: &GroupKey, members: &mut [Member]) {
    wait_until("the round is over", async || {
        beat_until_stable(api, group, members).await;
        redis.aggregate(group).await.unwrap()["metadataCorrection"].is_null()
    })
    .await;
    beat_until_stable(api, group, members).await;
    let shown = api.get(&format!("{}/assignments", monitored_path(group))).await.success();
    assert_eq!((&shown["invariantViolations"], &shown["holds"]), (&json!([]), &json!([])), "{shown}");
    let owned: usize = members.iter().map(|member| member.owned.len()).sum();
    assert_eq!(shown["shardCount"].as_u64(), Some(owned as u64), "{shown}");
}

#[tokio::test]
async fn key_that_vanishes_between_enter_and_commit_is_not_written_anew() {
    let redis = RedisServer::start();
    let proxy = Proxy::to(redis.port()).await;
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    let daemon = Daemon::builder(&["--redis-url", &url]).long_lease().start();
    let api = daemon.api();
    let group = api.create_stream("orders", 4).await;
    let mut members = vec![Member::new(&api, &group, "a"), Member::new(&api, &group, "b")];
    beat_until_stable(&api, &group, &mut members).await;
    let key = metadata_key(&group);

    // A renewal of a lease, and a join, which writes the whole record.
    for newcomer in [false, true] {
        let dump = redis.dump(&key).await.unwrap();
        let before = redis.aggregate(&group).await.unwrap();
        let mut member = if newcomer { Member::new(&api, &group, "c") } else { members[0].clone() };
        let request = member.request();
        let mut commit = proxy.hold_next(COMMIT);
        let sending = tokio::spawn({
            let (api, group) = (api.clone(), group.clone());
            async move { api.try_heartbeat(&group, &request).await }
        });
        commit.reached().await;
        redis.command::<()>(&["DEL", &key]).await;
        commit.let_go();
        sending.await.unwrap().expect_error(ErrorCode::GroupMetadataMissing);
        assert!(redis.dump(&key).await.is_none(), "nothing is written anew");
        for member in &mut members {
            api.try_heartbeat(&group, &member.request()).await.expect_error(ErrorCode::GroupMetadataMissing);
        }
        assert!(redis.dump(&key).await.is_none());

        redis.restore(&key, &dump).await;
        for member in &mut members {
            let owned = member.owned.clone();
            assert_eq!((member.beat().await.status, &member.owned), (Status::Ok, &owned));
        }
        let now = redis.aggregate(&group).await.unwrap();
        for field in ["metadataVersion", "groupEpoch", "targetAssignments"] {
            assert_eq!(now[field], before[field], "{field}: what was not committed has not happened");
        }
    }
    members.push(Member::new(&api, &group, "c"));
    beat_until_stable(&api, &group, &mut members).await;
}

/// The same with a record that is replaced by an older one of itself: nothing that was computed on the lost one is
/// written over it.
#[tokio::test]
async fn record_that_falls_back_between_enter_and_commit_is_noticed_before_anything_is_written() {
    let redis = RedisServer::start();
    let proxy = Proxy::to(redis.port()).await;
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    let daemon = Daemon::builder(&["--redis-url", &url]).lease(lease_ms(), 8_000).start();
    let api = daemon.api();
    let group = api.create_stream("orders", 4).await;
    let mut members = vec![Member::new(&api, &group, "a"), Member::new(&api, &group, "b")];
    beat_until_stable(&api, &group, &mut members).await;
    let key = metadata_key(&group);
    let dump = redis.dump(&key).await.unwrap();
    members.push(Member::new(&api, &group, "c"));
    beat_until_stable(&api, &group, &mut members).await;

    let mut leaver = members.pop().unwrap();
    let mut commit = proxy.hold_next(COMMIT);
    let sending = tokio::spawn(async move { leaver.leave().await });
    commit.reached().await;
    redis.restore(&key, &dump).await;
    commit.let_go();
    // c's leave was computed on a record that has it; Redis does not know it any more.
    assert_eq!(sending.await.unwrap().status, Status::UnknownMemberId);
    assert_eq!(api.metric("rsc_metadata_version_regression_total").await, 1.0);
    assert!(redis.aggregate(&group).await.unwrap()["metadataCorrection"].is_object());
    recovers(&redis, &api, &group, &mut members).await;
}

#[tokio::test]
async fn dump_of_other_members_put_back_gives_nobody_a_shard_that_somebody_reads() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).lease(lease_ms(), 8_000).start();
    let api = daemon.api();
    let group = api.create_stream("orders", 4).await;
    let key = metadata_key(&group);
    let mut former = vec![Member::new(&api, &group, "x"), Member::new(&api, &group, "y")];
    beat_until_stable(&api, &group, &mut former).await;
    let dump = redis.dump(&key).await.unwrap();
    for member in &mut former {
        member.leave().await;
    }
    let mut members = vec![Member::new(&api, &group, "a"), Member::new(&api, &group, "b")];
    beat_until_stable(&api, &group, &mut members).await;
    let reached = api.group(&group).await.metadata_version;

    redis.restore(&key, &dump).await;
    let restored = Instant::now();
    // The record has only x and y, who are long gone; a and b read on, and a hears nothing of this.
    let lost = members[0].beat_unheard().await;
    assert_eq!(lost.status, Status::UnknownMemberId);
    assert!(lost.metadata_version < reached);
    assert_eq!(members[1].beat().await.status, Status::UnknownMemberId);
    assert_eq!(api.metric("rsc_metadata_version_regression_total").await, 1.0);
    let shown = api.get(&format!("{}/assignments", monitored_path(&group))).await.success();
    let held =
        shown["holds"].as_array().unwrap().iter().filter(|hold| hold["cause"] == "LOST_FUTURE").count();
    assert_eq!(held, 4, "what a and b said to read: {shown}");
    wait_until("somebody reads something anew", async || {
        members[1].beat().await;
        !members[1].owned.is_empty()
    })
    .await;
    assert!(restored.elapsed() >= LEASE, "granted after {:?}", restored.elapsed());
    assert_eq!(members[0].beat().await.status, Status::UnknownMemberId);
    recovers(&redis, &api, &group, &mut members).await;
    let states = redis.aggregate(&group).await.unwrap()["members"].clone();
    assert_eq!((&states["x"]["state"], &states["y"]["state"]), (&json!("EXPIRED"), &json!("EXPIRED")));
}

#[tokio::test]
async fn dump_of_a_deleted_group_put_back_over_its_successor_is_a_loss_like_any_other() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).lease(lease_ms(), 8_000).start();
    let api = daemon.api();
    let group = api.create_stream("orders", 4).await;
    let (key, tombstone) = (metadata_key(&group), Keys::default().tombstone(&group));
    let mut members = vec![Member::new(&api, &group, "a"), Member::new(&api, &group, "b")];
    beat_until_stable(&api, &group, &mut members).await;
    let dump = redis.dump(&key).await.unwrap();
    let forced = json!({"requestedBy": "test", "reason": "to begin again", "force": true});
    api.delete(&group_path(&group), &forced).await.success();
    let deleted = Instant::now();
    assert!(redis.dump(&tombstone).await.is_some());
    api.create_group(&group, 4).await;

    // Nobody's memory of the deleted one is evidence of anything.
    let late = members[0].beat_unheard().await;
    assert_eq!(late.status, Status::UnknownMemberId);
    let mut newcomer = Member::new(&api, &group, "c");
    wait_until("the new group grants", async || {
        newcomer.beat().await;
        !newcomer.owned.is_empty()
    })
    .await;
    assert!(deleted.elapsed() > LEASE * 9 / 10, "a reads until its lease is over: {:?}", deleted.elapsed());
    assert_eq!(api.metric("rsc_correction_begun_total").await, 0.0);
    assert_eq!(api.metric("rsc_evidence_of_loss_total").await, 0.0);
    newcomer.leave().await;
    beat_until_stable(&api, &group, &mut members).await;

    // An operator's mistake: the deleted record comes back over the living one.
    redis.restore(&key, &dump).await;
    assert_eq!(members[0].beat().await.status, Status::SyncMetadata);
    assert_eq!(api.metric("rsc_metadata_version_regression_total").await, 1.0);
    recovers(&redis, &api, &group, &mut members).await;
    // And it is a group: should it vanish now, that is a loss and no deletion.
    assert!(redis.dump(&tombstone).await.is_none());
    redis.command::<()>(&["DEL", &key]).await;
    api.try_heartbeat(&group, &members[0].request()).await.expect_error(ErrorCode::GroupMetadataMissing);
}
