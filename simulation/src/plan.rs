//! What a run is made of: which clients, which faults, which timing, which rule is missing.

use clap::ValueEnum;
use rsc_core::Settings;
use rsc_core::fault::Fault as CoreFault;

use crate::dice::Dice;

/// Which clients take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Mix {
    /// The seed picks one of the others.
    All,
    /// Clients with every addition; some without `sequence`.
    Modern,
    /// Clients that know none of the additions.
    Old,
    /// Everything side by side, broken clients among them.
    Mixed,
}

/// Which faults happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum FaultMix {
    /// Members only come and go.
    None,
    /// Messages are lost, copied, late; the way to Redis breaks.
    Network,
    /// Processes crash, stall, start twice.
    Crash,
    /// Redis loses writes, its key, its time.
    Rollback,
    /// All of it.
    All,
}

impl FaultMix {
    /// Whether messages suffer.
    #[must_use]
    pub fn network(self) -> bool {
        matches!(self, FaultMix::Network | FaultMix::All)
    }

    /// Whether processes suffer.
    #[must_use]
    pub fn crash(self) -> bool {
        matches!(self, FaultMix::Crash | FaultMix::All)
    }

    /// Whether Redis forgets.
    #[must_use]
    pub fn rollback(self) -> bool {
        matches!(self, FaultMix::Rollback | FaultMix::All)
    }
}

/// A rule outside of the core that is left out: the actor's turn, the store, an old client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ModelFault {
    /// 2 (same-number-other-history): `writeId` is not compared, neither on entering nor on committing.
    WriteIdNotCompared,
    /// 2: the commit does not ask whether the mutex is still held and the record still the same.
    CommitUnchecked,
    /// Answers leave before the commit is known to be recorded.
    AnsweredBeforeRecorded,
    /// A commit without an answer is taken for done.
    UnknownTakenForDone,
    /// 4.1.1 (rollback-expires-everybody): the actor stays in service when it finds a record that is older.
    StaysInServiceAfterLoss,
    /// 4.1.1: an actor that only watches another one serve judges as if it had served itself.
    OnlyOwnCommitsSeen,
    /// 2 (time-jumps-forward): a jump of Redis time is not noticed.
    TimeJumpUnnoticed,
    /// 11 (lease-from-receipt): an old client counts its lease from the answer.
    LeaseFromReceipt,
    /// 11: an old client does not stop when its lease is over.
    OldClientIgnoresLeaseEnd,
}

impl ModelFault {
    /// Every one of them.
    pub const ALL: &[ModelFault] = &[
        ModelFault::WriteIdNotCompared,
        ModelFault::CommitUnchecked,
        ModelFault::AnsweredBeforeRecorded,
        ModelFault::UnknownTakenForDone,
        ModelFault::StaysInServiceAfterLoss,
        ModelFault::OnlyOwnCommitsSeen,
        ModelFault::TimeJumpUnnoticed,
        ModelFault::LeaseFromReceipt,
        ModelFault::OldClientIgnoresLeaseEnd,
    ];
}

/// A rule that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Planted {
    /// In the core.
    Core(CoreFault),
    /// In what this crate models.
    Model(ModelFault),
}

impl Planted {
    /// Every fault that shows in the world of one group.
    #[must_use]
    pub fn all() -> Vec<Planted> {
        let of_streams = crate::stream::plan::StreamFault::OF_THE_CORE;
        let core = CoreFault::ALL.iter().filter(|fault| !of_streams.contains(fault));
        let core = core.copied().map(Planted::Core);
        core.chain(ModelFault::ALL.iter().copied().map(Planted::Model)).collect()
    }

    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Planted::Core(fault) => format!("{fault:?}"),
            Planted::Model(fault) => format!("{fault:?}"),
        }
    }

    /// The fault of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Planted> {
        Self::all().into_iter().find(|planted| planted.name() == name)
    }
}

/// One run, decided completely.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Decides everything that chance decides.
    pub seed: u64,
    /// Which clients.
    pub mix: Mix,
    /// Which faults.
    pub faults: FaultMix,
    /// Which rule is missing.
    pub planted: Option<Planted>,
}

impl Plan {
    /// Whether that rule of the model is missing.
    #[must_use]
    pub fn lacks(&self, fault: ModelFault) -> bool {
        self.planted == Some(Planted::Model(fault))
    }
}

/// Times of a run, in milliseconds.
#[derive(Clone, Debug)]
pub struct Timing {
    /// What the core is configured with.
    pub core: Settings,
    /// Heartbeat interval.
    pub heartbeat: i64,
    /// Member lease.
    pub lease: i64,
    /// Rebalance timeout.
    pub rebalance: i64,
    /// How long the mutex lives.
    pub mutex: i64,
    /// How long an actor tries to get it.
    pub acquire: i64,
    /// How long an actor waits for Redis.
    pub redis_timeout: i64,
    /// How long a client waits for an answer.
    pub request_timeout: i64,
    /// How long faults happen.
    pub faulty: i64,
}

impl Timing {
    /// The timing of a run: mostly a third of the real one, sometimes the real one.
    pub(crate) fn draw(dice: &mut Dice) -> Self {
        let (heartbeat, lease, rebalance) =
            if dice.chance(0.15) { (3_000, 15_000, 60_000) } else { (1_000, 5_000, 8_000) };
        let unsigned = |millis: i64| u64::try_from(millis).unwrap_or(0);
        let core = Settings {
            heartbeat_interval_ms: unsigned(heartbeat),
            member_lease_ttl_ms: unsigned(lease),
            rebalance_timeout_ms: unsigned(rebalance),
            // Short enough for members to be pruned while the run lasts.
            stale_member_retention_ms: unsigned(lease * if dice.chance(0.5) { 3 } else { 40 }),
            ..Settings::default()
        };
        Timing {
            core,
            heartbeat,
            lease,
            rebalance,
            mutex: lease / 3,
            acquire: lease / 8,
            redis_timeout: lease / 30,
            request_timeout: heartbeat * 2 / 3,
            faulty: lease * dice.between(3, 9),
        }
    }

    /// Within this time after the last fault a group must have healed: whoever drains for ever is fenced
    /// after two rebalance timeouts at the latest (a lost future's claims are counted from their hold), every
    /// lease and hold that a fault left behind is over after that, and the hand-over takes a few heartbeats.
    #[must_use]
    pub fn healing_bound(&self) -> i64 {
        2 * self.rebalance + 6 * self.lease
    }
}
