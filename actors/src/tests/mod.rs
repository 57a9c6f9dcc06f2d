//! The crate's tests: real `redis-server` children where the store matters, the memory store for questions of
//! scheduling alone.

mod actix_facts;
mod batching;
mod creation;
mod deletion;
mod faults;
mod health;
mod idle;
mod interrupted;
mod member;
mod metrics;
mod outcomes;
mod panics;
mod redis_server;
mod resharding;
mod service;
mod stream_reads;
mod supervisor;
mod terminating;
mod two_coordinators;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rsc_core::{Command, Group};
use rsc_protocol::GroupKey;
use rsc_protocol::admin::{CreateGroupRequest, CreateStreamRequest, DeleteGroupRequest};
use rsc_protocol::keys::Keys;
use rsc_store::{GroupStore, MemoryStore};

use crate::inbox::Work;
use crate::{Coordinator, CoordinatorSettings, Refusal};

/// The longest a test waits for something that should happen at once.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

type DecisionHook = Box<dyn Fn(&[Command]) + Send + Sync>;
type TurnHook = Box<dyn Fn(&Work) + Send + Sync>;

/// What a test makes happen inside.
#[derive(Default)]
pub(crate) struct Hooks {
    before_decision: Mutex<Option<DecisionHook>>,
    before_turn: Mutex<Option<TurnHook>>,
}

impl Hooks {
    pub(crate) fn before_decision(&self, commands: &[Command]) {
        let hook = self.before_decision.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(hook) = &*hook {
            hook(commands);
        }
    }

    pub(crate) fn before_turn(&self, work: &Work) {
        let hook = self.before_turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(hook) = &*hook {
            hook(work);
        }
    }

    fn set_before_decision(&self, hook: impl Fn(&[Command]) + Send + Sync + 'static) {
        *self.before_decision.lock().unwrap() = Some(Box::new(hook));
    }

    fn set_before_turn(&self, hook: impl Fn(&Work) + Send + Sync + 'static) {
        *self.before_turn.lock().unwrap() = Some(Box::new(hook));
    }
}

/// Runs a test inside an actix system and ends its arbiters afterwards.
pub(crate) fn in_system<T>(test: impl Future<Output = T>) -> T {
    let system = actix::System::new();
    let result = system.block_on(async { tokio::time::timeout(Duration::from_secs(120), test).await });
    actix::System::current().stop();
    system.run().unwrap();
    result.expect("the test did not end")
}

/// Settings with short times: a lease of two seconds.
pub(crate) fn settings(instance_id: &str) -> CoordinatorSettings {
    CoordinatorSettings {
        timing: rsc_core::Settings {
            heartbeat_interval_ms: 100,
            member_lease_ttl_ms: 2_000,
            rebalance_timeout_ms: 4_000,
            stale_member_retention_ms: 60_000,
            ..rsc_core::Settings::default()
        },
        tick_interval: Duration::from_millis(50),
        mutex_ttl: Duration::from_secs(1),
        mutex_acquire_timeout: Duration::from_secs(2),
        index_refresh_interval: Duration::from_secs(3_600),
        ..CoordinatorSettings::new(instance_id)
    }
}

/// The same with a lease that no test waits for.
pub(crate) fn patient(instance_id: &str) -> CoordinatorSettings {
    let mut settings = settings(instance_id);
    settings.timing.member_lease_ttl_ms = 600_000;
    settings.timing.rebalance_timeout_ms = 600_000;
    settings
}

pub(crate) fn memory_store() -> Arc<MemoryStore> {
    Arc::new(MemoryStore::new(Keys::default(), Duration::from_secs(1)))
}

pub(crate) fn start(settings: CoordinatorSettings, store: &Arc<impl GroupStore>) -> Coordinator {
    Coordinator::start(settings, store.clone())
}

pub(crate) fn key(prefix: &str, group: &str) -> GroupKey {
    GroupKey::new(prefix, group).unwrap()
}

pub(crate) fn orders() -> GroupKey {
    key("orders", "billing")
}

pub(crate) fn group_request(shards: Option<i64>) -> CreateGroupRequest {
    CreateGroupRequest { initial_shard_count: shards, requested_by: "test".into(), reason: None }
}

pub(crate) fn stream_request(shards: Option<i64>, groups: &[&str]) -> CreateStreamRequest {
    CreateStreamRequest {
        initial_shard_count: shards,
        requested_by: "test".into(),
        reason: Some("a test".into()),
        consumer_groups: Some(groups.iter().map(|name| (*name).to_owned()).collect()),
    }
}

pub(crate) fn delete_request(force: bool) -> DeleteGroupRequest {
    DeleteGroupRequest { requested_by: "test".into(), reason: "a test".into(), force }
}

/// A new group of `shards` shards.
pub(crate) async fn create(coordinator: &Coordinator, group: &GroupKey, shards: u32) {
    coordinator.create_group(group, group_request(Some(i64::from(shards)))).await.unwrap();
}

pub(crate) fn code<T: std::fmt::Debug>(result: Result<T, Refusal>) -> &'static str {
    result.expect_err("refused").code.as_str()
}

/// Waits until `condition` holds.
pub(crate) async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition().await {
        assert!(Instant::now() < deadline, "waited in vain for: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The record, with every invariant checked.
pub(crate) async fn record(coordinator: &Coordinator, group: &GroupKey) -> Group {
    let group = coordinator.group(group).await.unwrap();
    assert_eq!(group.validate(), [], "invariants of the stored record");
    group
}

/// Waits until the group's actor in this process has ended its turn and nothing waits.
pub(crate) async fn settled(coordinator: &Coordinator, group: &GroupKey) {
    eventually("the actor is idle", || async {
        let status = coordinator.actor(group).await.unwrap();
        status.state != "IN_TURN" && status.mailbox_depth == 0
    })
    .await;
}
