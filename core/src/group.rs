//! The state of one group (protocol 1, 2, 3).

use std::collections::BTreeMap;

use rsc_protocol::admin::{GroupResponse, GroupState};
use rsc_protocol::routing::ProducerRouting;
use rsc_protocol::{GroupKey, Timestamp};
use serde::{Deserialize, Serialize};

use crate::correction;
use crate::member::Member;
use crate::migration::Migration;
use crate::settings::Settings;
use crate::shards::ShardSet;

/// The cache lease that a record without `maxRoutingCacheTtlMs` may have handed out: the protocol's default.
pub const ASSUMED_ROUTING_CACHE_TTL_MS: u64 = 30_000;

/// Everything that is recorded about one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Which group.
    pub key: GroupKey,
    /// Structural writes of the Redis key so far.
    pub store_revision: u64,
    /// +1 whenever membership or the shard set changes.
    pub group_epoch: u64,
    /// The group epoch for which the target was computed.
    pub assignment_epoch: u64,
    /// +1 on every transition a client can observe.
    pub metadata_version: u64,
    /// Drawn anew with each `metadata_version`; empty in a record of another implementation.
    pub metadata_token: String,
    /// The group's state as last derived.
    pub state: GroupState,
    /// The count producers route with.
    pub shard_count: u32,
    /// Every member that is remembered, by id.
    pub members: BTreeMap<String, Member>,
    /// Who should own what, for each assignable member.
    pub targets: BTreeMap<String, ShardSet>,
    /// Shards that somebody outside the accepted membership may still be reading (protocol 4.3).
    pub holds: Vec<Hold>,
    /// The last fencing token drawn for each shard.
    pub fencing_tokens: BTreeMap<u32, u64>,
    /// Nothing is granted before: members of a deleted group of this name may still be reading until their
    /// leases end.
    pub grants_from: Option<Timestamp>,
    /// The shards' streams have not all been created yet; nobody is admitted before.
    pub provisioning_pending: bool,
    /// The longest routing cache lease that may have been handed out, in milliseconds (protocol 7).
    pub max_routing_cache_ttl_ms: u64,
    /// What may be handed out from some instant on; `None` in a record of another implementation.
    pub routing_cap: Option<RoutingCap>,
    /// Migrations by id (protocol 6).
    pub migrations: BTreeMap<String, Migration>,
    /// What stands among the migrations of another implementation and is none that we understand.
    pub foreign_migrations: serde_json::Map<String, serde_json::Value>,
    /// The running migration.
    pub active_resharding_id: Option<String>,
    /// The running correction round (protocol 5).
    pub metadata_correction: Option<Correction>,
    /// Who has begun or restarted a round and has not synchronised since (protocol 5).
    pub correction_starters: Vec<CorrectionStarter>,
    /// When the group was created.
    pub created_at: Timestamp,
    /// When the record was last written; time never runs behind it.
    pub updated_at: Timestamp,
    /// Fields of other implementations, kept as they are.
    pub unknown: serde_json::Map<String, serde_json::Value>,
}

/// What routing answers may carry from some instant on. It is set below `maxRoutingCacheTtlMs` when instances that
/// handed out more are gone; that falls when the last such lease has run out (protocol 7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RoutingCap {
    /// The longest lease handed out, in milliseconds.
    pub cache_ttl_ms: u64,
    /// Since when.
    pub since: Timestamp,
}

/// Blocks new grants of one shard while somebody may still be reading it (protocol 4.3).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hold {
    /// The shard.
    pub shard_index: u32,
    /// The member whose incarnation may be reading.
    pub member_id: String,
    /// Which incarnation; `None` for a client that sends no `instanceId`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
    /// The last sequence applied from it; only a newer message lifts the hold early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    /// Why it was set.
    pub cause: HoldCause,
    /// When it ends: the party's lease end, at most one lease away.
    pub until: Timestamp,
    /// When it was set; a hold that moves with a lease does so for one rebalance timeout at most.
    #[serde(default)]
    pub since: Timestamp,
    /// A round set it for the accepted incarnation of a live member: its end moves with that member's lease
    /// while the member's reports name the shard.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub moves: bool,
}

