//! The index against the keys, and each record against the rules.

use std::collections::BTreeSet;
use std::time::Duration;

use redis::Value;
use rsc_core::{Group, LoadError};
use rsc_protocol::{GroupKey, LAYOUT_VERSION};
use rsc_store::{GroupStore, StoreError};

use super::count;
use super::facts::{Known, refusal, text};
use super::report::Report;
use crate::tools::Redis;
use crate::tools::look_up::{Listed, Record, look_up};
use crate::tools::scan::{Pace, keys_of_groups};

/// A group that is being created or deleted is for a moment in the index alone, or not in it: what looks wrong is
/// looked at again.
const SECOND_LOOK_AFTER: Duration = Duration::from_millis(500);
/// How far the clock may be behind a record before it is worth telling, in milliseconds.
const NOTICEABLE_MS: i64 = 1_000;

/// What there is.
pub(super) struct FoundGroups {
    /// Groups whose records can be used.
    pub(super) groups: Vec<Group>,
    /// All keys of groups, where they could be scanned.
    pub(super) keys: Option<BTreeSet<String>>,
}

/// Looks at index and records.
pub(super) async fn examine(redis: &Redis, report: &mut Report) -> Result<FoundGroups, StoreError> {
    let index_mark = report.mark();
    let indexed = index(redis, report).await?;
    let keys = match keys_of_groups(redis, Pace::BRIEF).await {
        Ok(keys) => Some(keys),
        Err(error) => {
            let why =
                format!("groups that it does not name are not found, the keys could not be scanned: {error}");
            report.unknown("index", redis.keys.groups(), why);
            None
        }
    };
    let metadata: BTreeSet<String> =
        keys.iter().flatten().filter(|key| redis.keys.joined_of_metadata(key).is_some()).cloned().collect();
    if let Ok(indexed) = &indexed {
        compare(redis, indexed, &metadata, report).await?;
        if report.is_clean_since(index_mark) {
            let message = format!("names every group and nothing else: {}", count(indexed.len(), "group"));
            report.ok("index", redis.keys.groups(), message);
        }
    }
    let mark = report.mark();
    let mut groups = Vec::new();
    for key in metadata.union(&indexed.unwrap_or_default()) {
        match look_up(redis, key).await? {
            Listed::Record(record) => {
                examine_record(redis, key, &record, keys.as_ref(), report).await?;
                groups.push(record.loaded.group);
            }
            Listed::Unreadable { error, .. } => unreadable(key, &error, report),
            Listed::WrongType { found } => report.error(
                "record.type",
                key,
                format!("holds a {found}, not a record"),
                "move it away, then rsc restore a backup of the group, or delete the group with force",
            ),
            // Told by the comparison.
            Listed::Missing { .. } | Listed::NotAKey => {}
        }
    }
    if report.is_clean_since(mark) {
        let message = format!("{} can be used, and every invariant holds", count(groups.len(), "record"));
        report.ok("records", format!("{}:*", redis.keys.prefix()), message);
    }
    Ok(FoundGroups { groups, keys })
}

async fn index(redis: &Redis, report: &mut Report) -> Result<Known<BTreeSet<String>>, StoreError> {
    let key = redis.keys.groups();
    match redis.store.index().await {
        Ok(entries) => Ok(Ok(entries.into_iter().collect())),
        Err(error) => {
            let words = refusal(error)?;
            if words.starts_with("WRONGTYPE") {
                report.error(
                    "index.type",
                    key,
                    "holds something else than a set: no group is found at a start",
                    "move it away, then rsc repair index",
                );
            } else {
                report.unknown("index", key, words.clone());
            }
            Ok(Err(words))
        }
    }
}

async fn compare(
    redis: &Redis,
    indexed: &BTreeSet<String>,
    metadata: &BTreeSet<String>,
    report: &mut Report,
) -> Result<(), StoreError> {
    let unindexed: Vec<&String> = metadata.difference(indexed).collect();
    let mut dubious = Vec::new();
    for key in indexed {
        if let Listed::Missing { .. } | Listed::NotAKey = look_up(redis, key).await? {
            dubious.push(key);
        }
    }
    if unindexed.is_empty() && dubious.is_empty() {
        return Ok(());
    }
    tokio::time::sleep(SECOND_LOOK_AFTER).await;
    let Ok(now_indexed) = redis.store.index().await else { return Ok(()) };
    let now_indexed: BTreeSet<String> = now_indexed.into_iter().collect();
    for key in unindexed.into_iter().filter(|key| !now_indexed.contains(*key)) {
        match look_up(redis, key).await? {
            Listed::Record(record) => {
                let group = record.group().clone();
                let message = format!(
                    "is the record of group {group} and not in the index: after a restart nobody finds it"
                );
                report.warning("index.unindexed", key, message, "rsc repair index");
            }
            Listed::Unreadable { owner: Some(_), .. } => report.warning(
                "index.unindexed",
                key,
                "is a group's record and not in the index: after a restart nobody finds it",
                "rsc repair index",
            ),
            _ => {}
        }
    }
    for key in dubious.into_iter().filter(|key| now_indexed.contains(*key)) {
        dubious_entry(key, look_up(redis, key).await?, report);
    }
    Ok(())
}

