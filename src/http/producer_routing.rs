//! `GET …/producer-routing` (protocol 7).

use actix_web::http::header::{CACHE_CONTROL, ETAG, EntityTag, Header, HeaderValue, IfNoneMatch};
use actix_web::web::Data;
use actix_web::{HttpRequest, HttpResponse};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use rsc_protocol::routing::ProducerRouting;

use super::ServerState;
use super::error::ApiError;
use super::names::GroupPath;

/// Routing, or 304 for a caller that has it. Both say what was in the store after the request came: whoever
/// is told "not modified" goes on for another lease.
pub(super) async fn read(
    request: HttpRequest,
    GroupPath(group): GroupPath,
    state: Data<ServerState>,
) -> Result<HttpResponse, ApiError> {
    let routing = state.coordinator.routing(&group).await?;
    let tag = entity_tag(&routing);
    let mut answer = if has(&request, &tag) { HttpResponse::NotModified() } else { HttpResponse::Ok() };
    answer.insert_header((ETAG, tag.to_string()));
    // A cache in between may keep it, but has to ask each time.
    answer.insert_header((CACHE_CONTROL, HeaderValue::from_static("no-cache")));
    Ok(if has(&request, &tag) { answer.finish() } else { answer.json(&routing) })
}

/// Changes exactly when the body does: everything else in it follows from the path and these four.
fn entity_tag(routing: &ProducerRouting) -> EntityTag {
    let token = utf8_percent_encode(&routing.metadata_token, NON_ALPHANUMERIC);
    EntityTag::new_strong(format!(
        "{}-{}-{}-{token}",
        routing.metadata_version, routing.shard_count, routing.routing_cache_ttl_ms
    ))
}

/// Whether the caller names this tag, or any. What it names and we cannot read is not ours.
fn has(request: &HttpRequest, tag: &EntityTag) -> bool {
    match IfNoneMatch::parse(request) {
        Ok(IfNoneMatch::Any) => true,
        Ok(IfNoneMatch::Items(named)) => named.iter().any(|named| named.weak_eq(tag)),
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use actix_web::http::header::IF_NONE_MATCH;
    use actix_web::test::TestRequest;
    use rsc_protocol::GroupKey;

    use super::*;

    fn routing(shards: u32, version: u64, token: &str, ttl_ms: u64) -> ProducerRouting {
        ProducerRouting::new(&GroupKey::new("p", "g").unwrap(), shards, version, token, ttl_ms)
    }

    #[test]
    fn the_tag_moves_with_everything_the_body_says() {
        let tag = entity_tag(&routing(3, 7, "tok", 30_000));
        assert_eq!(tag, entity_tag(&routing(3, 7, "tok", 30_000)));
        for other in [
            routing(4, 7, "tok", 30_000),
            routing(3, 8, "tok", 30_000),
            routing(3, 7, "token", 30_000),
            routing(3, 7, "", 30_000),
            routing(3, 7, "tok", 29_999),
        ] {
            assert_ne!(tag, entity_tag(&other), "{other:?}");
        }
    }

    #[test]
    fn any_token_gives_a_tag_that_a_header_can_carry() {
        for token in ["a\"b", "주문", "a, b", "W/\"x\""] {
            let tag = entity_tag(&routing(3, 7, token, 1));
            let request =
                TestRequest::default().insert_header((IF_NONE_MATCH, tag.to_string())).to_http_request();
            assert!(has(&request, &tag), "{tag}");
        }
    }

    #[test]
    fn if_none_match_as_clients_and_proxies_write_it() {
        let tag = entity_tag(&routing(3, 7, "tok", 1));
        let named = |values: &[String]| {
            let mut request = TestRequest::default();
            for value in values {
                request = request.append_header((IF_NONE_MATCH, value.as_str()));
            }
            has(&request.to_http_request(), &tag)
        };
        assert!(!named(&[]));
        for value in [
            tag.to_string(),
            format!("W/{tag}"),
            format!("\"other\", {tag}"),
            format!("{tag},\"other\""),
            "*".to_owned(),
        ] {
            assert!(named(std::slice::from_ref(&value)), "{value}");
        }
        assert!(named(&["\"other\"".to_owned(), tag.to_string()]));
        for value in [
            "\"other\"".to_owned(),
            tag.tag().to_owned(),
            format!("w/{tag}x"),
            String::new(),
            "\"".to_owned(),
        ] {
            assert!(!named(std::slice::from_ref(&value)), "{value}");
        }
    }
}
