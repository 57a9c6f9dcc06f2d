//! The scripts on the server: two calls per critical section, each sent once, and a server that forgets
//! them costs nobody a request.

// Clippy's own exception reaches test functions only, not the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rsc_core::{ShardSet, Stamp, Tombstone};
use rsc_protocol::GroupKey;
use rsc_store::{
    Entered, GroupStore, ProvisionError, RedisMode, RedisSettings, RedisStore, ShardDeletion, ShardProof,
    StoreError, StreamReads,
};
use support::server::RedisServer;
use support::stores::{settings, store};
use support::{applied, created, enter, eventually, group, lease_only, structural, token};

#[tokio::test]
async fn a_critical_section_is_two_script_calls() {
    let server = RedisServer::start();
    let store = store(server.url());
    let group = group("orders");
    let mut stamp = created(&store, &group).await;
    for write in [structural("{}", 2), lease_only(&[("m", "{}")])] {
        server.ok(&["CONFIG", "RESETSTAT"]);
        let (token, _) = enter(&store, &group, Some(&stamp)).await;
        stamp = applied(store.commit(&group, &token, &stamp, &write).await);
        assert_eq!(server.calls("evalsha"), 2);
        for other in ["eval", "script|load", "ping", "select", "client|setname", "multi", "get|x"] {
            assert_eq!(server.calls(other), 0, "{other}");
        }
    }
}

/// Bytes that the server has received from its clients since it started.
fn received(server: &RedisServer) -> u64 {
    let stats: String = server.run(&["INFO", "stats"]).unwrap();
    let bytes = stats.lines().find_map(|line| line.strip_prefix("total_net_input_bytes:")).unwrap();
    bytes.parse().unwrap()
}

#[tokio::test]
async fn a_big_aggregate_is_sent_once_also_by_the_first_commit_after_a_restart() {
    let mut server = RedisServer::start();
    let store = store(server.url());
    let group = group("orders");
    let big = "x".repeat(4_000_000);
    for _ in 0..2 {
        store.ping().await.ok();
        let before = received(&server);
        let creator = token();
        let stamp = applied(store.create(&group, &creator, None, &structural("{}", 1)).await);
        applied(store.commit(&group, &creator, &stamp, &structural(&big, 2)).await);
        let sent = received(&server) - before;
        assert!((4_000_000..4_200_000).contains(&sent), "{sent}");
        server.kill();
        server.restart();
    }
}

#[tokio::test]
async fn a_forgotten_script_costs_nobody_a_request() {
    let server = RedisServer::start();
    let store = store(server.url());
    let group = group("orders");
    let flush = || server.ok(&["SCRIPT", "FLUSH"]);
    flush();
    let creator = token();
    let stamp = applied(store.create(&group, &creator, None, &structural("{}", 1)).await);
    flush();
    assert!(store.renew(&group, &creator).await.unwrap());
    flush();
    store.release(&group, &creator).await.unwrap();
    flush();
    store.read(&group).await.unwrap();
    flush();
    let (holder, _) = enter(&store, &group, Some(&stamp)).await;
    flush();
    let stamp = applied(store.commit(&group, &holder, &stamp, &structural("{}", 2)).await);
    let (holder, _) = enter(&store, &group, Some(&stamp)).await;
    flush();
    applied(store.delete(&group, &holder, Some(&stamp), None).await);
    flush();
    assert_eq!(store.lock_stream("orders", &holder).await.unwrap(), None);
    flush();
    assert!(store.renew_stream("orders", &holder).await.unwrap());
    flush();
    store.unlock_stream("orders", &holder).await.unwrap();
    flush();
    store.prove_empty("orders", &ShardSet::from([0]), &[]).await.unwrap();
    flush();
    assert_eq!(
        store
            .delete_shard("orders", 0, &[], rsc_protocol::Timestamp::from_millis(i64::MAX / 2))
            .await
            .unwrap(),
        ShardDeletion::Absent
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_flushed_under_load() {
    let server = RedisServer::start();
    let store = Arc::new(store(server.url()));
    let done = Arc::new(AtomicBool::new(false));
    let mut flusher = server.connection();
    let flushing = {
        let done = Arc::clone(&done);
        std::thread::spawn(move || {
            let mut flushes = 0;
            while !done.load(Ordering::SeqCst) {
                let () = redis::cmd("SCRIPT").arg("FLUSH").query(&mut flusher).unwrap();
                flushes += 1;
            }
            flushes
        })
    };
    let workers: Vec<_> = (0..8)
        .map(|number| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                let group = group(&format!("orders-{number}"));
                let mut stamp = created(&*store, &group).await;
                for revision in 2..=150 {
                    let (token, entered) = enter(&*store, &group, Some(&stamp)).await;
                    assert!(matches!(entered, Entered::Unchanged { .. }), "{entered:?}");
                    stamp = applied(store.commit(&group, &token, &stamp, &structural("{}", revision)).await);
                }
                stamp
            })
        })
        .collect();
    for worker in workers {
        let stamp: Stamp = worker.await.unwrap();
        assert_eq!((stamp.revision, stamp.live_revision), (150, 150));
    }
    done.store(true, Ordering::SeqCst);
    assert!(flushing.join().unwrap() > 10);
    assert!(server.calls("eval") > 0, "no script was ever forgotten");
}

