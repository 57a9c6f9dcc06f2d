//! A user who lacks a permission: every write is whole or did not happen, and the answer says which.

// Clippy's own exception reaches test functions only, not the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use rsc_core::Tombstone;
use rsc_store::{GroupStore, Outcome, StoreError};
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
