//! Proofs over long lists of pending entries, and deletion with the proof in the same breath (protocol 6,
//! *Finish*).

// Clippy's own exception reaches test functions only, not the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::Duration;

use rsc_core::ShardSet;
use rsc_store::{GroupStore, RedisStore, ShardDeletion, ShardProof, StoreError, WaitReason, Waiting};
use support::proxy::Proxy;
use support::server::RedisServer;
use support::stores::{impatient, store};

const KEY: &str = "orders:0";

/// Writes `ARGV[1]` records, delivers all to the groups that follow, deletes or acknowledges every second one.
const SCATTERED: &str = "
for id = 1, tonumber(ARGV[1]) do redis.call('XADD', KEYS[1], id .. '-0', 'f', 'v') end
for at = 2, #ARGV do
  redis.call('XREADGROUP', 'GROUP', ARGV[at], 'c', 'COUNT', ARGV[1], 'STREAMS', KEYS[1], '>')
  for id = 2, tonumber(ARGV[1]), 2 do redis.call('XACK', KEYS[1], ARGV[at], id .. '-0') end
end
for id = 1, tonumber(ARGV[1]), 2 do redis.call('XDEL', KEYS[1], id .. '-0') end";

/// Writes and delivers `ARGV[1]` records to `billing`, and trims all but the last `ARGV[2]`.
const RUN: &str = "
for id = 1, tonumber(ARGV[1]) do redis.call('XADD', KEYS[1], id .. '-0', 'f', 'v') end
redis.call('XREADGROUP', 'GROUP', 'billing', 'c', 'COUNT', ARGV[1], 'STREAMS', KEYS[1], '>')
redis.call('XTRIM', KEYS[1], 'MAXLEN', ARGV[2])";

async fn provisioned(server: &RedisServer, groups: &[&str]) -> RedisStore {
    let store = store(server.url());
    for group in groups {
        store.provision("orders", group, &ShardSet::from([0])).await.unwrap();
    }
    store
}

fn run(server: &RedisServer, script: &str, arguments: &[&str]) {
    server.ok(&[&["EVAL", script, "1", KEY], arguments].concat());
    server.ok(&["CONFIG", "RESETSTAT"]);
}

async fn proof(store: &RedisStore) -> ShardProof {
    store.prove_empty("orders", &ShardSet::from([0]), &billing()).await.unwrap().remove(&0).unwrap()
}

async fn deletion(store: &RedisStore) -> ShardDeletion {
    store
        .delete_shard("orders", 0, &billing(), rsc_protocol::Timestamp::from_millis(i64::MAX / 2))
        .await
        .unwrap()
}

fn billing() -> [String; 1] {
    ["billing".to_owned()]
}

#[track_caller]
fn only(waits: &[Waiting]) -> &Waiting {
    assert_eq!(waits.len(), 1, "{waits:?}");
    &waits[0]
}

#[tokio::test]
async fn a_long_run_of_ghosts_is_one_leap() {
    let server = RedisServer::start();
    let store = provisioned(&server, &["billing"]).await;
    run(&server, RUN, &["100000", "1"]);
    let ShardProof::NotEmpty { waits } = proof(&store).await else { panic!("proven") };
    let wait = only(&waits);
    assert_eq!((wait.reason, wait.pending, wait.ghosts), (WaitReason::Pending, 1, 99_999), "{wait:?}");
    assert_eq!(wait.oldest_id.as_deref(), Some("100000-0"));
    server.ok(&["XTRIM", KEY, "MAXLEN", "0"]);
    assert_eq!(proof(&store).await, ShardProof::Empty { key_exists: true, ghosts: 100_000 });
    assert_eq!(server.calls("evalsha"), 2);
    assert!(server.calls("xpending") < 10);
    assert_eq!(deletion(&store).await, ShardDeletion::Deleted);
}

