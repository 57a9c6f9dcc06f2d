//! What `/actor` shows of a group's actor.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rsc_core::Stamp;
use rsc_protocol::{ErrorCode, GroupKey, Timestamp};
use serde::Serialize;

use crate::refusal::Refusal;

/// A group's actor in this process at a glance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ActorStatus {
    /// The stream prefix.
    pub stream_prefix: String,
    /// The consumer group.
    pub consumer_group: String,
    /// This process.
    pub instance_id: String,
    /// `false`: no actor in this process yet, nothing was asked of it.
    pub running: bool,
    /// `IDLE`, `IN_TURN`, `UNHEALTHY` or `NOT_RUNNING`.
    pub state: String,
    /// Commands that wait.
    pub mailbox_depth: usize,
    /// The remembered `storeRevision`.
    pub revision: Option<u64>,
    /// The remembered `liveRevision`.
    pub live_revision: Option<u64>,
    /// The remembered `metadataVersion`.
    pub metadata_version: Option<u64>,
    /// When the last turn ended, in Redis time as far as it is known.
    pub last_turn_at: Option<Timestamp>,
    /// How long it took.
    pub last_turn_ms: Option<u64>,
    /// How many commands it decided on.
    pub last_batch_size: Option<usize>,
    /// When the last turn that time alone had asked for ended.
    pub last_tick_at: Option<Timestamp>,
    /// When this actor last committed.
    pub last_commit_at: Option<Timestamp>,
    /// Turns so far.
    pub turns: u64,
    /// Commits that found another state than the expected one.
    pub conflicts: u64,
    /// Commits whose answer was lost.
    pub unknown_outcomes: u64,
    /// Crashes after which a fresh actor took over.
    pub restarts: u64,
    /// Members may be expired (protocol 4.1.1).
    pub in_service: bool,
    /// How far Redis time is behind what is recorded, in milliseconds: nothing ends until it has caught up. `null`: it
    /// is not, or by less than a second.
    pub redis_time_behind_ms: Option<i64>,
    /// Why the actor is `UNHEALTHY`.
    pub error_code: Option<ErrorCode>,
    /// The same for people.
    pub message: Option<String>,
}

/// The part of [`ActorStatus`] that the actor writes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Facts {
    /// The actor has loaded the group before.
    pub(crate) exists: bool,
    pub(crate) in_turn: bool,
    pub(crate) stamp: Option<Stamp>,
    /// What the supervisor has seen stored since the last turn, and when.
    pub(crate) sighted: Option<(std::time::Instant, Stamp)>,
    pub(crate) redis_behind_ms: Option<i64>,
    /// The group had live members in the last turn.
    pub(crate) has_members: bool,
    pub(crate) metadata_version: Option<u64>,
    pub(crate) last_turn_at: Option<Timestamp>,
    pub(crate) last_turn: Option<Duration>,
    pub(crate) last_batch_size: Option<usize>,
    pub(crate) last_tick_at: Option<Timestamp>,
    pub(crate) last_commit_at: Option<Timestamp>,
    pub(crate) turns: u64,
    pub(crate) conflicts: u64,
    pub(crate) unknown_outcomes: u64,
    pub(crate) restarts: u64,
    pub(crate) in_service_from: Option<std::time::Instant>,
    pub(crate) health: Option<Refusal>,
}

/// Written by the actor, read by anybody; outlives the actor.
#[derive(Debug, Default)]
pub(crate) struct StatusCell(Mutex<Facts>);

impl StatusCell {
    pub(crate) fn facts(&self) -> MutexGuard<'_, Facts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The status of a running actor.
    pub(crate) fn status(&self, group: &GroupKey, instance_id: &str, mailbox_depth: usize) -> ActorStatus {
        let facts = self.facts().clone();
        let state = match (&facts.health, facts.in_turn) {
            (Some(_), _) => "UNHEALTHY",
            (None, true) => "IN_TURN",
            (None, false) => "IDLE",
        };
        ActorStatus {
            running: true,
            state: state.to_owned(),
            mailbox_depth,
            revision: facts.stamp.as_ref().map(|stamp| stamp.revision),
            live_revision: facts.stamp.as_ref().map(|stamp| stamp.live_revision),
            metadata_version: facts.metadata_version,
            last_turn_at: facts.last_turn_at,
            last_turn_ms: facts.last_turn.map(|took| u64::try_from(took.as_millis()).unwrap_or(u64::MAX)),
            last_batch_size: facts.last_batch_size,
            last_tick_at: facts.last_tick_at,
            last_commit_at: facts.last_commit_at,
            turns: facts.turns,
            conflicts: facts.conflicts,
            unknown_outcomes: facts.unknown_outcomes,
            restarts: facts.restarts,
            redis_time_behind_ms: facts.redis_behind_ms,
            in_service: facts.in_service_from.is_some_and(|from| std::time::Instant::now() >= from),
            error_code: facts.health.as_ref().map(|refusal| refusal.code),
            message: facts.health.map(|refusal| refusal.message),
            ..ActorStatus::not_running(group, instance_id)
        }
    }
}

impl ActorStatus {
    /// The status of a group that has no actor in this process.
    pub(crate) fn not_running(group: &GroupKey, instance_id: &str) -> Self {
        ActorStatus {
            stream_prefix: group.stream_prefix().to_owned(),
            consumer_group: group.consumer_group().to_owned(),
            instance_id: instance_id.to_owned(),
            running: false,
            state: "NOT_RUNNING".to_owned(),
            mailbox_depth: 0,
            revision: None,
            live_revision: None,
            metadata_version: None,
            last_turn_at: None,
            last_turn_ms: None,
            last_batch_size: None,
            last_tick_at: None,
            last_commit_at: None,
            turns: 0,
            conflicts: 0,
            unknown_outcomes: 0,
            restarts: 0,
            in_service: false,
            redis_time_behind_ms: None,
            error_code: None,
            message: None,
        }
    }
}
