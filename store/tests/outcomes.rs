//! What an error says about a write: refused by the server means that nothing was written, whatever the
//! reason; lost on the way means that nobody knows.

// Clippy's own exception reaches test functions only, not the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::time::Duration;

use rsc_core::{Stamp, Tombstone};
use rsc_protocol::GroupKey;
use rsc_store::{Conflict, Entered, GroupStore, MutexToken, Outcome, RedisStore, StoreError};
use support::proxy::Proxy;
use support::server::{RedisServer, free_port};
use support::stores::{METADATA, MUTEX, TOMBSTONE, full_write, impatient, store, stored};
use support::{applied, created, enter, eventually, group, token};

#[track_caller]
fn refused_with(outcome: &Outcome, code: &str) {
    match outcome {
        Outcome::NotApplied(StoreError::Refused(text)) => assert!(text.contains(code), "{text}"),
        other => panic!("expected {code}, got {other:?}"),
    }
}

/// Enters, lets `break_it` change the server, commits, and checks that the answer was this refusal and that
/// nothing was written.
async fn commit_is_refused(code: &str, break_it: &[&str], mend_it: &[&str]) {
    let server = RedisServer::start();
    let store = store(server.url());
    let group = group("orders");
    let stamp = created(&store, &group).await;
    let (token, _) = enter(&store, &group, None).await;
    let before = stored(&server);
    server.ok(break_it);
    refused_with(&store.commit(&group, &token, &stamp, &full_write(2)).await, code);
    assert_eq!(stored(&server), before);
    server.ok(mend_it);
    applied(store.commit(&group, &token, &stamp, &full_write(2)).await);
}

#[tokio::test]
async fn no_memory_left() {
    commit_is_refused("OOM", &["CONFIG", "SET", "maxmemory", "1"], &["CONFIG", "SET", "maxmemory", "0"])
        .await;
}

#[tokio::test]
async fn a_replica() {
    commit_is_refused("READONLY", &["REPLICAOF", "127.0.0.1", "1"], &["REPLICAOF", "NO", "ONE"]).await;
}

#[tokio::test]
async fn a_master_that_became_a_replica_is_connected_to_anew() {
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port()).await;
    let store = store(proxy.url());
    created(&store, &group("orders")).await;
    server.ok(&["REPLICAOF", "127.0.0.1", "1"]);
    for connections in 1..4 {
        let error = store.enter(&group("orders"), &token(), None, None).await.unwrap_err();
        assert!(matches!(&error, StoreError::Refused(text) if text.contains("READONLY")), "{error:?}");
        assert_eq!(proxy.connections(), connections);
    }
}

#[tokio::test]
async fn too_few_replicas() {
    let setting = "min-replicas-to-write";
    commit_is_refused("NOREPLICAS", &["CONFIG", "SET", setting, "1"], &["CONFIG", "SET", setting, "0"]).await;
}

#[tokio::test]
async fn without_memory_a_group_is_entered_by_nobody_but_deleted_all_the_same() {
    let server = RedisServer::start();
    let store = store(server.url());
    let group = group("orders");
    let stamp = created(&store, &group).await;
    let (holder, _) = enter(&store, &group, None).await;
    server.ok(&["CONFIG", "SET", "maxmemory", "1"]);
    let error = store.enter(&support::group("parcels"), &token(), None, None).await.unwrap_err();
    assert!(matches!(&error, StoreError::Refused(text) if text.contains("OOM")), "{error:?}");
    let other = support::group("other");
    refused_with(&store.create(&other, &token(), None, &full_write(1)).await, "OOM");
    assert!(!server.exists("redis-stream:coord:{other:billing}:mutex"));
    applied(store.delete(&group, &holder, Some(&stamp), Some(&Tombstone::default())).await);
    assert!(!server.exists(METADATA));
    assert!(server.exists(TOMBSTONE));
}

