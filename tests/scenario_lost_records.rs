//! Scenarios of records that vanish or cannot be read: fail closed, touch nothing, go on by itself when the
//! record is back (protocol 2 and 3).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::time::Instant;

use reqwest::StatusCode;
use rsc_protocol::admin::GroupState;
use rsc_protocol::keys::Keys;
use rsc_protocol::{ErrorCode, GroupKey, Status};
use serde_json::{Value, json};
use support::{
    Api, Daemon, Member, RedisServer, beat_until_stable, group_path, heartbeat, monitored_path, wait_until,
};

const GROUPS: &str = "/coord/v1/monitoring/groups";

fn metadata_key(group: &GroupKey) -> String {
    Keys::default().metadata(group)
}

/// A stream with two members that own two shards each.
async fn two_members(api: &Api, stream_prefix: &str) -> (GroupKey, Vec<Member>) {
    let group = api.create_stream(stream_prefix, 4).await;
    let mut members = vec![Member::new(api, &group, "a"), Member::new(api, &group, "b")];
    beat_until_stable(api, &group, &mut members).await;
    // One more each, so that what follows moves nothing.
    for member in &mut members {
        member.beat().await;
    }
    (group, members)
}

/// Everything that needs the record is refused with `code`; reads say what is wrong.
async fn expect_closed(api: &Api, group: &GroupKey, members: &mut [Member], code: ErrorCode) {
    for member in members {
        api.try_heartbeat(group, &member.request()).await.expect_error(code);
    }
    api.try_heartbeat(group, &heartbeat("newcomer")).await.expect_error(code);
    let path = group_path(group);
    api.get(&format!("{path}/producer-routing")).await.expect_error(code);
    api.post(&path, &json!({"requestedBy": "test"})).await.expect_error(code);
    let shown = api.get(&path).await.success();
    assert_eq!((&shown["healthy"], &shown["errorCode"]), (&json!(false), &json!(code.as_str())), "{shown}");
}

/// The group as before: same members, same numbers, and it works.
async fn expect_untouched(api: &Api, group: &GroupKey, members: &mut [Member], before: &Value) {
    for member in members {
        let owned = member.owned.clone();
        let answer = member.beat().await;
        assert_eq!((answer.status, &member.owned), (Status::Ok, &owned), "{answer:?}");
    }
    let now = api.get(&group_path(group)).await.success();
    for field in ["state", "groupEpoch", "assignmentEpoch", "metadataVersion", "targetAssignmentSummary"] {
        assert_eq!(now[field], before[field], "{field} of {now}");
    }
    api.get(&format!("{}/producer-routing", group_path(group))).await.success();
}

#[tokio::test]
async fn metadata_key_deleted_fails_closed_rebuilds_nothing_and_goes_on_when_restored() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).lease(3_000, 30_000).start();
    let api = daemon.api();
    let (group, mut members) = two_members(&api, "orders").await;
    let before = api.get(&group_path(&group)).await.success();
    assert_eq!(before["state"], "STABLE");
    let key = metadata_key(&group);
    let dump = redis.dump(&key).await.unwrap();

    let deleted_at = Instant::now();
    redis.command::<()>(&["DEL", &key]).await;
    // For longer than the members' leases.
    wait_until("more than a lease has passed", async || {
        expect_closed(&api, &group, &mut members, ErrorCode::GroupMetadataMissing).await;
        assert!(redis.dump(&key).await.is_none());
        deleted_at.elapsed().as_millis() > 3_600
    })
    .await;
    assert_eq!(api.get(GROUPS).await.success()["missing"], json!([key]));
    // Who has never seen the record knows from the index that it should be there.
    let newcomer = Daemon::redis(&redis).lease(3_000, 30_000).start();
    expect_closed(&newcomer.api(), &group, &mut members, ErrorCode::GroupMetadataMissing).await;
    assert!(redis.dump(&key).await.is_none());

    redis.restore(&key, &dump).await;
    expect_untouched(&api, &group, &mut members, &before).await;
    // Nor is anybody expired once this instance judges again.
    wait_until("the group is in service again", async || {
        expect_untouched(&api, &group, &mut members, &before).await;
        api.get(&format!("{}/actor", monitored_path(&group))).await.success()["inService"] == true
    })
    .await;
    expect_untouched(&newcomer.api(), &group, &mut members, &before).await;
}

#[tokio::test]
async fn redis_restarted_empty_fails_closed_for_known_groups_until_an_operator_deletes_them() {
    let mut redis = RedisServer::start();
    // A lease that ends within the test: the group created again waits for the readers of the lost one.
    let daemon = Daemon::redis(&redis).lease(3_000, 6_000).start();
    let api = daemon.api();
    let (group, mut members) = two_members(&api, "orders").await;
    let before = api.group(&group).await;
    redis.restart_empty();
    wait_until("the daemon has found the new server", async || {
        api.get("/readyz").await.status == StatusCode::OK
    })
    .await;
    for _ in 0..3 {
        expect_closed(&api, &group, &mut members, ErrorCode::GroupMetadataMissing).await;
    }
    let keys: Vec<String> = redis.command(&["KEYS", "*:metadata"]).await;
    assert!(keys.is_empty(), "{keys:?}");

    // The operator's way out: delete it, create it anew.
    let body = json!({"requestedBy": "test", "reason": "redis was lost"});
    api.delete(&group_path(&group), &body).await.success();
    let answer = api.heartbeat(&group, &members[0].request()).await;
    assert_eq!(answer.status, Status::UnknownMemberId);
    let created = api.create_group(&group, 4).await;
    assert!(created.metadata_version > before.metadata_version, "{created:?} after {before:?}");
    let mut members = vec![Member::new(&api, &group, "a"), Member::new(&api, &group, "b")];
    beat_until_stable(&api, &group, &mut members).await;
}

