//! What one demo consumer believes about its membership, and what each answer does to it (protocol 4 and
//! 11). Pure: no IO, and every instant is given to it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rsc_protocol::heartbeat::{EPOCH_JOIN, EPOCH_LEAVE};
use rsc_protocol::{
    CapacityReport, HeartbeatRequest, HeartbeatResponse, PROTOCOL_VERSION, RevokingReport, RevokingState,
    ShardRef, Status,
};

/// A set of shard indexes.
pub(crate) type Shards = BTreeSet<u32>;

/// How long a demo consumer takes to finish what it has in flight on a shard, so that a hand-over can be
/// watched.
pub(crate) const DRAIN: Duration = Duration::from_millis(1_200);
/// Records that the demo claims to have in flight on a shard that it drains.
const IN_FLIGHT: u64 = 1;
/// Workers that a demo consumer claims to have.
const WORKERS: u32 = 4;

/// What an answer, or the lack of one, led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Accepted with this epoch.
    Joined(i64),
    /// These shards are read from now on.
    Started(Shards),
    /// These shards are to be given back: no new reads, finish what is in flight.
    AskedToDrain(Shards),
    /// These shards were reported `REVOKED`, and the coordinator has recorded it.
    GaveBack(Shards),
    /// Everything was stopped at the coordinator's word; the sentence says why.
    Fenced(String),
    /// Everything was stopped because no answer came in time.
    LeaseOver,
    /// Gone with everything given back.
    Left,
    /// The coordinator refuses for good; a person has to look.
    Refused(String),
}

/// One incarnation of a demo consumer.
#[derive(Debug)]
pub(crate) struct Membership {
    member_id: String,
    /// Random per start, so that a restart is told apart from the process that died.
    instance_id: String,
    epoch: i64,
    metadata_version: u64,
    metadata_token: String,
    sequence: u64,
    reading: Shards,
    /// Shards that are being given back, and when nothing of them is in flight any more.
    draining: BTreeMap<u32, Instant>,
    lease_ends: Option<Instant>,
    interval: Duration,
    leaving: bool,
    over: bool,
}

impl Membership {
    /// A consumer that has just started. `sequence` is wall-clock milliseconds, so that it is beyond
    /// whatever an earlier process sent; `interval` serves until the coordinator names its own.
    pub(crate) fn new(member_id: &str, instance_id: &str, sequence: u64, interval: Duration) -> Self {
        Membership {
            member_id: member_id.to_owned(),
            instance_id: instance_id.to_owned(),
            epoch: EPOCH_JOIN,
            metadata_version: 0,
            metadata_token: String::new(),
            sequence,
            reading: Shards::new(),
            draining: BTreeMap::new(),
            lease_ends: None,
            interval,
            leaving: false,
            over: false,
        }
    }

    /// The shards that are read.
    pub(crate) fn reading(&self) -> &Shards {
        &self.reading
    }

    /// The shards that are being given back.
    pub(crate) fn draining(&self) -> Shards {
        self.draining.keys().copied().collect()
    }

    /// When reading must stop unless an answer comes before; `None` without a lease.
    pub(crate) fn lease_ends(&self) -> Option<Instant> {
        self.lease_ends
    }

    /// How long to wait between heartbeats.
    pub(crate) fn interval(&self) -> Duration {
        self.interval
    }

    /// Whether this incarnation has nothing more to say.
    pub(crate) fn is_over(&self) -> bool {
        self.over
    }

    /// When there is something new to report before the next interval ends: a drain that finishes.
    pub(crate) fn next_finished_drain(&self) -> Option<Instant> {
        self.draining.values().min().copied()
    }

    /// Begins to leave: everything is drained, then given back.
    pub(crate) fn leave(&mut self, now: Instant) {
        self.leaving = true;
        let all = std::mem::take(&mut self.reading);
        self.drain(all, now);
        // Nobody knows a member that was never accepted; there is nothing to leave.
        self.over |= self.epoch == EPOCH_JOIN;
    }

    /// The next heartbeat: always the full state.
    pub(crate) fn request(&mut self, now: Instant) -> HeartbeatRequest {
        self.sequence += 1;
        let shard = |shard_index| ShardRef { shard_index };
        let revoking = self.draining.iter().map(|(index, finished_at)| {
            let finished = *finished_at <= now;
            RevokingReport {
                shard: shard(*index),
                state: if finished { RevokingState::Revoked } else { RevokingState::Draining },
                in_flight: if finished { 0 } else { IN_FLIGHT },
                acked_at: None,
            }
        });
        let busy = WORKERS.min(u32::try_from(self.reading.len() + self.draining.len()).unwrap_or(WORKERS));
        HeartbeatRequest {
            protocol_version: PROTOCOL_VERSION,
            request_id: format!("{}-{}", self.instance_id, self.sequence),
            member_id: self.member_id.clone(),
            member_name: None,
            member_epoch: if self.leaving { EPOCH_LEAVE } else { self.epoch },
            metadata_version: self.metadata_version,
            runtime_consumer_capacity: CapacityReport {
                runtime_max_concurrency: WORKERS,
                available_concurrency: WORKERS - busy,
            },
            owned_shards: self.reading.iter().copied().map(shard).collect(),
            revoking_shards: revoking.collect(),
            shard_progress: Vec::new(),
            instance_id: Some(self.instance_id.clone()),
            metadata_token: Some(self.metadata_token.clone()).filter(|token| !token.is_empty()),
            sequence: Some(self.sequence),
            wait_ms: None,
        }
    }

