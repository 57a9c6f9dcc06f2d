//! The part of Redis' data model that the coordinator uses: keys with a type and perhaps a TTL.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rsc_core::RawFields;
use rsc_protocol::Timestamp;
use rsc_protocol::monitoring::RecordId;

/// What a key holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A string: a mutex.
    Text(Vec<u8>),
    /// A hash: a group's metadata, or a tombstone.
    Hash(RawFields),
    /// A set: the index.
    Set(BTreeSet<String>),
    /// A stream: a history, oldest entry first.
    Stream(VecDeque<(RecordId, String)>),
}

impl Content {
    /// What Redis' `TYPE` says.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Content::Text(_) => "string",
            Content::Hash(_) => "hash",
            Content::Set(_) => "set",
            Content::Stream(_) => "stream",
        }
    }
}

#[derive(Clone, Debug)]
struct Entry {
    content: Content,
    expires_at: Option<Timestamp>,
}

/// Keys and what they hold.
#[derive(Clone, Debug, Default)]
pub struct Keyspace {
    entries: BTreeMap<String, Entry>,
    now: Timestamp,
}

impl Keyspace {
    /// Moves on to `now`: what expires then or earlier goes.
    pub(super) fn set_now(&mut self, now: Timestamp) {
        self.now = now;
        self.entries.retain(|_, entry| entry.expires_at.is_none_or(|expires_at| expires_at > now));
    }

    /// What `key` holds.
    #[must_use]
    pub fn content(&self, key: &str) -> Option<&Content> {
        self.entries.get(key).map(|entry| &entry.content)
    }

    /// Replaces what `key` holds; a TTL is gone.
    pub fn set(&mut self, key: &str, content: Content) {
        self.entries.insert(key.to_owned(), Entry { content, expires_at: None });
    }

    /// Removes `key`; returns what it held.
    pub fn remove(&mut self, key: &str) -> Option<Content> {
        self.entries.remove(key).map(|entry| entry.content)
    }

    /// Every key, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The fields of the hash under `key`, if it is one.
    pub fn hash_mut(&mut self, key: &str) -> Option<&mut RawFields> {
        match self.entries.get_mut(key).map(|entry| &mut entry.content) {
            Some(Content::Hash(fields)) => Some(fields),
            _ => None,
        }
    }

    /// The set under `key`, made if there is none; `None` when the key holds something else.
    pub fn set_mut(&mut self, key: &str) -> Option<&mut BTreeSet<String>> {
        match &mut self.entry_or(key, || Content::Set(BTreeSet::new())).content {
            Content::Set(members) => Some(members),
            _ => None,
        }
    }

    /// Appends to the stream under `key`, of which the newest `most` entries stay. `false`: the key holds
    /// something else.
    pub fn append(&mut self, key: &str, text: &str, most: usize) -> bool {
        let now = RecordId { milliseconds: self.now.as_millis().try_into().unwrap_or_default(), sequence: 0 };
        let Content::Stream(entries) = &mut self.entry_or(key, || Content::Stream(VecDeque::new())).content
        else {
            return false;
        };
        let behind = entries.back().and_then(|(last, _)| last.next());
        entries.push_back((behind.map_or(now, |behind| behind.max(now)), text.to_owned()));
        while entries.len() > most {
            entries.pop_front();
        }
        true
    }

    fn entry_or(&mut self, key: &str, make: impl FnOnce() -> Content) -> &mut Entry {
        self.entries.entry(key.to_owned()).or_insert_with(|| Entry { content: make(), expires_at: None })
    }

    /// Gives `key` a TTL in milliseconds.
    pub fn expire_in(&mut self, key: &str, ttl_ms: i64) {
        let expires_at = self.now.plus(ttl_ms);
        if let Some(entry) = self.entries.get_mut(key) {
            entry.expires_at = Some(expires_at);
        }
    }

    /// What is left of the TTL of `key` in milliseconds, if it has one.
    #[must_use]
    pub fn ttl_ms(&self, key: &str) -> Option<i64> {
        self.entries.get(key)?.expires_at.map(|expires_at| expires_at.since(self.now))
    }

    /// Removes the TTL of `key`; `false` when it had none.
    pub fn persist(&mut self, key: &str) -> bool {
        self.entries.get_mut(key).is_some_and(|entry| entry.expires_at.take().is_some())
    }
}
