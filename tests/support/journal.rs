//! Who read which shard from when to when, and whether two did at once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// A moment of the system's monotonic clock in microseconds: the same for every process on this machine.
pub(crate) fn monotonic_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap() * 1_000_000 + u64::try_from(now.tv_nsec).unwrap() / 1_000
}

/// One stretch of time in which one run of a consumer read one shard.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    pub(crate) shard: u32,
    /// Member and run: a restarted consumer is another reader.
    pub(crate) reader: String,
    pub(crate) from_us: u64,
    pub(crate) until_us: u64,
}

/// Two readers of one shard at the same time.
#[derive(Clone, Debug)]
pub(crate) struct DoubleReading {
    pub(crate) first: Reading,
    pub(crate) second: Reading,
    pub(crate) overlap_us: u64,
}

/// Everything that was read in a test. Clones are the same journal.
#[derive(Clone, Default)]
pub(crate) struct Journal(Arc<Mutex<Vec<Reading>>>);

impl Journal {
    fn readings(&self) -> MutexGuard<'_, Vec<Reading>> {
        self.0.lock().unwrap()
    }

    /// Notes that a stretch of reading has come to its end.
    pub(crate) fn note(&self, reading: Reading) {
        if reading.until_us > reading.from_us {
            self.readings().push(reading);
        }
    }

    /// How many stretches were noted.
    pub(crate) fn len(&self) -> usize {
        self.readings().len()
    }

    /// Every pair that overlaps by more than `tolerated_us`.
    pub(crate) fn double_readings(&self, tolerated_us: u64) -> Vec<DoubleReading> {
        let mut by_shard: BTreeMap<u32, Vec<Reading>> = BTreeMap::new();
        for reading in self.readings().iter() {
            by_shard.entry(reading.shard).or_default().push(reading.clone());
        }
        let mut found = Vec::new();
        for readings in by_shard.values_mut() {
            readings.sort_by_key(|reading| (reading.from_us, reading.until_us));
            for (index, first) in readings.iter().enumerate() {
                for second in &readings[index + 1..] {
                    if second.from_us >= first.until_us {
                        break;
                    }
                    let overlap_us = first.until_us.min(second.until_us) - second.from_us;
                    if first.reader != second.reader && overlap_us > tolerated_us {
                        found.push(DoubleReading {
                            first: first.clone(),
                            second: second.clone(),
                            overlap_us,
                        });
                    }
                }
            }
        }
        found
    }

    /// Fails when a shard was read by two at once. Redis tells time in whole milliseconds: that much is
    /// nobody's fault.
    pub(crate) fn expect_one_reader_at_a_time(&self) {
        let found = self.double_readings(1_000);
        assert!(found.is_empty(), "{} shards were read by two at once: {found:#?}", found.len());
    }
}
