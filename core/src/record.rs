//! Every check of a load, and the merging of live fields (protocol 2). The JSON itself: [`crate::aggregate`].
//!
//! What another implementation of the protocol writes (schema 1, none of our additions) loads; fields
//! nobody here knows are kept.

use rsc_protocol::keys::Keys;
use rsc_protocol::{GroupKey, LAYOUT_VERSION, SCHEMA_VERSION, Timestamp};
use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;

use crate::aggregate::GroupRecord;
pub use crate::aggregate::aggregate;
use crate::group::Group;
use crate::member::Live;
use crate::settings::Settings;
use crate::write::{RawFields, Stamp};

/// The prefix of live fields in the hash.
pub const LIVE_FIELD_PREFIX: &str = "live:";

/// Why a stored record is not used. Nothing that fails here is ever overwritten (protocol 2).
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LoadError {
    /// The record is the healthy one of the pair that gives the same key name.
    #[error(
        "the redis key belongs to the group ({stream_prefix}, {consumer_group}), whose names give the same key"
    )]
    Collision {
        /// That group's stream prefix.
        stream_prefix: String,
        /// That group's consumer group.
        consumer_group: String,
    },
    /// The record names a pair that does not belong under this key at all.
    #[error(
        "the record names the group ({stream_prefix}, {consumer_group}), which does not belong under this key"
    )]
    Foreign {
        /// The stream prefix found.
        stream_prefix: String,
        /// The consumer group found.
        consumer_group: String,
    },
    /// Schema newer than this version reads.
    #[error(
        "schemaVersion {found} is not supported, this version reads {SCHEMA_VERSION}: upgrade the coordinator"
    )]
    Schema {
        /// What the record says.
        found: String,
    },
    /// Layout newer than this version reads.
    #[error(
        "layoutVersion {found} is not supported, this version reads up to {LAYOUT_VERSION}: upgrade the coordinator"
    )]
    Layout {
        /// What the record says.
        found: String,
    },
    /// Field `revision` and the aggregate's `storeRevision` differ.
    #[error("field revision is {revision} but the aggregate's storeRevision is {store_revision}")]
    RevisionMismatch {
        /// The hash field.
        revision: u64,
        /// The aggregate's.
        store_revision: u64,
    },
    /// A hash field is absent or no number.
    #[error("field {field} is {problem}")]
    Field {
        /// The hash field.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The aggregate is not the JSON it should be.
    #[error("the aggregate cannot be read: {0}")]
    Aggregate(String),
}

/// A record that passed every check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// The group, live fields merged in.
    pub group: Group,
    /// What identifies the stored state.
    pub stamp: Stamp,
    /// Live fields without a member or that could not be read; the next structural commit removes them.
    pub stray_live: Vec<String>,
}

fn text<'a>(fields: &'a RawFields, field: &'static str) -> Result<Option<&'a str>, LoadError> {
    let Some(bytes) = fields.get(field) else {
        return Ok(None);
    };
    let text = std::str::from_utf8(bytes)
        .map_err(|_| LoadError::Field { field, problem: "not UTF-8".to_owned() })?;
    Ok(Some(text))
}

fn number(fields: &RawFields, field: &'static str) -> Result<Option<u64>, LoadError> {
    let Some(text) = text(fields, field)? else {
        return Ok(None);
    };
    let problem = || LoadError::Field { field, problem: "not a whole number".to_owned() };
    let number: u64 = text.parse().map_err(|_| problem())?;
    // The scripts compare texts: what is not written as we write it would load and then never be committed to.
    if number.to_string() == text { Ok(Some(number)) } else { Err(problem()) }
}

/// Reads the stamp of a hash: what the compare-and-set of the next commit will expect.
///
/// # Errors
/// When `revision` is absent or one of the numbers is none.
pub fn stamp(fields: &RawFields) -> Result<Stamp, LoadError> {
    Ok(Stamp {
        revision: number(fields, "revision")?
            .ok_or(LoadError::Field { field: "revision", problem: "absent".to_owned() })?,
        live_revision: number(fields, "liveRevision")?.unwrap_or(0),
        write_id: text(fields, "writeId")?.unwrap_or_default().to_owned(),
    })
}

