//! Every check of a load, and how live fields are merged (protocol 2).
#![expect(clippy::panic, clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use proptest::prelude::*;
use rsc_core::record::{LoadError, stamp};
use rsc_core::write::{RawFields, Stamp};
use rsc_core::{Settings, load};
use rsc_protocol::{GroupKey, Status, Timestamp};
use serde_json::{Value, json};
use support::*;

fn settled() -> (Bench, Client) {
    let mut bench = Bench::new(2);
    let mut p = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut p]);
    bench.pass(1_000);
    (bench, p)
}

fn aggregate(bench: &Bench) -> Value {
    serde_json::from_slice(&bench.fields["aggregate"]).unwrap()
}

fn set(fields: &mut RawFields, field: &str, value: impl ToString) {
    fields.insert(field.to_owned(), value.to_string().into_bytes());
}

fn edit(bench: &mut Bench, edit: impl FnOnce(&mut Value)) {
    let mut value = aggregate(bench);
    edit(&mut value);
    set(&mut bench.fields, "aggregate", value);
}

fn edit_live(bench: &mut Bench, id: &str, edit: impl FnOnce(&mut Value)) {
    let mut live: Value = serde_json::from_slice(&bench.fields[&format!("live:{id}")]).unwrap();
    edit(&mut live);
    set(&mut bench.fields, &format!("live:{id}"), live);
}

fn load_error(bench: &Bench) -> LoadError {
    match load(&bench.key, &bench.fields, &bench.settings) {
        Ok(loaded) => panic!("loads: {loaded:?}"),
        Err(error) => error,
    }
}

fn loads(bench: &Bench) -> bool {
    load(&bench.key, &bench.fields, &bench.settings).is_ok()
}

#[test]
fn protocol_2_a_schema_that_is_not_supported_is_refused_wherever_it_stands() {
    for found in ["0", "2", "1.0", "", "one"] {
        let (mut bench, _) = settled();
        set(&mut bench.fields, "schemaVersion", found);
        assert_eq!(load_error(&bench), LoadError::Schema { found: found.to_owned() });
    }
    let (mut bench, _) = settled();
    edit(&mut bench, |aggregate| aggregate["schemaVersion"] = json!(2));
    assert_eq!(load_error(&bench), LoadError::Schema { found: "2".to_owned() });
    // A newer schema need not parse as ours to be recognised as newer.
    edit(&mut bench, |aggregate| aggregate["members"] = json!("elsewhere"));
    assert_eq!(load_error(&bench), LoadError::Schema { found: "2".to_owned() });
}

#[test]
fn protocol_2_layouts_up_to_2_load_and_a_higher_one_is_refused() {
    for layout in [None, Some("1"), Some("2")] {
        let (mut bench, _) = settled();
        bench.fields.remove("layoutVersion");
        if let Some(layout) = layout {
            set(&mut bench.fields, "layoutVersion", layout);
        }
        assert!(loads(&bench), "{layout:?}");
    }
    let (mut bench, _) = settled();
    set(&mut bench.fields, "layoutVersion", 3);
    assert_eq!(load_error(&bench), LoadError::Layout { found: "3".to_owned() });
    set(&mut bench.fields, "layoutVersion", "two");
    assert!(matches!(load_error(&bench), LoadError::Field { field: "layoutVersion", .. }));
}

#[test]
fn protocol_2_the_revision_field_must_be_the_aggregates_store_revision() {
    let (mut bench, _) = settled();
    let store_revision = bench.group().store_revision;
    for revision in [store_revision - 1, store_revision + 1] {
        set(&mut bench.fields, "revision", revision);
        assert_eq!(load_error(&bench), LoadError::RevisionMismatch { revision, store_revision });
    }
    for broken in ["", "-1", "many"] {
        set(&mut bench.fields, "revision", broken);
        assert!(matches!(load_error(&bench), LoadError::Field { field: "revision", .. }), "{broken}");
    }
    bench.fields.remove("revision");
    assert!(matches!(load_error(&bench), LoadError::Field { field: "revision", .. }));
}

