//! Query strings, read strictly: what a route does not know is refused, not ignored.

use std::collections::BTreeMap;

use actix_web::HttpRequest;
use url::form_urlencoded;

use super::error::ApiError;

/// The longest piece of a query that a refusal repeats, in characters.
const LONGEST_REPEATED: usize = 50;
/// Rows of a page unless the query says otherwise.
const DEFAULT_LIMIT: usize = 100;
/// Rows of a page at most.
const LARGEST_LIMIT: usize = 1000;

/// The parameters of one request.
#[derive(Debug)]
pub(super) struct Query(BTreeMap<&'static str, String>);

impl Query {
    /// Reads the query of `request`, whose route knows the parameters `known`.
    pub(super) fn of(request: &HttpRequest, known: &[&'static str]) -> Result<Self, ApiError> {
        Query::parse(request.query_string(), known)
    }

    fn parse(text: &str, known: &[&'static str]) -> Result<Self, ApiError> {
        let mut parameters = BTreeMap::new();
        for (name, value) in form_urlencoded::parse(text.as_bytes()) {
            let Some(name) = known.iter().copied().find(|known| *known == name) else {
                let takes = match known {
                    [] => "none".to_owned(),
                    known => known.join(", "),
                };
                let name = shortened(&name);
                return Err(ApiError::invalid(format!(
                    "unknown query parameter {name:?}: this route takes {takes}"
                )));
            };
            if parameters.insert(name, value.into_owned()).is_some() {
                return Err(ApiError::invalid(format!(
                    "query parameter {name} is there twice: send it once"
                )));
            }
        }
        Ok(Query(parameters))
    }

    /// A parameter's value, if it was sent.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// `limit`: 1 to 1000, 100 when it was not sent.
    pub(super) fn limit(&self) -> Result<usize, ApiError> {
        let Some(text) = self.get("limit") else { return Ok(DEFAULT_LIMIT) };
        let limit = whole_number(text).filter(|limit| (1..=LARGEST_LIMIT).contains(limit));
        limit.ok_or_else(|| refused("limit", text, &format!("a whole number from 1 to {LARGEST_LIMIT}")))
    }
}

/// A number as digits alone; no sign, no space, no leading zero.
pub(super) fn whole_number<T: std::str::FromStr>(text: &str) -> Option<T> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if is_plain { text.parse().ok() } else { None }
}

/// `INVALID_REQUEST` that names the parameter and says what belongs there.
pub(super) fn refused(name: &str, text: &str, expected: &str) -> ApiError {
    ApiError::invalid(format!("{name} is {:?}: it has to be {expected}", shortened(text)))
}

fn shortened(text: &str) -> String {
    text.chars().take(LONGEST_REPEATED).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_known_is_taken_and_once() {
        let query = Query::parse("from=%28&limit=5", &["from", "limit", "to"]).unwrap();
        assert_eq!((query.get("from"), query.get("to"), query.limit().unwrap()), (Some("("), None, 5));
        for (text, expected) in [
            ("x=1", "unknown query parameter \"x\": this route takes from, limit"),
            ("FROM=1", "unknown query parameter \"FROM\""),
            ("from=1&from=1", "from is there twice"),
            ("&=", "unknown query parameter \"\""),
            ("%FF=1", "unknown query parameter"),
        ] {
            let error = Query::parse(text, &["from", "limit"]).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let error = Query::parse("x", &[]).unwrap_err().to_string();
        assert!(error.contains("this route takes none"), "{error}");
        let long = Query::parse(&"x".repeat(9000), &[]).unwrap_err().to_string();
        assert!(long.len() < 300, "{long}");
    }

    #[test]
    fn limits_are_whole_numbers_within_bounds() {
        let limit = |text: &str| Query::parse(text, &["limit"]).unwrap().limit().ok();
        assert_eq!((limit(""), limit("limit=1"), limit("limit=1000")), (Some(100), Some(1), Some(1000)));
        for text in ["", "0", "1001", "-1", "+5", "5.0", "1e2", " 5", "05", "all", "99999999999999999999999"]
        {
            assert_eq!(limit(&format!("limit={text}")), None, "{text}");
        }
    }
}
