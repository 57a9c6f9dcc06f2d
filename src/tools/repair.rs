//! `rsc repair index`: makes the index of groups (`P:groups`) say again which groups there are. Records are never
//! touched.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use rsc_store::{GroupStore, StoreError};
use serde::Serialize;
use serde_json::json;

use super::look_up::{Listed, look_up};
use super::scan::{Pace, keys_of_groups};
use super::{Output, Redis, one_line};
use crate::cli::ConfigArguments;
use crate::config::Loaded;

/// What can be repaired.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum RepairCommand {
    /// Rebuild the index of groups by looking through all keys
    Index(Box<RepairIndexArguments>),
}

impl RepairCommand {
    /// What decides the configuration.
    pub(crate) fn config(&self) -> &ConfigArguments {
        let RepairCommand::Index(arguments) = self;
        &arguments.config
    }
}

/// Arguments of `rsc repair index`.
#[derive(Args, Clone, Debug)]
pub(crate) struct RepairIndexArguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// Say what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Also remove entries whose record is missing although nobody deleted the group: it is then as if it had never
    /// been created
    #[arg(long)]
    remove_missing: bool,
    /// Keys that Redis looks at for one page
    #[arg(long, value_name = "N", default_value_t = Pace::GENTLE.count, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    scan_count: u32,
    /// Pause between two pages
    #[arg(long, value_name = "TIME", default_value = "10ms", value_parser = humantime::parse_duration)]
    scan_pause: Duration,
    /// When the scan is given up
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = humantime::parse_duration)]
    time_limit: Duration,
    /// How the outcome is printed
    #[arg(long, value_enum, default_value_t)]
    output: Output,
}

/// What is done about one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Action {
    /// Put into the index.
    Add,
    /// Taken out of the index.
    Remove,
    /// Left in the index, though something is wrong with it.
    Keep,
    /// Left out of the index.
    LeaveOut,
}

#[derive(Clone, Debug, Serialize)]
struct Done {
    action: Action,
    key: String,
    reason: String,
}

/// Repairs the index.
///
/// # Errors
/// When Redis does not answer or refuses, or the scan takes too long. What was done until then stays, and is right.
pub(crate) fn run(loaded: Loaded, command: &RepairCommand) -> anyhow::Result<ExitCode> {
    let RepairCommand::Index(arguments) = command;
    super::run(loaded, async |redis| {
        let done = repair(redis, arguments).await?;
        match arguments.output {
            Output::Json => {
                let document = json!({
                    "version": 1,
                    "dryRun": arguments.dry_run,
                    "index": redis.keys.groups(),
                    "actions": done,
                });
                crate::print(&format!("{document:#}\n"))
            }
            Output::Text => crate::print(&text(&done, arguments.dry_run)),
        }
    })
}

fn text(done: &[Done], dry_run: bool) -> String {
    let mut text = String::new();
    for one in done {
        let word = match (one.action, dry_run) {
            (Action::Add, false) => "added",
            (Action::Add, true) => "would add",
            (Action::Remove, false) => "removed",
            (Action::Remove, true) => "would remove",
            (Action::Keep, _) => "kept",
            (Action::LeaveOut, _) => "left out",
        };
        text.push_str(&format!("{word:<12} {}: {}\n", one_line(&one.key), one_line(&one.reason)));
    }
    if done.is_empty() {
        text.push_str("nothing to repair: the index names every group and nothing else\n");
    }
    text
}

async fn repair(redis: &Redis, arguments: &RepairIndexArguments) -> Result<Vec<Done>, StoreError> {
    let pace =
        Pace { count: arguments.scan_count, pause: arguments.scan_pause, time_limit: arguments.time_limit };
    let keys = keys_of_groups(redis, pace).await?;
    // Read after the scan: a group that was created meanwhile is then in both.
    let indexed: BTreeSet<String> = redis.store.index().await?.into_iter().collect();
    let mut done = Vec::new();
    for key in keys.iter().filter(|key| redis.keys.joined_of_metadata(key).is_some()) {
        if !indexed.contains(key)
            && let Some(one) = unindexed(redis, arguments, key).await?
        {
            done.push(one);
        }
    }
    for key in &indexed {
        if let Some(one) = entry(redis, arguments, key).await? {
            done.push(one);
        }
    }
    Ok(done)
}

/// A metadata key that the index does not name.
async fn unindexed(
    redis: &Redis,
    arguments: &RepairIndexArguments,
    key: &str,
) -> Result<Option<Done>, StoreError> {
    let (action, reason) = match look_up(redis, key).await? {
        Listed::Record(record) => (Action::Add, format!("the record of group {}", record.group())),
        // The group exists and is in trouble; the index has to say that it exists.
        Listed::Unreadable { owner: Some(owner), error, .. } => {
            (Action::Add, format!("the record of group {owner}, which cannot be used: {error}"))
        }
        Listed::Unreadable { owner: None, error, .. } => {
            (Action::LeaveOut, format!("the record does not say that it is this key's: {error}"))
        }
        Listed::WrongType { found } => (Action::LeaveOut, format!("holds a {found}, not a record")),
        Listed::NotAKey => (Action::LeaveOut, "no group's names give this key".to_owned()),
        // Deleted since the scan.
        Listed::Missing { .. } => return Ok(None),
    };
    if action == Action::Add && !arguments.dry_run {
        index(redis, "SADD", key).await?;
    }
    Ok(Some(Done { action, key: key.to_owned(), reason }))
}

/// An entry of the index.
async fn entry(
    redis: &Redis,
    arguments: &RepairIndexArguments,
    key: &str,
) -> Result<Option<Done>, StoreError> {
    let missing = if arguments.remove_missing { Action::Remove } else { Action::Keep };
    let (action, reason) = match look_up(redis, key).await? {
        Listed::Record(_) | Listed::Unreadable { .. } | Listed::WrongType { .. } => return Ok(None),
        Listed::Missing { deleted: Some((group, tombstone)) } => {
            (Action::Remove, format!("group {group} was deleted at {}", tombstone.deleted_at))
        }
        Listed::Missing { deleted: None } => {
            let remedy =
                "restore the record, or delete the group through the API; --remove-missing forgets it";
            (
                missing,
                format!(
                    "the record is missing and nobody deleted the group (GROUP_METADATA_MISSING): {remedy}"
                ),
            )
        }
        Listed::NotAKey => (missing, "no group's key: --remove-missing removes it".to_owned()),
    };
    if action == Action::Remove && !arguments.dry_run {
        index(redis, "SREM", key).await?;
        // Created again in this very moment: its creator has put it into the index before we took it out.
        if matches!(look_up(redis, key).await?, Listed::Record(_)) {
            index(redis, "SADD", key).await?;
            return Ok(None);
        }
    }
    Ok(Some(Done { action, key: key.to_owned(), reason }))
}

async fn index(redis: &Redis, command: &str, key: &str) -> Result<(), StoreError> {
    let index = redis.keys.groups();
    redis.tools.by_key(&index, redis::cmd(command).arg(&index).arg(key)).await.map(|_| ())
}
