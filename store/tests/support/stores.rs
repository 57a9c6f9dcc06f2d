//! Redis stores for tests, and the keys of the group `orders`/`billing` on the server.

use std::time::Duration;

use rsc_core::{RawFields, Write};
use rsc_store::{RedisSettings, RedisStore};

use super::server::RedisServer;
use super::structural;

pub const METADATA: &str = "redis-stream:coord:{orders:billing}:metadata";
pub const MUTEX: &str = "redis-stream:coord:{orders:billing}:mutex";
pub const HISTORY: &str = "redis-stream:coord:{orders:billing}:history";
pub const TOMBSTONE: &str = "redis-stream:coord:{orders:billing}:tombstone";

/// Settings with one connection and timeouts that no slow machine reaches.
pub fn settings(url: String) -> RedisSettings {
    let mut settings = RedisSettings::new(url);
    settings.command_timeout = Duration::from_secs(20);
    settings.connect_timeout = Duration::from_secs(20);
    settings.mutex_ttl = Duration::from_secs(600);
    settings.connections = 1;
    settings
}

/// A store with these settings.
pub fn store(url: String) -> RedisStore {
    RedisStore::new(&settings(url)).unwrap()
}

/// A store that gives up sooner.
pub fn impatient(url: String, timeout: Duration) -> RedisStore {
    let mut settings = settings(url);
    settings.command_timeout = timeout;
    RedisStore::new(&settings).unwrap()
}

/// The fields of the group's hash on the server.
pub fn stored(server: &RedisServer) -> RawFields {
    server.run(&["HGETALL", METADATA]).unwrap()
}

/// A write that uses every command that *commit* knows.
pub fn full_write(revision: u64) -> Write {
    let mut write = structural("{\"full\":1}", revision);
    write.live = (0..1500).map(|number| (format!("m{number}"), "{}".to_owned())).collect();
    write.removed_live = vec!["gone".into()];
    write.history = Some("{}".into());
    write
}
