//! Requests and answers about changing a stream's shard count (protocol 6, 8).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::heartbeat::ShardRef;
use crate::time::Timestamp;

/// The id of a change that changes nothing: the count asked for is the present one.
pub const NOOP: &str = "noop";

/// Where a migration is (protocol 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum MigrationState {
    /// Recorded; the new shards' streams and groups are being created. Nobody has been told of the new count.
    Preparing,
    /// Producers are told the new count; consumers read the old shards and the new ones.
    Active,
    /// The removed shards are read until they are proven empty.
    Draining,
    /// Finished. Its name is the field's: the old count is deprecated.
    Deprecated,
    /// On the way back: first consumers, then producers, then the added shards are drained.
    RollingBack,
    /// Fully back.
    RolledBack,
}

impl MigrationState {
    /// The state as it stands on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            MigrationState::Preparing => "PREPARING",
            MigrationState::Active => "ACTIVE",
            MigrationState::Draining => "DRAINING",
            MigrationState::Deprecated => "DEPRECATED",
            MigrationState::RollingBack => "ROLLING_BACK",
            MigrationState::RolledBack => "ROLLED_BACK",
        }
    }

    /// Whether nothing more happens in this state.
    #[must_use]
    pub fn is_over(self) -> bool {
        matches!(self, MigrationState::Deprecated | MigrationState::RolledBack)
    }

    /// Whether the way is back.
    #[must_use]
    pub fn is_back(self) -> bool {
        matches!(self, MigrationState::RollingBack | MigrationState::RolledBack)
    }
}

/// What becomes of a removed shard's key once it is proven empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Retire {
    /// It stays. A producer that was forgotten can still write into it, and nobody reads that.
    #[default]
    Keep,
    /// It is deleted by a script that proves it empty in the same breath, so that a late record is either seen or
    /// refused by `NOMKSTREAM`.
    Delete,
}

/// Body of `POST /streams/{p}/scale`. A field that is not known is refused: a misspelt `dryRun` must
/// not change anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ScaleRequest {
    /// The count to change to; 0 is one.
    pub target_shard_count: i64,
    /// Who asks, for the record. Not blank.
    pub requested_by: String,
    /// Why, for the record. Not blank.
    pub reason: String,
    /// The migration finishes at this instant at the earliest, and can be rolled back until then.
    #[serde(default)]
    pub deprecated_after: Option<Timestamp>,
    /// What becomes of removed shards; `KEEP` when absent.
    #[serde(default)]
    pub retire: Option<Retire>,
    /// Answer what would happen, and change nothing.
    #[serde(default)]
    pub dry_run: bool,
}

/// Body of `POST /streams/{p}/groups/{g}/migrations/{id}/rollback`. A field that is not known is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RollbackRequest {
    /// Who asks, for the record. Not blank.
    pub requested_by: String,
    /// Why, for the record. Not blank.
    pub reason: String,
}

/// One migration of one group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigrationResponse {
    /// The id, the same in every group of the stream.
    pub resharding_id: String,
    /// The stream prefix.
    pub stream_prefix: String,
    /// The group whose record says this.
    pub consumer_group: String,
    /// The count before.
    pub from_shard_count: u32,
    /// The count after.
    pub to_shard_count: u32,
    /// Where it is.
    pub state: MigrationState,
    /// When it was asked for.
    pub created_at: Timestamp,
    /// When this record of it was last changed.
    pub updated_at: Timestamp,
    /// Who asked.
    pub requested_by: String,
    /// Why.
    pub reason: String,
    /// Its earliest end, if one was asked for.
    pub deprecated_after: Option<Timestamp>,
    /// What becomes of the removed shards.
    pub retire: Retire,
    /// When this group's producers were last told another count by it.
    pub activated_at: Option<Timestamp>,
    /// Removed shards that are still assigned, because they are not proven empty.
    pub draining_shards: Vec<ShardRef>,
    /// Removed shards that were proven empty and are assigned no more.
    pub retired_shards: Vec<ShardRef>,
    /// Who asked for the way back, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback: Option<RollbackNote>,
    /// What it waits for, a sentence for people; empty when it is over.
    #[serde(default)]
    pub waits_for: String,
    /// For each removed shard that is not proven empty: what is in the way.
    #[serde(default)]
    pub drain: Vec<DrainRow>,
}

