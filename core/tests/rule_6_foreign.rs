//! Migrations as another implementation of the protocol writes them (protocol 2, 6): they load, nothing that is
//! assigned is dropped, what is not ours stays, and what cannot be anybody's is refused.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use rsc_core::{Group, LoadError, load};
use rsc_protocol::Timestamp;
use rsc_protocol::resharding::MigrationState;
use serde_json::{Value, json};
use support::streams::*;
use support::{Bench, START};

fn shards(shards: std::ops::Range<u32>) -> Value {
    shards.map(|shard| json!({ "shardIndex": shard })).collect()
}

fn at(millis: i64) -> Value {
    json!(Timestamp::from_millis(START + millis))
}

/// A migration with the fields that the protocol names, and nulls and fields of its own.
fn migration(id: &str, from: u32, to: u32, state: &str) -> Value {
    json!({
        "reshardingId": id, "fromShardCount": from, "toShardCount": to, "state": state,
        "createdAt": at(-50_000), "updatedAt": at(-40_000), "requestedBy": null, "reason": null,
        "deprecatedAfter": null, "strategy": { "kind": "drain", "weights": [1, 2] }, "owner": null,
    })
}

/// A record without our additions: `count` routes, its one member owns `assigned`.
fn record(count: u32, assigned: std::ops::Range<u32>, migrations: Value, active: Value) -> Bench {
    let member = json!({
        "memberId": "a", "state": "ACTIVE", "memberEpoch": 3, "metadataVersion": 9,
        "currentAssignment": shards(assigned.clone()), "revoking": [],
        "lastHeartbeatAt": at(0), "memberLeaseExpiresAt": at(15_000), "rebalanceTimeoutMs": 60_000,
    });
    let aggregate = json!({
        "streamPrefix": "orders", "consumerGroup": "billing", "schemaVersion": 1, "storeRevision": 7,
        "groupEpoch": 3, "metadataVersion": 9, "assignmentEpoch": 3, "state": "RECONCILING",
        "shardCount": count, "members": { "a": member },
        "targetAssignments": { "a": shards(assigned) }, "migrations": migrations,
        "activeReshardingId": active, "metadataCorrection": null,
        "createdAt": at(-100_000), "updatedAt": at(0),
    });
    let mut bench = Bench::new(1);
    bench.fields.clear();
    let mut set = |field: &str, value: String| bench.fields.insert(field.to_owned(), value.into_bytes());
    set("aggregate", aggregate.to_string());
    set("revision", "7".to_owned());
    set("schemaVersion", "1".to_owned());
    bench
}

fn running(count: u32, assigned: std::ops::Range<u32>, migration: Value) -> Bench {
    record(count, assigned, json!({ "m": migration }), json!("m"))
}

fn reads(group: &Group) -> Vec<u32> {
    group.read_set().iter().collect()
}

/// A stream of that one record.
fn stream_of(bench: Bench) -> Stream {
    let mut stream = Stream::new(1, &["billing"]);
    let reads = reads(&bench.group());
    stream.groups = vec![bench];
    let key = stream.groups[0].key.clone();
    stream.provision(&key, &(0..8).into()).unwrap();
    assert!(reads.iter().all(|shard| *shard < 8));
    stream.pass(0);
    stream
}

#[test]
fn protocol_6_a_running_scale_in_of_another_implementation_is_drained() {
    for state in ["ACTIVE", "DRAINING", "DEPRECATED"] {
        // Its count has moved already; its removed shards are assigned, or no longer.
        for assigned in [0..4, 0..2] {
            let bench = running(2, assigned, migration("m", 4, 2, state));
            let group = bench.group();
            assert_eq!((group.shard_count, reads(&group)), (2, vec![0, 1, 2, 3]), "{state}");
            assert_eq!(group.validate().iter().filter(|it| it.invariant != "legal-target").count(), 0);
            let mut stream = stream_of(bench);
            stream.publish(3);
            let waits = stream.drive();
            assert!(!waits.has_settled(), "its producers' caches first: {waits:?}");
            stream.settle();
            stream.assert_settled_but_provisioned(2);
            assert_eq!(stream.states("m"), [Some(MigrationState::Deprecated)]);
        }
    }
}

