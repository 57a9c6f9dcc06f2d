//! A consumer that lives by itself: heartbeats in real time, a lease of its own (protocol 11), several
//! coordinators to choose from, and a journal of what it read when.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use reqwest::{Method, StatusCode};
use rsc_protocol::admin::{GroupResponse, GroupState};
use rsc_protocol::{GroupKey, HeartbeatRequest, HeartbeatResponse, RevokingState, Status};
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::api::{Api, encode, group_path, monitored_path};
use super::journal::{Journal, Reading, monotonic_us};
use super::member::Member;
use super::records::Source;
use super::replay::Versions;
use super::wait::wait_until;

/// The coordinators that consumers may talk to; each heartbeat goes to one of them at random. Clones are the
/// same.
#[derive(Clone)]
pub(crate) struct Routes(Arc<Mutex<(Vec<Api>, StdRng)>>);

impl Routes {
    /// These coordinators.
    pub(crate) fn to(apis: &[&Api]) -> Self {
        Routes::seeded(apis, rand::random())
    }

    /// The same, and this seed decides which one is picked.
    pub(crate) fn seeded(apis: &[&Api], seed: u64) -> Self {
        let routes = Routes(Arc::new(Mutex::new((Vec::new(), StdRng::seed_from_u64(seed)))));
        routes.change(apis);
        routes
    }

    /// These from now on.
    pub(crate) fn change(&self, apis: &[&Api]) {
        self.0.lock().unwrap().0 = apis.iter().map(|&api| api.clone()).collect();
    }

    /// One of them, at random.
    pub(crate) fn pick(&self) -> Api {
        let (apis, chance) = &mut *self.0.lock().unwrap();
        apis.choose(chance).unwrap().clone()
    }
}

/// What consumers of one test have in common.
#[derive(Clone)]
pub(crate) struct Crew {
    pub(crate) group: GroupKey,
    pub(crate) routes: Routes,
    pub(crate) journal: Journal,
    /// Between the answer to one heartbeat and the next one.
    pub(crate) interval: Duration,
    /// How long an answer is waited for.
    pub(crate) patience: Duration,
    /// What they read between heartbeats; `None`: they only say that they do.
    pub(crate) source: Option<Source>,
    /// Where they compare what they are told; `None` where Redis may lose what they were told.
    pub(crate) versions: Option<Versions>,
}

impl Crew {
    /// Consumers that send a heartbeat every 100 ms.
    pub(crate) fn new(group: &GroupKey, routes: &Routes) -> Self {
        Crew {
            group: group.clone(),
            routes: routes.clone(),
            journal: Journal::default(),
            interval: Duration::from_millis(100),
            patience: Duration::from_secs(5),
            source: None,
            versions: None,
        }
    }

    /// The same, and they read records.
    pub(crate) fn reading(group: &GroupKey, routes: &Routes, source: &Source) -> Self {
        Crew { source: Some(source.clone()), ..Crew::new(group, routes) }
    }

    /// A consumer starts.
    pub(crate) fn start(&self, id: &str) -> Consumer {
        let (orders, listen) = watch::channel(Order::Go);
        let seen = Arc::new(Mutex::new(Seen::default()));
        let member = Member::new(&self.routes.pick(), &self.group, id);
        let run = member.instance_id.clone().unwrap_or_default();
        let life = Life {
            crew: self.clone(),
            reader: format!("{id}#{run}"),
            member,
            lease_until_us: 0,
            reading: BTreeMap::new(),
            claimed: BTreeSet::new(),
            seen: seen.clone(),
        };
        Consumer { id: id.to_owned(), orders, seen, task: tokio::spawn(life.live(listen)) }
    }

    /// Starts consumers `m0`, `m1` …
    pub(crate) fn start_many(&self, count: usize) -> Vec<Consumer> {
        (0..count).map(|index| self.start(&format!("m{index}"))).collect()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Go,
    Leave,
    Crash,
}

/// What a test may look at while the consumer lives.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// Shards it reads or drains now.
    pub(crate) reading: BTreeSet<u32>,
    /// How often each answer came: the status of a heartbeat, the error code of a refusal, `none`.
    pub(crate) answers: BTreeMap<String, u64>,
    /// The longest time that an answer, whichever, took.
    pub(crate) slowest: Duration,
    /// When last no answer came, or a refusal, in [`monotonic_us`].
    pub(crate) failed_us: u64,
    /// Whether it drains nothing and its last answer was `OK`.
    pub(crate) settled: bool,
}