fn dubious_entry(key: &str, listed: Listed, report: &mut Report) {
    match listed {
        Listed::Missing { deleted: Some((group, tombstone)) } => {
            let at = tombstone.deleted_at;
            let message = format!(
                "is in the index, and group {group} was deleted at {at}: harmless, running instances remove it"
            );
            report.info("index.deleted", key, message);
        }
        Listed::Missing { deleted: None } => report.error(
            "index.missing",
            key,
            "is in the index, its record is gone and nobody deleted the group: GROUP_METADATA_MISSING",
            "rsc restore a backup of it, or delete the group through the API and create it anew",
        ),
        Listed::NotAKey => report.warning(
            "index.foreign",
            key,
            "is in the index and no group's key",
            "rsc repair index --remove-missing",
        ),
        Listed::Record(_) | Listed::Unreadable { .. } | Listed::WrongType { .. } => {}
    }
}

/// A record that no load accepts; the daemon refuses the group and overwrites nothing.
fn unreadable(key: &str, error: &LoadError, report: &mut Report) {
    let (id, remedy) = match error {
        LoadError::Schema { .. } => ("record.schema", "run the newer version of rsc that wrote it"),
        LoadError::Layout { .. } => ("record.layout", "run the newer version of rsc that wrote it"),
        LoadError::RevisionMismatch { .. } => ("record.revision", "rsc restore --force a backup of it"),
        LoadError::Collision { .. } | LoadError::Foreign { .. } => {
            ("record.foreign", "find out who copied it there; rsc restore --force a backup of the group")
        }
        LoadError::Field { .. } | LoadError::Aggregate(_) => {
            ("record.unreadable", "rsc restore --force a backup of it, or delete the group with force")
        }
    };
    report.error(id, key, format!("{error}: the group is GROUP_METADATA_CORRUPT"), remedy);
}

async fn examine_record(
    redis: &Redis,
    key: &str,
    record: &Record,
    keys: Option<&BTreeSet<String>>,
    report: &mut Report,
) -> Result<(), StoreError> {
    let group = &record.loaded.group;
    if record.has_ttl {
        report.error(
            "record.ttl",
            key,
            "has a TTL: the group will vanish",
            format!("PERSIST {key}, and find out who sets it; a running coordinator removes it with its next write"),
        );
    }
    let layout =
        record.fields.get("layoutVersion").map(|layout| String::from_utf8_lossy(layout).into_owned());
    if layout.as_deref() != Some(LAYOUT_VERSION.to_string().as_str()) {
        let layout = layout.unwrap_or_else(|| "absent".to_owned());
        let message = format!("layoutVersion is {layout}; the next write makes it {LAYOUT_VERSION}");
        report.info("record.layout", key, message);
    }
    for violation in group.validate() {
        report.error(
            format!("invariant.{}", violation.invariant),
            key,
            format!("group {}: {}", group.key, violation.detail),
            "report it as a bug, with the output of rsc backup for this group",
        );
    }
    let behind = group.updated_at.since(record.now);
    if behind >= NOTICEABLE_MS {
        report.warning(
            "record.clock",
            key,
            format!("was written {behind} ms after Redis' present time: until then no lease, hold or round of it ends"),
            "compare the clocks of the Redis servers, see clock",
        );
    }
    if let Some(round) = &group.metadata_correction {
        let message = format!(
            "group {}: a correction round is on since {}, because Redis lost writes or the record was restored",
            group.key, round.requested_at
        );
        report.info("record.correction", key, message);
    }
    if has_tombstone(redis, &group.key, keys).await? {
        report.warning(
            "record.tombstone",
            key,
            format!("lives, and a tombstone says that group {} was deleted: a loss of the record would pass for a deletion", group.key),
            format!("DEL {}; a running coordinator does it with its next write", redis.keys.tombstone(&group.key)),
        );
    }
    Ok(())
}

async fn has_tombstone(
    redis: &Redis,
    group: &GroupKey,
    keys: Option<&BTreeSet<String>>,
) -> Result<bool, StoreError> {
    let key = redis.keys.tombstone(group);
    if let Some(keys) = keys {
        return Ok(keys.contains(&key));
    }
    Ok(kind_of(redis, &key).await?.is_ok_and(|kind| kind == "hash"))
}

/// What `TYPE` says.
pub(super) async fn kind_of(redis: &Redis, key: &str) -> Result<Known<String>, StoreError> {
    match redis.tools.by_key(key, redis::cmd("TYPE").arg(key)).await {
        Ok(answer) => Ok(text(&answer).ok_or_else(|| "TYPE answers no text".to_owned())),
        Err(error) => Ok(Err(refusal(error)?)),
    }
}

/// The milliseconds that a key has left; -1: it stays, -2: there is none.
pub(super) async fn milliseconds_left(redis: &Redis, key: &str) -> Result<Known<i64>, StoreError> {
    match redis.tools.by_key(key, redis::cmd("PTTL").arg(key)).await {
        Ok(Value::Int(left)) => Ok(Ok(left)),
        Ok(_) => Ok(Err("PTTL answers no number".to_owned())),
        Err(error) => Ok(Err(refusal(error)?)),
    }
}
