//! The main invariant, on what consumers believe: no shard is read by two of them, but as documented.

use crate::check::{self, Excuse, Grant, Loss};
use crate::coordinator::Job;
use crate::process::Process;
use crate::world::World;

impl World {
    /// No shard is read by two processes that believe in their lease.
    pub(crate) fn nobody_reads_twice(&mut self) {
        for (shard, one, other, _) in check::overlaps(&self.processes, self.at) {
            let known =
                self.excuses.iter().any(|excuse| excuse.shard == shard && excuse.pair == (one, other));
            if known {
                continue;
            }
            match self.excuse(shard, one, other) {
                Some(until) => {
                    self.excused += 1;
                    self.tell(|_| {
                        format!("shard {shard} is read by {one} and {other}: excused until {until}")
                    });
                    let since = self.at;
                    self.excuses.push(Excuse { shard, pair: (one, other), since, until });
                }
                None => {
                    self.violate(format!("one-reader: shard {shard} is read by processes {one} and {other}"))
                }
            }
        }
    }

    /// Until when two may read one shard, if that is one of the cases that remain (protocol 5, *What
    /// remains*).
    fn excuse(&self, shard: u32, one: usize, other: usize) -> Option<i64> {
        let (first, second) = (&self.processes[one], &self.processes[other]);
        let lease = self.timing.lease;
        if first.member == second.member
            && !first.kind.has_instance()
            && !second.kind.has_instance()
            && (first.is_forgotten || second.is_forgotten)
        {
            return Some(i64::MAX);
        }
        // What its twin says is taken for its own word: that it left, that it gave a shard back.
        if self.has_indistinguishable_twin(one) || self.has_indistinguishable_twin(other) {
            return Some(self.at + lease);
        }
        // A grant made between a loss and its first sign, for at most one lease of the party that was lost.
        let latest = |member: &str| {
            self.grants.iter().rev().find(|grant| grant.shard == shard && grant.member == member)
        };
        let grants: Vec<&Grant> = latest(first.member).into_iter().chain(latest(second.member)).collect();
        let by_loss = grants.iter().filter_map(|grant| {
            let is_unaware = |loss: &&Loss| {
                grant.at >= loss.at && loss.noticed_at.is_none_or(|noticed| grant.at <= noticed)
            };
            self.losses.iter().filter(is_unaware).map(|loss| loss.at + lease).max()
        });
        // The same by an answer that repeats a grant which the record has again.
        let started = [first, second].into_iter().filter_map(|process| process.started.get(&shard));
        let by_repetition = started.filter_map(|at| {
            let is_unaware =
                |loss: &&Loss| *at >= loss.at && loss.noticed_at.is_none_or(|noticed| *at <= noticed);
            self.losses.iter().filter(is_unaware).map(|loss| loss.at + lease).max()
        });
        // A grant by an instance that cannot know that time has jumped.
        let by_jump = grants.iter().filter(|grant| grant.is_blind).filter_map(|grant| {
            self.jumps.iter().filter(|jump| grant.at >= jump.at).map(|jump| jump.at + lease).max()
        });
        let by_small_jumps = self.excuse_by_small_jumps(shard, first, second);
        // What a message of a lost history gave back is read on until the lease of who had sent it is over.
        let strays =
            self.strays.iter().rev().find(|(member, _)| [first.member, second.member].contains(member));
        let by_strays = strays.map(|(_, at)| at + lease);
        let excused =
            by_strays.into_iter().chain(by_loss.chain(by_repetition)).chain(by_jump).chain(by_small_jumps);
        excused.max().filter(|until| *until > self.at)
    }

    /// A message that was sent before Redis lost writes and arrives when the record has reached its version again looks
    /// like a present one, unless it carries a sequence: nothing else tells how old it is.
    pub(crate) fn note_strays(&mut self, jobs: &[Job]) {
        let Some(last) = self.losses.last().map(|loss| loss.at) else { return };
        let strays = jobs.iter().filter(|job| job.sent_at < last);
        let strays = strays.map(|job| &self.processes[job.process]).filter(|it| !it.kind.has_sequence());
        let strays: Vec<_> = strays.map(|process| (process.member, self.at)).collect();
        self.strays.extend(strays);
    }

    /// Who counts the whole lease by its own configuration reads so much longer than its recorded lease as Redis
    /// time has gained unnoticed, a tenth of a lease at most (ADR 0012). Who counts the lease that it was told
    /// does not.
    fn excuse_by_small_jumps(&self, shard: u32, first: &Process, second: &Process) -> Option<i64> {
        let since = |process: &Process| process.started.get(&shard).copied();
        let former = if since(first) < since(second) { first } else { second };
        let tenth = self.timing.lease / 10;
        let unnoticed = self.gained_within_a_lease(|jump| jump.by <= tenth).min(tenth);
        (former.counts_its_own_lease() && unnoticed > 0).then_some(self.at + unnoticed)
    }

    /// Whether a process shares its id with another that cannot be told from it (protocol 5, *What remains*).
    fn has_indistinguishable_twin(&self, index: usize) -> bool {
        let process = &self.processes[index];
        let is_twin = |(other, twin): (usize, &Process)| {
            other != index
                && twin.member == process.member
                && twin.has_joined
                && !twin.kind.has_instance()
                && (twin.is_forgotten || process.is_forgotten)
        };
        !process.kind.has_instance() && self.processes.iter().enumerate().any(is_twin)
    }

    /// An excused overlap of two readers ends in time. (Who only drains any more has been told to stop, and
    /// reads nothing new: protocol 5.)
    pub(crate) fn check_excuses(&mut self) {
        if self.excuses.is_empty() {
            return;
        }
        let now = check::overlaps(&self.processes, self.at);
        // A loss in the middle of such an overlap makes one of the two a party of a lost future.
        let lease = self.timing.lease;
        for excuse in &mut self.excuses {
            let lost = self.losses.iter().filter(|loss| loss.at >= excuse.since && loss.at <= excuse.until);
            excuse.until = lost.map(|loss| loss.at + lease).fold(excuse.until, i64::max);
        }
        let still = |excuse: &Excuse| {
            now.iter().find(|(shard, one, other, _)| *shard == excuse.shard && (*one, *other) == excuse.pair)
        };
        let too_long = self.excuses.iter().find(|excuse| {
            self.at > excuse.until && still(excuse).is_some_and(|(_, _, _, both_read)| *both_read)
        });
        if let Some(excuse) = too_long {
            let what = format!(
                "one-reader: shard {} is read by processes {:?} for longer than a lease",
                excuse.shard, excuse.pair
            );
            self.violate(what);
        }
        self.excuses.retain(|excuse| still(excuse).is_some());
    }
}
