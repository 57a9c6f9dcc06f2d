//! A user who lacks a permission: every write is whole or did not happen, and the answer says which.

// Clippy's own exception reaches test functions only, not the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use rsc_core::{ShardSet, Tombstone};
use rsc_store::{GroupStore, Outcome, ShardDeletion, StoreError};
use support::server::RedisServer;
use support::stores::{METADATA, MUTEX, TOMBSTONE, full_write, store, stored};
use support::{created, enter, group, token};

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
        let deleting = store.delete_shard("orders", 0, &coordinated);
        let Err(StoreError::Refused(text)) = lacking(&server, command, deleting).await else {
            panic!("{command}: deleted");
        };
        assert!(text.contains("orders:0"), "{command}: {text}");
        assert!(server.exists("orders:0"), "{command}");
        assert_eq!(store.delete_shard("orders", 0, &coordinated).await.unwrap(), ShardDeletion::Deleted);
    }
}