/// A consumer that runs until it is told to leave or to crash.
pub(crate) struct Consumer {
    id: String,
    orders: watch::Sender<Order>,
    seen: Arc<Mutex<Seen>>,
    task: JoinHandle<()>,
}

impl Consumer {
    /// Its member id.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// What it has seen so far.
    pub(crate) fn seen(&self) -> Seen {
        self.seen.lock().unwrap().clone()
    }

    /// How often this answer came.
    pub(crate) fn answers(&self, name: &str) -> u64 {
        self.seen.lock().unwrap().answers.get(name).copied().unwrap_or(0)
    }

    /// It stops reading, says so, and ends.
    pub(crate) async fn leave(self) -> Seen {
        self.end(Order::Leave).await
    }

    /// It says nothing more. It goes on reading until its lease is over, as one does who has lost the network.
    pub(crate) async fn crash(self) -> Seen {
        self.end(Order::Crash).await
    }

    async fn end(self, order: Order) -> Seen {
        // When the task has ended by itself it has failed, and says so below.
        let _ = self.orders.send(order);
        self.task.await.unwrap();
        self.seen.lock().unwrap().clone()
    }
}

/// Waits until the group is `STABLE` with exactly these members, nobody drains, and each of its `shards`
/// shards is read by one of them.
pub(crate) async fn settle(api: &Api, group: &GroupKey, consumers: &[Consumer], shards: usize) {
    wait_until("everybody has settled", async || {
        let answer = api.get(&group_path(group)).await;
        if answer.status != StatusCode::OK {
            return false;
        }
        let shown: GroupResponse = answer.read();
        let seen: Vec<Seen> = consumers.iter().map(Consumer::seen).collect();
        let read: Vec<u32> = seen.iter().flat_map(|seen| seen.reading.iter().copied()).collect();
        shown.state == GroupState::Stable
            && shown.live_members == consumers.len()
            && seen.iter().all(|seen| seen.settled)
            && read.len() == shards
            && read.iter().collect::<BTreeSet<_>>().len() == shards
    })
    .await;
    let assignments = api.get(&format!("{}/assignments", monitored_path(group))).await.success();
    assert_eq!(assignments["invariantViolations"], json!([]), "{assignments}");
}

/// The consumer's own side.
struct Life {
    crew: Crew,
    reader: String,
    member: Member,
    /// Until when it may read, in [`monotonic_us`].
    lease_until_us: u64,
    /// What it reads, and since when.
    reading: BTreeMap<u32, u64>,
    /// Shards whose pending entries of former owners it has taken over.
    claimed: BTreeSet<u32>,
    seen: Arc<Mutex<Seen>>,
}

impl Life {
    async fn live(mut self, mut orders: watch::Receiver<Order>) {
        self.member.drains_slowly = true;
        loop {
            self.beat().await;
            self.read_records().await;
            let order = match timeout(self.crew.interval, orders.wait_for(|order| *order != Order::Go)).await
            {
                Err(_) => Order::Go,
                // The test has failed and dropped the consumer.
                Ok(Err(_)) => return,
                Ok(Ok(order)) => *order,
            };
            match order {
                Order::Go => {}
                Order::Leave => return self.leave().await,
                Order::Crash => return self.stop_all(self.lease_until_us),
            }
        }
    }

    async fn beat(&mut self) {
        self.keep_lease();
        // A drain takes some heartbeats; it is over before it is reported.
        if rand::random_bool(0.5) {
            self.member.finish_drains();
            self.keep_books();
        }
        let request = self.member.request();
        let sent_us = monotonic_us();
        let Some(response) = self.ask(&request).await else { return };
        // What comes after the lease has run out is not acted upon.
        if self.keep_lease() {
            return;
        }
        if matches!(response.status, Status::Ok | Status::SyncMetadata | Status::RevokePending) {
            self.lease_until_us = sent_us + response.assignment_lease_ms * 1_000;
        }
        self.member.apply(&request, &response);
        self.keep_books();
        let settled = response.status == Status::Ok && self.member.draining.is_empty();
        self.seen.lock().unwrap().settled = settled;
    }

