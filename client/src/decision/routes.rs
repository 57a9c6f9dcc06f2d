//! What a producer knows of its routing, and the one refresh of it in flight (protocol 11).

use std::time::Duration;

use rsc_protocol::routing::ProducerRouting;

/// Routing as it was told, and for how long it may be used.
#[derive(Clone, Debug)]
pub(crate) struct Cached {
    pub(crate) routing: ProducerRouting,
    /// Its `ETag`.
    pub(crate) tag: Option<String>,
    /// How long it may be used.
    pub(crate) ttl: Duration,
    /// Counted from here: when its request was **sent**, never when the answer came.
    pub(crate) sent_at: Duration,
    pub(crate) until: Duration,
}

impl Cached {
    /// The coordinator says that it still is what it was, to a request sent at `sent_at`.
    pub(crate) fn extend(&mut self, sent_at: Duration) {
        self.sent_at = self.sent_at.max(sent_at);
        self.until = self.sent_at.saturating_add(self.ttl);
    }

    /// When to ask again: half of the lease is left for tries that fail.
    pub(crate) fn refresh_at(&self) -> Duration {
        self.sent_at.saturating_add(self.ttl / 2)
    }
}

/// The refresh in flight, and when the next one is due.
#[derive(Clone, Debug, Default)]
pub(crate) struct Refresh {
    numbered: u64,
    /// Its number, and when it was sent.
    in_flight: Option<(u64, Duration)>,
    due_at: Duration,
}

impl Refresh {
    /// A request leaves; its number.
    pub(crate) fn send(&mut self, now: Duration) -> u64 {
        self.numbered += 1;
        self.in_flight = Some((self.numbered, now));
        self.numbered
    }

    /// When the request in flight was sent, if `request` is that one; any other answer came too late.
    pub(crate) fn answered(&mut self, request: u64) -> Option<Duration> {
        self.in_flight.take_if(|(number, _)| *number == request).map(|(_, sent_at)| sent_at)
    }

    /// Whether the request in flight has waited for `timeout`; it is given up then.
    pub(crate) fn give_up_after(&mut self, timeout: Duration, now: Duration) -> bool {
        self.in_flight.take_if(|(_, sent_at)| now >= sent_at.saturating_add(timeout)).is_some()
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
        self.in_flight.map_or(self.due_at, |(_, sent_at)| sent_at.saturating_add(timeout))
    }
}
