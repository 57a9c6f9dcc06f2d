//! Looking through all keys without keeping a busy Redis from its work: page by page, with a pause after each.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use redis::Value;
use rsc_store::{NodeRole, RedisNode, StoreError};

use super::Redis;

/// How a scan goes about it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Keys that Redis looks at for one page.
    pub(super) count: u32,
    /// Between two pages.
    pub(super) pause: Duration,
    /// When the scan is given up.
    pub(super) time_limit: Duration,
}

impl Pace {
    /// Some 100,000 keys a second at most, and ten minutes.
    pub(super) const GENTLE: Pace =
        Pace { count: 1_000, pause: Duration::from_millis(10), time_limit: Duration::from_secs(600) };
    /// The same for somebody who waits for the outcome: a minute.
    pub(super) const BRIEF: Pace = Pace { time_limit: Duration::from_secs(60), ..Pace::GENTLE };
}

/// The coordinator's own keys of groups (`P:{…}:…`), of every master. Keys whose names are no text belong to nobody
/// here and are left out. A key that is there from the beginning to the end of the scan is found; one that comes or
/// goes meanwhile may be.
///
/// # Errors
/// When a server does not answer or refuses, or the time is over.
pub(super) async fn keys_of_groups(redis: &Redis, pace: Pace) -> Result<BTreeSet<String>, StoreError> {
    let pattern = format!("{}:{{*}}:*", escaped(redis.keys.prefix()));
    let nodes = redis.tools.nodes().await?;
    let has_master = nodes.iter().any(|node| node.role == NodeRole::Master);
    let end = Instant::now() + pace.time_limit;
    let mut found = BTreeSet::new();
    for node in nodes.iter().filter(|node| node.role == NodeRole::Master || !has_master) {
        scan(redis, node, &pattern, pace, end, &mut found).await?;
    }
    Ok(found)
}

async fn scan(
    redis: &Redis,
    node: &RedisNode,
    pattern: &str,
    pace: Pace,
    end: Instant,
    found: &mut BTreeSet<String>,
) -> Result<(), StoreError> {
    let mut cursor = "0".to_owned();
    loop {
        let mut command = redis::cmd("SCAN");
        command.arg(&cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(pace.count);
        let (next, keys) = page(redis.tools.on(node, &command).await?).ok_or_else(|| {
            StoreError::Unexpected(format!("SCAN is answered with no page of keys ({})", node.address))
        })?;
        found.extend(keys.into_iter().filter_map(|key| String::from_utf8(key).ok()));
        if next == "0" {
            return Ok(());
        }
        cursor = next;
        if Instant::now() >= end {
            return Err(StoreError::Unavailable(format!(
                "the scan of {} did not end within {}: give it more time or a larger count",
                node.address,
                humantime::format_duration(pace.time_limit)
            )));
        }
        tokio::time::sleep(pace.pause).await;
    }
}

/// Cursor and keys.
fn page(answer: Value) -> Option<(String, Vec<Vec<u8>>)> {
    let [cursor, keys]: [Value; 2] = answer.into_sequence().ok()?.try_into().ok()?;
    let Value::BulkString(cursor) = cursor else { return None };
    let key = |value| match value {
        Value::BulkString(key) => Some(key),
        _ => None,
    };
    let keys = keys.into_sequence().ok()?.into_iter().map(key).collect::<Option<_>>()?;
    Some((String::from_utf8(cursor).ok()?, keys))
}

/// Text that a pattern matches as it is.
fn escaped(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for character in text.chars() {
        if matches!(character, '*' | '?' | '[' | ']' | '^' | '-' | '\\') {
            pattern.push('\\');
        }
        pattern.push(character);
    }
    pattern
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_matched_as_it_is() {
        assert_eq!(escaped("a:b"), "a:b");
        assert_eq!(escaped("a*[b]?\\"), "a\\*\\[b\\]\\?\\\\");
    }

    #[test]
    fn what_is_no_page_is_none() {
        let bulk = |text: &str| Value::BulkString(text.into());
        let keys = Value::Array(vec![bulk("k")]);
        let found = page(Value::Array(vec![bulk("17"), keys.clone()]));
        assert_eq!(found, Some(("17".to_owned(), vec![b"k".to_vec()])));
        for answer in [Value::Nil, Value::Array(vec![bulk("0")]), Value::Array(vec![keys.clone(), keys])] {
            assert_eq!(page(answer), None);
        }
    }
}
