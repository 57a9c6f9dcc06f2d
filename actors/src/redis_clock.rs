//! The Redis clock measured against the monotonic clock of this process (protocol 2, *time that jumped*).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rsc_protocol::Timestamp;

/// What two undisturbed clocks may drift apart, as a fraction: twice of what NTP corrects at most.
const DRIFT_PER_MILLION: i128 = 1_000;
/// Parts that the observed window is kept in.
const PARTS: u32 = 16;

/// How far the Redis clock was ahead of the monotonic one, at most, around one instant.
#[derive(Clone, Copy, Debug)]
struct Sample {
    first: Instant,
    upper_bound_us: i64,
}

/// Finds out whether Redis time gained more than a tenth of a lease on the monotonic clock within the last
/// lease. Only what is certain counts: the true offset lies between bounds that the round trip sets.
#[derive(Clone, Debug)]
pub(crate) struct RedisClock {
    lease: Duration,
    origin: Instant,
    /// Oldest first; the last one stays however old it gets.
    samples: VecDeque<Sample>,
}

impl RedisClock {
    pub(crate) fn new(lease: Duration, now: Instant) -> Self {
        RedisClock { lease, origin: now, samples: VecDeque::new() }
    }

    /// Takes in that Redis said `redis` in a round trip from `before` to `after`; `true` if time has jumped.
    /// After a jump the new time is the one to compare with.
    pub(crate) fn observe(&mut self, before: Instant, after: Instant, redis: Timestamp) -> bool {
        // Redis told whole milliseconds: its time was in `redis ..= redis + 1 ms`.
        let redis_us = redis.as_millis().saturating_mul(1_000);
        let lower_bound_us = redis_us.saturating_sub(self.since_origin(after));
        let upper_bound_us = redis_us.saturating_add(1_000).saturating_sub(self.since_origin(before));
        let jumped = self.gained_for_certain(after, lower_bound_us);
        if jumped {
            self.samples.clear();
        }
        self.keep(after, upper_bound_us);
        jumped
    }

    fn since_origin(&self, at: Instant) -> i64 {
        // Before the origin only if a caller measured before it made this clock: 0 is then exact enough.
        i64::try_from(at.saturating_duration_since(self.origin).as_micros()).unwrap_or(i64::MAX)
    }

    fn gained_for_certain(&self, now: Instant, lower_bound_us: i64) -> bool {
        let tenth_us = self.lease.as_micros() / 10;
        let allowed = |age: Duration| {
            let drift =
                if age > self.lease { i128::try_from(age.as_micros()).unwrap_or(i128::MAX) } else { 0 };
            i128::try_from(tenth_us).unwrap_or(i128::MAX)
                + drift.saturating_mul(DRIFT_PER_MILLION) / 1_000_000
        };
        self.samples.iter().any(|sample| {
            let gained = i128::from(lower_bound_us) - i128::from(sample.upper_bound_us);
            gained > allowed(now.saturating_duration_since(sample.first))
        })
    }

    fn keep(&mut self, now: Instant, upper_bound_us: i64) {
        match self.samples.back_mut() {
            Some(last) if now.saturating_duration_since(last.first) < self.lease / PARTS => {
                last.upper_bound_us = last.upper_bound_us.min(upper_bound_us);
            }
            _ => self.samples.push_back(Sample { first: now, upper_bound_us }),
        }
        while self.samples.len() > 1
            && self.samples.front().is_some_and(|oldest| {
                now.saturating_duration_since(oldest.first) > self.lease + self.lease / PARTS
            })
        {
            self.samples.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(15);

    struct Bench {
        start: Instant,
        clock: RedisClock,
    }

    impl Bench {
        fn new() -> Self {
            let start = Instant::now();
            Bench { start, clock: RedisClock::new(LEASE, start) }
        }

        /// A round trip of `trip_ms` that ends at `at_ms`, in whose middle Redis is `ahead_ms` ahead.
        fn sees(&mut self, at_ms: u64, trip_ms: u64, ahead_ms: i64) -> bool {
            let at = |ms: u64| self.start + Duration::from_millis(ms);
            let middle = i64::try_from(at_ms - trip_ms / 2).unwrap();
            let redis = Timestamp::from_millis(1_700_000_000_000 + middle + ahead_ms);
            self.clock.observe(at(at_ms - trip_ms), at(at_ms), redis)
        }
    }

    #[test]
    fn a_steady_clock_never_jumps() {
        let mut bench = Bench::new();
        for step in 1..20_000 {
            assert!(!bench.sees(step * 37, step % 30, 0));
        }
        assert!(bench.clock.samples.len() <= 18, "{} samples kept", bench.clock.samples.len());
    }

    #[test]
    fn more_than_a_tenth_of_a_lease_is_a_jump_and_less_is_none() {
        let mut bench = Bench::new();
        assert!(!bench.sees(1_000, 2, 0));
        assert!(!bench.sees(2_000, 2, 1_490));
        let mut bench = Bench::new();
        assert!(!bench.sees(1_000, 2, 0));
        assert!(bench.sees(2_000, 2, 1_510));
        assert!(!bench.sees(3_000, 2, 1_510), "the new time is the one to compare with");
    }

    #[test]
    fn small_steps_within_one_lease_add_up() {
        let mut bench = Bench::new();
        let jumps = (1..=10).filter(|step| {
            let ahead = i64::try_from(*step).unwrap() * 200;
            bench.sees(step * 1_000, 2, ahead)
        });
        assert_eq!(jumps.count(), 1);
    }

    #[test]
    fn small_steps_over_many_leases_are_drift() {
        let mut bench = Bench::new();
        for step in 1..=100_u64 {
            let ahead = i64::try_from(step).unwrap() * 70;
            assert!(!bench.sees(step * 1_000, 2, ahead), "step {step}");
        }
    }

    #[test]
    fn a_slow_round_trip_proves_nothing() {
        let mut bench = Bench::new();
        assert!(!bench.sees(1_000, 2, 0));
        // Redis answered at once and the answer was late: nothing is gained.
        let late = bench.start + Duration::from_millis(6_000);
        let redis = Timestamp::from_millis(1_700_000_000_000 + 1_001);
        assert!(!bench.clock.observe(bench.start + Duration::from_millis(1_000), late, redis));
        // Redis answered at the very end: nothing is gained either.
        let redis = Timestamp::from_millis(1_700_000_000_000 + 11_000);
        assert!(!bench.clock.observe(late, bench.start + Duration::from_millis(11_000), redis));
    }

    #[test]
    fn time_that_runs_backwards_and_returns_has_jumped_once() {
        let mut bench = Bench::new();
        assert!(!bench.sees(1_000, 2, 0));
        assert!(!bench.sees(2_000, 2, -5_000));
        assert!(bench.sees(3_000, 2, 0));
        assert!(!bench.sees(4_000, 2, 0));
    }

    #[test]
    fn an_old_sample_is_compared_with_allowance_for_drift() {
        let hour = 3_600_000;
        let mut bench = Bench::new();
        assert!(!bench.sees(1_000, 2, 0));
        // A thousandth of an hour is 3.6 s, beside the tenth of a lease.
        assert!(!bench.sees(hour, 2, 5_000));
        let mut bench = Bench::new();
        assert!(!bench.sees(1_000, 2, 0));
        assert!(bench.sees(hour, 2, 5_200));
    }
}
