//! What operators ask for: change the count, or take a change back (protocol 6, 8).

use std::sync::Arc;

use rsc_core::migration::{plan as planning, stream};
use rsc_core::{Group, Migration, MigrationSpec, MigrationStep, ShardSet};
use rsc_protocol::names::check_stream_prefix;
use rsc_protocol::resharding::{
    MigrationResponse, MigrationState, NOOP, RollbackNote, RollbackRequest, ScalePlan, ScaleRequest,
    ScaleResponse,
};
use rsc_protocol::{ErrorCode, GroupKey, ShardRef, Timestamp};
use rsc_store::MutexToken;

use super::pass::{self, Progress, ensure_streams, fresh_id, record, redis_time};
use crate::creation::check_request;
use crate::meter;
use crate::refusal::Refusal;
use crate::shared::Shared;
use crate::streams;

/// What a scale request came to.
#[derive(Debug)]
pub enum Scaled {
    /// Done, or under way by itself.
    Done(ScaleResponse),
    /// It was only asked what would happen.
    Planned(ScalePlan),
}

fn check_reason(requested_by: &str, reason: &str, what: &str) -> Result<(), Refusal> {
    check_request(requested_by, Some(reason))?;
    if reason.chars().all(char::is_whitespace) {
        return Err(Refusal::invalid(format!("reason is blank: say why {what}")));
    }
    Ok(())
}

fn check_target(shared: &Shared, asked: i64) -> Result<u32, Refusal> {
    let most = shared.settings.max_shard_count;
    match u32::try_from(asked) {
        Ok(count) if count <= most => Ok(count),
        _ => Err(Refusal::invalid(format!("targetShardCount is {asked}: 0 to {most} are allowed"))),
    }
}

/// Runs a piece of work on the pool, whoever waits for it or not, counted at the gate.
async fn detached<T: Send + 'static>(
    shared: &Arc<Shared>,
    work: impl Future<Output = Result<T, Refusal>> + Send + 'static,
) -> Result<T, Refusal> {
    let Some(running) = shared.gate.enter() else { return Err(Refusal::terminating()) };
    let (reply, answer) = tokio::sync::oneshot::channel();
    shared.workers.spawn(async move {
        let _caller_gone = reply.send(work.await);
        drop(running);
    });
    answer.await.unwrap_or_else(|_| Err(Refusal::internal()))
}

/// Changes the shard count of a stream, in all of its groups. `only_group`: asked for through one group, which must be
/// the only one.
pub(crate) async fn scale(
    shared: &Arc<Shared>,
    prefix: &str,
    only_group: Option<&GroupKey>,
    request: ScaleRequest,
) -> Result<Scaled, Refusal> {
    check_stream_prefix(prefix).map_err(|error| Refusal::invalid(error.to_string()))?;
    check_reason(&request.requested_by, &request.reason, "the shard count is changed")?;
    let target = check_target(shared, request.target_shard_count)?;
    let (task, prefix, only_group) = (Arc::clone(shared), prefix.to_owned(), only_group.cloned());
    detached(shared, async move {
        let groups = streams::groups(&task, &prefix).await?;
        check_groups(&prefix, &groups, only_group.as_ref())?;
        if request.dry_run {
            return Ok(Scaled::Planned(plan(&task, &prefix, &groups, target, &request)));
        }
        let token = streams::lock(&task, &prefix).await?;
        let result = scale_locked(&task, &prefix, only_group.as_ref(), target, &request, &token).await;
        streams::unlock(&task, &prefix, &token).await;
        meter::lifecycle("scale", if result.is_ok() { "done" } else { "refused" });
        match &result {
            Ok(response) => {
                let id = &response.resharding_id;
                tracing::info!(
                    prefix,
                    target,
                    resharding_id = id,
                    requested_by = request.requested_by,
                    reason = request.reason,
                    "scaled"
                );
                task.resharding.watch(&task, &prefix, true);
            }
            Err(refusal) => {
                let code = refusal.code.as_str();
                tracing::info!(
                    prefix,
                    target,
                    requested_by = request.requested_by,
                    code,
                    why = refusal.message,
                    "not scaled"
                );
            }
        }
        result.map(Scaled::Done)
    })
    .await
}

fn check_groups(prefix: &str, groups: &[Group], only_group: Option<&GroupKey>) -> Result<(), Refusal> {
    if let Some(group) = only_group {
        if groups.iter().all(|found| found.key != *group) {
            return Err(Refusal::not_found(group));
        }
        if groups.len() > 1 {
            let message = format!(
                "stream {prefix} has {} groups, which have one shard count: scale the stream with POST /coord/v1/streams/{prefix}/scale",
                groups.len()
            );
            return Err(Refusal::new(ErrorCode::ShardCountMismatch, message));
        }
    } else if groups.is_empty() {
        let message = format!("no group exists on stream {prefix}: create it first, or check its name");
        return Err(Refusal::new(ErrorCode::StreamNotFound, message));
    }
    Ok(())
}

