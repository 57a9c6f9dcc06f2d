//! What a member may claim, and what accepting its report does (protocol 4.1 rules 9 and 10).

use std::collections::BTreeMap;

use rsc_protocol::HeartbeatRequest;
use rsc_protocol::admin::MemberState;

use crate::decide::Answer;
use crate::group::HoldCause;
use crate::member::{Member, Revoking, Termination};
use crate::shards::ShardSet;
use crate::turn::{Transition, Turn, ranges};
use crate::{correction, handover, holds, membership};

/// What a heartbeat reports, as sets.
struct Report {
    owned: ShardSet,
    /// Drains that are not finished.
    draining: BTreeMap<u32, Revoking>,
}

/// Every shard a report names as owned or not yet drained.
pub(crate) fn claims(request: &HeartbeatRequest) -> ShardSet {
    Report::of(request).claims().collect()
}

impl Report {
    fn of(request: &HeartbeatRequest) -> Self {
        Report {
            owned: request.owned_shards.iter().map(|shard| shard.shard_index).collect(),
            draining: request
                .revoking_shards
                .iter()
                .filter(|report| !report.is_finished() && !planted!(DrainingCountsAsReleased))
                .map(|report| {
                    let revoking = Revoking { state: report.state, in_flight: report.in_flight };
                    (report.shard.shard_index, revoking)
                })
                .collect(),
        }
    }

    fn claims(&self) -> impl Iterator<Item = u32> + '_ {
        self.owned.iter().chain(self.draining.keys().copied())
    }

    fn names(&self, shard: u32) -> bool {
        self.owned.contains(shard) || self.draining.contains_key(&shard)
    }
}

/// Rules 9 and 10 for a heartbeat that passed every check of identity and epoch.
pub(crate) fn check_and_accept(turn: &mut Turn<'_>, request: &HeartbeatRequest) -> Answer {
    let mut report = Report::of(request);
    let illegal = illegal_claims(turn, request, &report);
    if !illegal.is_empty() {
        return fence_for_claims(turn, request, &report, &illegal);
    }
    membership::hear(turn, request);
    if let Some(member) = turn.member(&request.member_id)
        && member.state == MemberState::Starting
        && let Some(member) = turn.change(&request.member_id)
    {
        member.state = MemberState::Active;
    }
    cut_to_what_redis_gives(turn, request, &mut report);
    accept(turn, request, report);
    membership::depart_if_done(turn, &request.member_id);
    Answer::View
}

/// Rule 7's way of accepting: reports are cut to what the member holds; a late repetition of shards already
/// given back must not make a holding anew.
pub(crate) fn accept_cut(turn: &mut Turn<'_>, request: &HeartbeatRequest) {
    let Some(member) = turn.member(&request.member_id) else {
        return;
    };
    let mut report = Report::of(request);
    if !planted!(LeaveNotCut) {
        report.owned = report.owned.iter().filter(|shard| member.holds(*shard)).collect();
        report.draining.retain(|shard, _| member.holds(*shard));
    }
    membership::hear(turn, request);
    accept(turn, request, report);
}

/// Claims outside of holding(m) ∪ what could be granted to m now.
fn illegal_claims(turn: &Turn<'_>, request: &HeartbeatRequest, report: &Report) -> ShardSet {
    let id = &request.member_id;
    let Some(member) = turn.member(id) else {
        return ShardSet::new();
    };
    let in_round = correction::is_on(turn);
    let own_holds = if in_round { correction::own_holds(turn, id) } else { ShardSet::new() };
    report
        .claims()
        .filter(|shard| {
            let held_for_it =
                in_round && (own_holds.contains(*shard) || correction::is_nobodys_target(turn, id, *shard));
            !member.holds(*shard) && !held_for_it && !handover::is_grantable(turn, id, *shard)
        })
        .collect()
}

