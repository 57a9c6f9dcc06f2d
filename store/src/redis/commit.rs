//! *Commit* (protocol 2), and a commit that waits for replicas (protocol 12, `redis.wait-replicas`).

use std::time::Duration;

use ::redis::{Cmd, Value};
use rsc_core::{Stamp, Write};
use rsc_protocol::GroupKey;
use tokio::time::Instant;

use super::link::Failure;
use super::scripts::SCRIPTS;
use super::servers::Lane;
use super::start_check::is_about_rights;
use super::{RedisStore, script_call, stamp_texts};
use crate::fields::Change;
use crate::meter::{self, Operation};
use crate::types::{MutexToken, Outcome, Shortfall};

/// How long replicas are waited for that were not there the last time.
const ONLY_A_LOOK: Duration = Duration::from_millis(20);

/// Keys and arguments of one call of the script.
struct Call {
    keys: [String; 4],
    arguments: Vec<String>,
    stamp: Stamp,
}

impl Call {
    fn of(store: &RedisStore, group: &GroupKey, token: &MutexToken, expected: &Stamp, write: &Write) -> Self {
        let change = Change::of(expected, write);
        let mut arguments = vec![token.as_str().to_owned()];
        arguments.extend(stamp_texts(expected));
        arguments.push(write.history.clone().unwrap_or_default());
        arguments.push((change.set.len() * 2).to_string());
        arguments
            .extend(change.set.into_iter().flat_map(|(name, text)| [name.into_owned(), text.into_owned()]));
        arguments.extend(change.remove);
        let keys = &store.keys;
        let keys = [keys.metadata(group), keys.mutex(group), keys.history(group), keys.tombstone(group)];
        Call { keys, arguments, stamp: change.stamp }
    }

    fn keys(&self) -> [&str; 4] {
        self.keys.each_ref().map(String::as_str)
    }
}

/// [`GroupStore::commit`](crate::GroupStore::commit).
pub(super) async fn commit(
    store: &RedisStore,
    group: &GroupKey,
    token: &MutexToken,
    expected: &Stamp,
    write: &Write,
) -> Outcome {
    let call = Call::of(store, group, token, expected, write);
    let answer = store.run(&SCRIPTS.commit, &call.keys(), &call.arguments).await;
    let outcome = store.outcome(answer, &call.keys[1], call.stamp);
    meter::wrote(Operation::of(&write.kind), &outcome);
    outcome
}

/// [`GroupStore::commit_replicated`](crate::GroupStore::commit_replicated): the script and `WAIT` in one go, over
/// a connection on which nobody else waits behind it for long.
pub(super) async fn commit_replicated(
    store: &RedisStore,
    group: &GroupKey,
    token: &MutexToken,
    expected: &Stamp,
    write: &Write,
) -> (Outcome, Option<Shortfall>) {
    if store.wait_replicas == 0 {
        return (commit(store, group, token, expected, write).await, None);
    }
    let call = Call::of(store, group, token, expected, write);
    let started = Instant::now();
    let by_hash = script_call("EVALSHA", &SCRIPTS.commit.sha, &call.keys(), &call.arguments);
    let mut answer = send(store, &call, by_hash, started).await;
    if matches!(&answer, Err(Failure::Refused(refusal)) if refusal.code == "NOSCRIPT") {
        meter::script_resent(SCRIPTS.commit.name);
        let by_text = script_call("EVAL", SCRIPTS.commit.source, &call.keys(), &call.arguments);
        answer = send(store, &call, by_text, started).await;
    }
    metrics::histogram!("rsc_store_command_seconds", "command" => "commit_replicated")
        .record(started.elapsed().as_secs_f64());
    let (answer, confirmed) = match answer {
        Ok((value, confirmed)) => (Ok(value), confirmed),
        Err(Failure::Refused(refusal)) if is_about_rights(&refusal) => {
            let named = store.name_missing_rights(refusal, &SCRIPTS.commit, &call.keys[0]).await;
            (Err(Failure::Refused(named.about(&call.keys[0]))), 0)
        }
        Err(failure) => (Err(failure.about(&call.keys[0])), 0),
    };
    let outcome = store.outcome(answer, &call.keys[1], call.stamp);
    meter::wrote(Operation::of(&write.kind), &outcome);
    let wanted = store.wait_replicas;
    (outcome, (confirmed < wanted).then_some(Shortfall { wanted, confirmed }))
}

/// The answer of the script, and how many replicas have what it wrote.
async fn send(
    store: &RedisStore,
    call: &Call,
    script: Cmd,
    started: Instant,
) -> Result<(Value, u32), Failure> {
    // What is left of the command timeout is for the script, the way, and whoever is before us on this connection. Once a
    // wait has come short the next ones only look: each blocks a connection that other groups use too.
    let patience = store.command_timeout / 6;
    let is_short = store.servers.replicas_are_short(&call.keys[0]);
    let patience = if is_short { patience.min(ONLY_A_LOOK) } else { patience };
    let mut wait = ::redis::cmd("WAIT");
    wait.arg(store.wait_replicas).arg(u64::try_from(patience.as_millis()).unwrap_or(u64::MAX).max(1));
    let key = &call.keys[0];
    let deadline = started + store.command_timeout;
    let mut answers =
        store.servers.pipeline(Lane::Durable, key, &[script, wait], deadline).await?.into_iter();
    let value = match answers.next() {
        Some(answer) => answer.map_err(Failure::Refused)?,
        None => return Err(Failure::Unknown(super::reply::unexpected("fewer answers than commands"))),
    };
    let confirmed = match answers.next() {
        Some(Ok(Value::Int(count))) => u32::try_from(count).unwrap_or(0),
        Some(Err(refusal)) => {
            tracing::warn!(said = refusal.said, "WAIT was refused; redis.wait-replicas needs it");
            0
        }
        _ => 0,
    };
    store.servers.note_replicas(key, confirmed < store.wait_replicas);
    Ok((value, confirmed))
}
