//! What a consumer and a producer do, decided without IO and without a clock (protocol 11).
//!
//! The shell around it owns sockets, threads and Redis; it tells [`Consumer::handle`] or [`Producer::handle`]
//! what happened and at what instant, and carries the returned [`Action`]s or [`ProducerAction`]s out **in their
//! order**. Instants are [`Duration`]s of one monotonic clock of the process, counted from any origin.
//!
//! The rules that keep two consumers off one shard, each in one place:
//! - the lease is counted from *sending* the heartbeat, and extended only by `OK`, `SYNC_METADATA` and
//!   `REVOKE_PENDING`: `lease`;
//! - one request is in flight, and only its answer counts: `exchange`;
//! - a shard that is being drained is read again only after a later `OK` names it: `shards`.
//!
//! The rules that keep producers off a shard that is being retired:
//! - the cache lease is counted from *sending* the request for routing, one refresh is in flight, and only its answer
//!   counts: `routes`;
//! - a record carries the instant before which it has to be handed to Redis; without valid routing publishing fails:
//!   `producer`.
//!
//! [`Duration`]: std::time::Duration

mod consumer;
mod exchange;
mod lease;
mod producer;
mod routes;
mod shards;

pub use consumer::{Action, Consumer, End, Event, Identity, Settings};
pub use producer::{Producer, ProducerAction, ProducerEvent, ProducerSettings, PublishError};
pub use shards::Work;
