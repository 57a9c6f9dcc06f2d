//! Looks at a group's record and history in Redis again and again while others work on it, and checks what must hold of
//! every state and between any two.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use rsc_protocol::GroupKey;
use rsc_protocol::keys::Keys;
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::redis_server::RedisServer;
use super::replay::{Entries, Holder, Replay, Versions, entry};

/// What a client can observe of a record (protocol 1: each change of it moves `metadataVersion`).
#[derive(Clone, Debug, PartialEq)]
struct Observable {
    assignment_epoch: u64,
    shard_count: u64,
    target: Value,
    group_epoch: u64,
    live: BTreeMap<String, Holder>,
}

/// One look, all of it at the same instant.
struct Look {
    aggregate: Value,
    /// `revision`, `liveRevision`, `writeId`.
    stamp: (u64, u64, String),
    /// What has been appended to the history since the look before.
    entries: Entries,
}

impl Look {
    fn version(&self) -> u64 {
        self.aggregate["metadataVersion"].as_u64().unwrap()
    }

    fn observable(&self) -> Observable {
        let number = |field: &str| self.aggregate[field].as_u64().unwrap();
        let record = Replay::from_record(&self.aggregate);
        Observable {
            assignment_epoch: number("assignmentEpoch"),
            shard_count: number("shardCount"),
            target: self.aggregate["targetAssignments"].clone(),
            group_epoch: record.group_epoch,
            live: record.live,
        }
    }

    fn expect_one_holder_per_shard(&self) {
        let mut holders: BTreeMap<u64, String> = BTreeMap::new();
        for (id, holder) in self.observable().live {
            for shard in holder.shards {
                if let Some(other) = holders.insert(shard, id.clone()) {
                    panic!("shard {shard} is held by {other} and {id}: {}", self.aggregate);
                }
            }
        }
    }

    /// Each write has moved the numbers of protocol 2 by one, and none has gone back.
    fn expect_follows(&self, before: &Look) {
        let ((revision, live, id), (last_revision, last_live, last_id)) = (&self.stamp, &before.stamp);
        assert_eq!(self.aggregate["storeRevision"].as_u64(), Some(*revision));
        assert!(
            revision >= last_revision && live >= last_live,
            "{:?} came after {:?}",
            self.stamp,
            before.stamp
        );
        assert_eq!(live == last_live, id == last_id, "{:?} came after {:?}", self.stamp, before.stamp);
        let (writes, structural) = (live - last_live, revision - last_revision);
        assert!(structural <= writes, "{:?} came after {:?}", self.stamp, before.stamp);
        let versions = self.version().checked_sub(before.version());
        let versions = versions.unwrap_or_else(|| panic!("{} after {}", self.version(), before.version()));
        assert!(versions <= structural, "{versions} versions in {structural} structural writes");
        if versions == 0 {
            assert_eq!(self.observable(), before.observable(), "at version {}", self.version());
        }
    }
}

/// What an observer has seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct Observed {
    /// Records read.
    pub(crate) reads: usize,
    /// Versions that came up meanwhile.
    pub(crate) changes: usize,
    /// What the history said meanwhile.
    pub(crate) replay: Replay,
}

/// Watches one group until it is stopped.
pub(crate) struct Observer {
    stop: watch::Sender<bool>,
    versions: Versions,
    task: JoinHandle<Observed>,
}

impl Observer {
    /// Begins to watch.
    pub(crate) async fn start(redis: &RedisServer, group: &GroupKey) -> Self {
        let (stop, stopped) = watch::channel(false);
        let versions = Versions::default();
        let connection = redis.connection().await;
        let task = tokio::spawn(observe(connection, group.clone(), versions.clone(), stopped));
        Observer { stop, versions, task }
    }

    /// The versions it has seen, to be compared with those that members are told.
    pub(crate) fn versions(&self) -> Versions {
        self.versions.clone()
    }

    /// Ends; fails when something was wrong in between.
    pub(crate) async fn stop(self) -> Observed {
        // When the task has ended by itself it has failed, and says so below.
        let _ = self.stop.send(true);
        self.task.await.unwrap()
    }
}

async fn observe(
    mut redis: MultiplexedConnection,
    group: GroupKey,
    versions: Versions,
    stopped: watch::Receiver<bool>,
) -> Observed {
    let keys = Keys::default();
    let (metadata, history) = (keys.metadata(&group), keys.history(&group));
    let mut observed = Observed::default();
    let mut before: Option<Look> = None;
    let mut newest = String::new();
    let mut is_last = false;
    while !is_last {
        // What is stored when it is told to stop belongs to it.
        is_last = *stopped.borrow();
        let from = if newest.is_empty() { "-".to_owned() } else { format!("({newest}") };
        let mut asked = redis::pipe();
        asked.atomic().cmd("HMGET").arg(&metadata);
        asked.arg(&["aggregate", "revision", "liveRevision", "writeId"]);
        asked.cmd("XRANGE").arg(&history).arg(from).arg("+");
        let ((text, revision, live, id), entries): ((String, u64, Option<u64>, String), Entries) =
            asked.query_async(&mut redis).await.unwrap();
        if let Some((id, _)) = entries.last() {
            newest.clone_from(id);
        }
        let aggregate = serde_json::from_str(&text).unwrap();
        let now = Look { aggregate, stamp: (revision, live.unwrap_or(0), id), entries };
        now.expect_one_holder_per_shard();
        versions.note(now.version(), now.aggregate["metadataToken"].as_str().unwrap());
        match &before {
            None => observed.replay = Replay::from_record(&now.aggregate),
            Some(before) => {
                now.expect_follows(before);
                for (_, fields) in &now.entries {
                    observed.replay.apply(&entry(fields));
                }
                observed.replay.expect_is(&now.aggregate);
                observed.changes += now.entries.len();
            }
        }
        observed.reads += 1;
        before = Some(now);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let recorded = observed.replay.version;
    assert!(versions.highest() <= recorded, "{} was told, {recorded} is recorded", versions.highest());
    observed
}
