//! What is handed to the store and comes back from it: plain text and numbers, no IO (protocol 2).

use std::collections::BTreeMap;

use rsc_protocol::{GroupKey, Timestamp};
use serde::{Deserialize, Serialize};

/// Identifies one written state of a group's hash. A remembered state is still the stored one only if all
/// three match: after a rollback the same revision can come back with another content (protocol 2).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// The field `revision`: structural writes so far.
    pub revision: u64,
    /// The field `liveRevision`; 0 when absent. Never goes back.
    pub live_revision: u64,
    /// The field `writeId`, random per write; empty when absent.
    pub write_id: String,
}

/// The fields of a group's hash as they came from the store, before anything is believed.
pub type RawFields = BTreeMap<String, Vec<u8>>;

/// How much of the record a commit writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WriteKind {
    /// The whole aggregate; `revision` becomes this number.
    Structural {
        /// The aggregate as JSON.
        aggregate: String,
        /// `storeRevision` of that aggregate: the expected revision + 1.
        revision: u64,
    },
    /// Members' live fields only; `aggregate` and `revision` stay as they are.
    LeaseOnly,
}

/// One commit: everything the script needs besides token and expected stamp. `liveRevision` grows by 1 with
/// either kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// How much is written.
    pub kind: WriteKind,
    /// `live:<memberId>` fields to set: member id and JSON.
    pub live: Vec<(String, String)>,
    /// Member ids whose live field is removed.
    pub removed_live: Vec<String>,
    /// The field `updatedAt`.
    pub updated_at: Timestamp,
    /// A compact JSON entry for `P:G:history`, if the transition is observable.
    pub history: Option<String>,
}

/// What a deleted group had reached, kept one day so that a group created again starts above it
/// (protocol 3).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Tombstone {
    /// The stream prefix of the deleted group; empty when unknown.
    pub stream_prefix: String,
    /// The consumer group of the deleted group; empty when unknown.
    pub consumer_group: String,
    /// Its last group epoch.
    pub group_epoch: u64,
    /// Its last metadata version.
    pub metadata_version: u64,
    /// Its last store revision.
    pub store_revision: u64,
    /// Its last live revision.
    pub live_revision: u64,
    /// When it was deleted.
    pub deleted_at: Timestamp,
    /// Until when a member of the deleted group may still be reading; a group created again grants nothing
    /// before.
    pub reading_until: Timestamp,
}

impl Tombstone {
    /// How long a tombstone is kept, in milliseconds: one day (protocol 2).
    pub const TTL_MS: u64 = 24 * 60 * 60 * 1000;

    /// Whether this tombstone is of `group` (and not of the pair that collides with it).
    #[must_use]
    pub fn is_of(&self, group: &GroupKey) -> bool {
        self.stream_prefix == group.stream_prefix() && self.consumer_group == group.consumer_group()
    }
}
