//! What happens around every request: its id, one log line, metrics, and a net under panics.

use std::any::Any;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::{ConnectionType, Method, StatusCode};
use actix_web::middleware::Next;
use actix_web::web::Data;
use actix_web::{Error, HttpResponse, ResponseError};
use futures_util::FutureExt;
use rsc_protocol::{ErrorBody, ErrorCode};
use tracing::Level;

use super::ServerState;
use super::error::{AnsweredError, ApiError};
use super::request_id::{X_REQUEST_ID, header_value, request_id};
use super::routes;
use crate::panics;

/// The longest path in a log line, in characters.
const LONGEST_LOGGED_PATH: usize = 1024;

/// The middleware. Runs outermost, so that nothing is answered without a request id.
pub(super) async fn observe(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let observed = Observed {
        request_id: request_id(request.headers()),
        method: request.method().clone(),
        path: request.uri().path().chars().take(LONGEST_LOGGED_PATH).collect(),
        started: Instant::now(),
    };
    let _in_flight = InFlight::begin();
    // The call is made inside the guarded future: a handler may panic before it first waits.
    let guarded = AssertUnwindSafe(async move { next.call(request).await }).catch_unwind();
    match guarded.await {
        Ok(Ok(answer)) => Ok(observed.answered(answer.map_into_boxed_body())),
        Ok(Err(error)) => Err(error),
        Err(panic) => Err(observed.panicked(panic.as_ref()).into()),
    }
}

/// Counts a request until it is answered or its client has gone.
struct InFlight;

impl InFlight {
    fn begin() -> Self {
        metrics::gauge!("rsc_http_requests_in_flight").increment(1.0);
        InFlight
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        metrics::gauge!("rsc_http_requests_in_flight").decrement(1.0);
    }
}

struct Observed {
    request_id: String,
    method: Method,
    path: String,
    started: Instant,
}

impl Observed {
    fn answered(&self, mut answer: ServiceResponse) -> ServiceResponse {
        let error = answer.response().extensions().get::<AnsweredError>().cloned();
        if answer.status() == StatusCode::INTERNAL_SERVER_ERROR {
            answer = answer.map_body(|_, _| internal_error_body(&self.request_id));
        }
        if let Some(value) = header_value(&self.request_id) {
            answer.headers_mut().insert(X_REQUEST_ID, value);
        }
        if is_terminating(&answer) {
            // Sends clients that keep their connection to another instance.
            answer.response_mut().head_mut().set_connection_type(ConnectionType::Close);
        }
        let route = routes::name_of(answer.request());
        self.record(route, answer.status(), error.as_ref());
        answer
    }

    fn panicked(&self, panic: &(dyn Any + Send)) -> Panicked {
        let error = AnsweredError { code: ErrorCode::InternalError, message: panics::text(panic).to_owned() };
        self.record(routes::UNKNOWN, StatusCode::INTERNAL_SERVER_ERROR, Some(&error));
        metrics::counter!("rsc_http_panics_total").increment(1);
        Panicked { request_id: self.request_id.clone() }
    }

    fn record(&self, route: &'static str, status: StatusCode, error: Option<&AnsweredError>) {
        let took = self.started.elapsed();
        self.log(route, status, took, error);
        let code = error.map_or("", |error| error.code.as_str());
        metrics::counter!(
            "rsc_http_requests_total",
            "route" => route, "method" => known_method(&self.method),
            "status" => status.as_str().to_owned(), "error_code" => code
        )
        .increment(1);
        metrics::histogram!("rsc_http_request_seconds", "route" => route).record(took.as_secs_f64());
    }

    fn log(&self, route: &'static str, status: StatusCode, took: Duration, error: Option<&AnsweredError>) {
        let level = if status == StatusCode::INTERNAL_SERVER_ERROR {
            Level::ERROR
        } else if route != routes::HEARTBEAT && is_mutation(&self.method) {
            Level::INFO
        } else {
            Level::DEBUG
        };
        let error_code = error.map(|error| error.code.as_str());
        let reason = error.map(|error| error.message.as_str());
        let duration_ms = u64::try_from(took.as_micros()).unwrap_or(u64::MAX) as f64 / 1000.0;
        // The level of an event must be known when the program is built.
        macro_rules! line {
            ($level:expr) => {
                tracing::event!(
                    $level,
                    request_id = self.request_id,
                    method = self.method.as_str(),
                    path = self.path,
                    status = status.as_u16(),
                    duration_ms,
                    error_code,
                    reason,
                    "request"
                )
            };
        }
        match level {
            Level::ERROR => line!(Level::ERROR),
            Level::INFO => line!(Level::INFO),
            _ => line!(Level::DEBUG),
        }
    }
}

fn is_terminating(answer: &ServiceResponse) -> bool {
    let state = answer.request().app_data::<Data<ServerState>>();
    state.is_some_and(|state| state.coordinator.is_terminating())
}

fn is_mutation(method: &Method) -> bool {
    !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE)
}

/// The method as a label: a client can make up methods without end.
fn known_method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::DELETE => "DELETE",
        _ => "other",
    }
}

fn internal_error_body(request_id: &str) -> BoxBody {
    let message = format!("internal error: the coordinator's log tells more under request id {request_id}");
    let body = ErrorBody::new(ErrorCode::InternalError, message);
    BoxBody::new(serde_json::to_string(&body).unwrap_or_default())
}

/// A handler panicked. The answer says which request it was and nothing else.
#[derive(Debug)]
struct Panicked {
    request_id: String,
}

impl fmt::Display for Panicked {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "request {} panicked", self.request_id)
    }
}

impl std::error::Error for Panicked {}

impl ResponseError for Panicked {
    fn error_response(&self) -> HttpResponse {
        let mut answer = ApiError::new(ErrorCode::InternalError, "").error_response();
        if let Some(value) = header_value(&self.request_id) {
            answer.headers_mut().insert(X_REQUEST_ID, value);
        }
        answer.set_body(internal_error_body(&self.request_id))
    }
}
