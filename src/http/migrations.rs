//! Changing the shard count, and what becomes of it (protocol 6, 8).

use actix_web::HttpResponse;
use actix_web::web::Data;
use rsc_actors::Scaled;
use rsc_protocol::GroupKey;
use rsc_protocol::resharding::{RollbackRequest, ScaleRequest};

use super::body::JsonBody;
use super::error::ApiError;
use super::names::{GroupPath, MigrationPath, StreamPath};
use super::{ServerState, answer};

/// `POST /streams/{p}/scale`.
pub(super) async fn scale_stream(
    StreamPath(stream_prefix): StreamPath,
    state: Data<ServerState>,
    JsonBody(request): JsonBody<ScaleRequest>,
) -> Result<HttpResponse, ApiError> {
    scale(&state, &stream_prefix, None, request).await
}

/// `POST /streams/{p}/groups/{g}/scale`.
pub(super) async fn scale_group(
    GroupPath(group): GroupPath,
    state: Data<ServerState>,
    JsonBody(request): JsonBody<ScaleRequest>,
) -> Result<HttpResponse, ApiError> {
    scale(&state, group.stream_prefix(), Some(&group), request).await
}

async fn scale(
    state: &ServerState,
    stream_prefix: &str,
    group: Option<&GroupKey>,
    request: ScaleRequest,
) -> Result<HttpResponse, ApiError> {
    Ok(match state.coordinator.scale(stream_prefix, group, request).await? {
        Scaled::Done(response) => answer(HttpResponse::Accepted(), &response),
        Scaled::Planned(plan) => answer(HttpResponse::Ok(), &plan),
    })
}

/// `POST …/migrations/{id}/rollback`.
pub(super) async fn roll_back(
    MigrationPath { group, resharding_id }: MigrationPath,
    state: Data<ServerState>,
    JsonBody(request): JsonBody<RollbackRequest>,
) -> Result<HttpResponse, ApiError> {
    let response = state.coordinator.roll_back(&group, &resharding_id, request).await?;
    Ok(answer(HttpResponse::Accepted(), &response))
}

/// `GET …/migrations/{id}`.
pub(super) async fn read(
    MigrationPath { group, resharding_id }: MigrationPath,
    state: Data<ServerState>,
) -> Result<HttpResponse, ApiError> {
    let response = state.coordinator.migration(&group, &resharding_id).await?;
    Ok(answer(HttpResponse::Ok(), &response))
}

/// `GET …/migrations`.
pub(super) async fn list(
    GroupPath(group): GroupPath,
    state: Data<ServerState>,
) -> Result<HttpResponse, ApiError> {
    let response = state.coordinator.migrations(&group).await?;
    Ok(answer(HttpResponse::Ok(), &response))
}
