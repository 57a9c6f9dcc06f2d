//! Why something was refused, and how each failure of a turn answers each kind of command.

use rsc_core::{Command, view};
use rsc_protocol::{ErrorCode, GroupKey, Status};
use rsc_store::StoreError;

use crate::inbox::{Answered, Reply, Request};

/// A refusal: HTTP status and `Retry-After` follow from the code ([`ErrorCode`]).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// The code to act upon.
    pub code: ErrorCode,
    /// What happened, to what, and what to do, for people. Names nothing internal.
    pub message: String,
}

impl Refusal {
    /// A refusal with a sentence for people.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Refusal { code, message: message.into() }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Refusal::new(ErrorCode::InvalidRequest, message)
    }

    pub(crate) fn not_found(group: &GroupKey) -> Self {
        let message = format!("group {group} does not exist: create it first, or check its name");
        Refusal::new(ErrorCode::GroupNotFound, message)
    }

    pub(crate) fn missing(group: &GroupKey) -> Self {
        let message = format!(
            "the metadata key of group {group} is gone although nobody deleted the group: restore the key, or delete the group and create it anew"
        );
        Refusal::new(ErrorCode::GroupMetadataMissing, message)
    }

    pub(crate) fn corrupt(group: &GroupKey, what: &str) -> Self {
        let message = format!(
            "the record of group {group} cannot be used: {what}; nothing is written over it: repair it, or delete the group with \"force\": true"
        );
        Refusal::new(ErrorCode::GroupMetadataCorrupt, message)
    }

    pub(crate) fn lost_writes(group: &GroupKey) -> Self {
        let message = format!(
            "redis has lost writes of group {group}, a correction round begins: try again after a member lease"
        );
        Refusal::new(ErrorCode::MetadataSyncInProgress, message)
    }

    /// What the store said stays in the log: it may name addresses.
    pub(crate) fn store(error: &StoreError) -> Self {
        let message = match error {
            StoreError::Unavailable(_) => "redis did not answer in time: try again",
            StoreError::Refused(_) => "redis refused the command: try again, and see the coordinator's log",
            StoreError::Misconfigured(_) => {
                "redis cannot be used as configured: see the coordinator's log, and rsc doctor"
            }
            StoreError::Unexpected(_) => {
                "redis answered something unexpected: try again, and see the coordinator's log"
            }
        };
        Refusal::new(ErrorCode::RedisUnavailable, message)
    }

    /// As [`Refusal::store`], and tells the log what the store said: an outage is the same news each time, the
    /// rest needs somebody.
    pub(crate) fn store_logged(error: &StoreError, doing: &'static str, name: &str) -> Self {
        match error {
            StoreError::Unavailable(_) => tracing::debug!(doing, name, %error, "redis did not answer"),
            StoreError::Refused(_) | StoreError::Misconfigured(_) | StoreError::Unexpected(_) => {
                tracing::warn!(doing, name, %error, "redis did not do what was asked");
            }
        }
        Refusal::store(error)
    }

    /// This instance is shutting down (protocol 9).
    #[must_use]
    pub fn terminating() -> Self {
        Refusal::new(
            ErrorCode::CoordinatorTerminating,
            "this coordinator is shutting down: ask another instance",
        )
    }

    pub(crate) fn overloaded(group: &GroupKey, capacity: usize) -> Self {
        let message = format!("{capacity} commands are already waiting for group {group}: try again later");
        Refusal::new(ErrorCode::CoordinatorOverloaded, message)
    }

    pub(crate) fn busy(group: &GroupKey) -> Self {
        let message = format!("another coordinator is working on group {group}: try again");
        Refusal::new(ErrorCode::MutexUnavailable, message)
    }

    pub(crate) fn internal() -> Self {
        Refusal::new(ErrorCode::InternalError, "the coordinator failed on this request; see its log")
    }
}

/// Why nothing came of a turn. Nothing was written, or nobody knows; never a success.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The mutex stayed with somebody else for as long as a turn waits.
    Busy,
    /// The state moved again and again between *enter* and *commit*.
    Conflict,
    /// The store did not answer, refused, or its answer to a write was lost and could not be looked up.
    Store(StoreError),
    /// The key is gone and nobody deleted the group.
    Missing,
    /// The record is there and unreadable.
    Corrupt(String),
    /// The group was never created, or was deleted, or the record is that of the pair with the same key.
    NoGroup(&'static str),
    /// The command itself made the state machine panic.
    Panicked,
}

impl Failure {
    /// How a command that met this failure is answered: a heartbeat that only lost a race gets `RETRY`
    /// (protocol 8), one to no group `UNKNOWN_MEMBER_ID` (protocol 3).
    pub(crate) fn answer(&self, request: &Request, group: &GroupKey, timing: &rsc_core::Settings) -> Reply {
        let refusal = self.refusal(group);
        let Request::Command(Command::Heartbeat { request, .. }) = request else { return Err(refusal) };
        let without_group = |status, reason: &str| {
            Ok(Answered::Heartbeat(Box::new(view::without_group(request, status, reason, timing))))
        };
        match self {
            Failure::Busy | Failure::Conflict => without_group(Status::Retry, &refusal.message),
            Failure::NoGroup(reason) => without_group(Status::UnknownMemberId, reason),
            Failure::Store(_) | Failure::Missing | Failure::Corrupt(_) | Failure::Panicked => Err(refusal),
        }
    }

    /// The refusal that everything but a heartbeat gets.
    pub(crate) fn refusal(&self, group: &GroupKey) -> Refusal {
        match self {
            Failure::Busy => Refusal::busy(group),
            Failure::Conflict => {
                let message = format!("group {group} changed again and again meanwhile: try again");
                Refusal::new(ErrorCode::StateVersionConflict, message)
            }
            Failure::Store(error) => Refusal::store(error),
            Failure::Missing => Refusal::missing(group),
            Failure::Corrupt(what) => Refusal::corrupt(group, what),
            Failure::NoGroup(_) => Refusal::not_found(group),
            Failure::Panicked => Refusal::internal(),
        }
    }

    /// What `/actor` shows about a group that this failure keeps from working; `None` for what only
    /// concerns one turn.
    pub(crate) fn health(&self, group: &GroupKey) -> Option<Refusal> {
        match self {
            Failure::Missing | Failure::Corrupt(_) | Failure::Store(_) | Failure::Busy => {
                Some(self.refusal(group))
            }
            Failure::Conflict | Failure::NoGroup(_) | Failure::Panicked => None,
        }
    }

    /// The label of the metric that counts turns by how they ended.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Failure::Busy => "busy",
            Failure::Conflict => "conflict",
            Failure::Store(_) => "unavailable",
            Failure::Missing => "missing",
            Failure::Corrupt(_) => "corrupt",
            Failure::NoGroup(_) => "gone",
            Failure::Panicked => "panicked",
        }
    }
}
