//! A redis-server of a test's own, on its own port, gone with the value.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use redis::{Commands, Connection};
use tempfile::TempDir;

/// A running redis-server.
pub struct RedisServer {
    child: Child,
    port: u16,
    directory: TempDir,
    arguments: Vec<String>,
}

impl RedisServer {
    /// Starts one on a free port.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts one with more arguments.
    pub fn start_with(arguments: &[&str]) -> Self {
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        for _ in 0..20 {
            let directory = tempfile::tempdir().unwrap();
            let port = free_port();
            let child = spawn(port, &directory, &arguments);
            let mut server = RedisServer { child, port, directory, arguments: arguments.clone() };
            // Another process may have taken the port in between: then ours ends.
            if server.is_up() {
                return server;
            }
        }
        panic!("no redis-server could be started");
    }

    fn is_up(&mut self) -> bool {
        let started = Instant::now();
        let own = format!("process_id:{}\r\n", self.child.id());
        while started.elapsed() < Duration::from_secs(20) {
            if self.child.try_wait().unwrap().is_some() {
                return false;
            }
            let info = self
                .try_connect()
                .and_then(|mut connection| redis::cmd("INFO").arg("server").query::<String>(&mut connection));
            match info {
                Ok(info) if info.contains(&own) => return true,
                Ok(_) => return false,
                Err(error) if error.code() == Some("NOAUTH") => return true,
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
        false
    }

    /// `redis://` and its address.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    fn try_connect(&self) -> redis::RedisResult<Connection> {
        redis::Client::open(self.url())?.get_connection_with_timeout(Duration::from_secs(5))
    }

    /// A connection of the test's own, which does not pass through the store.
    pub fn connection(&self) -> Connection {
        self.try_connect().unwrap()
    }

    /// A connection with a password.
    pub fn connection_with(&self, password: &str) -> Connection {
        let url = format!("redis://:{password}@127.0.0.1:{}", self.port);
        redis::Client::open(url).unwrap().get_connection().unwrap()
    }

    /// Runs one command written as words.
    pub fn run<T: redis::FromRedisValue>(&self, words: &[&str]) -> redis::RedisResult<T> {
        let mut command = redis::cmd(words[0]);
        for word in &words[1..] {
            command.arg(*word);
        }
        command.query(&mut self.connection())
    }

    /// Runs one command and expects it to succeed.
    pub fn ok(&self, words: &[&str]) {
        self.run::<redis::Value>(words).unwrap();
    }

    /// How often the server was called with this command since the last `CONFIG RESETSTAT`.
    pub fn calls(&self, command: &str) -> u64 {
        let stats: String = self.run(&["INFO", "commandstats"]).unwrap();
        let start = format!("cmdstat_{command}:calls=");
        let line = stats.lines().find_map(|line| line.strip_prefix(start.as_str()));
        line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
    }

    /// `SIGSTOP`: the server is there and does nothing.
    pub fn stop(&self) {
        self.signal("STOP");
    }

    /// `SIGCONT`.
    pub fn resume(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("sh").arg("-c").arg(format!("kill -{name} {}", self.child.id())).status();
        assert!(sent.unwrap().success());
    }

    /// `kill -9`; it stays dead until `restart`.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again on the same port, empty.
    pub fn restart(&mut self) {
        let started = Instant::now();
        loop {
            self.child = spawn(self.port, &self.directory, &self.arguments);
            if self.is_up() {
                return;
            }
            assert!(started.elapsed() < Duration::from_secs(20), "port {} is taken", self.port);
        }
    }

    /// Whether a key exists.
    pub fn exists(&self, key: &str) -> bool {
        self.connection().exists(key).unwrap()
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A port that nobody listens on right now.
pub fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

fn spawn(port: u16, directory: &TempDir, arguments: &[String]) -> Child {
    Command::new("redis-server")
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        .arg("--dir")
        .arg(directory.path())
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("redis-server is installed (apt-get install redis-server)")
}
