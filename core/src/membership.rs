//! Who a message comes from, and what joining and leaving do (protocol 4.1 rules 2 to 8).

use rsc_protocol::admin::MemberState;
use rsc_protocol::heartbeat::{EPOCH_JOIN, EPOCH_LEAVE};
use rsc_protocol::{ErrorCode, HeartbeatRequest, Status};

use crate::decide::Answer;
use crate::group::HoldCause;
use crate::member::{Live, Member, Superseded, Termination};
use crate::settings::millis;
use crate::shards::ShardSet;
use crate::turn::{Transition, Turn, ranges};
use crate::{correction, holds, ownership};

/// Superseded incarnations that are always remembered; younger ones than a lease are kept beyond that, up
/// to `SUPERSEDED_AT_MOST`.
const SUPERSEDED_REMEMBERED: usize = 8;
const SUPERSEDED_AT_MOST: usize = 64;

/// Rule 2, order: a message of the accepted incarnation that is older than what was applied from it changes
/// nothing; the same one again gets the same answer.
pub(crate) fn check_sequence(turn: &mut Turn<'_>, request: &HeartbeatRequest) -> Option<Answer> {
    let member = turn.member(&request.member_id)?;
    let sequence = request.sequence?;
    if request.instance_id.is_none() || request.instance_id != member.instance_id {
        return None;
    }
    let applied = member.live.sequence?;
    if sequence < applied && !planted!(LateMessageApplied) {
        return Some(Answer::retry(format!("sequence {sequence} is late: {applied} is already applied")));
    }
    if sequence > applied || planted!(LateMessageApplied) {
        return None;
    }
    if member.is_live() {
        // The answer extends the member's lease from when it sent this copy, so the record must follow.
        renew_lease(turn, &request.member_id);
        return Some(Answer::View);
    }
    if request.member_epoch == EPOCH_LEAVE && member.has_left() {
        return Some(Answer::View);
    }
    Some(Answer::fenced("the membership that this message belonged to is over: rejoin with epoch 0"))
}

/// Rule 3a: who is not the accepted incarnation never touches it, unless it joins.
pub(crate) fn check_incarnation(turn: &mut Turn<'_>, request: &HeartbeatRequest) -> Option<Answer> {
    let member = turn.member(&request.member_id)?;
    if request.member_epoch == EPOCH_JOIN || member.instance_id == request.instance_id {
        return None;
    }
    if (planted!(AnybodyLeaves) && request.member_epoch == EPOCH_LEAVE)
        || (planted!(SyncForAZombie) && correction::is_on(turn))
    {
        return None;
    }
    let epoch = u64::try_from(request.member_epoch).unwrap_or(0);
    // After a rollback epochs repeat: a former incarnation may speak with the present one's by chance.
    let was_superseded =
        member.superseded.iter().any(|former| Some(&former.instance_id) == request.instance_id.as_ref());
    let adopts = member.is_live()
        && member.instance_id.is_none()
        && epoch == member.live.member_epoch
        && epoch > 0
        && !was_superseded;
    if !adopts {
        return Some(Answer::fenced(
            "another incarnation of this member has been accepted: rejoin with epoch 0",
        ));
    }
    if let Some(member) = turn.change(&request.member_id) {
        member.instance_id.clone_from(&request.instance_id);
    }
    None
}

/// Rule 4: an unknown member joins with epoch 0; what it reports to own is ignored.
pub(crate) fn unknown(turn: &mut Turn<'_>, request: &HeartbeatRequest) -> Answer {
    if request.member_epoch != EPOCH_JOIN {
        return Answer::Status(
            Status::UnknownMemberId,
            "no such member is on record: join with epoch 0".to_owned(),
        );
    }
    if let Some(refusal) = refuse_beyond_limit(turn) {
        return refusal;
    }
    admit(turn, request);
    turn.note(Transition::MemberJoined { member_id: request.member_id.clone() });
    Answer::View
}