/// A cluster's node refuses a script whose keys lie in several slots, or that reaches for another slot.
#[tokio::test]
async fn the_keys_of_a_script_share_one_slot() {
    let server = RedisServer::start_with(&["--cluster-enabled", "yes"]);
    let slots: Vec<String> = (0..16384).map(|slot| slot.to_string()).collect();
    let words: Vec<&str> =
        ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str)).collect();
    server.ok(&words);
    eventually("the node serves all slots", || async {
        server.run::<String>(&["CLUSTER", "INFO"]).unwrap().contains("cluster_state:ok")
    })
    .await;
    let settings = RedisSettings { mode: RedisMode::Cluster, ..settings(server.url()) };
    let store = RedisStore::new(&settings).unwrap();
    for (stream_prefix, consumer_group) in [("orders", "billing"), ("a:b", "c"), ("주문", "🙂%")] {
        let group = GroupKey::new(stream_prefix, consumer_group).unwrap();
        let left = Tombstone::default();
        let mut write = structural("{}", 1);
        write.history = Some("{}".into());
        let creator = token();
        let stamp = applied(store.create(&group, &creator, None, &write).await);
        let stamp = applied(store.commit(&group, &creator, &stamp, &write).await);
        let (holder, _) = enter(&store, &group, None).await;
        store.read(&group).await.unwrap();
        applied(store.delete(&group, &holder, Some(&stamp), Some(&left)).await);
        let (holder, entered) = enter(&store, &group, None).await;
        assert!(matches!(entered, Entered::Missing { tombstone: Some(_), .. }), "{entered:?}");
        applied(store.create(&group, &holder, Some(&left), &write).await);
        assert!(store.renew(&group, &holder).await.unwrap());
        store.release(&group, &holder).await.unwrap();
        store.index_add(&group).await.unwrap();
        assert_eq!(store.lock_stream(stream_prefix, &holder).await.unwrap(), None);
        assert!(store.renew_stream(stream_prefix, &holder).await.unwrap());
        store.unlock_stream(stream_prefix, &holder).await.unwrap();
        let shards = ShardSet::from(0..5);
        store.provision(stream_prefix, consumer_group, &shards).await.unwrap();
        store.shard_views(stream_prefix, consumer_group, &shards, &shards).await.unwrap();
        let coordinated = [consumer_group.to_owned()];
        let proofs = store.prove_empty(stream_prefix, &shards, &coordinated).await.unwrap();
        assert!(proofs.values().all(|proof| matches!(proof, ShardProof::Empty { key_exists: true, .. })));
        for shard in shards.iter() {
            let deletion = store
                .delete_shard(
                    stream_prefix,
                    shard,
                    &coordinated,
                    rsc_protocol::Timestamp::from_millis(i64::MAX / 2),
                )
                .await
                .unwrap();
            assert_eq!(deletion, ShardDeletion::Deleted);
        }
    }
}

#[tokio::test]
async fn a_shard_key_of_another_type_is_named() {
    let server = RedisServer::start();
    let store = store(server.url());
    server.ok(&["RPUSH", "orders:301", "x"]);
    let error = store.provision("orders", "billing", &ShardSet::from(0..600)).await.unwrap_err();
    assert_eq!(error, ProvisionError::WrongType { key: "orders:301".into(), found: "list".into() });
    assert!(error.to_string().contains("orders:301"), "{error}");
    server.ok(&["DEL", "orders:301"]);
    store.provision("orders", "billing", &ShardSet::from(0..600)).await.unwrap();
    let length: u64 = server.run(&["DBSIZE"]).unwrap();
    assert_eq!(length, 600);
}

#[tokio::test]
async fn provisioning_begins_at_the_first_record_and_keeps_what_was_read() {
    let server = RedisServer::start();
    let store = store(server.url());
    server.ok(&["XADD", "orders:0", "1-1", "a", "b"]);
    store.provision("orders", "billing", &ShardSet::from(0..1)).await.unwrap();
    let read = ["XREADGROUP", "GROUP", "billing", "me", "STREAMS", "orders:0", ">"];
    let first: redis::Value = server.run(&read).unwrap();
    assert!(format!("{first:?}").contains("1-1"), "{first:?}");
    store.provision("orders", "billing", &ShardSet::from(0..1)).await.unwrap();
    let again: redis::Value = server.run(&read).unwrap();
    assert_eq!(again, redis::Value::Nil);
}

#[tokio::test]
async fn provisioning_that_is_refused_or_cannot_be_sent() {
    let mut server = RedisServer::start();
    let store = store(server.url());
    store.ping().await.unwrap();
    server.ok(&["ACL", "SETUSER", "default", "-xgroup"]);
    let error = store.provision("orders", "billing", &ShardSet::from(0..2)).await.unwrap_err();
    let ProvisionError::Store(StoreError::Refused(text)) = &error else { panic!("{error:?}") };
    assert!(text.starts_with("NOPERM") && text.contains("orders:0"), "{text}");
    server.kill();
    let error = store.provision("orders", "billing", &ShardSet::from(0..2)).await.unwrap_err();
    assert!(matches!(error, ProvisionError::Store(StoreError::Unavailable(_))), "{error:?}");
}
