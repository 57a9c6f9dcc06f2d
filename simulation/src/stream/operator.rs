//! What operators ask for: another count, the way back, another group.

use std::collections::VecDeque;

use rsc_core::migration::stream::{self, Next, Todo};
use rsc_core::{Group, Migration, MigrationSpec, MigrationStep};
use rsc_protocol::Timestamp;
use rsc_protocol::resharding::{MigrationState, Retire, RollbackNote};

use super::plan::StreamFault;
use super::world::{Event, GROUPS, MOST_SHARDS, StreamWorld};

/// A request of an operator.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    /// Another count.
    Scale {
        /// The count.
        target: u32,
        /// What becomes of removed shards.
        retire: Retire,
        /// The earliest end, in milliseconds from now.
        deprecated_after: Option<i64>,
    },
    /// The way back.
    Rollback,
    /// The last of [`GROUPS`].
    CreateGroup,
}

/// Who asks for a rollback.
pub(crate) fn note(now: i64) -> RollbackNote {
    RollbackNote {
        requested_by: "operator".to_owned(),
        reason: "simulated".to_owned(),
        requested_at: Timestamp::from_millis(now),
    }
}

/// The migration that steps are about.
pub(crate) fn id_of(todo: &VecDeque<Todo>) -> String {
    todo.iter()
        .find_map(|todo| match todo {
            Todo::Step { resharding_id, .. } => Some(resharding_id.clone()),
            _ => None,
        })
        .unwrap_or_default()
}

impl StreamWorld {
    /// An operator asks whichever instance the load balancer picks.
    pub(crate) fn operate(&mut self) {
        if !self.is_faulty {
            return;
        }
        let request = match self.dice.between(0, 20) {
            0..=1 => Request::Rollback,
            5 if !self.groups[GROUPS.len() - 1].exists => Request::CreateGroup,
            _ => {
                let target = u32::try_from(self.dice.between(0, MOST_SHARDS)).unwrap_or(0);
                let deletes = self.shape.has_forgotten_producer || self.dice.chance(0.5);
                let retire = if deletes { Retire::Delete } else { Retire::Keep };
                let latest = self.shape.timing.lease * 2;
                let deprecated_after = self.dice.chance(0.15).then(|| self.dice.between(1, latest));
                Request::Scale { target, retire, deprecated_after }
            }
        };
        let creates = matches!(request, Request::Scale { .. }) && self.dice.chance(0.25);
        self.request(request);
        if creates {
            // Somebody else, who does not know of the change.
            let soon = self.at + self.dice.between(0, 200);
            self.schedule(soon, Event::CreateGroup);
        }
        let pause = self.dice.between(1, 2 * self.shape.timing.lease);
        self.schedule(self.at + pause, Event::Operate);
    }

    /// Everything that has just been taken away is wanted again.
    pub(crate) fn scale_out(&mut self) {
        if self.is_faulty {
            let target = u32::try_from(MOST_SHARDS).unwrap_or(1);
            self.request(Request::Scale { target, retire: Retire::Delete, deprecated_after: None });
        }
    }

    fn request(&mut self, request: Request) {
        let index = self.dice.below(self.coordinators.len());
        if self.coordinators[index].alive {
            self.tell(|_| format!("operator asks coordinator {index}: {request:?}"));
            self.coordinators[index].driver.requests.push_back(request);
            if matches!(self.coordinators[index].driver.phase, super::driver::Phase::Idle) {
                self.schedule_drive(index, 1);
            }
        }
    }

    /// Another group is asked for.
    pub(crate) fn ask_for_a_group(&mut self) {
        let group = GROUPS.len() - 1;
        if !self.is_faulty || self.groups[group].exists {
            return;
        }
        let count = self.groups[0].redis.stored.as_ref().map(|stored| stored.group.shard_count);
        if let (true, Some(count)) = (self.plan.lacks(StreamFault::GroupBornDuringMigration), count) {
            self.tell(|_| "a group is created whatever runs".to_owned());
            self.create_group(group, count);
            (0..count).for_each(|shard| self.streams.create_group(shard, group));
            let index = self.dice.below(self.coordinators.len());
            if self.coordinators[index].alive {
                self.give(index, group, super::coordinator::Job::Provisioned { order: 0 });
            }
        } else {
            self.request(Request::CreateGroup);
        }
    }

