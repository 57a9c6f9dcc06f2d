//! What waits for one group: a bounded queue that outlives the actor that works on it.
//!
//! Commands are not kept in the actix mailbox. A mailbox that is flooded is drained before anything else of
//! the actor runs, so a turn's completion and the timers would wait behind new requests; and what is in it
//! is lost with the actor. Here at most one `Wake` is in the mailbox, and a fresh actor finds the queue as
//! the crashed one left it.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use actix::Addr;
use rsc_core::Command;
use rsc_protocol::HeartbeatResponse;
use rsc_protocol::admin::{DeleteGroupRequest, GroupResponse};
use tokio::sync::oneshot;

use crate::group_actor::{GroupActor, Wake};
use crate::meter;
use crate::refusal::Refusal;

/// Something asked of one group.
#[derive(Debug)]
pub(crate) enum Request {
    /// A command for the state machine.
    Command(Command),
    /// Delete the group (protocol 3); a turn of its own.
    Delete(DeleteGroupRequest),
}

/// What a request is answered with.
#[derive(Debug)]
pub(crate) enum Answered {
    /// The answer to a heartbeat.
    Heartbeat(Box<HeartbeatResponse>),
    /// The group as it was when it was deleted.
    Deleted(Box<GroupResponse>),
    /// Done, nothing to say.
    Done,
}

pub(crate) type Reply = Result<Answered, Refusal>;

/// A request and who waits for its answer. Nobody may: a caller that went away disturbs nothing.
#[derive(Debug)]
pub(crate) struct Queued {
    pub(crate) request: Request,
    pub(crate) reply: oneshot::Sender<Reply>,
}

impl Queued {
    pub(crate) fn answer(self, reply: Reply) {
        meter::replied(&reply);
        // An error means that the caller has gone; what was recorded stands.
        let _gone = self.reply.send(reply);
    }
}

/// Why nothing is queued for a group any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    /// The group is gone; whoever asks again looks at the store first.
    Gone,
    /// The process is terminating.
    Terminating,
}

/// Why a request was not queued.
#[derive(Debug)]
pub(crate) enum NotQueued {
    /// As many as allowed are waiting.
    Full,
    /// See [`Closed`]; the request comes back.
    Closed(Closed, Request, oneshot::Sender<Reply>),
}

/// What a turn is about.
#[derive(Debug)]
pub(crate) enum Work {
    /// Commands that are decided on together.
    Batch(Vec<Queued>),
    /// One deletion.
    Delete(DeleteGroupRequest, oneshot::Sender<Reply>),
}

#[derive(Default)]
struct State {
    queue: VecDeque<Queued>,
    closed: Option<Closed>,
    /// The actor has been told and has not looked yet.
    woken: bool,
    /// Somebody thinks that time alone has work for the group.
    nudged: bool,
    actor: Option<Addr<GroupActor>>,
}

/// The queue of one group.
pub(crate) struct Inbox {
    state: Mutex<State>,
    capacity: usize,
}

impl Inbox {
    pub(crate) fn new(capacity: usize) -> Self {
        Inbox { state: Mutex::default(), capacity }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes `actor` the one that is woken; it is woken at once if something waits.
    pub(crate) fn attach(&self, actor: Addr<GroupActor>) {
        let mut state = self.state();
        if !state.queue.is_empty() || state.nudged || state.closed.is_some() {
            actor.do_send(Wake);
        }
        state.actor = Some(actor);
    }

    fn wake(state: &mut State) {
        if !std::mem::replace(&mut state.woken, true)
            && let Some(actor) = &state.actor
        {
            // `do_send` ignores the mailbox's capacity; there is at most one of these in it.
            actor.do_send(Wake);
        }
    }

    /// Queues a request; the answer comes through `reply`.
    pub(crate) fn push(&self, request: Request, reply: oneshot::Sender<Reply>) -> Result<(), NotQueued> {
        let mut state = self.state();
        if let Some(closed) = state.closed {
            return Err(NotQueued::Closed(closed, request, reply));
        }
        if state.queue.len() >= self.capacity {
            return Err(NotQueued::Full);
        }
        state.queue.push_back(Queued { request, reply });
        meter::queued(1);
        Self::wake(&mut state);
        Ok(())
    }

    /// Asks the actor to look whether time alone has work to do.
    pub(crate) fn nudge(&self) {
        let mut state = self.state();
        state.nudged = true;
        Self::wake(&mut state);
    }

    /// Whether somebody has asked since the last call.
    pub(crate) fn take_nudge(&self) -> bool {
        std::mem::take(&mut self.state().nudged)
    }

    /// The next requests in order: up to `limit` commands, or one deletion. `None`: nothing waits. From here
    /// on the actor is told again of what comes.
    pub(crate) fn take(&self, limit: usize) -> Option<Work> {
        let mut state = self.state();
        state.woken = false;
        let mut batch = Vec::new();
        while batch.len() < limit {
            match state.queue.pop_front() {
                Some(Queued { request: Request::Delete(request), reply }) => {
                    if batch.is_empty() {
                        meter::dequeued(1);
                        return Some(Work::Delete(request, reply));
                    }
                    state.queue.push_front(Queued { request: Request::Delete(request), reply });
                    break;
                }
                Some(queued) => batch.push(queued),
                None => break,
            }
        }
        meter::dequeued(batch.len());
        (!batch.is_empty()).then_some(Work::Batch(batch))
    }

    /// Queues nothing any more; returns what was waiting.
    pub(crate) fn close(&self, why: Closed) -> Vec<Queued> {
        let mut state = self.state();
        state.closed = Some(why);
        state.actor = None;
        let rest: Vec<Queued> = state.queue.drain(..).collect();
        meter::dequeued(rest.len());
        rest
    }

    /// Closes the queue of a group that is gone, unless something waits.
    pub(crate) fn close_if_empty(&self) -> bool {
        let mut state = self.state();
        if !state.queue.is_empty() {
            return false;
        }
        state.closed = Some(Closed::Gone);
        state.actor = None;
        true
    }

    /// Whether the queue was closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.state().closed.is_some()
    }

    /// Requests that wait.
    pub(crate) fn depth(&self) -> usize {
        self.state().queue.len()
    }
}
