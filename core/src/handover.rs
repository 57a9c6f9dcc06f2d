//! Handing a shard over: target, grants, the drain's clock (protocol 4.2).

use rsc_protocol::AssignedShard;
use rsc_protocol::Timestamp;

use crate::group::Group;
use crate::member::{Grant, Member};
use crate::settings::millis;
use crate::shards::ShardSet;
use crate::turn::{Transition, Turn, ranges};
use crate::{assignment, correction, lost_claims};

/// Whether `shard` could be granted to `id` now: its target, held by nobody else, not on hold.
pub(crate) fn is_grantable(turn: &Turn<'_>, id: &str, shard: u32) -> bool {
    turn.context.may_grant
        && turn.context.may_hand_out
        && turn.group.grants_from.is_none_or(|from| turn.now >= from)
        && !correction::is_on(turn)
        && turn.group.targets.get(id).is_some_and(|target| target.contains(shard))
        && (planted!(HoldsSkipped) || !turn.group.is_on_hold(shard, turn.now))
        && !turn.is_held_by_another(id, shard)
}

/// Rule 4.1.11: computes the target anew if membership or the shard set changed, also when whoever changed
/// it did not get that far, or if the record's target is none that this protocol could have made.
pub(crate) fn reconcile(turn: &mut Turn<'_>) {
    let is_behind = turn.group.assignment_epoch < turn.group.group_epoch;
    if turn.membership_changed || is_behind || !covers(&turn.group) {
        recompute(turn);
    }
}

/// Whether the target names every shard of the read set once and only assignable members, each of them.
fn covers(group: &Group) -> bool {
    let read_set = group.read_set();
    // A bitmap: this is asked in every turn.
    let mut named = vec![false; read_set.end()];
    let (mut members, mut shards) = (0, 0);
    for (id, _) in group.members.iter().filter(|(_, member)| member.state.is_assignable()) {
        let Some(target) = group.targets.get(id) else { return false };
        members += 1;
        for shard in target.iter() {
            let slot = usize::try_from(shard).ok().and_then(|shard| named.get_mut(shard));
            match slot {
                Some(named) if !*named && read_set.contains(shard) => *named = true,
                _ => return false,
            }
            shards += 1;
        }
    }
    group.targets.len() == members && (members == 0 || shards == read_set.len())
}

fn recompute(turn: &mut Turn<'_>) {
    let group = &turn.group;
    let members: Vec<&str> = group
        .members
        .iter()
        .filter(|(_, member)| member.state.is_assignable())
        .map(|(id, _)| id.as_str())
        .collect();
    let targets = assignment::assign(&group.targets, &members, group.read_set().to_set());
    let members = members.len();
    if !turn.membership_changed && targets != group.targets {
        turn.change_membership();
    }
    if targets != turn.group.targets {
        let moved = targets
            .iter()
            .map(|(id, target)| match turn.group.targets.get(id) {
                Some(before) => target.minus(before).len(),
                None => target.len(),
            })
            .sum();
        turn.move_version();
        turn.note(Transition::TargetChanged { moved, members });
        turn.group.targets = targets;
    }
    if turn.group.assignment_epoch != turn.group.group_epoch {
        turn.move_version();
        turn.group.assignment_epoch = turn.group.group_epoch;
    }
}

/// What one member may read now and what it still waits for.
pub(crate) struct Entitlement {
    pub(crate) assigned: Vec<AssignedShard>,
    pub(crate) pending: ShardSet,
    pub(crate) revoking: ShardSet,
}

/// Grants `id` what is its target and nobody else's, and marks what this answer leaves out. Called exactly
/// for an answer that the member will act upon.
pub(crate) fn grant(turn: &mut Turn<'_>, id: &str) -> Entitlement {
    let none = || Entitlement { assigned: Vec::new(), pending: ShardSet::new(), revoking: ShardSet::new() };
    let Some(member) = turn.member(id) else {
        return none();
    };
    let target = turn.group.target(id);
    let revoking = member.holding().minus(&target);
    let (mut assigned, mut pending, mut granted) = (ShardSet::new(), ShardSet::new(), ShardSet::new());
    for shard in target.iter() {
        let grant = member.granted.get(&shard);
        let is_reading = member.current.contains(shard) && grant.is_none();
        // An entry that an answer has left out since is granted anew: the member was told to drain it.
        let (allowed, anew) = match grant {
            Some(grant) if !grant.left_out || planted!(LeftOutGrantKeepsItsStamp) => (true, false),
            Some(_) => {
                let may = turn.context.may_grant && turn.context.may_hand_out;
                (may && !turn.group.is_on_hold(shard, turn.now), true)
            }
            None if is_reading || member.holds(shard) => (true, true),
            None => (is_grantable(turn, id, shard), true),
        };
        if !allowed {
            pending.insert(shard);
            continue;
        }
        assigned.insert(shard);
        if anew {
            granted.insert(shard);
        }
    }
    if !granted.is_empty() {
        record_grants(turn, id, &granted);
    }
    mark_left_out(turn, id, &assigned);
    Entitlement { assigned: with_tokens(&turn.group, &assigned), pending, revoking }
}

