//! What a member is answered (protocol 4).

use rsc_protocol::heartbeat::EPOCH_LEAVE;
use rsc_protocol::{Assignment, HeartbeatRequest, HeartbeatResponse, ShardRef, Status};

use crate::settings::{Settings, told_lease_ms};
use crate::shards::ShardSet;
use crate::turn::Turn;
use crate::{correction, handover};

/// The `OK` of a member that the request was applied to. Hands out the assignment epoch and what can be
/// granted; moves the record accordingly.
pub(crate) fn of_member(turn: &mut Turn<'_>, request: &HeartbeatRequest) -> HeartbeatResponse {
    let id = request.member_id.as_str();
    let status = correction::status(turn, request);
    let entitlement = if correction::is_on(turn) {
        let reported = match status {
            Status::Ok => ShardSet::new(),
            _ => request.owned_shards.iter().map(|shard| shard.shard_index).collect(),
        };
        handover::keep(turn, id, &reported)
    } else {
        handover::grant(turn, id)
    };
    let assignment_epoch = turn.group.assignment_epoch;
    let mut response = blank(turn, request, status);
    response.reason = reason(status).to_owned();
    let Some(member) = turn.member(id) else {
        return response;
    };
    response.rebalance_timeout_ms = member.rebalance_timeout_ms;
    if member.is_live() {
        response.assignment_lease_ms = told_lease_ms(member.live.member_lease_ttl_ms);
    }
    if member.state.is_assignable()
        && member.live.member_epoch != assignment_epoch
        && let Some(member) = turn.touch(id)
    {
        member.live.member_epoch = assignment_epoch;
    }
    response.member_epoch = if request.member_epoch == EPOCH_LEAVE {
        EPOCH_LEAVE
    } else {
        let epoch = turn.member(id).map_or(0, |member| member.live.member_epoch);
        i64::try_from(epoch).unwrap_or(i64::MAX)
    };
    response.assignment = Assignment {
        assigned_shards: entitlement.assigned,
        pending_shards: shard_refs(&entitlement.pending),
        revoking_shards: shard_refs(&entitlement.revoking),
        metadata_version: response.metadata_version,
    };
    response
}

fn reason(status: Status) -> &'static str {
    match status {
        Status::SyncMetadata => {
            "redis lost writes: adopt this version, keep only what is assigned, start nothing"
        }
        Status::RevokePending => {
            "redis lost writes: others are still coming back to its metadata, start nothing"
        }
        _ => "",
    }
}

/// An answer that says nothing about the assignment. `RETRY` repeats what the member said, so that there is
/// nothing to adopt; the other statuses carry the group's numbers and epoch 0, which is what to send next:
/// a superseded process must never learn its successor's epoch.
pub(crate) fn status(
    turn: &Turn<'_>,
    request: &HeartbeatRequest,
    status: Status,
    reason: &str,
) -> HeartbeatResponse {
    let mut response = blank(turn, request, status);
    reason.clone_into(&mut response.reason);
    if status == Status::Retry {
        echo(&mut response, request);
    }
    response
}

/// Sets the version the turn ended with.
pub(crate) fn stamp_version(turn: &Turn<'_>, response: &mut HeartbeatResponse) {
    response.metadata_version = turn.group.metadata_version;
    response.assignment.metadata_version = turn.group.metadata_version;
    response.metadata_token.clone_from(&turn.group.metadata_token);
    response.group_epoch = turn.group.group_epoch;
    response.assignment_epoch = turn.group.assignment_epoch;
}

/// An answer to a heartbeat of a group that is not there, or that could not be asked: every field, 0 or
/// empty where there is no group (protocol 4).
#[must_use]
pub fn without_group(
    request: &HeartbeatRequest,
    status: Status,
    reason: &str,
    settings: &Settings,
) -> HeartbeatResponse {
    let mut response = HeartbeatResponse {
        response_to: request.request_id.clone(),
        status,
        member_id: request.member_id.clone(),
        member_epoch: 0,
        heartbeat_interval_ms: settings.heartbeat_interval_ms,
        rebalance_timeout_ms: settings.rebalance_timeout_ms,
        group_epoch: 0,
        assignment_epoch: 0,
        metadata_version: 0,
        assignment: Assignment::default(),
        assignment_lease_ms: 0,
        metadata_token: String::new(),
        max_wait_ms: 0,
        reason: reason.to_owned(),
    };
    if status == Status::Retry {
        echo(&mut response, request);
    }
    response
}

fn echo(response: &mut HeartbeatResponse, request: &HeartbeatRequest) {
    response.member_epoch = request.member_epoch;
    response.metadata_version = request.metadata_version;
    response.assignment.metadata_version = request.metadata_version;
    response.metadata_token = request.metadata_token.clone().unwrap_or_default();
}

fn blank(turn: &Turn<'_>, request: &HeartbeatRequest, status: Status) -> HeartbeatResponse {
    let mut response = without_group(request, status, "", &turn.context.settings);
    if status != Status::Retry {
        stamp_version(turn, &mut response);
    }
    response.group_epoch = turn.group.group_epoch;
    response.assignment_epoch = turn.group.assignment_epoch;
    response
}

fn shard_refs(shards: &ShardSet) -> Vec<ShardRef> {
    shards.iter().map(|shard_index| ShardRef { shard_index }).collect()
}
