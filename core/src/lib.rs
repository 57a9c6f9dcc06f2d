//! The state machine of one group: (state, commands, now) → (state, replies). No IO, no async, no clock.
//!
//! The modules follow `docs/protocol.md`, so that a rule's number is its address.

pub mod write;

pub use write::{RawFields, Stamp, Tombstone, Write, WriteKind};
