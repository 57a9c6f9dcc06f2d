//! Clients: the decisions of the client crate (protocol 11) in a shell that sends real heartbeats, writes down what it reads,
//! and can be cut off, told to leave, or killed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use reqwest::{Method, StatusCode};
use rsc_client::decision::{Action, Consumer, End, Event, Identity, Settings, Work};
use rsc_protocol::{CapacityReport, GroupKey, HeartbeatRequest, HeartbeatResponse};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant as Timer, sleep_until};

use super::log::{Grant, Log, Reading, Transition};
use super::plan::{CLIENTS, HEARTBEAT, LEASE};
use super::support::{Routes, encode, group_path, monotonic_us};

/// How long a client takes at most to finish what it has in flight on a shard.
const LONGEST_DRAIN_MS: u64 = 300;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Go,
    /// Hears and says nothing, and reads on as long as its lease lasts.
    CutOff,
    Leave,
    Die,
}

/// What a run says about itself.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// Shards that it reads or drains.
    in_use: BTreeSet<u32>,
    drains: bool,
}

struct Run {
    orders: watch::Sender<Order>,
    seen: Arc<Mutex<Seen>>,
    task: JoinHandle<()>,
    is_cut_off: bool,
}

/// Clients `m0` to `m9`: for each what runs under its name now, if anything.
pub(crate) struct Clients {
    group: GroupKey,
    routes: Routes,
    log: Log,
    runs: Mutex<Vec<Option<Run>>>,
}

impl Clients {
    /// Nobody runs yet.
    pub(crate) fn new(group: &GroupKey, routes: &Routes, log: &Log) -> Self {
        let runs = Mutex::new((0..CLIENTS).map(|_| None).collect());
        Clients { group: group.clone(), routes: routes.clone(), log: log.clone(), runs }
    }

    /// A new run; what runs under the name is killed first.
    pub(crate) fn start(&self, index: usize) {
        self.die(index);
        let (orders, listen) = watch::channel(Order::Go);
        let seen = Arc::new(Mutex::new(Seen::default()));
        let id = format!("m{index}");
        let instance_id = uuid::Uuid::new_v4().to_string();
        let life = Life::new(self, &id, instance_id, Arc::clone(&seen));
        let run = Run { orders, seen, task: tokio::spawn(life.live(listen)), is_cut_off: false };
        self.runs.lock().unwrap()[index] = Some(run);
    }

    /// It says nothing more. What it read counts until its lease is over: it may have lost only the network.
    pub(crate) fn die(&self, index: usize) {
        self.order(index, Order::Die);
        self.runs.lock().unwrap()[index] = None;
    }

    /// It drains everything, says so, and is gone.
    pub(crate) fn leave(&self, index: usize) {
        self.order(index, Order::Leave);
        self.runs.lock().unwrap()[index] = None;
    }

    /// It hears and says nothing until [`Clients::reconnect`].
    pub(crate) fn cut_off(&self, index: usize) {
        self.order(index, Order::CutOff);
        if let Some(run) = &mut self.runs.lock().unwrap()[index] {
            run.is_cut_off = true;
        }
    }

    /// The end of [`Clients::cut_off`].
    pub(crate) fn reconnect(&self, index: usize) {
        self.order(index, Order::Go);
        if let Some(run) = &mut self.runs.lock().unwrap()[index] {
            run.is_cut_off = false;
        }
    }

    fn order(&self, index: usize, order: Order) {
        if let Some(run) = &self.runs.lock().unwrap()[index] {
            run.orders.send_replace(order);
        }
    }

    /// Those who run and can be heard.
    pub(crate) fn connected(&self) -> Vec<usize> {
        let runs = self.runs.lock().unwrap();
        let hears = |index: &usize| runs[*index].as_ref().is_some_and(|run| !run.is_cut_off);
        (0..runs.len()).filter(hears).collect()
    }

    /// Those who do not run.
    pub(crate) fn absent(&self) -> Vec<usize> {
        let runs = self.runs.lock().unwrap();
        (0..runs.len()).filter(|&index| runs[index].is_none()).collect()
    }

