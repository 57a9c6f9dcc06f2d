//! Figures over many runs.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::run::{Counted, StreamOutcome};

/// Sums over the runs of one kind.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StreamFigures {
    /// Runs without a violation.
    pub runs: u64,
    /// Simulated milliseconds in them.
    pub simulated_ms: i64,
    /// What happened in them.
    pub counts: Counted,
    /// The longest healing, in simulated milliseconds.
    pub longest_healing_ms: i64,
}

impl StreamFigures {
    /// Adds a run.
    pub fn add(&mut self, outcome: &StreamOutcome) {
        self.runs += 1;
        self.simulated_ms += outcome.simulated;
        self.counts.add(&outcome.counts);
        self.longest_healing_ms = self.longest_healing_ms.max(outcome.healing);
    }
}

/// Figures by fault mix, as a table.
#[must_use]
pub fn stream_table(figures: &BTreeMap<String, StreamFigures>) -> String {
    let mut text = String::from(
        "| faults | runs | simulated hours | decisions | changes begun | rolled back | keys deleted | records | \
         losses of redis | left as documented | longest healing, s |\n\
         | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for (faults, sum) in figures {
        let counts = &sum.counts;
        let _ = writeln!(
            text,
            "| {faults} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {}.{} |",
            sum.runs,
            sum.simulated_ms / 3_600_000,
            counts.decisions,
            counts.scales,
            counts.rolled_back,
            counts.deletions,
            counts.published,
            counts.losses,
            counts.forgotten,
            sum.longest_healing_ms / 1_000,
            sum.longest_healing_ms % 1_000 / 100,
        );
    }
    text
}
