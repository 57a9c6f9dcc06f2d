//! Waiting for conditions, never for time.

use std::time::{Duration, Instant};

/// How long anything may take that a test waits for: much, for slow machines. A test that passes never
/// waits that long.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Asks again and again until the condition holds; fails with `what` after [`DEADLINE`].
pub(crate) async fn wait_until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < DEADLINE, "waited {DEADLINE:?} in vain until {what}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// The same for code that does not wait asynchronously; returns what was waited for.
pub(crate) fn wait_until_blocking<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(started.elapsed() < DEADLINE, "waited {DEADLINE:?} in vain until {what}");
        std::thread::sleep(POLL_INTERVAL);
    }
}
