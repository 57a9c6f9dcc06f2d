//! Coordinator processes come and go.

use crate::coordinator::Coordinator;
use crate::plan::{ModelFault, Planted};
use crate::world::{Event, World};

impl World {
    /// A coordinator process dies; what it was doing is lost.
    pub(crate) fn crash_coordinator(&mut self, index: usize) {
        self.lives += 1;
        let coordinator = &mut self.coordinators[index];
        coordinator.alive = false;
        coordinator.life = self.lives;
        coordinator.turn = None;
        coordinator.queue.clear();
        let takes = self.dice.between(1, self.timing.lease * 2);
        self.schedule(self.at + takes, Event::StartCoordinator { coordinator: index });
    }

    /// The first coordinator that lives dies, if another one is left.
    pub(crate) fn crash_server(&mut self) {
        let mut living = (0..self.coordinators.len()).filter(|index| self.coordinators[*index].alive);
        if let (Some(index), Some(_)) = (living.next(), living.next()) {
            self.tell(|_| format!("coordinator {index} crashes with it"));
            self.crash_coordinator(index);
        }
    }

    /// A new coordinator process starts in its place.
    pub(crate) fn start_coordinator(&mut self, index: usize) {
        if self.coordinators[index].alive {
            return;
        }
        self.lives += 1;
        self.tell(|_| format!("coordinator {index} starts"));
        self.coordinators[index] = Coordinator::new(self.lives, self.at, &self.timing);
        self.begin_looking(index);
        // A new actor loads its group at once.
        self.begin_turn(index);
    }

    /// The first look of a coordinator's supervisor.
    pub(crate) fn begin_looking(&mut self, index: usize) {
        let life = self.coordinators[index].life;
        self.coordinators[index].watch.sees_itself_only = self.plan.lacks(ModelFault::OnlyOwnCommitsSeen);
        self.schedule(self.at + self.timing.lease / 3, Event::Look { coordinator: index, life });
    }

    /// A coordinator stands still for so long.
    pub(crate) fn pause_coordinator(&mut self, index: usize, length: i64) {
        let until = self.at + length;
        let coordinator = &mut self.coordinators[index];
        coordinator.paused_until = coordinator.paused_until.max(until);
        coordinator.watch.stalled(length, until);
    }

    /// Whether the planted fault, if any, is one of the core.
    #[must_use]
    pub(crate) fn core_fault(&self) -> Option<rsc_core::fault::Fault> {
        match self.plan.planted {
            Some(Planted::Core(fault)) => Some(fault),
            _ => None,
        }
    }
}
