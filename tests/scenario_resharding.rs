//! Scenarios of a stream whose shard count changes while producers write and consumers read (protocol 6, 7, 11): forth,
//! back, to zero and back again; whatever Redis acknowledged to a producer is read by every group.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeSet;
use std::time::Duration;

use rsc_protocol::ErrorCode;
use rsc_protocol::resharding::MigrationState;
use serde_json::json;
use support::{
    Daemon, DaemonBuilder, Ledger, Producer, RedisServer, Refresh, Routes, Scene, Stream, Unpublished,
    scale_body, wait_until,
};

/// Timing in which nobody's lease ends by accident, and producers' caches end soon.
fn configure(daemon: DaemonBuilder) -> DaemonBuilder {
    daemon.lease(3_000, 6_000).short_caches()
}

/// Publishes until this producer has used every shard it routes to.
async fn fill(producer: &mut Producer) {
    for number in 0..100 {
        producer.publish(&format!("key{number}")).await.unwrap();
    }
}

#[tokio::test]
async fn a_writing_producer_loses_nothing_through_scale_out_scale_in_and_rollback() {
    let scene = Scene::new(4, 3, configure).await;
    let stream = &scene.stream;
    let eager = scene.producer(Refresh::Early).await.run(Duration::from_millis(1));
    let stale = scene.producer(Refresh::Late).await.run(Duration::from_millis(1));
    for (target, retire, back) in [
        (7, "KEEP", false),
        (3, "DELETE", false),
        (5, "DELETE", true),
        (2, "KEEP", true),
        (6, "KEEP", false),
        (1, "DELETE", false),
        (4, "KEEP", false),
    ] {
        let before = stream.counts().await[0].0;
        let id = stream.scale_with(target, &json!({"retire": retire})).await.resharding_id;
        if back {
            // When every group has begun to drain what goes, if something goes.
            if target < i64::from(before) {
                stream
                    .wait_until("it drains", &id, |row| {
                        matches!(row.state, MigrationState::Draining | MigrationState::Deprecated)
                    })
                    .await;
            }
            if stream.try_roll_back(&id).await.status.is_success() {
                stream.wait_for(&id, MigrationState::RolledBack).await;
                stream.expect_settled_at(before).await;
                continue;
            }
        }
        stream.wait_for(&id, MigrationState::Deprecated).await;
    }
    wait_until("they have written much", async || scene.ledger.len() > 1_000).await;
    let (eager, stale) = (eager.stop().await, stale.stop().await);
    scene.expect_settled_at(4).await;
    assert_eq!((eager.unpublished, stale.unpublished), (0, 0), "{eager:?} {stale:?}");
    assert!(eager.acknowledged > 100 && stale.acknowledged > 100, "{eager:?} {stale:?}");
    assert!(scene.ledger.len() >= eager.acknowledged + stale.acknowledged - eager.stalled - stale.stalled);
}

#[tokio::test]
async fn scale_out_gives_the_new_shards_to_members_and_producers_find_them() {
    let scene = Scene::new(2, 2, configure).await;
    let mut producer = scene.producer(Refresh::Late).await;
    fill(&mut producer).await;
    let id = scene.stream.scale(5).await;
    // Its lease lasts: the former count is good still.
    fill(&mut producer).await;
    assert_eq!(scene.stream.shard_keys(&scene.redis).await, (0..5).collect());
    wait_until("the producer routes to 5 shards", async || {
        producer.publish("key").await.unwrap();
        producer.routes_to() == Some(5)
    })
    .await;
    fill(&mut producer).await;
    for shard in 0..5 {
        let length: u64 = scene.redis.command(&["XLEN", &scene.stream.key(shard)]).await;
        assert!(length > 0, "nothing was written to shard {shard}");
    }
    scene.stream.wait_for(&id, MigrationState::Deprecated).await;
    scene.expect_settled_at(5).await;
}

