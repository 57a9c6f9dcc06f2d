//! Creating and deleting a group (protocol 3).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use rsc_core::lifecycle::{Creation, create, delete};
use rsc_core::write::{Stamp, Tombstone, WriteKind};
use rsc_core::{Command, Settings};
use rsc_protocol::admin::GroupState;
use rsc_protocol::{ErrorCode, GroupKey, Status, Timestamp};
use serde_json::{Value, json};
use support::*;

fn key() -> GroupKey {
    GroupKey::new("orders", "billing").unwrap()
}

fn create_after(tombstone: Option<&Tombstone>) -> Creation {
    let now = Timestamp::from_millis(START);
    create(&key(), 4, now, "token", tombstone, &Settings::default())
}

fn stamp_of(bench: &Bench) -> Stamp {
    rsc_core::load(&bench.key, &bench.fields, &bench.settings).unwrap().stamp
}

#[test]
fn protocol_3_a_new_group_is_empty_and_its_write_is_the_whole_record() {
    let Creation { group, write } = create_after(None);
    assert_eq!((group.state, group.shard_count), (GroupState::Empty, 4));
    assert!(group.members.is_empty() && group.targets.is_empty() && group.holds.is_empty());
    assert_eq!((group.group_epoch, group.assignment_epoch), (1, 1));
    assert_eq!((group.metadata_version, group.metadata_token.as_str()), (1, "token"));
    assert_eq!((group.created_at, group.updated_at), (Timestamp::from_millis(START), group.created_at));
    assert_eq!(group.max_routing_cache_ttl_ms, Settings::default().routing_cache_ttl_ms);
    assert_eq!(group.validate(), []);
    let WriteKind::Structural { aggregate, revision } = &write.kind else { panic!("{write:?}") };
    assert_eq!(*revision, group.store_revision);
    let aggregate: Value = serde_json::from_str(aggregate).unwrap();
    assert_eq!(aggregate["storeRevision"], json!(revision));
    assert_eq!(
        (&aggregate["streamPrefix"], &aggregate["consumerGroup"]),
        (&json!("orders"), &json!("billing"))
    );
    let history: Value = serde_json::from_str(write.history.as_ref().unwrap()).unwrap();
    assert_eq!(history["transitions"][0]["type"], json!("GROUP_CREATED"));
}

#[test]
fn protocol_3_nobody_is_admitted_before_the_streams_exist() {
    let creation = create_after(None);
    let mut bench = Bench::new(4);
    let WriteKind::Structural { aggregate, revision } = creation.write.kind else { panic!() };
    bench.fields.insert("aggregate".to_owned(), aggregate.into_bytes());
    bench.fields.insert("revision".to_owned(), revision.to_string().into_bytes());
    let join = bench.request("p");
    assert_eq!(bench.send(join).status, Status::Retry);
    assert_eq!(bench.last_write(), None);
    let before = bench.group();
    bench.turn(&[Command::Provisioned]);
    assert!(matches!(bench.last_write().unwrap().kind, WriteKind::Structural { .. }), "recorded");
    assert_eq!(bench.group().metadata_version, before.metadata_version, "nobody observes that");
    let join = bench.request("p");
    assert_eq!(assigned(&bench.send(join)), [0, 1, 2, 3]);
    bench.turn(&[Command::Provisioned]);
    assert_eq!(bench.last_write(), None, "said twice, done once");
}

#[test]
fn protocol_3_a_group_created_again_starts_above_its_tombstone() {
    let tombstone = Tombstone {
        stream_prefix: "orders".to_owned(),
        consumer_group: "billing".to_owned(),
        group_epoch: 40,
        metadata_version: 70,
        store_revision: 90,
        live_revision: 500,
        deleted_at: Timestamp::from_millis(START + 5_000),
        reading_until: Timestamp::MIN,
    };
    let group = create_after(Some(&tombstone)).group;
    assert!(group.group_epoch > 40 && group.assignment_epoch == group.group_epoch);
    assert!(group.metadata_version > 70 && group.store_revision > 90);
    // A clock that runs behind the deletion: what came later is not older.
    assert_eq!((group.created_at, group.updated_at), (tombstone.deleted_at, tombstone.deleted_at));
}

#[test]
fn protocol_3_nobodys_memory_of_the_deleted_group_looks_newer_than_the_new_one() {
    let mut bench = Bench::new(4);
    let mut p = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut p]);
    let old = bench.group();
    let tombstone = delete(&old, &stamp_of(&bench), bench.now, true).unwrap();
    let creation = create(&key(), 4, bench.now, "new", Some(&tombstone), &bench.settings);
    let mut again = Bench::new(4);
    let WriteKind::Structural { aggregate, revision } = creation.write.kind else { panic!() };
    again.fields.insert("aggregate".to_owned(), aggregate.into_bytes());
    again.fields.insert("revision".to_owned(), revision.to_string().into_bytes());
    again.turn(&[Command::Provisioned]);
    let request = p.request(&mut again, true);
    let answer = again.send(request);
    assert_eq!(answer.status, Status::UnknownMemberId);
    assert!(answer.metadata_version > p.version);
    assert_eq!(again.counts.last().unwrap().evidence_of_loss, 0);
    p.apply(&answer);
    assert!(p.beat(&mut again).member_epoch > i64::try_from(old.group_epoch).unwrap());
}

