//! Giving up removed shards: when they may be, and in which order (protocol 6, *Drain* and *Finish*).

use std::collections::BTreeMap;

use rsc_protocol::Timestamp;
use rsc_protocol::resharding::Retire;

use super::leader::Leader;
use super::stream::{Next, StreamView, Todo};
use super::{Migration, MigrationStep};
use crate::settings::millis;
use crate::shards::ShardSet;

/// How long until shards that are too scattered to be deleted are tried again, in milliseconds: the proof is work for
/// Redis, and only somebody else can change what it finds.
const SCATTERED_AGAIN_MS: i64 = 10_000;

/// Until when a producer may use a count that some group of the stream has told before: counted from the last change
/// in any of them, with the longest cache lease any of them has handed out.
pub(super) fn caches_end(view: &StreamView<'_>, leader: &Leader) -> Timestamp {
    if planted!(CacheLeaseIgnored) {
        return view.now;
    }
    let last = leader.records(view.groups).filter_map(|(_, migration)| migration.activated_at).max();
    let lease = leader
        .records(view.groups)
        .map(|(group, migration)| migration.cache_lease_ms.max(group.max_routing_cache_ttl_ms))
        .max()
        .unwrap_or(0);
    last.unwrap_or(view.now).plus(millis(lease.saturating_add(view.settings.publish_margin_ms)))
}

/// Every shard beyond the count that some group reads, or has given up, in the course of this migration.
pub(super) fn removed_shards(view: &StreamView<'_>, leader: &Leader) -> ShardSet {
    let of_all = leader.records(view.groups).flat_map(|(group, migration)| {
        let removed = migration.removed();
        removed.iter().filter(|shard| *shard >= group.shard_count).collect::<Vec<_>>()
    });
    of_all.collect()
}

/// From the first removed shard that is still read to the end.
pub(super) fn drain(view: &StreamView<'_>, leader: &Leader, removed: &ShardSet) -> Next {
    let open: ShardSet = leader
        .records(view.groups)
        .flat_map(|(_, migration)| migration.draining().iter().collect::<Vec<_>>())
        .collect();
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
    }
    // While some are read nobody asks about the rest: the end looks at all of them again.
    let asked = if open.is_empty() { removed } else { &open };
    let unknown: ShardSet = asked.iter().filter(|shard| !view.facts.contains_key(shard)).collect();
    if !unknown.is_empty() {
        return Next::todo(vec![Todo::Prove(unknown)]);
    }
    let is_empty = |shard: &u32| view.facts.get(shard).is_some_and(|facts| facts.is_empty);
    let (empty, full): (Vec<u32>, Vec<u32>) = asked.iter().partition(is_empty);
    let (empty, full): (ShardSet, ShardSet) = (empty.into_iter().collect(), full.into_iter().collect());
    let todo: Vec<Todo> = provision_missing(view, asked)
        .into_iter()
        .chain(reopen(view, leader, &full))
        .chain(retire(view, leader, &empty))
        .collect();
    if !todo.is_empty() {
        return Next::todo(todo);
    }
    if !full.is_empty() {
        let shards = crate::turn::ranges(&full);
        return Next::wait(format!("shards {shards} are not proven empty"), None);
    }
    if let Some(wait) = waits_for_its_time(view, leader) {
        return wait;
    }
    if leader.spec.retire == Retire::Delete
        && let Some(next) = delete(view, leader, removed)
    {
        return next;
    }
    finish(view, leader)
}

/// Coordinated groups that do not exist on a shard's key are created there: what they have not read is not read.
fn provision_missing(view: &StreamView<'_>, asked: &ShardSet) -> Vec<Todo> {
    let mut missing: BTreeMap<&str, ShardSet> = BTreeMap::new();
    let facts = asked.iter().filter_map(|shard| Some((shard, view.facts.get(&shard)?)));
    for (shard, facts) in facts {
        for group in &facts.missing_groups {
            missing.entry(group).or_default().insert(shard);
        }
    }
    let create = view.groups.iter().filter_map(|group| {
        let shards = missing.get(group.key.consumer_group())?.clone();
        Some(Todo::Provision { group: group.key.clone(), shards })
    });
    create.collect()
}

/// Everybody reads again what holds something. This comes before anything is given up: a group that refuses to
/// give up must not keep another from reading.
fn reopen(view: &StreamView<'_>, leader: &Leader, full: &ShardSet) -> Vec<Todo> {
    let again = leader.records(view.groups).filter_map(|(group, _)| {
        let unread = full.minus(&group.read_set().to_set());
        (!unread.is_empty()).then(|| leader.step(group, MigrationStep::Reopen(unread)))
    });
    again.collect()
}

fn retire(view: &StreamView<'_>, leader: &Leader, empty: &ShardSet) -> Vec<Todo> {
    let up = leader.records(view.groups).filter_map(|(group, migration)| {
        let given_up: ShardSet = migration.draining().iter().filter(|shard| empty.contains(*shard)).collect();
        (!given_up.is_empty()).then(|| leader.step(group, MigrationStep::Retire(given_up)))
    });
    up.collect()
}

/// Deleting what is proven empty, once every group has recorded that there is no way back; `None`: it is done.
fn delete(view: &StreamView<'_>, leader: &Leader, removed: &ShardSet) -> Option<Next> {
    let undecided = |migration: &Migration| !migration.state.is_over() && !migration.deleting;
    let begin =
        leader.for_each(view.groups, undecided, |group| vec![leader.step(group, MigrationStep::BeginDelete)]);
    if !begin.is_empty() {
        return Some(Next::todo(begin));
    }
    let facts = |shard: &u32| view.facts.get(shard).filter(|facts| facts.exists);
    let there: ShardSet =
        removed.iter().filter(|shard| facts(shard).is_some_and(|facts| !facts.is_scattered)).collect();
    if !there.is_empty() {
        return Some(Next::todo(vec![Todo::Delete(there)]));
    }
    let scattered: ShardSet = removed.iter().filter(|shard| facts(shard).is_some()).collect();
    (!scattered.is_empty()).then(|| {
        let shards = crate::turn::ranges(&scattered);
        let message = format!(
            "shards {shards} are empty but for so many scattered pending entries without a record (PENDING_UNDECIDED) that no single look can prove it, which deleting takes: acknowledge them with XACK"
        );
        Next::wait(message, Some(view.now.plus(SCATTERED_AGAIN_MS)))
    })
}

/// The earliest end that was asked for has not come.
fn waits_for_its_time(view: &StreamView<'_>, leader: &Leader) -> Option<Next> {
    let at = leader.spec.deprecated_after.filter(|at| *at > view.now && !leader.is_back)?;
    Some(Next::wait(format!("it was asked to end at {at} at the earliest"), Some(at)))
}

/// Nothing is left to be done but to say so.
pub(super) fn end(view: &StreamView<'_>, leader: &Leader) -> Next {
    waits_for_its_time(view, leader).unwrap_or_else(|| finish(view, leader))
}

fn finish(view: &StreamView<'_>, leader: &Leader) -> Next {
    let running = |migration: &Migration| !migration.state.is_over();
    Next::todo(leader.for_each(view.groups, running, |group| vec![leader.step(group, MigrationStep::Finish)]))
}
