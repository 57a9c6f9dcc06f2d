//! Which step comes next in which group of a stream (protocol 6), decided from the records of all of them.
//!
//! One stream prefix has one shard count, but each group is a Redis key of its own: a process may die between two
//! groups' steps, and Redis may lose the writes of one of them. So nothing is remembered outside of the records,
//! every step can be repeated, and what is to be done follows from how the records differ: the newest migration that
//! any of them knows wins, and whoever is behind is brought there.

use std::collections::BTreeMap;

use rsc_protocol::resharding::{MigrationState, Retire, RollbackNote};
use rsc_protocol::{GroupKey, Timestamp};

use super::{Migration, MigrationSpec, MigrationStep};
use crate::group::Group;
use crate::settings::{Settings, millis};
use crate::shards::ShardSet;

/// What one look at a shard's stream showed (protocol 6, *Drain*).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardFacts {
    /// Nothing undelivered and nothing pending in any Redis consumer group, and every coordinated group is there;
    /// or the key does not exist.
    pub is_empty: bool,
    /// The key exists.
    pub exists: bool,
    /// Coordinated groups that do not exist on the key.
    pub missing_groups: Vec<String>,
}

/// All groups of one stream prefix, and what is known besides their records.
#[derive(Clone, Copy, Debug)]
pub struct StreamView<'v> {
    /// Every group of the prefix, loaded from the store.
    pub groups: &'v [Group],
    /// Redis time.
    pub now: Timestamp,
    /// Timing.
    pub settings: &'v Settings,
    /// What was found in shards since the last step; empty before anybody looked.
    pub facts: &'v BTreeMap<u32, ShardFacts>,
    /// The id to use if groups differ and no migration explains it.
    pub fresh_id: &'v str,
}

/// Something to do for one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Todo {
    /// Create the group on the streams of these shards.
    Provision {
        /// The group.
        group: GroupKey,
        /// The shards.
        shards: ShardSet,
    },
    /// Record a step.
    Step {
        /// The group.
        group: GroupKey,
        /// The migration.
        resharding_id: String,
        /// The step.
        step: MigrationStep,
    },
    /// Look into these shards, and ask again with what was found.
    Prove(ShardSet),
    /// Delete the keys of these shards, each if it is still empty in the same breath; ask again with what was found.
    Delete(ShardSet),
}

/// What comes next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Next {
    /// To do now, in this order; ask again when it is done.
    pub todo: Vec<Todo>,
    /// Nothing to do before; `None` with an empty `todo`: the stream has settled, or only members or records can
    /// move it on.
    pub wake_at: Option<Timestamp>,
    /// What it waits for, for people; empty when it has settled.
    pub waits_for: String,
}

impl Next {
    fn todo(todo: Vec<Todo>) -> Self {
        Next { todo, ..Next::default() }
    }

    fn wait(waits_for: impl Into<String>, wake_at: Option<Timestamp>) -> Self {
        Next { todo: Vec::new(), wake_at, waits_for: waits_for.into() }
    }

    /// Whether the groups agree and nothing is under way.
    #[must_use]
    pub fn has_settled(&self) -> bool {
        self.todo.is_empty() && self.waits_for.is_empty()
    }
}

/// The newest migration that any group records, finished ones included, as far as any of them is with it.
struct Leader {
    spec: MigrationSpec,
    /// Somebody has recorded the way back.
    rollback: Option<RollbackNote>,
    is_back: bool,
    /// Some group may have told its producers the new count.
    was_activated: bool,
    /// Every group that records it has finished it.
    is_over: bool,
}

impl Leader {
    fn of(groups: &[Group]) -> Option<Leader> {
        let all = || groups.iter().flat_map(|group| group.migrations.values());
        let newest =
            all().max_by_key(|migration| (migration.created_at, migration.resharding_id.as_str()))?.spec();
        let records = || all().filter(|migration| migration.resharding_id == newest.resharding_id);
        Some(Leader {
            rollback: records().find_map(|migration| migration.rollback.clone()),
            is_back: records().any(|migration| migration.state.is_back()),
            was_activated: records().any(|migration| migration.activated_at.is_some()),
            is_over: records().all(|migration| migration.state.is_over()),
            spec: newest,
        })
    }

