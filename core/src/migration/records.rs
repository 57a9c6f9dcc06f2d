//! Migrations in the aggregate's JSON: ours, and what another implementation of the protocol may have written
//! (protocol 2).

use rsc_protocol::Timestamp;
use rsc_protocol::resharding::MigrationState;
use serde_json::{Map, Value};

use super::{Migration, MigrationSpec};
use crate::group::Group;
use crate::record::LoadError;
use crate::shards::ShardSet;

/// The field under which a running migration that is not understood keeps what stood there.
const RECORDED_AS: &str = "recordedAs";

/// Reads the recorded migrations into `group`. What is none that we understand is kept as it is; the running one is
/// always understood, so far that nothing its consumers read is dropped.
///
/// # Errors
/// A shard or a count that is beyond `bound`: no coordinator has written it, and nobody could work with it.
pub(crate) fn take_in(group: &mut Group, recorded: Map<String, Value>, bound: u32) -> Result<(), LoadError> {
    for (id, value) in recorded {
        match serde_json::from_value::<Migration>(value.clone()) {
            Ok(mut migration) => {
                check_bounds(&id, &migration, bound)?;
                migration.resharding_id.clone_from(&id);
                group.migrations.insert(id, migration);
            }
            Err(_) => {
                group.foreign_migrations.insert(id, value);
            }
        }
    }
    let assigned: ShardSet = group.targets.values().flat_map(ShardSet::iter).collect();
    let beyond = assigned.minus(&(0..group.shard_count).into());
    if group.active_resharding_id.is_none() && !beyond.is_empty() {
        group.active_resharding_id = left_standing(group);
    }
    if let Some(id) = group.active_resharding_id.clone()
        && !group.migrations.contains_key(&id)
    {
        let recorded = group.foreign_migrations.remove(&id);
        let migration = unreadable(group, &id, recorded);
        group.migrations.insert(id, migration);
    }
    let active = group.active_resharding_id.clone();
    let others = group
        .migrations
        .values()
        .filter(|other| active.as_ref() != Some(&other.resharding_id) && !other.never_began());
    let newest = others.map(|other| (other.created_at, other.resharding_id.clone())).max();
    let (count, updated_at, lease) = (group.shard_count, group.updated_at, group.max_routing_cache_ttl_ms);
    for (id, migration) in &mut group.migrations {
        let is_running = active.as_ref() == Some(id);
        if migration.draining.is_none() {
            complete(migration, updated_at, lease);
            if is_running {
                // The newest of a stream wins, and the running one is.
                if let Some((created_at, other)) = &newest
                    && (*created_at, other) > (migration.created_at, id)
                {
                    migration.created_at = created_at.plus(1);
                }
                fit(migration, count);
                migration.draining = Some(unproven(migration, count, &beyond));
            }
        }
        if is_running {
            // What calls itself over and is not: its count stands, its shards are looked at.
            if migration.state == MigrationState::Deprecated {
                migration.state = MigrationState::Draining;
            } else if migration.state == MigrationState::RolledBack {
                (migration.state, migration.count_restored) = (MigrationState::RollingBack, true);
            }
            let routed = ShardSet::from(0..count);
            migration.draining = Some(migration.draining().minus(&routed));
            migration.retired = migration.retired.minus(migration.draining()).minus(&routed);
        } else {
            // Another implementation may have left what it did not finish standing.
            if !migration.state.is_over() {
                migration.state = MigrationState::Deprecated;
            }
            // Nothing of it is read any more: whatever it says of that, the end's proof is to look at it.
            let removed = migration.removed();
            migration.retired = removed;
            migration.draining = Some(ShardSet::new());
        }
    }
    Ok(())
}

fn check_bounds(id: &str, migration: &Migration, bound: u32) -> Result<(), LoadError> {
    let count = migration.from_shard_count.max(migration.to_shard_count);
    let removed = migration.removed();
    let found = if count > bound { Some(count) } else { removed.last().filter(|shard| *shard >= bound) };
    found.map_or(Ok(()), |found| {
        Err(LoadError::Aggregate(format!("migration {id}: shard or count {found} is out of range")))
    })
}

/// The newest migration that is not over, of a record that names none as running although shards beyond its count
/// are assigned: it is what they are still assigned for.
fn left_standing(group: &Group) -> Option<String> {
    let standing = group.migrations.values().filter(|migration| !migration.state.is_over());
    let newest = standing.max_by_key(|migration| (migration.created_at, &migration.resharding_id));
    newest.map(|migration| migration.resharding_id.clone())
}

/// What a record of another implementation does not say: the latest instant and the longest lease it can have meant.
fn complete(migration: &mut Migration, updated_at: Timestamp, lease_ms: u64) {
    if migration.updated_at == Timestamp::default() {
        migration.updated_at = migration.created_at.max(updated_at);
    }
    if migration.state != MigrationState::Preparing && migration.activated_at.is_none() {
        migration.activated_at = Some(migration.updated_at.max(migration.created_at));
        migration.cache_lease_ms = migration.cache_lease_ms.max(lease_ms);
    }
}

/// Another implementation may change the count later than we do: what routes with another count than the migration's
/// state says is still to be activated.
fn fit(migration: &mut Migration, count: u32) {
    let is_activated = matches!(migration.state, MigrationState::Active | MigrationState::Draining);
    if is_activated && migration.to_shard_count != count {
        migration.state = MigrationState::Preparing;
    }
}

/// Whatever another implementation calls the removed shards: what is assigned beyond the count, and what the count has
/// left behind, is read until it is proven empty.
fn unproven(migration: &Migration, count: u32, assigned_beyond: &ShardSet) -> ShardSet {
    let mut unproven = assigned_beyond.clone();
    if migration.activated_at.is_some() {
        unproven.extend(count..migration.from_shard_count.max(migration.to_shard_count).max(count));
    }
    unproven
}

/// The running migration of a record that does not say anything we understand about it: the present count stays, and
/// what is assigned beyond it is drained.
fn unreadable(group: &Group, id: &str, recorded: Option<Value>) -> Migration {
    let spec = MigrationSpec {
        resharding_id: id.to_owned(),
        from_shard_count: group.shard_count,
        to_shard_count: group.shard_count,
        created_at: group.created_at,
        requested_by: String::new(),
        reason: "recorded by another implementation".to_owned(),
        deprecated_after: None,
        retire: rsc_protocol::resharding::Retire::Keep,
        repairs: true,
    };
    let mut migration = Migration::new(&spec, group.updated_at);
    migration.state = MigrationState::Active;
    migration.draining = None;
    if let Some(recorded) = recorded {
        migration.unknown.insert(RECORDED_AS.to_owned(), recorded);
    }
    migration
}

/// The migrations as the aggregate records them.
pub(crate) fn as_recorded(group: &Group) -> Map<String, Value> {
    let mut recorded = group.foreign_migrations.clone();
    for (id, migration) in &group.migrations {
        if let Ok(value) = serde_json::to_value(migration) {
            recorded.insert(id.clone(), value);
        }
    }
    recorded
}
