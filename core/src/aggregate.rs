//! The aggregate as JSON: what this implementation writes, and what others may have written (protocol 2).

use std::collections::BTreeMap;

use rsc_protocol::admin::MemberState;
use rsc_protocol::heartbeat::MAX_COUNTER;
use rsc_protocol::{GroupKey, RevokingState, SCHEMA_VERSION, Timestamp};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::group::{ASSUMED_ROUTING_CACHE_TTL_MS, Correction, CorrectionStarter, Group, Hold, RoutingCap};
use crate::handover;
use crate::member::{Grant, Live, Member, Revoking, Superseded, Termination};
use crate::migration::records as migrations;
use crate::record::LoadError;
use crate::settings::{Settings, millis};
use crate::shards::ShardSet;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct GroupRecord {
    stream_prefix: String,
    consumer_group: String,
    schema_version: u64,
    pub(crate) store_revision: u64,
    group_epoch: u64,
    metadata_version: u64,
    #[serde(default, deserialize_with = "null_is_default")]
    metadata_token: String,
    assignment_epoch: u64,
    #[serde(default, deserialize_with = "derived")]
    state: rsc_protocol::admin::GroupState,
    shard_count: u32,
    #[serde(default, deserialize_with = "null_is_default")]
    members: BTreeMap<String, MemberRecord>,
    #[serde(default, deserialize_with = "null_is_default")]
    target_assignments: BTreeMap<String, ShardSet>,
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    holds: Vec<Hold>,
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    fencing_tokens: Vec<TokenRecord>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    grants_from: Option<Timestamp>,
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "std::ops::Not::not")]
    provisioning_pending: bool,
    #[serde(default)]
    max_routing_cache_ttl_ms: Option<u64>,
    #[serde(default, deserialize_with = "unknown_is_none", skip_serializing_if = "Option::is_none")]
    routing_cap: Option<RoutingCap>,
    #[serde(default, deserialize_with = "null_is_default")]
    migrations: Map<String, Value>,
    #[serde(default)]
    active_resharding_id: Option<String>,
    #[serde(default, deserialize_with = "correction")]
    metadata_correction: Option<Correction>,
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    correction_starters: Vec<CorrectionStarter>,
    #[serde(default)]
    created_at: Option<Timestamp>,
    #[serde(default)]
    updated_at: Option<Timestamp>,
    #[serde(flatten)]
    unknown: Map<String, Value>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct TokenRecord {
    shard_index: u32,
    token: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct MemberRecord {
    #[serde(default)]
    member_id: String,
    #[serde(default)]
    member_name: Option<String>,
    state: MemberState,
    member_epoch: u64,
    #[serde(default)]
    confirmed_member_epoch: Option<u64>,
    #[serde(default)]
    metadata_version: Option<u64>,
    #[serde(default)]
    runtime_max_concurrency: Option<u32>,
    #[serde(default)]
    active_consumer_workers: Option<u32>,
    #[serde(default, deserialize_with = "null_is_default")]
    current_assignment: ShardSet,
    #[serde(default)]
    granted_assignment: Option<Vec<GrantRecord>>,
    #[serde(default, deserialize_with = "null_is_default")]
    revoking: Vec<RevokingRecord>,
    #[serde(default)]
    last_heartbeat_at: Option<Timestamp>,
    #[serde(default)]
    member_lease_expires_at: Option<Timestamp>,
    #[serde(default)]
    member_lease_ttl_ms: Option<u64>,
    #[serde(default)]
    rebalance_timeout_ms: Option<u64>,
    #[serde(default)]
    rebalance_deadline_at: Option<Timestamp>,
    #[serde(default, deserialize_with = "null_is_default")]
    shard_progress: Vec<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    instance_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sequence: Option<u64>,
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    superseded: Vec<Superseded>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    join_request_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    join_metadata_version: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    heard: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reported_ownership: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    terminated_at: Option<Timestamp>,
    #[serde(default, deserialize_with = "unknown_is_none", skip_serializing_if = "Option::is_none")]
    termination: Option<Termination>,
    #[serde(flatten)]
    unknown: Map<String, Value>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct GrantRecord {
    shard_index: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    metadata_version: Option<u64>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    left_out: bool,
}

/// What another implementation writes may name the shard directly, or say nothing of the state.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RevokingRecord {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shard: Option<rsc_protocol::ShardRef>,
    #[serde(default, skip_serializing)]
    shard_index: Option<u32>,
    #[serde(default = "revoking_state")]
    state: RevokingState,
    #[serde(default)]
    in_flight: u64,
}

fn revoking_state() -> RevokingState {
    RevokingState::Revoking
}

/// What only people read and a newer version may know more of.
fn unknown_is_none<'de, D: Deserializer<'de>, T: serde::de::DeserializeOwned>(
    input: D,
) -> Result<Option<T>, D::Error> {
    Ok(serde_json::from_value(Value::deserialize(input)?).ok())
}

pub(crate) fn null_is_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    input: D,
) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(input)?.unwrap_or_default())
}

