//! One turn: what is being changed, what has moved, and what is told about it.

use std::collections::BTreeSet;

use rsc_protocol::Timestamp;
use rsc_protocol::resharding::MigrationState;
use serde::Serialize;

use crate::group::Group;
use crate::member::{Member, Termination};
use crate::settings::Settings;
use crate::shards::ShardSet;

/// What a turn knows about the world outside the record.
#[derive(Clone, Debug)]
pub struct Context {
    /// Redis `TIME` as *enter* returned it. A value behind the record's `updatedAt` is clamped to it.
    pub now: Timestamp,
    /// Timing and limits.
    pub settings: Settings,
    /// This instance has been in service for one lease: it may expire, fence for slowness, and prune
    /// (protocol 4.1.1).
    pub may_expire: bool,
    /// Redis time has not jumped within the last lease: new grants may be made (protocol 2).
    pub may_grant: bool,
    /// Nothing but time may be waited for: replicas have what was recorded (protocol 12, `wait-replicas`). Without it
    /// nothing new is handed out, and everything else goes on.
    pub may_hand_out: bool,
    /// The `metadataToken` to use if the version moves in this turn: random, drawn for this turn.
    pub metadata_token: String,
    /// How long this instance has used its present routing cache lease, in milliseconds (protocol 7).
    pub routing_ttl_age_ms: u64,
}

/// Something that happened, for the history and the log; never read back as truth.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "SCREAMING_SNAKE_CASE", rename_all_fields = "camelCase")]
pub enum Transition {
    /// The group was created.
    GroupCreated {
        /// Its shard count.
        shard_count: u32,
    },
    /// A new member joined.
    MemberJoined {
        /// The member.
        member_id: String,
    },
    /// A member that had expired, left or been fenced came back.
    MemberRejoined {
        /// The member.
        member_id: String,
    },
    /// A live member's process started over, having stopped everything.
    MemberRestarted {
        /// The member.
        member_id: String,
    },
    /// Another incarnation took a live member's place; what the former one held is on hold.
    MemberSuperseded {
        /// The member.
        member_id: String,
        /// The shards on hold.
        held: String,
    },
    /// A member began to leave.
    MemberLeaving {
        /// The member.
        member_id: String,
    },
    /// A member is gone: expired, left, fenced.
    MemberGone {
        /// The member.
        member_id: String,
        /// Why.
        cause: Termination,
        /// The shards it held.
        held: String,
    },
    /// The target was computed anew.
    TargetChanged {
        /// Shards whose owner changed.
        moved: usize,
        /// Members the shards are spread over.
        members: usize,
    },
    /// An `OK` allows a member to read shards.
    Granted {
        /// The member.
        member_id: String,
        /// The shards.
        shards: String,
    },
    /// Redis lost writes: everybody is brought back to what it still has.
    CorrectionBegun {
        /// The highest version that anybody spoke from.
        observed_metadata_version: u64,
        /// One was on already: it begins anew.
        again: bool,
    },
    /// Everybody is on Redis's metadata again.
    CorrectionEnded {},
    /// Shards are on hold for somebody who speaks from a lost future.
    Held {
        /// The party's member id.
        member_id: String,
        /// The shards.
        shards: String,
    },
    /// A step of a migration was recorded (protocol 6).
    MigrationStep {
        /// The migration.
        resharding_id: String,
        /// The step.
        step: &'static str,
        /// Where the migration is with it.
        state: MigrationState,
        /// The count producers route with.
        shard_count: u32,
    },
    /// An operator put an older record back (protocol 3).
    Restored {},
    /// A member gave shards back.
    Released {
        /// The member.
        member_id: String,
        /// The shards.
        shards: String,
    },
}

