//! A group under test: simulated time, requests in a line, every step through JSON and every invariant.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "the helpers of a test fail like the test"
)]

pub mod drivers;
pub mod rounds;
pub mod streams;

use rsc_core::validate::validate_transition;
use rsc_core::write::{RawFields, WriteKind};
use rsc_core::{Command, Context, Counts, Decision, Group, Reply, Settings, decide, lifecycle, load};
use rsc_protocol::{
    CapacityReport, GroupKey, HeartbeatRequest, HeartbeatResponse, RevokingReport, RevokingState, ShardRef,
    Status, Timestamp,
};

/// Milliseconds of one lease, one rebalance timeout, one retention with the default settings.
pub const LEASE: i64 = 15_000;
pub const REBALANCE: i64 = 60_000;
pub const RETENTION: i64 = 600_000;
/// Redis time when the tests begin.
pub const START: i64 = 1_800_000_000_000;

/// A group in "Redis": what is stored is text, and every turn starts by loading it.
#[derive(Clone)]
pub struct Bench {
    pub fields: RawFields,
    pub key: GroupKey,
    pub now: Timestamp,
    pub settings: Settings,
    pub may_expire: bool,
    pub may_grant: bool,
    pub may_hand_out: bool,
    pub routing_ttl_age_ms: u64,
    turns: u64,
    requests: u64,
    pub last: Option<Decision>,
    pub counts: Vec<Counts>,
    /// The stored hash before each write, oldest first.
    pub history: Vec<RawFields>,
}

impl Bench {
    /// A provisioned, empty group.
    pub fn new(shard_count: u32) -> Self {
        Self::with_settings(shard_count, Settings::default())
    }

    pub fn with_settings(shard_count: u32, settings: Settings) -> Self {
        Self::of("billing", shard_count, settings, Timestamp::from_millis(START))
    }

    /// One group of the stream `orders`, created at `now`.
    pub fn of(consumer_group: &str, shard_count: u32, settings: Settings, now: Timestamp) -> Self {
        let key = GroupKey::new("orders", consumer_group).unwrap();
        let creation = lifecycle::create(&key, shard_count, now, "token-0", None, &settings);
        let mut bench = Bench {
            fields: RawFields::new(),
            key,
            now,
            settings,
            may_expire: true,
            may_grant: true,
            may_hand_out: true,
            routing_ttl_age_ms: 0,
            turns: 0,
            requests: 0,
            last: None,
            counts: Vec::new(),
            history: Vec::new(),
        };
        bench.store(&creation.write);
        bench.turn(&[Command::Provisioned]);
        bench.history.clear();
        bench
    }

    pub fn group(&self) -> Group {
        load(&self.key, &self.fields, &self.settings).expect("what we wrote loads").group
    }

    /// Writes as the commit script does.
    pub fn store(&mut self, write: &rsc_core::Write) {
        let mut set = |field: &str, value: String| self.fields.insert(field.to_owned(), value.into_bytes());
        if let WriteKind::Structural { aggregate, revision } = &write.kind {
            set("aggregate", aggregate.clone());
            set("revision", revision.to_string());
            set("schemaVersion", "1".to_owned());
            set("layoutVersion", "2".to_owned());
        }
        set("updatedAt", write.updated_at.to_string());
        set("writeId", format!("write-{}", self.turns));
        for (id, live) in &write.live {
            set(&format!("live:{id}"), live.clone());
        }
        for id in &write.removed_live {
            self.fields.remove(&format!("live:{id}"));
        }
        let live_revision: u64 =
            self.fields.get("liveRevision").map_or(0, |v| String::from_utf8_lossy(v).parse().unwrap());
        self.fields.insert("liveRevision".to_owned(), (live_revision + 1).to_string().into_bytes());
    }

    /// One turn: load, decide, check every invariant, store.
    pub fn turn(&mut self, commands: &[Command]) -> Vec<Reply> {
        self.turns += 1;
        let loaded = load(&self.key, &self.fields, &self.settings).expect("what we wrote loads");
        let context = Context {
            now: self.now,
            settings: self.settings.clone(),
            may_expire: self.may_expire,
            may_grant: self.may_grant,
            may_hand_out: self.may_hand_out,
            metadata_token: format!("token-{}", self.turns),
            routing_ttl_age_ms: self.routing_ttl_age_ms,
        };
        let before = loaded.group.clone();
        let decision = decide(loaded.group, &loaded.stray_live, commands, &context);
        assert_eq!(decision.group.validate(), [], "after {commands:#?}");
        assert_eq!(validate_transition(&before, &decision.group, self.now), [], "after {commands:#?}");
        match &decision.write {
            Some(write) => {
                self.history.push(self.fields.clone());
                self.store(write);
                let stored = self.group();
                assert_eq!(stored, decision.group, "what is stored is what was decided");
            }
            None => assert_eq!(before, decision.group, "no write, no change"),
        }
        let replies = decision.replies.clone();
        self.counts.push(decision.counts.clone());
        self.last = Some(decision);
        replies
    }

