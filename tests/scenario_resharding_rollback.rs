//! Scenarios of a migration that is taken back at each of its stages (protocol 6, *Rollback*): consumers first, then
//! producers; what was added is drained before it goes, and nothing is lost on either way.

mod support;

use std::collections::BTreeSet;
use std::time::Duration;

use rsc_protocol::ErrorCode;
use rsc_protocol::resharding::{MigrationResponse, MigrationState};
use serde_json::json;
use support::{
    Ambush, Consumer, Crew, Daemon, DaemonBuilder, Fleet, Ledger, RedisServer, Refresh, Routes, Scene,
    Source, Stream, scale_body, wait_until,
};

/// Where a migration is when it is taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Producers have just been told.
    Active,
    /// No producer uses the former count any more.
    CachesOver,
    /// Removed shards are read to their end, and there is something left.
    Draining,
    /// Every removed shard was proven empty and is nobody's any more.
    GivenUp,
}

fn configure(daemon: DaemonBuilder) -> DaemonBuilder {
    daemon.lease(3_000, 6_000).short_caches()
}

async fn wait_for_stage(stream: &Stream, id: &str, stage: Stage) {
    let is_there = |row: &MigrationResponse| match stage {
        Stage::Active => row.state == MigrationState::Active,
        Stage::CachesOver => row.waits_for.starts_with("it was asked to end at"),
        Stage::Draining => row.state == MigrationState::Draining && !row.draining_shards.is_empty(),
        Stage::GivenUp => !row.retired_shards.is_empty() && row.draining_shards.is_empty(),
    };
    stream.wait_until(&format!("{id} is at {stage:?}"), id, is_there).await;
}

/// Takes a migration back at `stage`, under a producer with a stale cache and one with a fresh one.
async fn back_from(stage: Stage, from: u32, to: u32, retire: &str) {
    let mut scene = Scene::new(from, 2, configure).await;
    let producers = [Refresh::Early, Refresh::Late].map(|refresh| scene.producer(refresh));
    let mut running = Vec::new();
    for producer in producers {
        running.push(producer.await.run(Duration::from_millis(2)));
    }
    wait_until("they write", async || scene.ledger.len() > 50).await;
    if stage == Stage::Draining {
        scene.source.keep_pending(true);
    }
    let more = json!({"retire": retire, "deprecatedAfter": "2100-01-01T00:00:00Z"});
    let id = scene.stream.scale_with(i64::from(to), &more).await.resharding_id;
    wait_for_stage(&scene.stream, &id, stage).await;
    let row = scene.stream.roll_back(&id).await;
    assert!(row.state.is_back(), "{row:?}");
    // Answered when producers are told the former count, in every group.
    for (count, _) in scene.stream.counts().await {
        assert_eq!(count, from, "{stage:?} {from} to {to}");
    }
    if stage == Stage::Draining {
        scene.source.keep_pending(false);
        scene.restart_consumers().await;
    }
    scene.stream.wait_for(&id, MigrationState::RolledBack).await;
    for producer in running {
        let produced = producer.stop().await;
        let refused = if from == 0 || to == 0 { produced.unpublished } else { 0 };
        assert_eq!(produced.unpublished, refused, "{produced:?}");
    }
    scene.expect_settled_at(from).await;
    let keys = scene.stream.shard_keys(&scene.redis).await;
    let left = if retire == "DELETE" { from } else { from.max(to) };
    assert_eq!(keys, (0..left).collect(), "{stage:?} {from} to {to} {retire}");
}

#[tokio::test]
async fn scale_out_is_taken_back_right_after_its_activation() {
    back_from(Stage::Active, 2, 5, "KEEP").await;
    back_from(Stage::Active, 2, 5, "DELETE").await;
}

#[tokio::test]
async fn scale_out_is_taken_back_when_nobody_uses_the_former_count_any_more() {
    back_from(Stage::CachesOver, 3, 4, "KEEP").await;
    back_from(Stage::CachesOver, 3, 4, "DELETE").await;
}

#[tokio::test]
async fn scale_in_is_taken_back_right_after_its_activation() {
    back_from(Stage::Active, 5, 2, "KEEP").await;
    back_from(Stage::Active, 5, 2, "DELETE").await;
}

#[tokio::test]
async fn scale_in_is_taken_back_while_it_drains() {
    back_from(Stage::Draining, 4, 2, "KEEP").await;
    back_from(Stage::Draining, 4, 2, "DELETE").await;
}

#[tokio::test]
async fn scale_in_is_taken_back_when_its_shards_are_given_up() {
    back_from(Stage::GivenUp, 4, 1, "KEEP").await;
    back_from(Stage::GivenUp, 4, 1, "DELETE").await;
}

