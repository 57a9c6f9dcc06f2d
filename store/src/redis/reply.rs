//! Takes apart what the scripts answer. Whatever does not look as the scripts make it is
//! [`StoreError::Unexpected`]: another program's proxy, or a server that is no Redis.

use ::redis::Value;
use rsc_core::RawFields;
use rsc_protocol::Timestamp;

use crate::fields::tombstone_of;
use crate::types::{Conflict, Entered, Found, StoreError};

/// What *commit*, *create* and *delete* answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wrote {
    /// Written.
    Applied {
        /// The key carried a TTL, which is gone now.
        ttl_removed: bool,
        /// Why the history entry could not be written; empty when it was, or when there was none.
        history_error: String,
    },
    /// Not written.
    Conflict(Conflict),
}

/// The items of one script's answer, taken one after the other.
#[derive(Debug)]
pub(super) struct Reply {
    items: std::vec::IntoIter<Value>,
}

impl Reply {
    /// Reads a script's answer: its first item, which says what kind it is, and the rest. An answer that
    /// says that the mutex key holds something else is an error that names the key.
    pub(super) fn of(value: Value, mutex: &str) -> Result<(String, Self), StoreError> {
        let Value::Array(items) = value else {
            return Err(unexpected("a script's answer is no list"));
        };
        let mut reply = Reply { items: items.into_iter() };
        let kind = reply.text()?;
        if kind == "mutex_type" {
            let found = reply.text()?;
            return Err(StoreError::Refused(format!("key {mutex} holds a {found}, not a mutex: remove it")));
        }
        Ok((kind, reply))
    }

    fn next(&mut self) -> Result<Value, StoreError> {
        self.items.next().ok_or_else(|| unexpected("a script's answer is too short"))
    }

    /// The next item as text.
    pub(super) fn text(&mut self) -> Result<String, StoreError> {
        text(self.next()?)
    }

    fn flag(&mut self) -> Result<bool, StoreError> {
        match self.next()? {
            Value::Int(number) => Ok(number != 0),
            _ => Err(unexpected("a script's answer has no number where one belongs")),
        }
    }

    fn now(&mut self) -> Result<Timestamp, StoreError> {
        let (seconds, microseconds) = (self.next()?, self.next()?);
        time([seconds, microseconds])
    }

    fn fields(&mut self) -> Result<RawFields, StoreError> {
        let pairs = self
            .next()?
            .into_map_iter()
            .map_err(|_| unexpected("a script's answer has no fields where they belong"))?;
        pairs
            .map(|(name, value)| match value {
                Value::BulkString(bytes) => Ok((text(name)?, bytes)),
                _ => Err(unexpected("a field is no bytes")),
            })
            .collect()
    }
}

/// What *enter* answered.
pub(super) fn entered(value: Value, mutex: &str) -> Result<Entered, StoreError> {
    let (kind, mut reply) = Reply::of(value, mutex)?;
    if kind == "busy" {
        return Ok(Entered::Busy { holder: reply.text()? });
    }
    if kind == "unchanged" {
        return Ok(Entered::Unchanged { now: reply.now()?, has_ttl: reply.flag()? });
    }
    Ok(match state(&kind, &mut reply)? {
        Found::Record { now, fields, has_ttl } => Entered::Loaded { now, fields, has_ttl },
        Found::Missing { now, tombstone } => Entered::Missing { now, tombstone },
        Found::WrongType { now, found } => Entered::WrongType { now, found },
    })
}

/// What *read* answered.
pub(super) fn found(value: Value) -> Result<Found, StoreError> {
    let (kind, mut reply) = Reply::of(value, "")?;
    state(&kind, &mut reply)
}

fn state(kind: &str, reply: &mut Reply) -> Result<Found, StoreError> {
    let now = reply.now()?;
    match kind {
        "loaded" => {
            let has_ttl = reply.flag()?;
            Ok(Found::Record { now, fields: reply.fields()?, has_ttl })
        }
        "missing" => Ok(Found::Missing { now, tombstone: tombstone_of(&reply.fields()?) }),
        "wrong_type" => Ok(Found::WrongType { now, found: reply.text()? }),
        other => Err(unexpected(&format!("a script answered {other:?}"))),
    }
}