    /// Reads once whatever there is in the shards that it owns and does not drain, as long as its lease lasts.
    async fn read_records(&mut self) {
        let Some(source) = self.crew.source.clone() else { return };
        self.claimed.retain(|shard| self.member.owned.contains(shard));
        for shard in self.member.owned.clone() {
            if monotonic_us() >= self.lease_until_us {
                return;
            }
            let takes_over = !self.claimed.contains(&shard);
            if source.read(&self.crew.group, shard, self.member.id(), takes_over).await {
                self.claimed.insert(shard);
            }
        }
    }

    async fn leave(mut self) {
        self.stop_all(monotonic_us());
        self.member.draining.extend(self.member.owned.iter().map(|&shard| (shard, RevokingState::Revoked)));
        self.member.finish_drains();
        self.member.owned.clear();
        self.member.epoch = rsc_protocol::heartbeat::EPOCH_LEAVE;
        while monotonic_us() < self.lease_until_us {
            let request = self.member.request();
            if self.ask(&request).await.is_some_and(|response| response.status != Status::Retry) {
                return;
            }
            tokio::time::sleep(self.crew.interval).await;
        }
    }

    /// Sends a heartbeat and counts what comes.
    async fn ask(&mut self, request: &HeartbeatRequest) -> Option<HeartbeatResponse> {
        let api = self.crew.routes.pick();
        let path = format!("{}/members/{}/heartbeat", group_path(&self.crew.group), encode(self.member.id()));
        let asked = Instant::now();
        let sending = api.try_send(api.request(Method::POST, &path).json(request));
        let answer = timeout(self.crew.patience, sending).await.ok().and_then(Result::ok);
        let mut response = None;
        let name = match &answer {
            None => "none".to_owned(),
            Some(answer) if answer.status == StatusCode::OK => {
                let read: HeartbeatResponse = answer.read();
                assert_eq!(read.response_to, request.request_id);
                let name = read.status.as_str().to_owned();
                response = Some(read);
                name
            }
            Some(answer) => answer.json()["errorCode"].as_str().unwrap_or("no error code").to_owned(),
        };
        let told = response.as_ref().filter(|response| response.status == Status::Ok);
        if let (Some(versions), Some(told)) = (&self.crew.versions, told) {
            versions.note(told.metadata_version, &told.metadata_token);
        }
        let mut seen = self.seen.lock().unwrap();
        *seen.answers.entry(name).or_default() += 1;
        seen.slowest = seen.slowest.max(asked.elapsed());
        if response.is_none() {
            seen.failed_us = monotonic_us();
        }
        response
    }

    /// When the lease is over: stop reading and join anew. Returns whether it was.
    fn keep_lease(&mut self) -> bool {
        let has_joined = self.member.epoch != 0;
        if !has_joined || monotonic_us() < self.lease_until_us {
            return false;
        }
        self.stop_all(self.lease_until_us);
        self.member.owned.clear();
        self.member.draining.clear();
        self.member.epoch = 0;
        let mut seen = self.seen.lock().unwrap();
        *seen.answers.entry("lease over".to_owned()).or_default() += 1;
        seen.settled = false;
        true
    }

    /// Notes what it reads from now on and what it no longer reads.
    fn keep_books(&mut self) {
        let now = monotonic_us();
        let draining = self.member.draining.iter().filter(|(_, state)| **state != RevokingState::Revoked);
        let reads: BTreeSet<u32> =
            self.member.owned.iter().copied().chain(draining.map(|(&shard, _)| shard)).collect();
        let stopped: Vec<u32> = self.reading.keys().copied().filter(|shard| !reads.contains(shard)).collect();
        for shard in stopped {
            self.stop(shard, now);
        }
        for &shard in &reads {
            self.reading.entry(shard).or_insert(now);
        }
        self.seen.lock().unwrap().reading = reads;
    }

    fn stop(&mut self, shard: u32, at_us: u64) {
        if let Some(from_us) = self.reading.remove(&shard) {
            let reader = self.reader.clone();
            self.crew.journal.note(Reading {
                shard,
                reader,
                from_us,
                until_us: at_us.min(self.lease_until_us),
            });
        }
    }

    fn stop_all(&mut self, at_us: u64) {
        for shard in self.reading.keys().copied().collect::<Vec<_>>() {
            self.stop(shard, at_us);
        }
        self.seen.lock().unwrap().reading.clear();
    }
}
