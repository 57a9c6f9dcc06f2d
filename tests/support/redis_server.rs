//! A private `redis-server`.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, FromRedisValue};
use rsc_protocol::GroupKey;
use rsc_protocol::keys::Keys;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::clock::Clock;
use super::wait::{DEADLINE, wait_until_blocking};

/// A running server with nothing in it. It is killed, and its directory removed, when this is dropped.
pub(crate) struct RedisServer {
    child: Child,
    directory: TempDir,
    port: u16,
    options: Options,
}

/// How a server is started, also when it is started again.
#[derive(Clone, Default)]
struct Options {
    /// Nothing is answered before it is on disk.
    is_durable: bool,
    environment: Vec<(String, String)>,
    /// More arguments of the server.
    arguments: Vec<String>,
}

impl RedisServer {
    /// Starts a server on a free port and waits until it answers.
    pub(crate) fn start() -> Self {
        RedisServer::start_as(&Options::default())
    }

    /// The same with more arguments, such as `--rename-command XACK ""`.
    pub(crate) fn start_with(arguments: &[&str]) -> Self {
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        RedisServer::start_as(&Options { arguments, ..Options::default() })
    }

    /// One that has nothing forgotten after [`RedisServer::restart`] of what it has ever answered.
    pub(crate) fn start_durable() -> Self {
        RedisServer::start_as(&Options { is_durable: true, ..Options::default() })
    }

    /// One whose `TIME` is this clock's.
    pub(crate) fn start_with_clock(clock: &Clock) -> Self {
        RedisServer::start_as(&Options { environment: clock.environment(), ..Options::default() })
    }

    fn start_as(options: &Options) -> Self {
        // Between asking for a free port and using it somebody else may take it.
        (0..10).find_map(|_| RedisServer::try_start_as(RedisServer::free_port(), options)).unwrap()
    }

    /// A port that was free a moment ago.
    pub(crate) fn free_port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    /// Starts a server on this port, or says that it could not be had.
    pub(crate) fn try_start(port: u16) -> Option<Self> {
        RedisServer::try_start_as(port, &Options::default())
    }

    fn try_start_as(port: u16, options: &Options) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let mut child = spawn(port, &directory, options);
        let options = options.clone();
        answers(&mut child, port).then_some(RedisServer { child, directory, port, options })
    }

    /// What follows `--redis-url`.
    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The port.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// A connection of the test's own, to look into keys and to tamper with them.
    pub(crate) async fn connection(&self) -> MultiplexedConnection {
        let client = redis::Client::open(self.url()).unwrap();
        // A slow machine is not what a test is about.
        let patient = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(DEADLINE))
            .set_response_timeout(Some(DEADLINE));
        client.get_multiplexed_async_connection_with_config(&patient).await.unwrap()
    }

    /// One field of a group's metadata, as stored.
    pub(crate) async fn metadata_field(&self, group: &GroupKey, field: &str) -> Option<String> {
        let key = Keys::default().metadata(group);
        redis::cmd("HGET").arg(key).arg(field).query_async(&mut self.connection().await).await.unwrap()
    }

    /// A group's aggregate, as stored.
    pub(crate) async fn aggregate(&self, group: &GroupKey) -> Option<serde_json::Value> {
        let text = self.metadata_field(group, "aggregate").await?;
        Some(serde_json::from_str(&text).unwrap())
    }

    /// One command on a connection of its own.
    pub(crate) async fn command<T: FromRedisValue>(&self, arguments: &[&str]) -> T {
        let mut command = redis::cmd(arguments[0]);
        command.arg(&arguments[1..]);
        command.query_async(&mut self.connection().await).await.unwrap()
    }

    /// A key as `DUMP` gives it; `None` when it does not exist.
    pub(crate) async fn dump(&self, key: &str) -> Option<Vec<u8>> {
        self.command(&["DUMP", key]).await
    }

    /// Puts back what [`RedisServer::dump`] gave, over whatever is there.
    pub(crate) async fn restore(&self, key: &str, dump: &[u8]) {
        let mut command = redis::cmd("RESTORE");
        command.arg(key).arg(0).arg(dump).arg("REPLACE");
        command.exec_async(&mut self.connection().await).await.unwrap();
    }

    /// Everything it holds, by key, as [`RedisServer::dump`] gives it; but for mutexes, which come and go.
    pub(crate) async fn dump_all(&self) -> BTreeMap<String, Vec<u8>> {
        let mut dumps = BTreeMap::new();
        for key in self.command::<Vec<String>>(&["KEYS", "*"]).await {
            if !key.ends_with("mutex") {
                dumps.insert(key.clone(), self.dump(&key).await.unwrap());
            }
        }
        dumps
    }

    /// The server hangs from now on: connections stay open, nothing is answered.
    pub(crate) fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// The end of [`RedisServer::pause`].
    pub(crate) fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills the server and starts an empty one on the same port.
    pub(crate) fn restart_empty(&mut self) {
        self.kill();
        self.start_again();
    }

    /// Ends the server with this signal and starts it again with what it has on disk; returns once it answers.
    pub(crate) fn restart(&mut self, signal: Signal) {
        self.signal(signal);
        wait_until_blocking("the server ends", || self.child.try_wait().unwrap());
        self.start_again();
    }

    fn start_again(&mut self) {
        wait_until_blocking("the port of the ended server is free again", || {
            let mut child = spawn(self.port, &self.directory, &self.options);
            let up = answers(&mut child, self.port);
            self.child = child;
            up.then_some(())
        });
    }

    /// Kills the server: its port refuses connections from now on.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(port: u16, directory: &TempDir, options: &Options) -> Child {
    let append_only = if options.is_durable { "yes" } else { "no" };
    Command::new("redis-server")
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""])
        .args(["--appendonly", append_only, "--appendfsync", "always", "--dir"])
        .arg(directory.path())
        .envs(options.environment.iter().cloned())
        .args(&options.arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| {
            panic!("redis-server cannot be started ({error}): see scripts/need-test-tools")
        })
}

/// Waits until this very child answers on the port; `false` when it ended instead.
fn answers(child: &mut Child, port: u16) -> bool {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).unwrap();
    wait_until_blocking("redis-server answers", || {
        if child.try_wait().unwrap().is_some() {
            return Some(false);
        }
        let mut connection = client.get_connection().ok()?;
        let info: String = redis::cmd("INFO").arg("server").query(&mut connection).ok()?;
        let is_child = info.lines().any(|line| line == format!("process_id:{}", child.id()));
        // Somebody else's server on that port: ours will find the port taken and end.
        is_child.then_some(true)
    })
}
