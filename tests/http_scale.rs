//! Black-box tests of changing the shard count over HTTP (protocol 6 and 8): statuses, codes, fields, and that what is
//! refused changes nothing.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::{BTreeMap, BTreeSet};

use reqwest::{Method, StatusCode};
use rsc_protocol::keys::Keys;
use rsc_protocol::resharding::{MigrationResponse, MigrationState, Retire, ScalePlan, ScaleResponse};
use rsc_protocol::{ErrorCode, GroupKey, ShardRef};
use serde_json::{Value, json};
use support::{
    Answer, Api, Daemon, Member, RedisServer, Stream, beat_until_stable, group_path, monitored_path,
    scale_body, wait_until,
};

const INVALID: ErrorCode = ErrorCode::InvalidRequest;

fn refs(shards: std::ops::Range<u32>) -> Vec<ShardRef> {
    shards.map(|shard_index| ShardRef { shard_index }).collect()
}

fn with(body: &Value, field: &str, value: Value) -> Value {
    let mut body = body.clone();
    body[field] = value;
    body
}

fn without(body: &Value, field: &str) -> Value {
    let mut body = body.clone();
    body.as_object_mut().unwrap().remove(field);
    body
}

async fn roll_back_of(api: &Api, group: &GroupKey, id: &str, body: &Value) -> Answer {
    api.post(&format!("{}/migrations/{id}/rollback", group_path(group)), body).await
}

fn roll_back_body() -> Value {
    json!({"requestedBy": "test", "reason": "thought better of it"})
}

/// A daemon whose migrations stay where a request leaves them: producers may use the former count for a minute.
fn slow(redis: &RedisServer) -> Daemon {
    Daemon::redis(redis).long_lease().set("producer", "routing-cache-ttl", "60s").start()
}

#[tokio::test]
async fn bad_requests_say_what_is_wrong_and_change_nothing() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).long_lease().set("streams", "max-shard-count", "100").start();
    let api = daemon.api();
    let stream = Stream::create(&api, "orders", 3, &["a", "b"]).await;
    let alone = Stream::create(&api, "alone", 3, &["alone"]).await;
    let before = redis.dump_all().await;
    let good = scale_body(5);
    let cases = [
        (with(&good, "targetShardCount", json!(-1)), "targetShardCount is -1: 0 to 100 are allowed"),
        (with(&good, "targetShardCount", json!(101)), "targetShardCount is 101"),
        (with(&good, "targetShardCount", json!(4_294_967_296_u64)), "targetShardCount is 4294967296"),
        (with(&good, "targetShardCount", json!(i64::MIN)), "targetShardCount"),
        (with(&good, "targetShardCount", json!(1e30)), "targetShardCount"),
        (with(&good, "targetShardCount", json!(2.5)), "targetShardCount"),
        (with(&good, "targetShardCount", json!("5")), "targetShardCount"),
        (with(&good, "targetShardCount", Value::Null), "targetShardCount"),
        (without(&good, "targetShardCount"), "missing field `targetShardCount`"),
        (with(&good, "requestedBy", json!(" ")), "requestedBy is blank"),
        (without(&good, "requestedBy"), "missing field `requestedBy`"),
        (with(&good, "requestedBy", json!("x".repeat(513))), "requestedBy has 513 bytes"),
        (with(&good, "reason", json!("")), "reason is blank"),
        (with(&good, "reason", json!("\t\u{3000}")), "reason is blank"),
        (with(&good, "reason", json!("x".repeat(1025))), "reason has 1025 bytes"),
        (without(&good, "reason"), "missing field `reason`"),
        (with(&good, "retire", json!("BURN")), "retire"),
        (with(&good, "retire", json!("delete")), "retire"),
        (with(&good, "deprecatedAfter", json!("tomorrow")), "deprecatedAfter"),
        (with(&good, "deprecatedAfter", json!(17)), "deprecatedAfter"),
        (with(&good, "deprecatedAfter", json!("2026-02-30T00:00:00Z")), "deprecatedAfter"),
        (with(&good, "dryRun", json!("yes")), "dryRun"),
        (with(&good, "dryrun", json!(true)), "unknown field `dryrun`"),
        (with(&good, "shardCount", json!(5)), "unknown field `shardCount`"),
        (json!([good]), "expected an object"),
    ];
    let paths = [
        "/coord/v1/streams/orders/scale".to_owned(),
        format!("{}/scale", group_path(stream.group())),
        format!("{}/scale", group_path(alone.group())),
    ];
    for path in &paths {
        for (body, expected) in &cases {
            for dry_run in [None, Some(true)] {
                // A field that is the case itself stays as it is.
                let body = match dry_run {
                    Some(dry_run) if body.is_object() && body.get("dryRun").is_none() => {
                        with(body, "dryRun", json!(dry_run))
                    }
                    _ => body.clone(),
                };
                let message = api.post(path, &body).await.expect_error(INVALID);
                assert!(message.contains(expected), "{path} {body}: {message}");
            }
        }
        api.post_bytes(path, "").await.expect_error(INVALID);
        api.post_bytes(path, "{\"targetShardCount\": 5, \"targetShardCount\": 6}")
            .await
            .expect_error(INVALID);
        api.get(path).await.expect_error(ErrorCode::MethodNotAllowed);
    }
    for (body, expected) in [
        (json!({"requestedBy": "a"}), "missing field `reason`"),
        (json!({"requestedBy": "a", "reason": " "}), "reason is blank"),
        (json!({"requestedBy": "", "reason": "a"}), "requestedBy is blank"),
        (json!({"reason": "a"}), "missing field `requestedBy`"),
        (json!({"requestedBy": "a", "reason": "a", "force": true}), "unknown field `force`"),
    ] {
        let message = roll_back_of(&api, stream.group(), "reshard-1", &body).await.expect_error(INVALID);
        assert!(message.contains(expected), "{body}: {message}");
    }
    assert_eq!(redis.dump_all().await, before);
}

