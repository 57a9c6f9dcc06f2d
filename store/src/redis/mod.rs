//! The store on one Redis server: two scripts per critical section, and of every write one of four outcomes.
//!
//! # What an error says about a write
//!
//! | what happened | outcome |
//! | --- | --- |
//! | no connection, and none could be made in time | [`Outcome::NotApplied`] |
//! | the server answered with an error (`OOM`, `READONLY`, `NOPERM`, `LOADING`, `BUSY`, `MISCONF` …) | [`Outcome::NotApplied`]: no script writes anything before it can fail |
//! | the connection broke after the request was handed over, or no answer came in time | [`Outcome::Unknown`] |
//! | an answer that no script gives | [`Outcome::Unknown`] |
//!
//! Nothing is sent twice, with one exception: `NOSCRIPT` says that a script was not run because the server
//! had forgotten it, and the same call is made once more with its text. Text and call are one command, so
//! that a `SCRIPT FLUSH` in between cannot fail it.
//!
//! # What the user needs
//!
//! `EVALSHA`, `EVAL`, `SCRIPT|LOAD`, `TIME`, `TYPE`, `GET`, `SET`, `DEL`, `PTTL`, `PEXPIRE`, `PERSIST`,
//! `HGETALL`, `HMGET`, `HSET`, `HDEL`, `XADD`, `SMEMBERS`, `SISMEMBER`, `SADD`, `SREM` on the coordinator's
//! own keys, and `XGROUP|CREATE`, `TYPE`, `XINFO|GROUPS`, `XRANGE`, `XPENDING`, `XACK` and `UNLINK` on the
//! shards' keys; for monitoring also `XINFO|STREAM` and `XREVRANGE` on these and on histories, and, if it may,
//! `MEMORY|USAGE`.

mod address;
mod cluster;
mod commit;
mod deployment;
mod dial;
mod drain;
mod link;
mod provision;
mod remedy;
mod reply;
mod scripts;
mod sentinel;
mod servers;
mod settings;
mod slots;
mod start_check;
mod stream_reads;
mod tls;
mod tools;

use std::collections::BTreeMap;
use std::time::Duration;

use ::redis::{Cmd, ToRedisArgs, Value};
use async_trait::async_trait;
use rsc_core::{ShardSet, Stamp, Tombstone, Write, WriteKind};
use rsc_protocol::keys::Keys;
use rsc_protocol::{GroupKey, Timestamp};
use tokio::time::Instant;

use self::deployment::Deployment;
use self::link::Failure;
use self::reply::{Reply, Wrote};
use self::scripts::{SCRIPTS, Script};
use self::servers::{Lane, Servers};
pub use self::settings::{RedisMode, RedisSettings, SettingsError};
pub use self::tls::TlsSettings;
pub use self::tools::{NodeRole, RedisNode, RedisTools};
use crate::drain::{ShardDeletion, ShardProof};
use crate::fields::{Change, TOMBSTONE_IDENTITY, before_creation, lease_only_create, tombstone_fields};
use crate::group_store::GroupStore;
use crate::meter::{self, Operation};
use crate::types::{Entered, Found, MutexToken, Outcome, ProvisionError, Shortfall, StoreError};

/// Group metadata in Redis.
#[derive(Debug)]
pub struct RedisStore {
    keys: Keys,
    servers: Servers,
    mutex_ttl: String,
    command_timeout: Duration,
    connect_timeout: Duration,
    wait_replicas: u32,
    _home: deployment::Home,
}

impl RedisStore {
    /// A store that connects with its first call and again after every loss, so that a process can start
    /// while Redis is away. [`GroupStore::ping`] tells whether it is there. Connections live on a
    /// thread of the store's own; calls can come from any tokio runtime that has its timers enabled.
    ///
    /// # Errors
    /// When the settings cannot work with any server.
    pub fn new(settings: &RedisSettings) -> Result<Self, SettingsError> {
        let Deployment { servers, home, .. } = Deployment::new(settings)?;
        Ok(RedisStore {
            keys: settings.keys.clone(),
            servers,
            mutex_ttl: settings.mutex_ttl.as_millis().to_string(),
            command_timeout: settings.command_timeout,
            connect_timeout: settings.connect_timeout,
            wait_replicas: settings.wait_replicas,
            _home: home,
        })
    }

    /// Runs a script. `keys[0]` chooses the connection.
    async fn run<A: ToRedisArgs + Sync>(
        &self,
        script: &'static Script,
        keys: &[&str],
        arguments: &[A],
    ) -> Result<Value, Failure> {
        self.run_on(Lane::Work, script, keys, arguments).await
    }