#[test]
fn protocol_2_an_aggregate_that_is_no_json_of_a_group_is_refused() {
    let whole = settled().0.fields["aggregate"].clone();
    let broken: [&[u8]; 6] = [b"", b"{", b"null", b"[]", b"{}", &whole[..whole.len() / 2]];
    for bytes in broken {
        let (mut bench, _) = settled();
        bench.fields.insert("aggregate".to_owned(), bytes.to_vec());
        assert!(matches!(load_error(&bench), LoadError::Aggregate(_)), "{bytes:?}");
    }
    let (mut bench, _) = settled();
    bench.fields.insert("aggregate".to_owned(), vec![0xff, 0xfe]);
    assert!(matches!(load_error(&bench), LoadError::Field { field: "aggregate", .. }), "not UTF-8");
    bench.fields.remove("aggregate");
    assert!(matches!(load_error(&bench), LoadError::Field { field: "aggregate", .. }), "absent");
}

#[test]
fn protocol_2_a_field_without_a_default_must_be_there_and_of_its_type() {
    let required = [
        "streamPrefix",
        "consumerGroup",
        "storeRevision",
        "groupEpoch",
        "metadataVersion",
        "assignmentEpoch",
    ];
    for field in required.into_iter().chain(["shardCount", "schemaVersion"]) {
        for value in [None, Some(Value::Null), Some(json!({})), Some(json!(-1))] {
            let (mut bench, _) = settled();
            edit(&mut bench, |aggregate| match &value {
                Some(value) => aggregate[field] = value.clone(),
                None => {
                    aggregate.as_object_mut().unwrap().remove(field).unwrap();
                }
            });
            assert!(matches!(load_error(&bench), LoadError::Aggregate(_)), "{field}: {value:?}");
        }
    }
    for field in ["state", "memberEpoch"] {
        let (mut bench, _) = settled();
        edit(&mut bench, |aggregate| aggregate["members"]["p"][field] = json!("NOBODY"));
        assert!(matches!(load_error(&bench), LoadError::Aggregate(_)), "{field}");
    }
}

#[test]
fn protocol_2_a_member_that_calls_itself_otherwise_is_corruption() {
    let (mut bench, _) = settled();
    edit(&mut bench, |aggregate| aggregate["members"]["p"]["memberId"] = json!("q"));
    assert!(matches!(load_error(&bench), LoadError::Aggregate(_)));
}

#[test]
fn protocol_2_the_pair_that_gives_the_same_key_is_told_from_any_other_pair() {
    let settings = Settings::default();
    let pair = |prefix: &str, group: &str| {
        let (mut bench, _) = settled();
        edit(&mut bench, |aggregate| {
            aggregate["streamPrefix"] = json!(prefix);
            aggregate["consumerGroup"] = json!(group);
        });
        bench.fields
    };
    let fields = pair("a:b", "c");
    assert!(load(&GroupKey::new("a:b", "c").unwrap(), &fields, &settings).is_ok(), "stays healthy");
    assert_eq!(
        load(&GroupKey::new("a", "b:c").unwrap(), &fields, &settings).unwrap_err(),
        LoadError::Collision { stream_prefix: "a:b".to_owned(), consumer_group: "c".to_owned() }
    );
    for (prefix, group) in [("x", "y"), ("a", "b"), ("A:b", "c"), ("", ""), ("{a:b", "c")] {
        let error = load(&GroupKey::new("a", "b:c").unwrap(), &pair(prefix, group), &settings).unwrap_err();
        let (stream_prefix, consumer_group) = (prefix.to_owned(), group.to_owned());
        assert_eq!(error, LoadError::Foreign { stream_prefix, consumer_group });
    }
}

