//! The store in this process: for a first look with nothing installed, and for tests. Everything is gone
//! with the process, and no stream is provisioned.
//!
//! It keeps the very same keys, fields and texts as the Redis store, in a small [`Keyspace`], so that the
//! same loading code reads them. [`MemoryStore::edit`] reaches behind the store's back, as an operator with
//! `redis-cli` would: to lose a key, roll one back, or damage it.

mod clock;
mod keyspace;
mod stream_reads;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use rsc_core::{RawFields, ShardSet, Stamp, Tombstone, Write, WriteKind};
use rsc_protocol::keys::Keys;
use rsc_protocol::{GroupKey, Timestamp};

pub use self::clock::{Clock, ManualClock};
pub use self::keyspace::{Content, Keyspace};
use crate::drain::{ShardDeletion, ShardProof};
use crate::fields::{
    Change, LIVE_REVISION, REVISION, TOMBSTONE_IDENTITY, WRITE_ID, before_creation, lease_only_create,
    tombstone_fields, tombstone_of,
};
use crate::group_store::GroupStore;
use crate::meter::{self, Operation};
use crate::types::{Conflict, Entered, Found, MutexToken, Outcome, ProvisionError, StoreError};

/// Group metadata in this process. Clones share one content, so that two coordinators in one process can
/// work on the same groups.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    keys: Keys,
    mutex_ttl_ms: i64,
    clock: Clock,
    keyspace: Arc<Mutex<Keyspace>>,
}

/// How many history entries a group keeps.
const HISTORY_ENTRIES: usize = 1000;

impl MemoryStore {
    /// An empty store on the system clock; a mutex lasts `mutex_ttl` (at least 1 ms) unless renewed.
    #[must_use]
    pub fn new(keys: Keys, mutex_ttl: Duration) -> Self {
        Self::with_clock(keys, mutex_ttl, Clock::System)
    }

    /// An empty store on another clock.
    #[must_use]
    pub fn with_clock(keys: Keys, mutex_ttl: Duration, clock: Clock) -> Self {
        let mutex_ttl_ms = i64::try_from(mutex_ttl.as_millis()).unwrap_or(i64::MAX).max(1);
        MemoryStore { keys, mutex_ttl_ms, clock, keyspace: Arc::default() }
    }

    /// Looks at or changes the content behind the store's back, in one step that no call sees halfway.
    pub fn edit<T>(&self, edit: impl FnOnce(&mut Keyspace) -> T) -> T {
        edit(&mut self.locked().0)
    }

    /// The content as it is now: what has expired is gone.
    fn locked(&self) -> (MutexGuard<'_, Keyspace>, Timestamp) {
        let mut keyspace = self.keyspace.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.clock.now();
        keyspace.set_now(now);
        (keyspace, now)
    }

    fn write(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        expected: &Stamp,
        write: &Write,
    ) -> Result<Outcome, StoreError> {
        let (metadata, mutex) = (self.keys.metadata(group), self.keys.mutex(group));
        let (mut keyspace, _) = self.locked();
        if !self.holds(&keyspace, &mutex, token)? {
            return Ok(Outcome::Conflict(Conflict::MutexLost));
        }
        keyspace.remove(&mutex);
        if let Some(conflict) = conflict_of(&keyspace, &metadata, expected) {
            return Ok(Outcome::Conflict(conflict));
        }
        let change = Change::of(expected, write);
        if let Some(fields) = keyspace.hash_mut(&metadata) {
            apply(fields, &change);
        }
        if keyspace.persist(&metadata) {
            meter::ttl_removed();
        }
        keyspace.remove(&self.keys.tombstone(group));
        self.append_history(&mut keyspace, group, write);
        Ok(Outcome::Applied(change.stamp))
    }

