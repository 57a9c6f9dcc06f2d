//! `GET …/assignments`: who should own what, who does, and what each missing piece waits for.

use std::collections::BTreeMap;

use rsc_core::{Correction, Group, Hold, HoldCause, Member, ShardSet};
use rsc_protocol::admin::GroupState;
use rsc_protocol::{RevokingState, Timestamp};
use serde::Serialize;

use super::members::readable;

/// The answer.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Assignments<'a> {
    stream_prefix: &'a str,
    consumer_group: &'a str,
    state: GroupState,
    group_epoch: u64,
    assignment_epoch: u64,
    metadata_version: u64,
    shard_count: u32,
    /// When the record was last written, by the store's clock.
    updated_at: Timestamp,
    target_assignment: &'a BTreeMap<String, ShardSet>,
    /// What each live member last reported to own.
    current_assignments: BTreeMap<&'a str, &'a ShardSet>,
    /// What each live member was allowed to read and has not given back.
    granted_assignments: BTreeMap<&'a str, ShardSet>,
    holds: Vec<HoldRow<'a>>,
    /// The correction round, if Redis lost writes and not everybody is back on what it still has.
    metadata_correction: Option<&'a Correction>,
    /// Shards that members have yet to give back.
    revoke_progress: Vec<RevokeRow<'a>>,
    /// Shards that the member of their target may not read yet.
    pending_shards: Vec<PendingRow<'a>>,
    /// Shards that no live member holds.
    unowned_shards: Vec<UnownedRow<'a>>,
    invariant_violations: Vec<ViolationRow>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct HoldRow<'a> {
    shard_index: u32,
    member_id: &'a str,
    cause: HoldCause,
    until: Timestamp,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RevokeRow<'a> {
    member_id: &'a str,
    shard_index: u32,
    /// `null`: the member has not answered about this shard yet.
    state: Option<RevokingState>,
    in_flight: Option<u64>,
    /// When the member is fenced.
    deadline: Option<Timestamp>,
}

/// What a shard waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
enum WaitsFor {
    /// A member that can be assigned shards: there is none.
    Member,
    /// Another member that has to give it back, or to expire.
    Holder,
    /// The end of a hold.
    Hold,
    /// The next heartbeat of the member of its target, which will be granted it.
    Heartbeat,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PendingRow<'a> {
    shard_index: u32,
    /// Whose target it is.
    member_id: &'a str,
    waits_for: WaitsFor,
    /// The holder, or the member that the hold is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    held_by: Option<&'a str>,
    /// When the wait ends at the latest, as far as it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    until: Option<Timestamp>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct UnownedRow<'a> {
    shard_index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_member_id: Option<&'a str>,
    waits_for: WaitsFor,
    #[serde(skip_serializing_if = "Option::is_none")]
    until: Option<Timestamp>,
}

#[derive(Serialize)]
struct ViolationRow {
    invariant: &'static str,
    detail: String,
}

impl<'a> Assignments<'a> {
    /// What `group` says about its shards.
    pub(super) fn of(group: &'a Group) -> Self {
        let view = View::of(group);
        Assignments {
            stream_prefix: group.key.stream_prefix(),
            consumer_group: group.key.consumer_group(),
            state: group.state,
            group_epoch: group.group_epoch,
            assignment_epoch: group.assignment_epoch,
            metadata_version: group.metadata_version,
            shard_count: group.shard_count,
            updated_at: group.updated_at,
            target_assignment: &group.targets,
            current_assignments: of_live(group, |member| &member.current),
            granted_assignments: of_live(group, |member| member.granted.keys().copied().collect()),
            holds: group.holds.iter().map(|hold| hold_row(group, hold)).collect(),
            metadata_correction: group.metadata_correction.as_ref(),
            revoke_progress: revoke_progress(group),
            pending_shards: view.pending(),
            unowned_shards: view.unowned(),
            invariant_violations: violations(group),
        }
    }
}

/// The group's shards, looked up by shard.
struct View<'a> {
    group: &'a Group,
    holders: BTreeMap<u32, &'a str>,
    targets: BTreeMap<u32, &'a str>,
    /// The hold of each shard that lasts longest.
    holds: BTreeMap<u32, &'a Hold>,
}

