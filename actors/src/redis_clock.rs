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
/// lease, in one jump or in many. The gain between two round trips counts as far as it is certain: from the
/// beginning of the first to the end of the second. That is what the promise needs, as a member counts its lease
/// from before the first, and nobody is granted anything before the second has ended.
///
/// Redis time is taken in the whole milliseconds that records are made of.
#[derive(Clone, Debug)]
pub(crate) struct RedisClock {
    lease: Duration,
    origin: Instant,
    /// Oldest first. Exactly one of them is older than a lease, once there has been one: a jump is measured from
    /// before the oldest lease that still runs, however seldom this actor looks.
    samples: VecDeque<Sample>,
}

impl RedisClock {
    pub(crate) fn new(lease: Duration, now: Instant) -> Self {
        RedisClock { lease, origin: now, samples: VecDeque::new() }
    }

    /// Takes in that Redis said `redis` in a round trip from `before` to `after`; `true` if time has jumped.
    /// After a jump the new time is the one to compare with.
    pub(crate) fn observe(&mut self, before: Instant, after: Instant, redis: Timestamp) -> bool {
        let redis_us = redis.as_millis().saturating_mul(1_000);
        let lower_bound_us = redis_us.saturating_sub(self.since_origin(after));
        let upper_bound_us = redis_us.saturating_sub(self.since_origin(before));
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
        let micros = |length: Duration| i128::try_from(length.as_micros()).unwrap_or(i128::MAX);
        // Drift counts like jumps as long as it cannot be much. An actor that knows of a live member looks once
        // a lease; what it has missed after a longer time is not this clock's to tell.
        let allowed = |age: Duration| {
            let drift = micros(age.saturating_sub(2 * self.lease));
            micros(self.lease) / 10 + drift.saturating_mul(DRIFT_PER_MILLION) / 1_000_000
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
        let is_old = |sample: &Sample| now.saturating_duration_since(sample.first) >= self.lease;
        while self.samples.get(1).is_some_and(is_old) {
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

    /// Nothing happens for six leases, then 90 ms are gained every 500 ms: noticed as soon as that exceeds a tenth
    /// within a lease and somebody looks, and not before.
    #[test]
    fn the_sum_of_small_steps_within_a_lease_stays_under_a_tenth_however_seldom_it_is_looked() {
        let gained = |at: u64| i64::try_from(at.saturating_sub(90_000) / 500).unwrap() * 90;
        for every in [40, 700, 900, 1_000, 3_000, 7_000, 14_000, 15_000, 16_000] {
            let mut bench = Bench::new();
            let noticed = (1..).map(|look| look * every).take_while(|at| *at < 130_000).find(|at| {
                let lately = gained(*at) - gained(at.saturating_sub(15_000));
                let noticed = bench.sees(*at, 0, gained(*at));
                assert!(noticed || lately <= 1_500, "{lately} ms gained at {at}, looked every {every} ms");
                noticed
            });
            let noticed = noticed.unwrap_or_else(|| panic!("never noticed, looked every {every} ms"));
            assert!(gained(noticed) > 1_500, "noticed at {noticed}, looked every {every} ms");
        }
    }

    /// The last look before the first step counts, even if it is long ago: who looks once a lease must not
    /// forget it at the look after.
    #[test]
    fn steps_on_both_sides_of_a_look_add_up() {
        let mut bench = Bench::new();
        assert!(!bench.sees(1_000, 0, 0));
        assert!(!bench.sees(16_000, 0, 1_400), "the first step");
        assert!(!bench.sees(17_500, 0, 1_400), "the first look is more than a lease ago");
        assert!(bench.sees(27_000, 0, 2_800), "the second step, within a lease of the first");
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
        assert!(bench.sees(30_900, 2, 1_510), "none within two leases");
        let mut bench = Bench::new();
        assert!(!bench.sees(1_000, 2, 0));
        assert!(bench.sees(hour, 2, 5_200));
    }
}
