//! The actor of one group: it takes what waits, runs one turn at a time, and ticks when something is due.
//!
//! A turn is a future of the actor and owns the memory while it runs, so there is never a second one. The
//! actor itself stays free meanwhile: no `ctx.wait`, no `AtomicResponse`, which would stop timers and
//! messages until Redis answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::{
    Actor, ActorContext, ActorFutureExt, Addr, AsyncContext, Context, Handler, Message, SpawnHandle,
    WrapFuture,
};
use rsc_core::{Command, ShardSet};
use rsc_protocol::GroupKey;
use tokio::sync::oneshot;

use crate::gate::Running;
use crate::inbox::{Closed, Inbox, Queued, Request, Work};
use crate::memory::Memory;
use crate::provisioning;
use crate::refusal::{Failure, Refusal};
use crate::service_watch::ServiceWatch;
use crate::shared::Shared;
use crate::status::StatusCell;
use crate::supervisor::EndNotice;
use crate::turn::{self, After, DELETED, Ended};

/// Commands that are decided on together, at most.
const BATCH_LIMIT: usize = 1_000;
/// Turns in a row that may find the mutex held by another before that says something about the group.
const BUSY_TURNS_BORNE: u32 = 2;
/// The longest pause between two attempts at provisioning.
const LONGEST_PROVISIONING_PAUSE: Duration = Duration::from_secs(30);

/// Something waits in the inbox, or the gate has closed.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) struct Wake;

/// One group's actor.
pub(crate) struct GroupActor {
    shared: Arc<Shared>,
    group: GroupKey,
    worker: usize,
    inbox: Arc<Inbox>,
    status: Arc<StatusCell>,
    /// `None` while a turn owns it.
    memory: Option<Memory>,
    /// Commands that made the state machine panic together: each gets a turn of its own.
    one_by_one: std::collections::VecDeque<Queued>,
    /// Turns in a row that could not take the mutex.
    busy_turns: u32,
    timer: Option<SpawnHandle>,
    /// Time alone has work to do.
    tick_due: bool,
    last_tick: Option<Instant>,
    provisioning: Provisioning,
    /// Whether a correction round was on when the stream's groups were last compared.
    compared_in_round: Option<bool>,
    _end_notice: EndNotice,
    _running: Running,
}

/// How far this instance is with creating the streams of a group whose creation was cut short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Provisioning {
    NotNeeded,
    UnderWay,
    /// Streams exist; the next turn records it.
    Done,
    /// Failed that many times in a row; a timer will try again.
    Failed(u32),
}

impl GroupActor {
    /// Starts an actor on one of the arbiters; callable from any thread.
    pub(crate) fn start_on(
        shared: Arc<Shared>,
        group: GroupKey,
        inbox: Arc<Inbox>,
        status: Arc<StatusCell>,
        worker: usize,
        generation: u64,
    ) -> Addr<Self> {
        let arbiter = shared.workers.arbiter(worker);
        let running = shared.gate.count();
        GroupActor::start_in_arbiter(&arbiter, move |_| {
            let watch = ServiceWatch::new(shared.lease(), Instant::now());
            status.facts().in_service_from = Some(watch.in_service_from());
            GroupActor {
                _end_notice: EndNotice::new(&shared, group.clone(), generation),
                memory: Some(Memory::new(watch)),
                one_by_one: std::collections::VecDeque::new(),
                busy_turns: 0,
                timer: None,
                tick_due: false,
                last_tick: None,
                provisioning: Provisioning::NotNeeded,
                compared_in_round: None,
                _running: running,
                shared,
                group,
                worker,
                inbox,
                status,
            }
        })
    }

    /// Begins the next turn, if none runs and there is a reason. The order is the point: what is left from
    /// before and the closed gate go ahead of new requests.
    fn advance(&mut self, ctx: &mut Context<Self>) {
        if self.memory.is_none() {
            return;
        }
        if self.shared.gate.is_terminating() {
            return self.end(Closed::Terminating, ctx);
        }
        if self.inbox.take_nudge() {
            self.arm_timer(Instant::now(), ctx);
        }
        let Some(work) = self.next_work() else { return };
        #[cfg(test)]
        self.shared.hooks.before_turn(&work);
        let Some(mut memory) = self.memory.take() else { return };
        let mut facts = self.status.facts();
        facts.in_turn = true;
        if let Some((at, stamp)) = facts.sighted.take() {
            memory.watch.sighted(at, &stamp);
        }
        drop(facts);
        let (shared, group) = (Arc::clone(&self.shared), self.group.clone());
        let turn = turn::run(shared, group, self.worker, memory, work);
        ctx.spawn(turn.into_actor(self).map(|ended, actor, ctx| actor.turn_ended(ended, ctx)));
    }

