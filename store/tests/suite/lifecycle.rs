//! Creation, deletion, tombstones.

use rsc_core::{Stamp, Tombstone};
use rsc_protocol::{GroupKey, Timestamp};
use rsc_store::{Conflict, Entered, Found, Outcome};

use crate::support::hands::World;
use crate::support::{applied, created, enter, group, is_free, lease_only, structural, token};

#[track_caller]
fn conflicts(outcome: &Outcome, expected: Conflict) {
    match outcome {
        Outcome::Conflict(conflict) if *conflict == expected => {}
        other => panic!("expected {expected:?}, got {other:?}"),
    }
}

fn tombstone(group: &GroupKey) -> Tombstone {
    Tombstone {
        stream_prefix: group.stream_prefix().into(),
        consumer_group: group.consumer_group().into(),
        group_epoch: 11,
        metadata_version: 22,
        store_revision: 33,
        live_revision: 44,
        deleted_at: Timestamp::from_millis(1_700_000_000_000),
        reading_until: Timestamp::from_millis(1_700_000_015_000),
    }
}

/// Deletes a group that is there, leaving this tombstone.
async fn deleted(world: &World, group: &GroupKey, tombstone: &Tombstone) {
    let stamp = created(&*world.store, group).await;
    let (token, _) = enter(&*world.store, group, None).await;
    applied(world.store.delete(group, &token, Some(&stamp), Some(tombstone)).await);
}

pub(crate) async fn create_keeps_the_mutex(world: &World) {
    let group = group("orders");
    let (creator, other) = (token(), token());
    let mut write = structural("{\"storeRevision\":1}", 1);
    write.live = vec![("m".into(), "{}".into())];
    write.history = Some("{\"created\":true}".into());
    let stamp = applied(world.store.create(&group, &creator, None, &write).await);
    assert_eq!((stamp.revision, stamp.live_revision), (1, 1));
    let entered = world.store.enter(&group, &other, None, None).await.unwrap();
    assert_eq!(entered, Entered::Busy { holder: creator.as_str().to_owned() });
    assert!(world.ttl_ms(&world.keys.mutex(&group)).is_some());
    assert_eq!(world.history(&world.keys.history(&group)), ["{\"created\":true}"]);
    let key = world.keys.metadata(&group);
    for (name, text) in [
        ("aggregate", "{\"storeRevision\":1}"),
        ("revision", "1"),
        ("schemaVersion", "1"),
        ("layoutVersion", "2"),
        ("liveRevision", "1"),
        ("writeId", &stamp.write_id),
        ("live:m", "{}"),
    ] {
        assert_eq!(world.field(&key, name).as_deref(), Some(text), "{name}");
    }
    assert!(world.store.renew(&group, &creator).await.unwrap());
    world.store.release(&group, &creator).await.unwrap();
    let entered = world.store.enter(&group, &other, None, Some(&stamp)).await.unwrap();
    assert!(matches!(entered, Entered::Unchanged { has_ttl: false, .. }), "{entered:?}");
}

pub(crate) async fn create_refuses_what_is_there_already(world: &World) {
    let group = group("orders");
    let stamp = created(&*world.store, &group).await;
    let again = world.store.create(&group, &token(), None, &structural("{\"second\":1}", 1)).await;
    conflicts(&again, Conflict::Exists);
    assert!(is_free(&*world.store, &group).await);
    // Also from somebody who has entered, who then has the mutex no more.
    let (holder, _) = enter(&*world.store, &group, None).await;
    let again = world.store.create(&group, &holder, None, &structural("{\"second\":1}", 1)).await;
    conflicts(&again, Conflict::Exists);
    assert!(is_free(&*world.store, &group).await);
    assert_eq!(world.field(&world.keys.metadata(&group), "writeId"), Some(stamp.write_id));
}

pub(crate) async fn create_refuses_a_mutex_of_another(world: &World) {
    let group = group("orders");
    let (holder, entered) = enter(&*world.store, &group, None).await;
    assert!(matches!(entered, Entered::Missing { .. }), "{entered:?}");
    let outcome = world.store.create(&group, &token(), None, &structural("{}", 1)).await;
    conflicts(&outcome, Conflict::MutexLost);
    assert_eq!(world.kind(&world.keys.metadata(&group)), "none");
    assert!(world.store.renew(&group, &holder).await.unwrap());
    applied(world.store.create(&group, &holder, None, &structural("{}", 1)).await);
}

