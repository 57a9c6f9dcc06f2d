//! Records that really flow, where there is a Redis: a producer that routes as protocol 7 and 11 want it, and
//! what a consumer does with the shards it may read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::streams::{StreamAutoClaimReply, StreamReadReply};
use redis::{RedisResult, cmd};
use rsc_protocol::hash::shard_of;
use rsc_protocol::keys::shard_key;
use rsc_protocol::routing::ProducerRouting;
use tokio::time::{MissedTickBehavior, interval};

use super::consumer::Shards;
use super::{GROUP, STREAM};

/// One record in so long.
const PUBLISH_EVERY: Duration = Duration::from_millis(50);
/// Records that one command reads of each shard, or takes over.
const BATCH: usize = 1_000;

/// The way to the demo's records, and how many there were.
#[derive(Clone)]
pub(crate) struct Records {
    connection: MultiplexedConnection,
    sent: Arc<AtomicU64>,
    read: Arc<AtomicU64>,
}

/// What producers were told, and until when it may be used.
struct Route {
    shard_count: u32,
    good_until: Instant,
    refresh_at: Instant,
}

impl Records {
    /// Connects to the private server.
    ///
    /// # Errors
    /// When it does not answer.
    pub(crate) async fn connect(port: u16) -> RedisResult<Self> {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}"))?;
        let connection = client.get_multiplexed_async_connection().await?;
        Ok(Records { connection, sent: Arc::default(), read: Arc::default() })
    }

    /// Records read and acknowledged, and records sent.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.read.load(Ordering::Relaxed), self.sent.load(Ordering::Relaxed))
    }

    /// Publishes for ever. Without a route that is still good nothing is sent.
    pub(crate) async fn publish(mut self, http: reqwest::Client, group_url: String) {
        let url = format!("{group_url}/producer-routing");
        let mut route: Option<Route> = None;
        let mut every = interval(PUBLISH_EVERY);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for number in 0_u64.. {
            every.tick().await;
            if route.as_ref().is_none_or(|route| route.refresh_at <= Instant::now()) {
                route = ask_for_route(&http, &url).await.or(route);
            }
            let good = route.as_ref().filter(|route| route.good_until > Instant::now());
            let key = format!("order-{number}");
            let Some(shard) = good.and_then(|route| shard_of(key.as_bytes(), route.shard_count)) else {
                continue;
            };
            // NOMKSTREAM: a shard that is gone must not come back because a producer has not heard of it.
            let mut add = cmd("XADD");
            add.arg(shard_key(STREAM, shard)).arg("NOMKSTREAM").arg("*").arg("key").arg(key);
            let added: RedisResult<Option<String>> = add.query_async(&mut self.connection).await;
            if let Ok(Some(_)) = added {
                self.sent.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Reads what is new in `shards`, and acknowledges it. What fails is pending, and somebody's later.
    pub(crate) async fn read(&mut self, consumer: &str, shards: &Shards) -> RedisResult<()> {
        if shards.is_empty() {
            return Ok(());
        }
        let keys: Vec<String> = shards.iter().map(|shard| shard_key(STREAM, *shard)).collect();
        let mut read = cmd("XREADGROUP");
        read.arg("GROUP").arg(GROUP).arg(consumer).arg("COUNT").arg(BATCH).arg("STREAMS").arg(&keys);
        read.arg(vec![">"; keys.len()]);
        let found: Option<StreamReadReply> = read.query_async(&mut self.connection).await?;
        for stream in found.into_iter().flat_map(|found| found.keys) {
            self.acknowledge(&stream.key, stream.ids.into_iter().map(|record| record.id).collect()).await?;
        }
        Ok(())
    }

    /// Takes over what former readers of `shards` left pending. Only for shards that may be read now: then
    /// nobody else works on them, however short their idle time.
    pub(crate) async fn take_over(&mut self, consumer: &str, shards: &Shards) -> RedisResult<()> {
        for shard in shards {
            let key = shard_key(STREAM, *shard);
            let mut claim = cmd("XAUTOCLAIM");
            claim.arg(&key).arg(GROUP).arg(consumer).arg(0).arg("0").arg("COUNT").arg(BATCH);
            let claimed: StreamAutoClaimReply = claim.query_async(&mut self.connection).await?;
            self.acknowledge(&key, claimed.claimed.into_iter().map(|record| record.id).collect()).await?;
        }
        Ok(())
    }

    async fn acknowledge(&mut self, key: &str, ids: Vec<String>) -> RedisResult<()> {
        if !ids.is_empty() {
            let mut acknowledge = cmd("XACK");
            acknowledge.arg(key).arg(GROUP).arg(ids);
            let acknowledged: u64 = acknowledge.query_async(&mut self.connection).await?;
            self.read.fetch_add(acknowledged, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Asks what to route with. Its time counts from when it was asked for.
async fn ask_for_route(http: &reqwest::Client, url: &str) -> Option<Route> {
    let asked = Instant::now();
    let answer = http.get(url).timeout(Duration::from_secs(1)).send().await.ok()?;
    let routing: ProducerRouting = answer.error_for_status().ok()?.json().await.ok()?;
    let lease = Duration::from_millis(routing.routing_cache_ttl_ms);
    Some(Route { shard_count: routing.shard_count, good_until: asked + lease, refresh_at: asked + lease / 3 })
}
