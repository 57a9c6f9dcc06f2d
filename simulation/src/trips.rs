//! The coordinators' turns: their round trips to Redis and what each outcome means.

use std::rc::Rc;

use rsc_core::{Loaded, WriteKind, decide};

use crate::check::{self, Grant};
use crate::coordinator::{Job, Pending, Stage, Turn, is_stored, keep_newest_of_each_member};
use crate::messages::recorded;
use crate::plan::ModelFault;
use crate::redis::{Committed, Entered};
use crate::world::{Event, Step, World};

/// How often a batch is applied anew because the state had moved, and because an answer was lost.
const CONFLICTS_BORNE: u32 = 5;
const UNKNOWNS_BORNE: u32 = 3;

impl World {
    pub(crate) fn begin_turn(&mut self, index: usize) {
        let (now, acquire) = (self.at, self.timing.acquire);
        let coordinator = &mut self.coordinators[index];
        let jobs: Vec<Job> = coordinator.queue.drain(..).collect();
        coordinator.watch.turn_began(now);
        coordinator.turn = Some(Turn {
            jobs,
            stage: Stage::Waiting,
            lost: None,
            conflicts: 0,
            unknowns: 0,
            deadline: now + acquire,
            trip: 0,
            token: String::new(),
        });
        if self.boundary(index, "before enter") {
            self.go_on(index, 0, Step::Enter);
        }
    }

    fn go_on(&mut self, coordinator: usize, after: i64, step: Step) {
        let life = self.coordinators[coordinator].life;
        self.schedule(self.at + after, Event::Continue { coordinator, life, step });
    }

    /// A named boundary of a turn: here the process may crash or stand still. `false`: it is gone.
    fn boundary(&mut self, index: usize, name: &'static str) -> bool {
        if !self.is_faulty || !self.plan.faults.crash() {
            return true;
        }
        if self.dice.chance(0.006) {
            self.tell(|_| format!("coordinator {index} crashes {name}"));
            self.crash_coordinator(index);
            return false;
        }
        if self.dice.chance(0.006) {
            let longest = self.timing.lease * 2;
            let length = self.dice.between(1, longest);
            self.tell(|_| format!("coordinator {index} stands still {name} for {length}"));
            self.pause_coordinator(index, length);
        }
        true
    }

    /// Events of a coordinator's turn.
    pub(crate) fn trip(&mut self, event: Event) {
        match event {
            Event::Enter { coordinator, life, trip, token, sent_at } => {
                let is_mine = self.coordinators[coordinator].life == life;
                let (takeover, remembered) = if is_mine {
                    let coordinator = &self.coordinators[coordinator];
                    let stamp = coordinator.known.as_ref().map(|known| known.stamp.clone());
                    (coordinator.lost_tokens.clone(), stamp)
                } else {
                    (Vec::new(), None)
                };
                let compare = !self.plan.lacks(ModelFault::WriteIdNotCompared);
                let entered = self.redis.enter(
                    self.at,
                    &token,
                    &takeover,
                    remembered.as_ref(),
                    self.timing.mutex,
                    compare,
                );
                let redis_time = self.redis.time(self.at);
                let _ = sent_at;
                self.redis_answers(coordinator, |arrives| {
                    (arrives, Event::Entered { coordinator, life, trip, redis_time, entered })
                });
            }
            Event::Commit { coordinator, life, trip, token, pending } => {
                let committed = self.apply(&token, &pending);
                self.redis_answers(coordinator, |arrives| {
                    (arrives, Event::Committed { coordinator, life, trip, committed })
                });
            }
            Event::Release { token } => self.redis.release(&token),
            Event::Entered { coordinator, life, trip, redis_time, entered }
                if self.is_current(coordinator, life, trip) =>
            {
                self.entered(coordinator, redis_time, entered);
            }
            Event::Committed { coordinator, life, trip, committed }
                if self.is_current(coordinator, life, trip) =>
            {
                self.committed(coordinator, committed);
            }
            Event::TimedOut { coordinator, life, trip } if self.is_current(coordinator, life, trip) => {
                self.timed_out(coordinator);
            }
            Event::Continue { coordinator, life, step }
                if self.coordinators[coordinator].life == life
                    && self.coordinators[coordinator].turn.is_some() =>
            {
                match step {
                    Step::Enter => self.send_enter(coordinator),
                    Step::Commit(pending) => self.send_commit(coordinator, *pending),
                    Step::Reply(pending) => self.reply(coordinator, &pending),
                }
            }
            Event::Tick { coordinator, life, timer } => {
                let state = &self.coordinators[coordinator];
                if state.life == life && state.timer == timer && state.turn.is_none() && state.alive {
                    self.begin_turn(coordinator);
                }
            }
            Event::Look { coordinator, life } if self.coordinators[coordinator].life == life => {
                self.look(coordinator);
            }
            _ => {}
        }
    }

