//! A consumer as protocol 11 wants it, driven by the test one heartbeat at a time.

use std::collections::{BTreeMap, BTreeSet};

use rsc_protocol::admin::GroupState;
use rsc_protocol::{
    CapacityReport, GroupKey, HeartbeatRequest, HeartbeatResponse, RevokingReport, RevokingState, ShardRef,
    Status,
};

use super::api::Api;
use super::wait::wait_until;

/// The first heartbeat of a member that sends no `instanceId`; change what the test is about.
pub(crate) fn heartbeat(member_id: &str) -> HeartbeatRequest {
    HeartbeatRequest {
        protocol_version: rsc_protocol::PROTOCOL_VERSION,
        request_id: uuid::Uuid::new_v4().to_string(),
        member_id: member_id.to_owned(),
        member_name: None,
        member_epoch: 0,
        metadata_version: 0,
        runtime_consumer_capacity: CapacityReport { runtime_max_concurrency: 4, available_concurrency: 4 },
        owned_shards: Vec::new(),
        revoking_shards: Vec::new(),
        shard_progress: Vec::new(),
        instance_id: None,
        metadata_token: None,
        sequence: None,
        wait_ms: None,
    }
}

/// One consumer's local state. Without [`Member::drains_slowly`] a drain is finished by the next heartbeat.
#[derive(Clone)]
pub(crate) struct Member {
    api: Api,
    group: GroupKey,
    id: String,
    /// `None`: a client that sends none.
    pub(crate) instance_id: Option<String>,
    pub(crate) epoch: i64,
    pub(crate) metadata_version: u64,
    metadata_token: Option<String>,
    sequence: u64,
    /// Shards it reads.
    pub(crate) owned: BTreeSet<u32>,
    /// Shards it drains, and how far it is.
    pub(crate) draining: BTreeMap<u32, RevokingState>,
    /// Drains stay `DRAINING` until [`Member::finish_drains`].
    pub(crate) drains_slowly: bool,
}

impl Member {
    /// A consumer that has just started, with an `instanceId`.
    pub(crate) fn new(api: &Api, group: &GroupKey, id: &str) -> Self {
        Member {
            api: api.clone(),
            group: group.clone(),
            id: id.to_owned(),
            instance_id: Some(uuid::Uuid::new_v4().to_string()),
            epoch: 0,
            metadata_version: 0,
            metadata_token: None,
            sequence: 0,
            owned: BTreeSet::new(),
            draining: BTreeMap::new(),
            drains_slowly: false,
        }
    }

    /// The same for a client that knows nothing of `instanceId`.
    pub(crate) fn simple(api: &Api, group: &GroupKey, id: &str) -> Self {
        Member { instance_id: None, ..Member::new(api, group, id) }
    }

    /// Its id.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// The group it is a member of.
    pub(crate) fn group(&self) -> &GroupKey {
        &self.group
    }

    /// Talks to another coordinator from now on.
    pub(crate) fn talk_to(&mut self, api: &Api) {
        self.api = api.clone();
    }

    /// What it would say now; each call is a new request.
    pub(crate) fn request(&mut self) -> HeartbeatRequest {
        self.sequence += 1;
        let report = |(&shard_index, &state): (&u32, &RevokingState)| RevokingReport {
            shard: ShardRef { shard_index },
            state,
            in_flight: u64::from(state != RevokingState::Revoked),
            acked_at: None,
        };
        HeartbeatRequest {
            member_epoch: self.epoch,
            metadata_version: self.metadata_version,
            metadata_token: self.metadata_token.clone(),
            owned_shards: self.owned.iter().map(|&shard_index| ShardRef { shard_index }).collect(),
            revoking_shards: self.draining.iter().map(report).collect(),
            sequence: self.instance_id.as_ref().map(|_| self.sequence),
            instance_id: self.instance_id.clone(),
            ..heartbeat(&self.id)
        }
    }

