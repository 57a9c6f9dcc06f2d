//! Terminating mode (protocol 9): who may still begin, and who has not yet stopped.
//!
//! actix' `System::stop` does not wait for arbiters, so everybody who must end first counts here.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// The gate of one coordinator.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    terminating: AtomicBool,
    running: AtomicUsize,
    changed: Notify,
}

/// Somebody who has to stop before the process may end; counts until it is dropped.
#[derive(Debug)]
pub(crate) struct Running(Arc<Gate>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
        self.0.changed.notify_waiters();
    }
}

impl Gate {
    /// Closes the gate; `false` if it was closed before.
    pub(crate) fn close(&self) -> bool {
        !self.terminating.swap(true, Ordering::SeqCst)
    }

    pub(crate) fn is_terminating(&self) -> bool {
        self.terminating.load(Ordering::SeqCst)
    }

    /// Counts somebody who runs until it notices that the gate is closed.
    pub(crate) fn count(self: &Arc<Self>) -> Running {
        self.running.fetch_add(1, Ordering::SeqCst);
        Running(Arc::clone(self))
    }

    /// Lets a piece of work through that will be waited for; `None` once the gate is closed.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<Running> {
        // Counted first: who closes the gate after this check already waits for us.
        let running = self.count();
        (!self.is_terminating()).then_some(running)
    }

    /// Waits until nobody runs any more; `Err` with the number left after `timeout`.
    pub(crate) async fn stopped(&self, timeout: Duration) -> Result<(), usize> {
        let deadline = Instant::now() + timeout;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let left = self.running.load(Ordering::SeqCst);
            if left == 0 {
                return Ok(());
            }
            if timeout_at(deadline, changed).await.is_err() {
                return match self.running.load(Ordering::SeqCst) {
                    0 => Ok(()),
                    left => Err(left),
                };
            }
        }
    }
}
