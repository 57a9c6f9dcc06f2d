//! `rsc repair index` (protocol 2, 3 and 12): the index can always be rebuilt, and what fails closed stays closed.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeSet;

use rsc_protocol::keys::Keys;
use rsc_protocol::{ErrorCode, GroupKey};
use serde_json::{Value, json};
use support::{Api, Daemon, RedisServer, Tool, group_path, heartbeat, wait_until};

fn key_of(group: &GroupKey) -> String {
    Keys::default().metadata(group)
}

async fn index(redis: &RedisServer) -> BTreeSet<String> {
    redis.command(&["SMEMBERS", &Keys::default().groups()]).await
}

async fn run(redis: &RedisServer, command: &[&str]) {
    redis.command::<redis::Value>(command).await;
}

/// What `repair index` did: action and key.
async fn repair(tool: &Tool, arguments: &[&str]) -> Vec<(String, String)> {
    let run =
        tool.run(&[&["repair", "index", "--output", "json"], arguments].concat()).await.expect_success();
    let document = run.json();
    assert_eq!((&document["version"], &document["index"]), (&json!(1), &json!("redis-stream:coord:groups")));
    assert_eq!(document["dryRun"], json!(arguments.contains(&"--dry-run")));
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let action = |action: &Value| {
        assert!(!text(&action["reason"]).is_empty());
        (text(&action["action"]), text(&action["key"]))
    };
    document["actions"].as_array().unwrap().iter().map(action).collect()
}

async fn deleted(api: &Api, group: &GroupKey) {
    let body = json!({"requestedBy": "test", "reason": "test"});
    api.delete(&group_path(group), &body).await.success();
}

#[tokio::test]
async fn lost_index_is_rebuilt_from_the_keys() {
    let redis = RedisServer::start();
    let groups = {
        let daemon = Daemon::redis(&redis).start();
        // Names that are patterns, and many keys of others in between.
        let names = ["orders", "with[brackets]*?", "a:b", "ü"];
        let mut groups = Vec::new();
        for name in names {
            groups.push(daemon.api().create_stream(name, 1).await);
        }
        groups
    };
    let others: Vec<String> = (0..3_000).map(|number| format!("other:{number}")).collect();
    let pairs: Vec<&str> = others.iter().flat_map(|key| [key.as_str(), "x"]).collect();
    run(&redis, &[&["MSET"], &pairs[..]].concat()).await;
    let whole = index(&redis).await;
    assert_eq!(whole, groups.iter().map(key_of).collect());
    let tool = Tool::on(&redis);
    assert_eq!(repair(&tool, &[]).await, []);
    let text = tool.run(&["repair", "index"]).await.expect_success().stdout;
    assert_eq!(text, "nothing to repair: the index names every group and nothing else\n");

    run(&redis, &["DEL", &Keys::default().groups()]).await;
    let added: BTreeSet<(String, String)> = whole.iter().map(|key| ("add".to_owned(), key.clone())).collect();
    let planned = repair(&tool, &["--dry-run"]).await;
    assert_eq!(planned.into_iter().collect::<BTreeSet<_>>(), added);
    assert_eq!(index(&redis).await, BTreeSet::new(), "a dry run writes nothing");
    let text = tool.run(&["repair", "index", "--dry-run"]).await.expect_success().stdout;
    assert!(text.lines().all(|line| line.starts_with("would add    redis-stream:coord:{")), "{text}");
    assert_eq!(text.lines().count(), 4);

    // Page by page: some 3,000 keys in small steps, how small is the server's choice.
    let done = repair(&tool, &["--scan-count", "10", "--scan-pause", "0ms"]).await;
    assert_eq!(done.into_iter().collect::<BTreeSet<_>>(), added);
    assert_eq!(index(&redis).await, whole);
    let stats: String = redis.command(&["INFO", "commandstats"]).await;
    let scans = stats.lines().find(|line| line.starts_with("cmdstat_scan:")).unwrap();
    let calls: u64 = scans.split(['=', ',']).nth(1).unwrap().parse().unwrap();
    assert!(calls > 20, "{scans}");

    // A coordinator that starts now finds them.
    let daemon = Daemon::redis(&redis).fast().start();
    for group in &groups {
        daemon.api().group(group).await;
    }
}

#[tokio::test]
async fn other_prefixes_are_left_alone() {
    let redis = RedisServer::start();
    for prefix in ["one", "one:two", "on*"] {
        let daemon = Daemon::redis(&redis).set("store", "key-prefix", prefix).start();
        daemon.api().create_stream("orders", 1).await;
    }
    run(&redis, &["DEL", "one:groups", "one:two:groups", "on*:groups"]).await;
    let tool = Tool::on(&redis).set("store", "key-prefix", "on*");
    tool.run(&["repair", "index"]).await.expect_success();
    let keys: BTreeSet<String> = redis.command(&["KEYS", "*:groups"]).await;
    assert_eq!(keys, BTreeSet::from(["on*:groups".to_owned()]));
    let entries: BTreeSet<String> = redis.command(&["SMEMBERS", "on*:groups"]).await;
    assert_eq!(entries, BTreeSet::from(["on*:{orders:orders}:metadata".to_owned()]));
}

