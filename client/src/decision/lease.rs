//! Until when a consumer may read (protocol 11).

use std::time::Duration;

/// The assignment lease: how long the consumer may go on reading whatever happens.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lease {
    until: Option<Duration>,
}

impl Lease {
    /// An answer extended the lease: `ttl` from the moment its request was **sent**. Never shortens it.
    pub(crate) fn extend(&mut self, sent_at: Duration, ttl: Duration) {
        let until = sent_at.saturating_add(ttl);
        self.until = Some(self.until.map_or(until, |known| known.max(until)));
    }

    pub(crate) fn forget(&mut self) {
        self.until = None;
    }

    /// Whether the consumer may read at `now`.
    pub(crate) fn runs(self, now: Duration) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// Whether there was a lease and it is over at `now`.
    pub(crate) fn is_over(self, now: Duration) -> bool {
        self.until.is_some_and(|until| now >= until)
    }

    pub(crate) fn until(self) -> Option<Duration> {
        self.until
    }
}