    fn make(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        tombstone: Option<&Tombstone>,
        write: &Write,
    ) -> Result<Outcome, StoreError> {
        if write.kind == WriteKind::LeaseOnly {
            return Err(lease_only_create());
        }
        let (metadata, mutex) = (self.keys.metadata(group), self.keys.mutex(group));
        let (mut keyspace, _) = self.locked();
        let holder = holder_of(&keyspace, &mutex)?;
        if holder.is_some_and(|holder| holder != token.as_str()) {
            return Ok(Outcome::Conflict(Conflict::MutexLost));
        }
        let stored = tombstone_in(&keyspace, &self.keys.tombstone(group));
        let conflict = match keyspace.content(&metadata) {
            Some(Content::Hash(_)) => Some(Conflict::Exists),
            Some(_) => Some(Conflict::WrongType),
            None if identity(stored.as_ref()) != identity(tombstone) => Some(Conflict::TombstoneMoved),
            None => None,
        };
        if let Some(conflict) = conflict {
            keyspace.remove(&mutex);
            return Ok(Outcome::Conflict(conflict));
        }
        let change = Change::of(&before_creation(tombstone), write);
        let mut fields = RawFields::new();
        apply(&mut fields, &change);
        keyspace.set(&metadata, Content::Hash(fields));
        keyspace.remove(&self.keys.tombstone(group));
        self.take(&mut keyspace, &mutex, token);
        self.append_history(&mut keyspace, group, write);
        Ok(Outcome::Applied(change.stamp))
    }

    fn unmake(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        expected: Option<&Stamp>,
        tombstone: Option<&Tombstone>,
    ) -> Result<Outcome, StoreError> {
        let (metadata, mutex) = (self.keys.metadata(group), self.keys.mutex(group));
        let (mut keyspace, _) = self.locked();
        if !self.holds(&keyspace, &mutex, token)? {
            return Ok(Outcome::Conflict(Conflict::MutexLost));
        }
        keyspace.remove(&mutex);
        if let Some(conflict) = expected.and_then(|expected| conflict_of(&keyspace, &metadata, expected)) {
            return Ok(Outcome::Conflict(conflict));
        }
        keyspace.remove(&metadata);
        keyspace.remove(&self.keys.history(group));
        keyspace.remove(&self.keys.tombstone(group));
        if let Some(tombstone) = tombstone {
            let fields = tombstone_fields(tombstone);
            let fields =
                fields.into_iter().map(|(name, text)| (name.to_owned(), text.into_bytes())).collect();
            let key = self.keys.tombstone(group);
            keyspace.set(&key, Content::Hash(fields));
            keyspace.expire_in(&key, i64::try_from(Tombstone::TTL_MS).unwrap_or(i64::MAX));
        }
        Ok(Outcome::Applied(Stamp::default()))
    }

    fn take(&self, keyspace: &mut Keyspace, mutex: &str, token: &MutexToken) {
        keyspace.set(mutex, Content::Text(token.as_str().as_bytes().to_vec()));
        keyspace.expire_in(mutex, self.mutex_ttl_ms);
    }

    /// Another's mutex ends no later than one that was taken now would, as the scripts have it.
    fn shorten(&self, keyspace: &mut Keyspace, mutex: &str) {
        if keyspace.ttl_ms(mutex).is_none_or(|left| left > self.mutex_ttl_ms) {
            keyspace.expire_in(mutex, self.mutex_ttl_ms);
        }
    }

    fn append_history(&self, keyspace: &mut Keyspace, group: &GroupKey, write: &Write) {
        let Some(entry) = &write.history else { return };
        if !keyspace.append(&self.keys.history(group), entry, HISTORY_ENTRIES) {
            meter::history_failed();
        }
    }

    fn state(&self, keyspace: &Keyspace, group: &GroupKey, now: Timestamp) -> Found {
        let metadata = self.keys.metadata(group);
        match keyspace.content(&metadata) {
            None => Found::Missing { now, tombstone: tombstone_in(keyspace, &self.keys.tombstone(group)) },
            Some(Content::Hash(fields)) => {
                Found::Record { now, fields: fields.clone(), has_ttl: keyspace.ttl_ms(&metadata).is_some() }
            }
            Some(other) => Found::WrongType { now, found: other.kind().to_owned() },
        }
    }

