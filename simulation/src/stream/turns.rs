//! The turns of the groups' actors: *enter*, decision, *commit*, each a round trip that may fail.

use std::rc::Rc;

use rsc_core::{Loaded, Reply, WriteKind, decide};
use rsc_protocol::Timestamp;

use super::coordinator::{Job, Pending, Stage, Step, Turn};
use super::world::{Asker, Event, Op, Said, StreamWorld};
use crate::redis::{Committed, Entered};

/// How often a batch is applied anew.
const ATTEMPTS: u32 = 5;

impl StreamWorld {
    /// The way to Redis breaks now and then.
    pub(crate) fn link_breaks(&mut self) -> bool {
        self.is_faulty && self.plan.faults.network() && self.dice.chance(0.015)
            || self.is_faulty && self.plan.faults.crash() && self.dice.chance(0.005)
    }

    /// Sends something to Redis. What gets no answer is told by [`Event::TimedOut`].
    pub(crate) fn ask(&mut self, coordinator: usize, asker: Asker, op: Op) -> u64 {
        self.trips += 1;
        let (trip, life) = (self.trips, self.coordinators[coordinator].life);
        let timeout = self.at + self.shape.timing.redis_timeout;
        self.schedule(timeout, Event::TimedOut { asker: asker.clone(), coordinator, life, trip });
        let mut arrives = self.at + self.dice.between(0, self.shape.latency);
        let is_deletion = matches!(op, Op::Delete { .. });
        if is_deletion && self.is_faulty && self.plan.faults.network() && self.dice.chance(0.15) {
            arrives += self.dice.between(0, 2 * self.shape.timing.lease);
        }
        if self.link_breaks() {
            if self.dice.chance(0.5) {
                self.tell(|_| "         the message to redis is lost".to_owned());
                return trip;
            }
            arrives += self.dice.between(0, self.shape.timing.lease);
        }
        self.schedule(arrives, Event::Ask { asker, coordinator, life, trip, op });
        trip
    }

    /// A named boundary: here the process may crash or stand still. `false`: it is gone.
    pub(crate) fn boundary(&mut self, index: usize, name: &str, chance: f64) -> bool {
        if !self.is_faulty || !self.plan.faults.crash() {
            return true;
        }
        if self.dice.chance(chance) {
            self.tell(|_| format!("coordinator {index} crashes {name}"));
            self.crash_coordinator(index);
            return false;
        }
        if self.dice.chance(chance) {
            let timing = &self.shape.timing;
            // For less than a mutex lives, so that what it has begun still counts, or for long.
            let (shortest, longest) =
                if self.dice.chance(0.5) { (timing.mutex / 2, timing.mutex) } else { (1, timing.lease * 2) };
            let length = self.dice.between(shortest, longest);
            self.tell(|_| format!("coordinator {index} stands still {name} for {length}"));
            self.pause_coordinator(index, length);
        }
        true
    }

    /// Something to do for a group's actor.
    pub(crate) fn give(&mut self, coordinator: usize, group: usize, job: Job) {
        let actor = &mut self.coordinators[coordinator].actors[group];
        actor.queue.push_back(job);
        if actor.turn.is_none() {
            self.begin_turn(coordinator, group);
        }
    }

    pub(crate) fn begin_turn(&mut self, index: usize, group: usize) {
        let (now, acquire) = (self.at, self.shape.timing.acquire);
        let actor = &mut self.coordinators[index].actors[group];
        let jobs: Vec<Job> = actor.queue.drain(..).collect();
        actor.watch.turn_began(now);
        actor.turn = Some(Turn {
            jobs,
            stage: Stage::Waiting,
            lost: None,
            attempts: 0,
            deadline: now + acquire,
            trip: 0,
            token: String::new(),
        });
        if self.boundary(index, "before enter", 0.003) {
            self.go_on(index, group, 0, Step::Enter);
        }
    }

