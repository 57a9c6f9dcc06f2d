//! Enter and commit: stamps, fields, conflicts.

use rsc_core::Stamp;
use rsc_store::{Conflict, Entered, Outcome};

use crate::support::hands::World;
use crate::support::{applied, created, enter, group, is_free, lease_only, structural};

#[track_caller]
fn loaded(entered: Entered) -> rsc_core::RawFields {
    match entered {
        Entered::Loaded { fields, .. } => fields,
        other => panic!("not loaded: {other:?}"),
    }
}

#[track_caller]
fn conflicts(outcome: &Outcome, expected: Conflict) {
    match outcome {
        Outcome::Conflict(conflict) if *conflict == expected => {}
        other => panic!("expected {expected:?}, got {other:?}"),
    }
}

pub(crate) async fn unchanged_only_if_all_three_match(world: &World) {
    let group = group("orders");
    let stamp = created(&*world.store, &group).await;
    let others = [
        Stamp { revision: stamp.revision + 1, ..stamp.clone() },
        Stamp { live_revision: stamp.live_revision + 1, ..stamp.clone() },
        Stamp { write_id: "another".into(), ..stamp.clone() },
    ];
    for known in others.iter().map(Some).chain([None]) {
        let (token, entered) = enter(&*world.store, &group, known).await;
        assert_eq!(loaded(entered)["revision"], b"1", "{known:?}");
        world.store.release(&group, &token).await.unwrap();
    }
    let before = world.store.ping().await.unwrap();
    let (_, entered) = enter(&*world.store, &group, Some(&stamp)).await;
    match entered {
        Entered::Unchanged { now, has_ttl: false } => assert!(now >= before, "{now} {before}"),
        other => panic!("{other:?}"),
    }
}

pub(crate) async fn absent_live_revision_and_write_id_count(world: &World) {
    // As another implementation of the protocol writes it.
    let group = group("orders");
    let key = world.keys.metadata(&group);
    world.put_hash(&key, &[("aggregate", b"{}"), ("revision", b"7"), ("schemaVersion", b"1")]);
    let stamp = Stamp { revision: 7, live_revision: 0, write_id: String::new() };
    let (token, entered) = enter(&*world.store, &group, Some(&stamp)).await;
    assert!(matches!(entered, Entered::Unchanged { .. }), "{entered:?}");
    let after = applied(world.store.commit(&group, &token, &stamp, &lease_only(&[("m", "{}")])).await);
    assert_eq!((after.revision, after.live_revision), (7, 1));
    assert_eq!(world.field(&key, "revision").as_deref(), Some("7"));
    assert_eq!(world.field(&key, "layoutVersion").as_deref(), Some("2"));
}

pub(crate) async fn the_same_revision_with_another_write_id_does_not_pass(world: &World) {
    // counterexample same-number-other-history
    let group = group("orders");
    let remembered = created(&*world.store, &group).await;
    let key = world.keys.metadata(&group);
    world.put_field(&key, "writeId", Some("of-another-history"));
    let (token, entered) = enter(&*world.store, &group, Some(&remembered)).await;
    assert_eq!(loaded(entered)["writeId"], b"of-another-history");
    let outcome = world.store.commit(&group, &token, &remembered, &structural("{\"x\":1}", 2)).await;
    conflicts(&outcome, Conflict::Moved);
    assert_eq!(world.field(&key, "revision").as_deref(), Some("1"));
    assert!(is_free(&*world.store, &group).await);
    for (name, stale) in [("revision", "9"), ("liveRevision", "9")] {
        let (token, entered) = enter(&*world.store, &group, None).await;
        loaded(entered);
        let was = world.field(&key, name);
        world.put_field(&key, name, Some(stale));
        let now = Stamp { write_id: "of-another-history".into(), ..remembered.clone() };
        let outcome = world.store.commit(&group, &token, &now, &lease_only(&[("m", "{}")])).await;
        conflicts(&outcome, Conflict::Moved);
        assert_eq!(world.field(&key, "live:m"), None);
        world.put_field(&key, name, was.as_deref());
    }
}

