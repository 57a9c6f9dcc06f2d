//! Redis key names (protocol 2).

use crate::names::{GroupKey, NameError, check_key_prefix};

/// The prefix of the coordinator's own keys unless configured otherwise.
pub const DEFAULT_KEY_PREFIX: &str = "redis-stream:coord";

/// Makes the names of the coordinator's own keys under one prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    prefix: String,
}

impl Default for Keys {
    fn default() -> Self {
        Keys { prefix: DEFAULT_KEY_PREFIX.to_owned() }
    }
}

impl Keys {
    /// Keys under `prefix`.
    ///
    /// # Errors
    /// When the prefix is blank, too long, or has braces or control characters.
    pub fn new(prefix: impl Into<String>) -> Result<Self, NameError> {
        let prefix = prefix.into();
        check_key_prefix(&prefix)?;
        Ok(Keys { prefix })
    }

    /// The configured prefix.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    fn of_group(&self, group: &GroupKey, what: &str) -> String {
        format!("{}:{{{}}}:{what}", self.prefix, group.joined())
    }

    /// The hash that is the group's one truth.
    #[must_use]
    pub fn metadata(&self, group: &GroupKey) -> String {
        self.of_group(group, "metadata")
    }

    /// The mutex of the group's critical section.
    #[must_use]
    pub fn mutex(&self, group: &GroupKey) -> String {
        self.of_group(group, "mutex")
    }

    /// The capped stream of observable transitions, for people.
    #[must_use]
    pub fn history(&self, group: &GroupKey) -> String {
        self.of_group(group, "history")
    }

    /// What a deleted group had reached.
    #[must_use]
    pub fn tombstone(&self, group: &GroupKey) -> String {
        self.of_group(group, "tombstone")
    }

    /// The set of metadata keys; an index that can always be rebuilt.
    #[must_use]
    pub fn groups(&self) -> String {
        format!("{}:groups", self.prefix)
    }

    /// The mutex that serialises creation of groups on one stream prefix (ADR 0007): a prefix has one
    /// shard count, which no single group's mutex can protect.
    #[must_use]
    pub fn stream_mutex(&self, stream_prefix: &str) -> String {
        format!("{}:{{{stream_prefix}}}:stream-mutex", self.prefix)
    }

    /// The text between the braces of a metadata key of this prefix (`streamPrefix:consumerGroup`), or
    /// `None` for any other key. Which pair it is only the record itself can say.
    #[must_use]
    pub fn joined_of_metadata<'a>(&self, key: &'a str) -> Option<&'a str> {
        key.strip_prefix(&self.prefix)?.strip_prefix(":{")?.strip_suffix("}:metadata")
    }

    /// Every pair whose metadata key is `key`: one for each colon that can separate the two names. The
    /// record under the key says which of them it is.
    #[must_use]
    pub fn pairs_of_metadata(&self, key: &str) -> Vec<GroupKey> {
        let Some(joined) = self.joined_of_metadata(key) else {
            return Vec::new();
        };
        joined
            .match_indices(':')
            .filter_map(|(at, _)| GroupKey::new(&joined[..at], &joined[at + 1..]).ok())
            .collect()
    }
}

/// The stream key of one shard, `{prefix}:{index}`, e.g. `orders:0` (protocol 1).
#[must_use]
pub fn shard_key(stream_prefix: &str, shard_index: u32) -> String {
    format!("{stream_prefix}:{shard_index}")
}

/// The pattern producers are told, `orders:{shardIndex}` (protocol 7).
#[must_use]
pub fn stream_key_pattern(stream_prefix: &str) -> String {
    format!("{stream_prefix}:{{shardIndex}}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_every_key_of_a_group_in_one_slot() {
        let keys = Keys::default();
        let group = GroupKey::new("orders", "billing").unwrap();
        assert_eq!(keys.metadata(&group), "redis-stream:coord:{orders:billing}:metadata");
        assert_eq!(keys.mutex(&group), "redis-stream:coord:{orders:billing}:mutex");
        assert_eq!(keys.history(&group), "redis-stream:coord:{orders:billing}:history");
        assert_eq!(keys.tombstone(&group), "redis-stream:coord:{orders:billing}:tombstone");
        assert_eq!(keys.groups(), "redis-stream:coord:groups");
        assert_eq!(keys.stream_mutex("orders"), "redis-stream:coord:{orders}:stream-mutex");
        assert_eq!(shard_key("orders", 11), "orders:11");
        assert_eq!(stream_key_pattern("orders"), "orders:{shardIndex}");
    }

    #[test]
    fn metadata_keys_lead_back_to_every_possible_pair() {
        let keys = Keys::default();
        let pairs = keys.pairs_of_metadata("redis-stream:coord:{a:b:c}:metadata");
        assert_eq!(pairs, [GroupKey::new("a", "b:c").unwrap(), GroupKey::new("a:b", "c").unwrap()]);
        assert!(keys.pairs_of_metadata("redis-stream:coord:groups").is_empty());
        assert!(keys.pairs_of_metadata("other:{a:b}:metadata").is_empty());
        assert!(keys.pairs_of_metadata("redis-stream:coord:{a}:metadata").is_empty());
    }

    #[test]
    fn key_prefix_without_braces() {
        assert!(Keys::new("p{x}").is_err());
        assert!(Keys::new("").is_err());
    }
}
