//! Proving shards empty, and deleting them (protocol 6, *Drain* and *Finish*).

use std::collections::BTreeMap;

use ::redis::Value;
use futures_util::{StreamExt, TryStreamExt, stream};
use rsc_core::ShardSet;
use rsc_protocol::Timestamp;
use rsc_protocol::keys::shard_key;
use tokio::time::Instant;

use super::RedisStore;
use super::link::{Failure, Refusal};
use super::reply::{self, text, unexpected};
use super::scripts::{SCRIPTS, Script};
use super::servers::Lane;
use crate::drain::{ShardDeletion, ShardProof, WaitReason, Waiting};
use crate::types::StoreError;

/// How many shards are asked at the same time; each is a key of its own, perhaps on another node.
const IN_FLIGHT: usize = 16;

/// How many calls a proof may take; each walks some thousand scattered entries.
const MOST_CALLS: usize = 500;

/// What one call of a script says.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    TooLate,
    Absent,
    Proven {
        ghosts: u64,
    },
    Waits(Vec<Waiting>),
    /// The rows so far, and the arguments to go on with: groups and where their pending entries were left.
    Undecided(Vec<Waiting>, Vec<Vec<u8>>),
}

/// [`GroupStore::prove_empty`](crate::GroupStore::prove_empty).
pub(super) async fn prove_all_empty(
    store: &RedisStore,
    stream_prefix: &str,
    shards: &ShardSet,
    coordinated: &[String],
) -> Result<BTreeMap<u32, ShardProof>, StoreError> {
    stream::iter(shards.iter())
        .map(|shard| async move {
            let proof = prove_empty(store, &shard_key(stream_prefix, shard), coordinated).await?;
            Ok((shard, proof))
        })
        .buffer_unordered(IN_FLIGHT)
        .try_collect()
        .await
}

async fn prove_empty(
    store: &RedisStore,
    key: &str,
    coordinated: &[String],
) -> Result<ShardProof, StoreError> {
    let mut starts = Vec::new();
    for _ in 1..MOST_CALLS {
        match ask(store, &SCRIPTS.prove_empty, key, coordinated, &starts).await? {
            Answer::Undecided(_, go_on) => starts = go_on,
            decided => return Ok(proof(decided)),
        }
    }
    ask(store, &SCRIPTS.prove_empty, key, coordinated, &starts).await.map(proof)
}

fn proof(answer: Answer) -> ShardProof {
    match answer {
        // No proof is ever too late.
        Answer::Absent | Answer::TooLate => ShardProof::Empty { key_exists: false, ghosts: 0 },
        Answer::Proven { ghosts } => ShardProof::Empty { key_exists: true, ghosts },
        Answer::Waits(waits) | Answer::Undecided(waits, _) => ShardProof::NotEmpty { waits },
    }
}

/// [`GroupStore::shard_times`](crate::GroupStore::shard_times).
pub(super) async fn times(
    store: &RedisStore,
    stream_prefix: &str,
    shards: &ShardSet,
) -> Result<BTreeMap<u32, Timestamp>, StoreError> {
    let commands: Vec<_> =
        shards.iter().map(|shard| (shard_key(stream_prefix, shard), ::redis::cmd("TIME"))).collect();
    let deadline = Instant::now() + store.command_timeout;
    let answers =
        store.servers.commands(Lane::Work, &commands, deadline).await.map_err(Failure::into_error)?;
    let times = answers.into_iter().map(|answer| answer.map_err(Refusal::into_error).and_then(reply::times));
    shards.iter().zip(times).map(|(shard, time)| Ok((shard, time?))).collect()
}

