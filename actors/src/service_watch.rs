//! Whether this instance may judge the members of a group: *out of service*, protocol 4.1 rule 1.
//!
//! A stall of the process, an outage of Redis or a rollback of its data must not cost every member its place.
//! While one lasts and for one lease after it nobody is expired, fenced for slowness or pruned; after a jump of
//! Redis time nothing new is granted for that lease either.

use std::time::{Duration, Instant};

use rsc_core::Stamp;
use rsc_core::succession::is_successor;
use rsc_protocol::Timestamp;

use crate::redis_clock::RedisClock;

/// Why an instance went out of service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutOfService {
    /// The process, or the thread of this actor, did not run for more than a quarter of a lease.
    Stalled,
    /// For half a lease no turn could be finished.
    NoTurn,
    /// Redis time jumped forward.
    TimeJumped,
    /// The record is older than what this actor has committed or seen.
    OlderRecord,
    /// The key was gone and came back.
    KeyCameBack,
    /// A correction round began, or one is on that is younger than a lease.
    CorrectionRound,
}

impl OutOfService {
    pub(crate) fn label(self) -> &'static str {
        match self {
            OutOfService::Stalled => "stalled",
            OutOfService::NoTurn => "no_turn",
            OutOfService::TimeJumped => "time_jumped",
            OutOfService::OlderRecord => "older_record",
            OutOfService::KeyCameBack => "key_came_back",
            OutOfService::CorrectionRound => "correction_round",
        }
    }
}

/// What one actor knows about its own right to judge. Pure: every instant is given to it.
#[derive(Clone, Debug)]
pub(crate) struct ServiceWatch {
    lease: Duration,
    /// From here on members may be expired.
    judges_from: Instant,
    /// From here on shards may be granted.
    grants_from: Instant,
    /// The first of the turns since which none has finished.
    trying_since: Option<Instant>,
    /// The latest stall that has been taken into account.
    stall: Option<Instant>,
    /// This actor's last commit, and when it was made.
    own_commit: Option<(Stamp, Instant)>,
    /// The latest state that this actor, or the supervisor for it, has seen stored.
    seen: Option<Stamp>,
    key_was_missing: bool,
    clock: RedisClock,
}

impl ServiceWatch {
    /// An actor that has just started: out of service for one lease.
    pub(crate) fn new(lease: Duration, now: Instant) -> Self {
        ServiceWatch {
            lease,
            judges_from: now + lease,
            grants_from: now,
            trying_since: None,
            stall: None,
            own_commit: None,
            seen: None,
            key_was_missing: false,
            clock: RedisClock::new(lease, now),
        }
    }

    fn out_of_service(&mut self, until_now: Instant, why: OutOfService) -> OutOfService {
        self.judges_from = self.judges_from.max(until_now + self.lease);
        why
    }

    /// A turn begins: from now on this actor tries to finish one.
    pub(crate) fn turn_began(&mut self, now: Instant) {
        self.trying_since.get_or_insert(now);
    }

    /// The turn reached the store and came to an end there.
    pub(crate) fn turn_finished(&mut self) {
        self.trying_since = None;
    }

    /// The store has answered at last: did that take half a lease or more?
    pub(crate) fn entered(&mut self, now: Instant) -> Option<OutOfService> {
        let tried = now.saturating_duration_since(self.trying_since?);
        if tried < self.lease / 2 {
            return None;
        }
        // The time spent is accounted for; the rest of this turn counts anew.
        self.trying_since = Some(now);
        Some(self.out_of_service(now, OutOfService::NoTurn))
    }

    /// The process stalled last until `ended`.
    pub(crate) fn stalled(&mut self, ended: Option<Instant>) -> Option<OutOfService> {
        let ended = ended.filter(|ended| self.stall.is_none_or(|known| known < *ended))?;
        self.stall = Some(ended);
        Some(self.out_of_service(ended, OutOfService::Stalled))
    }

