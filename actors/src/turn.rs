//! One turn of a group: *enter*, decide, *commit*, and what each of the four outcomes means (protocol 2, the
//! group actor's turn).

use std::sync::Arc;
use std::time::{Duration, Instant};

use rsc_core::{Command, Decision, Group, Loaded, Stamp, Write, WriteKind};
use rsc_protocol::{GroupKey, Timestamp};
use rsc_store::{Conflict, MutexToken, Outcome, StoreError};

use crate::batch::Batch;
use crate::deciding::{Decided, Panicked, context, decide_on, tell};
use crate::inbox::{Queued, Reply, Request, Work};
use crate::memory::Memory;
use crate::refusal::Failure;
use crate::replication::{some_start, withhold};
use crate::section::{Section, Stored, enter, leave, renew_if_late, report, should_exist};
use crate::shared::Shared;
use crate::{deletion, meter};

/// What somebody is told who asks for a group that was deleted.
pub(crate) const DELETED: &str = "the group was deleted";
/// How often a batch is applied anew because the state had moved.
pub(crate) const CONFLICTS_BORNE: u64 = 5;
/// How often a batch is decided anew because the answer to its commit was lost.
pub(crate) const UNKNOWNS_BORNE: u64 = 3;

/// What every step of a turn needs.
pub(crate) struct Bench<'t> {
    pub(crate) shared: &'t Shared,
    pub(crate) group: &'t GroupKey,
    pub(crate) worker: usize,
    /// Until when the mutex may be waited for.
    pub(crate) deadline: Instant,
}

impl Bench<'_> {
    pub(crate) async fn enter(&self, memory: &mut Memory) -> Result<Section, Failure> {
        enter(self.shared, self.group, self.worker, memory, self.deadline).await
    }

    pub(crate) async fn leave(&self, memory: &mut Memory, token: MutexToken) {
        leave(self.shared, self.group, memory, token).await;
    }

    /// See [`renew_if_late`].
    pub(crate) async fn renew_if_late(&self, token: &MutexToken, since: Instant) -> Option<Outcome> {
        renew_if_late(self.shared, self.group, token, since).await
    }
}

/// What was counted on the way.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) conflicts: u64,
    pub(crate) unknowns: u64,
    pub(crate) committed_at: Option<Timestamp>,
}

/// What the actor does after a turn.
#[derive(Debug)]
pub(crate) enum After {
    /// The turn came to its end.
    Continue,
    /// Nothing came of it.
    Failed(Failure),
    /// This very turn deleted the group: the actor ends.
    Deleted,
    /// The group is not there: the actor ends if nothing else waits for it.
    Gone(&'static str),
    /// The state machine panicked on these together: each gets a turn of its own.
    OneByOne(Vec<Queued>),
}

/// A turn that has ended: the memory comes back, the replies may leave.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) memory: Memory,
    pub(crate) after: After,
    pub(crate) replies: Vec<(Queued, Reply)>,
    pub(crate) tally: Tally,
    pub(crate) batch: usize,
    pub(crate) took: Duration,
}

/// Runs one turn to its end, whoever waits for it or not.
pub(crate) async fn run(
    shared: Arc<Shared>,
    group: GroupKey,
    worker: usize,
    mut memory: Memory,
    work: Work,
) -> Ended {
    let started = Instant::now();
    memory.watch.turn_began(started);
    let deadline = started + shared.settings.mutex_acquire_timeout;
    let mut bench = Bench { shared: &shared, group: &group, worker, deadline };
    let mut tally = Tally::default();
    let batch;
    let (after, replies) = match work {
        Work::Batch(requests) => {
            batch = requests.len();
            run_batch(&mut bench, &mut memory, requests, &mut tally).await
        }
        Work::Delete(request, reply) => {
            batch = 1;
            let (after, answer) = deletion::run(&mut bench, &mut memory, &request, &mut tally).await;
            (after, vec![(Queued { request: Request::Delete(request), reply }, answer)])
        }
    };
    if matches!(after, After::Continue | After::Deleted | After::Gone(_)) {
        memory.watch.turn_finished();
    }
    let took = started.elapsed();
    let outcome = match &after {
        After::Continue => "done",
        After::Failed(failure) => failure.label(),
        After::Deleted => "deleted",
        After::Gone(_) => "gone",
        After::OneByOne(_) => "panicked",
    };
    meter::turn(outcome, batch, took);
    Ended { memory, after, replies, tally, batch, took }
}

/// A decision whose commit got no answer.
struct Pending {
    decision: Decision,
    expected: Stamp,
    error: StoreError,
}

impl Pending {
    /// Whether what is stored is exactly what was decided, written once. Who wrote it is then all the same:
    /// the replies are true of it.
    fn is_stored(&self, group: &Group, stamp: &Stamp) -> bool {
        stamp.live_revision == self.expected.live_revision + 1
            && stamp.revision == self.decision.group.store_revision
            && *group == self.decision.group
    }
}

