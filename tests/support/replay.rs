//! A group's history read as what it says: every transition once, in order, and what they come to is the record.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use rsc_protocol::GroupKey;
use rsc_protocol::keys::Keys;
use serde_json::Value;

use super::redis_server::RedisServer;

/// A live member as far as the history tells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) is_leaving: bool,
    pub(crate) shards: BTreeSet<u64>,
}

/// What the entries so far come to. Fails on an entry that does not fit: one that was lost, written twice, or decided
/// on a state that was no longer the stored one. Not for groups in which a correction round takes shards away.
#[derive(Clone, Debug, Default)]
pub(crate) struct Replay {
    pub(crate) version: u64,
    pub(crate) group_epoch: u64,
    pub(crate) live: BTreeMap<String, Holder>,
    /// How often each transition came: `GRANTED`, `MEMBER_GONE LEASE_EXPIRED` …
    pub(crate) counts: BTreeMap<String, usize>,
}

impl Replay {
    /// Begins in the middle, with a state that was read.
    pub(crate) fn from_record(aggregate: &Value) -> Self {
        let number = |field: &str| aggregate[field].as_u64().unwrap();
        Replay {
            version: number("metadataVersion"),
            group_epoch: number("groupEpoch"),
            live: live_members(aggregate),
            counts: BTreeMap::new(),
        }
    }

    /// Reads the whole history, which must not have been trimmed yet, and demands that it comes to the record.
    pub(crate) async fn whole(redis: &RedisServer, group: &GroupKey) -> Self {
        let keys = Keys::default();
        let (metadata, history) = (keys.metadata(group), keys.history(group));
        let mut look = redis::pipe();
        look.atomic().cmd("HGET").arg(metadata).arg("aggregate");
        look.cmd("XRANGE").arg(history).arg("-").arg("+");
        let (aggregate, entries): (String, Entries) =
            look.query_async(&mut redis.connection().await).await.unwrap();
        let mut replay = Replay::default();
        for (_, fields) in &entries {
            replay.apply(&entry(fields));
        }
        replay.expect_is(&serde_json::from_str(&aggregate).unwrap());
        replay
    }

    /// How often a transition came.
    pub(crate) fn count(&self, transition: &str) -> usize {
        self.counts.get(transition).copied().unwrap_or(0)
    }

    /// Whoever went otherwise than by leaving, and how.
    pub(crate) fn thrown_out(&self) -> BTreeMap<&str, usize> {
        let gone = self.counts.iter().filter(|(name, _)| {
            (name.starts_with("MEMBER_GONE") && *name != "MEMBER_GONE LEFT") || *name == "MEMBER_SUPERSEDED"
        });
        gone.map(|(name, count)| (name.as_str(), *count)).collect()
    }

    /// The next entry.
    pub(crate) fn apply(&mut self, entry: &Value) {
        let number = |field: &str| entry[field].as_u64().unwrap();
        assert_eq!(number("metadataVersion"), self.version + 1, "after version {}: {entry}", self.version);
        assert!(number("groupEpoch") >= self.group_epoch, "epoch {} came before: {entry}", self.group_epoch);
        (self.version, self.group_epoch) = (number("metadataVersion"), number("groupEpoch"));
        for transition in entry["transitions"].as_array().unwrap() {
            self.transition(transition).unwrap_or_else(|why| panic!("{why}: {entry} on {:?}", self.live));
        }
    }