#[test]
fn protocol_6_a_count_that_has_not_moved_yet_is_activated_behind_the_barrier() {
    for (from, to) in [(4, 2), (2, 4)] {
        for state in ["PREPARING", "ACTIVE", "DRAINING"] {
            let bench = running(from, 0..from, migration("m", from, to, state));
            let group = bench.group();
            assert_eq!(group.active_migration().unwrap().state, MigrationState::Preparing, "{state}");
            assert!((0..from).all(|shard| group.read_set().contains(shard)));
            let mut stream = stream_of(bench);
            stream.traffic();
            stream.settle();
            stream.assert_settled_but_provisioned(to);
        }
    }
}

#[test]
fn protocol_6_on_its_way_back_it_goes_back() {
    for (count, state) in [(2, "ROLLING_BACK"), (4, "ROLLING_BACK"), (4, "ROLLED_BACK")] {
        let bench = running(count, 0..4, migration("m", 4, 2, state));
        let mut stream = stream_of(bench);
        stream.traffic();
        stream.settle();
        stream.assert_settled_but_provisioned(4);
        assert_eq!(stream.states("m"), [Some(MigrationState::RolledBack)]);
    }
}

#[test]
fn protocol_6_assigned_shards_beyond_the_count_are_never_dropped() {
    let mut silent = migration("m", 2, 2, "PREPARING");
    silent["createdAt"] = Value::Null;
    silent["updatedAt"] = Value::Null;
    let cases = [
        running(2, 0..5, silent),
        running(2, 0..5, json!("a word")),
        running(2, 0..5, json!({ "state": "MOVING", "shards": 5 })),
        running(2, 0..5, json!({ "state": "DRAINING" })),
        running(2, 0..5, migration("m", 4, 2, "SOMETHING_NEW")),
        // Named as running, and not even there.
        record(2, 0..5, json!({}), json!("m")),
        // Not named, but not over.
        record(2, 0..5, json!({ "m": migration("m", 5, 2, "DRAINING") }), Value::Null),
    ];
    for bench in cases {
        let group = bench.group();
        assert_eq!((group.shard_count, reads(&group)), (2, vec![0, 1, 2, 3, 4]), "{:#?}", group.migrations);
        assert_eq!(group.active_resharding_id.as_deref(), Some("m"));
        let mut stream = stream_of(bench);
        stream.publish(4);
        stream.settle();
        stream.assert_settled_but_provisioned(2);
    }
}

#[test]
fn protocol_6_what_another_implementation_has_finished_decides_nothing() {
    // The history of a group whose count is right, whatever it calls its migrations and their times.
    let mut undated = migration("z", 4, 8, "DEPRECATED");
    undated.as_object_mut().unwrap().retain(|field, _| !field.ends_with("At"));
    let migrations = json!({
        "a": migration("a", 2, 4, "DEPRECATED"), "z": undated, "b": migration("b", 4, 6, "ROLLED_BACK"),
        "c": migration("c", 4, 9, "PREPARING"), "d": { "state": "COMPLETED", "toShardCount": 16 }, "e": null,
    });
    let bench = record(4, 0..4, migrations, Value::Null);
    let group = bench.group();
    assert_eq!((group.active_resharding_id.as_ref(), reads(&group)), (None, vec![0, 1, 2, 3]));
    assert_eq!(group.validate(), []);
    let mut stream = stream_of(bench);
    assert!(stream.drive().has_settled());
    // And the next one begins and ends like any other.
    let id = stream.scale(2);
    stream.settle();
    assert_eq!(stream.states(&id), [Some(MigrationState::Deprecated)]);
    stream.assert_settled_but_provisioned(2);
}

#[test]
fn protocol_6_the_running_one_is_the_newest() {
    // Without times, or with wrong ones, it would otherwise be overruled by one that is over.
    let mut migrations = json!({
        "m": migration("m", 4, 2, "DRAINING"), "z": migration("z", 8, 4, "DEPRECATED"),
    });
    migrations["m"]["createdAt"] = Value::Null;
    let bench = record(2, 0..4, migrations, json!("m"));
    let group = bench.group();
    let created_at = |id: &str| group.migration(id).unwrap().created_at;
    assert!(created_at("m") > created_at("z"));
    let mut stream = stream_of(bench);
    stream.settle();
    stream.assert_settled_but_provisioned(2);
}

fn stored(bench: &Bench) -> Value {
    serde_json::from_slice(&bench.fields["aggregate"]).unwrap()
}

