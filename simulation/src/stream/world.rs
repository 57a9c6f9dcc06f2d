//! Everything that is simulated for one stream with several groups, and the queue of what happens next.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::rc::Rc;

use rsc_core::migration::stream::ShardFacts;
use rsc_core::{Command, Context, decide, lifecycle};
use rsc_protocol::routing::ProducerRouting;
use rsc_protocol::{GroupKey, HeartbeatRequest, HeartbeatResponse, Timestamp};

use super::coordinator::{Coordinator, Pending, Step};
use super::ledger::Ledger;
use super::plan::{Shape, StreamFault, StreamPlan};
use super::producers::ProducerProcess;
use super::readers::Reader;
use super::streams::{ProofRules, Streams};
use crate::dice::Dice;
use crate::process::Process;
use crate::redis::{Committed, Entered, Redis, Snapshot};

/// The groups of the stream; the last one is created while the run lasts.
pub(crate) const GROUPS: [&str; 3] = ["billing", "audit", "search"];
/// The members' ids of each group.
pub(crate) const MEMBERS: [&str; 3] = ["a", "b", "c"];
/// The operator asks for fewer shards than this.
pub(crate) const MOST_SHARDS: i64 = 7;

/// One group's record in Redis.
#[derive(Debug)]
pub(crate) struct GroupRecord {
    /// Which group.
    pub(crate) key: GroupKey,
    /// Its hash, its mutex, its past.
    pub(crate) redis: Redis,
    /// When each state of the past was replaced.
    pub(crate) replaced_at: Vec<i64>,
    /// It was created: the index names it.
    pub(crate) exists: bool,
    /// Members are admitted.
    pub(crate) is_admitted: bool,
    /// What it comes back with while its key is missing.
    pub(crate) restored_with: Option<Rc<Snapshot>>,
}

/// Who asked Redis.
#[derive(Clone, Debug)]
pub(crate) enum Asker {
    /// A group's actor.
    Actor(usize),
    /// The driver.
    Driver,
    /// A producer's request for routing.
    Routing { producer: usize, request: u64, tag: Option<String>, sent_at: i64 },
}

/// What Redis is asked.
#[derive(Debug)]
pub(crate) enum Op {
    Enter {
        group: usize,
        token: String,
    },
    Commit {
        group: usize,
        token: String,
        pending: Box<Pending>,
    },
    Release {
        group: usize,
        token: String,
    },
    Read {
        group: usize,
    },
    Lock {
        token: String,
    },
    Renew {
        token: String,
    },
    Unlock {
        token: String,
    },
    Create {
        group: usize,
        count: u32,
    },
    Provision {
        group: usize,
        shard: u32,
    },
    Prove {
        shard: u32,
        coordinated: Vec<(usize, String)>,
    },
    /// `before`: Redis time at which the mutex it was decided under may have ended.
    Delete {
        shard: u32,
        coordinated: Vec<(usize, String)>,
        before: i64,
    },
}

/// What it says.
#[derive(Debug)]
pub(crate) enum Said {
    Entered(Entered),
    Committed(Committed),
    Read(Option<Rc<Snapshot>>),
    Locked(bool),
    Facts(u32, ShardFacts),
    Done,
}

