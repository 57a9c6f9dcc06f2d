//! What people are shown of Redis streams (protocol 8): read without any mutex, never written.

use std::collections::BTreeMap;
use std::ops::Range;

use async_trait::async_trait;
use rsc_core::ShardSet;
use rsc_protocol::GroupKey;
use rsc_protocol::monitoring::RecordId;

use crate::drain::Waiting;
use crate::types::StoreError;

/// Reads of the streams of shards and of histories. Nothing here decides anything, takes a mutex or writes,
/// and on Redis it goes through a connection of its own, so that a large answer delays no commit.
///
/// The memory store has no streams of shards, but histories.
#[async_trait]
pub trait StreamReads: Send + Sync + 'static {
    /// What the streams of these shards hold, and how far they have been read; each shard at one instant, the
    /// shards at different ones. Every shard of `shards` is a key of the answer. Of `consumer_group`
    /// the undelivered records are counted too; for the shards that are in `judged` too, everything that is
    /// unread is listed.
    ///
    /// # Errors
    /// When the store does not answer or refuses.
    async fn shard_views(
        &self,
        stream_prefix: &str,
        consumer_group: &str,
        shards: &ShardSet,
        judged: &ShardSet,
    ) -> Result<BTreeMap<u32, ShardView>, StoreError>;

    /// Those of the shards whose keys exist and hold streams.
    ///
    /// # Errors
    /// When the store does not answer or refuses.
    async fn existing_streams(&self, stream_prefix: &str, shards: Range<u32>)
    -> Result<ShardSet, StoreError>;

    /// The pending entries of a group by Redis consumer, for each of the shards; `None` where there is no
    /// such stream or group.
    ///
    /// # Errors
    /// When the store does not answer or refuses.
    async fn pending_by_consumer(
        &self,
        stream_prefix: &str,
        consumer_group: &str,
        shards: &ShardSet,
    ) -> Result<BTreeMap<u32, Option<Vec<(String, u64)>>>, StoreError>;

    /// Records of one shard's stream. A page ends early, with `more`, once it has some 4 MiB.
    ///
    /// # Errors
    /// When the store does not answer or refuses.
    async fn records(
        &self,
        stream_prefix: &str,
        shard: u32,
        range: &RecordRange,
    ) -> Result<RecordPage, StoreError>;

    /// At most `limit` entries of a group's history below `before`, newest first, as they were written. None
    /// where there is no history, or something else under its key.
    ///
    /// # Errors
    /// When the store does not answer or refuses.
    async fn history(
        &self,
        group: &GroupKey,
        before: Option<RecordId>,
        limit: usize,
    ) -> Result<HistoryPage, StoreError>;
}

/// What the key of a shard holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShardView {
    /// There is no such key.
    Absent,
    /// Something else than a stream.
    OtherType {
        /// What `TYPE` says.
        found: String,
    },
    /// A stream.
    Stream(Box<StreamView>),
}

/// A shard's stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamView {
    /// Records in it.
    pub length: u64,
    /// The oldest record.
    pub first_id: Option<RecordId>,
    /// The newest record.
    pub last_id: Option<RecordId>,
    /// The newest record there has ever been.
    pub last_generated_id: RecordId,
    /// Bytes of memory; `None` where the user may not ask.
    pub memory_bytes: Option<u64>,
    /// Every Redis consumer group on it.
    pub groups: Vec<GroupView>,
    /// What is unread, if that was asked for this shard; the group that was asked about counts also where it
    /// does not exist.
    pub unread: Vec<Waiting>,
}

/// One Redis consumer group on a shard's stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupView {
    /// Its name; what is no UTF-8 in it is replaced.
    pub consumer_group: String,
    /// Consumers that it remembers.
    pub consumers: u64,
    /// Its pending entries, with and without a record.
    pub pending: u64,
    /// Its last delivered id.
    pub cursor: RecordId,
    /// What Redis says of its lag; `None` where it does not know.
    pub lag: Option<u64>,
    /// Records behind the cursor; only for the group that was asked about.
    pub undelivered: Option<Undelivered>,
}

/// How many records are behind a cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Undelivered {
    /// Counted up to 100, or up to 256 KiB of content.
    pub count: u64,
    /// There may be more.
    pub is_at_least: bool,
}

/// Which records are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RecordRange {
    /// The lowest id, inclusive.
    pub lowest: RecordId,
    /// The highest id, inclusive.
    pub highest: RecordId,
    /// From the highest downwards.
    pub newest_first: bool,
    /// How many at most, at least 1.
    pub limit: usize,
}

/// One page of records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordPage {
    /// What `TYPE` says of the key; `None`: there is no such key.
    pub key_type: Option<String>,
    /// The records, in the order that was asked for.
    pub records: Vec<Record>,
    /// There may be more behind the last one.
    pub more: bool,
}

/// One record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its id.
    pub id: RecordId,
    /// Names and values, in the record's order.
    pub fields: Vec<(Vec<u8>, Vec<u8>)>,
}

/// One page of a history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HistoryPage {
    /// Ids and texts, newest first.
    pub entries: Vec<(RecordId, String)>,
    /// There are more below the last one.
    pub more: bool,
}
