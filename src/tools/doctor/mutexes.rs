//! Mutexes that nobody ever gives back.

use std::collections::BTreeSet;

use rsc_store::StoreError;

use super::count;
use super::groups::{FoundGroups, kind_of, milliseconds_left};
use super::report::Report;
use crate::tools::Redis;

/// Looks at the mutex of every group and of every stream.
pub(super) async fn examine(
    redis: &Redis,
    found: &FoundGroups,
    report: &mut Report,
) -> Result<(), StoreError> {
    let of_groups = found
        .groups
        .iter()
        .flat_map(|group| [redis.keys.mutex(&group.key), redis.keys.stream_mutex(group.key.stream_prefix())]);
    let is_mutex = |key: &&String| key.ends_with("}:mutex") || key.ends_with("}:stream-mutex");
    let scanned = found.keys.iter().flatten().filter(is_mutex).cloned();
    let mutexes: BTreeSet<String> = of_groups.chain(scanned).collect();
    let mark = report.mark();
    for key in &mutexes {
        match kind_of(redis, key).await? {
            Err(why) => report.unknown("mutexes", key, why),
            Ok(kind) if kind == "none" => {}
            Ok(kind) if kind == "string" => match milliseconds_left(redis, key).await? {
                Err(why) => report.unknown("mutexes", key, why),
                Ok(-1) => report.error(
                    "mutex.ttl",
                    key,
                    "has no TTL: a coordinator that comes by ends it within coordination.mutex-ttl; who does not know that is blocked for ever",
                    format!("DEL {key}"),
                ),
                Ok(_) => {}
            },
            Ok(kind) => report.error(
                "mutex.type",
                key,
                format!("holds a {kind}, not a mutex: whoever it belongs to is blocked"),
                format!("find out who put it there, then DEL {key}"),
            ),
        }
    }
    if report.is_clean_since(mark) {
        let message = format!("{} looked at, none is stuck", count(mutexes.len(), "mutex key"));
        report.ok("mutexes", format!("{}:*", redis.keys.prefix()), message);
    }
    Ok(())
}
