//! What the entries of the index mean. An entry is a metadata key; which pair of names it belongs to only the
//! record itself can say.

use rsc_core::{LoadError, Loaded, RawFields, record};
use rsc_protocol::GroupKey;
use rsc_protocol::keys::Keys;
use rsc_store::{Found, StoreError};

use crate::shared::Shared;

/// Every pair of names whose metadata key an entry is. The key's prefix has no braces, so it is what stands
/// before the first one.
pub(crate) fn candidates(entry: &str) -> Vec<GroupKey> {
    let prefix = entry.split_once(":{").and_then(|(prefix, _)| Keys::new(prefix).ok());
    prefix.map(|keys| keys.pairs_of_metadata(entry)).unwrap_or_default()
}

/// What an entry of the index leads to.
#[derive(Debug)]
pub(crate) enum Listed {
    /// A healthy record.
    Record {
        /// The group that the record names.
        group: GroupKey,
        /// It, boxed: the other variants are small.
        loaded: Box<Loaded>,
    },
    /// A record that cannot be read.
    Unreadable {
        /// Whose it probably is.
        group: GroupKey,
        /// What is wrong.
        what: String,
    },
    /// No record, and no tombstone of any pair that the key could be.
    Missing {
        /// Whose it could be.
        candidates: Vec<GroupKey>,
    },
    /// No record, but a tombstone.
    Deleted {
        /// Whose.
        group: GroupKey,
    },
    /// No metadata key at all.
    NoGroup,
}

/// Reads the record that an entry of the index leads to, given its [`candidates`].
pub(crate) async fn look_up(shared: &Shared, candidates: Vec<GroupKey>) -> Result<Listed, StoreError> {
    // All candidates have the same key: any of them reads the record.
    let Some(first) = candidates.first().cloned() else { return Ok(Listed::NoGroup) };
    Ok(match shared.store.read(&first).await? {
        Found::Record { fields, .. } => of_record(shared, first, &fields),
        Found::WrongType { found, .. } => {
            Listed::Unreadable { group: first, what: format!("the key holds a {found}, not a hash") }
        }
        Found::Missing { tombstone, .. } => {
            let of_tombstone = tombstone
                .and_then(|tombstone| candidates.iter().find(|group| tombstone.is_of(group)).cloned());
            match of_tombstone {
                Some(group) => Listed::Deleted { group },
                None => Listed::Missing { candidates },
            }
        }
    })
}

fn of_record(shared: &Shared, asked: GroupKey, fields: &RawFields) -> Listed {
    let timing = &shared.settings.timing;
    let result = match record::load(&asked, fields, timing) {
        Err(LoadError::Collision { stream_prefix, consumer_group }) => {
            match GroupKey::new(stream_prefix, consumer_group) {
                Ok(owner) => record::load(&owner, fields, timing).map_err(|error| (owner, error)),
                Err(_) => return Listed::NoGroup,
            }
        }
        other => other.map_err(|error| (asked, error)),
    };
    match result {
        Ok(loaded) => Listed::Record { group: loaded.group.key.clone(), loaded: Box::new(loaded) },
        Err((group, error)) => Listed::Unreadable { group, what: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_leads_to_every_pair_that_has_its_key() {
        let pair = |prefix: &str, group: &str| GroupKey::new(prefix, group).unwrap();
        assert_eq!(candidates("redis-stream:coord:{orders:billing}:metadata"), [pair("orders", "billing")]);
        assert_eq!(candidates("p:{a:b:c}:metadata"), [pair("a", "b:c"), pair("a:b", "c")]);
        for entry in ["", "p:groups", "p:{a}:metadata", "p:{a:b}:mutex", "{a:b}:metadata"] {
            assert!(candidates(entry).is_empty(), "{entry}");
        }
    }
}
