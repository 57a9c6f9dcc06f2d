//! `rsc backup`: the records of all groups in a file, each as it was stored at one instant.

use std::collections::BTreeSet;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use rsc_protocol::GroupKey;
use rsc_protocol::monitoring::RecordId;
use rsc_store::{GroupStore, StreamReads};
use tempfile::NamedTempFile;

use super::backup_file::{HistoryLine, SavedGroup, Writer};
use super::look_up::{Listed, look_up};
use super::scan::{Pace, keys_of_groups};
use super::{GroupFilter, Redis, one_line};
use crate::cli::ConfigArguments;
use crate::config::Loaded;

/// Entries of a history that are asked for at a time.
const HISTORY_PAGE: usize = 500;

/// Arguments of `rsc backup`.
#[derive(Args, Clone, Debug)]
pub(crate) struct BackupArguments {
    #[command(flatten)]
    pub(crate) config: ConfigArguments,
    /// Where to write to; - is standard output
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Replace the file if it exists
    #[arg(long)]
    force: bool,
    /// Also what happened to the groups
    #[arg(long)]
    history: bool,
    /// Also what deleted groups had reached
    #[arg(long)]
    tombstones: bool,
    #[command(flatten)]
    filter: GroupFilter,
}

/// Writes the backup. The code is 1 when a group that should be in it is not: what could be read is written.
///
/// # Errors
/// When Redis does not answer, or the file cannot be written; no file is left behind then.
pub(crate) fn run(loaded: Loaded, arguments: &BackupArguments) -> anyhow::Result<ExitCode> {
    super::run(loaded, async |redis| {
        let warnings = if arguments.file == Path::new("-") {
            write_to(redis, arguments, io::stdout().lock()).await?.1
        } else {
            to_file(redis, arguments).await?
        };
        for warning in &warnings {
            warn(warning);
        }
        Ok(if warnings.iter().any(|warning| warning.is_gap) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    })
}

/// Something about the backup that people should know.
struct Warning {
    text: String,
    /// Something that should be in the backup is not.
    is_gap: bool,
}

impl Warning {
    fn gap(text: String) -> Self {
        Warning { text, is_gap: true }
    }

    fn remark(text: String) -> Self {
        Warning { text, is_gap: false }
    }
}

fn warn(warning: &Warning) {
    // When even that cannot be written, the exit code remains.
    let _ = writeln!(io::stderr(), "warning: {}", one_line(&warning.text));
}

/// The file is there under its name only once it is whole.
async fn to_file(redis: &Redis, arguments: &BackupArguments) -> anyhow::Result<Vec<Warning>> {
    let path = &arguments.file;
    let shown = path.display();
    if !arguments.force && path.exists() {
        bail!("{shown} exists: choose another name, or replace it with --force");
    }
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let file = NamedTempFile::new_in(directory).with_context(|| format!("cannot write to {shown}"))?;
    let (file, warnings, groups) = {
        let (writer, warnings, groups) = write_to(redis, arguments, BufWriter::new(file)).await?;
        (writer.into_inner().map_err(io::IntoInnerError::into_error)?, warnings, groups)
    };
    file.as_file().sync_all().with_context(|| format!("cannot write to {shown}"))?;
    let persisted = if arguments.force { file.persist(path) } else { file.persist_noclobber(path) };
    persisted.map_err(|error| error.error).with_context(|| format!("cannot name the file {shown}"))?;
    // The name is in the directory, which has to reach the disk too.
    std::fs::File::open(directory).and_then(|directory| directory.sync_all())?;
    crate::print(&format!("{groups} groups written to {shown}\n"))?;
    Ok(warnings)
}

async fn write_to<W: Write>(
    redis: &Redis,
    arguments: &BackupArguments,
    out: W,
) -> anyhow::Result<(W, Vec<Warning>, u64)> {
    let began = redis.store.ping().await?;
    let mut warnings = Vec::new();
    let indexed: BTreeSet<String> = redis.store.index().await?.into_iter().collect();
    // A group that the index has lost is a group.
    let scanned = match keys_of_groups(redis, Pace::GENTLE).await {
        Ok(keys) => keys,
        Err(error) => {
            let text = format!("groups that are not in the index are not in the backup either: {error}");
            warnings.push(Warning::remark(text));
            BTreeSet::new()
        }
    };
    let is_metadata = |key: &&String| redis.keys.joined_of_metadata(key).is_some();
    let keys: BTreeSet<&String> = indexed.iter().chain(scanned.iter().filter(is_metadata)).collect();
    let mut writer = Writer::begin(out, began, redis.keys.prefix())?;
    for key in keys {
        if let Some(group) = saved(redis, arguments, key, &mut warnings).await? {
            writer.group(group)?;
        }
    }
    if arguments.tombstones {
        for key in scanned.iter().filter_map(|key| key.strip_suffix("}:tombstone")) {
            let metadata = format!("{key}}}:metadata");
            if let Listed::Missing { deleted: Some((group, tombstone)) } = look_up(redis, &metadata).await?
                && arguments.filter.takes(&group)
            {
                writer.tombstone(tombstone)?;
            }
        }
    }
    let groups = writer.groups;
    Ok((writer.end()?, warnings, groups))
}

/// The record that a key leads to, if it belongs into this backup.
async fn saved(
    redis: &Redis,
    arguments: &BackupArguments,
    key: &str,
    warnings: &mut Vec<Warning>,
) -> anyhow::Result<Option<SavedGroup>> {
    let could_be_meant = || {
        let pairs = redis.keys.pairs_of_metadata(key);
        arguments.filter.takes_all() || pairs.iter().any(|pair| arguments.filter.takes(pair))
    };
    let mut saved = match look_up(redis, key).await? {
        Listed::Record(record) => {
            let group = record.group().clone();
            if !arguments.filter.takes(&group) {
                return Ok(None);
            }
            SavedGroup::new(group.stream_prefix(), group.consumer_group(), record.now, record.fields)
        }
        Listed::Unreadable { owner, error, fields, now } => {
            let group = owner.or_else(|| redis.keys.pairs_of_metadata(key).into_iter().next());
            let Some(group) = group.filter(|_| could_be_meant()) else { return Ok(None) };
            let text = format!("{key} is saved as it is, but cannot be restored: {error}");
            warnings.push(Warning::gap(text));
            let mut saved = SavedGroup::new(group.stream_prefix(), group.consumer_group(), now, fields);
            saved.unusable = Some(error.to_string());
            saved
        }
        Listed::WrongType { found } => {
            if could_be_meant() {
                warnings.push(Warning::gap(format!("{key} holds a {found}, not a record: not saved")));
            }
            return Ok(None);
        }
        Listed::Missing { deleted: None } => {
            if could_be_meant() {
                let text =
                    format!("{key} is in the index and has no record (GROUP_METADATA_MISSING): not saved");
                warnings.push(Warning::gap(text));
            }
            return Ok(None);
        }
        Listed::Missing { deleted: Some(_) } => return Ok(None),
        Listed::NotAKey => {
            warnings.push(Warning::remark(format!("{key} is in the index and is no group's key")));
            return Ok(None);
        }
    };
    if arguments.history
        && let Ok(group) = GroupKey::new(saved.stream_prefix.as_str(), saved.consumer_group.as_str())
    {
        saved.history = history(redis, &group).await?;
    }
    Ok(Some(saved))
}

/// All of a group's history, oldest first.
async fn history(redis: &Redis, group: &GroupKey) -> anyhow::Result<Vec<HistoryLine>> {
    let mut lines = Vec::new();
    let mut before: Option<RecordId> = None;
    loop {
        let page = redis.store.history(group, before, HISTORY_PAGE).await?;
        before = page.entries.last().map(|(id, _)| *id);
        lines.extend(page.entries.into_iter().map(|(id, entry)| HistoryLine { id, entry }));
        if !page.more || before.is_none() {
            lines.reverse();
            return Ok(lines);
        }
    }
}
