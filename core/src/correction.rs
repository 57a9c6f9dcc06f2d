//! The correction round: Redis lost writes, and everybody is brought back to what it still has (protocol 5).

use rsc_protocol::heartbeat::{EPOCH_JOIN, EPOCH_LEAVE};
use rsc_protocol::{HeartbeatRequest, PROTOCOL_VERSION, Status, Timestamp};

use crate::decide::{Answer, Command};
use crate::group::{Correction, CorrectionStarter, Group, HoldCause};
use crate::member::Member;
use crate::settings::{Settings, millis};
use crate::shards::ShardSet;
use crate::turn::{Transition, Turn};
use crate::{handover, holds, membership, ownership};

pub(crate) use crate::lost_claims::{
    freeze_holds, hold_claims_of_member, hold_stranger, is_nobodys_target, lift_own_holds, own_holds,
};
use crate::lost_claims::{is_own_round_hold, stop_at_their_ends};

/// An unknown member that reports a version further ahead than this belongs to another group; it is counted
/// and nothing else.
const PLAUSIBLE_LEAD: u64 = 1_000_000;

/// Whether the request shows that Redis lost writes, and how (protocol 5, *Evidence*).
pub(crate) fn evidence(turn: &Turn<'_>, request: &HeartbeatRequest) -> Option<String> {
    let (version, reported) = (turn.recorded_version, request.metadata_version);
    if reported > version && !planted!(HigherVersionIgnored) {
        return Some(format!("metadataVersion {reported} was reported but the record is at {version}"));
    }
    let known = turn.member(&request.member_id)?;
    if reported == version && !planted!(TokenIgnored) && !token_fits(request, &turn.recorded_token) {
        return Some(format!("metadataVersion {version} was reported with another metadataToken"));
    }
    let epoch = u64::try_from(request.member_epoch).unwrap_or(0);
    (epoch > known.live.member_epoch)
        .then(|| format!("memberEpoch {epoch} was reported but the record is at {}", known.live.member_epoch))
}

/// Whether the member's words are none of this history, whatever it has synchronised before: a starter may not
/// let the round begin anew, but is not believed either.
fn speaks_from_a_lost_future(turn: &Turn<'_>, request: &HeartbeatRequest) -> bool {
    evidence(turn, request).is_some()
}

/// Whether the request's token is `token`; true where either side has none.
fn token_fits(request: &HeartbeatRequest, token: &str) -> bool {
    request.metadata_token.as_deref().is_none_or(|sent| sent.is_empty() || token.is_empty() || sent == token)
}

/// Whether an unknown member speaks from so far ahead that it can be none of this group's.
pub(crate) fn is_of_another_group(turn: &Turn<'_>, request: &HeartbeatRequest) -> bool {
    turn.member(&request.member_id).is_none()
        && request.metadata_version > turn.recorded_version.saturating_add(PLAUSIBLE_LEAD)
}

/// Acts on evidence: begins a round or, inside one, lets it begin anew; not for an unknown member's
/// implausible version, nor for a (member, instance) that has done so and not synchronised since.
pub(crate) fn begin_for(turn: &mut Turn<'_>, request: &HeartbeatRequest) {
    if !may_begin(turn, request) {
        return;
    }
    turn.group.correction_starters.push(CorrectionStarter {
        member_id: request.member_id.clone(),
        instance_id: request.instance_id.clone(),
        started_at: turn.now,
    });
    begin(turn, request.metadata_version);
}

fn may_begin(turn: &Turn<'_>, request: &HeartbeatRequest) -> bool {
    let is_starter =
        turn.group.correction_starters.iter().any(|starter| {
            starter.member_id == request.member_id && starter.instance_id == request.instance_id
        });
    !is_of_another_group(turn, request)
        && (!is_starter || planted!(StartersForgotten))
        && !has_begun_too_many(turn, request)
}

/// Whether a round is about to begin, or to begin anew, by what waits in this very turn: then maintenance, which comes
/// first, judges nobody (4.1.1, *began a correction round*). What was lost may be the renewals of everybody.
pub(crate) fn is_about_to_begin(turn: &Turn<'_>, commands: &[Command]) -> bool {
    commands.iter().any(|command| match command {
        Command::LostWrites { .. } => true,
        Command::Heartbeat { path_member_id, request } => {
            *path_member_id == request.member_id
                && request.protocol_version == PROTOCOL_VERSION
                && evidence(turn, request).is_some()
                && may_begin(turn, request)
        }
        _ => false,
    })
}