/// The group's state follows from members, target and holdings; what the record says is not asked.
fn derived<'de, D: Deserializer<'de>>(input: D) -> Result<rsc_protocol::admin::GroupState, D::Error> {
    serde::de::IgnoredAny::deserialize(input).map(|_| rsc_protocol::admin::GroupState::default())
}

/// A round as any implementation records it: fields that are absent or null have their defaults. What is no
/// object is not understood.
fn correction<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Correction>, D::Error> {
    let Some(mut fields) = Option::<Map<String, Value>>::deserialize(input)? else {
        return Ok(None);
    };
    fields.retain(|_, value| !value.is_null());
    serde_json::from_value(Value::Object(fields)).map(Some).map_err(serde::de::Error::custom)
}

/// The highest shard count that is taken for one: far above what can be configured, far below what would not
/// fit into memory.
const MAX_SHARD_COUNT: u32 = 1 << 20;

impl GroupRecord {
    /// Numbers that no coordinator has written and that arithmetic could not bear.
    pub(crate) fn check_bounds(&self) -> Result<(), LoadError> {
        let refuse =
            |what: &str, found: u64| Err(LoadError::Aggregate(format!("{what} {found} is out of range")));
        if self.shard_count > MAX_SHARD_COUNT {
            return refuse("shardCount", self.shard_count.into());
        }
        let targets = self.target_assignments.values().filter_map(ShardSet::last);
        if let Some(shard) = targets.max().filter(|shard| *shard >= MAX_SHARD_COUNT) {
            return refuse("shardIndex", shard.into());
        }
        let counters = [
            ("storeRevision", self.store_revision),
            ("groupEpoch", self.group_epoch),
            ("assignmentEpoch", self.assignment_epoch),
            ("metadataVersion", self.metadata_version),
        ];
        let of_members = self.members.values().map(|member| ("memberEpoch", member.member_epoch));
        let of_tokens = self.fencing_tokens.iter().map(|row| ("fencingToken", row.token));
        match counters.into_iter().chain(of_members).chain(of_tokens).find(|(_, value)| *value > MAX_COUNTER)
        {
            Some((what, found)) => refuse(what, found),
            None => Ok(()),
        }
    }

