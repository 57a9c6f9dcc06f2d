//! Every record that Redis ever took, and what became of it: what "no record is lost" is checked against.

use std::collections::BTreeMap;
use std::ops::Range;

use super::streams::Streams;

/// Groups fit into one set of bits.
type Groups = u8;

fn bit(group: usize) -> Groups {
    1 << group
}

/// One record.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    /// Its shard.
    pub(crate) shard: u32,
    /// When Redis took it.
    pub(crate) added_at: i64,
    /// Which producer sent it.
    pub(crate) producer: usize,
    /// Deleted or trimmed by somebody who wanted that.
    is_gone: bool,
    /// Groups that need not read it, or have acknowledged it.
    settled: Groups,
}

/// Shards that no group's record names any more, because Redis lost the activation of all of them (protocol 5, *What
/// remains*).
#[derive(Clone, Debug)]
pub(crate) struct Forgotten {
    /// The shards it added.
    pub(crate) shards: Range<u32>,
    /// When it was first activated.
    pub(crate) since: i64,
    /// When the last producer that was told of it stops.
    pub(crate) until: i64,
}

/// The ledger.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    records: BTreeMap<u64, Record>,
    groups: Groups,
    /// What is documented to remain.
    pub(crate) forgotten: Vec<Forgotten>,
}

impl Ledger {
    /// A group is there from now on: of what has been written it owes what is in the shards it begins with.
    pub(crate) fn add_group(&mut self, group: usize, count: u32, streams: &Streams) {
        self.groups |= bit(group);
        for (id, record) in &mut self.records {
            let is_there = record.shard < count
                && streams.keys.get(&record.shard).is_some_and(|stream| stream.records.contains(id));
            if !is_there {
                record.settled |= bit(group);
            }
        }
    }

    /// Redis took a record.
    pub(crate) fn added(&mut self, id: u64, shard: u32, producer: usize, at: i64) {
        self.records.insert(id, Record { shard, added_at: at, producer, is_gone: false, settled: 0 });
    }

    /// A group has acknowledged a record.
    pub(crate) fn acknowledged(&mut self, id: u64, group: usize) {
        if let Some(record) = self.records.get_mut(&id) {
            record.settled |= bit(group);
        }
    }

    /// Somebody deleted or trimmed it.
    pub(crate) fn deleted(&mut self, id: u64) {
        if let Some(record) = self.records.get_mut(&id) {
            record.is_gone = true;
        }
    }

    /// Records that some group still owes, with the groups.
    pub(crate) fn open(&self) -> impl Iterator<Item = (u64, &Record, Vec<usize>)> {
        self.records.iter().filter_map(|(id, record)| {
            let owed = self.groups & !record.settled;
            let open = !record.is_gone && owed != 0;
            let groups = (0..8).filter(|group| owed & bit(*group) != 0);
            open.then(|| (*id, record, groups.collect()))
        })
    }

    /// The same, of one shard.
    pub(crate) fn open_in(&self, shard: u32) -> impl Iterator<Item = (u64, Vec<usize>)> {
        self.open().filter(move |(_, record, _)| record.shard == shard).map(|(id, _, groups)| (id, groups))
    }

    /// Whether a record that nobody reads is one of those that are documented to remain.
    #[must_use]
    pub(crate) fn is_forgotten(&self, record: &Record) -> bool {
        self.forgotten.iter().any(|forgotten| {
            forgotten.shards.contains(&record.shard)
                && (forgotten.since..=forgotten.until).contains(&record.added_at)
        })
    }

    /// How many there were.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        self.records.len()
    }
}
