//! What the store's tests share: a real redis-server, a proxy in front of it, and hands that reach behind
//! the store's back.

// Every test binary compiles this module and uses its own part of it.
#![allow(dead_code, unreachable_pub)]

pub mod hands;
pub mod proxy;
pub mod server;
pub mod stores;

use std::future::Future;
use std::time::{Duration, Instant};

use rsc_core::{Stamp, Write, WriteKind};
use rsc_protocol::{GroupKey, Timestamp};
use rsc_store::{Entered, GroupStore, MutexToken, Outcome};

/// Asks again until `condition` holds, at most 20 s.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < Duration::from_secs(20), "never happened: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A group of this stream prefix.
pub fn group(stream_prefix: &str) -> GroupKey {
    GroupKey::new(stream_prefix, "billing").unwrap()
}

/// A fresh token.
pub fn token() -> MutexToken {
    MutexToken::fresh("test")
}

/// A structural write of `aggregate` that makes this revision.
pub fn structural(aggregate: &str, revision: u64) -> Write {
    Write {
        kind: WriteKind::Structural { aggregate: aggregate.to_owned(), revision },
        live: Vec::new(),
        removed_live: Vec::new(),
        updated_at: Timestamp::from_millis(1_700_000_000_000),
        history: None,
    }
}

/// A lease-only write of these members' live fields.
pub fn lease_only(live: &[(&str, &str)]) -> Write {
    Write {
        kind: WriteKind::LeaseOnly,
        live: live.iter().map(|(id, json)| ((*id).to_owned(), (*json).to_owned())).collect(),
        removed_live: Vec::new(),
        updated_at: Timestamp::from_millis(1_700_000_001_000),
        history: None,
    }
}

/// The stamp of an applied write.
#[track_caller]
pub fn applied(outcome: Outcome) -> Stamp {
    match outcome {
        Outcome::Applied(stamp) => stamp,
        other => panic!("not applied: {other:?}"),
    }
}

/// Creates a group at revision 1, releases its mutex, and returns its stamp.
pub async fn created(store: &dyn GroupStore, group: &GroupKey) -> Stamp {
    let token = token();
    let stamp = applied(store.create(group, &token, None, &structural("{\"storeRevision\":1}", 1)).await);
    store.release(group, &token).await.unwrap();
    stamp
}

/// Enters and panics when somebody else holds the mutex.
pub async fn enter(store: &dyn GroupStore, group: &GroupKey, known: Option<&Stamp>) -> (MutexToken, Entered) {
    let token = token();
    let entered = store.enter(group, &token, None, known).await.unwrap();
    assert!(!matches!(entered, Entered::Busy { .. }), "busy: {entered:?}");
    (token, entered)
}

/// Whether the group's mutex is free; takes it for a moment to find out.
pub async fn is_free(store: &dyn GroupStore, group: &GroupKey) -> bool {
    let token = token();
    let free = !matches!(store.enter(group, &token, None, None).await.unwrap(), Entered::Busy { .. });
    store.release(group, &token).await.unwrap();
    free
}