    /// A moment to come back to with [`Bench::restore`].
    pub fn mark(&self) -> usize {
        self.history.len()
    }

    /// Redis loses every write since the mark.
    pub fn restore(&mut self, mark: usize) {
        if let Some(fields) = self.history.drain(mark..).next() {
            self.fields = fields;
        }
    }

    pub fn last_write(&self) -> Option<&rsc_core::Write> {
        self.last.as_ref().and_then(|decision| decision.write.as_ref())
    }

    pub fn is_lease_only(&self) -> bool {
        matches!(self.last_write(), Some(write) if write.kind == WriteKind::LeaseOnly)
    }

    pub fn send(&mut self, request: HeartbeatRequest) -> HeartbeatResponse {
        self.try_send(request).expect("answered with a heartbeat response")
    }

    pub fn try_send(&mut self, request: HeartbeatRequest) -> Option<HeartbeatResponse> {
        request.check().expect("a well-formed request");
        match self.turn(&[heartbeat(request)]).pop() {
            Some(Reply::Heartbeat(response)) => Some(*response),
            _ => None,
        }
    }

    pub fn tick(&mut self) {
        self.turn(&[Command::Tick]);
    }

    pub fn pass(&mut self, millis: i64) {
        self.now = self.now.plus(millis);
    }

    /// A request with a fresh id: epoch 0, nothing owned.
    pub fn request(&mut self, member: &str) -> HeartbeatRequest {
        self.requests += 1;
        HeartbeatRequest {
            protocol_version: 1,
            request_id: format!("request-{}", self.requests),
            member_id: member.to_owned(),
            member_name: None,
            member_epoch: 0,
            metadata_version: 0,
            runtime_consumer_capacity: CapacityReport {
                runtime_max_concurrency: 4,
                available_concurrency: 3,
            },
            owned_shards: Vec::new(),
            revoking_shards: Vec::new(),
            shard_progress: Vec::new(),
            instance_id: None,
            metadata_token: None,
            sequence: None,
            wait_ms: None,
        }
    }
}

pub fn heartbeat(request: HeartbeatRequest) -> Command {
    Command::Heartbeat { path_member_id: request.member_id.clone(), request: Box::new(request) }
}

/// Builders on a request.
pub trait RequestExt: Sized {
    fn epoch(self, epoch: i64) -> Self;
    fn version(self, version: u64) -> Self;
    fn owned(self, shards: &[u32]) -> Self;
    fn draining(self, shards: &[u32]) -> Self;
    fn revoked(self, shards: &[u32]) -> Self;
    fn instance(self, instance: &str, sequence: u64) -> Self;
}

impl RequestExt for HeartbeatRequest {
    fn epoch(mut self, epoch: i64) -> Self {
        self.member_epoch = epoch;
        self
    }
    fn version(mut self, version: u64) -> Self {
        self.metadata_version = version;
        self
    }
    fn owned(mut self, shards: &[u32]) -> Self {
        self.owned_shards = shards.iter().map(|s| ShardRef { shard_index: *s }).collect();
        self
    }
    fn draining(mut self, shards: &[u32]) -> Self {
        self.revoking_shards.extend(shards.iter().map(|s| revoking(*s, RevokingState::Draining, 1)));
        self
    }
    fn revoked(mut self, shards: &[u32]) -> Self {
        self.revoking_shards.extend(shards.iter().map(|s| revoking(*s, RevokingState::Revoked, 0)));
        self
    }
    fn instance(mut self, instance: &str, sequence: u64) -> Self {
        self.instance_id = Some(instance.to_owned());
        self.sequence = Some(sequence);
        self
    }
}

pub fn revoking(shard: u32, state: RevokingState, in_flight: u64) -> RevokingReport {
    RevokingReport { shard: ShardRef { shard_index: shard }, state, in_flight, acked_at: None }
}

pub fn assigned(response: &HeartbeatResponse) -> Vec<u32> {
    response.assignment.assigned_shards.iter().map(|shard| shard.shard_index).collect()
}

pub fn pending(response: &HeartbeatResponse) -> Vec<u32> {
    response.assignment.pending_shards.iter().map(|shard| shard.shard_index).collect()
}

pub fn awaited(response: &HeartbeatResponse) -> Vec<u32> {
    response.assignment.revoking_shards.iter().map(|shard| shard.shard_index).collect()
}

/// A client that keeps the promises of protocol 11 and answers every question with its full state.
#[derive(Clone, Debug)]
pub struct Client {
    pub id: String,
    pub instance: Option<String>,
    pub sequence: u64,
    pub epoch: i64,
    pub version: u64,
    pub owned: Vec<u32>,
    pub draining: Vec<u32>,
    /// The token received with `version`; sent along only if `sends_token`.
    pub token: String,
    pub sends_token: bool,
    /// Without it what is taken from the client is stopped at once and never named again.
    pub knows_drains: bool,
    /// Until when the client goes on reading, as far as it knows itself.
    pub lease_until: Timestamp,
}

