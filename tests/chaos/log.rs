//! What the clients have done and been told: who read which shard from when to when, and by which grant.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use rsc_protocol::Status;

/// A version and its token: one transition of one history.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Transition {
    pub(crate) version: u64,
    pub(crate) token: String,
}

/// The `OK` that let a client read a shard. Times are of the monotonic clock, in microseconds.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub(crate) transition: Transition,
    pub(crate) fencing_token: u64,
    pub(crate) sent_us: u64,
    pub(crate) received_us: u64,
}

/// One stretch of time in which one run of a client read one shard.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    pub(crate) shard: u32,
    /// Member and run: a restarted client is another reader.
    pub(crate) reader: Arc<str>,
    pub(crate) from_us: u64,
    pub(crate) until_us: u64,
    pub(crate) grant: Grant,
}

/// A transition that a client was told of with an `OK`.
#[derive(Clone, Debug)]
pub(crate) struct Acknowledged {
    pub(crate) first_received_us: u64,
    pub(crate) readers: BTreeSet<Arc<str>>,
    /// Shards that such answers let somebody start.
    pub(crate) grants: usize,
}

/// All that was noted.
#[derive(Default)]
pub(crate) struct Notes {
    pub(crate) readings: Vec<Reading>,
    pub(crate) acknowledged: BTreeMap<Transition, Acknowledged>,
    /// How often each answer came: the status of a heartbeat, the error code of a refusal, `no answer`.
    pub(crate) answers: BTreeMap<String, u64>,
    /// Until when a run could still say something.
    pub(crate) ended: BTreeMap<Arc<str>, u64>,
}

/// Clones are the same log.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Notes>>);

impl Log {
    pub(crate) fn notes(&self) -> MutexGuard<'_, Notes> {
        self.0.lock().unwrap()
    }

    pub(crate) fn read(&self, reading: Reading) {
        if reading.until_us > reading.from_us {
            self.notes().readings.push(reading);
        }
    }

    pub(crate) fn answered(&self, name: &str) {
        *self.notes().answers.entry(name.to_owned()).or_default() += 1;
    }

    /// An answer with `status` was received and acted upon; it let the reader start so many shards.
    pub(crate) fn told(&self, reader: &Arc<str>, status: Status, grant: &Grant, started: usize) {
        if status != Status::Ok {
            return;
        }
        let mut notes = self.notes();
        let told = notes.acknowledged.entry(grant.transition.clone()).or_insert_with(|| Acknowledged {
            first_received_us: grant.received_us,
            readers: BTreeSet::new(),
            grants: 0,
        });
        told.readers.insert(Arc::clone(reader));
        told.grants += started;
    }

    pub(crate) fn ended(&self, reader: &Arc<str>, at_us: u64) {
        self.notes().ended.insert(Arc::clone(reader), at_us);
    }
}
