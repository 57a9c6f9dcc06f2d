//! `POST …/members/{m}/heartbeat` (protocol 4).

use actix_web::HttpResponse;
use actix_web::web::Data;
use rsc_protocol::HeartbeatRequest;

use super::body::JsonBody;
use super::error::ApiError;
use super::names::MemberPath;
use super::{ServerState, answer};

/// Hands a heartbeat to its group. The coordinator refuses what breaks the schema (400); what else can be wrong
/// with it is for the state machine to say, with HTTP 200 (protocol 4.1.2).
pub(super) async fn heartbeat(
    path: MemberPath,
    state: Data<ServerState>,
    JsonBody(request): JsonBody<HeartbeatRequest>,
) -> Result<HttpResponse, ApiError> {
    let response = state.coordinator.heartbeat(&path.group, &path.member_id, request).await?;
    Ok(answer(HttpResponse::Ok(), &response))
}
