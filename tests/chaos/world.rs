//! Everything that runs: servers, sentinels, coordinators, clients.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rsc_protocol::GroupKey;
use tokio::task::spawn_blocking;

use super::clients::Clients;
use super::log::Log;
use super::plan::{DOWN_AFTER, HEARTBEAT, LEASE, MUTEX_TTL, Plan, SHARDS};
use super::support::redis_topologies::{RedisSentinel, SentinelSettings};
use super::support::{Api, Daemon, Routes, group_path, monitored_path};
use super::witness::Witness;

/// Coordinators.
pub(crate) const DAEMONS: usize = 2;

/// What no coordinator may ever log.
const NEVER: [&str; 3] = ["invariants do not hold", "panicked", "the group's actor crashed"];

/// A coordinator's place: whoever is killed is replaced.
struct Berth {
    daemon: Daemon,
    /// Killed, and not replaced yet; or paused.
    is_struck: bool,
}

/// All of it. Everything ends with it.
pub(crate) struct World {
    pub(crate) redis: Arc<RedisSentinel>,
    pub(crate) group: GroupKey,
    pub(crate) clients: Clients,
    pub(crate) log: Log,
    routes: Routes,
    wait_replicas: usize,
    berths: Mutex<Vec<Berth>>,
    /// Lines of coordinators' logs that should not be there.
    pub(crate) complaints: Mutex<Vec<String>>,
    /// How often each warning and error stood in coordinators' logs.
    pub(crate) warnings: Mutex<BTreeMap<String, u64>>,
}

impl World {
    /// Starts servers and coordinators, creates the group, starts clients, and waits until all shards are read.
    pub(crate) async fn start(plan: &Plan) -> (Arc<Self>, Witness) {
        let settings = SentinelSettings {
            down_after_ms: u64::try_from(DOWN_AFTER.as_millis()).unwrap(),
            ..SentinelSettings::default()
        };
        let redis = spawn_blocking(move || RedisSentinel::start_with(settings)).await.unwrap();
        let ports: Vec<u16> = redis.servers().map(|index| redis.server(index).port()).collect();
        let group = GroupKey::new("orders", "orders").unwrap();
        let witness = Witness::start(&ports, &group);
        let redis = Arc::new(redis);
        let mut berths = Vec::new();
        for _ in 0..DAEMONS {
            berths.push(Berth { daemon: start_daemon(&redis, plan.wait_replicas).await, is_struck: false });
        }
        let apis: Vec<Api> = berths.iter().map(|berth| berth.daemon.api()).collect();
        apis[0].create_stream("orders", SHARDS).await;
        let routes = Routes::to(&apis.iter().collect::<Vec<_>>());
        let log = Log::default();
        let clients = Clients::new(&group, &routes, &log);
        let world = World {
            redis,
            group,
            clients,
            log,
            routes,
            wait_replicas: plan.wait_replicas,
            berths: Mutex::new(berths),
            complaints: Mutex::default(),
            warnings: Mutex::default(),
        };
        for index in world.clients.absent() {
            world.clients.start(index);
        }
        (Arc::new(world), witness)
    }

    /// One of the coordinators, dead or alive.
    pub(crate) fn api(&self) -> Api {
        self.routes.pick()
    }

    /// Coordinators that live and are not paused.
    pub(crate) fn serving(&self) -> Vec<usize> {
        let berths = self.berths.lock().unwrap();
        (0..berths.len()).filter(|&index| !berths[index].is_struck).collect()
    }

    /// `kill -9`. Clients go on asking at its address.
    pub(crate) fn kill_daemon(&self, index: usize) {
        let mut berths = self.berths.lock().unwrap();
        berths[index].is_struck = true;
        berths[index].daemon.kill();
        self.read_log(&berths[index].daemon);
    }

    /// A successor of a killed one, on another port.
    pub(crate) async fn replace_daemon(&self, index: usize) {
        let daemon = start_daemon(&self.redis, self.wait_replicas).await;
        let mut berths = self.berths.lock().unwrap();
        berths[index] = Berth { daemon, is_struck: false };
        let apis: Vec<Api> = berths.iter().map(|berth| berth.daemon.api()).collect();
        self.routes.change(&apis.iter().collect::<Vec<_>>());
    }

    /// `SIGSTOP`.
    pub(crate) fn pause_daemon(&self, index: usize) {
        let mut berths = self.berths.lock().unwrap();
        berths[index].is_struck = true;
        berths[index].daemon.pause();
    }

    /// `SIGCONT`.
    pub(crate) fn resume_daemon(&self, index: usize) {
        let mut berths = self.berths.lock().unwrap();
        berths[index].daemon.resume();
        berths[index].is_struck = false;
    }

    /// What the group and the clients look like, for people.
    pub(crate) async fn describe(&self) -> String {
        let api = self.api();
        let path = format!("{}/members", monitored_path(&self.group));
        let mut shown = Vec::new();
        for path in [group_path(&self.group), path] {
            let answer = api.try_send(api.request(reqwest::Method::GET, &path)).await;
            shown.push(answer.map_or_else(
                |error| error.to_string(),
                |answer| String::from_utf8_lossy(&answer.body).into_owned(),
            ));
        }
        format!("the clients {:?}; the group {}", self.clients, shown.join("; its members "))
    }

    /// The sum of a metric over the coordinators that run.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let apis: Vec<Api> = self.berths.lock().unwrap().iter().map(|berth| berth.daemon.api()).collect();
        let mut sum = 0.0;
        for api in apis {
            sum += api.metric(name).await;
        }
        sum
    }

    /// Reads the logs of those that still run.
    pub(crate) fn read_logs(&self) {
        self.berths.lock().unwrap().iter().for_each(|berth| self.read_log(&berth.daemon));
    }

    fn read_log(&self, daemon: &Daemon) {
        let log = daemon.log();
        for line in log.lines() {
            if NEVER.iter().any(|never| line.contains(never)) {
                self.complaints.lock().unwrap().push(line.to_owned());
            }
            // `2026-11-30T09:00:00.000000Z  WARN rsc_actors::section: what it is about field=value …`
            let words: Vec<&str> = line.split_whitespace().collect();
            if let [_, level @ ("WARN" | "ERROR"), _, message @ ..] = &words[..] {
                let message: Vec<&str> =
                    message.iter().copied().take_while(|word| !word.contains('=')).collect();
                let name = format!("{level} {}", message.join(" "));
                *self.warnings.lock().unwrap().entry(name).or_default() += 1;
            }
        }
    }
}

async fn start_daemon(redis: &Arc<RedisSentinel>, wait_replicas: usize) -> Daemon {
    let ms = |time: Duration| format!("{}ms", time.as_millis());
    let builder = Daemon::builder(&["--redis-mode", "sentinel"])
        .lease(u64::try_from(LEASE.as_millis()).unwrap(), u64::try_from(LEASE.as_millis()).unwrap() * 2)
        .set("telemetry", "log-filter", "info")
        .set("redis", "urls", &redis.sentinel_urls().join(","))
        .set("redis", "sentinel-master", redis.name())
        .set("redis", "wait-replicas", &wait_replicas.to_string())
        // A ninth of the lease: so each request is answered within a third of it while Redis hangs.
        .set("redis", "command-timeout", &ms(LEASE / 9))
        .set("coordination", "heartbeat-interval", &ms(HEARTBEAT))
        .set("coordination", "mutex-ttl", &ms(MUTEX_TTL))
        .set("coordination", "mutex-acquire-timeout", &ms(MUTEX_TTL));
    spawn_blocking(|| builder.start()).await.unwrap()
}
