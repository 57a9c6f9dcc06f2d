//! Black-box tests of producer routing and its ETag (protocol 7).

mod support;

use reqwest::Method;
use rsc_protocol::hash::redis_slot;
use rsc_protocol::routing::ProducerRouting;
use rsc_protocol::{ErrorCode, GroupKey};
use serde_json::json;
use support::{Answer, Api, Daemon, Member, RedisServer, group_path};

async fn routing(api: &Api, group: &GroupKey, if_none_match: &[&str]) -> Answer {
    let path = format!("{}/producer-routing", group_path(group));
    let mut request = api.request(Method::GET, &path);
    for value in if_none_match {
        request = request.header("if-none-match", *value);
    }
    api.send(request).await
}

#[tokio::test]
async fn routing_says_where_every_shard_is() {
    let daemon = Daemon::memory().set("producer", "routing-cache-ttl", "7s").start();
    let api = daemon.api();
    let group = api.create_stream("orders", 3).await;
    let answer = routing(&api, &group, &[]).await;
    assert_eq!(answer.header("cache-control"), "no-cache");
    let body: ProducerRouting = answer.read();
    assert_eq!(
        answer.json()["shards"][1],
        json!({"shardIndex": 1, "streamKey": "orders:1", "redisSlot": redis_slot("orders:1")})
    );
    assert_eq!((body.shard_count, body.shards.len()), (3, 3));
    assert_eq!((body.stream_key_pattern.as_str(), body.hash.as_str()), ("orders:{shardIndex}", "murmur3_32"));
    assert_eq!(body.routing_cache_ttl_ms, 7_000);
    assert_eq!(body.metadata_version, api.group(&group).await.metadata_version);
}

#[tokio::test]
async fn the_etag_stands_for_the_body_on_every_instance() {
    let redis = RedisServer::start();
    let (one, other) = (Daemon::redis(&redis).start(), Daemon::redis(&redis).start());
    let (one, other) = (one.api(), other.api());
    let group = one.create_stream("orders", 3).await;
    let first = routing(&one, &group, &[]).await;
    let tag = first.header("etag").to_owned();
    assert!(tag.starts_with('"') && tag.ends_with('"') && tag.is_ascii(), "{tag}");

    let weak = format!("W/{tag}");
    let listed = format!("\"x\", {tag} , \"y\"");
    for known in [&[tag.as_str()][..], &[&weak], &[&listed], &["*"], &["\"x\"", &tag]] {
        for api in [&one, &other] {
            let answer = routing(api, &group, known).await;
            assert_eq!((answer.status.as_u16(), answer.body.len()), (304, 0), "{known:?}");
            assert_eq!(answer.header("etag"), tag);
            assert_eq!(answer.header("cache-control"), "no-cache");
        }
    }
    for unknown in ["\"x\"", tag.trim_matches('"'), "", "W/"] {
        let answer = routing(&one, &group, &[unknown]).await;
        assert_eq!((answer.status.as_u16(), &answer.body), (200, &first.body), "{unknown}");
    }

    // A version that one instance made is seen by the other at once: whoever is told "not modified" goes on
    // for another lease.
    Member::new(&one, &group, "m1").beat().await;
    let second = routing(&other, &group, &[&tag]).await;
    assert_eq!(second.status, 200);
    assert_ne!(second.header("etag"), tag);
    assert!(
        second.read::<ProducerRouting>().metadata_version > first.read::<ProducerRouting>().metadata_version
    );

    // The same version of another history is another tag.
    let forced = json!({"requestedBy": "test", "reason": "again", "force": true});
    one.delete(&group_path(&group), &forced).await.success();
    routing(&other, &group, &["*"]).await.expect_error(ErrorCode::GroupNotFound);
    one.create_group(&group, 5).await;
    let third = routing(&other, &group, &[&tag, second.header("etag")]).await;
    assert_eq!((third.status.as_u16(), third.read::<ProducerRouting>().shard_count), (200, 5));
}

#[tokio::test]
async fn nothing_is_unmodified_that_could_not_be_read() {
    let mut redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).fast().start();
    let api = daemon.api();
    let group = api.create_stream("orders", 3).await;
    let tag = routing(&api, &group, &[]).await.header("etag").to_owned();
    redis.pause();
    routing(&api, &group, &[&tag]).await.expect_error(ErrorCode::RedisUnavailable);
    redis.resume();
    redis.kill();
    routing(&api, &group, &[&tag, "*"]).await.expect_error(ErrorCode::RedisUnavailable);
}

#[tokio::test]
async fn a_group_whose_record_is_gone_or_damaged_has_no_routing() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).start();
    let api = daemon.api();
    let group = api.create_stream("orders", 3).await;
    let tag = routing(&api, &group, &[]).await.header("etag").to_owned();
    let key = rsc_protocol::keys::Keys::default().metadata(&group);
    let mut connection = redis.connection().await;
    let aggregate = redis.metadata_field(&group, "aggregate").await.unwrap();
    let set = |value: &str| redis::cmd("HSET").arg(&key).arg("aggregate").arg(value).to_owned();
    set("{broken").exec_async(&mut connection).await.unwrap();
    routing(&api, &group, &[&tag]).await.expect_error(ErrorCode::GroupMetadataCorrupt);
    set(&aggregate).exec_async(&mut connection).await.unwrap();
    assert_eq!(routing(&api, &group, &[&tag]).await.status, 304);
    redis::cmd("DEL").arg(&key).exec_async(&mut connection).await.unwrap();
    routing(&api, &group, &[&tag]).await.expect_error(ErrorCode::GroupMetadataMissing);
}