    fn id(&self) -> &str {
        &self.spec.resharding_id
    }

    fn count(&self) -> u32 {
        if self.is_back { self.spec.from_shard_count } else { self.spec.to_shard_count }
    }

    fn step(&self, group: &Group, step: MigrationStep) -> Todo {
        Todo::Step { group: group.key.clone(), resharding_id: self.id().to_owned(), step }
    }

    fn prepare(&self, group: &Group) -> Todo {
        self.step(group, MigrationStep::Prepare { spec: Box::new(self.spec.clone()), compare: true })
    }

    /// Every shard that the stream has before, during or after the migration, or that anybody still reads.
    fn every_shard(&self, groups: &[Group]) -> ShardSet {
        let known = self.spec.from_shard_count.max(self.spec.to_shard_count);
        groups
            .iter()
            .flat_map(|group| group.read_set().to_set().iter().collect::<Vec<_>>())
            .chain(0..known)
            .collect()
    }
}

/// What comes next for the stream.
#[must_use]
pub fn next(view: &StreamView<'_>) -> Next {
    let Some(first) = view.groups.first() else { return Next::default() };
    let Some(leader) = Leader::of(view.groups) else {
        let differ = view.groups.iter().any(|group| group.shard_count != first.shard_count);
        return if differ { repair(view) } else { Next::default() };
    };
    let agrees = |group: &Group| group.active_resharding_id.is_none() && group.shard_count == leader.count();
    if leader.is_over && view.groups.iter().all(agrees) {
        return Next::default();
    }
    if planted!(CountsNotCompared) && leader.is_over {
        return Next::default();
    }
    if leader.is_back { back(view, &leader) } else { forth(view, &leader) }
}

/// Groups that differ although no migration is on record: the count of the one that was created first is the
/// stream's (protocol 6).
fn repair(view: &StreamView<'_>) -> Next {
    let oldest = view.groups.iter().min_by_key(|group| (group.created_at, &group.key));
    let most = view.groups.iter().map(|group| group.shard_count).max();
    let (Some(oldest), Some(most)) = (oldest, most) else { return Next::default() };
    let spec = MigrationSpec {
        resharding_id: view.fresh_id.to_owned(),
        from_shard_count: most,
        to_shard_count: oldest.shard_count,
        created_at: view.now,
        requested_by: "coordinator".to_owned(),
        reason: format!("the groups of the stream had different counts: {} is the oldest", oldest.key),
        deprecated_after: None,
        retire: Retire::Keep,
        repairs: true,
    };
    let prepare = |group: &Group| Todo::Step {
        group: group.key.clone(),
        resharding_id: spec.resharding_id.clone(),
        step: MigrationStep::Prepare { spec: Box::new(spec.clone()), compare: true },
    };
    Next::todo(view.groups.iter().map(prepare).collect())
}

/// Where a group is with the leading migration; `None`: its record lacks it, or contradicts it.
fn standing<'g>(group: &'g Group, leader: &Leader) -> Option<&'g Migration> {
    let migration = group.migration(leader.id())?;
    let runs = group.active_resharding_id.as_deref();
    match migration.state {
        state if state.is_over() => {
            let has_arrived = runs.is_none() && group.shard_count == leader.count();
            has_arrived.then_some(migration)
        }
        _ => (runs == Some(leader.id())).then_some(migration),
    }
}

/// Steps for each group that `which` says so of.
fn for_each<'g>(
    groups: &'g [Group],
    leader: &Leader,
    which: impl Fn(&Migration) -> bool,
    todo: impl Fn(&'g Group) -> Vec<Todo>,
) -> Vec<Todo> {
    groups.iter().filter(|group| standing(group, leader).is_some_and(&which)).flat_map(todo).collect()
}

/// Groups whose record lacks the migration are prepared again.
fn prepare_again(view: &StreamView<'_>, leader: &Leader) -> Vec<Todo> {
    view.groups
        .iter()
        .filter(|group| standing(group, leader).is_none())
        .map(|group| leader.prepare(group))
        .collect()
}

