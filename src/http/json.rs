//! From bytes to a request, strictly, with refusals that a person can act upon.

use serde::de::DeserializeOwned;
use serde_json::error::Category;

use super::strict::ObjectsOnly;

/// The longest refusal in characters: what a client sent is not sent back whole.
const LONGEST_MESSAGE: usize = 400;

/// Reads exactly one JSON value. The error is a sentence that names field and place, and nothing of how
/// this program is built.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Err("the body is empty: send a JSON object".to_owned());
    }
    let text = std::str::from_utf8(body)
        .map_err(|error| format!("the body is not UTF-8 from byte {} on", error.valid_up_to()))?;
    let mut input = serde_json::Deserializer::from_str(text);
    let mut track = serde_path_to_error::Track::new();
    let tracked = serde_path_to_error::Deserializer::new(&mut input, &mut track);
    match T::deserialize(ObjectsOnly(tracked)) {
        Ok(value) => match input.end() {
            Ok(()) => Ok(value),
            Err(error) => Err(format!("the body goes on after its JSON value ({})", place(&error))),
        },
        Err(error) => Err(shorten(describe(&error, &track.path().to_string()))),
    }
}

fn describe(error: &serde_json::Error, path: &str) -> String {
    let text = error.to_string();
    let what = text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what);
    let place = place(error);
    match error.classify() {
        Category::Data if path == "." => format!("{} ({place})", in_json_words(what)),
        Category::Data => format!("{path}: {} ({place})", in_json_words(what)),
        _ if what.starts_with("recursion limit") => format!("the body is nested too deeply ({place})"),
        _ => format!("the body is not valid JSON: {what} ({place})"),
    }
}

fn place(error: &serde_json::Error) -> String {
    format!("line {}, column {}", error.line(), error.column())
}

/// serde speaks of its own and Rust's types; a client knows JSON's.
fn in_json_words(what: &str) -> String {
    let Some((before, expected)) = what.rsplit_once(", expected ") else { return found_in_json_words(what) };
    let before = found_in_json_words(before);
    let expected = match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number, 0 or more and within range",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number within range",
        "f32" | "f64" => "a number",
        "a sequence" => "an array",
        "a map" => "an object",
        _ if expected.starts_with("struct ") => "an object",
        _ => expected,
    };
    format!("{before}, expected {expected}")
}

fn found_in_json_words(what: &str) -> String {
    for (rust, json) in
        [("invalid type: map", "invalid type: object"), ("invalid type: sequence", "invalid type: array")]
    {
        if what == rust {
            return json.to_owned();
        }
    }
    what.to_owned()
}

fn shorten(message: String) -> String {
    match message.char_indices().nth(LONGEST_MESSAGE) {
        Some((at, _)) => format!("{}…", &message[..at]),
        None => message,
    }
}

#[cfg(test)]
mod tests {
    use rsc_protocol::HeartbeatRequest;
    use rsc_protocol::admin::CreateStreamRequest;
    use serde_json::{Value, json};

    use super::*;

    fn heartbeat() -> Value {
        json!({
            "protocolVersion": 1, "requestId": "r1", "memberId": "m1", "memberEpoch": 0, "metadataVersion": 0,
            "runtimeConsumerCapacity": {"runtimeMaxConcurrency": 4, "availableConcurrency": 4},
            "ownedShards": [{"shardIndex": 0}, {"shardIndex": 1}],
            "revokingShards": [{"shard": {"shardIndex": 2}, "state": "REVOKED", "inFlight": 0}]
        })
    }

    fn refusal(text: &str) -> String {
        let refusal = parse::<HeartbeatRequest>(text.as_bytes()).unwrap_err();
        for leak in [
            "struct",
            "::",
            "u32",
            "u64",
            "i64",
            "HeartbeatRequest",
            "ShardRef",
            "variant identifier",
            ".rs",
            "enum",
        ] {
            assert!(!refusal.contains(leak), "{text}: {refusal}");
        }
        refusal
    }

    /// The refusal of a good heartbeat with one value exchanged.
    fn refusal_with(pointer: &str, value: Value) -> String {
        let mut body = heartbeat();
        *body.pointer_mut(pointer).unwrap() = value;
        refusal(&body.to_string())
    }

    #[test]
    fn reads_a_heartbeat_and_ignores_what_it_does_not_know() {
        let mut body = heartbeat();
        body["future"] = json!({"deep": [[1, 2], {"x": null}], "number": 1e9});
        assert_eq!(parse::<HeartbeatRequest>(body.to_string().as_bytes()).unwrap().owned_shards.len(), 2);
    }

