//! Several groups of one stream, its shards with records in them, producers with cached routing, and what operators ask
//! for (protocol 6).

use std::collections::{BTreeMap, BTreeSet};

use rsc_core::migration::stream::{Next, ShardFacts, StreamView, creation_time, next};
use rsc_core::{Command, Group, MigrationSpec, MigrationStep, Reply, Settings, ShardSet};
use rsc_protocol::resharding::{MigrationState, Retire, RollbackNote};
use rsc_protocol::{ErrorCode, GroupKey, Timestamp};

use super::drivers::Driver;
use super::{Bench, START};

/// What a routing cache lease and the margin last with the default settings, in milliseconds.
pub const CACHES: i64 = 30_000 + 5_000;

/// One stream key as Redis has it.
#[derive(Clone, Debug, Default)]
pub struct Shard {
    records: Vec<u64>,
    groups: BTreeMap<String, Reads>,
}

/// How far one Redis group is: records before `delivered` have been handed out.
#[derive(Clone, Debug, Default)]
struct Reads {
    delivered: usize,
    pending: BTreeSet<u64>,
}

impl Shard {
    fn is_read_by_all(&self) -> bool {
        self.groups.values().all(|it| it.delivered == self.records.len() && it.pending.is_empty())
    }
}

/// The groups of the stream `orders`, each a Redis key of its own.
pub struct Stream {
    pub groups: Vec<Bench>,
    pub now: Timestamp,
    pub settings: Settings,
    pub shards: BTreeMap<u32, Shard>,
    /// Records that `XADD` accepted, and by which groups they were acknowledged.
    pub accepted: BTreeMap<u64, BTreeSet<String>>,
    /// Streams cannot be created at the moment.
    pub provisioning_fails: bool,
    /// What producers were told, and until when they may use it.
    caches: Vec<(u32, Timestamp)>,
    ids: u64,
}

/// Why something was not done.
pub type Refused = (ErrorCode, String);

impl Stream {
    pub fn new(shard_count: u32, names: &[&str]) -> Self {
        let mut stream = Stream {
            groups: Vec::new(),
            now: Timestamp::from_millis(START),
            settings: Settings::default(),
            shards: BTreeMap::new(),
            accepted: BTreeMap::new(),
            provisioning_fails: false,
            caches: Vec::new(),
            ids: 0,
        };
        names.iter().for_each(|name| stream.create(name, shard_count));
        stream.pass(1_000);
        stream
    }

    /// An operator creates a group; the next one is younger.
    pub fn create(&mut self, name: &str, shard_count: u32) {
        let bench = Bench::of(name, shard_count, self.settings.clone(), self.now);
        self.groups.push(bench);
        let key = self.groups[self.groups.len() - 1].key.clone();
        self.provision(&key, &(0..shard_count).into()).unwrap();
        self.pass(10);
    }

    pub fn pass(&mut self, millis: i64) {
        self.now = self.now.plus(millis);
        for bench in &mut self.groups {
            bench.now = self.now;
        }
    }

    pub fn loaded(&self) -> Vec<Group> {
        self.groups.iter().map(Bench::group).collect()
    }

    pub fn counts(&self) -> Vec<u32> {
        self.loaded().iter().map(|group| group.shard_count).collect()
    }

    /// Where each group is with a migration.
    pub fn states(&self, id: &str) -> Vec<Option<MigrationState>> {
        let state = |group: &Group| group.migration(id).map(|migration| migration.state);
        self.loaded().iter().map(state).collect()
    }

    /// What each group's consumers read.
    pub fn reads(&self) -> Vec<Vec<u32>> {
        self.loaded().iter().map(|group| group.read_set().iter().collect()).collect()
    }

    pub fn versions(&self) -> Vec<u64> {
        self.loaded().iter().map(|group| group.metadata_version).collect()
    }

    pub fn next(&self, facts: &BTreeMap<u32, ShardFacts>) -> Next {
        let groups = self.loaded();
        let fresh_id = format!("reshard-repair-{}", self.ids);
        next(&StreamView {
            groups: &groups,
            now: self.now,
            settings: &self.settings,
            facts,
            fresh_id: &fresh_id,
        })
    }

    /// Redis loses the last `writes` of one group.
    pub fn lose(&mut self, group: usize, writes: usize) {
        let mark = self.groups[group].mark().saturating_sub(writes);
        self.groups[group].restore(mark);
    }

    /// One step in one group, as an actor records it.
    pub fn step(&mut self, group: &GroupKey, id: &str, step: MigrationStep) -> Result<(), Refused> {
        let bench = self.groups.iter_mut().find(|bench| bench.key == *group).unwrap();
        bench.now = self.now;
        match bench.turn(&[Command::Migrate { resharding_id: id.to_owned(), step }]).pop() {
            Some(Reply::Refused { code, message }) => Err((code, message)),
            _ => Ok(()),
        }
    }