async fn scale_locked(
    shared: &Arc<Shared>,
    prefix: &str,
    only_group: Option<&GroupKey>,
    target: u32,
    request: &ScaleRequest,
    token: &MutexToken,
) -> Result<ScaleResponse, Refusal> {
    let mut groups = streams::groups(shared, prefix).await?;
    check_groups(prefix, &groups, only_group)?;
    let running = running(&groups).cloned();
    let id = match running {
        Some(running)
            if running.to_shard_count == target
                && !running.state.is_back()
                && request.retire.is_none_or(|retire| retire == running.retire) =>
        {
            running.resharding_id
        }
        Some(running) => return Err(other_runs(prefix, &running)),
        None => {
            refuse_in_a_round(&groups)?;
            if groups.iter().any(|group| group.shard_count != groups[0].shard_count) {
                groups = pass::drive(shared, prefix, token).await?.groups;
                if let Some(running) = self::running(&groups) {
                    return Err(other_runs(prefix, running));
                }
            }
            if groups.iter().all(|group| group.shard_count == target) {
                return Ok(noop(prefix, target, &groups));
            }
            prepare(shared, prefix, &groups, target, request).await?
        }
    };
    let progress = pass::drive(shared, prefix, token).await?;
    let is_behind = |group: &&Group| {
        let state = group.migration(&id).map(|migration| migration.state);
        !matches!(state, Some(MigrationState::Active | MigrationState::Draining | MigrationState::Deprecated))
    };
    if let Some(group) = progress.groups.iter().find(is_behind) {
        return Err(not_yet(&id, group, &progress));
    }
    let mut response = response(prefix, &id, target, &progress.groups);
    for row in response.migrations.iter_mut().filter(|row| !row.state.is_over()) {
        row.waits_for = waits_for(&progress.next);
    }
    Ok(response)
}

/// The migration that is under way in any group of the stream.
fn running(groups: &[Group]) -> Option<&Migration> {
    let running = groups.iter().filter_map(Group::active_migration);
    running.max_by_key(|migration| (migration.created_at, migration.resharding_id.as_str()))
}

fn other_runs(prefix: &str, running: &Migration) -> Refusal {
    let (id, from, to) = (&running.resharding_id, running.from_shard_count, running.to_shard_count);
    let back = if running.state.is_back() { ", on its way back" } else { "" };
    let message = format!(
        "migration {id} of stream {prefix} ({from} to {to} shards, {}{back}) is running: wait for its end, or roll it back",
        running.state.as_str()
    );
    Refusal::new(ErrorCode::ActiveMigrationExists, message)
}

fn not_yet(id: &str, group: &Group, progress: &Progress) -> Refusal {
    let message = format!(
        "migration {id} is recorded and goes on by itself, but group {} has not come so far yet: {}",
        group.key, progress.next.waits_for
    );
    Refusal::new(ErrorCode::MutexUnavailable, message)
}

fn refuse_in_a_round(groups: &[Group]) -> Result<(), Refusal> {
    match groups.iter().find(|group| group.metadata_correction.is_some()) {
        None => Ok(()),
        Some(group) => {
            let message = format!(
                "redis has lost writes of group {}, its members are being brought back: try again later",
                group.key
            );
            Err(Refusal::new(ErrorCode::MetadataSyncInProgress, message))
        }
    }
}

/// Records the migration in every group, or in none.
async fn prepare(
    shared: &Arc<Shared>,
    prefix: &str,
    groups: &[Group],
    target: u32,
    request: &ScaleRequest,
) -> Result<String, Refusal> {
    let id = fresh_id();
    let newest = groups.iter().flat_map(|group| group.migrations.values()).map(|it| it.created_at).max();
    let now = redis_time(shared, prefix).await?;
    let spec = MigrationSpec {
        resharding_id: id.clone(),
        from_shard_count: groups.first().map_or(0, |group| group.shard_count),
        to_shard_count: target,
        // The newest of a stream wins: it is later than any before it, whatever the clock does.
        created_at: newest.map_or(now, |newest| now.max(newest.plus(1))),
        requested_by: request.requested_by.clone(),
        reason: request.reason.clone(),
        deprecated_after: request.deprecated_after,
        retire: request.retire.unwrap_or_default(),
        repairs: false,
    };
    for group in groups {
        let step = MigrationStep::Prepare { spec: Box::new(spec.clone()), compare: false };
        if let Err(refusal) = record(shared, &group.key, &id, step).await {
            unprepare(shared, groups, &id, now, &refusal).await;
            return Err(refusal);
        }
    }
    Ok(id)
}

