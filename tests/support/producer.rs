//! A producer as protocol 11 wants it: routing from a cache with a lease, `XADD NOMKSTREAM`, and one retry.

use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use reqwest::{Method, StatusCode};
use rsc_protocol::GroupKey;
use rsc_protocol::hash::shard_of;
use rsc_protocol::keys::shard_key;
use rsc_protocol::routing::ProducerRouting;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::api::group_path;
use super::consumer::Routes;
use super::records::{Ledger, Record};
use super::redis_server::RedisServer;

/// How long an answer about routing is waited for; a slow machine takes its time.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a running producer tries to publish one record before it gives it up.
const GIVES_UP_AFTER: Duration = Duration::from_secs(10);
/// What a machine may take from handing a command over until it has the answer, so that the publish margin of the
/// tests (300 ms) is kept. A producer that is stalled for longer breaks what the protocol asks of it.
const ON_ITS_WAY: Duration = Duration::from_millis(250);

/// Longer than any test.
const FOR_EVER: Duration = Duration::from_secs(3_600);

/// When the cache is refreshed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refresh {
    /// When half of its lease is over.
    Early,
    /// Not before its lease is over: it is as stale as it may be.
    Late,
    /// Only when a key is gone: a client that breaks the protocol, and believes its first answer for ever.
    Never,
}

/// Why a record was not published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unpublished {
    /// No valid routing.
    NoRouting,
    /// The stream has no shards.
    NoShards,
    /// The shard's key is gone, twice.
    Gone,
}

/// What a producer has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Produced {
    /// Records that Redis has taken.
    pub(crate) acknowledged: usize,
    /// `XADD` that `NOMKSTREAM` refused.
    pub(crate) refused: usize,
    /// Records not published, whatever the reason.
    pub(crate) unpublished: usize,
    /// Records left out of the ledger because this process was stalled while it sent them.
    pub(crate) stalled: usize,
}

struct Cached {
    routing: ProducerRouting,
    refresh_at: Instant,
    until: Instant,
}

/// One producer, a record at a time or [running](Producer::run).
pub(crate) struct Producer {
    group: GroupKey,
    routes: Routes,
    redis: MultiplexedConnection,
    ledger: Ledger,
    refresh: Refresh,
    cached: Option<Cached>,
    pub(crate) produced: Produced,
}

impl Producer {
    /// A producer that has just started; it asks for the routing of this group.
    pub(crate) async fn new(
        redis: &RedisServer,
        group: &GroupKey,
        routes: &Routes,
        ledger: &Ledger,
        refresh: Refresh,
    ) -> Self {
        Producer {
            group: group.clone(),
            routes: routes.clone(),
            redis: redis.connection().await,
            ledger: ledger.clone(),
            refresh,
            cached: None,
            produced: Produced::default(),
        }
    }

    /// How many shards it routes to; `None` without valid routing.
    pub(crate) fn routes_to(&self) -> Option<u32> {
        self.cached.as_ref().filter(|cached| Instant::now() < cached.until).map(|it| it.routing.shard_count)
    }

    /// How long its routing is valid still; zero without any.
    pub(crate) fn lease_left(&self) -> Duration {
        let until = self.cached.as_ref().map(|cached| cached.until);
        until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }

    /// Publishes one record.
    pub(crate) async fn publish(&mut self, partition_key: &str) -> Result<Record, Unpublished> {
        let result = self.try_publish(partition_key).await;
        match &result {
            Ok(_) => self.produced.acknowledged += 1,
            Err(_) => self.produced.unpublished += 1,
        }
        result
    }

    async fn try_publish(&mut self, partition_key: &str) -> Result<Record, Unpublished> {
        if self.cached.as_ref().is_none_or(|cached| Instant::now() >= cached.refresh_at) {
            self.ask().await;
        }
        for attempt in 0..2 {
            if attempt > 0 {
                self.produced.refused += 1;
                self.ask().await;
            }
            let Some(cached) = &self.cached else { return Err(Unpublished::NoRouting) };
            let until = cached.until;
            let count = cached.routing.shard_count;
            let Some(shard) = shard_of(partition_key.as_bytes(), count) else {
                return Err(Unpublished::NoShards);
            };
            let key = shard_key(self.group.stream_prefix(), shard);
            let mut add = redis::cmd("XADD");
            add.arg(&key).arg("NOMKSTREAM").arg("*").arg("key").arg(partition_key);
            if Instant::now() >= until {
                return Err(Unpublished::NoRouting);
            }
            let id: Option<String> = add.query_async(&mut self.redis).await.unwrap();
            if let Some(id) = id {
                if Instant::now() < until + ON_ITS_WAY {
                    self.ledger.acknowledged((key.clone(), id.clone()));
                } else {
                    self.produced.stalled += 1;
                }
                return Ok((key, id));
            }
        }
        self.produced.refused += 1;
        Err(Unpublished::Gone)
    }

    /// Asks for routing; without an answer the cache stays as long as it is valid.
    async fn ask(&mut self) {
        let api = self.routes.pick();
        let path = format!("{}/producer-routing", group_path(&self.group));
        // The lease counts from here.
        let sent = Instant::now();
        let answer = timeout(PATIENCE, api.try_send(api.request(Method::GET, &path))).await;
        let answer = answer.ok().and_then(Result::ok).filter(|answer| answer.status == StatusCode::OK);
        if let Some(answer) = answer {
            let routing: ProducerRouting = answer.read();
            let is_older = self.cached.as_ref().is_some_and(|cached| {
                routing.metadata_version < cached.routing.metadata_version
                    && routing.metadata_token == cached.routing.metadata_token
            });
            if !is_older {
                let lease = Duration::from_millis(routing.routing_cache_ttl_ms);
                let (refresh_after, lease) = match self.refresh {
                    Refresh::Early => (lease / 2, lease),
                    Refresh::Late => (lease, lease),
                    Refresh::Never => (FOR_EVER, FOR_EVER),
                };
                let (refresh_at, until) = (sent + refresh_after, sent + lease);
                self.cached = Some(Cached { routing, refresh_at, until });
            }
        }
        if self.cached.as_ref().is_some_and(|cached| Instant::now() >= cached.until) {
            self.cached = None;
        }
    }

    /// Publishes one record after the other from now on, each with another key, until [`Running::stop`]. What could not
    /// be published is tried again, as an application does; only what was given up counts as unpublished.
    pub(crate) fn run(mut self, pause: Duration) -> Running {
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(async move {
            let mut number = 0_u64;
            let mut give_up_at = Instant::now() + GIVES_UP_AFTER;
            while !*stopped.borrow() {
                if self.try_publish(&format!("key{number}")).await.is_ok() {
                    self.produced.acknowledged += 1;
                } else if Instant::now() < give_up_at {
                    tokio::time::sleep(pause).await;
                    continue;
                } else {
                    self.produced.unpublished += 1;
                }
                number += 1;
                tokio::time::sleep(pause).await;
                give_up_at = Instant::now() + GIVES_UP_AFTER;
            }
            self.produced
        });
        Running { stop, task }
    }
}

/// A producer that publishes by itself.
pub(crate) struct Running {
    stop: watch::Sender<bool>,
    task: JoinHandle<Produced>,
}

impl Running {
    /// Ends it.
    pub(crate) async fn stop(self) -> Produced {
        let _ = self.stop.send(true);
        self.task.await.unwrap()
    }
}