    /// One heartbeat, and what follows from its answer.
    pub(crate) async fn beat(&mut self) -> HeartbeatResponse {
        let request = self.request();
        let response = self.api.heartbeat(&self.group, &request).await;
        assert_eq!(response.response_to, request.request_id);
        self.apply(&request, &response);
        response
    }

    /// One heartbeat whose answer gets lost.
    pub(crate) async fn beat_unheard(&mut self) -> HeartbeatResponse {
        let request = self.request();
        self.api.heartbeat(&self.group, &request).await
    }

    /// Says that it leaves, once everything is drained at once.
    pub(crate) async fn leave(&mut self) -> HeartbeatResponse {
        self.draining.extend(self.owned.iter().map(|&shard| (shard, RevokingState::Revoked)));
        self.owned.clear();
        self.epoch = rsc_protocol::heartbeat::EPOCH_LEAVE;
        let request = self.request();
        self.api.heartbeat(&self.group, &request).await
    }

    /// Everything in flight of the shards it drains is done.
    pub(crate) fn finish_drains(&mut self) {
        self.draining.values_mut().for_each(|state| *state = RevokingState::Revoked);
    }

    /// Does what protocol 4 and 11 say about an answer.
    pub(crate) fn apply(&mut self, request: &HeartbeatRequest, response: &HeartbeatResponse) {
        let assigned: BTreeSet<u32> =
            response.assignment.assigned_shards.iter().map(|shard| shard.shard_index).collect();
        match response.status {
            Status::Ok => {
                // What was reported as given back is the coordinator's now.
                for report in request.revoking_shards.iter().filter(|report| report.is_finished()) {
                    self.draining.remove(&report.shard.shard_index);
                }
                self.adopt(response);
                self.drain_all_but(&assigned);
                self.draining.retain(|shard, _| !assigned.contains(shard));
                self.owned = assigned;
            }
            Status::SyncMetadata | Status::RevokePending => {
                self.adopt(response);
                self.drain_all_but(&assigned);
            }
            Status::UnknownMemberId | Status::FencedMemberEpoch => {
                self.owned.clear();
                self.draining.clear();
                self.epoch = 0;
                self.metadata_version = response.metadata_version;
            }
            Status::Retry => {}
            Status::UnsupportedProtocol | Status::InvalidRequest => {
                panic!("{} is refused for good: {}", self.id, response.reason)
            }
        }
    }

    fn adopt(&mut self, response: &HeartbeatResponse) {
        self.epoch = response.member_epoch;
        self.metadata_version = response.metadata_version;
        self.metadata_token = Some(response.metadata_token.clone());
    }

    fn drain_all_but(&mut self, assigned: &BTreeSet<u32>) {
        let state = if self.drains_slowly { RevokingState::Draining } else { RevokingState::Revoked };
        let lost: Vec<u32> = self.owned.difference(assigned).copied().collect();
        for shard in lost {
            self.owned.remove(&shard);
            self.draining.insert(shard, state);
        }
    }
}

/// Lets every member send heartbeats in turn until the group is `STABLE` and nobody drains; checks after
/// each answer that no shard is read by two.
pub(crate) async fn beat_until_stable(api: &Api, group: &GroupKey, members: &mut [Member]) {
    wait_until("the group is stable", async || {
        for index in 0..members.len() {
            members[index].beat().await;
            expect_one_reader(members);
        }
        let state = api.group(group).await.state;
        state == GroupState::Stable && members.iter().all(|member| member.draining.is_empty())
    })
    .await;
}

fn expect_one_reader(members: &[Member]) {
    let mut readers: BTreeMap<u32, &str> = BTreeMap::new();
    for member in members {
        // What is being drained with records in flight is still being read.
        let drained = member.draining.iter().filter(|(_, state)| **state != RevokingState::Revoked);
        for &shard in member.owned.iter().chain(drained.map(|(shard, _)| shard)) {
            if let Some(other) = readers.insert(shard, &member.id) {
                panic!("shard {shard} is read by {other} and {}", member.id);
            }
        }
    }
}
