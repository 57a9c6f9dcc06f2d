//! The group actor, the supervisor actor, and the handle that the rest of the daemon talks to.
//!
//! One group is one actor (actix), on a pool of arbiters. A request's way: [`Coordinator`] → registry →
//! the group's inbox → one turn: *enter*, decide on everything that waits, *commit*, and only then the
//! answers leave. The supervisor finds groups in the index, replaces crashed actors and lets go of deleted
//! groups. Creating a group is a task of its own; deleting one is a turn.
//!
//! # Metrics
//!
//! Through the `metrics` facade. Base units. Labels are small closed sets; only what needs an operator is
//! labelled with the group.
//!
//! | name | labels | counts |
//! | --- | --- | --- |
//! | `rsc_turn_total` | `outcome`: `done`, `deleted`, `gone`, `busy`, `conflict`, `unavailable`, `missing`, `corrupt`, `panicked` | turns by how they ended |
//! | `rsc_turn_batch_commands` | | histogram: commands decided on together |
//! | `rsc_turn_seconds` | | histogram: time of a turn, waiting for the mutex included |
//! | `rsc_turn_commit_total` | `outcome`: `applied`, `conflict`, `unknown`, `not_applied` | commits of turns |
//! | `rsc_actor_queue_depth` | | gauge: requests that wait, over all groups |
//! | `rsc_actor_groups` | | gauge: groups with an actor |
//! | `rsc_actor_restart_total` | | actors replaced after a crash |
//! | `rsc_heartbeat_total` | `status` | heartbeats by the status they were answered with |
//! | `rsc_refused_total` | `code` | requests refused with an error code |
//! | `rsc_lease_expired_total`, `rsc_fenced_total`, `rsc_superseded_total` | | members gone, and why |
//! | `rsc_ownership_violation_total`, `rsc_rebalance_timeout_total` | | the two causes of fencing |
//! | `rsc_grant_total`, `rsc_release_total`, `rsc_hold_lifted_total` | | shards handed over |
//! | `rsc_progress_rows_dropped_total` | | progress rows for shards that the member did not report |
//! | `rsc_evidence_of_loss_total` | | requests that showed that Redis lost writes |
//! | `rsc_correction_begun_total`, `rsc_correction_begun_anew_total` | | correction rounds begun; further signs of loss in running ones |
//! | `rsc_redis_time_behind_total` | | times that Redis time was found behind a record, by a second or more: nothing expires until it has caught up |
//! | `rsc_replica_shortfall_total` | | commits that fewer than `redis.wait-replicas` replicas had in time |
//! | `rsc_unreplicated_groups` | | gauge: groups whose last commit that was so |
//! | `rsc_metadata_version_regression_total` | | records older than this instance's own last commit |
//! | `rsc_out_of_service_total` | `cause`: `stalled`, `no_turn`, `time_jumped`, `older_record`, `key_came_back`, `correction_round` | an actor stopped judging members for one lease |
//! | `rsc_metadata_ttl_found_total` | `group` | turns that found a TTL on the metadata key |
//! | `rsc_metadata_corrupt_total`, `rsc_metadata_missing_total` | `group` | turns that found no usable record |
//! | `rsc_invariant_violation_total` | `invariant` | invariants that did not hold after a decision |
//! | `rsc_decide_panic_total` | | panics of the state machine |
//! | `rsc_lifecycle_total` | `operation`: `create`, `delete`, `scale`, `rollback`; `outcome`: `done`, `refused`, `undone` | what operators asked for |
//! | `rsc_migration_step_total` | `step`: the names of [`rsc_core::MigrationStep::name`] | steps of migrations recorded in one group each |
//! | `rsc_migration_pass_total` | `outcome`: `done`, `failed` | passes over a stream whose migration runs |
//! | `rsc_shard_delete_total` | `outcome`: `deleted`, `kept` | attempts to delete a removed shard's key |
//! | `rsc_provision_total` | `outcome`: `done`, `failed` | groups whose streams were created |
//! | `rsc_index_refresh_total` | `outcome`: `done`, `failed` | passes over the index |
//! | `rsc_stream_read_total` | `question`: `offsets`, `consumption`, `messages`, `history`; `outcome`: `done`, `failed`, `overloaded` | monitoring reads of streams that went to the store |
//! | `rsc_terminating` | | gauge: 1 once terminating |

mod batch;
mod claim;
mod coordinator;
mod creation;
mod deciding;
mod deletion;
mod gate;
mod group_actor;
mod inbox;
mod index;
mod memory;
mod meter;
mod provisioning;
mod reads;
mod redis_clock;
mod refusal;
mod registry;
mod replication;
mod resharding;
mod section;
mod service_watch;
mod settings;
mod shared;
mod status;
mod stream_reads;
mod streams;
mod submit;
mod supervisor;
mod turn;
mod watchdog;
mod workers;
mod write_trouble;

#[cfg(test)]
mod tests;

pub use coordinator::Coordinator;
pub use reads::GroupList;
pub use refusal::Refusal;
pub use resharding::Scaled;
pub use settings::CoordinatorSettings;
pub use status::ActorStatus;
pub use stream_reads::MessagesQuery;