#[tokio::test]
async fn scale_in_keeps_removed_shards_assigned_until_they_are_read() {
    for retire in ["KEEP", "DELETE"] {
        let mut scene = Scene::new(5, 2, configure).await;
        let stream = scene.stream.clone();
        let mut stale = scene.producer(Refresh::Late).await;
        fill(&mut stale).await;
        scene.source.keep_pending(true);
        // Read and not acknowledged, in all shards.
        fill(&mut stale).await;
        let id = stream.scale_with(2, &json!({"retire": retire})).await.resharding_id;
        let rows = stream.migration(&id).await;
        assert!(rows.iter().all(|row| row.draining_shards.len() == 3), "{rows:?}");
        stream.wait_for(&id, MigrationState::Draining).await;
        // Every member still reads what it read.
        scene.settle(5).await;
        for row in stream.migration(&id).await {
            assert_eq!(row.state, MigrationState::Draining, "{row:?}");
            assert_eq!((row.draining_shards.len(), row.retired_shards.len()), (3, 0), "{row:?}");
            assert_eq!(row.drain.len(), 3, "{row:?}");
            assert!(row.drain.iter().all(|drain| drain.owner.is_some() && !drain.empty), "{row:?}");
        }
        stream.expect_other_runs(5, &id).await;
        scene.source.keep_pending(false);
        // Whoever left them pending starts again, and takes them over as a new owner would.
        scene.restart_consumers().await;
        scene.stream.wait_for(&id, MigrationState::Deprecated).await;
        scene.expect_settled_at(2).await;
        let left = if retire == "DELETE" { 2 } else { 5 };
        assert_eq!(scene.stream.shard_keys(&scene.redis).await, (0..left).collect());
        // A producer that knows the former count finds out by NOMKSTREAM at the latest.
        fill(&mut stale).await;
        assert_eq!(stale.routes_to(), Some(2));
        scene.ledger.expect_all_read(&scene.stream.groups).await;
    }
}

#[tokio::test]
async fn what_a_stale_producer_writes_at_the_end_of_its_lease_is_read_before_a_removed_shard_is_given_up() {
    // A lease that is long enough to be in time for its end.
    let scene =
        Scene::new(3, 2, |daemon| configure(daemon).set("producer", "routing-cache-ttl", "2500ms")).await;
    let mut stale = scene.producer(Refresh::Late).await;
    fill(&mut stale).await;
    scene.ledger.expect_all_read(&scene.stream.groups).await;
    let written = scene.ledger.len();
    wait_until("it has asked again", async || {
        let left = stale.lease_left();
        let _ = stale.publish("x").await;
        stale.lease_left() > left
    })
    .await;
    let id = scene.stream.scale(1).await;
    assert_eq!(stale.routes_to(), Some(3));
    wait_until("its lease is nearly over", async || stale.lease_left() < Duration::from_millis(400)).await;
    for row in scene.stream.migration(&id).await {
        assert_eq!((row.state, row.draining_shards.len()), (MigrationState::Active, 2), "{row:?}");
        assert!(row.waits_for.starts_with("producers may use the former count until"), "{row:?}");
    }
    for number in 0..10 {
        // What is not sent in time is sent by the new routing; either way nothing is lost.
        let _ = stale.publish(&format!("key{number}")).await;
    }
    assert!(scene.ledger.len() > written);
    scene.stream.wait_for(&id, MigrationState::Deprecated).await;
    scene.expect_settled_at(1).await;
    // Nobody is left who could write where nobody reads.
    wait_until("it knows", async || {
        let _ = stale.publish("x").await;
        stale.routes_to() == Some(1)
    })
    .await;
}

