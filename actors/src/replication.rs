//! Commits that replicas may not have (protocol 12, `redis.wait-replicas`; ADR 0017): while that is so, answers start nothing.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rsc_core::{Command, Reply};
use rsc_protocol::heartbeat::{HeartbeatRequest, HeartbeatResponse, ShardRef};
use rsc_protocol::{GroupKey, Status};
use rsc_store::Shortfall;

use crate::inbox::{Queued, Request};
use crate::meter;

/// The groups of this process whose last commits too few replicas have, for people.
#[derive(Debug, Default)]
pub(crate) struct Unreplicated(Mutex<BTreeMap<GroupKey, Instant>>);

impl Unreplicated {
    /// Notes what the last commit of a group has come to.
    pub(crate) fn note(&self, group: &GroupKey, shortfall: Option<Shortfall>) {
        let mut groups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news = match shortfall {
            Some(_) => groups.insert(group.clone(), Instant::now()).is_none(),
            None => groups.remove(group).is_some(),
        };
        meter::unreplicated_groups(groups.len());
        match shortfall {
            Some(Shortfall { wanted, confirmed }) => {
                meter::replica_shortfall();
                if is_news {
                    tracing::warn!(%group, wanted, confirmed, "replicas do not have the last commit: nobody starts a shard of this group until they do");
                }
            }
            None if is_news => tracing::info!(%group, "replicas have everything again"),
            None => {}
        }
    }

    /// The group is gone.
    pub(crate) fn forget(&self, group: &GroupKey) {
        let mut groups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if groups.remove(group).is_some() {
            meter::unreplicated_groups(groups.len());
        }
    }

    /// The number of those that were found so within `age`: what this instance no longer serves it knows nothing of.
    pub(crate) fn count(&self, age: Duration) -> usize {
        let mut groups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|_, at| at.elapsed() <= age);
        meter::unreplicated_groups(groups.len());
        groups.len()
    }
}

/// Whether an answer lets its member start a shard that it does not read, or go back to one.
pub(crate) fn some_start(requests: &[Queued], replies: &[Reply]) -> bool {
    requests.iter().zip(replies).any(|(queued, reply)| match (heartbeat(queued), reply) {
        (Some(request), Reply::Heartbeat(response)) => !starts(request, response).is_empty(),
        _ => false,
    })
}

/// Moves what an answer would let its member start to what it waits for. What it reads already it goes on reading: the
/// answer extends its lease as always.
pub(crate) fn withhold(requests: &[Queued], replies: &mut [Reply]) {
    for (queued, reply) in requests.iter().zip(replies) {
        let (Some(request), Reply::Heartbeat(response)) = (heartbeat(queued), reply) else { continue };
        let withheld = starts(request, response);
        if withheld.is_empty() {
            continue;
        }
        let assignment = &mut response.assignment;
        assignment.assigned_shards.retain(|shard| !withheld.contains(&shard.shard_index));
        let pending = withheld.into_iter().map(|shard_index| ShardRef { shard_index });
        assignment.pending_shards.extend(pending);
        assignment.pending_shards.sort_by_key(|shard| shard.shard_index);
    }
}

fn heartbeat(queued: &Queued) -> Option<&HeartbeatRequest> {
    match &queued.request {
        Request::Command(Command::Heartbeat { request, .. }) => Some(request),
        _ => None,
    }
}

fn starts(request: &HeartbeatRequest, response: &HeartbeatResponse) -> Vec<u32> {
    if response.status != Status::Ok {
        return Vec::new();
    }
    // Who joins starts with nothing, whatever it says.
    let reads = |shard: u32| {
        request.member_epoch > 0 && request.owned_shards.iter().any(|owned| owned.shard_index == shard)
    };
    response
        .assignment
        .assigned_shards
        .iter()
        .map(|it| it.shard_index)
        .filter(|shard| !reads(*shard))
        .collect()
}