/// Why a hold was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum HoldCause {
    /// The member was fenced by the ownership check.
    OwnershipViolation,
    /// The member was fenced by the rebalance timeout.
    RebalanceTimeout,
    /// Another incarnation took the member's place.
    Superseded,
    /// Claimed by a party that speaks from a future that Redis lost (protocol 5).
    LostFuture,
    /// A cause that a newer version knows.
    #[serde(other)]
    Other,
}

/// A running correction round: Redis lost writes, and everybody is brought back to what it still has
/// (protocol 5).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Correction {
    /// The version that Redis had when the round began.
    #[serde(default)]
    pub target_metadata_version: u64,
    /// The highest version that anybody spoke from.
    #[serde(default)]
    pub observed_metadata_version: u64,
    /// When the round began, or began anew at a further sign of loss. Names the round.
    #[serde(default)]
    pub requested_at: Timestamp,
    /// When the round was last changed.
    #[serde(default)]
    pub updated_at: Timestamp,
    /// Who has set holds in this round: each party does so once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hold_setters: Vec<CorrectionParty>,
    /// Members that had synchronised when the aggregate was last written; their live fields are the truth.
    #[serde(default)]
    pub acknowledged_members: Vec<String>,
}

/// A (member, instance), known to the group or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CorrectionParty {
    /// The member.
    pub member_id: String,
    /// Its incarnation; `None` for a client that sends no `instanceId`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
}

/// A (member, instance) whose report began or restarted a round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CorrectionStarter {
    /// The member.
    pub member_id: String,
    /// Its incarnation; `None` for a client that sends no `instanceId`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,
    /// When its report began or restarted a round.
    pub started_at: Timestamp,
}

impl Group {
    /// The live members, by id.
    pub fn live_members(&self) -> impl Iterator<Item = (&String, &Member)> {
        self.members.iter().filter(|(_, member)| member.is_live())
    }

    /// The target of a member; empty when it has none.
    #[must_use]
    pub fn target(&self, member_id: &str) -> ShardSet {
        self.targets.get(member_id).cloned().unwrap_or_default()
    }

    /// Which live member holds each shard, if one does. With a valid record there is at most one.
    #[must_use]
    pub fn holders(&self) -> BTreeMap<u32, &str> {
        self.live_members()
            .flat_map(|(id, member)| {
                member.holding().iter().map(|shard| (shard, id.as_str())).collect::<Vec<_>>()
            })
            .collect()
    }

    /// Whether a hold that has not ended at `now` blocks new grants of `shard`.
    #[must_use]
    pub fn is_on_hold(&self, shard: u32, now: Timestamp) -> bool {
        self.holds.iter().any(|hold| hold.shard_index == shard && self.hold_lasts(hold, now))
    }

    /// Whether a hold has not ended at `now`. One that moves with a lease lasts for as long as its member is live
    /// and names the shard, also while nobody may judge that lease: its end in the record may have lost its
    /// meaning by a jump of time.
    pub(crate) fn hold_lasts(&self, hold: &Hold, now: Timestamp) -> bool {
        self.hold_end(hold) > now || self.moving_hold_of(hold).is_some()
    }

    /// When a hold ends. One that a round set for a live member of the accepted incarnation moves with the
    /// member's lease while its reports name the shard (protocol 4.3).
    #[must_use]
    pub fn hold_end(&self, hold: &Hold) -> Timestamp {
        let lease_end = self.moving_hold_of(hold).map(|member| member.live.member_lease_expires_at);
        lease_end.map_or(hold.until, |lease_end| hold.until.max(lease_end))
    }

    /// The live member with whose lease a hold moves, if it does.
    pub(crate) fn moving_hold_of(&self, hold: &Hold) -> Option<&Member> {
        self.members.get(&hold.member_id).filter(|member| {
            !planted!(HoldsDoNotMove)
                && hold.moves
                && member.is_live()
                && member.live.lost_claims.contains(hold.shard_index)
        })
    }