    /// Whether each of so many shards is read by one of those who run and can be heard, and nobody drains.
    pub(crate) fn cover(&self, shards: u32) -> bool {
        let mut read = Vec::new();
        for run in self.runs.lock().unwrap().iter().flatten().filter(|run| !run.is_cut_off) {
            assert!(!run.task.is_finished(), "a client was refused for good: {:?}", self.log.notes().answers);
            let seen = run.seen.lock().unwrap();
            if seen.drains {
                return false;
            }
            read.extend(seen.in_use.iter().copied());
        }
        read.sort_unstable();
        read == (0..shards).collect::<Vec<u32>>()
    }
}

impl fmt::Debug for Clients {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.runs.lock().unwrap();
        let shown =
            runs.iter().map(|run| run.as_ref().map(|run| (run.is_cut_off, run.seen.lock().unwrap().clone())));
        formatter.debug_list().entries(shown).finish()
    }
}

/// One run of a client.
struct Life {
    group_path: String,
    member_id: String,
    reader: Arc<str>,
    routes: Routes,
    log: Log,
    began: Instant,
    began_us: u64,
    decisions: Consumer,
    /// Shards that are being drained, and when nothing of them is in flight any more.
    drains: BTreeMap<u32, Duration>,
    /// The heartbeat on its way, and when it was sent.
    request: JoinSet<Event>,
    sent_us: u64,
    is_cut_off: bool,
    /// What it reads or drains, since when, and by which grant.
    reading: BTreeMap<u32, (u64, Grant)>,
    seen: Arc<Mutex<Seen>>,
}

impl Life {
    fn new(clients: &Clients, member_id: &str, instance_id: String, seen: Arc<Mutex<Seen>>) -> Self {
        let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let reader = format!("{member_id}#{}", &instance_id[..8]).into();
        let identity = Identity {
            member_id: member_id.to_owned(),
            member_name: None,
            instance_id,
            first_sequence: u64::try_from(since_1970.as_millis()).unwrap(),
        };
        let settings = Settings {
            heartbeat_interval: HEARTBEAT,
            request_timeout: Duration::from_millis(900),
            retry_pause: Duration::from_millis(100),
            assumed_lease: LEASE * 9 / 10,
        };
        let capacity = CapacityReport { runtime_max_concurrency: 4, available_concurrency: 4 };
        Life {
            group_path: group_path(&clients.group),
            member_id: member_id.to_owned(),
            reader,
            routes: clients.routes.clone(),
            log: clients.log.clone(),
            began: Instant::now(),
            began_us: monotonic_us(),
            decisions: Consumer::new(identity, settings, capacity),
            drains: BTreeMap::new(),
            request: JoinSet::new(),
            sent_us: 0,
            is_cut_off: false,
            reading: BTreeMap::new(),
            seen,
        }
    }

    async fn live(mut self, mut orders: watch::Receiver<Order>) {
        let mut event = Some(Event::Time);
        loop {
            if let Some(event) = event {
                self.handle(event);
            }
            if self.decisions.has_ended() {
                break;
            }
            event = self.next(&mut orders).await;
            let order = *orders.borrow_and_update();
            match order {
                Order::Go => self.is_cut_off = false,
                Order::CutOff => {
                    self.request = JoinSet::new();
                    self.is_cut_off = true;
                    // What came in between was not heard.
                    event = event.filter(|event| matches!(event, Event::Time | Event::Drain { .. }));
                }
                Order::Leave => event = event.or(Some(Event::Leave)),
                Order::Die => break,
            }
        }
        self.log.ended(&self.reader, monotonic_us());
        self.stop_all();
    }

    /// Waits for what happens next; `None`: there are new orders.
    async fn next(&mut self, orders: &mut watch::Receiver<Order>) -> Option<Event> {
        let instant = |at: Duration| Timer::from_std(self.began + at);
        let wake = instant(self.decisions.wakes_at().unwrap_or_default());
        let drained = self.drains.iter().map(|(shard, at)| (*at, *shard)).min();
        tokio::select! {
            biased;
            // An error means that the test has failed and dropped the clients: the run ends with its runtime.
            Ok(()) = orders.changed() => None,
            () = sleep_until(wake) => Some(Event::Time),
            Some(Ok(event)) = self.request.join_next() => Some(event),
            () = sleep_until(instant(drained.unwrap_or_default().0)), if drained.is_some() => {
                let shard = drained.map(|(_, shard)| shard)?;
                self.drains.remove(&shard);
                Some(Event::Drain { shard, in_flight: 0 })
            }
        }
    }