#[test]
fn protocol_2_an_absent_write_id_is_empty_and_an_absent_live_revision_is_0() {
    let (mut bench, _) = settled();
    let revision = bench.group().store_revision;
    set(&mut bench.fields, "writeId", "w-7");
    set(&mut bench.fields, "liveRevision", 41);
    let full = Stamp { revision, live_revision: 41, write_id: "w-7".to_owned() };
    assert_eq!(stamp(&bench.fields).unwrap(), full);
    assert_eq!(load(&bench.key, &bench.fields, &bench.settings).unwrap().stamp, full);
    bench.fields.remove("writeId");
    bench.fields.remove("liveRevision");
    assert_eq!(stamp(&bench.fields).unwrap(), Stamp { revision, ..Stamp::default() });
    set(&mut bench.fields, "liveRevision", "x");
    assert!(matches!(load_error(&bench), LoadError::Field { field: "liveRevision", .. }));
}

#[test]
fn protocol_2_the_newer_lease_wins_wherever_it_is_found() {
    let (mut bench, _) = settled();
    let recorded = bench.group().members["p"].live.member_lease_expires_at;
    let later = recorded.plus(5_000);
    let find = |bench: &Bench| bench.group().members["p"].live.member_lease_expires_at;
    for (in_aggregate, in_live) in [(recorded, later), (later, recorded)] {
        edit(&mut bench, |aggregate| {
            aggregate["members"]["p"]["memberLeaseExpiresAt"] = json!(in_aggregate);
        });
        edit_live(&mut bench, "p", |live| live["memberLeaseExpiresAt"] = json!(in_live));
        assert_eq!(find(&bench), later);
    }
    bench.fields.remove("live:p");
    assert_eq!(find(&bench), later, "leases found only in the aggregate count too");
}

#[test]
fn protocol_2_the_higher_epochs_and_the_higher_sequence_win() {
    let (mut bench, _) = settled();
    let live = bench.group().members["p"].live.clone();
    // What a lease-only commit writes: a newer heartbeat.
    edit_live(&mut bench, "p", |found| {
        found["memberEpoch"] = json!(live.member_epoch + 3);
        found["confirmedMemberEpoch"] = json!(live.member_epoch + 2);
        found["sequence"] = json!(9_000);
        found["activeConsumerWorkers"] = json!(2);
        found["lastHeartbeatAt"] = json!(live.last_heartbeat_at.plus(1));
    });
    let merged = bench.group().members["p"].live.clone();
    assert_eq!(merged.member_epoch, live.member_epoch + 3);
    assert_eq!(merged.confirmed_member_epoch, live.member_epoch + 2);
    assert_eq!((merged.sequence, merged.active_consumer_workers), (Some(9_000), 2));
    // The aggregate's may be the higher ones.
    edit(&mut bench, |aggregate| {
        aggregate["members"]["p"]["memberEpoch"] = json!(live.member_epoch + 7);
        aggregate["members"]["p"]["sequence"] = json!(9_500);
    });
    let merged = bench.group().members["p"].live.clone();
    assert_eq!((merged.member_epoch, merged.sequence), (live.member_epoch + 7, Some(9_500)));
    assert_eq!(merged.confirmed_member_epoch, live.member_epoch + 2);
}

#[test]
fn protocol_2_a_live_field_older_than_the_aggregate_does_not_take_the_newer_report_back() {
    let (mut bench, _) = settled();
    let live = bench.group().members["p"].live.clone();
    edit(&mut bench, |aggregate| {
        aggregate["members"]["p"]["lastHeartbeatAt"] = json!(live.last_heartbeat_at.plus(1_000));
        aggregate["members"]["p"]["activeConsumerWorkers"] = json!(3);
    });
    assert_eq!(bench.group().members["p"].live.active_consumer_workers, 3);
}

#[test]
fn protocol_2_a_live_field_of_an_earlier_incarnation_contributes_its_lease_only() {
    let (mut bench, p) = settled();
    let old = bench.fields["live:p"].clone();
    let mut new = Client::new("p", "p-2");
    new.beat(&mut bench);
    let joined = bench.group().members["p"].live.clone();
    assert!(joined.sequence < Some(p.sequence), "the newcomer counts anew");
    bench.fields.insert("live:p".to_owned(), old);
    let later = joined.member_lease_expires_at.plus(60_000);
    edit_live(&mut bench, "p", |live| {
        live["memberLeaseExpiresAt"] = json!(later);
        live["lastHeartbeatAt"] = json!(later);
    });
    let mut expected = joined;
    expected.member_lease_expires_at = later;
    assert_eq!(bench.group().members["p"].live, expected);
}

