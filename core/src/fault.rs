//! Rules taken out on purpose, one at a time, so that the simulation can prove that it would notice. Only
//! with the feature `faults`; without it `planted!` is `false` and nothing of this exists.

#[cfg(feature = "faults")]
macro_rules! planted {
    ($fault:ident) => {
        $crate::fault::is_planted($crate::fault::Fault::$fault)
    };
}

#[cfg(not(feature = "faults"))]
macro_rules! planted {
    ($fault:ident) => {
        $crate::fault::nothing_is_planted()
    };
}

/// A call and not the literal, so that the conditions around it read the same with and without the feature.
#[cfg(not(feature = "faults"))]
#[inline]
pub(crate) const fn nothing_is_planted() -> bool {
    false
}

#[cfg(feature = "faults")]
mod planting {
    use std::cell::Cell;

    /// A rule of the protocol that is left out.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Fault {
        /// 2, 4: members are told the whole lease, without what may go unnoticed.
        LeaseToldWhole,
        /// 4.2: *granted* does not count as held.
        GrantIgnoresGranted,
        /// 4.3: grants are made although the shard is on hold.
        HoldsSkipped,
        /// 4.2 (fenced-but-reading): only what was to be drained is put on hold at the rebalance timeout.
        HoldOnlyWhatWasToBeDrained,
        /// 4.3: what a superseded incarnation held is not put on hold.
        SupersededNotHeld,
        /// 4.1.9: what a fenced liar holds is not put on hold.
        LiarNotHeld,
        /// 1 (join-copied): each answer overwrites *granted*.
        AnswerOverwritesGranted,
        /// 4.1.10 (report-older-than-grant): a report older than a grant releases it.
        OldReportReleasesNewGrant,
        /// 1: a grant that an answer had left out is handed out again with its old stamp.
        LeftOutGrantKeepsItsStamp,
        /// 4.1.8 (two-lost-answers): only the newest epoch is accepted.
        OnlyTheNewestEpoch,
        /// 4.1.8 (previous-epoch-of-the-predecessor): any lower epoch is accepted.
        AnyLowerEpoch,
        /// 3a (dying-process-leaves-for-its-successor): a −1 of another incarnation is applied.
        AnybodyLeaves,
        /// 4.1.7 (late-leave): a leave's report is not cut to holding(m).
        LeaveNotCut,
        /// 4.3 (old-join-lifts-hold): any message of the incarnation lifts a hold, however old.
        OldJoinLiftsHold,
        /// 4.1.6 (queued-join-of-the-dead): a superseded incarnation's join supersedes its successor.
        SupersededJoinWins,
        /// 4.1.6: a superseded incarnation is refused for good before its successor was heard.
        RefusedBeforeHeard,
        /// 4.1.3, 3a (sync-for-a-zombie): in a round another incarnation is answered by the round.
        SyncForAZombie,
        /// 4.1.6 (one-id-for-two): without `instanceId` any join is the same join again.
        OneIdForTwo,
        /// 4.1.6: the same join again does not renew the lease.
        SameJoinRenewsNothing,
        /// 4.1.2: a late message is applied.
        LateMessageApplied,
        /// 4.1.10: a drain that still goes on counts as released.
        DrainingCountsAsReleased,
        /// 4.2: a newer target restarts the drain's clock.
        TargetRestartsDrainClock,
        /// 4.1.1: leases are judged in the young phase of a round (rollback-expires-everybody).
        YoungRoundExpires,
        /// 5: a round ends however young it is (no young phase).
        NoYoungPhase,
        /// 5: a round ends before everybody has synchronised.
        RoundEndsUnsynchronised,
        /// 5 (everybody-differs-again): others' moves undo an acknowledgement.
        AcknowledgementsVoid,
        /// 5 (broken-client-freezes-the-group): who began a round may do so again and again.
        StartersForgotten,
        /// 5 (second-loss-in-a-round): evidence in a running round changes nothing.
        SecondLossIgnored,
        /// 4.1.10 (two-holders-in-a-round): claims on hold are accepted into *current* as well.
        ClaimsNotCutInARound,
        /// 4.3: a hold of a live member does not move with its lease.
        HoldsDoNotMove,
        /// 5: the same version with another token is no evidence.
        TokenIgnored,
        /// 5: a higher version is no evidence.
        HigherVersionIgnored,
        /// 5 (neighbour-taken-for-a-loss): another instance's lease-only commit is taken for a loss.
        NeighbourTakenForLoss,
        /// 5 (round-waits-for-itself): a claim that is the member's target and nobody's is held against it.
        OwnTargetHeld,
        /// 6: removed shards leave the target with the activation, whatever is still in them.
        RemovedShardsLeaveAtOnce,
        /// 6: a group activates before it exists on the new shards (no barrier).
        ActivatedUnprovisioned,
        /// 6 (lease-from-receipt): removed shards are given up before the producers' caches are over.
        CacheLeaseIgnored,
        /// 6 (one-group-rolled-back): counts are not compared across the prefix once a migration is over.
        CountsNotCompared,
    }

    impl Fault {
        /// Every fault, in the order of the protocol.
        pub const ALL: &[Fault] = &[
            Fault::LeaseToldWhole,
            Fault::GrantIgnoresGranted,
            Fault::HoldsSkipped,
            Fault::HoldOnlyWhatWasToBeDrained,
            Fault::SupersededNotHeld,
            Fault::LiarNotHeld,
            Fault::AnswerOverwritesGranted,
            Fault::OldReportReleasesNewGrant,
            Fault::LeftOutGrantKeepsItsStamp,
            Fault::OnlyTheNewestEpoch,
            Fault::AnyLowerEpoch,
            Fault::AnybodyLeaves,
            Fault::LeaveNotCut,
            Fault::OldJoinLiftsHold,
            Fault::SupersededJoinWins,
            Fault::RefusedBeforeHeard,
            Fault::SyncForAZombie,
            Fault::OneIdForTwo,
            Fault::SameJoinRenewsNothing,
            Fault::LateMessageApplied,
            Fault::DrainingCountsAsReleased,
            Fault::TargetRestartsDrainClock,
            Fault::YoungRoundExpires,
            Fault::NoYoungPhase,
            Fault::RoundEndsUnsynchronised,
            Fault::AcknowledgementsVoid,
            Fault::StartersForgotten,
            Fault::SecondLossIgnored,
            Fault::ClaimsNotCutInARound,
            Fault::HoldsDoNotMove,
            Fault::TokenIgnored,
            Fault::HigherVersionIgnored,
            Fault::NeighbourTakenForLoss,
            Fault::OwnTargetHeld,
            Fault::RemovedShardsLeaveAtOnce,
            Fault::ActivatedUnprovisioned,
            Fault::CacheLeaseIgnored,
            Fault::CountsNotCompared,
        ];
    }

    thread_local! {
        static PLANTED: Cell<Option<Fault>> = const { Cell::new(None) };
    }

    /// Plants a fault for everything this thread decides from now on; `None` takes it away.
    pub fn plant(fault: Option<Fault>) {
        PLANTED.set(fault);
    }

    pub(crate) fn is_planted(fault: Fault) -> bool {
        PLANTED.get() == Some(fault)
    }
}

#[cfg(feature = "faults")]
pub(crate) use planting::is_planted;
#[cfg(feature = "faults")]
pub use planting::{Fault, plant};
