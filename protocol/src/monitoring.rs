//! What the monitoring reads of Redis streams answer (protocol 8).
//!
//! Everything here is for people and dashboards and decides nothing. What is not known is `null`, never 0.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::Error as _;
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

use crate::admin::{GroupState, MemberState};
use crate::heartbeat::ShardRef;
use crate::resharding::DrainWait;
use crate::time::Timestamp;

/// The id of a record in a Redis stream: `milliseconds-sequence`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordId {
    /// The first number; mostly, not always, the time of the record.
    pub milliseconds: u64,
    /// Tells records of one millisecond apart.
    pub sequence: u64,
}

/// Why a text is no record id.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is no record id: write milliseconds-sequence, e.g. 1700000000000-0")]
pub struct RecordIdError(String);

impl RecordId {
    /// Below every record.
    pub const MIN: RecordId = RecordId { milliseconds: 0, sequence: 0 };
    /// The highest there can be.
    pub const MAX: RecordId = RecordId { milliseconds: u64::MAX, sequence: u64::MAX };

    /// The id above this one; `None` above the highest.
    #[must_use]
    pub fn next(self) -> Option<RecordId> {
        match self.sequence.checked_add(1) {
            Some(sequence) => Some(RecordId { sequence, ..self }),
            None => Some(RecordId { milliseconds: self.milliseconds.checked_add(1)?, sequence: 0 }),
        }
    }

    /// The id below this one; `None` below the lowest.
    #[must_use]
    pub fn previous(self) -> Option<RecordId> {
        match self.sequence.checked_sub(1) {
            Some(sequence) => Some(RecordId { sequence, ..self }),
            None => Some(RecordId { milliseconds: self.milliseconds.checked_sub(1)?, sequence: u64::MAX }),
        }
    }
}

/// A number as Redis writes one: digits only.
fn number(digits: &str) -> Option<u64> {
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

impl FromStr for RecordId {
    type Err = RecordIdError;

    fn from_str(text: &str) -> Result<Self, RecordIdError> {
        let parts = text.split_once('-').and_then(|(milliseconds, sequence)| {
            Some(RecordId { milliseconds: number(milliseconds)?, sequence: number(sequence)? })
        });
        // What was sent is not sent back whole.
        parts.ok_or_else(|| RecordIdError(text.chars().take(50).collect()))
    }
}

impl fmt::Display for RecordId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}-{}", self.milliseconds, self.sequence)
    }
}

impl Serialize for RecordId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RecordId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// A name or a value of a record's field: any bytes. In JSON a string where they are UTF-8, else the object
/// `{"base64": "…"}` (standard alphabet, padded), so that nothing is lost.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct FieldText(pub Vec<u8>);

impl Serialize for FieldText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Ok(text) = std::str::from_utf8(&self.0) {
            return serializer.serialize_str(text);
        }
        let mut object = serializer.serialize_map(Some(1))?;
        object.serialize_entry("base64", &STANDARD.encode(&self.0))?;
        object.end()
    }
}

impl<'de> Deserialize<'de> for FieldText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Text(String),
            Bytes { base64: String },
        }
        Ok(FieldText(match Written::deserialize(deserializer)? {
            Written::Text(text) => text.into_bytes(),
            Written::Bytes { base64 } => STANDARD.decode(base64).map_err(D::Error::custom)?,
        }))
    }
}

/// Answer of `GET …/offsets`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OffsetsResponse {
    /// The stream prefix.
    pub stream_prefix: String,
    /// The consumer group.
    pub consumer_group: String,
    /// The version of the record that says which shards there are and whose they are.
    pub metadata_version: u64,
    /// The count producers route with.
    pub shard_count: u32,
    /// Shards that nobody reads any more and that hold records some consumer group has not read.
    pub unread_deprecated_shards: Vec<ShardRef>,
    /// Every shard that consumers read, removed ones that a migration names, and further ones whose streams
    /// exist; ascending.
    pub shards: Vec<ShardOffsets>,
}

