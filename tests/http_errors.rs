//! Black-box tests of bad requests (protocol 8; issue 2, "Bad input"): status, code, shape, headers.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use reqwest::Method;
use rsc_protocol::{ErrorCode, GroupKey, ShardRef};
use serde_json::{Value, json};
use support::{Api, Daemon, DaemonBuilder, RawConnection, group_path, heartbeat, monitored_path};

const INVALID: ErrorCode = ErrorCode::InvalidRequest;

async fn daemon_with_stream(builder: DaemonBuilder) -> (Daemon, Api, GroupKey) {
    let daemon = builder.start();
    let api = daemon.api();
    let group = api.create_stream("orders", 3).await;
    (daemon, api, group)
}

fn heartbeat_path(group: &GroupKey) -> String {
    format!("{}/members/m1/heartbeat", group_path(group))
}

fn heartbeat_with(pointer: &str, value: Value) -> Value {
    let mut body = serde_json::to_value(heartbeat("m1")).unwrap();
    body["ownedShards"] = json!([{"shardIndex": 0}, {"shardIndex": 1}]);
    match body.pointer_mut(pointer) {
        Some(place) => *place = value,
        None => body[&pointer[1..]] = value,
    }
    body
}

#[tokio::test]
async fn broken_bodies_are_refused_with_field_and_place() {
    let (_daemon, api, group) = daemon_with_stream(Daemon::memory()).await;
    let good = serde_json::to_string(&heartbeat("m1")).unwrap();
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"".to_vec(), "empty"),
        (b"  \n".to_vec(), "empty"),
        (b"{".to_vec(), "not valid JSON"),
        (b"{\"memberEpoch\": NaN}".to_vec(), "not valid JSON"),
        (b"{\"memberEpoch\": 1e999}".to_vec(), "not valid JSON"),
        (b"{\"requestId\": \"\xff\"}".to_vec(), "not UTF-8"),
        (b"[1]".to_vec(), "expected an object"),
        (b"{}".to_vec(), "missing field `protocolVersion`"),
        (format!("{good} x").into_bytes(), "goes on after its JSON value"),
        (format!("{{\"requestId\": \"a\", {}", &good[1..]).into_bytes(), "duplicate field `requestId`"),
        ("[".repeat(200_000).into_bytes(), "expected an object"),
        (
            good.replacen('{', &format!("{{\"x\": {}", "[".repeat(200_000)), 1).into_bytes(),
            "nested too deeply",
        ),
    ];
    for (body, expected) in cases {
        let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
        let message = api.post_bytes(&heartbeat_path(&group), body).await.expect_error(INVALID);
        assert!(message.contains(expected), "{shown}: {message}");
    }
}