    fn next_work(&mut self) -> Option<Work> {
        if let Some(queued) = self.one_by_one.pop_front() {
            return Some(Work::Batch(vec![queued]));
        }
        if self.provisioning == Provisioning::Done {
            let (reply, _) = oneshot::channel();
            return Some(Work::Batch(vec![Queued {
                request: Request::Command(Command::Provisioned),
                reply,
            }]));
        }
        let work = self.inbox.take(BATCH_LIMIT);
        if work.is_none() && self.tick_due {
            return Some(Work::Batch(Vec::new()));
        }
        work
    }

    /// Completion of a turn: remember, answer, go on.
    fn turn_ended(&mut self, ended: Ended, ctx: &mut Context<Self>) {
        let Ended { memory, after, replies, tally, batch, took } = ended;
        let now = Instant::now();
        let was_tick = std::mem::take(&mut self.tick_due);
        if was_tick {
            self.last_tick = Some(now);
        }
        self.note(&memory, &after, tally, batch, took, was_tick);
        let deadline = self.next_deadline(&memory, &after, now);
        let to_provision = memory.last_seen().filter(|seen| seen.group.provisioning_pending);
        let to_provision = to_provision.map(|seen| seen.group.read_set().to_set());
        self.provisioning = match self.provisioning {
            Provisioning::UnderWay => Provisioning::UnderWay,
            // Could not be recorded; not at once again.
            Provisioning::Done if matches!(after, After::Failed(_)) => Provisioning::Failed(1),
            other if to_provision.is_some() => other,
            _ => Provisioning::NotNeeded,
        };
        self.watch_stream(&memory);
        self.memory = Some(memory);
        if matches!(after, After::Deleted) {
            // Before the answer leaves: what is asked after it belongs to whatever is created then.
            self.end(Closed::Gone, ctx);
        }
        for (queued, reply) in replies {
            queued.answer(reply);
        }
        match after {
            After::Deleted => return,
            // What has come meanwhile may be about a group created anew: it gets a look of its own.
            After::Gone(reason) if self.one_by_one.is_empty() && self.inbox.close_if_empty() => {
                tracing::info!(group = %self.group, reason, "let go of the group");
                return self.end(Closed::Gone, ctx);
            }
            After::OneByOne(requests) => self.one_by_one.extend(requests),
            After::Gone(_) | After::Continue | After::Failed(_) => {}
        }
        if let Some(shards) = to_provision {
            self.provision(shards, ctx);
        }
        self.set_timer(deadline, ctx);
        self.advance(ctx);
    }

    fn note(
        &mut self,
        memory: &Memory,
        after: &After,
        tally: turn::Tally,
        batch: usize,
        took: Duration,
        was_tick: bool,
    ) {
        self.busy_turns = match after {
            After::Failed(Failure::Busy) => self.busy_turns.saturating_add(1),
            _ => 0,
        };
        let mut news = None;
        let mut facts = self.status.facts();
        facts.in_turn = false;
        facts.exists = memory.exists;
        facts.stamp = memory.stamp().cloned();
        let live = memory.known.as_ref().map(|known| known.group.live_members().next().is_some());
        facts.redis_behind_ms = memory.redis_is_behind;
        facts.has_members = live.unwrap_or(facts.has_members);
        facts.metadata_version = memory.known.as_ref().map(|known| known.group.metadata_version);
        facts.last_turn = Some(took);
        facts.last_batch_size = Some(batch);
        facts.turns += 1;
        facts.conflicts += tally.conflicts;
        facts.unknown_outcomes += tally.unknowns;
        facts.in_service_from = Some(memory.watch.in_service_from());
        let redis_now = memory.redis_now();
        facts.last_turn_at = redis_now.or(facts.last_turn_at);
        if was_tick {
            facts.last_tick_at = redis_now.or(facts.last_tick_at);
        }
        facts.last_commit_at = tally.committed_at.or(facts.last_commit_at);
        match after {
            After::Continue | After::Deleted | After::Gone(_) => facts.health = None,
            After::Failed(Failure::Busy) if self.busy_turns <= BUSY_TURNS_BORNE => {}
            After::Failed(failure) => {
                let health = failure.health(&self.group);
                let known = facts.health.as_ref().map(|health| health.code);
                let code = health.as_ref().map(|health| health.code).filter(|code| known != Some(*code));
                news = code.map(|code| (code, failure));
                facts.health = health.or(facts.health.take());
            }
            After::OneByOne(_) => {}
        }
        drop(facts);
        if let Some((code, failure)) = news {
            // Told once; what the store said is for the log alone.
            tracing::warn!(group = %self.group, code = code.as_str(), cause = ?failure, "the group cannot work");
        }
    }

