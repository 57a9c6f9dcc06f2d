//! The invariants, by name (`docs/invariants.md`). Property tests, the running daemon and its metrics use
//! the same names.

use std::collections::BTreeMap;
use std::fmt;

use rsc_protocol::Timestamp;

use crate::group::Group;
use crate::migration::Migration;
use crate::shards::ShardSet;

/// An invariant that does not hold, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The invariant's id in `docs/invariants.md`.
    pub invariant: &'static str,
    /// What was found.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.invariant, self.detail)
    }
}

/// Every invariant id that [`Group::validate`] and [`validate_transition`] can name.
pub const INVARIANTS: &[&str] = &[
    "one-holder",
    "legal-target",
    "balanced-target",
    "epoch-order",
    "grant-not-from-the-future",
    "terminal-holds-nothing",
    "drain-clock",
    "one-migration",
    "drained-or-read",
    "accepted-not-superseded",
    "version-monotonic",
    "epoch-monotonic",
    "lease-monotonic",
    "fencing-monotonic",
    "hold-blocks-grant",
    "observable-moves-version",
];

struct Findings(Vec<Violation>);

impl Findings {
    fn require(&mut self, holds: bool, invariant: &'static str, detail: impl FnOnce() -> String) {
        if !holds {
            self.0.push(Violation { invariant, detail: detail() });
        }
    }
}

impl Group {
    /// Every invariant of one recorded state; empty when all hold.
    #[must_use]
    pub fn validate(&self) -> Vec<Violation> {
        let mut findings = Findings(Vec::new());
        self.validate_holders(&mut findings);
        self.validate_targets(&mut findings);
        self.validate_members(&mut findings);
        self.validate_migrations(&mut findings);
        findings.require(self.assignment_epoch <= self.group_epoch, "epoch-order", || {
            format!("assignment epoch {} > group epoch {}", self.assignment_epoch, self.group_epoch)
        });
        findings.0
    }

    fn validate_holders(&self, findings: &mut Findings) {
        let mut holders: BTreeMap<u32, &str> = BTreeMap::new();
        for (id, member) in self.live_members() {
            for shard in member.holding().iter() {
                if let Some(other) = holders.insert(shard, id) {
                    findings.require(false, "one-holder", || format!("shard {shard}: {other} and {id}"));
                }
            }
        }
    }

    fn validate_targets(&self, findings: &mut Findings) {
        let assignable: Vec<&String> =
            self.members.iter().filter(|(_, m)| m.state.is_assignable()).map(|(id, _)| id).collect();
        findings.require(self.targets.keys().collect::<Vec<_>>() == assignable, "legal-target", || {
            format!("targets of {:?}, assignable members {assignable:?}", self.targets.keys())
        });
        if assignable.is_empty() {
            return;
        }
        let mut named: Vec<u32> = self.targets.values().flat_map(ShardSet::iter).collect();
        named.sort_unstable();
        findings.require(named == self.read_set().iter().collect::<Vec<_>>(), "legal-target", || {
            format!("targets name {named:?}, the read set is {:?}", self.read_set())
        });
        let sizes = || self.targets.values().map(ShardSet::len);
        let spread = sizes().max().unwrap_or(0) - sizes().min().unwrap_or(0);
        findings.require(spread <= 1, "balanced-target", || format!("target sizes differ by {spread}"));
    }

    fn validate_migrations(&self, findings: &mut Findings) {
        let running: Vec<&str> = self
            .migrations
            .values()
            .filter(|migration| !migration.state.is_over())
            .map(|migration| migration.resharding_id.as_str())
            .collect();
        let active: Vec<&str> = self.active_resharding_id.as_deref().into_iter().collect();
        findings.require(running == active, "one-migration", || {
            format!("running are {running:?}, active is {active:?}")
        });
        for migration in self.migrations.values() {
            let (id, draining) = (&migration.resharding_id, migration.draining());
            let both = draining.iter().find(|shard| migration.retired.contains(*shard));
            findings.require(both.is_none(), "drained-or-read", || {
                format!("{id}: shard {both:?} is both given up and drained")
            });
            let is_over = migration.state.is_over();
            findings.require(!is_over || draining.is_empty(), "drained-or-read", || {
                format!("{id} is over, and nobody reads what it still drains: {draining:?}")
            });
            let routed = migration.removed().iter().find(|shard| *shard < self.shard_count);
            findings.require(is_over || routed.is_none(), "drained-or-read", || {
                format!("{id}: producers route to shard {routed:?}, which is being removed")
            });
        }
    }