    /// The state that members, target and holdings amount to (protocol 3). `STABLE` means: every live member
    /// reports exactly its target, and nothing else is granted or being drained.
    #[must_use]
    pub fn derived_state(&self) -> GroupState {
        if self.live_members().next().is_none() {
            return GroupState::Empty;
        }
        if self.assignment_epoch < self.group_epoch {
            return GroupState::Assigning;
        }
        let converged = self.live_members().all(|(id, member)| {
            let target = self.target(id);
            member.current == target && member.holding() == target && member.revoking.is_empty()
        });
        if converged { GroupState::Stable } else { GroupState::Reconciling }
    }

    /// The earliest instant at which time alone changes something: a lease, rebalance deadline, hold,
    /// retention or the first lease of a round ends, or a round gives up on a member. `None`: nothing ever
    /// will.
    #[must_use]
    pub fn next_deadline(&self, settings: &Settings) -> Option<Timestamp> {
        let retention = crate::settings::millis(settings.stale_member_retention_ms);
        let of_members = self.members.values().filter_map(|member| {
            if member.is_live() {
                let lease = member.live.member_lease_expires_at;
                Some(member.rebalance_deadline_at.map_or(lease, |deadline| deadline.min(lease)))
            } else {
                member.terminated_at.map(|at| at.plus(retention))
            }
        });
        let of_starters = self
            .correction_starters
            .iter()
            .filter_map(|starter| correction::forgotten_at(self, starter, settings));
        of_members
            .chain(of_starters)
            .chain(self.holds.iter().map(|hold| self.hold_end(hold)))
            .chain(self.grants_from)
            .chain(self.longer_routing_leases_end())
            .chain(correction::deadlines(self, settings))
            .min()
    }

    /// Whether a correction round is on that is younger than one lease (protocol 5).
    #[must_use]
    pub fn is_in_young_round(&self, now: Timestamp, settings: &Settings) -> bool {
        let lease = crate::settings::millis(settings.member_lease_ttl_ms);
        self.metadata_correction.as_ref().is_some_and(|round| round.requested_at.plus(lease) > now)
    }

    /// What producers are told (protocol 7); `cache_ttl_ms` is cut to what the record allows.
    #[must_use]
    pub fn routing(&self, cache_ttl_ms: u64) -> ProducerRouting {
        ProducerRouting::new(
            &self.key,
            self.shard_count,
            self.metadata_version,
            &self.metadata_token,
            cache_ttl_ms.min(self.routing_cap_ms()),
        )
    }

    /// The longest routing cache lease that may be handed out now, in milliseconds.
    #[must_use]
    pub fn routing_cap_ms(&self) -> u64 {
        self.routing_cap.map_or(self.max_routing_cache_ttl_ms, |cap| cap.cache_ttl_ms)
    }

    /// When every lease that was longer than what may be handed out now has run out; `None`: there was none.
    pub(crate) fn longer_routing_leases_end(&self) -> Option<Timestamp> {
        let cap = self.routing_cap.filter(|cap| cap.cache_ttl_ms < self.max_routing_cache_ttl_ms)?;
        Some(cap.since.plus(crate::settings::millis(self.max_routing_cache_ttl_ms)))
    }

    /// The group at a glance (protocol 8).
    #[must_use]
    pub fn response(&self) -> GroupResponse {
        let count = |members: &mut dyn Iterator<Item = (&String, usize)>| {
            members.map(|(id, shards)| (id.clone(), shards)).collect::<BTreeMap<_, _>>()
        };
        GroupResponse {
            stream_prefix: self.key.stream_prefix().to_owned(),
            consumer_group: self.key.consumer_group().to_owned(),
            state: self.state,
            group_epoch: self.group_epoch,
            assignment_epoch: self.assignment_epoch,
            metadata_version: self.metadata_version,
            shard_count: self.shard_count,
            active_migration: self.active_resharding_id.clone(),
            target_assignment_summary: count(&mut self.targets.iter().map(|(id, set)| (id, set.len()))),
            current_assignment_summary: count(&mut self.live_members().map(|(id, m)| (id, m.current.len()))),
            metadata_token: self.metadata_token.clone(),
            store_revision: self.store_revision,
            live_members: self.live_members().count(),
            healthy: true,
            metadata_sync_in_progress: self.metadata_correction.is_some(),
            error_code: None,
            message: None,
            created_at: self.created_at,
            updated_at: self.updated_at,
        }
    }
}
