//! What one step does to one group's record (protocol 6). A step that does not fit what is recorded is refused and
//! changes nothing; one that has been done is done.

use rsc_protocol::ErrorCode;
use rsc_protocol::resharding::{MigrationState, RollbackNote};

use super::{Migration, MigrationSpec, MigrationStep, REMEMBERED};
use crate::settings::millis;
use crate::shards::ShardSet;
use crate::turn::{Transition, Turn};

/// Why a step is refused.
type Refused = (ErrorCode, String);

/// Whether the step changed something.
type Applied = Result<bool, Refused>;

/// Applies `step` of the migration `id`.
///
/// # Errors
/// `METADATA_SYNC_IN_PROGRESS` in a correction round, `ACTIVE_MIGRATION_EXISTS`, `MIGRATION_NOT_FOUND`,
/// `ROLLBACK_NOT_ALLOWED`, and `STATE_VERSION_CONFLICT` where the step does not fit what is recorded.
pub(crate) fn apply(turn: &mut Turn<'_>, id: &str, step: &MigrationStep) -> Result<(), Refused> {
    let key = &turn.group.key;
    if turn.group.metadata_correction.is_some() {
        let message = format!(
            "redis has lost writes of group {key}, its members are being brought back: migration {id} waits for that"
        );
        return Err((ErrorCode::MetadataSyncInProgress, message));
    }
    if turn.group.provisioning_pending {
        let message = format!("group {key} is still being created: migration {id} waits for that");
        return Err((ErrorCode::MutexUnavailable, message));
    }
    let changed = match step {
        MigrationStep::Prepare { spec, compare } => prepare(turn, spec, *compare),
        MigrationStep::Provisioned => provisioned(turn, id),
        MigrationStep::Activate => activate(turn, id),
        MigrationStep::BeginDrain => begin_drain(turn, id),
        MigrationStep::Retire(shards) => retire(turn, id, shards),
        MigrationStep::Reopen(shards) => reopen(turn, id, shards),
        MigrationStep::BeginDelete => begin_delete(turn, id),
        MigrationStep::Finish => finish(turn, id),
        MigrationStep::Rollback { note, whole, compare } => roll_back(turn, id, note, *whole, *compare),
        MigrationStep::RestoreCount => restore_count(turn, id),
    }?;
    if changed {
        let (now, shard_count) = (turn.now, turn.group.shard_count);
        if let Some(migration) = turn.group.migrations.get_mut(id) {
            migration.updated_at = now;
            let state = migration.state;
            turn.note(Transition::MigrationStep {
                resharding_id: id.to_owned(),
                step: step.name(),
                state,
                shard_count,
            });
        }
        turn.move_version();
    }
    Ok(())
}

fn conflict<T>(message: String) -> Result<T, Refused> {
    Err((ErrorCode::StateVersionConflict, message))
}

/// The migration a step is about, as it is recorded.
fn find<'t>(turn: &'t Turn<'_>, id: &str) -> Result<&'t Migration, Refused> {
    turn.group.migration(id).ok_or_else(|| {
        let message = format!("group {} has no migration {id}", turn.group.key);
        (ErrorCode::MigrationNotFound, message)
    })
}

fn change(turn: &mut Turn<'_>, id: &str, with: impl FnOnce(&mut Migration)) {
    if let Some(migration) = turn.group.migrations.get_mut(id) {
        with(migration);
    }
}

fn misfit<T>(turn: &Turn<'_>, migration: &Migration, step: &str) -> Result<T, Refused> {
    let id = &migration.resharding_id;
    conflict(format!(
        "migration {id} of group {} is {}: {step} does not fit",
        turn.group.key,
        migration.state.as_str()
    ))
}

