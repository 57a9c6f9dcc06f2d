//! One consumer process: its decisions, its clock, and what it believes.

use std::collections::BTreeMap;
use std::time::Duration;

use rsc_client::decision::{Action, Consumer, End, Event, Identity, Settings, Work};
use rsc_protocol::{CapacityReport, HeartbeatRequest, HeartbeatResponse, Status};

use crate::old_client::OldClient;
use crate::plan::{Plan, Timing};

/// Which of the additions a client sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// All of them.
    Full,
    /// `instanceId` and `metadataToken`, no `sequence`.
    NoSequence,
    /// `revokingShards` only.
    Bare,
    /// None at all.
    Old,
    /// All of them, and it reports ever higher versions.
    Broken,
}

impl Kind {
    /// Whether it sends `sequence`, which tells its messages' order.
    #[must_use]
    pub(crate) fn has_sequence(self) -> bool {
        matches!(self, Kind::Full | Kind::Broken)
    }

    /// Whether it sends `instanceId`.
    #[must_use]
    pub(crate) fn has_instance(self) -> bool {
        matches!(self, Kind::Full | Kind::NoSequence | Kind::Broken)
    }
}

#[derive(Debug)]
enum Machine {
    Decided(Box<Consumer>),
    Old(Box<OldClient>),
}

/// What a process wants done.
#[derive(Debug)]
pub(crate) enum Wish {
    /// Send this.
    Send(Box<HeartbeatRequest>),
    /// A shard is to be drained: tell when it is.
    Drain(u32),
    /// A shard is read from now on.
    Started(u32),
}

/// A consumer process.
#[derive(Debug)]
pub(crate) struct Process {
    /// The member's id.
    pub(crate) member: &'static str,
    /// What it sends.
    pub(crate) kind: Kind,
    /// Its `instanceId`, sent or not.
    pub(crate) instance: String,
    machine: Machine,
    /// It has not crashed.
    pub(crate) alive: bool,
    /// It does not run until then.
    pub(crate) paused_until: i64,
    /// Its messages do not pass until then.
    pub(crate) cut_off_until: i64,
    born_at: i64,
    /// How much faster its clock runs, in millionths.
    fast_ppm: i64,
    /// For each shard that it has been reading without a break: since when, by which answer's decision.
    pub(crate) started: BTreeMap<u32, i64>,
    /// It drains until it is told to stop, or for ever.
    pub(crate) never_finishes: bool,
    lies: u64,
    /// Numbers its timers: only the newest one counts.
    pub(crate) timer: u64,
    /// It has sent a join.
    pub(crate) has_joined: bool,
    /// It sends no `instanceId`, and Redis lost writes since it joined: it cannot be told from another process of
    /// its id (protocol 5, *What remains*).
    pub(crate) is_forgotten: bool,
    /// It was asked to leave.
    pub(crate) is_leaving: bool,
    /// It was refused for good.
    pub(crate) refused: bool,
}

impl Process {
    /// A process that starts at `born_at`. Its wall clock is `wall_ahead` ms ahead of the true time.
    #[must_use]
    #[expect(clippy::too_many_arguments, reason = "everything that tells one process from another")]
    pub(crate) fn new(
        member: &'static str,
        kind: Kind,
        number: usize,
        born_at: i64,
        wall_ahead: i64,
        fast_ppm: i64,
        timing: &Timing,
        plan: &Plan,
    ) -> Self {
        let instance = format!("i{number}");
        let millis = |millis: i64| Duration::from_millis(u64::try_from(millis).unwrap_or(0));
        let machine = if kind == Kind::Old {
            Machine::Old(Box::new(OldClient::new(member, instance.clone(), timing, plan)))
        } else {
            let identity = Identity {
                member_id: member.to_owned(),
                member_name: None,
                instance_id: instance.clone(),
                first_sequence: u64::try_from(1_000_000 + born_at + wall_ahead).unwrap_or(0),
            };
            let settings = Settings {
                heartbeat_interval: millis(timing.heartbeat),
                request_timeout: millis(timing.request_timeout),
                retry_pause: millis(timing.heartbeat / 4),
                assumed_lease: millis(timing.lease / 10 * 9),
            };
            let capacity = CapacityReport { runtime_max_concurrency: 1, available_concurrency: 1 };
            Machine::Decided(Box::new(Consumer::new(identity, settings, capacity)))
        };
        Process {
            member,
            kind,
            instance,
            machine,
            alive: true,
            paused_until: 0,
            cut_off_until: 0,
            born_at,
            fast_ppm,
            started: BTreeMap::new(),
            never_finishes: false,
            lies: 0,
            timer: 0,
            has_joined: false,
            is_forgotten: false,
            is_leaving: false,
            refused: false,
        }
    }

    /// Its own clock, in microseconds since it started.
    fn clock(&self, at: i64) -> i64 {
        (at - self.born_at) * (1_000_000 + self.fast_ppm) / 1_000
    }

    fn duration(&self, at: i64) -> Duration {
        Duration::from_micros(u64::try_from(self.clock(at)).unwrap_or(0))
    }

    /// The simulated instant at which its clock shows `micros`, rounded up.
    fn instant(&self, micros: i64) -> i64 {
        self.born_at + micros * 1_000 / (1_000_000 + self.fast_ppm) + 1
    }