/// One group refused, or could not be asked: what was recorded in others is taken back. The refusing one is asked too:
/// its answer may have been lost.
async fn unprepare(shared: &Arc<Shared>, groups: &[Group], id: &str, now: Timestamp, refusal: &Refusal) {
    let note = RollbackNote {
        requested_by: "coordinator".to_owned(),
        reason: format!("one group refused it: {}", refusal.message),
        requested_at: now,
    };
    for group in groups {
        let step = MigrationStep::Rollback { note: Box::new(note.clone()), whole: false, compare: false };
        match record(shared, &group.key, id, step).await {
            Ok(()) => {}
            Err(refusal) if refusal.code == ErrorCode::MigrationNotFound => {}
            Err(refusal) => {
                let (group, reason) = (&group.key, &refusal.message);
                tracing::warn!(%group, resharding_id = id, reason, "a migration that another group refused could not be taken back here; it goes on by itself");
            }
        }
    }
}

fn response(prefix: &str, id: &str, target: u32, groups: &[Group]) -> ScaleResponse {
    let rows = groups.iter().filter_map(|group| Some(group.migration(id)?.response(&group.key)));
    ScaleResponse {
        stream_prefix: prefix.to_owned(),
        resharding_id: id.to_owned(),
        target_shard_count: target,
        affected_consumer_groups: names(groups),
        migrations: rows.collect(),
    }
}

fn names(groups: &[Group]) -> Vec<String> {
    groups.iter().map(|group| group.key.consumer_group().to_owned()).collect()
}

/// The answer to a change that changes nothing.
fn noop(prefix: &str, count: u32, groups: &[Group]) -> ScaleResponse {
    let row = |group: &Group| MigrationResponse {
        resharding_id: NOOP.to_owned(),
        stream_prefix: prefix.to_owned(),
        consumer_group: group.key.consumer_group().to_owned(),
        from_shard_count: count,
        to_shard_count: count,
        state: MigrationState::Deprecated,
        created_at: group.updated_at,
        updated_at: group.updated_at,
        requested_by: String::new(),
        reason: String::new(),
        deprecated_after: None,
        retire: rsc_protocol::resharding::Retire::Keep,
        activated_at: None,
        draining_shards: Vec::new(),
        retired_shards: Vec::new(),
        rollback: None,
        waits_for: String::new(),
        drain: Vec::new(),
    };
    ScaleResponse {
        stream_prefix: prefix.to_owned(),
        resharding_id: NOOP.to_owned(),
        target_shard_count: count,
        affected_consumer_groups: names(groups),
        migrations: groups.iter().map(row).collect(),
    }
}

/// What the change would do (protocol 6, `dryRun`).
pub(crate) fn plan(
    shared: &Shared,
    prefix: &str,
    groups: &[Group],
    target: u32,
    request: &ScaleRequest,
) -> ScalePlan {
    let from = groups.first().map_or(0, |group| group.shard_count);
    let refs = |shards: std::ops::Range<u32>| shards.map(|shard_index| ShardRef { shard_index }).collect();
    let lease = groups.iter().map(|group| group.max_routing_cache_ttl_ms).max().unwrap_or(0);
    let mut refusals = Vec::new();
    if let Some(running) = running(groups) {
        refusals.push(other_runs(prefix, running).message);
    }
    if let Err(refusal) = refuse_in_a_round(groups) {
        refusals.push(refusal.message);
    }
    ScalePlan {
        dry_run: true,
        stream_prefix: prefix.to_owned(),
        from_shard_count: from,
        target_shard_count: target,
        affected_consumer_groups: names(groups),
        added_shards: refs(from..target.max(from)),
        shards_to_drain: refs(target..from.max(target)),
        keys_changing_shard: planning::share_of_keys_moved(from, target),
        retire: request.retire.unwrap_or_default(),
        producer_cache_wait_ms: lease.saturating_add(shared.settings.timing.publish_margin_ms),
        groups: groups.iter().map(|group| planning::of_group(group, target)).collect(),
        refusals,
    }
}

