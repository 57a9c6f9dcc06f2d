//! There are no streams of shards in memory; histories are read like those in Redis.

use std::collections::BTreeMap;
use std::ops::Range;

use async_trait::async_trait;
use rsc_core::ShardSet;
use rsc_protocol::GroupKey;
use rsc_protocol::monitoring::RecordId;

use super::MemoryStore;
use super::keyspace::Content;
use crate::stream_reads::{HistoryPage, RecordPage, RecordRange, ShardView, StreamReads};
use crate::types::StoreError;

#[async_trait]
impl StreamReads for MemoryStore {
    async fn shard_views(
        &self,
        _: &str,
        _: &str,
        shards: &ShardSet,
        _: &ShardSet,
    ) -> Result<BTreeMap<u32, ShardView>, StoreError> {
        Ok(shards.iter().map(|shard| (shard, ShardView::Absent)).collect())
    }

    async fn existing_streams(&self, _: &str, _: Range<u32>) -> Result<ShardSet, StoreError> {
        Ok(ShardSet::new())
    }

    async fn pending_by_consumer(
        &self,
        _: &str,
        _: &str,
        shards: &ShardSet,
    ) -> Result<BTreeMap<u32, Option<Vec<(String, u64)>>>, StoreError> {
        Ok(shards.iter().map(|shard| (shard, None)).collect())
    }

    async fn records(&self, _: &str, _: u32, _: &RecordRange) -> Result<RecordPage, StoreError> {
        Ok(RecordPage::default())
    }

    async fn history(
        &self,
        group: &GroupKey,
        before: Option<RecordId>,
        limit: usize,
    ) -> Result<HistoryPage, StoreError> {
        let (keyspace, _) = self.locked();
        let Some(Content::Stream(entries)) = keyspace.content(&self.keys.history(group)) else {
            return Ok(HistoryPage::default());
        };
        let mut below = entries.iter().rev().filter(|(id, _)| before.is_none_or(|before| *id < before));
        let page = below.by_ref().take(limit).cloned().collect();
        Ok(HistoryPage { entries: page, more: below.next().is_some() })
    }
}
