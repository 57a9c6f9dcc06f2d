//! Configuration (protocol 12): one struct with a section per table, filled from layers, checked before use.
//!
//! [`load`] merges the layers and refuses what cannot be true; what it returns is safe to run with. The
//! decisions behind it are in `docs/decisions/0003-configuration.md`, every key with its default in
//! `config/rsc.toml`.

mod checks;
mod error;
mod keys;
mod layers;
mod redis_checks;
mod sections;
mod unbuilt;
mod values;

#[cfg(test)]
mod checks_tests;
#[cfg(test)]
mod layers_tests;

use serde::{Deserialize, Serialize};

pub(crate) use error::ConfigError;
pub(crate) use layers::{Flag, Loaded, Sources, load};
pub(crate) use sections::{
    AuditConfig, CoordinationConfig, LogFormat, ProducerConfig, RedisConfig, RedisMode, SecurityConfig,
    ServerConfig, StoreConfig, StoreType, StreamsConfig, TelemetryConfig,
};

/// Everything `rsc` can be told. Field names are the sections of protocol 12; in files and messages all
/// names are kebab-case.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Config {
    /// Where and how the daemon listens and ends.
    pub(crate) server: ServerConfig,
    /// Where group metadata is kept.
    pub(crate) store: StoreConfig,
    /// How Redis is reached.
    pub(crate) redis: RedisConfig,
    /// Timing and limits of groups and their members.
    pub(crate) coordination: CoordinationConfig,
    /// Streams and their shards.
    pub(crate) streams: StreamsConfig,
    /// What producers are told.
    pub(crate) producer: ProducerConfig,
    /// Authentication and limits on callers.
    pub(crate) security: SecurityConfig,
    /// The log of who changed what.
    pub(crate) audit: AuditConfig,
    /// Logs, metrics, traces.
    pub(crate) telemetry: TelemetryConfig,
    /// `--insecure`: serve without authentication, on loopback addresses only (protocol 8). A flag and
    /// nothing else: no file or environment that travels between machines can turn authentication off.
    #[serde(skip)]
    pub(crate) insecure: bool,
}

impl Config {
    /// The configuration as TOML with every secret masked; it loads again as a file (with `***` for each
    /// secret). Keys without a value are left out.
    ///
    /// # Errors
    /// When a value has no TOML form, which no checked configuration has.
    pub(crate) fn to_masked_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string(self)
    }
}