/// Verifies and reads a stored hash as the record of `group` (protocol 2, *On load, verify*).
///
/// # Errors
/// The first check that fails; the record must then not be written over.
pub fn load(group: &GroupKey, fields: &RawFields, settings: &Settings) -> Result<Loaded, LoadError> {
    if let Some(schema) = text(fields, "schemaVersion")?
        && schema.trim() != SCHEMA_VERSION.to_string()
    {
        return Err(LoadError::Schema { found: schema.to_owned() });
    }
    match number(fields, "layoutVersion") {
        Ok(Some(layout)) if layout > LAYOUT_VERSION => {
            return Err(LoadError::Layout { found: layout.to_string() });
        }
        Ok(_) => {}
        Err(error) => return Err(error),
    }
    let aggregate = text(fields, "aggregate")?
        .ok_or(LoadError::Field { field: "aggregate", problem: "absent".to_owned() })?;
    // The schema first: a newer one may well not parse as ours.
    let header: Header =
        serde_json::from_str(aggregate).map_err(|error| LoadError::Aggregate(error.to_string()))?;
    if header.schema_version != SCHEMA_VERSION {
        return Err(LoadError::Schema { found: header.schema_version.to_string() });
    }
    check_pair(group, &header)?;
    let stamp = stamp(fields)?;
    let record: GroupRecord =
        serde_json::from_str(aggregate).map_err(|error| LoadError::Aggregate(error.to_string()))?;
    record.check_bounds()?;
    if record.store_revision != stamp.revision {
        let (revision, store_revision) = (stamp.revision, record.store_revision);
        return Err(LoadError::RevisionMismatch { revision, store_revision });
    }
    let mut group = record.into_group(group.clone(), settings)?;
    // A lease-only commit moves the hash's `updatedAt`, which time must not run behind (protocol 2).
    if let Some(updated_at) = text(fields, "updatedAt")?
        && let Ok(updated_at) = serde_json::from_value::<Timestamp>(Value::String(updated_at.to_owned()))
    {
        group.updated_at = group.updated_at.max(updated_at);
    }
    let stray_live = merge_live(&mut group, fields);
    merge_acknowledgements(&mut group);
    Ok(Loaded { group, stamp, stray_live })
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    stream_prefix: String,
    consumer_group: String,
    schema_version: u64,
}

fn check_pair(group: &GroupKey, header: &Header) -> Result<(), LoadError> {
    let (stream_prefix, consumer_group) = (header.stream_prefix.clone(), header.consumer_group.clone());
    if stream_prefix == group.stream_prefix() && consumer_group == group.consumer_group() {
        return Ok(());
    }
    let keys = Keys::default();
    match GroupKey::new(stream_prefix.as_str(), consumer_group.as_str()) {
        Ok(other) if keys.metadata(&other) == keys.metadata(group) => {
            Err(LoadError::Collision { stream_prefix, consumer_group })
        }
        _ => Err(LoadError::Foreign { stream_prefix, consumer_group }),
    }
}

/// Merges `live:<memberId>` fields into the members: the newer lease and the higher epochs win; a field
/// that speaks of an earlier incarnation contributes its lease only.
fn merge_live(group: &mut Group, fields: &RawFields) -> Vec<String> {
    let mut stray = Vec::new();
    for (field, value) in fields {
        let Some(member_id) = field.strip_prefix(LIVE_FIELD_PREFIX) else {
            continue;
        };
        let live = serde_json::from_slice::<Live>(value).ok();
        match (group.members.get_mut(member_id), live) {
            (Some(member), Some(live)) => merge_one(&mut member.live, live),
            _ => stray.push(member_id.to_owned()),
        }
    }
    stray
}

/// Who has synchronised according to the aggregate has, whatever its live field says: other implementations
/// write none.
fn merge_acknowledgements(group: &mut Group) {
    let Some(round) = &group.metadata_correction else { return };
    for id in &round.acknowledged_members {
        if let Some(member) = group.members.get_mut(id) {
            member.live.synchronised_at_round = Some(round.requested_at);
        }
    }
}

fn merge_one(recorded: &mut Live, found: Live) {
    let lease = recorded.member_lease_expires_at.max(found.member_lease_expires_at);
    if found.member_epoch < recorded.confirmed_member_epoch {
        recorded.member_lease_expires_at = lease;
        return;
    }
    let member_epoch = recorded.member_epoch.max(found.member_epoch);
    let confirmed = recorded.confirmed_member_epoch.max(found.confirmed_member_epoch);
    let sequence = recorded.sequence.max(found.sequence);
    if found.last_heartbeat_at >= recorded.last_heartbeat_at {
        *recorded = found;
    }
    recorded.member_lease_expires_at = lease;
    recorded.member_epoch = member_epoch;
    recorded.confirmed_member_epoch = confirmed;
    recorded.sequence = sequence;
}