/// Who asked for a rollback.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RollbackNote {
    /// Who.
    #[serde(default)]
    pub requested_by: String,
    /// Why.
    #[serde(default)]
    pub reason: String,
    /// When.
    pub requested_at: Timestamp,
}

/// Why one removed shard is not proven empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DrainRow {
    /// The shard.
    pub shard_index: u32,
    /// Its stream key.
    pub stream_key: String,
    /// Whether nothing is in the way.
    pub empty: bool,
    /// Whether the key exists.
    pub exists: bool,
    /// The member whose target it is.
    pub owner: Option<String>,
    /// Since when it drains.
    pub since: Option<Timestamp>,
    /// Every Redis consumer group that has something left there, coordinated or not.
    pub waits_for: Vec<DrainWait>,
}

/// What one Redis consumer group still has in a removed shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DrainWait {
    /// The Redis consumer group.
    pub consumer_group: String,
    /// Whether it is one that is coordinated.
    pub coordinated: bool,
    /// `UNDELIVERED`, `PENDING`, `GROUP_MISSING`, `WRONG_TYPE`, `PENDING_UNDECIDED`.
    pub reason: String,
    /// Records behind the group's cursor.
    pub undelivered: u64,
    /// Whether there may be more than that.
    pub undelivered_is_at_least: bool,
    /// Entries delivered and not acknowledged whose record exists.
    pub pending: u64,
    /// Not all pending entries were looked at: some of `pending` may have no record.
    pub pending_is_at_most: bool,
    /// Pending entries whose record no longer exists: reported, and not waited for.
    pub pending_without_record: u64,
}

/// Answer of `GET …/migrations`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigrationsResponse {
    /// The running one.
    pub active_resharding_id: Option<String>,
    /// All that are remembered, oldest first.
    pub migrations: Vec<MigrationResponse>,
}

/// Answer of `POST /streams/{p}/scale`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScaleResponse {
    /// The stream prefix.
    pub stream_prefix: String,
    /// The migration's id; `noop` when the count is the present one.
    pub resharding_id: String,
    /// The count asked for.
    pub target_shard_count: u32,
    /// Every group of the stream.
    pub affected_consumer_groups: Vec<String>,
    /// The migration as each group records it, groups in ascending order.
    pub migrations: Vec<MigrationResponse>,
}

/// Answer of a scale request with `dryRun`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScalePlan {
    /// Always `true`.
    pub dry_run: bool,
    /// The stream prefix.
    pub stream_prefix: String,
    /// The present count.
    pub from_shard_count: u32,
    /// The count asked for.
    pub target_shard_count: u32,
    /// Every group of the stream.
    pub affected_consumer_groups: Vec<String>,
    /// Shards that would be created.
    pub added_shards: Vec<ShardRef>,
    /// Shards that must be proven empty before they go.
    pub shards_to_drain: Vec<ShardRef>,
    /// The share of partition keys, 0 to 1, whose shard would be another: their order across the change is
    /// not kept.
    pub keys_changing_shard: f64,
    /// What would become of the removed shards.
    pub retire: Retire,
    /// Milliseconds from the activation during which producers may still use the former count.
    pub producer_cache_wait_ms: u64,
    /// What would move between members, by group.
    pub groups: Vec<GroupPlan>,
    /// Why the change would be refused now; empty when it would not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refusals: Vec<String>,
}

/// What a change of the shard count does to one group's assignment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupPlan {
    /// The group.
    pub consumer_group: String,
    /// Shards that change their owner, or get their first or last one.
    pub moves: Vec<ShardMove>,
    /// Shards each member owns in the end.
    pub shards_per_member: BTreeMap<String, usize>,
}

/// One shard's way from one owner to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShardMove {
    /// The shard.
    pub shard_index: u32,
    /// Whose it is; `null`: nobody's yet.
    pub from: Option<String>,
    /// Whose it will be; `null`: it is drained, and goes.
    pub to: Option<String>,
}