#[tokio::test]
async fn what_does_not_exist_is_404_with_its_own_code() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).long_lease().start();
    let api = daemon.api();
    let stream = Stream::create(&api, "orders", 3, &["a", "b"]).await;
    let before = redis.dump_all().await;
    let nobody = GroupKey::new("nobody", "nobody").unwrap();
    let other = GroupKey::new("orders", "c").unwrap();
    let stream_scale = "/coord/v1/streams/nobody/scale";
    for body in [scale_body(5), scale_body(0), with(&scale_body(5), "dryRun", json!(true))] {
        let message = api.post(stream_scale, &body).await.expect_error(ErrorCode::StreamNotFound);
        assert!(message.contains("nobody"), "{message}");
        for group in [&nobody, &other] {
            let path = format!("{}/scale", group_path(group));
            api.post(&path, &body).await.expect_error(ErrorCode::GroupNotFound);
        }
    }
    for group in [&nobody, &other] {
        for path in [group_path(group), monitored_path(group)] {
            api.get(&format!("{path}/migrations/reshard-1")).await.expect_error(ErrorCode::GroupNotFound);
        }
        api.get(&format!("{}/migrations", monitored_path(group)))
            .await
            .expect_error(ErrorCode::GroupNotFound);
        roll_back_of(&api, group, "reshard-1", &roll_back_body())
            .await
            .expect_error(ErrorCode::GroupNotFound);
    }
    for id in ["reshard-1", "noop", "%20x", "reshard-%EC%A3%BC"] {
        for path in [group_path(stream.group()), monitored_path(stream.group())] {
            let answer = api.get(&format!("{path}/migrations/{id}")).await;
            answer.expect_error(ErrorCode::MigrationNotFound);
        }
        let answer = roll_back_of(&api, stream.group(), id, &roll_back_body()).await;
        answer.expect_error(ErrorCode::MigrationNotFound);
    }
    for id in ["", "%20", "%00", &"x".repeat(513)] {
        let answer = roll_back_of(&api, stream.group(), id, &roll_back_body()).await;
        answer.expect_error(INVALID);
        api.get(&format!("{}/migrations/{id}", group_path(stream.group()))).await.expect_error(INVALID);
    }
    assert_eq!(stream.migrations_of(stream.group()).await.migrations, []);
    assert_eq!(redis.dump_all().await, before);
}

