//! What goes wrong, and when; and that it ends.

use std::collections::BTreeSet;

use super::coordinator::Coordinator;
use super::world::{Event, GROUPS, MEMBERS, StreamWorld};

#[derive(Clone, Copy, Debug)]
enum Disruption {
    MemberStarts,
    MemberLeaves,
    MemberCutOff,
    MemberCrashes,
    MemberStandsStill,
    EverybodyOfAGroupLeaves,
    CoordinatorCrashes,
    CoordinatorStandsStill,
    ProducerStandsStill,
    ProducerCutOff,
    PoisonDeleted,
    RecordsDeleted,
    StreamTrimmed,
    RedisGroupDestroyed,
    OneGroupRolledBack,
    AllGroupsRolledBack,
    KeyLost,
}

use Disruption as D;

impl StreamWorld {
    /// One thing goes wrong; the next one follows.
    pub(crate) fn disrupt(&mut self) {
        if !self.is_faulty {
            return;
        }
        let faults = self.plan.faults;
        let when = |is_on: bool, weight: u32| if is_on { weight } else { 0 };
        let choices = [
            (5, D::MemberStarts),
            (3, D::MemberLeaves),
            (1, D::EverybodyOfAGroupLeaves),
            (3, D::RecordsDeleted),
            (1, D::StreamTrimmed),
            (1, D::RedisGroupDestroyed),
            (when(faults.network(), 3), D::MemberCutOff),
            (when(faults.network(), 4), D::ProducerCutOff),
            (when(faults.crash(), 2), D::PoisonDeleted),
            (when(faults.crash(), 4), D::MemberCrashes),
            (when(faults.crash(), 3), D::MemberStandsStill),
            (when(faults.crash(), 3), D::CoordinatorCrashes),
            (when(faults.crash(), 3), D::CoordinatorStandsStill),
            (when(faults.crash(), 2), D::ProducerStandsStill),
            (when(self.shape.loses, 5), D::OneGroupRolledBack),
            (when(self.shape.loses, 3), D::AllGroupsRolledBack),
            (when(self.shape.loses, 2), D::KeyLost),
        ];
        if let Some(disruption) = self.dice.weighted(&choices) {
            self.inflict(disruption);
        }
        let pause = self.dice.between(1, self.shape.timing.lease);
        self.schedule(self.at + pause, Event::Disrupt);
    }

    /// A process that runs, if any.
    fn someone(&mut self) -> Option<usize> {
        let running: Vec<usize> =
            (0..self.processes.len()).filter(|index| !self.processes[*index].is_over()).collect();
        if running.is_empty() { None } else { Some(running[self.dice.below(running.len())]) }
    }

    fn inflict(&mut self, disruption: Disruption) {
        let lease = self.shape.timing.lease;
        match disruption {
            D::MemberStarts => {
                let group = self.dice.below(GROUPS.len());
                self.start_missing_member(group);
            }
            D::EverybodyOfAGroupLeaves => {
                let group = self.dice.below(GROUPS.len());
                for index in 0..self.processes.len() {
                    if self.readers[index].group == group && !self.processes[index].is_over() {
                        self.leave(index);
                    }
                }
            }
            D::CoordinatorCrashes => {
                let index = self.dice.below(self.coordinators.len());
                if self.coordinators[index].alive {
                    self.tell(|_| format!("coordinator {index} crashes"));
                    self.crash_coordinator(index);
                }
            }
            D::CoordinatorStandsStill => {
                let index = self.dice.below(self.coordinators.len());
                let length = self.dice.between(1, 2 * lease);
                self.tell(|_| format!("coordinator {index} stands still for {length}"));
                self.pause_coordinator(index, length);
            }
            D::ProducerStandsStill => {
                let index = self.dice.below(self.producers.len());
                let length = self.dice.between(1, 3 * lease);
                self.tell(|_| format!("producer {index} stands still for {length}"));
                self.producers[index].paused_until = self.at + length;
            }
            D::ProducerCutOff => {
                let index = self.dice.below(self.producers.len());
                self.cut_producer_off(index);
            }
            D::PoisonDeleted => {
                if let Some(index) = self.someone() {
                    let in_hand = self.readers[index].in_hand.clone();
                    self.inflict_on(index, D::MemberCrashes);
                    self.tell(|_| format!("what it had in hand is deleted: {in_hand:?}"));
                    for (shard, id) in
                        in_hand.iter().flat_map(|(shard, ids)| ids.iter().map(|id| (*shard, *id)))
                    {
                        self.streams.delete(shard, id);
                        self.ledger.deleted(id);
                    }
                }
            }
            D::RecordsDeleted => self.delete_records(),
            D::StreamTrimmed | D::RedisGroupDestroyed => self.touch_a_stream(disruption),
            D::OneGroupRolledBack => {
                let group = self.dice.below(GROUPS.len());
                let writes = if self.dice.chance(0.6) { 9 } else { 80 };
                let writes = self.dice.between(1, writes);
                self.lose(|world| world.roll_back(group, usize::try_from(writes).unwrap_or(1)));
            }
            D::AllGroupsRolledBack => {
                let ago = if self.dice.chance(0.7) { lease / 2 } else { 4 * lease };
                let since = self.at - self.dice.between(1, ago);
                self.lose(|world| {
                    for group in 0..GROUPS.len() {
                        let record = &world.groups[group];
                        let writes = record.replaced_at.iter().filter(|at| **at >= since).count();
                        world.roll_back(group, writes);
                    }
                });
                if self.dice.chance(0.5) {
                    self.lock = None;
                }
            }
            D::KeyLost => {
                let group = self.dice.below(GROUPS.len());
                self.lose(|world| world.lose_key(group));
            }
            _ => {
                if let Some(index) = self.someone() {
                    self.inflict_on(index, disruption);
                }
            }
        }
    }

