//! Calling the pure state machine: its context, a net under it, and a check of what it did.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use rsc_core::{
    Command, Context, Counts, Decision, Group, Loaded, Reply, Transition, WriteKind, decide, validate,
};
use rsc_protocol::{GroupKey, Timestamp};

use crate::memory::Memory;
use crate::meter;
use crate::shared::Shared;

/// The state machine panicked. Nothing of its decision is used.
#[derive(Debug)]
pub(crate) struct Panicked;

/// What the state machine is told about the world at this moment.
pub(crate) fn context(shared: &Shared, memory: &Memory, now: Timestamp) -> Context {
    let at = Instant::now();
    Context {
        now,
        settings: shared.settings.timing.clone(),
        may_expire: memory.watch.may_expire(at),
        may_grant: memory.watch.may_grant(at),
        may_hand_out: !memory.replicas_are_short,
        metadata_token: Shared::metadata_token(),
        routing_ttl_age_ms: shared.routing_ttl_age_ms(),
    }
}

/// Decides on `commands`. A panic stays here: it must harm nobody but the command that caused it.
pub(crate) fn decide_on(
    shared: &Shared,
    loaded: &Loaded,
    commands: &[Command],
    context: &Context,
) -> Result<Decision, Panicked> {
    let group = loaded.group.clone();
    // Unwind safe: what the closure touches is cloned in, or given up together with the decision.
    let decided = catch_unwind(AssertUnwindSafe(|| {
        #[cfg(test)]
        shared.hooks.before_decision(commands);
        decide(group, &loaded.stray_live, commands, context)
    }));
    match decided {
        Ok(decision) => {
            check(&loaded.group, &decision, context);
            Ok(decision)
        }
        Err(_) => {
            meter::decide_panicked();
            tracing::error!(group = %loaded.group.key, commands = commands.len(), instance = shared.settings.instance_id, "the state machine panicked");
            Err(Panicked)
        }
    }
}

/// The invariants, counted and logged and never in the way of the service. In release builds only what a
/// structural change leaves behind is checked.
fn check(before: &Group, decision: &Decision, context: &Context) {
    let structural = matches!(&decision.write, Some(write) if write.kind != WriteKind::LeaseOnly);
    let mut violations = Vec::new();
    if structural || cfg!(debug_assertions) {
        violations.extend(decision.group.validate());
    }
    if cfg!(debug_assertions) {
        violations.extend(validate::validate_transition(before, &decision.group, context.now));
    }
    if violations.is_empty() {
        return;
    }
    for violation in &violations {
        meter::violated(violation);
    }
    let texts: Vec<String> = violations.iter().map(ToString::to_string).collect();
    tracing::error!(group = %before.key, violations = ?texts, "invariants do not hold");
}

/// What remains of a recorded decision once its group has become the memory.
pub(crate) struct Decided {
    pub(crate) replies: Vec<Reply>,
    transitions: Vec<Transition>,
    counts: Counts,
    version: u64,
}

impl Decided {
    pub(crate) fn of(decision: Decision) -> (Group, Self) {
        let Decision { group, replies, transitions, counts, .. } = decision;
        let version = group.metadata_version;
        (group, Decided { replies, transitions, counts, version })
    }
}

/// Tells people what a recorded decision did.
pub(crate) fn tell(group: &GroupKey, decision: &Decided) {
    use Transition as T;
    meter::decided(&decision.counts);
    let version = decision.version;
    for transition in &decision.transitions {
        match transition {
            T::GroupCreated { shard_count } => tracing::info!(%group, version, shard_count, "group created"),
            T::MemberJoined { member_id } => tracing::info!(%group, version, member_id, "member joined"),
            T::MemberRejoined { member_id } => tracing::info!(%group, version, member_id, "member rejoined"),
            T::MemberRestarted { member_id } => {
                tracing::info!(%group, version, member_id, "member restarted")
            }
            T::MemberSuperseded { member_id, held } => {
                tracing::info!(%group, version, member_id, held, "member superseded");
            }
            T::MemberLeaving { member_id } => tracing::info!(%group, version, member_id, "member leaving"),
            T::MemberGone { member_id, cause, held } => {
                tracing::info!(%group, version, member_id, ?cause, held, "member gone");
            }
            T::TargetChanged { moved, members } => {
                tracing::info!(%group, version, moved, members, "target changed");
            }
            T::Granted { member_id, shards } => {
                tracing::info!(%group, version, member_id, shards, "shards granted");
            }
            // Everybody who has seen the lost writes says so once: one loss, many signs.
            T::CorrectionBegun { observed_metadata_version, again: true } => {
                tracing::debug!(%group, version, observed_metadata_version, "a further sign that redis lost writes: the correction round begins anew");
            }
            T::CorrectionBegun { observed_metadata_version, again: false } => {
                tracing::warn!(%group, version, observed_metadata_version, "redis lost writes: correction round begun");
            }
            T::CorrectionEnded {} => tracing::info!(%group, version, "correction round ended"),
            T::Held { member_id, shards } => {
                tracing::info!(%group, version, member_id, shards, "shards on hold for who reads them from a lost future");
            }
            // Recorded by `rsc restore`, never by a turn.
            T::Restored {} => tracing::info!(%group, version, "record restored"),
            T::MigrationStep { resharding_id, step, state, shard_count } => {
                meter::migration_step(step);
                tracing::info!(%group, version, resharding_id, step, ?state, shard_count, "migration step");
            }
            T::Released { member_id, shards } => {
                tracing::info!(%group, version, member_id, shards, "shards released");
            }
        }
    }
    if decision.counts.evidence_of_loss > 0 {
        tracing::debug!(
            %group,
            version,
            requests = decision.counts.evidence_of_loss,
            "members report a newer state than redis has: redis lost writes"
        );
    }
}