    /// Runs a script through this lane.
    async fn run_on<A: ToRedisArgs + Sync>(
        &self,
        lane: Lane,
        script: &'static Script,
        keys: &[&str],
        arguments: &[A],
    ) -> Result<Value, Failure> {
        let started = Instant::now();
        let deadline = started + self.command_timeout;
        let key = keys.first().copied().unwrap_or_default();
        let command = script_call("EVALSHA", &script.sha, keys, arguments);
        let mut answer = self.servers.command(lane, key, &command, deadline).await;
        if matches!(&answer, Err(Failure::Refused(refusal)) if refusal.code == "NOSCRIPT") {
            tracing::debug!(script = script.name, "the server had forgotten a script");
            meter::script_resent(script.name);
            let command = script_call("EVAL", script.source, keys, arguments);
            answer = self.servers.command(lane, key, &command, deadline).await;
        }
        metrics::histogram!("rsc_store_command_seconds", "command" => script.name)
            .record(started.elapsed().as_secs_f64());
        match answer {
            Err(Failure::Refused(refusal)) if start_check::is_about_rights(&refusal) => {
                let named = self.name_missing_rights(refusal, script, key).await;
                Err(Failure::Refused(named.about(key)))
            }
            answer => answer.map_err(|failure| failure.about(key)),
        }
    }

    /// Runs a command that is no script.
    async fn plain(&self, name: &'static str, key: &str, command: &Cmd) -> Result<Value, StoreError> {
        let started = Instant::now();
        let answer = self.servers.command(Lane::Work, key, command, started + self.command_timeout).await;
        metrics::histogram!("rsc_store_command_seconds", "command" => name)
            .record(started.elapsed().as_secs_f64());
        answer.map_err(|failure| failure.about(key).into_error())
    }

    /// Turns what a writing script answered, or how it failed, into one of the four outcomes.
    fn outcome(&self, answer: Result<Value, Failure>, mutex: &str, stamp: Stamp) -> Outcome {
        let value = match answer {
            Ok(value) => value,
            Err(Failure::Unknown(error)) => return Outcome::Unknown(error),
            Err(failure) => return Outcome::NotApplied(failure.into_error()),
        };
        match reply::wrote(value, mutex) {
            Ok(Wrote::Applied { ttl_removed, history_error }) => {
                if ttl_removed {
                    tracing::warn!(mutex, "removed a TTL from the metadata key beside this mutex");
                    meter::ttl_removed();
                }
                if !history_error.is_empty() {
                    tracing::warn!(mutex, error = history_error, "could not append to the history");
                    meter::history_failed();
                }
                Outcome::Applied(stamp)
            }
            Ok(Wrote::Conflict(conflict)) => Outcome::Conflict(conflict),
            // The one refusal of ours: the mutex key holds something else.
            Err(error @ StoreError::Refused(_)) => Outcome::NotApplied(error),
            Err(error) => Outcome::Unknown(error),
        }
    }

    async fn index_command(
        &self,
        command: &str,
        name: &'static str,
        group: &GroupKey,
    ) -> Result<Value, StoreError> {
        let key = self.keys.groups();
        self.plain(name, &key, ::redis::cmd(command).arg(&key).arg(self.keys.metadata(group))).await
    }

    async fn hold(
        &self,
        script: &'static Script,
        mutex: &str,
        arguments: &[&str],
    ) -> Result<String, StoreError> {
        let value = self.run(script, &[mutex], arguments).await.map_err(Failure::into_error)?;
        Ok(Reply::of(value, mutex)?.0)
    }

    async fn renew_mutex(&self, mutex: &str, token: &MutexToken) -> Result<bool, StoreError> {
        Ok(self.hold(&SCRIPTS.renew, mutex, &[token.as_str(), &self.mutex_ttl]).await? == "held")
    }

    async fn release_mutex(&self, mutex: &str, token: &MutexToken) -> Result<(), StoreError> {
        self.hold(&SCRIPTS.release, mutex, &[token.as_str()]).await.map(|_| ())
    }
}

/// The command that runs a script, by its hash or its text.
fn script_call<A: ToRedisArgs>(command: &str, script: &str, keys: &[&str], arguments: &[A]) -> Cmd {
    let mut call = ::redis::cmd(command);
    call.arg(script).arg(keys.len()).arg(keys).arg(arguments);
    call
}

