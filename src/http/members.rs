//! `GET …/members`: every remembered member of a group, as recorded.

use rsc_core::member::{Grant, Revoking, Termination};
use rsc_core::{Group, Member, ShardSet};
use rsc_protocol::admin::MemberState;
use rsc_protocol::{RevokingState, ShardProgress, Timestamp};
use serde::Serialize;

/// The answer.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Members<'a> {
    stream_prefix: &'a str,
    consumer_group: &'a str,
    metadata_version: u64,
    /// When the record was last written, by the store's clock. `leaseRemainingMs` counts from here.
    updated_at: Timestamp,
    members: Vec<MemberRow<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct MemberRow<'a> {
    member_id: &'a str,
    member_name: Option<&'a str>,
    state: MemberState,
    member_epoch: u64,
    confirmed_member_epoch: u64,
    /// What the member last reported.
    metadata_version: u64,
    runtime_max_concurrency: u32,
    active_consumer_workers: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    instance_id: Option<&'a str>,
    target_shards: ShardSet,
    /// What the member may read now.
    assigned_shards: ShardSet,
    /// Its target that it may not read yet.
    pending_shards: ShardSet,
    current_shards: &'a ShardSet,
    granted_shards: Vec<GrantRow>,
    revoking_shards: Vec<RevokingRow>,
    last_heartbeat_at: Timestamp,
    member_lease_expires_at: Timestamp,
    /// 0 for members that are not live.
    lease_remaining_ms: i64,
    rebalance_timeout_ms: u64,
    rebalance_deadline_at: Option<Timestamp>,
    terminated_at: Option<Timestamp>,
    termination: Option<Termination>,
    shard_progress: &'a [ShardProgress],
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct GrantRow {
    shard_index: u32,
    /// The version at which the shard was handed out.
    metadata_version: u64,
    /// The member has been told to drain it.
    left_out: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RevokingRow {
    shard_index: u32,
    state: RevokingState,
    in_flight: u64,
}

impl<'a> Members<'a> {
    /// Every member of `group`, by id.
    pub(super) fn of(group: &'a Group) -> Self {
        Members {
            stream_prefix: group.key.stream_prefix(),
            consumer_group: group.key.consumer_group(),
            metadata_version: group.metadata_version,
            updated_at: group.updated_at,
            members: group.members.iter().map(|(id, member)| MemberRow::of(group, id, member)).collect(),
        }
    }
}

impl<'a> MemberRow<'a> {
    fn of(group: &Group, id: &'a str, member: &'a Member) -> Self {
        let live = &member.live;
        let target = group.target(id);
        let assigned = readable(&target, member);
        let remaining = live.member_lease_expires_at.since(group.updated_at);
        MemberRow {
            member_id: id,
            member_name: member.member_name.as_deref(),
            state: member.state,
            member_epoch: live.member_epoch,
            confirmed_member_epoch: live.confirmed_member_epoch,
            metadata_version: live.metadata_version,
            runtime_max_concurrency: live.runtime_max_concurrency,
            active_consumer_workers: live.active_consumer_workers,
            instance_id: member.instance_id.as_deref(),
            pending_shards: target.minus(&assigned),
            assigned_shards: assigned,
            target_shards: target,
            current_shards: &member.current,
            granted_shards: member.granted.iter().map(grant_row).collect(),
            revoking_shards: member.revoking.iter().map(revoking_row).collect(),
            last_heartbeat_at: live.last_heartbeat_at,
            member_lease_expires_at: live.member_lease_expires_at,
            lease_remaining_ms: if member.is_live() { remaining.max(0) } else { 0 },
            rebalance_timeout_ms: member.rebalance_timeout_ms,
            rebalance_deadline_at: member.rebalance_deadline_at,
            terminated_at: member.terminated_at,
            termination: member.termination,
            shard_progress: &live.shard_progress,
        }
    }
}

/// What a member may read as recorded: of its target, what it holds and has not been told to drain.
pub(super) fn readable(target: &ShardSet, member: &Member) -> ShardSet {
    target
        .iter()
        .filter(|shard| match member.granted.get(shard) {
            Some(grant) => !grant.left_out,
            None => member.current.contains(*shard),
        })
        .collect()
}

fn grant_row((&shard_index, grant): (&u32, &Grant)) -> GrantRow {
    GrantRow { shard_index, metadata_version: grant.metadata_version, left_out: grant.left_out }
}

fn revoking_row((&shard_index, revoking): (&u32, &Revoking)) -> RevokingRow {
    RevokingRow { shard_index, state: revoking.state, in_flight: revoking.in_flight }
}