    /// A step in the group with this index.
    pub fn step_in(&mut self, group: usize, id: &str, step: MigrationStep) -> Result<(), ErrorCode> {
        let key = self.groups[group].key.clone();
        self.step(&key, id, step).map_err(|(code, _)| code)
    }

    /// `XGROUP CREATE key group 0 MKSTREAM`.
    pub fn provision(&mut self, group: &GroupKey, shards: &ShardSet) -> Result<(), Refused> {
        if self.provisioning_fails {
            return Err((ErrorCode::ProvisioningFailed, "the key holds something else".to_owned()));
        }
        for shard in shards.iter() {
            let key = self.shards.entry(shard).or_default();
            key.groups.entry(group.consumer_group().to_owned()).or_default();
        }
        Ok(())
    }

    pub fn prove(&self, shards: &ShardSet) -> BTreeMap<u32, ShardFacts> {
        shards.iter().map(|shard| (shard, self.facts(shard))).collect()
    }

    fn facts(&self, shard: u32) -> ShardFacts {
        let Some(key) = self.shards.get(&shard) else {
            return ShardFacts { is_empty: true, ..ShardFacts::default() };
        };
        let names = self.groups.iter().map(|bench| bench.key.consumer_group().to_owned());
        let missing_groups: Vec<String> = names.filter(|name| !key.groups.contains_key(name)).collect();
        let is_empty = missing_groups.is_empty() && key.is_read_by_all();
        ShardFacts { is_empty, exists: true, missing_groups, ..ShardFacts::default() }
    }

    pub fn delete(&mut self, shards: &ShardSet) -> BTreeMap<u32, ShardFacts> {
        for shard in shards.iter() {
            if self.facts(shard).is_empty {
                self.shards.remove(&shard);
            }
        }
        self.prove(shards)
    }

    /// `XADD NOMKSTREAM`; whether there is such a key.
    pub fn publish(&mut self, shard: u32) -> bool {
        let Some(key) = self.shards.get_mut(&shard) else { return false };
        self.ids += 1;
        key.records.push(self.ids);
        self.accepted.insert(self.ids, BTreeSet::new());
        true
    }

    /// Producers ask every group for the count, and write one record into every shard that any answer which is still
    /// good lets them write into.
    pub fn traffic(&mut self) {
        for group in self.loaded() {
            let routing = group.routing(self.settings.routing_cache_ttl_ms);
            let ttl = i64::try_from(routing.routing_cache_ttl_ms).unwrap();
            self.caches.push((routing.shard_count, self.now.plus(ttl)));
        }
        let now = self.now;
        self.caches.retain(|(_, until)| *until > now);
        let most = self.caches.iter().map(|(count, _)| *count).max().unwrap_or(0);
        for shard in 0..most {
            self.publish(shard);
        }
    }

    /// The consumers of a group read what is there for them, of `shards` as far as the group reads them at all.
    pub fn deliver(&mut self, group: usize, shards: impl IntoIterator<Item = u32>) {
        let read_set = self.groups[group].group().read_set().to_set();
        let name = self.groups[group].key.consumer_group().to_owned();
        for shard in shards.into_iter().filter(|shard| read_set.contains(*shard)) {
            let Some(key) = self.shards.get_mut(&shard) else { continue };
            let Some(reads) = key.groups.get_mut(&name) else { continue };
            reads.pending.extend(&key.records[reads.delivered..]);
            reads.delivered = key.records.len();
        }
    }

    /// The consumers of a group finish what they were handed out of shards that the group reads.
    pub fn acknowledge(&mut self, group: usize) {
        let read_set = self.groups[group].group().read_set().to_set();
        let name = self.groups[group].key.consumer_group().to_owned();
        for (_, key) in self.shards.iter_mut().filter(|(shard, _)| read_set.contains(**shard)) {
            let Some(reads) = key.groups.get_mut(&name) else { continue };
            for id in std::mem::take(&mut reads.pending) {
                self.accepted.get_mut(&id).unwrap().insert(name.clone());
            }
        }
    }

    /// Every group reads everything that it may.
    pub fn consume(&mut self) {
        for group in 0..self.groups.len() {
            self.deliver(group, 0..100);
            self.acknowledge(group);
        }
    }

    /// Records that a group has never acknowledged: `(record, group)`.
    pub fn unread(&self) -> Vec<(u64, String)> {
        let names: Vec<&str> = self.groups.iter().map(|bench| bench.key.consumer_group()).collect();
        let of = |(id, by): (&u64, &BTreeSet<String>)| {
            let missing = names.iter().filter(|name| !by.contains(**name));
            missing.map(|name| (*id, (*name).to_owned())).collect::<Vec<_>>()
        };
        self.accepted.iter().flat_map(of).collect()
    }