/// A stamp as the scripts take it: three texts.
fn stamp_texts(stamp: &Stamp) -> [String; 3] {
    [stamp.revision.to_string(), stamp.live_revision.to_string(), stamp.write_id.clone()]
}

#[async_trait]
impl GroupStore for RedisStore {
    async fn enter(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        takeover: Option<&MutexToken>,
        known: Option<&Stamp>,
    ) -> Result<Entered, StoreError> {
        let (metadata, mutex) = (self.keys.metadata(group), self.keys.mutex(group));
        let takeover = takeover.map_or("", MutexToken::as_str);
        let remembered = if known.is_some() { "1" } else { "0" };
        let [revision, live_revision, write_id] = stamp_texts(known.unwrap_or(&Stamp::default()));
        let result = self
            .run(
                &SCRIPTS.enter,
                &[&metadata, &mutex, &self.keys.tombstone(group)],
                &[
                    token.as_str(),
                    takeover,
                    &self.mutex_ttl,
                    remembered,
                    &revision,
                    &live_revision,
                    &write_id,
                ],
            )
            .await
            .map_err(Failure::into_error)
            .and_then(|value| reply::entered(value, &mutex));
        meter::entered(&result);
        result
    }

    async fn commit(&self, group: &GroupKey, token: &MutexToken, expected: &Stamp, write: &Write) -> Outcome {
        commit::commit(self, group, token, expected, write).await
    }

    async fn commit_replicated(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        expected: &Stamp,
        write: &Write,
    ) -> (Outcome, Option<Shortfall>) {
        commit::commit_replicated(self, group, token, expected, write).await
    }

    async fn release(&self, group: &GroupKey, token: &MutexToken) -> Result<(), StoreError> {
        self.release_mutex(&self.keys.mutex(group), token).await
    }

    async fn renew(&self, group: &GroupKey, token: &MutexToken) -> Result<bool, StoreError> {
        self.renew_mutex(&self.keys.mutex(group), token).await
    }

    async fn create(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        tombstone: Option<&Tombstone>,
        write: &Write,
    ) -> Outcome {
        if write.kind == WriteKind::LeaseOnly {
            return Outcome::NotApplied(lease_only_create());
        }
        let (metadata, mutex) = (self.keys.metadata(group), self.keys.mutex(group));
        let change = Change::of(&before_creation(tombstone), write);
        let read = if tombstone.is_some() { "1" } else { "0" };
        let identity = tombstone_fields(tombstone.unwrap_or(&Tombstone::default()));
        let history = write.history.as_deref().unwrap_or_default();
        let mut arguments: Vec<&str> = vec![token.as_str(), &self.mutex_ttl, history, read];
        arguments.extend(identity.iter().take(TOMBSTONE_IDENTITY).map(|(_, text)| text.as_str()));
        arguments.extend(change.set.iter().flat_map(|(name, text)| [name.as_ref(), text.as_ref()]));
        let keys = [metadata.as_str(), &mutex, &self.keys.history(group), &self.keys.tombstone(group)];
        let answer = self.run(&SCRIPTS.create, &keys, &arguments).await;
        let outcome = self.outcome(answer, &mutex, change.stamp);
        meter::wrote(Operation::Create, &outcome);
        outcome
    }

    async fn delete(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        expected: Option<&Stamp>,
        tombstone: Option<&Tombstone>,
    ) -> Outcome {
        let (metadata, mutex) = (self.keys.metadata(group), self.keys.mutex(group));
        let checked = if expected.is_some() { "1" } else { "0" };
        let [revision, live_revision, write_id] = stamp_texts(expected.unwrap_or(&Stamp::default()));
        let ttl = Tombstone::TTL_MS.to_string();
        let fields = tombstone.map(tombstone_fields);
        let mut arguments: Vec<&str> =
            vec![token.as_str(), checked, &revision, &live_revision, &write_id, &ttl];
        arguments.extend(fields.iter().flatten().flat_map(|(name, text)| [*name, text.as_str()]));
        let keys = [metadata.as_str(), &mutex, &self.keys.history(group), &self.keys.tombstone(group)];
        let answer = self.run(&SCRIPTS.delete, &keys, &arguments).await;
        let outcome = self.outcome(answer, &mutex, Stamp::default());
        meter::wrote(Operation::Delete, &outcome);
        outcome
    }

