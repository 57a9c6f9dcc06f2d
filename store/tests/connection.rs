//! Connections: made late, made again, shared, and never confused about whose answer is whose.

// Clippy's own exception reaches test functions only, not the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use rsc_protocol::GroupKey;
use rsc_store::{Entered, Found, GroupStore, RedisSettings, RedisStore, StoreError};
use support::proxy::Proxy;
use support::server::{RedisServer, free_port};
use support::stores::{settings, store};
use support::{applied, created, enter, eventually, group, structural, token};

/// A failed attempt to connect stands for a moment.
async fn answers_again(store: &RedisStore) {
    eventually("the store answers again", || async { store.ping().await.is_ok() }).await;
}

#[tokio::test]
async fn a_server_that_refuses_does_not_get_a_connection_per_request() {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let store = store(format!("redis://127.0.0.1:{port}"));
    let attempts = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let counted = Arc::clone(&attempts);
    // Hangs up on everybody, until the test's process ends.
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            drop(connection);
        }
    });
    let started = std::time::Instant::now();
    for _ in 0..50 {
        store.ping().await.unwrap_err();
    }
    let most = 1 + started.elapsed().as_millis() / 50;
    let made = attempts.load(std::sync::atomic::Ordering::SeqCst);
    assert!(made >= 1 && u128::from(made) <= most, "{made} attempts, {most} at most");
}

#[tokio::test]
async fn a_store_is_made_while_redis_is_away_and_works_when_it_comes() {
    let mut server = RedisServer::start();
    server.kill();
    let store = store(server.url());
    let error = store.ping().await.unwrap_err();
    let port = server.port().to_string();
    assert!(matches!(&error, StoreError::Unavailable(text) if text.contains(&port)), "{error}");
    server.restart();
    answers_again(&store).await;
    created(&store, &group("orders")).await;
}

#[tokio::test]
async fn a_restart_of_redis_needs_no_help() {
    let mut server = RedisServer::start();
    let mut settings = settings(server.url());
    settings.connections = 3;
    let store = RedisStore::new(&settings).unwrap();
    let groups: Vec<GroupKey> = (0..12).map(|number| group(&format!("orders-{number}"))).collect();
    for _ in 0..3 {
        for group in &groups {
            created(&store, group).await;
        }
        server.kill();
        for group in &groups {
            store.read(group).await.unwrap_err();
        }
        server.restart();
        for group in &groups {
            eventually("the group's connection is made again", || async {
                matches!(store.read(group).await, Ok(Found::Missing { .. }))
            })
            .await;
        }
    }
}

#[tokio::test]
async fn a_password_that_comes_to_be_right_is_found_right() {
    let server = RedisServer::start();
    let mut settings = settings(server.url());
    settings.username = Some("rsc".into());
    settings.password = Some("geheim".into());
    let store = RedisStore::new(&settings).unwrap();
    for _ in 0..2 {
        let error = store.ping().await.unwrap_err();
        assert!(matches!(&error, StoreError::Misconfigured(text) if !text.contains("geheim")), "{error:?}");
    }
    server.ok(&["ACL", "SETUSER", "rsc", "on", ">geheim", "~*", "&*", "+@all"]);
    answers_again(&store).await;
    created(&store, &group("orders")).await;
    let names: String = server.run(&["CLIENT", "LIST"]).unwrap();
    assert!(names.contains("name=rsc:rsc ") && names.contains("user=rsc "), "{names}");
}

#[tokio::test]
async fn a_server_that_wants_a_password_says_so() {
    let server = RedisServer::start_with(&["--requirepass", "geheim"]);
    let error = store(server.url()).ping().await.unwrap_err();
    assert!(matches!(&error, StoreError::Misconfigured(text) if text.contains("NOAUTH")), "{error:?}");
    let with_password = format!("redis://:geheim@127.0.0.1:{}/5", server.port());
    let store = store(with_password);
    store.index_add(&group("orders")).await.unwrap();
    let mut connection = server.connection_with("geheim");
    let keyspace: String = redis::cmd("INFO").arg("keyspace").query(&mut connection).unwrap();
    assert!(keyspace.contains("db5:keys=1"), "{keyspace}");
}

