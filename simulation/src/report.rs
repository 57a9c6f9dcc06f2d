//! Figures over many runs.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::run::Outcome;

/// Sums over the runs of one kind.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Figures {
    /// Runs without a violation.
    pub runs: u64,
    /// Simulated milliseconds in them.
    pub simulated_ms: i64,
    /// Decisions of coordinators in them.
    pub decisions: u64,
    /// Losses of Redis in them.
    pub losses: u64,
    /// Overlaps of the documented kind in them.
    pub excused: u64,
    /// The longest healing, in simulated milliseconds.
    pub longest_healing_ms: i64,
}

impl Figures {
    /// Adds a run.
    pub fn add(&mut self, outcome: &Outcome) {
        self.runs += 1;
        self.simulated_ms += outcome.simulated;
        self.decisions += outcome.decided;
        self.losses += u64::try_from(outcome.losses).unwrap_or(0);
        self.excused += outcome.excused;
        self.longest_healing_ms = self.longest_healing_ms.max(outcome.healing);
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: &Figures) {
        self.runs += other.runs;
        self.simulated_ms += other.simulated_ms;
        self.decisions += other.decisions;
        self.losses += other.losses;
        self.excused += other.excused;
        self.longest_healing_ms = self.longest_healing_ms.max(other.longest_healing_ms);
    }
}

/// Figures by client mix and fault mix, as a table.
#[must_use]
pub fn table(figures: &BTreeMap<String, Figures>) -> String {
    let mut text = String::from(
        "| clients | faults | runs | simulated hours | decisions | losses of redis | documented overlaps | longest healing, s |\n\
         | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for (kind, sum) in figures {
        let (mix, faults) = kind.split_once('/').unwrap_or((kind, ""));
        let _ = writeln!(
            text,
            "| {mix} | {faults} | {} | {} | {} | {} | {} | {}.{} |",
            sum.runs,
            sum.simulated_ms / 3_600_000,
            sum.decisions,
            sum.losses,
            sum.excused,
            sum.longest_healing_ms / 1_000,
            sum.longest_healing_ms % 1_000 / 100,
        );
    }
    text
}
