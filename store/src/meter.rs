//! The metrics that the crate's documentation lists, counted in one place for both stores.

use metrics::counter;
use rsc_core::WriteKind;

use crate::types::{Conflict, Entered, Outcome, StoreError};

/// Which write is counted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    /// A commit of the whole aggregate.
    Structural,
    /// A commit of live fields.
    LeaseOnly,
    /// The creation of a group.
    Create,
    /// The deletion of a group.
    Delete,
}

impl Operation {
    /// The operation of a commit of this kind.
    pub(crate) fn of(kind: &WriteKind) -> Self {
        match kind {
            WriteKind::Structural { .. } => Operation::Structural,
            WriteKind::LeaseOnly => Operation::LeaseOnly,
        }
    }

    fn label(self) -> &'static str {
        match self {
            Operation::Structural => "structural",
            Operation::LeaseOnly => "lease_only",
            Operation::Create => "create",
            Operation::Delete => "delete",
        }
    }
}

/// Counts one *enter*.
pub(crate) fn entered(result: &Result<Entered, StoreError>) {
    let outcome = match result {
        Ok(Entered::Busy { .. }) => "busy",
        Ok(Entered::Unchanged { .. }) => "unchanged",
        Ok(Entered::Loaded { .. }) => "loaded",
        Ok(Entered::Missing { .. }) => "missing",
        Ok(Entered::WrongType { .. }) => "wrong_type",
        Err(StoreError::Unavailable(_)) => "unavailable",
        Err(StoreError::Refused(_) | StoreError::Misconfigured(_)) => "refused",
        Err(StoreError::Unexpected(_)) => "unexpected",
    };
    counter!("rsc_store_enter_total", "outcome" => outcome).increment(1);
}

/// Counts one write.
pub(crate) fn wrote(operation: Operation, outcome: &Outcome) {
    let outcome = match outcome {
        Outcome::Applied(_) => "applied",
        Outcome::Conflict(Conflict::Moved) => "conflict_moved",
        Outcome::Conflict(Conflict::MutexLost) => "conflict_mutex_lost",
        Outcome::Conflict(Conflict::Missing) => "conflict_missing",
        Outcome::Conflict(Conflict::WrongType) => "conflict_wrong_type",
        Outcome::Conflict(Conflict::Exists) => "conflict_exists",
        Outcome::Conflict(Conflict::TombstoneMoved) => "conflict_tombstone_moved",
        Outcome::Unknown(_) => "unknown",
        Outcome::NotApplied(_) => "not_applied",
    };
    counter!("rsc_store_commit_total", "operation" => operation.label(), "outcome" => outcome).increment(1);
}

/// Counts a TTL that a commit removed from a metadata key.
pub(crate) fn ttl_removed() {
    counter!("rsc_store_ttl_removed_total").increment(1);
}

/// Counts a history entry that could not be written.
pub(crate) fn history_failed() {
    counter!("rsc_store_history_failed_total").increment(1);
}

/// Counts an attempt to connect.
pub(crate) fn connected(succeeded: bool) {
    let outcome = if succeeded { "connected" } else { "failed" };
    counter!("rsc_store_connect_total", "outcome" => outcome).increment(1);
}

/// Counts a script call that was sent again with the script's text.
pub(crate) fn script_resent(command: &'static str) {
    counter!("rsc_store_script_resent_total", "command" => command).increment(1);
}
