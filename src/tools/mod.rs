//! The operator's tools that talk to Redis and not to a coordinator (protocol 12): `doctor`, `repair`, `backup`,
//! `restore`. What is decided and why: docs/decisions/0018-operators-tools.md.

pub(crate) mod backup;
mod backup_file;
pub(crate) mod doctor;
mod look_up;
pub(crate) mod repair;
pub(crate) mod restore;
mod scan;

use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, ValueEnum};
use rsc_core::Settings;
use rsc_protocol::GroupKey;
use rsc_protocol::keys::Keys;
use rsc_store::{RedisStore, RedisTools, StoreError};
use thiserror::Error;

use crate::config::{Config, Loaded, StoreType};
use crate::wiring;

/// What the tools call themselves in mutex tokens and in `CLIENT LIST`.
const INSTANCE: &str = "operator";

/// A tool cannot work with this configuration or these arguments: exit code 2.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub(crate) struct Unusable(String);

/// How a tool prints what it found or did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// A line each, for people
    #[default]
    Text,
    /// One JSON document
    Json,
}

/// Which groups a tool works on; all of them unless it is told.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct GroupFilter {
    /// Only groups of this stream
    #[arg(long, value_name = "PREFIX")]
    stream_prefix: Option<String>,
    /// Only groups of this name
    #[arg(long, value_name = "GROUP")]
    consumer_group: Option<String>,
}

impl GroupFilter {
    fn takes(&self, group: &GroupKey) -> bool {
        let fits = |wanted: &Option<String>, name: &str| wanted.as_ref().is_none_or(|wanted| wanted == name);
        fits(&self.stream_prefix, group.stream_prefix()) && fits(&self.consumer_group, group.consumer_group())
    }

    /// Whether everything is asked for.
    fn takes_all(&self) -> bool {
        self.stream_prefix.is_none() && self.consumer_group.is_none()
    }
}

/// A configured Redis, as the tools reach it. Nothing is connected before the first question.
struct Redis {
    config: Config,
    keys: Keys,
    /// How records are read; the same as in the daemon.
    timing: Settings,
    /// The daemon's own way to group metadata and streams.
    store: RedisStore,
    /// Everything else.
    tools: RedisTools,
}

impl Redis {
    fn of(config: Config) -> anyhow::Result<Self> {
        if config.store.store_type == StoreType::Memory {
            let problem = "store.type is memory: this tool looks into Redis, and there is none".to_owned();
            return Err(Unusable(problem).into());
        }
        let keys = Keys::new(config.store.key_prefix.as_str()).context("store.key-prefix")?;
        let settings = wiring::redis_settings(&config, keys.clone(), INSTANCE);
        let (store, tools) = (RedisStore::new(&settings)?, RedisTools::new(&settings)?);
        let timing = wiring::coordinator_settings(&config, INSTANCE).timing;
        Ok(Redis { config, keys, timing, store, tools })
    }
}

/// Runs a tool on what is configured. That Redis does not answer or refuses is a failure; only a Redis that cannot be used
/// as it is configured is bad configuration.
fn run(
    loaded: Loaded,
    tool: impl AsyncFnOnce(&Redis) -> anyhow::Result<ExitCode>,
) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let redis = Redis::of(loaded.config)?;
    runtime.block_on(tool(&redis)).map_err(|error| match error.downcast_ref::<StoreError>() {
        None | Some(StoreError::Misconfigured(_)) => error,
        Some(failure) => anyhow::anyhow!("{failure}"),
    })
}

/// Text that stays on its line, whatever somebody has called a key.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() { line.extend(character.escape_default()) } else { line.push(character) }
    }
    line
}

/// A few of many names, and how many more there are.
fn few(names: &[String]) -> String {
    const SHOWN: usize = 5;
    let shown = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN { format!("{shown} and {} more", names.len() - SHOWN) } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_break_a_line() {
        assert_eq!(one_line("a\nb\u{1b}[31m"), "a\\nb\\u{1b}[31m");
        let names: Vec<String> = (0..7).map(|name| name.to_string()).collect();
        assert_eq!(few(&names), "0, 1, 2, 3, 4 and 2 more");
        assert_eq!(few(&names[..2]), "0, 1");
    }

    #[test]
    fn a_filter_takes_what_fits_both_names() {
        let group = GroupKey::new("orders", "billing").unwrap();
        let filter = |prefix: Option<&str>, name: Option<&str>| GroupFilter {
            stream_prefix: prefix.map(str::to_owned),
            consumer_group: name.map(str::to_owned),
        };
        for (filter, takes) in [
            (filter(None, None), true),
            (filter(Some("orders"), None), true),
            (filter(None, Some("billing")), true),
            (filter(Some("orders"), Some("billing")), true),
            (filter(Some("orders"), Some("other")), false),
            (filter(Some("other"), None), false),
        ] {
            assert_eq!(filter.takes(&group), takes, "{filter:?}");
        }
    }
}
