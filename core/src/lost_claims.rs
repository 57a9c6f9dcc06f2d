//! Holds for those who speak from a future that Redis lost (protocol 5 and 4.3).

use rsc_protocol::heartbeat::EPOCH_JOIN;
use rsc_protocol::{HeartbeatRequest, Timestamp};

use crate::correction::{is_of_another_group, is_on};
use crate::group::{CorrectionParty, Hold, HoldCause};
use crate::member::Member;
use crate::ownership;
use crate::settings::millis;
use crate::shards::ShardSet;
use crate::turn::{Transition, Turn, ranges};

/// Rows that a round holds at most, beyond four for each shard of the read set: who invents claims must not fill
/// the record. While strangers speak the round is young, and a young round grants nothing anyway.
const ROWS_BEYOND: usize = 4_096;

/// What a party claims that speaks from a lost future and is not answered by the round: unknown, expired,
/// fenced or superseded. Held for one lease, once per round.
pub(crate) fn hold_stranger(turn: &mut Turn<'_>, request: &HeartbeatRequest) {
    let speaks_from_a_lost_future =
        request.metadata_version > turn.recorded_version && !is_of_another_group(turn, request);
    if !is_on(turn) || !speaks_from_a_lost_future || request.member_epoch == EPOCH_JOIN {
        return;
    }
    let claims = ownership::claims(request);
    let until = turn.now.plus(millis(turn.context.settings.member_lease_ttl_ms));
    set_holds(turn, request, &claims, until, false);
}

/// Sets the holds of one party, once per round. `moves`: it is the accepted incarnation of a live member.
fn set_holds(
    turn: &mut Turn<'_>,
    request: &HeartbeatRequest,
    shards: &ShardSet,
    until: Timestamp,
    moves: bool,
) {
    let party =
        CorrectionParty { member_id: request.member_id.clone(), instance_id: request.instance_id.clone() };
    let now = turn.now;
    let Some(round) = &mut turn.group.metadata_correction else {
        return;
    };
    if shards.is_empty() || round.hold_setters.contains(&party) {
        return;
    }
    round.hold_setters.push(party);
    round.updated_at = now;
    let sequence = request.instance_id.as_ref().and(request.sequence);
    // What a round that began anew finds again stays one hold.
    let mut found = ShardSet::new();
    for hold in &mut turn.group.holds {
        if hold.cause == HoldCause::LostFuture
            && hold.moves == moves
            && hold.member_id == request.member_id
            && hold.instance_id == request.instance_id
            && shards.contains(hold.shard_index)
        {
            hold.until = hold.until.max(until);
            hold.sequence = hold.sequence.max(sequence);
            found.insert(hold.shard_index);
        }
    }
    let rows = turn.group.holds.iter().filter(|hold| hold.cause == HoldCause::LostFuture).count();
    let room = (4 * turn.group.read_set().len() + ROWS_BEYOND).saturating_sub(rows);
    for shard_index in shards.minus(&found).iter().take(room) {
        turn.group.holds.push(Hold {
            shard_index,
            member_id: request.member_id.clone(),
            instance_id: request.instance_id.clone(),
            sequence,
            cause: HoldCause::LostFuture,
            until,
            since: now,
            moves,
        });
    }
    turn.structural = true;
    turn.note(Transition::Held { member_id: request.member_id.clone(), shards: ranges(shards) });
}

/// In the target of `id`, held by no other live member, and not on hold for another party.
pub(crate) fn is_nobodys_target(turn: &Turn<'_>, id: &str, shard: u32) -> bool {
    let is_on_hold_for_another = || {
        turn.group.holds.iter().any(|hold| {
            hold.shard_index == shard
                && turn.group.hold_lasts(hold, turn.now)
                && !is_own_round_hold(turn, hold, id)
        })
    };
    turn.group.targets.get(id).is_some_and(|target| target.contains(shard))
        && !turn.is_held_by_another(id, shard)
        && !is_on_hold_for_another()
}

pub(crate) fn is_own_round_hold(turn: &Turn<'_>, hold: &Hold, id: &str) -> bool {
    hold.moves && hold.member_id == id && turn.member(id).is_some_and(Member::is_live)
}

/// The shards that a round holds for this very incarnation (protocol 4.1.9).
pub(crate) fn own_holds(turn: &Turn<'_>, id: &str) -> ShardSet {
    let own = turn.group.holds.iter().filter(|hold| is_own_round_hold(turn, hold, id));
    own.map(|hold| hold.shard_index).collect()
}

/// Holds what the accepted incarnation claims and Redis does not give it, and remembers what its last report
/// named: those holds move with its lease.
pub(crate) fn hold_claims_of_member(turn: &mut Turn<'_>, request: &HeartbeatRequest, claims: &ShardSet) {
    let id = &request.member_id;
    let Some(member) = turn.member(id) else { return };
    let lost = claims.minus(&member.holding());
    let until = member.live.member_lease_expires_at;
    let changed = member.live.lost_claims != lost;
    set_holds(turn, request, &lost, until, true);
    if changed && let Some(member) = turn.touch(id) {
        member.live.lost_claims = lost;
    }
}

/// What becomes the member's own again is on no hold against it.
pub(crate) fn lift_own_holds_on(turn: &mut Turn<'_>, id: &str, shards: &ShardSet) {
    let held: ShardSet = turn.group.holds.iter().map(|hold| hold.shard_index).collect();
    lift_own_holds(turn, id, &held.minus(shards));
}

/// A synchronised report without a shard lifts the member's own hold on it (protocol 4.3).
pub(crate) fn lift_own_holds(turn: &mut Turn<'_>, id: &str, still_claimed: &ShardSet) {
    let keep: Vec<bool> = turn
        .group
        .holds
        .iter()
        .map(|hold| !is_own_round_hold(turn, hold, id) || still_claimed.contains(hold.shard_index))
        .collect();
    if keep.iter().all(|keep| *keep) {
        return;
    }
    let mut keep = keep.into_iter();
    turn.group.holds.retain(|_| keep.next().unwrap_or(true));
    turn.structural = true;
}

/// The moving holds of an incarnation that is no longer accepted keep the end they had reached; what comes
/// after it under the same id neither moves nor lifts them.
pub(crate) fn freeze_holds(turn: &mut Turn<'_>, id: &str) {
    stop_at_their_ends(turn, |hold| hold.member_id == id);
    for hold in &mut turn.group.holds {
        if hold.member_id == id && hold.moves {
            hold.moves = false;
            turn.structural = true;
        }
    }
}

/// Writes the end that the holds have reached into them.
pub(crate) fn stop_at_their_ends(turn: &mut Turn<'_>, of: impl Fn(&Hold) -> bool) {
    let ends: Vec<Timestamp> = turn.group.holds.iter().map(|hold| turn.group.hold_end(hold)).collect();
    for (hold, end) in turn.group.holds.iter_mut().zip(ends) {
        if of(hold) && hold.until != end {
            hold.until = end;
            turn.structural = true;
        }
    }
}