    async fn read(&self, group: &GroupKey) -> Result<Found, StoreError> {
        let (metadata, tombstone) = (self.keys.metadata(group), self.keys.tombstone(group));
        let answer = self.run::<&str>(&SCRIPTS.read, &[&metadata, &tombstone], &[]).await;
        reply::found(answer.map_err(Failure::into_error)?)
    }

    async fn stamp(&self, group: &GroupKey) -> Result<Option<Stamp>, StoreError> {
        const FIELDS: [&str; 3] = ["revision", "liveRevision", "writeId"];
        let metadata = self.keys.metadata(group);
        let command = ::redis::cmd("HMGET").arg(&metadata).arg(&FIELDS).to_owned();
        let values = self.plain("stamp", &metadata, &command).await?;
        let values = values.into_sequence().map_err(|_| reply::unexpected("HMGET answers no list"))?;
        let mut fields = rsc_core::RawFields::new();
        for (field, value) in FIELDS.into_iter().zip(values) {
            if value != Value::Nil {
                fields.insert(field.to_owned(), reply::text(value)?.into_bytes());
            }
        }
        Ok(rsc_core::record::stamp(&fields).ok())
    }

    async fn index(&self) -> Result<Vec<String>, StoreError> {
        let key = self.keys.groups();
        let members = self.plain("index", &key, ::redis::cmd("SMEMBERS").arg(&key)).await?;
        let members = members.into_sequence().map_err(|_| reply::unexpected("the index is no list"))?;
        members.into_iter().map(reply::text).collect()
    }

    async fn index_contains(&self, group: &GroupKey) -> Result<bool, StoreError> {
        let answer = self.index_command("SISMEMBER", "index_contains", group).await?;
        Ok(answer == Value::Int(1))
    }

    async fn index_add(&self, group: &GroupKey) -> Result<(), StoreError> {
        self.index_command("SADD", "index_add", group).await.map(|_| ())
    }

    async fn index_remove(&self, group: &GroupKey) -> Result<(), StoreError> {
        self.index_command("SREM", "index_remove", group).await.map(|_| ())
    }

    async fn lock_stream(
        &self,
        stream_prefix: &str,
        token: &MutexToken,
    ) -> Result<Option<String>, StoreError> {
        let mutex = self.keys.stream_mutex(stream_prefix);
        let answer = self.run(&SCRIPTS.lock, &[&mutex], &[token.as_str(), &self.mutex_ttl]).await;
        let (kind, mut reply) = Reply::of(answer.map_err(Failure::into_error)?, &mutex)?;
        if kind == "busy" { reply.text().map(Some) } else { Ok(None) }
    }

    async fn renew_stream(&self, stream_prefix: &str, token: &MutexToken) -> Result<bool, StoreError> {
        self.renew_mutex(&self.keys.stream_mutex(stream_prefix), token).await
    }

    async fn unlock_stream(&self, stream_prefix: &str, token: &MutexToken) -> Result<(), StoreError> {
        self.release_mutex(&self.keys.stream_mutex(stream_prefix), token).await
    }

    /// As the trait says; a batch of 250 shards has the command timeout for itself.
    async fn provision(
        &self,
        stream_prefix: &str,
        consumer_group: &str,
        shards: &ShardSet,
    ) -> Result<(), ProvisionError> {
        provision::provision(&self.servers, stream_prefix, consumer_group, shards, self.command_timeout).await
    }

    /// As the trait says; each call of the script has the command timeout for itself.
    async fn prove_empty(
        &self,
        stream_prefix: &str,
        shards: &ShardSet,
        coordinated: &[String],
    ) -> Result<BTreeMap<u32, ShardProof>, StoreError> {
        drain::prove_all_empty(self, stream_prefix, shards, coordinated).await
    }

    async fn shard_times(
        &self,
        stream_prefix: &str,
        shards: &ShardSet,
    ) -> Result<BTreeMap<u32, Timestamp>, StoreError> {
        drain::times(self, stream_prefix, shards).await
    }

    async fn delete_shard(
        &self,
        stream_prefix: &str,
        shard: u32,
        coordinated: &[String],
        not_after: Timestamp,
    ) -> Result<ShardDeletion, StoreError> {
        drain::delete(self, stream_prefix, shard, coordinated, not_after).await
    }

    async fn ping(&self) -> Result<Timestamp, StoreError> {
        reply::times(self.plain("ping", &self.keys.groups(), &::redis::cmd("TIME")).await?)
    }

    async fn check(&self) -> Result<(), StoreError> {
        start_check::check(self).await
    }

    fn kind(&self) -> &'static str {
        "redis"
    }
}
