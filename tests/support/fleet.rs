//! Coordinators that get killed and are replaced, each behind a [`AmbushProxy`] of its own.

use std::time::Duration;

use reqwest::StatusCode;
use serde_json::Value;
use tokio::time::timeout;

use super::api::{Api, encode};
use super::consumer::Routes;
use super::daemon::{Daemon, DaemonBuilder};
use super::proxy::{Ambush, AmbushProxy};
use super::redis_server::RedisServer;
use super::wait::wait_until;

/// How long an answer is waited for: its coordinator may be dead.
const PATIENCE: Duration = Duration::from_secs(3);

/// Coordinators on one Redis. Whoever dies is replaced by [`Fleet::tend`].
pub(crate) struct Fleet {
    configure: fn(DaemonBuilder) -> DaemonBuilder,
    berths: Vec<(AmbushProxy, Daemon)>,
    routes: Routes,
    /// Replaced so far.
    pub(crate) replaced: usize,
}

async fn start(configure: fn(DaemonBuilder) -> DaemonBuilder, url: String) -> Daemon {
    // Not on this thread: consumers and proxies go on meanwhile.
    tokio::task::spawn_blocking(move || configure(Daemon::builder(&["--redis-url", &url])).start())
        .await
        .unwrap()
}

impl Fleet {
    /// Starts so many coordinators, which the ambush lies in wait for; `routes` lead to them, also to their successors.
    pub(crate) async fn start(
        redis: &RedisServer,
        count: usize,
        ambush: &Ambush,
        routes: &Routes,
        configure: fn(DaemonBuilder) -> DaemonBuilder,
    ) -> Self {
        let mut berths = Vec::new();
        for _ in 0..count {
            let proxy = AmbushProxy::start(redis.port(), ambush);
            let daemon = start(configure, proxy.url()).await;
            proxy.aim_at(daemon.pid());
            berths.push((proxy, daemon));
        }
        let fleet = Fleet { configure, berths, routes: routes.clone(), replaced: 0 };
        fleet.publish();
        fleet
    }

    fn publish(&self) {
        let apis: Vec<Api> = self.berths.iter().map(|(_, daemon)| daemon.api()).collect();
        self.routes.change(&apis.iter().collect::<Vec<_>>());
    }

    /// One that lives, as far as is known.
    pub(crate) fn api(&self) -> Api {
        self.routes.pick()
    }

    /// Replaces whoever has died.
    pub(crate) async fn tend(&mut self) {
        for index in 0..self.berths.len() {
            let (proxy, daemon) = &mut self.berths[index];
            if daemon.has_ended() {
                let url = proxy.url();
                let successor = start(self.configure, url).await;
                let (proxy, daemon) = &mut self.berths[index];
                *daemon = successor;
                proxy.aim_at(daemon.pid());
                self.replaced += 1;
                self.publish();
            }
        }
    }

    /// Asks again and again, whoever is there, until the answer is 202; meanwhile whoever dies is replaced.
    pub(crate) async fn ask(&mut self, path: &str, body: &Value) -> Value {
        let mut accepted = None;
        wait_until(&format!("POST {path} is answered 202"), async || {
            self.tend().await;
            let api = self.api();
            let answer =
                timeout(PATIENCE, api.try_send(api.request(reqwest::Method::POST, path).json(body))).await;
            let answer = answer.ok().and_then(Result::ok);
            accepted =
                answer.filter(|answer| answer.status == StatusCode::ACCEPTED).map(|answer| answer.json());
            accepted.is_some()
        })
        .await;
        accepted.unwrap_or_default()
    }

    /// Changes a stream's count.
    pub(crate) async fn scale(&mut self, prefix: &str, body: &Value) -> Value {
        self.ask(&format!("/coord/v1/streams/{}/scale", encode(prefix)), body).await
    }

    /// Waits until as many have died and been replaced since the start.
    pub(crate) async fn tend_until_replaced(&mut self, times: usize) {
        wait_until(&format!("{times} have been replaced"), async || {
            self.tend().await;
            self.replaced >= times
        })
        .await;
        assert_eq!(self.replaced, times);
    }

    /// Replaces whoever dies until the condition holds.
    pub(crate) async fn tend_until(&mut self, what: &str, mut condition: impl AsyncFnMut() -> bool) {
        wait_until(what, async || {
            self.tend().await;
            condition().await
        })
        .await;
    }
}
