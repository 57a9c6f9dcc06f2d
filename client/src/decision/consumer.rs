//! The consumer's state machine: what each event makes of it.

use std::time::Duration;

use rsc_protocol::heartbeat::{EPOCH_JOIN, EPOCH_LEAVE};
use rsc_protocol::{
    AssignedShard, CapacityReport, HeartbeatRequest, HeartbeatResponse, PROTOCOL_VERSION, Status,
};

use super::exchange::{Exchange, InFlight};
use super::lease::Lease;
use super::shards::{Changes, Shards, Work};

/// Who a consumer is.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The member's id, the same over restarts.
    pub member_id: String,
    /// A name for people.
    pub member_name: Option<String>,
    /// Random per start of the process.
    pub instance_id: String,
    /// The first `sequence`: wall-clock milliseconds at the start.
    pub first_sequence: u64,
}

/// Timing of a consumer.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Between heartbeats until an answer says otherwise.
    pub heartbeat_interval: Duration,
    /// How long an answer is waited for; shorter than the lease, or one lost answer costs it.
    pub request_timeout: Duration,
    /// Before the next try after a failure or a `RETRY`.
    pub retry_pause: Duration,
    /// The lease to assume where a coordinator does not tell `assignmentLeaseMs`; at most nine tenths of its member lease
    /// (ADR 0012).
    pub assumed_lease: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            heartbeat_interval: Duration::from_secs(3),
            request_timeout: Duration::from_secs(2),
            retry_pause: Duration::from_millis(500),
            assumed_lease: Duration::from_millis(13_500),
        }
    }
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// Time has passed; due at [`Consumer::wakes_at`].
    Time,
    /// An answer arrived.
    Answer(Box<HeartbeatResponse>),
    /// A request certainly gets no answer: connection refused, HTTP error. (A timeout is told by time alone.)
    Failed {
        /// Its id.
        request_id: String,
    },
    /// A draining shard still has this many records in flight; 0: it is drained.
    Drain {
        /// The shard.
        shard: u32,
        /// Records handed to the application and not acknowledged.
        in_flight: u64,
    },
    /// The workers' load changed; goes out with the next heartbeat.
    Capacity(CapacityReport),
    /// The process wants to stop: drain everything, then leave.
    Leave,
}

/// What the shell has to do, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send this heartbeat.
    Send(Box<HeartbeatRequest>),
    /// Read this shard from now on; claim what a previous owner left pending.
    Start(AssignedShard),
    /// Read no more from this shard, finish what is in flight, tell by [`Event::Drain`].
    Drain(u32),
    /// Stop with this shard at once: its reads have ended before a later `Send` of the same list leaves.
    /// Nothing is acknowledged or claimed for it any more.
    Abandon(u32),
    /// It is over; nothing more will happen.
    Ended(End),
}

/// How a consumer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It left as it was asked to.
    Left,
    /// The coordinator refused it for good: tell a person.
    Refused {
        /// `INVALID_REQUEST` or `UNSUPPORTED_PROTOCOL`.
        status: Status,
        /// The coordinator's sentence.
        reason: String,
    },
}

/// Where in its life the consumer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Not a member, or not any more: the next heartbeat joins.
    Joining,
    Member,
    /// Drains and says −1 until it is let go.
    Leaving,
    Ended,
}

/// The decisions of one consumer process.
#[derive(Clone, Debug)]
pub struct Consumer {
    identity: Identity,
    settings: Settings,
    phase: Phase,
    sequence: u64,
    /// The epoch to send as a member.
    epoch: i64,
    version: u64,
    token: String,
    capacity: CapacityReport,
    lease: Lease,
    exchange: Exchange,
    shards: Shards,
    /// A join went out since everything was forgotten: a coordinator may know this incarnation.
    may_be_known: bool,
    interval: Duration,
}

impl Consumer {
    /// A consumer that has not said anything yet; the first [`Event::Time`] makes it join.
    #[must_use]
    pub fn new(identity: Identity, settings: Settings, capacity: CapacityReport) -> Self {
        Consumer {
            sequence: identity.first_sequence,
            interval: settings.heartbeat_interval,
            identity,
            settings,
            phase: Phase::Joining,
            epoch: EPOCH_JOIN,
            version: 0,
            token: String::new(),
            capacity,
            lease: Lease::default(),
            exchange: Exchange::default(),
            shards: Shards::default(),
            may_be_known: false,
        }
    }

