//! Deleting a group (protocol 3): a turn of its own. Leaves a tombstone, so that a group created again starts
//! above what this one had reached.

use std::time::Instant;

use rsc_core::{Command, Group, Stamp, Tombstone, lifecycle};
use rsc_protocol::admin::{DeleteGroupRequest, GroupResponse, GroupState};
use rsc_protocol::{GroupKey, Timestamp};
use rsc_store::{MutexToken, Outcome, StoreError};

use crate::deciding::{context, decide_on};
use crate::inbox::{Answered, Reply};
use crate::memory::Memory;
use crate::meter;
use crate::refusal::{Failure, Refusal};
use crate::section::{Section, Stored, should_exist};
use crate::turn::{After, Bench, CONFLICTS_BORNE, DELETED, Tally, UNKNOWNS_BORNE};

/// What there is to delete.
struct Plan {
    /// The stamp it was decided on; `None`: whatever is there.
    expected: Option<Stamp>,
    tombstone: Tombstone,
    snapshot: GroupResponse,
}

impl Plan {
    /// Whether `group` was created after this plan was carried out. A creation starts no earlier than the
    /// tombstone that it finds (protocol 3).
    fn is_older_than(&self, group: &Group) -> bool {
        group.created_at >= self.tombstone.deleted_at && group.created_at != self.snapshot.created_at
    }
}

/// What one attempt came to.
enum Attempt {
    Deleted(GroupResponse),
    /// Deleted by an earlier attempt, and another group has been created under the name since.
    Replaced(GroupResponse),
    /// Nothing yet: look again.
    Again,
}

/// Why a deletion ends without another attempt.
enum Stop {
    Refused(Refusal),
    Failed(Failure),
    Gone(&'static str),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Stop::Failed(failure)
    }
}

/// Deletes the group of this turn.
pub(crate) async fn run(
    bench: &mut Bench<'_>,
    memory: &mut Memory,
    request: &DeleteGroupRequest,
    tally: &mut Tally,
) -> (After, Reply) {
    let mut lost: Option<(Plan, StoreError)> = None;
    loop {
        let stop = match attempt(bench, memory, request, &mut lost, tally).await {
            Ok(Attempt::Again) => continue,
            Ok(Attempt::Deleted(snapshot)) => {
                forget_in_index(bench).await;
                tell(bench, request);
                bench.shared.unreplicated.forget(bench.group);
                return (After::Deleted, Ok(Answered::Deleted(Box::new(snapshot))));
            }
            Ok(Attempt::Replaced(snapshot)) => {
                tell(bench, request);
                return (After::Continue, Ok(Answered::Deleted(Box::new(snapshot))));
            }
            Err(stop) => stop,
        };
        meter::lifecycle("delete", "refused");
        return match (stop, lost) {
            (Stop::Refused(refusal), _) => (After::Continue, Err(refusal)),
            (Stop::Gone(reason), _) => {
                memory.forget_group();
                bench.shared.unreplicated.forget(bench.group);
                (After::Gone(reason), Err(Refusal::not_found(bench.group)))
            }
            (Stop::Failed(Failure::Busy), Some((_, error))) => fail(bench, Failure::Store(error)),
            (Stop::Failed(failure), _) => fail(bench, failure),
        };
    }
}

fn tell(bench: &Bench<'_>, request: &DeleteGroupRequest) {
    meter::lifecycle("delete", "done");
    tracing::info!(group = %bench.group, requested_by = request.requested_by, reason = request.reason, force = request.force, "group deleted");
}

fn fail(bench: &Bench<'_>, failure: Failure) -> (After, Reply) {
    let refusal = failure.refusal(bench.group);
    (After::Failed(failure), Err(refusal))
}

async fn attempt(
    bench: &mut Bench<'_>,
    memory: &mut Memory,
    request: &DeleteGroupRequest,
    lost: &mut Option<(Plan, StoreError)>,
    tally: &mut Tally,
) -> Result<Attempt, Stop> {
    let Section { token, now, state, since } = bench.enter(memory).await?;
    let plan = match plan(bench, memory, request, state, now, lost.as_ref().map(|(plan, _)| plan)).await {
        Ok(Planned::Delete(plan)) => *plan,
        Ok(Planned::Done { replaced }) => {
            bench.leave(memory, token).await;
            let Some((plan, _)) = lost.take() else { return Ok(Attempt::Again) };
            let done = if replaced { Attempt::Replaced } else { Attempt::Deleted };
            return Ok(done(plan.snapshot));
        }
        Err(stop) => {
            bench.leave(memory, token).await;
            return Err(stop);
        }
    };
    let outcome = match bench.renew_if_late(&token, since).await {
        Some(not_sent) => not_sent,
        None => {
            let (expected, tombstone) = (plan.expected.as_ref(), Some(&plan.tombstone));
            bench.shared.store.delete(bench.group, &token, expected, tombstone).await
        }
    };
    conclude(bench, memory, token, plan, outcome, lost, tally).await
}