/// Rule 5: an expired or fenced member.
pub(crate) fn terminal(turn: &mut Turn<'_>, request: &HeartbeatRequest) -> Answer {
    let left = turn.member(&request.member_id).is_some_and(Member::has_left);
    match request.member_epoch {
        EPOCH_JOIN => {
            if let Some(refusal) = refuse_beyond_limit(turn) {
                return refusal;
            }
            admit(turn, request);
            turn.note(Transition::MemberRejoined { member_id: request.member_id.clone() });
            Answer::View
        }
        EPOCH_LEAVE if left => Answer::View,
        _ => Answer::fenced("the member is no longer live (lease over, left or fenced): rejoin with epoch 0"),
    }
}

/// Rule 6: epoch 0 from a live member.
pub(crate) fn join_of_a_live_member(turn: &mut Turn<'_>, request: &HeartbeatRequest) -> Answer {
    let id = &request.member_id;
    let Some(member) = turn.member(id) else {
        return Answer::retry("the member has just gone");
    };
    if let Some(instance) = &request.instance_id
        && member.superseded.iter().any(|former| former.instance_id == *instance)
        && !planted!(SupersededJoinWins)
    {
        if (!member.heard || correction::is_on(turn)) && !planted!(RefusedBeforeHeard) {
            return Answer::retry("this incarnation was superseded, and its successor is yet to be heard");
        }
        let reason = format!("memberId {id} is used by two running processes: give each its own");
        return Answer::Status(Status::InvalidRequest, reason);
    }
    let same_instance = request.instance_id.is_some() && request.instance_id == member.instance_id;
    let same_request = request.instance_id.is_none()
        && member.instance_id.is_none()
        && (request.request_id == member.join_request_id || planted!(OneIdForTwo));
    let leaving = member.state == MemberState::Leaving;
    if !leaving && !member.reported_ownership && (same_instance || same_request) {
        return same_join_again(turn, request);
    }
    // The first sequence ever seen from an incarnation that sent none before proves nothing about order.
    let newer = match (request.sequence, member.live.sequence) {
        (Some(sequence), Some(applied)) => sequence > applied,
        _ => false,
    };
    if same_instance && newer {
        admit(turn, request);
        turn.note(Transition::MemberRestarted { member_id: id.clone() });
        return Answer::View;
    }
    let late_copy_of_instance =
        same_instance && member.heard && request.metadata_version < member.join_metadata_version;
    if late_copy_of_instance || same_request {
        return Answer::retry("a late copy of a join that has been answered and used since");
    }
    supersede(turn, request);
    Answer::View
}

/// The same join again: the same answer, no epoch moves, *granted* does not shrink. The answer extends the
/// lease of whoever sent it, so the record follows.
fn same_join_again(turn: &mut Turn<'_>, request: &HeartbeatRequest) -> Answer {
    if !planted!(SameJoinRenewsNothing) {
        renew_lease(turn, &request.member_id);
    }
    if let Some(member) = turn.touch(&request.member_id) {
        member.live.sequence = member.live.sequence.max(counted_sequence(request));
    }
    correction::acknowledge(turn, &request.member_id);
    Answer::View
}

/// A restart, or a second process with the same id: the newcomer takes the place, everything the former
/// incarnation held goes on hold until its lease would have run out (protocol 4.3).
fn supersede(turn: &mut Turn<'_>, request: &HeartbeatRequest) {
    let held = turn.member(&request.member_id).map(Member::holding).unwrap_or_default();
    holds::set(turn, &request.member_id, &held, HoldCause::Superseded, None);
    turn.counts.superseded += 1;
    admit(turn, request);
    turn.note(Transition::MemberSuperseded { member_id: request.member_id.clone(), held: ranges(&held) });
}

fn refuse_beyond_limit(turn: &Turn<'_>) -> Option<Answer> {
    let limit = turn.context.settings.max_members_per_group;
    (turn.group.live_members().count() >= limit).then(|| {
        let message = format!(
            "group {} has {limit} live members, the most that coordination.max-members-per-group allows",
            turn.group.key
        );
        Answer::Refused(ErrorCode::GroupMaxSizeReached, message)
    })
}

fn counted_sequence(request: &HeartbeatRequest) -> Option<u64> {
    request.instance_id.as_ref().and(request.sequence)
}

