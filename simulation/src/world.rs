//! Everything that is simulated, and the queue of what happens next.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;

use rsc_core::{Command, Context, decide, lifecycle};
use rsc_protocol::{GroupKey, HeartbeatRequest, HeartbeatResponse};

use crate::check::{Excuse, Grant, Jump, Loss};
use crate::coordinator::{Coordinator, Pending};
use crate::dice::Dice;
use crate::plan::{Mix, Plan, Timing};
use crate::process::{Kind, Process, Wish};
use crate::redis::{Committed, Entered, Redis, Snapshot};

/// The members' ids.
pub(crate) const MEMBERS: [&str; 4] = ["a", "b", "c", "d"];
/// The shards of the stream.
pub(crate) const SHARDS: u32 = 4;

/// Something that happens at an instant.
#[derive(Debug)]
pub(crate) enum Event {
    /// A heartbeat reaches a coordinator.
    Request { coordinator: usize, process: usize, request: Rc<HeartbeatRequest>, sent_at: i64 },
    /// An answer, or the certainty that there is none, reaches a process.
    Answer { process: usize, request_id: String, response: Option<Box<HeartbeatResponse>>, decided_at: i64 },
    /// A process wakes.
    Wake { process: usize, timer: u64 },
    /// A drain is done.
    Drained { process: usize, shard: u32 },
    /// *enter* reaches Redis.
    Enter { coordinator: usize, life: u64, trip: u64, token: String, sent_at: i64 },
    /// Its answer comes back.
    Entered { coordinator: usize, life: u64, trip: u64, redis_time: i64, entered: Entered },
    /// *commit* reaches Redis.
    Commit { coordinator: usize, life: u64, trip: u64, token: String, pending: Box<Pending> },
    /// Its answer comes back.
    Committed { coordinator: usize, life: u64, trip: u64, committed: Committed },
    /// The mutex is given back.
    Release { token: String },
    /// A round trip has taken too long.
    TimedOut { coordinator: usize, life: u64, trip: u64 },
    /// A turn goes on after a boundary or a pause.
    Continue { coordinator: usize, life: u64, step: Step },
    /// A coordinator's tick is due.
    Tick { coordinator: usize, life: u64, timer: u64 },
    /// The supervisor of a coordinator looks at what is stored.
    Look { coordinator: usize, life: u64 },
    /// A process starts anew after a crash.
    StartCoordinator { coordinator: usize },
    /// A process of a member starts.
    StartProcess { member: usize, kind: Kind },
    /// The next disruption.
    Disrupt,
    /// The key comes back.
    Restore { snapshot: Rc<Snapshot> },
}

/// Where a turn goes on.
#[derive(Debug)]
pub(crate) enum Step {
    /// *enter* is sent (again).
    Enter,
    /// *commit* is sent.
    Commit(Box<Pending>),
    /// The answers leave.
    Reply(Box<Pending>),
}

/// A world under one seed.
#[derive(Debug)]
pub(crate) struct World {
    /// What is simulated.
    pub(crate) plan: Plan,
    /// Its times.
    pub(crate) timing: Timing,
    /// Chance.
    pub(crate) dice: Dice,
    /// The simulated instant, in milliseconds.
    pub(crate) at: i64,
    queue: BinaryHeap<Reverse<(i64, u64)>>,
    events: std::collections::HashMap<u64, Event>,
    numbered: u64,
    /// The group.
    pub(crate) key: GroupKey,
    /// The server.
    pub(crate) redis: Redis,
    /// The coordinators.
    pub(crate) coordinators: Vec<Coordinator>,
    /// Every consumer process there ever was.
    pub(crate) processes: Vec<Process>,
    /// Losses so far.
    pub(crate) losses: Vec<Loss>,
    /// Forward jumps of Redis time so far.
    pub(crate) jumps: Vec<Jump>,
    /// Messages of a lost history that were taken for present ones: whose, and when.
    pub(crate) strays: Vec<(&'static str, i64)>,
    /// Grants so far.
    pub(crate) grants: Vec<Grant>,
    /// Overlaps that are documented to remain, while they last.
    pub(crate) excuses: Vec<Excuse>,
    /// How many overlaps were excused.
    pub(crate) excused: u64,
    /// Whether heartbeats go to one coordinator as long as it lives.
    pub(crate) is_sticky: bool,
    /// Faults happen.
    pub(crate) is_faulty: bool,
    /// What is wrong.
    pub(crate) violation: Option<String>,
    /// What happened, for people; only kept when asked for.
    pub(crate) trace: Option<Vec<String>>,
    /// Turns decided.
    pub(crate) decided: u64,
    pub(crate) lives: u64,
    tokens: u64,
}

impl World {
    /// The world of a plan before anything happened.
    #[must_use]
    pub(crate) fn new(plan: Plan, with_trace: bool) -> Self {
        let mut dice = Dice::new(plan.seed);
        let mut plan = plan;
        if plan.mix == Mix::All {
            plan.mix =
                dice.weighted(&[(3, Mix::Modern), (3, Mix::Old), (4, Mix::Mixed)]).unwrap_or(Mix::Mixed);
        }
        let timing = Timing::draw(&mut dice);
        #[expect(clippy::expect_used, reason = "two plain names")]
        let key = GroupKey::new("orders", "billing").expect("two plain names make a group");
        let mut world = World {
            plan,
            timing,
            dice,
            at: 0,
            queue: BinaryHeap::new(),
            events: std::collections::HashMap::new(),
            numbered: 0,
            key,
            redis: Redis::default(),
            coordinators: Vec::new(),
            processes: Vec::new(),
            losses: Vec::new(),
            jumps: Vec::new(),
            strays: Vec::new(),
            grants: Vec::new(),
            excuses: Vec::new(),
            excused: 0,
            is_sticky: false,
            is_faulty: true,
            violation: None,
            trace: with_trace.then(Vec::new),
            decided: 0,
            lives: 0,
            tokens: 0,
        };
        world.create_group();
        world.populate();
        world
    }

