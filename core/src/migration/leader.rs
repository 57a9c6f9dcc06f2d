//! The migration that a stream follows, and where its groups are with it (protocol 6).

use rsc_protocol::Timestamp;
use rsc_protocol::resharding::{MigrationState, RollbackNote};

use super::stream::Todo;
use super::{Migration, MigrationSpec, MigrationStep};
use crate::group::Group;
use crate::shards::ShardSet;

/// The newest migration that any group records, finished ones included, as far as any of them is with it.
pub(super) struct Leader {
    pub(super) spec: MigrationSpec,
    /// Somebody has recorded the way back.
    pub(super) rollback: Option<RollbackNote>,
    pub(super) is_back: bool,
    /// Some group may have told its producers the new count. The barrier before *Activate* counts: who has told
    /// it may be the very group whose record Redis has lost.
    pub(super) may_be_told: bool,
    /// Every group that records it has finished it.
    pub(super) is_over: bool,
}

impl Leader {
    pub(super) fn of(groups: &[Group]) -> Option<Leader> {
        let all = || groups.iter().flat_map(|group| group.migrations.values());
        // What was taken back before anybody was told of it says nothing about the stream, unless somebody has
        // not heard of that yet.
        let counts = |id: &str| all().any(|other| other.resharding_id == id && !other.never_began());
        let newest = all()
            .filter(|migration| counts(&migration.resharding_id))
            .max_by_key(|migration| (migration.created_at, migration.resharding_id.as_str()))?
            .spec();
        let records = || all().filter(|migration| migration.resharding_id == newest.resharding_id);
        Some(Leader {
            rollback: records().find_map(|migration| migration.rollback.clone()),
            is_back: records().any(|migration| migration.state.is_back()),
            may_be_told: records().any(|migration| migration.provisioned || migration.activated_at.is_some()),
            is_over: records().all(|migration| migration.state.is_over()),
            spec: newest,
        })
    }

    pub(super) fn id(&self) -> &str {
        &self.spec.resharding_id
    }

    pub(super) fn count(&self) -> u32 {
        if self.is_back { self.spec.from_shard_count } else { self.spec.to_shard_count }
    }

    pub(super) fn step(&self, group: &Group, step: MigrationStep) -> Todo {
        Todo::Step { group: group.key.clone(), resharding_id: self.id().to_owned(), step }
    }

    pub(super) fn prepare(&self, group: &Group) -> Todo {
        self.step(group, MigrationStep::Prepare { spec: Box::new(self.spec.clone()), compare: true })
    }

    /// Every shard that the stream has before, during or after the migration, or that anybody still reads.
    pub(super) fn every_shard(&self, groups: &[Group]) -> ShardSet {
        let known = self.spec.from_shard_count.max(self.spec.to_shard_count);
        groups
            .iter()
            .flat_map(|group| group.read_set().to_set().iter().collect::<Vec<_>>())
            .chain(0..known)
            .collect()
    }

    /// Where a group is with the migration; `None`: its record lacks it, or contradicts it.
    pub(super) fn standing<'g>(&self, group: &'g Group) -> Option<&'g Migration> {
        let migration = group.migration(self.id())?;
        let runs = group.active_resharding_id.as_deref();
        match migration.state {
            state if state.is_over() => {
                let has_arrived = runs.is_none() && group.shard_count == self.count();
                has_arrived.then_some(migration)
            }
            _ => (runs == Some(self.id())).then_some(migration),
        }
    }

    /// What each group records of it, whatever else it records.
    pub(super) fn records<'g>(
        &self,
        groups: &'g [Group],
    ) -> impl Iterator<Item = (&'g Group, &'g Migration)> + use<'g, '_> {
        groups.iter().filter_map(|group| Some((group, group.migration(self.id())?)))
    }

    /// `todo` for each group that `which` says so of.
    pub(super) fn for_each<'g>(
        &self,
        groups: &'g [Group],
        which: impl Fn(&Migration) -> bool,
        todo: impl Fn(&'g Group) -> Vec<Todo>,
    ) -> Vec<Todo> {
        groups.iter().filter(|group| self.standing(group).is_some_and(&which)).flat_map(todo).collect()
    }

    /// Groups whose record lacks the migration are prepared again.
    pub(super) fn prepare_again(&self, groups: &[Group]) -> Vec<Todo> {
        let lacking = groups.iter().filter(|group| self.standing(group).is_none());
        lacking.map(|group| self.prepare(group)).collect()
    }

    /// While groups route differently, because Redis has lost writes of one of them, its producers may write into
    /// shards that another has given up: until they agree the read set is the union.
    pub(super) fn widen(&self, groups: &[Group]) -> Vec<Todo> {
        let most = groups.iter().map(|group| group.shard_count).max().unwrap_or(0);
        let reopens = |migration: &Migration| match migration.state {
            MigrationState::Preparing => false,
            MigrationState::RollingBack | MigrationState::RolledBack => migration.count_restored,
            MigrationState::Active | MigrationState::Draining | MigrationState::Deprecated => true,
        };
        self.for_each(groups, reopens, |group| {
            let unread = ShardSet::from(0..most).minus(&group.read_set().to_set());
            if unread.is_empty() {
                return Vec::new();
            }
            let create = Todo::Provision { group: group.key.clone(), shards: unread.clone() };
            vec![create, self.step(group, MigrationStep::Reopen(unread))]
        })
    }
}

/// An instant for a new migration of the stream: now, but later than any that is on record, whatever the clock
/// has done, because the newest of a stream wins (protocol 6).
#[must_use]
pub fn creation_time(groups: &[Group], now: Timestamp) -> Timestamp {
    let all = groups.iter().flat_map(|group| group.migrations.values());
    all.map(|migration| migration.created_at.plus(1)).max().map_or(now, |later| later.max(now))
}
