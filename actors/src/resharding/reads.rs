//! What migrations look like from outside, and what each removed shard waits for (protocol 8).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use moka::future::Cache;
use rsc_core::migration::stream::{ShardFacts, StreamView, next};
use rsc_core::{Group, Migration, ShardSet};
use rsc_protocol::resharding::{DrainRow, DrainWait, MigrationResponse, MigrationsResponse};
use rsc_protocol::{ErrorCode, GroupKey};
use rsc_store::{ShardProof, Waiting};

use super::pass::{facts_of, proofs, redis_time};
use super::requests::waits_for;
use crate::refusal::Refusal;
use crate::shared::Shared;
use crate::{reads, streams};

/// How long what was found in shards is shown again without another look.
const SHOWN_FOR: Duration = Duration::from_secs(1);
/// Streams whose last look is remembered.
const STREAMS_REMEMBERED: u64 = 1_000;

type Found = Arc<BTreeMap<u32, ShardProof>>;

/// What was last found in removed shards, by stream: who watches a screen must not keep Redis busy.
pub(crate) struct Proofs(Cache<String, Found>);

impl Default for Proofs {
    fn default() -> Self {
        Proofs(Cache::builder().max_capacity(STREAMS_REMEMBERED).time_to_live(SHOWN_FOR).build())
    }
}

impl Proofs {
    async fn of(
        &self,
        shared: &Shared,
        prefix: &str,
        shards: &ShardSet,
        groups: &[Group],
    ) -> Result<Found, Refusal> {
        let look = async { proofs(shared, prefix, shards, groups).await.map(Arc::new) };
        self.0.try_get_with(prefix.to_owned(), look).await.map_err(|refusal| (*refusal).clone())
    }
}

/// Every migration of a group, oldest first.
pub(crate) async fn migrations(shared: &Arc<Shared>, key: &GroupKey) -> Result<MigrationsResponse, Refusal> {
    let group = reads::group(shared, key).await?;
    let mut rows: Vec<MigrationResponse> =
        group.migrations_by_age().into_iter().map(|migration| migration.response(key)).collect();
    if let Some(active) = group.active_migration()
        && let Some(row) = rows.iter_mut().find(|row| row.resharding_id == active.resharding_id)
    {
        explain(shared, &group, active, row).await?;
    }
    Ok(MigrationsResponse { active_resharding_id: group.active_resharding_id.clone(), migrations: rows })
}

/// One migration of a group.
pub(crate) async fn migration(
    shared: &Arc<Shared>,
    key: &GroupKey,
    id: &str,
) -> Result<MigrationResponse, Refusal> {
    let group = reads::group(shared, key).await?;
    let Some(migration) = group.migration(id) else {
        let message =
            format!("group {key} has no migration {id}: GET …/migrations lists those that are remembered");
        return Err(Refusal::new(ErrorCode::MigrationNotFound, message));
    };
    let mut row = migration.response(key);
    if !migration.state.is_over() {
        explain(shared, &group, migration, &mut row).await?;
    }
    Ok(row)
}

/// Adds what the migration waits for, by the same decision that drives it.
async fn explain(
    shared: &Shared,
    group: &Group,
    migration: &Migration,
    row: &mut MigrationResponse,
) -> Result<(), Refusal> {
    let prefix = group.key.stream_prefix();
    let groups = match streams::groups(shared, prefix).await {
        Ok(groups) => groups,
        Err(refusal) => {
            row.waits_for = refusal.message;
            return Ok(());
        }
    };
    let removed = migration.removed();
    let found = match removed.is_empty() {
        true => Found::default(),
        false => shared.resharding.proofs.of(shared, prefix, &removed, &groups).await?,
    };
    let facts: BTreeMap<u32, ShardFacts> =
        found.iter().map(|(shard, proof)| (*shard, facts_of(proof))).collect();
    let view = StreamView {
        groups: &groups,
        now: redis_time(shared, prefix).await?,
        settings: &shared.settings.timing,
        facts: &facts,
        fresh_id: "",
    };
    let next = next(&view);
    row.waits_for = waits_for(&next);
    // What is to be done next has been tried, and something was in the way.
    let held_up_by = shared.resharding.held_up_by(prefix);
    if !next.todo.is_empty() && !held_up_by.is_empty() {
        row.waits_for = format!("{}; when it was last tried: {held_up_by}", row.waits_for);
    }
    let since = migration.draining_since.or(migration.activated_at);
    row.drain = migration
        .draining()
        .iter()
        .filter_map(|shard| Some(drain_row(group, &groups, shard, found.get(&shard)?, since)))
        .collect();
    Ok(())
}

fn drain_row(
    group: &Group,
    groups: &[Group],
    shard_index: u32,
    proof: &ShardProof,
    since: Option<rsc_protocol::Timestamp>,
) -> DrainRow {
    let owner = group.targets.iter().find(|(_, target)| target.contains(shard_index));
    let facts = facts_of(proof);
    let waits_for = match proof {
        ShardProof::Empty { .. } => Vec::new(),
        ShardProof::NotEmpty { waits } => waits.iter().map(|wait| drain_wait(groups, wait)).collect(),
    };
    DrainRow {
        shard_index,
        stream_key: rsc_protocol::keys::shard_key(group.key.stream_prefix(), shard_index),
        empty: facts.is_empty,
        exists: facts.exists,
        owner: owner.map(|(id, _)| id.clone()),
        since,
        waits_for,
    }
}

/// What one Redis consumer group has left, as it is shown.
pub(crate) fn drain_wait(groups: &[Group], wait: &Waiting) -> DrainWait {
    DrainWait {
        consumer_group: wait.consumer_group.clone(),
        coordinated: groups.iter().any(|group| group.key.consumer_group() == wait.consumer_group),
        reason: wait.reason.as_str().to_owned(),
        undelivered: wait.undelivered,
        undelivered_is_at_least: wait.undelivered_is_at_least,
        pending: wait.pending,
        pending_is_at_most: wait.pending_is_at_most,
        pending_without_record: wait.ghosts,
    }
}
