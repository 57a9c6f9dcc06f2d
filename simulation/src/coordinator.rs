//! One coordinator's actor of the group: the turn of `rsc-actors`, its round trips as separate events.

use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

use rsc_core::{Command, Decision, Group, Loaded, Stamp};
use rsc_protocol::HeartbeatRequest;

use crate::plan::Timing;
use crate::watch::Watch;

/// A heartbeat that waits for its turn.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// The message.
    pub(crate) request: Rc<HeartbeatRequest>,
    /// The process that sent it.
    pub(crate) process: usize,
    /// When.
    pub(crate) sent_at: i64,
}

/// A decision whose commit is on its way, or got no answer.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    /// What was decided.
    pub(crate) decision: Rc<Decision>,
    /// The stamp it was decided on.
    pub(crate) expected: Stamp,
    /// When it was decided.
    pub(crate) decided_at: i64,
    /// Redis time as *enter* returned it.
    pub(crate) now: rsc_protocol::Timestamp,
    /// Heartbeats that it answers.
    pub(crate) jobs: Vec<Job>,
    /// Whether the first command was the actor's own evidence of a loss.
    pub(crate) notices_loss: bool,
    /// The actor cannot know that time has jumped.
    pub(crate) is_blind: bool,
}

/// Where a turn is.
#[derive(Clone, Debug)]
pub(crate) enum Stage {
    /// *enter* is on its way.
    Entering {
        /// When it was sent.
        sent_at: i64,
    },
    /// *commit* is on its way.
    Committing(Box<Pending>),
    /// The decision waits to be sent, or its answers to leave.
    Waiting,
}

/// A turn under way.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    /// Heartbeats to be answered.
    pub(crate) jobs: Vec<Job>,
    /// Where it is.
    pub(crate) stage: Stage,
    /// A commit without an answer.
    pub(crate) lost: Option<Box<Pending>>,
    /// Conflicts so far.
    pub(crate) conflicts: u32,
    /// Lost answers so far.
    pub(crate) unknowns: u32,
    /// Until when the mutex may be waited for.
    pub(crate) deadline: i64,
    /// The round trip under way, 0 for none: an answer to an older one is late.
    pub(crate) trip: u64,
    /// The mutex token in use.
    pub(crate) token: String,
}

/// The actor of the group on one instance.
#[derive(Debug)]
pub(crate) struct Coordinator {
    /// Which run of the process this is; what was meant for an earlier one is lost.
    pub(crate) life: u64,
    /// Runs.
    pub(crate) alive: bool,
    /// Stands still until then.
    pub(crate) paused_until: i64,
    /// Waiting heartbeats.
    pub(crate) queue: VecDeque<Job>,
    /// The turn under way.
    pub(crate) turn: Option<Turn>,
    /// The remembered state.
    pub(crate) known: Option<Loaded>,
    /// The highest version it has seen.
    pub(crate) seen_version: u64,
    /// Tokens that may hold the mutex although nobody works under them.
    pub(crate) lost_tokens: Vec<String>,
    /// May it judge?
    pub(crate) watch: Watch,
    /// It found that Redis lost writes, and has not recorded that yet.
    pub(crate) loss_to_report: bool,
    /// When it found so last.
    pub(crate) loss_noticed_at: Option<i64>,
    /// Numbers its timers.
    pub(crate) timer: u64,
    tokens: u64,
    trips: u64,
}

impl Coordinator {
    /// A process that has just started.
    #[must_use]
    pub(crate) fn new(life: u64, now: i64, timing: &Timing) -> Self {
        Coordinator {
            life,
            alive: true,
            paused_until: 0,
            queue: VecDeque::new(),
            turn: None,
            known: None,
            seen_version: 0,
            lost_tokens: Vec::new(),
            watch: Watch::new(timing.lease, now),
            loss_to_report: false,
            loss_noticed_at: None,
            timer: 0,
            tokens: 0,
            trips: 0,
        }
    }

    /// A mutex token nobody has used.
    pub(crate) fn fresh_token(&mut self, index: usize) -> String {
        self.tokens += 1;
        format!("c{index}.{}.{}", self.life, self.tokens)
    }

    /// The number of the next round trip.
    pub(crate) fn fresh_trip(&mut self) -> u64 {
        self.trips += 1;
        self.trips
    }

    /// Remembers a token whose message got no answer.
    pub(crate) fn lose_token(&mut self, token: String) {
        if self.lost_tokens.len() == 8 {
            self.lost_tokens.remove(0);
        }
        self.lost_tokens.push(token);
    }

    /// The commands of a batch.
    #[must_use]
    pub(crate) fn commands(&self, jobs: &[Job]) -> Vec<Command> {
        let loss = self
            .loss_to_report
            .then_some(Command::LostWrites { observed_metadata_version: self.seen_version });
        let beats = jobs.iter().map(|job| Command::Heartbeat {
            path_member_id: job.request.member_id.clone(),
            request: Box::new((*job.request).clone()),
        });
        let mut commands: Vec<Command> = loss.into_iter().chain(beats).collect();
        if commands.is_empty() {
            commands.push(Command::Tick);
        }
        commands
    }
}

/// Takes the older ones of several heartbeats of one member out: before a batch is applied to a state that may
/// already contain it.
pub(crate) fn keep_newest_of_each_member(jobs: &mut Vec<Job>) -> Vec<Job> {
    let mut seen = BTreeSet::new();
    let (mut kept, mut older) = (Vec::new(), Vec::new());
    for job in std::mem::take(jobs).into_iter().rev() {
        if seen.insert(job.request.member_id.clone()) { kept.push(job) } else { older.push(job) }
    }
    kept.reverse();
    *jobs = kept;
    older
}

/// Whether what is stored is exactly what was decided, written once.
#[must_use]
pub(crate) fn is_stored(pending: &Pending, group: &Group, stamp: &Stamp) -> bool {
    stamp.live_revision == pending.expected.live_revision + 1
        && stamp.revision == pending.decision.group.store_revision
        && *group == pending.decision.group
}
