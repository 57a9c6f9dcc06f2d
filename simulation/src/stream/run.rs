//! One run from its first event to its end.

use std::collections::BTreeMap;

use rsc_protocol::admin::GroupState;
use serde::{Deserialize, Serialize};

use super::plan::{StreamPlan, StreamPlanted};
use super::world::{GROUPS, StreamWorld};
use crate::plan::FaultMix;

/// What happened in runs, counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// Decisions of the groups' actors.
    pub decisions: u64,
    /// Changes of the count that were begun.
    pub scales: u64,
    /// Requests of operators that were refused.
    pub refused: u64,
    /// Migrations finished, by group.
    pub finished: u64,
    /// Of these, on the way back.
    pub rolled_back: u64,
    /// Keys deleted.
    pub deletions: u64,
    /// Records that were published.
    pub published: u64,
    /// Records that producers could not publish.
    pub not_published: u64,
    /// Crashes of coordinators.
    pub crashes: u64,
    /// Losses of Redis.
    pub losses: u64,
    /// Records left unread as documented: every record of the activation was lost.
    pub forgotten: u64,
}

impl Counted {
    /// Adds what happened in another run.
    pub fn add(&mut self, other: &Counted) {
        self.decisions += other.decisions;
        self.scales += other.scales;
        self.refused += other.refused;
        self.finished += other.finished;
        self.rolled_back += other.rolled_back;
        self.deletions += other.deletions;
        self.published += other.published;
        self.not_published += other.not_published;
        self.crashes += other.crashes;
        self.losses += other.losses;
        self.forgotten += other.forgotten;
    }
}

/// What came of a run.
#[derive(Clone, Debug)]
pub struct StreamOutcome {
    /// What was wrong, first.
    pub violation: Option<String>,
    /// What happened, if it was asked for.
    pub trace: Vec<String>,
    /// Simulated milliseconds.
    pub simulated: i64,
    /// From the last fault until everything was read and nothing was under way, in simulated milliseconds.
    pub healing: i64,
    /// What happened, counted.
    pub counts: Counted,
}

/// Runs `plan` to its end, or to the first violation.
#[must_use]
pub fn run_stream(plan: StreamPlan, with_trace: bool) -> StreamOutcome {
    let mut world = StreamWorld::new(plan, with_trace);
    let planted = match plan.planted {
        Some(StreamPlanted::Core(fault)) => Some(fault),
        _ => None,
    };
    rsc_core::fault::plant(planted);
    let calm_at = world.shape.timing.faulty;
    advance(&mut world, calm_at);
    let mut healing = 0;
    if world.violation.is_none() {
        world.at = calm_at;
        let runs_at = world.calm_down();
        healing = heal(&mut world, runs_at);
    }
    rsc_core::fault::plant(None);
    world.counts.losses = u64::try_from(world.losses).unwrap_or(0);
    world.counts.published = u64::try_from(world.ledger.len()).unwrap_or(0);
    StreamOutcome {
        violation: world.violation,
        trace: world.trace.unwrap_or_default(),
        simulated: world.at,
        healing,
        counts: world.counts,
    }
}

/// Lets everything happen that happens before `until`.
fn advance(world: &mut StreamWorld, until: i64) {
    while world.violation.is_none() && world.next_at().is_some_and(|at| at < until) {
        world.step();
    }
}

/// Within its bound every migration ends, and every record is read.
fn heal(world: &mut StreamWorld, began: i64) -> i64 {
    let shape = &world.shape;
    let late = if world.plan.faults == FaultMix::None { 0 } else { 2 * shape.timing.lease };
    let margin = i64::try_from(shape.timing.core.publish_margin_ms).unwrap_or(0);
    // Two waits for the producers' caches (a change, and what brings a group that lost it to the same count), two
    // healings of a group, and what an operator asked for as the earliest end.
    let bound =
        began + late + 2 * (shape.cache + margin) + 2 * shape.timing.healing_bound() + 2 * shape.timing.lease;
    let step = shape.timing.heartbeat / 2;
    while world.violation.is_none() {
        let until = world.at + step;
        advance(world, until);
        world.at = until;
        let starts = staff(world);
        world.look_after_streams();
        let missing = missing(world);
        if missing.is_none() && !starts && world.at >= began + late {
            break;
        }
        if world.at >= bound {
            let missing = missing.unwrap_or_default();
            world.tell(|world| {
                let groups: Vec<String> =
                    world.stored().iter().map(|stored| format!("{:#?}", stored.group)).collect();
                groups.join("\n")
            });
            world.violate(format!("{missing} {} ms after the last fault", bound - began));
        }
    }
    if world.violation.is_none() {
        world.counts.forgotten = u64::try_from(world.ledger.open().count()).unwrap_or(0);
    }
    world.at - began
}

/// Somebody of each group stays.
fn staff(world: &mut StreamWorld) -> bool {
    let mut starts = false;
    for group in 0..GROUPS.len() {
        let stays = (0..world.processes.len()).any(|index| {
            let process = &world.processes[index];
            world.readers[index].group == group && !process.is_over() && !process.is_leaving
        });
        if !stays {
            starts |= world.start_missing_member(group);
        }
    }
    starts
}

/// What is still to be done, if anything: the invariant that would not hold, and where.
fn missing(world: &StreamWorld) -> Option<String> {
    let stored = world.stored();
    let groups: Vec<rsc_core::Group> = stored.iter().map(|stored| stored.group.clone()).collect();
    for group in &groups {
        if let Some(id) = &group.active_resharding_id {
            return Some(format!("migrations-end: {} is not over in {}", id, group.key));
        }
        if group.provisioning_pending {
            return Some(format!("groups-are-admitted: {} is not", group.key));
        }
        if group.shard_count != groups[0].shard_count {
            return Some(format!(
                "counts-agree: {} has {}, {} has {}",
                group.key, group.shard_count, groups[0].key, groups[0].shard_count
            ));
        }
    }
    let now = world.groups[0].redis.time(world.at);
    if !world.view_next(&groups, now, &BTreeMap::new()).has_settled() {
        return Some("migrations-end: something is left to be done".to_owned());
    }
    for group in &groups {
        if group.state != GroupState::Stable {
            return Some(format!("converges: {} is {:?}", group.key, group.state));
        }
    }
    let count = groups.first().map_or(0, |group| group.shard_count);
    for shard in 0..count {
        for group in 0..GROUPS.len() {
            if world.groups[group].is_admitted && !world.streams.has_group(shard, group) {
                return Some(format!("shards-exist: {} has no group on shard {shard}", world.name(group)));
            }
        }
    }
    let lost = world.ledger.open().find(|(_, record, _)| {
        let is_documented = record.shard >= count && world.ledger.is_forgotten(record);
        !is_documented
    });
    lost.map(|(id, record, groups)| {
        let groups: Vec<&str> = groups.into_iter().map(|group| world.name(group)).collect();
        format!(
            "record-lost: record {id} of shard {} (by producer {} at {}) is not read by {groups:?}",
            record.shard, record.producer, record.added_at
        )
    })
}