    pub(crate) fn into_group(self, key: GroupKey, settings: &Settings) -> Result<Group, LoadError> {
        let updated_at = self.updated_at.unwrap_or_default();
        let mut group = Group {
            key,
            store_revision: self.store_revision,
            // The target cannot be of a later epoch than the group's.
            group_epoch: self.group_epoch.max(self.assignment_epoch),
            assignment_epoch: self.assignment_epoch,
            metadata_version: self.metadata_version,
            metadata_token: self.metadata_token,
            state: self.state,
            shard_count: self.shard_count,
            members: BTreeMap::new(),
            targets: self.target_assignments,
            holds: self.holds,
            fencing_tokens: self.fencing_tokens.into_iter().map(|row| (row.shard_index, row.token)).collect(),
            grants_from: self.grants_from,
            provisioning_pending: self.provisioning_pending,
            max_routing_cache_ttl_ms: self.max_routing_cache_ttl_ms.unwrap_or(ASSUMED_ROUTING_CACHE_TTL_MS),
            routing_cap: self.routing_cap,
            migrations: BTreeMap::new(),
            foreign_migrations: serde_json::Map::new(),
            active_resharding_id: self.active_resharding_id,
            metadata_correction: self.metadata_correction,
            correction_starters: self.correction_starters,
            created_at: self.created_at.unwrap_or(updated_at),
            updated_at,
            unknown: self.unknown,
        };
        migrations::take_in(&mut group, self.migrations, MAX_SHARD_COUNT)?;
        // The members' map key is the id; who disagrees with it inside is not a record we understand.
        let mut without_grants = Vec::new();
        for (id, record) in self.members {
            if !record.member_id.is_empty() && record.member_id != id {
                return Err(LoadError::Aggregate(format!("member {id} calls itself {}", record.member_id)));
            }
            if record.granted_assignment.is_none() && record.state.is_live() {
                without_grants.push(id.clone());
            }
            group.members.insert(id, record.into_member(&group, settings));
        }
        assume_grants(&mut group, &without_grants);
        // Other implementations may keep what a terminal member owned, and know no clock for what only we
        // count as held. The clock starts with the record, so that it does not move with each load.
        for member in group.members.values_mut().filter(|member| !member.is_live()) {
            member.forget_ownership();
        }
        handover::update_deadlines(&mut group, updated_at, false);
        // A round that does not say since when it is on began with the aggregate's last write at the latest.
        if let Some(round) = &mut group.metadata_correction
            && round.requested_at == Timestamp::default()
        {
            round.requested_at = updated_at;
        }
        group.state = group.derived_state();
        Ok(group)
    }
}

/// A record without *granted*: whatever its writer may have allowed counts as granted, as old as the
/// aggregate. That is the target, as far as nobody else holds it.
fn assume_grants(group: &mut Group, members: &[String]) {
    for id in members {
        let held_elsewhere: ShardSet = group
            .live_members()
            .filter(|(other, _)| *other != id)
            .flat_map(|(_, other)| other.holding().iter().collect::<Vec<_>>())
            .collect();
        let assumed = group.target(id).minus(&held_elsewhere);
        let version = group.metadata_version;
        if let Some(member) = group.members.get_mut(id) {
            let grant = Grant { metadata_version: version, left_out: false };
            let current = member.current.clone();
            member.granted.extend(assumed.iter().chain(current.iter()).map(|shard| (shard, grant)));
        }
    }
}

impl MemberRecord {
    fn into_member(self, group: &Group, settings: &Settings) -> Member {
        let ttl = self.member_lease_ttl_ms.unwrap_or(settings.member_lease_ttl_ms);
        let last_heartbeat_at = self.last_heartbeat_at.unwrap_or(group.updated_at);
        let lease = self.member_lease_expires_at.unwrap_or_else(|| last_heartbeat_at.plus(millis(ttl)));
        let progress = self.shard_progress.into_iter().filter_map(|row| serde_json::from_value(row).ok());
        let granted = self.granted_assignment.unwrap_or_default().into_iter().map(|row| {
            let metadata_version = row.metadata_version.unwrap_or(group.metadata_version);
            (row.shard_index, Grant { metadata_version, left_out: row.left_out })
        });
        let revoking =
            self.revoking.into_iter().filter(|row| row.state != RevokingState::Revoked || row.in_flight > 0);
        let heard = self.heard.unwrap_or(self.state != MemberState::Starting);
        let terminated_at = self.terminated_at.or((!self.state.is_live()).then_some(lease));
        Member {
            member_name: self.member_name,
            state: self.state,
            instance_id: self.instance_id,
            superseded: self.superseded,
            join_request_id: self.join_request_id.unwrap_or_default(),
            join_metadata_version: self.join_metadata_version.unwrap_or(0),
            heard,
            reported_ownership: self.reported_ownership.unwrap_or(heard),
            granted: granted.collect(),
            revoking: revoking
                .filter_map(|row| {
                    let shard = row.shard.map(|shard| shard.shard_index).or(row.shard_index)?;
                    Some((shard, Revoking { state: row.state, in_flight: row.in_flight }))
                })
                .collect(),
            current: self.current_assignment,
            rebalance_timeout_ms: self.rebalance_timeout_ms.unwrap_or(settings.rebalance_timeout_ms),
            rebalance_deadline_at: self.rebalance_deadline_at,
            terminated_at,
            termination: self.termination,
            live: Live {
                last_heartbeat_at,
                member_lease_expires_at: lease,
                member_lease_ttl_ms: ttl,
                sequence: self.sequence,
                metadata_version: self.metadata_version.unwrap_or(0),
                runtime_max_concurrency: self.runtime_max_concurrency.unwrap_or(0),
                active_consumer_workers: self.active_consumer_workers.unwrap_or(0),
                shard_progress: progress.collect(),
                member_epoch: self.member_epoch,
                confirmed_member_epoch: self.confirmed_member_epoch.unwrap_or(self.member_epoch),
                ..Live::default()
            },
            unknown: self.unknown,
        }
    }

