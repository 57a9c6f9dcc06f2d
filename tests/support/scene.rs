//! A stream with groups `a` and `b`, one coordinator, and consumers that read, for tests that change the shard count.

use super::consumer::{Consumer, Crew, Routes, settle};
use super::daemon::{Daemon, DaemonBuilder};
use super::producer::{Producer, Refresh};
use super::records::{Ledger, Source};
use super::redis_server::RedisServer;
use super::stream::Stream;

/// All there is; the coordinator is killed when this is dropped.
pub(crate) struct Scene {
    pub(crate) redis: RedisServer,
    pub(crate) daemon: Daemon,
    pub(crate) stream: Stream,
    pub(crate) routes: Routes,
    pub(crate) ledger: Ledger,
    pub(crate) source: Source,
    /// For each group its consumers.
    pub(crate) crews: Vec<(Crew, Vec<Consumer>)>,
}

impl Scene {
    /// So many shards, and consumers in each group, which have settled.
    pub(crate) async fn new(
        shards: u32,
        members: usize,
        configure: impl FnOnce(DaemonBuilder) -> DaemonBuilder,
    ) -> Self {
        let redis = RedisServer::start();
        let daemon = configure(Daemon::redis(&redis)).start();
        let stream = Stream::create(&daemon.api(), "orders", shards, &["a", "b"]).await;
        let (routes, ledger) = (Routes::to(&[&daemon.api()]), Ledger::default());
        let source = Source::new(&redis, &ledger).await;
        let mut crews = Vec::new();
        for group in &stream.groups {
            let crew = Crew::reading(group, &routes, &source);
            let consumers = crew.start_many(members);
            settle(&daemon.api(), group, &consumers, shards as usize).await;
            crews.push((crew, consumers));
        }
        Scene { redis, daemon, stream, routes, ledger, source, crews }
    }

    /// A producer that has just started.
    pub(crate) async fn producer(&self, refresh: Refresh) -> Producer {
        Producer::new(&self.redis, self.stream.group(), &self.routes, &self.ledger, refresh).await
    }

    /// A new life for every consumer: it takes over what the former one has left pending.
    pub(crate) async fn restart_consumers(&mut self) {
        for (crew, consumers) in &mut self.crews {
            for consumer in std::mem::take(consumers) {
                let name = consumer.id().to_owned();
                consumer.crash().await;
                consumers.push(crew.start(&name));
            }
        }
    }

    /// Waits until each shard of the count is read by one consumer of each group.
    pub(crate) async fn settle(&self, shards: u32) {
        for (crew, consumers) in &self.crews {
            settle(&self.stream.api, &crew.group, consumers, shards as usize).await;
        }
    }

    /// Demands that the migration is over and the count is this; compares what was written with what is read.
    pub(crate) async fn expect_settled_at(&self, shards: u32) {
        self.stream.expect_settled_at(shards).await;
        self.settle(shards).await;
        self.ledger.expect_all_read(&self.stream.groups).await;
        for (crew, _) in &self.crews {
            crew.journal.expect_one_reader_at_a_time();
        }
    }
}