#[tokio::test]
async fn a_busy_server() {
    let server = RedisServer::start();
    let store = store(server.url());
    let group = group("orders");
    let stamp = created(&store, &group).await;
    let (holder, _) = enter(&store, &group, None).await;
    server.ok(&["CONFIG", "SET", "lua-time-limit", "1"]);
    let mut other = server.connection();
    let endless = std::thread::spawn(move || {
        redis::cmd("EVAL").arg("while true do end").arg(0).query::<redis::Value>(&mut other)
    });
    eventually("the server is busy", || async {
        server.run::<redis::Value>(&["PING"]).is_err_and(|error| error.code() == Some("BUSY"))
    })
    .await;
    refused_with(&store.commit(&group, &holder, &stamp, &full_write(2)).await, "BUSY");
    server.ok(&["SCRIPT", "KILL"]);
    assert!(endless.join().unwrap().is_err());
    applied(store.commit(&group, &holder, &stamp, &full_write(2)).await);
}

/// Commits, creates and deletes against a server that is not there.
async fn every_write(
    store: &RedisStore,
    group: &GroupKey,
    token: &MutexToken,
    stamp: &Stamp,
) -> [Outcome; 3] {
    [
        store.commit(group, token, stamp, &full_write(2)).await,
        store.create(group, token, None, &full_write(1)).await,
        store.delete(group, token, Some(stamp), None).await,
    ]
}

#[tokio::test]
async fn a_server_that_is_not_there_has_applied_nothing() {
    let store = store(format!("redis://127.0.0.1:{}", free_port()));
    for outcome in every_write(&store, &group("orders"), &token(), &Stamp::default()).await {
        match outcome {
            Outcome::NotApplied(StoreError::Unavailable(text)) => {
                assert!(text.contains("127.0.0.1"), "{text}")
            }
            other => panic!("{other:?}"),
        }
    }
    let error = store.ping().await.unwrap_err();
    assert!(matches!(&error, StoreError::Unavailable(text) if text.contains("refused")), "{error}");
}

#[tokio::test]
async fn a_server_killed_between_enter_and_commit() {
    let mut server = RedisServer::start();
    let store = store(server.url());
    let group = group("orders");
    let stamp = created(&store, &group).await;
    let (holder, _) = enter(&store, &group, None).await;
    server.kill();
    // Whether the loss of the connection is seen before or after the request was handed over, is chance;
    // that nothing is claimed to be written, is not.
    let first = store.commit(&group, &holder, &stamp, &full_write(2)).await;
    assert!(
        matches!(first, Outcome::Unknown(_) | Outcome::NotApplied(StoreError::Unavailable(_))),
        "{first:?}"
    );
    for outcome in every_write(&store, &group, &holder, &stamp).await {
        assert!(matches!(outcome, Outcome::NotApplied(StoreError::Unavailable(_))), "{outcome:?}");
    }
}