#[tokio::test]
async fn group_without_record_stays_in_the_index_and_closed_unless_somebody_insists() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).fast().start();
    let api = daemon.api();
    let (lost, gone) = (api.create_stream("lost", 1).await, api.create_stream("gone", 1).await);
    deleted(&api, &gone).await;
    drop(daemon);
    run(&redis, &["DEL", &key_of(&lost)]).await;
    run(&redis, &["SADD", &Keys::default().groups(), &key_of(&gone), "no key at all"]).await;

    let tool = Tool::on(&redis);
    let plan: BTreeSet<(String, String)> =
        [("keep", key_of(&lost)), ("remove", key_of(&gone)), ("keep", "no key at all".to_owned())]
            .map(|(action, key)| (action.to_owned(), key))
            .into();
    let set = |done: Vec<(String, String)>| done.into_iter().collect::<BTreeSet<_>>();
    assert_eq!(set(repair(&tool, &["--dry-run"]).await), plan);
    assert_eq!(index(&redis).await.len(), 3);
    assert_eq!(set(repair(&tool, &[]).await), plan);
    assert_eq!(index(&redis).await, BTreeSet::from([key_of(&lost), "no key at all".to_owned()]));
    let daemon = Daemon::redis(&redis).fast().start();
    let missing = daemon.api().try_heartbeat(&lost, &heartbeat("m")).await;
    missing.expect_error(ErrorCode::GroupMetadataMissing);

    let text = tool.run(&["repair", "index", "--remove-missing"]).await.expect_success().stdout;
    assert!(text.contains(&format!("removed      {}: ", key_of(&lost))), "{text}");
    assert_eq!(index(&redis).await, BTreeSet::new());
}

#[tokio::test]
async fn only_records_that_say_that_they_are_this_keys_are_added() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).start();
    let group = daemon.api().create_stream("orders", 1).await;
    drop(daemon);
    let keys = Keys::default();
    let other = |name: &str| key_of(&GroupKey::new(name, name).unwrap());
    let (copied, newer, garbage, list) = (other("copied"), other("newer"), other("garbage"), other("list"));
    run(&redis, &["COPY", &key_of(&group), &copied]).await;
    run(&redis, &["COPY", &key_of(&group), &newer]).await;
    // Unreadable, and yet that group's: it exists, and needs an operator.
    let aggregate =
        json!({"streamPrefix": "newer", "consumerGroup": "newer", "schemaVersion": 9}).to_string();
    run(&redis, &["HSET", &newer, "aggregate", &aggregate]).await;
    run(&redis, &["HSET", &garbage, "aggregate", "{"]).await;
    run(&redis, &["RPUSH", &list, "x"]).await;
    run(&redis, &["HSET", "redis-stream:coord:{nocolon}:metadata", "aggregate", "{"]).await;
    run(&redis, &["DEL", &keys.groups()]).await;

    let done: BTreeSet<(String, String)> = repair(&Tool::on(&redis), &[]).await.into_iter().collect();
    let expected = [
        ("add", key_of(&group)),
        ("add", newer.clone()),
        ("leave-out", copied),
        ("leave-out", garbage),
        ("leave-out", list),
        ("leave-out", "redis-stream:coord:{nocolon}:metadata".to_owned()),
    ];
    assert_eq!(done, expected.map(|(action, key)| (action.to_owned(), key)).into());
    assert_eq!(index(&redis).await, BTreeSet::from([key_of(&group), newer]));
}

#[tokio::test]
async fn scan_that_takes_too_long_is_given_up() {
    let redis = RedisServer::start();
    let others: Vec<String> = (0..100).map(|number| format!("other:{number}")).collect();
    let pairs: Vec<&str> = others.iter().flat_map(|key| [key.as_str(), "x"]).collect();
    run(&redis, &[&["MSET"], &pairs[..]].concat()).await;
    let tool = Tool::on(&redis);
    let slow = ["repair", "index", "--scan-count", "1", "--scan-pause", "20ms", "--time-limit", "100ms"];
    let run = tool.run(&slow).await;
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.contains("did not end within 100ms"), "{run:?}");
}

#[tokio::test]
async fn index_that_is_rebuilt_beside_a_running_coordinator_is_the_same() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).fast().start();
    let group = daemon.api().create_stream("orders", 1).await;
    for _ in 0..5 {
        run(&redis, &["DEL", &Keys::default().groups()]).await;
        Tool::on(&redis).run(&["repair", "index"]).await.expect_success();
        assert_eq!(index(&redis).await, BTreeSet::from([key_of(&group)]));
    }
    deleted(&daemon.api(), &group).await;
    wait_until("the deleted group is gone from the index", async || index(&redis).await.is_empty()).await;
    assert_eq!(repair(&Tool::on(&redis), &[]).await, []);
}
