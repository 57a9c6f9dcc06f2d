//! What must hold after every step.

use rsc_core::group::Correction;
use rsc_core::member::Termination;
use rsc_core::validate::validate_transition;
use rsc_core::{Counts, Decision, Group, RawFields, Reply, Transition};
use rsc_core::{Hold, Member};
use rsc_protocol::admin::GroupState;
use rsc_protocol::{HeartbeatRequest, HeartbeatResponse, Status, Timestamp};

use crate::process::Process;

/// When Redis lost writes, and when the record first showed that somebody knows.
#[derive(Clone, Debug)]
pub(crate) struct Loss {
    /// Nothing decided from here on knew what was lost.
    pub(crate) at: i64,
    /// A round was begun, or begun anew.
    pub(crate) noticed_at: Option<i64>,
}

/// A forward jump of Redis time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Jump {
    /// When.
    pub(crate) at: i64,
    /// By so many milliseconds.
    pub(crate) by: i64,
}

/// A grant as it was recorded.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    /// The shard.
    pub(crate) shard: u32,
    /// Whose.
    pub(crate) member: String,
    /// When it was written.
    pub(crate) at: i64,
    /// By an instance that could not know that time had jumped.
    pub(crate) is_blind: bool,
}

/// Two processes that read one shard, as far as that is documented to remain.
#[derive(Clone, Debug)]
pub(crate) struct Excuse {
    /// The shard.
    pub(crate) shard: u32,
    /// The processes.
    pub(crate) pair: (usize, usize),
    /// When it began.
    pub(crate) since: i64,
    /// The overlap must be over by then.
    pub(crate) until: i64,
}

/// The invariants of one commit, and of the step to it from what was stored.
#[must_use]
pub(crate) fn commit(before: &Group, decision: &Decision, now: Timestamp, lease: i64) -> Vec<String> {
    let after = &decision.group;
    let mut found: Vec<String> = after.validate().iter().map(ToString::to_string).collect();
    found.extend(validate_transition(before, after, now).iter().map(ToString::to_string));
    drain_clock_stands(before, after, &mut found);
    young_round_spares(before, after, now, lease, &mut found);
    superseded_stays_so(before, decision, &mut found);
    round_ends_synchronised(before, decision, &mut found);
    claims_stay_on_hold(before, after, now.max(before.updated_at), &mut found);
    let now = now.max(before.updated_at);
    // What its reader claims is stamped when it is its own already, or nobody's: taken over, not granted.
    let is_new = |(shard, id): &(u32, String)| {
        let held = before.members.get(id).is_some_and(|former| former.is_live() && former.holds(*shard));
        let claims = |member: &rsc_core::Member| {
            member.current.contains(*shard) || member.revoking.contains_key(shard)
        };
        !held && !after.members.get(id).is_some_and(claims)
    };
    if is_young(before.metadata_correction.as_ref(), now, lease)
        && new_grants(before, after).iter().any(is_new)
    {
        found.push("young-round-grants-nothing: a grant in the first lease of a round".to_owned());
    }
    found
}

/// Grants that `after` has and `before` has not: (shard, member).
#[must_use]
pub(crate) fn new_grants(before: &Group, after: &Group) -> Vec<(u32, String)> {
    let mut found = Vec::new();
    for (id, member) in after.live_members() {
        for (shard, grant) in &member.granted {
            let former = before.members.get(id).and_then(|former| former.granted.get(shard));
            if former.is_none_or(|former| former.metadata_version != grant.metadata_version) {
                found.push((*shard, id.clone()));
            }
        }
    }
    found
}

/// A newer target does not restart a drain's clock (protocol 4.2).
fn drain_clock_stands(before: &Group, after: &Group, found: &mut Vec<String>) {
    for (id, member) in after.live_members() {
        let same = before.members.get(id).filter(|former| {
            former.is_live() && former.join_metadata_version == member.join_metadata_version
        });
        if let Some(former) = same
            && let (Some(then), Some(now)) = (former.rebalance_deadline_at, member.rebalance_deadline_at)
            && then != now
        {
            found.push(format!("drain-clock-stands: {id} had until {then}, now until {now}"));
        }
    }
}

fn is_young(round: Option<&Correction>, now: Timestamp, lease: i64) -> bool {
    round.is_some_and(|round| round.requested_at.plus(lease) > now)
}

/// While a round is younger than a lease nobody is expired and nothing is granted (protocol 4.1.1, 5).
fn young_round_spares(before: &Group, after: &Group, now: Timestamp, lease: i64, found: &mut Vec<String>) {
    let now = now.max(before.updated_at);
    if !is_young(before.metadata_correction.as_ref(), now, lease) {
        return;
    }
    if after.metadata_correction.is_none() {
        found.push("young-round-goes-on: a round ended before it was one lease old".to_owned());
    }
    for (id, _) in before.live_members() {
        let expired = after
            .members
            .get(id)
            .is_none_or(|later| later.termination == Some(Termination::LeaseExpired) && !later.is_live());
        if expired {
            found.push(format!("young-round-spares: {id} expired in the first lease of a round"));
        }
    }
}