/// One shard's stream, and how far it has been read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShardOffsets {
    /// 0-based.
    pub shard_index: u32,
    /// Its stream key.
    pub stream_key: String,
    /// The key's cluster slot.
    pub redis_slot: u16,
    /// Producers are told to write to it.
    pub routed: bool,
    /// Consumers are told to read it.
    pub consumed: bool,
    /// The live member that holds it.
    pub owner: Option<String>,
    /// Whether the key exists.
    pub exists: bool,
    /// `stream`; anything else is in the way.
    pub key_type: Option<String>,
    /// Records in the stream.
    pub length: Option<u64>,
    /// The oldest record.
    pub first_id: Option<RecordId>,
    /// The newest record.
    pub last_id: Option<RecordId>,
    /// The newest record there has ever been.
    pub last_generated_id: Option<RecordId>,
    /// Bytes of Redis' memory.
    pub memory_bytes: Option<u64>,
    /// This group's cursor: the last record delivered.
    pub cursor: Option<RecordId>,
    /// This group's records delivered and not acknowledged, those included that exist no longer.
    pub pending: Option<u64>,
    /// What Redis says about how many records are undelivered, a hint: after deletions it is unknown, or wrong for ever.
    pub lag: Option<u64>,
    /// Records behind this group's cursor, counted up to a limit.
    pub undelivered: Option<u64>,
    /// There may be more than `undelivered`.
    pub undelivered_is_at_least: bool,
    /// Every Redis consumer group on the key, coordinated or not.
    pub groups: Vec<GroupOffsets>,
    /// Where producers are not told to write (any more): every Redis consumer group that has not read, or not
    /// acknowledged, all of it.
    pub unread: Vec<DrainWait>,
}

/// How far one Redis consumer group has read one shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupOffsets {
    /// The Redis consumer group.
    pub consumer_group: String,
    /// The last record delivered.
    pub cursor: RecordId,
    /// Records delivered and not acknowledged, those included that exist no longer.
    pub pending: u64,
    /// As in [`ShardOffsets::lag`].
    pub lag: Option<u64>,
    /// Consumers that the group remembers.
    pub consumers: u64,
}

/// Answer of `GET …/consumption`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConsumptionResponse {
    /// The stream prefix.
    pub stream_prefix: String,
    /// The consumer group.
    pub consumer_group: String,
    /// The group's state.
    pub state: GroupState,
    /// The version of the record.
    pub metadata_version: u64,
    /// When the record was last written, by the store's clock.
    pub updated_at: Timestamp,
    /// Live members, by id.
    pub members: Vec<MemberConsumption>,
    /// Shards that no live member holds.
    pub unowned_shards: Vec<ShardConsumption>,
    /// Sums over all shards.
    pub totals: ConsumptionTotals,
}

/// What one member reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberConsumption {
    /// The member.
    pub member_id: String,
    /// Its name for people.
    pub member_name: Option<String>,
    /// Its state.
    pub state: MemberState,
    /// When it was last heard.
    pub last_heartbeat_at: Timestamp,
    /// Every shard that it holds.
    pub shards: Vec<ShardConsumption>,
    /// Sums over its shards.
    pub totals: ConsumptionTotals,
}

/// One shard: what its reader says, and what Redis says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShardConsumption {
    /// 0-based.
    pub shard_index: u32,
    /// Its stream key.
    pub stream_key: String,
    /// The member reports to read it; otherwise it has yet to start, or drains.
    pub reading: bool,
    /// The last record delivered to the application, as the member last reported.
    pub last_delivered_id: Option<String>,
    /// The last record acknowledged, as the member last reported.
    pub last_acked_id: Option<String>,
    /// Records delivered and not acknowledged, as the member last reported; `null`: it reports none.
    pub reported_pending: Option<u64>,
    /// When the member measured that, by its own clock.
    pub reported_at: Option<Timestamp>,
    /// Pending entries of the group in Redis; `null`: there is no such stream or group.
    pub redis_pending: Option<u64>,
    /// The same by Redis consumer.
    pub redis_consumers: Vec<ConsumerPending>,
}