    fn go_on(&mut self, coordinator: usize, group: usize, after: i64, step: Step) {
        let life = self.coordinators[coordinator].life;
        self.schedule(self.at + after, Event::Continue { coordinator, life, group, step });
    }

    pub(crate) fn continue_turn(&mut self, index: usize, group: usize, step: Step) {
        if self.coordinators[index].actors[group].turn.is_none() {
            return;
        }
        match step {
            Step::Enter => {
                let token = format!("c{index}.{}", self.trips);
                let op = Op::Enter { group, token: token.clone() };
                let trip = self.ask(index, Asker::Actor(group), op);
                let now = self.at;
                if let Some(turn) = &mut self.coordinators[index].actors[group].turn {
                    (turn.trip, turn.token, turn.stage) = (trip, token, Stage::Entering(now));
                }
            }
            Step::Commit(pending) => {
                let actor = &self.coordinators[index].actors[group];
                let token = actor.turn.as_ref().map(|turn| turn.token.clone()).unwrap_or_default();
                let trip = self.ask(
                    index,
                    Asker::Actor(group),
                    Op::Commit { group, token, pending: pending.clone() },
                );
                if let Some(turn) = &mut self.coordinators[index].actors[group].turn {
                    (turn.trip, turn.stage) = (trip, Stage::Committing(pending));
                }
            }
            Step::Reply(pending) => self.reply(index, group, &pending),
        }
    }

    pub(crate) fn tick(&mut self, index: usize, group: usize, timer: u64) {
        let coordinator = &self.coordinators[index];
        let actor = &coordinator.actors[group];
        if actor.timer == timer && actor.turn.is_none() && coordinator.alive {
            self.begin_turn(index, group);
        }
    }

    pub(crate) fn actor_hears(&mut self, index: usize, group: usize, trip: u64, now: i64, said: Said) {
        let turn = &mut self.coordinators[index].actors[group].turn;
        let Some(turn) = turn.as_mut().filter(|turn| turn.trip == trip) else { return };
        turn.trip = 0;
        match said {
            Said::Entered(entered) => self.entered(index, group, now, entered),
            Said::Committed(committed) => self.committed(index, group, committed),
            _ => {}
        }
    }

    fn entered(&mut self, index: usize, group: usize, redis_time: i64, entered: Entered) {
        let (now, pause) = (self.at, 1 + self.dice.between(0, 50));
        let settings = self.shape.timing.core.clone();
        let key = self.groups[group].key.clone();
        let actor = &mut self.coordinators[index].actors[group];
        let Some(turn) = &mut actor.turn else { return };
        let Stage::Entering(sent_at) = std::mem::replace(&mut turn.stage, Stage::Waiting) else { return };
        let token = turn.token.clone();
        match entered {
            Entered::Busy if now + pause < turn.deadline => {
                self.go_on(index, group, pause, Step::Enter);
                return;
            }
            Entered::Busy => {
                let is_known = turn.lost.is_none();
                self.fail(index, group, is_known.then_some("another instance works on it"));
                return;
            }
            _ => actor.watch.entered(sent_at, now, redis_time, true),
        }
        match entered {
            Entered::Missing => {
                actor.known = None;
                actor.watch.key_missing();
                actor.watch.turn_finished();
                self.ask(index, Asker::Actor(group), Op::Release { group, token });
                self.fail(index, group, None);
                return;
            }
            Entered::Loaded(snapshot) => match rsc_core::load(&key, &snapshot.fields, &settings) {
                Ok(found) => actor.known = Some(found),
                Err(error) => {
                    self.violate(format!("stored-is-decided: {error}"));
                    return;
                }
            },
            Entered::Unchanged | Entered::Busy => {}
        }
        let Some(known) = actor.known.take() else { return };
        if actor.watch.found(now, &known.stamp, true) {
            actor.loss_to_report = true;
        }
        actor.seen_version = actor.seen_version.max(known.group.metadata_version);
        self.decide(index, group, redis_time, known);
    }

