//! Random schedules against the real state machine: loss, delay, duplication and reordering of messages,
//! crashes, restarts, second processes of one id, silent drains, lies, instances out of service. After every
//! step: every invariant of the record (the bench checks them), and the one on what consumers *believe*: no
//! shard is read by two processes whose lease still runs. At the end the faults stop and the group must heal.
//!
//! This is the small sister of the deterministic simulation that comes with protocol section 5.
#![expect(clippy::panic, clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeSet;

use proptest::prelude::*;
use rsc_core::Reply;
use rsc_protocol::admin::GroupState;
use rsc_protocol::{HeartbeatRequest, HeartbeatResponse, Status, Timestamp};
use support::*;

const IDS: [&str; 3] = ["a", "b", "c"];
const SHARDS: u32 = 5;

/// One process of a consumer, as protocol 11 wants it.
#[derive(Debug)]
struct Process {
    id: &'static str,
    instance: Option<String>,
    orders: bool,
    /// Knows no drain: what is taken from it, it stops at once and no longer names.
    legacy: bool,
    /// When it was allowed each shard that it reads.
    started: std::collections::BTreeMap<u32, Timestamp>,
    sequence: u64,
    epoch: i64,
    version: u64,
    token: String,
    reading: BTreeSet<u32>,
    draining: BTreeSet<u32>,
    finished: BTreeSet<u32>,
    lease_until: Timestamp,
    in_flight: Option<(String, Timestamp)>,
    leaving: bool,
    running: bool,
}

impl Process {
    fn new(id: &'static str, instance: Option<String>, kind: Kind) -> Self {
        Process {
            id,
            instance,
            orders: matches!(kind, Kind::Full),
            legacy: matches!(kind, Kind::Legacy),
            started: std::collections::BTreeMap::new(),
            sequence: 0,
            epoch: 0,
            version: 0,
            token: String::new(),
            reading: BTreeSet::new(),
            draining: BTreeSet::new(),
            finished: BTreeSet::new(),
            lease_until: Timestamp::MIN,
            in_flight: None,
            leaving: false,
            running: true,
        }
    }

    fn forget(&mut self) {
        self.reading.clear();
        self.draining.clear();
        self.finished.clear();
        self.epoch = 0;
        self.leaving = false;
    }

    /// What this process may be touching now, as far as it knows itself.
    fn touches(&self, now: Timestamp) -> impl Iterator<Item = u32> + '_ {
        let alive = self.running && now < self.lease_until;
        self.reading.iter().chain(&self.draining).copied().filter(move |_| alive)
    }

    fn notice_time(&mut self, now: Timestamp) {
        if self.epoch != 0 && now >= self.lease_until {
            self.forget();
            self.in_flight = None;
        }
    }

    fn request(&mut self, bench: &mut Bench) -> HeartbeatRequest {
        self.sequence += 1;
        let list = |shards: &BTreeSet<u32>| shards.iter().copied().collect::<Vec<_>>();
        let epoch = if self.leaving && self.epoch > 0 { -1 } else { self.epoch };
        let mut request = bench
            .request(self.id)
            .epoch(epoch)
            .version(self.version)
            .owned(&list(&self.reading))
            .draining(&list(&self.draining))
            .revoked(&list(&self.finished));
        if let Some(instance) = &self.instance {
            request = request.instance(instance, self.sequence);
            request.metadata_token = Some(self.token.clone());
            request.sequence = request.sequence.filter(|_| self.orders);
        }
        self.in_flight = Some((request.request_id.clone(), bench.now));
        request
    }

    fn receive(&mut self, response: &HeartbeatResponse, now: Timestamp) {
        let Some((request_id, sent_at)) = &self.in_flight else {
            return;
        };
        if *request_id != response.response_to || !self.running {
            return;
        }
        let sent_at = *sent_at;
        self.in_flight = None;
        match response.status {
            Status::Ok => {
                let lease = i64::try_from(response.assignment_lease_ms).unwrap();
                self.lease_until = self.lease_until.max(sent_at.plus(lease));
                self.version = response.metadata_version;
                self.token.clone_from(&response.metadata_token);
                let assigned: BTreeSet<u32> = assigned(response).into_iter().collect();
                self.finished.clear();
                if !self.legacy {
                    self.draining.extend(self.reading.difference(&assigned));
                }
                self.started.retain(|shard, _| self.reading.contains(shard));
                for shard in &assigned {
                    self.started.entry(*shard).or_insert(now);
                }
                self.draining.retain(|shard| !assigned.contains(shard));
                self.reading = assigned;
                if self.leaving {
                    if self.draining.is_empty() && self.reading.is_empty() {
                        self.running = false;
                    }
                } else {
                    self.epoch = response.member_epoch;
                }
            }
            Status::Retry => {}
            Status::UnknownMemberId | Status::FencedMemberEpoch => {
                self.forget();
                self.version = response.metadata_version;
            }
            Status::InvalidRequest | Status::UnsupportedProtocol => {
                self.forget();
                self.running = false;
            }
            Status::SyncMetadata | Status::RevokePending => {
                let lease = i64::try_from(response.assignment_lease_ms).unwrap();
                self.lease_until = self.lease_until.max(sent_at.plus(lease));
                self.version = response.metadata_version;
                self.token.clone_from(&response.metadata_token);
                self.epoch = response.member_epoch;
                let assigned: BTreeSet<u32> = assigned(response).into_iter().collect();
                self.finished.clear();
                let lost: BTreeSet<u32> = self.reading.difference(&assigned).copied().collect();
                self.reading.retain(|shard| assigned.contains(shard));
                if !self.legacy {
                    self.draining.extend(lost);
                }
            }
        }
    }

    fn finish_drains(&mut self) {
        self.finished.append(&mut self.draining);
    }

    fn begin_leaving(&mut self) {
        if self.epoch > 0 {
            self.leaving = true;
            self.draining.append(&mut self.reading);
            if self.legacy {
                self.draining.clear();
            }
        }
    }
}

