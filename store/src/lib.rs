//! Group metadata in Redis and in memory, behind one trait (protocol 2).
//!
//! A critical section is two round trips: [`GroupStore::enter`] and [`GroupStore::commit`]. The scripts
//! that do the work on the server live in `src/scripts/`, one file each. [`RedisStore`] runs them;
//! [`MemoryStore`] keeps the very same fields in the process, for a first look and for tests.
//!
//! # Metrics
//!
//! Through the `metrics` facade, so that whatever recorder the process installs gets them. Base units.
//!
//! | name | labels | counts |
//! | --- | --- | --- |
//! | `rsc_store_enter_total` | `outcome`: `busy`, `unchanged`, `loaded`, `missing`, `wrong_type`, `unavailable`, `refused`, `unexpected` | calls of *enter* |
//! | `rsc_store_commit_total` | `operation`: `structural`, `lease_only`, `create`, `delete`; `outcome`: `applied`, `conflict_moved`, `conflict_mutex_lost`, `conflict_missing`, `conflict_wrong_type`, `conflict_exists`, `conflict_tombstone_moved`, `unknown`, `not_applied` | writes of group metadata |
//! | `rsc_store_ttl_removed_total` | | commits that found a TTL on the key and removed it |
//! | `rsc_store_history_failed_total` | | commits whose history entry could not be written |
//! | `rsc_store_command_seconds` | `command` | histogram: time from the call to its answer or failure, connecting included (Redis only) |
//! | `rsc_store_connect_total` | `outcome`: `connected`, `failed` | attempts to connect (Redis only) |
//! | `rsc_store_script_resent_total` | `command` | script calls sent again with the text, because the server had forgotten the script (Redis only) |

mod drain;
mod fields;
mod group_store;
pub mod memory;
mod meter;
pub mod redis;
mod stream_reads;
mod types;

pub use drain::{ShardDeletion, ShardProof, WaitReason, Waiting};
pub use group_store::GroupStore;
pub use memory::MemoryStore;
pub use redis::{
    NodeRole, RedisMode, RedisNode, RedisSettings, RedisStore, RedisTools, SettingsError, TlsSettings,
};
pub use stream_reads::{
    GroupView, HistoryPage, Record, RecordPage, RecordRange, ShardView, StreamReads, StreamView, Undelivered,
};
pub use types::{Conflict, Entered, Found, MutexToken, Outcome, ProvisionError, Shortfall, StoreError};
