//! Chaos with real processes: two coordinators, a master with replicas and sentinels, ten clients that write down what they
//! read, and somebody who kills and pauses whatever there is, at random. Afterwards what clients were told and did is compared
//! with what lasted in Redis.
//!
//! The short run is a test like any other. The long one is `make chaos`; its report is `target/chaos-report.md`.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "the helpers of a test fail like the test"
)]

mod checker;
mod clients;
mod killer;
mod lineage;
mod log;
mod plan;
mod recovery;
mod report;
mod roles;
#[path = "../support/mod.rs"]
mod support;
mod witness;
mod world;

use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use killer::Killer;
use lineage::Lineage;
use plan::Plan;
use report::Outcome;
use serde_json::json;
use support::{monitored_path, monotonic_us};
use world::World;

/// How far the wall clock is ahead of the monotonic one.
fn wall_us() -> u64 {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(wall.as_micros()).unwrap() - monotonic_us()
}

/// Runs the plan, checks everything, and returns the report; fails when something was found that must not be.
async fn run(plan: &Plan, report: Option<&Path>) {
    println!("chaos: CHAOS_SEED={} for {plan:?}", plan.seed);
    let (began, wall_at_start_us) = (Instant::now(), wall_us());
    let (world, witness) = World::start(plan).await;
    let (deeds, recovery, roles) = Killer::new(&world, plan.seed).rage(plan).await;
    let api = world.api();
    let assignments = api.get(&format!("{}/assignments", monitored_path(&world.group))).await.success();
    assert_eq!(assignments["invariantViolations"], json!([]), "{assignments}");
    for name in ["rsc_invariant_violation_total", "rsc_decide_panic_total", "rsc_actor_restart_total"] {
        assert!(world.metric(name).await.abs() < 0.5, "{name}");
    }
    for index in world.clients.connected() {
        world.clients.die(index);
    }
    // What was written is seen a moment later.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let (commits, promotions) =
        tokio::task::spawn_blocking(|| (witness.finish(), roles.finish())).await.unwrap();
    world.read_logs();

    let terms = promotions.iter().map(|one| (one.server, one.since_us + wall_at_start_us));
    let terms: Vec<(usize, u64)> = [(0, 0)].into_iter().chain(terms).collect();
    let clock_drift_us = wall_us().abs_diff(wall_at_start_us);
    let log = world.log.clone();
    let notes = log.notes();
    let lineage = Lineage::of(commits, &terms);
    let verdict = checker::check(lineage, &notes, wall_at_start_us, &deeds.master_kills_us);
    let outcome = Outcome {
        plan,
        took: began.elapsed(),
        world: &world,
        deeds: &deeds,
        failovers: promotions.len(),
        recovery: &recovery,
        notes: &notes,
        verdict: &verdict,
        clock_drift_us,
    };
    let text = report::write(&outcome);
    println!("{text}");
    if let Some(path) = report {
        std::fs::write(path, &text).unwrap();
    }
    assert!(verdict.violations.is_empty(), "{} violations: see the report", verdict.violations.len());
    assert!(world.complaints.lock().unwrap().is_empty(), "coordinators complain: see the report");
    assert!(verdict.acknowledged > 0 && verdict.grants > 0 && !notes.readings.is_empty());
    if plan.wait_replicas == 0 {
        // Else nothing was tried.
        assert!(!verdict.lost.is_empty(), "no acknowledged transition was lost");
        assert!(!verdict.lineage.rounds.is_empty(), "no correction round has begun");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_run_of_chaos_finds_nothing_that_must_not_be() {
    run(&Plan::short(), None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes many minutes: make chaos"]
async fn a_long_run_of_chaos_finds_nothing_that_must_not_be() {
    let report = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/chaos-report.md");
    std::fs::create_dir_all(report.parent().unwrap()).unwrap();
    run(&Plan::long(), Some(&report)).await;
}