/// What *commit*, *create* or *delete* answered.
pub(super) fn wrote(value: Value, mutex: &str) -> Result<Wrote, StoreError> {
    let (kind, mut reply) = Reply::of(value, mutex)?;
    match kind.as_str() {
        "applied" => Ok(Wrote::Applied { ttl_removed: reply.flag()?, history_error: reply.text()? }),
        "conflict" => Ok(Wrote::Conflict(match reply.text()?.as_str() {
            "moved" => Conflict::Moved,
            "mutex_lost" => Conflict::MutexLost,
            "missing" => Conflict::Missing,
            "wrong_type" => Conflict::WrongType,
            "exists" => Conflict::Exists,
            "tombstone_moved" => Conflict::TombstoneMoved,
            other => return Err(unexpected(&format!("a script reported the conflict {other:?}"))),
        })),
        other => Err(unexpected(&format!("a script answered {other:?}"))),
    }
}

/// Reads what `TIME` answers: seconds and microseconds.
pub(super) fn time(parts: [Value; 2]) -> Result<Timestamp, StoreError> {
    let mut numbers = [0_i64; 2];
    for (number, part) in numbers.iter_mut().zip(parts) {
        *number = text(part)?.parse().map_err(|_| unexpected("the time is no number"))?;
    }
    let [seconds, microseconds] = numbers;
    Ok(Timestamp::from_millis(seconds.saturating_mul(1000).saturating_add(microseconds / 1000)))
}

/// Reads a whole answer to `TIME`.
pub(super) fn times(answer: Value) -> Result<Timestamp, StoreError> {
    let parts = answer.into_sequence().map_err(|_| unexpected("the time is no list"))?;
    time(parts.try_into().map_err(|_| unexpected("the time has not two parts"))?)
}

/// A text; bytes that are no UTF-8 are replaced.
pub(super) fn text(value: Value) -> Result<String, StoreError> {
    match value {
        Value::BulkString(bytes) => Ok(String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())),
        Value::SimpleString(text) => Ok(text),
        Value::Int(number) => Ok(number.to_string()),
        Value::Okay => Ok("OK".to_owned()),
        _ => Err(unexpected("an answer has no text where one belongs")),
    }
}

/// An answer that this version does not understand.
pub(super) fn unexpected(what: &str) -> StoreError {
    StoreError::Unexpected(what.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    #[test]
    fn what_no_script_says_is_unexpected_and_no_panic() {
        let answers = [
            Value::Nil,
            Value::Okay,
            Value::Array(vec![]),
            Value::Array(vec![Value::Nil]),
            Value::Array(vec![bulk("loaded")]),
            Value::Array(vec![bulk("loaded"), bulk("x"), bulk("0"), Value::Int(0), Value::Array(vec![])]),
            Value::Array(vec![bulk("loaded"), bulk("1"), bulk("0"), bulk("0"), Value::Array(vec![])]),
            Value::Array(vec![
                bulk("loaded"),
                bulk("1"),
                bulk("0"),
                Value::Int(0),
                Value::Array(vec![bulk("f")]),
            ]),
            Value::Array(vec![bulk("gone"), bulk("1"), bulk("0")]),
            Value::Array(vec![bulk("conflict"), bulk("weather")]),
            Value::Array(vec![bulk("applied"), bulk("0")]),
        ];
        for answer in answers {
            assert!(matches!(entered(answer.clone(), "m"), Err(StoreError::Unexpected(_))), "{answer:?}");
            assert!(matches!(found(answer.clone()), Err(StoreError::Unexpected(_))), "{answer:?}");
            assert!(matches!(wrote(answer.clone(), "m"), Err(StoreError::Unexpected(_))), "{answer:?}");
        }
    }

    #[test]
    fn fields_are_bytes() {
        let pairs = vec![bulk("aggregate"), Value::BulkString(vec![0, 255, 10])];
        let answer =
            Value::Array(vec![bulk("loaded"), bulk("1"), bulk("999"), Value::Int(1), Value::Array(pairs)]);
        let Ok(Found::Record { now, fields, has_ttl }) = found(answer) else { panic!("no record") };
        assert_eq!((now.as_millis(), has_ttl), (1000, true));
        assert_eq!(fields["aggregate"], [0, 255, 10]);
    }
}
