//! The requests that one turn decides on, and who waits for each.

use std::collections::BTreeSet;

use rsc_core::{Command, Reply as CoreReply};
use rsc_protocol::Status;

use crate::inbox::{Answered, Queued, Reply, Request};
use crate::refusal::{Failure, Refusal};
use crate::turn::Bench;

/// A batch on its way: the commands, and who waits for each.
pub(crate) struct Batch {
    pub(crate) requests: Vec<Queued>,
    pub(crate) commands: Vec<Command>,
    pub(crate) answered: Vec<(Queued, Reply)>,
}

impl Batch {
    pub(crate) fn of(requests: Vec<Queued>) -> Self {
        let mut batch = Batch { requests, commands: Vec::new(), answered: Vec::new() };
        batch.read_commands();
        batch
    }

    fn read_commands(&mut self) {
        let commands = self.requests.iter().filter_map(|queued| match &queued.request {
            Request::Command(command) => Some(command.clone()),
            Request::Delete(_) => None,
        });
        self.commands = commands.collect();
        // Maintenance comes with every decision; a turn without commands is for it alone.
        if self.commands.is_empty() {
            self.commands.push(Command::Tick);
        }
    }

    pub(crate) fn fail(self, failure: &Failure, bench: &Bench<'_>) -> Vec<(Queued, Reply)> {
        let timing = &bench.shared.settings.timing;
        let mut replies = self.answered;
        replies.extend(self.requests.into_iter().map(|queued| {
            let reply = failure.answer(&queued.request, bench.group, timing);
            (queued, reply)
        }));
        replies
    }

    pub(crate) fn succeed(self, decided: Vec<CoreReply>) -> Vec<(Queued, Reply)> {
        let mut replies = self.answered;
        replies.extend(self.requests.into_iter().zip(decided.into_iter().map(reply_of)));
        replies
    }

    /// Takes the older ones of several heartbeats of one member out and answers them `RETRY`. Before a batch
    /// is applied to a state that may already contain it: there an older report would come after the newer
    /// one, and claim what that one has given back.
    pub(crate) fn keep_newest_of_each_member(&mut self, timing: &rsc_core::Settings) {
        let mut seen = BTreeSet::new();
        let (mut kept, mut older) = (Vec::new(), Vec::new());
        for queued in std::mem::take(&mut self.requests).into_iter().rev() {
            let is_newest = match &queued.request {
                Request::Command(Command::Heartbeat { request, .. }) => {
                    seen.insert(request.member_id.clone())
                }
                Request::Command(_) | Request::Delete(_) => true,
            };
            if is_newest { kept.push(queued) } else { older.push(queued) }
        }
        kept.reverse();
        self.requests = kept;
        for queued in older {
            let Request::Command(Command::Heartbeat { request, .. }) = &queued.request else { continue };
            let reason = "a newer heartbeat of this member came with it";
            let response = rsc_core::view::without_group(request, Status::Retry, reason, timing);
            self.answered.push((queued, Ok(Answered::Heartbeat(Box::new(response)))));
        }
        self.read_commands();
    }
}

fn reply_of(reply: CoreReply) -> Reply {
    match reply {
        CoreReply::Heartbeat(response) => Ok(Answered::Heartbeat(response)),
        CoreReply::Refused { code, message } => Err(Refusal { code, message }),
        CoreReply::Done => Ok(Answered::Done),
    }
}