    /// Stops everything once the lease has run out.
    pub(crate) fn check_lease(&mut self, now: Instant) -> Option<Event> {
        self.lease_ends.filter(|ends| *ends <= now)?;
        self.stop_everything();
        self.over |= self.leaving;
        Some(Event::LeaseOver)
    }

    /// Does what the answer to `request`, sent at `sent`, says.
    pub(crate) fn apply(
        &mut self,
        request: &HeartbeatRequest,
        response: &HeartbeatResponse,
        sent: Instant,
        now: Instant,
    ) -> Vec<Event> {
        // Only the answer to the request in flight counts, and it may come too late for its own lease.
        if response.response_to != request.request_id {
            return Vec::new();
        }
        if let Some(over) = self.check_lease(now) {
            return vec![over];
        }
        match response.status {
            Status::Ok => self.apply_ok(request, response, sent, now),
            Status::SyncMetadata | Status::RevokePending => {
                self.adopt(response, sent);
                self.keep_only(&assigned(response), now).into_iter().collect()
            }
            Status::Retry => Vec::new(),
            Status::UnknownMemberId | Status::FencedMemberEpoch => {
                self.stop_everything();
                self.metadata_version = response.metadata_version;
                self.metadata_token.clone_from(&response.metadata_token);
                self.over |= self.leaving;
                vec![Event::Fenced(response.reason.clone())]
            }
            Status::UnsupportedProtocol | Status::InvalidRequest => {
                self.stop_everything();
                self.over = true;
                vec![Event::Refused(response.reason.clone())]
            }
        }
    }

    fn apply_ok(
        &mut self,
        request: &HeartbeatRequest,
        response: &HeartbeatResponse,
        sent: Instant,
        now: Instant,
    ) -> Vec<Event> {
        let mut events = Vec::new();
        if self.epoch == EPOCH_JOIN {
            events.push(Event::Joined(response.member_epoch));
        }
        self.adopt(response, sent);
        let assigned = if self.leaving { Shards::new() } else { assigned(response) };
        let given_back: Shards = request
            .revoking_shards
            .iter()
            .filter(|report| report.is_finished())
            .map(|report| report.shard.shard_index)
            .filter(|shard| !assigned.contains(shard) && self.draining.remove(shard).is_some())
            .collect();
        if !given_back.is_empty() {
            events.push(Event::GaveBack(given_back));
        }
        events.extend(self.keep_only(&assigned, now));
        // Only an OK starts a shard, or goes back to one that was being drained.
        let started: Shards = assigned.difference(&self.reading).copied().collect();
        self.draining.retain(|shard, _| !started.contains(shard));
        self.reading.extend(&started);
        if !started.is_empty() {
            events.push(Event::Started(started));
        }
        if self.leaving && request.member_epoch == EPOCH_LEAVE && self.draining.is_empty() {
            self.over = true;
            self.lease_ends = None;
            events.push(Event::Left);
        }
        events
    }

    /// Version, epoch, interval, and a lease that counts from when the request was *sent*.
    fn adopt(&mut self, response: &HeartbeatResponse, sent: Instant) {
        if response.member_epoch != EPOCH_LEAVE {
            self.epoch = response.member_epoch;
        }
        self.metadata_version = response.metadata_version;
        self.metadata_token.clone_from(&response.metadata_token);
        self.interval = Duration::from_millis(response.heartbeat_interval_ms.max(1));
        self.lease_ends = Some(sent + Duration::from_millis(response.assignment_lease_ms));
    }

    fn keep_only(&mut self, assigned: &Shards, now: Instant) -> Option<Event> {
        let to_drain: Shards = self.reading.difference(assigned).copied().collect();
        self.reading.retain(|shard| assigned.contains(shard));
        self.drain(to_drain.clone(), now);
        (!to_drain.is_empty()).then_some(Event::AskedToDrain(to_drain))
    }

    fn drain(&mut self, shards: Shards, now: Instant) {
        self.draining.extend(shards.into_iter().map(|shard| (shard, now + DRAIN)));
    }

    fn stop_everything(&mut self) {
        self.reading.clear();
        self.draining.clear();
        self.epoch = EPOCH_JOIN;
        self.lease_ends = None;
    }
}

fn assigned(response: &HeartbeatResponse) -> Shards {
    response.assignment.assigned_shards.iter().map(|shard| shard.shard_index).collect()
}

#[cfg(test)]
#[path = "membership_tests.rs"]
mod tests;
