//! What producers are told (protocol 7).

use serde::{Deserialize, Serialize};

use crate::hash::redis_slot;
use crate::keys::{shard_key, stream_key_pattern};
use crate::names::GroupKey;

/// The name of the shard hash, for clients that check it.
pub const SHARD_HASH: &str = "murmur3_32";

/// Routing metadata of one group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProducerRouting {
    /// The stream prefix.
    pub stream_prefix: String,
    /// The consumer group.
    pub consumer_group: String,
    /// The version of this answer.
    pub metadata_version: u64,
    /// How many shards producers route to; 0: publishing fails.
    pub shard_count: u32,
    /// `{prefix}:{shardIndex}` with the prefix filled in.
    pub stream_key_pattern: String,
    /// Every shard producers route to.
    pub shards: Vec<RoutedShard>,
    /// Milliseconds this answer may be used, counted from when the request was sent (addition).
    #[serde(default)]
    pub routing_cache_ttl_ms: u64,
    /// Goes with `metadataVersion`; tells two histories apart (addition).
    #[serde(default)]
    pub metadata_token: String,
    /// The shard hash to use (addition).
    #[serde(default)]
    pub hash: String,
}

/// One shard as producers see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RoutedShard {
    /// 0-based.
    pub shard_index: u32,
    /// The stream to publish to.
    pub stream_key: String,
    /// Its cluster slot.
    pub redis_slot: u16,
}

impl ProducerRouting {
    /// Routing of `group` with `shard_count` shards.
    #[must_use]
    pub fn new(
        group: &GroupKey,
        shard_count: u32,
        metadata_version: u64,
        metadata_token: &str,
        routing_cache_ttl_ms: u64,
    ) -> Self {
        let shards = (0..shard_count)
            .map(|shard_index| {
                let stream_key = shard_key(group.stream_prefix(), shard_index);
                RoutedShard { shard_index, redis_slot: redis_slot(&stream_key), stream_key }
            })
            .collect();
        ProducerRouting {
            stream_prefix: group.stream_prefix().to_owned(),
            consumer_group: group.consumer_group().to_owned(),
            metadata_version,
            shard_count,
            stream_key_pattern: stream_key_pattern(group.stream_prefix()),
            shards,
            routing_cache_ttl_ms,
            metadata_token: metadata_token.to_owned(),
            hash: SHARD_HASH.to_owned(),
        }
    }
}
