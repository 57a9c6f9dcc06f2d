//! Names in paths: extractors that decode the raw path themselves.
//!
//! The router decodes most percent-sequences before it matches and leaves `%2F`, `%25` and `%2B` alone, and
//! it replaces what is not UTF-8. Decoding its result again would be wrong (`%252F`), not decoding it too
//! (`%2F`). So the router only decides which route it is, and names are taken from the path as it was sent.

use std::future::{Ready, ready};

use actix_web::dev::Payload;
use actix_web::{FromRequest, HttpRequest};
use percent_encoding::percent_decode_str;
use rsc_protocol::GroupKey;
use rsc_protocol::heartbeat::MAX_SHARD_INDEX;
use rsc_protocol::names::{check_member_id, check_stream_prefix};

use super::error::ApiError;
use super::query::{refused, whole_number};

/// The `{p}` of `/coord/v1/streams/{p}`, checked.
pub(super) struct StreamPath(pub(super) String);

/// The names of `…/streams/{p}/groups/{g}` and of what lies below, checked.
pub(super) struct GroupPath(pub(super) GroupKey);

/// The names of `…/streams/{p}/groups/{g}/members/{m}` and of what lies below, checked.
pub(super) struct MemberPath {
    /// The group.
    pub(super) group: GroupKey,
    /// The member's id.
    pub(super) member_id: String,
}

/// The names of `…/streams/{p}/groups/{g}/migrations/{id}` and of what lies below, checked.
pub(super) struct MigrationPath {
    /// The group.
    pub(super) group: GroupKey,
    /// The migration's id.
    pub(super) resharding_id: String,
}

/// The names of `…/groups/{g}/shards/{i}/messages`, checked.
pub(super) struct ShardPath {
    /// The group.
    pub(super) group: GroupKey,
    /// The shard.
    pub(super) shard_index: u32,
}

impl FromRequest for ShardPath {
    type Error = ApiError;
    type Future = Ready<Result<Self, ApiError>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(shard(request.uri().path()))
    }
}

impl FromRequest for MigrationPath {
    type Error = ApiError;
    type Future = Ready<Result<Self, ApiError>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(migration(request.uri().path()))
    }
}

impl FromRequest for StreamPath {
    type Error = ApiError;
    type Future = Ready<Result<Self, ApiError>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(stream_prefix(request.uri().path()).map(StreamPath))
    }
}

impl FromRequest for GroupPath {
    type Error = ApiError;
    type Future = Ready<Result<Self, ApiError>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(group(request.uri().path()).map(GroupPath))
    }
}

impl FromRequest for MemberPath {
    type Error = ApiError;
    type Future = Ready<Result<Self, ApiError>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(member(request.uri().path()))
    }
}

fn stream_prefix(path: &str) -> Result<String, ApiError> {
    let name = decode("streamPrefix", below_streams(path, 0))?;
    check_stream_prefix(&name)?;
    Ok(name)
}

fn group(path: &str) -> Result<GroupKey, ApiError> {
    let stream_prefix = decode("streamPrefix", below_streams(path, 0))?;
    let consumer_group = decode("consumerGroup", below_streams(path, 2))?;
    Ok(GroupKey::new(stream_prefix, consumer_group)?)
}

fn member(path: &str) -> Result<MemberPath, ApiError> {
    let group = group(path)?;
    let member_id = decode("memberId", below_streams(path, 4))?;
    check_member_id(&member_id)?;
    Ok(MemberPath { group, member_id })
}

fn migration(path: &str) -> Result<MigrationPath, ApiError> {
    let group = group(path)?;
    let resharding_id = decode("reshardingId", below_streams(path, 4))?;
    check_member_id(&resharding_id).map_err(|_| {
        ApiError::invalid("reshardingId in the path is blank, too long, or has control characters".to_owned())
    })?;
    Ok(MigrationPath { group, resharding_id })
}

fn shard(path: &str) -> Result<ShardPath, ApiError> {
    let group = group(path)?;
    let text = decode("shardIndex", below_streams(path, 4))?;
    let shard_index = whole_number(&text).filter(|index| *index <= MAX_SHARD_INDEX);
    let shard_index = shard_index.ok_or_else(|| {
        let expected = format!("a whole number from 0 to {MAX_SHARD_INDEX}");
        refused("shardIndex in the path", &text, &expected)
    })?;
    Ok(ShardPath { group, shard_index })
}