    /// The supervisor looks at what is stored, also while the actor has nothing to do.
    fn look(&mut self, index: usize) {
        let (at, every) = (self.at, self.timing.lease / 3);
        let stored = self.redis.stored.as_ref().map(|stored| stored.stamp.clone());
        let coordinator = &mut self.coordinators[index];
        let life = coordinator.life;
        if !coordinator.alive {
            return;
        }
        let is_free = coordinator.turn.is_none() && coordinator.paused_until <= at;
        if let (true, Some(stored)) = (is_free, stored) {
            let known = coordinator.known.as_ref().map(|known| &known.stamp);
            let moved = known.is_none_or(|known| {
                known.revision != stored.revision || !rsc_core::is_successor(&stored, known)
            });
            coordinator.watch.sighted(at, &stored);
            if moved {
                self.begin_turn(index);
            }
        }
        self.schedule(at + every, Event::Look { coordinator: index, life });
    }

    fn is_current(&self, coordinator: usize, life: u64, trip: u64) -> bool {
        let coordinator = &self.coordinators[coordinator];
        coordinator.life == life && coordinator.turn.as_ref().is_some_and(|turn| turn.trip == trip)
    }

    /// The way to Redis breaks now and then: the message never arrives, arrives very late, or its answer is
    /// lost.
    fn link_breaks(&mut self) -> bool {
        self.is_faulty && self.plan.faults != crate::plan::FaultMix::None && self.dice.chance(0.012)
    }

    fn redis_answers(&mut self, _coordinator: usize, event: impl FnOnce(i64) -> (i64, Event)) {
        if self.link_breaks() {
            self.tell(|_| "         the answer of redis is lost".to_owned());
            return;
        }
        let arrives = self.at + self.dice.between(0, 4);
        let (arrives, event) = event(arrives);
        self.schedule(arrives, event);
    }

    /// Sends a message to Redis and waits for the answer for so long.
    fn ask_redis(&mut self, coordinator: usize, event: Event) {
        let timeout = self.timing.redis_timeout;
        let state = &mut self.coordinators[coordinator];
        let (life, trip) = (state.life, state.turn.as_ref().map_or(0, |turn| turn.trip));
        self.schedule(self.at + timeout, Event::TimedOut { coordinator, life, trip });
        let mut arrives = self.at + self.dice.between(0, 4);
        if self.link_breaks() {
            if self.dice.chance(0.5) {
                self.tell(|_| "         the message to redis is lost".to_owned());
                return;
            }
            arrives += self.dice.between(0, self.timing.lease);
        }
        self.schedule(arrives, event);
    }

    fn send_enter(&mut self, index: usize) {
        let now = self.at;
        let coordinator = &mut self.coordinators[index];
        let (life, token, trip) =
            (coordinator.life, coordinator.fresh_token(index), coordinator.fresh_trip());
        let Some(turn) = &mut coordinator.turn else { return };
        turn.trip = trip;
        turn.token.clone_from(&token);
        turn.stage = Stage::Entering { sent_at: now };
        self.ask_redis(index, Event::Enter { coordinator: index, life, trip, token, sent_at: now });
    }

