//! What the store is asked and what it answers: tokens, states found, conflicts, outcomes, errors.

use rsc_core::{RawFields, Stamp, Tombstone};
use rsc_protocol::Timestamp;
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

/// A write that is on the master, and on fewer replicas than it should be: a failover may lose it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortfall {
    /// How many replicas should have it.
    pub wanted: u32,
    /// How many have said that they do.
    pub confirmed: u32,
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
    /// Redis is there and cannot be used as configured: another mode, a wrong password, a certificate that is not
    /// accepted. Trying again does not help.
    #[error("redis cannot be used: {0}")]
    Misconfigured(String),
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