pub(crate) async fn create_wants_the_tombstone_that_was_read(world: &World) {
    let group = group("orders");
    let left = tombstone(&group);
    let write = structural("{}", 1);
    conflicts(&world.store.create(&group, &token(), Some(&left), &write).await, Conflict::TombstoneMoved);
    deleted(world, &group, &left).await;
    let others = [
        Tombstone { stream_prefix: "o".into(), ..left.clone() },
        Tombstone { consumer_group: "c".into(), ..left.clone() },
        Tombstone { group_epoch: 12, ..left.clone() },
        Tombstone { metadata_version: 23, ..left.clone() },
        Tombstone { store_revision: 34, ..left.clone() },
        Tombstone { live_revision: 45, ..left.clone() },
    ];
    for other in others.iter().map(Some).chain([None]) {
        let outcome = world.store.create(&group, &token(), other, &write).await;
        conflicts(&outcome, Conflict::TombstoneMoved);
        assert!(is_free(&*world.store, &group).await);
    }
    assert_eq!(world.kind(&world.keys.metadata(&group)), "none");
    assert_eq!(world.kind(&world.keys.tombstone(&group)), "hash");
}

pub(crate) async fn create_removes_the_tombstone_and_goes_on_above_it(world: &World) {
    let group = group("orders");
    deleted(world, &group, &tombstone(&group)).await;
    let (token, entered) = enter(&*world.store, &group, None).await;
    let Entered::Missing { tombstone: Some(read), .. } = entered else { panic!("{entered:?}") };
    assert_eq!(read, tombstone(&group));
    let stamp = applied(world.store.create(&group, &token, Some(&read), &structural("{}", 34)).await);
    assert_eq!((stamp.revision, stamp.live_revision), (34, 45));
    assert_eq!(world.kind(&world.keys.tombstone(&group)), "none");
}

pub(crate) async fn a_commit_to_a_restored_group_removes_its_tombstone(world: &World) {
    let group = group("orders");
    deleted(world, &group, &tombstone(&group)).await;
    let restored: &[(&str, &[u8])] = &[("aggregate", b"{}"), ("revision", b"7")];
    world.put_hash(&world.keys.metadata(&group), restored);
    let stamp = Stamp { revision: 7, ..Stamp::default() };
    let (token, _) = enter(&*world.store, &group, None).await;
    applied(world.store.commit(&group, &token, &stamp, &lease_only(&[("m", "{}")])).await);
    assert_eq!(
        world.kind(&world.keys.tombstone(&group)),
        "none",
        "or a later loss would pass for a deletion"
    );
}

pub(crate) async fn create_by_a_lease_only_write_is_refused(world: &World) {
    let group = group("orders");
    let outcome = world.store.create(&group, &token(), None, &lease_only(&[("m", "{}")])).await;
    assert!(matches!(outcome, Outcome::NotApplied(_)), "{outcome:?}");
    assert_eq!(world.kind(&world.keys.metadata(&group)), "none");
    assert!(is_free(&*world.store, &group).await);
}

pub(crate) async fn a_damaged_or_foreign_tombstone_stops_nobody(world: &World) {
    let damaged = group("damaged");
    let key = world.keys.tombstone(&damaged);
    world.put_hash(&key, &[("groupEpoch", b"007"), ("metadataVersion", b"5"), ("liveRevision", b"x")]);
    let (token_of_creator, entered) = enter(&*world.store, &damaged, None).await;
    let Entered::Missing { tombstone: Some(read), .. } = entered else { panic!("{entered:?}") };
    assert_eq!(read, Tombstone { metadata_version: 5, ..Tombstone::default() });
    applied(world.store.create(&damaged, &token_of_creator, Some(&read), &structural("{}", 1)).await);

    let foreign = group("foreign");
    let key = world.keys.tombstone(&foreign);
    world.put_text(&key, "no hash");
    let (_, entered) = enter(&*world.store, &foreign, None).await;
    assert!(matches!(entered, Entered::Missing { tombstone: None, .. }), "{entered:?}");
    let found = world.store.read(&foreign).await.unwrap();
    assert!(matches!(found, Found::Missing { tombstone: None, .. }), "{found:?}");
    world.remove(&world.keys.mutex(&foreign));
    let stamp = created(&*world.store, &foreign).await;
    world.put_text(&key, "no hash");
    let (token, _) = enter(&*world.store, &foreign, None).await;
    let left = tombstone(&foreign);
    applied(world.store.delete(&foreign, &token, Some(&stamp), Some(&left)).await);
    assert_eq!(world.kind(&key), "hash");
}

