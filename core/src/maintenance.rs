//! What time alone does (protocol 4.1 rule 1).

use std::collections::BTreeSet;

use rsc_protocol::Timestamp;
use rsc_protocol::admin::MemberState;
use rsc_protocol::resharding::MigrationState;

use crate::group::{HoldCause, RoutingCap};
use crate::member::{Member, Termination};
use crate::settings::millis;
use crate::turn::{Transition, Turn};
use crate::{correction, holds, membership};

/// Terminal members that a record remembers at most, whatever the retention.
const TERMINAL_REMEMBERED: usize = 1_000;

/// What the history calls it when a migration waits anew for producers, because Redis time jumped.
const WAIT_ANEW: &str = "wait-anew";

/// Expires live members whose lease is over, fences stuck drainers, prunes old terminal members, unless this
/// instance has been out of service; keeps the recorded routing lease true (protocol 7).
///
/// `loss_is_known`: this very turn will begin a correction round.
pub(crate) fn run(turn: &mut Turn<'_>, loss_is_known: bool) {
    // A young round is the sign of a loss that took lease renewals with it (protocol 4.1.1).
    let is_young = correction::is_young(turn) && !planted!(YoungRoundExpires);
    // Time that runs backwards expires nobody (protocol 2): the record's last instant, which stands in for it, may
    // lie hours after the last word of everybody.
    let runs_backwards = turn.context.now < turn.now;
    if turn.context.may_expire && !is_young && !loss_is_known && !runs_backwards {
        expire(turn);
        fence_stuck_drainers(turn);
        correction::fence_stuck(turn);
        prune(turn);
    }
    holds::drop_ended(turn);
    if turn.group.grants_from.is_some_and(|from| turn.now >= from) {
        turn.group.grants_from = None;
        turn.structural = true;
    }
    correction::forget_starters(turn);
    correction::end_if_over(turn);
    if !turn.context.may_grant {
        wait_anew_for_producers(turn);
    }
    keep_routing_lease(turn);
}

fn members_where(turn: &Turn<'_>, due: impl Fn(&Member) -> bool) -> Vec<String> {
    turn.group.members.iter().filter(|(_, member)| due(member)).map(|(id, _)| id.clone()).collect()
}

/// A leaver that falls silent expires too: it must not block its shards until the rebalance timeout.
fn expire(turn: &mut Turn<'_>) {
    let now = turn.now;
    for id in members_where(turn, |member| member.is_live() && member.live.member_lease_expires_at <= now) {
        membership::terminate(turn, &id, MemberState::Expired, Termination::LeaseExpired);
        turn.counts.leases_expired += 1;
    }
}

/// Protocol 4.2: who drains for too long is fenced, and **all** it holds goes on hold until its lease would
/// have run out: it may still be reading the shards it was entitled to.
fn fence_stuck_drainers(turn: &mut Turn<'_>) {
    let now = turn.now;
    let stuck = members_where(turn, |member| {
        member.is_live() && member.rebalance_deadline_at.is_some_and(|at| at <= now)
    });
    for id in stuck {
        let mut held = turn.member(&id).map(Member::holding).unwrap_or_default();
        if planted!(HoldOnlyWhatWasToBeDrained) {
            held = held.minus(&turn.group.target(&id));
        }
        holds::set(turn, &id, &held, HoldCause::RebalanceTimeout, None);
        membership::terminate(turn, &id, MemberState::Fenced, Termination::RebalanceTimeout);
        turn.counts.rebalance_timeouts += 1;
    }
}

fn prune(turn: &mut Turn<'_>) {
    let retention = millis(turn.context.settings.stale_member_retention_ms);
    let now = turn.now;
    let over = members_where(turn, |member| {
        !member.is_live() && member.terminated_at.is_none_or(|at| now.since(at) >= retention)
    });
    let over = over.into_iter().chain(beyond_memory(turn)).collect::<BTreeSet<_>>();
    for id in over {
        turn.group.members.remove(&id);
        turn.group.correction_starters.retain(|starter| starter.member_id != id);
        turn.touched.remove(&id);
        turn.removed.push(id);
        turn.structural = true;
    }
}

/// The oldest terminal members beyond what a record remembers: clients that come and go under ever new names
/// must not fill it within the retention.
fn beyond_memory(turn: &Turn<'_>) -> Vec<String> {
    let mut terminal: Vec<_> = turn
        .group
        .members
        .iter()
        .filter(|(_, member)| !member.is_live())
        .map(|(id, member)| (member.terminated_at, id))
        .collect();
    let beyond = terminal.len().saturating_sub(TERMINAL_REMEMBERED);
    terminal.sort_unstable();
    terminal.into_iter().take(beyond).map(|(_, id)| id.clone()).collect()
}

/// Redis time jumped, and the instants from which producers' leases are counted have lost their meaning: a count that was
/// handed out before may be in use for a whole lease from now on. What waits for that waits anew (protocol 2, 6, 7).
fn wait_anew_for_producers(turn: &mut Turn<'_>) {
    let now = turn.now;
    // A jump is seen by every turn of one lease; not each of them has to write.
    let tolerated = millis(turn.context.settings.member_lease_ttl_ms / 4);
    let is_before_the_jump = |since: Timestamp| now.since(since) > tolerated;
    if let Some(cap) = turn.group.routing_cap.as_mut().filter(|cap| is_before_the_jump(cap.since)) {
        cap.since = now;
        turn.structural = true;
    }
    let shard_count = turn.group.shard_count;
    let running = turn.group.active_resharding_id.as_ref().and_then(|id| turn.group.migrations.get_mut(id));
    // Once shards are being drained the wait is over; on the way back it begins with the former count.
    let waiting = running
        .filter(|it| matches!(it.state, MigrationState::Active | MigrationState::RollingBack))
        .filter(|it| it.activated_at.is_some_and(is_before_the_jump));
    let Some(migration) = waiting else { return };
    migration.activated_at = Some(now);
    let (resharding_id, state) = (migration.resharding_id.clone(), migration.state);
    turn.note(Transition::MigrationStep { resharding_id, step: WAIT_ANEW, state, shard_count });
    turn.move_version();
}

/// Raises the recorded routing lease before a longer one is handed out, and lowers it only once the longest one that may
/// be out has run out (protocol 7). Another instance may hand out more than this one does and say nothing of it, so
/// lowering takes two steps: first the record forbids longer leases, which everybody obeys who reads it; and when the
/// last one that was handed out before has run out, it forgets them.
fn keep_routing_lease(turn: &mut Turn<'_>) {
    let (used, now) = (turn.context.settings.routing_cache_ttl_ms, turn.now);
    let (cap, longest) = (turn.group.routing_cap_ms(), turn.group.max_routing_cache_ttl_ms);
    // Who raised it last may still be there: then it would be raised again at once.
    let stands_for = turn.group.routing_cap.map(|cap| now.since(cap.since));
    let may_lower =
        turn.context.routing_ttl_age_ms > longest && stands_for.is_none_or(|stands| stands > millis(longest));
    if used > cap {
        turn.group.max_routing_cache_ttl_ms = longest.max(used);
        turn.group.routing_cap = Some(RoutingCap { cache_ttl_ms: used, since: now });
    } else if turn.group.longer_routing_leases_end().is_some_and(|end| end <= now) {
        turn.group.max_routing_cache_ttl_ms = cap;
    } else if used < cap && may_lower {
        turn.group.routing_cap = Some(RoutingCap { cache_ttl_ms: used, since: now });
    } else {
        return;
    }
    turn.structural = true;
}
