//! What the doctor found, and how it is printed. The ids are stable: docs/doctor.md lists them.

use std::borrow::Cow;

use rsc_protocol::Timestamp;
use serde::Serialize;
use serde_json::{Value, json};

use crate::tools::one_line;

/// Every id there is, in the order of the checks; `invariant.` is followed by one of docs/invariants.md.
const IDS: [&str; 46] = [
    "connection",
    "nodes",
    "mode",
    "role",
    "version",
    "commands",
    "commands.consumers",
    "commands.ack",
    "eviction",
    "memory",
    "persistence",
    "replicas",
    "server-timeouts",
    "timeouts",
    "clock",
    "clock.nodes",
    "writes",
    "acl",
    "acl.optional",
    "index",
    "index.type",
    "index.unindexed",
    "index.missing",
    "index.deleted",
    "index.foreign",
    "records",
    "record.type",
    "record.unreadable",
    "record.schema",
    "record.layout",
    "record.revision",
    "record.foreign",
    "record.ttl",
    "record.clock",
    "record.correction",
    "record.tombstone",
    "mutexes",
    "mutex.ttl",
    "mutex.type",
    "stream.count",
    "shards",
    "shard.rights",
    "shard.type",
    "shard.missing",
    "shard.group",
    "shard.unread",
];

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    /// Looked at, and as it should be.
    Ok,
    /// Worth knowing.
    Info,
    /// Could not be looked at: neither good nor bad.
    Unknown,
    /// Will hurt one day.
    Warning,
    /// Hurts now, or loses data the next time something fails.
    Error,
}

impl Level {
    const ALL: [Level; 5] = [Level::Error, Level::Warning, Level::Unknown, Level::Info, Level::Ok];

    fn label(self) -> &'static str {
        match self {
            Level::Ok => "ok",
            Level::Info => "info",
            Level::Unknown => "unknown",
            Level::Warning => "warning",
            Level::Error => "error",
        }
    }
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) id: Cow<'static, str>,
    pub(super) level: Level,
    /// What it is about: a server's address, a key, a group, a configuration key.
    pub(super) subject: String,
    /// What was found.
    pub(super) message: String,
    /// What to do; `null` where there is nothing to do.
    pub(super) remedy: Option<String>,
}

/// All findings, in the order of the checks.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) findings: Vec<Finding>,
    /// Redis time at the beginning, if Redis told it.
    pub(super) checked_at: Option<Timestamp>,
}

impl Report {
    fn push(
        &mut self,
        level: Level,
        id: impl Into<Cow<'static, str>>,
        subject: impl Into<String>,
        message: impl Into<String>,
        remedy: Option<String>,
    ) {
        let id = id.into();
        debug_assert!(
            IDS.contains(&id.as_ref()) || id.starts_with("invariant."),
            "{id} is not among the ids"
        );
        self.findings.push(Finding { id, level, subject: subject.into(), message: message.into(), remedy });
    }

    pub(super) fn ok(&mut self, id: &'static str, subject: impl Into<String>, message: impl Into<String>) {
        self.push(Level::Ok, id, subject, message, None);
    }

    pub(super) fn info(&mut self, id: &'static str, subject: impl Into<String>, message: impl Into<String>) {
        self.push(Level::Info, id, subject, message, None);
    }

    /// Could not be looked at, and why.
    pub(super) fn unknown(&mut self, id: &'static str, subject: impl Into<String>, why: impl Into<String>) {
        self.push(Level::Unknown, id, subject, why, None);
    }

    pub(super) fn warning(
        &mut self,
        id: &'static str,
        subject: impl Into<String>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.push(Level::Warning, id, subject, message, Some(remedy.into()));
    }

    pub(super) fn error(
        &mut self,
        id: impl Into<Cow<'static, str>>,
        subject: impl Into<String>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.push(Level::Error, id, subject, message, Some(remedy.into()));
    }

    /// How many findings there are so far; see [`Report::is_clean_since`].
    pub(super) fn mark(&self) -> usize {
        self.findings.len()
    }

    /// Whether nothing but good was found since the mark.
    pub(super) fn is_clean_since(&self, mark: usize) -> bool {
        self.findings[mark..].iter().all(|finding| finding.level <= Level::Info)
    }

    pub(super) fn has_errors(&self) -> bool {
        self.findings.iter().any(|finding| finding.level == Level::Error)
    }

    fn count(&self, level: Level) -> usize {
        self.findings.iter().filter(|finding| finding.level == level).count()
    }

    /// A line each, and one that counts them.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            let level = finding.level.label();
            let mut line = format!("{level:<8} {:<20} {}: {}", finding.id, finding.subject, finding.message);
            if let Some(remedy) = &finding.remedy {
                line.push_str("; do: ");
                line.push_str(remedy);
            }
            text.push_str(&one_line(&line));
            text.push('\n');
        }
        let counts = Level::ALL.map(|level| format!("{} {}", self.count(level), level.label()));
        text.push_str(&counts.join(", "));
        text.push('\n');
        text
    }

    /// The document of docs/doctor.md.
    pub(super) fn json(&self, mode: &str, key_prefix: &str) -> Value {
        let counts: serde_json::Map<String, Value> =
            Level::ALL.iter().map(|level| (level.label().to_owned(), self.count(*level).into())).collect();
        let worst = self.findings.iter().map(|finding| finding.level).max().unwrap_or(Level::Ok);
        json!({
            "version": 1,
            "mode": mode,
            "keyPrefix": key_prefix,
            "checkedAt": self.checked_at,
            "level": worst,
            "counts": counts,
            "findings": self.findings,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_has_its_row_in_the_documentation() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/doctor.md");
        let page = std::fs::read_to_string(page).unwrap();
        let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        let rows: Vec<&str> = rows.filter(|id| *id != "invariant.*").collect();
        assert_eq!(rows, IDS);
    }

    #[test]
    fn a_finding_is_one_line_and_a_summary_counts_them() {
        let mut report = Report::default();
        report.ok("version", "a:1", "redis 7");
        let mark = report.mark();
        report.info("commands.ack", "a:1", "none");
        assert!(report.is_clean_since(mark));
        report.error("record.ttl", "k\ney", "has a TTL", "PERSIST it");
        assert!(!report.is_clean_since(mark) && report.has_errors());
        let text = report.text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert_eq!(lines[2], "error    record.ttl           k\\ney: has a TTL; do: PERSIST it");
        assert_eq!(lines[3], "1 error, 0 warning, 0 unknown, 1 info, 1 ok");
        let document = report.json("standalone", "p");
        assert_eq!(document["level"], "error");
        assert_eq!(document["counts"]["info"], 1);
        assert_eq!(document["findings"][2]["subject"], "k\ney");
    }
}