pub(crate) async fn delete_leaves_a_tombstone_for_a_day_and_frees_the_mutex(world: &World) {
    let group = group("orders");
    let creator = token();
    let mut write = structural("{}", 1);
    write.history = Some("{}".into());
    let stamp = applied(world.store.create(&group, &creator, None, &write).await);
    applied(world.store.delete(&group, &creator, Some(&stamp), Some(&tombstone(&group))).await);
    assert_eq!(world.kind(&world.keys.metadata(&group)), "none");
    assert_eq!(world.kind(&world.keys.history(&group)), "none");
    let left = world.ttl_ms(&world.keys.tombstone(&group)).unwrap();
    assert!((86_300_000..=86_400_000).contains(&left), "{left}");
    let found = world.store.read(&group).await.unwrap();
    let Found::Missing { tombstone: Some(read), .. } = found else { panic!("{found:?}") };
    assert_eq!(read, tombstone(&group));
    assert!(read.is_of(&group));
    assert!(is_free(&*world.store, &group).await);
}

pub(crate) async fn delete_with_a_stale_stamp_is_refused(world: &World) {
    let group = group("orders");
    let stamp = created(&*world.store, &group).await;
    let stale = Stamp { write_id: "stale".into(), ..stamp.clone() };
    let (token, _) = enter(&*world.store, &group, None).await;
    let left = tombstone(&group);
    conflicts(&world.store.delete(&group, &token, Some(&stale), Some(&left)).await, Conflict::Moved);
    assert_eq!(world.kind(&world.keys.metadata(&group)), "hash");
    assert_eq!(world.kind(&world.keys.tombstone(&group)), "none");
    assert!(is_free(&*world.store, &group).await);
    let (token, _) = enter(&*world.store, &group, None).await;
    world.remove(&world.keys.metadata(&group));
    conflicts(&world.store.delete(&group, &token, Some(&stamp), Some(&left)).await, Conflict::Missing);
    assert!(is_free(&*world.store, &group).await);
}

pub(crate) async fn delete_without_a_stamp_takes_whatever_is_there(world: &World) {
    let group = group("orders");
    let key = world.keys.metadata(&group);
    let left = tombstone(&group);
    let damage: [&dyn Fn(); 3] = [
        &|| world.put_hash(&key, &[("aggregate", b"not json")]),
        &|| world.put_text(&key, "no hash"),
        &|| world.remove(&key),
    ];
    for damaged in damage {
        damaged();
        let (token, _) = enter(&*world.store, &group, None).await;
        applied(world.store.delete(&group, &token, None, Some(&left)).await);
        assert_eq!(world.kind(&key), "none");
        assert_eq!(world.kind(&world.keys.tombstone(&group)), "hash");
        assert!(is_free(&*world.store, &group).await);
        world.remove(&world.keys.tombstone(&group));
    }
}

pub(crate) async fn delete_without_a_tombstone_leaves_none(world: &World) {
    let group = group("orders");
    deleted(world, &group, &tombstone(&group)).await;
    let creator = token();
    let read = tombstone(&group);
    let stamp = applied(world.store.create(&group, &creator, Some(&read), &structural("{}", 34)).await);
    applied(world.store.delete(&group, &creator, Some(&stamp), None).await);
    assert_eq!(world.kind(&world.keys.metadata(&group)), "none");
    assert_eq!(world.kind(&world.keys.tombstone(&group)), "none");
    assert!(is_free(&*world.store, &group).await);
}

pub(crate) async fn delete_needs_the_mutex(world: &World) {
    let group = group("orders");
    let stamp = created(&*world.store, &group).await;
    conflicts(&world.store.delete(&group, &token(), None, None).await, Conflict::MutexLost);
    let (holder, _) = enter(&*world.store, &group, None).await;
    conflicts(&world.store.delete(&group, &token(), Some(&stamp), None).await, Conflict::MutexLost);
    assert!(world.store.renew(&group, &holder).await.unwrap());
    assert_eq!(world.kind(&world.keys.metadata(&group)), "hash");
}