/// Takes a migration back, in all groups of the stream.
pub(crate) async fn roll_back(
    shared: &Arc<Shared>,
    group: &GroupKey,
    resharding_id: &str,
    request: RollbackRequest,
) -> Result<MigrationResponse, Refusal> {
    check_reason(&request.requested_by, &request.reason, "the migration is rolled back")?;
    let (task, group, id) = (Arc::clone(shared), group.clone(), resharding_id.to_owned());
    detached(shared, async move {
        let prefix = group.stream_prefix();
        let token = streams::lock(&task, prefix).await?;
        let result = roll_back_locked(&task, &group, &id, &request, &token).await;
        streams::unlock(&task, prefix, &token).await;
        meter::lifecycle("rollback", if result.is_ok() { "done" } else { "refused" });
        match &result {
            Ok(row) => {
                tracing::info!(%group, resharding_id = id, state = ?row.state, requested_by = request.requested_by, reason = request.reason, "rolled back");
                task.resharding.watch(&task, prefix, true);
            }
            Err(refusal) => {
                let code = refusal.code.as_str();
                tracing::info!(%group, resharding_id = id, requested_by = request.requested_by, code, why = refusal.message, "not rolled back");
            }
        }
        result
    })
    .await
}

async fn roll_back_locked(
    shared: &Arc<Shared>,
    group: &GroupKey,
    id: &str,
    request: &RollbackRequest,
    token: &MutexToken,
) -> Result<MigrationResponse, Refusal> {
    let prefix = group.stream_prefix();
    let groups = streams::groups(shared, prefix).await?;
    if groups.iter().all(|found| found.key != *group) {
        return Err(Refusal::not_found(group));
    }
    let records = || groups.iter().filter_map(|group| Some((group, group.migration(id)?)));
    if records().next().is_none() {
        return Err(unknown(group, id));
    }
    refuse_in_a_round(&groups)?;
    let is_back = records().any(|(_, migration)| migration.state.is_back());
    if !is_back {
        let whole = records().any(|(_, migration)| migration.activated_at.is_some());
        let note = RollbackNote {
            requested_by: request.requested_by.clone(),
            reason: request.reason.clone(),
            requested_at: redis_time(shared, prefix).await?,
        };
        // Every record is asked before any is changed: none may have gone too far.
        if let Some((_, migration)) = records().find(|(_, migration)| gone_too_far(migration)) {
            return Err(too_late(migration));
        }
        let (first, migration) = records().next().ok_or_else(|| unknown(group, id))?;
        if whole {
            let known = migration.from_shard_count.max(migration.to_shard_count);
            ensure_streams(shared, &first.key, &ShardSet::from(0..known)).await?;
        }
        let step = MigrationStep::Rollback { note: Box::new(note), whole, compare: false };
        record(shared, &first.key, id, step).await?;
    }
    let progress = pass::drive(shared, prefix, token).await?;
    let is_behind = |group: &&Group| {
        let migration = group.migration(id);
        migration.is_some_and(|migration| {
            !(migration.count_restored || migration.state == MigrationState::RolledBack)
        })
    };
    if let Some(group) = progress.groups.iter().find(is_behind) {
        return Err(not_yet(id, group, &progress));
    }
    let found = progress.groups.iter().find(|found| found.key == *group);
    let row = found.and_then(|found| Some(found.migration(id)?.response(&found.key)));
    let mut row = row.ok_or_else(|| unknown(group, id))?;
    if !row.state.is_over() {
        row.waits_for = waits_for(&progress.next);
    }
    Ok(row)
}

fn gone_too_far(migration: &Migration) -> bool {
    migration.state == MigrationState::Deprecated || migration.deleting || migration.repairs
}

fn too_late(migration: &Migration) -> Refusal {
    let id = &migration.resharding_id;
    let why = if migration.repairs {
        "it brings the stream's groups, whose records differ, to one count".to_owned()
    } else {
        let stage = match migration.deleting && migration.state != MigrationState::Deprecated {
            true => "keys of its removed shards are being deleted",
            false => "it is finished",
        };
        format!("{stage}: scale to {} shards instead", migration.from_shard_count)
    };
    Refusal::new(ErrorCode::RollbackNotAllowed, format!("migration {id} cannot be rolled back: {why}"))
}

fn unknown(group: &GroupKey, id: &str) -> Refusal {
    let message =
        format!("group {group} has no migration {id}: GET …/migrations lists those that are remembered");
    Refusal::new(ErrorCode::MigrationNotFound, message)
}

/// What comes next for a stream, in a sentence.
pub(crate) fn waits_for(next: &stream::Next) -> String {
    match next.todo.first() {
        None => next.waits_for.clone(),
        Some(stream::Todo::Step { group, step, .. }) => {
            format!("next step: {} in group {group}", step.name())
        }
        Some(stream::Todo::Provision { group, .. }) => {
            format!("next step: create what is missing of the streams of group {group}")
        }
        Some(stream::Todo::Prove(_)) => "next step: look whether the removed shards are empty".to_owned(),
        Some(stream::Todo::Delete(_)) => "next step: delete the removed shards' keys".to_owned(),
    }
}