pub(crate) async fn structural_writes_every_field_and_frees_the_mutex(world: &World) {
    let group = group("orders");
    let stamp = created(&*world.store, &group).await;
    let (token, _) = enter(&*world.store, &group, Some(&stamp)).await;
    let mut write = structural("{\"storeRevision\":2}", 2);
    write.live = vec![("m1".into(), "{\"a\":1}".into()), ("m2".into(), "{\"a\":2}".into())];
    let second = applied(world.store.commit(&group, &token, &stamp, &write).await);
    assert_eq!((second.revision, second.live_revision), (2, stamp.live_revision + 1));
    assert_ne!(second.write_id, stamp.write_id);
    assert!(!second.write_id.is_empty());
    let key = world.keys.metadata(&group);
    for (name, text) in [
        ("aggregate", "{\"storeRevision\":2}"),
        ("revision", "2"),
        ("schemaVersion", "1"),
        ("layoutVersion", "2"),
        ("updatedAt", "2023-11-14T22:13:20.000Z"),
        ("liveRevision", &second.live_revision.to_string()),
        ("writeId", &second.write_id),
        ("live:m1", "{\"a\":1}"),
        ("live:m2", "{\"a\":2}"),
    ] {
        assert_eq!(world.field(&key, name).as_deref(), Some(text), "{name}");
    }
    assert_eq!(world.hash(&key).len(), 9);
    assert_eq!(world.ttl_ms(&key), None);

    let (token, entered) = enter(&*world.store, &group, Some(&second)).await;
    assert!(matches!(entered, Entered::Unchanged { .. }), "{entered:?}");
    let mut write = structural("{\"storeRevision\":3}", 3);
    write.removed_live = vec!["m1".into(), "never-was".into()];
    applied(world.store.commit(&group, &token, &second, &write).await);
    assert_eq!(world.field(&key, "live:m1"), None);
    assert_eq!(world.field(&key, "live:m2").as_deref(), Some("{\"a\":2}"));
    assert!(is_free(&*world.store, &group).await);
}

pub(crate) async fn lease_only_leaves_aggregate_and_revision_alone(world: &World) {
    let group = group("orders");
    let stamp = created(&*world.store, &group).await;
    let key = world.keys.metadata(&group);
    let (token, _) = enter(&*world.store, &group, Some(&stamp)).await;
    let before = world.hash(&key);
    let after = applied(world.store.commit(&group, &token, &stamp, &lease_only(&[("m", "{\"l\":1}")])).await);
    assert_eq!((after.revision, after.live_revision), (stamp.revision, stamp.live_revision + 1));
    assert_ne!(after.write_id, stamp.write_id);
    let hash = world.hash(&key);
    for name in ["aggregate", "revision", "schemaVersion", "layoutVersion"] {
        assert_eq!(hash[name], before[name], "{name}");
    }
    assert_eq!(hash["liveRevision"], after.live_revision.to_string().as_bytes());
    assert_eq!(hash["writeId"], after.write_id.as_bytes());
    assert_eq!(hash["updatedAt"], b"2023-11-14T22:13:21.000Z");
    assert_eq!(hash["live:m"], b"{\"l\":1}");
    assert!(is_free(&*world.store, &group).await);
    // A structural commit afterwards does not take the live revision back.
    let (token, _) = enter(&*world.store, &group, Some(&after)).await;
    let third = applied(world.store.commit(&group, &token, &after, &structural("{}", 2)).await);
    assert_eq!(third.live_revision, after.live_revision + 1);
}

