//! The consumers: the real decisions, and around them what a shell does with the shards it may read.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use rsc_core::view;
use rsc_protocol::{HeartbeatRequest, HeartbeatResponse, Status};

use super::coordinator::Job;
use super::world::{Event, MEMBERS, StreamWorld};
use crate::plan::{Mix, Plan};
use crate::process::{Kind, Process, Wish};

/// Records a reader has in hand at most, by shard.
const IN_HAND: usize = 4;
/// How long a record takes at most, in milliseconds, where nothing is wrong.
const QUICK: i64 = 300;

/// What one consumer process has in hand.
#[derive(Debug)]
pub(crate) struct Reader {
    /// Its group.
    pub(crate) group: usize,
    /// Records handed to the application and not acknowledged, by shard.
    pub(crate) in_hand: BTreeMap<u32, BTreeSet<u64>>,
    /// Shards that it is draining.
    draining: BTreeSet<u32>,
    /// How long a record takes at most.
    slowness: i64,
}

impl StreamWorld {
    /// How long a message of a member or producer takes.
    pub(crate) fn travel(&mut self) -> i64 {
        if !self.is_faulty || !self.plan.faults.network() {
            return self.dice.between(1, 20);
        }
        match self.dice.between(0, 20) {
            0..=15 => self.dice.between(1, 30),
            16..=18 => self.dice.between(1, self.shape.timing.heartbeat),
            _ => self.dice.between(1, 2 * self.shape.timing.lease),
        }
    }

    pub(crate) fn is_lost(&mut self) -> bool {
        self.is_faulty && self.plan.faults.network() && self.dice.chance(0.06)
    }

    pub(crate) fn reader_event(&mut self, event: Event) {
        match event {
            Event::StartMember { group, member } => self.start_member(group, member),
            Event::Answer { process, request_id, response } if self.runs(process) => {
                let wishes = self.processes[process].answered(self.at, &request_id, response.as_deref());
                self.carry_out(process, wishes);
            }
            Event::Wake { process, timer }
                if self.runs(process) && self.processes[process].timer == timer =>
            {
                let wishes = self.processes[process].time(self.at);
                self.carry_out(process, wishes);
            }
            Event::Drained { process, shard } if self.runs(process) => {
                let wishes = self.processes[process].drained(self.at, shard);
                self.carry_out(process, wishes);
            }
            Event::Poll { process } if self.runs(process) => self.poll(process),
            Event::Worked { process, shard, id } if self.runs(process) => {
                self.drop_what_was_abandoned(process);
                if self.readers[process].in_hand.get(&shard).is_some_and(|ids| ids.contains(&id)) {
                    let takes = self.dice.between(0, 4);
                    self.schedule(self.at + takes, Event::Acknowledge { process, shard, id });
                }
            }
            Event::Acknowledge { process, shard, id } => self.acknowledge(process, shard, id),
            _ => {}
        }
    }

    fn runs(&self, process: usize) -> bool {
        !self.processes[process].is_over()
    }

    fn start_member(&mut self, group: usize, member: usize) {
        let number = self.processes.len();
        let wall = self.dice.between(-60_000, 60_000);
        let fast = if self.dice.chance(0.3) { self.dice.between(-50, 5_000) } else { 0 };
        let plan = Plan { seed: 0, mix: Mix::Modern, faults: self.plan.faults, planted: None };
        let (at, timing) = (self.at, &self.shape.timing);
        let mut process = Process::new(MEMBERS[member], Kind::Full, number, at, wall, fast, timing, &plan);
        process.never_finishes = self.is_faulty && self.dice.chance(0.05);
        let slowest = if self.dice.chance(0.2) { self.shape.timing.rebalance / 2 } else { QUICK };
        self.tell(|world| format!("process {number} of {}/{} starts", world.name(group), MEMBERS[member]));
        self.processes.push(process);
        let (in_hand, draining) = (BTreeMap::new(), BTreeSet::new());
        self.readers.push(Reader { group, in_hand, draining, slowness: slowest });
        let wishes = self.processes[number].time(self.at);
        self.carry_out(number, wishes);
        self.schedule(self.at + 1, Event::Poll { process: number });
    }

    /// Does what a process wants, and sets its timer.
    pub(crate) fn carry_out(&mut self, process: usize, wishes: Vec<Wish>) {
        self.drop_what_was_abandoned(process);
        let mut has_started = false;
        for wish in wishes {
            match wish {
                Wish::Send(request) => self.send(process, *request),
                Wish::Drain(shard) => {
                    self.readers[process].draining.insert(shard);
                    self.tell(|_| format!("process {process} drains shard {shard}"));
                    self.look_at_drain(process, shard);
                }
                Wish::Started(shard) => {
                    has_started = true;
                    self.readers[process].draining.remove(&shard);
                    self.tell(|_| format!("process {process} reads shard {shard}"));
                }
            }
        }
        if has_started {
            self.nobody_reads_twice(process);
        }
        let state = &mut self.processes[process];
        if let Some(at) = state.wakes_at() {
            state.timer += 1;
            let timer = state.timer;
            self.schedule(at, Event::Wake { process, timer });
        }
    }