#[tokio::test]
async fn heartbeats_that_break_the_schema_are_refused() {
    let (_daemon, api, group) = daemon_with_stream(Daemon::memory()).await;
    for (pointer, value, expected) in [
        ("/memberEpoch", json!("0"), "memberEpoch"),
        ("/memberEpoch", json!(0.5), "memberEpoch"),
        ("/memberEpoch", json!(9_223_372_036_854_775_808_u64), "memberEpoch"),
        ("/memberEpoch", json!(9_007_199_254_740_993_u64), "2^53"),
        ("/metadataVersion", json!(-1), "metadataVersion"),
        ("/protocolVersion", Value::Null, "protocolVersion"),
        ("/requestId", json!(""), "requestId has 0 characters"),
        ("/requestId", json!("x".repeat(129)), "requestId has 129 characters"),
        ("/memberId", json!(" "), "memberId is blank"),
        ("/memberId", json!("a\u{0}b"), "U+0000"),
        ("/memberId", json!("x".repeat(513)), "513 bytes"),
        ("/instanceId", json!(""), "instanceId is empty"),
        ("/ownedShards", json!([{"shardIndex": -1}]), "ownedShards[0].shardIndex"),
        ("/ownedShards", json!([{"shardIndex": 4_000_000_000_u32}]), "out of range"),
        ("/ownedShards", json!([{"shardIndex": 1}, {"shardIndex": 1}]), "shard 1 appears more than once"),
        ("/ownedShards", json!([[0]]), "ownedShards[0]"),
        ("/ownedShards", Value::Null, "ownedShards"),
        (
            "/revokingShards",
            json!([{"shard": {"shardIndex": 1}, "state": "DRAINING", "inFlight": 1}]),
            "shard 1 appears more than once",
        ),
        (
            "/revokingShards",
            json!([{"shard": {"shardIndex": 2}, "state": "GONE", "inFlight": 1}]),
            "revokingShards[0].state",
        ),
        (
            "/runtimeConsumerCapacity",
            json!({"runtimeMaxConcurrency": 0, "availableConcurrency": 0}),
            "at least 1",
        ),
        ("/runtimeConsumerCapacity", json!({"runtimeMaxConcurrency": 1}), "availableConcurrency"),
        ("/runtimeConsumerCapacity/availableConcurrency", json!(-1), "availableConcurrency"),
    ] {
        let answer = api.post(&heartbeat_path(&group), &heartbeat_with(pointer, value.clone())).await;
        let message = answer.expect_error(INVALID);
        assert!(message.contains(expected), "{pointer} = {value}: {message}");
    }
    // The limits themselves are fine.
    for (pointer, value) in [("/requestId", json!("é".repeat(128))), ("/memberName", json!("x".repeat(512)))]
    {
        let mut body = heartbeat_with(pointer, value);
        body["ownedShards"] = json!([]);
        api.post(&heartbeat_path(&group), &body).await.success();
    }
}

#[tokio::test]
async fn what_the_state_machine_refuses_is_a_200() {
    let (_daemon, api, group) = daemon_with_stream(Daemon::memory()).await;
    for (pointer, value, status) in [
        ("/memberId", json!("somebody-else"), "INVALID_REQUEST"),
        ("/memberEpoch", json!(-2), "INVALID_REQUEST"),
        ("/protocolVersion", json!(2), "UNSUPPORTED_PROTOCOL"),
        ("/protocolVersion", json!(-1), "UNSUPPORTED_PROTOCOL"),
        ("/memberEpoch", json!(17), "UNKNOWN_MEMBER_ID"),
    ] {
        let answer =
            api.post(&heartbeat_path(&group), &heartbeat_with(pointer, value.clone())).await.success();
        assert_eq!(answer["status"], status, "{pointer} = {value}: {answer}");
        assert!(!answer["reason"].as_str().unwrap().is_empty(), "{answer}");
    }
    let nobody = GroupKey::new("orders", "nobody-made-this").unwrap();
    let answer = api.try_heartbeat(&nobody, &heartbeat("m1")).await.success();
    assert_eq!(answer["status"], "UNKNOWN_MEMBER_ID");
    assert_eq!(
        (&answer["metadataVersion"], &answer["assignment"]["assignedShards"]),
        (&json!(0), &json!([]))
    );
}

