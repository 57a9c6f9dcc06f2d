use super::*;

fn body() -> serde_json::Value {
    serde_json::json!({
        "protocolVersion": 1, "requestId": "r1", "memberId": "m1", "memberEpoch": 0, "metadataVersion": 0,
        "runtimeConsumerCapacity": {"runtimeMaxConcurrency": 4, "availableConcurrency": 4},
        "ownedShards": []
    })
}

fn parse(body: serde_json::Value) -> Result<HeartbeatRequest, String> {
    let request: HeartbeatRequest = serde_json::from_value(body).map_err(|error| error.to_string())?;
    request.check().map_err(|error| error.to_string())?;
    Ok(request)
}

fn with(field: &str, value: serde_json::Value) -> serde_json::Value {
    let mut body = body();
    body[field] = value;
    body
}

#[test]
fn the_smallest_request_of_an_old_client() {
    let request = parse(body()).unwrap();
    assert!(request.revoking_shards.is_empty() && request.instance_id.is_none());
}

#[test]
fn unknown_fields_and_nulls_for_optional_ones_are_fine() {
    let mut body = with("futureField", serde_json::json!({"a": [1]}));
    for optional in
        ["memberName", "revokingShards", "shardProgress", "instanceId", "metadataToken", "sequence", "waitMs"]
    {
        body[optional] = serde_json::Value::Null;
    }
    parse(body).unwrap();
}

#[test]
fn request_id_has_1_to_128_characters() {
    parse(with("requestId", "é".repeat(128).into())).unwrap();
    for bad in [String::new(), "x".repeat(129)] {
        assert!(parse(with("requestId", bad.into())).unwrap_err().contains("requestId"));
    }
}

#[test]
fn a_shard_appears_at_most_once() {
    let mut body = with("ownedShards", serde_json::json!([{"shardIndex": 3}]));
    body["revokingShards"] =
        serde_json::json!([{"shard": {"shardIndex": 3}, "state": "DRAINING", "inFlight": 1}]);
    assert!(parse(body).unwrap_err().contains("shard 3 appears more than once"));
    let twice = serde_json::json!([{"shardIndex": 1}, {"shardIndex": 1}]);
    assert!(parse(with("ownedShards", twice)).is_err());
}

#[test]
fn values_out_of_range_are_refused() {
    for (field, value) in [
        ("ownedShards", serde_json::json!([{"shardIndex": -1}])),
        ("ownedShards", serde_json::json!([{"shardIndex": 2_147_483_648_u64}])),
        ("ownedShards", serde_json::json!([{"shardIndex": 1.5}])),
        ("ownedShards", serde_json::json!([{"shardIndex": "1"}])),
        ("ownedShards", serde_json::json!(null)),
        ("metadataVersion", serde_json::json!(-1)),
        ("metadataVersion", serde_json::json!(1e30)),
        ("metadataVersion", serde_json::json!(9_007_199_254_740_993_u64)),
        ("memberEpoch", serde_json::json!(9_223_372_036_854_775_807_i64)),
        ("memberEpoch", serde_json::json!("0")),
        ("sequence", serde_json::json!(-5)),
        ("sequence", serde_json::json!(u64::MAX)),
        ("waitMs", serde_json::json!(-1)),
        ("instanceId", serde_json::json!("")),
        ("instanceId", serde_json::json!("x".repeat(513))),
        ("memberId", serde_json::json!("a\u{0}")),
        (
            "runtimeConsumerCapacity",
            serde_json::json!({"runtimeMaxConcurrency": 0, "availableConcurrency": 0}),
        ),
        (
            "runtimeConsumerCapacity",
            serde_json::json!({"runtimeMaxConcurrency": 1, "availableConcurrency": -1}),
        ),
        ("revokingShards", serde_json::json!([{"shard": {"shardIndex": 1}, "state": "GONE", "inFlight": 0}])),
        ("protocolVersion", serde_json::json!(null)),
    ] {
        assert!(parse(with(field, value.clone())).is_err(), "{field}: {value}");
    }
}

#[test]
fn old_protocols_and_odd_epochs_are_left_to_the_state_machine() {
    parse(with("protocolVersion", 2.into())).unwrap();
    parse(with("memberEpoch", (-7).into())).unwrap();
}

#[test]
fn only_revoked_with_nothing_in_flight_is_finished() {
    let report = |state, in_flight| RevokingReport {
        shard: ShardRef { shard_index: 0 },
        state,
        in_flight,
        acked_at: None,
    };
    assert!(report(RevokingState::Revoked, 0).is_finished());
    assert!(!report(RevokingState::Revoked, 1).is_finished());
    assert!(!report(RevokingState::Draining, 0).is_finished());
}
