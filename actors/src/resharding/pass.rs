//! One pass over a stream under its mutex: ask what comes next, do it, ask again, until there is nothing to do now.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use rsc_core::migration::stream::{Next, ShardFacts, StreamView, Todo, next};
use rsc_core::{Command, Group, MigrationStep, ShardSet};
use rsc_protocol::{ErrorCode, GroupKey, Timestamp};
use rsc_store::{MutexToken, ShardDeletion, ShardProof, WaitReason, Waiting};

use crate::inbox::Request;
use crate::meter;
use crate::provisioning::{HeldMutexes, provision};
use crate::refusal::Refusal;
use crate::shared::Shared;
use crate::streams;
use crate::submit::submit;

/// Rounds of one pass; a pass that has not come to its end by then gives the mutex back and is followed by another.
const MOST_ROUNDS: usize = 64;
/// Keys deleted at a time.
const DELETIONS_AT_A_TIME: usize = 16;

/// Where a pass has come to.
pub(crate) struct Progress {
    /// The stream's groups as they were read last.
    pub(crate) groups: Vec<Group>,
    /// What comes next.
    pub(crate) next: Next,
    /// Redis time of that.
    pub(crate) now: Timestamp,
}

/// Does everything that can be done for the stream now.
///
/// # Errors
/// The first refusal; what was recorded before stands, and whoever comes next goes on from there.
pub(crate) async fn drive(
    shared: &Arc<Shared>,
    prefix: &str,
    token: &MutexToken,
) -> Result<Progress, Refusal> {
    let mutexes = HeldMutexes { stream: (prefix, token), groups: Vec::new() };
    let result = mutexes.while_running(shared, rounds(shared, prefix, token)).await;
    meter::migration_pass(if result.is_ok() { "done" } else { "failed" });
    result
}