#[tokio::test]
async fn admin_requests_that_break_the_schema_are_refused() {
    let (_daemon, api, group) =
        daemon_with_stream(Daemon::memory().set("streams", "max-shard-count", "100")).await;
    let create = "/coord/v1/streams/fresh";
    for (body, expected) in [
        (json!({}), "requestedBy"),
        (json!({"requestedBy": ""}), "requestedBy is blank"),
        (json!({"requestedBy": " \t"}), "requestedBy is blank"),
        (json!({"requestedBy": 1}), "requestedBy"),
        (json!({"requestedBy": "x".repeat(513)}), "requestedBy has 513 bytes"),
        (json!({"requestedBy": "a", "reason": "x".repeat(1025)}), "reason has 1025 bytes"),
        (json!({"requestedBy": "a", "initialShardCount": 0}), "initialShardCount"),
        (json!({"requestedBy": "a", "initialShardCount": -1}), "initialShardCount"),
        (json!({"requestedBy": "a", "initialShardCount": 101}), "initialShardCount"),
        (json!({"requestedBy": "a", "initialShardCount": 1e300}), "initialShardCount"),
        (json!({"requestedBy": "a", "initialShardCount": "3"}), "initialShardCount"),
        (json!({"requestedBy": "a", "consumerGroups": []}), "consumerGroups is empty"),
        (json!({"requestedBy": "a", "consumerGroups": ["x", "x"]}), "names x twice"),
        (json!({"requestedBy": "a", "consumerGroups": ["x", "y{z}"]}), "consumerGroup contains a brace"),
        (json!({"requestedBy": "a", "consumerGroups": [""]}), "consumerGroup is blank"),
    ] {
        let message = api.post(create, &body).await.expect_error(INVALID);
        assert!(message.contains(expected), "{body}: {message}");
    }
    let fresh = GroupKey::new("fresh", "fresh").unwrap();
    for (body, expected) in [
        (json!({"requestedBy": ""}), "requestedBy is blank"),
        (json!({"requestedBy": "a", "initialShardCount": 0}), "initialShardCount"),
    ] {
        let message = api.post(&group_path(&fresh), &body).await.expect_error(INVALID);
        assert!(message.contains(expected), "{body}: {message}");
    }
    for (body, expected) in [
        (json!({"requestedBy": "a"}), "missing field `reason`"),
        (json!({"requestedBy": "a", "reason": " "}), "reason is blank"),
        (json!({"requestedBy": "", "reason": "a"}), "requestedBy is blank"),
        (json!({"requestedBy": "a", "reason": "a", "force": 1}), "force"),
    ] {
        let message = api.delete(&group_path(&group), &body).await.expect_error(INVALID);
        assert!(message.contains(expected), "{body}: {message}");
    }
    let message = api.send(api.request(Method::DELETE, &group_path(&group))).await.expect_error(INVALID);
    assert!(message.contains("empty"), "{message}");
    // Nothing of all this was done.
    api.get(&group_path(&fresh)).await.expect_error(ErrorCode::GroupNotFound);
    api.group(&group).await;
}

#[tokio::test]
async fn conflicts_and_missing_groups_have_their_codes() {
    let (_daemon, api, group) = daemon_with_stream(Daemon::memory()).await;
    let by = json!({"requestedBy": "test"});
    api.post("/coord/v1/streams/orders", &by).await.expect_error(ErrorCode::StreamPrefixAlreadyExists);
    api.post(&group_path(&group), &by).await.expect_error(ErrorCode::GroupAlreadyExists);
    let other = GroupKey::new("orders", "other").unwrap();
    let seven = json!({"requestedBy": "test", "initialShardCount": 7});
    api.post(&group_path(&other), &seven).await.expect_error(ErrorCode::ShardCountMismatch);

    api.heartbeat(&group, &heartbeat("m1")).await;
    let delete = json!({"requestedBy": "test", "reason": "over"});
    api.delete(&group_path(&group), &delete).await.expect_error(ErrorCode::GroupHasActiveMembers);
    let forced = json!({"requestedBy": "test", "reason": "over", "force": true});
    let deleted = api.delete(&group_path(&group), &forced).await.success();
    assert_eq!((&deleted["consumerGroup"], &deleted["liveMembers"]), (&json!("orders"), &json!(1)));

    for path in [
        group_path(&group),
        format!("{}/producer-routing", group_path(&group)),
        monitored_path(&group),
        format!("{}/members", monitored_path(&group)),
        format!("{}/assignments", monitored_path(&group)),
        format!("{}/actor", monitored_path(&group)),
        format!("{}/offsets", monitored_path(&group)),
        format!("{}/consumption", monitored_path(&group)),
        format!("{}/shards/0/messages", monitored_path(&group)),
        format!("{}/history", monitored_path(&group)),
    ] {
        api.get(&path).await.expect_error(ErrorCode::GroupNotFound);
    }
    api.delete(&group_path(&group), &forced).await.expect_error(ErrorCode::GroupNotFound);
}