    fn send_commit(&mut self, index: usize, pending: Pending) {
        let coordinator = &mut self.coordinators[index];
        let (life, trip) = (coordinator.life, coordinator.fresh_trip());
        let Some(turn) = &mut coordinator.turn else { return };
        turn.trip = trip;
        let token = turn.token.clone();
        turn.stage = Stage::Committing(Box::new(pending.clone()));
        if self.plan.lacks(ModelFault::AnsweredBeforeRecorded) {
            self.answer_all(&pending);
        }
        let pending = Box::new(pending);
        self.ask_redis(index, Event::Commit { coordinator: index, life, trip, token, pending });
    }

    /// The commit script, and every invariant of what it wrote.
    fn apply(&mut self, token: &str, pending: &Pending) -> Committed {
        let Some(write) = &pending.decision.write else { return Committed::Conflict("nothing to write") };
        let before = self.redis.stored.clone();
        let compare = !self.plan.lacks(ModelFault::WriteIdNotCompared);
        let checked = !self.plan.lacks(ModelFault::CommitUnchecked);
        let decided = &pending.decision.group;
        let committed =
            self.redis.commit(self.at, token, &pending.expected, write, decided, compare, checked);
        let (Committed::Applied(_), Some(before)) = (&committed, before) else { return committed };
        let mut wrong = check::commit(&before.group, &pending.decision, pending.now, self.timing.lease);
        if (write.kind != WriteKind::LeaseOnly || self.plan.seed.is_multiple_of(8))
            && let Some(stored) = &self.redis.stored
        {
            wrong.extend(check::stored(&pending.decision, &stored.fields, &self.timing.core));
        }
        for what in wrong {
            self.violate(what);
        }
        for (shard, member) in check::new_grants(&before.group, decided) {
            self.grants.push(Grant { shard, member, at: self.at, is_blind: pending.is_blind });
        }
        if check::begins_round(&pending.decision.counts) {
            let at = self.at;
            self.losses.iter_mut().for_each(|loss| loss.noticed_at = loss.noticed_at.or(Some(at)));
        }
        self.tell(|_| recorded(pending));
        committed
    }

    fn entered(&mut self, index: usize, redis_time: i64, entered: Entered) {
        let (now, pause) = (self.at, 1 + self.dice.between(0, 50));
        let settings = self.timing.core.clone();
        let notices_jumps = !self.plan.lacks(ModelFault::TimeJumpUnnoticed);
        let judges_itself = !self.plan.lacks(ModelFault::StaysInServiceAfterLoss);
        let key = self.key.clone();
        let coordinator = &mut self.coordinators[index];
        let Some(turn) = &mut coordinator.turn else { return };
        let Stage::Entering { sent_at } = turn.stage else { return };
        turn.trip = 0;
        let loaded = match entered {
            Entered::Busy if now + pause < turn.deadline => {
                turn.stage = Stage::Waiting;
                self.go_on(index, pause, Step::Enter);
                return;
            }
            Entered::Busy => {
                let response = if turn.lost.is_some() { None } else { Some("another instance works on it") };
                self.fail(index, response);
                return;
            }
            other => other,
        };
        coordinator.watch.entered(sent_at, now, redis_time, notices_jumps);
        match loaded {
            Entered::Missing => {
                coordinator.known = None;
                coordinator.watch.key_missing();
                let token = turn.token.clone();
                self.schedule(now, Event::Release { token });
                self.tell(|_| format!("coordinator {index} finds no key"));
                self.coordinators[index].watch.turn_finished();
                self.fail(index, None);
                return;
            }
            Entered::Loaded(snapshot) => match rsc_core::load(&key, &snapshot.fields, &settings) {
                Ok(found) => coordinator.known = Some(found),
                Err(error) => {
                    let what = format!("stored-is-decided: {error}");
                    self.violate(what);
                    return;
                }
            },
            Entered::Unchanged | Entered::Busy => {}
        }
        let Some(known) = coordinator.known.take() else { return };
        if coordinator.watch.found(now, &known.stamp, judges_itself) {
            coordinator.loss_to_report = true;
            coordinator.loss_noticed_at = Some(now);
        }
        coordinator.seen_version = coordinator.seen_version.max(known.group.metadata_version);
        self.decide(index, redis_time, known);
    }

