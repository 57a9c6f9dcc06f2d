//! Requests and answers of operators (protocol 8).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::time::Timestamp;

/// Body of `POST /streams/{p}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CreateStreamRequest {
    /// How many shards, at least 1; the configured default when absent.
    #[serde(default)]
    pub initial_shard_count: Option<i64>,
    /// Who asks, for the record. Not blank.
    pub requested_by: String,
    /// Why, for the record.
    #[serde(default)]
    pub reason: Option<String>,
    /// The groups to create; one group named like the prefix when absent.
    #[serde(default)]
    pub consumer_groups: Option<Vec<String>>,
}

/// Answer of `POST /streams/{p}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CreateStreamResponse {
    /// The stream prefix.
    pub stream_prefix: String,
    /// Its shard count.
    pub shard_count: u32,
    /// The version the groups start with (the highest of them).
    pub metadata_version: u64,
    /// The groups created (addition).
    #[serde(default)]
    pub consumer_groups: Vec<String>,
}

/// Body of `POST /streams/{p}/groups/{g}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CreateGroupRequest {
    /// How many shards, at least 1; must be the stream's count where the stream exists.
    #[serde(default)]
    pub initial_shard_count: Option<i64>,
    /// Who asks, for the record. Not blank.
    pub requested_by: String,
    /// Why, for the record.
    #[serde(default)]
    pub reason: Option<String>,
}

/// Body of `DELETE /streams/{p}/groups/{g}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeleteGroupRequest {
    /// Who asks, for the record. Not blank.
    pub requested_by: String,
    /// Why, for the record. Not blank.
    pub reason: String,
    /// Delete although members are live, or although the record cannot be read.
    #[serde(default)]
    pub force: bool,
}

/// A group's states (protocol 3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum GroupState {
    /// No live members.
    #[default]
    Empty,
    /// The target is not computed for the current group epoch.
    Assigning,
    /// The target differs from what members hold.
    Reconciling,
    /// Every live member reads exactly its target.
    Stable,
}

/// A member's states (protocol 3). Live: the first three.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum MemberState {
    /// Joined, not yet heard with its epoch.
    Starting,
    /// Heard with its epoch.
    Active,
    /// Draining on its way out.
    Leaving,
    /// Lease over, or left.
    Expired,
    /// Thrown out.
    Fenced,
}

impl MemberState {
    /// Whether the member counts: `STARTING`, `ACTIVE` or `LEAVING`.
    #[must_use]
    pub fn is_live(self) -> bool {
        matches!(self, MemberState::Starting | MemberState::Active | MemberState::Leaving)
    }

    /// Whether shards are assigned to the member: `STARTING` or `ACTIVE`.
    #[must_use]
    pub fn is_assignable(self) -> bool {
        matches!(self, MemberState::Starting | MemberState::Active)
    }
}

/// A group at a glance (protocol 8).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupResponse {
    /// The stream prefix.
    pub stream_prefix: String,
    /// The consumer group.
    pub consumer_group: String,
    /// The group's state.
    pub state: GroupState,
    /// The group's epoch.
    pub group_epoch: u64,
    /// The group epoch for which the target was computed.
    pub assignment_epoch: u64,
    /// The version of this answer.
    pub metadata_version: u64,
    /// The count producers route with.
    pub shard_count: u32,
    /// The running migration's id, if one runs.
    pub active_migration: Option<String>,
    /// Member → number of shards it should own.
    pub target_assignment_summary: BTreeMap<String, usize>,
    /// Member → number of shards it reports to own.
    pub current_assignment_summary: BTreeMap<String, usize>,
    /// Goes with `metadataVersion` (addition).
    #[serde(default)]
    pub metadata_token: String,
    /// Structural writes of the Redis key so far (addition).
    #[serde(default)]
    pub store_revision: u64,
    /// Live members (addition).
    #[serde(default)]
    pub live_members: usize,
    /// `true` while the group takes heartbeats; `false` with `errorCode` and `message` (addition).
    #[serde(default = "yes")]
    pub healthy: bool,
    /// A correction round is on: Redis lost writes, members are being brought back, mutations wait (addition).
    #[serde(default)]
    pub metadata_sync_in_progress: bool,
    /// What is wrong with the record, if something is (addition).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_code: Option<crate::ErrorCode>,
    /// The same for people (addition).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// When the group was created.
    #[serde(default)]
    pub created_at: Timestamp,
    /// When the record was last written.
    #[serde(default)]
    pub updated_at: Timestamp,
}

fn yes() -> bool {
    true
}
