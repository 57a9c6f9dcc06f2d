//! `rsc restore`: puts records of a backup back, each of them wholly or not at all, under its group's mutex.

mod verdict;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use redis::Value;
use rsc_core::{LoadError, Loaded as LoadedRecord, RawFields, Tombstone, WriteKind, lifecycle, record};
use rsc_protocol::{GroupKey, LAYOUT_VERSION, SCHEMA_VERSION, Timestamp};
use rsc_store::{Entered, Found, GroupStore, MutexToken, StoreError};
use serde::Serialize;
use serde_json::json;

use super::backup_file::{BackupFile, Saved, SavedGroup};
use super::{GroupFilter, INSTANCE, Output, Redis, Unusable, one_line};
use crate::cli::ConfigArguments;
use crate::config::Loaded;
use verdict::{Current, Verdict, judge};

const RESTORE: &str = include_str!("scripts/restore.lua");
const RESTORE_TOMBSTONE: &str = include_str!("scripts/restore_tombstone.lua");
/// Between two attempts to take a mutex.
const PAUSE: Duration = Duration::from_millis(20);
/// How often a restore is tried whose answer was lost, or under which the record moved.
const ATTEMPTS: u32 = 5;

/// Arguments of `rsc restore`.
#[derive(Args, Clone, Debug)]
pub(crate) struct RestoreArguments {
    #[command(flatten)]
    pub(crate) config: ConfigArguments,
    /// A file of `rsc backup`; - is standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Say what would be done, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// Also over records that are newer or cannot be read, and of groups that were deleted
    #[arg(long)]
    force: bool,
    /// How the outcome is printed
    #[arg(long, value_enum, default_value_t)]
    output: Output,
    #[command(flatten)]
    filter: GroupFilter,
}

/// What became of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Became {
    Restored,
    WouldBeRestored,
    Unchanged,
    Skipped,
    Refused,
    Failed,
}

impl Became {
    fn is_trouble(self) -> bool {
        matches!(self, Became::Refused | Became::Failed)
    }

    fn label(self) -> &'static str {
        match self {
            Became::Restored => "restored",
            Became::WouldBeRestored => "would restore",
            Became::Unchanged => "unchanged",
            Became::Skipped => "skipped",
            Became::Refused => "refused",
            Became::Failed => "failed",
        }
    }
}

/// One line of the outcome.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Done {
    stream_prefix: String,
    consumer_group: String,
    outcome: Became,
    message: String,
}

impl Done {
    fn of(group: &GroupKey, outcome: Became, message: impl Into<String>) -> Self {
        Done {
            stream_prefix: group.stream_prefix().to_owned(),
            consumer_group: group.consumer_group().to_owned(),
            outcome,
            message: message.into(),
        }
    }
}

