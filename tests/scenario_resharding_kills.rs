//! Scenarios of `kill -9` at each step of a migration (protocol 6; `docs/architecture.md` names the steps): right before
//! a group's record of the step is written, and right after, when nobody was told. Whoever is there carries it on.

mod support;

use std::collections::BTreeSet;
use std::time::Duration;

use rsc_protocol::Timestamp;
use rsc_protocol::resharding::MigrationState;
use serde_json::{Value, json};
use support::{
    Ambush, Consumer, Crew, Daemon, DaemonBuilder, Fleet, Ledger, Observer, Producer, RedisServer, Refresh,
    Routes, Source, Stream, encode, group_path, scale_body, settle, wait_until,
};

fn configure(daemon: DaemonBuilder) -> DaemonBuilder {
    let daemon = daemon.lease(3_000, 6_000).short_caches();
    // Whoever is killed leaves its mutexes behind.
    daemon.set("coordination", "mutex-ttl", "400ms").set("redis", "command-timeout", "300ms")
}

/// Coordinators that are killed, and consumers and a producer that go on meanwhile.
struct Killings {
    redis: RedisServer,
    fleet: Fleet,
    ambush: Ambush,
    stream: Stream,
    routes: Routes,
    ledger: Ledger,
    crews: Vec<(Crew, Vec<Consumer>)>,
}

impl Killings {
    async fn new(shards: u32, instances: usize) -> Self {
        let redis = RedisServer::start();
        let mut midwife = configure(Daemon::redis(&redis)).start();
        let stream = Stream::create(&midwife.api(), "orders", shards, &["a", "b"]).await;
        midwife.kill();
        let (routes, ledger) = (Routes::to(&[]), Ledger::default());
        let ambush = Ambush::on(&stream.groups);
        let fleet = Fleet::start(&redis, instances, &ambush, &routes, configure).await;
        let source = Source::new(&redis, &ledger).await;
        let mut crews = Vec::new();
        for group in &stream.groups {
            let mut crew = Crew::reading(group, &routes, &source);
            crew.patience = Duration::from_secs(1);
            let consumers = crew.start_many(2);
            settle(&fleet.api(), group, &consumers, shards as usize).await;
            crews.push((crew, consumers));
        }
        Killings { redis, fleet, ambush, stream, routes, ledger, crews }
    }

    /// Does `ask` while whoever records one of `steps` is killed, and waits until the stream has settled at `shards`.
    async fn survive(&mut self, steps: &[&str], path: &str, body: &Value, shards: u32) {
        let producer =
            Producer::new(&self.redis, self.stream.group(), &self.routes, &self.ledger, Refresh::Late).await;
        let producer = producer.run(Duration::from_millis(5));
        let mut observers = Vec::new();
        for group in &self.stream.groups {
            observers.push(Observer::start(&self.redis, group).await);
        }
        let before = self.fleet.replaced;
        let known = self.migrations().await;
        self.ambush.lay(steps);
        self.fleet.ask(path, body).await;
        self.settle_at(shards).await;
        assert_eq!(self.ambush.kills(), self.ambush.planned());
        self.fleet.tend_until_replaced(before + self.ambush.planned().len()).await;
        self.ambush.lay(&[]);
        // One and the same is carried on; none is begun anew because somebody died.
        let is_new = usize::from(path == self.scale_path());
        assert_eq!(self.migrations().await, known.map(|known| known + is_new));
        wait_until("much is written", async || self.ledger.len() > 50).await;
        producer.stop().await;
        self.expect_settled_at(shards).await;
        for observer in observers {
            observer.stop().await;
        }
    }

    /// How many migrations each group records.
    async fn migrations(&self) -> [usize; 2] {
        let mut counts = [0; 2];
        for (count, group) in counts.iter_mut().zip(&self.stream.groups) {
            let record = self.redis.aggregate(group).await.unwrap_or_default();
            *count = record["migrations"].as_object().map_or(0, serde_json::Map::len);
        }
        counts
    }

    async fn settle_at(&mut self, shards: u32) {
        let (redis, groups) = (&self.redis, &self.stream.groups);
        let has_settled = async || {
            for group in groups {
                let record = redis.aggregate(group).await.unwrap_or_default();
                if record["shardCount"] != shards || !record["activeReshardingId"].is_null() {
                    return false;
                }
            }
            true
        };
        self.fleet.tend_until("the stream has settled", has_settled).await;
    }

    async fn expect_settled_at(&mut self, shards: u32) {
        self.stream.talk_to(&self.fleet.api());
        self.stream.expect_settled_at(shards).await;
        for (crew, consumers) in &self.crews {
            settle(&self.stream.api, &crew.group, consumers, shards as usize).await;
        }
        self.ledger.expect_all_read(&self.stream.groups).await;
        for (crew, _) in &self.crews {
            crew.journal.expect_one_reader_at_a_time();
        }
    }

    fn scale_path(&self) -> String {
        format!("/coord/v1/streams/{}/scale", encode(&self.stream.prefix))
    }
}

