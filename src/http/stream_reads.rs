//! `GET …/offsets`, `/consumption`, `/shards/{i}/messages`, `/history` (protocol 8): reads of Redis streams.

use actix_web::web::Data;
use actix_web::{HttpRequest, HttpResponse};
use rsc_actors::MessagesQuery;
use rsc_protocol::monitoring::{RecordId, RecordOrder};

use super::error::ApiError;
use super::names::{GroupPath, ShardPath};
use super::query::{Query, refused, whole_number};
use super::{ServerState, answer};

/// `GET …/offsets`.
pub(super) async fn offsets(
    request: HttpRequest,
    GroupPath(group): GroupPath,
    state: Data<ServerState>,
) -> Result<HttpResponse, ApiError> {
    Query::of(&request, &[])?;
    Ok(answer(HttpResponse::Ok(), &state.coordinator.offsets(&group).await?))
}

/// `GET …/consumption`.
pub(super) async fn consumption(
    request: HttpRequest,
    GroupPath(group): GroupPath,
    state: Data<ServerState>,
) -> Result<HttpResponse, ApiError> {
    Query::of(&request, &[])?;
    Ok(answer(HttpResponse::Ok(), &state.coordinator.consumption(&group).await?))
}

/// `GET …/shards/{i}/messages`: a page of records, or the one with `id`.
pub(super) async fn messages(
    request: HttpRequest,
    ShardPath { group, shard_index }: ShardPath,
    state: Data<ServerState>,
) -> Result<HttpResponse, ApiError> {
    let query = Query::of(&request, &["from", "to", "limit", "order", "id"])?;
    let query = messages_query(shard_index, &query)?;
    Ok(answer(HttpResponse::Ok(), &state.coordinator.messages(&group, &query).await?))
}

/// `GET …/history`.
pub(super) async fn history(
    request: HttpRequest,
    GroupPath(group): GroupPath,
    state: Data<ServerState>,
) -> Result<HttpResponse, ApiError> {
    let query = Query::of(&request, &["limit", "before"])?;
    let before = query.get("before").map(|text| whole_id("before", text)).transpose()?;
    Ok(answer(HttpResponse::Ok(), &state.coordinator.history(&group, before, query.limit()?).await?))
}

fn messages_query(shard_index: u32, query: &Query) -> Result<MessagesQuery, ApiError> {
    if let Some(text) = query.get("id") {
        let id = whole_id("id", text)?;
        if let Some(other) =
            ["from", "to", "limit", "order"].into_iter().find(|name| query.get(name).is_some())
        {
            return Err(ApiError::invalid(format!(
                "id names one record, {other} a range: send one of the two"
            )));
        }
        let order = RecordOrder::Asc;
        return Ok(MessagesQuery { shard_index, lowest: id, highest: id, order, limit: 1 });
    }
    let order = match query.get("order") {
        None | Some("asc") => RecordOrder::Asc,
        Some("desc") => RecordOrder::Desc,
        Some(other) => return Err(refused("order", other, "asc or desc")),
    };
    let lowest = query.get("from").map(|text| bound("from", text, Side::Lowest)).transpose()?;
    let highest = query.get("to").map(|text| bound("to", text, Side::Highest)).transpose()?;
    let (lowest, highest) =
        match (lowest.unwrap_or(Some(RecordId::MIN)), highest.unwrap_or(Some(RecordId::MAX))) {
            (Some(lowest), Some(highest)) => (lowest, highest),
            // Behind the last id, or before the first one, there is nothing.
            _ => (RecordId::MAX, RecordId::MIN),
        };
    Ok(MessagesQuery { shard_index, lowest, highest, order, limit: query.limit()? })
}

fn whole_id(name: &str, text: &str) -> Result<RecordId, ApiError> {
    text.parse().map_err(|_| refused(name, text, "a record id: milliseconds-sequence, e.g. 1700000000000-0"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Lowest,
    Highest,
}

/// One end of a range: an id, `(` and an id without that one, or milliseconds alone, which stand for all their
/// records. `None`: nothing can be on this side of it.
fn bound(name: &str, text: &str, side: Side) -> Result<Option<RecordId>, ApiError> {
    if let Some(id) = text.strip_prefix('(').and_then(|text| text.parse::<RecordId>().ok()) {
        return Ok(match side {
            Side::Lowest => id.next(),
            Side::Highest => id.previous(),
        });
    }
    if let Some(milliseconds) = whole_number(text) {
        let sequence = if side == Side::Lowest { 0 } else { u64::MAX };
        return Ok(Some(RecordId { milliseconds, sequence }));
    }
    let expected =
        "a record id (milliseconds-sequence), with ( before it to leave that one out, or milliseconds";
    text.parse().map(Some).map_err(|_| refused(name, text, expected))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> RecordId {
        text.parse().unwrap()
    }

    #[test]
    fn bounds_are_inclusive_exclusive_or_whole_milliseconds() {
        for (text, lowest, highest) in [
            ("5-3", Some("5-3"), Some("5-3")),
            ("(5-3", Some("5-4"), Some("5-2")),
            ("(5-0", Some("5-1"), Some("4-18446744073709551615")),
            ("5", Some("5-0"), Some("5-18446744073709551615")),
            ("0", Some("0-0"), Some("0-18446744073709551615")),
            ("(0-0", Some("0-1"), None),
            (
                "(18446744073709551615-18446744073709551615",
                None,
                Some("18446744073709551615-18446744073709551614"),
            ),
        ] {
            assert_eq!(bound("from", text, Side::Lowest).unwrap(), lowest.map(id), "{text}");
            assert_eq!(bound("to", text, Side::Highest).unwrap(), highest.map(id), "{text}");
        }
        for text in [
            "",
            "(",
            "(5",
            "-",
            "+",
            "$",
            "5-",
            "-5",
            "[5-3",
            "((5-3",
            "5-3-1",
            "abc",
            "5-x",
            " 5-3",
            "18446744073709551616",
        ] {
            for side in [Side::Lowest, Side::Highest] {
                let error = bound("from", text, side).unwrap_err().to_string();
                assert!(error.contains("from is") && error.contains("milliseconds"), "{text}: {error}");
            }
        }
    }
}