/// Something that happens at an instant.
#[derive(Debug)]
pub(crate) enum Event {
    Ask { asker: Asker, coordinator: usize, life: u64, trip: u64, op: Op },
    Said { asker: Asker, coordinator: usize, life: u64, trip: u64, now: i64, said: Said },
    TimedOut { asker: Asker, coordinator: usize, life: u64, trip: u64 },
    Continue { coordinator: usize, life: u64, group: usize, step: Step },
    Request { coordinator: usize, process: usize, request: Rc<HeartbeatRequest> },
    Answer { process: usize, request_id: String, response: Option<Box<HeartbeatResponse>> },
    Tick { coordinator: usize, life: u64, group: usize, timer: u64 },
    Drive { coordinator: usize, life: u64, timer: u64 },
    Wake { process: usize, timer: u64 },
    Drained { process: usize, shard: u32 },
    Poll { process: usize },
    Worked { process: usize, shard: u32, id: u64 },
    Acknowledge { process: usize, shard: u32, id: u64 },
    Publish { producer: usize },
    PublishOne { producer: usize },
    ProducerWakes { producer: usize, timer: u64 },
    Route { coordinator: usize, producer: usize, request: u64, tag: Option<String>, sent_at: i64 },
    Routed { producer: usize, request: u64, routing: Option<Option<Box<ProducerRouting>>>, sent_at: i64 },
    Hand { producer: usize, ticket: u64, shard: u32, before: i64 },
    Add { producer: usize, ticket: u64, shard: u32 },
    Added { producer: usize, ticket: u64, is_taken: bool },
    StartCoordinator { coordinator: usize },
    StartMember { group: usize, member: usize },
    Restore { group: usize },
    Disrupt,
    Operate,
    CreateGroup,
    ScaleOut,
}

/// A world under one seed.
#[derive(Debug)]
pub(crate) struct StreamWorld {
    /// What is simulated.
    pub(crate) plan: StreamPlan,
    /// Its times and traits.
    pub(crate) shape: Shape,
    /// Chance.
    pub(crate) dice: Dice,
    /// The simulated instant, in milliseconds.
    pub(crate) at: i64,
    queue: BinaryHeap<Reverse<(i64, u64)>>,
    events: HashMap<u64, Event>,
    numbered: u64,
    /// Every group there may be.
    pub(crate) groups: Vec<GroupRecord>,
    /// The shards' streams.
    pub(crate) streams: Streams,
    /// Every record ever taken.
    pub(crate) ledger: Ledger,
    /// The stream's mutex: token and end.
    pub(crate) lock: Option<(String, i64)>,
    /// The coordinators.
    pub(crate) coordinators: Vec<Coordinator>,
    /// Every consumer process there ever was, and what it reads.
    pub(crate) processes: Vec<Process>,
    /// The other half of each process.
    pub(crate) readers: Vec<Reader>,
    /// The producers.
    pub(crate) producers: Vec<ProducerProcess>,
    /// When migrations were first activated.
    pub(crate) activated_at: BTreeMap<String, i64>,
    /// Shards whose deletion Redis forgot.
    pub(crate) undone: Vec<u32>,
    /// Consumer groups of Redis that somebody destroyed: shard and group.
    pub(crate) destroyed: Vec<(u32, usize)>,
    /// Losses so far.
    pub(crate) losses: usize,
    /// Faults happen.
    pub(crate) is_faulty: bool,
    /// What is wrong.
    pub(crate) violation: Option<String>,
    /// What happened, for people; only kept when asked for.
    pub(crate) trace: Option<Vec<String>>,
    /// What happened, counted.
    pub(crate) counts: super::run::Counted,
    pub(crate) lives: u64,
    pub(crate) trips: u64,
    tokens: u64,
}

impl StreamWorld {
    /// The world of a plan before anything happened.
    #[must_use]
    pub(crate) fn new(plan: StreamPlan, with_trace: bool) -> Self {
        let mut dice = Dice::new(plan.seed ^ 0x5eed_57e4);
        let shape = Shape::draw(&mut dice, &plan);
        let mut world = StreamWorld {
            plan,
            shape,
            dice,
            at: 0,
            queue: BinaryHeap::new(),
            events: HashMap::new(),
            numbered: 0,
            groups: Vec::new(),
            streams: Streams::default(),
            ledger: Ledger::default(),
            lock: None,
            coordinators: Vec::new(),
            processes: Vec::new(),
            readers: Vec::new(),
            producers: Vec::new(),
            activated_at: BTreeMap::new(),
            undone: Vec::new(),
            destroyed: Vec::new(),
            losses: 0,
            is_faulty: true,
            violation: None,
            trace: with_trace.then(Vec::new),
            counts: super::run::Counted::default(),
            lives: 0,
            trips: 0,
            tokens: 0,
        };
        world.create_groups();
        world.populate();
        world
    }

