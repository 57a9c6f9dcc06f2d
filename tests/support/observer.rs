//! Looks at a group's record in Redis again and again while others work on it, and checks what must hold of
//! every state and between any two.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use rsc_protocol::GroupKey;
use rsc_protocol::keys::Keys;
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::redis_server::RedisServer;

/// What a client can observe of a record (protocol 1: each change of it moves `metadataVersion`).
#[derive(Clone, Debug, PartialEq)]
struct Observable {
    group_epoch: u64,
    assignment_epoch: u64,
    shard_count: u64,
    target: Value,
    /// Live members, whether they are leaving, and what they hold.
    members: BTreeMap<String, (bool, BTreeSet<u64>)>,
}

fn shards(rows: &Value) -> impl Iterator<Item = u64> {
    let index = |row: &Value| row["shardIndex"].as_u64().or_else(|| row["shard"]["shardIndex"].as_u64());
    rows.as_array().into_iter().flatten().map(move |row| index(row).unwrap())
}

impl Observable {
    fn of(aggregate: &Value) -> Self {
        let number = |field: &str| aggregate[field].as_u64().unwrap();
        let mut members = BTreeMap::new();
        for (id, member) in aggregate["members"].as_object().unwrap() {
            let state = member["state"].as_str().unwrap();
            if matches!(state, "STARTING" | "ACTIVE" | "LEAVING") {
                let rows = ["currentAssignment", "grantedAssignment", "revoking"];
                let holding = rows.into_iter().flat_map(|field| shards(&member[field])).collect();
                members.insert(id.clone(), (state == "LEAVING", holding));
            }
        }
        Observable {
            group_epoch: number("groupEpoch"),
            assignment_epoch: number("assignmentEpoch"),
            shard_count: number("shardCount"),
            target: aggregate["targetAssignments"].clone(),
            members,
        }
    }

    fn expect_one_holder_per_shard(&self) {
        let mut holders: BTreeMap<u64, &str> = BTreeMap::new();
        for (id, (_, holding)) in &self.members {
            for &shard in holding {
                if let Some(other) = holders.insert(shard, id) {
                    panic!("shard {shard} is held by {other} and {id}: {self:?}");
                }
            }
        }
    }
}

/// What an observer has seen.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Observed {
    /// Records read.
    pub(crate) reads: usize,
    /// Records that differed from the one before.
    pub(crate) changes: usize,
}

/// Watches one group until it is stopped.
pub(crate) struct Observer {
    stop: watch::Sender<bool>,
    task: JoinHandle<Observed>,
}

impl Observer {
    /// Begins to watch.
    pub(crate) async fn start(redis: &RedisServer, group: &GroupKey) -> Self {
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(observe(redis.connection().await, Keys::default().metadata(group), stopped));
        Observer { stop, task }
    }

    /// Ends; fails when something was wrong in between.
    pub(crate) async fn stop(self) -> Observed {
        // When the task has ended by itself it has failed, and says so below.
        let _ = self.stop.send(true);
        self.task.await.unwrap()
    }
}

async fn observe(mut redis: MultiplexedConnection, key: String, stopped: watch::Receiver<bool>) -> Observed {
    let mut observed = Observed::default();
    let mut last: Option<(u64, Observable)> = None;
    while !*stopped.borrow() {
        let text: String =
            redis::cmd("HGET").arg(&key).arg("aggregate").query_async(&mut redis).await.unwrap();
        let aggregate: Value = serde_json::from_str(&text).unwrap();
        let version = aggregate["metadataVersion"].as_u64().unwrap();
        let now = Observable::of(&aggregate);
        now.expect_one_holder_per_shard();
        if let Some((last_version, before)) = &last {
            assert!(version >= *last_version, "the version went back from {last_version} to {version}");
            if now != *before {
                observed.changes += 1;
                assert!(version > *last_version, "at version {version}: {before:?} became {now:?}");
            }
        }
        observed.reads += 1;
        last = Some((version, now));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    observed
}
