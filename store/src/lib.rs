//! Group metadata in Redis and in memory, behind one trait (protocol 2).
//!
//! A critical section is two round trips: [`GroupStore::enter`] and [`GroupStore::commit`]. The scripts
//! that do the work on the server live in `src/scripts/`, one file each.

use async_trait::async_trait;
use rsc_core::{RawFields, Stamp, Tombstone, Write};
use rsc_protocol::{GroupKey, Timestamp};
use thiserror::Error;

/// Who holds a mutex: `instance:uuid`, drawn anew for every attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MutexToken(String);

impl MutexToken {
    /// A fresh token of `instance`.
    #[must_use]
    pub fn fresh(instance: &str) -> Self {
        MutexToken(format!("{instance}:{}", uuid::Uuid::new_v4()))
    }

    /// The text stored in the mutex key.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What *enter* found. Every variant but `Busy` means: the caller holds the mutex now and must commit,
/// delete or release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entered {
    /// Another token holds the mutex; nothing was taken.
    Busy {
        /// The token that holds it.
        holder: String,
    },
    /// The stored state is the remembered one.
    Unchanged {
        /// Redis `TIME`.
        now: Timestamp,
        /// The key carries a TTL, which the next commit removes.
        has_ttl: bool,
    },
    /// The stored state is another one.
    Loaded {
        /// Redis `TIME`.
        now: Timestamp,
        /// Every field of the hash.
        fields: RawFields,
        /// The key carries a TTL, which the next commit removes.
        has_ttl: bool,
    },
    /// There is no metadata key.
    Missing {
        /// Redis `TIME`.
        now: Timestamp,
        /// The tombstone under the group's name, if there is one.
        tombstone: Option<Tombstone>,
    },
    /// The key holds something else than a hash; it is never touched.
    WrongType {
        /// Redis `TIME`.
        now: Timestamp,
        /// What `TYPE` says.
        found: String,
    },
}

/// What a read without the mutex found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// The hash.
    Record {
        /// Redis `TIME`.
        now: Timestamp,
        /// Every field of the hash.
        fields: RawFields,
        /// The key carries a TTL, which the next commit removes.
        has_ttl: bool,
    },
    /// There is no metadata key.
    Missing {
        /// Redis `TIME`.
        now: Timestamp,
        /// The tombstone under the group's name, if there is one.
        tombstone: Option<Tombstone>,
    },
    /// The key holds something else than a hash.
    WrongType {
        /// Redis `TIME`.
        now: Timestamp,
        /// What `TYPE` says.
        found: String,
    },
}

/// Why nothing was written although the server answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conflict {
    /// Revision, live revision or write id are not the expected ones.
    Moved,
    /// The token no longer holds the mutex.
    MutexLost,
    /// The key vanished since *enter*; it is never recreated.
    Missing,
    /// The key is no longer a hash.
    WrongType,
    /// *create* only: the key exists already.
    Exists,
    /// *create* only: the tombstone is not the one that the caller had read.
    TombstoneMoved,
}

/// The four things that can have happened to a write. Matched everywhere, never guessed.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Written, and this is the new stamp. The mutex is free again (after *create* it is still held).
    Applied(Stamp),
    /// Certainly not written. The mutex, if it was ours, is free again.
    Conflict(Conflict),
    /// The connection broke or the answer timed out after sending: written or not, nobody knows. Forget,
    /// reload, and only then decide.
    Unknown(StoreError),
    /// Certainly not written: the request never left, or the server refused it.
    NotApplied(StoreError),
}

/// What went wrong between us and the store.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StoreError {
    /// No connection, a broken one, or no answer in time.
    #[error("redis did not answer: {0}")]
    Unavailable(String),
    /// The server answered with an error (`OOM`, `READONLY`, `NOPERM`, `LOADING` …).
    #[error("redis refused: {0}")]
    Refused(String),
    /// The server answered something this version does not understand.
    #[error("redis answered something unexpected: {0}")]
    Unexpected(String),
}

/// Why shards could not be provisioned.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ProvisionError {
    /// The shard's key holds something else than a stream.
    #[error("key {key} holds a {found}, not a stream: rename or remove it, or choose another stream prefix")]
    WrongType {
        /// The shard key.
        key: String,
        /// What `TYPE` says.
        found: String,
    },
    /// The store failed on the way; what was created stays, provisioning again is safe.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Group metadata, the mutexes around it, the index of groups, and the streams of shards.
///
/// Every method ends by itself within the store's command timeout. Deadlines are computed from the Redis
/// time that is returned, never from a process clock (protocol 2).
#[async_trait]
pub trait GroupStore: Send + Sync + 'static {
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
    async fn lock_stream(&self, stream_prefix: &str, token: &MutexToken) -> Result<Option<String>, StoreError>;

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

    /// `XGROUP CREATE key group 0 MKSTREAM` for the shards `first..end` and one consumer group; a group
    /// that exists already is fine (protocol 6). The memory store has no streams and provisions nothing.
    ///
    /// # Errors
    /// A key of another type, or the store failing. Asking again is safe.
    async fn provision(
        &self,
        stream_prefix: &str,
        consumer_group: &str,
        shards: std::ops::Range<u32>,
    ) -> Result<(), ProvisionError>;

    /// Redis `TIME`; shows that the store answers.
    ///
    /// # Errors
    /// When it does not.
    async fn ping(&self) -> Result<Timestamp, StoreError>;

    /// `redis` or `memory`.
    fn kind(&self) -> &'static str;
}
