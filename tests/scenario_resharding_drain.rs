//! Scenarios of what is in the way of a drain (protocol 6, *Drain* and *Finish*): the migration waits for what is really
//! left, says so, and ends by itself when nothing is.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeSet;

use rsc_protocol::GroupKey;
use rsc_protocol::resharding::{DrainRow, DrainWait, MigrationState};
use serde_json::json;
use support::{
    Api, Consumer, Crew, Daemon, Ledger, Member, Producer, RedisServer, Refresh, Routes, Source, Stream,
    beat_until_stable, settle, wait_until,
};

/// A stream of two shards with one coordinator that nobody produces to: what is in shard 1 the test puts there.
struct Obstacles {
    redis: RedisServer,
    daemon: Daemon,
    stream: Stream,
    ledger: Ledger,
}

impl Obstacles {
    async fn new(groups: &[&str]) -> Self {
        let redis = RedisServer::start();
        let daemon = Daemon::redis(&redis)
            .lease(2_000, 4_000)
            .set("producer", "routing-cache-ttl", "100ms")
            .set("producer", "publish-margin", "50ms")
            .start();
        let stream = Stream::create(&daemon.api(), "orders", 2, groups).await;
        Obstacles { redis, daemon, stream, ledger: Ledger::default() }
    }

    fn api(&self) -> &Api {
        &self.stream.api
    }

    /// Adds a record to shard 1 and returns its id.
    async fn add(&self) -> String {
        let id: String = self.redis.command(&["XADD", "orders:1", "*", "k", "v"]).await;
        self.ledger.acknowledged(("orders:1".to_owned(), id.clone()));
        id
    }

    /// Reads as a consumer that the coordinator knows nothing of, and acknowledges or not.
    async fn read(&self, group: &str, acknowledges: bool) {
        let read = ["XREADGROUP", "GROUP", group, "dead", "STREAMS", "orders:1", ">"];
        let found: redis::Value = self.redis.command(&read).await;
        assert_ne!(found, redis::Value::Nil);
        if acknowledges {
            self.acknowledge_all(group).await;
        }
    }

    async fn acknowledge_all(&self, group: &str) {
        let pending = ["XPENDING", "orders:1", group, "-", "+", "1000"];
        let pending: Vec<(String, String, u64, u64)> = self.redis.command(&pending).await;
        for (id, ..) in pending {
            self.redis.command::<u64>(&["XACK", "orders:1", group, &id]).await;
        }
    }

    /// Consumers that read, in every group, as they do in production.
    async fn readers(&self) -> Vec<Consumer> {
        let source = Source::new(&self.redis, &self.ledger).await;
        let routes = Routes::to(&[self.api()]);
        let crew = |group: &GroupKey| Crew::reading(group, &routes, &source);
        self.stream.groups.iter().map(|group| crew(group).start("reader")).collect()
    }

    /// Begins to remove shard 1.
    async fn remove(&self, retire: &str) -> String {
        self.stream.scale_with(1, &json!({"retire": retire})).await.resharding_id
    }

    /// What each group's record says about shard 1; empty when it is given up.
    async fn rows(&self, id: &str) -> Vec<DrainRow> {
        let rows = self.stream.migration(id).await.into_iter().flat_map(|row| row.drain);
        rows.inspect(|row| assert_eq!((row.shard_index, row.stream_key.as_str()), (1, "orders:1"))).collect()
    }

    /// Waits until every group's record says that shard 1 waits for exactly this, and checks that it goes on waiting.
    async fn expect_waiting(&self, id: &str, expected: &[Expected<'_>]) {
        let mut last = Vec::new();
        let says = async || {
            last = self.rows(id).await;
            let fits = |row: &DrainRow| {
                row.waits_for.len() == expected.len()
                    && row.waits_for.iter().zip(expected).all(|(wait, expected)| expected.fits(wait))
            };
            last.len() == self.stream.groups.len() && last.iter().all(fits)
        };
        wait_until(&format!("shard 1 waits for {expected:?}"), says).await;
        assert!(last.iter().all(|row| !row.empty && row.since.is_some()), "{last:?}");
        self.passes(3).await;
        for row in self.stream.migration(id).await {
            assert_eq!((row.state, row.draining_shards.len()), (MigrationState::Draining, 1), "{row:?}");
            assert_eq!(row.waits_for, "shards 1 are not proven empty");
        }
    }

    /// Waits until the coordinator has looked so often again.
    async fn passes(&self, times: u64) {
        let passed = async || {
            let metrics = String::from_utf8(self.api().get("/metrics").await.body).unwrap();
            let counter = "rsc_migration_pass_total{outcome=\"done\"} ";
            metrics.lines().find_map(|line| line.strip_prefix(counter)?.parse::<u64>().ok()).unwrap_or(0)
        };
        let before = passed().await;
        wait_until("more passes are made", async || passed().await >= before + times).await;
    }

    async fn expect_end(&self, id: &str) {
        self.stream.wait_for(id, MigrationState::Deprecated).await;
        self.stream.expect_settled_at(1).await;
    }
}

/// What a shard waits for, in one Redis group.
#[derive(Debug)]
struct Expected<'e> {
    group: &'e str,
    coordinated: bool,
    reason: &'e str,
    /// Undelivered, pending, pending without a record.
    counts: [u64; 3],
}