    fn decide(&mut self, index: usize, group: usize, redis_time: i64, known: Loaded) {
        let now = self.at;
        let actor = &mut self.coordinators[index].actors[group];
        let Some(turn) = &mut actor.turn else { return };
        let token = turn.token.clone();
        if let Some(lost) = turn.lost.take()
            && known.stamp.live_revision == lost.expected.live_revision + 1
            && known.stamp.revision == lost.decision.group.store_revision
            && known.group == lost.decision.group
        {
            actor.watch.committed(now, &known.stamp);
            actor.loss_to_report &= !lost.notices_loss;
            actor.known = Some(known);
            self.ask(index, Asker::Actor(group), Op::Release { group, token });
            self.reply(index, group, &lost);
            return;
        }
        let jobs = turn.jobs.clone();
        let (may_expire, may_grant) = (actor.watch.may_expire(now), actor.watch.may_grant(now));
        let notices_loss = actor.loss_to_report;
        let loss = notices_loss
            .then_some(rsc_core::Command::LostWrites { observed_metadata_version: actor.seen_version });
        let mut commands: Vec<_> = loss.into_iter().chain(jobs.iter().map(Job::command)).collect();
        if commands.is_empty() {
            commands.push(rsc_core::Command::Tick);
        }
        let decided_on = Timestamp::from_millis(redis_time);
        let context = self.context(decided_on, may_expire, may_grant);
        let decision = decide(known.group.clone(), &known.stray_live, &commands, &context);
        self.counts.decisions += 1;
        let pending = Box::new(Pending {
            decision: Rc::new(decision),
            expected: known.stamp.clone(),
            now: decided_on,
            jobs,
            notices_loss,
        });
        let shard_count = known.group.shard_count;
        self.coordinators[index].actors[group].known = Some(known);
        if pending.decision.write.is_none() {
            self.ask(index, Asker::Actor(group), Op::Release { group, token });
            self.go_on(index, group, 0, Step::Reply(pending));
            return;
        }
        let changes_count = pending.decision.group.shard_count != shard_count;
        let steps = pending.jobs.iter().any(|job| !matches!(job, Job::Heartbeat { .. }));
        let chance = if changes_count {
            0.1
        } else if steps {
            0.03
        } else {
            0.003
        };
        if self.boundary(index, "after enter, before commit", chance) {
            self.go_on(index, group, 0, Step::Commit(pending));
        }
    }

    fn committed(&mut self, index: usize, group: usize, committed: Committed) {
        let now = self.at;
        let actor = &mut self.coordinators[index].actors[group];
        let Some(turn) = &mut actor.turn else { return };
        let Stage::Committing(pending) = std::mem::replace(&mut turn.stage, Stage::Waiting) else { return };
        match committed {
            Committed::Applied(stamp) => {
                actor.watch.committed(now, &stamp);
                actor.loss_to_report &= !pending.notices_loss;
                let decided = &pending.decision;
                actor.seen_version = actor.seen_version.max(decided.group.metadata_version);
                let is_lease_only =
                    decided.write.as_ref().is_some_and(|write| write.kind == WriteKind::LeaseOnly);
                let stray_live = actor.known.take().map(|known| known.stray_live).unwrap_or_default();
                let stray_live = if is_lease_only { stray_live } else { Vec::new() };
                actor.known = Some(Loaded { group: decided.group.clone(), stamp, stray_live });
                let steps = pending.jobs.iter().any(|job| !matches!(job, Job::Heartbeat { .. }));
                let chance = if steps { 0.03 } else { 0.003 };
                if self.boundary(index, "after commit, before the answers leave", chance) {
                    self.go_on(index, group, 0, Step::Reply(pending));
                }
            }
            Committed::Conflict(why) => {
                actor.known = None;
                turn.attempts += 1;
                let too_often = turn.attempts > ATTEMPTS;
                self.tell(|_| format!("coordinator {index}: conflict, {why}"));
                if too_often {
                    self.fail(index, group, Some("the state moved again and again"));
                } else {
                    self.go_on(index, group, 0, Step::Enter);
                }
            }
        }
    }