#[tokio::test]
async fn scaling_answers_with_every_field_for_every_group_and_reads_show_the_same() {
    let redis = RedisServer::start();
    let daemon = slow(&redis);
    let api = daemon.api();
    let stream = Stream::create(&api, "orders", 3, &["b", "a"]).await;
    let more = json!({"retire": "DELETE", "deprecatedAfter": "2100-01-01T00:00:00Z"});
    let scaled = stream.scale_with(5, &more).await;
    let id = scaled.resharding_id.clone();
    assert!(id.starts_with("reshard-") && id.len() > 40, "{id}");
    assert_eq!((scaled.stream_prefix.as_str(), scaled.target_shard_count), ("orders", 5));
    assert_eq!(scaled.affected_consumer_groups, ["a", "b"]);
    assert_eq!(scaled.migrations.len(), 2);
    for (row, group) in scaled.migrations.iter().zip(&stream.groups) {
        assert_eq!((row.resharding_id.as_str(), row.stream_prefix.as_str()), (id.as_str(), "orders"));
        assert_eq!(row.consumer_group, group.consumer_group());
        assert_eq!((row.from_shard_count, row.to_shard_count, row.state), (3, 5, MigrationState::Active));
        assert_eq!((row.requested_by.as_str(), row.reason.as_str()), ("test", "load has changed"));
        assert_eq!(row.retire, Retire::Delete);
        assert_eq!(serde_json::to_value(row.deprecated_after).unwrap(), json!("2100-01-01T00:00:00.000Z"));
        assert!(row.activated_at.is_some() && row.updated_at >= row.created_at, "{row:?}");
        assert_eq!(
            (row.draining_shards.len(), row.retired_shards.len(), row.rollback.is_some()),
            (0, 0, false)
        );
        assert!(row.waits_for.contains("producers may use the former count until"), "{}", row.waits_for);
        // The same in each of the reads.
        let listed = stream.migrations_of(group).await;
        assert_eq!(listed.active_resharding_id.as_ref(), Some(&id));
        for path in [group_path(group), monitored_path(group)] {
            let one: MigrationResponse = api.get(&format!("{path}/migrations/{id}")).await.read();
            assert_eq!((&one, std::slice::from_ref(&one)), (row, listed.migrations.as_slice()));
        }
        let shown = api.group(group).await;
        assert_eq!((shown.shard_count, shown.active_migration.as_ref()), (5, Some(&id)));
        let routing = api.get(&format!("{}/producer-routing", group_path(group))).await.success();
        assert_eq!((&routing["shardCount"], routing["shards"].as_array().unwrap().len()), (&json!(5), 5));
    }
    assert_eq!(stream.shard_keys(&redis).await, (0..5).collect());
    // HEAD says the same without a body.
    let path = format!("{}/migrations/{id}", group_path(stream.group()));
    let head = api.send(api.request(Method::HEAD, &path)).await;
    assert_eq!((head.status, head.body.len()), (StatusCode::OK, 0));
}

#[tokio::test]
async fn a_second_change_is_refused_the_same_again_goes_on_and_the_present_count_is_a_noop() {
    let redis = RedisServer::start();
    let daemon = slow(&redis);
    let api = daemon.api();
    let stream = Stream::create(&api, "orders", 3, &["a", "b"]).await;
    let before = redis.dump_all().await;
    let noop = stream.scale_with(3, &json!({})).await;
    assert_eq!((noop.resharding_id.as_str(), noop.target_shard_count), ("noop", 3));
    assert_eq!((noop.affected_consumer_groups.len(), noop.migrations.len()), (2, 2));
    assert!(noop.migrations.iter().all(|row| row.resharding_id == "noop" && row.from_shard_count == 3));
    assert_eq!(redis.dump_all().await, before);

    let id = stream.scale(5).await;
    let dumped = redis.dump_all().await;
    assert_eq!(stream.scale(5).await, id);
    for target in [3, 4, 0, 6] {
        stream.expect_other_runs(target, &id).await;
    }
    let through_group = format!("{}/scale", group_path(stream.group()));
    let message = api.post(&through_group, &scale_body(7)).await.expect_error(ErrorCode::ShardCountMismatch);
    assert!(message.contains("/coord/v1/streams/orders/scale"), "{message}");
    assert_eq!(redis.dump_all().await, dumped);
    // On its way back it is another change.
    let row = stream.roll_back(&id).await;
    assert_eq!(row.state, MigrationState::RollingBack);
    for target in [5, 3, 4] {
        stream.expect_other_runs(target, &id).await;
    }
    // Asking for the way back again is answered the same.
    let again = stream.roll_back(&id).await;
    assert_eq!((again.state, again.rollback), (MigrationState::RollingBack, row.rollback.clone()));
    let note = row.rollback.unwrap();
    assert_eq!((note.requested_by.as_str(), note.reason.as_str()), ("test", "thought better of it"));
    assert!(stream.counts().await.iter().all(|(count, running)| (*count, running) == (3, &Some(id.clone()))));
}