    /// What the lease no longer covers, or the coordinator took away at once, is nobody's business any more.
    fn drop_what_was_abandoned(&mut self, process: usize) {
        let touched = self.processes[process].touches(self.at);
        let still = |shard: &u32| touched.iter().any(|(one, _)| one == shard);
        let reader = &mut self.readers[process];
        reader.in_hand.retain(|shard, _| still(shard));
        reader.draining.retain(still);
    }

    fn look_at_drain(&mut self, process: usize, shard: u32) {
        let reader = &self.readers[process];
        let is_done = reader.in_hand.get(&shard).is_none_or(BTreeSet::is_empty);
        if reader.draining.contains(&shard) && is_done && !self.processes[process].never_finishes {
            self.readers[process].draining.remove(&shard);
            self.schedule(self.at, Event::Drained { process, shard });
        }
    }

    /// Reads what may be read; what a former owner left pending first.
    fn poll(&mut self, process: usize) {
        let group = self.readers[process].group;
        let slowness = if self.is_faulty { self.readers[process].slowness } else { QUICK };
        for (shard, is_reading) in self.processes[process].touches(self.at) {
            let in_hand = self.readers[process].in_hand.get(&shard).map_or(0, BTreeSet::len);
            if !is_reading || in_hand >= IN_HAND {
                continue;
            }
            let hand = self.readers[process].in_hand.get(&shard);
            let mut ids = self.streams.claim(shard, group, process, hand, self.shape.drops_ghosts);
            ids.extend(self.streams.read(shard, group, process, IN_HAND - in_hand));
            for id in ids {
                self.readers[process].in_hand.entry(shard).or_default().insert(id);
                let takes = self.dice.between(1, slowness);
                self.schedule(self.at + takes, Event::Worked { process, shard, id });
            }
        }
        let pause = self.dice.between(50, self.shape.timing.heartbeat / 2);
        self.schedule(self.at + pause, Event::Poll { process });
    }

    fn acknowledge(&mut self, process: usize, shard: u32, id: u64) {
        let group = self.readers[process].group;
        self.streams.ack(shard, group, id);
        self.ledger.acknowledged(id, group);
        if self.runs(process) {
            if let Some(ids) = self.readers[process].in_hand.get_mut(&shard) {
                ids.remove(&id);
            }
            self.look_at_drain(process, shard);
        }
    }

    fn send(&mut self, process: usize, request: HeartbeatRequest) {
        if self.processes[process].cut_off_until > self.at || self.is_lost() {
            return;
        }
        let request = Rc::new(request);
        let copies =
            if self.is_faulty && self.plan.faults.network() && self.dice.chance(0.03) { 2 } else { 1 };
        for _ in 0..copies {
            let coordinator = self.dice.below(self.coordinators.len());
            let arrives = self.at + self.travel();
            self.schedule(arrives, Event::Request { coordinator, process, request: Rc::clone(&request) });
        }
    }

    pub(crate) fn arrive(&mut self, coordinator: usize, process: usize, request: Rc<HeartbeatRequest>) {
        if self.coordinators[coordinator].alive {
            let group = self.readers[process].group;
            self.give(coordinator, group, Job::Heartbeat { request, process });
        } else {
            self.respond(process, &request.request_id, None);
        }
    }

    pub(crate) fn respond(&mut self, process: usize, request_id: &str, response: Option<HeartbeatResponse>) {
        if self.processes[process].cut_off_until > self.at || self.is_lost() {
            return;
        }
        let arrives = self.at + self.travel();
        let (request_id, response) = (request_id.to_owned(), response.map(Box::new));
        self.schedule(arrives, Event::Answer { process, request_id, response });
    }

    pub(crate) fn refuse(&mut self, process: usize, request: &HeartbeatRequest, retry: Option<&str>) {
        let core = &self.shape.timing.core;
        let response = retry.map(|reason| view::without_group(request, Status::Retry, reason, core));
        self.respond(process, &request.request_id, response);
    }

    /// No shard is read by two processes of a group that believe in their lease. What a loss of Redis leaves behind is
    /// looked at in the other world.
    fn nobody_reads_twice(&mut self, process: usize) {
        if self.losses > 0 {
            return;
        }
        let group = self.readers[process].group;
        let mine = self.processes[process].touches(self.at);
        for other in 0..self.processes.len() {
            if other == process || self.readers[other].group != group {
                continue;
            }
            let theirs = self.processes[other].touches(self.at);
            let shared = mine.iter().find(|(shard, _)| theirs.iter().any(|(one, _)| one == shard));
            if let Some((shard, _)) = shared {
                self.violate(format!(
                    "one-reader: shard {shard} of {} is read by processes {process} and {other}",
                    self.name(group)
                ));
            }
        }
    }
}
