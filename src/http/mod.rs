//! The HTTP surface (protocol 8): parses, checks, asks the coordinator, writes JSON.
//!
//! A request's way: `observe` gives it an id, `routes` finds its handler, `names` and `body` read what it says,
//! the handler asks the coordinator. Whatever goes wrong on the way becomes an `ApiError`, and that an answer.
//!
//! # Metrics
//!
//! | name | labels | counts |
//! | --- | --- | --- |
//! | `rsc_http_requests_total` | `route` (its name in `routes`), `method`, `status`, `error_code` | requests answered |
//! | `rsc_http_request_seconds` | `route` | histogram: time from a request to its answer |
//! | `rsc_http_requests_in_flight` | | gauge: requests that are not answered yet |
//! | `rsc_http_panics_total` | | handlers that panicked |

mod assignments;
mod body;
mod error;
mod groups;
mod heartbeat;
mod json;
mod members;
mod migrations;
mod monitoring;
mod names;
mod observe;
mod probes;
mod producer_routing;
mod query;
mod request_id;
mod routes;
mod stream_reads;
mod strict;

#[cfg(test)]
mod surface_tests;
#[cfg(test)]
mod view_tests;

use std::time::Instant;

use actix_web::body::BoxBody;
use actix_web::dev::{ServiceFactory, ServiceRequest, ServiceResponse};
use actix_web::http::header::{CACHE_CONTROL, HeaderValue};
use actix_web::middleware::from_fn;
use actix_web::web::Data;
use actix_web::{App, Error, HttpResponse};
use metrics_exporter_prometheus::PrometheusHandle;
use rsc_actors::Coordinator;
use serde::Serialize;

/// What every handler works with; one for all threads.
pub(crate) struct ServerState {
    /// Decides everything.
    pub(crate) coordinator: Coordinator,
    /// This process, as the coordinator names itself in mutex tokens.
    pub(crate) instance_id: String,
    /// Largest accepted body, bytes (`server.max-body`).
    pub(crate) max_body: usize,
    /// When the process began to serve.
    pub(crate) started: Instant,
    /// Renders the metrics.
    pub(crate) metrics: PrometheusHandle,
}

/// The whole surface as one application.
pub(crate) fn application(
    state: Data<ServerState>,
) -> App<
    impl ServiceFactory<
        ServiceRequest,
        Config = (),
        Response = ServiceResponse<BoxBody>,
        Error = Error,
        InitError = (),
    >,
> {
    App::new().app_data(state).wrap(from_fn(observe::observe)).configure(routes::configure)
}

/// A JSON answer that no cache keeps.
fn answer(mut builder: actix_web::HttpResponseBuilder, body: &impl Serialize) -> HttpResponse {
    builder.insert_header((CACHE_CONTROL, HeaderValue::from_static("no-store"))).json(body)
}
