//! Whether a record of a backup may be put back over what is stored now. Pure.

use rsc_core::{Loaded, Tombstone};

/// What is stored under the group's key.
#[derive(Debug)]
pub(super) enum Current {
    /// Nothing, and perhaps the tombstone of this very group.
    Missing(Option<Tombstone>),
    /// A record that can be used.
    Record(Box<Loaded>),
    /// A hash that cannot.
    Unreadable(String),
    /// Something else than a hash.
    WrongType(String),
    /// The healthy record of the pair whose names give the same key.
    OtherGroups(String),
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Put it back.
    Restore {
        /// The highest version that is known to have been reached.
        observed: u64,
        /// What it is put over, for people.
        why: String,
    },
    /// It stands.
    Unchanged,
    /// Leave everything as it is.
    Refuse(String),
}

/// Never over another group's record. Over what is newer or cannot be compared, and over a deletion, only if forced.
pub(super) fn judge(backup: &Loaded, current: &Current, force: bool) -> Verdict {
    let version = backup.group.metadata_version;
    let restore = |reached: u64, what: &str| Verdict::Restore {
        observed: reached.max(version),
        why: format!("metadataVersion {version}, {what}"),
    };
    match current {
        Current::OtherGroups(owner) => {
            Verdict::Refuse(format!("the key belongs to the group {owner}, whose names give the same one"))
        }
        Current::Missing(None) => restore(0, "the record was missing"),
        Current::Missing(Some(tombstone)) if force => {
            restore(tombstone.metadata_version, "the group had been deleted")
        }
        Current::Missing(Some(tombstone)) => Verdict::Refuse(format!(
            "the group was deleted at {}: --force brings it back",
            tombstone.deleted_at
        )),
        Current::Unreadable(error) if force => {
            restore(0, &format!("over a record that cannot be used: {error}"))
        }
        Current::Unreadable(error) => Verdict::Refuse(format!(
            "what is stored cannot be compared ({error}): --force puts the backup over it"
        )),
        Current::WrongType(found) if force => restore(0, &format!("in place of a {found}")),
        Current::WrongType(found) => {
            Verdict::Refuse(format!("the key holds a {found}, not a record: --force removes it"))
        }
        Current::Record(stored) if stored.stamp == backup.stamp => Verdict::Unchanged,
        Current::Record(stored) => over_a_record(backup, stored, force, restore),
    }
}

fn over_a_record(
    backup: &Loaded,
    stored: &Loaded,
    force: bool,
    restore: impl Fn(u64, &str) -> Verdict,
) -> Verdict {
    let (revision, version) = (stored.stamp.revision, stored.group.metadata_version);
    let is_newer = revision > backup.stamp.revision || version >= backup.group.metadata_version;
    if is_newer && !force {
        return Verdict::Refuse(format!(
            "the stored record is not older: revision {revision} and metadataVersion {version}, the backup has {} and {}; \
             --force puts the backup over it",
            backup.stamp.revision, backup.group.metadata_version
        ));
    }
    restore(version, &format!("over revision {revision}, metadataVersion {version}"))
}

#[cfg(test)]
mod tests {
    use rsc_core::{Settings, Stamp, lifecycle};
    use rsc_protocol::{GroupKey, Timestamp};

    use super::*;

    fn loaded(revision: u64, version: u64, write_id: &str) -> Loaded {
        let key = GroupKey::new("orders", "billing").unwrap();
        let now = Timestamp::from_millis(1_000);
        let mut group = lifecycle::create(&key, 4, now, "token", None, &Settings::default()).group;
        (group.store_revision, group.metadata_version) = (revision, version);
        let stamp = Stamp { revision, live_revision: 5, write_id: write_id.to_owned() };
        Loaded { group, stamp, stray_live: Vec::new() }
    }

    fn stored(revision: u64, version: u64) -> Current {
        Current::Record(Box::new(loaded(revision, version, "other")))
    }

    #[test]
    fn only_what_is_older_in_every_respect_is_written_over_without_force() {
        let backup = loaded(10, 20, "w");
        for (current, may) in [
            (Current::Missing(None), true),
            (stored(9, 19), true),
            (stored(10, 19), true),
            (stored(11, 19), false),
            (stored(9, 20), false),
            (stored(10, 20), false),
            (stored(11, 21), false),
            (Current::Missing(Some(Tombstone::default())), false),
            (Current::Unreadable("x".to_owned()), false),
            (Current::WrongType("list".to_owned()), false),
        ] {
            let verdict = judge(&backup, &current, false);
            assert_eq!(matches!(verdict, Verdict::Restore { .. }), may, "{current:?}: {verdict:?}");
            assert!(matches!(judge(&backup, &current, true), Verdict::Restore { .. }), "{current:?}");
        }
        let own = Current::Record(Box::new(loaded(10, 20, "w")));
        assert_eq!(judge(&backup, &own, true), Verdict::Unchanged);
        let other = Current::OtherGroups("a:b".to_owned());
        assert!(matches!(judge(&backup, &other, true), Verdict::Refuse(_)));
    }

    #[test]
    fn the_round_knows_the_highest_version_that_was_reached() {
        let backup = loaded(10, 20, "w");
        let observed = |current: &Current| match judge(&backup, current, true) {
            Verdict::Restore { observed, .. } => observed,
            other => panic!("{other:?}"),
        };
        assert_eq!(observed(&stored(12, 31)), 31);
        assert_eq!(observed(&stored(2, 3)), 20);
        let tombstone = Tombstone { metadata_version: 40, ..Tombstone::default() };
        assert_eq!(observed(&Current::Missing(Some(tombstone))), 40);
    }
}
