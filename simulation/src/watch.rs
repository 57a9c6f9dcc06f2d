//! Whether an actor may judge and grant (protocol 4.1.1, 2): the rules of `rsc-actors`' service watch and
//! Redis clock, on simulated milliseconds.

use rsc_core::{Stamp, is_successor};

/// What one actor knows about its own right to judge.
#[derive(Clone, Debug)]
pub(crate) struct Watch {
    lease: i64,
    judges_from: i64,
    grants_from: i64,
    trying_since: Option<i64>,
    own_commit: Option<(Stamp, i64)>,
    seen: Option<Stamp>,
    key_was_missing: bool,
    /// Planted: only its own commits tell an actor what was lost.
    pub(crate) sees_itself_only: bool,
    /// First seen at, and how far Redis time was ahead at most.
    samples: Vec<(i64, i64)>,
    /// When the first sample was taken.
    pub(crate) first_sample: Option<i64>,
}

impl Watch {
    /// An actor that has just started.
    #[must_use]
    pub(crate) fn new(lease: i64, now: i64) -> Self {
        Watch {
            lease,
            judges_from: now + lease,
            grants_from: now,
            trying_since: None,
            own_commit: None,
            seen: None,
            key_was_missing: false,
            sees_itself_only: false,
            samples: Vec::new(),
            first_sample: None,
        }
    }

    fn out_of_service(&mut self, now: i64) {
        self.judges_from = self.judges_from.max(now + self.lease);
    }

    /// A turn begins.
    pub(crate) fn turn_began(&mut self, now: i64) {
        self.trying_since.get_or_insert(now);
    }

    /// A turn came to its end at the store.
    pub(crate) fn turn_finished(&mut self) {
        self.trying_since = None;
    }

    /// The store answered, in a round trip from `before` to `now`, that Redis time is `redis`.
    pub(crate) fn entered(&mut self, before: i64, now: i64, redis: i64, notices_jumps: bool) {
        if self.trying_since.is_some_and(|since| now - since >= self.lease / 2) {
            self.trying_since = Some(now);
            self.out_of_service(now);
        }
        let (lower, upper) = (redis - now, redis - before);
        let jumped = self.samples.iter().any(|(first, ahead)| {
            let drift = (now - first - 2 * self.lease).max(0) / 1_000;
            lower - ahead > self.lease / 10 + drift
        });
        if jumped && notices_jumps {
            self.samples.clear();
            self.grants_from = self.grants_from.max(now + self.lease);
            self.out_of_service(now);
        }
        self.first_sample.get_or_insert(now);
        match self.samples.last_mut() {
            Some((first, ahead)) if now - *first < self.lease / 16 => *ahead = (*ahead).min(upper),
            _ => self.samples.push((now, upper)),
        }
        while self.samples.get(1).is_some_and(|(first, _)| now - first >= self.lease) {
            self.samples.remove(0);
        }
    }

    /// The process did not run for `length` until `now`.
    pub(crate) fn stalled(&mut self, length: i64, now: i64) {
        if length > self.lease / 4 {
            self.out_of_service(now);
        }
    }

    /// The record was found with this stamp; `true`: it is no successor of what this actor has committed or seen.
    pub(crate) fn found(&mut self, now: i64, stamp: &Stamp, judges_itself: bool) -> bool {
        let came_back = std::mem::take(&mut self.key_was_missing);
        let own = self.own_commit.as_ref().map(|(own, _)| own);
        let known = if self.sees_itself_only { own } else { self.seen.as_ref() };
        let lost = known.is_some_and(|known| !is_successor(stamp, known));
        if lost {
            self.own_commit = None;
            self.seen = Some(stamp.clone());
        } else {
            self.saw(now, stamp);
        }
        if (lost || came_back) && judges_itself {
            self.out_of_service(now);
        }
        lost
    }

    /// The supervisor saw this state stored.
    pub(crate) fn sighted(&mut self, at: i64, stamp: &Stamp) {
        if self.seen.as_ref().is_some_and(|seen| is_successor(stamp, seen)) {
            self.saw(at, stamp);
        }
    }

    fn saw(&mut self, at: i64, stamp: &Stamp) {
        let is_news = self.seen.as_ref().is_some_and(|seen| seen != stamp);
        let own = self.own_commit.as_ref();
        let is_own = own.is_some_and(|(own, _)| own == stamp);
        let is_idle = own.is_none_or(|(_, made)| at - made > self.lease);
        if is_news && !is_own && is_idle && !self.sees_itself_only {
            self.judges_from = self.judges_from.max(at + self.lease + self.lease / 3);
        }
        self.seen = Some(stamp.clone());
    }

    /// There is no key.
    pub(crate) fn key_missing(&mut self) {
        self.key_was_missing = true;
    }

    /// This actor's own write was applied.
    pub(crate) fn committed(&mut self, now: i64, stamp: &Stamp) {
        self.own_commit = Some((stamp.clone(), now));
        self.seen = Some(stamp.clone());
    }

    /// Whether members may be expired, fenced for slowness and pruned.
    #[must_use]
    pub(crate) fn may_expire(&self, now: i64) -> bool {
        now >= self.judges_from
    }

    /// Whether something new may be granted.
    #[must_use]
    pub(crate) fn may_grant(&self, now: i64) -> bool {
        now >= self.grants_from
    }

    /// From when on members may be expired.
    #[must_use]
    pub(crate) fn in_service_from(&self) -> i64 {
        self.judges_from
    }
}
