//! Changing the shard count without losing a record (protocol 6).
//!
//! What one group records of it, and the steps that change that ([`MigrationStep`]), are here; which step comes
//! next for which group of a stream is decided in [`stream`], from all of their records.

mod apply;
mod drain;
mod leader;
pub mod plan;
pub(crate) mod records;
pub mod stream;

use rsc_protocol::resharding::{MigrationResponse, MigrationState, Retire, RollbackNote};
use rsc_protocol::{GroupKey, ShardRef, Timestamp};
use serde::{Deserialize, Serialize};

use crate::aggregate::null_is_default;
use crate::group::Group;
use crate::shards::ShardSet;

pub(crate) use apply::apply;

/// Finished migrations that a record remembers at most.
const REMEMBERED: usize = 50;

/// One migration as one group of the stream records it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Migration {
    /// The id, the same in every group of the stream.
    #[serde(default, deserialize_with = "null_is_default")]
    pub resharding_id: String,
    /// The stream's count before. Without it or the next one nothing could be made of a record.
    pub from_shard_count: u32,
    /// The stream's count after.
    pub to_shard_count: u32,
    /// Where this group is with it.
    pub state: MigrationState,
    /// When it was asked for; the newest of a stream wins.
    #[serde(default, deserialize_with = "null_is_default")]
    pub created_at: Timestamp,
    /// When this record of it was last changed.
    #[serde(default, deserialize_with = "null_is_default")]
    pub updated_at: Timestamp,
    /// Who asked.
    #[serde(default, deserialize_with = "null_is_default")]
    pub requested_by: String,
    /// Why.
    #[serde(default, deserialize_with = "null_is_default")]
    pub reason: String,
    /// Its earliest end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deprecated_after: Option<Timestamp>,
    /// What becomes of removed shards.
    #[serde(default, deserialize_with = "null_is_default")]
    pub retire: Retire,
    /// Not asked for by anybody: it brings groups to one count whose records differ after a loss.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "std::ops::Not::not")]
    pub repairs: bool,
    /// The group exists on every shard of this migration (the barrier before *Activate*).
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "std::ops::Not::not")]
    pub provisioned: bool,
    /// When this group's count was last changed by it, forth or back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activated_at: Option<Timestamp>,
    /// The longest routing cache lease that may have been out then, in milliseconds.
    #[serde(default, deserialize_with = "null_is_default")]
    pub cache_lease_ms: u64,
    /// Shards beyond the count that consumers still read. `None` in a record of another implementation.
    #[serde(default)]
    pub draining: Option<ShardSet>,
    /// Shards beyond the count that were proven empty and given up.
    #[serde(default, skip_serializing_if = "ShardSet::is_empty")]
    pub retired: ShardSet,
    /// When draining began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draining_since: Option<Timestamp>,
    /// Keys of removed shards may be gone: there is no way back any more.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "std::ops::Not::not")]
    pub deleting: bool,
    /// Who asked for the way back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback: Option<RollbackNote>,
    /// On the way back, the count before is in force again.
    #[serde(default, deserialize_with = "null_is_default", skip_serializing_if = "std::ops::Not::not")]
    pub count_restored: bool,
    /// Fields of other implementations, kept as they are.
    #[serde(flatten)]
    pub unknown: serde_json::Map<String, serde_json::Value>,
}

/// What is asked for, or what another group of the stream already records: enough to begin a migration with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigrationSpec {
    /// The id.
    pub resharding_id: String,
    /// The stream's count before.
    pub from_shard_count: u32,
    /// The stream's count after.
    pub to_shard_count: u32,
    /// When it was asked for.
    pub created_at: Timestamp,
    /// Who asks.
    pub requested_by: String,
    /// Why.
    pub reason: String,
    /// Its earliest end.
    pub deprecated_after: Option<Timestamp>,
    /// What becomes of removed shards.
    pub retire: Retire,
    /// Nobody asks: records differ.
    pub repairs: bool,
}