fn prepare(turn: &mut Turn<'_>, spec: &MigrationSpec, compare: bool) -> Applied {
    let (id, now) = (&spec.resharding_id, turn.now);
    let running = turn.group.active_migration();
    if running.is_some_and(|running| running.resharding_id == *id) {
        return Ok(false);
    }
    let age = |migration: &Migration| (migration.created_at, migration.resharding_id.clone());
    let own_age = (spec.created_at, id.clone());
    let mut draining = ShardSet::new();
    if let Some(running) = running {
        if !compare || age(running) >= own_age {
            let (other, from, to) =
                (&running.resharding_id, running.from_shard_count, running.to_shard_count);
            let message = format!(
                "migration {other} of stream {} ({from} to {to} shards) is running: wait for its end, or roll it back",
                turn.group.key.stream_prefix()
            );
            return Err((ErrorCode::ActiveMigrationExists, message));
        }
        // Redis lost what came after it: the stream has moved on. What it still drains is drained on, and what it
        // has given up without having come to its end is looked at again.
        draining = running.removed();
    }
    if !compare && turn.group.migration(id).is_some() {
        return conflict(format!("group {} already has a migration {id}, which is over", turn.group.key));
    }
    // The newest of a stream wins: one that is late, or was asked for while the clock ran backwards, would undo
    // what came after it.
    let overtaken = turn.group.migrations.values().find(|other| {
        other.resharding_id != *id && age(other) >= own_age && (!compare || !other.never_began())
    });
    if let Some(other) = overtaken {
        return conflict(format!(
            "migration {id} is of {}, but group {} already records {} of {}",
            spec.created_at, turn.group.key, other.resharding_id, other.created_at
        ));
    }
    if let Some(other) = turn.group.active_resharding_id.clone() {
        change(turn, &other, |running| {
            running.state = MigrationState::Deprecated;
            running.draining = Some(ShardSet::new());
            running.retired = ShardSet::new();
            running.updated_at = now;
        });
    }
    let mut migration = Migration::new(spec, now);
    let is_read_on = !draining.is_empty();
    migration.draining = Some(draining);
    if let Some(former) = turn.group.migration(id) {
        migration.deleting = former.deleting;
        migration.unknown = former.unknown.clone();
    }
    turn.group.migrations.insert(id.clone(), migration);
    turn.group.active_resharding_id = Some(id.clone());
    forget_oldest(turn);
    if is_read_on {
        turn.change_shard_set();
    }
    Ok(true)
}

fn forget_oldest(turn: &mut Turn<'_>) {
    let over: Vec<String> = turn
        .group
        .migrations_by_age()
        .into_iter()
        .filter(|migration| migration.state.is_over())
        .map(|migration| migration.resharding_id.clone())
        .collect();
    let beyond = over.len().saturating_sub(REMEMBERED);
    for id in over.into_iter().take(beyond) {
        turn.group.migrations.remove(&id);
    }
}

fn provisioned(turn: &mut Turn<'_>, id: &str) -> Applied {
    if find(turn, id)?.provisioned {
        return Ok(false);
    }
    change(turn, id, |migration| migration.provisioned = true);
    Ok(true)
}

/// The count that routes, and every shard consumers read beyond it. Nothing that was read is dropped.
fn set_count(turn: &mut Turn<'_>, id: &str, count: u32) -> Result<(), Refused> {
    let migration = find(turn, id)?;
    let known = migration.from_shard_count.max(migration.to_shard_count);
    let mut draining = turn.group.read_set().to_set();
    draining.extend(migration.retired.iter().chain(0..known));
    let mut draining = draining.minus(&(0..count).into());
    if planted!(RemovedShardsLeaveAtOnce) {
        draining = ShardSet::new();
    }
    let (now, cache_lease_ms) = (turn.now, turn.group.max_routing_cache_ttl_ms);
    change(turn, id, |migration| {
        migration.activated_at = Some(now);
        migration.cache_lease_ms = cache_lease_ms;
        migration.draining = Some(draining);
        migration.draining_since = None;
        migration.retired = ShardSet::new();
    });
    turn.group.shard_count = count;
    turn.change_shard_set();
    Ok(())
}

fn activate(turn: &mut Turn<'_>, id: &str) -> Applied {
    let migration = find(turn, id)?;
    match migration.state {
        MigrationState::Preparing if !migration.provisioned && !planted!(ActivatedUnprovisioned) => {
            misfit(turn, migration, "activating it before its shards exist")
        }
        MigrationState::Preparing => {
            set_count(turn, id, migration.to_shard_count)?;
            change(turn, id, |migration| migration.state = MigrationState::Active);
            Ok(true)
        }
        MigrationState::Active | MigrationState::Draining | MigrationState::Deprecated => Ok(false),
        MigrationState::RollingBack | MigrationState::RolledBack => misfit(turn, migration, "activating it"),
    }
}

/// Producers that were told the former count may use it for so long after the change, as far as this record knows;
/// `Err`: in how many milliseconds the wait is over.
fn caches_are_over(turn: &Turn<'_>, migration: &Migration) -> Result<(), i64> {
    if planted!(CacheLeaseIgnored) {
        return Ok(());
    }
    let Some(activated_at) = migration.activated_at else { return Err(i64::MAX) };
    let margin = turn.context.settings.publish_margin_ms;
    let left = activated_at.plus(millis(migration.cache_lease_ms.saturating_add(margin))).since(turn.now);
    if left <= 0 { Ok(()) } else { Err(left) }
}

