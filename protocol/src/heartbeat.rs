//! The heartbeat: request, answer, statuses (protocol 4).

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::names::{MAX_NAME_BYTES, NameError, check_member_id};
use crate::time::Timestamp;

/// Epoch of a member that joins or rejoins.
pub const EPOCH_JOIN: i64 = 0;
/// Epoch of a member that leaves.
pub const EPOCH_LEAVE: i64 = -1;
/// The longest `requestId`, in characters; the shortest has one.
pub const MAX_REQUEST_ID_CHARACTERS: usize = 128;
/// The largest shard index, what a signed 32-bit integer of other implementations can hold.
pub const MAX_SHARD_INDEX: u32 = i32::MAX as u32;
/// The largest value of a version, epoch or sequence: integers beyond 2⁵³ are not exact in every JSON
/// implementation.
pub const MAX_COUNTER: u64 = 1 << 53;

/// A member's full state, sent every interval (protocol 4).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeartbeatRequest {
    /// The protocol version the client speaks; this coordinator speaks 1.
    pub protocol_version: i64,
    /// Names this request; echoed in `responseTo`. 1 to 128 characters.
    pub request_id: String,
    /// The member's id, the same as in the path.
    pub member_id: String,
    /// A name for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member_name: Option<String>,
    /// 0 to join or rejoin, −1 to leave, else the last epoch received.
    pub member_epoch: i64,
    /// The last version received; 0 when none was.
    pub metadata_version: u64,
    /// What the member can work on.
    pub runtime_consumer_capacity: CapacityReport,
    /// Shards the member reads.
    pub owned_shards: Vec<ShardRef>,
    /// Shards the member is draining or has just given back.
    #[serde(default, deserialize_with = "null_is_empty")]
    pub revoking_shards: Vec<RevokingReport>,
    /// How far the member has read, per shard; for people.
    #[serde(default, deserialize_with = "null_is_empty", skip_serializing_if = "Vec::is_empty")]
    pub shard_progress: Vec<ShardProgress>,
    /// Random per start of the client process (addition).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
    /// The token received with `metadataVersion` (addition).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata_token: Option<String>,
    /// Increases with every request of one incarnation; counts only with `instanceId` (addition).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    /// How long the answer may be held back, in milliseconds (addition, protocol 4.5).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
}

fn null_is_empty<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de>,
{
    Ok(Option::<Vec<T>>::deserialize(deserializer)?.unwrap_or_default())
}

/// What a member can work on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CapacityReport {
    /// Workers the member has, at least 1.
    pub runtime_max_concurrency: u32,
    /// Workers that are idle now.
    pub available_concurrency: u32,
}

/// Names one shard by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShardRef {
    /// 0-based.
    pub shard_index: u32,
}

/// How far a drain has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum RevokingState {
    /// Told to stop; reads may still be running.
    Revoking,
    /// No new reads; finishing what is in flight.
    Draining,
    /// Stopped, nothing in flight.
    Revoked,
}

/// One shard that a member is giving back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RevokingReport {
    /// The shard.
    pub shard: ShardRef,
    /// How far the drain has come.
    pub state: RevokingState,
    /// Records handed to the application and not yet acknowledged.
    pub in_flight: u64,
    /// When the drain ended, by the member's clock; for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acked_at: Option<Timestamp>,
}

impl RevokingReport {
    /// `REVOKED` with nothing in flight: the shard is given back.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.state == RevokingState::Revoked && self.in_flight == 0
    }
}

/// How far a member has read a shard; for people, decides nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShardProgress {
    /// The shard.
    pub shard: ShardRef,
    /// Its stream key.
    pub stream_key: String,
    /// The last record delivered to the application.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_delivered_id: Option<String>,
    /// The last record acknowledged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_acked_id: Option<String>,
    /// Records delivered and not yet acknowledged.
    pub pending_count: u64,
    /// When the member measured this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub updated_at: Option<Timestamp>,
}