/// Makes the sender of `request` the accepted incarnation, with a new epoch and nothing held.
fn admit(turn: &mut Turn<'_>, request: &HeartbeatRequest) {
    correction::freeze_holds(turn, &request.member_id);
    let epoch = turn.change_membership();
    let (now, settings) = (turn.now, &turn.context.settings);
    let (ttl, join_metadata_version) = (settings.member_lease_ttl_ms, turn.group.metadata_version);
    let former = turn.group.members.remove(&request.member_id);
    let mut superseded = former.as_ref().map(|member| member.superseded.clone()).unwrap_or_default();
    if let Some(instance_id) = former.as_ref().and_then(|member| member.instance_id.clone()) {
        superseded.push(Superseded { instance_id, superseded_at: now });
    }
    superseded.retain(|one| Some(&one.instance_id) != request.instance_id.as_ref());
    forget_old_incarnations(&mut superseded, turn);
    let same_instance = request.instance_id.is_some()
        && former.as_ref().is_some_and(|member| member.instance_id == request.instance_id);
    let sequence_before = former.as_ref().filter(|_| same_instance).and_then(|member| member.live.sequence);
    let lease_before = former.as_ref().map(|member| member.live.member_lease_expires_at).unwrap_or_default();
    let member = Member {
        member_name: request.member_name.clone(),
        state: MemberState::Starting,
        instance_id: request.instance_id.clone(),
        superseded,
        join_request_id: request.request_id.clone(),
        join_metadata_version,
        heard: false,
        reported_ownership: false,
        current: ShardSet::new(),
        granted: std::collections::BTreeMap::new(),
        revoking: std::collections::BTreeMap::new(),
        rebalance_timeout_ms: settings.rebalance_timeout_ms.max(ttl),
        rebalance_deadline_at: None,
        terminated_at: None,
        termination: None,
        live: Live {
            last_heartbeat_at: now,
            member_lease_expires_at: now.plus(millis(ttl)).max(lease_before),
            member_lease_ttl_ms: ttl,
            sequence: sequence_before.max(counted_sequence(request)),
            metadata_version: request.metadata_version,
            runtime_max_concurrency: request.runtime_consumer_capacity.runtime_max_concurrency,
            active_consumer_workers: busy_workers(request),
            shard_progress: Vec::new(),
            member_epoch: epoch,
            confirmed_member_epoch: epoch,
            ..Live::default()
        },
        unknown: former.map(|member| member.unknown).unwrap_or_default(),
    };
    turn.group.members.insert(request.member_id.clone(), member);
    turn.touched.insert(request.member_id.clone());
    // Who starts with nothing has nothing to correct (protocol 5).
    correction::acknowledge(turn, &request.member_id);
}

fn forget_old_incarnations(superseded: &mut Vec<Superseded>, turn: &Turn<'_>) {
    let lease = millis(turn.context.settings.member_lease_ttl_ms);
    while superseded.len() > SUPERSEDED_REMEMBERED {
        let oldest_is_young = superseded.first().is_some_and(|one| turn.now.since(one.superseded_at) < lease);
        if oldest_is_young && superseded.len() <= SUPERSEDED_AT_MOST {
            break;
        }
        superseded.remove(0);
    }
}

pub(crate) fn busy_workers(request: &HeartbeatRequest) -> u32 {
    let capacity = request.runtime_consumer_capacity;
    capacity.runtime_max_concurrency.saturating_sub(capacity.available_concurrency)
}

/// Extends the member's lease from now; a lease end never moves backwards (protocol 2).
pub(crate) fn renew_lease(turn: &mut Turn<'_>, id: &str) {
    let (now, ttl) = (turn.now, turn.context.settings.member_lease_ttl_ms);
    if let Some(member) = turn.touch(id) {
        member.live.last_heartbeat_at = now;
        member.live.member_lease_ttl_ms = ttl;
        let end = now.plus(millis(ttl));
        member.live.member_lease_expires_at = member.live.member_lease_expires_at.max(end);
    }
}