    /// What a request amounts to, by the records of all groups; or why it is refused.
    pub(crate) fn todos_of(
        &mut self,
        request: &Request,
        groups: &[Group],
        now: i64,
        next: &Next,
    ) -> Result<Vec<Todo>, &'static str> {
        let running = groups.iter().filter_map(Group::active_migration);
        let running =
            running.max_by_key(|migration| (migration.created_at, migration.resharding_id.as_str()));
        let in_round = groups.iter().any(|group| group.metadata_correction.is_some());
        match request {
            Request::Scale { target, retire, deprecated_after } => {
                if let Some(running) = running {
                    let same = running.to_shard_count == *target && !running.state.is_back();
                    return if same { Ok(next.todo.clone()) } else { Err("another migration runs") };
                }
                if in_round {
                    return Err("members are being brought back");
                }
                if !next.has_settled() {
                    return Err("the groups are being brought to one count");
                }
                let Some(first) = groups.first() else { return Err("there is no group") };
                if groups.iter().any(|group| group.provisioning_pending) {
                    return Err("a group is being created");
                }
                if first.shard_count == *target {
                    return Err("it is the present count");
                }
                self.counts.scales += 1;
                let spec = MigrationSpec {
                    resharding_id: format!("m{}", self.trips),
                    from_shard_count: first.shard_count,
                    to_shard_count: *target,
                    created_at: stream::creation_time(groups, Timestamp::from_millis(now)),
                    requested_by: "operator".to_owned(),
                    reason: "simulated".to_owned(),
                    deprecated_after: deprecated_after.map(|after| Timestamp::from_millis(now + after)),
                    retire: *retire,
                    repairs: false,
                };
                let prepare = |group: &Group| Todo::Step {
                    group: group.key.clone(),
                    resharding_id: spec.resharding_id.clone(),
                    step: MigrationStep::Prepare { spec: Box::new(spec.clone()), compare: false },
                };
                Ok(groups.iter().map(prepare).collect())
            }
            Request::Rollback => {
                let Some(running) = running else { return Err("nothing runs") };
                if in_round {
                    return Err("members are being brought back");
                }
                if self.shape.has_forgotten_producer && running.state == MigrationState::Preparing {
                    // Its shards stay, and who does not know this protocol may write into them.
                    return Err("not in this run");
                }
                let id = running.resharding_id.clone();
                let known = running.from_shard_count.max(running.to_shard_count);
                let records = || groups.iter().filter_map(|group| Some((group, group.migration(&id)?)));
                let too_far = |migration: &Migration| {
                    migration.state == MigrationState::Deprecated || migration.deleting || migration.repairs
                };
                if records().any(|(_, migration)| too_far(migration)) {
                    return Err("it has gone too far");
                }
                if records().any(|(_, migration)| migration.state.is_back()) {
                    return Ok(next.todo.clone());
                }
                let whole = records().any(|(_, migration)| migration.activated_at.is_some());
                let Some((first, _)) = records().next() else { return Err("nothing runs") };
                let step = MigrationStep::Rollback { note: Box::new(note(now)), whole, compare: false };
                let step = Todo::Step { group: first.key.clone(), resharding_id: id.clone(), step };
                let create = Todo::Provision { group: first.key.clone(), shards: (0..known).collect() };
                Ok(if whole { vec![create, step] } else { vec![step] })
            }
            Request::CreateGroup => {
                let is_free = running.is_none() && next.has_settled();
                let group = GROUPS.len() - 1;
                if self.groups[group].exists || !is_free {
                    return Err("a migration runs");
                }
                if groups.is_empty() { Err("there is no group") } else { Ok(Vec::new()) }
            }
        }
    }
}