    fn decide(&mut self, index: usize, redis_time: i64, known: Loaded) {
        let now = self.at;
        let coordinator = &mut self.coordinators[index];
        let Some(turn) = &mut coordinator.turn else { return };
        let mut older = Vec::new();
        if let Some(lost) = turn.lost.take() {
            if is_stored(&lost, &known.group, &known.stamp) {
                coordinator.watch.committed(now, &known.stamp);
                coordinator.loss_to_report &= !lost.notices_loss;
                coordinator.known = Some(known);
                let token = turn.token.clone();
                self.schedule(now, Event::Release { token });
                self.reply(index, &lost);
                return;
            }
            older = keep_newest_of_each_member(&mut turn.jobs);
        }
        let jobs = turn.jobs.clone();
        let token = turn.token.clone();
        let may_expire = coordinator.watch.may_expire(now);
        let may_grant = coordinator.watch.may_grant(now);
        let (notices_loss, noticed_at) = (coordinator.loss_to_report, coordinator.loss_noticed_at);
        let commands = coordinator.commands(&jobs);
        self.note_strays(&jobs);
        let coordinator = &mut self.coordinators[index];
        let first_sample = coordinator.watch.first_sample.unwrap_or(now);
        let is_blind = self.is_blind(first_sample);
        self.refuse(older, "a newer heartbeat of this member came with it");
        let decided_on = rsc_protocol::Timestamp::from_millis(redis_time);
        let context = self.context(decided_on, may_expire, may_grant);
        let before = known.group.clone();
        let expected = known.stamp.clone();
        let stray_live = known.stray_live.clone();
        let decision = decide(known.group.clone(), &stray_live, &commands, &context);
        self.decided += 1;
        // Several messages of one batch are applied one after the other.
        let beats = decision.replies.iter().skip(commands.len() - jobs.len());
        let wrong: Vec<String> = match (jobs.as_slice(), beats.last()) {
            ([job], Some(reply)) => {
                let has_lost = !self.losses.is_empty();
                check::answer(&before, &decision.group, &job.request, reply, decided_on, has_lost)
            }
            _ => Vec::new(),
        };
        let spares = noticed_at.is_some_and(|at| now < at + self.timing.lease);
        let wrong = wrong.into_iter().chain(spares.then(|| check::expires_somebody(&decision)).flatten());
        for what in wrong.collect::<Vec<_>>() {
            self.violate(what);
        }
        let decision = Rc::new(decision);
        let pending = Pending {
            decision: Rc::clone(&decision),
            now: decided_on,
            decided_at: now,
            expected,
            jobs,
            notices_loss,
            is_blind,
        };
        if decision.write.is_none() {
            self.coordinators[index].known = Some(known);
            self.schedule(now, Event::Release { token });
            if self.boundary(index, "after deciding, nothing to write") {
                self.go_on(index, 0, Step::Reply(Box::new(pending)));
            }
            return;
        }
        self.coordinators[index].known = Some(known);
        if self.boundary(index, "after enter, before commit") {
            self.go_on(index, 0, Step::Commit(Box::new(pending)));
        }
    }

