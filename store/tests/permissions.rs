//! A user who lacks a permission: every write is whole or did not happen, and the answer says which.

// Clippy's own exception reaches test functions only, not the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use rsc_core::{ShardSet, Tombstone};
use rsc_protocol::monitoring::RecordId;
use rsc_store::{
    GroupStore, Outcome, RecordRange, RedisStore, ShardDeletion, ShardView, StoreError, StreamReads,
};
use support::server::RedisServer;
use support::stores::{METADATA, MUTEX, TOMBSTONE, full_write, settings, store, stored};
use support::{applied, created, enter, group, token};

/// The commands that the scripts use, for taking each of them away.
const COMMANDS: [&str; 15] = [
    "get", "set", "del", "hset", "hdel", "hmget", "hgetall", "persist", "pexpire", "xadd", "type", "time",
    "pttl", "evalsha", "script",
];

/// A server whose default user lacks one command while `work` runs.
async fn lacking<T>(server: &RedisServer, command: &str, work: impl Future<Output = T>) -> T {
    server.ok(&["ACL", "SETUSER", "default", &format!("-{command}")]);
    let result = work.await;
    server.ok(&["ACL", "SETUSER", "default", &format!("+{command}")]);
    result
}

#[tokio::test]
async fn without_one_permission_a_commit_is_whole_or_nothing() {
    for command in COMMANDS {
        let server = RedisServer::start();
        let store = store(server.url());
        let group = group("orders");
        let stamp = created(&store, &group).await;
        let (holder, _) = enter(&store, &group, None).await;
        server.ok(&["PEXPIRE", METADATA, "600000"]);
        let before = stored(&server);
        let write = full_write(2);
        let commit = store.commit(&group, &holder, &stamp, &write);
        match lacking(&server, command, commit).await {
            Outcome::NotApplied(StoreError::Refused(text)) => {
                assert!(text.starts_with("NOPERM") || text.starts_with("ERR"), "{command}: {text}");
                assert_eq!(stored(&server), before, "{command}");
            }
            Outcome::Applied(after) => {
                let fields = stored(&server);
                assert_eq!(fields["writeId"], after.write_id.as_bytes(), "{command}");
                assert_eq!(fields.len(), 7 + 1500, "{command}");
            }
            other => panic!("{command}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn without_one_permission_a_creation_is_whole_or_nothing() {
    for command in COMMANDS {
        let server = RedisServer::start();
        let store = store(server.url());
        let group = group("orders");
        store.ping().await.unwrap();
        let write = full_write(1);
        let creator = token();
        let create = store.create(&group, &creator, None, &write);
        match lacking(&server, command, create).await {
            Outcome::NotApplied(StoreError::Refused(_)) => {
                assert!(!server.exists(METADATA), "{command}");
                assert!(!server.exists(MUTEX), "{command}");
            }
            Outcome::Applied(_) => {
                assert_eq!(stored(&server).len(), 7 + 1500, "{command}");
                assert!(server.exists(MUTEX), "{command}");
            }
            other => panic!("{command}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn without_one_permission_a_deletion_is_whole_or_nothing() {
    for command in COMMANDS {
        let server = RedisServer::start();
        let store = store(server.url());
        let group = group("orders");
        let stamp = created(&store, &group).await;
        let (holder, _) = enter(&store, &group, None).await;
        let left = Tombstone::default();
        let delete = store.delete(&group, &holder, Some(&stamp), Some(&left));
        match lacking(&server, command, delete).await {
            Outcome::NotApplied(StoreError::Refused(_)) => {
                assert!(server.exists(METADATA), "{command}");
                assert!(!server.exists(TOMBSTONE), "{command}");
            }
            Outcome::Applied(_) => {
                assert!(!server.exists(METADATA), "{command}");
                let ttl: i64 = server.run(&["PTTL", TOMBSTONE]).unwrap();
                assert!(ttl > 0, "{command}: {ttl}");
            }
            other => panic!("{command}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn without_one_permission_no_shard_is_proven_or_deleted() {
    let coordinated = ["billing".to_owned()];
    let shards = ShardSet::from([0]);
    for command in ["type", "xack", "xinfo", "xrange", "xpending", "unlink", "evalsha"] {
        let server = RedisServer::start();
        let store = store(server.url());
        store.provision("orders", "billing", &shards).await.unwrap();
        server.ok(&["XADD", "orders:0", "1-1", "a", "b"]);
        server.ok(&["XREADGROUP", "GROUP", "billing", "me", "STREAMS", "orders:0", ">"]);
        server.ok(&["XDEL", "orders:0", "1-1"]);
        if command != "unlink" {
            let proving = store.prove_empty("orders", &shards, &coordinated);
            let Err(StoreError::Refused(text)) = lacking(&server, command, proving).await else {
                panic!("{command}: proven");
            };
            assert!(text.contains("orders:0"), "{command}: {text}");
        }
        let deleting =
            store.delete_shard("orders", 0, &coordinated, rsc_protocol::Timestamp::from_millis(i64::MAX / 2));
        let Err(StoreError::Refused(text)) = lacking(&server, command, deleting).await else {
            panic!("{command}: deleted");
        };
        assert!(text.contains("orders:0"), "{command}: {text}");
        assert!(server.exists("orders:0"), "{command}");
        assert_eq!(
            store
                .delete_shard("orders", 0, &coordinated, rsc_protocol::Timestamp::from_millis(i64::MAX / 2))
                .await
                .unwrap(),
            ShardDeletion::Deleted
        );
    }
}

/// The commands that `docs/operations.md` lists in the row that begins with `on`, as ACL rules.
fn documented(on: &str) -> Vec<String> {
    let page = include_str!("../../docs/operations.md");
    let (_, table) = page.split_once("What the Redis user must be allowed:").unwrap();
    let row = table.lines().find(|line| line.starts_with(&format!("| {on} |"))).unwrap();
    let commands = row.split('`').skip(1).step_by(2).filter(|word| !word.contains(' '));
    commands.map(|command| format!("+{}", command.replace("\\|", "|").to_lowercase())).collect()
}

#[tokio::test]
async fn what_is_documented_is_enough() {
    let server = RedisServer::start();
    let everywhere = documented("everything").join(" ");
    let selector = |keys: &str, on: &str| format!("(~{keys} {everywhere} {})", documented(on).join(" "));
    let own = selector("redis-stream:coord:*", "the coordinator's keys");
    let shards = selector("orders:*", "the shards");
    let rules: Vec<String> = documented("everything");
    let rules = rules.iter().map(String::as_str).chain([own.as_str(), &shards]);
    server.ok(&["ACL", "SETUSER", "rsc", "on", ">secret"].into_iter().chain(rules).collect::<Vec<_>>());
    let mut settings = settings(server.url());
    settings.username = Some("rsc".into());
    settings.password = Some("secret".into());
    let store = RedisStore::new(&settings).unwrap();

    let group = group("orders");
    let stamp = created(&store, &group).await;
    let (holder, _) = enter(&store, &group, Some(&stamp)).await;
    assert!(store.renew(&group, &holder).await.unwrap());
    let stamp = applied(store.commit(&group, &holder, &stamp, &full_write(2)).await);
    store.read(&group).await.unwrap();
    store.index_add(&group).await.unwrap();
    assert!(store.index_contains(&group).await.unwrap());
    store.index().await.unwrap();
    store.index_remove(&group).await.unwrap();
    let lock = token();
    store.lock_stream("orders", &lock).await.unwrap();
    assert!(store.renew_stream("orders", &lock).await.unwrap());
    store.unlock_stream("orders", &lock).await.unwrap();
    let shards = ShardSet::from([0]);
    store.provision("orders", "billing", &shards).await.unwrap();
    server.ok(&["XADD", "orders:0", "1-1", "a", "b"]);
    server.ok(&["XREADGROUP", "GROUP", "billing", "me", "STREAMS", "orders:0", ">"]);
    let views = store.shard_views("orders", "billing", &shards, &shards).await.unwrap();
    let ShardView::Stream(view) = &views[&0] else { panic!("{views:?}") };
    assert!(view.memory_bytes.is_some());
    assert!(store.pending_by_consumer("orders", "billing", &shards).await.unwrap()[&0].is_some());
    store.existing_streams("orders", 0..3).await.unwrap();
    for newest_first in [false, true] {
        let range = RecordRange { lowest: RecordId::MIN, highest: RecordId::MAX, newest_first, limit: 5 };
        assert_eq!(store.records("orders", 0, &range).await.unwrap().records.len(), 1);
    }
    assert_eq!(store.history(&group, None, 5).await.unwrap().entries.len(), 1);
    store.prove_empty("orders", &shards, &["billing".into()]).await.unwrap();
    server.ok(&["XDEL", "orders:0", "1-1"]);
    let deletion = store
        .delete_shard("orders", 0, &["billing".into()], rsc_protocol::Timestamp::from_millis(i64::MAX / 2))
        .await
        .unwrap();
    assert_eq!(deletion, ShardDeletion::Deleted);
    store.ping().await.unwrap();
    let (holder, _) = enter(&store, &group, Some(&stamp)).await;
    applied(store.delete(&group, &holder, Some(&stamp), Some(&Tombstone::default())).await);
    let (holder, _) = enter(&store, &group, None).await;
    store.release(&group, &holder).await.unwrap();
    // The log of refusals is empty: nothing was tried that is not documented.
    let refused: redis::Value = server.run(&["ACL", "LOG"]).unwrap();
    assert_eq!(refused, redis::Value::Array(Vec::new()));
}
