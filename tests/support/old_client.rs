//! `tests/old_client.py` as a process: a client that was written before anything was added to the protocol.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use rsc_protocol::GroupKey;
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use tempfile::TempDir;

use super::journal::{Journal, Reading};
use super::wait::wait_until_blocking;

/// A running old client. It is killed when this is dropped.
pub(crate) struct OldClient {
    child: Child,
    member_id: String,
    log: PathBuf,
    _directory: TempDir,
}

/// A line of its log: from `at` on it reads `reading`, until the next line or `until`.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct LogLine {
    at: f64,
    until: f64,
    pub(crate) event: String,
    pub(crate) reading: BTreeSet<u32>,
}

impl OldClient {
    /// Starts one that would go on for a minute, with a lease of its own.
    pub(crate) fn start(url: &str, group: &GroupKey, member_id: &str, lease_seconds: f64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/old_client.py");
        let child = Command::new("python3")
            .arg(script)
            .args(["--url", url, "--stream", group.stream_prefix(), "--group", group.consumer_group()])
            .args(["--member", member_id, "--seconds", "60", "--interval", "0.2"])
            .args(["--lease", &lease_seconds.to_string(), "--log"])
            .arg(&log)
            .stdin(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("python3 cannot be started: {error}"));
        OldClient { child, member_id: member_id.to_owned(), log, _directory: directory }
    }

    /// Everything it has noted so far; a line that is still being written is left out.
    pub(crate) fn lines(&self) -> Vec<LogLine> {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// What it reads now, as far as it has noted; nothing unless its last answer was `OK`.
    pub(crate) fn settled_on(&self) -> BTreeSet<u32> {
        self.lines().pop().filter(|line| line.event == "OK").map(|line| line.reading).unwrap_or_default()
    }

    /// `kill -9`.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asks it to leave and waits until it has.
    pub(crate) fn leave(&mut self) -> ExitStatus {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        wait_until_blocking("the old client has left", || self.child.try_wait().unwrap())
    }

    /// Enters into the journal what it has read when. It must have ended.
    pub(crate) fn note_in(&self, journal: &Journal) {
        let us = |ms: f64| (ms * 1_000.0) as u64;
        let reader = format!("{}#{}", self.member_id, self.child.id());
        let note = |shard: u32, from_us: u64, until_us: u64| {
            journal.note(Reading { shard, reader: reader.clone(), from_us, until_us });
        };
        let mut reading: BTreeMap<u32, u64> = BTreeMap::new();
        let mut until = 0.0;
        for line in self.lines() {
            let lease_ran_out = line.at > until;
            let over: Vec<u32> = reading
                .keys()
                .copied()
                .filter(|shard| lease_ran_out || !line.reading.contains(shard))
                .collect();
            for shard in over {
                let from_us = reading.remove(&shard).unwrap();
                note(shard, from_us, us(line.at.min(until)));
            }
            if line.at < line.until {
                for &shard in &line.reading {
                    reading.entry(shard).or_insert(us(line.at));
                }
            }
            until = line.until;
        }
        for (shard, from_us) in reading {
            note(shard, from_us, us(until));
        }
    }
}

impl Drop for OldClient {
    fn drop(&mut self) {
        self.kill();
    }
}