    fn create_groups(&mut self) {
        for name in GROUPS {
            #[expect(clippy::expect_used, reason = "two plain names")]
            let key = GroupKey::new("orders", name).expect("two plain names make a group");
            self.groups.push(GroupRecord {
                key,
                redis: Redis::default(),
                replaced_at: Vec::new(),
                exists: false,
                is_admitted: false,
                restored_with: None,
            });
        }
        let count = u32::try_from(self.dice.between(1, 5)).unwrap_or(1);
        for group in 0..self.shape.groups {
            self.create_group(group, count);
            (0..count).for_each(|shard| self.streams.create_group(shard, group));
            let record = &self.groups[group];
            if let Some(stored) = record.redis.stored.clone() {
                let context = self.context(record.redis.timestamp(0), true, true);
                let decision = decide(stored.group.clone(), &[], &[Command::Provisioned], &context);
                if let Some(write) = &decision.write {
                    let redis = &mut self.groups[group].redis;
                    redis.commit(0, "", &stored.stamp, write, &decision.group, true, false);
                    redis.past.clear();
                }
            }
            self.admit(group, count);
        }
    }

    /// A group's record comes into being, not admitting anybody yet.
    pub(crate) fn create_group(&mut self, group: usize, count: u32) {
        let record = &mut self.groups[group];
        let now = record.redis.timestamp(self.at);
        let token = format!("born-{group}");
        let creation = lifecycle::create(&record.key, count, now, &token, None, &self.shape.timing.core);
        record.redis.create(&creation.write, &creation.group);
        record.exists = true;
    }

    /// A group owes what is written from now on.
    pub(crate) fn admit(&mut self, group: usize, count: u32) {
        self.groups[group].is_admitted = true;
        self.ledger.add_group(group, count, &self.streams);
    }

