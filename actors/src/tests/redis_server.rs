//! A private `redis-server` for one test.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::Commands;
use rsc_protocol::GroupKey;
use rsc_protocol::keys::Keys;
use rsc_store::{RedisSettings, RedisStore};

/// The server ends with this value.
pub(crate) struct RedisServer {
    child: Child,
    port: u16,
    _directory: tempfile::TempDir,
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

impl RedisServer {
    pub(crate) fn start() -> Self {
        // Another process may take the port between the look and the start: then with another one again.
        for _ in 0..20 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            if let Some(server) = Self::start_on(port) {
                return server;
            }
        }
        panic!("no redis-server could be started");
    }

    fn start_on(port: u16) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let child = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
            .arg("--dir")
            .arg(directory.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server is installed");
        let mut server = RedisServer { child, port, _directory: directory };
        let deadline = Instant::now() + super::PATIENCE;
        while Instant::now() < deadline {
            if server.child.try_wait().unwrap().is_some() {
                return None;
            }
            if server.connection().is_ok_and(|mut connection| connection.ping::<String>().is_ok()) {
                return Some(server);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// A store on this server.
    pub(crate) fn store(&self) -> Arc<RedisStore> {
        self.store_with(super::settings("any").mutex_ttl)
    }

    /// A store whose mutexes last as long as that: longer than any test, nobody can just wait for one.
    pub(crate) fn store_with(&self, mutex_ttl: Duration) -> Arc<RedisStore> {
        let settings = RedisSettings { mutex_ttl, ..RedisSettings::new(self.url()) };
        Arc::new(RedisStore::new(&settings).unwrap())
    }

    fn connection(&self) -> redis::RedisResult<redis::Connection> {
        redis::Client::open(self.url())?.get_connection_with_timeout(Duration::from_secs(5))
    }

    /// Runs a command that returns whatever the test wants to read.
    pub(crate) fn run<T: redis::FromRedisValue>(&self, command: &redis::Cmd) -> T {
        command.query(&mut self.connection().unwrap()).unwrap()
    }

    /// Takes the metadata key away; returns what puts it back.
    pub(crate) fn take_metadata(&self, group: &GroupKey) -> Vec<u8> {
        let key = Keys::default().metadata(group);
        let dump: Vec<u8> = self.run(redis::cmd("DUMP").arg(&key));
        let _: i64 = self.run(redis::cmd("DEL").arg(&key));
        dump
    }

    /// Puts the metadata key back as it was, over whatever is there.
    pub(crate) fn restore_metadata(&self, group: &GroupKey, dump: &[u8]) {
        let key = Keys::default().metadata(group);
        let _: String = self.run(redis::cmd("RESTORE").arg(&key).arg(0).arg(dump).arg("REPLACE"));
    }

    /// Whether a key exists.
    pub(crate) fn exists(&self, key: &str) -> bool {
        self.run::<i64>(redis::cmd("EXISTS").arg(key)) == 1
    }
}