    /// When it wants to be woken.
    #[must_use]
    pub(crate) fn wakes_at(&self) -> Option<i64> {
        match &self.machine {
            Machine::Decided(consumer) => {
                let at = consumer.wakes_at()?;
                Some(self.instant(i64::try_from(at.as_micros()).unwrap_or(i64::MAX / 2_000)))
            }
            Machine::Old(client) => client.wakes_at().map(|at| self.instant(at)),
        }
    }

    /// Whether it reads for a lease of its own, and not for the one that it is told.
    #[must_use]
    pub(crate) fn counts_its_own_lease(&self) -> bool {
        matches!(self.machine, Machine::Old(_))
    }

    /// Whether it has stopped, crashed or was told to.
    #[must_use]
    pub(crate) fn is_over(&self) -> bool {
        !self.alive
            || match &self.machine {
                Machine::Decided(consumer) => consumer.has_ended(),
                Machine::Old(client) => client.has_ended(),
            }
    }

    /// Shards that it may be touching at `at` as it believes: read, or with records still in flight.
    #[must_use]
    pub(crate) fn touches(&self, at: i64) -> Vec<(u32, bool)> {
        if !self.alive {
            return Vec::new();
        }
        match &self.machine {
            Machine::Decided(consumer) if consumer.may_read(self.duration(at)) => consumer
                .shards()
                .filter(|(_, work)| *work != Work::Drained)
                .map(|(shard, work)| (shard, work == Work::Reading))
                .collect(),
            Machine::Decided(_) => Vec::new(),
            Machine::Old(client) => client.reads(self.clock(at)).map(|shard| (shard, true)).collect(),
        }
    }

    /// Time has passed.
    pub(crate) fn time(&mut self, at: i64) -> Vec<Wish> {
        self.event(at, |_| Event::Time, |client, now| client.time(now))
    }

    /// An answer, or the certainty that none will come.
    pub(crate) fn answered(
        &mut self,
        at: i64,
        request_id: &str,
        response: Option<&HeartbeatResponse>,
    ) -> Vec<Wish> {
        let decided = |_: &Consumer| match response {
            Some(response) => Event::Answer(Box::new(response.clone())),
            None => Event::Failed { request_id: request_id.to_owned() },
        };
        let wishes = self.event(at, decided, |client, now| {
            match response {
                Some(response) => client.answered(now, response),
                None => client.failed(now, request_id),
            }
            client.time(now)
        });
        if response.is_some_and(|response| response.status == Status::InvalidRequest) {
            self.refused |= self.is_over();
        }
        wishes
    }

    /// A drain has come to its end.
    pub(crate) fn drained(&mut self, at: i64, shard: u32) -> Vec<Wish> {
        self.event(at, |_| Event::Drain { shard, in_flight: 0 }, |client, now| client.time(now))
    }

    /// It wants to leave.
    pub(crate) fn leave(&mut self, at: i64) -> Vec<Wish> {
        let now = self.duration(at);
        if let Machine::Decided(consumer) = &self.machine
            && self.kind == Kind::Bare
            && !consumer.may_read(now)
        {
            // As the old client: only a member leaves.
            self.alive = false;
            return Vec::new();
        }
        self.event(
            at,
            |_| Event::Leave,
            |client, now| {
                client.leave(now);
                client.time(now)
            },
        )
    }

    fn event(
        &mut self,
        at: i64,
        decided: impl FnOnce(&Consumer) -> Event,
        old: impl FnOnce(&mut OldClient, i64) -> Option<HeartbeatRequest>,
    ) -> Vec<Wish> {
        let now = self.clock(at);
        let duration = self.duration(at);
        let mut wishes = Vec::new();
        match &mut self.machine {
            Machine::Decided(consumer) => {
                let event = decided(consumer);
                for action in consumer.handle(duration, event) {
                    match action {
                        Action::Send(request) => wishes.push(Wish::Send(request)),
                        Action::Start(shard) => wishes.push(Wish::Started(shard.shard_index)),
                        Action::Drain(shard) => wishes.push(Wish::Drain(shard)),
                        Action::Abandon(shard) => {
                            self.started.remove(&shard);
                        }
                        Action::Ended(End::Left | End::Refused { .. }) => {}
                    }
                }
            }
            Machine::Old(client) => {
                let before: Vec<u32> = client.reads(now).collect();
                let request = old(client, now);
                let after: Vec<u32> = client.reads(now).collect();
                wishes.extend(after.iter().filter(|s| !before.contains(s)).map(|s| Wish::Started(*s)));
                self.started.retain(|shard, _| after.contains(shard));
                wishes.extend(request.map(Box::new).map(Wish::Send));
            }
        }
        for wish in &mut wishes {
            if let Wish::Send(request) = wish {
                self.dress(request);
            }
        }
        wishes
    }

    /// Takes away what this kind of client does not send.
    fn dress(&mut self, request: &mut HeartbeatRequest) {
        if request.member_epoch == 0 {
            self.has_joined = true;
            self.is_forgotten = false;
        }
        match self.kind {
            Kind::Full | Kind::Old => {}
            Kind::NoSequence => request.sequence = None,
            Kind::Bare => {
                request.sequence = None;
                request.instance_id = None;
                request.metadata_token = None;
            }
            Kind::Broken if request.member_epoch > 0 => {
                self.lies += 1_000;
                request.metadata_version += self.lies;
            }
            Kind::Broken => {}
        }
    }
}
