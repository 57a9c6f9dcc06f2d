//! The state machine of one group: (state, commands, now) → (state, replies). No IO, no async, no clock.
//!
//! The modules follow `docs/protocol.md`, so that a rule's number is its address: [`group`] and [`member`]
//! (the state, 1 and 3), [`mod@decide`] (the list of 4.1 in its order), `membership` (4.1.4-8), `ownership`
//! (4.1.9-10), `handover` (4.2), `holds` (4.3), [`assignment`] (4.4), `correction` and
//! `lost_claims` (5), `maintenance` (4.1.1), [`migration`] (6), `view` (what a member is answered), [`succession`] (5, the actor's
//! own evidence), [`lifecycle`] (3), [`record`] and [`aggregate`] (2), [`validate`] (the invariants).

#[macro_use]
pub mod fault;
pub mod aggregate;
pub mod assignment;
mod correction;
pub mod decide;
pub mod group;
mod handover;
mod holds;
pub mod lifecycle;
mod lost_claims;
mod maintenance;
pub mod member;
mod membership;
pub mod migration;
mod ownership;
pub mod record;
pub mod settings;
pub mod shards;
pub mod succession;
pub mod turn;
pub mod validate;
pub mod view;
pub mod write;

pub use decide::{Command, Decision, Reply, decide};
pub use group::{Correction, Group, Hold, HoldCause};
pub use member::Member;
pub use migration::{Migration, MigrationSpec, MigrationStep, ReadSet};
pub use record::{LoadError, Loaded, load};
pub use settings::Settings;
pub use shards::ShardSet;
pub use succession::is_successor;
pub use turn::{Context, Counts, Transition};
pub use validate::Violation;
pub use write::{RawFields, Stamp, Tombstone, Write, WriteKind};
