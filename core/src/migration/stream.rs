//! Which step comes next in which group of a stream (protocol 6), decided from the records of all of them.
//!
//! One stream prefix has one shard count, but each group is a Redis key of its own: a process may die between two
//! groups' steps, and Redis may lose the writes of one of them. So nothing is remembered outside of the records,
//! every step can be repeated, and what is to be done follows from how the records differ: the newest migration that
//! any of them knows wins, and whoever is behind is brought there.

use std::collections::BTreeMap;

use rsc_protocol::resharding::{MigrationState, Retire, RollbackNote};
use rsc_protocol::{GroupKey, Timestamp};

use super::drain::{caches_end, drain, end, removed_shards};
use super::leader::Leader;
pub use super::leader::creation_time;
use super::{Migration, MigrationSpec, MigrationStep};
use crate::group::Group;
use crate::settings::Settings;
use crate::shards::ShardSet;

/// What one look at a shard's stream showed (protocol 6, *Drain*).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardFacts {
    /// Nothing undelivered and nothing pending in any Redis consumer group, and every coordinated group is there;
    /// or the key does not exist.
    pub is_empty: bool,
    /// The key exists.
    pub exists: bool,
    /// Proven empty in several looks, and too scattered for the one look that deleting takes.
    pub is_scattered: bool,
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
    pub(super) fn todo(todo: Vec<Todo>) -> Self {
        Next { todo, ..Next::default() }
    }

    pub(super) fn wait(waits_for: impl Into<String>, wake_at: Option<Timestamp>) -> Self {
        Next { todo: Vec::new(), wake_at, waits_for: waits_for.into() }
    }

    /// Whether the groups agree and nothing is under way.
    #[must_use]
    pub fn has_settled(&self) -> bool {
        self.todo.is_empty() && self.waits_for.is_empty()
    }
}

/// What comes next for the stream.
///
/// The todos are to be done in their order, none after one that failed or was refused; then ask again, with
/// [`StreamView::facts`] forgotten if a step or a group was among them.
#[must_use]
pub fn next(view: &StreamView<'_>) -> Next {
    let Some(first) = view.groups.first() else { return Next::default() };
    let is_idle = view.groups.iter().all(|group| group.active_resharding_id.is_none());
    let differ = view.groups.iter().any(|group| group.shard_count != first.shard_count);
    // Groups that agree are right, whatever their records say of migrations that are over.
    if is_idle && !differ {
        return Next::default();
    }
    let Some(leader) = Leader::of(view.groups) else {
        return if differ { repair(view) } else { Next::default() };
    };
    if planted!(CountsNotCompared) && leader.is_over {
        return Next::default();
    }
    // What producers may be writing into is read before anything else: whoever has lost writes may be in a
    // correction round, and refuse for a while.
    let wider = leader.widen(view.groups);
    if !wider.is_empty() {
        return Next::todo(wider);
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
        created_at: creation_time(view.groups, view.now),
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

fn forth(view: &StreamView<'_>, leader: &Leader) -> Next {
    let lacking = leader.prepare_again(view.groups);
    if !lacking.is_empty() {
        return Next::todo(lacking);
    }
    let unprovisioned =
        |migration: &Migration| migration.state == MigrationState::Preparing && !migration.provisioned;
    let provision = leader.for_each(view.groups, unprovisioned, |group| {
        let shards = leader.every_shard(view.groups);
        let create = Todo::Provision { group: group.key.clone(), shards };
        vec![create, leader.step(group, MigrationStep::Provisioned)]
    });
    if !provision.is_empty() && !planted!(ActivatedUnprovisioned) {
        return Next::todo(provision);
    }
    let preparing = |migration: &Migration| migration.state == MigrationState::Preparing;
    let activate =
        leader.for_each(view.groups, preparing, |group| vec![leader.step(group, MigrationStep::Activate)]);
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
        leader.for_each(view.groups, active, |group| vec![leader.step(group, MigrationStep::BeginDrain)]);
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
    let whole = leader.may_be_told || differs;
    let lacking = if whole { leader.prepare_again(view.groups) } else { Vec::new() };
    if !lacking.is_empty() {
        return Next::todo(lacking);
    }
    let goes_forth = |migration: &Migration| {
        !migration.state.is_back()
            || (whole && migration.state == MigrationState::RolledBack && !migration.count_restored)
    };
    let rollback = leader.for_each(view.groups, goes_forth, |group| {
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
    let restore = leader
        .for_each(view.groups, without_count, |group| vec![leader.step(group, MigrationStep::RestoreCount)]);
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
