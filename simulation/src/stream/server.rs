//! What Redis does when it is asked, each at one instant, and every invariant of what that leaves behind.

use std::rc::Rc;

use rsc_core::migration::stream::ShardFacts;
use rsc_core::{Command, Group, WriteKind};
use rsc_protocol::resharding::MigrationState;

use super::coordinator::{Job, Pending};
use super::plan::StreamFault;
use super::world::{Event, Op, Said, StreamWorld};
use crate::check;
use crate::redis::Committed;

impl StreamWorld {
    pub(crate) fn redis_does(&mut self, coordinator: usize, life: u64, op: Op) -> Said {
        let now = self.groups[0].redis.time(self.at);
        match op {
            Op::Enter { group, token } => {
                let asker = &self.coordinators[coordinator];
                let actor = &asker.actors[group];
                let (takeover, remembered) = if asker.life == life {
                    (actor.lost_tokens.clone(), actor.known.as_ref().map(|known| known.stamp.clone()))
                } else {
                    (Vec::new(), None)
                };
                let (at, ttl) = (self.at, self.shape.timing.mutex);
                let redis = &mut self.groups[group].redis;
                Said::Entered(redis.enter(at, &token, &takeover, remembered.as_ref(), ttl, true))
            }
            Op::Commit { group, token, pending } => Said::Committed(self.apply(group, &token, &pending)),
            Op::Release { group, token } => {
                self.groups[group].redis.release(&token);
                Said::Done
            }
            Op::Read { group } => Said::Read(self.groups[group].redis.stored.clone()),
            Op::Lock { token } => {
                let is_free = self.lock.as_ref().is_none_or(|(_, until)| *until <= now);
                if is_free {
                    self.lock = Some((token, now + self.shape.timing.mutex));
                }
                Said::Locked(is_free)
            }
            Op::Renew { token } => {
                let holds =
                    self.lock.as_ref().is_some_and(|(holder, until)| *holder == token && *until > now);
                if holds {
                    self.lock = Some((token, now + self.shape.timing.mutex));
                }
                Said::Locked(holds)
            }
            Op::Unlock { token } => {
                if self.lock.as_ref().is_some_and(|(holder, _)| *holder == token) {
                    self.lock = None;
                }
                Said::Done
            }
            Op::Create { group, count } => {
                if !self.groups[group].exists {
                    self.tell(|world| format!("group {} is created with {count} shards", world.name(group)));
                    self.create_group(group, count);
                }
                Said::Done
            }
            Op::Provision { group, shard } => {
                self.streams.create_group(shard, group);
                self.destroyed.retain(|one| *one != (shard, group));
                Said::Done
            }
            Op::Prove { shard, coordinated } => {
                let facts = self.streams.prove(shard, &coordinated, self.proof_rules());
                self.tell(|_| format!("         shard {shard}: {facts:?}"));
                if facts.is_empty && facts.exists {
                    self.write_behind_the_proof(shard);
                }
                Said::Facts(shard, facts)
            }
            Op::Delete { before, .. } if now >= before && !self.plan.lacks(StreamFault::LateDeletion) => {
                Said::Locked(false)
            }
            Op::Delete { shard, coordinated, .. } => Said::Facts(shard, self.delete(shard, &coordinated)),
        }
    }

    fn delete(&mut self, shard: u32, coordinated: &[(usize, String)]) -> ShardFacts {
        let facts = self.streams.prove(shard, coordinated, self.proof_rules());
        let proven = facts.is_empty || self.plan.lacks(StreamFault::DeletedUnproven);
        if !proven || !facts.exists {
            return facts;
        }
        self.streams.keys.remove(&shard);
        self.counts.deletions += 1;
        self.tell(|_| format!("the key of shard {shard} is deleted"));
        if self.is_faulty && self.dice.chance(0.3) {
            let soon = self.at + self.dice.between(100, self.shape.timing.lease);
            self.schedule(soon, Event::ScaleOut);
        }
        let lost = self.ledger.open_in(shard).next();
        if let Some((id, groups)) = lost {
            self.violate(format!(
                "record-lost: record {id} of shard {shard} is deleted, groups {groups:?} have not read it"
            ));
        }
        self.destroyed.retain(|(destroyed, _)| *destroyed != shard);
        ShardFacts { is_empty: true, ..ShardFacts::default() }
    }