#[tokio::test]
async fn the_way_to_zero_and_the_way_from_zero_are_taken_back() {
    back_from(Stage::Active, 3, 0, "DELETE").await;
    back_from(Stage::GivenUp, 3, 0, "KEEP").await;
    let scene = Scene::new(1, 2, configure).await;
    let id = scene.stream.scale_with(0, &json!({"retire": "DELETE"})).await.resharding_id;
    scene.stream.wait_for(&id, MigrationState::Deprecated).await;
    let id = scene.stream.scale_with(3, &json!({"retire": "DELETE"})).await.resharding_id;
    let mut producer = scene.producer(Refresh::Late).await;
    for number in 0..30 {
        producer.publish(&format!("key{number}")).await.unwrap();
    }
    scene.stream.roll_back(&id).await;
    scene.stream.wait_for(&id, MigrationState::RolledBack).await;
    scene.expect_settled_at(0).await;
    assert_eq!(scene.stream.shard_keys(&scene.redis).await, BTreeSet::new());
}

#[tokio::test]
async fn what_was_added_is_drained_before_it_goes_and_the_wait_is_told() {
    let mut scene = Scene::new(2, 2, configure).await;
    let more = json!({"retire": "DELETE", "deprecatedAfter": "2100-01-01T00:00:00Z"});
    let id = scene.stream.scale_with(4, &more).await.resharding_id;
    wait_for_stage(&scene.stream, &id, Stage::CachesOver).await;
    scene.settle(4).await;
    scene.source.keep_pending(true);
    let mut producer = scene.producer(Refresh::Late).await;
    for number in 0..50 {
        producer.publish(&format!("key{number}")).await.unwrap();
    }
    wait_until("it is delivered", async || {
        let mut pending = 0;
        for shard in [2, 3] {
            for group in &scene.stream.groups {
                let key = scene.stream.key(shard);
                let rows: Vec<redis::Value> =
                    scene.redis.command(&["XPENDING", &key, group.consumer_group(), "-", "+", "1"]).await;
                pending += rows.len();
            }
        }
        pending == 4
    })
    .await;
    let row = scene.stream.roll_back(&id).await;
    assert_eq!((row.state, row.draining_shards.len()), (MigrationState::RollingBack, 2), "{row:?}");
    assert!(row.waits_for.contains("until"), "{row:?}");
    scene
        .stream
        .wait_until("what it waits for is told", &id, |row| {
            row.waits_for == "shards 2-3 are not proven empty"
                && row.drain.len() == 2
                && row.drain.iter().all(|drain| {
                    drain.waits_for.len() == 2
                        && drain.waits_for.iter().all(|wait| wait.reason == "PENDING" && wait.pending > 0)
                })
        })
        .await;
    scene.source.keep_pending(false);
    scene.restart_consumers().await;
    scene.stream.wait_for(&id, MigrationState::RolledBack).await;
    scene.expect_settled_at(2).await;
    assert_eq!(scene.stream.shard_keys(&scene.redis).await, BTreeSet::from([0, 1]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn once_keys_may_be_deleted_there_is_no_way_back() {
    let redis = RedisServer::start();
    let (routes, ledger) = (Routes::to(&[]), Ledger::default());
    let mut creator = configure(Daemon::redis(&redis)).start();
    let mut stream = Stream::create(&creator.api(), "orders", 3, &["a", "b"]).await;
    creator.kill();
    let ambush = Ambush::on(&stream.groups);
    let mut fleet = Fleet::start(&redis, 1, &ambush, &routes, configure).await;
    stream.talk_to(&fleet.api());
    ambush.lay(&["begin-delete"]);
    let mut body = scale_body(1);
    body["retire"] = json!("DELETE");
    fleet.scale("orders", &body).await;
    let id = stream.counts().await[0].1.clone().unwrap_or_default();
    assert!(!id.is_empty());
    // The last coordinator dies when both groups have said so and nothing is deleted yet. Then a record comes.
    fleet.tend_until("the last one is killed", async || ambush.kills().len() == 3).await;
    wait_until("the last one is dead", async || ambush.kills().len() == 4).await;
    let late: String = redis.command(&["XADD", "orders:1", "NOMKSTREAM", "*", "k", "v"]).await;
    ledger.acknowledged(("orders:1".to_owned(), late));
    fleet.tend_until_replaced(4).await;
    stream.talk_to(&fleet.api());
    stream.wait_until("the late record is waited for", &id, |row| row.drain.len() == 1).await;
    let before = redis.dump_all().await;
    let message = stream.try_roll_back(&id).await.expect_error(ErrorCode::RollbackNotAllowed);
    assert!(message.contains("being deleted"), "{message}");
    assert_eq!(redis.dump_all().await, before);
    let source = Source::new(&redis, &ledger).await;
    let crews = stream.groups.iter().map(|group| Crew::reading(group, &routes, &source));
    let consumers: Vec<Consumer> = crews.map(|crew| crew.start("m")).collect();
    stream.wait_for(&id, MigrationState::Deprecated).await;
    ledger.expect_all_read(&stream.groups).await;
    stream.expect_settled_at(1).await;
    assert_eq!(stream.shard_keys(&redis).await, BTreeSet::from([0]));
    drop(consumers);
}
