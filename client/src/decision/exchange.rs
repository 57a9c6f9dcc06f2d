//! One request in flight, and when the next one is due (protocol 4, 11).

use std::collections::BTreeSet;
use std::time::Duration;

/// The request whose answer counts.
#[derive(Clone, Debug)]
pub(crate) struct InFlight {
    pub(crate) request_id: String,
    pub(crate) sent_at: Duration,
    /// Its `memberEpoch`.
    pub(crate) epoch: i64,
    /// Shards that it reported as given back.
    pub(crate) reported: BTreeSet<u32>,
}

/// The conversation with the coordinator.
#[derive(Clone, Debug, Default)]
pub(crate) struct Exchange {
    in_flight: Option<InFlight>,
    /// When the next request is due, if none is in flight.
    due_at: Duration,
}

impl Exchange {
    pub(crate) fn send(&mut self, request: InFlight) {
        self.in_flight = Some(request);
    }

    /// Takes the request in flight out if `request_id` is its id: any other answer came too late.
    pub(crate) fn answered(&mut self, request_id: &str) -> Option<InFlight> {
        self.in_flight.take_if(|request| request.request_id == request_id)
    }

    /// Whether the request in flight has waited for `timeout`; it is given up then.
    pub(crate) fn give_up_after(&mut self, timeout: Duration, now: Duration) -> bool {
        self.in_flight.take_if(|request| now >= request.sent_at.saturating_add(timeout)).is_some()
    }

    /// Forgets the request in flight: its answer would belong to another life.
    pub(crate) fn forget(&mut self) {
        self.in_flight = None;
    }

    pub(crate) fn schedule(&mut self, at: Duration) {
        self.due_at = at;
    }

    /// Not later than `at`.
    pub(crate) fn hasten(&mut self, at: Duration) {
        self.due_at = self.due_at.min(at);
    }

    pub(crate) fn is_due(&self, now: Duration) -> bool {
        self.in_flight.is_none() && now >= self.due_at
    }

    /// When something is to be done next.
    pub(crate) fn wakes_at(&self, timeout: Duration) -> Duration {
        self.in_flight.as_ref().map_or(self.due_at, |request| request.sent_at.saturating_add(timeout))
    }
}