/// The end of a connection arrives while nobody asks anything; the next write goes over a new one and is
/// applied. A slow machine may not see it in time, but not always.
#[tokio::test]
async fn a_connection_seen_to_end_is_not_used_for_a_write() {
    let server = RedisServer::start();
    let store = store(server.url());
    let group = group("orders");
    let stamp = created(&store, &group).await;
    for _ in 0..30 {
        let (holder, _) = enter(&store, &group, None).await;
        server.ok(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        eventually("the server has forgotten the connection", || async {
            let clients: String = server.run(&["INFO", "clients"]).unwrap();
            clients.contains("connected_clients:1\r\n")
        })
        .await;
        tokio::time::sleep(Duration::from_millis(10)).await;
        match store.commit(&group, &holder, &stamp, &full_write(2)).await {
            Outcome::Applied(_) => return,
            Outcome::Unknown(_) => store.release(&group, &holder).await.unwrap(),
            other => panic!("{other:?}"),
        }
    }
    panic!("every write was handed to a dead connection");
}

#[tokio::test]
async fn a_server_that_stops_during_a_commit() {
    let server = RedisServer::start();
    let timeout = Duration::from_millis(1500);
    let store = impatient(server.url(), timeout);
    let group = group("orders");
    let stamp = eventually_created(&store, &group).await;
    let (holder, _) = enter(&store, &group, None).await;
    server.stop();
    let started = std::time::Instant::now();
    let outcome = store.commit(&group, &holder, &stamp, &full_write(2)).await;
    let took = started.elapsed();
    assert!(matches!(outcome, Outcome::Unknown(StoreError::Unavailable(_))), "{outcome:?}");
    assert!(took >= timeout && took < timeout * 5, "{took:?}");
    // Still stopped: no connection can be made, so nothing is sent any more.
    let outcome = store.commit(&group, &holder, &stamp, &full_write(2)).await;
    assert!(matches!(outcome, Outcome::NotApplied(StoreError::Unavailable(_))), "{outcome:?}");
    server.resume();
    eventually("the store works again", || async { store.ping().await.is_ok() }).await;
    // The delayed commit may have been carried out or not; the next turn takes its token over and sees.
    let fresh = token();
    let mut entered = store.enter(&group, &fresh, Some(&holder), Some(&stamp)).await;
    while let Err(error) = entered {
        assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
        entered = store.enter(&group, &fresh, Some(&holder), Some(&stamp)).await;
    }
    let revision = match entered.unwrap() {
        Entered::Unchanged { .. } => 1,
        Entered::Loaded { fields, .. } => {
            assert_eq!(fields["aggregate"], b"{\"full\":1}");
            2
        }
        other => panic!("{other:?}"),
    };
    // Whichever it was, the earlier token writes nothing now.
    let late = store.commit(&group, &holder, &stamp, &full_write(2)).await;
    assert!(matches!(late, Outcome::Conflict(Conflict::MutexLost)), "{late:?} at {revision}");
}

/// Creates a group with a store whose timeout is short, on a machine that may be slow.
async fn eventually_created(store: &RedisStore, group: &GroupKey) -> Stamp {
    eventually("the server answers in time", || async { store.ping().await.is_ok() }).await;
    created(store, group).await
}

#[tokio::test]
async fn an_answer_lost_on_the_way_of_a_commit_that_happened() {
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port()).await;
    let store = impatient(proxy.url(), Duration::from_secs(2));
    let group = group("orders");
    let stamp = created(&store, &group).await;
    let (holder, _) = enter(&store, &group, None).await;
    proxy.swallow_answers(true);
    let outcome = store.commit(&group, &holder, &stamp, &full_write(2)).await;
    assert!(matches!(outcome, Outcome::Unknown(StoreError::Unavailable(_))), "{outcome:?}");
    assert_eq!(stored(&server)["revision"], b"2");
    assert!(!server.exists(MUTEX));
    proxy.swallow_answers(false);
    let (_, entered) = enter(&store, &group, Some(&stamp)).await;
    assert!(matches!(entered, Entered::Loaded { .. }), "{entered:?}");
}

#[tokio::test]
async fn a_connection_cut_before_the_answer_of_each_write() {
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port()).await;
    let store = store(proxy.url());
    let group = group("orders");

    let creator = token();
    store.ping().await.unwrap();
    proxy.cut_at_next_answer();
    let outcome = store.create(&group, &creator, None, &full_write(1)).await;
    assert!(matches!(outcome, Outcome::Unknown(StoreError::Unavailable(_))), "{outcome:?}");
    let write_id = String::from_utf8(stored(&server)["writeId"].clone()).unwrap();
    let stamp = Stamp { revision: 1, live_revision: 1, write_id };

    proxy.cut_at_next_answer();
    store.enter(&group, &creator, None, None).await.unwrap_err();
    // What was cut may have been the new connection's greeting: that failure stands for a moment.
    eventually("it enters again", || async { store.enter(&group, &creator, None, None).await.is_ok() }).await;
    proxy.cut_at_next_answer();
    let outcome = store.commit(&group, &creator, &stamp, &full_write(2)).await;
    assert!(matches!(outcome, Outcome::Unknown(StoreError::Unavailable(_))), "{outcome:?}");
    assert_eq!(stored(&server)["revision"], b"2");

    let (holder, _) = enter(&store, &group, None).await;
    proxy.cut_at_next_answer();
    let outcome = store.delete(&group, &holder, None, None).await;
    assert!(matches!(outcome, Outcome::Unknown(StoreError::Unavailable(_))), "{outcome:?}");
    assert!(!server.exists(METADATA));
}

#[tokio::test]
async fn something_that_is_no_redis() {
    // The proxy in front of itself would be one; a server that answers every line with a status is shorter.
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let _ = tokio::io::AsyncWriteExt::write_all(&mut client, b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    .await;
            });
        }
    });
    let store = store(format!("redis://127.0.0.1:{port}"));
    let error = store.ping().await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable(_) | StoreError::Unexpected(_)), "{error:?}");
    for outcome in every_write(&store, &group("orders"), &token(), &Stamp::default()).await {
        assert!(matches!(outcome, Outcome::NotApplied(_) | Outcome::Unknown(_)), "{outcome:?}");
    }
}
