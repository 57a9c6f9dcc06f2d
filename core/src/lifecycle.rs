//! Creating and deleting a group, and putting its record back (protocol 3). Only an operator does any of it.

use std::collections::BTreeMap;

use rsc_protocol::admin::GroupState;
use rsc_protocol::heartbeat::MAX_COUNTER;
use rsc_protocol::{ErrorCode, GroupKey, Timestamp};

use crate::correction;
use crate::decide::{finish, history_entry, structural};
use crate::group::Group;
use crate::record::Loaded;
use crate::settings::{Settings, millis};
use crate::turn::{Context, Transition, Turn};
use crate::write::{Stamp, Tombstone, Write};

/// How far ahead a tombstone's instants are believed: an hour, longer than any lease that makes sense.
const LONGEST_LEASE_MS: u64 = 3_600_000;

/// A group that nobody has joined, and the write that claims its key.
#[derive(Clone, Debug)]
pub struct Creation {
    /// The group as it will be recorded.
    pub group: Group,
    /// What to record.
    pub write: Write,
}

/// A new group of `shard_count` shards, starting above what a deleted one of the same name had reached, so
/// that nobody's memory of the old one looks newer. Its streams are still to be created: it admits nobody
/// until [`crate::Command::Provisioned`].
#[must_use]
pub fn create(
    key: &GroupKey,
    shard_count: u32,
    now: Timestamp,
    metadata_token: &str,
    tombstone: Option<&Tombstone>,
    settings: &Settings,
) -> Creation {
    let mut reached = tombstone.cloned().unwrap_or_default();
    // A damaged tombstone must not make a group that no load accepts.
    for number in [
        &mut reached.group_epoch,
        &mut reached.metadata_version,
        &mut reached.store_revision,
        &mut reached.live_revision,
    ] {
        if *number > MAX_COUNTER / 2 {
            *number = 0;
        }
    }
    let latest = now.plus(millis(settings.member_lease_ttl_ms.max(LONGEST_LEASE_MS)));
    let (deleted_at, reading_until) = (reached.deleted_at.min(latest), reached.reading_until.min(latest));
    let group = Group {
        key: key.clone(),
        store_revision: reached.store_revision + 1,
        group_epoch: reached.group_epoch + 1,
        assignment_epoch: reached.group_epoch + 1,
        metadata_version: reached.metadata_version + 1,
        metadata_token: metadata_token.to_owned(),
        state: GroupState::Empty,
        shard_count,
        members: BTreeMap::new(),
        targets: BTreeMap::new(),
        holds: Vec::new(),
        fencing_tokens: BTreeMap::new(),
        grants_from: (reading_until > now).then_some(reading_until),
        provisioning_pending: true,
        max_routing_cache_ttl_ms: settings.routing_cache_ttl_ms,
        routing_cap: None,
        migrations: BTreeMap::new(),
        foreign_migrations: serde_json::Map::new(),
        active_resharding_id: None,
        metadata_correction: None,
        correction_starters: Vec::new(),
        created_at: now.max(deleted_at),
        updated_at: now.max(deleted_at),
        unknown: serde_json::Map::new(),
    };
    let created = Transition::GroupCreated { shard_count };
    let write = Write {
        kind: structural(&group),
        live: Vec::new(),
        removed_live: Vec::new(),
        updated_at: group.updated_at,
        history: Some(history_entry(&group, &[created])),
    };
    Creation { group, write }
}

/// Until when somebody may be reading a shard of `group`: the leases of its live members, its holds, and what
/// was left of a former group of the name.
fn reading_until(group: &Group) -> Timestamp {
    let leases = group.live_members().map(|(_, member)| member.live.member_lease_expires_at);
    let holds = group.holds.iter().map(|hold| group.hold_end(hold));
    leases.chain(holds).chain(group.grants_from).max().unwrap_or_default()
}

/// Whether a group may be deleted, and what remains of it.
///
/// # Errors
/// `METADATA_SYNC_IN_PROGRESS` while a correction round is on (protocol 5): what remained would lie below what
/// members have seen. `ACTIVE_MIGRATION_EXISTS` while a migration of the stream runs, and `GROUP_HAS_ACTIVE_MEMBERS` while members are live, unless forced.
pub fn delete(
    group: &Group,
    stamp: &Stamp,
    now: Timestamp,
    force: bool,
) -> Result<Tombstone, (ErrorCode, String)> {
    if group.metadata_correction.is_some() {
        let message = format!(
            "redis has lost writes of group {}, its members are being brought back: try again later",
            group.key
        );
        return Err((ErrorCode::MetadataSyncInProgress, message));
    }
    if let Some(migration) = group.active_resharding_id.as_deref().filter(|_| !force) {
        let message = format!(
            "migration {migration} of stream {} is running, and group {} is part of it: wait for its end, roll it back, or delete with \"force\": true",
            group.key.stream_prefix(),
            group.key
        );
        return Err((ErrorCode::ActiveMigrationExists, message));
    }
    let live = group.live_members().count();
    if live > 0 && !force {
        let message = format!(
            "group {} has {live} live members: stop them first, or delete with \"force\": true",
            group.key
        );
        return Err((ErrorCode::GroupHasActiveMembers, message));
    }
    Ok(Tombstone {
        stream_prefix: group.key.stream_prefix().to_owned(),
        consumer_group: group.key.consumer_group().to_owned(),
        group_epoch: group.group_epoch,
        metadata_version: group.metadata_version,
        store_revision: group.store_revision,
        live_revision: stamp.live_revision,
        deleted_at: now.max(group.updated_at),
        reading_until: reading_until(group),
    })
}

/// What to write so that a record of former times stands again. `observed_metadata_version`: the highest version that
/// is known to have been reached since.
///
/// Whatever was recorded between the backup and now is lost, so a correction round begins with the very write that
/// puts the record back (protocol 5): from its first moment on nothing new is granted and nobody is expired for a
/// lease, also by an instance that has just started and cannot know, and before any client has spoken. Everything
/// else stays as it is in the backup: members, target, leases, versions. The write is the next structural one
/// after the backup's, with a `writeId` of its own, so that no instance takes it for a state it remembers.
#[must_use]
pub fn restore(loaded: Loaded, now: Timestamp, observed_metadata_version: u64) -> Creation {
    let context = Context {
        now,
        // Nothing below asks for any of these: no maintenance, no grants, no new version.
        settings: Settings::default(),
        may_expire: false,
        may_grant: false,
        may_hand_out: false,
        metadata_token: String::new(),
        routing_ttl_age_ms: 0,
    };
    let mut turn = Turn::new(loaded.group, &context);
    turn.note(Transition::Restored {});
    correction::begin(&mut turn, observed_metadata_version);
    let decision = finish(turn, &loaded.stray_live, Vec::new());
    let history = history_entry(&decision.group, &decision.transitions);
    let write = Write {
        kind: structural(&decision.group),
        live: Vec::new(),
        removed_live: loaded.stray_live,
        updated_at: decision.group.updated_at,
        history: Some(history),
    };
    Creation { group: decision.group, write }
}
