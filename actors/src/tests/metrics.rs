//! Reads counters back: one recorder for the whole test process, so a test asks whether a number grew.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

static COUNTERS: Mutex<BTreeMap<String, Arc<AtomicU64>>> = Mutex::new(BTreeMap::new());

struct Counters;

impl Recorder for Counters {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let mut name = key.name().to_owned();
        for label in key.labels() {
            name.push_str(&format!(" {}={}", label.key(), label.value()));
        }
        Counter::from_arc(COUNTERS.lock().unwrap().entry(name).or_default().clone())
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

/// Begins to record, if that has not begun.
pub(crate) fn record() {
    static RECORDING: OnceLock<()> = OnceLock::new();
    RECORDING.get_or_init(|| metrics::set_global_recorder(Counters).ok().unwrap());
}

/// A counter with its labels (`name label=value`); other tests may count into it too.
pub(crate) fn counter(name: &str) -> u64 {
    COUNTERS.lock().unwrap().get(name).map_or(0, |counter| counter.load(Ordering::SeqCst))
}
