//! The trait behind which Redis and memory stand.

use std::collections::BTreeMap;

use async_trait::async_trait;
use rsc_core::{ShardSet, Stamp, Tombstone, Write};
use rsc_protocol::{GroupKey, Timestamp};

use crate::drain::{ShardDeletion, ShardProof};
use crate::stream_reads::StreamReads;
use crate::types::{Entered, Found, MutexToken, Outcome, ProvisionError, Shortfall, StoreError};

/// Group metadata, the mutexes around it, the index of groups, and the streams of shards.
///
/// Every method ends by itself within the store's command timeout. Deadlines are computed from the Redis
/// time that is returned, never from a process clock (protocol 2).
#[async_trait]
pub trait GroupStore: StreamReads {
    /// Takes the group's mutex and returns what is stored (protocol 2, *enter*). `takeover`: a token of an
    /// earlier attempt of the same turn whose outcome is unknown; if that one still holds the mutex, the
    /// fresh token replaces it, so that a delayed commit of the earlier attempt can no longer pass.
    ///
    /// # Errors
    /// When the store does not answer or refuses. The mutex may be held then; it expires by itself.
    async fn enter(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        takeover: Option<&MutexToken>,
        known: Option<&Stamp>,
    ) -> Result<Entered, StoreError>;

    /// Writes if `token` holds the mutex and the stored stamp is `expected`; removes a TTL on the key;
    /// appends to the history; releases the mutex, on a conflict too (protocol 2, *commit*).
    async fn commit(&self, group: &GroupKey, token: &MutexToken, expected: &Stamp, write: &Write) -> Outcome;

    /// As [`GroupStore::commit`], and then waits, within the command timeout, until as many replicas as are configured
    /// have it and everything that was written before it. What they have not is told, and is written all the same. A
    /// store without replicas waits for none.
    async fn commit_replicated(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        expected: &Stamp,
        write: &Write,
    ) -> (Outcome, Option<Shortfall>) {
        (self.commit(group, token, expected, write).await, None)
    }

    /// Gives the mutex back without writing. Does nothing if another token holds it.
    ///
    /// # Errors
    /// When the store does not answer or refuses; the mutex then expires by itself.
    async fn release(&self, group: &GroupKey, token: &MutexToken) -> Result<(), StoreError>;

    /// Extends the mutex for another TTL. `false`: the token no longer holds it.
    ///
    /// # Errors
    /// When the store does not answer or refuses.
    async fn renew(&self, group: &GroupKey, token: &MutexToken) -> Result<bool, StoreError>;

    /// Creates the key if neither key nor mutex exist and the tombstone is still `tombstone`, which it
    /// removes; **keeps** the mutex under `token`, so that nobody enters before provisioning is over. A
    /// mutex held by another token: `Conflict(MutexLost)`. `write` is structural.
    async fn create(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        tombstone: Option<&Tombstone>,
        write: &Write,
    ) -> Outcome;

    /// Deletes key and history, writes the tombstone with its TTL of one day, and releases the mutex.
    /// `expected`: the stamp the caller decided on; `None` deletes whatever is there or is not there (an
    /// unreadable or missing record; a key of another type is removed too).
    /// `tombstone: None` leaves none behind (an undone creation that nobody saw).
    async fn delete(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        expected: Option<&Stamp>,
        tombstone: Option<&Tombstone>,
    ) -> Outcome;

    /// Reads a group without the mutex and without writing (protocol 8: reads never take the mutex).
    ///
    /// # Errors
    /// When the store does not answer or refuses.
    async fn read(&self, group: &GroupKey) -> Result<Found, StoreError>;

    /// What identifies the stored state of a group, without reading the rest; `None` where there is no record to
    /// identify.
    ///
    /// # Errors
    /// When the store does not answer or refuses.
    async fn stamp(&self, group: &GroupKey) -> Result<Option<Stamp>, StoreError> {
        Ok(match self.read(group).await? {
            Found::Record { fields, .. } => rsc_core::record::stamp(&fields).ok(),
            Found::Missing { .. } | Found::WrongType { .. } => None,
        })
    }

    /// Every member of the index: metadata keys, unordered.
    ///
    /// # Errors
    /// When the store does not answer or refuses.
    async fn index(&self) -> Result<Vec<String>, StoreError>;

    /// Whether the group's metadata key is in the index.
    ///
    /// # Errors
    /// When the store does not answer or refuses.
    async fn index_contains(&self, group: &GroupKey) -> Result<bool, StoreError>;

    /// Adds the group's metadata key to the index.
    ///
    /// # Errors
    /// When the store does not answer or refuses.
    async fn index_add(&self, group: &GroupKey) -> Result<(), StoreError>;

