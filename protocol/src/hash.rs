//! Which shard a partition key belongs to, and which cluster slot a key (protocol 7).

/// Number of slots of a Redis Cluster.
pub const CLUSTER_SLOTS: u16 = 16_384;

const SLOT_CRC: crc::Crc<u16> = crc::Crc::<u16>::new(&crc::CRC_16_XMODEM);

/// MurmurHash3 x86 32-bit of `bytes`.
#[must_use]
#[expect(clippy::expect_used, reason = "reading from a byte slice in memory has no error to return")]
pub fn murmur3_32(mut bytes: &[u8], seed: u32) -> u32 {
    murmur3::murmur3_32(&mut bytes, seed).expect("reading from a slice cannot fail")
}

/// The shard of a partition key, `0..shard_count`; `None` when there are no shards to choose from.
///
/// Values of the hash beyond the largest multiple of `shard_count` are drawn again with another seed, so
/// every shard is equally likely whatever the count.
#[must_use]
pub fn shard_of(partition_key: &[u8], shard_count: u32) -> Option<u32> {
    shard_of_counted(partition_key, shard_count).map(|(shard, _)| shard)
}

/// Like [`shard_of`], with the number of times the hash was drawn again.
#[must_use]
pub fn shard_of_counted(partition_key: &[u8], shard_count: u32) -> Option<(u32, u32)> {
    const RANGE: u64 = 1 << 32;
    if shard_count == 0 {
        return None;
    }
    let limit = RANGE - RANGE % u64::from(shard_count);
    let mut hash = murmur3_32(partition_key, 0);
    let mut attempt = 0_u32;
    while u64::from(hash) >= limit {
        // A hash is rejected with probability below one half, so this ends; the attempt wraps rather than
        // panics should it ever come that far.
        attempt = attempt.wrapping_add(1);
        hash = murmur3_32(partition_key, murmur3_32(&attempt.to_le_bytes(), 0));
    }
    Some((hash % shard_count, attempt))
}

/// The cluster slot of a whole key: CRC16/XMODEM mod 16384. Shard keys carry no hash tag (protocol 1), so
/// none is looked for.
#[must_use]
pub fn redis_slot(key: &str) -> u16 {
    SLOT_CRC.checksum(key.as_bytes()) % CLUSTER_SLOTS
}
