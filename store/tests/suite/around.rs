//! Reads, the index, names, provisioning.

use rsc_core::{RawFields, ShardSet, Stamp};
use rsc_protocol::GroupKey;
use rsc_store::{Entered, Found};

use crate::support::hands::World;
use crate::support::{applied, created, enter, group, structural};

pub(crate) async fn read_takes_no_mutex(world: &World) {
    let group = group("orders");
    let found = world.store.read(&group).await.unwrap();
    assert!(matches!(found, Found::Missing { tombstone: None, .. }), "{found:?}");
    created(&*world.store, &group).await;
    let (holder, _) = enter(&*world.store, &group, None).await;
    let before = world.store.ping().await.unwrap();
    let Found::Record { now, fields, has_ttl } = world.store.read(&group).await.unwrap() else {
        panic!("no record");
    };
    assert!(now >= before && !has_ttl);
    assert_eq!(fields["aggregate"], b"{\"storeRevision\":1}");
    assert!(world.store.renew(&group, &holder).await.unwrap());
    world.store.release(&group, &holder).await.unwrap();
    world.store.read(&group).await.unwrap();
    assert_eq!(world.kind(&world.keys.mutex(&group)), "none");
    world.expire_in(&world.keys.metadata(&group), std::time::Duration::from_secs(600));
    let found = world.store.read(&group).await.unwrap();
    assert!(matches!(found, Found::Record { has_ttl: true, .. }), "{found:?}");
    world.put_text(&world.keys.metadata(&group), "no hash");
    let found = world.store.read(&group).await.unwrap();
    assert!(matches!(&found, Found::WrongType { found, .. } if found == "string"), "{found:?}");
}

pub(crate) async fn the_index_is_a_set(world: &World) {
    let (first, second) = (group("orders"), group("parcels"));
    assert_eq!(world.store.index().await.unwrap(), Vec::<String>::new());
    assert!(!world.store.index_contains(&first).await.unwrap());
    for group in [&first, &first, &second] {
        world.store.index_add(group).await.unwrap();
    }
    let mut members = world.store.index().await.unwrap();
    members.sort();
    assert_eq!(members, [world.keys.metadata(&first), world.keys.metadata(&second)]);
    assert!(world.store.index_contains(&first).await.unwrap());
    for _ in 0..2 {
        world.store.index_remove(&first).await.unwrap();
    }
    assert_eq!(world.store.index().await.unwrap(), [world.keys.metadata(&second)]);
}

pub(crate) async fn an_index_of_another_type_is_an_error(world: &World) {
    world.put_text(&world.keys.groups(), "no set");
    let error = world.store.index().await.unwrap_err();
    assert!(error.to_string().contains(&world.keys.groups()), "{error}");
    assert!(world.store.index_add(&group("orders")).await.is_err());
    assert!(world.store.index_contains(&group("orders")).await.is_err());
}

pub(crate) async fn names_of_every_kind(world: &World) {
    let names = ["주문", "🙂", "a:b", "a", "100%", "%7B", "a b", "\\\"'", "..", "\u{feff}x", "ﷺ"];
    for stream_prefix in names {
        for consumer_group in ["b:c", "c", "소비자🙂%"] {
            let group = GroupKey::new(stream_prefix, consumer_group).unwrap();
            let key = world.keys.metadata(&group);
            // `a:b`+`c` and `a`+`b:c` have one key (protocol 2); the loading side tells them apart.
            if world.kind(&key) == "none" {
                created(&*world.store, &group).await;
            }
            let (token, entered) = enter(&*world.store, &group, None).await;
            let Entered::Loaded { fields, .. } = entered else { panic!("{entered:?}") };
            let stamp = stamp_of(&fields);
            let mut write =
                structural(&format!("{{\"name\":\"{}\"}}", key.escape_default()), stamp.revision + 1);
            write.live = vec![(format!("{stream_prefix}{{}}:🙂"), "{\"live\":\"🙂\"}".into())];
            applied(world.store.commit(&group, &token, &stamp, &write).await);
            let name = format!("live:{stream_prefix}{{}}:🙂");
            assert_eq!(world.field(&key, &name).as_deref(), Some("{\"live\":\"🙂\"}"));
            world.store.index_add(&group).await.unwrap();
            assert!(world.store.index().await.unwrap().contains(&key));
            let lock = crate::support::token();
            assert_eq!(world.store.lock_stream(stream_prefix, &lock).await.unwrap(), None);
            world.store.unlock_stream(stream_prefix, &lock).await.unwrap();
            world.store.provision(stream_prefix, consumer_group, &ShardSet::from(0..2)).await.unwrap();
        }
    }
}

fn stamp_of(fields: &RawFields) -> Stamp {
    let text = |name: &str| String::from_utf8(fields[name].clone()).unwrap();
    Stamp {
        revision: text("revision").parse().unwrap(),
        live_revision: text("liveRevision").parse().unwrap(),
        write_id: text("writeId"),
    }
}

pub(crate) async fn provisioning_again_is_fine(world: &World) {
    world.store.provision("orders", "billing", &ShardSet::from(0..0)).await.unwrap();
    for shards in [0..3, 0..3, 2..5] {
        world.store.provision("orders", "billing", &ShardSet::from(shards)).await.unwrap();
    }
    world.store.provision("orders", "audit", &ShardSet::from(0..5)).await.unwrap();
    let Some(server) = world.server() else { return };
    for shard in 0..5 {
        let groups: redis::Value = server.run(&["XINFO", "GROUPS", &format!("orders:{shard}")]).unwrap();
        assert_eq!(groups.as_sequence().unwrap().len(), 2, "{groups:?}");
        let text = format!("{groups:?}");
        assert!(text.contains("billing") && text.contains("audit") && text.contains("0-0"), "{text}");
    }
    assert!(!server.exists("orders:5"));
    world.store.provision("orders", "billing", &ShardSet::from([7, 900])).await.unwrap();
    assert!(server.exists("orders:7") && server.exists("orders:900") && !server.exists("orders:8"));
}

pub(crate) async fn ping_tells_the_time(world: &World) {
    let first = world.store.ping().await.unwrap();
    // 2024-01-01
    assert!(first.as_millis() > 1_704_067_200_000);
    assert!(world.store.ping().await.unwrap() >= first);
    let expected = if world.server().is_some() { "redis" } else { "memory" };
    assert_eq!(world.store.kind(), expected);
}