    /// Removes the group's metadata key from the index.
    ///
    /// # Errors
    /// When the store does not answer or refuses.
    async fn index_remove(&self, group: &GroupKey) -> Result<(), StoreError>;

    /// Takes the mutex that serialises creation of groups on one stream prefix; `Some(holder)` when another
    /// token holds it.
    ///
    /// # Errors
    /// When the store does not answer or refuses.
    async fn lock_stream(
        &self,
        stream_prefix: &str,
        token: &MutexToken,
    ) -> Result<Option<String>, StoreError>;

    /// Extends the stream mutex for another TTL. `false`: the token no longer holds it.
    ///
    /// # Errors
    /// When the store does not answer or refuses.
    async fn renew_stream(&self, stream_prefix: &str, token: &MutexToken) -> Result<bool, StoreError>;

    /// Gives the stream mutex back; does nothing if another token holds it.
    ///
    /// # Errors
    /// When the store does not answer or refuses; the mutex then expires by itself.
    async fn unlock_stream(&self, stream_prefix: &str, token: &MutexToken) -> Result<(), StoreError>;

    /// `XGROUP CREATE key group 0 MKSTREAM` for each of the shards and one consumer group; a group
    /// that exists already is fine (protocol 6). The memory store has no streams and provisions nothing.
    ///
    /// # Errors
    /// A key of another type, or the store failing. Asking again is safe.
    async fn provision(
        &self,
        stream_prefix: &str,
        consumer_group: &str,
        shards: &ShardSet,
    ) -> Result<(), ProvisionError>;

    /// Asks of each shard whether it is proven empty (protocol 6, *Drain*): the key does not exist, or
    /// every group of `coordinated` exists on it, and for every Redis consumer group on it, coordinated or
    /// not, no record is behind its last delivered id and no pending entry has a record any more. Every
    /// shard of `shards` is a key of the answer. The memory store has no streams: everything is proven.
    ///
    /// Each shard is read by one script at one instant, the shards at different ones. Only where records
    /// and ghosts (pending entries without a record) alternate some 1,000 times before anything real is
    /// found, the script is called again from where it stopped. Such a proof is put together from several
    /// instants: an entry that somebody moves meanwhile (`XCLAIM … FORCE`, `XGROUP SETID`) to where the
    /// proof has passed escapes it. [`GroupStore::delete_shard`] never accepts one.
    ///
    /// # Errors
    /// When the store does not answer or refuses about any of the shards. Asking again is safe.
    async fn prove_empty(
        &self,
        stream_prefix: &str,
        shards: &ShardSet,
        coordinated: &[String],
    ) -> Result<BTreeMap<u32, ShardProof>, StoreError>;

    /// The time of the server that holds each of these shards: what [`GroupStore::delete_shard`] measures its
    /// `not_after` by. In a cluster it is another one than the group's. Every shard of `shards` is a key of the answer.
    ///
    /// # Errors
    /// When a server does not answer or refuses.
    async fn shard_times(
        &self,
        stream_prefix: &str,
        shards: &ShardSet,
    ) -> Result<BTreeMap<u32, Timestamp>, StoreError>;

    /// Deletes the shard's key if the proof of [`GroupStore::prove_empty`] holds at that very instant, in
    /// one script. What the proof cannot decide within one call (records and ghosts that alternate some 5,000
    /// times) stays: `NotEmpty` with [`PendingUndecided`](crate::WaitReason::PendingUndecided), until somebody
    /// acknowledges the ghosts. The memory store has no streams: `Absent`.
    ///
    /// Not after `not_after`, in time of the shard's server ([`GroupStore::shard_times`]): a call that was held up on its way must not meet a stream that
    /// was made anew since, by a migration that has come and gone.
    ///
    /// # Errors
    /// When the store does not answer or refuses; the key may be deleted then. Asking again is safe: it
    /// says `Absent`.
    async fn delete_shard(
        &self,
        stream_prefix: &str,
        shard: u32,
        coordinated: &[String],
        not_after: Timestamp,
    ) -> Result<ShardDeletion, StoreError>;

    /// Redis `TIME`; shows that the store answers.
    ///
    /// # Errors
    /// When it does not.
    async fn ping(&self) -> Result<Timestamp, StoreError>;

    /// Whether the store can work as configured, as far as that can be known before anything is done: which servers
    /// are there, of which kind, and what the user may do. The memory store always can.
    ///
    /// # Errors
    /// [`StoreError::Misconfigured`] when trying again will not help; anything else may pass.
    async fn check(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// `redis` or `memory`.
    fn kind(&self) -> &'static str;
}