    /// A count has just changed: now and then those who were told the former one hear no more for a while.
    pub(crate) fn cut_off_who_was_told(&mut self, group: usize) {
        if self.plan.faults.network() && self.is_faulty && self.dice.chance(0.4) {
            for index in 0..self.producers.len() {
                if self.producers[index].group == group {
                    self.cut_producer_off(index);
                }
            }
        }
    }

    /// No coordinator is reached any more.
    fn cut_producer_off(&mut self, index: usize) {
        if self.is_faulty {
            let length = self.dice.between(self.shape.cache / 2, 3 * self.shape.cache);
            self.tell(|_| format!("producer {index} is cut off for {length}"));
            self.producers[index].cut_off_until = self.at + length;
        }
    }

    fn leave(&mut self, index: usize) {
        self.tell(|_| format!("process {index} wants to leave"));
        self.processes[index].is_leaving = true;
        let wishes = self.processes[index].leave(self.at);
        self.carry_out(index, wishes);
    }

    fn inflict_on(&mut self, index: usize, disruption: Disruption) {
        let (at, lease) = (self.at, self.shape.timing.lease);
        match disruption {
            D::MemberLeaves => self.leave(index),
            D::MemberCutOff => {
                let length = self.dice.between(1, 3 * lease);
                self.tell(|_| format!("process {index} is cut off for {length}"));
                self.processes[index].cut_off_until = at + length;
            }
            D::MemberStandsStill => {
                let length = self.dice.between(1, 3 * lease);
                self.tell(|_| format!("process {index} stands still for {length}"));
                self.processes[index].paused_until = at + length;
            }
            _ => {
                self.tell(|_| format!("process {index} crashes"));
                self.processes[index].alive = false;
                let group = self.readers[index].group;
                let member = MEMBERS.iter().position(|one| *one == self.processes[index].member).unwrap_or(0);
                let takes = self.dice.between(0, lease);
                if self.dice.chance(0.6) {
                    self.schedule(at + takes, Event::StartMember { group, member });
                }
            }
        }
    }

    /// `true` if anybody was started.
    pub(crate) fn start_missing_member(&mut self, group: usize) -> bool {
        let runs = |world: &Self, member: &str| {
            (0..world.processes.len()).any(|index| {
                let process = &world.processes[index];
                world.readers[index].group == group && process.member == member && !process.is_over()
            })
        };
        let missing: Vec<usize> = (0..MEMBERS.len()).filter(|member| !runs(self, MEMBERS[*member])).collect();
        if missing.is_empty() || !self.groups[group].exists {
            return false;
        }
        let member = missing[self.dice.below(missing.len())];
        self.schedule(self.at, Event::StartMember { group, member });
        true
    }

    /// Somebody deletes records, delivered or not.
    fn delete_records(&mut self) {
        let shards: Vec<u32> = self.streams.keys.keys().copied().collect();
        if shards.is_empty() {
            return;
        }
        let shard = shards[self.dice.below(shards.len())];
        let pending = |stream: &super::streams::Stream| {
            let ids = stream.groups.values().flat_map(|cursor| cursor.pending.keys().copied());
            ids.collect::<BTreeSet<u64>>()
        };
        let Some(stream) = self.streams.keys.get(&shard) else { return };
        // The newest ones, which nobody may have read; or those that are being worked on.
        let ids: Vec<u64> = if self.dice.chance(0.5) {
            stream.records.iter().rev().take(3).copied().collect()
        } else {
            pending(stream).into_iter().filter(|id| stream.records.contains(id)).collect()
        };
        self.tell(|_| format!("records {ids:?} of shard {shard} are deleted"));
        for id in ids {
            self.streams.delete(shard, id);
            self.ledger.deleted(id);
        }
    }

