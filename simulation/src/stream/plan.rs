//! What a run of this world is made of.

use rsc_core::fault::Fault as CoreFault;

use crate::dice::Dice;
use crate::plan::{FaultMix, Timing};

/// A rule outside of the core that is left out: the driver, the store's proof, creation, routing, a producer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StreamFault {
    /// 6 (empty-because-nobody-asked): a coordinated group that does not exist on a shard counts as done.
    MissingGroupIsDone,
    /// 7 (old-count-fresh-lease): routing is answered from memory, with a full lease.
    RoutingFromMemory,
    /// 11 (lease-from-receipt): a producer counts its lease from the answer.
    ProducerLeaseFromReceipt,
    /// 11: a producer hands records to Redis after its lease.
    PublishedAfterLease,
    /// 6 (group-born-during-migration): a group is created while a migration runs.
    GroupBornDuringMigration,
    /// 6: `lag` is believed instead of looking behind the cursor.
    LagInsteadOfRange,
    /// 6: pending entries without a record are waited for.
    GhostsCounted,
    /// 6: keys are deleted without the proof in the same breath.
    DeletedUnproven,
    /// A deletion counts however late it reaches Redis, also when others have gone on meanwhile.
    LateDeletion,
    /// 6: no publish margin.
    NoPublishMargin,
    /// A proof is believed after other steps were taken.
    FactsOutliveSteps,
    /// A group whose record is missing is left out of what is decided.
    MissingRecordLeftOut,
}

impl StreamFault {
    /// Every one of them.
    pub const ALL: &[StreamFault] = &[
        StreamFault::MissingGroupIsDone,
        StreamFault::RoutingFromMemory,
        StreamFault::ProducerLeaseFromReceipt,
        StreamFault::PublishedAfterLease,
        StreamFault::GroupBornDuringMigration,
        StreamFault::LagInsteadOfRange,
        StreamFault::GhostsCounted,
        StreamFault::DeletedUnproven,
        StreamFault::LateDeletion,
        StreamFault::NoPublishMargin,
        StreamFault::FactsOutliveSteps,
        StreamFault::MissingRecordLeftOut,
    ];

    /// Faults of the core that show when a stream is resharded.
    pub const OF_THE_CORE: &[CoreFault] = &[
        CoreFault::RemovedShardsLeaveAtOnce,
        CoreFault::ActivatedUnprovisioned,
        CoreFault::CacheLeaseIgnored,
        CoreFault::CountsNotCompared,
    ];
}

/// A rule that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamPlanted {
    /// In the core.
    Core(CoreFault),
    /// In what this world models.
    Model(StreamFault),
}

impl StreamPlanted {
    /// Every fault that can be planted here.
    #[must_use]
    pub fn all() -> Vec<StreamPlanted> {
        let core = StreamFault::OF_THE_CORE.iter().copied().map(StreamPlanted::Core);
        core.chain(StreamFault::ALL.iter().copied().map(StreamPlanted::Model)).collect()
    }

    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            StreamPlanted::Core(fault) => format!("{fault:?}"),
            StreamPlanted::Model(fault) => format!("{fault:?}"),
        }
    }

    /// The fault of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<StreamPlanted> {
        Self::all().into_iter().find(|planted| planted.name() == name)
    }
}

/// One run, decided completely.
#[derive(Clone, Copy, Debug)]
pub struct StreamPlan {
    /// Decides everything that chance decides.
    pub seed: u64,
    /// Which faults.
    pub faults: FaultMix,
    /// Which rule is missing.
    pub planted: Option<StreamPlanted>,
}

impl StreamPlan {
    /// Whether that rule is missing.
    #[must_use]
    pub(crate) fn lacks(&self, fault: StreamFault) -> bool {
        self.planted == Some(StreamPlanted::Model(fault))
    }
}

/// Times of a run, in milliseconds, and what the run is like.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    /// Members and coordinators.
    pub(crate) timing: Timing,
    /// Groups that the stream begins with.
    pub(crate) groups: usize,
    /// How long producers may use what they are told.
    pub(crate) cache: i64,
    /// The longest way of an `XADD`.
    pub(crate) flight: i64,
    /// How long producers wait for routing.
    pub(crate) producer_timeout: i64,
    /// The longest way to Redis when nothing is wrong with it.
    pub(crate) latency: i64,
    /// Between a driver's looks at the stream.
    pub(crate) tick: i64,
    /// The server drops pending entries whose record is gone when they are claimed (7.0).
    pub(crate) drops_ghosts: bool,
    /// Redis loses writes. (Of the runs with every fault some are without, because a loss excuses much.)
    pub(crate) loses: bool,
    /// One producer never asks again (a program without this protocol). Scale-ins delete then.
    pub(crate) has_forgotten_producer: bool,
}

impl Shape {
    /// The shape of a run.
    pub(crate) fn draw(dice: &mut Dice, plan: &StreamPlan) -> Self {
        let mut timing = Timing::draw(dice);
        let unsigned = |millis: i64| u64::try_from(millis).unwrap_or(0);
        let cache = dice.between(timing.lease / 2, timing.lease * 2);
        let flight = timing.mutex / 2;
        // A change may be recorded a mutex' life after the instant that it carries.
        let loses = plan.faults.rollback() && (plan.faults != FaultMix::All || dice.chance(0.6));
        let margin = if plan.lacks(StreamFault::NoPublishMargin) { 0 } else { timing.mutex + flight };
        timing.core.routing_cache_ttl_ms = unsigned(cache);
        timing.core.publish_margin_ms = unsigned(margin);
        timing.faulty = timing.lease * dice.between(4, 12);
        Shape {
            groups: if dice.chance(0.15) { 1 } else { 2 },
            cache,
            flight,
            producer_timeout: if dice.chance(0.5) { timing.request_timeout } else { cache },
            latency: if dice.chance(0.7) { 4 } else { timing.redis_timeout / 4 },
            tick: timing.heartbeat * 2 / 3,
            drops_ghosts: dice.chance(0.5),
            has_forgotten_producer: !loses && dice.chance(0.3),
            loses,
            timing,
        }
    }
}
