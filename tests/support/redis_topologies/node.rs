//! One Redis process: a server, or a sentinel.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::{Connection, FromRedisValue, RedisResult};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::ports::free_port;
use super::{DEADLINE, wait_for};

/// So many lines of each log are shown when a test fails.
const SHOWN_LINES: usize = 40;

/// A process that can be killed, paused and started again with the directory and the arguments it had. It ends with this
/// value.
pub(crate) struct RedisNode {
    port: u16,
    directory: TempDir,
    arguments: Vec<String>,
    password: Option<String>,
    child: Mutex<Child>,
    paused: AtomicBool,
}

impl RedisNode {
    /// Starts one on a free port and waits until it answers. `arguments` are given the port and the directory.
    pub(super) fn start(password: Option<&str>, arguments: impl Fn(u16, &TempDir) -> Vec<String>) -> Self {
        for _ in 0..10 {
            let (port, directory) = (free_port(), tempfile::tempdir().unwrap());
            let arguments = arguments(port, &directory);
            let child = spawn(port, &directory, &arguments);
            let password = password.map(str::to_owned);
            let (child, paused) = (Mutex::new(child), AtomicBool::new(false));
            let node = RedisNode { port, directory, arguments, password, child, paused };
            // Between finding a port and using it somebody else may take it.
            if node.comes_up() {
                return node;
            }
        }
        panic!("no redis-server could be started")
    }

    /// The port it listens on.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// `redis://127.0.0.1:port`, without credentials.
    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.lock().unwrap().id()
    }

    /// A connection of the caller's own, with the password if there is one. Nothing on it takes longer than 2 s.
    pub(crate) fn connect(&self) -> RedisResult<Connection> {
        let credentials = self.password.as_ref().map(|password| format!(":{password}@")).unwrap_or_default();
        let client = redis::Client::open(format!("redis://{credentials}127.0.0.1:{}", self.port))?;
        let patience = Duration::from_secs(2);
        let connection = client.get_connection_with_timeout(patience)?;
        connection.set_read_timeout(Some(patience))?;
        connection.set_write_timeout(Some(patience))?;
        Ok(connection)
    }

    /// One command, written as words, on a connection of its own. Redirections are errors: nobody follows them.
    pub(crate) fn try_command<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        redis::cmd(words[0]).arg(&words[1..]).query(&mut self.connect()?)
    }

    /// The same, and it has to succeed.
    pub(crate) fn command<T: FromRedisValue>(&self, words: &[&str]) -> T {
        self.try_command(words).unwrap_or_else(|error| panic!("{words:?} on port {}: {error}", self.port))
    }

    /// One command that writes; waits until so many replicas have it. (`WAIT` only waits for what its own connection wrote.)
    pub(crate) fn write_through(&self, words: &[&str], replicas: usize) {
        let mut connection = self.connect().unwrap();
        let patience = DEADLINE.as_millis().to_string();
        connection.set_read_timeout(Some(DEADLINE)).unwrap();
        redis::cmd(words[0]).arg(&words[1..]).exec(&mut connection).unwrap();
        let have: usize = redis::cmd("WAIT").arg(replicas).arg(patience).query(&mut connection).unwrap();
        assert!(have >= replicas, "{words:?} on port {}: {have} of {replicas} replicas have it", self.port);
    }

    /// `INFO section` as a map.
    pub(crate) fn info(&self, section: &str) -> RedisResult<BTreeMap<String, String>> {
        Ok(fields(&self.try_command::<String>(&["INFO", section])?))
    }

    /// Whether it says that it is a master.
    pub(crate) fn is_master(&self) -> bool {
        self.info("replication").is_ok_and(|info| info.get("role").is_some_and(|role| role == "master"))
    }

    /// `Err` unless it is a replica that has all that its master has.
    pub(super) fn is_synced_replica(&self) -> Result<(), String> {
        let info = self.info("replication").map_err(|error| error.to_string())?;
        let is = |field: &str, value: &str| info.get(field).is_some_and(|found| found == value);
        let synced =
            is("role", "slave") && is("master_link_status", "up") && is("master_sync_in_progress", "0");
        if synced { Ok(()) } else { Err(format!("port {}: {info:?}", self.port)) }
    }

    /// Whether the process lives; a paused one does.
    pub(crate) fn is_alive(&self) -> bool {
        self.child.lock().unwrap().try_wait().unwrap().is_none()
    }

    /// Whether the process lives and is not paused.
    pub(crate) fn is_running(&self) -> bool {
        self.is_alive() && !self.paused.load(Ordering::SeqCst)
    }

    /// `kill -9`: its port refuses connections from now on.
    pub(crate) fn kill(&self) {
        let mut child = self.child.lock().unwrap();
        let _ = child.kill();
        let _ = child.wait();
        self.paused.store(false, Ordering::SeqCst);
    }

    /// Starts it again after [`RedisNode::kill`], as it was started first, with `more` arguments; waits until it answers.
    pub(crate) fn restart(&self, more: &[&str]) {
        assert!(!self.is_alive(), "the server on port {} is restarted while it lives", self.port);
        let more = more.iter().map(|&argument| argument.to_owned());
        let arguments: Vec<String> = self.arguments.iter().cloned().chain(more).collect();
        wait_for(&format!("the server on port {} is up again", self.port), || {
            *self.child.lock().unwrap() = spawn(self.port, &self.directory, &arguments);
            if self.comes_up() { Ok(()) } else { Err(format!("it ended: {}", self.log())) }
        });
    }

    /// It hangs from now on: connections stay open, nothing is answered.
    pub(crate) fn pause(&self) {
        self.signal(Signal::STOP);
        self.paused.store(true, Ordering::SeqCst);
    }

    /// The end of [`RedisNode::pause`].
    pub(crate) fn resume(&self) {
        self.signal(Signal::CONT);
        self.paused.store(false, Ordering::SeqCst);
    }

    /// What it has logged since it was started last.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child.lock().unwrap()), signal).unwrap();
    }

    /// Waits until this very process answers; `false` when it ends instead.
    fn comes_up(&self) -> bool {
        wait_for(&format!("the server on port {} answers", self.port), || {
            if !self.is_alive() {
                return Ok(false);
            }
            match self.info("server") {
                // Somebody else's server on that port: ours will find the port taken and end.
                Ok(info) if info.get("process_id") != Some(&self.pid().to_string()) => {
                    Err(format!("{info:?}"))
                }
                Ok(_) => Ok(true),
                Err(error) => Err(format!("{error}: {}", self.log())),
            }
        })
    }
}

impl Drop for RedisNode {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let last = lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n");
            eprintln!("end of the log of the server on port {}:\n{last}", self.port);
        }
    }
}

/// The lines `field:value` of an answer.
pub(super) fn fields(text: &str) -> BTreeMap<String, String> {
    let pair = |line: &str| line.split_once(':').map(|(field, value)| (field.to_owned(), value.to_owned()));
    text.lines().filter_map(pair).collect()
}

fn spawn(port: u16, directory: &TempDir, arguments: &[String]) -> Child {
    let log = fs::File::create(directory.path().join("log")).unwrap();
    Command::new("redis-server")
        .args(arguments)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--dir"])
        .arg(directory.path())
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| {
            panic!("redis-server cannot be started ({error}): see scripts/need-test-tools")
        })
}
