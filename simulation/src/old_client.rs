//! A client of the same protocol that knows none of our additions: no `revokingShards`, `instanceId`,
//! `sequence`, `metadataToken`. It replaces its set on `OK` and intersects it on `SYNC_METADATA` and
//! `REVOKE_PENDING`; what it loses it stops at once.

use std::collections::BTreeSet;

use rsc_protocol::{CapacityReport, HeartbeatRequest, HeartbeatResponse, ShardRef, Status};

use crate::plan::{ModelFault, Plan, Timing};

/// Its state. Instants are microseconds of its own clock.
#[derive(Debug)]
pub(crate) struct OldClient {
    member_id: String,
    name: String,
    requests: u64,
    epoch: i64,
    version: u64,
    reading: BTreeSet<u32>,
    lease_until: Option<i64>,
    in_flight: Option<(String, i64)>,
    due_at: i64,
    leaving: bool,
    ended: bool,
    heartbeat: i64,
    timeout: i64,
    lease: i64,
    from_receipt: bool,
    ignores_lease_end: bool,
}

impl OldClient {
    /// A process named `name` (unique) of the member.
    #[must_use]
    pub(crate) fn new(member_id: &str, name: String, timing: &Timing, plan: &Plan) -> Self {
        OldClient {
            member_id: member_id.to_owned(),
            name,
            requests: 0,
            epoch: 0,
            version: 0,
            reading: BTreeSet::new(),
            lease_until: None,
            in_flight: None,
            due_at: 0,
            leaving: false,
            ended: false,
            heartbeat: timing.heartbeat * 1_000,
            timeout: timing.request_timeout * 1_000,
            lease: timing.lease * 1_000,
            from_receipt: plan.lacks(ModelFault::LeaseFromReceipt),
            ignores_lease_end: plan.lacks(ModelFault::OldClientIgnoresLeaseEnd),
        }
    }

    /// Shards it reads at `now`, as it believes.
    pub(crate) fn reads(&self, now: i64) -> impl Iterator<Item = u32> + '_ {
        let runs = self.lease_until.is_some_and(|until| now < until) || self.ignores_lease_end;
        self.reading.iter().copied().filter(move |_| runs && !self.ended)
    }

    /// Whether it has stopped for good.
    #[must_use]
    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    /// When it wants to be woken.
    #[must_use]
    pub(crate) fn wakes_at(&self) -> Option<i64> {
        if self.ended {
            return None;
        }
        let next = self.in_flight.as_ref().map_or(self.due_at, |(_, sent)| sent + self.timeout);
        let lease_end = self.lease_until.filter(|_| !self.ignores_lease_end);
        Some(lease_end.map_or(next, |until| next.min(until)))
    }

    fn check_lease(&mut self, now: i64) {
        if self.lease_until.is_some_and(|until| now >= until) && !self.ignores_lease_end {
            self.forget(now);
        }
    }

    fn forget(&mut self, now: i64) {
        self.reading.clear();
        self.lease_until = None;
        self.in_flight = None;
        self.epoch = 0;
        self.due_at = now;
        self.ended |= self.leaving;
    }

    /// Time has passed: the next request, if one is due.
    pub(crate) fn time(&mut self, now: i64) -> Option<HeartbeatRequest> {
        if self.ended {
            return None;
        }
        self.check_lease(now);
        if self.in_flight.as_ref().is_some_and(|(_, sent)| now >= sent + self.timeout) {
            self.in_flight = None;
            self.due_at = now;
        }
        if self.ended || self.in_flight.is_some() || now < self.due_at {
            return None;
        }
        self.requests += 1;
        let request_id = format!("{}-{}", self.name, self.requests);
        self.in_flight = Some((request_id.clone(), now));
        Some(HeartbeatRequest {
            protocol_version: 1,
            request_id,
            member_id: self.member_id.clone(),
            member_name: None,
            member_epoch: if self.leaving { -1 } else { self.epoch },
            metadata_version: self.version,
            runtime_consumer_capacity: CapacityReport {
                runtime_max_concurrency: 1,
                available_concurrency: 1,
            },
            owned_shards: self.reading.iter().map(|shard| ShardRef { shard_index: *shard }).collect(),
            revoking_shards: Vec::new(),
            shard_progress: Vec::new(),
            instance_id: None,
            metadata_token: None,
            sequence: None,
            wait_ms: None,
        })
    }

    /// It wants to stop: it stops reading and says −1.
    pub(crate) fn leave(&mut self, now: i64) {
        self.check_lease(now);
        // Only a member leaves: without `instanceId` a −1 before the answer to its join would be taken for the
        // leave of whoever is accepted.
        if self.epoch == 0 {
            self.ended = true;
            return;
        }
        self.leaving = true;
        self.reading.clear();
        self.due_at = self.due_at.min(now);
    }

    /// A request got no answer and never will.
    pub(crate) fn failed(&mut self, now: i64, request_id: &str) {
        if self.in_flight.as_ref().is_some_and(|(id, _)| id == request_id) {
            self.in_flight = None;
            self.due_at = now + self.heartbeat / 4;
        }
    }

    /// An answer arrived.
    pub(crate) fn answered(&mut self, now: i64, response: &HeartbeatResponse) {
        self.check_lease(now);
        let is_mine = |(id, _): &mut (String, i64)| *id == response.response_to;
        let Some((_, sent_at)) = self.in_flight.take_if(is_mine) else { return };
        let assigned: BTreeSet<u32> =
            response.assignment.assigned_shards.iter().map(|shard| shard.shard_index).collect();
        match response.status {
            Status::Ok if self.leaving => {
                self.reading.clear();
                self.ended = response.member_epoch == -1;
                self.due_at = now;
            }
            Status::Ok => {
                self.adopt(now, sent_at, response);
                self.reading = assigned;
            }
            Status::SyncMetadata | Status::RevokePending => {
                self.adopt(now, sent_at, response);
                self.reading.retain(|shard| assigned.contains(shard));
            }
            Status::Retry => self.due_at = now + self.heartbeat / 4,
            Status::UnknownMemberId | Status::FencedMemberEpoch => {
                self.version = response.metadata_version;
                let was_a_join = self.epoch == 0;
                self.forget(now);
                if was_a_join {
                    self.due_at = now + self.heartbeat;
                }
            }
            Status::UnsupportedProtocol | Status::InvalidRequest => {
                self.forget(now);
                self.ended = true;
            }
        }
    }

    fn adopt(&mut self, now: i64, sent_at: i64, response: &HeartbeatResponse) {
        let from = if self.from_receipt { now } else { sent_at };
        self.lease_until = self.lease_until.max(Some(from + self.lease));
        self.version = response.metadata_version;
        self.epoch = response.member_epoch;
        self.due_at = now.max(sent_at + self.heartbeat);
    }
}