    fn try_enter(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        takeover: Option<&MutexToken>,
        known: Option<&Stamp>,
    ) -> Result<Entered, StoreError> {
        let mutex = self.keys.mutex(group);
        let (mut keyspace, now) = self.locked();
        let mine = |holder: &str| {
            holder == token.as_str() || takeover.is_some_and(|takeover| holder == takeover.as_str())
        };
        if let Some(holder) = holder_of(&keyspace, &mutex)?.filter(|holder| !mine(holder)) {
            self.shorten(&mut keyspace, &mutex);
            return Ok(Entered::Busy { holder });
        }
        self.take(&mut keyspace, &mutex, token);
        Ok(match self.state(&keyspace, group, now) {
            Found::Record { now, fields, has_ttl }
                if known.is_some_and(|known| has_stamp(&fields, known)) =>
            {
                Entered::Unchanged { now, has_ttl }
            }
            Found::Record { now, fields, has_ttl } => Entered::Loaded { now, fields, has_ttl },
            Found::Missing { now, tombstone } => Entered::Missing { now, tombstone },
            Found::WrongType { now, found } => Entered::WrongType { now, found },
        })
    }

    fn with_index<T>(&self, work: impl FnOnce(&mut BTreeSet<String>) -> T) -> Result<T, StoreError> {
        let key = self.keys.groups();
        let (mut keyspace, _) = self.locked();
        match keyspace.set_mut(&key) {
            Some(index) => Ok(work(index)),
            None => Err(StoreError::Refused(format!("WRONGTYPE the index holds another type (key {key})"))),
        }
    }

    /// Whether `token` holds the mutex.
    fn holds(&self, keyspace: &Keyspace, mutex: &str, token: &MutexToken) -> Result<bool, StoreError> {
        Ok(holder_of(keyspace, mutex)?.as_deref() == Some(token.as_str()))
    }

    fn release_mutex(&self, mutex: &str, token: &MutexToken) -> Result<(), StoreError> {
        let (mut keyspace, _) = self.locked();
        if self.holds(&keyspace, mutex, token)? {
            keyspace.remove(mutex);
        }
        Ok(())
    }

    fn renew_mutex(&self, mutex: &str, token: &MutexToken) -> Result<bool, StoreError> {
        let (mut keyspace, _) = self.locked();
        let held = self.holds(&keyspace, mutex, token)?;
        if held {
            keyspace.expire_in(mutex, self.mutex_ttl_ms);
        }
        Ok(held)
    }
}

/// The token in a mutex key. A key of another type is refused by name, as on Redis.
fn holder_of(keyspace: &Keyspace, mutex: &str) -> Result<Option<String>, StoreError> {
    match keyspace.content(mutex) {
        None => Ok(None),
        Some(Content::Text(token)) => Ok(Some(String::from_utf8_lossy(token).into_owned())),
        Some(other) => {
            Err(StoreError::Refused(format!("key {mutex} holds a {}, not a mutex: remove it", other.kind())))
        }
    }
}

fn tombstone_in(keyspace: &Keyspace, key: &str) -> Option<Tombstone> {
    match keyspace.content(key) {
        Some(Content::Hash(fields)) => tombstone_of(fields),
        _ => None,
    }
}

/// What tells one tombstone from another.
fn identity(tombstone: Option<&Tombstone>) -> Option<Vec<String>> {
    let fields = tombstone.map(tombstone_fields)?;
    Some(fields.into_iter().take(TOMBSTONE_IDENTITY).map(|(_, text)| text).collect())
}

fn has_stamp(fields: &RawFields, stamp: &Stamp) -> bool {
    let is = |name: &str, absent: &str, text: &str| {
        fields.get(name).map_or(absent.as_bytes(), Vec::as_slice) == text.as_bytes()
    };
    is(REVISION, "", &stamp.revision.to_string())
        && is(LIVE_REVISION, "0", &stamp.live_revision.to_string())
        && is(WRITE_ID, "", &stamp.write_id)
}

fn conflict_of(keyspace: &Keyspace, metadata: &str, expected: &Stamp) -> Option<Conflict> {
    match keyspace.content(metadata) {
        None => Some(Conflict::Missing),
        Some(Content::Hash(fields)) if has_stamp(fields, expected) => None,
        Some(Content::Hash(_)) => Some(Conflict::Moved),
        Some(_) => Some(Conflict::WrongType),
    }
}

fn apply(fields: &mut RawFields, change: &Change<'_>) {
    for (name, text) in &change.set {
        fields.insert(name.clone().into_owned(), text.as_bytes().to_vec());
    }
    for name in &change.remove {
        fields.remove(name);
    }
}

