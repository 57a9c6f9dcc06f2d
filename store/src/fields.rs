//! The field names and texts of the hashes under a group's keys (protocol 2), the same for both stores, so
//! that the same loading code reads what either wrote.

use std::borrow::Cow;

use rsc_core::{RawFields, Stamp, Tombstone, Write, WriteKind};
use rsc_protocol::{LAYOUT_VERSION, SCHEMA_VERSION, Timestamp};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::Error as ValueError;

use crate::types::StoreError;

/// `revision`: structural writes so far.
pub(crate) const REVISION: &str = "revision";
/// `liveRevision`: writes of either kind so far; absent counts as 0.
pub(crate) const LIVE_REVISION: &str = "liveRevision";
/// `writeId`: random per write; absent counts as empty.
pub(crate) const WRITE_ID: &str = "writeId";

const AGGREGATE: &str = "aggregate";
const SCHEMA: &str = "schemaVersion";
const LAYOUT: &str = "layoutVersion";
const UPDATED_AT: &str = "updatedAt";
const LIVE_PREFIX: &str = "live:";

/// What one commit does to the hash.
#[derive(Debug)]
pub(crate) struct Change<'a> {
    /// Fields to set, in this order. The stamp comes before the live fields, so that it is part of the
    /// first of several calls.
    pub(crate) set: Vec<(Cow<'a, str>, Cow<'a, str>)>,
    /// Fields to remove, after those were set.
    pub(crate) remove: Vec<String>,
    /// The stamp that the hash has afterwards.
    pub(crate) stamp: Stamp,
}

impl<'a> Change<'a> {
    /// The change that `write` makes to a hash whose stamp is `expected`. Both kinds of write draw a new
    /// write id, count the live revision up, and bring the layout to this version's: a hash with live
    /// fields must not pass for one of layout 1.
    pub(crate) fn of(expected: &Stamp, write: &'a Write) -> Self {
        let mut stamp = Stamp {
            revision: expected.revision,
            live_revision: expected.live_revision.saturating_add(1),
            write_id: uuid::Uuid::new_v4().simple().to_string(),
        };
        let mut set: Vec<(Cow<'a, str>, Cow<'a, str>)> = Vec::with_capacity(write.live.len() + 7);
        if let WriteKind::Structural { aggregate, revision } = &write.kind {
            stamp.revision = *revision;
            set.push((AGGREGATE.into(), aggregate.into()));
            set.push((REVISION.into(), revision.to_string().into()));
            set.push((SCHEMA.into(), SCHEMA_VERSION.to_string().into()));
        }
        set.push((LAYOUT.into(), LAYOUT_VERSION.to_string().into()));
        set.push((LIVE_REVISION.into(), stamp.live_revision.to_string().into()));
        set.push((WRITE_ID.into(), stamp.write_id.clone().into()));
        set.push((UPDATED_AT.into(), write.updated_at.to_string().into()));
        set.extend(
            write.live.iter().map(|(member_id, json)| (live_field(member_id).into(), json.as_str().into())),
        );
        let remove = write.removed_live.iter().map(|member_id| live_field(member_id)).collect();
        Change { set, remove, stamp }
    }
}

fn live_field(member_id: &str) -> String {
    format!("{LIVE_PREFIX}{member_id}")
}

