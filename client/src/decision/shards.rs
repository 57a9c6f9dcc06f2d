//! The shards a consumer works on, and how far each one is.

use std::collections::{BTreeMap, BTreeSet};

use rsc_protocol::{AssignedShard, RevokingReport, RevokingState, ShardRef};

/// What is being done with one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Records are read.
    Reading,
    /// No new reads; what is in flight is being finished. Never read again before a later `OK` names it.
    Draining {
        /// Records handed to the application and not acknowledged yet, as last told.
        in_flight: u64,
    },
    /// Nothing is in flight any more; reported until an answer shows that the coordinator knows.
    Drained,
}

/// What an answer makes of the shards.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) started: Vec<AssignedShard>,
    pub(crate) drained: Vec<u32>,
}

/// Every shard the consumer has anything to do with.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shards {
    work: BTreeMap<u32, Work>,
}

impl Shards {
    /// `OK`: the assignment is what is read from now on; the rest is drained.
    pub(crate) fn apply(&mut self, assigned: &[AssignedShard], reported: &BTreeSet<u32>) -> Changes {
        let mut changes = self.cut_to(assigned, reported);
        for shard in assigned {
            if self.work.insert(shard.shard_index, Work::Reading) != Some(Work::Reading) {
                changes.started.push(*shard);
            }
        }
        changes
    }

    /// Keeps reading only what is read and assigned, drains the rest, starts nothing; forgets the finished
    /// drains that the answered request had reported.
    pub(crate) fn cut_to(&mut self, assigned: &[AssignedShard], reported: &BTreeSet<u32>) -> Changes {
        self.work.retain(|shard, work| *work != Work::Drained || !reported.contains(shard));
        let is_assigned = |shard: u32| assigned.iter().any(|one| one.shard_index == shard);
        let drained = self.drain_where(|shard| !is_assigned(shard));
        Changes { started: Vec::new(), drained }
    }

    /// Begins to drain everything that is read.
    pub(crate) fn drain_all(&mut self) -> Vec<u32> {
        self.drain_where(|_| true)
    }

    fn drain_where(&mut self, which: impl Fn(u32) -> bool) -> Vec<u32> {
        let mut drained = Vec::new();
        for (shard, work) in &mut self.work {
            if *work == Work::Reading && which(*shard) {
                // Until the shell has told, one record counts as in flight.
                *work = Work::Draining { in_flight: 1 };
                drained.push(*shard);
            }
        }
        drained
    }

    /// The shell tells how many records a draining shard still has in flight; 0 ends the drain. `true` if
    /// one ended.
    pub(crate) fn progress(&mut self, shard: u32, in_flight: u64) -> bool {
        match self.work.get_mut(&shard) {
            Some(work @ Work::Draining { .. }) => {
                *work = if in_flight == 0 { Work::Drained } else { Work::Draining { in_flight } };
                in_flight == 0
            }
            _ => false,
        }
    }

    /// Forgets everything; returns what was not finished.
    pub(crate) fn abandon(&mut self) -> Vec<u32> {
        let unfinished = self.in_use().collect();
        self.work.clear();
        unfinished
    }

    /// Shards that are read or still have records in flight.
    pub(crate) fn in_use(&self) -> impl Iterator<Item = u32> + '_ {
        self.work.iter().filter(|(_, work)| **work != Work::Drained).map(|(shard, _)| *shard)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, Work)> + '_ {
        self.work.iter().map(|(shard, work)| (*shard, *work))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.work.is_empty()
    }

    /// Shards for `ownedShards`.
    pub(crate) fn owned(&self) -> Vec<ShardRef> {
        self.iter()
            .filter(|(_, work)| *work == Work::Reading)
            .map(|(shard_index, _)| ShardRef { shard_index })
            .collect()
    }

    /// Rows for `revokingShards`.
    pub(crate) fn revoking(&self) -> Vec<RevokingReport> {
        self.iter()
            .filter_map(|(shard_index, work)| {
                let (state, in_flight) = match work {
                    Work::Reading => return None,
                    Work::Draining { in_flight } => (RevokingState::Draining, in_flight),
                    Work::Drained => (RevokingState::Revoked, 0),
                };
                Some(RevokingReport { shard: ShardRef { shard_index }, state, in_flight, acked_at: None })
            })
            .collect()
    }

    /// Shards that a request built now reports as given back.
    pub(crate) fn drained(&self) -> BTreeSet<u32> {
        self.iter().filter(|(_, work)| *work == Work::Drained).map(|(shard, _)| shard).collect()
    }
}
