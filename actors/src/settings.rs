//! What a coordinator is told at start.

use std::time::Duration;

/// A hundred years: as good as for ever, and far from the end of every clock.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Settings of one coordinator process; the same for every group.
#[derive(Clone, Debug)]
pub struct CoordinatorSettings {
    /// Names this process, in mutex tokens and in [`crate::ActorStatus`].
    pub instance_id: String,
    /// Heartbeat interval, lease, rebalance timeout, retention, member limit, routing cache lease.
    pub timing: rsc_core::Settings,
    /// At most one tick of a group per interval.
    pub tick_interval: Duration,
    /// How long a mutex lasts unless renewed; the store's own setting, repeated here so that long work
    /// renews in time.
    pub mutex_ttl: Duration,
    /// How long a turn waits for a mutex that another instance holds.
    pub mutex_acquire_timeout: Duration,
    /// How often the index of groups is read.
    pub index_refresh_interval: Duration,
    /// Commands that may wait for one group; beyond it they are refused with `COORDINATOR_OVERLOADED`.
    pub mailbox_capacity: usize,
    /// Arbiters (threads) that group actors are spread over; at least one.
    pub workers: usize,
    /// Whether creating a group creates the streams and consumer groups of its shards.
    pub provisioning_enabled: bool,
    /// The shard count of a stream that was created without one; at least 1.
    pub default_shard_count: u32,
    /// The largest shard count that a stream may be created with.
    pub max_shard_count: u32,
    /// Whether the store waits for replicas: then nobody starts a shard whose grant they may not have.
    pub waits_for_replicas: bool,
}

impl CoordinatorSettings {
    /// The defaults of protocol 10 and 12 for an instance of this name.
    #[must_use]
    pub fn new(instance_id: impl Into<String>) -> Self {
        CoordinatorSettings {
            instance_id: instance_id.into(),
            timing: rsc_core::Settings::default(),
            tick_interval: Duration::from_secs(1),
            mutex_ttl: Duration::from_secs(5),
            mutex_acquire_timeout: Duration::from_secs(2),
            index_refresh_interval: Duration::from_secs(10),
            mailbox_capacity: 10_000,
            workers: 2,
            provisioning_enabled: true,
            default_shard_count: 12,
            max_shard_count: 10_000,
            waits_for_replicas: false,
        }
    }

    /// The same with every duration short enough to be added to an instant.
    pub(crate) fn bounded(mut self) -> Self {
        for duration in [
            &mut self.tick_interval,
            &mut self.mutex_ttl,
            &mut self.mutex_acquire_timeout,
            &mut self.index_refresh_interval,
        ] {
            *duration = (*duration).min(LONGEST);
        }
        let longest_ms = u64::try_from(LONGEST.as_millis()).unwrap_or(u64::MAX);
        let lease_ms = &mut self.timing.member_lease_ttl_ms;
        *lease_ms = (*lease_ms).min(longest_ms);
        self.workers = self.workers.max(1);
        self
    }

    /// The member lease.
    pub(crate) fn lease(&self) -> Duration {
        Duration::from_millis(self.timing.member_lease_ttl_ms)
    }
}