/// Which of our additions a client sends.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Legacy,
    Old,
    InstanceOnly,
    Full,
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Legacy), Just(Kind::Old), Just(Kind::InstanceOnly), Just(Kind::Full)]
}

#[derive(Clone, Debug)]
enum Action {
    /// A process gives up on what is in flight and sends anew.
    Send(usize),
    /// A message in the network arrives; `keep`: a copy stays in the network; `lost`: the answer is lost.
    Deliver {
        message: usize,
        keep: bool,
        lost: bool,
    },
    /// Two messages arrive in one batch.
    DeliverTwo {
        one: usize,
        other: usize,
    },
    Pass(i64),
    FinishDrains(usize),
    /// A process dies; a new one of the same id starts.
    Restart {
        process: usize,
        kind: Kind,
    },
    /// A second process of an id that may still be running.
    Second {
        id: usize,
        kind: Kind,
    },
    Leave(usize),
    /// A broken client claims shards that it does not read, besides those that it does. (One that hides what
    /// it reads cannot be told from one that has stopped.)
    Lie {
        process: usize,
        shards: BTreeSet<u32>,
    },
    Service(bool),
    Grants(bool),
    /// Redis loses its last writes.
    Rollback(usize),
    /// The running actor notices.
    Notice,
    Tick,
}

fn action() -> impl Strategy<Value = Action> {
    let process = 0_usize..8;
    prop_oneof![
        30 => process.clone().prop_map(Action::Send),
        30 => (any::<prop::sample::Index>(), prop::bool::weighted(0.2), prop::bool::weighted(0.2))
            .prop_map(|(message, keep, lost)| Action::Deliver { message: message.index(64), keep, lost }),
        5 => (0_usize..64, 0_usize..64).prop_map(|(one, other)| Action::DeliverTwo { one, other }),
        12 => prop_oneof![Just(100_i64), Just(3_000), Just(7_000), Just(14_900), Just(15_100), Just(61_000)]
            .prop_map(Action::Pass),
        12 => process.clone().prop_map(Action::FinishDrains),
        3 => (process.clone(), kind()).prop_map(|(process, kind)| Action::Restart { process, kind }),
        2 => (0_usize..3, kind()).prop_map(|(id, kind)| Action::Second { id, kind }),
        3 => process.clone().prop_map(Action::Leave),
        3 => (process, prop::collection::btree_set(0_u32..SHARDS + 2, 1..4))
            .prop_map(|(process, shards)| Action::Lie { process, shards }),
        2 => any::<bool>().prop_map(Action::Service),
        1 => any::<bool>().prop_map(Action::Grants),
        4 => Just(Action::Tick),
        2 => (1_usize..8).prop_map(Action::Rollback),
        1 => Just(Action::Notice),
    ]
}

/// One line of the trace: what a member said.
fn told(command: &rsc_core::Command, now: Timestamp) -> String {
    let rsc_core::Command::Heartbeat { request, .. } = command else { return format!("{command:?}") };
    let owned: Vec<u32> = request.owned_shards.iter().map(|shard| shard.shard_index).collect();
    let revoking: Vec<_> =
        request.revoking_shards.iter().map(|report| (report.shard.shard_index, report.state)).collect();
    format!(
        "{:6} {} -> {}/{} seq {:?} epoch {} v{} {:?} owned {owned:?} revoking {revoking:?}",
        now.as_millis() - START,
        request.request_id,
        request.member_id,
        request.instance_id.as_deref().unwrap_or("-"),
        request.sequence,
        request.member_epoch,
        request.metadata_version,
        request.metadata_token,
    )
}

