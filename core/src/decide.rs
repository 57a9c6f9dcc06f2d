//! What is done with commands: the list of protocol 4.1, in its order.

use rsc_protocol::heartbeat::{EPOCH_JOIN, EPOCH_LEAVE};
use rsc_protocol::{ErrorCode, HeartbeatRequest, HeartbeatResponse, PROTOCOL_VERSION, Status};

use crate::group::Group;
use crate::migration::{self, MigrationStep};
use crate::turn::{Context, Counts, Transition, Turn};
use crate::write::{Write, WriteKind};
use crate::{correction, handover, holds, maintenance, membership, ownership, record, view};

/// Something to do to a group.
#[derive(Clone, Debug)]
pub enum Command {
    /// A member's heartbeat (protocol 4). `path_member_id` is the id in the path; the request passed
    /// [`HeartbeatRequest::check`].
    Heartbeat {
        /// The id the path names.
        path_member_id: String,
        /// The body.
        request: Box<HeartbeatRequest>,
    },
    /// Time has passed: maintenance only (protocol 4.1.1).
    Tick,
    /// The actor found a record that is no successor of its own last commit (protocol 5).
    LostWrites {
        /// The version it had committed.
        observed_metadata_version: u64,
    },
    /// Every shard's stream exists now: members may be admitted.
    Provisioned,
    /// One step of a migration (protocol 6).
    Migrate {
        /// The migration.
        resharding_id: String,
        /// The step.
        step: MigrationStep,
    },
}

/// What a command is answered with, once the decision it is part of is recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The answer to a heartbeat.
    Heartbeat(Box<HeartbeatResponse>),
    /// The command was refused and changed nothing.
    Refused {
        /// The code.
        code: ErrorCode,
        /// What happened, to what, and what to do.
        message: String,
    },
    /// Done, nothing to say.
    Done,
}

/// What comes out of a turn. `replies` may leave only after `write`, if there is one, is recorded.
#[derive(Clone, Debug)]
pub struct Decision {
    /// The group after the turn.
    pub group: Group,
    /// What to record; `None` when nothing changed.
    pub write: Option<Write>,
    /// One reply per command, in order.
    pub replies: Vec<Reply>,
    /// What happened, for people.
    pub transitions: Vec<Transition>,
    /// What happened, for metrics.
    pub counts: Counts,
}

/// How one heartbeat is to be answered once the whole batch is applied.
pub(crate) enum Answer {
    /// By the member's view of the final state.
    View,
    /// By a status that says nothing about the assignment.
    Status(Status, String),
    /// By an error.
    Refused(ErrorCode, String),
}

impl Answer {
    pub(crate) fn retry(reason: impl Into<String>) -> Self {
        Answer::Status(Status::Retry, reason.into())
    }

    pub(crate) fn fenced(reason: impl Into<String>) -> Self {
        Answer::Status(Status::FencedMemberEpoch, reason.into())
    }
}

/// Applies `commands` in order to one loaded state, reconciles once, and computes each reply from the final
/// state (protocol 4.1). `stray_live` are live fields without a member, removed with the next structural
/// write.
#[must_use]
pub fn decide(group: Group, stray_live: &[String], commands: &[Command], context: &Context) -> Decision {
    let mut turn = Turn::new(group, context);
    let loss_is_known = correction::is_about_to_begin(&turn, commands);
    maintenance::run(&mut turn, loss_is_known);
    let answers: Vec<Option<Answer>> = commands
        .iter()
        .map(|command| match command {
            Command::Heartbeat { path_member_id, request } => {
                Some(heartbeat(&mut turn, path_member_id, request))
            }
            Command::Tick => None,
            Command::LostWrites { observed_metadata_version } => {
                correction::begin(&mut turn, *observed_metadata_version);
                None
            }
            Command::Provisioned => {
                turn.structural |= std::mem::take(&mut turn.group.provisioning_pending);
                None
            }
            Command::Migrate { resharding_id, step } => migration::apply(&mut turn, resharding_id, step)
                .err()
                .map(|(code, message)| Answer::Refused(code, message)),
        })
        .collect();
    handover::reconcile(&mut turn);
    correction::end_if_over(&mut turn);
    let replies = answer_all(&mut turn, commands, answers);
    finish(turn, stray_live, replies)
}

