//! A store that counts, fails and waits on demand, in front of a real one.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use rsc_core::{ShardSet, Stamp, Tombstone, Write};
use rsc_protocol::monitoring::RecordId;
use rsc_protocol::{GroupKey, Timestamp};
use rsc_store::{
    Entered, Found, GroupStore, HistoryPage, MutexToken, Outcome, ProvisionError, RecordPage, RecordRange,
    ShardDeletion, ShardProof, ShardView, StoreError, StreamReads,
};
use tokio::sync::watch;

/// What happens to one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// None: the call goes well, and the next fault is for a later one.
    Pass,
    /// The call reaches the store and its answer is lost; what notices that can be held as `lost`.
    LostAfter,
    /// The call is lost on its way; nobody knows that.
    LostBefore,
    /// The call is certainly not made.
    NotSent,
}

/// The wrapper.
pub(crate) struct TestStore {
    inner: Arc<dyn GroupStore>,
    calls: Mutex<BTreeMap<&'static str, usize>>,
    faults: Mutex<BTreeMap<&'static str, VecDeque<Fault>>>,
    gates: Mutex<BTreeMap<&'static str, watch::Sender<bool>>>,
    cut: AtomicBool,
}

fn lost() -> StoreError {
    StoreError::Unavailable("a fault of the test".to_owned())
}

impl TestStore {
    pub(crate) fn new(inner: Arc<dyn GroupStore>) -> Arc<Self> {
        Arc::new(TestStore {
            inner,
            calls: Mutex::default(),
            faults: Mutex::default(),
            gates: Mutex::default(),
            cut: AtomicBool::new(false),
        })
    }

    /// Calls of one kind so far.
    pub(crate) fn calls(&self, call: &str) -> usize {
        self.calls.lock().unwrap().get(call).copied().unwrap_or(0)
    }

    /// All calls so far.
    pub(crate) fn all_calls(&self) -> usize {
        self.calls.lock().unwrap().values().sum()
    }

    /// Puts a fault on one of the next calls of this kind.
    pub(crate) fn fail_next(&self, call: &'static str, fault: Fault) {
        self.faults.lock().unwrap().entry(call).or_default().push_back(fault);
    }

    /// Whether every fault has happened.
    pub(crate) fn all_faults_happened(&self) -> bool {
        self.faults.lock().unwrap().values().all(VecDeque::is_empty)
    }

    /// Takes all faults away.
    pub(crate) fn no_more_faults(&self) {
        self.faults.lock().unwrap().clear();
    }

    /// Cuts this instance off from the store, or joins it again.
    pub(crate) fn cut_off(&self, cut: bool) {
        self.cut.store(cut, Ordering::SeqCst);
    }

    /// Makes every call of this kind wait before it is made.
    pub(crate) fn hold(&self, call: &'static str) {
        self.gates.lock().unwrap().insert(call, watch::channel(true).0);
    }

    /// Lets the calls go on.
    pub(crate) fn let_go(&self, call: &'static str) {
        if let Some(gate) = self.gates.lock().unwrap().remove(call) {
            let _nobody_waits = gate.send(false);
        }
    }

    async fn pass_gate(&self, call: &'static str) {
        *self.calls.lock().unwrap().entry(call).or_default() += 1;
        let gate = self.gates.lock().unwrap().get(call).map(watch::Sender::subscribe);
        if let Some(mut gate) = gate {
            let _let_go = gate.wait_for(|held| !held).await;
        }
    }

    async fn begin(&self, call: &'static str) -> Option<Fault> {
        self.pass_gate(call).await;
        if self.cut.load(Ordering::SeqCst) {
            return Some(Fault::NotSent);
        }
        self.faults.lock().unwrap().get_mut(call).and_then(VecDeque::pop_front)
    }

    async fn write(&self, call: &'static str, write: impl Future<Output = Outcome>) -> Outcome {
        match self.begin(call).await {
            None | Some(Fault::Pass) => write.await,
            Some(Fault::LostAfter) => {
                write.await;
                self.pass_gate("lost").await;
                Outcome::Unknown(lost())
            }
            Some(Fault::LostBefore) => Outcome::Unknown(lost()),
            Some(Fault::NotSent) => Outcome::NotApplied(lost()),
        }
    }

    async fn ask<T, E: From<StoreError>>(
        &self,
        call: &'static str,
        question: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        match self.begin(call).await {
            None | Some(Fault::Pass) => question.await,
            Some(Fault::LostAfter) => {
                let _lost = question.await;
                Err(lost().into())
            }
            Some(Fault::LostBefore | Fault::NotSent) => Err(lost().into()),
        }
    }
}

#[async_trait]
impl GroupStore for TestStore {
    async fn enter(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        takeover: Option<&MutexToken>,
        known: Option<&Stamp>,
    ) -> Result<Entered, StoreError> {
        self.ask("enter", self.inner.enter(group, token, takeover, known)).await
    }

    async fn commit(&self, group: &GroupKey, token: &MutexToken, expected: &Stamp, write: &Write) -> Outcome {
        self.write("commit", self.inner.commit(group, token, expected, write)).await
    }