#[test]
fn protocol_2_a_live_field_without_a_member_is_ignored_and_removed_by_the_next_structural_commit() {
    let (mut bench, mut p) = settled();
    let before = bench.group();
    let stray = bench.fields["live:p"].clone();
    bench.fields.insert("live:nobody".to_owned(), stray);
    set(&mut bench.fields, "live:", "{}");
    assert_eq!(bench.group(), before);
    p.beat(&mut bench);
    assert!(bench.is_lease_only());
    assert!(bench.fields.contains_key("live:nobody"), "a lease-only commit writes its members' fields");
    let join = bench.request("q");
    bench.send(join);
    assert!(!bench.fields.contains_key("live:nobody") && !bench.fields.contains_key("live:"));
    assert!(bench.fields.contains_key("live:p") && bench.fields.contains_key("live:q"));
}

#[test]
fn protocol_2_a_join_rewrites_a_live_field_that_was_stray() {
    let (mut bench, p) = settled();
    set(&mut bench.fields, "live:q", r#"{"memberEpoch": 77, "sequence": 5}"#);
    let join = bench.request("q").version(p.version);
    assert_eq!(bench.send(join).status, Status::Ok);
    let live: Value = serde_json::from_slice(&bench.fields["live:q"]).unwrap();
    assert_eq!(live["memberEpoch"], json!(bench.group().assignment_epoch));
    assert_eq!(live.get("sequence"), None);
}

#[test]
fn protocol_2_a_live_field_that_cannot_be_read_leaves_what_the_aggregate_says() {
    for broken in ["", "{", "null", r#"{"memberEpoch": "x"}"#] {
        let (mut bench, mut p) = settled();
        let join = bench.request("q");
        bench.send(join);
        set(&mut bench.fields, "live:p", broken);
        let loaded = load(&bench.key, &bench.fields, &bench.settings).unwrap();
        assert_eq!(loaded.stray_live, ["p"], "{broken}");
        assert!(loaded.group.members["p"].is_live());
        assert_eq!(p.beat_draining(&mut bench).status, Status::Ok);
        assert!(serde_json::from_slice::<Value>(&bench.fields["live:p"]).unwrap().is_object(), "rewritten");
    }
}

#[test]
fn protocol_2_time_does_not_run_behind_the_hashs_updated_at() {
    let (mut bench, mut p) = settled();
    // A lease-only commit of an instance whose Redis clock was ahead moved the hash's field only.
    let ahead = bench.now.plus(3_000);
    set(&mut bench.fields, "updatedAt", ahead);
    assert_eq!(bench.group().updated_at, ahead);
    p.beat(&mut bench);
    assert_eq!(bench.group().members["p"].live.member_lease_expires_at, ahead.plus(LEASE));
    // The aggregate's own is the floor, and what is no instant is not believed.
    let floor: Timestamp = serde_json::from_value(aggregate(&bench)["updatedAt"].clone()).unwrap();
    for text in [floor.plus(-1).to_string(), "yesterday".to_owned(), String::new()] {
        set(&mut bench.fields, "updatedAt", &text);
        assert_eq!(bench.group().updated_at, floor, "{text}");
    }
}

#[test]
fn protocol_2_a_load_needs_nothing_but_the_fields_it_names() {
    let (mut bench, _) = settled();
    bench.fields.retain(|field, _| field == "aggregate" || field == "revision");
    set(&mut bench.fields, "somebodyElses", "\u{1F980}");
    bench.fields.insert("binary".to_owned(), vec![0xff]);
    assert!(loads(&bench));
}

/// Every value inside `value`, by its JSON pointer.
fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(field, value)| pointers(value, &format!("{at}/{field}"), found));
        }
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.for_each(|(index, value)| pointers(value, &format!("{at}/{index}"), found));
        }
        _ => {}
    }
}