#[tokio::test]
async fn scaling_through_the_only_group_is_scaling_the_stream() {
    let redis = RedisServer::start();
    let daemon = slow(&redis);
    let api = daemon.api();
    let stream = Stream::create(&api, "orders", 3, &["a"]).await;
    let path = format!("{}/scale", group_path(stream.group()));
    let plan: ScalePlan = api.post(&path, &with(&scale_body(2), "dryRun", json!(true))).await.read();
    assert_eq!((plan.target_shard_count, plan.shards_to_drain), (2, refs(2..3)));
    let answer = api.post(&path, &scale_body(2)).await;
    assert_eq!(answer.status, StatusCode::ACCEPTED);
    let scaled: ScaleResponse = answer.read();
    assert_eq!(scaled.affected_consumer_groups, ["a"]);
    assert_eq!(stream.scale(2).await, scaled.resharding_id);
    assert_eq!(scaled.migrations[0].draining_shards, refs(2..3));
}

#[tokio::test]
async fn rollback_after_the_end_is_422_and_changes_nothing() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).long_lease().short_caches().start();
    let api = daemon.api();
    let stream = Stream::create(&api, "orders", 3, &["a", "b"]).await;
    for (target, retire) in [(5, "KEEP"), (4, "KEEP"), (2, "DELETE")] {
        let id = stream.scale_with(target, &json!({"retire": retire})).await.resharding_id;
        stream.wait_for(&id, MigrationState::Deprecated).await;
        let before = redis.dump_all().await;
        let message = stream.try_roll_back(&id).await.expect_error(ErrorCode::RollbackNotAllowed);
        assert!(message.contains(&id) && message.contains("finished"), "{message}");
        assert_eq!(redis.dump_all().await, before);
        stream.expect_settled_at(u32::try_from(target).unwrap()).await;
    }
    // Rolled back is over too, and there is nothing more to take back.
    let id = stream.scale(6).await;
    stream.roll_back(&id).await;
    stream.wait_for(&id, MigrationState::RolledBack).await;
    let again = stream.roll_back(&id).await;
    assert_eq!((again.state, again.waits_for.as_str()), (MigrationState::RolledBack, ""));
    stream.expect_settled_at(2).await;
    let ids: BTreeSet<String> = stream
        .migrations_of(stream.group())
        .await
        .migrations
        .into_iter()
        .map(|row| row.resharding_id)
        .collect();
    assert_eq!(ids.len(), 4, "{ids:?}");
}

#[tokio::test]
async fn a_plan_changes_nothing_and_is_what_then_happens() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).long_lease().short_caches().start();
    let api = daemon.api();
    let stream = Stream::create(&api, "orders", 6, &["a", "b"]).await;
    let mut crews = BTreeMap::new();
    for group in &stream.groups {
        let ids = ["m0", "m1", "m2"];
        let mut members: Vec<Member> = ids.iter().map(|id| Member::new(&api, group, id)).collect();
        beat_until_stable(&api, group, &mut members).await;
        crews.insert(group.clone(), members);
    }
    for (from, target, retire) in [(6, 9, "KEEP"), (9, 4, "DELETE"), (4, 0, "KEEP"), (0, 5, "KEEP")] {
        let before = redis.dump_all().await;
        let body = with(&with(&scale_body(target), "dryRun", json!(true)), "retire", json!(retire));
        let answer = stream.try_scale(&body).await;
        assert_eq!(answer.status, StatusCode::OK);
        let plan: ScalePlan = answer.read();
        assert_eq!(redis.dump_all().await, before, "planning {from} to {target} wrote something");
        let to = u32::try_from(target).unwrap();
        assert!(plan.dry_run && plan.refusals.is_empty(), "{plan:?}");
        assert_eq!((plan.from_shard_count, plan.target_shard_count), (from, to));
        assert_eq!(plan.affected_consumer_groups, ["a", "b"]);
        assert_eq!(
            (plan.added_shards, plan.shards_to_drain),
            (refs(from..to.max(from)), refs(to..from.max(to)))
        );
        assert_eq!(plan.producer_cache_wait_ms, 800);
        assert_eq!(serde_json::to_value(plan.retire).unwrap(), json!(retire));
        let share = match (from, to) {
            (6, 9) => 1.0 - 3.0 / 9.0,
            (9, 4) => 1.0 - 1.0 / 9.0,
            _ => 1.0,
        };
        assert!((plan.keys_changing_shard - share).abs() < 1e-9, "{}", plan.keys_changing_shard);

        let owners = owners(&crews);
        let id = stream.scale_with(target, &json!({"retire": retire})).await.resharding_id;
        wait_until("the migration is over", async || {
            for (group, members) in &mut crews {
                beat_until_stable(&api, group, members).await;
            }
            stream.migration(&id).await.iter().all(|row| row.state == MigrationState::Deprecated)
        })
        .await;
        for (planned, (group, members)) in plan.groups.iter().zip(&mut crews) {
            beat_until_stable(&api, group, members).await;
            assert_eq!(planned.consumer_group, group.consumer_group());
            let sizes: BTreeMap<String, usize> =
                members.iter().map(|member| (member.id().to_owned(), member.owned.len())).collect();
            assert_eq!(planned.shards_per_member, sizes);
            let mut expected = owners[group].clone();
            for step in &planned.moves {
                assert_eq!(expected.get(&step.shard_index), step.from.as_ref(), "{planned:?}");
                match &step.to {
                    Some(to) => drop(expected.insert(step.shard_index, to.clone())),
                    None => drop(expected.remove(&step.shard_index)),
                }
            }
            assert_eq!(owners_of(members), expected, "{from} to {target}: {planned:?}");
        }
        let left: BTreeSet<u32> = stream.shard_keys(&redis).await;
        let kept = if retire == "DELETE" { to } else { from.max(to) };
        assert_eq!(left, (0..kept.max(left.len() as u32)).collect());
    }
    // While one runs, the plan says why it would be refused.
    let id = stream.scale(6).await;
    let refused = stream.plan(7).await.refusals;
    assert!(refused.len() == 1 && refused[0].contains(&id), "{refused:?}");
}