/// What one attempt came to.
enum Attempt {
    Done(Decided),
    Failed(Failure),
    Gone(&'static str),
    Panicked,
    /// Certainly nothing was written: apply the batch to what is there now.
    Moved(Conflict),
    /// Nobody knows whether it was written: look, and only then decide.
    Lost(Box<Pending>),
}

async fn run_batch(
    bench: &mut Bench<'_>,
    memory: &mut Memory,
    requests: Vec<Queued>,
    tally: &mut Tally,
) -> (After, Vec<(Queued, Reply)>) {
    let mut batch = Batch::of(requests);
    let mut pending: Option<Box<Pending>> = None;
    loop {
        let lost_before = pending.as_ref().map(|pending| pending.error.clone());
        match attempt(bench, memory, &mut batch, pending.take(), tally).await {
            Attempt::Done(decided) => {
                tell(bench.group, &decided);
                return (After::Continue, batch.succeed(decided.replies));
            }
            Attempt::Failed(failure) => {
                // A failed reload after a lost answer: what became of the write is still not known.
                let failure = match (lost_before, failure) {
                    (Some(error), Failure::Busy) => Failure::Store(error),
                    (_, failure) => failure,
                };
                let replies = batch.fail(&failure, bench);
                return (After::Failed(failure), replies);
            }
            Attempt::Gone(reason) => {
                memory.forget_group();
                bench.shared.unreplicated.forget(bench.group);
                let replies = batch.fail(&Failure::NoGroup(reason), bench);
                return (After::Gone(reason), replies);
            }
            Attempt::Panicked if batch.requests.len() > 1 => {
                return (After::OneByOne(batch.requests), batch.answered);
            }
            Attempt::Panicked => {
                let replies = batch.fail(&Failure::Panicked, bench);
                return (After::Failed(Failure::Panicked), replies);
            }
            Attempt::Moved(conflict) => {
                tally.conflicts += 1;
                tracing::debug!(group = %bench.group, ?conflict, "the state moved before the commit");
                if tally.conflicts > CONFLICTS_BORNE {
                    let replies = batch.fail(&Failure::Conflict, bench);
                    return (After::Failed(Failure::Conflict), replies);
                }
            }
            Attempt::Lost(lost) => {
                tally.unknowns += 1;
                tracing::warn!(group = %bench.group, error = %lost.error, "the answer to a commit was lost; looking what is stored");
                if tally.unknowns > UNKNOWNS_BORNE {
                    let failure = Failure::Store(lost.error);
                    let replies = batch.fail(&failure, bench);
                    return (After::Failed(failure), replies);
                }
                // Waiting for the lost answer has used the time up that the mutex may be waited for.
                bench.deadline = Instant::now() + bench.shared.settings.mutex_acquire_timeout;
                pending = Some(lost);
            }
        }
    }
}

async fn attempt(
    bench: &Bench<'_>,
    memory: &mut Memory,
    batch: &mut Batch,
    pending: Option<Box<Pending>>,
    tally: &mut Tally,
) -> Attempt {
    let section = match bench.enter(memory).await {
        Ok(section) => section,
        Err(failure) => {
            if let Failure::Store(error) = &failure {
                bench.shared.write_trouble.note(error);
            }
            return Attempt::Failed(failure);
        }
    };
    let Section { token, now, state, since } = section;
    let has_ttl = match state {
        Stored::Known { has_ttl } => has_ttl,
        other => {
            bench.leave(memory, token).await;
            return without_record(bench, memory, other).await;
        }
    };
    let Some(known) = memory.known.take() else {
        bench.leave(memory, token).await;
        return Attempt::Moved(Conflict::Moved);
    };
    if let Some(pending) = pending {
        if pending.is_stored(&known.group, &known.stamp) {
            memory.watch.committed(Instant::now(), &known.stamp);
            memory.lost_writes = None;
            memory.known = Some(known);
            bench.leave(memory, token).await;
            tally.committed_at = Some(now);
            let mut decided = Decided::of(pending.decision).1;
            if bench.shared.settings.waits_for_replicas {
                // Nobody has waited for them to the end; the next turn does.
                memory.maybe_unreplicated = true;
                withhold(&batch.requests, &mut decided.replies);
            }
            return Attempt::Done(decided);
        }
        batch.keep_newest_of_each_member(&bench.shared.settings.timing);
    }
    let context = context(bench.shared, memory, now);
    let Ok(mut decision) = decide_after_losses(bench.shared, &known, batch, memory.lost_writes, &context)
    else {
        memory.known = Some(known);
        bench.leave(memory, token).await;
        return Attempt::Panicked;
    };
    if decision.group.is_in_young_round(now, &bench.shared.settings.timing)
        && let Some(cause) = memory.watch.young_round(Instant::now())
    {
        report(bench.group, cause);
    }
    if has_ttl {
        meter::ttl_found(bench.group);
        tracing::warn!(group = %bench.group, "the metadata key has a TTL; this turn's commit removes it");
        decision.group.updated_at = decision.group.updated_at.max(now);
        let updated_at = decision.group.updated_at;
        decision.write.get_or_insert_with(|| empty_write(updated_at));
    }
    let waits = bench.shared.settings.waits_for_replicas;
    if waits && memory.maybe_unreplicated && some_start(&batch.requests, &decision.replies) {
        // A commit is what can be waited behind.
        let updated_at = decision.group.updated_at;
        decision.write.get_or_insert_with(|| empty_write(updated_at));
    }
    let Some(write) = &decision.write else {
        // Whatever was lost has been decided on, and there is nothing to record about it.
        memory.lost_writes = None;
        memory.known = Some(known);
        bench.leave(memory, token).await;
        return Attempt::Done(Decided::of(decision).1);
    };
    // While they are known to be short each commit looks whether they are back.
    let must_wait = waits
        && (write.kind != WriteKind::LeaseOnly
            || memory.replicas_are_short
            || (memory.maybe_unreplicated && some_start(&batch.requests, &decision.replies)));
    let store = &bench.shared.store;
    let (outcome, shortfall) = match bench.renew_if_late(&token, since).await {
        Some(not_sent) => (not_sent, None),
        None if must_wait => store.commit_replicated(bench.group, &token, &known.stamp, write).await,
        None => (store.commit(bench.group, &token, &known.stamp, write).await, None),
    };
    match outcome {
        Outcome::Applied(stamp) => {
            if must_wait {
                memory.maybe_unreplicated = shortfall.is_some();
                memory.replicas_are_short = shortfall.is_some();
                bench.shared.unreplicated.note(bench.group, shortfall);
                if shortfall.is_some() {
                    withhold(&batch.requests, &mut decision.replies);
                }
            }
            meter::committed("applied");
            bench.shared.write_trouble.clear();
            memory.watch.committed(Instant::now(), &stamp);
            memory.lost_writes = None;
            tally.committed_at = Some(now);
            let stray_live = if write.kind == WriteKind::LeaseOnly { known.stray_live } else { Vec::new() };
            let (group, decided) = Decided::of(decision);
            memory.known = Some(Loaded { group, stamp, stray_live });
            Attempt::Done(decided)
        }
        Outcome::Conflict(conflict) => {
            meter::committed("conflict");
            memory.mistrust(known);
            Attempt::Moved(conflict)
        }
        Outcome::Unknown(error) => {
            meter::committed("unknown");
            let expected = known.stamp.clone();
            memory.mistrust(known);
            memory.lost(token);
            Attempt::Lost(Box::new(Pending { decision, expected, error }))
        }
        Outcome::NotApplied(error) => {
            meter::committed("not_applied");
            bench.shared.write_trouble.note(&error);
            tracing::debug!(group = %bench.group, %error, "the commit was refused, or could not be sent");
            memory.known = Some(known);
            // The mutex may still be ours. A server that answers takes it back; one that does not, later.
            match error {
                StoreError::Refused(_) | StoreError::Misconfigured(_) => bench.leave(memory, token).await,
                StoreError::Unavailable(_) | StoreError::Unexpected(_) => memory.lost(token),
            }
            Attempt::Failed(Failure::Store(error))
        }
    }
}

/// Decides on the batch; first of all, if Redis was found to have lost writes, that a correction round begins
/// (protocol 5).
fn decide_after_losses(
    shared: &Shared,
    known: &Loaded,
    batch: &Batch,
    lost_writes: Option<u64>,
    context: &rsc_core::Context,
) -> Result<Decision, Panicked> {
    let Some(observed_metadata_version) = lost_writes else {
        return decide_on(shared, known, &batch.commands, context);
    };
    let mut commands = vec![Command::LostWrites { observed_metadata_version }];
    commands.extend(batch.commands.iter().cloned());
    let mut decision = decide_on(shared, known, &commands, context)?;
    // Nobody waits for the answer to this actor's own observation.
    decision.replies.remove(0);
    Ok(decision)
}

/// A commit that writes nothing but the stamp: it takes a TTL off the key.
fn empty_write(updated_at: Timestamp) -> Write {
    Write {
        kind: WriteKind::LeaseOnly,
        live: Vec::new(),
        removed_live: Vec::new(),
        updated_at,
        history: None,
    }
}

/// What becomes of a batch when there is no record to apply it to.
async fn without_record(bench: &Bench<'_>, memory: &mut Memory, state: Stored) -> Attempt {
    match no_record(bench, memory, state).await {
        Ok(reason) => Attempt::Gone(reason),
        Err(failure) => Attempt::Failed(failure),
    }
}

/// Tells why there is no record: `Ok` when the group does not exist (protocol 3).
pub(crate) async fn no_record(
    bench: &Bench<'_>,
    memory: &mut Memory,
    state: Stored,
) -> Result<&'static str, Failure> {
    match state {
        Stored::Missing { tombstone } => {
            if tombstone.is_some_and(|tombstone| tombstone.is_of(bench.group)) {
                return Ok(DELETED);
            }
            if should_exist(bench.shared, bench.group, memory).await? {
                meter::missing_load(bench.group);
                return Err(Failure::Missing);
            }
            Ok("no such group exists")
        }
        Stored::Collision => Ok("no such group exists: the key is another group's"),
        Stored::Corrupt { what, .. } => {
            meter::corrupt_load(bench.group);
            Err(Failure::Corrupt(what))
        }
        Stored::Known { .. } => Err(Failure::Conflict),
    }
}