/// Records what every applied message of the accepted incarnation says about itself.
pub(crate) fn hear(turn: &mut Turn<'_>, request: &HeartbeatRequest) {
    renew_lease(turn, &request.member_id);
    let heard_before = turn.member(&request.member_id).is_some_and(|member| member.heard);
    if let Some(member) = turn.touch(&request.member_id) {
        member.heard = true;
        let live = &mut member.live;
        live.sequence = live.sequence.max(counted_sequence(request));
        live.metadata_version = request.metadata_version;
        live.runtime_max_concurrency = request.runtime_consumer_capacity.runtime_max_concurrency;
        live.active_consumer_workers = busy_workers(request);
    }
    turn.structural |= !heard_before;
}

/// Rule 7: the accepted incarnation leaves; its shards stay its own until it reports them released.
pub(crate) fn leave(turn: &mut Turn<'_>, request: &HeartbeatRequest) -> Answer {
    let id = &request.member_id;
    let Some(member) = turn.member(id) else {
        return Answer::retry("the member has just gone");
    };
    // Without a sequence only the version tells a former incarnation's last words from this one's.
    if counted_sequence(request).is_none() && request.metadata_version < member.join_metadata_version {
        return Answer::fenced("this leave is older than the member's last join");
    }
    if member.state != MemberState::Leaving {
        turn.change_membership();
        if let Some(member) = turn.change(id) {
            member.state = MemberState::Leaving;
        }
        turn.note(Transition::MemberLeaving { member_id: id.clone() });
    }
    ownership::accept_cut(turn, request);
    if correction::is_on(turn) {
        // What it reports beyond its holding is held until it is seen without it; there is nothing else to
        // correct in a leaver.
        let claims = ownership::claims(request);
        correction::hold_claims_of_member(turn, request, &claims);
        correction::lift_own_holds(turn, id, &claims);
        correction::acknowledge(turn, id);
    }
    depart_if_done(turn, id);
    Answer::View
}

/// A leaving member that holds nothing any more has left.
pub(crate) fn depart_if_done(turn: &mut Turn<'_>, id: &str) {
    let done = turn.member(id).is_some_and(|m| m.state == MemberState::Leaving && m.holds_nothing());
    if done {
        terminate(turn, id, MemberState::Expired, Termination::Left);
    }
}

/// Ends a membership: the member holds nothing from now on. Holds, where they are due, are set before.
pub(crate) fn terminate(turn: &mut Turn<'_>, id: &str, state: MemberState, cause: Termination) {
    let held = turn.member(id).map(Member::holding).unwrap_or_default();
    correction::freeze_holds(turn, id);
    let epoch = turn.change_membership();
    let now = turn.now;
    if let Some(member) = turn.change(id) {
        member.forget_ownership();
        member.state = state;
        member.terminated_at = Some(now);
        member.termination = Some(cause);
        if state == MemberState::Fenced {
            member.live.member_epoch = epoch;
            member.live.confirmed_member_epoch = epoch;
        }
    }
    turn.note(Transition::MemberGone { member_id: id.to_owned(), cause, held: ranges(&held) });
}

/// Rule 8: epochs from the confirmed one up to the current one are the member's own; answers with the newer
/// ones were lost.
pub(crate) fn check_epoch(turn: &mut Turn<'_>, request: &HeartbeatRequest) -> Option<Answer> {
    let member = turn.member(&request.member_id)?;
    let epoch = u64::try_from(request.member_epoch).unwrap_or(0);
    let lowest = if planted!(OnlyTheNewestEpoch) {
        member.live.member_epoch
    } else if planted!(AnyLowerEpoch) {
        0
    } else {
        member.live.confirmed_member_epoch
    };
    if epoch < lowest {
        let reason = format!(
            "memberEpoch {epoch} is stale: {} has been confirmed; rejoin with epoch 0",
            member.live.confirmed_member_epoch
        );
        return Some(Answer::fenced(reason));
    }
    if epoch > member.live.member_epoch && !correction::is_on(turn) {
        return Some(Answer::fenced("memberEpoch was never handed out: rejoin with epoch 0"));
    }
    if epoch > member.live.confirmed_member_epoch
        && epoch <= member.live.member_epoch
        && let Some(member) = turn.touch(&request.member_id)
    {
        member.live.confirmed_member_epoch = epoch;
    }
    None
}