/// A round ends when every live member has synchronised in it (protocol 5).
fn round_ends_synchronised(before: &Group, decision: &Decision, found: &mut Vec<String>) {
    let Some(round) = &before.metadata_correction else { return };
    if decision.group.metadata_correction.is_some() || decision.counts.corrections_begun > 0 {
        return;
    }
    for (id, member) in decision.group.live_members() {
        let joined_since = before.members.get(id).is_none_or(|former| {
            !former.is_live() || former.join_metadata_version != member.join_metadata_version
        });
        if !joined_since && member.live.synchronised_at_round != Some(round.requested_at) {
            found.push(format!("round-ends-synchronised: {id} has not"));
        }
    }
}

/// The dead do not win: a superseded incarnation does not get its place back from a living successor.
fn superseded_stays_so(before: &Group, decision: &Decision, found: &mut Vec<String>) {
    let after = &decision.group;
    let has_gone = |id: &str| {
        let is_it = |transition: &Transition| matches!(transition, Transition::MemberGone { member_id, .. } if member_id == id);
        decision.transitions.iter().any(is_it)
    };
    for (id, member) in before.live_members().filter(|(id, _)| !has_gone(id)) {
        let Some(later) = after.members.get(id).filter(|later| later.is_live()) else { continue };
        let back =
            member.superseded.iter().any(|former| Some(&former.instance_id) == later.instance_id.as_ref());
        if back && later.instance_id != member.instance_id {
            found.push(format!("superseded-stays-so: {id} is {:?} again", later.instance_id));
        }
    }
}

/// What is stored loads as what was decided.
#[must_use]
pub(crate) fn stored(
    decision: &Decision,
    fields: &RawFields,
    settings: &rsc_core::Settings,
) -> Option<String> {
    match rsc_core::load(&decision.group.key, fields, settings) {
        Ok(loaded) if loaded.group == decision.group => None,
        Ok(_) => Some("stored-is-decided: the record loads as another group".to_owned()),
        Err(error) => Some(format!("stored-is-decided: the record does not load: {error}")),
    }
}

/// What a single heartbeat was answered, against what was stored before and is decided now.
#[must_use]
pub(crate) fn answer(
    before: &Group,
    after: &Group,
    request: &HeartbeatRequest,
    reply: &Reply,
    now: Timestamp,
    has_lost: bool,
) -> Vec<String> {
    let Reply::Heartbeat(response) = reply else { return Vec::new() };
    let turned_away = if has_lost { None } else { turned_away(before, after, request, response) };
    turned_away
        .into_iter()
        .chain(evidence_is_acted_upon(before, after, request, response))
        .chain(acknowledged_stays_so(before, after, request, response))
        .chain(absence_releases(before, after, request, response))
        .chain(stranger_is_fenced(before, request, response))
        .chain(late_changes_nothing(before, after, request, response, now.max(before.updated_at)))
        .chain(own_is_kept(before, after, request, response, now.max(before.updated_at)))
        .collect()
}

/// A living process, the accepted incarnation, whose newest message this is, is not turned away; and only a
/// duplicate of somebody who was heard is refused for good (protocol 4.1.6, 4.1.8).
fn turned_away(
    before: &Group,
    after: &Group,
    request: &HeartbeatRequest,
    response: &HeartbeatResponse,
) -> Option<String> {
    let member = before.members.get(&request.member_id)?;
    let later = after.members.get(&request.member_id)?;
    match response.status {
        Status::FencedMemberEpoch | Status::UnknownMemberId => {
            let is_accepted = request.instance_id.is_some() && member.instance_id == request.instance_id;
            let is_newest = request.sequence > member.live.sequence && request.sequence.is_some();
            // It has heard of the join that is on record: no late copy of an older one was taken for it. (A broken client
            // says more than anybody can have heard.)
            let is_its_own = request.metadata_version >= member.join_metadata_version
                && request.metadata_version <= before.metadata_version;
            let untouched = later.is_live() && later.join_metadata_version == member.join_metadata_version;
            (member.is_live() && is_accepted && is_newest && is_its_own && untouched)
                .then(|| format!("innocent-not-fenced: {} {:?}", request.request_id, response.status))
        }
        Status::InvalidRequest if request.member_epoch == 0 && member.is_live() && !member.heard => {
            Some(format!(
                "refused-only-beside-a-living: {} although its successor was never heard",
                request.request_id
            ))
        }
        _ => None,
    }
}