impl Expected<'_> {
    fn fits(&self, wait: &DrainWait) -> bool {
        (wait.consumer_group.as_str(), wait.coordinated, wait.reason.as_str())
            == (self.group, self.coordinated, self.reason)
            && [wait.undelivered, wait.pending, wait.pending_without_record] == self.counts
            && !wait.undelivered_is_at_least
            && !wait.pending_is_at_most
    }
}

const fn waits<'e>(group: &'e str, reason: &'e str, counts: [u64; 3]) -> Expected<'e> {
    Expected { group, coordinated: true, reason, counts }
}

#[tokio::test]
async fn undelivered_records_without_any_member_are_waited_for_until_somebody_has_read_them() {
    let scene = Obstacles::new(&["a", "b"]).await;
    scene.add().await;
    scene.add().await;
    let id = scene.remove("KEEP").await;
    scene
        .expect_waiting(&id, &[waits("a", "UNDELIVERED", [2, 0, 0]), waits("b", "UNDELIVERED", [2, 0, 0])])
        .await;
    scene.read("a", true).await;
    scene.expect_waiting(&id, &[waits("b", "UNDELIVERED", [2, 0, 0])]).await;
    let readers = scene.readers().await;
    scene.expect_end(&id).await;
    assert!(scene.rows(&id).await.is_empty());
    assert_eq!(scene.ledger.unread(&scene.stream.groups[1]), []);
    drop(readers);
}

#[tokio::test]
async fn pending_entries_of_a_dead_consumer_are_waited_for_until_they_are_taken_over() {
    let scene = Obstacles::new(&["a"]).await;
    scene.add().await;
    scene.add().await;
    scene.read("a", false).await;
    let id = scene.remove("DELETE").await;
    scene.expect_waiting(&id, &[waits("a", "PENDING", [0, 2, 0])]).await;
    scene.add().await;
    scene.expect_waiting(&id, &[waits("a", "UNDELIVERED", [1, 2, 0])]).await;
    let readers = scene.readers().await;
    scene.expect_end(&id).await;
    assert_eq!(scene.ledger.unread(scene.stream.group()), []);
    assert_eq!(scene.stream.shard_keys(&scene.redis).await, BTreeSet::from([0]));
    drop(readers);
}

#[tokio::test]
async fn records_deleted_or_trimmed_before_delivery_are_not_waited_for() {
    for retire in ["KEEP", "DELETE"] {
        let scene = Obstacles::new(&["a"]).await;
        // Redis does not know the lag any more, and there is nothing to read.
        for _ in 0..3 {
            scene.add().await;
        }
        scene.read("a", true).await;
        let last = scene.add().await;
        scene.redis.command::<u64>(&["XDEL", "orders:1", &last]).await;
        let id = scene.remove(retire).await;
        scene.expect_end(&id).await;
    }
    let scene = Obstacles::new(&["a"]).await;
    for _ in 0..10 {
        scene.add().await;
    }
    // Past the cursor, which has seen nothing.
    scene.redis.command::<u64>(&["XTRIM", "orders:1", "MAXLEN", "=", "3"]).await;
    let id = scene.remove("KEEP").await;
    scene.expect_waiting(&id, &[waits("a", "UNDELIVERED", [3, 0, 0])]).await;
    scene.redis.command::<u64>(&["XTRIM", "orders:1", "MAXLEN", "=", "1"]).await;
    scene.expect_waiting(&id, &[waits("a", "UNDELIVERED", [1, 0, 0])]).await;
    scene.redis.command::<u64>(&["XTRIM", "orders:1", "MAXLEN", "=", "0"]).await;
    scene.expect_end(&id).await;
}

