//! What a metadata key leads to, for tools that go through all of them. As the daemon's own look at its index, but
//! what cannot be used is told in all detail.

use rsc_core::{LoadError, Loaded, RawFields, Tombstone, record};
use rsc_protocol::{GroupKey, Timestamp};
use rsc_store::{Found, GroupStore, StoreError};
use serde::Deserialize;

use super::Redis;

/// What a metadata key leads to.
#[derive(Debug)]
pub(super) enum Listed {
    /// A record that can be used.
    Record(Box<Record>),
    /// A hash that cannot.
    Unreadable {
        /// Whose it is, if it says so and the key is that group's.
        owner: Option<GroupKey>,
        /// Why it cannot be used.
        error: LoadError,
        /// All of it.
        fields: RawFields,
        /// Redis time when it was read.
        now: Timestamp,
    },
    /// Something else than a hash.
    WrongType {
        /// What `TYPE` says.
        found: String,
    },
    /// Nothing.
    Missing {
        /// Whose deletion a tombstone under the key's name tells of.
        deleted: Option<(GroupKey, Tombstone)>,
    },
    /// No group's metadata key has this name.
    NotAKey,
}

/// A record that can be used.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) loaded: Loaded,
    pub(super) fields: RawFields,
    pub(super) has_ttl: bool,
    pub(super) now: Timestamp,
}

impl Record {
    pub(super) fn group(&self) -> &GroupKey {
        &self.loaded.group.key
    }
}

/// Looks into one metadata key, with the store's consistent read.
///
/// # Errors
/// When the store does not answer or refuses.
pub(super) async fn look_up(redis: &Redis, key: &str) -> Result<Listed, StoreError> {
    // All pairs that the key can be of have the same key: any of them reads it.
    let candidates = redis.keys.pairs_of_metadata(key);
    let Some(first) = candidates.first() else { return Ok(Listed::NotAKey) };
    Ok(match redis.store.read(first).await? {
        Found::Record { now, fields, has_ttl } => of_record(redis, &candidates, fields, has_ttl, now),
        Found::WrongType { found, .. } => Listed::WrongType { found },
        Found::Missing { tombstone, .. } => {
            let deleted = tombstone.and_then(|tombstone| {
                let group = candidates.iter().find(|group| tombstone.is_of(group))?.clone();
                Some((group, tombstone))
            });
            Listed::Missing { deleted }
        }
    })
}

fn of_record(
    redis: &Redis,
    candidates: &[GroupKey],
    fields: RawFields,
    has_ttl: bool,
    now: Timestamp,
) -> Listed {
    let owner = names(&fields).and_then(|names| candidates.iter().find(|pair| **pair == names).cloned());
    let Some(asked) = owner.as_ref().or(candidates.first()) else { return Listed::NotAKey };
    match record::load(asked, &fields, &redis.timing) {
        Ok(loaded) => Listed::Record(Box::new(Record { loaded, fields, has_ttl, now })),
        Err(error) => Listed::Unreadable { owner, error, fields, now },
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Names {
    stream_prefix: String,
    consumer_group: String,
}

/// The names that a record gives itself, also one that cannot be used otherwise.
pub(super) fn names(fields: &RawFields) -> Option<GroupKey> {
    let names: Names = serde_json::from_slice(fields.get("aggregate")?).ok()?;
    GroupKey::new(names.stream_prefix, names.consumer_group).ok()
}