/// One line of the trace: what it was answered.
fn answered(reply: &Reply, lost: bool) -> String {
    let Reply::Heartbeat(response) = reply else { return format!("       {reply:?}") };
    format!(
        "       {} <- {:?} epoch {} v{} assigned {:?} pending {:?}{} {}",
        response.response_to,
        response.status,
        response.member_epoch,
        response.metadata_version,
        assigned(response),
        pending(response),
        if lost { " (lost)" } else { "" },
        response.reason,
    )
}

struct World {
    bench: Bench,
    processes: Vec<Process>,
    network: Vec<HeartbeatRequest>,
    instances: u64,
    /// When Redis lost writes, and when the record first showed a sign of it.
    losses: Vec<(Timestamp, Option<Timestamp>)>,
    /// What happened, for people.
    trace: Vec<String>,
}

impl World {
    fn new() -> Self {
        let mut world = World {
            bench: Bench::new(SHARDS),
            processes: Vec::new(),
            network: Vec::new(),
            instances: 0,
            losses: Vec::new(),
            trace: Vec::new(),
        };
        world.start("a", Kind::Full);
        world.start("b", Kind::Old);
        world.start("c", Kind::Full);
        world
    }

    fn start(&mut self, id: &'static str, kind: Kind) {
        self.instances += 1;
        let instance =
            matches!(kind, Kind::InstanceOnly | Kind::Full).then(|| format!("instance-{}", self.instances));
        self.processes.push(Process::new(id, instance, kind));
    }

    fn act(&mut self, action: &Action) {
        if !matches!(action, Action::Deliver { .. } | Action::DeliverTwo { .. } | Action::Send(_)) {
            self.trace.push(format!("{action:?}"));
        }
        match action {
            Action::Send(process) => {
                let now = self.bench.now;
                if let Some(process) = self.processes.get_mut(*process).filter(|process| process.running) {
                    process.notice_time(now);
                    let request = process.request(&mut self.bench);
                    self.network.push(request);
                }
            }
            Action::Deliver { message, keep, lost } => {
                if let Some(request) = self.network.get(*message % self.network.len().max(1)).cloned() {
                    if !keep {
                        self.network.remove(*message % self.network.len());
                    }
                    self.deliver(vec![request], *lost);
                }
            }
            Action::DeliverTwo { one, other } => {
                if !self.network.is_empty() {
                    let one = self.network.remove(one % self.network.len());
                    let mut batch = vec![one];
                    if !self.network.is_empty() {
                        batch.push(self.network.remove(other % self.network.len()));
                    }
                    self.deliver(batch, false);
                }
            }
            Action::Pass(millis) => {
                self.bench.pass(*millis);
                let now = self.bench.now;
                self.processes.iter_mut().for_each(|process| process.notice_time(now));
            }
            Action::FinishDrains(process) => {
                if let Some(process) = self.processes.get_mut(*process) {
                    process.finish_drains();
                }
            }
            Action::Restart { process, kind } => {
                if let Some(process) = self.processes.get_mut(*process).filter(|process| process.running) {
                    process.running = false;
                    let id = process.id;
                    self.start(id, *kind);
                }
            }
            Action::Second { id, kind } => {
                if self.processes.len() < 8 {
                    self.start(IDS[*id], *kind);
                }
            }
            Action::Leave(process) => {
                if let Some(process) = self.processes.get_mut(*process) {
                    process.begin_leaving();
                }
            }
            Action::Lie { process, shards } => {
                let joined = self.processes.get_mut(*process).filter(|process| process.epoch > 0);
                if let Some(process) = joined {
                    process.sequence += 1;
                    let draining: Vec<u32> = process.draining.difference(shards).copied().collect();
                    let owned: Vec<u32> = process.reading.union(shards).copied().collect();
                    let mut lie = self
                        .bench
                        .request(process.id)
                        .epoch(process.epoch)
                        .version(process.version)
                        .owned(&owned)
                        .draining(&draining);
                    // A lie in the name of a client with an order is the next message of that client.
                    lie.instance_id.clone_from(&process.instance);
                    lie.sequence = process.orders.then_some(process.sequence);
                    self.network.push(lie);
                }
            }
            Action::Service(in_service) => self.bench.may_expire = *in_service,
            Action::Grants(may_grant) => self.bench.may_grant = *may_grant,
            Action::Tick => self.bench.tick(),
            Action::Rollback(writes) => self.roll_back(*writes),
            Action::Notice => {
                if !self.losses.is_empty() {
                    self.bench.turn(&[rsc_core::Command::LostWrites { observed_metadata_version: 0 }]);
                }
            }
        }
        // An old round that comes back with the old record is no sign; one that begins is.
        let begun: u64 = self.bench.counts.drain(..).map(|counts| counts.corrections_begun).sum();
        if begun > 0 {
            self.losses
                .iter_mut()
                .for_each(|(_, noticed_at)| *noticed_at = noticed_at.or(Some(self.bench.now)));
        }
        self.nobody_reads_twice(action);
    }

