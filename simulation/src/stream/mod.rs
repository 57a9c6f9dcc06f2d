//! The second world: one stream with several groups under one seed, so that its shard count can change while
//! everything goes wrong (protocol 6, 7, 11).
//!
//! What decides is the code that ships: [`rsc_core::decide()`] with [`rsc_core::Command::Migrate`] in each group's
//! actor, [`rsc_core::migration::stream::next`] in the driver on each instance, [`rsc_client::decision`] in consumers
//! and producers. What is modelled around them: Redis with a record and a mutex per group, the stream's mutex, and
//! the shards' streams themselves; operators; crashes, standstills, lost messages, rollbacks of one group or of all.
//! What is checked: no record is lost, and every migration ends (`docs/simulation.md`).

mod coordinator;
mod disrupt;
mod driver;
mod ledger;
mod losses;
mod operator;
pub mod plan;
mod producers;
mod readers;
pub mod report;
pub mod run;
mod server;
mod streams;
mod turns;
mod world;
