//! Everything that is written to the group's record, by each server, in order: the truth that clients' reports are compared with.
//!
//! `MONITOR` shows each command that a server carries out, those of scripts included (their source is `lua`) and, on a replica,
//! those that come from the master. So the writes that were acknowledged and then lost are seen as well.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, sleep};
use std::time::Duration;

use rsc_protocol::GroupKey;
use rsc_protocol::keys::Keys;
use serde_json::Value;

use super::log::Transition;

/// One write to the group's record.
#[derive(Clone, Debug)]
pub(crate) struct Commit {
    pub(crate) server: usize,
    /// By the server's clock, in microseconds since 1970.
    pub(crate) at_us: u64,
    pub(crate) live_revision: u64,
    /// `None`: only leases were renewed.
    pub(crate) structure: Option<Structure>,
}

/// What a structural write says.
#[derive(Clone, Debug)]
pub(crate) struct Structure {
    pub(crate) revision: u64,
    pub(crate) transition: Transition,
    /// When the correction round that is on began.
    pub(crate) round: Option<String>,
}

/// Watches some servers until it is asked what it has seen.
pub(crate) struct Witness {
    over: Arc<AtomicBool>,
    commits: Arc<Mutex<Vec<Commit>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Witness {
    /// Begins to watch the servers on these ports; returns once it sees all of them.
    pub(crate) fn start(ports: &[u16], group: &GroupKey) -> Self {
        let (over, commits) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let key = Keys::default().metadata(group);
        let mut threads = Vec::new();
        for (server, &port) in ports.iter().enumerate() {
            let (sees, seeing) = std::sync::mpsc::channel();
            let watch = Watch {
                server,
                port,
                key: key.clone(),
                over: Arc::clone(&over),
                commits: Arc::clone(&commits),
            };
            threads.push(thread::spawn(move || watch.run(&sees)));
            seeing.recv_timeout(Duration::from_secs(10)).unwrap();
        }
        Witness { over, commits, threads }
    }

    /// Ends, and returns what servers wrote by themselves (not what replicas repeated), in the order of time.
    pub(crate) fn finish(mut self) -> Vec<Commit> {
        self.over.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
        let mut commits = std::mem::take(&mut *self.commits.lock().unwrap());
        commits.sort_by_key(|commit| commit.at_us);
        commits
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
    }
}

struct Watch {
    server: usize,
    port: u16,
    key: String,
    over: Arc<AtomicBool>,
    commits: Arc<Mutex<Vec<Commit>>>,
}

impl Watch {
    /// Servers are killed, and hang up on everybody when their role changes: it connects again and again.
    fn run(&self, sees: &std::sync::mpsc::Sender<()>) {
        while !self.over.load(Ordering::SeqCst) {
            if self.watch(sees).is_err() {
                sleep(Duration::from_millis(2));
            }
        }
    }

    fn watch(&self, sees: &std::sync::mpsc::Sender<()>) -> std::io::Result<()> {
        let address = SocketAddr::from(([127, 0, 0, 1], self.port));
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_millis(500))?;
        stream.set_read_timeout(Some(Duration::from_millis(100)))?;
        stream.write_all(b"MONITOR\r\n")?;
        let (mut lines, mut line) = (BufReader::new(stream), Vec::new());
        while !self.over.load(Ordering::SeqCst) {
            match lines.read_until(b'\n', &mut line) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => {
                    // Nobody waits for it any more but the first time.
                    let _ = sees.send(());
                    if let Some(commit) = self.commit(&line) {
                        self.commits.lock().unwrap().push(commit);
                    }
                    line.clear();
                }
                // The beginning of a line that has been read stays in `line`.
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// `+seconds.micros [database source] "COMMAND" "argument" …`
    fn commit(&self, line: &[u8]) -> Option<Commit> {
        let line = std::str::from_utf8(line).ok()?;
        let (head, command) = line.strip_prefix('+')?.split_once("] ")?;
        if !head.ends_with(" lua") || !command.starts_with("\"HSET\"") {
            return None;
        }
        let words = words(command);
        let fields: BTreeMap<&str, &str> =
            words.get(2..)?.chunks_exact(2).map(|pair| (pair[0].as_str(), pair[1].as_str())).collect();
        let live_revision = fields.get("liveRevision")?.parse().ok()?;
        if words[1] != self.key {
            return None;
        }
        let (seconds, micros) = head.split_once(' ')?.0.split_once('.')?;
        let structure = fields.get("aggregate").map(|aggregate| {
            let aggregate: Value = serde_json::from_str(aggregate).unwrap();
            Structure {
                revision: aggregate["storeRevision"].as_u64().unwrap(),
                transition: Transition {
                    version: aggregate["metadataVersion"].as_u64().unwrap(),
                    token: aggregate["metadataToken"].as_str().unwrap().to_owned(),
                },
                round: aggregate["metadataCorrection"]["requestedAt"].as_str().map(str::to_owned),
            }
        });
        Some(Commit {
            server: self.server,
            at_us: seconds.parse::<u64>().ok()? * 1_000_000 + micros.parse::<u64>().ok()?,
            live_revision,
            structure,
        })
    }
}

/// The words of a command as `MONITOR` shows it: each in quotes, with `\"`, `\\`, `\n`, `\xHH` and their like in it.
fn words(command: &str) -> Vec<String> {
    let (mut words, mut word, mut is_inside) = (Vec::new(), Vec::new(), false);
    let mut bytes = command.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' if is_inside => {
                words.push(String::from_utf8_lossy(&std::mem::take(&mut word)).into_owned());
                is_inside = false;
            }
            b'"' => is_inside = true,
            b'\\' => match bytes.next() {
                Some(b'n') => word.push(b'\n'),
                Some(b'r') => word.push(b'\r'),
                Some(b't') => word.push(b'\t'),
                Some(b'a') => word.push(7),
                Some(b'b') => word.push(8),
                Some(b'x') => {
                    let digits = [bytes.next(), bytes.next()].map(|digit| digit.map_or('?', char::from));
                    let digits: String = digits.iter().collect();
                    word.push(u8::from_str_radix(&digits, 16).unwrap());
                }
                other => word.extend(other),
            },
            _ if is_inside => word.push(byte),
            _ => {}
        }
    }
    words
}

#[test]
fn words_are_read_as_monitor_writes_them() {
    let shown = r#""HSET" "{a:b}" "aggregate" "{\"token\":\"x\\\\y\"}" "\xc3\xa4\n" """#;
    assert_eq!(words(shown), ["HSET", "{a:b}", "aggregate", r#"{"token":"x\\y"}"#, "ä\n", ""]);
}