    fn transition(&mut self, transition: &Value) -> Result<(), &'static str> {
        let text = |field: &str| transition[field].as_str().unwrap();
        let kind = text("type");
        let name = match transition["cause"].as_str() {
            Some(cause) => format!("{kind} {cause}"),
            None => kind.to_owned(),
        };
        *self.counts.entry(name).or_default() += 1;
        match kind {
            "MEMBER_JOINED" | "MEMBER_REJOINED" => {
                let before = self.live.insert(text("memberId").to_owned(), Holder::default());
                before.is_none().then_some(()).ok_or("it was a live member already")
            }
            "MEMBER_LEAVING" => {
                let member = self.member(transition)?;
                let was_leaving = std::mem::replace(&mut member.is_leaving, true);
                (!was_leaving).then_some(()).ok_or("it was leaving already")
            }
            "MEMBER_RESTARTED" => {
                *self.member(transition)? = Holder::default();
                Ok(())
            }
            "MEMBER_SUPERSEDED" => {
                let before = std::mem::take(self.member(transition)?);
                (before.shards == shards(text("held"))).then_some(()).ok_or("it held something else")
            }
            "MEMBER_GONE" => {
                let before = self.live.remove(text("memberId")).ok_or("no live member")?;
                (before.shards == shards(text("held"))).then_some(()).ok_or("it held something else")
            }
            "RELEASED" => {
                let member = self.member(transition)?;
                let all_held = shards(text("shards")).iter().all(|shard| member.shards.remove(shard));
                all_held.then_some(()).ok_or("it did not hold all of them")
            }
            "GRANTED" => {
                let granted = shards(text("shards"));
                let others = self.live.iter().filter(|(id, _)| *id != text("memberId"));
                if others.flat_map(|(_, other)| &other.shards).any(|held| granted.contains(held)) {
                    return Err("somebody else holds one of them");
                }
                self.member(transition)?.shards.extend(granted);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn member(&mut self, transition: &Value) -> Result<&mut Holder, &'static str> {
        self.live.get_mut(transition["memberId"].as_str().unwrap()).ok_or("no live member")
    }

    /// Demands that this is what the record says.
    pub(crate) fn expect_is(&self, aggregate: &Value) {
        let record = Replay::from_record(aggregate);
        assert_eq!(
            (self.version, self.group_epoch, &self.live),
            (record.version, record.group_epoch, &record.live),
            "what the history comes to, and the record"
        );
    }
}

/// Entries as `XRANGE` gives them.
pub(crate) type Entries = Vec<(String, BTreeMap<String, String>)>;

/// The JSON of an entry.
pub(crate) fn entry(fields: &BTreeMap<String, String>) -> Value {
    serde_json::from_str(&fields["entry"]).unwrap()
}

fn live_members(aggregate: &Value) -> BTreeMap<String, Holder> {
    let index = |row: &Value| row["shardIndex"].as_u64().or_else(|| row["shard"]["shardIndex"].as_u64());
    let mut live = BTreeMap::new();
    for (id, member) in aggregate["members"].as_object().unwrap() {
        let state = member["state"].as_str().unwrap();
        if matches!(state, "STARTING" | "ACTIVE" | "LEAVING") {
            let rows = ["currentAssignment", "grantedAssignment", "revoking"];
            let rows = rows.into_iter().flat_map(|field| member[field].as_array().into_iter().flatten());
            let shards = rows.map(|row| index(row).unwrap()).collect();
            live.insert(id.clone(), Holder { is_leaving: state == "LEAVING", shards });
        }
    }
    live
}

/// `0-2,5`.
fn shards(ranges: &str) -> BTreeSet<u64> {
    let number = |text: &str| text.parse::<u64>().unwrap();
    let runs = ranges.split(',').filter(|run| !run.is_empty());
    runs.flat_map(|run| {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        number(first)..=number(last)
    })
    .collect()
}

/// Which token each version was told with, whoever told it: two tokens for one version are two histories. Clones are
/// the same.
#[derive(Clone, Default)]
pub(crate) struct Versions(Arc<Mutex<BTreeMap<u64, String>>>);

impl Versions {
    /// Somebody was told, or has read, this version.
    pub(crate) fn note(&self, version: u64, token: &str) {
        let first = self.0.lock().unwrap().entry(version).or_insert_with(|| token.to_owned()).clone();
        assert_eq!(first, token, "version {version} was told with two tokens");
    }

    /// The highest one, 0 if there is none.
    pub(crate) fn highest(&self) -> u64 {
        self.0.lock().unwrap().keys().next_back().copied().unwrap_or(0)
    }
}
