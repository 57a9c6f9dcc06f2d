//! Records: who was told that one is written, and who has read it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use redis::aio::MultiplexedConnection;
use redis::streams::{StreamAutoClaimReply, StreamId, StreamReadReply};
use rsc_protocol::GroupKey;
use rsc_protocol::keys::shard_key;

use super::redis_server::RedisServer;
use super::wait::{DEADLINE, wait_until};

/// How many records one read takes at most.
const BATCH: usize = 500;

/// Stream key and id.
pub(crate) type Record = (String, String);

#[derive(Default)]
struct Books {
    acknowledged: BTreeSet<Record>,
    read: BTreeMap<String, BTreeSet<Record>>,
}

/// Every record that Redis acknowledged to a producer, and every one that a group has read. Clones are the same ledger.
#[derive(Clone, Default)]
pub(crate) struct Ledger(Arc<Mutex<Books>>);

impl Ledger {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.0.lock().unwrap()
    }

    /// Redis has taken this record.
    pub(crate) fn acknowledged(&self, record: Record) {
        self.books().acknowledged.insert(record);
    }

    /// How many Redis has taken.
    pub(crate) fn len(&self) -> usize {
        self.books().acknowledged.len()
    }

    fn read(&self, group: &GroupKey, record: Record) {
        self.books().read.entry(group.consumer_group().to_owned()).or_default().insert(record);
    }

    /// Whether the group has read this record.
    pub(crate) fn has_read(&self, group: &GroupKey, record: &Record) -> bool {
        self.books().read.get(group.consumer_group()).is_some_and(|read| read.contains(record))
    }

    /// What was acknowledged and not read by the group.
    pub(crate) fn unread(&self, group: &GroupKey) -> Vec<Record> {
        let books = self.books();
        let read = books.read.get(group.consumer_group());
        let is_unread = |record: &&Record| read.is_none_or(|read| !read.contains(*record));
        books.acknowledged.iter().filter(is_unread).cloned().collect()
    }

    /// Waits until each group has read every record that was acknowledged.
    pub(crate) async fn expect_all_read(&self, groups: &[GroupKey]) {
        for group in groups {
            let mut asked = 0_u32;
            wait_until("every record is read", async || {
                asked += 1;
                let unread = self.unread(group);
                // The polls come every 10 ms: say what is missing shortly before the wait is given up.
                assert!(
                    unread.is_empty() || u128::from(asked) * 20 < DEADLINE.as_millis(),
                    "{} of {} records are not read by {group}: {unread:?}",
                    unread.len(),
                    self.len()
                );
                unread.is_empty()
            })
            .await;
        }
    }
}

/// Where consumers read from, and where they note it. Clones are the same.
#[derive(Clone)]
pub(crate) struct Source {
    redis: MultiplexedConnection,
    pub(crate) ledger: Ledger,
    keeps_pending: Arc<AtomicBool>,
}

impl Source {
    /// Consumers of this Redis; what they read is noted in the ledger.
    pub(crate) async fn new(redis: &RedisServer, ledger: &Ledger) -> Self {
        Source { redis: redis.connection().await, ledger: ledger.clone(), keeps_pending: Arc::default() }
    }

    /// From now on consumers read without acknowledging, as one does who hangs in a handler; or again as usual.
    pub(crate) fn keep_pending(&self, keeps_pending: bool) {
        self.keeps_pending.store(keeps_pending, Ordering::SeqCst);
    }

    /// Whether they do so now.
    pub(crate) fn keeps_pending(&self) -> bool {
        self.keeps_pending.load(Ordering::SeqCst)
    }

    /// Reads and acknowledges once what there is; `takes_over`: first what others had read and not acknowledged. Returns
    /// whether the group exists on the shard.
    pub(crate) async fn read(&self, group: &GroupKey, shard: u32, consumer: &str, takes_over: bool) -> bool {
        let key = shard_key(group.stream_prefix(), shard);
        let mut records = Vec::new();
        if takes_over {
            match self.claim(group, &key, consumer).await {
                Some(claimed) => records.extend(claimed),
                None => return false,
            }
        }
        let mut read = redis::cmd("XREADGROUP");
        read.arg("GROUP").arg(group.consumer_group()).arg(consumer).arg("COUNT").arg(BATCH);
        read.arg("STREAMS").arg(&key).arg(">");
        match read.query_async::<Option<StreamReadReply>>(&mut self.redis.clone()).await {
            Ok(reply) => {
                records.extend(reply.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids))
            }
            Err(error) if error.code() == Some("NOGROUP") => return false,
            Err(error) => panic!("{key}: {error}"),
        }
        if records.is_empty() || self.keeps_pending() {
            return true;
        }
        let mut acknowledge = redis::cmd("XACK");
        acknowledge.arg(&key).arg(group.consumer_group());
        for record in records {
            acknowledge.arg(&record.id);
            self.ledger.read(group, (key.clone(), record.id));
        }
        let _: u64 = acknowledge.query_async(&mut self.redis.clone()).await.unwrap();
        true
    }

    async fn claim(&self, group: &GroupKey, key: &str, consumer: &str) -> Option<Vec<StreamId>> {
        let (mut from, mut records) = ("0-0".to_owned(), Vec::new());
        loop {
            let mut claim = redis::cmd("XAUTOCLAIM");
            claim
                .arg(key)
                .arg(group.consumer_group())
                .arg(consumer)
                .arg(0)
                .arg(&from)
                .arg("COUNT")
                .arg(BATCH);
            match claim.query_async::<StreamAutoClaimReply>(&mut self.redis.clone()).await {
                Ok(reply) => {
                    records.extend(reply.claimed);
                    from = reply.next_stream_id;
                }
                Err(error) if error.code() == Some("NOGROUP") => return None,
                Err(error) => panic!("{key}: {error}"),
            }
            if from == "0-0" {
                return Some(records);
            }
        }
    }
}