fn wait_for_caches(turn: &Turn<'_>, migration: &Migration, step: &str) -> Result<(), Refused> {
    caches_are_over(turn, migration).or_else(|left| {
        let id = &migration.resharding_id;
        conflict(format!(
            "producers may use the former count for {left} ms more: {step} of migration {id} waits for that"
        ))
    })
}

fn begin_drain(turn: &mut Turn<'_>, id: &str) -> Applied {
    let migration = find(turn, id)?;
    match migration.state {
        MigrationState::Active => {}
        MigrationState::Draining | MigrationState::Deprecated => return Ok(false),
        _ => return misfit(turn, migration, "draining it"),
    }
    wait_for_caches(turn, migration, "draining")?;
    let now = turn.now;
    change(turn, id, |migration| {
        migration.state = MigrationState::Draining;
        migration.draining_since = Some(now);
    });
    Ok(true)
}

/// Whether the migration's removed shards are being drained: on the way forth, or back once the count is.
fn is_draining(migration: &Migration) -> bool {
    match migration.state {
        MigrationState::Draining => true,
        MigrationState::RollingBack => migration.count_restored,
        _ => false,
    }
}

fn retire(turn: &mut Turn<'_>, id: &str, shards: &ShardSet) -> Applied {
    let migration = find(turn, id)?;
    let count = turn.group.shard_count;
    let retired: ShardSet =
        migration.draining().iter().filter(|shard| *shard >= count && shards.contains(*shard)).collect();
    if retired.is_empty() {
        return Ok(false);
    }
    if !is_draining(migration) {
        return misfit(turn, migration, "retiring shards of it");
    }
    wait_for_caches(turn, migration, "retiring shards")?;
    change(turn, id, |migration| {
        migration.draining = Some(migration.draining().minus(&retired));
        migration.retired.extend(retired.iter());
    });
    turn.change_shard_set();
    Ok(true)
}

fn reopen(turn: &mut Turn<'_>, id: &str, shards: &ShardSet) -> Applied {
    let migration = find(turn, id)?;
    let reads = turn.group.read_set().to_set();
    let opened: ShardSet = shards.minus(&reads);
    if opened.is_empty() {
        return Ok(false);
    }
    let (state, is_running) = (
        migration.state,
        turn.group.active_resharding_id.as_deref() == Some(migration.resharding_id.as_str()),
    );
    if state.is_over() && !is_running {
        if let Some(other) = turn.group.active_resharding_id.clone() {
            return conflict(format!("migration {other} runs: shards of {id} are read again by it"));
        }
    } else if !is_draining(migration) && state != MigrationState::Active {
        return misfit(turn, migration, "reading shards of it again");
    }
    let now = turn.now;
    change(turn, id, |migration| {
        migration.retired = migration.retired.minus(&opened);
        let mut draining = migration.draining().clone();
        draining.extend(opened.iter());
        migration.draining = Some(draining);
        migration.draining_since = migration.draining_since.or(Some(now));
        migration.state = match migration.state {
            MigrationState::Deprecated => MigrationState::Draining,
            MigrationState::RolledBack => MigrationState::RollingBack,
            other => other,
        };
    });
    turn.group.active_resharding_id = Some(id.to_owned());
    turn.change_shard_set();
    Ok(true)
}

/// Everything of the removed shards is given up: none is assigned, none is touched, and the time has come.
fn nothing_is_left(turn: &Turn<'_>, migration: &Migration, step: &str) -> Result<(), Refused> {
    let id = &migration.resharding_id;
    if !migration.draining().is_empty() {
        let shards = crate::turn::ranges(migration.draining());
        return conflict(format!(
            "shards {shards} are not proven empty: {step} of migration {id} waits for that"
        ));
    }
    let touched = turn.group.still_touched(&migration.retired);
    if !touched.is_empty() {
        let shards = crate::turn::ranges(&touched);
        return conflict(format!("shards {shards} are still held: {step} of migration {id} waits for that"));
    }
    if let Some(at) = migration.deprecated_after
        && at > turn.now
        && !migration.state.is_back()
    {
        return conflict(format!("migration {id} was asked to end at {at} at the earliest"));
    }
    Ok(())
}

