//! The recorder behind every counter of this process, and what it is told about the process itself.

use std::time::Duration;

use anyhow::Context;
use metrics::{Unit, describe_counter, describe_gauge, describe_histogram, gauge};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

/// Upper bounds of every histogram of seconds.
const SECONDS: &[f64] =
    &[0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// How often recorded values are sorted into their buckets when nobody reads them.
pub(crate) const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Installs the recorder; once per process.
///
/// # Errors
/// When one is installed already.
pub(crate) fn install() -> anyhow::Result<PrometheusHandle> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), SECONDS)
        .and_then(PrometheusBuilder::install_recorder)
        .context("metrics cannot be recorded")?;
    describe_counter!(
        "rsc_http_requests_total",
        "requests answered, by route, method, status and error code"
    );
    describe_histogram!("rsc_http_request_seconds", Unit::Seconds, "time from a request to its answer");
    describe_gauge!("rsc_http_requests_in_flight", "requests that are not answered yet");
    describe_counter!("rsc_http_panics_total", "handlers that panicked");
    describe_gauge!("rsc_build_info", "always 1; the version is a label");
    gauge!("rsc_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    // The coordinator raises it; a series that is always there is easier to watch.
    gauge!("rsc_terminating").set(0.0);
    Ok(handle)
}