/// [`GroupStore::delete_shard`](crate::GroupStore::delete_shard).
pub(super) async fn delete(
    store: &RedisStore,
    stream_prefix: &str,
    shard: u32,
    coordinated: &[String],
    not_after: Timestamp,
) -> Result<ShardDeletion, StoreError> {
    let key = shard_key(stream_prefix, shard);
    let not_after = vec![not_after.as_millis().to_string().into_bytes()];
    Ok(match ask(store, &SCRIPTS.delete_shard, &key, coordinated, &not_after).await? {
        Answer::TooLate => ShardDeletion::TooLate,
        Answer::Absent => ShardDeletion::Absent,
        Answer::Proven { .. } => ShardDeletion::Deleted,
        Answer::Waits(waits) | Answer::Undecided(waits, _) => ShardDeletion::NotEmpty { waits },
    })
}

async fn ask(
    store: &RedisStore,
    script: &'static Script,
    key: &str,
    coordinated: &[String],
    starts: &[Vec<u8>],
) -> Result<Answer, StoreError> {
    let count = coordinated.len().to_string();
    let mut arguments: Vec<&[u8]> = vec![count.as_bytes()];
    arguments.extend(coordinated.iter().map(String::as_bytes));
    arguments.extend(starts.iter().map(Vec::as_slice));
    answer(store.run(script, &[key], &arguments).await.map_err(Failure::into_error)?)
}

fn answer(value: Value) -> Result<Answer, StoreError> {
    let mut items = list(value)?.into_iter();
    let mut next = || items.next().ok_or_else(|| unexpected("the answer about a shard is too short"));
    Ok(match text(next()?)?.as_str() {
        "too_late" => Answer::TooLate,
        "absent" => Answer::Absent,
        "proven" => Answer::Proven { ghosts: number(next()?)? },
        "wrong_type" => Answer::Waits(vec![Waiting::wrong_type()]),
        "waits" => Answer::Waits(rows(next()?)?),
        "undecided" => Answer::Undecided(
            rows(next()?)?,
            list(next()?)?.into_iter().map(bytes).collect::<Result<_, _>>()?,
        ),
        other => return Err(unexpected(&format!("the answer about a shard is {other:?}"))),
    })
}

/// The rows of what waits; an answer without any would pass for a proof.
fn rows(value: Value) -> Result<Vec<Waiting>, StoreError> {
    let rows: Vec<Waiting> = list(value)?.into_iter().map(row).collect::<Result<_, _>>()?;
    if rows.is_empty() { Err(unexpected("a shard waits for nobody")) } else { Ok(rows) }
}

pub(super) fn row(value: Value) -> Result<Waiting, StoreError> {
    let row: [Value; 8] = list(value)?.try_into().map_err(|_| unexpected("what waits has not 8 parts"))?;
    let [group, reason, undelivered, at_least, pending, at_most, ghosts, oldest] = row;
    let reason = WaitReason::of(&text(reason)?).ok_or_else(|| unexpected("a shard waits for no reason"))?;
    let oldest = text(oldest)?;
    Ok(Waiting {
        // For people: any bytes may be the name of a group.
        consumer_group: String::from_utf8_lossy(&bytes(group)?).into_owned(),
        reason,
        undelivered: number(undelivered)?,
        undelivered_is_at_least: number(at_least)? != 0,
        pending: number(pending)?,
        pending_is_at_most: number(at_most)? != 0,
        ghosts: number(ghosts)?,
        oldest_id: (!oldest.is_empty()).then_some(oldest),
    })
}

pub(super) fn list(value: Value) -> Result<Vec<Value>, StoreError> {
    match value {
        Value::Array(items) => Ok(items),
        _ => Err(unexpected("an answer about a shard has no list where one belongs")),
    }
}

pub(super) fn bytes(value: Value) -> Result<Vec<u8>, StoreError> {
    match value {
        Value::BulkString(bytes) => Ok(bytes),
        _ => Err(unexpected("an answer about a shard has no bytes where they belong")),
    }
}

pub(super) fn number(value: Value) -> Result<u64, StoreError> {
    let number = if let Value::Int(number) = value { u64::try_from(number).ok() } else { None };
    number.ok_or_else(|| unexpected("an answer about a shard has no number where one belongs"))
}