async fn rounds(shared: &Arc<Shared>, prefix: &str, token: &MutexToken) -> Result<Progress, Refusal> {
    let mut facts = BTreeMap::new();
    let fresh_id = fresh_id();
    let mut rounds = 0;
    loop {
        let groups = streams::groups(shared, prefix).await?;
        let now = redis_time(shared, prefix).await?;
        let view = StreamView {
            groups: &groups,
            now,
            settings: &shared.settings.timing,
            facts: &facts,
            fresh_id: &fresh_id,
        };
        let next = next(&view);
        rounds += 1;
        if next.todo.is_empty() || rounds > MOST_ROUNDS {
            return Ok(Progress { groups, next, now });
        }
        // What was read under the mutex must still be ours to act upon.
        streams::renew(shared, prefix, token).await?;
        for todo in next.todo {
            match todo {
                Todo::Prove(shards) => facts.extend(prove(shared, prefix, &shards, &groups).await?),
                Todo::Delete(shards) => {
                    // Within the mutex as it is renewed after a look at the clocks that the shards' servers go by.
                    let times = shared.store.shard_times(prefix, &shards).await;
                    let failed = |error| Refusal::store_logged(&error, "ask for the time of shards", prefix);
                    let last = times.map_err(failed)?;
                    let ttl = millis(shared.settings.mutex_ttl);
                    let last = last.into_iter().map(|(shard, time)| (shard, time.plus(ttl))).collect();
                    streams::renew(shared, prefix, token).await?;
                    facts.extend(delete(shared, prefix, last, &groups).await?);
                }
                Todo::Provision { group, shards } => {
                    facts.clear();
                    ensure_streams(shared, &group, &shards).await?;
                }
                Todo::Step { group, resharding_id, step } => {
                    facts.clear();
                    record(shared, &group, &resharding_id, step).await?;
                }
            }
        }
    }
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// A new migration's id.
pub(crate) fn fresh_id() -> String {
    format!("reshard-{}", uuid::Uuid::new_v4())
}

pub(crate) async fn redis_time(shared: &Shared, prefix: &str) -> Result<Timestamp, Refusal> {
    let failed = |error| Refusal::store_logged(&error, "ask for redis time", prefix);
    shared.store.ping().await.map_err(failed)
}

/// Records one step in one group.
pub(crate) async fn record(
    shared: &Arc<Shared>,
    group: &GroupKey,
    resharding_id: &str,
    step: MigrationStep,
) -> Result<(), Refusal> {
    let name = step.name();
    let command = Command::Migrate { resharding_id: resharding_id.to_owned(), step };
    let result = submit(shared, group, Request::Command(command)).await.map(|_| ());
    if let Err(refusal) = &result {
        let code = refusal.code.as_str();
        tracing::debug!(%group, resharding_id, step = name, code, reason = refusal.message, "migration step refused");
    }
    result
}

/// Creates what is missing of the group's streams; where nothing is provisioned, looks whether somebody else has.
pub(crate) async fn ensure_streams(
    shared: &Shared,
    group: &GroupKey,
    shards: &ShardSet,
) -> Result<(), Refusal> {
    if shared.settings.provisioning_enabled || shared.store.kind() == "memory" {
        return provision(shared, group, shards).await;
    }
    let (prefix, name) = (group.stream_prefix(), group.consumer_group().to_owned());
    let failed = |error| Refusal::store_logged(&error, "look into a stream's shards", prefix);
    let proofs =
        shared.store.prove_empty(prefix, shards, std::slice::from_ref(&name)).await.map_err(failed)?;
    let is_missing = |proof: &ShardProof| match proof {
        ShardProof::Empty { key_exists, .. } => !key_exists,
        ShardProof::NotEmpty { waits } => waits.iter().any(|wait| wait.reason == WaitReason::GroupMissing),
    };
    match proofs.iter().find(|(_, proof)| is_missing(proof)) {
        None => Ok(()),
        Some((shard, _)) => {
            let message = format!(
                "streams.provisioning-enabled is false and consumer group {name} does not exist on stream {prefix}:{shard}: create it (XGROUP CREATE {prefix}:{shard} {name} 0 MKSTREAM), the migration goes on by itself"
            );
            Err(Refusal::new(ErrorCode::ProvisioningFailed, message))
        }
    }
}

fn coordinated(groups: &[Group]) -> Vec<String> {
    groups.iter().map(|group| group.key.consumer_group().to_owned()).collect()
}

/// What every Redis consumer group has left in these shards.
pub(crate) async fn proofs(
    shared: &Shared,
    prefix: &str,
    shards: &ShardSet,
    groups: &[Group],
) -> Result<BTreeMap<u32, ShardProof>, Refusal> {
    let failed = |error| Refusal::store_logged(&error, "look into a stream's shards", prefix);
    shared.store.prove_empty(prefix, shards, &coordinated(groups)).await.map_err(failed)
}

async fn prove(
    shared: &Shared,
    prefix: &str,
    shards: &ShardSet,
    groups: &[Group],
) -> Result<BTreeMap<u32, ShardFacts>, Refusal> {
    let proofs = proofs(shared, prefix, shards, groups).await?;
    Ok(proofs.iter().map(|(shard, proof)| (*shard, facts_of(proof))).collect())
}

/// A proof as the state machine needs it.
pub(crate) fn facts_of(proof: &ShardProof) -> ShardFacts {
    match proof {
        ShardProof::Empty { key_exists, .. } => {
            ShardFacts { is_empty: true, exists: *key_exists, ..ShardFacts::default() }
        }
        ShardProof::NotEmpty { waits } => {
            ShardFacts { exists: true, missing_groups: missing(waits), ..ShardFacts::default() }
        }
    }
}

fn missing(waits: &[Waiting]) -> Vec<String> {
    let missing = waits.iter().filter(|wait| wait.reason == WaitReason::GroupMissing);
    missing.map(|wait| wait.consumer_group.clone()).collect()
}

/// Deletes the keys of removed shards, each if it is empty in the same breath, and not after its last instant.
async fn delete(
    shared: &Shared,
    prefix: &str,
    shards: BTreeMap<u32, Timestamp>,
    groups: &[Group],
) -> Result<BTreeMap<u32, ShardFacts>, Refusal> {
    let coordinated = coordinated(groups);
    let coordinated = coordinated.as_slice();
    let deletions = shards.into_iter().map(|(shard, not_after)| async move {
        let outcome = shared.store.delete_shard(prefix, shard, coordinated, not_after).await;
        outcome.map(|outcome| (shard, outcome))
    });
    let mut facts = BTreeMap::new();
    let mut outcomes = futures_util::stream::iter(deletions).buffer_unordered(DELETIONS_AT_A_TIME);
    while let Some(outcome) = outcomes.next().await {
        let failed = |error| Refusal::store_logged(&error, "delete an empty shard", prefix);
        let (shard, outcome) = outcome.map_err(failed)?;
        meter::shard_deleted(matches!(outcome, ShardDeletion::Deleted));
        let found = match outcome {
            ShardDeletion::Deleted => {
                tracing::info!(
                    prefix,
                    shard,
                    "removed shard deleted: it was proven empty in the same breath"
                );
                ShardFacts { is_empty: true, ..ShardFacts::default() }
            }
            ShardDeletion::Absent => ShardFacts { is_empty: true, ..ShardFacts::default() },
            ShardDeletion::TooLate => {
                let message =
                    format!("deleting removed shards of stream {prefix} took too long: it goes on by itself");
                return Err(Refusal::new(ErrorCode::MutexUnavailable, message));
            }
            ShardDeletion::NotEmpty { waits } => {
                let is_scattered = waits.iter().all(|wait| wait.reason == WaitReason::PendingUndecided);
                ShardFacts {
                    is_empty: is_scattered,
                    exists: true,
                    is_scattered,
                    missing_groups: missing(&waits),
                }
            }
        };
        facts.insert(shard, found);
    }
    Ok(facts)
}