    pub fn destroy_redis_group(&mut self, shard: u32, name: &str) {
        self.shards.get_mut(&shard).unwrap().groups.remove(name);
    }

    /// A Redis group that nobody coordinates.
    pub fn add_redis_group(&mut self, shard: u32, name: &str) {
        self.shards.get_mut(&shard).unwrap().groups.insert(name.to_owned(), Reads::default());
    }

    /// Every shard that producers route to exists, with every group on it.
    pub fn is_provisioned(&self) -> bool {
        let most = self.counts().into_iter().max().unwrap_or(0);
        (0..most).all(|shard| self.shards.contains_key(&shard) && self.facts(shard).missing_groups.is_empty())
    }
}

/// What an operator asks for.
impl Stream {
    pub fn spec(&mut self, to: u32) -> MigrationSpec {
        self.ids += 1;
        let groups = self.loaded();
        MigrationSpec {
            resharding_id: format!("reshard-{}", self.ids),
            from_shard_count: groups[0].shard_count,
            to_shard_count: to,
            created_at: creation_time(&groups, self.now),
            requested_by: "ops".to_owned(),
            reason: "test".to_owned(),
            deprecated_after: None,
            retire: Retire::Keep,
            repairs: false,
        }
    }

    /// Records a migration in every group, or in none.
    pub fn prepare(&mut self, spec: &MigrationSpec) -> Result<(), ErrorCode> {
        let keys: Vec<GroupKey> = self.groups.iter().map(|bench| bench.key.clone()).collect();
        for key in &keys {
            let step = MigrationStep::Prepare { spec: Box::new(spec.clone()), compare: false };
            if let Err((code, _)) = self.step(key, &spec.resharding_id, step) {
                let note = Box::new(self.note());
                for key in &keys {
                    let step = MigrationStep::Rollback { note: note.clone(), whole: false, compare: false };
                    drop(self.step(key, &spec.resharding_id, step));
                }
                return Err(code);
            }
        }
        Ok(())
    }

    pub fn note(&self) -> RollbackNote {
        RollbackNote { requested_by: "ops".to_owned(), reason: "test".to_owned(), requested_at: self.now }
    }

    /// Records the way back in one group, as an operator asks for it: every record is looked at first.
    pub fn roll_back(&mut self, id: &str) -> Result<(), ErrorCode> {
        let groups = self.loaded();
        let records: Vec<_> = groups.iter().filter_map(|group| Some((group, group.migration(id)?))).collect();
        let gone_too_far =
            |state, deleting, repairs| state == MigrationState::Deprecated || deleting || repairs;
        if records.iter().any(|(_, it)| gone_too_far(it.state, it.deleting, it.repairs)) {
            return Err(ErrorCode::RollbackNotAllowed);
        }
        let Some((first, migration)) = records.first() else { return Err(ErrorCode::MigrationNotFound) };
        let whole = records.iter().any(|(_, migration)| migration.activated_at.is_some());
        let known = migration.from_shard_count.max(migration.to_shard_count);
        if whole {
            self.provision(&first.key, &(0..known).into()).map_err(|(code, _)| code)?;
        }
        let step = MigrationStep::Rollback { note: Box::new(self.note()), whole, compare: false };
        self.step(&first.key, id, step).map_err(|(code, _)| code)
    }

    /// Prepares, and drives as far as it goes.
    pub fn scale(&mut self, to: u32) -> String {
        let spec = self.spec(to);
        self.begin(&spec)
    }

    pub fn begin(&mut self, spec: &MigrationSpec) -> String {
        self.prepare(spec).unwrap();
        self.drive();
        spec.resharding_id.clone()
    }

    /// Does everything that can be done now; what it waits for then.
    pub fn drive(&mut self) -> Next {
        Driver::default().run(self).unwrap()
    }

    /// Drives, reads and lets time pass until nothing is under way.
    pub fn settle(&mut self) {
        for _ in 0..20 {
            if self.drive().has_settled() {
                return;
            }
            self.consume();
            self.pass(10_000);
            self.groups.iter_mut().for_each(Bench::tick);
        }
        panic!("it does not end: {:#?}", self.next(&BTreeMap::new()));
    }

    /// The groups agree, nothing runs, nothing is lost, and every shard is there with every group on it.
    pub fn assert_settled(&mut self, count: u32) {
        self.assert_settled_but_provisioned(count);
        assert!(self.is_provisioned());
    }

    /// The same of a stream whose keys somebody else has made.
    pub fn assert_settled_but_provisioned(&mut self, count: u32) {
        self.consume();
        assert!(self.next(&BTreeMap::new()).has_settled());
        assert!(self.counts().iter().all(|found| *found == count), "{:?}", self.counts());
        let only: Vec<u32> = (0..count).collect();
        assert!(self.reads().iter().all(|reads| *reads == only), "{:?}", self.reads());
        assert_eq!(self.unread(), [], "every record was read by every group");
    }
}