/// Why a heartbeat body was refused with HTTP 400 although it is well-formed JSON of the right types.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum HeartbeatError {
    /// `requestId` is empty or too long.
    #[error("requestId has {characters} characters: 1 to {MAX_REQUEST_ID_CHARACTERS} are allowed")]
    RequestId {
        /// Its length in characters.
        characters: usize,
    },
    /// A name breaks a rule.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A shard is named twice over `ownedShards` and `revokingShards`.
    #[error("shard {0} appears more than once over ownedShards and revokingShards: name each shard once")]
    DuplicateShard(u32),
    /// A shard index is larger than any shard can have.
    #[error("shardIndex {0} is out of range: at most {MAX_SHARD_INDEX}")]
    ShardIndex(u32),
    /// `runtimeMaxConcurrency` is 0.
    #[error("runtimeConsumerCapacity.runtimeMaxConcurrency is 0: a consumer has at least 1 worker")]
    Capacity,
    /// A counter is beyond what JSON can carry exactly.
    #[error("{field} is out of range: at most 2^53")]
    Counter {
        /// The JSON name of the field.
        field: &'static str,
    },
    /// An optional text is longer than allowed.
    #[error("{field} has {bytes} bytes: at most {MAX_NAME_BYTES} are allowed")]
    TextTooLong {
        /// The JSON name of the field.
        field: &'static str,
        /// Its length in bytes.
        bytes: usize,
    },
    /// An optional identifier was sent empty.
    #[error("{field} is empty: leave it out or give it a value")]
    TextEmpty {
        /// The JSON name of the field.
        field: &'static str,
    },
}

impl HeartbeatRequest {
    /// Checks what the types alone do not say (protocol 4). A request that fails is answered HTTP 400 and
    /// changes nothing.
    ///
    /// # Errors
    /// The first rule that the body breaks.
    pub fn check(&self) -> Result<(), HeartbeatError> {
        let characters = self.request_id.chars().count();
        if !(1..=MAX_REQUEST_ID_CHARACTERS).contains(&characters) {
            return Err(HeartbeatError::RequestId { characters });
        }
        check_member_id(&self.member_id)?;
        if self.runtime_consumer_capacity.runtime_max_concurrency == 0 {
            return Err(HeartbeatError::Capacity);
        }
        self.check_texts()?;
        self.check_counters()?;
        self.check_shards()
    }

    fn check_texts(&self) -> Result<(), HeartbeatError> {
        let texts = [
            ("memberName", self.member_name.as_deref(), false),
            ("instanceId", self.instance_id.as_deref(), true),
            ("metadataToken", self.metadata_token.as_deref(), false),
        ];
        for (field, text, must_not_be_empty) in texts {
            let Some(text) = text else { continue };
            if text.len() > MAX_NAME_BYTES {
                return Err(HeartbeatError::TextTooLong { field, bytes: text.len() });
            }
            if must_not_be_empty && text.is_empty() {
                return Err(HeartbeatError::TextEmpty { field });
            }
        }
        for row in &self.shard_progress {
            let texts = [
                ("shardProgress.streamKey", Some(&row.stream_key)),
                ("shardProgress.lastDeliveredId", row.last_delivered_id.as_ref()),
                ("shardProgress.lastAckedId", row.last_acked_id.as_ref()),
            ];
            for (field, text) in texts {
                let bytes = text.map_or(0, String::len);
                if bytes > MAX_NAME_BYTES * 2 {
                    return Err(HeartbeatError::TextTooLong { field, bytes });
                }
            }
        }
        Ok(())
    }

    fn check_counters(&self) -> Result<(), HeartbeatError> {
        let counters = [
            ("memberEpoch", self.member_epoch.unsigned_abs()),
            ("metadataVersion", self.metadata_version),
            ("sequence", self.sequence.unwrap_or(0)),
            ("waitMs", self.wait_ms.unwrap_or(0)),
        ];
        match counters.into_iter().find(|(_, value)| *value > MAX_COUNTER) {
            Some((field, _)) => Err(HeartbeatError::Counter { field }),
            None => Ok(()),
        }
    }