/// Whoever invents a new name with each message must not keep a group in a young round for ever, nor fill the
/// record: what members that are not on record, or ever new incarnations of one that is, show beyond these
/// numbers within the retention is counted and begins nothing. The actor and the members still do.
fn has_begun_too_many(turn: &Turn<'_>, request: &HeartbeatRequest) -> bool {
    const BY_STRANGERS: usize = 8;
    const BY_INCARNATIONS_OF_ONE: usize = 16;
    let starters = turn.group.correction_starters.iter();
    match turn.member(&request.member_id) {
        None => {
            let of_strangers = starters.filter(|starter| turn.member(&starter.member_id).is_none());
            of_strangers.count() >= BY_STRANGERS
        }
        Some(member) => {
            let of_member = starters.filter(|starter| starter.member_id == request.member_id);
            member.instance_id != request.instance_id && of_member.count() >= BY_INCARNATIONS_OF_ONE
        }
    }
}

/// A round begins, or what it knows begins anew: age, acknowledgements, the holds' "once".
pub(crate) fn begin(turn: &mut Turn<'_>, observed: u64) {
    if planted!(SecondLossIgnored) && is_on(turn) {
        return;
    }
    let (now, version) = (turn.now, turn.group.metadata_version);
    let running = turn.group.metadata_correction.take();
    let again = running.is_some();
    // The instant names the round; a round that begins anew needs another name.
    let requested_at = running.as_ref().map_or(now, |round| now.max(round.requested_at.plus(1)));
    let observed = running.as_ref().map_or(0, |round| round.observed_metadata_version).max(observed);
    turn.group.metadata_correction = Some(Correction {
        target_metadata_version: version,
        observed_metadata_version: observed.max(version),
        requested_at,
        updated_at: now,
        acknowledged_members: Vec::new(),
        hold_setters: Vec::new(),
    });
    turn.structural = true;
    turn.counts.corrections_begun += 1;
    turn.counts.corrections_begun_anew += u64::from(again);
    turn.note(Transition::CorrectionBegun { observed_metadata_version: observed.max(version), again });
}

/// Whether a round is on.
pub(crate) fn is_on(turn: &Turn<'_>) -> bool {
    turn.group.metadata_correction.is_some()
}

/// Whether a round is on and younger than one lease: nothing new is granted (protocol 5).
pub(crate) fn is_young(turn: &Turn<'_>) -> bool {
    let settings = &turn.context.settings;
    turn.group.metadata_correction.as_ref().is_some_and(|round| first_lease_end(settings, round) > turn.now)
}

fn first_lease_end(settings: &Settings, round: &Correction) -> Timestamp {
    round.requested_at.plus(millis(settings.member_lease_ttl_ms))
}

/// How long a round waits for a member, in milliseconds.
fn patience(member: &Member) -> i64 {
    millis(member.rebalance_timeout_ms.max(member.live.member_lease_ttl_ms))
}

fn round_name(turn: &Turn<'_>) -> Option<Timestamp> {
    turn.group.metadata_correction.as_ref().map(|round| round.requested_at)
}

/// Whether the member has synchronised in the running round.
fn has_synchronised(member: &Member, round: &Correction) -> bool {
    member.live.synchronised_at_round == Some(round.requested_at)
}

/// How a live member is answered: `OK` unless a round is on; joining and leaving are `OK` then too, with
/// nothing assigned.
pub(crate) fn status(turn: &Turn<'_>, request: &HeartbeatRequest) -> Status {
    let (Some(round), Some(member)) =
        (&turn.group.metadata_correction, turn.member(&request.member_id).filter(|member| member.is_live()))
    else {
        return Status::Ok;
    };
    match request.member_epoch {
        EPOCH_JOIN | EPOCH_LEAVE => Status::Ok,
        _ if has_synchronised(member, round) && !speaks_from_a_lost_future(turn, request) => {
            Status::RevokePending
        }
        _ => Status::SyncMetadata,
    }
}

/// Records that the member has synchronised.
pub(crate) fn acknowledge(turn: &mut Turn<'_>, id: &str) {
    let Some(name) = round_name(turn) else { return };
    if let Some(member) = turn.touch(id) {
        member.live.synchronised_at_round = Some(name);
    }
}