fn anything() -> impl Strategy<Value = Value> {
    let numbers = [json!(-1), json!(0), json!(1.5), json!(1_u64 << 53), json!(u64::MAX), json!(i64::MIN)];
    let others = [Value::Null, json!(true), json!(""), json!("x"), json!([]), json!({}), json!([[]])];
    let instants = [json!("0000-01-01T00:00:00Z"), json!("9999-12-31T23:59:59.999Z")];
    prop::sample::select([&numbers[..], &others[..], &instants[..]].concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, .. ProptestConfig::default() })]

    #[test]
    fn protocol_2_whatever_stands_in_a_record_it_is_read_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), anything()), 1..4),
        live in anything(),
    ) {
        let (mut bench, _) = settled();
        let mut second = Client::new("p", "p-2");
        second.beat(&mut bench);
        Client::new("m", "m-1").beat(&mut bench);
        let mut value = aggregate(&bench);
        for (index, replacement) in changes {
            let mut found = Vec::new();
            pointers(&value, "", &mut found);
            *value.pointer_mut(&found[index.index(found.len())]).unwrap() = replacement;
        }
        set(&mut bench.fields, "aggregate", value);
        set(&mut bench.fields, "live:p", live);
        if let Ok(loaded) = load(&bench.key, &bench.fields, &bench.settings) {
            let again = rsc_core::record::aggregate(&loaded.group).unwrap();
            set(&mut bench.fields, "aggregate", again);
            bench.fields.remove("live:p");
            let read_again = load(&bench.key, &bench.fields, &bench.settings).unwrap();
            prop_assert_eq!(read_again.group, loaded.group, "what was read is what is written");
        }
    }
}

#[test]
fn numbers_that_nobody_has_written_are_refused_not_computed_with() {
    let bench = Bench::new(2);
    let aggregate: serde_json::Value =
        serde_json::from_slice(&bench.fields["aggregate"]).expect("what we wrote is JSON");
    for (field, value) in [
        ("shardCount", serde_json::json!(4_294_967_295_u32)),
        ("groupEpoch", serde_json::json!(u64::MAX)),
        ("metadataVersion", serde_json::json!(u64::MAX)),
        ("fencingTokens", serde_json::json!([{"shardIndex": 0, "token": u64::MAX}])),
        ("targetAssignments", serde_json::json!({"a": [{"shardIndex": u32::MAX}]})),
    ] {
        let mut damaged = aggregate.clone();
        damaged[field] = value;
        let mut fields = bench.fields.clone();
        fields.insert("aggregate".to_owned(), damaged.to_string().into_bytes());
        let error = rsc_core::load(&bench.key, &fields, &bench.settings).expect_err(field);
        assert!(error.to_string().contains("out of range"), "{field}: {error}");
    }
}

#[test]
fn a_number_that_the_scripts_would_compare_otherwise_is_refused() {
    let bench = Bench::new(2);
    for (field, value) in
        [("revision", "+2"), ("revision", "02"), ("liveRevision", " 2"), ("liveRevision", "2 ")]
    {
        let mut fields = bench.fields.clone();
        fields.insert(field.to_owned(), value.as_bytes().to_vec());
        let error = rsc_core::load(&bench.key, &fields, &bench.settings).expect_err(value);
        assert!(error.to_string().contains(field), "{error}");
    }
}

#[test]
fn causes_that_a_newer_version_knows_make_no_record_unreadable() {
    let mut bench = Bench::new(2);
    let mut p = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut p]);
    let mut aggregate: serde_json::Value = serde_json::from_slice(&bench.fields["aggregate"]).unwrap();
    aggregate["members"]["p"]["termination"] = serde_json::json!("EATEN_BY_BEARS");
    aggregate["holds"] = serde_json::json!([
        {"shardIndex": 1, "memberId": "q", "cause": "FUTURE_CAUSE", "until": bench.now.plus(LEASE)}
    ]);
    bench.fields.insert("aggregate".to_owned(), aggregate.to_string().into_bytes());
    let group = bench.group();
    assert!(group.is_on_hold(1, bench.now), "whatever it is about, it holds");
    assert_eq!(group.members["p"].termination, None);
}