    /// Takes in an event at the instant `now`; never call it with an instant before the last one.
    #[must_use = "the actions are the decision"]
    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.phase == Phase::Ended {
            return actions;
        }
        // The lease first: whatever the event is, it comes too late for what the lease no longer covers.
        if self.lease.is_over(now) {
            self.lose_everything(now, &mut actions);
        }
        match event {
            Event::Time => {}
            Event::Answer(response) => self.answered(now, &response, &mut actions),
            Event::Failed { request_id } => {
                if self.exchange.answered(&request_id).is_some() {
                    self.exchange.schedule(now + self.settings.retry_pause);
                }
            }
            Event::Drain { shard, in_flight } => {
                if self.shards.progress(shard, in_flight) {
                    self.exchange.hasten(now);
                }
            }
            Event::Capacity(capacity) => self.capacity = capacity,
            Event::Leave => self.begin_leaving(now, &mut actions),
        }
        self.go_on(now, &mut actions);
        actions
    }

    /// When [`Event::Time`] is due at the latest; `None` once it is over.
    #[must_use]
    pub fn wakes_at(&self) -> Option<Duration> {
        if self.phase == Phase::Ended {
            return None;
        }
        let next = self.exchange.wakes_at(self.settings.request_timeout);
        Some(self.lease.until().map_or(next, |until| next.min(until)))
    }

    /// Whether the consumer may read at `now`.
    #[must_use]
    pub fn may_read(&self, now: Duration) -> bool {
        self.lease.runs(now)
    }

    /// Until when the consumer may read; `None` without a lease.
    #[must_use]
    pub fn lease_until(&self) -> Option<Duration> {
        self.lease.until()
    }

    /// Every shard the consumer has to do with, and what it does with each.
    pub fn shards(&self) -> impl Iterator<Item = (u32, Work)> + '_ {
        self.shards.iter()
    }

    /// Whether it has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    fn answered(&mut self, now: Duration, response: &HeartbeatResponse, actions: &mut Vec<Action>) {
        let Some(request) = self.exchange.answered(&response.response_to) else {
            return;
        };
        if response.heartbeat_interval_ms > 0 {
            self.interval = Duration::from_millis(response.heartbeat_interval_ms);
        }
        match response.status {
            Status::Ok => self.apply(now, &request, response, actions),
            Status::SyncMetadata | Status::RevokePending => {
                self.adopt(now, &request, response);
                let changes = self.shards.cut_to(&response.assignment.assigned_shards, &request.reported);
                carry_out(&changes, actions);
            }
            Status::Retry => self.exchange.schedule(now + self.settings.retry_pause),
            Status::UnknownMemberId | Status::FencedMemberEpoch => {
                self.version = response.metadata_version;
                self.token.clone_from(&response.metadata_token);
                self.lose_everything(now, actions);
                if request.epoch == EPOCH_JOIN {
                    // A join is refused where there is no group (yet): no hurry.
                    self.exchange.schedule(now + self.interval);
                }
            }
            Status::UnsupportedProtocol | Status::InvalidRequest => {
                self.abandon(actions);
                let end = End::Refused { status: response.status, reason: response.reason.clone() };
                self.end(end, actions);
            }
        }
    }

    /// `OK`: the only status that lets a shard be started, or gone back to.
    fn apply(
        &mut self,
        now: Duration,
        request: &InFlight,
        response: &HeartbeatResponse,
        actions: &mut Vec<Action>,
    ) {
        self.adopt(now, request, response);
        if self.phase != Phase::Leaving {
            self.phase = Phase::Member;
            let changes = self.shards.apply(&response.assignment.assigned_shards, &request.reported);
            carry_out(&changes, actions);
            return;
        }
        // What a join in flight was given before the wish to leave is given back unread.
        let changes = self.shards.cut_to(&[], &request.reported);
        carry_out(&changes, actions);
        if request.epoch != EPOCH_LEAVE {
            self.exchange.schedule(now);
        } else if self.shards.is_empty() {
            self.end(End::Left, actions);
        }
    }

    /// What the three answers have in common that extend the lease.
    fn adopt(&mut self, now: Duration, request: &InFlight, response: &HeartbeatResponse) {
        // A leaver whom the coordinator no longer counts is told no lease, and gets none: it finishes what it
        // can within the last one.
        let told = Duration::from_millis(response.assignment_lease_ms);
        if !told.is_zero() {
            self.lease.extend(request.sent_at, told);
        } else if request.epoch != EPOCH_LEAVE {
            self.lease.extend(request.sent_at, self.settings.assumed_lease);
        }
        self.version = response.metadata_version;
        self.token.clone_from(&response.metadata_token);
        if response.member_epoch > 0 {
            self.epoch = response.member_epoch;
        }
        self.exchange.schedule(now.max(request.sent_at + self.interval));
        // A drain that ended while the request was on its way is told at once.
        if self.shards.drained().iter().any(|shard| !request.reported.contains(shard)) {
            self.exchange.hasten(now);
        }
    }

    fn begin_leaving(&mut self, now: Duration, actions: &mut Vec<Action>) {
        if self.phase == Phase::Leaving {
            return;
        }
        if !self.may_be_known {
            self.end(End::Left, actions);
            return;
        }
        self.phase = Phase::Leaving;
        actions.extend(self.shards.drain_all().into_iter().map(Action::Drain));
        self.exchange.hasten(now);
    }

    /// The lease is over, or the coordinator says that the membership is: stop everything, claim nothing,
    /// come back with epoch 0.
    fn lose_everything(&mut self, now: Duration, actions: &mut Vec<Action>) {
        self.abandon(actions);
        if self.phase == Phase::Leaving {
            self.end(End::Left, actions);
            return;
        }
        self.phase = Phase::Joining;
        self.exchange.schedule(now);
    }

    fn abandon(&mut self, actions: &mut Vec<Action>) {
        actions.extend(self.shards.abandon().into_iter().map(Action::Abandon));
        self.lease.forget();
        self.exchange.forget();
        self.epoch = EPOCH_JOIN;
        self.may_be_known = false;
    }

    fn end(&mut self, end: End, actions: &mut Vec<Action>) {
        self.phase = Phase::Ended;
        self.exchange.forget();
        self.lease.forget();
        actions.push(Action::Ended(end));
    }

    fn go_on(&mut self, now: Duration, actions: &mut Vec<Action>) {
        if self.phase == Phase::Ended {
            return;
        }
        if self.exchange.give_up_after(self.settings.request_timeout, now) {
            self.exchange.schedule(now);
        }
        if self.exchange.is_due(now) {
            let request = self.compose();
            self.may_be_known = true;
            self.exchange.send(InFlight {
                request_id: request.request_id.clone(),
                sent_at: now,
                epoch: request.member_epoch,
                reported: self.shards.drained(),
            });
            actions.push(Action::Send(Box::new(request)));
        }
    }

    /// The full state of the member, as the next heartbeat tells it.
    fn compose(&mut self) -> HeartbeatRequest {
        self.sequence += 1;
        let member_epoch = match self.phase {
            Phase::Leaving => EPOCH_LEAVE,
            Phase::Joining => EPOCH_JOIN,
            Phase::Member | Phase::Ended => self.epoch,
        };
        HeartbeatRequest {
            protocol_version: PROTOCOL_VERSION,
            request_id: format!("{}-{}", self.identity.instance_id, self.sequence),
            member_id: self.identity.member_id.clone(),
            member_name: self.identity.member_name.clone(),
            member_epoch,
            metadata_version: self.version,
            runtime_consumer_capacity: self.capacity,
            owned_shards: self.shards.owned(),
            revoking_shards: self.shards.revoking(),
            shard_progress: Vec::new(),
            instance_id: Some(self.identity.instance_id.clone()),
            metadata_token: (!self.token.is_empty()).then(|| self.token.clone()),
            sequence: Some(self.sequence),
            wait_ms: None,
        }
    }
}

fn carry_out(changes: &Changes, actions: &mut Vec<Action>) {
    actions.extend(changes.drained.iter().map(|shard| Action::Drain(*shard)));
    actions.extend(changes.started.iter().map(|shard| Action::Start(*shard)));
}