pub(crate) async fn a_lost_mutex_writes_nothing(world: &World) {
    let group = group("orders");
    let stamp = created(&*world.store, &group).await;
    let (first, _) = enter(&*world.store, &group, None).await;
    world.remove(&world.keys.mutex(&group));
    let write = structural("{\"lost\":1}", 2);
    conflicts(&world.store.commit(&group, &first, &stamp, &write).await, Conflict::MutexLost);
    let (second, _) = enter(&*world.store, &group, None).await;
    conflicts(&world.store.commit(&group, &first, &stamp, &write).await, Conflict::MutexLost);
    assert_eq!(world.field(&world.keys.metadata(&group), "revision").as_deref(), Some("1"));
    assert!(world.store.renew(&group, &second).await.unwrap());
}

pub(crate) async fn a_vanished_key_is_never_created_again(world: &World) {
    let group = group("orders");
    let stamp = created(&*world.store, &group).await;
    let key = world.keys.metadata(&group);
    for write in [structural("{}", 2), lease_only(&[("m", "{}")])] {
        let (token, _) = enter(&*world.store, &group, None).await;
        world.remove(&key);
        conflicts(&world.store.commit(&group, &token, &stamp, &write).await, Conflict::Missing);
        assert_eq!(world.kind(&key), "none");
        assert!(is_free(&*world.store, &group).await);
    }
    let (_, entered) = enter(&*world.store, &group, Some(&stamp)).await;
    assert!(matches!(entered, Entered::Missing { tombstone: None, .. }), "{entered:?}");
}

pub(crate) async fn a_key_of_another_type_is_never_touched(world: &World) {
    let group = group("orders");
    let stamp = created(&*world.store, &group).await;
    let key = world.keys.metadata(&group);
    let (token, _) = enter(&*world.store, &group, None).await;
    world.put_text(&key, "somebody else's");
    let outcome = world.store.commit(&group, &token, &stamp, &structural("{}", 2)).await;
    conflicts(&outcome, Conflict::WrongType);
    let (token, entered) = enter(&*world.store, &group, Some(&stamp)).await;
    assert!(matches!(&entered, Entered::WrongType { found, .. } if found == "string"), "{entered:?}");
    world.store.release(&group, &token).await.unwrap();
    let created = world.store.create(&group, &token, None, &structural("{}", 1)).await;
    conflicts(&created, Conflict::WrongType);
    assert_eq!(world.kind(&key), "string");
    assert!(is_free(&*world.store, &group).await);
}

pub(crate) async fn a_ttl_is_reported_and_removed(world: &World) {
    let group = group("orders");
    let mut stamp = created(&*world.store, &group).await;
    let key = world.keys.metadata(&group);
    for write in [structural("{}", 2), lease_only(&[("m", "{}")])] {
        world.expire_in(&key, std::time::Duration::from_secs(600));
        let (token, entered) = enter(&*world.store, &group, Some(&stamp)).await;
        assert!(matches!(entered, Entered::Unchanged { has_ttl: true, .. }), "{entered:?}");
        world.store.release(&group, &token).await.unwrap();
        let (token, entered) = enter(&*world.store, &group, None).await;
        assert!(matches!(entered, Entered::Loaded { has_ttl: true, .. }), "{entered:?}");
        stamp = applied(world.store.commit(&group, &token, &stamp, &write).await);
        assert_eq!(world.ttl_ms(&key), None);
    }
    let (_, entered) = enter(&*world.store, &group, None).await;
    assert!(matches!(entered, Entered::Loaded { has_ttl: false, .. }), "{entered:?}");
}