    async fn release(&self, group: &GroupKey, token: &MutexToken) -> Result<(), StoreError> {
        self.ask("release", self.inner.release(group, token)).await
    }

    async fn renew(&self, group: &GroupKey, token: &MutexToken) -> Result<bool, StoreError> {
        self.ask("renew", self.inner.renew(group, token)).await
    }

    async fn create(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        tombstone: Option<&Tombstone>,
        write: &Write,
    ) -> Outcome {
        self.write("create", self.inner.create(group, token, tombstone, write)).await
    }

    async fn delete(
        &self,
        group: &GroupKey,
        token: &MutexToken,
        expected: Option<&Stamp>,
        tombstone: Option<&Tombstone>,
    ) -> Outcome {
        self.write("delete", self.inner.delete(group, token, expected, tombstone)).await
    }

    async fn read(&self, group: &GroupKey) -> Result<Found, StoreError> {
        self.ask("read", self.inner.read(group)).await
    }

    async fn index(&self) -> Result<Vec<String>, StoreError> {
        self.ask("index", self.inner.index()).await
    }

    async fn index_contains(&self, group: &GroupKey) -> Result<bool, StoreError> {
        self.ask("index_contains", self.inner.index_contains(group)).await
    }

    async fn index_add(&self, group: &GroupKey) -> Result<(), StoreError> {
        self.ask("index_add", self.inner.index_add(group)).await
    }

    async fn index_remove(&self, group: &GroupKey) -> Result<(), StoreError> {
        self.ask("index_remove", self.inner.index_remove(group)).await
    }

    async fn lock_stream(&self, prefix: &str, token: &MutexToken) -> Result<Option<String>, StoreError> {
        self.ask("lock_stream", self.inner.lock_stream(prefix, token)).await
    }

    async fn renew_stream(&self, prefix: &str, token: &MutexToken) -> Result<bool, StoreError> {
        self.ask("renew_stream", self.inner.renew_stream(prefix, token)).await
    }

    async fn unlock_stream(&self, prefix: &str, token: &MutexToken) -> Result<(), StoreError> {
        self.ask("unlock_stream", self.inner.unlock_stream(prefix, token)).await
    }

    async fn provision(
        &self,
        stream_prefix: &str,
        consumer_group: &str,
        shards: &ShardSet,
    ) -> Result<(), ProvisionError> {
        self.ask("provision", self.inner.provision(stream_prefix, consumer_group, shards)).await
    }

    async fn prove_empty(
        &self,
        stream_prefix: &str,
        shards: &ShardSet,
        coordinated: &[String],
    ) -> Result<BTreeMap<u32, ShardProof>, StoreError> {
        self.ask("prove_empty", self.inner.prove_empty(stream_prefix, shards, coordinated)).await
    }

    async fn shard_times(
        &self,
        stream_prefix: &str,
        shards: &ShardSet,
    ) -> Result<BTreeMap<u32, Timestamp>, StoreError> {
        self.ask("shard_times", self.inner.shard_times(stream_prefix, shards)).await
    }

    async fn delete_shard(
        &self,
        stream_prefix: &str,
        shard: u32,
        coordinated: &[String],
        not_after: Timestamp,
    ) -> Result<ShardDeletion, StoreError> {
        self.ask("delete_shard", self.inner.delete_shard(stream_prefix, shard, coordinated, not_after)).await
    }

    async fn ping(&self) -> Result<Timestamp, StoreError> {
        self.ask("ping", self.inner.ping()).await
    }

    fn kind(&self) -> &'static str {
        self.inner.kind()
    }
}

#[async_trait]
impl StreamReads for TestStore {
    async fn shard_views(
        &self,
        stream_prefix: &str,
        consumer_group: &str,
        shards: &ShardSet,
        judged: &ShardSet,
    ) -> Result<BTreeMap<u32, ShardView>, StoreError> {
        let views = self.inner.shard_views(stream_prefix, consumer_group, shards, judged);
        self.ask("shard_views", views).await
    }

    async fn existing_streams(
        &self,
        stream_prefix: &str,
        shards: Range<u32>,
    ) -> Result<ShardSet, StoreError> {
        self.ask("existing_streams", self.inner.existing_streams(stream_prefix, shards)).await
    }

    async fn pending_by_consumer(
        &self,
        stream_prefix: &str,
        consumer_group: &str,
        shards: &ShardSet,
    ) -> Result<BTreeMap<u32, Option<Vec<(String, u64)>>>, StoreError> {
        let pending = self.inner.pending_by_consumer(stream_prefix, consumer_group, shards);
        self.ask("pending_by_consumer", pending).await
    }

    async fn records(
        &self,
        stream_prefix: &str,
        shard: u32,
        range: &RecordRange,
    ) -> Result<RecordPage, StoreError> {
        self.ask("records", self.inner.records(stream_prefix, shard, range)).await
    }

    async fn history(
        &self,
        group: &GroupKey,
        before: Option<RecordId>,
        limit: usize,
    ) -> Result<HistoryPage, StoreError> {
        self.ask("history", self.inner.history(group, before, limit)).await
    }
}