/// What happened in a turn, as numbers for metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that showed that Redis lost writes (protocol 5).
    pub evidence_of_loss: u64,
    /// Progress rows of shards that the member did not report (protocol 4.1.9).
    pub progress_rows_dropped: u64,
    /// Members fenced by the ownership check.
    pub ownership_violations: u64,
    /// Members fenced by the rebalance timeout.
    pub rebalance_timeouts: u64,
    /// Members whose lease ran out.
    pub leases_expired: u64,
    /// Incarnations superseded.
    pub superseded: u64,
    /// Shards granted.
    pub grants: u64,
    /// Shards given back.
    pub releases: u64,
    /// Correction rounds begun or begun anew.
    pub corrections_begun: u64,
    /// Those of them that were on already.
    pub corrections_begun_anew: u64,
    /// Holds lifted before their time.
    pub holds_lifted: u64,
}

/// The state under change and what is known about the change so far.
pub(crate) struct Turn<'c> {
    pub(crate) group: Group,
    pub(crate) context: &'c Context,
    /// `context.now`, never behind the record.
    pub(crate) now: Timestamp,
    /// The version the record had when the turn began: what a client can have seen.
    pub(crate) recorded_version: u64,
    pub(crate) recorded_token: String,
    pub(crate) structural: bool,
    pub(crate) version_moved: bool,
    pub(crate) membership_changed: bool,
    pub(crate) touched: BTreeSet<String>,
    pub(crate) removed: Vec<String>,
    pub(crate) transitions: Vec<Transition>,
    pub(crate) counts: Counts,
}

impl<'c> Turn<'c> {
    pub(crate) fn new(group: Group, context: &'c Context) -> Self {
        Turn {
            now: context.now.max(group.updated_at),
            recorded_version: group.metadata_version,
            recorded_token: group.metadata_token.clone(),
            group,
            context,
            structural: false,
            version_moved: false,
            membership_changed: false,
            touched: BTreeSet::new(),
            removed: Vec::new(),
            transitions: Vec::new(),
            counts: Counts::default(),
        }
    }

    /// Something a client can observe changed: the version moves, once per turn (protocol 1).
    pub(crate) fn move_version(&mut self) {
        self.structural = true;
        if !self.version_moved {
            self.version_moved = true;
            self.group.metadata_version += 1;
            self.group.metadata_token.clone_from(&self.context.metadata_token);
        }
    }

    /// The shard set changed: as if membership had.
    pub(crate) fn change_shard_set(&mut self) {
        self.change_membership();
    }

    /// Membership changed: a new group epoch, a new version, a target to compute (protocol 1).
    pub(crate) fn change_membership(&mut self) -> u64 {
        self.membership_changed = true;
        self.group.group_epoch += 1;
        self.move_version();
        self.group.group_epoch
    }

    pub(crate) fn member(&self, id: &str) -> Option<&Member> {
        self.group.members.get(id)
    }

    /// A member to change its live part only.
    pub(crate) fn touch(&mut self, id: &str) -> Option<&mut Member> {
        let member = self.group.members.get_mut(id)?;
        self.touched.insert(id.to_owned());
        Some(member)
    }

    /// A member to change what the aggregate says of it.
    pub(crate) fn change(&mut self, id: &str) -> Option<&mut Member> {
        self.structural = true;
        self.touch(id)
    }

    /// Whether a live member other than `id` holds `shard`.
    pub(crate) fn is_held_by_another(&self, id: &str, shard: u32) -> bool {
        self.group.live_members().any(|(other, member)| {
            let holds = if planted!(GrantIgnoresGranted) {
                member.current.contains(shard) || member.revoking.contains_key(&shard)
            } else {
                member.holds(shard)
            };
            other != id && holds
        })
    }

    pub(crate) fn note(&mut self, transition: Transition) {
        self.transitions.push(transition);
    }
}

/// Shards for people: `0-3,7`.
pub(crate) fn ranges(shards: &ShardSet) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for shard in shards.iter() {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == shard => *last = shard,
            _ => runs.push((shard, shard)),
        }
    }
    let texts: Vec<String> = runs
        .into_iter()
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") })
        .collect();
    texts.join(",")
}
