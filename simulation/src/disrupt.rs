//! What goes wrong, and when; and that it ends.

use std::rc::Rc;

use crate::check::{Jump, Loss};
use crate::process::Kind;
use crate::redis::Snapshot;
use crate::world::{Event, MEMBERS, World};

#[derive(Clone, Copy, Debug)]
enum Disruption {
    MemberStarts,
    MemberLeaves,
    MemberCutOff,
    MemberCrashes,
    MemberRestarts,
    MemberReplaced,
    MemberStandsStill,
    SecondProcess,
    CoordinatorCrashes,
    CoordinatorStandsStill,
    RollBack,
    OldDump,
    KeyLost,
    JumpForward,
    SmallJump,
    JumpBackward,
}

use Disruption as D;

impl World {
    /// One thing goes wrong; the next one follows.
    pub(crate) fn disrupt(&mut self) {
        if !self.is_faulty {
            return;
        }
        let faults = self.plan.faults;
        let when = |is_on: bool, weight: u32| if is_on { weight } else { 0 };
        let choices = [
            (4, D::MemberStarts),
            (3, D::MemberLeaves),
            (when(faults.network(), 3), D::MemberCutOff),
            (when(faults.crash(), 2), D::MemberCrashes),
            (when(faults.crash(), 5), D::MemberRestarts),
            (when(faults.crash(), 3), D::MemberReplaced),
            (when(faults.crash(), 3), D::MemberStandsStill),
            (when(faults.crash(), 3), D::SecondProcess),
            (when(faults.crash(), 3), D::CoordinatorCrashes),
            (when(faults.crash(), 3), D::CoordinatorStandsStill),
            (when(faults.rollback(), 9), D::RollBack),
            (when(faults.rollback(), 1), D::OldDump),
            (when(faults.rollback(), 2), D::KeyLost),
            (when(faults.rollback(), 1), D::JumpForward),
            (when(faults.rollback(), 4), D::SmallJump),
            (when(faults.rollback(), 1), D::JumpBackward),
        ];
        if let Some(disruption) = self.dice.weighted(&choices) {
            self.inflict(disruption);
        }
        let pause = self.dice.between(1, self.timing.lease);
        self.schedule(self.at + pause, Event::Disrupt);
    }

    /// A process that runs, if any.
    fn someone(&mut self) -> Option<usize> {
        let running: Vec<usize> =
            (0..self.processes.len()).filter(|index| !self.processes[*index].is_over()).collect();
        if running.is_empty() { None } else { Some(running[self.dice.below(running.len())]) }
    }