#[tokio::test]
async fn scattered_ghosts_take_several_calls_and_are_never_deleted_unproven() {
    let server = RedisServer::start();
    let store = provisioned(&server, &["billing", "audit"]).await;
    run(&server, SCATTERED, &["24000", "billing", "audit"]);
    assert_eq!(proof(&store).await, ShardProof::Empty { key_exists: true, ghosts: 24_000 });
    let calls = server.calls("evalsha");
    assert!((12..=50).contains(&calls), "{calls}");
    let commands = server.calls("xrange") + server.calls("xpending");
    assert!((20_000..=2_050 * calls).contains(&commands), "{commands} in {calls}");
    let ShardDeletion::NotEmpty { waits } = deletion(&store).await else { panic!("deleted") };
    assert!(waits.iter().all(|wait| wait.reason == WaitReason::PendingUndecided), "{waits:?}");
    assert!(waits.iter().all(|wait| wait.pending == 12_000 && wait.pending_is_at_most), "{waits:?}");
    assert!(server.exists(KEY));
    // Something real behind all of them.
    server.ok(&["XADD", KEY, "50000-0", "f", "v"]);
    server.ok(&["XREADGROUP", "GROUP", "billing", "c", "STREAMS", KEY, ">"]);
    server.ok(&["XGROUP", "SETID", KEY, "audit", "$"]);
    let ShardProof::NotEmpty { waits } = proof(&store).await else { panic!("proven") };
    let real = waits.iter().find(|wait| wait.reason == WaitReason::Pending).unwrap();
    assert_eq!((real.pending, real.ghosts, real.oldest_id.as_deref()), (1, 12_000, Some("50000-0")));
    server.ok(&["XACK", KEY, "billing", "50000-0"]);
    server.ok(&["XTRIM", KEY, "MAXLEN", "0"]);
    assert_eq!(deletion(&store).await, ShardDeletion::Deleted);
    assert!(!server.exists(KEY));
    // A deletion, which has to prove at once, may look at more than one call of a proof.
    store.provision("orders", "billing", &ShardSet::from([0])).await.unwrap();
    run(&server, SCATTERED, &["8000", "billing"]);
    assert_eq!(deletion(&store).await, ShardDeletion::Deleted);
}

#[tokio::test]
async fn what_is_known_already_costs_little_more() {
    let server = RedisServer::start();
    let store = provisioned(&server, &["billing"]).await;
    run(&server, SCATTERED, &["24000", "billing"]);
    server.ok(&["XADD", KEY, "50000-0", "f", "v"]);
    let ShardProof::NotEmpty { waits } = proof(&store).await else { panic!("proven") };
    let wait = only(&waits);
    assert_eq!((wait.reason, wait.undelivered), (WaitReason::Undelivered, 1), "{wait:?}");
    assert!(wait.pending_is_at_most && wait.pending == 12_000, "{wait:?}");
    assert!(server.calls("xpending") < 1000, "{}", server.calls("xpending"));
}

#[tokio::test]
async fn what_keeps_the_shard_anyway_ends_the_question() {
    let server = RedisServer::start();
    let store = provisioned(&server, &["billing"]).await;
    run(&server, SCATTERED, &["24000", "billing"]);
    let coordinated = ["billing".to_owned(), "missing".to_owned()];
    let proofs = store.prove_empty("orders", &ShardSet::from([0]), &coordinated).await.unwrap();
    let ShardProof::NotEmpty { waits } = &proofs[&0] else { panic!("proven") };
    let reasons: Vec<_> = waits.iter().map(|wait| wait.reason).collect();
    assert_eq!(reasons, [WaitReason::PendingUndecided, WaitReason::GroupMissing]);
    assert_eq!(server.calls("evalsha"), 1);
    server.ok(&["XGROUP", "CREATE", KEY, "audit", "0"]);
    let ShardProof::NotEmpty { waits } = proof(&store).await else { panic!("proven") };
    let reasons: Vec<_> = waits.iter().map(|wait| wait.reason).collect();
    assert_eq!(reasons, [WaitReason::Undelivered, WaitReason::PendingUndecided]);
    assert_eq!(server.calls("evalsha"), 2);
}