/// What a test does to a record: given the server, the key, and the aggregate.
async fn corrupted_record_is_refused_and_kept(
    corrupt: impl AsyncFnOnce(&RedisServer, &str, Value),
    told: &str,
) {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).long_lease().start();
    let api = daemon.api();
    let (group, mut members) = two_members(&api, "orders").await;
    let (other, mut others) = two_members(&api, "parcels").await;
    let before = api.get(&group_path(&group)).await.success();
    let other_before = api.get(&group_path(&other)).await.success();
    let key = metadata_key(&group);
    let healthy = redis.dump(&key).await.unwrap();

    corrupt(&redis, &key, redis.aggregate(&group).await.unwrap()).await;
    let corrupted = redis.dump(&key).await.unwrap();
    assert_ne!(corrupted, healthy);
    for _ in 0..3 {
        expect_closed(&api, &group, &mut members, ErrorCode::GroupMetadataCorrupt).await;
        expect_untouched(&api, &other, &mut others, &other_before).await;
    }
    let body = json!({"requestedBy": "test", "reason": "it is broken"});
    api.delete(&group_path(&group), &body).await.expect_error(ErrorCode::GroupMetadataCorrupt);
    let shown = api.get(&group_path(&group)).await.success();
    assert!(shown["message"].as_str().unwrap().contains(told), "{shown}");
    let listed = api.get(GROUPS).await.success();
    let healths: Vec<_> = listed["groups"].as_array().unwrap().iter().map(|row| &row["healthy"]).collect();
    assert_eq!(healths, [&json!(false), &json!(true)], "{listed}");
    let metrics = String::from_utf8(api.get("/metrics").await.body).unwrap();
    let counted = metrics.lines().any(|line| line.starts_with("rsc_metadata_corrupt_total"));
    assert!(counted, "{metrics}");
    assert_eq!(redis.dump(&key).await.unwrap(), corrupted);

    redis.restore(&key, &healthy).await;
    expect_untouched(&api, &group, &mut members, &before).await;
    expect_untouched(&api, &other, &mut others, &other_before).await;
}

/// As somebody else's write: it has a `writeId` of its own, so that nobody takes it for what he remembers.
async fn write_fields(redis: &RedisServer, key: &str, fields: &[&str]) {
    redis.command::<()>(&[&["HSET", key, "writeId", "somebody else's"], fields].concat()).await;
}

#[tokio::test]
async fn aggregate_of_broken_json_is_refused_and_kept() {
    let corrupt = async |redis: &RedisServer, key: &str, aggregate: Value| {
        let text = aggregate.to_string();
        let half = &text[..text.len() / 2];
        write_fields(redis, key, &["aggregate", half]).await;
    };
    corrupted_record_is_refused_and_kept(corrupt, "the aggregate cannot be read").await;
}

#[tokio::test]
async fn aggregate_of_another_revision_is_refused_and_kept() {
    let corrupt = async |redis: &RedisServer, key: &str, mut aggregate: Value| {
        aggregate["storeRevision"] = json!(aggregate["storeRevision"].as_u64().unwrap() + 1);
        write_fields(redis, key, &["aggregate", &aggregate.to_string()]).await;
    };
    corrupted_record_is_refused_and_kept(corrupt, "storeRevision").await;
}

#[tokio::test]
async fn record_of_a_newer_schema_is_refused_and_kept() {
    let corrupt = async |redis: &RedisServer, key: &str, mut aggregate: Value| {
        aggregate["schemaVersion"] = json!(2);
        aggregate["members"] = json!("what schema 2 makes of it");
        write_fields(redis, key, &["aggregate", &aggregate.to_string()]).await;
    };
    corrupted_record_is_refused_and_kept(corrupt, "schemaVersion 2 is not supported").await;
}

#[tokio::test]
async fn record_of_a_newer_layout_is_refused_and_kept() {
    let corrupt = async |redis: &RedisServer, key: &str, _: Value| {
        write_fields(redis, key, &["layoutVersion", "3"]).await;
    };
    corrupted_record_is_refused_and_kept(corrupt, "layoutVersion 3 is not supported").await;
}

#[tokio::test]
async fn record_of_a_foreign_group_is_refused_and_kept() {
    let corrupt = async |redis: &RedisServer, key: &str, mut aggregate: Value| {
        aggregate["streamPrefix"] = json!("invoices");
        write_fields(redis, key, &["aggregate", &aggregate.to_string()]).await;
    };
    corrupted_record_is_refused_and_kept(corrupt, "invoices").await;
}

#[tokio::test]
async fn key_of_another_type_is_refused_and_kept() {
    let corrupt = async |redis: &RedisServer, key: &str, _: Value| {
        redis.command::<()>(&["SET", key, "something of somebody else's"]).await;
    };
    corrupted_record_is_refused_and_kept(corrupt, "string").await;
}

#[tokio::test]
async fn time_to_live_on_the_key_is_removed_by_the_next_commit() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).long_lease().start();
    let api = daemon.api();
    let (group, mut members) = two_members(&api, "orders").await;
    let before = api.get(&group_path(&group)).await.success();
    let key = metadata_key(&group);
    redis.command::<()>(&["EXPIRE", &key, "1000"]).await;
    assert!(redis.command::<i64>(&["TTL", &key]).await > 0);
    expect_untouched(&api, &group, &mut members, &before).await;
    assert_eq!(redis.command::<i64>(&["TTL", &key]).await, -1);
    assert_eq!(api.group(&group).await.state, GroupState::Stable);
}
