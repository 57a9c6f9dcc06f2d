//! Monitoring reads of Redis streams (protocol 8): how far shards are read, who has what pending, the records
//! themselves, a group's history. They take no mutex, write nothing, and decide nothing.
//!
//! Who watches a screen must not keep Redis busy: answers of the store are shown again for a second, the same
//! question is asked once at a time, and a few questions at a time go to the store at all.

mod views;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use moka::future::Cache;
use rsc_core::{Group, ShardSet};
use rsc_protocol::keys::shard_key;
use rsc_protocol::monitoring::{
    ConsumptionResponse, HistoryEntry, HistoryResponse, Message, MessagesResponse, OffsetsResponse, RecordId,
    RecordOrder,
};
use rsc_protocol::{ErrorCode, GroupKey};
use rsc_store::{HistoryPage, RecordPage, RecordRange, ShardView, StoreError};
use serde_json::Value;
use tokio::sync::Semaphore;

use crate::meter;
use crate::reads::{self, Presence};
use crate::refusal::Refusal;
use crate::shared::Shared;
use crate::{Coordinator, streams};

/// Questions that are with the store at a time, per process.
const AT_A_TIME: usize = 4;
/// How long a question waits for its turn.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long an answer is shown again.
const SHOWN_FOR: Duration = Duration::from_secs(1);
/// Groups whose answers are remembered.
const GROUPS_REMEMBERED: u64 = 1_000;
/// Kibibytes of records that are remembered.
const RECORDS_REMEMBERED: u64 = 64 * 1024;
/// Above the highest shard on record, so many indexes in a row without a stream end the search for further ones.
const LOOK_BEYOND: u32 = 256;

/// A group as its record stood at one version.
type At = (GroupKey, u64);
/// Pending entries by consumer, by shard; `None` where there is no such stream or group.
type Pending = BTreeMap<u32, Option<Vec<(String, u64)>>>;

/// What was read a moment ago, and the permits for reading more.
pub(crate) struct StreamReads {
    permits: Semaphore,
    views: Cache<At, Arc<BTreeMap<u32, ShardView>>>,
    pending: Cache<At, Arc<Pending>>,
    records: Cache<(String, u32, RecordRange), Arc<RecordPage>>,
    histories: Cache<(GroupKey, Option<RecordId>, usize), Arc<HistoryPage>>,
}

impl Default for StreamReads {
    fn default() -> Self {
        fn remembered<K, V>() -> Cache<K, V>
        where
            K: std::hash::Hash + Eq + Send + Sync + 'static,
            V: Clone + Send + Sync + 'static,
        {
            Cache::builder().max_capacity(GROUPS_REMEMBERED).time_to_live(SHOWN_FOR).build()
        }
        let records = Cache::builder()
            .weigher(|_, page: &Arc<RecordPage>| kibibytes(page))
            .max_capacity(RECORDS_REMEMBERED)
            .time_to_live(SHOWN_FOR)
            .build();
        StreamReads {
            permits: Semaphore::new(AT_A_TIME),
            views: remembered(),
            pending: remembered(),
            records,
            histories: remembered(),
        }
    }
}

/// What a page weighs in the memory, a record's own weight included.
fn kibibytes(page: &RecordPage) -> u32 {
    let fields = page.records.iter().flat_map(|record| &record.fields);
    let bytes: usize = fields.map(|(name, value)| name.len() + value.len() + 64).sum();
    u32::try_from(bytes / 1024 + 1).unwrap_or(u32::MAX)
}

impl StreamReads {
    /// Asks the store once it is this question's turn.
    async fn ask<T>(
        &self,
        question: &'static str,
        group: &GroupKey,
        read: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<Arc<T>, Refusal> {
        let Ok(Ok(_permit)) = tokio::time::timeout(PATIENCE, self.permits.acquire()).await else {
            meter::stream_read(question, "overloaded");
            let message = format!(
                "{AT_A_TIME} monitoring reads of streams are under way and took too long: try again later"
            );
            return Err(Refusal::new(ErrorCode::CoordinatorOverloaded, message));
        };
        let result = read.await;
        meter::stream_read(question, if result.is_ok() { "done" } else { "failed" });
        result.map(Arc::new).map_err(|error| Refusal::store_logged(&error, question, &group.joined()))
    }
}

/// Which records of a shard are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessagesQuery {
    /// The shard.
    pub shard_index: u32,
    /// The lowest id, inclusive.
    pub lowest: RecordId,
    /// The highest id, inclusive; below `lowest`: nothing is asked for.
    pub highest: RecordId,
    /// The order.
    pub order: RecordOrder,
    /// How many records at most, at least 1.
    pub limit: usize,
}

impl Coordinator {
    /// How far each shard of a group's stream is read.
    ///
    /// # Errors
    /// As [`Coordinator::group`]; `COORDINATOR_OVERLOADED`.
    pub async fn offsets(&self, key: &GroupKey) -> Result<OffsetsResponse, Refusal> {
        let shared = self.shared();
        let group = reads::group(shared, key).await?;
        let cache = &shared.stream_reads;
        let look = cache.ask("offsets", key, look_into(shared, &group));
        let views = cache.views.try_get_with((key.clone(), group.metadata_version), look).await;
        let views = views.map_err(|refusal| (*refusal).clone())?;
        let groups = match views::anything_unread(&views) {
            // Which of them are coordinated is a remark; a broken record among them does not matter here.
            true => streams::groups(shared, key.stream_prefix()).await.unwrap_or_default(),
            false => Vec::new(),
        };
        Ok(views::offsets(&group, &groups, &views))
    }

