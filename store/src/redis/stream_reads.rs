//! What people are shown of streams, over a connection of its own (protocol 8).

use std::collections::BTreeMap;
use std::ops::Range;

use ::redis::{Cmd, Value};
use async_trait::async_trait;
use futures_util::{StreamExt, TryStreamExt, stream};
use rsc_core::ShardSet;
use rsc_protocol::GroupKey;
use rsc_protocol::keys::shard_key;
use rsc_protocol::monitoring::RecordId;
use tokio::time::Instant;

use super::RedisStore;
use super::drain::{bytes, list, number, row};
use super::link::{Answer, Failure};
use super::reply::{text, unexpected};
use super::scripts::SCRIPTS;
use super::servers::Lane;
use crate::stream_reads::{
    GroupView, HistoryPage, Record, RecordPage, RecordRange, ShardView, StreamReads, StreamView, Undelivered,
};
use crate::types::StoreError;

/// How many shards are looked into at the same time; each is a key of its own, perhaps on another node.
const IN_FLIGHT: usize = 16;
/// How many short commands go into one round trip, which has the command timeout for itself.
const BATCH: usize = 250;
/// Records asked for first. Nobody knows how large they are.
const FIRST_RECORDS: usize = 10;
/// Bytes after which a page of records ends.
const PAGE_BYTES: usize = 4 << 20;

#[async_trait]
impl StreamReads for RedisStore {
    async fn shard_views(
        &self,
        stream_prefix: &str,
        consumer_group: &str,
        shards: &ShardSet,
        judged: &ShardSet,
    ) -> Result<BTreeMap<u32, ShardView>, StoreError> {
        stream::iter(shards.iter())
            .map(|shard| async move {
                let key = shard_key(stream_prefix, shard);
                let judge = if judged.contains(shard) { "1" } else { "0" };
                let arguments = [consumer_group, judge];
                let answer = self.run_on(Lane::Monitoring, &SCRIPTS.view, &[&key], &arguments).await;
                Ok((shard, view(answer.map_err(Failure::into_error)?)?))
            })
            .buffer_unordered(IN_FLIGHT)
            .try_collect()
            .await
    }

    async fn existing_streams(
        &self,
        stream_prefix: &str,
        shards: Range<u32>,
    ) -> Result<ShardSet, StoreError> {
        let shards: Vec<u32> = shards.collect();
        let mut found = ShardSet::new();
        for batch in shards.chunks(BATCH) {
            let commands: Vec<_> = batch
                .iter()
                .map(|shard| {
                    let key = shard_key(stream_prefix, *shard);
                    let command = ::redis::cmd("TYPE").arg(&key).to_owned();
                    (key, command)
                })
                .collect();
            for (shard, answer) in batch.iter().zip(self.shown("types", &commands).await?) {
                let kind = answer
                    .map_err(|refusal| refusal.about(&shard_key(stream_prefix, *shard)).into_error())?;
                if text(kind)? == "stream" {
                    found.insert(*shard);
                }
            }
        }
        Ok(found)
    }

    async fn pending_by_consumer(
        &self,
        stream_prefix: &str,
        consumer_group: &str,
        shards: &ShardSet,
    ) -> Result<BTreeMap<u32, Option<Vec<(String, u64)>>>, StoreError> {
        let shards: Vec<u32> = shards.iter().collect();
        let mut pending = BTreeMap::new();
        for batch in shards.chunks(BATCH) {
            let commands: Vec<_> = batch
                .iter()
                .map(|shard| {
                    let key = shard_key(stream_prefix, *shard);
                    let command = ::redis::cmd("XPENDING").arg(&key).arg(consumer_group).to_owned();
                    (key, command)
                })
                .collect();
            for (shard, answer) in batch.iter().zip(self.shown("pending", &commands).await?) {
                let by_consumer = match answer {
                    Ok(answer) => Some(consumers(answer)?),
                    Err(refusal) if matches!(refusal.code.as_str(), "NOGROUP" | "WRONGTYPE") => None,
                    Err(refusal) => {
                        return Err(refusal.about(&shard_key(stream_prefix, *shard)).into_error());
                    }
                };
                pending.insert(*shard, by_consumer);
            }
        }
        Ok(pending)
    }

