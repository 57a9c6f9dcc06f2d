//! Log lines on standard error.

use std::io::IsTerminal;

use anyhow::Context;
use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, TelemetryConfig};

/// Starts writing log lines to standard error, in the configured format and through the configured filter.
///
/// # Errors
/// When the filter cannot be read (a checked configuration has none such) or logging has been started.
pub(crate) fn init_logging(telemetry: &TelemetryConfig) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&telemetry.log_filter).context("telemetry.log-filter")?;
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match telemetry.log_format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => lines.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("logging cannot be started: {error}"))
}
