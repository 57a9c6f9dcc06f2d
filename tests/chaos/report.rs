//! The outcome in words and figures.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use super::checker::{Excuse, Verdict};
use super::killer::{Deeds, Fault, Strike};
use super::lineage::Loss;
use super::log::Notes;
use super::plan::{CLIENTS, DOWN_AFTER, HEARTBEAT, LEASE, MUTEX_TTL, Plan, SHARDS};
use super::recovery::Recovery;
use super::world::{DAEMONS, World};

/// Everything that the report is made of.
pub(crate) struct Outcome<'o> {
    pub(crate) plan: &'o Plan,
    pub(crate) took: Duration,
    pub(crate) world: &'o World,
    pub(crate) deeds: &'o Deeds,
    pub(crate) failovers: usize,
    pub(crate) recovery: &'o Recovery,
    pub(crate) notes: &'o Notes,
    pub(crate) verdict: &'o Verdict,
    pub(crate) clock_drift_us: u64,
}

/// The report as Markdown.
pub(crate) fn write(outcome: &Outcome<'_>) -> String {
    let mut text = String::new();
    head(&mut text, outcome);
    safety(&mut text, outcome);
    recovery(&mut text, outcome);
    answers(&mut text, outcome);
    text
}

fn head(text: &mut String, outcome: &Outcome<'_>) {
    let Outcome { plan, took, deeds, verdict, .. } = outcome;
    let verdict =
        if verdict.violations.is_empty() { "nothing that must not be" } else { "**VIOLATIONS**, see below" };
    let _ = write!(
        text,
        "# Chaos, seed {}\n\n\
         {DAEMONS} coordinators, 1 master, 2 replicas, 3 sentinels, {CLIENTS} clients, {SHARDS} shards; lease {LEASE:?}, heartbeat \
         {HEARTBEAT:?}, mutex TTL {MUTEX_TTL:?}, a master is taken for dead after {DOWN_AFTER:?}, wait-replicas {}. {:.0} s. Found: \
         {verdict}.\n\n\
         | | |\n| --- | --- |\n\
         | processes killed | {} |\n| processes paused | {} |\n| clients killed | {} |\n| failovers | {} |\n",
        plan.seed,
        plan.wait_replicas,
        took.as_secs_f64(),
        deeds.kills,
        deeds.pauses,
        deeds.client_kills,
        outcome.failovers,
    );
}

fn safety(text: &mut String, outcome: &Outcome<'_>) {
    let Outcome { verdict, notes, world, clock_drift_us, .. } = outcome;
    let lineage = &verdict.lineage;
    let with_loss = lineage.terms.iter().filter(|term| term.lost > 0).count();
    let noticed: Vec<u64> = verdict.lost.iter().filter_map(|lost| lost.noticed_after_us).collect();
    let nobody_left =
        verdict.lost.iter().filter(|lost| lost.noticed_after_us.is_none() && lost.nobody_left).count();
    let unnoticed = verdict.lost.len() - noticed.len() - nobody_left;
    let lost_grants: usize = verdict.lost.iter().map(|lost| lost.told.grants).sum();
    let in_vain = verdict.lost.iter().filter(|lost| lost.loss == Loss::ByReplacedMaster).count();
    let anew = lineage.rounds.iter().filter(|round| round.is_anew).count();
    let reread = |excuse: Option<Excuse>| {
        let found: Vec<u64> =
            verdict.double_readings.iter().filter(|d| d.excuse == excuse).map(|d| d.overlap_us).collect();
        format!(
            "{:.3} s in {} cases, longest {:.3} s",
            seconds(found.iter().sum()),
            found.len(),
            seconds(found.iter().copied().max().unwrap_or(0))
        )
    };
    let _ = write!(
        text,
        "| writes to the record | {}, lost {} at {with_loss} of {} failovers |\n\
         | transitions acknowledged to clients | {}, with {} grants |\n\
         | of these lost by failover | {}, with {lost_grants} grants ({in_vain} written to a master that had been replaced) |\n\
         | lost, and seen by a correction round | {}, {} after the new master's first write |\n\
         | lost, and nobody who knew of it spoke again | {nobody_left} |\n\
         | **lost, and not noticed** | **{unnoticed}** |\n\
         | correction rounds | {} begun, {anew} begun anew, lasted {} |\n\
         | stretches of reading | {} |\n\
         | **double reading without an excuse** | **{}** |\n\
         | double reading by a grant between loss and first sign | {} |\n\
         | double reading by a grant of a replaced master | {} |\n\
         | writes that the witness missed | {} |\n\
         | clocks drifted apart by | {clock_drift_us} µs |\n\n",
        lineage.writes,
        lineage.lost_writes,
        outcome.failovers,
        verdict.acknowledged,
        verdict.grants,
        verdict.lost.len(),
        noticed.len(),
        spread(&noticed),
        lineage.rounds.len() - anew,
        spread(&lineage.round_lengths_us),
        notes.readings.len(),
        reread(None),
        reread(Some(Excuse::GrantedBeforeTheFirstSign)),
        reread(Some(Excuse::TwoHistories)),
        lineage.unseen,
    );
    if !verdict.violations.is_empty() {
        let _ = write!(text, "## Violations\n\n");
        for violation in &verdict.violations {
            let _ = writeln!(text, "- {violation}");
        }
        text.push('\n');
    }
    let complaints = world.complaints.lock().unwrap();
    if !complaints.is_empty() {
        let _ = write!(text, "## Coordinators complain\n\n```\n{}\n```\n\n", complaints.join("\n"));
    }
}

