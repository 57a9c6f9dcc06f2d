//! `/monitoring/…` (protocol 8): what people and dashboards read. Nothing here writes or takes a mutex.

use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::web::Data;
use rsc_protocol::ErrorCode;
use rsc_protocol::admin::GroupResponse;
use serde::Serialize;

use super::assignments::Assignments;
use super::error::ApiError;
use super::members::Members;
use super::names::GroupPath;
use super::probes::check_ready;
use super::{ServerState, answer};

/// How long `/health` waits for the list of groups at most.
const GROUPS_TIMEOUT: Duration = Duration::from_secs(3);

/// `/monitoring/health`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Health {
    status: HealthStatus,
    /// Why the status is not `UP`.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    instance_id: String,
    version: &'static str,
    /// Milliseconds since this process began to serve.
    uptime_ms: u64,
    store: StoreHealth,
    /// Groups in the index that have a record; `null` while the store does not answer.
    group_count: Option<usize>,
    /// Groups that take no heartbeats until a person repairs something.
    unhealthy_groups: Vec<UnhealthyGroup>,
    /// Metadata keys of the index without a record.
    missing: Vec<String>,
    /// Groups of this instance whose last commits fewer than `redis.wait-replicas` replicas have: nobody starts a shard
    /// of theirs until they do.
    unreplicated_groups: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
enum HealthStatus {
    /// The store answers and every group is healthy.
    Up,
    /// The store does not answer, or a group needs a person.
    Degraded,
    /// This instance is shutting down.
    Terminating,
}

#[derive(Serialize)]
struct StoreHealth {
    kind: &'static str,
    reachable: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct UnhealthyGroup {
    stream_prefix: String,
    consumer_group: String,
    error_code: Option<ErrorCode>,
    message: Option<String>,
}

/// `GET /monitoring/health`: always 200; whether work can be taken is what `/readyz` says.
pub(super) async fn health(state: Data<ServerState>) -> HttpResponse {
    let coordinator = &state.coordinator;
    let (groups, ready) =
        tokio::join!(tokio::time::timeout(GROUPS_TIMEOUT, coordinator.groups()), check_ready(&state));
    let groups = match groups {
        Ok(groups) => groups.map_err(|refusal| refusal.message),
        Err(_) => Err(format!("the store did not list the groups within {} s", GROUPS_TIMEOUT.as_secs())),
    };
    let store_answers = groups.is_ok() || ready.is_ok();
    let (group_count, unhealthy_groups, missing, trouble) = match groups {
        Ok(list) => {
            let count = list.groups.len();
            let unhealthy: Vec<_> =
                list.groups.into_iter().filter(|group| !group.healthy).map(unhealthy).collect();
            let trouble = match (unhealthy.len(), list.missing.len()) {
                (0, 0) => None,
                (unhealthy, missing) => Some(format!(
                    "{unhealthy} groups are unhealthy, {missing} are in the index without a record"
                )),
            };
            (Some(count), unhealthy, list.missing, trouble)
        }
        Err(message) => (None, Vec::new(), Vec::new(), Some(message)),
    };
    let unreplicated_groups = coordinator.unreplicated_groups();
    let trouble = trouble.or_else(|| {
        (unreplicated_groups > 0).then(|| {
            format!(
                "the last commits of {unreplicated_groups} groups are on fewer than redis.wait-replicas replicas: nobody \
                 starts a shard there until they are; bring the replicas back"
            )
        })
    });
    let trouble = trouble.or_else(|| coordinator.write_trouble());
    let (status, reason) = if coordinator.is_terminating() {
        (HealthStatus::Terminating, Some("this instance is shutting down".to_owned()))
    } else if let Some(trouble) = trouble.or(ready.err().map(|error| error.message().to_owned())) {
        (HealthStatus::Degraded, Some(trouble))
    } else {
        (HealthStatus::Up, None)
    };
    let body = Health {
        status,
        reason,
        instance_id: state.instance_id.clone(),
        version: env!("CARGO_PKG_VERSION"),
        uptime_ms: u64::try_from(state.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        store: StoreHealth { kind: coordinator.store_kind(), reachable: store_answers },
        group_count,
        unhealthy_groups,
        missing,
        unreplicated_groups,
    };
    answer(HttpResponse::Ok(), &body)
}

fn unhealthy(group: GroupResponse) -> UnhealthyGroup {
    UnhealthyGroup {
        stream_prefix: group.stream_prefix,
        consumer_group: group.consumer_group,
        error_code: group.error_code,
        message: group.message,
    }
}

/// `GET /monitoring/groups`.
pub(super) async fn groups(state: Data<ServerState>) -> Result<HttpResponse, ApiError> {
    Ok(answer(HttpResponse::Ok(), &state.coordinator.groups().await?))
}

/// `GET /monitoring/streams/{p}/groups/{g}`.
pub(super) async fn summary(
    GroupPath(group): GroupPath,
    state: Data<ServerState>,
) -> Result<HttpResponse, ApiError> {
    Ok(answer(HttpResponse::Ok(), &state.coordinator.group_summary(&group).await?))
}

/// `GET …/members`.
pub(super) async fn members(
    GroupPath(group): GroupPath,
    state: Data<ServerState>,
) -> Result<HttpResponse, ApiError> {
    let group = state.coordinator.group(&group).await?;
    Ok(answer(HttpResponse::Ok(), &Members::of(&group)))
}

/// `GET …/assignments`.
pub(super) async fn assignments(
    GroupPath(group): GroupPath,
    state: Data<ServerState>,
) -> Result<HttpResponse, ApiError> {
    let group = state.coordinator.group(&group).await?;
    Ok(answer(HttpResponse::Ok(), &Assignments::of(&group)))
}

/// `GET …/actor`.
pub(super) async fn actor(
    GroupPath(group): GroupPath,
    state: Data<ServerState>,
) -> Result<HttpResponse, ApiError> {
    Ok(answer(HttpResponse::Ok(), &state.coordinator.actor(&group).await?))
}