#[tokio::test]
async fn pending_entries_whose_record_is_gone_are_reported_and_not_waited_for() {
    let scene = Obstacles::new(&["a"]).await;
    let (ghost, real) = (scene.add().await, scene.add().await);
    scene.read("a", false).await;
    scene.redis.command::<u64>(&["XDEL", "orders:1", &ghost]).await;
    let id = scene.remove("DELETE").await;
    scene.expect_waiting(&id, &[waits("a", "PENDING", [0, 1, 1])]).await;
    // By an acknowledgement or by a deletion: nothing real is left.
    scene.redis.command::<u64>(&["XDEL", "orders:1", &real]).await;
    scene.expect_end(&id).await;
    assert_eq!(scene.stream.shard_keys(&scene.redis).await, BTreeSet::from([0]));
}

#[tokio::test]
async fn a_redis_group_that_nobody_coordinates_counts_too() {
    let scene = Obstacles::new(&["a"]).await;
    scene.add().await;
    scene.redis.command::<()>(&["XGROUP", "CREATE", "orders:1", "reports", "0"]).await;
    scene.redis.command::<()>(&["XGROUP", "CREATE", "orders:1", "archive", "$"]).await;
    let readers = scene.readers().await;
    let id = scene.remove("DELETE").await;
    let foreign = Expected { coordinated: false, ..waits("reports", "UNDELIVERED", [1, 0, 0]) };
    scene.expect_waiting(&id, &[foreign]).await;
    scene.read("reports", false).await;
    let foreign = Expected { coordinated: false, ..waits("reports", "PENDING", [0, 1, 0]) };
    scene.expect_waiting(&id, &[foreign]).await;
    // An operator does away with it, or it does its work.
    scene.redis.command::<u64>(&["XGROUP", "DESTROY", "orders:1", "reports"]).await;
    scene.expect_end(&id).await;
    drop(readers);
}

#[tokio::test]
async fn a_destroyed_group_is_provisioned_again_at_the_beginning_and_reads_its_records() {
    let scene = Obstacles::new(&["a", "b"]).await;
    scene.add().await;
    scene.add().await;
    scene.read("a", true).await;
    scene.redis.command::<u64>(&["XGROUP", "DESTROY", "orders:1", "a"]).await;
    let id = scene.remove("DELETE").await;
    // It may have lost what was not read: its cursor is gone.
    scene
        .expect_waiting(&id, &[waits("a", "UNDELIVERED", [2, 0, 0]), waits("b", "UNDELIVERED", [2, 0, 0])])
        .await;
    // Again, while it drains; and both at once.
    for groups in [&["a"][..], &["b"], &["b", "a"]] {
        for group in groups {
            scene.redis.command::<u64>(&["XGROUP", "DESTROY", "orders:1", group]).await;
        }
        wait_until("it is there again", async || {
            let info: Vec<redis::Value> = scene.redis.command(&["XINFO", "GROUPS", "orders:1"]).await;
            info.len() == 2
        })
        .await;
    }
    let readers = scene.readers().await;
    scene.expect_end(&id).await;
    for group in &scene.stream.groups {
        assert_eq!(scene.ledger.unread(group), [], "{group}");
    }
    drop(readers);
}

#[tokio::test]
async fn a_key_that_is_gone_is_read_to_its_end_and_one_of_another_type_is_not() {
    let scene = Obstacles::new(&["a"]).await;
    scene.add().await;
    let id = scene.remove("KEEP").await;
    scene.redis.command::<()>(&["SET", "orders:1", "not a stream"]).await;
    wait_until("the type is told", async || {
        let rows = scene.rows(&id).await;
        rows.first().is_some_and(|row| row.waits_for.iter().all(|wait| wait.reason == "WRONG_TYPE"))
    })
    .await;
    scene.passes(3).await;
    stream_is(&scene, &id, MigrationState::Draining).await;
    scene.redis.command::<u64>(&["DEL", "orders:1"]).await;
    scene.expect_end(&id).await;
    assert_eq!(scene.stream.shard_keys(&scene.redis).await, BTreeSet::from([0]));
}

async fn stream_is(scene: &Obstacles, id: &str, state: MigrationState) {
    for row in scene.stream.migration(id).await {
        assert_eq!(row.state, state, "{row:?}");
    }
}