#[async_trait]
impl GroupStore for MemoryStore {
    async fn enter(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        takeover: Option<&MutexToken>,
        known: Option<&Stamp>,
    ) -> Result<Entered, StoreError> {
        let result = self.try_enter(group, token, takeover, known);
        meter::entered(&result);
        result
    }

    async fn commit(&self, group: &GroupKey, token: &MutexToken, expected: &Stamp, write: &Write) -> Outcome {
        let outcome = self.write(group, token, expected, write).unwrap_or_else(Outcome::NotApplied);
        meter::wrote(Operation::of(&write.kind), &outcome);
        outcome
    }

    async fn release(&self, group: &GroupKey, token: &MutexToken) -> Result<(), StoreError> {
        self.release_mutex(&self.keys.mutex(group), token)
    }

    async fn renew(&self, group: &GroupKey, token: &MutexToken) -> Result<bool, StoreError> {
        self.renew_mutex(&self.keys.mutex(group), token)
    }

    async fn create(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        tombstone: Option<&Tombstone>,
        write: &Write,
    ) -> Outcome {
        let outcome = self.make(group, token, tombstone, write).unwrap_or_else(Outcome::NotApplied);
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
        let outcome = self.unmake(group, token, expected, tombstone).unwrap_or_else(Outcome::NotApplied);
        meter::wrote(Operation::Delete, &outcome);
        outcome
    }

    async fn read(&self, group: &GroupKey) -> Result<Found, StoreError> {
        let (keyspace, now) = self.locked();
        Ok(self.state(&keyspace, group, now))
    }

    async fn index(&self) -> Result<Vec<String>, StoreError> {
        self.with_index(|index| index.iter().cloned().collect())
    }

    async fn index_contains(&self, group: &GroupKey) -> Result<bool, StoreError> {
        self.with_index(|index| index.contains(&self.keys.metadata(group)))
    }

    async fn index_add(&self, group: &GroupKey) -> Result<(), StoreError> {
        self.with_index(|index| index.insert(self.keys.metadata(group))).map(|_| ())
    }

    async fn index_remove(&self, group: &GroupKey) -> Result<(), StoreError> {
        self.with_index(|index| index.remove(&self.keys.metadata(group))).map(|_| ())
    }

    async fn lock_stream(
        &self,
        stream_prefix: &str,
        token: &MutexToken,
    ) -> Result<Option<String>, StoreError> {
        let mutex = self.keys.stream_mutex(stream_prefix);
        let (mut keyspace, _) = self.locked();
        let other = holder_of(&keyspace, &mutex)?.filter(|holder| holder != token.as_str());
        match other {
            None => self.take(&mut keyspace, &mutex, token),
            Some(_) => self.shorten(&mut keyspace, &mutex),
        }
        Ok(other)
    }

    async fn renew_stream(&self, stream_prefix: &str, token: &MutexToken) -> Result<bool, StoreError> {
        self.renew_mutex(&self.keys.stream_mutex(stream_prefix), token)
    }

    async fn unlock_stream(&self, stream_prefix: &str, token: &MutexToken) -> Result<(), StoreError> {
        self.release_mutex(&self.keys.stream_mutex(stream_prefix), token)
    }

    async fn provision(&self, _: &str, _: &str, _: &ShardSet) -> Result<(), ProvisionError> {
        Ok(())
    }

    async fn prove_empty(
        &self,
        _: &str,
        shards: &ShardSet,
        _: &[String],
    ) -> Result<BTreeMap<u32, ShardProof>, StoreError> {
        let proof = ShardProof::Empty { key_exists: false, ghosts: 0 };
        Ok(shards.iter().map(|shard| (shard, proof.clone())).collect())
    }

    async fn shard_times(&self, _: &str, shards: &ShardSet) -> Result<BTreeMap<u32, Timestamp>, StoreError> {
        let now = self.clock.now();
        Ok(shards.iter().map(|shard| (shard, now)).collect())
    }

    async fn delete_shard(
        &self,
        _: &str,
        _: u32,
        _: &[String],
        _: Timestamp,
    ) -> Result<ShardDeletion, StoreError> {
        Ok(ShardDeletion::Absent)
    }

    async fn ping(&self) -> Result<Timestamp, StoreError> {
        Ok(self.clock.now())
    }

    fn kind(&self) -> &'static str {
        "memory"
    }
}
