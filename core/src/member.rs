//! One member of a group, as recorded (protocol 1, 2).

use std::collections::BTreeMap;

use rsc_protocol::admin::MemberState;
use rsc_protocol::{RevokingState, ShardProgress, Timestamp};
use serde::{Deserialize, Serialize};

use crate::shards::ShardSet;

/// One logical consumer and the incarnation of it that is accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// A name for people.
    pub member_name: Option<String>,
    /// Where in its life the member is.
    pub state: MemberState,
    /// The accepted incarnation's `instanceId`; `None` for a client that sends none.
    pub instance_id: Option<String>,
    /// Incarnations that this one replaced, oldest first (protocol 4.1.6).
    pub superseded: Vec<Superseded>,
    /// `requestId` of the accepted join, to recognise the same join of a client without `instanceId`.
    pub join_request_id: String,
    /// The group's version once the accepted join was recorded; what speaks from an older one is older than
    /// this incarnation.
    pub join_metadata_version: u64,
    /// Whether this incarnation has sent anything but its join.
    pub heard: bool,
    /// Whether this incarnation has ever reported to own or to drain a shard.
    pub reported_ownership: bool,
    /// What the member last reported to read.
    pub current: ShardSet,
    /// What an `OK` has allowed and the member has not given back since.
    pub granted: BTreeMap<u32, Grant>,
    /// What the member last reported to drain, unfinished.
    pub revoking: BTreeMap<u32, Revoking>,
    /// How long the member was told it has for a drain, in milliseconds.
    pub rebalance_timeout_ms: u64,
    /// When the member is fenced unless it has drained what is not its target; `None` while it holds only
    /// its target (protocol 4.2).
    pub rebalance_deadline_at: Option<Timestamp>,
    /// When the member became `EXPIRED` or `FENCED`.
    pub terminated_at: Option<Timestamp>,
    /// Why, for people.
    pub termination: Option<Termination>,
    /// What moves with every heartbeat.
    pub live: Live,
    /// Fields of other implementations, kept as they are.
    pub unknown: serde_json::Map<String, serde_json::Value>,
}

/// What changes with every heartbeat and decides nothing but expiry and which message is late; kept in the
/// hash field `live:<memberId>` (protocol 2).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Live {
    /// When the last applied heartbeat came.
    pub last_heartbeat_at: Timestamp,
    /// When the member expires unless it is heard before. Never moves backwards within an incarnation.
    pub member_lease_expires_at: Timestamp,
    /// The lease that the member was given, in milliseconds; it is told [`crate::settings::told_lease_ms`] of it.
    pub member_lease_ttl_ms: u64,
    /// The highest sequence applied from the accepted incarnation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    /// The version the member last reported.
    pub metadata_version: u64,
    /// Workers the member has.
    pub runtime_max_concurrency: u32,
    /// Workers that are busy.
    pub active_consumer_workers: u32,
    /// How far the member has read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shard_progress: Vec<ShardProgress>,
    /// The assignment epoch last handed to the member.
    pub member_epoch: u64,
    /// The last epoch this incarnation has itself reported.
    pub confirmed_member_epoch: u64,
    /// The round (its `requestedAt`) in which the member has synchronised (protocol 5).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub synchronised_at_round: Option<Timestamp>,
    /// The version that the member's last answer in a round carried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answered_version: Option<u64>,
    /// The token that went with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answered_token: Option<String>,
    /// The round (its `requestedAt`) in which that answer was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answered_at_round: Option<Timestamp>,
    /// Shards of a lost future that the member's last report named; on hold while it does.
    #[serde(skip_serializing_if = "ShardSet::is_empty")]
    pub lost_claims: ShardSet,
}

/// One entry of *granted* (protocol 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The `metadataVersion` at which the shard was handed out.
    pub metadata_version: u64,
    /// An answer since has left the shard out: the member was told to drain it.
    pub left_out: bool,
}

/// One unfinished drain as the member reported it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Revoking {
    /// How far it has come.
    pub state: RevokingState,
    /// Records not yet acknowledged.
    pub in_flight: u64,
}

/// An incarnation that another one replaced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Superseded {
    /// Its `instanceId`.
    pub instance_id: String,
    /// When it was replaced.
    pub superseded_at: Timestamp,
}

/// Why a member is `EXPIRED` or `FENCED`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Termination {
    /// It left (protocol 4.1.7).
    Left,
    /// Its lease ran out (protocol 4.1.1).
    LeaseExpired,
    /// It drained for longer than its rebalance timeout (protocol 4.2).
    RebalanceTimeout,
    /// It did not come back to Redis's metadata within its rebalance timeout (protocol 5).
    NotSynchronised,
    /// It claimed shards that it could not have been given (protocol 4.1.9).
    OwnershipViolation,
}

impl Member {
    /// Every shard the member might be touching: current ∪ granted ∪ revoking (protocol 1).
    #[must_use]
    pub fn holding(&self) -> ShardSet {
        let mut holding = self.current.clone();
        holding.extend(self.granted.keys().copied());
        holding.extend(self.revoking.keys().copied());
        holding
    }

    /// Whether the member might be touching `shard`.
    #[must_use]
    pub fn holds(&self, shard: u32) -> bool {
        self.current.contains(shard)
            || self.granted.contains_key(&shard)
            || self.revoking.contains_key(&shard)
    }

    /// Whether the member holds nothing at all.
    #[must_use]
    pub fn holds_nothing(&self) -> bool {
        self.current.is_empty() && self.granted.is_empty() && self.revoking.is_empty()
    }

    /// Whether the member counts (protocol 3).
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.state.is_live()
    }

    /// Whether it left of its own accord.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.termination == Some(Termination::Left)
    }

    pub(crate) fn forget_ownership(&mut self) {
        self.current = ShardSet::new();
        self.granted.clear();
        self.revoking.clear();
        self.rebalance_deadline_at = None;
    }
}
