//! What a consumer does, decided without IO and without a clock (protocol 11).
//!
//! The shell around it owns sockets, threads and Redis; it tells [`Consumer::handle`] what happened and at
//! what instant, and carries the returned [`Action`]s out **in their order**. Instants are [`Duration`]s of
//! one monotonic clock of the process, counted from any origin.
//!
//! The rules that keep two consumers off one shard, each in one place:
//! - the lease is counted from *sending* the heartbeat, and extended only by `OK`, `SYNC_METADATA` and
//!   `REVOKE_PENDING`: `lease`;
//! - one request is in flight, and only its answer counts: `exchange`;
//! - a shard that is being drained is read again only after a later `OK` names it: `shards`.
//!
//! [`Duration`]: std::time::Duration

mod consumer;
mod exchange;
mod lease;
mod shards;

pub use consumer::{Action, Consumer, End, Event, Identity, Settings};
pub use shards::Work;
