//! Request bodies: JSON within the limit, or an error answer that the client can read.

use std::time::Duration;

use actix_web::dev::Payload;
use actix_web::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use actix_web::web::{Bytes, BytesMut, Data};
use actix_web::{FromRequest, HttpRequest};
use futures_util::StreamExt;
use futures_util::future::LocalBoxFuture;
use rsc_actors::Refusal;
use rsc_protocol::ErrorCode;
use serde::de::DeserializeOwned;

use super::error::ApiError;
use super::{ServerState, json};

/// How long a client may take to send its body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// A body that was read and understood. What is wrong with one is answered with 413, 415 or 400.
///
/// A body beyond the limit is never read to its end here: the server closes such a connection politely, or
/// discards the rest, so that the client can read the answer (see `serve`).
pub(super) struct JsonBody<T>(pub(super) T);

impl<T: DeserializeOwned + 'static> FromRequest for JsonBody<T> {
    type Error = ApiError;
    type Future = LocalBoxFuture<'static, Result<Self, ApiError>>;

    fn from_request(request: &HttpRequest, payload: &mut Payload) -> Self::Future {
        let limit = request.app_data::<Data<ServerState>>().map_or(0, |state| state.max_body);
        let acceptable = check_headers(request, limit);
        let payload = payload.take();
        let state = request.app_data::<Data<ServerState>>().cloned();
        Box::pin(async move {
            acceptable?;
            let body = tokio::select! {
                biased;
                body = read_within(BODY_TIMEOUT, payload, limit) => body?,
                () = terminating(state) => return Err(Refusal::terminating().into()),
            };
            json::parse(&body).map(JsonBody).map_err(ApiError::invalid)
        })
    }
}

/// Resolves once the coordinator has been terminating for long enough for a body that is on its way: who does
/// not send the rest must not delay the end (protocol 9).
async fn terminating(state: Option<Data<ServerState>>) {
    const GRACE: Duration = Duration::from_millis(300);
    let Some(state) = state else { return std::future::pending().await };
    while !state.coordinator.is_terminating() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    tokio::time::sleep(GRACE).await;
}

fn check_headers(request: &HttpRequest, limit: usize) -> Result<(), ApiError> {
    let headers = request.headers();
    let declared = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|bytes| usize::try_from(bytes).map_or(true, |bytes| bytes > limit)) {
        return Err(too_large(limit));
    }
    if let Some(encoding) = headers.get(CONTENT_ENCODING)
        && !encoding.as_bytes().eq_ignore_ascii_case(b"identity")
    {
        return Err(ApiError::new(
            ErrorCode::UnsupportedMediaType,
            "the body is compressed: send it without Content-Encoding",
        ));
    }
    let kinds = headers.get_all(CONTENT_TYPE);
    for kind in kinds {
        if !kind.to_str().is_ok_and(is_json) {
            return Err(ApiError::new(
                ErrorCode::UnsupportedMediaType,
                "the body is not declared as JSON: send Content-Type: application/json",
            ));
        }
    }
    Ok(())
}

/// Whether a media type means JSON in UTF-8: `application/json` or `…+json`, with no other charset.
fn is_json(media_type: &str) -> bool {
    let mut parts = media_type.split(';').map(str::trim);
    let essence = parts.next().unwrap_or_default().to_ascii_lowercase();
    let named =
        essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"));
    named
        && parts.all(|parameter| match parameter.split_once('=') {
            Some((name, value)) if name.trim().eq_ignore_ascii_case("charset") => {
                value.trim().trim_matches('"').eq_ignore_ascii_case("utf-8")
            }
            _ => true,
        })
}

async fn read_within(longest: Duration, payload: Payload, limit: usize) -> Result<Bytes, ApiError> {
    match tokio::time::timeout(longest, read(payload, limit)).await {
        Ok(body) => body,
        Err(_) => {
            let seconds = longest.as_secs_f64();
            Err(ApiError::invalid(format!("the body did not arrive within {seconds} s")))
        }
    }
}

async fn read(mut payload: Payload, limit: usize) -> Result<Bytes, ApiError> {
    let mut body = BytesMut::new();
    while let Some(chunk) = payload.next().await {
        let chunk = chunk.map_err(|_| {
            ApiError::invalid("the body ended before its announced end, or its transfer encoding is broken")
        })?;
        if body.len() + chunk.len() > limit {
            return Err(too_large(limit));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body.freeze())
}

fn too_large(limit: usize) -> ApiError {
    ApiError::new(
        ErrorCode::PayloadTooLarge,
        format!("the body has more than {limit} bytes, the limit server.max-body of this coordinator"),
    )
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    #[test]
    fn media_types_that_mean_json() {
        for kind in [
            "application/json",
            "Application/JSON",
            "application/json; charset=utf-8",
            "application/json;charset=\"UTF-8\"",
            "application/problem+json",
            "application/json; version=1",
        ] {
            assert!(is_json(kind), "{kind}");
        }
        for kind in
            ["", "text/plain", "text/json", "application/jsonp", "application/json; charset=latin1", "json"]
        {
            assert!(!is_json(kind), "{kind}");
        }
    }

    #[actix_web::test]
    async fn a_body_that_never_ends_is_given_up() {
        let begun = stream::iter([Ok(Bytes::from_static(b"{"))]).chain(stream::pending()).boxed_local();
        let payload = Payload::Stream { payload: begun };
        let error = read_within(Duration::from_millis(20), payload, 100).await.unwrap_err();
        assert_eq!(error, ApiError::invalid("the body did not arrive within 0.02 s"));
    }
}
