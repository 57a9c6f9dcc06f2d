//! Error answers: the JSON shape, statuses and headers of protocol 8.

use std::fmt;

use actix_web::http::StatusCode;
use actix_web::http::header::{ALLOW, CACHE_CONTROL, RETRY_AFTER};
use actix_web::{HttpResponse, ResponseError};
use rsc_actors::Refusal;
use rsc_protocol::{ErrorBody, ErrorCode, NameError};

/// Why a request was not done. Becomes the error body of protocol 8; status and `Retry-After` follow from
/// the code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    code: ErrorCode,
    message: String,
    allow: Option<&'static str>,
}

/// What was answered, kept beside the answer for the log and the metrics.
#[derive(Clone, Debug)]
pub(super) struct AnsweredError {
    /// The code in the answer.
    pub(super) code: ErrorCode,
    /// The message, also where the answer itself must not carry it.
    pub(super) message: String,
}

impl ApiError {
    /// An error of the given code with a sentence for people.
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        ApiError { code, message: message.into(), allow: None }
    }

    /// `INVALID_REQUEST`: the body, path or a header breaks the schema or a limit.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        ApiError::new(ErrorCode::InvalidRequest, message)
    }

    /// `NOT_FOUND`: no such route.
    pub(crate) fn no_route() -> Self {
        ApiError::new(
            ErrorCode::NotFound,
            "no such route: check the path, and that each name in it is percent-encoded",
        )
    }

    /// `METHOD_NOT_ALLOWED`: the route exists with the methods in `allow`, as the header of that name lists
    /// them.
    pub(crate) fn method_not_allowed(allow: &'static str) -> Self {
        ApiError {
            code: ErrorCode::MethodNotAllowed,
            message: format!("this route takes {allow}"),
            allow: Some(allow),
        }
    }

    /// The sentence for people.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.code.as_str(), self.message)
    }
}

impl std::error::Error for ApiError {}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        ApiError::new(refusal.code, refusal.message)
    }
}

impl From<NameError> for ApiError {
    fn from(error: NameError) -> Self {
        ApiError::invalid(error.to_string())
    }
}

impl ResponseError for ApiError {
    fn status_code(&self) -> StatusCode {
        status_of(self.code)
    }

    fn error_response(&self) -> HttpResponse {
        // What went wrong inside is for the log. The request id is added on the way out (see `observe`).
        let shown = match self.code {
            ErrorCode::InternalError => "internal error",
            _ => self.message.as_str(),
        };
        let mut answer = HttpResponse::build(self.status_code());
        answer.insert_header((CACHE_CONTROL, "no-store"));
        if let Some(seconds) = self.code.retry_after_seconds() {
            answer.insert_header((RETRY_AFTER, seconds));
        }
        if let Some(allow) = self.allow {
            answer.insert_header((ALLOW, allow));
        }
        let mut answer = answer.json(ErrorBody::new(self.code, shown));
        answer.extensions_mut().insert(AnsweredError { code: self.code, message: self.message.clone() });
        answer
    }
}

/// The status that carries `code`.
pub(super) fn status_of(code: ErrorCode) -> StatusCode {
    StatusCode::from_u16(code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

#[cfg(test)]
mod tests {
    use actix_web::body::to_bytes;
    use actix_web::http::header::CONTENT_TYPE;

    use super::*;

    #[actix_web::test]
    async fn every_code_has_its_status_and_tells_when_to_come_back() {
        for &code in ErrorCode::ALL {
            let answer = ApiError::new(code, "why").error_response();
            assert_eq!(answer.status().as_u16(), code.http_status(), "{code:?}");
            let retry_after =
                answer.headers().get(RETRY_AFTER).map(|value| value.to_str().unwrap().to_owned());
            assert_eq!(
                retry_after,
                code.retry_after_seconds().map(|seconds| seconds.to_string()),
                "{code:?}"
            );
            assert_eq!(answer.headers().get(CONTENT_TYPE).unwrap(), "application/json");
            let body: ErrorBody =
                serde_json::from_slice(&to_bytes(answer.into_body()).await.unwrap()).unwrap();
            assert_eq!((body.status.as_str(), body.error_code), (code.status_text(), code));
        }
    }

    #[actix_web::test]
    async fn an_internal_error_keeps_its_cause_to_itself() {
        let answer = ApiError::new(ErrorCode::InternalError, "thread 'x' at src/secret.rs").error_response();
        let kept = answer.extensions().get::<AnsweredError>().cloned().unwrap();
        assert_eq!(kept.message, "thread 'x' at src/secret.rs");
        let body = to_bytes(answer.into_body()).await.unwrap();
        assert!(!String::from_utf8_lossy(&body).contains("secret"));
    }
}