/// With one that is started anew after each kill, or with another that is there already.
async fn scale_out(instances: usize) {
    let mut scene = Killings::new(2, instances).await;
    let path = scene.scale_path();
    scene.survive(&["prepare", "provisioned", "activate", "finish"], &path, &scale_body(4), 4).await;
    assert_eq!(scene.stream.shard_keys(&scene.redis).await, (0..4).collect());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scale_out_goes_on_after_each_step_with_a_fresh_instance() {
    scale_out(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scale_out_goes_on_after_each_step_with_another_instance() {
    scale_out(2).await;
}

async fn scale_in(instances: usize, steps: &[&str]) {
    let mut scene = Killings::new(4, instances).await;
    let path = scene.scale_path();
    let mut body = scale_body(2);
    body["retire"] = json!("DELETE");
    scene.survive(steps, &path, &body, 2).await;
    assert_eq!(scene.stream.shard_keys(&scene.redis).await, BTreeSet::from([0, 1]));
}

const TO_THE_DRAIN: [&str; 4] = ["prepare", "provisioned", "activate", "begin-drain"];
const TO_THE_END: [&str; 3] = ["retire", "begin-delete", "finish"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scale_in_begins_to_drain_after_each_step_with_a_fresh_instance() {
    scale_in(1, &TO_THE_DRAIN).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scale_in_begins_to_drain_after_each_step_with_another_instance() {
    scale_in(2, &TO_THE_DRAIN).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scale_in_comes_to_its_end_after_each_step_with_a_fresh_instance() {
    scale_in(1, &TO_THE_END).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scale_in_comes_to_its_end_after_each_step_with_another_instance() {
    scale_in(2, &TO_THE_END).await;
}

async fn rollback(instances: usize, from: u32, to: u32) {
    let mut scene = Killings::new(from, instances).await;
    let mut body = scale_body(i64::from(to));
    body["deprecatedAfter"] = json!("2100-01-01T00:00:00Z");
    let id = scene.fleet.scale("orders", &body).await["reshardingId"].as_str().unwrap_or_default().to_owned();
    let path = format!("{}/migrations/{}/rollback", group_path(scene.stream.group()), encode(&id));
    // Nothing is to drain when what was removed comes back.
    let steps: &[&str] = if to > from {
        &["rollback", "restore-count", "retire", "finish"]
    } else {
        &["rollback", "restore-count"]
    };
    let body = json!({"requestedBy": "test", "reason": "thought better of it"});
    scene.survive(steps, &path, &body, from).await;
    for row in scene.stream.migration(&id).await {
        assert_eq!(row.state, MigrationState::RolledBack, "{row:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollback_of_a_scale_out_goes_on_after_each_step_with_a_fresh_instance() {
    rollback(1, 2, 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollback_of_a_scale_out_goes_on_after_each_step_with_another_instance() {
    rollback(2, 2, 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollback_of_a_scale_in_goes_on_after_each_step_with_another_instance() {
    rollback(2, 4, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_record_is_read_although_each_step_back_kills_somebody() {
    let mut scene = Killings::new(3, 2).await;
    let now: (i64, i64) = scene.redis.command(&["TIME"]).await;
    let mut body = scale_body(1);
    body["deprecatedAfter"] = json!(Timestamp::from_millis(now.0 * 1_000 + 4_000));
    scene.fleet.scale("orders", &body).await;
    let (redis, groups) = (&scene.redis, &scene.stream.groups);
    let given_up = async || {
        let mut records = Vec::new();
        for group in groups {
            let record = redis.aggregate(group).await.unwrap_or_default();
            let id = record["activeReshardingId"].as_str().unwrap_or_default();
            records.push(record["migrations"][id]["retired"] != Value::Null);
        }
        records.iter().all(|given_up| *given_up)
    };
    scene.fleet.tend_until("the shards are given up", given_up).await;
    scene.ambush.lay(&["reopen"]);
    for shard in ["orders:1", "orders:2"] {
        let id: String = scene.redis.command(&["XADD", shard, "*", "k", "v"]).await;
        scene.ledger.acknowledged((shard.to_owned(), id));
    }
    scene.settle_at(1).await;
    assert_eq!(scene.ambush.kills(), scene.ambush.planned());
    scene.fleet.tend_until_replaced(scene.ambush.planned().len()).await;
    scene.expect_settled_at(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_group_reads_again_what_was_given_up_before_any_producer_is_told() {
    let mut scene = Killings::new(4, 1).await;
    let more = json!({"deprecatedAfter": "2100-01-01T00:00:00Z"});
    scene.stream.talk_to(&scene.fleet.api());
    let id = scene.stream.scale_with(2, &more).await.resharding_id;
    scene.stream.wait_until("shards are given up", &id, |row| row.retired_shards.len() == 2).await;
    scene.ambush.lay(&["restore-count"]);
    let path = format!("{}/migrations/{}/rollback", group_path(scene.stream.group()), encode(&id));
    let body = json!({"requestedBy": "test", "reason": "thought better of it"});
    let api = scene.fleet.api();
    let asked = api.try_send(api.request(reqwest::Method::POST, &path).json(&body)).await;
    assert!(asked.is_err(), "the coordinator is dead before the first count is restored: {asked:?}");
    for group in &scene.stream.groups {
        let record = scene.redis.aggregate(group).await.unwrap_or_default();
        let targets = record["targetAssignments"].as_object().cloned().unwrap_or_default();
        let assigned: BTreeSet<u64> = targets
            .values()
            .flat_map(|shards| shards.as_array().cloned().unwrap_or_default())
            .filter_map(|shard| shard["shardIndex"].as_u64())
            .collect();
        assert_eq!((&record["shardCount"], assigned), (&json!(2), (0..4).collect()), "{group}");
    }
    scene.settle_at(4).await;
    scene.fleet.tend_until_replaced(4).await;
    scene.expect_settled_at(4).await;
}