/// The hash of a tombstone. The first six fields are what tells one tombstone from another.
pub(crate) fn tombstone_fields(tombstone: &Tombstone) -> [(&'static str, String); 8] {
    [
        ("streamPrefix", tombstone.stream_prefix.clone()),
        ("consumerGroup", tombstone.consumer_group.clone()),
        ("groupEpoch", tombstone.group_epoch.to_string()),
        ("metadataVersion", tombstone.metadata_version.to_string()),
        ("storeRevision", tombstone.store_revision.to_string()),
        ("liveRevision", tombstone.live_revision.to_string()),
        ("deletedAt", tombstone.deleted_at.to_string()),
        ("readingUntil", tombstone.reading_until.to_string()),
    ]
}

/// How many of [`tombstone_fields`] tell one tombstone from another.
pub(crate) const TOMBSTONE_IDENTITY: usize = 6;

/// The stamp that a group to be created is said to have had: live revisions go on above the tombstone, so
/// that they never go back under one name.
pub(crate) fn before_creation(tombstone: Option<&Tombstone>) -> Stamp {
    Stamp { live_revision: tombstone.map_or(0, |tombstone| tombstone.live_revision), ..Stamp::default() }
}

/// Why *create* refuses a write that has no aggregate.
pub(crate) fn lease_only_create() -> StoreError {
    StoreError::Unexpected("a group cannot be created by a lease-only write".to_owned())
}

/// Reads a tombstone; `None` when there are no fields. What is missing or unreadable in it counts as empty
/// or 0: a damaged tombstone must not keep a group from being created.
pub(crate) fn tombstone_of(fields: &RawFields) -> Option<Tombstone> {
    if fields.is_empty() {
        return None;
    }
    let text = |name: &str| fields.get(name).map(|bytes| String::from_utf8_lossy(bytes)).unwrap_or_default();
    let number = |name: &str| decimal(&text(name)).unwrap_or_default();
    Some(Tombstone {
        stream_prefix: text("streamPrefix").into_owned(),
        consumer_group: text("consumerGroup").into_owned(),
        group_epoch: number("groupEpoch"),
        metadata_version: number("metadataVersion"),
        store_revision: number("storeRevision"),
        live_revision: number("liveRevision"),
        deleted_at: instant(&text("deletedAt")).unwrap_or_default(),
        reading_until: instant(&text("readingUntil")).unwrap_or_default(),
    })
}

/// A plain decimal: no sign, no leading zero, at most 19 digits. `create.lua` has the same rule.
fn decimal(text: &str) -> Option<u64> {
    let plain = text.len() <= 19
        && text.bytes().all(|byte| byte.is_ascii_digit())
        && (text == "0" || !text.starts_with('0'));
    if plain { text.parse().ok() } else { None }
}

fn instant(text: &str) -> Option<Timestamp> {
    Timestamp::deserialize(IntoDeserializer::<ValueError>::into_deserializer(text)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(fields: &[(&str, &str)]) -> RawFields {
        fields.iter().map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec())).collect()
    }

    #[test]
    fn a_tombstone_survives_its_own_fields() {
        let tombstone = Tombstone {
            stream_prefix: "주문🙂".into(),
            consumer_group: "a:b%c".into(),
            group_epoch: 1 << 53,
            metadata_version: 9_999_999_999_999_999_999,
            store_revision: 0,
            live_revision: 7,
            deleted_at: Timestamp::from_millis(1_700_000_000_123),
            reading_until: Timestamp::from_millis(1_700_000_015_123),
        };
        let fields = tombstone_fields(&tombstone);
        let fields: Vec<_> = fields.iter().map(|(name, text)| (*name, text.as_str())).collect();
        assert_eq!(tombstone_of(&raw(&fields)), Some(tombstone));
    }

    #[test]
    fn a_damaged_tombstone_is_still_one() {
        let damaged = raw(&[("groupEpoch", "007"), ("storeRevision", "-1"), ("deletedAt", "yesterday")]);
        assert_eq!(tombstone_of(&damaged), Some(Tombstone::default()));
        assert_eq!(tombstone_of(&RawFields::new()), None);
    }

    #[test]
    fn only_plain_decimals_are_numbers() {
        assert_eq!(decimal("0"), Some(0));
        assert_eq!(decimal("9999999999999999999"), Some(9_999_999_999_999_999_999));
        for text in ["", "00", "01", "+1", "-1", "1.0", " 1", "10000000000000000000"] {
            assert_eq!(decimal(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_lease_only_change_leaves_aggregate_and_revision_alone() {
        let expected = Stamp { revision: 4, live_revision: 9, write_id: "w".into() };
        let write = Write {
            kind: WriteKind::LeaseOnly,
            live: vec![("m".into(), "{}".into())],
            removed_live: vec!["gone".into()],
            updated_at: Timestamp::from_millis(0),
            history: None,
        };
        let change = Change::of(&expected, &write);
        let names: Vec<_> = change.set.iter().map(|(name, _)| name.as_ref()).collect();
        assert_eq!(names, ["layoutVersion", "liveRevision", "writeId", "updatedAt", "live:m"]);
        assert_eq!(change.remove, ["live:gone"]);
        assert_eq!((change.stamp.revision, change.stamp.live_revision), (4, 10));
        assert_ne!(change.stamp.write_id, Change::of(&expected, &write).stamp.write_id);
    }
}