#[tokio::test]
async fn names_that_share_a_key_collide() {
    let (_daemon, api, _) = daemon_with_stream(Daemon::memory()).await;
    let (one, other) = (GroupKey::new("a:b", "c").unwrap(), GroupKey::new("a", "b:c").unwrap());
    api.create_group(&one, 2).await;
    let answer = api.post(&group_path(&other), &json!({"requestedBy": "test"})).await;
    answer.expect_error(ErrorCode::GroupKeyCollision);
    api.get(&group_path(&other)).await.expect_error(ErrorCode::GroupNotFound);
    assert!(api.group(&one).await.healthy);
}

#[tokio::test]
async fn content_types_other_than_json_are_refused() {
    let (_daemon, api, group) = daemon_with_stream(Daemon::memory()).await;
    let body = || serde_json::to_vec(&heartbeat("m1")).unwrap();
    let post = || api.request(Method::POST, &heartbeat_path(&group)).body(body());
    for kind in
        ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", "json", ""]
    {
        let message =
            api.send(post().header("content-type", kind)).await.expect_error(ErrorCode::UnsupportedMediaType);
        assert!(message.contains("application/json"), "{kind}: {message}");
    }
    let compressed = post().header("content-type", "application/json").header("content-encoding", "gzip");
    api.send(compressed).await.expect_error(ErrorCode::UnsupportedMediaType);
    let delete =
        api.request(Method::DELETE, &group_path(&group)).header("content-type", "text/plain").body("x");
    api.send(delete).await.expect_error(ErrorCode::UnsupportedMediaType);

    let mut declared = vec![post()];
    for kind in ["application/json", "APPLICATION/JSON; charset=UTF-8", "application/vnd.rsc+json"] {
        declared.push(post().header("content-type", kind));
    }
    for request in declared {
        api.send(request).await.success();
    }
}

#[tokio::test]
async fn unknown_routes_and_methods_answer_in_the_same_shape() {
    let (daemon, api, group) = daemon_with_stream(Daemon::memory()).await;
    for path in [
        "/",
        "/favicon.ico",
        "/coord/v1",
        "/coord/v1/streams/orders/",
        "/coord/v1/streams/orders/shrink",
        "/coord/v1/streams/orders/groups/orders/",
        "/coord/v1/streams/orders/groups/orders/migrations/x/y",
        "/coord/v1/auth/login",
        "/coord/v1/monitoring/events",
        "/openapi.json",
    ] {
        for method in [Method::GET, Method::POST, Method::PUT] {
            let request = api.request(method, path).header("content-type", "application/json").body("{}");
            api.send(request).await.expect_error(ErrorCode::NotFound);
        }
    }
    for (method, path, allow) in [
        (Method::PUT, group_path(&group), "GET, HEAD, POST, DELETE"),
        (Method::GET, heartbeat_path(&group), "POST"),
        (Method::POST, "/livez".to_owned(), "GET, HEAD"),
        (Method::DELETE, "/coord/v1/monitoring/groups".to_owned(), "GET, HEAD"),
        (Method::GET, "/coord/v1/streams/orders".to_owned(), "POST"),
    ] {
        let answer = api.send(api.request(method.clone(), &path)).await;
        let message = answer.expect_error(ErrorCode::MethodNotAllowed);
        assert!(answer.header("allow") == allow && message.contains(allow), "{method} {path}: {answer:?}");
    }
    let mut raw = RawConnection::open(daemon.address()).await;
    assert_eq!(raw.request("BREW", "/livez", "").await.status, 405);
    assert_eq!(raw.request("OPTIONS", "*", "").await.status, 404);
    let absolute = format!("http://{}/livez", daemon.address());
    assert_eq!(raw.request("GET", &absolute, "").await.status, 200);
}