impl Client {
    /// With `instanceId` and `sequence`.
    pub fn new(id: &str, instance: &str) -> Self {
        Client { instance: Some(instance.to_owned()), ..Self::old(id) }
    }

    /// Without our additions.
    pub fn old(id: &str) -> Self {
        Client {
            id: id.to_owned(),
            instance: None,
            sequence: 100,
            epoch: 0,
            version: 0,
            owned: Vec::new(),
            draining: Vec::new(),
            token: String::new(),
            sends_token: false,
            knows_drains: true,
            lease_until: Timestamp::MIN,
        }
    }

    /// With all of our additions.
    pub fn full(id: &str, instance: &str) -> Self {
        Client { sends_token: true, ..Self::new(id, instance) }
    }

    /// Without our additions and without drains: it replaces or intersects its set as the status says.
    pub fn legacy(id: &str) -> Self {
        Client { knows_drains: false, ..Self::old(id) }
    }

    /// The next heartbeat: whatever is being drained is reported `REVOKED` if `finish`, else `DRAINING`.
    pub fn request(&mut self, bench: &mut Bench, finish: bool) -> HeartbeatRequest {
        self.sequence += 1;
        let mut request = bench.request(&self.id).epoch(self.epoch).version(self.version).owned(&self.owned);
        request = if finish { request.revoked(&self.draining) } else { request.draining(&self.draining) };
        if let Some(instance) = &self.instance {
            request = request.instance(instance, self.sequence);
        }
        if finish {
            self.draining.clear();
        }
        request.metadata_token = self.sends_token.then(|| self.token.clone());
        request
    }

    pub fn apply(&mut self, response: &HeartbeatResponse) {
        match response.status {
            Status::Ok | Status::SyncMetadata | Status::RevokePending => {
                self.epoch = response.member_epoch;
                self.version = response.metadata_version;
                self.token.clone_from(&response.metadata_token);
                let assigned = assigned(response);
                let stopped: Vec<u32> =
                    self.owned.iter().copied().filter(|s| !assigned.contains(s)).collect();
                if response.status == Status::Ok {
                    self.draining.retain(|shard| !assigned.contains(shard));
                    self.owned = assigned;
                } else {
                    // Keeps what it reads and starts nothing.
                    self.owned.retain(|shard| assigned.contains(shard));
                }
                if self.knows_drains {
                    self.draining.extend(stopped);
                }
            }
            Status::UnknownMemberId | Status::FencedMemberEpoch => {
                self.epoch = 0;
                self.version = response.metadata_version;
                self.owned.clear();
                self.draining.clear();
            }
            _ => {}
        }
    }

    /// One heartbeat, drains finished at once.
    pub fn beat(&mut self, bench: &mut Bench) -> HeartbeatResponse {
        self.exchange(bench, true)
    }

    /// One heartbeat that keeps draining.
    pub fn beat_draining(&mut self, bench: &mut Bench) -> HeartbeatResponse {
        self.exchange(bench, false)
    }

    fn exchange(&mut self, bench: &mut Bench, finish: bool) -> HeartbeatResponse {
        let sent_at = bench.now;
        let request = self.request(bench, finish);
        let response = bench.send(request);
        self.apply(&response);
        let extends = matches!(response.status, Status::Ok | Status::SyncMetadata | Status::RevokePending);
        if extends {
            let lease = i64::try_from(response.assignment_lease_ms).unwrap();
            self.lease_until = self.lease_until.max(sent_at.plus(lease));
        }
        response
    }

    /// One heartbeat whose answer is lost; the client goes on as before.
    pub fn beat_in_vain(&mut self, bench: &mut Bench) -> HeartbeatResponse {
        let request = self.request(bench, false);
        bench.send(request)
    }

    /// Stops everything if the lease is over; the next heartbeat is a join.
    pub fn notice_time(&mut self, now: Timestamp) {
        if self.epoch != 0 && now >= self.lease_until {
            self.epoch = 0;
            self.owned.clear();
            self.draining.clear();
        }
    }

    /// What the client may be touching now, as far as it knows itself.
    pub fn touches(&self, now: Timestamp) -> Vec<u32> {
        let alive = now < self.lease_until;
        self.owned.iter().chain(&self.draining).copied().filter(|_| alive).collect()
    }
}

/// Heartbeats of everybody in turn until nothing moves; panics after too many rounds.
pub fn settle(bench: &mut Bench, clients: &mut [&mut Client]) {
    for _ in 0..50 {
        let before = bench.group();
        for client in clients.iter_mut() {
            client.beat(bench);
            bench.pass(100);
        }
        let after = bench.group();
        if after.metadata_version == before.metadata_version
            && after.state == rsc_protocol::admin::GroupState::Stable
        {
            return;
        }
    }
    panic!("the group did not settle: {:#?}", bench.group());
}
