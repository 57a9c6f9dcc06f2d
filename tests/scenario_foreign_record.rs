//! Scenarios of a record that another implementation of the protocol has written: schema 1, layout 1, none of
//! our additions (protocol 2).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeSet;

use rsc_protocol::admin::GroupState;
use rsc_protocol::keys::Keys;
use rsc_protocol::{GroupKey, Status, Timestamp};
use serde_json::{Value, json};
use support::{Api, Daemon, Member, RedisServer, beat_until_stable, group_path, monitored_path, wait_until};

const EPOCH: i64 = 12;
const VERSION: u64 = 41;

fn shards(indexes: &[u32]) -> Value {
    indexes.iter().map(|index| json!({"shardIndex": index})).collect()
}

fn member(id: &str, state: &str, current: &[u32], now: Timestamp) -> Value {
    json!({
        "memberId": id,
        "memberName": format!("{id} of the other implementation"),
        "state": state,
        "memberEpoch": EPOCH,
        "metadataVersion": VERSION,
        "runtimeMaxConcurrency": 8,
        "activeConsumerWorkers": 0,
        "currentAssignment": shards(current),
        "revoking": [],
        "lastHeartbeatAt": now,
        "memberLeaseExpiresAt": now.plus(15_000),
        "rebalanceTimeoutMs": 60_000,
        "rebalanceDeadlineAt": null,
        "shardProgress": [],
        "rackName": "r7",
    })
}

/// Two members that own two shards each, one that has gone; written straight into Redis.
async fn write_record(redis: &RedisServer, group: &GroupKey) -> String {
    let time: (String, String) = redis.command(&["TIME"]).await;
    let now = Timestamp::from_millis(time.0.parse::<i64>().unwrap() * 1_000);
    let aggregate = json!({
        "streamPrefix": group.stream_prefix(),
        "consumerGroup": group.consumer_group(),
        "schemaVersion": 1,
        "storeRevision": 7,
        "groupEpoch": EPOCH,
        "metadataVersion": VERSION,
        "assignmentEpoch": EPOCH,
        "state": "STABLE",
        "shardCount": 4,
        "members": {
            "a": member("a", "ACTIVE", &[0, 1], now),
            "b": member("b", "ACTIVE", &[2, 3], now),
            "gone": member("gone", "EXPIRED", &[], now),
        },
        "targetAssignments": {"a": shards(&[0, 1]), "b": shards(&[2, 3])},
        "migrations": {},
        "activeReshardingId": null,
        "metadataCorrection": null,
        "createdAt": now.plus(-86_400_000),
        "updatedAt": now,
        "ownerTeam": {"name": "payments"},
    });
    let key = Keys::default().metadata(group);
    let updated_at = aggregate["updatedAt"].as_str().unwrap();
    let fields: i64 = redis
        .command(&[
            "HSET",
            &key,
            "aggregate",
            &aggregate.to_string(),
            "revision",
            "7",
            "schemaVersion",
            "1",
            "layoutVersion",
            "1",
            "updatedAt",
            updated_at,
        ])
        .await;
    assert_eq!(fields, 5);
    key
}

/// The members of the record, as they were when the other implementation last answered them.
fn members(api: &Api, group: &GroupKey) -> Vec<Member> {
    let member = |id: &str, owned: [u32; 2]| {
        let mut member = Member::simple(api, group, id);
        member.epoch = EPOCH;
        member.metadata_version = VERSION;
        member.owned = BTreeSet::from(owned);
        member
    };
    vec![member("a", [0, 1]), member("b", [2, 3])]
}

/// The group is served as if it had always been ours, and nothing of the record gets lost.
async fn goes_on(redis: &RedisServer, api: &Api, group: &GroupKey) {
    let mut members = members(api, group);
    for member in &mut members {
        let owned = member.owned.clone();
        let answer = member.beat().await;
        assert_eq!((answer.status, answer.member_epoch), (Status::Ok, EPOCH), "{answer:?}");
        assert_eq!(member.owned, owned);
    }
    let shown = api.group(group).await;
    assert_eq!((shown.state, shown.shard_count, shown.live_members), (GroupState::Stable, 4, 2));
    assert_eq!((shown.metadata_version, shown.group_epoch), (VERSION, EPOCH.unsigned_abs()));
    let routing = api.get(&format!("{}/producer-routing", group_path(group))).await.success();
    assert_eq!((&routing["shardCount"], &routing["metadataVersion"]), (&json!(4), &json!(VERSION)));

    // Life goes on: one joins, one leaves.
    members.push(Member::new(api, group, "c"));
    beat_until_stable(api, group, &mut members).await;
    assert!(members.iter().all(|member| !member.owned.is_empty()));
    members.remove(1).leave().await;
    beat_until_stable(api, group, &mut members).await;

    let key = Keys::default().metadata(group);
    let aggregate = redis.aggregate(group).await.unwrap();
    assert_eq!(aggregate["ownerTeam"], json!({"name": "payments"}));
    for id in ["a", "b", "gone"] {
        assert_eq!(aggregate["members"][id]["rackName"], "r7", "{id}");
    }
    assert_eq!(aggregate["members"]["gone"]["state"], "EXPIRED");
    assert!(aggregate["metadataVersion"].as_u64().unwrap() > VERSION);
    assert!(aggregate["groupEpoch"].as_i64().unwrap() > EPOCH);
    let stamp: Vec<String> =
        redis.command(&["HMGET", &key, "revision", "schemaVersion", "layoutVersion"]).await;
    assert_eq!(stamp[0], aggregate["storeRevision"].to_string());
    assert_eq!(stamp[1..], ["1", "2"]);
    let violations = api.get(&format!("{}/assignments", monitored_path(group))).await.success();
    assert_eq!(violations["invariantViolations"], json!([]));
}

#[tokio::test]
async fn record_of_another_implementation_is_found_in_the_index_served_and_kept_whole() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).long_lease().start();
    let api = daemon.api();
    let group = GroupKey::new("orders", "billing").unwrap();
    let key = write_record(&redis, &group).await;
    redis.command::<i64>(&["SADD", &Keys::default().groups(), &key]).await;
    wait_until("the index has led to the group", async || {
        let actor = api.get(&format!("{}/actor", monitored_path(&group))).await;
        actor.status.is_success() && actor.json()["running"] == true
    })
    .await;
    goes_on(&redis, &api, &group).await;
}

#[tokio::test]
async fn record_of_another_implementation_that_the_index_does_not_name_is_served_and_indexed() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).long_lease().start();
    let api = daemon.api();
    let group = GroupKey::new("orders", "billing").unwrap();
    let key = write_record(&redis, &group).await;
    goes_on(&redis, &api, &group).await;
    wait_until("the group is in the index", async || {
        redis.command::<bool>(&["SISMEMBER", &Keys::default().groups(), &key]).await
    })
    .await;
}