#[tokio::test]
async fn a_record_that_slips_into_a_shard_that_was_given_up_is_read_before_the_end() {
    for retire in ["KEEP", "DELETE"] {
        let scene = Obstacles::new(&["a", "b"]).await;
        let readers = scene.readers().await;
        // Both steps are far apart: shards are given up, and the end has to wait.
        let now: (u64, u64) = scene.redis.command(&["TIME"]).await;
        let end = rsc_protocol::Timestamp::from_millis(i64::try_from(now.0).unwrap() * 1_000 + 3_000);
        let more = json!({"retire": retire, "deprecatedAfter": end});
        let id = scene.stream.scale_with(1, &more).await.resharding_id;
        scene
            .stream
            .wait_until("it is given up", &id, |row| {
                row.draining_shards.is_empty() && row.retired_shards.len() == 1
            })
            .await;
        stream_is(&scene, &id, MigrationState::Draining).await;
        wait_until("it is told what the end waits for", async || {
            let rows = scene.stream.migration(&id).await;
            rows.iter().all(|row| row.waits_for.starts_with("it was asked to end at"))
        })
        .await;
        scene.add().await;
        scene.expect_end(&id).await;
        for group in &scene.stream.groups {
            assert_eq!(scene.ledger.unread(group), [], "{group} {retire}");
        }
        assert_eq!(scene.stream.shard_keys(&scene.redis).await.contains(&1), retire == "KEEP");
        drop(readers);
    }
}

#[tokio::test]
async fn a_shard_that_a_member_still_drains_is_waited_for_and_comes_back_to_it_with_a_late_record() {
    let scene = Obstacles::new(&["a"]).await;
    let mut member = Member::new(scene.api(), scene.stream.group(), "m");
    member.drains_slowly = true;
    beat_until_stable(scene.api(), scene.stream.group(), std::slice::from_mut(&mut member)).await;
    let id = scene.remove("DELETE").await;
    wait_until("the member drains shard 1", async || {
        member.beat().await;
        member.draining.contains_key(&1)
    })
    .await;
    scene.passes(3).await;
    for row in scene.stream.migration(&id).await {
        assert_eq!(row.state, MigrationState::Draining);
        assert_eq!(row.waits_for, "members still hold shards 1, which are empty");
    }
    scene.add().await;
    member.finish_drains();
    wait_until("shard 1 is the member's again", async || {
        member.beat().await;
        member.owned.contains(&1)
    })
    .await;
    scene.expect_waiting(&id, &[waits("a", "UNDELIVERED", [1, 0, 0])]).await;
    scene.read("a", true).await;
    wait_until("it is over", async || {
        member.beat().await;
        member.finish_drains();
        scene.stream.migration(&id).await[0].state == MigrationState::Deprecated
    })
    .await;
    assert_eq!(member.owned, BTreeSet::from([0]));
    assert_eq!(scene.stream.shard_keys(&scene.redis).await, BTreeSet::from([0]));
}

#[tokio::test]
async fn a_producer_that_never_asks_again_loses_nothing_when_shards_are_deleted() {
    let scene = Obstacles::new(&["a", "b"]).await;
    let readers = scene.readers().await;
    for (consumer, group) in readers.iter().zip(&scene.stream.groups) {
        settle(scene.api(), group, std::slice::from_ref(consumer), 2).await;
    }
    let routes = Routes::to(&[scene.api()]);
    let mut running = Vec::new();
    for pause in [431, 617, 809] {
        let producer =
            Producer::new(&scene.redis, scene.stream.group(), &routes, &scene.ledger, Refresh::Never).await;
        running.push(producer.run(std::time::Duration::from_millis(pause)));
    }
    wait_until("they write", async || scene.ledger.len() > 4).await;
    let id = scene.remove("DELETE").await;
    scene.expect_end(&id).await;
    let written = scene.ledger.len();
    wait_until("they write on", async || scene.ledger.len() > written + 8).await;
    let mut refused = 0;
    for producer in running {
        let produced = producer.stop().await;
        assert_eq!((produced.unpublished, produced.stalled), (0, 0), "{produced:?}");
        refused += produced.refused;
    }
    // Each of them found the key gone at most once, and asked.
    assert!((1..=3).contains(&refused), "{refused}");
    scene.ledger.expect_all_read(&scene.stream.groups).await;
    assert_eq!(scene.stream.shard_keys(&scene.redis).await, BTreeSet::from([0]));
    drop(readers);
    drop(scene.daemon);
}