fn owners_of(members: &[Member]) -> BTreeMap<u32, String> {
    let owned =
        members.iter().flat_map(|member| member.owned.iter().map(|&shard| (shard, member.id().to_owned())));
    owned.collect()
}

fn owners(crews: &BTreeMap<GroupKey, Vec<Member>>) -> BTreeMap<GroupKey, BTreeMap<u32, String>> {
    crews.iter().map(|(group, members)| (group.clone(), owners_of(members))).collect()
}

#[tokio::test]
async fn groups_are_created_and_deleted_around_a_migration_with_the_streams_count() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).long_lease().short_caches().start();
    let api = daemon.api();
    let mut stream = Stream::create(&api, "orders", 3, &["a", "b"]).await;
    let late = GroupKey::new("orders", "late").unwrap();
    let by = json!({"requestedBy": "test"});
    // Held in DRAINING by a record that nobody reads.
    redis.command::<String>(&["XADD", "orders:2", "*", "k", "v"]).await;
    let id = stream.scale(2).await;
    stream.wait_for(&id, MigrationState::Draining).await;
    let message = api.post(&group_path(&late), &by).await.expect_error(ErrorCode::ActiveMigrationExists);
    assert!(message.contains(&id), "{message}");
    let count = json!({"requestedBy": "test", "initialShardCount": 2});
    api.post(&group_path(&late), &count).await.expect_error(ErrorCode::ActiveMigrationExists);
    assert_eq!(redis.dump(&Keys::default().metadata(&late)).await, None);

    // A group may go meanwhile, by force; the rest of the stream carries on without it.
    let delete = json!({"requestedBy": "test", "reason": "not needed"});
    let gone = stream.groups.pop().unwrap();
    let path = group_path(&gone);
    let message = api.delete(&path, &delete).await.expect_error(ErrorCode::ActiveMigrationExists);
    assert!(message.contains(&id), "{message}");
    assert_eq!(api.group(&gone).await.active_migration.as_ref(), Some(&id));
    api.delete(&path, &with(&delete, "force", json!(true))).await.success();
    api.get(&format!("{path}/migrations/{id}")).await.expect_error(ErrorCode::GroupNotFound);
    // Its Redis group is left, and is one that nobody coordinates.
    let waits = stream.migration(&id).await[0].drain[0].waits_for.clone();
    let named: BTreeSet<(&str, bool)> =
        waits.iter().map(|wait| (wait.consumer_group.as_str(), wait.coordinated)).collect();
    assert_eq!(named, BTreeSet::from([("a", true), ("b", false)]), "{waits:?}");
    redis.command::<u64>(&["XTRIM", "orders:2", "MAXLEN", "0"]).await;
    stream.wait_for(&id, MigrationState::Deprecated).await;
    stream.expect_settled_at(2).await;

    let three = json!({"requestedBy": "test", "initialShardCount": 3});
    api.post(&group_path(&late), &three).await.expect_error(ErrorCode::ShardCountMismatch);
    let created = api.post(&group_path(&late), &by).await.success();
    assert_eq!(created["shardCount"], 2);
}
