//! What an actor remembers between turns. Never the truth: every turn asks Redis whether it still holds.

use std::collections::VecDeque;
use std::time::Instant;

use rsc_core::{Group, Loaded, Stamp, Tombstone};
use rsc_protocol::heartbeat::MAX_COUNTER;
use rsc_protocol::{GroupKey, Timestamp};
use rsc_store::MutexToken;

use crate::service_watch::ServiceWatch;

/// How many tokens of lost answers are remembered; each is of use for one mutex TTL.
const LOST_TOKENS: usize = 8;

/// An actor's memory. A turn owns it while it runs.
#[derive(Debug)]
pub(crate) struct Memory {
    /// The stored state, as last confirmed.
    pub(crate) known: Option<Loaded>,
    /// What was known before it had to be forgotten: the best guess at what a missing key had reached.
    last_known: Option<Loaded>,
    /// The group has been loaded before: it exists.
    pub(crate) exists: bool,
    /// Whether members may be judged.
    pub(crate) watch: ServiceWatch,
    /// Tokens whose last message to Redis got no answer: they may hold the mutex.
    lost_tokens: VecDeque<MutexToken>,
    /// Redis was found to have lost writes, which no decision has recorded yet: the version that had been
    /// reached.
    pub(crate) lost_writes: Option<u64>,
    /// Redis time and the monotonic clock at the same moment, as last seen.
    pub(crate) clock: Option<(Timestamp, Instant)>,
    /// Replicas may not have what is stored: somebody else has written it, or they have not said so in time.
    pub(crate) maybe_unreplicated: bool,
    /// They have not said so in time when they were last waited for.
    pub(crate) replicas_are_short: bool,
    /// How far Redis time was behind the record in the last turn, in milliseconds, if that is worth telling.
    pub(crate) redis_is_behind: Option<i64>,
}

impl Memory {
    pub(crate) fn new(watch: ServiceWatch) -> Self {
        Memory {
            known: None,
            last_known: None,
            exists: false,
            watch,
            lost_tokens: VecDeque::new(),
            lost_writes: None,
            clock: None,
            maybe_unreplicated: true,
            replicas_are_short: false,
            redis_is_behind: None,
        }
    }

    /// What was remembered may not be what is stored.
    pub(crate) fn forget(&mut self) {
        if let Some(known) = self.known.take() {
            self.last_known = Some(known);
        }
    }

    /// The same for a state that a turn has taken out of the memory.
    pub(crate) fn mistrust(&mut self, known: Loaded) {
        self.last_known = Some(known);
    }

    /// The group does not exist; what may come under its name is another one.
    pub(crate) fn forget_group(&mut self) {
        self.known = None;
        self.last_known = None;
        self.lost_writes = None;
        self.watch.group_gone();
        self.exists = false;
    }

    /// The remembered stamp.
    pub(crate) fn stamp(&self) -> Option<&Stamp> {
        self.known.as_ref().map(|known| &known.stamp)
    }

    /// The last state that this actor has seen, stored or not.
    pub(crate) fn last_seen(&self) -> Option<&Loaded> {
        self.known.as_ref().or(self.last_known.as_ref())
    }

    /// The highest version that this actor has seen.
    pub(crate) fn last_seen_version(&self) -> u64 {
        let seen = self.known.iter().chain(&self.last_known);
        seen.map(|loaded| loaded.group.metadata_version).max().unwrap_or(0)
    }

    /// Remembers a token that may hold the mutex although nobody works under it.
    pub(crate) fn lost(&mut self, token: MutexToken) {
        if self.lost_tokens.len() == LOST_TOKENS {
            self.lost_tokens.pop_front();
        }
        self.lost_tokens.push_back(token);
    }

    /// The lost token that holds the mutex, if it is one of them.
    pub(crate) fn lost_token(&self, holder: &str) -> Option<MutexToken> {
        self.lost_tokens.iter().find(|token| token.as_str() == holder).cloned()
    }

    /// Redis time now, as far as is known.
    pub(crate) fn redis_now(&self) -> Option<Timestamp> {
        let (now, at) = self.clock?;
        Some(now.plus(i64::try_from(at.elapsed().as_millis()).unwrap_or(i64::MAX)))
    }

    /// The monotonic instant at which Redis time will be `deadline`, as far as is known.
    pub(crate) fn instant_of(&self, deadline: Timestamp) -> Option<Instant> {
        let (now, at) = self.clock?;
        let ahead = u64::try_from(deadline.since(now)).unwrap_or(0);
        // Redis time is cut to milliseconds on both sides: a tick must not come a moment too early.
        at.checked_add(std::time::Duration::from_millis(ahead.saturating_add(2)))
    }

    /// What a deleted group whose record cannot be read had reached, as far as this actor has seen. Numbers in
    /// such a record that no group can have count for nothing: one created above them could not be read.
    pub(crate) fn tombstone(
        &self,
        group: &GroupKey,
        found: Option<&Stamp>,
        now: Timestamp,
        lease: std::time::Duration,
    ) -> Tombstone {
        let seen = self.last_seen();
        let number = |of: fn(&Group) -> u64| seen.map_or(0, |seen| of(&seen.group));
        let plausible = |number: u64| if number < MAX_COUNTER { number } else { 0 };
        let reached = |of: fn(&Stamp) -> u64| {
            plausible(seen.map_or(0, |seen| of(&seen.stamp))).max(plausible(found.map_or(0, of)))
        };
        Tombstone {
            stream_prefix: group.stream_prefix().to_owned(),
            consumer_group: group.consumer_group().to_owned(),
            group_epoch: plausible(number(|group| group.group_epoch)),
            metadata_version: plausible(
                number(|group| group.metadata_version).max(self.lost_writes.unwrap_or(0)),
            ),
            store_revision: reached(|stamp| stamp.revision),
            live_revision: reached(|stamp| stamp.live_revision),
            deleted_at: now,
            // Who was a member of what cannot be read may be reading until its lease ends.
            reading_until: now.plus(i64::try_from(lease.as_millis()).unwrap_or(i64::MAX)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn numbers_that_no_group_can_have_are_not_handed_down() {
        let memory = Memory::new(ServiceWatch::new(Duration::from_secs(15), Instant::now()));
        let group = GroupKey::new("orders", "billing").unwrap();
        let tombstone = |revision, live_revision| {
            let found = Stamp { revision, live_revision, write_id: String::new() };
            let lease = std::time::Duration::from_secs(15);
            let left = memory.tombstone(&group, Some(&found), Timestamp::default(), lease);
            (left.store_revision, left.live_revision)
        };
        assert_eq!(tombstone(7, 9), (7, 9));
        assert_eq!(tombstone(MAX_COUNTER, 9), (0, 9), "one more could not be read");
        assert_eq!(tombstone(7, u64::MAX), (7, 0));
        assert_eq!(tombstone(MAX_COUNTER - 1, 9), (MAX_COUNTER - 1, 9));
    }
}