pub(crate) async fn ten_thousand_live_fields_in_one_commit(world: &World) {
    let group = group("orders");
    let stamp = created(&*world.store, &group).await;
    let (token, _) = enter(&*world.store, &group, None).await;
    let mut write = structural("{}", 2);
    write.live =
        (0..10_000).map(|number| (format!("member-{number}"), format!("{{\"n\":{number}}}"))).collect();
    let second = applied(world.store.commit(&group, &token, &stamp, &write).await);
    let (token, entered) = enter(&*world.store, &group, None).await;
    let fields = loaded(entered);
    assert_eq!(fields.len(), 10_007);
    assert_eq!(fields["live:member-9999"], b"{\"n\":9999}");

    let mut write = structural("{}", 3);
    write.removed_live = (0..10_000).map(|number| format!("member-{number}")).collect();
    write.live = vec![("stays".into(), "{}".into())];
    applied(world.store.commit(&group, &token, &second, &write).await);
    let (_, entered) = enter(&*world.store, &group, None).await;
    assert_eq!(
        loaded(entered).keys().filter(|name| name.starts_with("live:")).collect::<Vec<_>>(),
        ["live:stays"]
    );
}

pub(crate) async fn numbers_keep_every_digit(world: &World) {
    let group = group("orders");
    let key = world.keys.metadata(&group);
    let big = (1_u64 << 53) + 1;
    world.put_hash(
        &key,
        &[
            ("aggregate", b"{}"),
            ("revision", big.to_string().as_bytes()),
            ("liveRevision", b"9007199254740993"),
        ],
    );
    let stamp = Stamp { revision: big, live_revision: big, write_id: String::new() };
    // One less is the same number to a float.
    for near in
        [Stamp { revision: big - 1, ..stamp.clone() }, Stamp { live_revision: big - 1, ..stamp.clone() }]
    {
        let (token, entered) = enter(&*world.store, &group, Some(&near)).await;
        loaded(entered);
        conflicts(&world.store.commit(&group, &token, &near, &structural("{}", big)).await, Conflict::Moved);
    }
    let (token, entered) = enter(&*world.store, &group, Some(&stamp)).await;
    assert!(matches!(entered, Entered::Unchanged { .. }), "{entered:?}");
    applied(world.store.commit(&group, &token, &stamp, &structural("{}", big + 1)).await);
    assert_eq!(world.field(&key, "revision").as_deref(), Some("9007199254740994"));
    assert_eq!(world.field(&key, "liveRevision").as_deref(), Some("9007199254740994"));
}

pub(crate) async fn bytes_survive(world: &World) {
    let group = group("orders");
    let bytes: Vec<u8> = (0..=255).collect();
    world.put_hash(&world.keys.metadata(&group), &[("aggregate", &bytes), ("revision", b"1")]);
    let (_, entered) = enter(&*world.store, &group, None).await;
    assert_eq!(loaded(entered)["aggregate"], bytes);
}

pub(crate) async fn history_grows_and_is_capped(world: &World) {
    let group = group("orders");
    let mut stamp = created(&*world.store, &group).await;
    let key = world.keys.history(&group);
    assert_eq!(world.kind(&key), "none");
    for number in 0..1300 {
        let (token, _) = enter(&*world.store, &group, Some(&stamp)).await;
        let mut write = lease_only(&[]);
        write.history = Some(format!("{{\"n\":{number}}}"));
        stamp = applied(world.store.commit(&group, &token, &stamp, &write).await);
    }
    let entries = world.history(&key);
    assert!((1000..1200).contains(&entries.len()), "{}", entries.len());
    assert_eq!(entries.last().map(String::as_str), Some("{\"n\":1299}"));
}

pub(crate) async fn a_history_of_another_type_fails_nothing(world: &World) {
    let group = group("orders");
    let stamp = created(&*world.store, &group).await;
    let key = world.keys.history(&group);
    world.put_text(&key, "no stream");
    let (token, _) = enter(&*world.store, &group, None).await;
    let mut write = structural("{}", 2);
    write.history = Some("{}".into());
    applied(world.store.commit(&group, &token, &stamp, &write).await);
    assert_eq!(world.field(&world.keys.metadata(&group), "revision").as_deref(), Some("2"));
    assert_eq!(world.kind(&key), "string");
    assert!(is_free(&*world.store, &group).await);
}
