//! Tells a stall of the process (or of one of its threads) by a timer that comes late (protocol 4.1 rule 1).
//!
//! A group without requests is no stall: the timers run whether there is work or not.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// One thread's heartbeat, in milliseconds since the watchdog's origin; 0 is "never".
#[derive(Debug, Default)]
struct Beat {
    last: AtomicU64,
    stall_ended: AtomicU64,
}

/// The watchdog of one process: a beat for each worker thread.
#[derive(Debug)]
pub(crate) struct Watchdog {
    origin: Instant,
    period: Duration,
    tolerated_ms: u64,
    beats: Vec<Beat>,
}

impl Watchdog {
    /// A watchdog for `workers` threads that expects each to beat every eighth of a lease, and takes a beat
    /// that is late by more than a quarter of a lease for a stall.
    pub(crate) fn new(lease: Duration, workers: usize, now: Instant) -> Self {
        // Never 0: that means "never".
        let origin = now.checked_sub(Duration::from_millis(1)).unwrap_or(now);
        let period = (lease / 8).max(Duration::from_millis(1));
        let tolerated = period + lease / 4;
        let watchdog = Watchdog {
            origin,
            period,
            tolerated_ms: u64::try_from(tolerated.as_millis()).unwrap_or(u64::MAX),
            beats: (0..workers).map(|_| Beat::default()).collect(),
        };
        for worker in 0..workers {
            watchdog.beat(worker, now);
        }
        watchdog
    }

    /// How often a thread beats.
    pub(crate) fn period(&self) -> Duration {
        self.period
    }

    fn ms(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.origin).as_millis()).unwrap_or(u64::MAX)
    }

    /// The thread runs.
    pub(crate) fn beat(&self, worker: usize, now: Instant) {
        let Some(beat) = self.beats.get(worker) else { return };
        let now = self.ms(now);
        let last = beat.last.swap(now, Ordering::SeqCst);
        if last != 0 && now.saturating_sub(last) > self.tolerated_ms {
            beat.stall_ended.fetch_max(now, Ordering::SeqCst);
        }
    }

    /// When this thread's last stall ended. Looks at the beat's age as well: after a stall whoever runs first
    /// must know, timer or not. An overdue beat is a stall that ends now.
    pub(crate) fn last_stall(&self, worker: usize, now: Instant) -> Option<Instant> {
        let beat = self.beats.get(worker)?;
        let last = beat.last.load(Ordering::SeqCst);
        let now = self.ms(now);
        if last != 0 && now.saturating_sub(last) > self.tolerated_ms {
            beat.stall_ended.fetch_max(now, Ordering::SeqCst);
        }
        match beat.stall_ended.load(Ordering::SeqCst) {
            0 => None,
            ended => Some(self.origin + Duration::from_millis(ended)),
        }
    }
}

/// Beats for one thread as long as it lives; to be run on that thread.
pub(crate) async fn keep_beating(watchdog: Arc<Watchdog>, worker: usize) {
    loop {
        watchdog.beat(worker, Instant::now());
        actix_rt::time::sleep(watchdog.period()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(8);

    #[test]
    fn beats_in_time_are_no_stall() {
        let start = Instant::now();
        let watchdog = Watchdog::new(LEASE, 1, start);
        for second in 1..100 {
            let now = start + Duration::from_secs(second);
            watchdog.beat(0, now);
            assert_eq!(watchdog.last_stall(0, now), None);
        }
        let just_tolerated = start + Duration::from_secs(99 + 3);
        watchdog.beat(0, just_tolerated);
        assert_eq!(watchdog.last_stall(0, just_tolerated), None);
    }

    #[test]
    fn a_beat_late_by_more_than_a_quarter_of_a_lease_is_a_stall_that_ended_then() {
        let start = Instant::now();
        let watchdog = Watchdog::new(LEASE, 2, start);
        let late = start + Duration::from_millis(3_002);
        watchdog.beat(0, late);
        let ended = watchdog.last_stall(0, late + Duration::from_secs(1)).unwrap();
        assert!(late.saturating_duration_since(ended) < Duration::from_millis(2));
        assert_eq!(
            watchdog.last_stall(1, start + Duration::from_secs(1)),
            None,
            "another thread's beats are its own"
        );
    }

    #[test]
    fn whoever_looks_first_after_a_stall_sees_it() {
        let start = Instant::now();
        let watchdog = Watchdog::new(LEASE, 1, start);
        let now = start + Duration::from_secs(20);
        assert!(watchdog.last_stall(0, now).is_some(), "the timer has not run yet");
    }
}
