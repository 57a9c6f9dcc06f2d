//! The real core and the real consumer decisions under one seed that decides everything.
//!
//! Time, network, Redis, crashes and clocks are modelled; what decides is the code that ships:
//! [`rsc_core::decide()`] and [`rsc_core::load`] on the coordinators' side, [`rsc_client::decision`] on the
//! consumers'. After every step every invariant is checked, above all that no shard is read by two processes
//! that believe in their lease. `docs/simulation.md` says how to use it.

mod belief;
mod check;
mod coordinator;
mod dice;
mod disrupt;
mod messages;
mod old_client;
pub mod plan;
mod process;
mod processes;
mod redis;
pub mod report;
pub mod run;
pub mod stream;
mod trips;
mod watch;
mod world;