    fn handle(&mut self, event: Event) {
        let now = self.began.elapsed();
        // What it reads it reads as long as the lease that it had lasted, however late this is looked at.
        let lease_until_us = self.decisions.lease_until().map_or(0, |until| self.at_us(until));
        let answer = match &event {
            Event::Answer(response) => Some((response.status, self.grant_of(response))),
            _ => None,
        };
        let mut started = Vec::new();
        let had_lease = self.decisions.lease_until();
        for action in self.decisions.handle(now, event) {
            match action {
                Action::Send(request) => self.send(*request),
                Action::Start(shard) => {
                    self.drains.remove(&shard.shard_index);
                    started.push(shard);
                }
                Action::Drain(shard) => {
                    let takes = Duration::from_millis(rand::random_range(0..LONGEST_DRAIN_MS));
                    self.drains.insert(shard, now + takes);
                }
                Action::Abandon(shard) => {
                    self.drains.remove(&shard);
                }
                Action::Ended(End::Left) => {}
                Action::Ended(refused) => self.log.answered(&format!("{refused:?} of {}", self.reader)),
            }
        }
        let was_applied = !started.is_empty() || self.decisions.lease_until() != had_lease;
        let now_us = self.at_us(now);
        let in_use = |(_, work): &(u32, Work)| *work != Work::Drained;
        let in_use: BTreeSet<u32> = self.decisions.shards().filter(in_use).map(|(shard, _)| shard).collect();
        for shard in self.reading.keys().copied().collect::<Vec<_>>() {
            if !in_use.contains(&shard) {
                self.stop(shard, now_us.min(lease_until_us));
            }
        }
        if let Some((status, grant)) = answer {
            for shard in &started {
                let fencing_token = shard.fencing_token.unwrap_or_default();
                let grant = Grant { fencing_token, ..grant.clone() };
                // Who goes back to a shard that it was draining has never stopped.
                self.reading.entry(shard.shard_index).or_insert((now_us, grant));
            }
            if was_applied {
                self.log.told(&self.reader, status, &grant, started.len());
            }
        }
        let drains = self.decisions.shards().any(|(_, work)| work != Work::Reading);
        *self.seen.lock().unwrap() = Seen { in_use, drains };
    }

    fn grant_of(&self, response: &HeartbeatResponse) -> Grant {
        let transition =
            Transition { version: response.metadata_version, token: response.metadata_token.clone() };
        Grant { transition, fencing_token: 0, sent_us: self.sent_us, received_us: monotonic_us() }
    }

    /// Sends a heartbeat to any coordinator; one that is still on its way has been given up.
    fn send(&mut self, request: HeartbeatRequest) {
        self.request = JoinSet::new();
        self.sent_us = monotonic_us();
        if self.is_cut_off {
            return;
        }
        let api = self.routes.pick();
        let path = format!("{}/members/{}/heartbeat", self.group_path, encode(&self.member_id));
        let log = self.log.clone();
        self.request.spawn(async move {
            let sent = api.try_send(api.request(Method::POST, &path).json(&request)).await;
            match sent {
                Ok(answer) if answer.status == StatusCode::OK => {
                    let response: HeartbeatResponse = answer.read();
                    log.answered(response.status.as_str());
                    return Event::Answer(Box::new(response));
                }
                Ok(answer) => log.answered(answer.json()["errorCode"].as_str().unwrap_or("no error code")),
                Err(_) => log.answered("no answer"),
            }
            Event::Failed { request_id: request.request_id }
        });
    }

    fn at_us(&self, at: Duration) -> u64 {
        self.began_us + u64::try_from(at.as_micros()).unwrap()
    }

    fn stop(&mut self, shard: u32, until_us: u64) {
        if let Some((from_us, grant)) = self.reading.remove(&shard) {
            self.log.read(Reading { shard, reader: Arc::clone(&self.reader), from_us, until_us, grant });
        }
    }

    fn stop_all(&mut self) {
        let until_us = self.decisions.lease_until().map_or(0, |until| self.at_us(until));
        for shard in self.reading.keys().copied().collect::<Vec<_>>() {
            self.stop(shard, until_us);
        }
        *self.seen.lock().unwrap() = Seen::default();
    }
}
