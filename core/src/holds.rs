//! Holds: shards that somebody outside the accepted membership may still be reading (protocol 4.3).

use std::collections::BTreeMap;

use rsc_protocol::HeartbeatRequest;
use rsc_protocol::heartbeat::EPOCH_JOIN;

use crate::group::{Hold, HoldCause};
use crate::settings::millis;
use crate::shards::ShardSet;
use crate::turn::Turn;

/// Puts `shards` on hold for the accepted incarnation of `id`, until its lease would have run out.
/// `sequence`: that of the message now being applied, if it is newer than the recorded one.
pub(crate) fn set(turn: &mut Turn<'_>, id: &str, shards: &ShardSet, cause: HoldCause, sequence: Option<u64>) {
    let Some(member) = turn.member(id) else { return };
    let mut until = member.live.member_lease_expires_at;
    let (instance_id, sequence) = (member.instance_id.clone(), member.live.sequence.max(sequence));
    if until <= turn.now && !turn.context.may_expire {
        // The record may have lost the party's last renewals, else maintenance would have expired it.
        until = turn.now.plus(millis(turn.context.settings.member_lease_ttl_ms));
    }
    let is_skipped = match cause {
        HoldCause::Superseded => planted!(SupersededNotHeld),
        HoldCause::OwnershipViolation => planted!(LiarNotHeld),
        _ => false,
    };
    if until <= turn.now || shards.is_empty() || is_skipped {
        return;
    }
    // A party has one hold per shard, or a client that is fenced over and over would fill the record.
    let mut held_before = BTreeMap::new();
    turn.group.holds.retain(|hold| {
        let is_of_party = hold.member_id == id && hold.instance_id == instance_id;
        // A round counts its own holds; they stay beside this one.
        let again = is_of_party && hold.cause != HoldCause::LostFuture && shards.contains(hold.shard_index);
        if again {
            held_before.insert(hold.shard_index, (hold.sequence, hold.until));
        }
        !again
    });
    for shard_index in shards.iter() {
        // What has no order in either is lifted by nothing.
        let (before, held_until) = held_before.get(&shard_index).copied().unwrap_or((sequence, until));
        turn.group.holds.push(Hold {
            shard_index,
            member_id: id.to_owned(),
            instance_id: instance_id.clone(),
            sequence: before.zip(sequence).map(|(before, now)| before.max(now)),
            cause,
            until: until.max(held_until),
            since: turn.now,
            moves: false,
        });
    }
    turn.structural = true;
}

/// A newer message of the very incarnation that a hold is about lifts it if it proves that the incarnation
/// stopped: epoch 0 (all of its shards), or `REVOKED` with nothing in flight (that shard).
pub(crate) fn lift_what_stopped(turn: &mut Turn<'_>, request: &HeartbeatRequest) {
    let (Some(instance), Some(sequence)) = (&request.instance_id, request.sequence) else {
        return;
    };
    let stopped_all = request.member_epoch == EPOCH_JOIN;
    let revoked: ShardSet = request
        .revoking_shards
        .iter()
        .filter(|report| report.is_finished())
        .map(|report| report.shard.shard_index)
        .collect();
    let before = turn.group.holds.len();
    turn.group.holds.retain(|hold| {
        let is_the_party = hold.member_id == request.member_id && hold.instance_id.as_ref() == Some(instance);
        let is_newer = planted!(OldJoinLiftsHold) || hold.sequence.is_some_and(|applied| sequence > applied);
        !(is_the_party && is_newer && (stopped_all || revoked.contains(hold.shard_index)))
    });
    let lifted = before - turn.group.holds.len();
    if lifted > 0 {
        turn.structural = true;
        turn.counts.holds_lifted += u64::try_from(lifted).unwrap_or(u64::MAX);
    }
}

/// Removes holds whose time is over.
pub(crate) fn drop_ended(turn: &mut Turn<'_>) {
    let ended: Vec<bool> =
        turn.group.holds.iter().map(|hold| !turn.group.hold_lasts(hold, turn.now)).collect();
    turn.structural |= ended.contains(&true);
    let mut ended = ended.into_iter();
    turn.group.holds.retain(|_| !ended.next().unwrap_or(false));
}