/// The decision list for one heartbeat. The numbers are those of protocol 4.1.
fn heartbeat(turn: &mut Turn<'_>, path_member_id: &str, request: &HeartbeatRequest) -> Answer {
    let id = request.member_id.as_str();
    // 2: protocol, names, order of messages.
    if request.protocol_version != PROTOCOL_VERSION {
        let reason = format!(
            "protocolVersion {} is not supported: this coordinator speaks {PROTOCOL_VERSION}",
            request.protocol_version
        );
        return Answer::Status(Status::UnsupportedProtocol, reason);
    }
    if path_member_id != id {
        return Answer::Status(Status::InvalidRequest, "memberId in path and body differ".to_owned());
    }
    if request.member_epoch < EPOCH_LEAVE {
        let reason =
            format!("memberEpoch {} means nothing: send 0 to join, -1 to leave", request.member_epoch);
        return Answer::Status(Status::InvalidRequest, reason);
    }
    if turn.group.provisioning_pending {
        return Answer::retry("the group's streams are still being created");
    }
    holds::lift_what_stopped(turn, request);
    if let Some(answer) = membership::check_sequence(turn, request) {
        return answer;
    }
    // 3: evidence of lost metadata; identity comes first.
    if correction::evidence(turn, request).is_some() {
        turn.counts.evidence_of_loss += 1;
        correction::begin_for(turn, request);
    }
    // 3a to 6: who is it?
    if turn.member(id).is_none() {
        correction::hold_stranger(turn, request);
        return membership::unknown(turn, request);
    }
    if let Some(answer) = membership::check_incarnation(turn, request) {
        correction::hold_stranger(turn, request);
        return answer;
    }
    if turn.member(id).is_some_and(|member| !member.is_live()) {
        correction::hold_stranger(turn, request);
        return membership::terminal(turn, request);
    }
    if request.member_epoch == EPOCH_JOIN {
        return membership::join_of_a_live_member(turn, request);
    }
    // 7: leaving.
    if request.member_epoch == EPOCH_LEAVE {
        return membership::leave(turn, request);
    }
    // 8: the epoch.
    if let Some(answer) = membership::check_epoch(turn, request) {
        return answer;
    }
    correction::forgive_starter(turn, request);
    if correction::is_on(turn) {
        return correction::answer(turn, request);
    }
    // 9, 10: ownership.
    ownership::check_and_accept(turn, request)
}

/// 11: of several heartbeats of one member only the newest is answered with the outcome.
fn answer_all(turn: &mut Turn<'_>, commands: &[Command], answers: Vec<Option<Answer>>) -> Vec<Reply> {
    let mut answered_by_view = std::collections::BTreeSet::new();
    let mut replies: Vec<Reply> = commands
        .iter()
        .zip(answers)
        .rev()
        .map(|(command, answer)| match (command, answer) {
            (Command::Heartbeat { request, .. }, Some(Answer::View)) => {
                let id = request.member_id.as_str();
                // A newer one may also have got its member fenced.
                let stands = turn.member(id).is_some_and(|member| member.is_live() || member.has_left());
                let response = if answered_by_view.insert(id) && stands {
                    view::of_member(turn, request)
                } else {
                    view::status(
                        turn,
                        request,
                        Status::Retry,
                        "a newer heartbeat of this member came with it",
                    )
                };
                Reply::Heartbeat(Box::new(response))
            }
            (Command::Heartbeat { request, .. }, Some(Answer::Status(status, reason))) => {
                Reply::Heartbeat(Box::new(view::status(turn, request, status, &reason)))
            }
            (_, Some(Answer::Refused(code, message))) => Reply::Refused { code, message },
            (_, _) => Reply::Done,
        })
        .collect();
    replies.reverse();
    // A version that moved while a later command was answered is the version of every answer.
    for reply in &mut replies {
        if let Reply::Heartbeat(response) = reply
            && response.status != Status::Retry
        {
            view::stamp_version(turn, response);
            if matches!(response.status, Status::SyncMetadata | Status::RevokePending) {
                correction::note_answer(turn, &response.member_id);
            }
        }
    }
    replies
}

pub(crate) fn finish(mut turn: Turn<'_>, stray_live: &[String], replies: Vec<Reply>) -> Decision {
    let changed = turn.structural || !turn.touched.is_empty();
    if turn.structural {
        let restart = planted!(TargetRestartsDrainClock) && turn.membership_changed;
        handover::update_deadlines(&mut turn.group, turn.now, restart);
        correction::note_acknowledgements(&mut turn);
        turn.group.state = turn.group.derived_state();
        turn.group.store_revision += 1;
    }
    if changed {
        turn.group.updated_at = turn.now;
    }
    let write = changed.then(|| write_of(&turn, stray_live));
    Decision { group: turn.group, write, replies, transitions: turn.transitions, counts: turn.counts }
}

fn write_of(turn: &Turn<'_>, stray_live: &[String]) -> Write {
    let group = &turn.group;
    let live = turn.touched.iter().filter_map(|id| {
        let live = serde_json::to_string(&group.members.get(id)?.live).ok()?;
        Some((id.clone(), live))
    });
    let kind = if turn.structural { structural(group) } else { WriteKind::LeaseOnly };
    // What a join in this turn rewrites stays: the store removes after it has set.
    let stray_live = if turn.structural { stray_live } else { &[] };
    let removed_live = turn.removed.iter().chain(stray_live);
    let removed_live = removed_live.filter(|id| !turn.touched.contains(*id));
    Write {
        kind,
        live: live.collect(),
        removed_live: removed_live.cloned().collect(),
        updated_at: group.updated_at,
        history: turn.version_moved.then(|| history_entry(group, &turn.transitions)),
    }
}

/// The whole record, to be written as its `storeRevision`.
#[expect(
    clippy::expect_used,
    reason = "a group is strings, numbers and string-keyed maps: serde_json cannot refuse it"
)]
pub(crate) fn structural(group: &Group) -> WriteKind {
    let aggregate = record::aggregate(group).expect("a group is always representable as JSON");
    WriteKind::Structural { aggregate, revision: group.store_revision }
}

/// One compact history entry (protocol 2): for people, never read back as truth.
pub(crate) fn history_entry(group: &Group, transitions: &[Transition]) -> String {
    serde_json::json!({
        "at": group.updated_at,
        "metadataVersion": group.metadata_version,
        "groupEpoch": group.group_epoch,
        "assignmentEpoch": group.assignment_epoch,
        "state": group.state,
        "shardCount": group.shard_count,
        "transitions": transitions,
    })
    .to_string()
}
