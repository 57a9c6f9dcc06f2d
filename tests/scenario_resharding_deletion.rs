//! Scenarios of the moment in which a removed shard's key is deleted (protocol 6, *Finish*): a record that comes right
//! before it is seen, one that comes right after it is refused by `NOMKSTREAM`.

mod support;

use std::collections::BTreeSet;

use rsc_protocol::resharding::MigrationState;
use serde_json::json;
use support::{
    Ambush, AmbushProxy, Consumer, Crew, Daemon, DaemonBuilder, Ledger, RedisServer, Routes, Source, Stream,
};

fn configure(daemon: DaemonBuilder) -> DaemonBuilder {
    daemon.lease(3_000, 6_000).short_caches()
}

/// A stream of three shards and a coordinator that speaks to Redis through a proxy.
async fn scene() -> (RedisServer, Daemon, Ambush, Stream, Ledger, Vec<Consumer>) {
    let redis = RedisServer::start();
    let mut creator = configure(Daemon::redis(&redis)).start();
    let mut stream = Stream::create(&creator.api(), "orders", 3, &["a", "b"]).await;
    creator.kill();
    let ambush = Ambush::on(&stream.groups);
    let proxy = AmbushProxy::start(redis.port(), &ambush);
    let daemon = configure(Daemon::builder(&["--redis-url", &proxy.url()])).start();
    stream.talk_to(&daemon.api());
    let ledger = Ledger::default();
    let source = Source::new(&redis, &ledger).await;
    let routes = Routes::to(&[&daemon.api()]);
    let crews = stream.groups.iter().map(|group| Crew::reading(group, &routes, &source));
    let consumers = crews.map(|crew| crew.start("m")).collect();
    (redis, daemon, ambush, stream, ledger, consumers)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_comes_after_the_proof_and_right_before_the_deletion_is_read() {
    let (redis, _daemon, ambush, stream, ledger, _consumers) = scene().await;
    // The last that is recorded before keys are deleted. Then the key is proven empty once more, and then deleted.
    ambush.slip_in(&stream.groups[1], "begin-delete", "orders:2", 1);
    let id = stream.scale_with(1, &json!({"retire": "DELETE"})).await.resharding_id;
    stream.wait_for(&id, MigrationState::Deprecated).await;
    let late = ("orders:2".to_owned(), ambush.slipped_in().unwrap());
    for group in &stream.groups {
        assert!(ledger.has_read(group, &late), "{group} has not read {late:?}");
    }
    assert_eq!(stream.shard_keys(&redis).await, BTreeSet::from([0]));
    stream.expect_settled_at(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_comes_right_before_the_proof_at_the_end_is_read_and_the_key_kept() {
    let (redis, _daemon, ambush, stream, ledger, _consumers) = scene().await;
    // The last that is recorded before the end: nobody is assigned the shard any more.
    ambush.slip_in(&stream.groups[1], "retire", "orders:2", 0);
    let id = stream.scale_with(1, &json!({"retire": "KEEP"})).await.resharding_id;
    stream.wait_for(&id, MigrationState::Deprecated).await;
    let late = ("orders:2".to_owned(), ambush.slipped_in().unwrap());
    for group in &stream.groups {
        assert!(ledger.has_read(group, &late), "{group} has not read {late:?}");
    }
    assert_eq!(stream.shard_keys(&redis).await, BTreeSet::from([0, 1, 2]));
    stream.expect_settled_at(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_comes_after_the_deletion_is_refused() {
    let (redis, _daemon, _ambush, stream, ledger, _consumers) = scene().await;
    let id = stream.scale_with(1, &json!({"retire": "DELETE"})).await.resharding_id;
    stream.wait_for(&id, MigrationState::Deprecated).await;
    for key in ["orders:1", "orders:2"] {
        let refused: Option<String> = redis.command(&["XADD", key, "NOMKSTREAM", "*", "k", "v"]).await;
        assert_eq!(refused, None);
    }
    let taken: Option<String> = redis.command(&["XADD", "orders:0", "NOMKSTREAM", "*", "k", "v"]).await;
    ledger.acknowledged(("orders:0".to_owned(), taken.unwrap()));
    ledger.expect_all_read(&stream.groups).await;
    assert_eq!(stream.shard_keys(&redis).await, BTreeSet::from([0]));
}