    /// What each member of a group reads, by its own words and by Redis'.
    ///
    /// # Errors
    /// As [`Coordinator::group`]; `COORDINATOR_OVERLOADED`.
    pub async fn consumption(&self, key: &GroupKey) -> Result<ConsumptionResponse, Refusal> {
        let shared = self.shared();
        let group = reads::group(shared, key).await?;
        let cache = &shared.stream_reads;
        let shards = views::consumed(&group);
        let (prefix, name) = (key.stream_prefix(), key.consumer_group());
        let look = cache.ask("consumption", key, shared.store.pending_by_consumer(prefix, name, &shards));
        let pending = cache.pending.try_get_with((key.clone(), group.metadata_version), look).await;
        let pending = pending.map_err(|refusal| (*refusal).clone())?;
        Ok(views::consumption(&group, &pending))
    }

    /// Records of one shard.
    ///
    /// # Errors
    /// As [`Coordinator::group`]; `COORDINATOR_OVERLOADED`; `NOT_FOUND` for a shard that no record names and
    /// that has no stream.
    pub async fn messages(&self, key: &GroupKey, query: &MessagesQuery) -> Result<MessagesResponse, Refusal> {
        let shared = self.shared();
        let group = reads::group(shared, key).await?;
        let cache = &shared.stream_reads;
        let (prefix, shard) = (key.stream_prefix(), query.shard_index);
        let newest_first = query.order == RecordOrder::Desc;
        let (lowest, highest) = (query.lowest, query.highest);
        let range = RecordRange { lowest, highest, newest_first, limit: query.limit };
        let look = cache.ask("messages", key, shared.store.records(prefix, shard, &range));
        let page = cache.records.try_get_with((prefix.to_owned(), shard, range), look).await;
        let page = page.map_err(|refusal| (*refusal).clone())?;
        let is_stream = page.key_type.as_deref() == Some("stream");
        if !is_stream && !views::on_record(&group).contains(shard) {
            let message = format!(
                "stream {prefix} has no shard {shard}: it has {} shards, GET …/offsets lists them and what is left of removed ones",
                group.shard_count
            );
            return Err(Refusal::new(ErrorCode::NotFound, message));
        }
        Ok(messages(key, query, &page))
    }

    /// At most `limit` entries of a group's history, newest first, below `before`. Also of a group whose record is
    /// missing or unreadable.
    ///
    /// # Errors
    /// `GROUP_NOT_FOUND`, `REDIS_UNAVAILABLE`, `COORDINATOR_OVERLOADED`.
    pub async fn history(
        &self,
        key: &GroupKey,
        before: Option<RecordId>,
        limit: usize,
    ) -> Result<HistoryResponse, Refusal> {
        let shared = self.shared();
        if let Presence::NoGroup(_) = reads::presence(shared, key).await? {
            return Err(Refusal::not_found(key));
        }
        let cache = &shared.stream_reads;
        let look = cache.ask("history", key, shared.store.history(key, before, limit));
        let page = cache.histories.try_get_with((key.clone(), before, limit), look).await;
        let page = page.map_err(|refusal| (*refusal).clone())?;
        let entry = |(id, text): &(RecordId, String)| {
            let entry = serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.clone()));
            HistoryEntry { id: *id, entry }
        };
        Ok(HistoryResponse {
            stream_prefix: key.stream_prefix().to_owned(),
            consumer_group: key.consumer_group().to_owned(),
            entries: page.entries.iter().map(entry).collect(),
            next: page.entries.last().filter(|_| page.more).map(|(id, _)| *id),
        })
    }
}

/// Looks into every shard that the record names, and searches for streams beyond them: a record may have lost an
/// activation (protocol 5, *What remains*), or forgotten an old migration.
async fn look_into(shared: &Shared, group: &Group) -> Result<BTreeMap<u32, ShardView>, StoreError> {
    let key = &group.key;
    let mut shards = views::on_record(group);
    let highest = shards.last();
    let mut from = group.shard_count;
    loop {
        let to = from.saturating_add(LOOK_BEYOND);
        let found = shared.store.existing_streams(key.stream_prefix(), from..to).await?;
        shards.extend(found.iter());
        let is_beyond = highest.is_none_or(|highest| from > highest);
        if (is_beyond && found.is_empty()) || to > shared.settings.max_shard_count.max(highest.unwrap_or(0)) {
            break;
        }
        from = to;
    }
    let unrouted: ShardSet = shards.iter().filter(|shard| *shard >= group.shard_count).collect();
    shared.store.shard_views(key.stream_prefix(), key.consumer_group(), &shards, &unrouted).await
}

fn messages(key: &GroupKey, query: &MessagesQuery, page: &RecordPage) -> MessagesResponse {
    let last = page.records.last().filter(|_| page.more);
    MessagesResponse {
        stream_prefix: key.stream_prefix().to_owned(),
        consumer_group: key.consumer_group().to_owned(),
        shard_index: query.shard_index,
        stream_key: shard_key(key.stream_prefix(), query.shard_index),
        exists: page.key_type.is_some(),
        key_type: page.key_type.clone(),
        order: query.order,
        messages: page.records.iter().map(message).collect(),
        next: last.map(|record| format!("({}", record.id)),
    }
}

fn message(record: &rsc_store::Record) -> Message {
    let text = rsc_protocol::monitoring::FieldText;
    let pair = |(name, value): &(Vec<u8>, Vec<u8>)| (text(name.clone()), text(value.clone()));
    Message { id: record.id, fields: record.fields.iter().map(pair).collect() }
}