#[tokio::test]
async fn a_full_server_is_asked_again() {
    let server = RedisServer::start();
    let store = store(server.url());
    let holder = server.connection();
    server.ok(&["CONFIG", "SET", "maxclients", "2"]);
    let second = server.connection();
    // Both places are taken, so nothing but the store's own failure can be seen.
    store.ping().await.unwrap_err();
    drop(second);
    eventually("a place is free", || async { store.ping().await.is_ok() }).await;
    drop(holder);
}

#[tokio::test]
async fn a_connection_that_stays_silent_is_replaced() {
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port()).await;
    let mut settings = settings(proxy.url());
    settings.command_timeout = Duration::from_secs(2);
    let store = RedisStore::new(&settings).unwrap();
    store.ping().await.unwrap();
    // From here on the first connection is a hole; later ones are not.
    proxy.silence_present_connections();
    let error = store.ping().await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
    store.ping().await.unwrap();
}

#[tokio::test]
async fn many_callers_share_one_attempt_to_connect() {
    // Accepts and never answers: every attempt takes the whole connect timeout.
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut settings = settings(format!("redis://127.0.0.1:{}", listener.local_addr().unwrap().port()));
    settings.connect_timeout = Duration::from_millis(400);
    let store = Arc::new(RedisStore::new(&settings).unwrap());
    let started = std::time::Instant::now();
    let callers: Vec<_> = (0..50)
        .map(|_| {
            let store = Arc::clone(&store);
            tokio::spawn(async move { store.ping().await.unwrap_err() })
        })
        .collect();
    for caller in callers {
        let error = caller.await.unwrap();
        assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
    }
    // One after the other would take 20 s.
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    listener.set_nonblocking(true).unwrap();
    let attempts = std::iter::from_fn(|| listener.accept().ok()).count();
    assert!(attempts <= 2, "{attempts}");
}

#[tokio::test]
async fn an_attempt_to_connect_outlives_an_impatient_caller() {
    let server = RedisServer::start();
    let proxy = Proxy::before(server.port()).await;
    proxy.swallow_answers(true);
    let mut settings = settings(proxy.url());
    settings.command_timeout = Duration::from_millis(100);
    let store = RedisStore::new(&settings).unwrap();
    let error = store.ping().await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
    // The attempt that the caller began is still waiting for its first answer; a next caller joins it.
    store.ping().await.unwrap_err();
    assert_eq!(proxy.connections(), 1);
}

/// Polls a call once.
async fn polled<F: Future + Unpin>(call: &mut F) -> Poll<F::Output> {
    std::future::poll_fn(|context| Poll::Ready(Pin::new(&mut *call).poll(context))).await
}

/// Every group's aggregate is its own name, so that a foreign answer shows.
async fn read_own(store: &RedisStore, group: &GroupKey) {
    let Found::Record { fields, .. } = store.read(group).await.unwrap() else { panic!("no record") };
    assert_eq!(fields["aggregate"], group.stream_prefix().as_bytes());
}