    /// The commit script, and every invariant of what it wrote.
    fn apply(&mut self, group: usize, token: &str, pending: &Pending) -> Committed {
        let Some(write) = &pending.decision.write else { return Committed::Conflict("nothing to write") };
        let (at, lease) = (self.at, self.shape.timing.lease);
        let record = &mut self.groups[group];
        let before = record.redis.stored.clone();
        let decided = &pending.decision.group;
        let committed = record.redis.commit(at, token, &pending.expected, write, decided, true, true);
        let (Committed::Applied(_), Some(before)) = (&committed, before) else { return committed };
        record.replaced_at.push(at);
        let mut wrong = check::commit(&before.group, &pending.decision, pending.now, lease);
        if write.kind != WriteKind::LeaseOnly
            && let Some(stored) = &self.groups[group].redis.stored
        {
            wrong.extend(check::stored(&pending.decision, &stored.fields, &self.shape.timing.core));
        }
        self.tell(|world| recorded(world.name(group), pending));
        wrong.extend(self.check_steps(group, &before.group, decided));
        for what in wrong {
            self.violate(what);
        }
        if pending.jobs.iter().any(|job| matches!(job.command(), Command::Provisioned))
            && !decided.provisioning_pending
            && !self.groups[group].is_admitted
        {
            self.admit(group, decided.shard_count);
        }
        committed
    }

    /// What the steps of migrations promise when they are recorded (protocol 6).
    fn check_steps(&mut self, group: usize, before: &Group, after: &Group) -> Vec<String> {
        let mut wrong = Vec::new();
        for (id, migration) in &after.migrations {
            let former = before.migrations.get(id);
            if migration.activated_at.is_some() && former.is_none_or(|former| former.activated_at.is_none()) {
                self.activated_at.entry(id.clone()).or_insert(self.at);
            }
            let was_over = former.is_none_or(|former| former.state.is_over());
            if migration.state.is_over() && !was_over {
                self.counts.finished += 1;
                let is_back = migration.state == MigrationState::RolledBack;
                self.counts.rolled_back += u64::from(is_back);
                wrong.extend(self.finished_while_full(&migration.retired));
            }
        }
        if after.shard_count != before.shard_count {
            self.cut_off_who_was_told(group);
        }
        let grows = after.shard_count > before.shard_count;
        if grows && let Some(shard) = self.unprovisioned(after.shard_count) {
            wrong.push(format!(
                "provisioned-before-activated: {} has {} shards, shard {shard} lacks a group",
                self.name(group),
                after.shard_count
            ));
        }
        wrong
    }

    /// Nothing is finished while a real record is left.
    fn finished_while_full(&self, removed: &rsc_core::ShardSet) -> Option<String> {
        // After a loss producers may rightly have been told another count in the meantime; the end is looked at then.
        if self.losses > 0 || self.shape.has_forgotten_producer {
            return None;
        }
        removed.iter().find_map(|shard| {
            let (id, groups) = self.ledger.open_in(shard).next()?;
            Some(format!("finished-while-full: record {id} of shard {shard}, groups {groups:?}"))
        })
    }

    /// A shard below the count that a group of the stream does not exist on.
    fn unprovisioned(&self, count: u32) -> Option<u32> {
        (0..count).find(|shard| {
            (0..self.groups.len()).any(|group| {
                let by_hand = self.destroyed.contains(&(*shard, group)) || self.undone.contains(shard);
                self.groups[group].is_admitted && !by_hand && !self.streams.has_group(*shard, group)
            })
        })
    }

    /// The consumer group's name.
    #[must_use]
    pub(crate) fn name(&self, group: usize) -> &'static str {
        super::world::GROUPS[group]
    }

    /// The records of every group that exists, as far as they are there.
    pub(crate) fn stored(&self) -> Vec<Rc<crate::redis::Snapshot>> {
        self.groups.iter().filter_map(|group| group.redis.stored.clone()).collect()
    }
}

fn recorded(group: &str, pending: &Pending) -> String {
    let decided = &pending.decision.group;
    let steps = pending.jobs.iter().filter_map(|job| match job {
        Job::Migrate { id, step, .. } => Some(format!("{id} {}", step.name())),
        Job::Provisioned { .. } => Some("provisioned".to_owned()),
        Job::Heartbeat { .. } => None,
    });
    let steps: Vec<String> = steps.collect();
    let what: Vec<String> = pending.decision.transitions.iter().map(|one| format!("{one:?}")).collect();
    format!(
        "{group} records r{} v{} count {} {} {}",
        decided.store_revision,
        decided.metadata_version,
        decided.shard_count,
        steps.join(", "),
        what.join(", ")
    )
}