fn begin_delete(turn: &mut Turn<'_>, id: &str) -> Applied {
    let migration = find(turn, id)?;
    if migration.deleting {
        return Ok(false);
    }
    if !is_draining(migration) {
        return misfit(turn, migration, "deleting its removed shards");
    }
    wait_for_caches(turn, migration, "deleting")?;
    nothing_is_left(turn, migration, "deleting")?;
    change(turn, id, |migration| migration.deleting = true);
    Ok(true)
}

fn finish(turn: &mut Turn<'_>, id: &str) -> Applied {
    let migration = find(turn, id)?;
    let ends_as = match migration.state {
        MigrationState::Active if migration.removed().is_empty() => MigrationState::Deprecated,
        MigrationState::Draining => MigrationState::Deprecated,
        MigrationState::RollingBack if migration.count_restored => MigrationState::RolledBack,
        MigrationState::Deprecated | MigrationState::RolledBack => return Ok(false),
        _ => return misfit(turn, migration, "finishing it"),
    };
    // The way back of a scale-in removes nothing, so nobody can be writing into what goes.
    if !(ends_as == MigrationState::RolledBack && migration.removed().is_empty()) {
        wait_for_caches(turn, migration, "the end")?;
    }
    nothing_is_left(turn, migration, "the end")?;
    change(turn, id, |migration| migration.state = ends_as);
    if turn.group.active_resharding_id.as_deref() == Some(id) {
        turn.group.active_resharding_id = None;
    }
    Ok(true)
}

fn roll_back(turn: &mut Turn<'_>, id: &str, note: &RollbackNote, whole: bool, compare: bool) -> Applied {
    let migration = find(turn, id)?;
    let refuse = |why: &str| {
        Err((ErrorCode::RollbackNotAllowed, format!("migration {id} cannot be rolled back: {why}")))
    };
    match migration.state {
        MigrationState::RollingBack => return Ok(false),
        MigrationState::RolledBack if !whole || migration.count_restored => return Ok(false),
        _ if compare => {}
        MigrationState::Deprecated => return refuse("it is finished; scale to the former count instead"),
        _ if migration.repairs => {
            return refuse("it brings the stream's groups, whose records differ, to one count");
        }
        _ if migration.deleting => {
            return refuse(
                "keys of its removed shards are being deleted; scale to the former count once it is finished",
            );
        }
        _ => {}
    }
    // Who has been told of it is known from this record too: past the barrier another group may have told its
    // producers, and Redis may have lost that. What is carried on from an older migration is still to be read.
    let is_known_to_nobody = migration.state == MigrationState::Preparing
        && !whole
        && !migration.provisioned
        && migration.draining().is_empty();
    if is_known_to_nobody {
        change(turn, id, |migration| {
            migration.state = MigrationState::RolledBack;
            migration.rollback = Some(note.clone());
        });
        if turn.group.active_resharding_id.as_deref() == Some(id) {
            turn.group.active_resharding_id = None;
        }
        return Ok(true);
    }
    if let Some(other) = turn.group.active_resharding_id.as_deref()
        && other != id
    {
        return conflict(format!("migration {other} is running: roll that back first"));
    }
    // Removed shards that had left the target come back before producers do.
    let known = migration.from_shard_count.max(migration.to_shard_count);
    let mut draining = turn.group.read_set().to_set();
    draining.extend(migration.retired.iter().chain(0..known));
    let draining = draining.minus(&(0..turn.group.shard_count).into());
    change(turn, id, |migration| {
        migration.state = MigrationState::RollingBack;
        migration.rollback = Some(note.clone());
        migration.draining = Some(draining);
        migration.retired = ShardSet::new();
        migration.draining_since = None;
    });
    turn.group.active_resharding_id = Some(id.to_owned());
    turn.change_shard_set();
    Ok(true)
}

fn restore_count(turn: &mut Turn<'_>, id: &str) -> Applied {
    let migration = find(turn, id)?;
    match migration.state {
        MigrationState::RollingBack if !migration.count_restored => {}
        MigrationState::RollingBack | MigrationState::RolledBack => return Ok(false),
        _ => return misfit(turn, migration, "restoring the count before it"),
    }
    set_count(turn, id, migration.from_shard_count)?;
    let now = turn.now;
    change(turn, id, |migration| {
        migration.count_restored = true;
        migration.draining_since = Some(now);
    });
    Ok(true)
}