    fn create_group(&mut self) {
        let now = self.redis.timestamp(0);
        let creation = lifecycle::create(&self.key, SHARDS, now, "token-0", None, &self.timing.core);
        self.redis.create(&creation.write, &creation.group);
        let context = self.context(now, true, true);
        let decision = decide(creation.group, &[], &[Command::Provisioned], &context);
        if let (Some(write), Some(stored)) = (&decision.write, self.redis.stored.clone()) {
            self.redis.commit(0, "", &stored.stamp, write, &decision.group, true, false);
        }
        self.redis.past.clear();
    }

    fn populate(&mut self) {
        self.is_sticky = self.dice.chance(0.3);
        let coordinators = usize::try_from(self.dice.between(2, 4)).unwrap_or(2);
        for index in 0..coordinators {
            self.lives += 1;
            let coordinator = Coordinator::new(self.lives, 0, &self.timing);
            self.coordinators.push(coordinator);
            self.begin_looking(index);
        }
        for member in 0..3 {
            let at = self.dice.between(0, self.timing.heartbeat);
            let kind = self.draw_kind();
            self.schedule(at, Event::StartProcess { member, kind });
        }
        let first = self.dice.between(self.timing.heartbeat, 3 * self.timing.heartbeat);
        self.schedule(first, Event::Disrupt);
    }

    /// A kind of client of the mix.
    pub(crate) fn draw_kind(&mut self) -> Kind {
        let weights: &[(u32, Kind)] = match self.plan.mix {
            Mix::Modern => &[(4, Kind::Full), (1, Kind::NoSequence)],
            Mix::Old => &[(3, Kind::Old), (1, Kind::Bare)],
            Mix::Mixed | Mix::All => {
                &[(8, Kind::Full), (3, Kind::NoSequence), (3, Kind::Bare), (5, Kind::Old), (1, Kind::Broken)]
            }
        };
        self.dice.weighted(weights).unwrap_or(Kind::Full)
    }

    /// Puts an event into the future.
    pub(crate) fn schedule(&mut self, at: i64, event: Event) {
        self.numbered += 1;
        self.queue.push(Reverse((at.max(self.at), self.numbered)));
        self.events.insert(self.numbered, event);
    }

    /// Adds a line to the trace.
    pub(crate) fn tell(&mut self, line: impl FnOnce(&Self) -> String) {
        if self.trace.is_some() {
            let line = format!("{:8} {}", self.at, line(self));
            if let Some(trace) = &mut self.trace {
                trace.push(line);
            }
        }
    }

    /// Something is wrong; the first thing counts.
    pub(crate) fn violate(&mut self, what: String) {
        self.tell(|_| format!("VIOLATION {what}"));
        self.violation.get_or_insert(what);
    }

    /// What the core is told about the world.
    pub(crate) fn context(
        &mut self,
        now: rsc_protocol::Timestamp,
        may_expire: bool,
        may_grant: bool,
    ) -> Context {
        self.tokens += 1;
        Context {
            now,
            settings: self.timing.core.clone(),
            may_expire,
            may_grant,
            may_hand_out: true,
            metadata_token: format!("t{}", self.tokens),
            routing_ttl_age_ms: 0,
        }
    }

    /// Processes that were still to start do not.
    pub(crate) fn forget_starts(&mut self) {
        self.events.retain(|_, event| !matches!(event, Event::StartProcess { .. }));
    }

    /// When the next event is due.
    #[must_use]
    pub(crate) fn next_at(&self) -> Option<i64> {
        self.queue.peek().map(|Reverse((at, _))| *at)
    }

