//! Creating a stream or a group (protocol 3, 6, 8): claim the metadata key, create the shards' streams, admit
//! members. What cannot be completed is undone.
//!
//! A prefix has one shard count, which no single group's mutex can protect: creation on one prefix is
//! serialised by the stream's mutex.

use std::collections::BTreeSet;
use std::sync::Arc;

use rsc_core::Group;
use rsc_protocol::admin::{CreateGroupRequest, CreateStreamRequest, CreateStreamResponse, GroupResponse};
use rsc_protocol::names::check_stream_prefix;
use rsc_protocol::{ErrorCode, GroupKey};
use rsc_store::MutexToken;

use crate::claim::{self, Claim};
use crate::index::{Listed, look_up};
use crate::meter;
use crate::provisioning::{HeldMutexes, provision};
use crate::refusal::Refusal;
use crate::shared::Shared;
use crate::streams;

/// The longest `requestedBy`, in bytes.
const MAX_REQUESTED_BY_BYTES: usize = 512;
/// The most groups that one request may create: each takes a claim and streams of its own.
const MAX_GROUPS_PER_REQUEST: usize = 100;
/// The longest `reason`, in bytes.
const MAX_REASON_BYTES: usize = 1_024;

/// Checks who asks and why.
pub(crate) fn check_request(requested_by: &str, reason: Option<&str>) -> Result<(), Refusal> {
    if requested_by.chars().all(char::is_whitespace) {
        return Err(Refusal::invalid("requestedBy is blank: say who asks"));
    }
    if requested_by.len() > MAX_REQUESTED_BY_BYTES {
        let bytes = requested_by.len();
        return Err(Refusal::invalid(format!(
            "requestedBy has {bytes} bytes: at most {MAX_REQUESTED_BY_BYTES} are allowed"
        )));
    }
    let reason_bytes = reason.map_or(0, str::len);
    if reason_bytes > MAX_REASON_BYTES {
        return Err(Refusal::invalid(format!(
            "reason has {reason_bytes} bytes: at most {MAX_REASON_BYTES} are allowed"
        )));
    }
    Ok(())
}

fn check_shard_count(shared: &Shared, asked: Option<i64>) -> Result<Option<u32>, Refusal> {
    let Some(asked) = asked else { return Ok(None) };
    let most = shared.settings.max_shard_count;
    match u32::try_from(asked) {
        Ok(count) if (1..=most).contains(&count) => Ok(Some(count)),
        _ => Err(Refusal::invalid(format!("initialShardCount is {asked}: 1 to {most} are allowed"))),
    }
}

/// What is to be created.
#[derive(Debug)]
pub(crate) struct Plan {
    prefix: String,
    groups: Vec<GroupKey>,
    shard_count: Option<u32>,
    /// The stream must not exist yet.
    new_stream: bool,
    requested_by: String,
    reason: Option<String>,
}

impl Plan {
    /// One stream with its first groups.
    pub(crate) fn stream(
        shared: &Shared,
        prefix: &str,
        request: CreateStreamRequest,
    ) -> Result<Self, Refusal> {
        check_stream_prefix(prefix).map_err(|error| Refusal::invalid(error.to_string()))?;
        check_request(&request.requested_by, request.reason.as_deref())?;
        let shard_count = check_shard_count(shared, request.initial_shard_count)?;
        let names = request.consumer_groups.unwrap_or_else(|| vec![prefix.to_owned()]);
        if names.is_empty() {
            let message = "consumerGroups is empty: name at least one, or leave it out for one group named like the stream";
            return Err(Refusal::invalid(message));
        }
        if names.len() > MAX_GROUPS_PER_REQUEST {
            let asked = names.len();
            return Err(Refusal::invalid(format!(
                "consumerGroups names {asked} groups: at most {MAX_GROUPS_PER_REQUEST} are allowed in one request"
            )));
        }
        let mut seen = BTreeSet::new();
        let mut groups = Vec::with_capacity(names.len());
        for name in names {
            let group =
                GroupKey::new(prefix, name.as_str()).map_err(|error| Refusal::invalid(error.to_string()))?;
            if !seen.insert(name.clone()) {
                return Err(Refusal::invalid(format!("consumerGroups names {name} twice")));
            }
            groups.push(group);
        }
        Ok(Plan {
            prefix: prefix.to_owned(),
            groups,
            shard_count,
            new_stream: true,
            requested_by: request.requested_by,
            reason: request.reason,
        })
    }