#[tokio::test]
async fn a_dropped_call_shifts_nobodys_answer() {
    let server = RedisServer::start();
    let store = Arc::new(store(server.url()));
    let groups: Vec<GroupKey> = (0..20).map(|number| group(&format!("orders-{number}"))).collect();
    for group in &groups {
        let creator = token();
        applied(store.create(group, &creator, None, &structural(group.stream_prefix(), 1)).await);
        store.release(group, &creator).await.unwrap();
    }
    for round in 0..300 {
        let dropped = &groups[round % groups.len()];
        {
            // Polled so often that some are dropped before they were sent and some when the answer is there.
            let mut call = Box::pin(store.read(dropped));
            for _ in 0..round % 7 {
                if polled(&mut call).await.is_ready() {
                    break;
                }
                tokio::task::yield_now().await;
            }
        }
        let others: Vec<_> = (1..4)
            .map(|step| {
                let (store, group) = (Arc::clone(&store), groups[(round + step) % groups.len()].clone());
                tokio::spawn(async move { read_own(&store, &group).await })
            })
            .collect();
        for other in others {
            other.await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_call_dropped_while_the_server_is_stopped_shifts_nobodys_answer() {
    let server = RedisServer::start();
    let store = Arc::new(store(server.url()));
    let groups: Vec<GroupKey> = (0..4).map(|number| group(&format!("orders-{number}"))).collect();
    for group in &groups {
        let creator = token();
        applied(store.create(group, &creator, None, &structural(group.stream_prefix(), 1)).await);
        store.release(group, &creator).await.unwrap();
    }
    for _ in 0..20 {
        server.stop();
        let mut calls: Vec<_> = groups.iter().map(|group| Box::pin(store.read(group))).collect();
        for call in &mut calls {
            assert!(polled(call).await.is_pending());
        }
        // All are on their way; two are dropped.
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        drop(calls.remove(2));
        drop(calls.remove(0));
        server.resume();
        for (call, group) in calls.into_iter().zip([&groups[1], &groups[3]]) {
            let Found::Record { fields, .. } = call.await.unwrap() else { panic!("no record") };
            assert_eq!(fields["aggregate"], group.stream_prefix().as_bytes());
        }
    }
}

#[tokio::test]
async fn two_instances_work_on_one_group_by_turns() {
    let server = RedisServer::start();
    let stores: Vec<_> = (0..4).map(|_| Arc::new(store(server.url()))).collect();
    let group = group("orders");
    created(&*stores[0], &group).await;
    let workers: Vec<_> = stores
        .iter()
        .map(|store| {
            let (store, group) = (Arc::clone(store), group.clone());
            tokio::spawn(async move {
                let mut written = 0;
                while written < 50 {
                    let token = token();
                    match store.enter(&group, &token, None, None).await.unwrap() {
                        Entered::Loaded { fields, .. } => {
                            let number = |name: &str| {
                                String::from_utf8(fields[name].clone()).unwrap().parse::<u64>().unwrap()
                            };
                            let stamp = rsc_core::Stamp {
                                revision: number("revision"),
                                live_revision: number("liveRevision"),
                                write_id: String::from_utf8(fields["writeId"].clone()).unwrap(),
                            };
                            let write = structural("{}", stamp.revision + 1);
                            applied(store.commit(&group, &token, &stamp, &write).await);
                            written += 1;
                        }
                        Entered::Busy { .. } => tokio::task::yield_now().await,
                        other => panic!("{other:?}"),
                    }
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
    let (_, entered) = enter(&*stores[0], &group, None).await;
    let Entered::Loaded { fields, .. } = entered else { panic!("{entered:?}") };
    assert_eq!(fields["revision"], b"201");
}

/// An HTTP worker that called first is stopped at shutdown; an actor's call goes on.
#[test]
fn a_call_under_way_outlives_the_runtime_that_made_the_connection() {
    let runtime =
        || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = RedisServer::start();
    let store = Arc::new(store(server.url()));
    let first = runtime();
    first.block_on(store.ping()).unwrap();
    let second = runtime();
    server.stop();
    let orders = group("orders");
    let mut call = store.read(&orders);
    // Polled once, it has handed its command over and waits for the answer.
    assert!(second.block_on(polled(&mut call)).is_pending());
    drop(first);
    server.resume();
    let found = second.block_on(call).unwrap();
    assert!(matches!(found, Found::Missing { .. }), "{found:?}");
    // And a store may be dropped anywhere.
    second.block_on(async move { drop(store) });
}

#[tokio::test]
async fn a_unix_socket() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("redis.sock");
    let _server = RedisServer::start_with(&["--unixsocket", socket.to_str().unwrap()]);
    let store = store(format!("unix://{}", socket.display()));
    created(&store, &group("orders")).await;
}

#[tokio::test]
async fn settings_that_can_never_work_make_no_store() {
    for url in ["nonsense", "http://127.0.0.1"] {
        RedisStore::new(&RedisSettings::new(url)).unwrap_err();
    }
    RedisStore::new(&RedisSettings::new(format!("redis://127.0.0.1:{}", free_port()))).unwrap();
}
