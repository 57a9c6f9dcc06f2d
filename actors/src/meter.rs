//! The metrics that the crate's documentation lists, in one place.

use std::time::Duration;

use metrics::{counter, gauge, histogram};
use rsc_core::{Counts, Violation};
use rsc_protocol::GroupKey;

use crate::inbox::{Answered, Reply};
use crate::service_watch::OutOfService;

fn count(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "a gauge is a float; a queue is far below 2^52")]
fn float(n: usize) -> f64 {
    n as f64
}

/// Requests have joined a queue.
pub(crate) fn queued(requests: usize) {
    gauge!("rsc_actor_queue_depth").increment(float(requests));
}

/// Requests have left a queue.
pub(crate) fn dequeued(requests: usize) {
    gauge!("rsc_actor_queue_depth").decrement(float(requests));
}

/// A request was answered.
pub(crate) fn replied(reply: &Reply) {
    match reply {
        Ok(Answered::Heartbeat(response)) => {
            counter!("rsc_heartbeat_total", "status" => response.status.as_str()).increment(1);
        }
        Ok(_) => {}
        Err(refusal) => refused(refusal.code.as_str()),
    }
}

/// A request was refused with an error code.
pub(crate) fn refused(code: &'static str) {
    counter!("rsc_refused_total", "code" => code).increment(1);
}

/// A turn came to its end.
pub(crate) fn turn(outcome: &'static str, batch: usize, took: Duration) {
    counter!("rsc_turn_total", "outcome" => outcome).increment(1);
    histogram!("rsc_turn_batch_commands").record(float(batch));
    histogram!("rsc_turn_seconds").record(took.as_secs_f64());
}

/// Too few replicas have a commit.
pub(crate) fn replica_shortfall() {
    counter!("rsc_replica_shortfall_total").increment(1);
}

/// How many groups have commits that too few replicas have.
pub(crate) fn unreplicated_groups(groups: usize) {
    gauge!("rsc_unreplicated_groups").set(float(groups));
}

/// One attempt to commit, by what became of it.
pub(crate) fn committed(outcome: &'static str) {
    counter!("rsc_turn_commit_total", "outcome" => outcome).increment(1);
}

/// What a recorded decision did.
pub(crate) fn decided(counts: &Counts) {
    for (name, number) in [
        ("rsc_evidence_of_loss_total", counts.evidence_of_loss),
        ("rsc_progress_rows_dropped_total", counts.progress_rows_dropped),
        ("rsc_ownership_violation_total", counts.ownership_violations),
        ("rsc_rebalance_timeout_total", counts.rebalance_timeouts),
        ("rsc_lease_expired_total", counts.leases_expired),
        ("rsc_superseded_total", counts.superseded),
        ("rsc_grant_total", counts.grants),
        ("rsc_release_total", counts.releases),
        ("rsc_hold_lifted_total", counts.holds_lifted),
        ("rsc_correction_begun_total", counts.corrections_begun - counts.corrections_begun_anew),
        ("rsc_correction_begun_anew_total", counts.corrections_begun_anew),
    ] {
        if number > 0 {
            counter!(name).increment(number);
        }
    }
    let fenced = counts.ownership_violations + counts.rebalance_timeouts;
    if fenced > 0 {
        counter!("rsc_fenced_total").increment(fenced);
    }
}

/// An invariant did not hold after a decision.
pub(crate) fn violated(violation: &Violation) {
    counter!("rsc_invariant_violation_total", "invariant" => violation.invariant).increment(1);
}

/// Redis time was found behind a record.
pub(crate) fn redis_time_behind() {
    counter!("rsc_redis_time_behind_total").increment(1);
}

/// This instance went out of service for a group.
pub(crate) fn out_of_service(why: OutOfService) {
    counter!("rsc_out_of_service_total", "cause" => why.label()).increment(1);
    if why == OutOfService::OlderRecord {
        counter!("rsc_metadata_version_regression_total").increment(1);
    }
}

/// A metadata key had a TTL.
pub(crate) fn ttl_found(group: &GroupKey) {
    counter!("rsc_metadata_ttl_found_total", "group" => group.joined()).increment(1);
}

/// A record could not be read.
pub(crate) fn corrupt_load(group: &GroupKey) {
    counter!("rsc_metadata_corrupt_total", "group" => group.joined()).increment(1);
}

/// A metadata key was gone.
pub(crate) fn missing_load(group: &GroupKey) {
    counter!("rsc_metadata_missing_total", "group" => group.joined()).increment(1);
}

/// The state machine panicked.
pub(crate) fn decide_panicked() {
    counter!("rsc_decide_panic_total").increment(1);
}

/// An actor crashed and a fresh one took over.
pub(crate) fn restarted() {
    counter!("rsc_actor_restart_total").increment(1);
}

/// The number of group actors.
pub(crate) fn actors(number: usize) {
    gauge!("rsc_actor_groups").set(float(number));
}

/// Terminating mode.
pub(crate) fn terminating() {
    gauge!("rsc_terminating").set(1.0);
}

/// A group was created or deleted, or that failed.
pub(crate) fn lifecycle(operation: &'static str, outcome: &'static str) {
    counter!("rsc_lifecycle_total", "operation" => operation, "outcome" => outcome).increment(1);
}

/// Shards were provisioned, or could not be.
pub(crate) fn provisioned(groups: usize, succeeded: bool) {
    let outcome = if succeeded { "done" } else { "failed" };
    counter!("rsc_provision_total", "outcome" => outcome).increment(count(groups));
}

/// One pass of the supervisor over the index.
pub(crate) fn index_refreshed(succeeded: bool) {
    let outcome = if succeeded { "done" } else { "failed" };
    counter!("rsc_index_refresh_total", "outcome" => outcome).increment(1);
}

/// A step of a migration was recorded.
pub(crate) fn migration_step(step: &'static str) {
    counter!("rsc_migration_step_total", "step" => step).increment(1);
}

/// One pass over a stream with a migration.
pub(crate) fn migration_pass(outcome: &'static str) {
    counter!("rsc_migration_pass_total", "outcome" => outcome).increment(1);
}

/// An attempt to delete the key of a removed shard.
pub(crate) fn shard_deleted(deleted: bool) {
    let outcome = if deleted { "deleted" } else { "kept" };
    counter!("rsc_shard_delete_total", "outcome" => outcome).increment(1);
}

/// A monitoring read of streams has come back from the store, or never got there.
pub(crate) fn stream_read(question: &'static str, outcome: &'static str) {
    counter!("rsc_stream_read_total", "question" => question, "outcome" => outcome).increment(1);
}