/// One recorded step of a migration in one group. Every step can be repeated: where it has been done, it is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MigrationStep {
    /// Record the migration. `compare`: another group of the stream records it already, and this record is
    /// brought into line, whatever it says of earlier ones.
    Prepare {
        /// What is asked for.
        spec: Box<MigrationSpec>,
        /// See above.
        compare: bool,
    },
    /// The group exists on all shards of the migration.
    Provisioned,
    /// The count changes. New shards are assigned; removed ones stay so.
    Activate,
    /// The wait for the producers' caches is over.
    BeginDrain,
    /// These shards are proven empty: they are assigned no more.
    Retire(ShardSet),
    /// A record slipped into these: they are assigned again.
    Reopen(ShardSet),
    /// Keys are going to be deleted: no way back from here.
    BeginDelete,
    /// Nothing is left to do.
    Finish,
    /// The way back. `whole`: some group of the stream may have told its producers the new count.
    Rollback {
        /// Who asks.
        note: Box<RollbackNote>,
        /// See above.
        whole: bool,
        /// Another group of the stream records the way back already: this one follows, however far it had come.
        compare: bool,
    },
    /// On the way back, producers are told the count before.
    RestoreCount,
}

impl MigrationStep {
    /// The step's name in logs, histories and `docs/architecture.md`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            MigrationStep::Prepare { .. } => "prepare",
            MigrationStep::Provisioned => "provisioned",
            MigrationStep::Activate => "activate",
            MigrationStep::BeginDrain => "begin-drain",
            MigrationStep::Retire(_) => "retire",
            MigrationStep::Reopen(_) => "reopen",
            MigrationStep::BeginDelete => "begin-delete",
            MigrationStep::Finish => "finish",
            MigrationStep::Rollback { .. } => "rollback",
            MigrationStep::RestoreCount => "restore-count",
        }
    }
}

impl Migration {
    /// A migration that nobody has been told of.
    pub(crate) fn new(spec: &MigrationSpec, now: Timestamp) -> Self {
        Migration {
            resharding_id: spec.resharding_id.clone(),
            from_shard_count: spec.from_shard_count,
            to_shard_count: spec.to_shard_count,
            state: MigrationState::Preparing,
            created_at: spec.created_at,
            updated_at: now,
            requested_by: spec.requested_by.clone(),
            reason: spec.reason.clone(),
            deprecated_after: spec.deprecated_after,
            retire: spec.retire,
            repairs: spec.repairs,
            provisioned: false,
            activated_at: None,
            cache_lease_ms: 0,
            draining: Some(ShardSet::new()),
            retired: ShardSet::new(),
            draining_since: None,
            deleting: false,
            rollback: None,
            count_restored: false,
            unknown: serde_json::Map::new(),
        }
    }

    /// What another group of the stream needs to begin the same migration.
    #[must_use]
    pub fn spec(&self) -> MigrationSpec {
        MigrationSpec {
            resharding_id: self.resharding_id.clone(),
            from_shard_count: self.from_shard_count,
            to_shard_count: self.to_shard_count,
            created_at: self.created_at,
            requested_by: self.requested_by.clone(),
            reason: self.reason.clone(),
            deprecated_after: self.deprecated_after,
            retire: self.retire,
            repairs: self.repairs,
        }
    }

    /// Whether it was taken back before any group could have told its producers of it: as if it had never been.
    #[must_use]
    pub(crate) fn never_began(&self) -> bool {
        self.state == MigrationState::RolledBack
            && !self.count_restored
            && !self.provisioned
            && self.activated_at.is_none()
    }

    /// Shards beyond the count that consumers still read.
    #[must_use]
    pub fn draining(&self) -> &ShardSet {
        const NONE: &ShardSet = &ShardSet::new();
        self.draining.as_ref().unwrap_or(NONE)
    }

