//! Streams and groups: create, read, delete (protocol 8). What the types of a body do not say is checked by
//! the coordinator, for every way in.

use actix_web::HttpResponse;
use actix_web::web::Data;
use rsc_protocol::admin::{CreateGroupRequest, CreateStreamRequest, DeleteGroupRequest};

use super::body::JsonBody;
use super::error::ApiError;
use super::names::{GroupPath, StreamPath};
use super::{ServerState, answer};

/// `POST /streams/{p}`.
pub(super) async fn create_stream(
    StreamPath(stream_prefix): StreamPath,
    state: Data<ServerState>,
    JsonBody(request): JsonBody<CreateStreamRequest>,
) -> Result<HttpResponse, ApiError> {
    let response = state.coordinator.create_stream(&stream_prefix, request).await?;
    Ok(answer(HttpResponse::Created(), &response))
}

/// `POST /streams/{p}/groups/{g}`.
pub(super) async fn create(
    GroupPath(group): GroupPath,
    state: Data<ServerState>,
    JsonBody(request): JsonBody<CreateGroupRequest>,
) -> Result<HttpResponse, ApiError> {
    let response = state.coordinator.create_group(&group, request).await?;
    Ok(answer(HttpResponse::Created(), &response))
}

/// `GET /streams/{p}/groups/{g}`.
pub(super) async fn read(
    GroupPath(group): GroupPath,
    state: Data<ServerState>,
) -> Result<HttpResponse, ApiError> {
    let response = state.coordinator.group_summary(&group).await?;
    Ok(answer(HttpResponse::Ok(), &response))
}

/// `DELETE /streams/{p}/groups/{g}`.
pub(super) async fn delete(
    GroupPath(group): GroupPath,
    state: Data<ServerState>,
    JsonBody(request): JsonBody<DeleteGroupRequest>,
) -> Result<HttpResponse, ApiError> {
    let response = state.coordinator.delete_group(&group, request).await?;
    Ok(answer(HttpResponse::Ok(), &response))
}
