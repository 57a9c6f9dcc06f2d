//! What a server says about itself: `INFO`, `CONFIG GET`, `COMMAND INFO`. Managed servers forbid some of it; what could
//! not be asked stays unknown, with the reason.

use std::collections::BTreeMap;

use redis::Value;
use rsc_store::{RedisNode, StoreError};

use crate::tools::Redis;

/// Something that was asked, or why it could not be.
pub(super) type Known<T> = Result<T, String>;

/// One server and what it says about itself.
#[derive(Clone, Debug)]
pub(super) struct Server {
    pub(super) node: RedisNode,
    pub(super) info: Known<Info>,
    settings: BTreeMap<&'static str, Known<Option<String>>>,
}

/// The settings that are asked for.
const SETTINGS: [&str; 7] = [
    "save",
    "stop-writes-on-bgsave-error",
    "min-replicas-to-write",
    "timeout",
    "tcp-keepalive",
    "busy-reply-threshold",
    "lua-time-limit",
];

impl Server {
    /// Asks a server that answers.
    ///
    /// # Errors
    /// When it no longer does.
    pub(super) async fn ask(redis: &Redis, node: &RedisNode) -> Result<Self, StoreError> {
        let info = match redis.tools.on(node, &redis::cmd("INFO")).await {
            Ok(answer) => text(&answer).map(|text| Info::of(&text)).ok_or("INFO answers no text".to_owned()),
            Err(error) => Err(refusal(error)?),
        };
        let mut settings = BTreeMap::new();
        for name in SETTINGS {
            let answer = match redis.tools.on(node, redis::cmd("CONFIG").arg("GET").arg(name)).await {
                Ok(answer) => Ok(value_of_setting(&answer)),
                Err(error) => Err(refusal(error)?),
            };
            settings.insert(name, answer);
        }
        Ok(Server { node: node.clone(), info, settings })
    }

    /// A setting; `None` where the server has none of that name.
    pub(super) fn setting(&self, name: &'static str) -> Known<Option<&str>> {
        match self.settings.get(name) {
            Some(Ok(value)) => Ok(value.as_deref()),
            Some(Err(why)) => Err(why.clone()),
            None => Err(format!("{name} was not asked for")),
        }
    }

    pub(super) fn address(&self) -> &str {
        &self.node.address
    }
}

/// The words of a server that refused; every other failure is one of the connection.
pub(super) fn refusal(error: StoreError) -> Result<String, StoreError> {
    match error {
        StoreError::Refused(text) => Ok(text),
        other => Err(other),
    }
}

/// What `INFO` says, by name.
#[derive(Clone, Debug, Default)]
pub(super) struct Info(BTreeMap<String, String>);

impl Info {
    pub(super) fn of(text: &str) -> Self {
        let pairs = text.lines().filter_map(|line| line.trim_end().split_once(':'));
        Info(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.get(name)?.parse().ok()
    }

    /// The server's kind and version. Valkey says that it is Redis 7.2.4 whatever it is.
    pub(super) fn version(&self) -> Option<String> {
        let named =
            [("valkey_version", "valkey"), ("dragonfly_version", "dragonfly"), ("redis_version", "redis")];
        named.iter().find_map(|(field, name)| Some(format!("{name} {}", self.get(field)?)))
    }

    /// `standalone`, `cluster` or `sentinel`.
    pub(super) fn mode(&self) -> Option<&str> {
        self.get("redis_mode").or(self.get("server_mode"))
    }
}

/// Which of the commands the server does not have.
pub(super) async fn missing_commands<'c>(
    redis: &Redis,
    node: &RedisNode,
    commands: &[&'c str],
) -> Result<Known<Vec<&'c str>>, StoreError> {
    let answer = redis.tools.on(node, redis::cmd("COMMAND").arg("INFO").arg(commands)).await;
    let rows = match answer {
        Ok(answer) => answer.into_sequence().unwrap_or_default(),
        Err(error) => return Ok(Err(refusal(error)?)),
    };
    if rows.len() != commands.len() {
        return Ok(Err("COMMAND INFO does not answer for each command".to_owned()));
    }
    let has = |row: &Value| matches!(row, Value::Array(parts) if !parts.is_empty());
    Ok(Ok(commands.iter().zip(&rows).filter(|(_, row)| !has(row)).map(|(command, _)| *command).collect()))
}

/// Text of an answer.
pub(super) fn text(answer: &Value) -> Option<String> {
    match answer {
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        Value::VerbatimString { text, .. } | Value::SimpleString(text) => Some(text.clone()),
        Value::Int(number) => Some(number.to_string()),
        Value::Okay => Some("OK".to_owned()),
        _ => None,
    }
}

/// The one value of `CONFIG GET name`.
fn value_of_setting(answer: &Value) -> Option<String> {
    match answer {
        Value::Array(items) => items.get(1).and_then(text),
        Value::Map(pairs) => pairs.first().and_then(|(_, value)| text(value)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valkey_is_not_taken_for_the_redis_it_says_it_is() {
        let info =
            Info::of("# Server\r\nredis_version:7.2.4\r\nvalkey_version:8.1.8\r\nserver_mode:standalone\r\n");
        assert_eq!((info.version().as_deref(), info.mode()), (Some("valkey 8.1.8"), Some("standalone")));
        let info = Info::of("redis_version:6.2.14\nredis_mode:cluster\n");
        assert_eq!((info.version().as_deref(), info.mode()), (Some("redis 6.2.14"), Some("cluster")));
        assert_eq!(Info::of("").version(), None);
    }
}
