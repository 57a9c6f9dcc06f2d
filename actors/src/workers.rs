//! The threads that group actors are spread over: a fixed pool, not one per actor.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use actix::Arbiter;
use actix_rt::ArbiterHandle;

use crate::watchdog::{Watchdog, keep_beating};

/// A pool of arbiters. They end with the actix system.
pub(crate) struct Workers {
    arbiters: Vec<Arbiter>,
    next: AtomicUsize,
}

impl Workers {
    /// Starts `count` arbiters, which is at least one; the watchdog gets the beats of each. Needs a running system.
    pub(crate) fn start(count: usize, watchdog: &Arc<Watchdog>) -> Self {
        let arbiters: Vec<Arbiter> = (0..count.max(1)).map(|_| Arbiter::new()).collect();
        for (worker, arbiter) in arbiters.iter().enumerate() {
            arbiter.spawn(keep_beating(Arc::clone(watchdog), worker));
        }
        Workers { arbiters, next: AtomicUsize::new(0) }
    }

    /// The next one's index, round robin.
    pub(crate) fn next(&self) -> usize {
        self.next.fetch_add(1, Ordering::Relaxed) % self.arbiters.len()
    }

    /// One of them; the index may be any number.
    pub(crate) fn arbiter(&self, worker: usize) -> ArbiterHandle {
        self.arbiters[worker % self.arbiters.len()].handle()
    }

    /// Runs a future on one of them, to its end, whoever waits for it or not.
    pub(crate) fn spawn<F>(&self, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.arbiter(self.next()).spawn(future);
    }
}
