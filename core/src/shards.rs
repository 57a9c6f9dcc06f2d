//! Sets of shards of one stream.

use std::collections::BTreeSet;

use rsc_protocol::ShardRef;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A set of shard indexes, ordered; in JSON `[{"shardIndex": 0}, …]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardSet(BTreeSet<u32>);

impl ShardSet {
    /// The empty set.
    #[must_use]
    pub const fn new() -> Self {
        ShardSet(BTreeSet::new())
    }

    /// Whether the set names no shard.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many shards the set names.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether `shard` is in the set.
    #[must_use]
    pub fn contains(&self, shard: u32) -> bool {
        self.0.contains(&shard)
    }

    /// Adds a shard; `true` if it was not there.
    pub fn insert(&mut self, shard: u32) -> bool {
        self.0.insert(shard)
    }

    /// Removes a shard; `true` if it was there.
    pub fn remove(&mut self, shard: u32) -> bool {
        self.0.remove(&shard)
    }

    /// The shards in ascending order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// The shards of `self` that are not in `other`.
    #[must_use]
    pub fn minus(&self, other: &ShardSet) -> ShardSet {
        self.0.difference(&other.0).copied().collect()
    }

    /// Adds every shard of `shards`.
    pub fn extend(&mut self, shards: impl IntoIterator<Item = u32>) {
        self.0.extend(shards);
    }

    /// The highest shard, if any.
    #[must_use]
    pub fn last(&self) -> Option<u32> {
        self.0.last().copied()
    }
}

impl FromIterator<u32> for ShardSet {
    fn from_iter<I: IntoIterator<Item = u32>>(shards: I) -> Self {
        ShardSet(shards.into_iter().collect())
    }
}

impl<const N: usize> From<[u32; N]> for ShardSet {
    fn from(shards: [u32; N]) -> Self {
        shards.into_iter().collect()
    }
}

impl From<std::ops::Range<u32>> for ShardSet {
    fn from(shards: std::ops::Range<u32>) -> Self {
        shards.collect()
    }
}

impl Serialize for ShardSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(|shard| ShardRef { shard_index: *shard }))
    }
}

impl<'de> Deserialize<'de> for ShardSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let shards = Option::<Vec<ShardRef>>::deserialize(deserializer)?.unwrap_or_default();
        Ok(shards.into_iter().map(|shard| shard.shard_index).collect())
    }
}