/// Whether the request is the newest one of the accepted incarnation of a live member, which has an order.
fn newest_of<'g>(before: &'g Group, request: &HeartbeatRequest) -> Option<&'g Member> {
    before.members.get(&request.member_id).filter(|member| {
        member.is_live()
            && member.instance_id == request.instance_id
            && request.instance_id.is_some()
            && request.sequence > member.live.sequence
    })
}

/// Whether its report shows that Redis lost writes (protocol 5, *Evidence*).
fn is_evidence(before: &Group, request: &HeartbeatRequest, member: &Member) -> bool {
    let token = request.metadata_token.as_deref().filter(|token| !token.is_empty());
    let is_fork = request.metadata_version == before.metadata_version
        && token.is_some_and(|token| token != before.metadata_token);
    let epoch = u64::try_from(request.member_epoch).unwrap_or(0);
    request.metadata_version > before.metadata_version || is_fork || epoch > member.live.member_epoch
}

/// Evidence begins a round, or begins the running one anew, unless this incarnation is known not to be
/// trusted (protocol 5).
fn evidence_is_acted_upon(
    before: &Group,
    after: &Group,
    request: &HeartbeatRequest,
    response: &HeartbeatResponse,
) -> Option<String> {
    let member = newest_of(before, request)?;
    let is_starter = before
        .correction_starters
        .iter()
        .any(|starter| starter.member_id == request.member_id && starter.instance_id == request.instance_id);
    let counts = !is_starter && response.status != Status::Retry && is_evidence(before, request, member);
    let name = |group: &Group| group.metadata_correction.as_ref().map(|round| round.requested_at);
    let begins = name(after).is_some() && name(after) != name(before);
    (counts && !begins).then(|| format!("evidence-is-acted-upon: {} shows a loss", request.request_id))
}

/// Who has synchronised in a round stays so whatever others move, unless it shows another loss (protocol 5).
fn acknowledged_stays_so(
    before: &Group,
    after: &Group,
    request: &HeartbeatRequest,
    response: &HeartbeatResponse,
) -> Option<String> {
    let member = newest_of(before, request)?;
    let round = before.metadata_correction.as_ref()?.requested_at;
    let same_round = after.metadata_correction.as_ref().is_some_and(|later| later.requested_at == round);
    let undone = same_round
        && member.live.synchronised_at_round == Some(round)
        && !is_evidence(before, request, member)
        && response.status == Status::SyncMetadata;
    undone.then(|| format!("acknowledged-stays-so: {} is told to synchronise again", request.request_id))
}

/// Who has synchronised gives back what its report no longer names, whatever others move (protocol 5).
fn absence_releases(
    before: &Group,
    after: &Group,
    request: &HeartbeatRequest,
    response: &HeartbeatResponse,
) -> Option<String> {
    let member = newest_of(before, request)?;
    let round = before.metadata_correction.as_ref()?.requested_at;
    let later = after.members.get(&request.member_id)?;
    let counts = member.live.synchronised_at_round == Some(round)
        && after.metadata_correction.as_ref().is_some_and(|later| later.requested_at == round)
        && response.status == Status::RevokePending
        && !is_evidence(before, request, member);
    let named = |shard: u32| {
        request.owned_shards.iter().any(|one| one.shard_index == shard)
            || request.revoking_shards.iter().any(|one| one.shard.shard_index == shard && !one.is_finished())
    };
    let is_older = |shard: u32| {
        member.granted.get(&shard).is_none_or(|grant| grant.metadata_version <= request.metadata_version)
    };
    let kept =
        member.holding().iter().find(|shard| !named(*shard) && is_older(*shard) && later.holds(*shard))?;
    counts.then(|| format!("absence-releases: {} gave shard {kept} back", request.request_id))
}

/// Another incarnation than the accepted one is answered by nothing that could make it a member (rule 3a).
fn stranger_is_fenced(
    before: &Group,
    request: &HeartbeatRequest,
    response: &HeartbeatResponse,
) -> Option<String> {
    let member = before.members.get(&request.member_id).filter(|member| member.is_live())?;
    let is_stranger = member.instance_id.is_some()
        && member.instance_id != request.instance_id
        && request.member_epoch != 0;
    let is_answered = matches!(response.status, Status::Ok | Status::SyncMetadata | Status::RevokePending);
    (is_stranger && is_answered)
        .then(|| format!("stranger-is-fenced: {} {:?}", request.request_id, response.status))
}