async fn conclude(
    bench: &mut Bench<'_>,
    memory: &mut Memory,
    token: MutexToken,
    plan: Plan,
    outcome: Outcome,
    lost: &mut Option<(Plan, StoreError)>,
    tally: &mut Tally,
) -> Result<Attempt, Stop> {
    match outcome {
        Outcome::Applied(_) => Ok(Attempt::Deleted(plan.snapshot)),
        Outcome::Conflict(conflict) => {
            memory.forget();
            tally.conflicts += 1;
            tracing::debug!(group = %bench.group, ?conflict, "the state moved before the deletion");
            if tally.conflicts > CONFLICTS_BORNE { Err(Failure::Conflict.into()) } else { Ok(Attempt::Again) }
        }
        Outcome::Unknown(error) => {
            memory.forget();
            memory.lost(token);
            tally.unknowns += 1;
            tracing::warn!(group = %bench.group, %error, "the answer to a deletion was lost; looking what is stored");
            if tally.unknowns > UNKNOWNS_BORNE {
                return Err(Failure::Store(error).into());
            }
            bench.deadline = Instant::now() + bench.shared.settings.mutex_acquire_timeout;
            *lost = Some((plan, error));
            Ok(Attempt::Again)
        }
        Outcome::NotApplied(error) => {
            tracing::debug!(group = %bench.group, %error, "the deletion was refused, or could not be sent");
            match error {
                StoreError::Refused(_) | StoreError::Misconfigured(_) => bench.leave(memory, token).await,
                StoreError::Unavailable(_) | StoreError::Unexpected(_) => memory.lost(token),
            }
            Err(Failure::Store(error).into())
        }
    }
}

enum Planned {
    Delete(Box<Plan>),
    /// The deletion whose answer was lost has happened.
    Done {
        /// There is another group under the name by now.
        replaced: bool,
    },
}

/// Decides what a deletion does to what is stored.
async fn plan(
    bench: &Bench<'_>,
    memory: &mut Memory,
    request: &DeleteGroupRequest,
    state: Stored,
    now: Timestamp,
    lost: Option<&Plan>,
) -> Result<Planned, Stop> {
    match state {
        Stored::Known { .. } => {
            let Some(known) = &memory.known else { return Err(Failure::Conflict.into()) };
            if lost.is_some_and(|lost| lost.is_older_than(&known.group)) {
                return Ok(Planned::Done { replaced: true });
            }
            if memory.lost_writes.is_some() {
                // Not recorded yet; the turn after this one does that.
                return Err(Stop::Refused(Refusal::lost_writes(bench.group)));
            }
            // Maintenance first: members whose lease is over must not stand in the way.
            let context = context(bench.shared, memory, now);
            let group = match decide_on(bench.shared, known, &[Command::Tick], &context) {
                Ok(decision) => decision.group,
                Err(_) => known.group.clone(),
            };
            let tombstone = lifecycle::delete(&group, &known.stamp, now, request.force)
                .map_err(|(code, message)| Stop::Refused(Refusal { code, message }))?;
            let (expected, snapshot) = (Some(known.stamp.clone()), known.group.response());
            Ok(Planned::Delete(Box::new(Plan { expected, tombstone, snapshot })))
        }
        Stored::Missing { tombstone } => {
            if lost.is_some_and(|lost| tombstone.as_ref() == Some(&lost.tombstone)) {
                return Ok(Planned::Done { replaced: false });
            }
            if tombstone.is_some_and(|tombstone| tombstone.is_of(bench.group)) {
                return Err(Stop::Gone(DELETED));
            }
            if !should_exist(bench.shared, bench.group, memory).await? {
                return Err(Stop::Gone("no such group exists"));
            }
            Ok(without_record(bench, memory, None, now, Refusal::missing(bench.group)))
        }
        Stored::Collision if lost.is_some() => Ok(Planned::Done { replaced: true }),
        Stored::Collision => Err(Stop::Gone("no such group exists: the key is another group's")),
        Stored::Corrupt { what, stamp } => {
            meter::corrupt_load(bench.group);
            if !request.force {
                return Err(Failure::Corrupt(what).into());
            }
            Ok(without_record(bench, memory, stamp, now, Refusal::corrupt(bench.group, &what)))
        }
    }
}

/// The plan for a record that is missing or unreadable: whatever is there goes, and the tombstone says what
/// this actor has seen of it.
fn without_record(
    bench: &Bench<'_>,
    memory: &Memory,
    stamp: Option<Stamp>,
    now: Timestamp,
    wrong: Refusal,
) -> Planned {
    let tombstone = memory.tombstone(bench.group, stamp.as_ref(), now, bench.shared.lease());
    let snapshot = memory.last_seen().map(|seen| seen.group.response());
    let snapshot = unhealthy(bench.group, snapshot, &wrong);
    Planned::Delete(Box::new(Plan { expected: None, tombstone, snapshot }))
}

/// The summary of a group whose record cannot be shown, with what was last seen of it if anything was.
pub(crate) fn unhealthy(
    group: &GroupKey,
    last_seen: Option<GroupResponse>,
    wrong: &Refusal,
) -> GroupResponse {
    let blank = || GroupResponse {
        metadata_sync_in_progress: false,
        stream_prefix: group.stream_prefix().to_owned(),
        consumer_group: group.consumer_group().to_owned(),
        state: GroupState::Empty,
        group_epoch: 0,
        assignment_epoch: 0,
        metadata_version: 0,
        shard_count: 0,
        active_migration: None,
        target_assignment_summary: Default::default(),
        current_assignment_summary: Default::default(),
        metadata_token: String::new(),
        store_revision: 0,
        live_members: 0,
        healthy: false,
        error_code: None,
        message: None,
        created_at: Timestamp::default(),
        updated_at: Timestamp::default(),
    };
    let response = last_seen.unwrap_or_else(blank);
    GroupResponse {
        healthy: false,
        error_code: Some(wrong.code),
        message: Some(wrong.message.clone()),
        ..response
    }
}

/// The index can be rebuilt and is not the truth: what fails here, the supervisor repairs.
async fn forget_in_index(bench: &Bench<'_>) {
    if let Err(error) = bench.shared.store.index_remove(bench.group).await {
        tracing::warn!(group = %bench.group, %error, "the deleted group stays in the index for now");
    }
}