    /// When time alone will have work to do: the earliest deadline of the record, or another attempt after a
    /// turn that failed while there was something to do. `None`: never, an idle group costs Redis nothing.
    fn next_deadline(&self, memory: &Memory, after: &After, now: Instant) -> Option<Instant> {
        let retry_later = now + (self.shared.lease() / 8).max(self.shared.settings.tick_interval);
        match after {
            After::Failed(Failure::Missing | Failure::Corrupt(_)) => None,
            // Redis lost writes, and no turn has recorded it yet: whoever else loads the group cannot know.
            After::Continue if memory.lost_writes.is_some() => Some(now),
            After::Failed(_) if memory.lost_writes.is_some() => Some(retry_later),
            After::Failed(_) => {
                // Never seen: there may be members to expire, or a creation to complete.
                let Some(seen) = memory.last_seen() else { return Some(retry_later) };
                seen.group.next_deadline(&self.shared.settings.timing)?;
                Some(retry_later)
            }
            After::Continue | After::Deleted | After::Gone(_) | After::OneByOne(_) => {
                let timing = &self.shared.settings.timing;
                let deadline = memory.known.as_ref()?.group.next_deadline(timing)?;
                Some(memory.instant_of(deadline)?.max(memory.watch.in_service_from()))
            }
        }
    }

    /// One timer, replaced by each turn.
    fn set_timer(&mut self, deadline: Option<Instant>, ctx: &mut Context<Self>) {
        if let Some(timer) = self.timer.take() {
            ctx.cancel_future(timer);
        }
        if let Some(deadline) = deadline {
            self.arm_timer(deadline, ctx);
        }
    }

    /// Ticks at `deadline`, but not before a tick interval has passed since the last tick.
    fn arm_timer(&mut self, deadline: Instant, ctx: &mut Context<Self>) {
        let not_before = self.last_tick.map(|last| last + self.shared.settings.tick_interval);
        let at = not_before.map_or(deadline, |not_before| deadline.max(not_before));
        if let Some(timer) = self.timer.take() {
            ctx.cancel_future(timer);
        }
        let timer = ctx.run_later(at.saturating_duration_since(Instant::now()), |actor, ctx| {
            actor.timer = None;
            actor.tick_due = true;
            actor.advance(ctx);
        });
        self.timer = Some(timer);
    }

    /// Migrations and counts are compared across the prefix when an actor starts, when a correction round begins or
    /// ends, and while a migration runs (protocol 6).
    fn watch_stream(&mut self, memory: &Memory) {
        let Some(seen) = memory.last_seen() else { return };
        let (runs, in_round) =
            (seen.group.active_resharding_id.is_some(), seen.group.metadata_correction.is_some());
        let is_news = self.compared_in_round != Some(in_round);
        self.compared_in_round = Some(in_round);
        let prefix = self.group.stream_prefix();
        // A group that is alone can differ from nobody.
        if runs || (is_news && self.shared.registry.has_sibling(&self.group)) {
            self.shared.resharding.watch(&self.shared, prefix, is_news);
        }
    }

    /// Creates the streams of a group whose creation was cut short. Any instance may; doing it twice is fine.
    fn provision(&mut self, shards: ShardSet, ctx: &mut Context<Self>) {
        let failures = match self.provisioning {
            Provisioning::UnderWay | Provisioning::Done => return,
            Provisioning::NotNeeded => 0,
            Provisioning::Failed(failures) => failures,
        };
        self.provisioning = Provisioning::UnderWay;
        let pause = match failures {
            0 => Duration::ZERO,
            _ => (self.shared.settings.tick_interval * 2_u32.saturating_pow(failures.min(16)))
                .min(LONGEST_PROVISIONING_PAUSE),
        };
        let (shared, group) = (Arc::clone(&self.shared), self.group.clone());
        let todo = shards.clone();
        tracing::info!(%group, shards = shards.len(), "resuming the creation of the group's streams");
        let work = async move {
            tokio::time::sleep(pause).await;
            provisioning::provision(&shared, &group, &todo).await
        };
        ctx.spawn(work.into_actor(self).map(move |result, actor, ctx| match result {
            Ok(()) => {
                actor.provisioning = Provisioning::Done;
                actor.advance(ctx);
            }
            Err(refusal) => {
                actor.status.facts().health = Some(refusal);
                actor.provisioning = Provisioning::Failed(failures + 1);
                actor.provision(shards, ctx);
            }
        }));
    }

    /// The actor's end: nothing is queued any more, what waits is answered, the registry forgets it.
    fn end(&mut self, why: Closed, ctx: &mut Context<Self>) {
        let mut rest: Vec<Queued> = self.one_by_one.drain(..).collect();
        rest.extend(self.inbox.close(why));
        self.shared.registry.forget(&self.group, &self.inbox);
        for queued in rest {
            let reply = match why {
                Closed::Terminating => Err(Refusal::terminating()),
                Closed::Gone => {
                    let timing = &self.shared.settings.timing;
                    Failure::NoGroup(DELETED).answer(&queued.request, &self.group, timing)
                }
            };
            queued.answer(reply);
        }
        ctx.stop();
    }
}

impl Actor for GroupActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.advance(ctx);
    }
}

impl Handler<Wake> for GroupActor {
    type Result = ();

    fn handle(&mut self, _: Wake, ctx: &mut Self::Context) {
        self.advance(ctx);
    }
}

impl std::fmt::Debug for GroupActor {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("GroupActor").field("group", &self.group).finish_non_exhaustive()
    }
}