    fn check_shards(&self) -> Result<(), HeartbeatError> {
        let mut named: Vec<u32> = self
            .owned_shards
            .iter()
            .map(|shard| shard.shard_index)
            .chain(self.revoking_shards.iter().map(|report| report.shard.shard_index))
            .collect();
        named.sort_unstable();
        if let Some(&index) = named.last().filter(|index| **index > MAX_SHARD_INDEX) {
            return Err(HeartbeatError::ShardIndex(index));
        }
        match named.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(HeartbeatError::DuplicateShard(pair[0])),
            None => Ok(()),
        }
    }
}

/// What a heartbeat is answered with (protocol 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Status {
    /// Apply the assignment; the only status that lets a member start a shard.
    Ok,
    /// Change nothing, try again; the lease is not extended.
    Retry,
    /// Adopt version and epochs, keep only what is read and assigned, start nothing.
    SyncMetadata,
    /// As `SYNC_METADATA` with a correct version: keep draining, start nothing.
    RevokePending,
    /// Stop everything and join anew with epoch 0.
    UnknownMemberId,
    /// Stop everything and rejoin with epoch 0.
    FencedMemberEpoch,
    /// Stop and tell a person: the coordinator does not speak this version.
    UnsupportedProtocol,
    /// Stop and tell a person.
    InvalidRequest,
}

impl Status {
    /// The status as it stands on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Ok => "OK",
            Status::Retry => "RETRY",
            Status::SyncMetadata => "SYNC_METADATA",
            Status::RevokePending => "REVOKE_PENDING",
            Status::UnknownMemberId => "UNKNOWN_MEMBER_ID",
            Status::FencedMemberEpoch => "FENCED_MEMBER_EPOCH",
            Status::UnsupportedProtocol => "UNSUPPORTED_PROTOCOL",
            Status::InvalidRequest => "INVALID_REQUEST",
        }
    }
}

/// One shard that a member may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AssignedShard {
    /// The shard.
    pub shard_index: u32,
    /// Increases with every grant of the shard; for handlers to stamp their writes with (addition).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fencing_token: Option<u64>,
}

/// A member's view of its assignment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Assignment {
    /// Shards the member may read now.
    pub assigned_shards: Vec<AssignedShard>,
    /// Shards that will be the member's once somebody else has let go.
    pub pending_shards: Vec<ShardRef>,
    /// Shards the coordinator still waits for from this member (addition).
    #[serde(default)]
    pub revoking_shards: Vec<ShardRef>,
    /// The same as the outer one.
    pub metadata_version: u64,
}

/// The answer to a heartbeat: always every field (protocol 4).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeartbeatResponse {
    /// The `requestId` answered.
    pub response_to: String,
    /// What the member must do.
    pub status: Status,
    /// The member.
    pub member_id: String,
    /// The epoch to send next.
    pub member_epoch: i64,
    /// Milliseconds between heartbeats.
    pub heartbeat_interval_ms: u64,
    /// Milliseconds a member has to drain what was taken from it.
    pub rebalance_timeout_ms: u64,
    /// The group's epoch.
    pub group_epoch: u64,
    /// The group epoch for which the target was computed.
    pub assignment_epoch: u64,
    /// The version of this answer.
    pub metadata_version: u64,
    /// The member's view.
    pub assignment: Assignment,
    /// Milliseconds the member may go on reading, counted from when it sent the request (addition).
    #[serde(default)]
    pub assignment_lease_ms: u64,
    /// Goes with `metadataVersion`; tells two histories apart (addition).
    #[serde(default)]
    pub metadata_token: String,
    /// The longest `waitMs` that is honoured; 0: not supported (addition, protocol 4.5).
    #[serde(default)]
    pub max_wait_ms: u64,
    /// A sentence for people on every status but `OK`; empty on `OK` (addition).
    #[serde(default)]
    pub reason: String,
}

#[cfg(test)]
#[path = "heartbeat_tests.rs"]
mod tests;