#[test]
fn protocol_6_fields_of_others_and_what_is_none_of_ours_stay() {
    let garbage = json!({
        "number": 7, "word": "x", "list": [1, { "a": null }], "null": null, "empty": {},
        "unknown-state": migration("unknown-state", 1, 2, "PAUSED"),
        "wrong-type": { "state": "ACTIVE", "fromShardCount": "two", "toShardCount": 2 },
        "negative": { "state": "ACTIVE", "fromShardCount": -1, "toShardCount": 2 },
    });
    let mut migrations = garbage.clone();
    migrations["m"] = migration("m", 4, 2, "DRAINING");
    migrations["done"] = migration("done", 2, 4, "DEPRECATED");
    let mut bench = record(2, 0..4, migrations, json!("m"));
    let loaded = bench.group();
    assert_eq!(loaded.foreign_migrations.len(), garbage.as_object().unwrap().len());
    assert_eq!(loaded.migrations.len(), 2);
    // The first structural commit writes everything anew.
    bench.pass(20_000);
    bench.tick();
    let written = stored(&bench);
    for (id, value) in garbage.as_object().unwrap() {
        assert_eq!(written["migrations"][id], *value, "{id} as it was");
    }
    for id in ["m", "done"] {
        let row = &written["migrations"][id];
        assert_eq!(row["strategy"], json!({ "kind": "drain", "weights": [1, 2] }), "{id}");
        assert!(row.as_object().unwrap().contains_key("owner"), "{id}: nulls of others too");
        assert_eq!(row["createdAt"], at(-50_000), "{id}");
    }
    // What is read back is what was written (the bench compares), and writes the same again.
    let group = bench.group();
    let again = rsc_core::record::aggregate(&group).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&again).unwrap(), written);
}

#[test]
fn protocol_6_a_running_one_that_is_not_understood_keeps_what_stood_there() {
    for garbage in [json!("a word"), json!({ "state": "MOVING", "toShardCount": 9 }), json!(null), json!([1])]
    {
        let mut bench = running(2, 0..3, garbage.clone());
        bench.pass(20_000);
        bench.tick();
        let written = stored(&bench);
        assert_eq!(written["migrations"]["m"]["recordedAs"], garbage);
        let before = bench.group();
        bench.tick();
        assert_eq!(bench.group().migrations, before.migrations, "the same with every load");
        assert_eq!(before.migration("m").unwrap().unknown["recordedAs"], garbage);
    }
}

#[test]
fn protocol_6_numbers_that_nobody_can_work_with_are_refused() {
    let refused = |bench: &Bench| match load(&bench.key, &bench.fields, &bench.settings) {
        Err(LoadError::Aggregate(message)) => message,
        other => panic!("{other:?}"),
    };
    for field in ["fromShardCount", "toShardCount"] {
        let mut absurd = migration("m", 4, 2, "DEPRECATED");
        absurd[field] = json!(4_000_000_000_u32);
        let message = refused(&record(2, 0..2, json!({ "m": absurd }), Value::Null));
        assert!(message.contains('m') && message.contains("4000000000 is out of range"), "{message}");
    }
    for field in ["draining", "retired"] {
        let mut absurd = migration("m", 4, 2, "DRAINING");
        absurd[field] = json!([{ "shardIndex": 4_294_967_295_u32 }]);
        let message = refused(&running(2, 0..2, absurd));
        assert!(message.contains("4294967295 is out of range"), "{message}");
    }
    // A count too large for the type is no count at all: kept, and not understood.
    let mut absurd = migration("m", 4, 2, "DEPRECATED");
    absurd["toShardCount"] = json!(1_u64 << 40);
    let group = record(2, 0..2, json!({ "m": absurd }), Value::Null).group();
    assert!(group.foreign_migrations.contains_key("m"));
}

#[test]
fn protocol_6_a_record_of_ours_that_contradicts_itself_still_comes_to_an_end() {
    // Shards that producers route to are not removed, and none is both read and given up.
    let mut odd = migration("m", 4, 2, "DRAINING");
    odd["draining"] = shards(0..4);
    odd["retired"] = shards(1..4);
    odd["activatedAt"] = at(-40_000);
    let bench = running(2, 0..4, odd);
    let group = bench.group();
    let migration_of = group.active_migration().unwrap();
    assert_eq!((migration_of.draining(), &migration_of.retired), (&[2, 3].into(), &[].into()));
    let mut stream = stream_of(bench);
    stream.settle();
    stream.assert_settled_but_provisioned(2);
    // What is over reads nothing.
    let mut over = migration("m", 4, 2, "DEPRECATED");
    over["draining"] = shards(2..4);
    let group = record(2, 0..2, json!({ "m": over }), Value::Null).group();
    assert_eq!(reads(&group), [0, 1]);
    assert_eq!(group.migration("m").unwrap().retired, [2, 3].into());
    assert_eq!(group.validate(), []);
}