    /// One group; the first one makes the stream.
    pub(crate) fn group(
        shared: &Shared,
        group: &GroupKey,
        request: CreateGroupRequest,
    ) -> Result<Self, Refusal> {
        check_request(&request.requested_by, request.reason.as_deref())?;
        let shard_count = check_shard_count(shared, request.initial_shard_count)?;
        Ok(Plan {
            prefix: group.stream_prefix().to_owned(),
            groups: vec![group.clone()],
            shard_count,
            new_stream: false,
            requested_by: request.requested_by,
            reason: request.reason,
        })
    }
}

/// Creates what the plan says, whoever waits for it or not: it runs on the pool and is counted at the gate.
pub(crate) async fn create(shared: &Arc<Shared>, plan: Plan) -> Result<Vec<Group>, Refusal> {
    let Some(running) = shared.gate.enter() else { return Err(Refusal::terminating()) };
    let (reply, answer) = tokio::sync::oneshot::channel();
    let task = Arc::clone(shared);
    shared.workers.spawn(async move {
        let result = locked(&task, &plan).await;
        meter::lifecycle("create", if result.is_ok() { "done" } else { "refused" });
        match &result {
            Ok(groups) => {
                let names: Vec<String> = groups.iter().map(|group| group.key.to_string()).collect();
                let shards = groups.first().map_or(0, |group| group.shard_count);
                tracing::info!(groups = ?names, shards, requested_by = plan.requested_by, reason = plan.reason, "created");
            }
            Err(refusal) => {
                tracing::info!(prefix = plan.prefix, requested_by = plan.requested_by, code = refusal.code.as_str(), reason = refusal.message, "not created");
            }
        }
        let _caller_gone = reply.send(result);
        drop(running);
    });
    answer.await.unwrap_or_else(|_| Err(Refusal::internal()))
}

/// Answer of `create_stream`.
pub(crate) fn stream_response(prefix: &str, groups: &[Group]) -> CreateStreamResponse {
    CreateStreamResponse {
        stream_prefix: prefix.to_owned(),
        shard_count: groups.first().map_or(0, |group| group.shard_count),
        metadata_version: groups.iter().map(|group| group.metadata_version).max().unwrap_or(0),
        consumer_groups: groups.iter().map(|group| group.key.consumer_group().to_owned()).collect(),
    }
}

/// Answer of `create_group`.
pub(crate) fn group_response(groups: &[Group]) -> Result<GroupResponse, Refusal> {
    groups.first().map(Group::response).ok_or_else(Refusal::internal)
}

async fn locked(shared: &Arc<Shared>, plan: &Plan) -> Result<Vec<Group>, Refusal> {
    let token = streams::lock(shared, &plan.prefix).await?;
    let result = under_the_lock(shared, plan, &token).await;
    streams::unlock(shared, &plan.prefix, &token).await;
    result
}

async fn under_the_lock(
    shared: &Arc<Shared>,
    plan: &Plan,
    stream_token: &MutexToken,
) -> Result<Vec<Group>, Refusal> {
    let shard_count = shard_count(shared, plan).await?;
    let mut claims: Vec<Claim> = Vec::with_capacity(plan.groups.len());
    for group in &plan.groups {
        // The count was read under the lock: it must still be ours when the claim is made.
        let result = match shared.store.renew_stream(&plan.prefix, stream_token).await {
            Ok(true) => claim::claim(shared, group, shard_count).await,
            Ok(false) => Err(Refusal::new(
                ErrorCode::MutexUnavailable,
                format!("the lock of stream {} was lost: try again", plan.prefix),
            )),
            Err(error) => Err(Refusal::store_logged(&error, "renew the lock of a stream", &plan.prefix)),
        };
        match result {
            Ok(claim) => claims.push(claim),
            Err(refusal) => {
                claim::undo(shared, claims).await;
                return Err(refusal);
            }
        }
    }
    let mutexes = HeldMutexes {
        stream: (&plan.prefix, stream_token),
        groups: claims.iter().map(|claim| (claim.group.key.clone(), claim.token.clone())).collect(),
    };
    let provisioned = mutexes.while_running(shared, provision_all(shared, &claims)).await;
    if let Err(refusal) = provisioned {
        claim::undo(shared, claims).await;
        return Err(refusal);
    }
    let mut created = Vec::with_capacity(claims.len());
    let mut failed = None;
    for claim in claims {
        // One that fails here stays: its streams exist, and whoever loads it finishes the creation.
        match claim::admit(shared, claim).await {
            Ok(group) => created.push(group),
            Err(refusal) => failed = Some(refusal),
        }
    }
    match failed {
        None => Ok(created),
        Some(refusal) => Err(refusal),
    }
}

