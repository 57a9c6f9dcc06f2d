//! The world of one stream with several groups: a fixed number of schedules without a violation, and the proof that it
//! would notice.

use rsc_simulation::plan::FaultMix;
use rsc_simulation::stream::plan::{StreamPlan, StreamPlanted};
use rsc_simulation::stream::run::run_stream;

/// Seeds of each kind that CI runs.
const SEEDS: u64 = 40;
/// Seeds tried at most for a planted fault.
const AT_MOST: u64 = 800;

fn again(plan: StreamPlan) -> String {
    format!("{plan:?}; docs/simulation.md says how to replay it")
}

fn clean(faults: FaultMix) {
    for seed in 0..SEEDS {
        let plan = StreamPlan { seed, faults, planted: None };
        assert_eq!(run_stream(plan, false).violation, None, "{}", again(plan));
    }
}

#[test]
fn no_record_is_lost_without_faults() {
    clean(FaultMix::None);
}

#[test]
fn no_record_is_lost_with_a_bad_network() {
    clean(FaultMix::Network);
}

#[test]
fn no_record_is_lost_with_crashes() {
    clean(FaultMix::Crash);
}

#[test]
fn no_record_is_lost_with_rollbacks() {
    clean(FaultMix::Rollback);
}

#[test]
fn no_record_is_lost_with_everything() {
    clean(FaultMix::All);
}

/// The schedules do what they are for: counts change, migrations end and are taken back, keys are deleted, records are
/// published through all of it, and what is documented to remain does remain.
#[test]
fn the_schedules_reshard() {
    let mut sum = rsc_simulation::stream::run::Counted::default();
    for seed in 0..SEEDS {
        for faults in [FaultMix::None, FaultMix::Rollback] {
            sum.add(&run_stream(StreamPlan { seed, faults, planted: None }, false).counts);
        }
    }
    for (what, count) in [
        ("changes begun", sum.scales),
        ("refusals", sum.refused),
        ("migrations finished", sum.finished),
        ("taken back", sum.rolled_back),
        ("keys deleted", sum.deletions),
        ("records", sum.published),
        ("losses", sum.losses),
        ("records left as documented", sum.forgotten),
    ] {
        assert!(count >= SEEDS / 4, "{what}: {count} in {sum:?}");
    }
}

/// One seed decides everything: the same plan gives the same trace.
#[test]
fn a_seed_replays() {
    let plan = StreamPlan { seed: 5, faults: FaultMix::All, planted: None };
    let (one, other) = (run_stream(plan, true), run_stream(plan, true));
    assert!(one.trace.len() > 50);
    assert_eq!(one.trace, other.trace);
}

/// Where a fault shows: the kind of run that has what it takes, so that few seeds do.
fn kind_of(name: &str) -> FaultMix {
    match name {
        "CountsNotCompared" | "MissingRecordLeftOut" => FaultMix::Rollback,
        "ProducerLeaseFromReceipt" | "PublishedAfterLease" | "NoPublishMargin" | "LateDeletion" => {
            FaultMix::Network
        }
        "GhostsCounted" => FaultMix::Crash,
        _ => FaultMix::None,
    }
}

fn find(part: usize, parts: usize) {
    for planted in StreamPlanted::all().into_iter().skip(part).step_by(parts) {
        let faults = kind_of(&planted.name());
        let plan = |seed| StreamPlan { seed, faults, planted: Some(planted) };
        let found = (0..AT_MOST).find(|seed| run_stream(plan(*seed), false).violation.is_some());
        assert!(found.is_some(), "{} is not found", planted.name());
        let without = StreamPlan { planted: None, ..plan(found.unwrap_or(0)) };
        assert_eq!(run_stream(without, false).violation, None, "{}", again(without));
    }
}

#[test]
fn planted_faults_are_found_one() {
    find(0, 2);
}

#[test]
fn planted_faults_are_found_two() {
    find(1, 2);
}
