//! One run from its first event to its end.

use crate::check::has_healed;
use crate::plan::{FaultMix, Plan};
use crate::world::World;

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What was wrong, first.
    pub violation: Option<String>,
    /// What happened, if it was asked for.
    pub trace: Vec<String>,
    /// Simulated milliseconds.
    pub simulated: i64,
    /// From the last fault until the group had healed, in simulated milliseconds.
    pub healing: i64,
    /// Decisions of coordinators.
    pub decided: u64,
    /// Losses of Redis.
    pub losses: usize,
    /// Overlaps of the documented kind.
    pub excused: u64,
}

/// Runs `plan` to its end, or to the first violation.
#[must_use]
pub fn run(plan: Plan, with_trace: bool) -> Outcome {
    let mut world = World::new(plan, with_trace);
    rsc_core::fault::plant(world.core_fault());
    let calm_at = world.timing.faulty;
    advance(&mut world, calm_at);
    let mut healing = 0;
    if world.violation.is_none() {
        world.at = calm_at;
        let runs_at = world.calm_down();
        healing = heal(&mut world, runs_at);
    }
    if world.violation.is_none() {
        stay_healed(&mut world);
    }
    rsc_core::fault::plant(None);
    Outcome {
        violation: world.violation,
        trace: world.trace.unwrap_or_default(),
        simulated: world.at,
        healing,
        decided: world.decided,
        losses: world.losses.len(),
        excused: world.excused,
    }
}

/// Lets everything happen that happens before `until`.
fn advance(world: &mut World, until: i64) {
    while world.violation.is_none() && world.next_at().is_some_and(|at| at < until) {
        world.step();
    }
}

/// Within its bound the group becomes stable with every shard read.
fn heal(world: &mut World, began: i64) -> i64 {
    // The last messages of the faulty time arrive two leases later.
    let late = if world.plan.faults == FaultMix::None { 0 } else { 2 * world.timing.lease };
    // Where Redis time fell back behind the record, nothing is due before it has caught up.
    let behind = world
        .redis
        .stored
        .as_ref()
        .map_or(0, |stored| stored.group.updated_at.as_millis() - world.redis.time(world.at));
    let bound = began + late + behind.max(0) + world.timing.healing_bound();
    let step = world.timing.heartbeat / 2;
    while world.violation.is_none() {
        let until = world.at + step;
        advance(world, until);
        world.at = until;
        let starts = world.staff();
        let healed =
            world.redis.stored.as_ref().is_some_and(|it| has_healed(&it.group, &world.processes, world.at));
        if healed && !starts && world.at >= began + late {
            break;
        }
        if world.at >= bound {
            let group = world.redis.stored.as_ref().map(|stored| stored.group.clone());
            world.tell(|_| format!("{group:#?}"));
            world.violate(format!("converges: not healed {} ms after the last fault", bound - began));
        }
    }
    world.at - began
}

/// A group that has healed stays so: steady heartbeats move nothing (protocol 4.1).
fn stay_healed(world: &mut World) {
    // What a round left in somebody's hands, or an answer of it left out, is granted anew by the next heartbeat.
    let settled = world.at + 2 * world.timing.heartbeat + world.timing.request_timeout;
    advance(world, settled);
    world.at = settled;
    let version = world.redis.stored.as_ref().map(|stored| stored.group.metadata_version);
    let until = world.at + world.timing.lease;
    advance(world, until);
    let stored = world.redis.stored.as_ref().map(|stored| stored.group.metadata_version);
    if world.violation.is_none() && stored != version {
        world.violate(format!("steady-moves-nothing: {version:?} became {stored:?} without a cause"));
    }
}