fn forth(view: &StreamView<'_>, leader: &Leader) -> Next {
    let lacking = prepare_again(view, leader);
    if !lacking.is_empty() {
        return Next::todo(lacking);
    }
    let unprovisioned =
        |migration: &Migration| migration.state == MigrationState::Preparing && !migration.provisioned;
    let provision = for_each(view.groups, leader, unprovisioned, |group| {
        let shards = leader.every_shard(view.groups);
        let create = Todo::Provision { group: group.key.clone(), shards };
        vec![create, leader.step(group, MigrationStep::Provisioned)]
    });
    if !provision.is_empty() {
        return Next::todo(provision);
    }
    let preparing = |migration: &Migration| migration.state == MigrationState::Preparing;
    let activate =
        for_each(view.groups, leader, preparing, |group| vec![leader.step(group, MigrationStep::Activate)]);
    if !activate.is_empty() {
        return Next::todo(activate);
    }
    let due = caches_end(view, leader);
    if due > view.now {
        return Next::wait(format!("producers may use the former count until {due}"), Some(due));
    }
    let removed = removed_shards(view, leader);
    if removed.is_empty() {
        return end(view, leader);
    }
    let active = |migration: &Migration| migration.state == MigrationState::Active;
    let begin =
        for_each(view.groups, leader, active, |group| vec![leader.step(group, MigrationStep::BeginDrain)]);
    if !begin.is_empty() {
        return Next::todo(begin);
    }
    drain(view, leader, &removed)
}

fn back(view: &StreamView<'_>, leader: &Leader) -> Next {
    let note = leader.rollback.clone().unwrap_or_else(|| RollbackNote {
        requested_by: "coordinator".to_owned(),
        reason: "another group of the stream has gone back".to_owned(),
        requested_at: view.now,
    });
    let differs = view.groups.iter().any(|group| group.shard_count != leader.spec.from_shard_count);
    let whole = leader.was_activated || differs;
    let lacking = if whole { prepare_again(view, leader) } else { Vec::new() };
    if !lacking.is_empty() {
        return Next::todo(lacking);
    }
    let goes_forth = |migration: &Migration| {
        !migration.state.is_back()
            || (whole && migration.state == MigrationState::RolledBack && !migration.count_restored)
    };
    let rollback = for_each(view.groups, leader, goes_forth, |group| {
        let step = leader
            .step(group, MigrationStep::Rollback { note: Box::new(note.clone()), whole, compare: true });
        let shards = leader.every_shard(view.groups);
        let create = Todo::Provision { group: group.key.clone(), shards };
        if whole { vec![create, step] } else { vec![step] }
    });
    if !rollback.is_empty() {
        return Next::todo(rollback);
    }
    // Consumers of every group read again what producers are about to be told of.
    let without_count =
        |migration: &Migration| migration.state == MigrationState::RollingBack && !migration.count_restored;
    let restore = for_each(view.groups, leader, without_count, |group| {
        vec![leader.step(group, MigrationStep::RestoreCount)]
    });
    if !restore.is_empty() {
        return Next::todo(restore);
    }
    let removed = removed_shards(view, leader);
    if removed.is_empty() {
        return end(view, leader);
    }
    let due = caches_end(view, leader);
    if due > view.now {
        return Next::wait(format!("producers may use the count that is taken back until {due}"), Some(due));
    }
    drain(view, leader, &removed)
}

fn records<'v>(view: &StreamView<'v>, leader: &Leader) -> impl Iterator<Item = (&'v Group, &'v Migration)> {
    let id = leader.id().to_owned();
    view.groups.iter().filter_map(move |group| Some((group, group.migration(&id)?)))
}

/// Until when a producer may use a count that some group of the stream has told before: counted from the last change
/// in any of them, with the longest cache lease any of them has handed out.
fn caches_end(view: &StreamView<'_>, leader: &Leader) -> Timestamp {
    if planted!(CacheLeaseIgnored) {
        return view.now;
    }
    let last = records(view, leader).filter_map(|(_, migration)| migration.activated_at).max();
    let lease = records(view, leader)
        .map(|(group, migration)| migration.cache_lease_ms.max(group.max_routing_cache_ttl_ms))
        .max()
        .unwrap_or(0);
    last.unwrap_or(view.now).plus(millis(lease.saturating_add(view.settings.publish_margin_ms)))
}