    /// Takes the next event and lets it happen. `false`: nothing is left to happen.
    pub(crate) fn step(&mut self) -> bool {
        let Some(Reverse((at, number))) = self.queue.pop() else { return false };
        let Some(event) = self.events.remove(&number) else { return true };
        self.at = at;
        self.check_excuses();
        if let Some(later) = self.put_off(&event) {
            self.schedule(later, event);
            return true;
        }
        self.happen(event);
        true
    }

    /// Whoever stands still takes nothing in.
    fn put_off(&self, event: &Event) -> Option<i64> {
        let paused_until = match event {
            Event::Answer { process, .. } | Event::Wake { process, .. } | Event::Drained { process, .. } => {
                self.processes[*process].paused_until
            }
            Event::Request { coordinator, .. }
            | Event::Entered { coordinator, .. }
            | Event::Committed { coordinator, .. }
            | Event::TimedOut { coordinator, .. }
            | Event::Continue { coordinator, .. }
            | Event::Tick { coordinator, .. } => self.coordinators[*coordinator].paused_until,
            _ => 0,
        };
        (paused_until > self.at).then_some(paused_until)
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Request { coordinator, process, request, sent_at } => {
                self.arrive(coordinator, process, request, sent_at);
            }
            Event::Answer { process, request_id, response, decided_at } => {
                if !self.processes[process].is_over() {
                    let wishes = self.processes[process].answered(self.at, &request_id, response.as_deref());
                    self.carry_out_by(process, wishes, decided_at);
                }
            }
            Event::Wake { process, timer } => {
                if self.processes[process].timer == timer && !self.processes[process].is_over() {
                    let wishes = self.processes[process].time(self.at);
                    self.carry_out(process, wishes);
                }
            }
            Event::Drained { process, shard } => {
                if !self.processes[process].is_over() {
                    let wishes = self.processes[process].drained(self.at, shard);
                    self.carry_out(process, wishes);
                }
            }
            Event::StartProcess { member, kind } => self.start_process(member, kind),
            Event::StartCoordinator { coordinator } => self.start_coordinator(coordinator),
            Event::Disrupt => self.disrupt(),
            Event::Restore { snapshot } => self.restore(snapshot),
            trip => self.trip(trip),
        }
    }

    fn start_process(&mut self, member: usize, kind: Kind) {
        let number = self.processes.len();
        let wall = self.dice.between(-60_000, 60_000);
        // A clock that runs slow by more than the way of a message would take is outside of the promise.
        let fast = if self.dice.chance(0.3) { self.dice.between(-50, 5_000) } else { 0 };
        let mut process =
            Process::new(MEMBERS[member], kind, number, self.at, wall, fast, &self.timing, &self.plan);
        process.never_finishes = self.is_faulty && self.dice.chance(0.1);
        self.tell(|_| format!("process {number} of {} starts, {kind:?}", MEMBERS[member]));
        self.processes.push(process);
        let wishes = self.processes[number].time(self.at);
        self.carry_out(number, wishes);
    }

    /// Does what a process wants, and sets its timer.
    pub(crate) fn carry_out(&mut self, process: usize, wishes: Vec<Wish>) {
        self.carry_out_by(process, wishes, self.at);
    }

    /// The same, by an answer that was decided at that instant.
    fn carry_out_by(&mut self, process: usize, wishes: Vec<Wish>, decided_at: i64) {
        let mut has_started = false;
        for wish in wishes {
            match wish {
                Wish::Send(request) => self.send(process, *request),
                Wish::Drain(shard) => {
                    let takes = self.drain_time(process);
                    self.schedule(self.at + takes, Event::Drained { process, shard });
                }
                Wish::Started(shard) => {
                    has_started = true;
                    self.tell(|_| format!("process {process} reads shard {shard}"));
                    self.processes[process].started.insert(shard, decided_at);
                    let member = self.processes[process].member;
                    if !self.grants.iter().any(|grant| grant.shard == shard && grant.member == member) {
                        self.violate(format!("recorded-before-answered: {member} reads shard {shard}"));
                    }
                }
            }
        }
        if has_started {
            self.nobody_reads_twice();
        }
        let state = &mut self.processes[process];
        if let Some(at) = state.wakes_at() {
            state.timer += 1;
            let timer = state.timer;
            self.schedule(at, Event::Wake { process, timer });
        } else if state.is_over() {
            self.tell(|_| format!("process {process} has ended"));
        }
    }

    fn drain_time(&mut self, process: usize) -> i64 {
        if self.is_faulty && self.processes[process].never_finishes {
            return 3 * self.timing.rebalance;
        }
        match self.dice.between(0, 10) {
            0..=3 => 0,
            4..=7 => self.dice.between(0, self.timing.heartbeat * 2),
            _ if self.is_faulty => self.dice.between(0, self.timing.rebalance),
            _ => self.timing.heartbeat,
        }
    }
}