#[tokio::test]
async fn what_waits_is_not_deleted() {
    let server = RedisServer::start();
    let store = provisioned(&server, &["billing", "audit"]).await;
    server.ok(&["XADD", KEY, "1-0", "f", "v"]);
    server.ok(&["XGROUP", "SETID", KEY, "billing", "$"]);
    let ShardDeletion::NotEmpty { waits } = deletion(&store).await else { panic!("deleted") };
    assert_eq!((only(&waits).consumer_group.as_str(), only(&waits).undelivered), ("audit", 1));
    server.ok(&["XREADGROUP", "GROUP", "audit", "c", "STREAMS", KEY, ">"]);
    let ShardDeletion::NotEmpty { waits } = deletion(&store).await else { panic!("deleted") };
    assert_eq!((only(&waits).reason, only(&waits).pending), (WaitReason::Pending, 1));
    server.ok(&["XACK", KEY, "audit", "1-0"]);
    server.ok(&["XGROUP", "DESTROY", KEY, "billing"]);
    let ShardDeletion::NotEmpty { waits } = deletion(&store).await else { panic!("deleted") };
    assert_eq!(only(&waits).reason, WaitReason::GroupMissing);
    assert!(server.exists(KEY));
    server.ok(&["XGROUP", "CREATE", KEY, "billing", "$"]);
    assert_eq!(deletion(&store).await, ShardDeletion::Deleted);
    assert_eq!(deletion(&store).await, ShardDeletion::Absent);
    server.ok(&["SET", KEY, "x"]);
    let ShardDeletion::NotEmpty { waits } = deletion(&store).await else { panic!("deleted") };
    assert_eq!(only(&waits).reason, WaitReason::WrongType);
    assert!(server.exists(KEY));
}

/// A producer whose route is stale writes with `NOMKSTREAM` while the shard is deleted: the record is either
/// refused or keeps the shard.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_record_is_refused_or_seen() {
    let server = RedisServer::start();
    let store = provisioned(&server, &[]).await;
    let (mut refused, mut seen) = (0, 0);
    let mut producer = server.connection();
    for round in 0..10_000_u64 {
        store.provision("orders", "billing", &ShardSet::from([0])).await.unwrap();
        let writing = tokio::task::spawn_blocking(move || {
            for _ in 0..round % 4 {
                let () = redis::cmd("PING").query(&mut producer).unwrap();
            }
            let mut command = redis::cmd("XADD");
            command.arg(KEY).arg("NOMKSTREAM").arg("*").arg("f").arg("v");
            (command.query::<Option<String>>(&mut producer).unwrap(), producer)
        });
        let deletion = deletion(&store).await;
        let (written, connection) = writing.await.unwrap();
        producer = connection;
        match (&deletion, &written) {
            (ShardDeletion::Deleted, None) => refused += 1,
            (ShardDeletion::NotEmpty { .. }, Some(_)) => {
                seen += 1;
                server.ok(&["DEL", KEY]);
            }
            lost => panic!("{lost:?}"),
        }
        if refused > 50 && seen > 50 {
            return;
        }
    }
    panic!("refused {refused}, seen {seen}");
}

#[tokio::test]
async fn a_deletion_whose_answer_is_lost_can_be_asked_for_again() {
    let server = RedisServer::start();
    let patient = provisioned(&server, &["billing"]).await;
    let proxy = Proxy::before(server.port()).await;
    let store = impatient(proxy.url(), Duration::from_secs(10));
    store.ping().await.unwrap();
    proxy.cut_at_next_answer();
    let error = store
        .delete_shard("orders", 0, &billing(), rsc_protocol::Timestamp::from_millis(i64::MAX / 2))
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
    assert_eq!(
        store
            .delete_shard("orders", 0, &billing(), rsc_protocol::Timestamp::from_millis(i64::MAX / 2))
            .await
            .unwrap(),
        ShardDeletion::Absent
    );
    assert_eq!(proof(&patient).await, ShardProof::Empty { key_exists: false, ghosts: 0 });
}

#[tokio::test]
async fn a_server_that_may_not_write_deletes_nothing() {
    let server = RedisServer::start();
    let store = provisioned(&server, &["billing"]).await;
    server.ok(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    let error = store
        .delete_shard("orders", 0, &billing(), rsc_protocol::Timestamp::from_millis(i64::MAX / 2))
        .await
        .unwrap_err();
    assert!(matches!(&error, StoreError::Refused(text) if text.contains("NOREPLICAS")), "{error:?}");
    let error = store.prove_empty("orders", &ShardSet::from([0]), &billing()).await.unwrap_err();
    assert!(matches!(&error, StoreError::Refused(text) if text.contains("NOREPLICAS")), "{error:?}");
    server.ok(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
    // Deleting needs no memory.
    server.ok(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(deletion(&store).await, ShardDeletion::Deleted);
}