    pub(crate) fn actor_hears_nothing(&mut self, index: usize, group: usize, trip: u64) {
        let (now, acquire) = (self.at, self.shape.timing.acquire);
        let actor = &mut self.coordinators[index].actors[group];
        let Some(turn) = actor.turn.as_mut().filter(|turn| turn.trip == trip) else { return };
        turn.trip = 0;
        actor.lost_tokens.push(turn.token.clone());
        let beyond = actor.lost_tokens.len().saturating_sub(8);
        actor.lost_tokens.drain(..beyond);
        match std::mem::replace(&mut turn.stage, Stage::Waiting) {
            Stage::Entering(_) => self.fail(index, group, None),
            Stage::Committing(pending) => {
                actor.known = None;
                turn.attempts += 1;
                turn.deadline = now + acquire;
                turn.lost = Some(pending);
                if turn.attempts > ATTEMPTS {
                    self.fail(index, group, None);
                } else {
                    self.go_on(index, group, 0, Step::Enter);
                }
            }
            Stage::Waiting => {}
        }
    }

    /// Nothing came of a turn: `RETRY` with a reason, or an error.
    fn fail(&mut self, index: usize, group: usize, retry: Option<&str>) {
        let Some(turn) = self.coordinators[index].actors[group].turn.take() else { return };
        for job in turn.jobs {
            match job {
                Job::Heartbeat { request, process } => self.refuse(process, &request, retry),
                Job::Migrate { order, .. } | Job::Provisioned { order } => {
                    self.driver_told(index, order, None);
                }
            }
        }
        self.end_turn(index, group);
    }

    fn reply(&mut self, index: usize, group: usize, pending: &Pending) {
        let life = self.coordinators[index].life;
        let replies = &pending.decision.replies;
        let replies = replies.iter().skip(replies.len().saturating_sub(pending.jobs.len()));
        for (job, reply) in pending.jobs.iter().zip(replies) {
            match (job, reply) {
                (Job::Heartbeat { request, process }, Reply::Heartbeat(response)) => {
                    self.respond(*process, &request.request_id, Some((**response).clone()));
                }
                (Job::Heartbeat { request, process }, _) => self.respond(*process, &request.request_id, None),
                (Job::Migrate { order, .. } | Job::Provisioned { order }, reply) => {
                    self.driver_told(index, *order, Some(reply.clone()));
                }
            }
        }
        let coordinator = &mut self.coordinators[index];
        if coordinator.life == life {
            coordinator.actors[group].watch.turn_finished();
            coordinator.actors[group].turn = None;
            self.end_turn(index, group);
        }
    }

    fn end_turn(&mut self, index: usize, group: usize) {
        let redis_ahead = self.groups[group].redis.time(0);
        let (now, heartbeat) = (self.at, self.shape.timing.heartbeat);
        let coordinator = &mut self.coordinators[index];
        let actor = &mut coordinator.actors[group];
        if !coordinator.alive || actor.turn.is_some() {
            return;
        }
        if !actor.queue.is_empty() {
            self.begin_turn(index, group);
            return;
        }
        actor.timer += 1;
        let (life, timer) = (coordinator.life, actor.timer);
        let deadline = |known: &Loaded| known.group.next_deadline(&self.shape.timing.core);
        let at = match actor.known.as_ref().map(deadline) {
            Some(Some(deadline)) => (deadline.as_millis() - redis_ahead + 2)
                .max(actor.watch.in_service_from())
                .max(now + heartbeat / 3),
            Some(None) => return,
            None => now + heartbeat,
        };
        self.schedule(at, Event::Tick { coordinator: index, life, group, timer });
    }
}