    async fn records(
        &self,
        stream_prefix: &str,
        shard: u32,
        range: &RecordRange,
    ) -> Result<RecordPage, StoreError> {
        self.page(&shard_key(stream_prefix, shard), range).await
    }

    async fn history(
        &self,
        group: &GroupKey,
        before: Option<RecordId>,
        limit: usize,
    ) -> Result<HistoryPage, StoreError> {
        let Some(highest) = before.map_or(Some(RecordId::MAX), RecordId::previous) else {
            return Ok(HistoryPage::default());
        };
        let range = RecordRange { lowest: RecordId::MIN, highest, newest_first: true, limit };
        let page = self.page(&self.keys.history(group), &range).await?;
        let entries = page.records.into_iter().map(|record| {
            let entry = record.fields.into_iter().find(|(name, _)| name == b"entry");
            let text = entry.map(|(_, text)| String::from_utf8_lossy(&text).into_owned());
            (record.id, text.unwrap_or_default())
        });
        Ok(HistoryPage { entries: entries.collect(), more: page.more })
    }
}

impl RedisStore {
    /// Sends several commands at once, each about its own key.
    async fn shown(&self, name: &'static str, commands: &[(String, Cmd)]) -> Result<Vec<Answer>, StoreError> {
        let started = Instant::now();
        let deadline = started + self.command_timeout;
        let answers = self.servers.commands(Lane::Monitoring, commands, deadline).await;
        metrics::histogram!("rsc_store_command_seconds", "command" => name)
            .record(started.elapsed().as_secs_f64());
        answers.map_err(Failure::into_error)
    }

    /// Reads in steps that grow as long as the records turn out to be small: one question for a thousand of them
    /// could be one for a gigabyte.
    async fn page(&self, key: &str, range: &RecordRange) -> Result<RecordPage, StoreError> {
        let mut page = RecordPage::default();
        let (mut bytes, mut ask) = (0, FIRST_RECORDS);
        let mut rest = Some(*range);
        while let Some(range) = rest {
            // One more than wanted tells whether there are more.
            let missing = (range.limit + 1).saturating_sub(page.records.len());
            let asked = ask.min(missing);
            let type_of = ::redis::cmd("TYPE").arg(key).to_owned();
            let commands = [(key.to_owned(), type_of), (key.to_owned(), range_command(key, &range, asked))];
            let mut answers = self.shown("records", &commands).await?.into_iter();
            let mut next = || answers.next().ok_or_else(|| unexpected("fewer answers than commands"));
            let kind = text(next()?.map_err(|refusal| refusal.about(key).into_error())?)?;
            if kind != "stream" {
                page.key_type = (kind != "none").then_some(kind);
                return Ok(page);
            }
            page.key_type = Some(kind);
            let records = list(next()?.map_err(|refusal| refusal.about(key).into_error())?)?;
            let is_last = records.len() < asked;
            for value in records {
                let record = record(value)?;
                bytes += record.fields.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
                page.records.push(record);
            }
            if page.records.len() > range.limit {
                page.records.truncate(range.limit);
                page.more = true;
                return Ok(page);
            }
            if is_last {
                return Ok(page);
            }
            rest = behind(&range, page.records.last());
            if bytes >= PAGE_BYTES {
                page.more = rest.is_some();
                return Ok(page);
            }
            ask = if bytes < PAGE_BYTES / 8 { ask * 4 } else { FIRST_RECORDS };
        }
        Ok(page)
    }
}

fn range_command(key: &str, range: &RecordRange, count: usize) -> Cmd {
    let (lowest, highest) = (range.lowest.to_string(), range.highest.to_string());
    let mut command = if range.newest_first {
        let mut command = ::redis::cmd("XREVRANGE");
        command.arg(key).arg(highest).arg(lowest);
        command
    } else {
        let mut command = ::redis::cmd("XRANGE");
        command.arg(key).arg(lowest).arg(highest);
        command
    };
    command.arg("COUNT").arg(count);
    command
}