    fn populate(&mut self) {
        for _ in 0..self.dice.between(2, 4) {
            self.lives += 1;
            let coordinator = Coordinator::new(self.lives, 0, &self.shape.timing);
            self.coordinators.push(coordinator);
        }
        for coordinator in 0..self.coordinators.len() {
            self.schedule_drive(coordinator, self.shape.tick);
        }
        for group in 0..self.shape.groups {
            for member in 0..self.dice.below(MEMBERS.len() + 1) {
                let at = self.dice.between(0, self.shape.timing.heartbeat);
                self.schedule(at, Event::StartMember { group, member });
            }
        }
        self.start_producers();
        let first = self.dice.between(0, self.shape.timing.lease);
        self.schedule(first, Event::Disrupt);
        let first = self.dice.between(self.shape.timing.heartbeat, self.shape.timing.lease);
        self.schedule(first, Event::Operate);
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
    pub(crate) fn context(&mut self, now: Timestamp, may_expire: bool, may_grant: bool) -> Context {
        self.tokens += 1;
        Context {
            now,
            settings: self.shape.timing.core.clone(),
            may_expire,
            may_grant,
            may_hand_out: true,
            metadata_token: format!("t{}", self.tokens),
            routing_ttl_age_ms: 0,
        }
    }

    /// How shards are proven empty in this run.
    pub(crate) fn proof_rules(&self) -> ProofRules {
        ProofRules {
            asks_everybody: !self.plan.lacks(StreamFault::MissingGroupIsDone),
            by_lag: self.plan.lacks(StreamFault::LagInsteadOfRange),
            ghosts_count: self.plan.lacks(StreamFault::GhostsCounted),
        }
    }

    /// What was to start does not.
    pub(crate) fn forget_starts(&mut self) {
        self.events.retain(|_, event| {
            !matches!(
                event,
                Event::StartMember { .. } | Event::Operate | Event::Disrupt | Event::Publish { .. }
            )
        });
    }

    /// When the next event is due.
    #[must_use]
    pub(crate) fn next_at(&self) -> Option<i64> {
        self.queue.peek().map(|Reverse((at, _))| *at)
    }

    /// Takes the next event and lets it happen.
    pub(crate) fn step(&mut self) {
        let Some(Reverse((at, number))) = self.queue.pop() else { return };
        let Some(event) = self.events.remove(&number) else { return };
        self.at = at;
        match self.put_off(&event) {
            Some(later) => self.schedule(later, event),
            None => self.happen(event),
        }
    }

    /// Whoever stands still takes nothing in.
    fn put_off(&self, event: &Event) -> Option<i64> {
        let paused_until = match event {
            Event::Answer { process, .. }
            | Event::Wake { process, .. }
            | Event::Drained { process, .. }
            | Event::Poll { process }
            | Event::Worked { process, .. } => self.processes[*process].paused_until,
            Event::Said { coordinator, .. }
            | Event::TimedOut { coordinator, .. }
            | Event::Continue { coordinator, .. }
            | Event::Request { coordinator, .. }
            | Event::Tick { coordinator, .. }
            | Event::Drive { coordinator, .. }
            | Event::Route { coordinator, .. } => self.coordinators[*coordinator].paused_until,
            Event::Publish { producer }
            | Event::PublishOne { producer }
            | Event::ProducerWakes { producer, .. }
            | Event::Routed { producer, .. }
            | Event::Hand { producer, .. }
            | Event::Added { producer, .. } => self.producers[*producer].paused_until,
            _ => 0,
        };
        (paused_until > self.at).then_some(paused_until)
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Ask { asker, coordinator, life, trip, op } => {
                let said = self.redis_does(coordinator, life, op);
                let now = self.groups[0].redis.time(self.at);
                if self.link_breaks() {
                    self.tell(|_| "         the answer of redis is lost".to_owned());
                } else {
                    let arrives = self.at + self.dice.between(0, self.shape.latency);
                    self.schedule(arrives, Event::Said { asker, coordinator, life, trip, now, said });
                }
            }
            Event::Said { coordinator, life, .. }
            | Event::TimedOut { coordinator, life, .. }
            | Event::Continue { coordinator, life, .. }
            | Event::Tick { coordinator, life, .. }
            | Event::Drive { coordinator, life, .. }
                if self.coordinators[coordinator].life != life => {}
            Event::Said { asker: Asker::Actor(group), coordinator, trip, now, said, .. } => {
                self.actor_hears(coordinator, group, trip, now, said);
            }
            Event::TimedOut { asker: Asker::Actor(group), coordinator, trip, .. } => {
                self.actor_hears_nothing(coordinator, group, trip);
            }
            Event::Said { asker: Asker::Driver, coordinator, trip, now, said, .. } => {
                self.driver_hears(coordinator, trip, now, said);
            }
            Event::TimedOut { asker: Asker::Driver, coordinator, trip, .. } => {
                self.driver_hears_nothing(coordinator, trip);
            }
            Event::Said { asker: Asker::Routing { producer, request, tag, sent_at }, said, .. } => {
                self.answer_routing(producer, request, tag.as_deref(), sent_at, said)
            }
            Event::TimedOut { asker: Asker::Routing { .. }, .. } => {}
            Event::Continue { coordinator, group, step, .. } => self.continue_turn(coordinator, group, step),
            Event::Tick { coordinator, group, timer, .. } => self.tick(coordinator, group, timer),
            Event::Drive { coordinator, timer, .. } => self.drive(coordinator, timer),
            Event::Request { coordinator, process, request } => self.arrive(coordinator, process, request),
            Event::StartCoordinator { coordinator } => self.start_coordinator(coordinator),
            Event::Restore { group } => self.restore(group),
            Event::Disrupt => self.disrupt(),
            Event::Operate => self.operate(),
            Event::CreateGroup => self.ask_for_a_group(),
            Event::ScaleOut => self.scale_out(),
            Event::Publish { .. }
            | Event::PublishOne { .. }
            | Event::ProducerWakes { .. }
            | Event::Route { .. }
            | Event::Routed { .. }
            | Event::Hand { .. }
            | Event::Add { .. }
            | Event::Added { .. } => self.producer_event(event),
            event => self.reader_event(event),
        }
    }
}
