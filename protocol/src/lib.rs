//! What coordinator and clients agree on: wire types, statuses, error codes, key names, the shard
//! hash. No IO, no clock, no randomness: clients in any process can link it.
//!
//! Section numbers in this crate's docs are those of `docs/protocol.md`.

pub mod admin;
pub mod error;
pub mod hash;
pub mod heartbeat;
pub mod keys;
pub mod monitoring;
pub mod names;
pub mod resharding;
pub mod routing;
pub mod time;

pub use error::{ClientAction, ErrorBody, ErrorCode};
pub use heartbeat::{
    AssignedShard, Assignment, CapacityReport, HeartbeatRequest, HeartbeatResponse, RevokingReport,
    RevokingState, ShardProgress, ShardRef, Status,
};
pub use names::{GroupKey, NameError};
pub use time::Timestamp;

/// The protocol version this implementation speaks (protocol 4).
pub const PROTOCOL_VERSION: i64 = 1;
/// The aggregate schema this implementation reads and writes (protocol 2).
pub const SCHEMA_VERSION: u64 = 1;
/// The Redis layout this implementation writes; 1 or absent loads (protocol 2).
pub const LAYOUT_VERSION: u64 = 2;