    fn deliver(&mut self, batch: Vec<HeartbeatRequest>, lost: bool) {
        let now = self.bench.now;
        let commands: Vec<_> = batch.into_iter().map(heartbeat).collect();
        self.trace.extend(commands.iter().map(|command| told(command, self.bench.now)));
        for reply in self.bench.turn(&commands) {
            self.trace.push(answered(&reply, lost));
            if let Reply::Heartbeat(response) = reply
                && !lost
            {
                self.processes.iter_mut().for_each(|process| process.receive(&response, now));
            }
        }
    }

    fn nobody_reads_twice(&self, action: &Action) {
        let mut readers = std::collections::BTreeMap::new();
        for (index, process) in self.processes.iter().enumerate() {
            for shard in process.touches(self.bench.now) {
                if let Some(other) = readers.insert(shard, index) {
                    if self.excused(shard, other, index) {
                        continue;
                    }
                    panic!(
                        "{}\nshard {shard} is read by two after {action:?}:\n{:#?}\n{:#?}\n{:#?}",
                        self.trace.join("\n"),
                        self.processes[other],
                        self.processes[index],
                        self.bench.group()
                    );
                }
            }
        }
    }

    /// What remains (protocol 5): a grant made between a loss and its first sign, for one lease.
    fn excused(&self, shard: u32, one: usize, other: usize) -> bool {
        self.losses.iter().any(|(lost_at, noticed_at)| {
            let by_an_unaware_grant = [one, other].iter().any(|index| {
                let started = self.processes[*index].started.get(&shard);
                started.is_some_and(|at| at >= lost_at && noticed_at.is_none_or(|noticed| *at <= noticed))
            });
            by_an_unaware_grant && self.bench.now < lost_at.plus(LEASE)
        })
    }

    fn roll_back(&mut self, writes: usize) {
        let history = &mut self.bench.history;
        if history.is_empty() {
            return;
        }
        let keep = history.len().saturating_sub(writes);
        if let Some(fields) = history.drain(keep..).next() {
            self.bench.fields = fields;
            self.losses.push((self.bench.now, None));
        }
    }

    /// The faults stop: one process per id, messages arrive, drains end. Within three leases and the
    /// rebalance timeout the group must be stable with every shard read.
    fn heal(&mut self) {
        self.network.clear();
        self.bench.may_expire = true;
        self.bench.may_grant = true;
        for id in IDS {
            let mut alive: Vec<usize> = (0..self.processes.len())
                .filter(|i| self.processes[*i].id == id && self.processes[*i].running)
                .collect();
            alive.pop();
            alive.into_iter().for_each(|index| self.processes[index].running = false);
        }
        if self.processes.iter().all(|process| !process.running || process.leaving) {
            self.start("a", Kind::Full);
        }
        let bound = self.bench.now.plus(REBALANCE + 4 * LEASE);
        loop {
            for index in 0..self.processes.len() {
                self.act(&Action::FinishDrains(index));
                if self.processes[index].running {
                    self.act(&Action::Send(index));
                    self.act(&Action::Deliver { message: 0, keep: false, lost: false });
                } else if self.processes[index].id != "stopped" && self.was_told_to_stop(index) {
                    // A person restarts what stopped with INVALID_REQUEST.
                    let id = self.processes[index].id;
                    self.processes[index].id = "stopped";
                    self.start(id, Kind::Full);
                }
            }
            let group = self.bench.group();
            let reading: BTreeSet<u32> =
                self.processes.iter().flat_map(|process| process.touches(self.bench.now)).collect();
            if group.state == GroupState::Stable && reading.len() == SHARDS as usize {
                return;
            }
            let trace = self.trace.join("\n");
            assert!(self.bench.now < bound, "{trace}\ndoes not heal: {:#?}\n{group:#?}", self.processes);
            self.bench.pass(1_000);
        }
    }

    fn was_told_to_stop(&self, index: usize) -> bool {
        let id = self.processes[index].id;
        !self.processes.iter().any(|process| process.running && process.id == id)
            && self.processes.iter().rposition(|process| process.id == id) == Some(index)
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: std::env::var("RSC_PROPERTY_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(400),
        max_shrink_iters: std::env::var("RSC_PROPERTY_SHRINK").ok().and_then(|n| n.parse().ok()).unwrap_or(20_000),
        failure_persistence: None,
        .. ProptestConfig::default()
    })]

    #[test]
    fn one_reader_at_every_step_and_healing_afterwards(
        actions in prop::collection::vec(action(), 1..120),
    ) {
        let mut world = World::new();
        for action in &actions {
            world.act(action);
        }
        world.heal();
    }
}