    /// Redis said that it is `redis`, in a round trip from `before` to `after`.
    pub(crate) fn redis_time(
        &mut self,
        before: Instant,
        after: Instant,
        redis: Timestamp,
    ) -> Option<OutOfService> {
        if !self.clock.observe(before, after, redis) {
            return None;
        }
        self.grants_from = self.grants_from.max(after + self.lease);
        Some(self.out_of_service(after, OutOfService::TimeJumped))
    }

    /// The record was found with this stamp. No successor of what this actor has committed or seen before: Redis lost
    /// writes.
    pub(crate) fn found(&mut self, now: Instant, stamp: &Stamp) -> Option<OutOfService> {
        let came_back = std::mem::take(&mut self.key_was_missing);
        if self.seen.as_ref().is_some_and(|seen| !is_successor(stamp, seen)) {
            self.own_commit = None;
            self.seen = Some(stamp.clone());
            return Some(self.out_of_service(now, OutOfService::OlderRecord));
        }
        self.saw(now, stamp);
        came_back.then(|| self.out_of_service(now, OutOfService::KeyCameBack))
    }

    /// The supervisor saw this state stored, at `at`. Nothing, if it is older than what is known by now.
    pub(crate) fn sighted(&mut self, at: Instant, stamp: &Stamp) {
        if self.seen.as_ref().is_some_and(|seen| is_successor(stamp, seen)) {
            self.saw(at, stamp);
        }
    }

    /// While another instance serves the group and this one commits nothing, Redis can lose many of the other's
    /// lease renewals, and what is left looks to this one like what it has always known. So it judges nobody before
    /// a lease has passed since the other was last seen at work, and the time in which it may have gone on unseen.
    fn saw(&mut self, at: Instant, stamp: &Stamp) {
        let is_news = self.seen.as_ref().is_some_and(|seen| seen != stamp);
        let own = self.own_commit.as_ref();
        let is_own = own.is_some_and(|(own, _)| own == stamp);
        let is_idle = own.is_none_or(|(_, made)| at.saturating_duration_since(*made) > self.lease);
        if is_news && !is_own && is_idle {
            self.judges_from = self.judges_from.max(at + self.lease + look_interval(self.lease));
        }
        self.seen = Some(stamp.clone());
    }

    /// A correction round is on that is younger than one lease. `Some` when that is news.
    pub(crate) fn young_round(&mut self, now: Instant) -> Option<OutOfService> {
        let is_news = self.may_expire(now);
        let why = self.out_of_service(now, OutOfService::CorrectionRound);
        is_news.then_some(why)
    }

    /// The key is gone.
    pub(crate) fn key_missing(&mut self) {
        self.key_was_missing = true;
    }

    /// The group does not exist: what comes under its name succeeds nothing.
    pub(crate) fn group_gone(&mut self) {
        self.own_commit = None;
        self.seen = None;
        self.key_was_missing = false;
    }

    /// This actor's own write was applied.
    pub(crate) fn committed(&mut self, now: Instant, stamp: &Stamp) {
        self.own_commit = Some((stamp.clone(), now));
        self.seen = Some(stamp.clone());
    }

    /// Whether members may be expired, fenced for slowness and pruned.
    pub(crate) fn may_expire(&self, now: Instant) -> bool {
        now >= self.judges_from
    }

    /// Whether something new may be granted.
    pub(crate) fn may_grant(&self, now: Instant) -> bool {
        now >= self.grants_from
    }

    /// From when on members may be expired, as things stand.
    pub(crate) fn in_service_from(&self) -> Instant {
        self.judges_from
    }
}

/// How often an instance looks at what others record in a group that it does not serve itself: a third of a lease, so
/// that no loss of more than that goes unnoticed.
pub(crate) fn look_interval(lease: Duration) -> Duration {
    lease / 3
}

#[cfg(test)]
#[path = "service_watch_tests.rs"]
mod tests;
