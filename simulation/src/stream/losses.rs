//! Redis loses writes of one group or of all, or a key for a while; and what of that is documented to remain.

use std::collections::BTreeSet;

use super::ledger::Forgotten;
use super::world::{Event, StreamWorld};

/// What the records of all groups say together.
#[derive(Debug, Default)]
struct Known {
    /// Migrations that were activated, with the counts before and after.
    activated: BTreeSet<(String, u32, u32)>,
    /// Removed shards whose deletion has begun, by migration.
    deleting: BTreeSet<(String, u32)>,
}

impl StreamWorld {
    /// What records know: migrations that were activated, and removed shards whose deletion has begun.
    fn known(&self) -> Known {
        let mut known = Known::default();
        let stored = self
            .groups
            .iter()
            .filter_map(|group| group.redis.stored.as_ref().or(group.restored_with.as_ref()));
        for (id, migration) in stored.flat_map(|stored| stored.group.migrations.iter()) {
            if migration.activated_at.is_some() {
                let (from, to) = (migration.from_shard_count, migration.to_shard_count);
                known.activated.insert((id.clone(), from, to));
            }
            if migration.deleting {
                known.deleting.extend(migration.retired.iter().map(|shard| (id.clone(), shard)));
            }
        }
        known
    }

    /// Redis loses something; what no record knows any more afterwards is what is documented to remain.
    pub(super) fn lose(&mut self, loss: impl FnOnce(&mut Self)) {
        let before = self.known();
        loss(self);
        self.losses += 1;
        let after = self.known();
        // Whoever asked before the loss may use the lost count for a cache lease.
        let until = self.at + self.shape.cache + self.shape.flight;
        for (id, from, to) in before.activated.difference(&after.activated) {
            let since = self.activated_at.get(id).copied().unwrap_or(0);
            self.tell(|_| format!("no record knows the activation of {id} ({from} to {to}) any more"));
            self.ledger.forgotten.push(Forgotten { shards: *from..*to, since, until });
        }
        for (id, shard) in before.deleting.difference(&after.deleting) {
            self.tell(|_| format!("no record knows any more that {id} deletes shard {shard}"));
            self.undone.push(*shard);
        }
    }

    pub(super) fn roll_back(&mut self, group: usize, writes: usize) {
        let record = &mut self.groups[group];
        if writes == 0 || !record.is_admitted {
            return;
        }
        if let Some(lost) = record.redis.roll_back(writes) {
            record.replaced_at.truncate(record.redis.past.len());
            self.tell(|world| {
                let stored = world.groups[group].redis.stored.as_ref();
                let now = stored.map(|stored| (stored.group.metadata_version, stored.group.shard_count));
                format!(
                    "REDIS LOSES {writes} writes of {}: v{} -> {now:?}",
                    world.name(group),
                    lost.group.metadata_version
                )
            });
        }
    }

    /// The key goes; it comes back as it was, or as it was some time ago.
    pub(super) fn lose_key(&mut self, group: usize) {
        if !self.groups[group].is_admitted {
            return;
        }
        let record = &mut self.groups[group];
        let Some(lost) = record.redis.lose_key() else { return };
        let past = record.redis.past.len();
        let back = if self.dice.chance(0.5) { 0 } else { self.dice.below(past.min(30) + 1) };
        let snapshot = if back == 0 { lost } else { self.groups[group].redis.past[past - back].clone() };
        let away = self.dice.between(1, 2 * self.shape.timing.lease);
        self.tell(|world| format!("REDIS LOSES THE KEY of {} for {away}", world.name(group)));
        self.groups[group].restored_with = Some(snapshot);
        self.schedule(self.at + away, Event::Restore { group });
    }

    pub(crate) fn restore(&mut self, group: usize) {
        let record = &mut self.groups[group];
        let Some(snapshot) = record.restored_with.take() else { return };
        let live_revision = snapshot.stamp.live_revision;
        record.redis.past.retain(|one| one.stamp.live_revision < live_revision);
        record.replaced_at.truncate(record.redis.past.len());
        record.redis.restore(snapshot);
        self.tell(|world| format!("the key of {} comes back", world.name(group)));
    }
}
