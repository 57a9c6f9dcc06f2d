//! The streams of shards: are they there, with every group on them, and does anybody leave records unread?

use std::collections::{BTreeMap, BTreeSet};

use rsc_core::{Group, ShardSet};
use rsc_protocol::keys::shard_key;
use rsc_store::{ShardView, StoreError, StreamReads, WaitReason, Waiting};

use super::count;
use super::facts::refusal;
use super::groups::FoundGroups;
use super::report::Report;
use crate::tools::{Redis, few};

/// Above the highest shard on record, so many indexes in a row without a stream end the search for further ones.
const LOOK_BEYOND: u32 = 256;

/// Looks at every stream that a group is coordinated on.
pub(super) async fn examine(
    redis: &Redis,
    found: &FoundGroups,
    report: &mut Report,
) -> Result<(), StoreError> {
    let mut streams: BTreeMap<&str, Vec<&Group>> = BTreeMap::new();
    for group in &found.groups {
        streams.entry(group.key.stream_prefix()).or_default().push(group);
    }
    let mark = report.mark();
    let mut shards = 0;
    for (prefix, groups) in &streams {
        agree(prefix, groups, report);
        match look_into(redis, prefix, groups).await {
            Ok(stream) => {
                shards += stream.shards.len();
                stream.tell(report);
            }
            Err(error) => rights(prefix, &refusal(error)?, report),
        }
        may_write(redis, prefix, groups, report).await?;
    }
    if report.is_clean_since(mark) {
        let message = format!(
            "{}, {}: every one is there with every group on it, nothing is left unread in removed ones",
            count(streams.len(), "stream"),
            count(shards, "shard")
        );
        report.ok("shards", format!("{}:*", redis.keys.prefix()), message);
    }
    Ok(())
}

/// A stream has one shard count.
fn agree(prefix: &str, groups: &[&Group], report: &mut Report) {
    let counts: BTreeSet<u32> = groups.iter().map(|group| group.shard_count).collect();
    let is_idle = groups.iter().all(|group| group.active_resharding_id.is_none());
    if counts.len() > 1 && is_idle {
        let of_groups: Vec<String> =
            groups.iter().map(|group| format!("{}: {}", group.key, group.shard_count)).collect();
        report.warning(
            "stream.count",
            prefix,
            format!("its groups have different shard counts and no migration runs ({})", few(&of_groups)),
            "start a coordinator: it brings them together by itself",
        );
    }
}

fn rights(prefix: &str, words: &str, report: &mut Report) {
    report.error(
        "shard.rights",
        prefix,
        format!("its shards cannot be worked with: {words}"),
        format!("give the user ~{prefix}:* and the rights on shards that docs/operations.md lists"),
    );
}

/// Acknowledges nothing: refused where the user may not write.
async fn may_write(
    redis: &Redis,
    prefix: &str,
    groups: &[&Group],
    report: &mut Report,
) -> Result<(), StoreError> {
    if groups.iter().all(|group| group.shard_count == 0) {
        return Ok(());
    }
    let key = shard_key(prefix, 0);
    match redis.tools.by_key(&key, redis::cmd("XACK").arg(&key).arg("").arg("0-0")).await {
        Ok(_) => Ok(()),
        Err(error) => {
            let words = refusal(error)?;
            // The key may hold something else; that is told by its own id.
            if !words.starts_with("WRONGTYPE") {
                rights(prefix, &words, report);
            }
            Ok(())
        }
    }
}

/// What one stream's shards are like.
#[derive(Default)]
struct StreamFacts {
    prefix: String,
    shards: BTreeSet<u32>,
    other_type: BTreeMap<u32, String>,
    missing: BTreeSet<u32>,
    /// By consumer group, shards on which it does not exist.
    without_group: BTreeMap<String, BTreeSet<u32>>,
    /// By shard that a group does not read, who has what left.
    unread: BTreeMap<u32, BTreeSet<String>>,
}

/// Every shard that the record names: what consumers read, and what its migrations have removed.
fn on_record(group: &Group) -> ShardSet {
    let mut shards = group.read_set().to_set();
    for migration in group.migrations.values() {
        shards.extend(migration.removed().iter());
    }
    shards
}

async fn look_into(redis: &Redis, prefix: &str, groups: &[&Group]) -> Result<StreamFacts, StoreError> {
    let mut facts = StreamFacts { prefix: prefix.to_owned(), ..StreamFacts::default() };
    let beyond = beyond(redis, prefix, groups).await?;
    for group in groups {
        let mut shards = on_record(group);
        shards.extend(beyond.iter());
        let read = group.read_set().to_set();
        let unread: ShardSet = shards.iter().filter(|shard| !read.contains(*shard)).collect();
        let name = group.key.consumer_group();
        for (shard, view) in redis.store.shard_views(prefix, name, &shards, &unread).await? {
            facts.shards.insert(shard);
            facts.take_in(group, shard, read.contains(shard), view);
        }
    }
    Ok(facts)
}