    fn touch_a_stream(&mut self, disruption: Disruption) {
        let shards: Vec<u32> = self.streams.keys.keys().copied().collect();
        if shards.is_empty() {
            return;
        }
        let shard = shards[self.dice.below(shards.len())];
        if matches!(disruption, D::StreamTrimmed) {
            let Some(stream) = self.streams.keys.get(&shard) else { return };
            let keep = self.dice.below(4);
            let ids: Vec<u64> = stream.records.iter().rev().skip(keep).copied().collect();
            self.tell(|_| format!("shard {shard} is trimmed to {keep} records"));
            for id in ids {
                self.streams.delete(shard, id);
                self.ledger.deleted(id);
            }
            return;
        }
        // Only where it is provisioned again: on a shard that is going away.
        let stored = self.stored();
        let drains = stored.iter().all(|stored| {
            let running = stored.group.active_migration();
            shard >= stored.group.shard_count
                && running.is_some_and(|running| running.draining().contains(shard))
        });
        let group = self.dice.below(GROUPS.len());
        if drains && self.streams.has_group(shard, group) {
            self.tell(|world| format!("somebody destroys group {} of shard {shard}", world.name(group)));
            if let Some(stream) = self.streams.keys.get_mut(&shard) {
                stream.groups.remove(&group);
            }
            self.destroyed.push((shard, group));
        }
    }

    /// A coordinator process dies; what it was doing is lost.
    pub(crate) fn crash_coordinator(&mut self, index: usize) {
        self.lives += 1;
        let mut dead = Coordinator::new(self.lives, self.at, &self.shape.timing);
        dead.alive = false;
        self.coordinators[index] = dead;
        self.counts.crashes += 1;
        let takes = self.dice.between(1, self.shape.timing.lease * 2);
        self.schedule(self.at + takes, Event::StartCoordinator { coordinator: index });
    }

    /// A new coordinator process starts in its place.
    pub(crate) fn start_coordinator(&mut self, index: usize) {
        if self.coordinators[index].alive {
            return;
        }
        self.lives += 1;
        self.tell(|_| format!("coordinator {index} starts"));
        self.coordinators[index] = Coordinator::new(self.lives, self.at, &self.shape.timing);
        for group in 0..GROUPS.len() {
            if self.groups[group].exists {
                self.begin_turn(index, group);
            }
        }
        self.schedule_drive(index, 1);
    }

    /// A coordinator stands still for so long.
    pub(crate) fn pause_coordinator(&mut self, index: usize, length: i64) {
        let until = self.at + length;
        let coordinator = &mut self.coordinators[index];
        coordinator.paused_until = coordinator.paused_until.max(until);
        coordinator.actors.iter_mut().for_each(|actor| actor.watch.stalled(length, until));
    }

    /// The faults stop, and so does publishing. Returns when the last one that stands still runs again.
    pub(crate) fn calm_down(&mut self) -> i64 {
        self.is_faulty = false;
        self.forget_starts();
        self.tell(|_| "the faults stop".to_owned());
        for index in 0..self.coordinators.len() {
            self.start_coordinator(index);
        }
        for process in &mut self.processes {
            process.cut_off_until = 0;
            process.never_finishes = false;
        }
        for group in 0..GROUPS.len() {
            self.restore(group);
            for member in MEMBERS {
                let mut running: Vec<usize> = (0..self.processes.len())
                    .filter(|index| {
                        let process = &self.processes[*index];
                        self.readers[*index].group == group && process.member == member && !process.is_over()
                    })
                    .collect();
                running.pop();
                running.into_iter().for_each(|index| self.processes[index].alive = false);
            }
        }
        let running = self.processes.iter().filter(|process| !process.is_over());
        let of_processes = running.map(|process| process.paused_until);
        let of_coordinators = self.coordinators.iter().map(|coordinator| coordinator.paused_until);
        of_processes.chain(of_coordinators).max().unwrap_or(0).max(self.at)
    }

    /// Operators look after what nobody else does: keys that were deleted although no record knows it any more, and
    /// Redis groups that somebody destroyed on a shard which was rolled back into the count.
    pub(crate) fn look_after_streams(&mut self) {
        let all = |shard: &u32| (0..GROUPS.len()).map(|group| (*shard, group)).collect::<Vec<_>>();
        let open: Vec<(u32, usize)> =
            self.undone.iter().flat_map(all).chain(self.destroyed.iter().copied()).collect();
        for (shard, group) in open {
            let stored = self.groups[group].redis.stored.as_ref();
            if stored.is_some_and(|stored| shard < stored.group.shard_count) {
                self.streams.create_group(shard, group);
            }
        }
    }
}
