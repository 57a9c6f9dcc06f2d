//! Hands that reach behind a store's back, the same for Redis and memory, and the two worlds that the
//! behaviour suite runs in.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use redis::Commands;
use redis::streams::StreamRangeReply;
use rsc_core::RawFields;
use rsc_protocol::keys::Keys;
use rsc_store::memory::Content;
use rsc_store::{GroupStore, MemoryStore, RedisSettings, RedisStore};

use super::server::RedisServer;

/// A store and hands on its content.
pub struct World {
    pub store: Arc<dyn GroupStore>,
    pub keys: Keys,
    hands: Hands,
}

enum Hands {
    Redis(RedisServer),
    Memory(MemoryStore),
}

impl World {
    /// On a redis-server of its own.
    pub fn redis(mutex_ttl: Duration) -> Self {
        let server = RedisServer::start();
        let mut settings = RedisSettings::new(server.url());
        settings.mutex_ttl = mutex_ttl;
        settings.command_timeout = Duration::from_secs(20);
        settings.connect_timeout = Duration::from_secs(20);
        let store = RedisStore::new(&settings).unwrap();
        World { store: Arc::new(store), keys: settings.keys, hands: Hands::Redis(server) }
    }

    /// In this process, on the system's clock.
    pub fn memory(mutex_ttl: Duration) -> Self {
        let keys = Keys::default();
        let store = MemoryStore::new(keys.clone(), mutex_ttl);
        World { store: Arc::new(store.clone()), keys, hands: Hands::Memory(store) }
    }

    /// The server behind it, if there is one.
    pub fn server(&self) -> Option<&RedisServer> {
        match &self.hands {
            Hands::Redis(server) => Some(server),
            Hands::Memory(_) => None,
        }
    }

    /// Writes a hash anew.
    pub fn put_hash(&self, key: &str, fields: &[(&str, &[u8])]) {
        match &self.hands {
            Hands::Redis(server) => {
                let mut connection = server.connection();
                let () = connection.del(key).unwrap();
                let () = connection.hset_multiple(key, fields).unwrap();
            }
            Hands::Memory(store) => {
                let fields = fields.iter().map(|(name, value)| ((*name).to_owned(), value.to_vec()));
                store.edit(|keyspace| keyspace.set(key, Content::Hash(fields.collect())));
            }
        }
    }

    /// Writes a string.
    pub fn put_text(&self, key: &str, text: &str) {
        match &self.hands {
            Hands::Redis(server) => server.connection().set(key, text).unwrap(),
            Hands::Memory(store) => {
                store.edit(|keyspace| keyspace.set(key, Content::Text(text.as_bytes().to_vec())));
            }
        }
    }

    /// Sets one field of a hash; `None` removes it.
    pub fn put_field(&self, key: &str, name: &str, text: Option<&str>) {
        match &self.hands {
            Hands::Redis(server) => match text {
                Some(text) => server.connection().hset(key, name, text).unwrap(),
                None => server.connection().hdel(key, name).unwrap(),
            },
            Hands::Memory(store) => store.edit(|keyspace| {
                let fields = keyspace.hash_mut(key).unwrap();
                match text {
                    Some(text) => fields.insert(name.to_owned(), text.as_bytes().to_vec()),
                    None => fields.remove(name),
                };
            }),
        }
    }

    /// Removes a key.
    pub fn remove(&self, key: &str) {
        match &self.hands {
            Hands::Redis(server) => server.connection().del(key).unwrap(),
            Hands::Memory(store) => {
                store.edit(|keyspace| keyspace.remove(key));
            }
        }
    }

    /// Gives a key a TTL.
    pub fn expire_in(&self, key: &str, ttl: Duration) {
        let ttl_ms = i64::try_from(ttl.as_millis()).unwrap();
        match &self.hands {
            Hands::Redis(server) => server.connection().pexpire(key, ttl_ms).unwrap(),
            Hands::Memory(store) => store.edit(|keyspace| keyspace.expire_in(key, ttl_ms)),
        }
    }

    /// What is left of a key's TTL in milliseconds, if it has one.
    pub fn ttl_ms(&self, key: &str) -> Option<i64> {
        match &self.hands {
            Hands::Redis(server) => {
                let left: i64 = server.connection().pttl(key).unwrap();
                (left >= 0).then_some(left)
            }
            Hands::Memory(store) => store.edit(|keyspace| keyspace.ttl_ms(key)),
        }
    }

    /// What `TYPE` says; `none` when there is no such key.
    pub fn kind(&self, key: &str) -> String {
        match &self.hands {
            Hands::Redis(server) => server.run(&["TYPE", key]).unwrap(),
            Hands::Memory(store) => {
                store.edit(|keyspace| keyspace.content(key).map_or("none", Content::kind).to_owned())
            }
        }
    }

    /// The fields of a hash; none when there is no such key.
    pub fn hash(&self, key: &str) -> RawFields {
        match &self.hands {
            Hands::Redis(server) => server.connection().hgetall(key).unwrap(),
            Hands::Memory(store) => {
                store.edit(|keyspace| keyspace.hash_mut(key).map(|fields| fields.clone()).unwrap_or_default())
            }
        }
    }

    /// A field of a hash as text.
    pub fn field(&self, key: &str, name: &str) -> Option<String> {
        self.hash(key).get(name).map(|bytes| String::from_utf8(bytes.clone()).unwrap())
    }

    /// The entries of a history, oldest first.
    pub fn history(&self, key: &str) -> Vec<String> {
        match &self.hands {
            Hands::Redis(server) => {
                let entries: StreamRangeReply = server.connection().xrange_all(key).unwrap();
                entries.ids.iter().map(|entry| entry.get("entry").unwrap()).collect()
            }
            Hands::Memory(store) => store.edit(|keyspace| match keyspace.content(key) {
                Some(Content::Stream(entries)) => entries.iter().map(|(_, text)| text.clone()).collect(),
                _ => VecDeque::new().into(),
            }),
        }
    }
}