/// The pending entries of one Redis consumer. Its name is the client's choice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConsumerPending {
    /// The Redis consumer.
    pub consumer: String,
    /// Its pending entries.
    pub pending: u64,
}

/// Sums over shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConsumptionTotals {
    /// How many shards.
    pub shards: u64,
    /// What members report; `null`: none of them does.
    pub reported_pending: Option<u64>,
    /// What Redis says, of the shards for which it does; `null`: of none.
    pub redis_pending: Option<u64>,
}

/// In which order records are shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecordOrder {
    /// Oldest first.
    #[default]
    Asc,
    /// Newest first.
    Desc,
}

/// Answer of `GET …/shards/{i}/messages`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MessagesResponse {
    /// The stream prefix.
    pub stream_prefix: String,
    /// The consumer group.
    pub consumer_group: String,
    /// The shard.
    pub shard_index: u32,
    /// Its stream key.
    pub stream_key: String,
    /// Whether the key exists.
    pub exists: bool,
    /// `stream`; anything else has no records.
    pub key_type: Option<String>,
    /// The order of `messages`.
    pub order: RecordOrder,
    /// The records.
    pub messages: Vec<Message>,
    /// Where the next page begins, exclusive: send it as `from` where the order is `asc`, as `to` where it is `desc`,
    /// and the rest as before. `null`: there is none.
    pub next: Option<String>,
}

/// One record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Message {
    /// Its id.
    pub id: RecordId,
    /// Names and values, in the record's order; a name may occur again.
    pub fields: Vec<(FieldText, FieldText)>,
}

/// Answer of `GET …/history`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HistoryResponse {
    /// The stream prefix.
    pub stream_prefix: String,
    /// The consumer group.
    pub consumer_group: String,
    /// What happened, newest first.
    pub entries: Vec<HistoryEntry>,
    /// Where the next page begins: send it as `before`. `null`: there is none.
    pub next: Option<RecordId>,
}

/// One transition of a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HistoryEntry {
    /// Its id.
    pub id: RecordId,
    /// What was written: an object, or a string where somebody else wrote something else.
    pub entry: serde_json::Value,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn record_ids_are_read_strictly() {
        for (text, id) in [("0-0", (0, 0)), ("17-3", (17, 3)), ("18446744073709551615-0", (u64::MAX, 0))] {
            let (milliseconds, sequence) = id;
            let id = RecordId { milliseconds, sequence };
            assert_eq!((text.parse(), id.to_string()), (Ok(id), text.to_owned()));
        }
        for text in [
            "",
            "1",
            "-",
            "+",
            "$",
            "1-",
            "-1",
            "1-2-3",
            "+1-2",
            "1-+2",
            " 1-2",
            "1-2 ",
            "18446744073709551616-0",
            "٣-1",
        ] {
            assert!(text.parse::<RecordId>().is_err(), "{text}");
        }
        assert!("x".repeat(5000).parse::<RecordId>().unwrap_err().to_string().len() < 200);
    }

    #[test]
    fn ids_have_neighbours() {
        let id = |text: &str| text.parse::<RecordId>().unwrap();
        for (low, high) in [("0-0", "0-1"), ("5-18446744073709551615", "6-0")] {
            assert_eq!((id(low).next(), id(high).previous()), (Some(id(high)), Some(id(low))));
            assert!(id(low) < id(high));
        }
        assert_eq!((RecordId::MAX.next(), RecordId::MIN.previous()), (None, None));
    }

    #[test]
    fn bytes_of_every_kind_survive() {
        for (bytes, shown) in [
            (b"plain".to_vec(), json!("plain")),
            ("주문\u{0}".into(), json!("주문\u{0}")),
            (vec![0xff, 0x00], json!({"base64": "/wA="})),
            (vec![], json!("")),
        ] {
            let text = FieldText(bytes);
            assert_eq!(serde_json::to_value(&text).unwrap(), shown);
            assert_eq!(serde_json::from_value::<FieldText>(shown).unwrap(), text);
        }
        assert!(serde_json::from_value::<FieldText>(json!({"base64": "?"})).is_err());
    }
}
