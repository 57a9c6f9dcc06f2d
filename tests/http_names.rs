//! Black-box tests of names in paths: percent-encoding, limits, refusals (protocol 1 and 8).

mod support;

use rsc_protocol::keys::{Keys, shard_key};
use rsc_protocol::names::MAX_NAME_BYTES;
use rsc_protocol::{ErrorCode, GroupKey};
use serde_json::json;
use support::{Daemon, RawConnection, RedisServer, encode, group_path, heartbeat, monitored_path};

#[tokio::test]
async fn names_round_trip_from_the_path_to_the_redis_key() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).start();
    let api = daemon.api();
    let longest = "é".repeat(MAX_NAME_BYTES / 2);
    for name in [
        "plain",
        "a/b",
        "/",
        "#fragment",
        "what?",
        "100%",
        "%2F",
        "%252f",
        "a+b",
        "two words",
        " padded ",
        "주문",
        "🚚📦",
        "e\u{301}",
        "colon:colon",
        "semi;comma,equals=&",
        "\"quoted\"\\",
        "...",
        "monitoring",
        "groups",
        longest.as_str(),
    ] {
        let group = GroupKey::new(name, format!("g {name}").chars().take(200).collect::<String>()).unwrap();
        let created = api.create_group(&group, 1).await;
        assert_eq!(
            (created.stream_prefix.as_str(), created.consumer_group.as_str()),
            (name, group.consumer_group())
        );
        assert_eq!(api.group(&group).await.stream_prefix, name);

        let member = if name.len() < 500 { format!("{{{name}}}") } else { name.to_owned() };
        let answer = api.heartbeat(&group, &heartbeat(&member)).await;
        assert_eq!(
            (answer.member_id.as_str(), answer.assignment.assigned_shards.len()),
            (member.as_str(), 1),
            "{name}"
        );
        let members = api.get(&format!("{}/members", monitored_path(&group))).await.success();
        assert_eq!(members["members"][0]["memberId"], *member, "{name}");
        let routing = api.get(&format!("{}/producer-routing", group_path(&group))).await.success();
        assert_eq!(routing["shards"][0]["streamKey"], format!("{name}:0"));

        let key = Keys::default().metadata(&group);
        let mut connection = redis.connection().await;
        let kind: String = redis::cmd("TYPE").arg(&key).query_async(&mut connection).await.unwrap();
        assert_eq!(kind, "hash", "{key}");
        let stream: String =
            redis::cmd("TYPE").arg(shard_key(name, 0)).query_async(&mut connection).await.unwrap();
        assert_eq!(stream, "stream", "{name}");
        assert_eq!(redis.aggregate(&group).await.unwrap()["streamPrefix"], name);
    }
}

#[tokio::test]
async fn dots_are_names_like_any_other() {
    let daemon = Daemon::memory().start();
    let mut raw = RawConnection::open(daemon.address()).await;
    let body = json!({"requestedBy": "test", "initialShardCount": 1}).to_string();
    for (encoded, name) in [("..", ".."), (".", "."), ("%2E%2e", ".."), ("%2e", ".")] {
        let path = format!("/coord/v1/streams/{encoded}/groups/g{}", encoded.len());
        let created = raw.request("POST", &path, &body).await;
        assert_eq!(created.status, 201, "{path}: {created:?}");
        assert_eq!(created.json()["streamPrefix"], name, "{path}");
        assert_eq!(raw.request("GET", &path, "").await.json()["streamPrefix"], name);
    }
}

#[tokio::test]
async fn names_that_break_a_rule_are_refused_with_the_rule() {
    let daemon = Daemon::memory().start();
    let api = daemon.api();
    let too_long = "x".repeat(MAX_NAME_BYTES + 1);
    let bad = [
        (String::new(), "is blank"),
        ("%20".to_owned(), "is blank"),
        ("%E3%80%80".to_owned(), "is blank"),
        (encode(&too_long), "513 bytes"),
        (encode(&"é".repeat(257)), "514 bytes"),
        ("a%00b".to_owned(), "U+0000"),
        ("a%0Ab".to_owned(), "U+000A"),
        ("%7F".to_owned(), "U+007F"),
        ("%C2%85".to_owned(), "U+0085"),
        ("a%FFb".to_owned(), "not UTF-8"),
        ("%C0%AF".to_owned(), "not UTF-8"),
        ("%ED%A0%80".to_owned(), "not UTF-8"),
        ("100%".to_owned(), "hexadecimal"),
        ("%2".to_owned(), "hexadecimal"),
        ("%zz".to_owned(), "hexadecimal"),
    ];
    let braces = [("a%7Bb".to_owned(), "brace"), ("a%7Db".to_owned(), "brace")];
    let create = json!({"requestedBy": "test"});
    for (segment, expected) in bad.iter().chain(&braces) {
        let message = api.post(&format!("/coord/v1/streams/{segment}"), &create).await;
        let message = message.expect_error(ErrorCode::InvalidRequest);
        assert!(message.contains("streamPrefix") && message.contains(expected), "{segment}: {message}");
        for path in [
            format!("/coord/v1/streams/p/groups/{segment}"),
            format!("/coord/v1/monitoring/streams/p/groups/{segment}/members"),
        ] {
            let message = api.get(&path).await.expect_error(ErrorCode::InvalidRequest);
            assert!(message.contains("consumerGroup") && message.contains(expected), "{path}: {message}");
        }
    }
    let body = serde_json::to_value(heartbeat("m")).unwrap();
    for (segment, expected) in &bad {
        let path = format!("/coord/v1/streams/p/groups/g/members/{segment}/heartbeat");
        let message = api.post(&path, &body).await.expect_error(ErrorCode::InvalidRequest);
        assert!(message.contains("memberId") && message.contains(expected), "{segment}: {message}");
    }
    assert_eq!(api.get("/coord/v1/monitoring/groups").await.success()["groups"], json!([]));
}

#[tokio::test]
async fn raw_bytes_in_a_path_are_refused_and_the_daemon_goes_on() {
    let daemon = Daemon::memory().start();
    for target in [&b"/coord/v1/streams/\xff\xfe"[..], "/coord/v1/streams/주문".as_bytes(), b"/a b", b"/a\0b"]
    {
        let mut raw = RawConnection::open(daemon.address()).await;
        raw.send(&[b"GET ", target, b" HTTP/1.1\r\nhost: test\r\n\r\n"].concat()).await;
        assert_eq!(raw.answer(false).await.status, 400, "{}", String::from_utf8_lossy(target));
    }
    daemon.api().get("/livez").await.success();
}