/// The segment at `index` behind `/coord/v1/streams/` or `/coord/v1/monitoring/streams/`, as it was sent.
fn below_streams(path: &str, index: usize) -> &str {
    let mut segments = path.split('/').skip("/coord/v1".split('/').count());
    let first = segments.next().unwrap_or_default();
    let skipped = usize::from(percent_decode_str(first).eq("monitoring".bytes()));
    segments.nth(skipped + index).unwrap_or_default()
}

/// Decodes one segment; `field` names it in the refusal.
fn decode(field: &str, segment: &str) -> Result<String, ApiError> {
    let mut sequences = segment.split('%');
    let mut at = sequences.next().map_or(0, str::len);
    for sequence in sequences {
        let digits = sequence.as_bytes().iter().take(2).filter(|byte| byte.is_ascii_hexdigit());
        if digits.count() != 2 {
            return Err(ApiError::invalid(format!(
                "{field} in the path has a % at byte {at} that no two hexadecimal digits follow: write % as %25"
            )));
        }
        at += 1 + sequence.len();
    }
    match percent_decode_str(segment).decode_utf8() {
        Ok(name) => Ok(name.into_owned()),
        Err(error) => Err(ApiError::invalid(format!(
            "{field} in the path is not UTF-8 from byte {} on, once its percent-encoding is undone",
            error.valid_up_to()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

    use super::*;

    #[test]
    fn names_are_decoded_exactly_once() {
        for (segment, name) in [
            ("orders", "orders"),
            ("a%2Fb", "a/b"),
            ("a%2fb", "a/b"),
            ("a%252Fb", "a%2Fb"),
            ("%25", "%"),
            ("a+b", "a+b"),
            ("a%2Bb", "a+b"),
            ("a%20b", "a b"),
            ("%23%3F", "#?"),
            ("%2E%2e", ".."),
            ("%EC%A3%BC%EB%AC%B8", "주문"),
            ("%F0%9F%9A%9A", "🚚"),
            ("", ""),
        ] {
            assert_eq!(decode("memberId", segment).unwrap(), name, "{segment}");
        }
    }

    #[test]
    fn broken_encoding_is_refused_with_field_and_place() {
        for (segment, place) in [
            ("%", "byte 0"),
            ("a%", "byte 1"),
            ("a%2", "byte 1"),
            ("a%2G", "byte 1"),
            ("%41%zz", "byte 3"),
            ("%%41", "byte 0"),
            ("a%FF", "not UTF-8 from byte 1"),
            ("%ED%A0%80", "not UTF-8 from byte 0"),
        ] {
            let error = decode("memberId", segment).unwrap_err().to_string();
            assert!(error.contains(place) && error.contains("memberId"), "{segment}: {error}");
        }
    }

    #[test]
    fn names_are_found_below_both_roots() {
        let encoded = |name| utf8_percent_encode(name, NON_ALPHANUMERIC);
        for root in ["/coord/v1/streams", "/coord/v1/monitoring/streams", "/coord/v1/%6Donitoring/streams"] {
            let path = format!(
                "{root}/{}/groups/{}/members/{}/heartbeat",
                encoded("a/b"),
                encoded("c d"),
                encoded("m{1}")
            );
            let found = member(&path).unwrap();
            assert_eq!((found.group.stream_prefix(), found.group.consumer_group()), ("a/b", "c d"), "{path}");
            assert_eq!(found.member_id, "m{1}");
            assert_eq!(stream_prefix(&path).unwrap(), "a/b");
        }
        assert_eq!(stream_prefix("/coord/v1/streams/monitoring").unwrap(), "monitoring");
        let error = group("/coord/v1/streams//groups/g").unwrap_err().to_string();
        assert!(error.contains("streamPrefix is blank"), "{error}");
        let error = group("/coord/v1/streams/p/groups/").unwrap_err().to_string();
        assert!(error.contains("consumerGroup is blank"), "{error}");
    }
}