#[tokio::test]
async fn a_producer_with_a_forgotten_cache_is_refused_by_the_deleted_key_and_retries_once() {
    let redis = RedisServer::start();
    // The lease is long, and longer than what the stream waits for: it was handed out under another configuration.
    let daemon = Daemon::redis(&redis).lease(3_000, 6_000).short_caches().start();
    let stream = Stream::create(&daemon.api(), "orders", 3, &["a"]).await;
    let (routes, ledger) = (Routes::to(&[&daemon.api()]), Ledger::default());
    let mut forgotten = Producer::new(&redis, stream.group(), &routes, &ledger, Refresh::Never).await;
    assert_eq!(forgotten.publish("x").await.map(|_| ()), Ok(()));
    redis.command::<u64>(&["XTRIM", "orders:0", "MAXLEN", "0"]).await;
    redis.command::<u64>(&["XTRIM", "orders:1", "MAXLEN", "0"]).await;
    redis.command::<u64>(&["XTRIM", "orders:2", "MAXLEN", "0"]).await;
    let id = stream.scale_with(1, &json!({"retire": "DELETE"})).await.resharding_id;
    stream.wait_for(&id, MigrationState::Deprecated).await;
    assert_eq!(forgotten.routes_to(), Some(3));
    for number in 0..20 {
        let (key, _) = forgotten.publish(&format!("key{number}")).await.unwrap();
        assert_eq!(key, "orders:0");
    }
    assert_eq!((forgotten.produced.refused, forgotten.routes_to()), (1, Some(1)));
    assert_eq!(stream.shard_keys(&redis).await, BTreeSet::from([0]));
}

#[tokio::test]
async fn to_zero_and_back() {
    for retire in ["KEEP", "DELETE"] {
        let scene = Scene::new(3, 2, configure).await;
        let stream = &scene.stream;
        let mut producer = scene.producer(Refresh::Early).await;
        fill(&mut producer).await;
        let id = stream.scale_with(0, &json!({"retire": retire})).await.resharding_id;
        stream.wait_for(&id, MigrationState::Deprecated).await;
        scene.expect_settled_at(0).await;
        let left = if retire == "DELETE" { 0 } else { 3 };
        assert_eq!(stream.shard_keys(&scene.redis).await, (0..left).collect());
        wait_until("the producer knows", async || producer.publish("x").await == Err(Unpublished::NoShards))
            .await;
        let id = stream.scale(4).await;
        wait_until("the producer knows", async || producer.publish("x").await.is_ok()).await;
        fill(&mut producer).await;
        stream.wait_for(&id, MigrationState::Deprecated).await;
        scene.expect_settled_at(4).await;
    }
}

#[tokio::test]
async fn preparing_is_held_by_a_key_of_another_type_and_goes_on_or_back() {
    let scene = Scene::new(2, 2, configure).await;
    let stream = &scene.stream;
    let mut producer = scene.producer(Refresh::Late).await;
    for goes_on in [true, false] {
        let target = if goes_on { 4 } else { 6 };
        let in_the_way = stream.key(target - 1);
        redis_set(&scene.redis, &in_the_way).await;
        let answer = stream.try_scale(&scale_body(i64::from(target))).await;
        let message = answer.expect_error(ErrorCode::ProvisioningFailed);
        assert!(message.contains(&in_the_way), "{message}");
        let count = target - 2;
        let running = stream.counts().await;
        let id = running[0].1.clone().unwrap();
        assert!(running.iter().all(|shown| *shown == (count, Some(id.clone()))), "{running:?}");
        for row in stream.migration(&id).await {
            assert_eq!(row.state, MigrationState::Preparing);
            assert!(!row.waits_for.is_empty(), "{row:?}");
        }
        // Producers and consumers notice nothing.
        fill(&mut producer).await;
        assert_eq!(producer.routes_to(), Some(count));
        scene.ledger.expect_all_read(&stream.groups).await;
        stream.expect_other_runs(i64::from(count), &id).await;
        if goes_on {
            redis_del(&scene.redis, &in_the_way).await;
            // By itself, or by being asked again.
            assert_eq!(stream.scale(i64::from(target)).await, id);
            stream.wait_for(&id, MigrationState::Deprecated).await;
            scene.expect_settled_at(target).await;
        } else {
            let row = stream.roll_back(&id).await;
            assert_eq!(row.state, MigrationState::RolledBack);
            scene.expect_settled_at(count).await;
            let kind: String = scene.redis.command(&["TYPE", &in_the_way]).await;
            assert_eq!(kind, "string");
        }
    }
}

async fn redis_set(redis: &RedisServer, key: &str) {
    redis.command::<()>(&["SET", key, "not a stream"]).await;
}

async fn redis_del(redis: &RedisServer, key: &str) {
    redis.command::<()>(&["DEL", key]).await;
}