/// What is left of a range behind its last record so far; `None` where nothing can be.
fn behind(range: &RecordRange, last: Option<&Record>) -> Option<RecordRange> {
    let last = last?.id;
    let rest = if range.newest_first {
        RecordRange { highest: last.previous()?, ..*range }
    } else {
        RecordRange { lowest: last.next()?, ..*range }
    };
    (rest.lowest <= rest.highest).then_some(rest)
}

fn view(value: Value) -> Result<ShardView, StoreError> {
    let mut items = list(value)?.into_iter();
    let mut next = || items.next().ok_or_else(|| unexpected("the view of a shard is too short"));
    Ok(match text(next()?)?.as_str() {
        "absent" => ShardView::Absent,
        "wrong_type" => ShardView::OtherType { found: text(next()?)? },
        "stream" => ShardView::Stream(Box::new(StreamView {
            length: number(next()?)?,
            first_id: optional(next()?, record_id)?,
            last_id: optional(next()?, record_id)?,
            last_generated_id: record_id(next()?)?,
            memory_bytes: optional(next()?, number)?,
            groups: list(next()?)?.into_iter().map(group_view).collect::<Result<_, _>>()?,
            unread: list(next()?)?.into_iter().map(row).collect::<Result<_, _>>()?,
        })),
        other => return Err(unexpected(&format!("the view of a shard is {other:?}"))),
    })
}

fn group_view(value: Value) -> Result<GroupView, StoreError> {
    let row: [Value; 7] =
        list(value)?.try_into().map_err(|_| unexpected("the view of a group has not 7 parts"))?;
    let [name, consumers, pending, cursor, lag, undelivered, at_least] = row;
    let is_at_least = number(at_least)? != 0;
    Ok(GroupView {
        consumer_group: text(name)?,
        consumers: number(consumers)?,
        pending: number(pending)?,
        cursor: record_id(cursor)?,
        // Negative after some deletions: not known either.
        lag: optional(lag, |lag| Ok(number(lag).ok()))?.flatten(),
        undelivered: optional(undelivered, number)?.map(|count| Undelivered { count, is_at_least }),
    })
}

fn consumers(value: Value) -> Result<Vec<(String, u64)>, StoreError> {
    let [_total, _lowest, _highest, rows]: [Value; 4] =
        list(value)?.try_into().map_err(|_| unexpected("pending entries are not told in 4 parts"))?;
    let consumer = |row: Value| {
        let [name, count]: [Value; 2] =
            list(row)?.try_into().map_err(|_| unexpected("a consumer is not told in 2 parts"))?;
        let count = text(count)?.parse().map_err(|_| unexpected("a consumer's entries are no number"))?;
        Ok((text(name)?, count))
    };
    optional(rows, list)?.unwrap_or_default().into_iter().map(consumer).collect()
}

fn record(value: Value) -> Result<Record, StoreError> {
    let [id, fields]: [Value; 2] =
        list(value)?.try_into().map_err(|_| unexpected("a record has not 2 parts"))?;
    let fields: Vec<Vec<u8>> = list(fields)?.into_iter().map(bytes).collect::<Result<_, _>>()?;
    if !fields.len().is_multiple_of(2) {
        return Err(unexpected("a record has a field without a value"));
    }
    let mut fields = fields.into_iter();
    let mut pairs = Vec::with_capacity(fields.len() / 2);
    while let (Some(name), Some(value)) = (fields.next(), fields.next()) {
        pairs.push((name, value));
    }
    Ok(Record { id: record_id(id)?, fields: pairs })
}

fn record_id(value: Value) -> Result<RecordId, StoreError> {
    text(value)?.parse().map_err(|error| unexpected(&format!("{error}")))
}

fn optional<T>(
    value: Value,
    read: impl FnOnce(Value) -> Result<T, StoreError>,
) -> Result<Option<T>, StoreError> {
    if value == Value::Nil { Ok(None) } else { read(value).map(Some) }
}
