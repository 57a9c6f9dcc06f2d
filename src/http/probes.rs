//! `/livez`, `/readyz`, `/metrics`: for whatever runs and watches the process.

use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use actix_web::web::Data;
use rsc_protocol::ErrorCode;
use serde_json::json;

use super::error::ApiError;
use super::{ServerState, answer};

/// How long `/readyz` waits for the store at most.
const READY_TIMEOUT: Duration = Duration::from_secs(2);

/// The process is alive. Asks nobody: a store that hangs is no reason to be killed.
pub(super) async fn livez() -> HttpResponse {
    answer(HttpResponse::Ok(), &json!({"status": "UP"}))
}

/// Work can be taken: not terminating, and the store answers.
pub(super) async fn readyz(state: Data<ServerState>) -> Result<HttpResponse, ApiError> {
    check_ready(&state).await?;
    Ok(answer(HttpResponse::Ok(), &json!({"status": "UP"})))
}

/// Why no work can be taken, within [`READY_TIMEOUT`].
pub(super) async fn check_ready(state: &ServerState) -> Result<(), ApiError> {
    match tokio::time::timeout(READY_TIMEOUT, state.coordinator.ready()).await {
        Ok(ready) => Ok(ready?),
        Err(_) => Err(ApiError::new(
            ErrorCode::RedisUnavailable,
            format!("the store did not answer within {} s", READY_TIMEOUT.as_secs()),
        )),
    }
}

/// Everything counted in this process, as Prometheus reads it.
pub(super) async fn metrics(state: Data<ServerState>) -> HttpResponse {
    HttpResponse::Ok()
        .insert_header((CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8"))
        .insert_header((CACHE_CONTROL, "no-store"))
        .body(state.metrics.render())
}