    /// Every shard beyond the count that this migration is about.
    #[must_use]
    pub fn removed(&self) -> ShardSet {
        let mut removed = self.draining().clone();
        removed.extend(self.retired.iter());
        removed
    }

    /// The migration as it is shown.
    #[must_use]
    pub fn response(&self, group: &GroupKey) -> MigrationResponse {
        let refs = |shards: &ShardSet| shards.iter().map(|shard_index| ShardRef { shard_index }).collect();
        MigrationResponse {
            resharding_id: self.resharding_id.clone(),
            stream_prefix: group.stream_prefix().to_owned(),
            consumer_group: group.consumer_group().to_owned(),
            from_shard_count: self.from_shard_count,
            to_shard_count: self.to_shard_count,
            state: self.state,
            created_at: self.created_at,
            updated_at: self.updated_at,
            requested_by: self.requested_by.clone(),
            reason: self.reason.clone(),
            deprecated_after: self.deprecated_after,
            retire: self.retire,
            activated_at: self.activated_at,
            draining_shards: refs(self.draining()),
            retired_shards: refs(&self.retired),
            rollback: self.rollback.clone(),
            waits_for: String::new(),
            drain: Vec::new(),
        }
    }
}

/// Every shard that consumers read: those that producers route to, and those beyond that are not proven empty
/// (protocol 6).
#[derive(Clone, Copy, Debug)]
pub struct ReadSet<'g> {
    count: u32,
    beyond: Option<&'g ShardSet>,
}

impl ReadSet<'_> {
    /// Whether consumers read `shard`.
    #[must_use]
    pub fn contains(&self, shard: u32) -> bool {
        shard < self.count || self.beyond.is_some_and(|beyond| beyond.contains(shard))
    }

    /// How many shards consumers read.
    #[must_use]
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    /// One above the highest shard that consumers read; 0 when there is none.
    #[must_use]
    pub fn end(&self) -> usize {
        let beyond = self.beyond.and_then(ShardSet::last).map_or(0, |last| last.saturating_add(1));
        usize::try_from(self.count.max(beyond)).unwrap_or(usize::MAX)
    }

    /// Whether there is nothing to read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// The shards in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let beyond = self.beyond.into_iter().flat_map(ShardSet::iter);
        (0..self.count).chain(beyond.filter(|shard| *shard >= self.count))
    }

    /// The shards as a set of their own.
    #[must_use]
    pub fn to_set(&self) -> ShardSet {
        self.iter().collect()
    }
}

impl Group {
    /// Every shard that consumers read (protocol 6).
    #[must_use]
    pub fn read_set(&self) -> ReadSet<'_> {
        let beyond = self.active_migration().and_then(|migration| migration.draining.as_ref());
        ReadSet { count: self.shard_count, beyond }
    }

    /// The running migration, if this record has one.
    #[must_use]
    pub fn active_migration(&self) -> Option<&Migration> {
        self.migration(self.active_resharding_id.as_deref()?)
    }

    /// A migration by its id.
    #[must_use]
    pub fn migration(&self, resharding_id: &str) -> Option<&Migration> {
        self.migrations.get(resharding_id)
    }

    /// Every migration on record, oldest first.
    #[must_use]
    pub fn migrations_by_age(&self) -> Vec<&Migration> {
        let mut all: Vec<&Migration> = self.migrations.values().collect();
        all.sort_by_key(|migration| (migration.created_at, migration.resharding_id.as_str()));
        all
    }

    /// Removed shards of its last migration that somebody may still be touching: held by a live member, or on hold.
    #[must_use]
    pub fn still_touched(&self, removed: &ShardSet) -> ShardSet {
        let held = self.live_members().flat_map(|(_, member)| member.holding().iter().collect::<Vec<_>>());
        let on_hold = self.holds.iter().map(|hold| hold.shard_index);
        held.chain(on_hold).filter(|shard| removed.contains(*shard)).collect()
    }
}
