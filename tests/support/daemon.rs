//! The real binary as a process of its own.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::api::Api;
use super::clock::Clock;
use super::redis_server::RedisServer;
use super::wait::wait_until_blocking;

/// How to start a daemon: arguments and environment of `rsc serve`.
pub(crate) struct DaemonBuilder {
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
}

impl DaemonBuilder {
    /// One more argument.
    pub(crate) fn argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_owned());
        self
    }

    /// One configuration key through the environment: `("coordination", "member-lease-ttl", "3s")`.
    pub(crate) fn set(mut self, section: &str, key: &str, value: &str) -> Self {
        let name = format!("RSC_{section}__{key}").to_uppercase().replace('-', "_");
        self.environment.push((name, value.to_owned()));
        self
    }

    /// Timing for tests that wait for leases: heartbeat 200 ms, lease 1 s, rebalance timeout 2 s.
    pub(crate) fn fast(self) -> Self {
        self.set("coordination", "heartbeat-interval", "200ms")
            .set("coordination", "member-lease-ttl", "1s")
            .set("coordination", "rebalance-timeout", "2s")
            .set("coordination", "tick-interval", "50ms")
            .set("coordination", "stale-member-retention", "1m")
            .set("coordination", "mutex-ttl", "500ms")
            .set("coordination", "mutex-acquire-timeout", "500ms")
            .set("coordination", "index-refresh-interval", "200ms")
            .set("redis", "connect-timeout", "300ms")
            .set("redis", "command-timeout", "300ms")
    }

    /// Quick timing around this member lease, which is what a test waits for; both in milliseconds.
    pub(crate) fn lease(self, lease_ms: u64, rebalance_timeout_ms: u64) -> Self {
        let ms = |ms: u64| format!("{ms}ms");
        self.fast()
            .set("coordination", "member-lease-ttl", &ms(lease_ms))
            .set("coordination", "rebalance-timeout", &ms(rebalance_timeout_ms))
            .set("coordination", "stale-member-retention", &ms(60_000.max(lease_ms * 4)))
            .set("coordination", "mutex-ttl", &ms(lease_ms * 2 / 5))
            .set("coordination", "mutex-acquire-timeout", &ms(lease_ms * 2 / 5))
            .set("redis", "connect-timeout", &ms(lease_ms * 3 / 10))
            .set("redis", "command-timeout", &ms(lease_ms * 3 / 10))
    }

    /// Its wall clock is this one.
    pub(crate) fn clock(mut self, clock: &Clock) -> Self {
        self.environment.extend(clock.environment());
        self
    }

    /// Producers' caches that end quickly: 500 ms, and 300 ms for what is on its way.
    pub(crate) fn short_caches(self) -> Self {
        self.set("producer", "routing-cache-ttl", "500ms").set("producer", "publish-margin", "300ms")
    }

    /// For tests in which nobody is to expire and nothing to time out, however slow the machine is.
    pub(crate) fn long_lease(self) -> Self {
        self.lease(60_000, 60_000)
    }

    /// Starts the daemon and waits until it listens.
    pub(crate) fn start(self) -> Daemon {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let mut command = Command::new(env!("CARGO_BIN_EXE_rsc"));
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("RSC_")) {
            command.env_remove(name);
        }
        let child = command
            .args(["serve", "--insecure", "--listen", "127.0.0.1:0"])
            .args(&self.arguments)
            .env("RSC_TELEMETRY__LOG_FILTER", "info,rsc=debug")
            .envs(self.environment)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut daemon = Daemon { child, log, _directory: directory, address: String::new() };
        daemon.address = wait_until_blocking("the daemon listens", || daemon.ready_field("addr"));
        daemon
    }
}

/// A running daemon. It is killed when this is dropped; when the test is failing, its log is shown.
pub(crate) struct Daemon {
    child: Child,
    log: PathBuf,
    _directory: TempDir,
    address: String,
}

impl Daemon {
    /// A daemon with nothing but `arguments`.
    pub(crate) fn builder(arguments: &[&str]) -> DaemonBuilder {
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        DaemonBuilder { arguments, environment: Vec::new() }
    }

    /// A daemon that keeps everything in memory.
    pub(crate) fn memory() -> DaemonBuilder {
        Daemon::builder(&["--store", "memory"])
    }

    /// A daemon on this Redis.
    pub(crate) fn redis(redis: &RedisServer) -> DaemonBuilder {
        Daemon::builder(&["--redis-url", &redis.url()])
    }

    /// `address:port` it listens on.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// The port it listens on.
    pub(crate) fn port(&self) -> u16 {
        self.address.rsplit_once(':').unwrap().1.parse().unwrap()
    }

    /// Where clients find it.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// A client of it.
    pub(crate) fn api(&self) -> Api {
        Api::new(&self.address)
    }

    /// Everything it has logged so far.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A field of the ready line, without quotes; `None` before there is one.
    pub(crate) fn ready_field(&mut self, field: &str) -> Option<String> {
        let log = self.log();
        let Some(line) = log.split_inclusive('\n').find(|line| line.contains(": listening ")) else {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "the daemon ended with {ended:?} before it listened:\n{log}");
            return None;
        };
        let value = line.strip_suffix('\n')?.split_once(&format!(" {field}="))?.1.split(' ').next()?;
        Some(value.trim_matches('"').to_owned())
    }

    /// SIGTERM: stop in an orderly way.
    pub(crate) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// SIGINT.
    pub(crate) fn interrupt(&self) {
        self.signal(Signal::INT);
    }

    /// SIGSTOP: the process stands still until [`Daemon::resume`].
    pub(crate) fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// SIGCONT.
    pub(crate) fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// `kill -9`, and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits until the process has ended by itself.
    pub(crate) fn wait_for_exit(&mut self) -> ExitStatus {
        wait_until_blocking("the daemon ends", || self.child.try_wait().unwrap())
    }

    /// Whether the process has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("log of the daemon on {}:\n{}", self.address, self.log());
        }
    }
}
