//! One coordinator process: an actor for each group, and the stream's driver.

use std::collections::VecDeque;
use std::rc::Rc;

use rsc_core::{Command, Decision, Loaded, MigrationStep, Stamp};
use rsc_protocol::{HeartbeatRequest, Timestamp};

use super::driver::Driver;
use super::world::GROUPS;
use crate::plan::Timing;
use crate::watch::Watch;

/// What a group's actor is asked to do.
#[derive(Clone, Debug)]
pub(crate) enum Job {
    /// Answer a heartbeat.
    Heartbeat {
        /// The message.
        request: Rc<HeartbeatRequest>,
        /// The process that sent it.
        process: usize,
    },
    /// A step of a migration; the driver waits for the answer.
    Migrate {
        /// The migration.
        id: String,
        /// The step.
        step: Box<MigrationStep>,
        /// Which order of the driver it is.
        order: u64,
    },
    /// The group's streams are there; the driver waits for the answer.
    Provisioned {
        /// Which order of the driver it is.
        order: u64,
    },
}

impl Job {
    pub(crate) fn command(&self) -> Command {
        match self {
            Job::Heartbeat { request, .. } => Command::Heartbeat {
                path_member_id: request.member_id.clone(),
                request: Box::new((**request).clone()),
            },
            Job::Migrate { id, step, .. } => {
                Command::Migrate { resharding_id: id.clone(), step: (**step).clone() }
            }
            Job::Provisioned { .. } => Command::Provisioned,
        }
    }
}

/// A decision whose commit is on its way, or got no answer.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    /// What was decided.
    pub(crate) decision: Rc<Decision>,
    /// The stamp it was decided on.
    pub(crate) expected: Stamp,
    /// Redis time as *enter* returned it.
    pub(crate) now: Timestamp,
    /// What it answers.
    pub(crate) jobs: Vec<Job>,
    /// Whether the first command was the actor's own evidence of a loss.
    pub(crate) notices_loss: bool,
}

/// Where a turn is.
#[derive(Clone, Debug)]
pub(crate) enum Stage {
    /// *enter* is on its way since then.
    Entering(i64),
    /// *commit* is on its way.
    Committing(Box<Pending>),
    /// Something is to be done next.
    Waiting,
}

/// Where a turn goes on.
#[derive(Debug)]
pub(crate) enum Step {
    /// *enter* is sent (again).
    Enter,
    /// *commit* is sent.
    Commit(Box<Pending>),
    /// The answers leave.
    Reply(Box<Pending>),
}

/// A turn under way.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    pub(crate) jobs: Vec<Job>,
    pub(crate) stage: Stage,
    /// A commit without an answer.
    pub(crate) lost: Option<Box<Pending>>,
    /// Conflicts and lost answers so far.
    pub(crate) attempts: u32,
    /// Until when the mutex may be waited for.
    pub(crate) deadline: i64,
    /// The round trip under way, 0 for none.
    pub(crate) trip: u64,
    pub(crate) token: String,
}

/// One group's actor on one instance.
#[derive(Debug)]
pub(crate) struct Actor {
    pub(crate) queue: VecDeque<Job>,
    pub(crate) turn: Option<Turn>,
    /// The remembered state.
    pub(crate) known: Option<Loaded>,
    pub(crate) seen_version: u64,
    /// Tokens that may hold the mutex although nobody works under them.
    pub(crate) lost_tokens: Vec<String>,
    pub(crate) watch: Watch,
    /// It found that Redis lost writes, and has not recorded that yet.
    pub(crate) loss_to_report: bool,
    pub(crate) timer: u64,
}

/// A coordinator process.
#[derive(Debug)]
pub(crate) struct Coordinator {
    /// Which run of the process this is; what was meant for an earlier one is lost.
    pub(crate) life: u64,
    /// Runs.
    pub(crate) alive: bool,
    /// Stands still until then.
    pub(crate) paused_until: i64,
    /// By group.
    pub(crate) actors: Vec<Actor>,
    /// The stream's driver.
    pub(crate) driver: Driver,
}

impl Coordinator {
    /// A process that has just started.
    #[must_use]
    pub(crate) fn new(life: u64, now: i64, timing: &Timing) -> Self {
        let actor = |_| Actor {
            queue: VecDeque::new(),
            turn: None,
            known: None,
            seen_version: 0,
            lost_tokens: Vec::new(),
            watch: Watch::new(timing.lease, now),
            loss_to_report: false,
            timer: 0,
        };
        Coordinator {
            life,
            alive: true,
            paused_until: 0,
            actors: (0..GROUPS.len()).map(actor).collect(),
            driver: Driver::default(),
        }
    }
}