/// In a round a report is first cut to what the member holds or nobody does; the rest stays on its hold
/// alone, and a hold whose shard the report no longer names is over (rule 10, protocol 4.3).
fn cut_to_what_redis_gives(turn: &mut Turn<'_>, request: &HeartbeatRequest, report: &mut Report) {
    if !correction::is_on(turn) {
        return;
    }
    let id = &request.member_id;
    let claims: ShardSet = report.claims().collect();
    let given: ShardSet = claims
        .iter()
        .filter(|shard| {
            turn.member(id).is_some_and(|member| member.holds(*shard))
                || correction::is_nobodys_target(turn, id, *shard)
        })
        .collect();
    if !planted!(ClaimsNotCutInARound) {
        report.owned = report.owned.iter().filter(|shard| given.contains(*shard)).collect();
        report.draining.retain(|shard, _| given.contains(*shard));
    }
    let lost = claims.minus(&given);
    correction::lift_own_holds(turn, id, &lost);
    if turn.member(id).is_some_and(|member| member.live.lost_claims != lost)
        && let Some(member) = turn.touch(id)
    {
        member.live.lost_claims = lost;
    }
}

fn fence_for_claims(
    turn: &mut Turn<'_>,
    request: &HeartbeatRequest,
    report: &Report,
    illegal: &ShardSet,
) -> Answer {
    let id = &request.member_id;
    let read_set = turn.group.read_set();
    let mut suspect = turn.member(id).map(Member::holding).unwrap_or_default();
    suspect.extend(report.claims().filter(|shard| read_set.contains(*shard)));
    let sequence = request.instance_id.as_ref().and(request.sequence);
    holds::set(turn, id, &suspect, HoldCause::OwnershipViolation, sequence);
    if let Some(member) = turn.touch(id) {
        member.live.sequence = member.live.sequence.max(sequence);
    }
    membership::terminate(turn, id, MemberState::Fenced, Termination::OwnershipViolation);
    turn.counts.ownership_violations += 1;
    Answer::fenced(format!(
        "shards {} were reported but neither held nor assignable: stop reading and rejoin with epoch 0",
        ranges(illegal)
    ))
}

/// Rule 10: current := owned, revoking := unfinished drains; a shard in neither is released, except a grant
/// that is newer than the version this report speaks from.
fn accept(turn: &mut Turn<'_>, request: &HeartbeatRequest, report: Report) {
    let id = &request.member_id;
    let (progress, dropped) = progress_rows(request);
    turn.counts.progress_rows_dropped += dropped;
    let Some(member) = turn.member(id) else { return };
    let held_before = member.holding();
    let granted: BTreeMap<_, _> = member
        .granted
        .iter()
        .filter(|(shard, grant)| {
            let is_newer =
                grant.metadata_version > request.metadata_version && !planted!(OldReportReleasesNewGrant);
            report.names(**shard) || is_newer
        })
        .map(|(shard, grant)| (*shard, *grant))
        .collect();
    let reports_ownership = !report.owned.is_empty() || !report.draining.is_empty();
    let differs = member.current != report.owned
        || member.revoking != report.draining
        || member.granted.len() != granted.len()
        || (reports_ownership && !member.reported_ownership);
    let member = if differs { turn.change(id) } else { turn.touch(id) };
    let Some(member) = member else { return };
    member.live.shard_progress = progress;
    member.reported_ownership |= reports_ownership;
    member.current = report.owned;
    member.revoking = report.draining;
    member.granted = granted;
    let released = held_before.minus(&member.holding());
    if !released.is_empty() {
        turn.move_version();
        turn.counts.releases += u64::try_from(released.len()).unwrap_or(u64::MAX);
        turn.note(Transition::Released { member_id: id.clone(), shards: ranges(&released) });
    }
}

/// Progress rows of the shards this very report names; others are dropped and counted (rule 9).
fn progress_rows(request: &HeartbeatRequest) -> (Vec<rsc_protocol::ShardProgress>, u64) {
    let named: ShardSet = request
        .owned_shards
        .iter()
        .map(|shard| shard.shard_index)
        .chain(request.revoking_shards.iter().map(|report| report.shard.shard_index))
        .collect();
    let mut seen = ShardSet::new();
    let rows: Vec<_> = request
        .shard_progress
        .iter()
        .filter(|row| named.contains(row.shard.shard_index) && seen.insert(row.shard.shard_index))
        .cloned()
        .collect();
    let dropped = request.shard_progress.len() - rows.len();
    (rows, u64::try_from(dropped).unwrap_or(u64::MAX))
}