/// Streams beyond what is on record: a record may have lost an activation, or forgotten an old migration (protocol
/// 5, *What remains*).
async fn beyond(redis: &Redis, prefix: &str, groups: &[&Group]) -> Result<ShardSet, StoreError> {
    let highest = groups.iter().filter_map(|group| on_record(group).last()).max();
    let mut from = groups.iter().map(|group| group.shard_count).min().unwrap_or(0);
    let most = redis.config.streams.max_shard_count.max(highest.unwrap_or(0));
    let mut found = ShardSet::new();
    loop {
        let to = from.saturating_add(LOOK_BEYOND);
        let existing = redis.store.existing_streams(prefix, from..to).await?;
        found.extend(existing.iter());
        let is_beyond = highest.is_none_or(|highest| from > highest);
        if (is_beyond && existing.is_empty()) || to > most {
            return Ok(found);
        }
        from = to;
    }
}

impl StreamFacts {
    fn take_in(&mut self, group: &Group, shard: u32, is_read: bool, view: ShardView) {
        let name = group.key.consumer_group();
        match view {
            ShardView::OtherType { found } if is_read => {
                self.other_type.insert(shard, found);
            }
            // Its streams are still being created.
            ShardView::Absent if is_read && !group.provisioning_pending => {
                self.missing.insert(shard);
            }
            ShardView::Absent | ShardView::OtherType { .. } => {}
            ShardView::Stream(view) => {
                let exists = view.groups.iter().any(|on_it| on_it.consumer_group == name);
                if is_read && !exists && !group.provisioning_pending {
                    self.without_group.entry(name.to_owned()).or_default().insert(shard);
                }
                let left = view.unread.iter().filter(|wait| !is_read && is_unread(wait)).map(words);
                let left: Vec<String> = left.collect();
                if !left.is_empty() {
                    self.unread.entry(shard).or_default().extend(left);
                }
            }
        }
    }

    fn keys(&self, shards: &BTreeSet<u32>) -> Vec<String> {
        shards.iter().map(|shard| shard_key(&self.prefix, *shard)).collect()
    }

    fn tell(&self, report: &mut Report) {
        let prefix = &self.prefix;
        if !self.other_type.is_empty() {
            let keys = self.other_type.iter();
            let keys: Vec<String> =
                keys.map(|(shard, found)| format!("{} (a {found})", shard_key(prefix, *shard))).collect();
            report.error(
                "shard.type",
                prefix,
                format!("keys of shards hold something else than streams: {}", few(&keys)),
                "find out who put it there, and move it away",
            );
        }
        if !self.missing.is_empty() {
            report.error(
                "shard.missing",
                prefix,
                format!(
                    "shards have no stream, producers and consumers fail there: {}",
                    few(&self.keys(&self.missing))
                ),
                format!("for each of them and each group: XGROUP CREATE {prefix}:<shard> <group> 0 MKSTREAM"),
            );
        }
        for (group, shards) in &self.without_group {
            report.error(
                "shard.group",
                prefix,
                format!("consumer group {group} does not exist on {}", few(&self.keys(shards))),
                format!("for each of them: XGROUP CREATE {prefix}:<shard> {group} 0 (from its beginning; a later id if that was read)"),
            );
        }
        for (shard, left) in &self.unread {
            let left: Vec<String> = left.iter().cloned().collect();
            report.warning(
                "shard.unread",
                shard_key(prefix, *shard),
                format!("nobody reads this shard any more, and it has unread records: {}", few(&left)),
                "scale out to read it again, or copy the records into the stream's other shards, then DEL it; find the producer with an old route",
            );
        }
    }
}

/// A missing group has nothing to read in an empty stream; that is no news about a shard nobody reads.
fn is_unread(wait: &Waiting) -> bool {
    wait.reason != WaitReason::GroupMissing || wait.undelivered > 0
}

fn words(wait: &Waiting) -> String {
    let at_least = if wait.undelivered_is_at_least { "at least " } else { "" };
    let at_most = if wait.pending_is_at_most { "at most " } else { "" };
    let oldest = wait.oldest_id.as_ref().map(|id| format!(", the oldest {id}")).unwrap_or_default();
    format!(
        "{} for group {}: {at_least}{} undelivered, {at_most}{} pending{oldest}",
        wait.reason.as_str(),
        wait.consumer_group,
        wait.undelivered,
        wait.pending
    )
}
