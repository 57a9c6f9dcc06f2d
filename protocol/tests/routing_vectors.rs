//! Golden values of the shard hash and the cluster slot, shared with clients in other languages.
#![expect(clippy::expect_used, reason = "the helpers of a test fail like the test")]

use rsc_protocol::hash::{murmur3_32, redis_slot, shard_of, shard_of_counted};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Vectors {
    shard: Vec<ShardRow>,
    hash: Vec<HashRow>,
    slot: Vec<SlotRow>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ShardRow {
    key: String,
    shard_count: u32,
    shard_index: u32,
    rejections: u32,
}

#[derive(Deserialize)]
struct HashRow {
    key: String,
    murmur3_x86_32: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SlotRow {
    key: String,
    redis_slot: u16,
}

fn vectors() -> Vectors {
    serde_json::from_str(include_str!("routing-vectors.json")).expect("the vectors are valid JSON")
}

#[test]
fn every_shard_row() {
    let rows = vectors().shard;
    assert_eq!(rows.len(), 151);
    assert!(rows.iter().any(|row| row.rejections > 0), "the rejection path is exercised");
    for row in rows {
        assert_eq!(
            shard_of_counted(row.key.as_bytes(), row.shard_count),
            Some((row.shard_index, row.rejections)),
            "key {:?} of {} shards",
            row.key,
            row.shard_count
        );
    }
}

#[test]
fn every_slot_row() {
    let rows = vectors().slot;
    assert_eq!(rows.len(), 8);
    for row in rows {
        assert_eq!(redis_slot(&row.key), row.redis_slot, "key {:?}", row.key);
    }
}

#[test]
fn no_shards_no_answer() {
    assert_eq!(shard_of(b"order-1", 0), None);
    assert_eq!(shard_of(b"order-1", 1), Some(0));
}

#[test]
fn every_hash_row() {
    let rows = vectors().hash;
    assert_eq!(rows.len(), 14);
    for row in rows {
        assert_eq!(murmur3_32(row.key.as_bytes(), 0), row.murmur3_x86_32, "key {:?}", row.key);
    }
}
