//! The shards' Redis Streams, as far as resharding sees them: ids that increase, cursors and pending entries by
//! consumer group, records deleted and trimmed, keys that come and go.

use std::collections::{BTreeMap, BTreeSet};

use rsc_core::migration::stream::ShardFacts;

/// A consumer group of one stream.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cursor {
    /// The last delivered id.
    pub(crate) delivered: u64,
    /// Records delivered, as `XINFO GROUPS` counts them.
    read: u64,
    /// Delivered and not acknowledged: who has it.
    pub(crate) pending: BTreeMap<u64, usize>,
}

/// One stream.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stream {
    /// Ids of the records that are there.
    pub(crate) records: Vec<u64>,
    added: u64,
    /// By group index.
    pub(crate) groups: BTreeMap<usize, Cursor>,
}

impl Stream {
    fn holds(&self, id: u64) -> bool {
        self.records.binary_search(&id).is_ok()
    }

    /// Whether a record behind this id is there.
    fn has_behind(&self, id: u64) -> bool {
        self.records.last().is_some_and(|last| *last > id)
    }
}

/// How a proof is made; everything `true` but `by_lag` and `ghosts_count` is what the protocol says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProofRules {
    /// Every coordinated group must exist.
    pub(crate) asks_everybody: bool,
    /// `lag` of `XINFO GROUPS` is believed.
    pub(crate) by_lag: bool,
    /// Pending entries whose record is gone count.
    pub(crate) ghosts_count: bool,
}

/// Every shard's stream.
#[derive(Clone, Debug, Default)]
pub(crate) struct Streams {
    /// By shard; a shard without a key has no entry.
    pub(crate) keys: BTreeMap<u32, Stream>,
    last_id: u64,
}

impl Streams {
    /// `XADD NOMKSTREAM`; the new record's id, which no other stream has.
    pub(crate) fn add(&mut self, shard: u32) -> Option<u64> {
        let stream = self.keys.get_mut(&shard)?;
        self.last_id += 1;
        stream.added += 1;
        stream.records.push(self.last_id);
        Some(self.last_id)
    }

    /// `XGROUP CREATE key group 0 MKSTREAM`.
    pub(crate) fn create_group(&mut self, shard: u32, group: usize) {
        self.keys.entry(shard).or_default().groups.entry(group).or_default();
    }

    /// Whether a group exists on a shard.
    #[must_use]
    pub(crate) fn has_group(&self, shard: u32, group: usize) -> bool {
        self.keys.get(&shard).is_some_and(|stream| stream.groups.contains_key(&group))
    }

    /// `XREADGROUP … >`: at most `count` records.
    pub(crate) fn read(&mut self, shard: u32, group: usize, consumer: usize, count: usize) -> Vec<u64> {
        let Some(stream) = self.keys.get_mut(&shard) else { return Vec::new() };
        let Some(cursor) = stream.groups.get_mut(&group) else { return Vec::new() };
        let from = stream.records.partition_point(|id| *id <= cursor.delivered);
        let ids: Vec<u64> = stream.records.iter().skip(from).take(count).copied().collect();
        for id in &ids {
            cursor.delivered = *id;
            cursor.read += 1;
            cursor.pending.insert(*id, consumer);
        }
        ids
    }

    /// What is pending, whoever has it, becomes this consumer's, unless it has it in hand; entries whose record is gone
    /// are dropped if the server does that.
    pub(crate) fn claim(
        &mut self,
        shard: u32,
        group: usize,
        consumer: usize,
        in_hand: Option<&BTreeSet<u64>>,
        drops_ghosts: bool,
    ) -> Vec<u64> {
        let Some(stream) = self.keys.get_mut(&shard) else { return Vec::new() };
        let records = &stream.records;
        let Some(cursor) = stream.groups.get_mut(&group) else { return Vec::new() };
        let has = |id: &u64| in_hand.is_some_and(|ids| ids.contains(id));
        let there = |id: &u64| records.binary_search(id).is_ok();
        if drops_ghosts {
            cursor.pending.retain(|id, _| has(id) || there(id));
        }
        let free = cursor.pending.iter_mut().filter(|(id, _)| !has(id) && there(id));
        free.map(|(id, owner)| {
            *owner = consumer;
            *id
        })
        .collect()
    }

    /// `XACK`.
    pub(crate) fn ack(&mut self, shard: u32, group: usize, id: u64) {
        let cursor = self.keys.get_mut(&shard).and_then(|stream| stream.groups.get_mut(&group));
        if let Some(cursor) = cursor {
            cursor.pending.remove(&id);
        }
    }

    /// `XDEL`.
    pub(crate) fn delete(&mut self, shard: u32, id: u64) {
        if let Some(stream) = self.keys.get_mut(&shard) {
            stream.records.retain(|one| *one != id);
        }
    }

    /// One look at a shard, at one instant (protocol 6, *Drain*).
    #[must_use]
    pub(crate) fn prove(&self, shard: u32, coordinated: &[(usize, String)], rules: ProofRules) -> ShardFacts {
        let Some(stream) = self.keys.get(&shard) else {
            return ShardFacts { is_empty: true, ..ShardFacts::default() };
        };
        let missing = coordinated.iter().filter(|(group, _)| !stream.groups.contains_key(group));
        let missing_groups: Vec<String> =
            if rules.asks_everybody { missing.map(|(_, name)| name.clone()).collect() } else { Vec::new() };
        let done = |cursor: &Cursor| {
            let all_delivered =
                if rules.by_lag { cursor.read >= stream.added } else { !stream.has_behind(cursor.delivered) };
            let waits = |id: &u64| rules.ghosts_count || stream.holds(*id);
            all_delivered && !cursor.pending.keys().any(waits)
        };
        let is_empty = missing_groups.is_empty() && stream.groups.values().all(done);
        ShardFacts { is_empty, exists: true, missing_groups, ..ShardFacts::default() }
    }
}