impl<'a> View<'a> {
    fn of(group: &'a Group) -> Self {
        let targets =
            group.targets.iter().flat_map(|(id, target)| target.iter().map(|shard| (shard, id.as_str())));
        let mut holds: BTreeMap<u32, &Hold> = BTreeMap::new();
        for hold in group.holds.iter().filter(|hold| group.hold_end(hold) > group.updated_at) {
            let longest = holds.entry(hold.shard_index).or_insert(hold);
            if group.hold_end(hold) > group.hold_end(longest) {
                *longest = hold;
            }
        }
        View { group, holders: group.holders(), targets: targets.collect(), holds }
    }

    fn pending(&self) -> Vec<PendingRow<'a>> {
        let of_member = |(id, target): (&'a String, &'a ShardSet)| {
            let readable =
                self.group.members.get(id).map(|member| readable(target, member)).unwrap_or_default();
            target.minus(&readable).iter().map(|shard| self.pending_row(shard, id)).collect::<Vec<_>>()
        };
        let mut rows: Vec<_> = self.group.targets.iter().flat_map(of_member).collect();
        rows.sort_unstable_by_key(|row| row.shard_index);
        rows
    }

    fn pending_row(&self, shard_index: u32, member_id: &'a str) -> PendingRow<'a> {
        let row =
            |waits_for, held_by, until| PendingRow { shard_index, member_id, waits_for, held_by, until };
        match (self.holders.get(&shard_index), self.holds.get(&shard_index)) {
            (Some(&holder), _) if holder != member_id => {
                let until = self.group.members.get(holder).and_then(|member| member.rebalance_deadline_at);
                row(WaitsFor::Holder, Some(holder), until)
            }
            (None, Some(hold)) => {
                row(WaitsFor::Hold, Some(hold.member_id.as_str()), Some(self.group.hold_end(hold)))
            }
            _ => row(WaitsFor::Heartbeat, None, None),
        }
    }

    fn unowned(&self) -> Vec<UnownedRow<'a>> {
        let free = self.group.read_set().to_set();
        let free = free.iter().filter(|shard| !self.holders.contains_key(shard));
        free.map(|shard_index| {
            let target_member_id = self.targets.get(&shard_index).copied();
            let hold = self.holds.get(&shard_index);
            UnownedRow {
                shard_index,
                target_member_id,
                waits_for: match (target_member_id, hold) {
                    (None, _) => WaitsFor::Member,
                    (Some(_), Some(_)) => WaitsFor::Hold,
                    (Some(_), None) => WaitsFor::Heartbeat,
                },
                until: hold.map(|hold| self.group.hold_end(hold)),
            }
        })
        .collect()
    }
}

fn of_live<'a, T>(group: &'a Group, what: impl Fn(&'a Member) -> T) -> BTreeMap<&'a str, T> {
    group.live_members().map(|(id, member)| (id.as_str(), what(member))).collect()
}

fn hold_row<'a>(group: &Group, hold: &'a Hold) -> HoldRow<'a> {
    HoldRow {
        shard_index: hold.shard_index,
        member_id: &hold.member_id,
        cause: hold.cause,
        until: group.hold_end(hold),
    }
}

fn revoke_progress(group: &Group) -> Vec<RevokeRow<'_>> {
    let mut rows = Vec::new();
    for (id, member) in group.live_members() {
        let mut draining = member.holding().minus(&group.target(id));
        draining.extend(member.revoking.keys().copied());
        for shard_index in draining.iter() {
            let reported = member.revoking.get(&shard_index);
            rows.push(RevokeRow {
                member_id: id,
                shard_index,
                state: reported.map(|revoking| revoking.state),
                in_flight: reported.map(|revoking| revoking.in_flight),
                deadline: member.rebalance_deadline_at,
            });
        }
    }
    rows
}

fn violations(group: &Group) -> Vec<ViolationRow> {
    let row = |violation: rsc_core::Violation| ViolationRow {
        invariant: violation.invariant,
        detail: violation.detail,
    };
    group.validate().into_iter().map(row).collect()
}
