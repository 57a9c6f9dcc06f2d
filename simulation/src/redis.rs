//! Redis as far as a group sees it: one hash of texts, one mutex, one clock, and a past to fall back to.

use std::rc::Rc;

use rsc_core::{Group, RawFields, Stamp, Write, WriteKind};
use rsc_protocol::Timestamp;

/// Redis time when a run begins.
pub(crate) const EPOCH: i64 = 1_800_000_000_000;

/// One stored state.
#[derive(Debug)]
pub(crate) struct Snapshot {
    /// The hash.
    pub(crate) fields: RawFields,
    /// Its stamp.
    pub(crate) stamp: Stamp,
    /// What was decided, to compare with what loads.
    pub(crate) group: Group,
}

/// What *enter* returns.
#[derive(Clone, Debug)]
pub(crate) enum Entered {
    /// Somebody else holds the mutex.
    Busy,
    /// The record is the remembered one.
    Unchanged,
    /// Another record.
    Loaded(Rc<Snapshot>),
    /// No key.
    Missing,
}

/// What *commit* returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Committed {
    /// Written.
    Applied(Stamp),
    /// Certainly not written.
    Conflict(&'static str),
}

/// The server.
#[derive(Debug, Default)]
pub(crate) struct Redis {
    /// What is stored; `None`: there is no key.
    pub(crate) stored: Option<Rc<Snapshot>>,
    /// Every state that was ever stored, oldest first, the present one excluded.
    pub(crate) past: Vec<Rc<Snapshot>>,
    /// Token and end (Redis time).
    mutex: Option<(String, i64)>,
    /// What Redis time is ahead of the time of the simulation.
    pub(crate) ahead: i64,
    writes: u64,
}

impl Redis {
    /// Redis time at the simulated instant `at`.
    #[must_use]
    pub(crate) fn time(&self, at: i64) -> i64 {
        EPOCH + at + self.ahead
    }

    /// The script *enter*.
    pub(crate) fn enter(
        &mut self,
        at: i64,
        token: &str,
        takeover: &[String],
        remembered: Option<&Stamp>,
        ttl: i64,
        compare_write_id: bool,
    ) -> Entered {
        let now = self.time(at);
        if let Some((holder, until)) = &self.mutex
            && *until > now
            && !takeover.contains(holder)
        {
            return Entered::Busy;
        }
        self.mutex = Some((token.to_owned(), now + ttl));
        match &self.stored {
            None => Entered::Missing,
            Some(snapshot)
                if remembered.is_some_and(|stamp| same(stamp, &snapshot.stamp, compare_write_id)) =>
            {
                Entered::Unchanged
            }
            Some(snapshot) => Entered::Loaded(Rc::clone(snapshot)),
        }
    }

    /// The script *commit*. `decided` is the group that `write` was made of.
    #[expect(clippy::too_many_arguments, reason = "what the script is given, and what is left out")]
    pub(crate) fn commit(
        &mut self,
        at: i64,
        token: &str,
        expected: &Stamp,
        write: &Write,
        decided: &Group,
        compare_write_id: bool,
        checked: bool,
    ) -> Committed {
        let now = self.time(at);
        let holds_mutex = self.mutex.as_ref().is_some_and(|(holder, until)| holder == token && *until > now);
        if !holds_mutex && checked {
            return Committed::Conflict("mutex lost");
        }
        let Some(before) = self.stored.clone() else {
            self.release(token);
            return Committed::Conflict("missing");
        };
        if checked && !same(expected, &before.stamp, compare_write_id) {
            self.release(token);
            return Committed::Conflict("moved");
        }
        let mut fields = before.fields.clone();
        let stamp = self.write(&mut fields, &before.stamp, write);
        self.past.push(before);
        self.stored = Some(Rc::new(Snapshot { fields, stamp: stamp.clone(), group: decided.clone() }));
        self.release(token);
        Committed::Applied(stamp)
    }

    fn write(&mut self, fields: &mut RawFields, before: &Stamp, write: &Write) -> Stamp {
        self.writes += 1;
        let mut stamp = Stamp {
            revision: before.revision,
            live_revision: before.live_revision + 1,
            write_id: format!("write-{}", self.writes),
        };
        let mut set = |field: &str, value: String| {
            fields.insert(field.to_owned(), value.into_bytes());
        };
        if let WriteKind::Structural { aggregate, revision } = &write.kind {
            stamp.revision = *revision;
            set("aggregate", aggregate.clone());
            set("revision", revision.to_string());
            set("schemaVersion", rsc_protocol::SCHEMA_VERSION.to_string());
            set("layoutVersion", rsc_protocol::LAYOUT_VERSION.to_string());
        }
        set("updatedAt", write.updated_at.to_string());
        set("writeId", stamp.write_id.clone());
        set("liveRevision", stamp.live_revision.to_string());
        for (id, live) in &write.live {
            set(&format!("live:{id}"), live.clone());
        }
        for id in &write.removed_live {
            fields.remove(&format!("live:{id}"));
        }
        stamp
    }

    /// Creates the key.
    pub(crate) fn create(&mut self, write: &Write, group: &Group) {
        let mut fields = RawFields::new();
        let stamp = self.write(&mut fields, &Stamp::default(), write);
        self.stored = Some(Rc::new(Snapshot { fields, stamp, group: group.clone() }));
    }

    /// Gives the mutex back if `token` holds it.
    pub(crate) fn release(&mut self, token: &str) {
        if self.mutex.as_ref().is_some_and(|(holder, _)| holder == token) {
            self.mutex = None;
        }
    }

    /// Falls back to the state `writes` writes ago; mutexes are lost with it. `None`: there is no such past.
    pub(crate) fn roll_back(&mut self, writes: usize) -> Option<Rc<Snapshot>> {
        if self.past.is_empty() || self.stored.is_none() {
            return None;
        }
        let keep = self.past.len().saturating_sub(writes);
        let found = self.past.drain(keep..).next()?;
        self.mutex = None;
        self.stored.replace(found)
    }

    /// The key is gone; returns what it held.
    pub(crate) fn lose_key(&mut self) -> Option<Rc<Snapshot>> {
        self.mutex = None;
        self.stored.take()
    }

    /// The key comes back with `snapshot`.
    pub(crate) fn restore(&mut self, snapshot: Rc<Snapshot>) {
        self.stored = Some(snapshot);
    }

    /// Redis time as a timestamp.
    #[must_use]
    pub(crate) fn timestamp(&self, at: i64) -> Timestamp {
        Timestamp::from_millis(self.time(at))
    }
}

fn same(one: &Stamp, other: &Stamp, compare_write_id: bool) -> bool {
    one.revision == other.revision
        && one.live_revision == other.live_revision
        && (one.write_id == other.write_id || !compare_write_id)
}