    fn committed(&mut self, index: usize, committed: Committed) {
        let coordinator = &mut self.coordinators[index];
        let Some(turn) = &mut coordinator.turn else { return };
        let Stage::Committing(pending) = std::mem::replace(&mut turn.stage, Stage::Waiting) else { return };
        turn.trip = 0;
        match committed {
            Committed::Applied(stamp) => {
                coordinator.watch.committed(self.at, &stamp);
                coordinator.loss_to_report &= !pending.notices_loss;
                let group = pending.decision.group.clone();
                coordinator.seen_version = coordinator.seen_version.max(group.metadata_version);
                let is_lease_only =
                    pending.decision.write.as_ref().is_some_and(|write| write.kind == WriteKind::LeaseOnly);
                let stray_live = coordinator.known.take().map(|known| known.stray_live).unwrap_or_default();
                let stray_live = if is_lease_only { stray_live } else { Vec::new() };
                coordinator.known = Some(Loaded { group, stamp, stray_live });
                if self.boundary(index, "after commit, before the answers leave") {
                    self.go_on(index, 0, Step::Reply(pending));
                }
            }
            Committed::Conflict(why) => {
                coordinator.known = None;
                turn.conflicts += 1;
                let too_often = turn.conflicts > CONFLICTS_BORNE;
                self.tell(|_| format!("coordinator {index}: conflict, {why}"));
                if too_often {
                    self.fail(index, Some("the state moved again and again"));
                } else {
                    self.go_on(index, 0, Step::Enter);
                }
            }
        }
    }

    /// No answer from Redis in time.
    fn timed_out(&mut self, index: usize) {
        let (now, acquire) = (self.at, self.timing.acquire);
        let takes_it_for_done = self.plan.lacks(ModelFault::UnknownTakenForDone);
        let coordinator = &mut self.coordinators[index];
        let Some(turn) = &mut coordinator.turn else { return };
        turn.trip = 0;
        let token = turn.token.clone();
        match std::mem::replace(&mut turn.stage, Stage::Waiting) {
            Stage::Entering { .. } => {
                coordinator.lose_token(token);
                self.tell(|_| format!("coordinator {index}: redis does not answer"));
                self.fail(index, None);
            }
            Stage::Committing(pending) => {
                coordinator.known = None;
                turn.unknowns += 1;
                turn.deadline = now + acquire;
                let too_often = turn.unknowns > UNKNOWNS_BORNE;
                turn.lost = Some(pending.clone());
                coordinator.lose_token(token);
                self.tell(|_| format!("coordinator {index}: no answer to its commit, looks what is stored"));
                if takes_it_for_done {
                    self.go_on(index, 0, Step::Reply(pending));
                } else if too_often {
                    self.fail(index, None);
                } else {
                    self.go_on(index, 0, Step::Enter);
                }
            }
            Stage::Waiting => {}
        }
    }

    /// Nothing came of a turn: `RETRY` with a reason, or an error.
    fn fail(&mut self, index: usize, retry: Option<&str>) {
        let Some(turn) = self.coordinators[index].turn.take() else { return };
        match retry {
            Some(reason) => self.refuse(turn.jobs, reason),
            None => turn
                .jobs
                .iter()
                .for_each(|job| self.respond(job.process, &job.request.request_id, None, self.at)),
        }
        self.end_turn(index);
    }

    fn reply(&mut self, index: usize, pending: &Pending) {
        if !self.plan.lacks(ModelFault::AnsweredBeforeRecorded) || pending.decision.write.is_none() {
            self.answer_all(pending);
        }
        self.coordinators[index].watch.turn_finished();
        self.coordinators[index].turn = None;
        self.end_turn(index);
    }

    fn end_turn(&mut self, index: usize) {
        if !self.coordinators[index].queue.is_empty() {
            self.begin_turn(index);
            return;
        }
        self.set_tick(index);
    }

    /// The tick comes when a deadline is due and the actor may act on it.
    fn set_tick(&mut self, index: usize) {
        let now = self.at;
        let redis_ahead = self.redis.time(0);
        let coordinator = &mut self.coordinators[index];
        coordinator.timer += 1;
        let (life, timer) = (coordinator.life, coordinator.timer);
        let deadline =
            coordinator.known.as_ref().and_then(|known| known.group.next_deadline(&self.timing.core));
        let at = match (&coordinator.known, deadline) {
            (Some(_), Some(deadline)) => (deadline.as_millis() - redis_ahead + 2)
                .max(coordinator.watch.in_service_from())
                .max(now + self.timing.heartbeat / 3),
            (Some(_), None) => return,
            // Nothing is known: the actor looks again.
            (None, _) => now + self.timing.heartbeat,
        };
        self.schedule(at, Event::Tick { coordinator: index, life, timer });
    }
}