    fn of(id: &str, member: &Member) -> Self {
        let live = &member.live;
        MemberRecord {
            member_id: id.to_owned(),
            member_name: member.member_name.clone(),
            state: member.state,
            member_epoch: live.member_epoch,
            confirmed_member_epoch: Some(live.confirmed_member_epoch),
            metadata_version: Some(live.metadata_version),
            runtime_max_concurrency: Some(live.runtime_max_concurrency),
            active_consumer_workers: Some(live.active_consumer_workers),
            current_assignment: member.current.clone(),
            granted_assignment: Some(
                member
                    .granted
                    .iter()
                    .map(|(shard, grant)| GrantRecord {
                        shard_index: *shard,
                        metadata_version: Some(grant.metadata_version),
                        left_out: grant.left_out,
                    })
                    .collect(),
            ),
            revoking: member
                .revoking
                .iter()
                .map(|(shard, revoking)| RevokingRecord {
                    shard: Some(rsc_protocol::ShardRef { shard_index: *shard }),
                    shard_index: None,
                    state: revoking.state,
                    in_flight: revoking.in_flight,
                })
                .collect(),
            last_heartbeat_at: Some(live.last_heartbeat_at),
            member_lease_expires_at: Some(live.member_lease_expires_at),
            member_lease_ttl_ms: Some(live.member_lease_ttl_ms),
            rebalance_timeout_ms: Some(member.rebalance_timeout_ms),
            rebalance_deadline_at: member.rebalance_deadline_at,
            shard_progress: live
                .shard_progress
                .iter()
                .filter_map(|row| serde_json::to_value(row).ok())
                .collect(),
            instance_id: member.instance_id.clone(),
            sequence: live.sequence,
            superseded: member.superseded.clone(),
            join_request_id: Some(member.join_request_id.clone()),
            join_metadata_version: Some(member.join_metadata_version),
            heard: Some(member.heard),
            reported_ownership: Some(member.reported_ownership),
            terminated_at: member.terminated_at,
            termination: member.termination,
            unknown: member.unknown.clone(),
        }
    }
}

/// The aggregate of a group as JSON.
///
/// # Errors
/// None that a `Group` can cause; serde's signature has one.
pub fn aggregate(group: &Group) -> Result<String, serde_json::Error> {
    serde_json::to_string(&GroupRecord {
        stream_prefix: group.key.stream_prefix().to_owned(),
        consumer_group: group.key.consumer_group().to_owned(),
        schema_version: SCHEMA_VERSION,
        store_revision: group.store_revision,
        group_epoch: group.group_epoch,
        metadata_version: group.metadata_version,
        metadata_token: group.metadata_token.clone(),
        assignment_epoch: group.assignment_epoch,
        state: group.state,
        shard_count: group.shard_count,
        members: group
            .members
            .iter()
            .map(|(id, member)| (id.clone(), MemberRecord::of(id, member)))
            .collect(),
        target_assignments: group.targets.clone(),
        holds: group.holds.clone(),
        fencing_tokens: group
            .fencing_tokens
            .iter()
            .map(|(shard_index, token)| TokenRecord { shard_index: *shard_index, token: *token })
            .collect(),
        grants_from: group.grants_from,
        provisioning_pending: group.provisioning_pending,
        max_routing_cache_ttl_ms: Some(group.max_routing_cache_ttl_ms),
        routing_cap: group.routing_cap,
        migrations: migrations::as_recorded(group),
        active_resharding_id: group.active_resharding_id.clone(),
        metadata_correction: group.metadata_correction.clone(),
        correction_starters: group.correction_starters.clone(),
        created_at: Some(group.created_at),
        updated_at: Some(group.updated_at),
        unknown: group.unknown.clone(),
    })
}
