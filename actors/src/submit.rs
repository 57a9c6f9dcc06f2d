//! A request's way to the group's actor and back.

use std::sync::Arc;

use rsc_protocol::GroupKey;
use tokio::sync::oneshot;

use crate::inbox::{Closed, NotQueued, Reply, Request};
use crate::meter;
use crate::reads::{self, Presence};
use crate::refusal::{Failure, Refusal};
use crate::shared::Shared;

/// How often a request looks for an actor again when the one it found has just ended.
const LOOKS: usize = 4;

/// Hands a request to the group's actor and waits for the answer. An actor is only started for a group that exists:
/// what nobody created leaves nothing behind.
pub(crate) async fn submit(shared: &Arc<Shared>, group: &GroupKey, request: Request) -> Reply {
    let (reply, answer) = oneshot::channel();
    let (mut request, mut reply) = (request, reply);
    for _ in 0..LOOKS {
        if shared.gate.is_terminating() {
            return refused(Refusal::terminating());
        }
        let handle = match shared.registry.get(group) {
            Some(handle) => handle,
            None => match reads::presence(shared, group).await {
                Ok(Presence::Healthy(_) | Presence::Unhealthy(_)) => shared.registry.ensure(shared, group),
                Ok(Presence::NoGroup(reason)) => return no_group(shared, group, &request, reason),
                Err(refusal) => return refused(refusal),
            },
        };
        match handle.inbox.push(request, reply) {
            Ok(()) => {
                // Nobody answers only if the actor crashed in the middle of the turn.
                let crashed = || match shared.gate.is_terminating() {
                    true => Err(Refusal::terminating()),
                    false => Err(Refusal::internal()),
                };
                return answer.await.unwrap_or_else(|_| crashed());
            }
            Err(NotQueued::Full) => {
                return refused(Refusal::overloaded(group, shared.settings.mailbox_capacity));
            }
            Err(NotQueued::Closed(Closed::Terminating, ..)) => return refused(Refusal::terminating()),
            Err(NotQueued::Closed(Closed::Gone, request_back, reply_back)) => {
                shared.registry.forget(group, &handle.inbox);
                (request, reply) = (request_back, reply_back);
            }
        }
    }
    refused(Refusal::busy(group))
}

fn refused(refusal: Refusal) -> Reply {
    let reply = Err(refusal);
    meter::replied(&reply);
    reply
}

fn no_group(shared: &Shared, group: &GroupKey, request: &Request, reason: &'static str) -> Reply {
    let reply = Failure::NoGroup(reason).answer(request, group, &shared.settings.timing);
    meter::replied(&reply);
    reply
}