/// A report of the accepted incarnation that synchronises, in a round or later, lets it begin a round again.
/// A join does not: a broken client would be fenced, join, and begin the next round, for ever.
pub(crate) fn forgive_starter(turn: &mut Turn<'_>, request: &HeartbeatRequest) {
    let is_the_starter = |starter: &CorrectionStarter| {
        starter.member_id == request.member_id && starter.instance_id == request.instance_id
    };
    let synchronises =
        turn.member(&request.member_id).is_some_and(|member| synchronises(turn, request, member));
    if synchronises && turn.group.correction_starters.iter().any(is_the_starter) {
        turn.group.correction_starters.retain(|starter| !is_the_starter(starter));
        turn.structural = true;
    }
}

/// Whether this report synchronises: it speaks from the current version, or from the one that the member's
/// last answer in this round carried, and from no later epoch than was handed out.
fn synchronises(turn: &Turn<'_>, request: &HeartbeatRequest, member: &Member) -> bool {
    let epoch = u64::try_from(request.member_epoch).unwrap_or(0);
    if epoch > member.live.member_epoch {
        return false;
    }
    let current =
        request.metadata_version == turn.recorded_version && token_fits(request, &turn.recorded_token);
    let answered = member.live.answered_at_round == round_name(turn)
        && member.live.answered_version == Some(request.metadata_version)
        && token_fits(request, member.live.answered_token.as_deref().unwrap_or_default());
    current || (answered && !planted!(AcknowledgementsVoid))
}

/// A live member of the accepted incarnation with an acceptable or a higher epoch, while a round is on.
pub(crate) fn answer(turn: &mut Turn<'_>, request: &HeartbeatRequest) -> Answer {
    let id = &request.member_id;
    let (Some(member), Some(round)) = (turn.member(id), &turn.group.metadata_correction) else {
        return Answer::retry("the round has just ended");
    };
    let knows = has_synchronised(member, round) && !planted!(AcknowledgementsVoid);
    if speaks_from_a_lost_future(turn, request) || (!knows && !synchronises(turn, request, member)) {
        synchronise(turn, request);
        return Answer::View;
    }
    acknowledge(turn, id);
    ownership::check_and_accept(turn, request)
}

/// Uses of an unsynchronised report only what the protocol allows: claimed shards that are the member's
/// target and nobody's are taken into *current* (else a round waits for itself), the rest of the claim that
/// Redis does not give it is held while its reports name it. The lease is renewed.
fn synchronise(turn: &mut Turn<'_>, request: &HeartbeatRequest) {
    let id = &request.member_id;
    let claims = ownership::claims(request);
    // A report that does not name a shard moves its hold no further; only a synchronised one lifts it.
    stop_at_their_ends(turn, |hold| hold.member_id == *id && !claims.contains(hold.shard_index));
    membership::hear(turn, request);
    let owned: ShardSet = request.owned_shards.iter().map(|shard| shard.shard_index).collect();
    let taken: ShardSet = owned
        .iter()
        .filter(|shard| {
            turn.member(id).is_some_and(|member| !member.holds(*shard))
                && is_nobodys_target(turn, id, *shard)
                && !planted!(OwnTargetHeld)
        })
        .collect();
    if !taken.is_empty()
        && let Some(member) = turn.change(id)
    {
        member.current.extend(taken.iter());
        member.reported_ownership = true;
    }
    hold_claims_of_member(turn, request, &claims);
}

/// Ends the round if it is one lease old, every live member has synchronised, and no hold of the round and
/// no revoke that began in its first lease is left.
pub(crate) fn end_if_over(turn: &mut Turn<'_>) {
    let Some(round) = &turn.group.metadata_correction else {
        return;
    };
    let first_lease_end = first_lease_end(&turn.context.settings, round);
    if (first_lease_end > turn.now && !planted!(NoYoungPhase)) || !turn.context.may_grant {
        return;
    }
    let all_synchronised = turn.group.live_members().all(|(_, member)| has_synchronised(member, round));
    let held = turn
        .group
        .holds
        .iter()
        .any(|hold| hold.cause == HoldCause::LostFuture && turn.group.hold_lasts(hold, turn.now));
    let all_synchronised = all_synchronised || planted!(RoundEndsUnsynchronised);
    if !all_synchronised || held || revoke_of_first_lease_is_left(turn, first_lease_end) {
        return;
    }
    turn.group.metadata_correction = None;
    turn.structural = true;
    turn.note(Transition::CorrectionEnded {});
}

fn revoke_of_first_lease_is_left(turn: &Turn<'_>, first_lease_end: Timestamp) -> bool {
    turn.group.live_members().any(|(id, member)| {
        let began_in_time =
            member.rebalance_deadline_at.is_some_and(|at| at.plus(-patience(member)) <= first_lease_end);
        began_in_time && handover::holds_beyond_target(member, turn.group.targets.get(id))
    })
}