/// A late message changes nothing (protocol 4.1.2), and lifts no hold (4.3).
fn late_changes_nothing(
    before: &Group,
    after: &Group,
    request: &HeartbeatRequest,
    response: &HeartbeatResponse,
    now: Timestamp,
) -> Option<String> {
    let (instance, sequence) = (request.instance_id.as_ref()?, request.sequence?);
    let member = before.members.get(&request.member_id);
    let is_late = member.is_some_and(|member| {
        member.is_live()
            && member.instance_id.as_ref() == Some(instance)
            && member.live.sequence.is_some_and(|applied| sequence < applied)
    });
    if is_late && response.status != Status::Retry {
        return Some(format!("late-changes-nothing: {} {:?}", request.request_id, response.status));
    }
    let lifted = before.holds.iter().find(|hold| {
        hold.member_id == request.member_id
            && hold.instance_id.as_ref() == Some(instance)
            && hold.sequence.is_none_or(|applied| sequence <= applied)
            && before.hold_end(hold) > now
            && !after
                .holds
                .iter()
                .any(|later| later.shard_index == hold.shard_index && later.cause == hold.cause)
    })?;
    Some(format!("late-changes-nothing: {} lifts {lifted:?}", request.request_id))
}

/// While a live member's reports name a shard of a lost future, its hold reaches to the end of its lease; for
/// its rebalance timeout at most (protocol 4.3).
fn claims_stay_on_hold(before: &Group, after: &Group, now: Timestamp, found: &mut Vec<String>) {
    for (id, member) in after.live_members() {
        for shard in member.live.lost_claims.iter() {
            let mine = |hold: &&Hold| hold.shard_index == shard && hold.member_id == *id && hold.moves;
            let covers = |hold: &Hold| after.hold_end(hold) >= member.live.member_lease_expires_at;
            let was = before.holds.iter().any(|hold| mine(&hold) && before.hold_end(hold) > now);
            if was && after.holds.iter().filter(mine).any(|hold| !covers(hold)) {
                found.push(format!("claims-stay-on-hold: {id} still names shard {shard}"));
            }
        }
    }
}

/// What a member reads, is its target, held by no other and on no hold, a round leaves to it (protocol 5).
fn own_is_kept(
    before: &Group,
    after: &Group,
    request: &HeartbeatRequest,
    response: &HeartbeatResponse,
    now: Timestamp,
) -> Option<String> {
    if response.status != Status::SyncMetadata {
        return None;
    }
    let id = &request.member_id;
    let (target, former) = (after.target(id), before.target(id));
    let taken = request.owned_shards.iter().map(|shard| shard.shard_index).find(|shard| {
        let held = before.live_members().any(|(other, member)| other != id && member.holds(*shard));
        let named = response.assignment.assigned_shards.iter().any(|one| one.shard_index == *shard);
        target.contains(*shard)
            && former.contains(*shard)
            && !held
            && !before.is_on_hold(*shard, now)
            && !named
    })?;
    Some(format!("own-is-kept: {} loses shard {taken}, which is its own", request.request_id))
}

/// An actor that found Redis to have lost writes expires nobody for a lease (protocol 4.1.1).
#[must_use]
pub(crate) fn expires_somebody(decision: &Decision) -> Option<String> {
    decision.transitions.iter().find_map(|transition| match transition {
        Transition::MemberGone { member_id, cause: Termination::LeaseExpired, .. } => {
            Some(format!("loss-expires-nobody: {member_id} expired"))
        }
        _ => None,
    })
}

/// Every pair of processes that believe in one shard at `at`: (shard, one, other, both are reading it).
#[must_use]
pub(crate) fn overlaps(processes: &[Process], at: i64) -> Vec<(u32, usize, usize, bool)> {
    let mut readers: Vec<(u32, usize, bool)> = Vec::new();
    let mut found = Vec::new();
    for (index, process) in processes.iter().enumerate() {
        for (shard, reading) in process.touches(at) {
            for (other_shard, other, other_reading) in &readers {
                if *other_shard == shard {
                    found.push((shard, *other, index, reading && *other_reading));
                }
            }
            readers.push((shard, index, reading));
        }
    }
    found
}

/// Whether the group has healed: stable, no round, and each shard read by the member whose target it is.
#[must_use]
pub(crate) fn has_healed(group: &Group, processes: &[Process], at: i64) -> bool {
    if group.state != GroupState::Stable || group.metadata_correction.is_some() {
        return false;
    }
    let mut readers: Vec<(u32, &str)> = Vec::new();
    for process in processes {
        readers.extend(process.touches(at).into_iter().map(|(shard, _)| (shard, process.member)));
    }
    readers.sort_unstable();
    let wanted: Vec<(u32, &str)> = group
        .read_set()
        .iter()
        .filter_map(|shard| {
            let (id, _) = group.targets.iter().find(|(_, target)| target.contains(shard))?;
            Some((shard, id.as_str()))
        })
        .collect();
    readers == wanted && wanted.len() == group.read_set().len()
}

/// Whether the counts tell of a round begun.
#[must_use]
pub(crate) fn begins_round(counts: &Counts) -> bool {
    counts.corrections_begun > 0
}