    #[test]
    fn names_field_and_place_of_wrong_values() {
        for (pointer, value, field, expected) in [
            ("/memberEpoch", json!("x"), "memberEpoch: ", "expected a whole number"),
            ("/memberEpoch", json!(1.5), "memberEpoch: ", "expected a whole number"),
            ("/memberEpoch", json!(1e30), "memberEpoch: ", "expected a whole number"),
            ("/metadataVersion", json!(-1), "metadataVersion: ", "0 or more"),
            ("/requestId", json!(7), "requestId: ", "expected a string"),
            ("/requestId", Value::Null, "requestId: ", "expected a string"),
            ("/ownedShards", json!({}), "ownedShards: invalid type: object", "expected an array"),
            ("/ownedShards", json!("0,1"), "ownedShards: ", "expected an array"),
            ("/ownedShards/1/shardIndex", json!(-1), "ownedShards[1].shardIndex: ", "0 or more"),
            (
                "/ownedShards/1/shardIndex",
                json!(4_294_967_296_u64),
                "ownedShards[1].shardIndex: ",
                "within range",
            ),
            ("/ownedShards/1", json!([1]), "ownedShards[1]: invalid type: array", "expected an object"),
            ("/ownedShards/1", json!(1), "ownedShards[1]: ", "expected an object"),
            ("/runtimeConsumerCapacity", json!([4, 4]), "runtimeConsumerCapacity: ", "expected an object"),
            (
                "/revokingShards/0/state",
                json!("GONE"),
                "revokingShards[0].state: ",
                "`REVOKING`, `DRAINING`, `REVOKED`",
            ),
            ("/revokingShards/0/state", json!(1), "revokingShards[0].state: ", "expected a string"),
            (
                "/revokingShards/0/state",
                json!({"REVOKED": null}),
                "revokingShards[0].state: ",
                "expected a string",
            ),
            ("/revokingShards/0/inFlight", json!(true), "revokingShards[0].inFlight: ", "0 or more"),
        ] {
            let refusal = refusal_with(pointer, value.clone());
            assert!(refusal.starts_with(field), "{pointer} = {value}: {refusal}");
            assert!(refusal.contains(expected), "{pointer} = {value}: {refusal}");
            assert!(
                refusal.contains("(line 1, column ") && !refusal.contains("column 0"),
                "{pointer} = {value}: {refusal}"
            );
        }
    }

    #[test]
    fn names_missing_and_repeated_fields() {
        let mut body = heartbeat();
        body.as_object_mut().unwrap().remove("requestId");
        assert!(refusal(&body.to_string()).contains("missing field `requestId`"));
        let refusal = refusal(r#"{"requestId": "a", "requestId": "b"}"#);
        assert!(refusal.contains("duplicate field `requestId`"), "{refusal}");
    }

    #[test]
    fn refuses_what_is_no_json_object() {
        for (text, expected) in [
            ("", "the body is empty"),
            (" \r\n\t", "the body is empty"),
            ("{", "not valid JSON"),
            ("{]", "not valid JSON"),
            ("nope", "not valid JSON"),
            (r#"{"memberEpoch": NaN}"#, "not valid JSON"),
            (r#"{"memberEpoch": 1e999}"#, "not valid JSON: number out of range"),
            (r#"{"memberEpoch": 01}"#, "not valid JSON"),
            (r#"{"requestId": "a"#, "not valid JSON"),
            ("{\"requestId\": \"a\nb\"}", "not valid JSON"),
            (r#"{"requestId": "\ud800"}"#, "not valid JSON"),
            ("{'requestId': 1}", "not valid JSON"),
            ("[]", "expected an object"),
            (r#"[1, "r", "m", 0, 0]"#, "expected an object"),
            ("null", "expected an object"),
            ("17", "expected an object"),
            ("\"text\"", "expected an object"),
            ("\u{feff}{}", "not valid JSON"),
        ] {
            let refusal = refusal(text);
            assert!(refusal.contains(expected), "{text}: {refusal}");
        }
    }

    #[test]
    fn refuses_a_second_value_and_what_is_not_utf8() {
        let twice = format!("{} {{}}", heartbeat());
        assert!(refusal(&twice).contains("goes on after its JSON value (line 1"));
        let error = parse::<HeartbeatRequest>(b"{\"requestId\": \"\xff\"}").unwrap_err();
        assert_eq!(error, "the body is not UTF-8 from byte 15 on");
    }

    #[test]
    fn deep_nesting_ends_in_a_refusal() {
        let nested = |open: &str, close: &str, depth: usize| {
            let mut body = heartbeat();
            body["future"] = json!("HERE");
            body.to_string().replace("\"HERE\"", &format!("{}0{}", open.repeat(depth), close.repeat(depth)))
        };
        for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
            let refusal = refusal(&nested(open, close, 100_000));
            assert!(refusal.contains("nested too deeply"), "{refusal}");
            assert!(parse::<HeartbeatRequest>(nested(open, close, 100).as_bytes()).is_ok());
        }
        assert!(refusal(&"[".repeat(100_000)).contains("expected an object"));
    }

    #[test]
    fn a_refusal_does_not_repeat_a_long_body() {
        let refusal = refusal_with("/memberEpoch", json!("x".repeat(100_000)));
        assert_eq!(refusal.chars().count(), LONGEST_MESSAGE + 1);
    }

    #[test]
    fn optional_fields_may_be_null() {
        let body =
            br#"{"requestedBy": "a", "reason": null, "initialShardCount": null, "consumerGroups": null}"#;
        assert_eq!(parse::<CreateStreamRequest>(body).unwrap().consumer_groups, None);
        let error =
            parse::<CreateStreamRequest>(br#"{"requestedBy": "a", "consumerGroups": ["a", 1]}"#).unwrap_err();
        assert!(error.starts_with("consumerGroups[1]: "), "{error}");
    }
}