/// Live members that a round does not wait for any longer: not synchronised within their rebalance timeout,
/// or naming shards of a lost future for that long.
pub(crate) fn stuck_members(turn: &Turn<'_>) -> Vec<String> {
    let now = turn.now;
    let round = turn.group.metadata_correction.as_ref();
    let is_stuck = |id: &str, member: &Member| {
        let not_synchronised = round.is_some_and(|round| {
            !has_synchronised(member, round) && now.since(round.requested_at) >= patience(member)
        });
        let claims_for_too_long = turn.group.holds.iter().any(|hold| {
            is_own_round_hold(turn, hold, id)
                && member.live.lost_claims.contains(hold.shard_index)
                && now.since(hold.since) >= patience(member)
        });
        not_synchronised || claims_for_too_long
    };
    turn.group.live_members().filter(|(id, member)| is_stuck(id, member)).map(|(id, _)| id.clone()).collect()
}

/// When time alone changes something in a round: its first lease ends, or it gives up on a member. The end of
/// the first lease is none any more once a write came after it: what still keeps the round open has its own.
pub(crate) fn deadlines(group: &Group, settings: &Settings) -> Vec<Timestamp> {
    let Some(round) = &group.metadata_correction else {
        return Vec::new();
    };
    let first_lease_end = first_lease_end(settings, round);
    let unsynchronised = group.live_members().filter(|(_, member)| !has_synchronised(member, round));
    let claimed = group.holds.iter().filter_map(|hold| {
        let member = group.moving_hold_of(hold)?;
        Some(hold.since.plus(patience(member)))
    });
    Some(first_lease_end)
        .filter(|end| *end > group.updated_at)
        .into_iter()
        .chain(unsynchronised.map(|(_, member)| round.requested_at.plus(patience(member))))
        .chain(claimed)
        .collect()
}

/// When a starter is forgotten; `None`: with its member. The incarnation that was last accepted stays known for
/// as long as its member is on record: else a broken client would be fenced, come back and begin a round once
/// per retention, for ever.
pub(crate) fn forgotten_at(
    group: &Group,
    starter: &CorrectionStarter,
    settings: &Settings,
) -> Option<Timestamp> {
    let on_record = group.members.get(&starter.member_id);
    let is_its_member = on_record.is_some_and(|member| member.instance_id == starter.instance_id);
    (!is_its_member).then(|| starter.started_at.plus(millis(settings.stale_member_retention_ms)))
}

/// Forgets who began rounds once the retention is over.
pub(crate) fn forget_starters(turn: &mut Turn<'_>) {
    let (settings, now) = (&turn.context.settings, turn.now);
    let keep: Vec<bool> = turn
        .group
        .correction_starters
        .iter()
        .map(|starter| forgotten_at(&turn.group, starter, settings).is_none_or(|at| at > now))
        .collect();
    turn.structural |= keep.contains(&false);
    let mut keep = keep.into_iter();
    turn.group.correction_starters.retain(|_| keep.next().unwrap_or(true));
}

/// The aggregate's list of who has synchronised, for people; written along with structural changes.
pub(crate) fn note_acknowledgements(turn: &mut Turn<'_>) {
    let Some(round) = &turn.group.metadata_correction else {
        return;
    };
    let acknowledged: Vec<String> = turn
        .group
        .live_members()
        .filter(|(_, member)| has_synchronised(member, round))
        .map(|(id, _)| id.clone())
        .collect();
    if let Some(round) = &mut turn.group.metadata_correction {
        round.acknowledged_members = acknowledged;
    }
}

/// Remembers what the answer to an unsynchronised member carries.
pub(crate) fn note_answer(turn: &mut Turn<'_>, id: &str) {
    let (version, token) = (turn.group.metadata_version, turn.group.metadata_token.clone());
    let name = round_name(turn);
    if let Some(member) = turn.touch(id) {
        member.live.answered_at_round = name;
        member.live.answered_version = Some(version);
        member.live.answered_token = Some(token);
    }
}

/// Sets ordinary holds on everything a member that the round gave up on may be reading.
pub(crate) fn fence_stuck(turn: &mut Turn<'_>) {
    use rsc_protocol::admin::MemberState;
    for id in stuck_members(turn) {
        let held = turn.member(&id).map(Member::holding).unwrap_or_default();
        holds::set(turn, &id, &held, HoldCause::RebalanceTimeout, None);
        membership::terminate(turn, &id, MemberState::Fenced, crate::member::Termination::NotSynchronised);
        turn.counts.rebalance_timeouts += 1;
    }
}
