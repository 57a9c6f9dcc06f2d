//! Migrations in the aggregate's JSON: ours, and what another implementation of the protocol may have written
//! (protocol 2).

use rsc_protocol::resharding::MigrationState;
use serde_json::{Map, Value};

use super::{Migration, MigrationSpec};
use crate::group::Group;
use crate::record::LoadError;
use crate::shards::ShardSet;

/// Reads the recorded migrations into `group`. What is none that we understand is kept as it is; the running one is
/// always understood, so far that nothing its consumers read is dropped.
///
/// # Errors
/// A shard or a count that is `bound` or above: no coordinator has written it, and nobody could work with it.
pub(crate) fn take_in(group: &mut Group, recorded: Map<String, Value>, bound: u32) -> Result<(), LoadError> {
    for (id, value) in recorded {
        match serde_json::from_value::<Migration>(value.clone()) {
            Ok(mut migration) => {
                let highest = migration.removed().last().max(Some(migration.from_shard_count));
                let highest = highest.max(Some(migration.to_shard_count)).unwrap_or(0);
                if highest > bound {
                    let message = format!("migration {id}: shard {highest} is out of range");
                    return Err(LoadError::Aggregate(message));
                }
                migration.resharding_id.clone_from(&id);
                group.migrations.insert(id, migration);
            }
            Err(_) => {
                group.foreign_migrations.insert(id, value);
            }
        }
    }
    if let Some(id) = group.active_resharding_id.clone()
        && !group.migrations.contains_key(&id)
    {
        group.foreign_migrations.remove(&id);
        let migration = unreadable(group, &id);
        group.migrations.insert(id, migration);
    }
    let (count, updated_at) = (group.shard_count, group.updated_at);
    let assigned: ShardSet = group.targets.values().flat_map(ShardSet::iter).collect();
    let active = group.active_resharding_id.clone();
    for (id, migration) in &mut group.migrations {
        let is_running = active.as_ref() == Some(id);
        if migration.state != MigrationState::Preparing && migration.activated_at.is_none() {
            migration.activated_at = Some(migration.updated_at.max(migration.created_at));
        }
        if migration.draining.is_none() {
            let mut draining = ShardSet::new();
            if is_running {
                // Whatever it calls the removed shards: what is assigned beyond the count, and what the count
                // has left behind, is read until it is proven empty.
                draining = assigned.minus(&(0..count).into());
                if migration.state != MigrationState::Preparing {
                    let known = migration.from_shard_count.max(migration.to_shard_count);
                    draining.extend(count..known.max(count));
                }
            }
            migration.draining = Some(draining);
        }
        if is_running && migration.updated_at == rsc_protocol::Timestamp::default() {
            migration.updated_at = updated_at;
        }
        // Another implementation may have left what it did not finish standing.
        if !is_running && !migration.state.is_over() {
            migration.state = MigrationState::Deprecated;
        }
        if is_running && migration.state.is_over() {
            migration.state = MigrationState::Draining;
        }
        let retired = migration.retired.minus(migration.draining());
        migration.retired = retired;
    }
    Ok(())
}

/// The running migration of a record that does not say anything we understand about it: the present count stays, and
/// what is assigned beyond it is drained.
fn unreadable(group: &Group, id: &str) -> Migration {
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