fn removed_shards(view: &StreamView<'_>, leader: &Leader) -> ShardSet {
    records(view, leader).flat_map(|(_, migration)| migration.removed().iter().collect::<Vec<_>>()).collect()
}

/// From the first removed shard that is still read to the end.
fn drain(view: &StreamView<'_>, leader: &Leader, removed: &ShardSet) -> Next {
    let open: ShardSet = records(view, leader)
        .flat_map(|(_, migration)| migration.draining().iter().collect::<Vec<_>>())
        .collect();
    // While some are read nobody asks about the rest: the end looks at all of them again.
    let asked = if open.is_empty() { removed } else { &open };
    if open.is_empty() {
        let touched: ShardSet = view
            .groups
            .iter()
            .flat_map(|group| group.still_touched(removed).iter().collect::<Vec<_>>())
            .collect();
        if !touched.is_empty() {
            let shards = crate::turn::ranges(&touched);
            return Next::wait(format!("members still hold shards {shards}, which are empty"), None);
        }
        if !leader.is_back
            && let Some(at) = leader.spec.deprecated_after.filter(|at| *at > view.now)
        {
            return Next::wait(format!("it was asked to end at {at} at the earliest"), Some(at));
        }
    }
    let unknown: ShardSet = asked.iter().filter(|shard| !view.facts.contains_key(shard)).collect();
    if !unknown.is_empty() {
        return Next::todo(vec![Todo::Prove(unknown)]);
    }
    let facts = |shard: u32| view.facts.get(&shard);
    let mut missing: BTreeMap<&str, ShardSet> = BTreeMap::new();
    for shard in asked.iter() {
        for group in facts(shard).into_iter().flat_map(|facts| &facts.missing_groups) {
            missing.entry(group).or_default().insert(shard);
        }
    }
    let mut todo: Vec<Todo> = view
        .groups
        .iter()
        .filter_map(|group| {
            let shards = missing.get(group.key.consumer_group())?.clone();
            Some(Todo::Provision { group: group.key.clone(), shards })
        })
        .collect();
    let (empty, full): (Vec<u32>, Vec<u32>) =
        asked.iter().partition(|shard| facts(*shard).is_some_and(|facts| facts.is_empty));
    let (empty, full): (ShardSet, ShardSet) = (empty.into_iter().collect(), full.into_iter().collect());
    for (group, migration) in records(view, leader) {
        let unread: ShardSet = full.minus(&group.read_set().to_set());
        if !unread.is_empty() {
            todo.push(leader.step(group, MigrationStep::Reopen(unread)));
        }
        let given_up: ShardSet = empty.iter().filter(|shard| migration.draining().contains(*shard)).collect();
        if !given_up.is_empty() {
            todo.push(leader.step(group, MigrationStep::Retire(given_up)));
        }
    }
    if !todo.is_empty() {
        return Next::todo(todo);
    }
    if !full.is_empty() {
        let shards = crate::turn::ranges(&full);
        return Next::wait(format!("shards {shards} are not proven empty"), None);
    }
    if leader.spec.retire == Retire::Delete {
        let undecided = |migration: &Migration| !migration.state.is_over() && !migration.deleting;
        let begin = for_each(view.groups, leader, undecided, |group| {
            vec![leader.step(group, MigrationStep::BeginDelete)]
        });
        if !begin.is_empty() {
            return Next::todo(begin);
        }
        let there: ShardSet =
            removed.iter().filter(|shard| facts(*shard).is_some_and(|facts| facts.exists)).collect();
        if !there.is_empty() {
            return Next::todo(vec![Todo::Delete(there)]);
        }
    }
    end(view, leader)
}

/// Nothing is left to be done but to say so.
fn end(view: &StreamView<'_>, leader: &Leader) -> Next {
    if !leader.is_back
        && let Some(at) = leader.spec.deprecated_after.filter(|at| *at > view.now)
    {
        return Next::wait(format!("it was asked to end at {at} at the earliest"), Some(at));
    }
    let running = |migration: &Migration| !migration.state.is_over();
    let finish =
        for_each(view.groups, leader, running, |group| vec![leader.step(group, MigrationStep::Finish)]);
    Next::todo(finish)
}