/// One row: of how many times the figures are.
fn row(text: &mut String, name: &str, mut times: Vec<u64>) {
    times.sort_unstable();
    if let (Some(min), Some(max)) = (times.first(), times.last()) {
        let at = |share: usize| seconds(times[(times.len() * share / 100).min(times.len() - 1)]);
        let (min, max, count) = (seconds(*min), seconds(*max), times.len());
        let _ = writeln!(
            text,
            "| {name} | {count} | {min:.2} s | {:.2} s | {:.2} s | {max:.2} s |",
            at(50),
            at(99)
        );
    }
}

fn recovery(text: &mut String, outcome: &Outcome<'_>) {
    let Outcome { recovery, deeds, .. } = outcome;
    let mut alone: BTreeMap<Fault, Vec<u64>> = BTreeMap::new();
    let mut all = Vec::new();
    for (index, strike) in deeds.strikes.iter().enumerate() {
        let Some(well_us) = recovery.after(strike.in_force_us) else { continue };
        let time_us = well_us - strike.at_us;
        all.push(time_us);
        let is_other =
            |(other, next): (usize, &Strike)| other != index && (strike.at_us..well_us).contains(&next.at_us);
        if recovery.was_well(strike.at_us) && !deeds.strikes.iter().enumerate().any(is_other) {
            alone.entry(strike.fault).or_default().push(time_us);
        }
    }
    let _ = write!(
        text,
        "## Recovery\n\n\
         From a fault until the group is `STABLE`, no correction round is on, and each shard is read by one client that runs and can be \
         heard. Each kind is shown where it struck alone: all was well before, and nothing else struck before all was well again. All was \
         well for {:.1} % of the time.\n\n\
         | fault | times | min | median | p99 | max |\n| --- | --: | --: | --: | --: | --: |\n",
        recovery.well_share() * 100.0
    );
    for (fault, times) in alone {
        row(text, &format!("{fault:?}"), times);
    }
    row(text, "**all, whatever else struck**", all);
    text.push('\n');
}

fn answers(text: &mut String, outcome: &Outcome<'_>) {
    let table = |text: &mut String, title: &str, rows: &BTreeMap<String, u64>| {
        let _ = write!(text, "## {title}\n\n| | |\n| --- | --: |\n");
        for (name, count) in rows {
            let _ = writeln!(text, "| {name} | {count} |");
        }
        text.push('\n');
    };
    table(text, "Answers to heartbeats", &outcome.notes.answers);
    table(text, "Warnings and errors of the coordinators", &outcome.world.warnings.lock().unwrap());
}

#[expect(clippy::cast_precision_loss, reason = "microseconds of an hour fit")]
fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

fn spread(times: &[u64]) -> String {
    let mut times = times.to_vec();
    times.sort_unstable();
    match (times.first(), times.get(times.len() / 2), times.last()) {
        (Some(min), Some(median), Some(max)) => {
            format!("{:.2} to {:.2} s, median {:.2} s", seconds(*min), seconds(*max), seconds(*median))
        }
        _ => "–".to_owned(),
    }
}
