//! Instants on the wire: ISO-8601 in UTC, milliseconds inside (protocol 2).

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Milliseconds since the Unix epoch, read from Redis `TIME`; on the wire an ISO-8601 UTC string.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

impl Timestamp {
    /// The largest instant kept, 9999-12-30T00:00:00Z: what ISO-8601 with four digits can write everywhere.
    pub const MAX: Timestamp = Timestamp(253_402_128_000_000);
    /// The smallest one, kept at the epoch: nothing here happened before 1970.
    pub const MIN: Timestamp = Timestamp(0);

    /// From milliseconds since the epoch; clamped to `MIN..=MAX`.
    #[must_use]
    pub fn from_millis(millis: i64) -> Self {
        Timestamp(millis.clamp(Self::MIN.0, Self::MAX.0))
    }

    /// Milliseconds since the epoch, never negative.
    #[must_use]
    pub fn as_millis(self) -> i64 {
        self.0
    }

    /// This instant plus `millis` (≥ 0 or negative), clamped to the range.
    #[must_use]
    pub fn plus(self, millis: i64) -> Self {
        Self::from_millis(self.0.saturating_add(millis))
    }

    /// Milliseconds from `earlier` to this instant; negative when this one is earlier.
    #[must_use]
    pub fn since(self, earlier: Timestamp) -> i64 {
        self.0 - earlier.0
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match jiff::Timestamp::from_millisecond(self.0) {
            Ok(instant) => write!(formatter, "{instant:.3}"),
            Err(_) => write!(formatter, "{}ms", self.0),
        }
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Timestamp;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an ISO-8601 UTC instant such as 2026-01-31T12:00:00Z")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Timestamp, E> {
                text.parse::<jiff::Timestamp>()
                    .map(|instant| Timestamp::from_millis(instant.as_millisecond()))
                    .map_err(|_| E::invalid_value(de::Unexpected::Str(text), &self))
            }
        }
        deserializer.deserialize_str(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_and_reads_iso_8601_utc() {
        let instant = Timestamp::from_millis(1_700_000_000_123);
        let text = serde_json::to_string(&instant).unwrap();
        assert_eq!(text, "\"2023-11-14T22:13:20.123Z\"");
        assert_eq!(serde_json::from_str::<Timestamp>(&text).unwrap(), instant);
    }

    #[test]
    fn reads_what_other_implementations_write() {
        for (text, millis) in [
            ("\"2023-11-14T22:13:20Z\"", 1_700_000_000_000),
            ("\"2023-11-14T22:13:20.123456789Z\"", 1_700_000_000_123),
            ("\"2023-11-14T23:13:20+01:00\"", 1_700_000_000_000),
        ] {
            assert_eq!(serde_json::from_str::<Timestamp>(text).unwrap().as_millis(), millis, "{text}");
        }
    }

    #[test]
    fn refuses_what_is_no_instant() {
        for text in ["\"yesterday\"", "12", "\"\"", "null"] {
            assert!(serde_json::from_str::<Timestamp>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn extremes_survive_the_round_trip() {
        for instant in [Timestamp::MIN, Timestamp::MAX, Timestamp::from_millis(i64::MAX)] {
            let text = serde_json::to_string(&instant).unwrap();
            assert_eq!(serde_json::from_str::<Timestamp>(&text).unwrap(), instant, "{text}");
        }
    }
}