    fn inflict(&mut self, disruption: Disruption) {
        match disruption {
            D::MemberStarts => {
                self.start_missing_member();
            }
            D::SecondProcess => {
                let running = self.processes.iter().filter(|process| !process.is_over()).count();
                if running < 6 {
                    let (member, kind) = (self.dice.below(MEMBERS.len()), self.draw_kind());
                    self.schedule(self.at, Event::StartProcess { member, kind });
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
                let length = self.dice.between(1, 2 * self.timing.lease);
                self.tell(|_| format!("coordinator {index} stands still for {length}"));
                self.pause_coordinator(index, length);
            }
            D::RollBack => self.roll_back(),
            D::OldDump | D::KeyLost => self.lose_key(matches!(disruption, D::OldDump)),
            D::JumpForward | D::JumpBackward | D::SmallJump => self.jump(disruption),
            _ => {
                if let Some(index) = self.someone() {
                    self.inflict_on(index, disruption);
                }
            }
        }
    }

    fn inflict_on(&mut self, index: usize, disruption: Disruption) {
        let at = self.at;
        match disruption {
            D::MemberLeaves => {
                self.tell(|_| format!("process {index} wants to leave"));
                self.processes[index].is_leaving = true;
                let wishes = self.processes[index].leave(at);
                self.carry_out(index, wishes);
            }
            D::MemberReplaced => {
                // A rolling update: the successor joins while its predecessor still drains.
                let id = self.processes[index].member;
                let member = MEMBERS.iter().position(|one| *one == id).unwrap_or(0);
                let kind = if self.dice.chance(0.7) { self.processes[index].kind } else { self.draw_kind() };
                let takes = self.dice.between(0, 2 * self.timing.heartbeat);
                self.schedule(at + takes, Event::StartProcess { member, kind });
                self.inflict_on(index, D::MemberLeaves);
            }
            D::MemberCutOff => {
                let length = self.dice.between(1, 3 * self.timing.lease);
                self.tell(|_| format!("process {index} is cut off for {length}"));
                self.processes[index].cut_off_until = at + length;
            }
            D::MemberStandsStill => {
                let length = self.dice.between(1, 3 * self.timing.lease);
                self.tell(|_| format!("process {index} stands still for {length}"));
                let process = &mut self.processes[index];
                process.paused_until = process.paused_until.max(at + length);
            }
            D::MemberCrashes | D::MemberRestarts => {
                self.tell(|_| format!("process {index} crashes"));
                self.processes[index].alive = false;
                if matches!(disruption, D::MemberRestarts) {
                    let id = self.processes[index].member;
                    let member = MEMBERS.iter().position(|one| *one == id).unwrap_or(0);
                    // Most restarts are the same program; some are an upgrade.
                    let kind =
                        if self.dice.chance(0.7) { self.processes[index].kind } else { self.draw_kind() };
                    let takes = self.dice.between(0, self.timing.lease);
                    self.schedule(at + takes, Event::StartProcess { member, kind });
                }
            }
            _ => {}
        }
    }

    /// `false`: everybody is there.
    fn start_missing_member(&mut self) -> bool {
        let missing: Vec<usize> = (0..MEMBERS.len())
            .filter(|member| {
                !self.processes.iter().any(|process| process.member == MEMBERS[*member] && !process.is_over())
            })
            .collect();
        if !missing.is_empty() {
            let (member, kind) = (missing[self.dice.below(missing.len())], self.draw_kind());
            self.schedule(self.at, Event::StartProcess { member, kind });
        }
        !missing.is_empty()
    }

    fn roll_back(&mut self) {
        let writes = if self.dice.chance(0.7) { self.dice.between(1, 9) } else { self.dice.between(1, 60) };
        let writes = usize::try_from(writes).unwrap_or(1);
        if let Some(lost) = self.redis.roll_back(writes) {
            self.tell(|world| {
                let stored = world.redis.stored.as_ref().map(|stored| stored.group.metadata_version);
                format!("REDIS LOSES {writes} writes: v{} -> v{stored:?}", lost.group.metadata_version)
            });
            self.losses.push(Loss { at: self.at, noticed_at: None });
            self.mark_indistinguishable();
            // Often what kills the server kills who served from it too.
            if self.dice.chance(0.2) {
                self.crash_server();
            }
        }
    }

    /// The key goes; it comes back as it was, or as it was some time ago.
    fn lose_key(&mut self, old_dump: bool) {
        let Some(lost) = self.redis.lose_key() else { return };
        let away = if old_dump { 0 } else { self.dice.between(1, 2 * self.timing.lease) };
        let past = self.redis.past.len();
        let snapshot = if (old_dump || self.dice.chance(0.5)) && past > 0 {
            let index = self.dice.below(past);
            Rc::clone(&self.redis.past[index])
        } else {
            lost
        };
        self.tell(|_| {
            format!("REDIS LOSES THE KEY for {away}; back to v{}", snapshot.group.metadata_version)
        });
        self.losses.push(Loss { at: self.at, noticed_at: None });
        self.schedule(self.at + away, Event::Restore { snapshot });
    }

    pub(crate) fn restore(&mut self, snapshot: Rc<Snapshot>) {
        if self.redis.stored.is_none() {
            self.tell(|_| format!("the key comes back with v{}", snapshot.group.metadata_version));
            // What was stored after the restored state is no past of it.
            self.redis.past.retain(|one| one.stamp.live_revision < snapshot.stamp.live_revision);
            self.redis.restore(snapshot);
            self.mark_indistinguishable();
        }
    }

    /// Two processes of one id without `instanceId` cannot be told apart while one of them speaks from a lost
    /// future: its join may be lost, and its epoch looks like a later one of whoever Redis knows. It is
    /// answered as that one until it joins anew (protocol 5, *What remains*).
    fn mark_indistinguishable(&mut self) {
        for process in self.processes.iter_mut().filter(|process| process.alive) {
            process.is_forgotten |= !process.kind.has_instance() && process.has_joined;
        }
    }

    fn jump(&mut self, how: Disruption) {
        let tenth = self.timing.lease / 10;
        let by = match how {
            // Alone it goes unnoticed: nobody can tell it from drift.
            D::SmallJump if self.dice.chance(0.5) => self.dice.between(1, tenth + 1),
            D::SmallJump => self.dice.between(tenth * 4 / 5, tenth + 1),
            _ => self.dice.between(tenth + 10, 6 * self.timing.lease),
        };
        let by = if matches!(how, D::JumpBackward) { -by } else { by };
        self.tell(|_| format!("REDIS TIME jumps by {by}"));
        if by > 0 {
            self.jumps.push(Jump { at: self.at, by });
        }
        self.redis.ahead += by;
        // What moves a clock rarely moves it alone.
        if self.plan.faults.network()
            && self.dice.chance(0.5)
            && let Some(index) = self.someone()
        {
            self.inflict_on(index, D::MemberCutOff);
        }
    }

    /// What Redis time has gained by such jumps within the last lease: so much early a lease may end in the record.
    pub(crate) fn gained_within_a_lease(&self, counts: impl Fn(&Jump) -> bool) -> i64 {
        let lately = self.jumps.iter().filter(|jump| jump.at + self.timing.lease > self.at);
        lately.filter(|jump| counts(jump)).map(|jump| jump.by).sum()
    }

    /// Whether an instance that looked at Redis first at `first_look` cannot know that time has gained more than
    /// a tenth of a lease within the last one.
    pub(crate) fn is_blind(&self, first_look: i64) -> bool {
        let lease = self.timing.lease;
        self.gained_within_a_lease(|_| true) > lease / 10
            && self.jumps.iter().any(|jump| first_look >= jump.at && self.at < jump.at + lease)
    }

    /// The faults stop: everybody runs, the key is there, one process per id, messages arrive.
    /// Returns when the last one that stands still runs again.
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
        for member in MEMBERS {
            let mut running: Vec<usize> = (0..self.processes.len())
                .filter(|index| self.processes[*index].member == member && !self.processes[*index].is_over())
                .collect();
            running.pop();
            running.into_iter().for_each(|index| self.processes[index].alive = false);
        }
        if self.redis.stored.is_none()
            && let Some(snapshot) = self.redis.past.last().cloned()
        {
            self.restore(snapshot);
        }
        let of_processes =
            self.processes.iter().filter(|process| !process.is_over()).map(|one| one.paused_until);
        let of_coordinators = self.coordinators.iter().map(|coordinator| coordinator.paused_until);
        of_processes.chain(of_coordinators).max().unwrap_or(0).max(self.at)
    }

    /// A person starts again what was refused for good, once nothing else of its id runs; and somebody stays.
    /// `true` if anybody was started.
    pub(crate) fn staff(&mut self) -> bool {
        let mut starts = false;
        let stays = |process: &crate::process::Process| {
            !process.is_over() && !process.is_leaving && process.kind != Kind::Broken
        };
        if !self.processes.iter().any(stays) {
            starts = self.start_missing_member();
        }
        for (member, id) in MEMBERS.iter().enumerate() {
            let of_id = |process: &&crate::process::Process| process.member == *id;
            let runs = self.processes.iter().filter(of_id).any(|process| !process.is_over());
            let refused = self.processes.iter().rfind(of_id).is_some_and(|process| process.refused);
            if !runs && refused {
                self.schedule(self.at, Event::StartProcess { member, kind: Kind::Full });
                starts = true;
            }
        }
        starts
    }
}