/// What a member keeps in a correction round: of its target what it holds and has just reported to own
/// (protocol 5). Nothing is granted.
pub(crate) fn keep(turn: &mut Turn<'_>, id: &str, reported: &ShardSet) -> Entitlement {
    let target = turn.group.target(id);
    let holding = turn.member(id).map(Member::holding).unwrap_or_default();
    let assigned: ShardSet =
        target.iter().filter(|shard| holding.contains(*shard) && reported.contains(*shard)).collect();
    // What was taken over from its report is stamped, or a late report would release it again (rule 10); not
    // while another's hold is on it, which blocks every new stamp and lets nobody else have it.
    let is_taken = |shard: &u32| turn.member(id).is_some_and(|member| !member.granted.contains_key(shard));
    let taken: ShardSet = assigned.iter().filter(is_taken).collect();
    if !taken.is_empty() {
        lost_claims::lift_own_holds_on(turn, id, &taken);
        let stamped: ShardSet =
            taken.iter().filter(|shard| !turn.group.is_on_hold(*shard, turn.now)).collect();
        if !stamped.is_empty() {
            record_grants(turn, id, &stamped);
        }
    }
    mark_left_out(turn, id, &assigned);
    let (pending, revoking) = (target.minus(&assigned), holding.minus(&target));
    Entitlement { assigned: with_tokens(&turn.group, &assigned), pending, revoking }
}

/// Marks the grants that this answer leaves out: the member is told to drain them (protocol 1).
fn mark_left_out(turn: &mut Turn<'_>, id: &str, assigned: &ShardSet) {
    let is_new = |member: &Member| {
        member.granted.iter().any(|(shard, grant)| !assigned.contains(*shard) && !grant.left_out)
    };
    if turn.member(id).is_some_and(is_new)
        && let Some(member) = turn.change(id)
    {
        if planted!(AnswerOverwritesGranted) {
            member.granted.retain(|shard, _| assigned.contains(*shard));
        }
        for (shard, grant) in &mut member.granted {
            grant.left_out |= !assigned.contains(*shard);
        }
    }
}

fn with_tokens(group: &Group, shards: &ShardSet) -> Vec<AssignedShard> {
    let token = |shard_index| group.fencing_tokens.get(&shard_index).copied();
    shards
        .iter()
        .map(|shard_index| AssignedShard { shard_index, fencing_token: token(shard_index) })
        .collect()
}

fn record_grants(turn: &mut Turn<'_>, id: &str, shards: &ShardSet) {
    turn.move_version();
    let (metadata_version, now) = (turn.group.metadata_version, turn.now);
    for shard in shards.iter() {
        draw_fencing_token(&mut turn.group, shard, now);
    }
    if let Some(member) = turn.change(id) {
        let grant = Grant { metadata_version, left_out: false };
        member.granted.extend(shards.iter().map(|shard| (shard, grant)));
    }
    turn.counts.grants += u64::try_from(shards.len()).unwrap_or(u64::MAX);
    turn.note(Transition::Granted { member_id: id.to_owned(), shards: ranges(shards) });
}

/// max(previous + 1, Redis time in ms), so that it grows even where the record lost the previous one
/// (protocol 4).
fn draw_fencing_token(group: &mut Group, shard: u32, now: Timestamp) {
    let at_least = u64::try_from(now.as_millis()).unwrap_or(0);
    let token = group.fencing_tokens.get(&shard).map_or(at_least, |previous| at_least.max(previous + 1));
    group.fencing_tokens.insert(shard, token);
}

/// Whether the member might be touching a shard that is not its target.
pub(crate) fn holds_beyond_target(member: &Member, target: Option<&ShardSet>) -> bool {
    member
        .current
        .iter()
        .chain(member.granted.keys().copied())
        .chain(member.revoking.keys().copied())
        .any(|shard| !target.is_some_and(|target| target.contains(shard)))
}

/// Starts the drain's clock of each live member the moment it holds something beyond its target, and stops
/// it when it no longer does; a newer target does not restart it (protocol 4.2). `restart`: it does, a fault
/// planted for the simulation.
pub(crate) fn update_deadlines(group: &mut Group, now: Timestamp, restart: bool) {
    let targets = &group.targets;
    for (id, member) in &mut group.members {
        let holds_more = member.is_live() && holds_beyond_target(member, targets.get(id));
        if !holds_more {
            member.rebalance_deadline_at = None;
        } else if member.rebalance_deadline_at.is_none() || restart {
            let allowed = member.rebalance_timeout_ms.max(member.live.member_lease_ttl_ms);
            member.rebalance_deadline_at = Some(now.plus(millis(allowed)));
        }
    }
}
