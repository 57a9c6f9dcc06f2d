//! Reads (protocol 8): from the store after the request arrived, without the mutex, without writing.

use std::sync::Arc;

use futures_util::StreamExt;
use rsc_core::{Group, LoadError, record};
use rsc_protocol::admin::GroupResponse;
use rsc_protocol::routing::ProducerRouting;
use rsc_protocol::{ErrorCode, GroupKey, Timestamp};
use rsc_store::{Found, StoreError};
use serde::Serialize;

use crate::deletion::unhealthy;
use crate::index::{Listed, candidates, look_up};
use crate::refusal::Refusal;
use crate::shared::Shared;
use crate::turn::DELETED;

/// Reads of the store that one listing makes at a time.
const PARALLEL_READS: usize = 8;

/// Every group that the index names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupList {
    /// The groups, by name; unreadable ones with `healthy: false`.
    pub groups: Vec<GroupResponse>,
    /// Metadata keys of the index without a record.
    pub missing: Vec<String>,
}

/// What a read found.
pub(crate) enum Presence {
    /// A healthy record.
    Healthy(Box<Group>),
    /// A record, or its absence, that needs an operator.
    Unhealthy(Refusal),
    /// Never created, deleted, or the key is another group's.
    NoGroup(&'static str),
}

fn failed(group: &GroupKey, error: &StoreError) -> Refusal {
    Refusal::store_logged(error, "read a group", &group.joined())
}

/// Looks a group up (protocol 3).
pub(crate) async fn presence(shared: &Arc<Shared>, group: &GroupKey) -> Result<Presence, Refusal> {
    let found = shared.store.read(group).await.map_err(|error| failed(group, &error))?;
    Ok(match found {
        Found::Record { now, fields, .. } => match record::load(group, &fields, &shared.settings.timing) {
            Ok(loaded) => {
                remind_of_overdue(shared, &loaded.group, now);
                Presence::Healthy(Box::new(loaded.group))
            }
            Err(LoadError::Collision { .. }) => {
                Presence::NoGroup("no such group exists: the key is another group's")
            }
            Err(error) => Presence::Unhealthy(Refusal::corrupt(group, &error.to_string())),
        },
        Found::WrongType { found, .. } => {
            let what = format!("the key holds a {found}, not a hash");
            Presence::Unhealthy(Refusal::corrupt(group, &what))
        }
        Found::Missing { tombstone, .. } => {
            if tombstone.is_some_and(|tombstone| tombstone.is_of(group)) {
                return Ok(Presence::NoGroup(DELETED));
            }
            let known = shared.registry.is_known_to_exist(group)
                || shared.store.index_contains(group).await.map_err(|error| failed(group, &error))?;
            if known {
                Presence::Unhealthy(Refusal::missing(group))
            } else {
                Presence::NoGroup("no such group exists")
            }
        }
    })
}

/// A read that shows a deadline that has passed reminds the actor: another instance may have served this group
/// and died, and then nothing else tells this one that there is somebody to expire. The read itself writes
/// nothing.
fn remind_of_overdue(shared: &Shared, group: &Group, now: Timestamp) {
    let timing = &shared.settings.timing;
    if group.next_deadline(timing).is_some_and(|deadline| deadline <= now)
        && let Some(handle) = shared.registry.get(&group.key)
    {
        handle.inbox.nudge();
    }
}

/// One group's record.
pub(crate) async fn group(shared: &Arc<Shared>, group: &GroupKey) -> Result<Group, Refusal> {
    match presence(shared, group).await? {
        Presence::Healthy(found) => Ok(*found),
        Presence::Unhealthy(refusal) => Err(refusal),
        Presence::NoGroup(_) => Err(Refusal::not_found(group)),
    }
}

/// One group at a glance, unhealthy ones too.
pub(crate) async fn group_summary(shared: &Arc<Shared>, group: &GroupKey) -> Result<GroupResponse, Refusal> {
    match presence(shared, group).await? {
        Presence::Healthy(found) => Ok(found.response()),
        Presence::Unhealthy(refusal) => Ok(unhealthy(group, None, &refusal)),
        Presence::NoGroup(_) => Err(Refusal::not_found(group)),
    }
}

/// Every group at a glance.
pub(crate) async fn groups(shared: &Arc<Shared>) -> Result<GroupList, Refusal> {
    let failed = |error: StoreError| Refusal::store_logged(&error, "list the groups", "");
    let entries = shared.store.index().await.map_err(failed)?;
    let mut list = GroupList { groups: Vec::new(), missing: Vec::new() };
    list.groups.extend(unnamed(shared, &entries).await.map_err(failed)?);
    let mut looked_up = futures_util::stream::iter(entries)
        .map(|entry| async move {
            let listed = look_up(shared, candidates(&entry)).await;
            (entry, listed)
        })
        .buffer_unordered(PARALLEL_READS);
    while let Some((entry, listed)) = looked_up.next().await {
        match listed.map_err(failed)? {
            Listed::Record { loaded, .. } => list.groups.push(loaded.group.response()),
            Listed::Unreadable { group, what } => {
                list.groups.push(unhealthy(&group, None, &Refusal::corrupt(&group, &what)));
            }
            Listed::Missing { .. } | Listed::Deleted { .. } | Listed::NoGroup => list.missing.push(entry),
        }
    }
    list.groups.sort_by(|one, other| {
        (&one.stream_prefix, &one.consumer_group).cmp(&(&other.stream_prefix, &other.consumer_group))
    });
    list.missing.sort();
    Ok(list)
}

/// Groups that this instance has served and the index does not name: an emptied Redis must not make the overview
/// green.
async fn unnamed(shared: &Arc<Shared>, entries: &[String]) -> Result<Vec<GroupResponse>, StoreError> {
    let mut found = Vec::new();
    for group in shared.registry.groups() {
        let named = format!("{{{}}}:metadata", group.joined());
        let is_named = entries.iter().any(|entry| entry.ends_with(&named));
        if is_named || !shared.registry.is_known_to_exist(&group) {
            continue;
        }
        match look_up(shared, vec![group.clone()]).await? {
            Listed::Record { loaded, .. } => found.push(loaded.group.response()),
            Listed::Unreadable { group, what } => {
                found.push(unhealthy(&group, None, &Refusal::corrupt(&group, &what)));
            }
            Listed::Missing { .. } | Listed::NoGroup => {
                found.push(unhealthy(&group, None, &Refusal::missing(&group)));
            }
            Listed::Deleted { .. } => {}
        }
    }
    Ok(found)
}

/// What producers of a group are told (protocol 7).
pub(crate) async fn routing(shared: &Arc<Shared>, key: &GroupKey) -> Result<ProducerRouting, Refusal> {
    let group = group(shared, key).await?;
    if group.provisioning_pending {
        let message = format!("the streams of group {key} are still being created: try again");
        return Err(Refusal::new(ErrorCode::MutexUnavailable, message));
    }
    Ok(group.routing(shared.settings.timing.routing_cache_ttl_ms))
}
