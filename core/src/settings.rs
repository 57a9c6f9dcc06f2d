//! The numbers the state machine works with (protocol 10). Durations are milliseconds.

/// Timing and limits of a group; the same for every group of one coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// What members are told to wait between heartbeats.
    pub heartbeat_interval_ms: u64,
    /// How long a member counts as alive after its last accepted heartbeat.
    pub member_lease_ttl_ms: u64,
    /// How long a member has to drain what was taken from it; never shorter than the lease.
    pub rebalance_timeout_ms: u64,
    /// How long an expired or fenced member is remembered.
    pub stale_member_retention_ms: u64,
    /// Live members a group takes at most.
    pub max_members_per_group: usize,
    /// How long producers may use what they were told about routing.
    pub routing_cache_ttl_ms: u64,
    /// What is waited beyond the producers' cache leases before a removed shard may be given up (protocol 6).
    pub publish_margin_ms: u64,
}

impl Default for Settings {
    /// The timing of protocol 10.
    fn default() -> Self {
        Settings {
            heartbeat_interval_ms: 3_000,
            member_lease_ttl_ms: 15_000,
            rebalance_timeout_ms: 60_000,
            stale_member_retention_ms: 600_000,
            max_members_per_group: 10_000,
            routing_cache_ttl_ms: 30_000,
            publish_margin_ms: 5_000,
        }
    }
}

/// What a member whose recorded lease is `lease_ttl_ms` long is told (`assignmentLeaseMs`, protocol 4), in
/// milliseconds: nine tenths of it, rounded down. The member stops by this, the coordinators count the whole
/// lease. In between lies what they cannot notice (protocol 2): Redis time that jumps, or runs fast, by up to a
/// tenth of a lease ends the recorded lease so much early, and the clocks that the member and the instances
/// count by may drift.
#[must_use]
pub fn told_lease_ms(lease_ttl_ms: u64) -> u64 {
    if planted!(LeaseToldWhole) { lease_ttl_ms } else { lease_ttl_ms - lease_ttl_ms.div_ceil(10) }
}

/// A duration as a difference of [`rsc_protocol::Timestamp`]s.
pub(crate) fn millis(duration_ms: u64) -> i64 {
    i64::try_from(duration_ms).unwrap_or(i64::MAX)
}