async fn provision_all(shared: &Shared, claims: &[Claim]) -> Result<(), Refusal> {
    for claim in claims {
        provision(shared, &claim.group.key, &claim.group.read_set().to_set()).await?;
    }
    Ok(())
}

/// The stream's shard count: that of the groups that exist on the prefix, else what is asked for, else the
/// default. Groups that stand in the way are a refusal.
async fn shard_count(shared: &Shared, plan: &Plan) -> Result<u32, Refusal> {
    let mut count = None;
    let failed = |error| Refusal::store_logged(&error, "look at a stream's groups", &plan.prefix);
    for candidates in streams::keys_of_prefix(shared, &plan.prefix).await.map_err(failed)? {
        let own = candidates.iter().any(|group| plan.groups.contains(group));
        match look_up(shared, candidates).await.map_err(failed)? {
            Listed::Record { group, .. } if group.stream_prefix() != plan.prefix => {}
            Listed::Record { group, loaded } => {
                let found = count_of(plan, &group, &loaded.group)?;
                if count.is_some_and(|count| count != found) {
                    let message = format!(
                        "the groups of stream {} have different counts after redis lost writes: they are being brought to one, try again",
                        plan.prefix
                    );
                    return Err(Refusal::new(ErrorCode::ActiveMigrationExists, message));
                }
                count = Some(found);
            }
            Listed::Deleted { .. } | Listed::NoGroup => {}
            // The group to be created itself: the claim says what is wrong with it.
            Listed::Missing { .. } | Listed::Unreadable { .. } if own => {}
            Listed::Missing { candidates } => {
                let other = candidates.into_iter().find(|group| group.stream_prefix() == plan.prefix);
                return Err(other.map_or_else(Refusal::internal, |group| Refusal::missing(&group)));
            }
            Listed::Unreadable { group, what } => return Err(Refusal::corrupt(&group, &what)),
        }
    }
    let default = shared.settings.default_shard_count;
    Ok(count.or(plan.shard_count).unwrap_or(default))
}

/// The count that an existing group of the prefix dictates.
fn count_of(plan: &Plan, group: &GroupKey, existing: &Group) -> Result<u32, Refusal> {
    let refuse = |code, message| Err(Refusal::new(code, message));
    if plan.new_stream {
        let message = format!("stream {} exists already: group {group} is on it", plan.prefix);
        return refuse(ErrorCode::StreamPrefixAlreadyExists, message);
    }
    if plan.groups.contains(group) {
        return refuse(ErrorCode::GroupAlreadyExists, format!("group {group} exists already"));
    }
    if let Some(migration) = &existing.active_resharding_id {
        let message = format!("migration {migration} of stream {} is running: wait for its end", plan.prefix);
        return refuse(ErrorCode::ActiveMigrationExists, message);
    }
    if existing.metadata_correction.is_some() {
        let message = format!("the metadata of group {group} is being corrected: try again later");
        return refuse(ErrorCode::MetadataSyncInProgress, message);
    }
    if let Some(asked) = plan.shard_count
        && asked != existing.shard_count
    {
        let message = format!(
            "stream {} has {} shards, {asked} were asked for: leave initialShardCount out to take the stream's",
            plan.prefix, existing.shard_count
        );
        return refuse(ErrorCode::ShardCountMismatch, message);
    }
    Ok(existing.shard_count)
}