    fn validate_members(&self, findings: &mut Findings) {
        for (id, member) in &self.members {
            let live = &member.live;
            findings.require(
                live.confirmed_member_epoch <= live.member_epoch && live.member_epoch <= self.group_epoch,
                "epoch-order",
                || {
                    format!(
                        "{id}: confirmed {} ≤ member {} ≤ group {} does not hold",
                        live.confirmed_member_epoch, live.member_epoch, self.group_epoch
                    )
                },
            );
            for (shard, grant) in &member.granted {
                findings.require(
                    grant.metadata_version <= self.metadata_version,
                    "grant-not-from-the-future",
                    || format!("{id}, shard {shard}: {} > {}", grant.metadata_version, self.metadata_version),
                );
            }
            findings.require(member.is_live() || member.holds_nothing(), "terminal-holds-nothing", || {
                format!("{id} is {:?} and holds {:?}", member.state, member.holding())
            });
            let beyond = member.is_live() && !member.holding().minus(&self.target(id)).is_empty();
            findings.require(beyond == member.rebalance_deadline_at.is_some(), "drain-clock", || {
                format!("{id}: drains {beyond}, deadline {:?}", member.rebalance_deadline_at)
            });
            let accepted_is_superseded = member
                .superseded
                .iter()
                .any(|former| Some(&former.instance_id) == member.instance_id.as_ref());
            findings.require(!accepted_is_superseded, "accepted-not-superseded", || id.clone());
        }
    }
}

/// Every invariant of one step from `before` to `after` at Redis time `now`; empty when all hold.
#[must_use]
pub fn validate_transition(before: &Group, after: &Group, now: Timestamp) -> Vec<Violation> {
    let mut findings = Findings(Vec::new());
    findings.require(after.metadata_version >= before.metadata_version, "version-monotonic", || {
        format!("{} after {}", after.metadata_version, before.metadata_version)
    });
    findings.require(
        after.group_epoch >= before.group_epoch && after.assignment_epoch >= before.assignment_epoch,
        "epoch-monotonic",
        || format!("group {} after {}", after.group_epoch, before.group_epoch),
    );
    for (shard, token) in &before.fencing_tokens {
        findings.require(after.fencing_tokens.get(shard) >= Some(token), "fencing-monotonic", || {
            format!("shard {shard}: {:?} after {token}", after.fencing_tokens.get(shard))
        });
    }
    for (id, member) in &before.members {
        let Some(later) = after.members.get(id) else {
            continue;
        };
        findings.require(later.live.member_epoch >= member.live.member_epoch, "epoch-monotonic", || {
            format!("{id}: {} after {}", later.live.member_epoch, member.live.member_epoch)
        });
        let (lease, lease_before) = (later.live.member_lease_expires_at, member.live.member_lease_expires_at);
        findings.require(lease >= lease_before, "lease-monotonic", || {
            format!("{id}: {lease} after {lease_before}")
        });
    }
    validate_grants(before, after, now, &mut findings);
    if after.metadata_version == before.metadata_version {
        findings.require(observable(before) == observable(after), "observable-moves-version", || {
            format!("version {} shows two states", after.metadata_version)
        });
        findings.require(before.metadata_token == after.metadata_token, "observable-moves-version", || {
            "the token moved without the version".to_owned()
        });
    }
    findings.0
}

/// A hold that was there before the step and has not ended or been lifted blocks every new grant.
fn validate_grants(before: &Group, after: &Group, now: Timestamp, findings: &mut Findings) {
    let now = now.max(before.updated_at);
    for (id, member) in after.live_members() {
        for (shard, grant) in &member.granted {
            let held_before = before.members.get(id).is_some_and(|former| {
                let same_incarnation = former.join_metadata_version == member.join_metadata_version;
                // A new stamp on a shard that was to be drained is a new grant (protocol 1).
                let anew = former
                    .granted
                    .get(shard)
                    .is_some_and(|old| old.metadata_version != grant.metadata_version);
                same_incarnation && former.is_live() && former.holds(*shard) && !anew
            });
            findings.require(held_before || !after.is_on_hold(*shard, now), "hold-blocks-grant", || {
                format!("{id} was granted shard {shard}, which is on hold")
            });
        }
    }
}

type Observable<'g> = (
    (u64, u64, u32),
    &'g BTreeMap<String, ShardSet>,
    Vec<(&'g String, bool, ShardSet)>,
    &'g BTreeMap<String, Migration>,
);

/// What a client can observe and the version must therefore move with: epochs, shard count, target,
/// membership, grants, migrations.
fn observable(group: &Group) -> Observable<'_> {
    let members = group
        .live_members()
        .map(|(id, member)| {
            (id, member.state.is_assignable(), member.granted.keys().copied().collect::<ShardSet>())
        })
        .collect();
    let numbers = (group.group_epoch, group.assignment_epoch, group.shard_count);
    (numbers, &group.targets, members, &group.migrations)
}
