//! `X-Request-Id`: the caller's, or one made up here (protocol 8).

use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};

/// Echoed on every answer.
pub(super) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The longest id that is taken over, in characters.
const LONGEST: usize = 128;

/// The id of the request with these headers: the one it carries if that is 1 to 128 visible ASCII
/// characters, which are safe in a header and in a log line; else a random one.
pub(super) fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(&X_REQUEST_ID).and_then(|value| value.to_str().ok());
    match given {
        Some(id) if (1..=LONGEST).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic()) => {
            id.to_owned()
        }
        _ => uuid::Uuid::new_v4().to_string(),
    }
}

/// The header's value for an id made by [`request_id`].
pub(super) fn header_value(id: &str) -> Option<HeaderValue> {
    HeaderValue::from_str(id).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id_for(value: &[u8]) -> String {
        let mut headers = HeaderMap::new();
        headers.insert(X_REQUEST_ID, HeaderValue::from_bytes(value).unwrap());
        request_id(&headers)
    }

    #[test]
    fn takes_over_visible_ascii_only() {
        let longest = "x".repeat(128);
        for id in ["a", "req-1/2;{}\"", &longest] {
            assert_eq!(id_for(id.as_bytes()), id);
        }
        for id in [&b""[..], b"a b", b"a\tb", "é".as_bytes(), "x".repeat(129).as_bytes()] {
            let made_up = id_for(id);
            assert!(uuid::Uuid::parse_str(&made_up).is_ok(), "{id:?}: {made_up}");
        }
        assert_ne!(request_id(&HeaderMap::new()), request_id(&HeaderMap::new()));
        assert!(header_value(&longest).is_some());
    }
}
