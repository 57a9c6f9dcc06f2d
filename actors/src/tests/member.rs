//! A member as the protocol wants it (protocol 11), for tests that only look at the coordinator.

use std::collections::BTreeSet;

use rsc_protocol::heartbeat::{CapacityReport, RevokingReport, RevokingState, ShardRef};
use rsc_protocol::{GroupKey, HeartbeatRequest, HeartbeatResponse, PROTOCOL_VERSION, Status};

use crate::{Coordinator, Refusal};

/// One member's own view.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) id: String,
    pub(crate) instance: String,
    pub(crate) epoch: i64,
    pub(crate) version: u64,
    pub(crate) token: String,
    pub(crate) sequence: u64,
    pub(crate) owned: BTreeSet<u32>,
    /// Stopped reading; to be reported once.
    pub(crate) revoked: BTreeSet<u32>,
}

impl Member {
    pub(crate) fn new(id: &str) -> Self {
        Member {
            id: id.to_owned(),
            instance: format!("{id}-1"),
            epoch: 0,
            version: 0,
            token: String::new(),
            sequence: 0,
            owned: BTreeSet::new(),
            revoked: BTreeSet::new(),
        }
    }

    /// The next heartbeat of this member.
    pub(crate) fn request(&mut self) -> HeartbeatRequest {
        self.sequence += 1;
        HeartbeatRequest {
            protocol_version: PROTOCOL_VERSION,
            request_id: format!("{}-{}", self.instance, self.sequence),
            member_id: self.id.clone(),
            member_name: None,
            member_epoch: self.epoch,
            metadata_version: self.version,
            runtime_consumer_capacity: CapacityReport {
                runtime_max_concurrency: 4,
                available_concurrency: 4,
            },
            owned_shards: self.owned.iter().map(|shard| ShardRef { shard_index: *shard }).collect(),
            revoking_shards: self
                .revoked
                .iter()
                .map(|shard| RevokingReport {
                    shard: ShardRef { shard_index: *shard },
                    state: RevokingState::Revoked,
                    in_flight: 0,
                    acked_at: None,
                })
                .collect(),
            shard_progress: Vec::new(),
            instance_id: Some(self.instance.clone()),
            metadata_token: Some(self.token.clone()),
            sequence: Some(self.sequence),
            wait_ms: None,
        }
    }

    /// Acts on an answer; returns the shards that the member may newly read.
    pub(crate) fn apply(&mut self, response: &HeartbeatResponse) -> BTreeSet<u32> {
        match response.status {
            Status::Ok => {
                let assigned: BTreeSet<u32> =
                    response.assignment.assigned_shards.iter().map(|shard| shard.shard_index).collect();
                self.epoch = response.member_epoch;
                self.version = response.metadata_version;
                self.token = response.metadata_token.clone();
                self.revoked = self.owned.difference(&assigned).copied().collect();
                let new = assigned.difference(&self.owned).copied().collect();
                self.owned = assigned;
                new
            }
            Status::SyncMetadata | Status::RevokePending => {
                let assigned: BTreeSet<u32> =
                    response.assignment.assigned_shards.iter().map(|shard| shard.shard_index).collect();
                self.epoch = response.member_epoch;
                self.version = response.metadata_version;
                self.token = response.metadata_token.clone();
                self.revoked = self.owned.difference(&assigned).copied().collect();
                self.owned.retain(|shard| assigned.contains(shard));
                BTreeSet::new()
            }
            Status::UnknownMemberId | Status::FencedMemberEpoch => {
                self.epoch = 0;
                self.version = response.metadata_version;
                self.token = response.metadata_token.clone();
                self.owned.clear();
                self.revoked.clear();
                BTreeSet::new()
            }
            _ => BTreeSet::new(),
        }
    }

    /// Sends a heartbeat and acts on the answer.
    pub(crate) async fn beat(
        &mut self,
        coordinator: &Coordinator,
        group: &GroupKey,
    ) -> Result<HeartbeatResponse, Refusal> {
        let request = self.request();
        let response = coordinator.heartbeat(group, &self.id.clone(), request).await?;
        self.apply(&response);
        Ok(response)
    }

    /// As [`Member::beat`], and the answer must be `OK`.
    pub(crate) async fn beat_ok(&mut self, coordinator: &Coordinator, group: &GroupKey) -> HeartbeatResponse {
        let response = self.beat(coordinator, group).await.unwrap();
        assert_eq!(response.status, Status::Ok, "{}", response.reason);
        response
    }
}
