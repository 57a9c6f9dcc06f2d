//! The one source of chance.

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

/// A generator that one seed decides completely.
#[derive(Debug)]
pub(crate) struct Dice(Pcg64Mcg);

impl Dice {
    /// The generator of `seed`.
    #[must_use]
    pub(crate) fn new(seed: u64) -> Self {
        Dice(Pcg64Mcg::seed_from_u64(seed))
    }

    /// `true` with the given probability.
    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        self.0.random_range(0.0..1.0) < probability
    }

    /// A number of `low..high`; `low` where that is empty.
    pub(crate) fn between(&mut self, low: i64, high: i64) -> i64 {
        if low >= high { low } else { self.0.random_range(low..high) }
    }

    /// An index below `length`, which is at least 1.
    pub(crate) fn below(&mut self, length: usize) -> usize {
        self.0.random_range(0..length.max(1))
    }

    /// One of the weighted choices; the weights are not all 0.
    pub(crate) fn weighted<T: Copy>(&mut self, choices: &[(u32, T)]) -> Option<T> {
        let total: u32 = choices.iter().map(|(weight, _)| weight).sum();
        if total == 0 {
            return None;
        }
        let mut at = self.0.random_range(0..total);
        for (weight, choice) in choices {
            if at < *weight {
                return Some(*choice);
            }
            at -= weight;
        }
        None
    }
}