#[tokio::test]
async fn head_is_get_without_a_body() {
    let (daemon, api, group) = daemon_with_stream(Daemon::memory()).await;
    let mut raw = RawConnection::open(daemon.address()).await;
    for path in ["/livez".to_owned(), group_path(&group), format!("{}/producer-routing", group_path(&group))]
    {
        let get = api.get(&path).await;
        let head = raw.request("HEAD", &path, "").await;
        assert_eq!(head.status, 200, "{path}");
        for name in ["content-length", "content-type", "etag", "cache-control"] {
            assert_eq!(head.header(name), get.header(name).to_lowercase(), "{path}: {name}");
        }
    }
    // The connection is in step: what follows a HEAD is read as the next answer.
    assert_eq!(raw.request("GET", "/livez", "").await.json()["status"], "UP");
}

#[tokio::test]
async fn request_ids_are_echoed_or_made_up() {
    let (daemon, api, group) = daemon_with_stream(Daemon::memory()).await;
    for path in ["/livez", "/nowhere", "/coord/v1/streams//groups/x", &group_path(&group)] {
        let given = api.request(Method::GET, path).header("x-request-id", "trace-1/2:3");
        assert_eq!(api.send(given).await.header("x-request-id"), "trace-1/2:3", "{path}");
        for bad in ["", "two words", &"x".repeat(129), "caf\u{e9}"] {
            let request = api.request(Method::GET, path).header("x-request-id", bad);
            let id = api.send(request).await.header("x-request-id").to_owned();
            assert!(uuid::Uuid::parse_str(&id).is_ok(), "{path}, {bad}: {id}");
        }
    }
    let create = api.request(Method::POST, "/coord/v1/streams/logged").header("x-request-id", "mutation-1");
    api.send(create.json(&json!({"requestedBy": "test"}))).await.success();
    let beat = api.request(Method::POST, &heartbeat_path(&group)).header("x-request-id", "beat-1");
    api.send(beat.json(&heartbeat("m1"))).await.success();
    let log = daemon.log();
    let line = |id: &str| log.lines().find(|line| line.contains(id)).unwrap().to_owned();
    let (mutation, beat) = (line("mutation-1"), line("beat-1"));
    assert!(mutation.contains(" INFO ") && beat.contains("DEBUG "), "{mutation}\n{beat}");
    for fact in ["method=\"POST\"", "path=\"/coord/v1/streams/logged\"", "status=201", "duration_ms="] {
        assert!(mutation.contains(fact), "{fact}: {mutation}");
    }
}

#[tokio::test]
async fn no_answer_tells_how_the_program_is_built() {
    let (_daemon, api, group) = daemon_with_stream(Daemon::memory()).await;
    let mut refused =
        vec![api.get("/nowhere").await, api.post_bytes(&heartbeat_path(&group), "{\"a\":").await];
    for (pointer, value) in [
        ("/ownedShards", json!(1)),
        ("/runtimeConsumerCapacity", json!("x")),
        ("/revokingShards", json!([{"shard": 1, "state": {}, "inFlight": []}])),
        (
            "/shardProgress",
            json!([{"shard": {"shardIndex": 0}, "streamKey": "k", "pendingCount": 0, "updatedAt": 5}]),
        ),
    ] {
        refused.push(api.post(&heartbeat_path(&group), &heartbeat_with(pointer, value)).await);
    }
    for answer in refused {
        let text = String::from_utf8(answer.body.clone()).unwrap();
        for leak in
            [".rs", "::", "struct", "src/", "serde", "actix", "u32", "i64", "panicked", "RUST_BACKTRACE"]
        {
            assert!(!text.contains(leak), "{leak}: {text}");
        }
        assert_eq!((answer.header("server"), answer.header("x-powered-by")), ("", ""));
    }
}

#[tokio::test]
async fn shards_a_member_cannot_own_are_no_bad_request() {
    let (_daemon, api, group) = daemon_with_stream(Daemon::memory()).await;
    let mut request = heartbeat("m1");
    request.owned_shards = vec![ShardRef { shard_index: i32::MAX as u32 }];
    // Reported ownership of a join is ignored (protocol 4.1.4).
    let answer = api.heartbeat(&group, &request).await;
    assert_eq!(answer.assignment.assigned_shards.len(), 3);
}