/// Restores what the file holds. The code is 1 when anything of it was refused or failed.
///
/// # Errors
/// When the file is not one of `rsc backup`, or not whole: nothing is done then.
pub(crate) fn run(loaded: Loaded, arguments: &RestoreArguments) -> anyhow::Result<ExitCode> {
    let shown = arguments.file.display().to_string();
    let text = read_text(&arguments.file).with_context(|| format!("cannot read {shown}"))?;
    let file = BackupFile::read(&text).with_context(|| shown.clone())?;
    super::run(loaded, async |redis| {
        let (here, there) = (redis.keys.prefix(), file.header.key_prefix.as_str());
        if here != there {
            let problem = format!(
                "{shown} is of the key prefix {there:?}, and store.key-prefix is {here:?}: restore with the same one"
            );
            return Err(Unusable(problem).into());
        }
        let mut done = Vec::new();
        for saved in file.saved() {
            let one = match saved? {
                Saved::Group(saved) => restore(redis, arguments, &saved).await,
                Saved::Tombstone(tombstone) => restore_tombstone(redis, arguments, &tombstone).await,
            };
            if let Some(one) = one {
                if arguments.output == Output::Text {
                    crate::print(&line(&one))?;
                }
                done.push(one);
            }
        }
        if arguments.output == Output::Json {
            let document = json!({
                "version": 1,
                "dryRun": arguments.dry_run,
                "backupCreatedAt": file.header.created_at,
                "groups": done,
            });
            crate::print(&format!("{document:#}\n"))?;
        }
        if done.is_empty() {
            anyhow::bail!(
                "{shown}: nothing in it is asked for, nothing was done: see --stream-prefix and --consumer-group, and what is \
                 in the file"
            );
        }
        let has_trouble = done.iter().any(|one| one.outcome.is_trouble());
        Ok(if has_trouble { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    })
}

fn read_text(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    if path == Path::new("-") {
        std::io::stdin().lock().read_to_string(&mut text)?;
    } else {
        text = std::fs::read_to_string(path)?;
    }
    Ok(text)
}

fn line(done: &Done) -> String {
    let group = format!("{}:{}", done.stream_prefix, done.consumer_group);
    format!("{:<13} {}: {}\n", done.outcome.label(), one_line(&group), one_line(&done.message))
}

/// A record of the file that can be put back.
struct Backup<'s> {
    group: GroupKey,
    saved: &'s SavedGroup,
    fields: RawFields,
    loaded: LoadedRecord,
}

async fn restore(redis: &Redis, arguments: &RestoreArguments, saved: &SavedGroup) -> Option<Done> {
    let group = match GroupKey::new(saved.stream_prefix.as_str(), saved.consumer_group.as_str()) {
        Ok(group) => group,
        Err(error) => {
            return Some(Done {
                stream_prefix: saved.stream_prefix.clone(),
                consumer_group: saved.consumer_group.clone(),
                outcome: Became::Refused,
                message: format!("these are no names of a group: {error}"),
            });
        }
    };
    if !arguments.filter.takes(&group) {
        return None;
    }
    let fields = saved.fields();
    let loaded = match (&saved.unusable, record::load(&group, &fields, &redis.timing)) {
        (None, Ok(loaded)) => loaded,
        (Some(unusable), _) => {
            let message = format!("the record could not be used already when it was saved: {unusable}");
            return Some(Done::of(&group, Became::Refused, message));
        }
        (None, Err(error)) => {
            let message = format!("the file's record cannot be used: {error}");
            return Some(Done::of(&group, Became::Refused, message));
        }
    };
    let backup = Backup { group, saved, fields, loaded };
    let done = if arguments.dry_run {
        look(redis, arguments, &backup).await
    } else {
        put_back(redis, arguments, &backup).await
    };
    Some(done.unwrap_or_else(|error| Done::of(&backup.group, Became::Failed, error.to_string())))
}

fn current_of(redis: &Redis, group: &GroupKey, fields: &RawFields) -> Current {
    match record::load(group, fields, &redis.timing) {
        Ok(loaded) => Current::Record(Box::new(loaded)),
        Err(LoadError::Collision { stream_prefix, consumer_group }) => {
            Current::OtherGroups(format!("{stream_prefix}:{consumer_group}"))
        }
        Err(error) => Current::Unreadable(error.to_string()),
    }
}

/// What would be done.
async fn look(redis: &Redis, arguments: &RestoreArguments, backup: &Backup<'_>) -> Result<Done, StoreError> {
    let group = &backup.group;
    let current = match redis.store.read(group).await? {
        Found::Record { fields, .. } => current_of(redis, group, &fields),
        Found::Missing { tombstone, .. } => Current::Missing(tombstone.filter(|it| it.is_of(group))),
        Found::WrongType { found, .. } => Current::WrongType(found),
    };
    Ok(match judge(&backup.loaded, &current, arguments.force) {
        Verdict::Restore { why, .. } => Done::of(group, Became::WouldBeRestored, why),
        Verdict::Unchanged => unchanged(group),
        Verdict::Refuse(why) => Done::of(group, Became::Refused, why),
    })
}

fn unchanged(group: &GroupKey) -> Done {
    Done::of(group, Became::Unchanged, "what is stored is what the file has")
}

/// What the mutex protects: what is stored, and how the script recognises it.
struct Section {
    now: Timestamp,
    kind: String,
    fields: RawFields,
    current: Current,
}

async fn put_back(
    redis: &Redis,
    arguments: &RestoreArguments,
    backup: &Backup<'_>,
) -> Result<Done, StoreError> {
    let group = &backup.group;
    let mut lost: Option<(MutexToken, String)> = None;
    for _ in 0..ATTEMPTS {
        let token = MutexToken::fresh(INSTANCE);
        let takeover = lost.as_ref().map(|(token, _)| token);
        let section = match enter(redis, group, &token, takeover).await? {
            Ok(section) => section,
            Err(holder) => {
                let message = format!(
                    "the group's mutex is held by {holder}: try again, or look for a mutex without TTL with rsc doctor"
                );
                return Ok(Done::of(group, Became::Failed, message));
            }
        };
        // The answer to the attempt before was lost: did it come to its end?
        if let Some((_, write_id)) = &lost
            && section.fields.get("writeId").is_some_and(|stored| stored == write_id.as_bytes())
        {
            redis.store.release(group, &token).await?;
            return Ok(restored(redis, group, "its answer was lost, and it stands".to_owned()).await);
        }
        let (observed, why) = match judge(&backup.loaded, &section.current, arguments.force) {
            Verdict::Restore { observed, why } => (observed, why),
            verdict => {
                redis.store.release(group, &token).await?;
                if let Verdict::Refuse(why) = verdict {
                    return Ok(Done::of(group, Became::Refused, why));
                }
                redis.store.index_add(group).await?;
                return Ok(unchanged(group));
            }
        };
        let restoration = lifecycle::restore(backup.loaded.clone(), section.now, observed);
        let (fields, write_id) = hash_of(backup, &restoration.write);
        let history = restoration.write.history.unwrap_or_default();
        let answer = write(redis, backup, &token, &section, &fields, &history).await;
        match answer {
            Ok(answer) if answer == "restored" => return Ok(restored(redis, group, why).await),
            // Somebody without the mutex has changed it, or the mutex ran out: look again.
            Ok(_) => lost = None,
            Err(StoreError::Unavailable(_)) => lost = Some((token, write_id)),
            Err(error) => {
                // Certainly nothing was written. A mutex that cannot be given back expires by itself.
                let _given_back = redis.store.release(group, &token).await;
                return Err(error);
            }
        }
    }
    Ok(Done::of(group, Became::Failed, "the record moved, or answers were lost, again and again: try again"))
}

/// The end of a successful restore: the index names the group again.
async fn restored(redis: &Redis, group: &GroupKey, why: String) -> Done {
    match redis.store.index_add(group).await {
        Ok(()) => Done::of(group, Became::Restored, why),
        Err(error) => {
            let message =
                format!("{why}; but it could not be put into the index, run rsc repair index: {error}");
            Done::of(group, Became::Failed, message)
        }
    }
}

/// Takes the group's mutex; `Err` with its holder when it is not to be had.
async fn enter(
    redis: &Redis,
    group: &GroupKey,
    token: &MutexToken,
    takeover: Option<&MutexToken>,
) -> Result<Result<Section, String>, StoreError> {
    let coordination = &redis.config.coordination;
    // A coordinator that was killed in its section leaves the mutex for its TTL.
    let deadline = Instant::now() + coordination.mutex_ttl + coordination.mutex_acquire_timeout;
    loop {
        let (now, kind, fields, current) = match redis.store.enter(group, token, takeover, None).await? {
            Entered::Busy { holder } if Instant::now() < deadline => {
                tracing::debug!(%group, holder, "the mutex is busy");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
            Entered::Busy { holder } => return Ok(Err(holder)),
            Entered::Loaded { now, fields, .. } => {
                let current = current_of(redis, group, &fields);
                (now, "hash".to_owned(), fields, current)
            }
            Entered::Missing { now, tombstone } => {
                let current = Current::Missing(tombstone.filter(|tombstone| tombstone.is_of(group)));
                (now, "none".to_owned(), RawFields::new(), current)
            }
            Entered::WrongType { now, found } => {
                (now, found.clone(), RawFields::new(), Current::WrongType(found))
            }
            Entered::Unchanged { .. } => {
                return Err(StoreError::Unexpected("a record was left out that nobody remembers".to_owned()));
            }
        };
        return Ok(Ok(Section { now, kind, fields, current }));
    }
}

/// Every field that the hash is to have, and its new `writeId`: what the backup has, and on top of it the write that
/// begins the correction round.
fn hash_of(backup: &Backup<'_>, write: &rsc_core::Write) -> (RawFields, String) {
    let mut fields = backup.fields.clone();
    let write_id = uuid::Uuid::new_v4().simple().to_string();
    let live_revision = backup.loaded.stamp.live_revision.saturating_add(1);
    let mut set = |field: &str, text: String| fields.insert(field.to_owned(), text.into_bytes());
    if let WriteKind::Structural { aggregate, revision } = &write.kind {
        set("aggregate", aggregate.clone());
        set("revision", revision.to_string());
    }
    set("schemaVersion", SCHEMA_VERSION.to_string());
    set("layoutVersion", LAYOUT_VERSION.to_string());
    set("liveRevision", live_revision.to_string());
    set("writeId", write_id.clone());
    set("updatedAt", write.updated_at.to_string());
    for member_id in &write.removed_live {
        fields.remove(&format!("{}{member_id}", record::LIVE_FIELD_PREFIX));
    }
    (fields, write_id)
}

/// Runs the script; the first word of its answer.
async fn write(
    redis: &Redis,
    backup: &Backup<'_>,
    token: &MutexToken,
    section: &Section,
    fields: &RawFields,
    history: &str,
) -> Result<String, StoreError> {
    let group = &backup.group;
    let metadata = redis.keys.metadata(group);
    let mut call = redis::cmd("EVAL");
    call.arg(RESTORE).arg(4).arg(&metadata).arg(redis.keys.mutex(group));
    call.arg(redis.keys.tombstone(group)).arg(redis.keys.history(group));
    call.arg(token.as_str()).arg(&section.kind);
    for field in ["revision", "liveRevision", "writeId"] {
        call.arg(section.fields.get(field).map(Vec::as_slice).unwrap_or_default());
    }
    let entries = &backup.saved.history;
    call.arg(fields.len() * 2).arg(entries.len() * 2).arg(history);
    // The stamp is part of the first of several calls.
    let (first, rest): (Vec<_>, Vec<_>) =
        fields.iter().partition(|(name, _)| !name.starts_with(record::LIVE_FIELD_PREFIX));
    for (name, value) in first.into_iter().chain(rest) {
        call.arg(name).arg(value.as_slice());
    }
    for entry in entries {
        call.arg(entry.id.to_string()).arg(&entry.entry);
    }
    for name in section.fields.keys().filter(|name| !fields.contains_key(*name)) {
        call.arg(name);
    }
    first_word(redis.tools.by_key(&metadata, &call).await?)
}

fn first_word(answer: Value) -> Result<String, StoreError> {
    let word = match answer {
        Value::Array(items) => items.into_iter().next(),
        other => Some(other),
    };
    match word {
        Some(Value::BulkString(word)) => Ok(String::from_utf8_lossy(&word).into_owned()),
        Some(Value::SimpleString(word)) => Ok(word),
        other => Err(StoreError::Unexpected(format!("the restoring script answered {other:?}"))),
    }
}

async fn restore_tombstone(
    redis: &Redis,
    arguments: &RestoreArguments,
    tombstone: &Tombstone,
) -> Option<Done> {
    let names = (tombstone.stream_prefix.as_str(), tombstone.consumer_group.as_str());
    let group = GroupKey::new(names.0, names.1).ok().filter(|group| arguments.filter.takes(group))?;
    let done = match put_tombstone_back(redis, arguments, &group, tombstone).await {
        Ok((outcome, message)) => Done::of(&group, outcome, format!("tombstone: {message}")),
        Err(error) => Done::of(&group, Became::Failed, format!("tombstone: {error}")),
    };
    Some(done)
}

async fn put_tombstone_back(
    redis: &Redis,
    arguments: &RestoreArguments,
    group: &GroupKey,
    tombstone: &Tombstone,
) -> Result<(Became, &'static str), StoreError> {
    let (day, now) = (i64::try_from(Tombstone::TTL_MS).unwrap_or(i64::MAX), redis.store.ping().await?);
    let left = day.saturating_sub(now.since(tombstone.deleted_at)).min(day);
    if left <= 0 {
        return Ok((Became::Skipped, "the group was deleted more than a day ago"));
    }
    if arguments.dry_run {
        return Ok(match redis.store.read(group).await? {
            Found::Missing { tombstone: None, .. } => (Became::WouldBeRestored, "there is none"),
            _ => (Became::Skipped, "there is a record, or a tombstone"),
        });
    }
    let metadata = redis.keys.metadata(group);
    let mut call = redis::cmd("EVAL");
    call.arg(RESTORE_TOMBSTONE).arg(2).arg(&metadata).arg(redis.keys.tombstone(group)).arg(left);
    let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(tombstone) else {
        return Err(StoreError::Unexpected("a tombstone is no object".to_owned()));
    };
    for (name, value) in fields {
        call.arg(name).arg(value.as_str().map_or_else(|| value.to_string(), str::to_owned));
    }
    Ok(match first_word(redis.tools.by_key(&metadata, &call).await?)?.as_str() {
        "restored" => (Became::Restored, "there was none"),
        _ => (Became::Skipped, "there is a record, or a tombstone"),
    })
}
