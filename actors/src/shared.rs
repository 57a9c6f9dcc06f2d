//! What every part of one coordinator holds in common.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rsc_store::GroupStore;

use crate::gate::Gate;
use crate::registry::Registry;
use crate::replication::Unreplicated;
use crate::resharding::Resharding;
use crate::settings::CoordinatorSettings;
use crate::stream_reads::StreamReads;
use crate::supervisor::SupervisorLink;
use crate::watchdog::Watchdog;
use crate::workers::Workers;
use crate::write_trouble::WriteTrouble;

/// One coordinator's insides.
pub(crate) struct Shared {
    pub(crate) settings: CoordinatorSettings,
    pub(crate) store: Arc<dyn GroupStore>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) registry: Registry,
    pub(crate) workers: Workers,
    pub(crate) watchdog: Arc<Watchdog>,
    pub(crate) supervisor: SupervisorLink,
    pub(crate) resharding: Resharding,
    pub(crate) stream_reads: StreamReads,
    pub(crate) unreplicated: Unreplicated,
    pub(crate) write_trouble: WriteTrouble,
    pub(crate) started: Instant,
    /// Lets tests make a decision or an actor panic.
    #[cfg(test)]
    pub(crate) hooks: crate::tests::Hooks,
}

impl Shared {
    /// How long this instance has used its present routing cache lease (protocol 7): it comes from the
    /// configuration, so since the start.
    pub(crate) fn routing_ttl_age_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// The member lease.
    pub(crate) fn lease(&self) -> Duration {
        self.settings.lease()
    }

    /// A fresh random `metadataToken`.
    pub(crate) fn metadata_token() -> String {
        uuid::Uuid::new_v4().simple().to_string()
    }
}