#[test]
fn protocol_3_deleting_leaves_what_the_group_had_reached() {
    let mut bench = Bench::new(4);
    let mut p = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut p]);
    let leave = p.request(&mut bench, true).epoch(-1).owned(&[]);
    bench.send(leave);
    let (group, stamp) = (bench.group(), stamp_of(&bench));
    assert!(stamp.live_revision > 0);
    let tombstone = delete(&group, &stamp, bench.now.plus(7), false).unwrap();
    assert_eq!(
        tombstone,
        Tombstone {
            stream_prefix: "orders".to_owned(),
            consumer_group: "billing".to_owned(),
            group_epoch: group.group_epoch,
            metadata_version: group.metadata_version,
            store_revision: group.store_revision,
            live_revision: stamp.live_revision,
            deleted_at: bench.now.plus(7),
            reading_until: Timestamp::MIN,
        }
    );
    assert!(tombstone.is_of(&group.key));
    let earlier = delete(&group, &stamp, bench.now.plus(-60_000), false).unwrap();
    assert_eq!(earlier.deleted_at, group.updated_at, "time does not run backwards");
    // Not of the pair that gives the same key.
    let colliding =
        Tombstone { stream_prefix: "a:b".to_owned(), consumer_group: "c".to_owned(), ..tombstone };
    assert!(!colliding.is_of(&GroupKey::new("a", "b:c").unwrap()));
    assert_eq!(Tombstone::TTL_MS, 86_400_000, "one day");
}

#[test]
fn protocol_8_a_group_with_live_members_is_deleted_only_by_force() {
    let mut bench = Bench::new(4);
    let mut p = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut p]);
    let attempt = |bench: &Bench, force| delete(&bench.group(), &stamp_of(bench), bench.now, force);
    let (code, message) = attempt(&bench, false).unwrap_err();
    assert_eq!(code, ErrorCode::GroupHasActiveMembers);
    assert!(message.contains("force") && message.contains('1'), "what to do: {message}");
    let leave = p.request(&mut bench, true).epoch(-1);
    bench.send(leave);
    assert!(attempt(&bench, false).is_err(), "LEAVING is live");
    assert!(attempt(&bench, true).is_ok());
    bench.pass(LEASE);
    bench.tick();
    assert!(attempt(&bench, false).is_ok(), "EXPIRED is not");
}

/// A bench whose group was created again over `tombstone`.
fn created_again(old: &Bench, tombstone: &Tombstone) -> Bench {
    let creation = create(&key(), 4, old.now, "new", Some(tombstone), &old.settings);
    let mut again = Bench::new(4);
    again.now = old.now;
    let aggregate = rsc_core::record::aggregate(&creation.group).unwrap();
    let revision = creation.group.store_revision;
    again.fields.insert("aggregate".to_owned(), aggregate.into_bytes());
    again.fields.insert("revision".to_owned(), revision.to_string().into_bytes());
    again.turn(&[Command::Provisioned]);
    again
}

#[test]
fn protocol_4_2_a_group_created_again_grants_nothing_while_members_of_the_deleted_one_may_be_reading() {
    let mut bench = Bench::new(4);
    let mut p = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut p]);
    let lease_end = bench.group().members["p"].live.member_lease_expires_at;
    let tombstone = delete(&bench.group(), &stamp_of(&bench), bench.now, true).unwrap();
    assert_eq!(tombstone.reading_until, lease_end);
    let mut again = created_again(&bench, &tombstone);
    // Deleted and created once more in between: what is left of the first still counts.
    let second = delete(&again.group(), &stamp_of(&again), again.now, false).unwrap();
    assert_eq!(second.reading_until, lease_end);
    let mut m = Client::new("m", "m-1");
    while again.now < lease_end {
        let answer = m.beat(&mut again);
        assert_eq!((answer.status, assigned(&answer), pending(&answer).len()), (Status::Ok, vec![], 4));
        again.pass(1_000);
    }
    assert_eq!(assigned(&m.beat(&mut again)), [0, 1, 2, 3]);
    assert_eq!(again.group().grants_from, None);
}

#[test]
fn protocol_3_a_group_deleted_without_readers_grants_at_once_when_created_again() {
    let bench = Bench::new(4);
    let tombstone = delete(&bench.group(), &stamp_of(&bench), bench.now, false).unwrap();
    let mut again = created_again(&bench, &tombstone);
    assert_eq!(assigned(&Client::new("m", "m-1").beat(&mut again)), [0, 1, 2, 3]);
}

#[test]
fn protocol_2_a_damaged_tombstone_makes_no_group_that_no_load_accepts() {
    let far = Timestamp::from_millis(i64::MAX);
    let tombstone = Tombstone {
        group_epoch: 1 << 62,
        metadata_version: u64::MAX,
        store_revision: 1 << 62,
        live_revision: u64::MAX,
        deleted_at: far,
        reading_until: far,
        ..Tombstone::default()
    };
    let bench = Bench::new(4);
    let again = created_again(&bench, &tombstone);
    let group = again.group();
    assert!(group.updated_at <= bench.now.plus(3_600_000), "an hour ahead at most");
    assert!(group.grants_from.is_none_or(|from| from <= bench.now.plus(3_600_000)));
    assert_eq!((group.group_epoch, group.metadata_version), (1, 1));
}
