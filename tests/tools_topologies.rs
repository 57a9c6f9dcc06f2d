//! The operator's tools on a Redis Cluster and behind sentinels (protocol 12): every server is looked at, every master is
//! scanned, each key is found where it lies.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

#[allow(dead_code, reason = "each test binary uses its part of this module")]
#[path = "support/redis_topologies/mod.rs"]
mod redis_topologies;
mod support;

use std::collections::{BTreeMap, BTreeSet};

use redis_topologies::{Announced, ClusterSettings, RedisCluster, RedisSentinel};
use rsc_protocol::GroupKey;
use rsc_protocol::keys::{Keys, shard_key};
use support::{Daemon, RedisServer, Tool, wait_until};

fn tool(cluster: &RedisCluster) -> Tool {
    Tool::at(&cluster.urls()[0]).set("redis", "mode", "cluster").set("redis", "command-timeout", "1s").set(
        "producer",
        "publish-margin",
        "7s",
    )
}

/// Complaints besides the one that these servers keep nothing on disk.
fn complaints(examined: &support::Examined) -> BTreeSet<&str> {
    examined.complaints().into_iter().filter(|id| *id != "persistence").collect()
}

fn masters_of(cluster: &RedisCluster, keys: impl Iterator<Item = String>) -> BTreeSet<usize> {
    keys.map(|key| cluster.master_of(&key)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_examined_repaired_and_restored_on_all_its_masters() {
    let cluster = RedisCluster::start();
    let keys = Keys::default();
    let daemon = Daemon::builder(&["--redis-mode", "cluster", "--redis-url", &cluster.urls()[0]]).start();
    let mut groups: Vec<GroupKey> = Vec::new();
    for number in 0..9 {
        groups.push(daemon.api().create_stream(&format!("stream-{number}"), 2).await);
    }
    drop(daemon);
    assert_eq!(
        masters_of(&cluster, groups.iter().map(|group| keys.metadata(group))).len(),
        3,
        "on every master"
    );

    // A node tells of a replica once it has heard that it has something.
    wait_until("all nodes tell of each other", async || {
        let told = |index| {
            let slots: redis::Value = cluster.command(index, &["CLUSTER", "SLOTS"]);
            cluster
                .indices()
                .all(|other| format!("{slots:?}").contains(&cluster.node(other).port().to_string()))
        };
        cluster.indices().all(told)
    })
    .await;
    let examined = tool(&cluster).doctor().await;
    assert_eq!(complaints(&examined), BTreeSet::new(), "{examined:#?}");
    examined.expect("connection", "ok", "6 servers known");
    for id in [
        "nodes", "mode", "role", "commands", "eviction", "clock", "acl", "index", "records", "mutexes",
        "shards",
    ] {
        assert_eq!(examined.level(id), Some("ok"), "{id}: {examined:#?}");
    }
    examined.expect("records", "ok", "9 records");
    examined.expect("shards", "ok", "18 shards");
    assert_eq!(
        examined.findings.iter().filter(|finding| finding.id == "replicas").count(),
        3,
        "of each master"
    );

    // The index, which lies on one of them, is rebuilt from all.
    let index = cluster.master_of(&keys.groups());
    cluster.command::<redis::Value>(index, &["DEL", &keys.groups()]);
    let unindexed = tool(&cluster).doctor().await;
    let found = unindexed.findings.iter().filter(|finding| finding.id == "index.unindexed").count();
    assert_eq!(found, 9, "{unindexed:#?}");
    tool(&cluster).run(&["repair", "index"]).await.expect_success();
    let entries: BTreeSet<String> = cluster.command(index, &["SMEMBERS", &keys.groups()]);
    assert_eq!(entries, groups.iter().map(|group| keys.metadata(group)).collect());

    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("backup");
    let file = file.to_str().unwrap();
    tool(&cluster).run(&["backup", file]).await.expect_success();
    for master in cluster.masters() {
        cluster.command::<redis::Value>(master, &["FLUSHALL"]);
    }
    let run = tool(&cluster).run(&["restore", file]).await.expect_success();
    assert_eq!(run.stdout.lines().filter(|line| line.starts_with("restored ")).count(), 9, "{run:?}");
    for group in &groups {
        let exists: bool = cluster.command_for(&keys.metadata(group), &["EXISTS", &keys.metadata(group)]);
        assert!(exists, "{group}");
    }
    let examined = tool(&cluster).doctor().await;
    assert_eq!(complaints(&examined), BTreeSet::from(["shard.missing"]), "the streams are in no backup");
    assert_eq!(examined.level("records"), Some("ok"));
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_single_nodes_is_named() {
    let cluster = RedisCluster::start();
    let daemon = Daemon::builder(&["--redis-mode", "cluster", "--redis-url", &cluster.urls()[0]]).start();
    daemon.api().create_stream("orders", 6).await;
    drop(daemon);
    let [.., master] = cluster.masters()[..] else { panic!() };
    let port = |index: usize| cluster.node(index).port().to_string();
    // A right that is missing on one master only.
    for index in cluster.indices() {
        let rules = ["ACL", "SETUSER", "anna", "on", ">pw", "~*", "+@all"];
        cluster.command::<redis::Value>(index, &rules);
    }
    cluster.command::<redis::Value>(master, &["ACL", "SETUSER", "anna", "-hset"]);
    let anna = tool(&cluster).set("redis", "username", "anna").set("redis", "password", "pw");
    let examined = anna.doctor().await;
    examined.expect("acl", "error", &format!("127.0.0.1:{}", port(master)));
    assert_eq!(complaints(&examined), BTreeSet::from(["acl"]));

    cluster.command::<redis::Value>(master, &["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    tool(&cluster).doctor().await.expect("eviction", "warning", &port(master));
    cluster.command::<redis::Value>(master, &["CONFIG", "SET", "maxmemory-policy", "noeviction"]);

    let waiting = tool(&cluster).set("redis", "wait-replicas", "2").doctor().await;
    let short =
        waiting.findings.iter().filter(|finding| finding.id == "replicas" && finding.level == "error");
    assert_eq!(short.count(), 3, "each master has one replica: {waiting:#?}");

    let replica = cluster.replica_of(master);
    cluster.pause(replica);
    let examined = tool(&cluster).set("redis", "command-timeout", "500ms").doctor().await;
    cluster.resume(replica);
    let finding = examined.expect("nodes", "error", &port(replica));
    assert!(finding.remedy.as_ref().unwrap().contains("redis.node-mappings"), "{finding:?}");
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread")]
async fn announced_addresses_that_lead_nowhere_are_named_and_can_be_mapped() {
    let settings = ClusterSettings { announced: Announced::Ports, ..ClusterSettings::default() };
    let cluster = RedisCluster::start_with(settings);
    let examined = tool(&cluster).doctor().await;
    let mappings: BTreeMap<String, String> = cluster.mappings();
    let masters = cluster.masters();
    let is_master =
        |real: &String| masters.iter().any(|&index| real.ends_with(&cluster.node(index).port().to_string()));
    for (announced, _) in mappings.iter().filter(|(_, real)| is_master(real)) {
        let finding = examined.expect("nodes", "error", announced);
        assert!(finding.remedy.as_ref().unwrap().contains("redis.node-mappings"), "{finding:?}");
    }
    assert_eq!(examined.findings.iter().filter(|finding| finding.level == "ok").count(), 1, "{examined:#?}");

    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("rsc.toml");
    let rows: String = mappings.iter().map(|(from, to)| format!("\"{from}\" = \"{to}\"\n")).collect();
    std::fs::write(&file, format!("[redis.node-mappings]\n{rows}")).unwrap();
    let run = tool(&cluster).run(&["doctor", "--config", file.to_str().unwrap()]).await.expect_success();
    assert!(run.stdout.contains("every server answers where it is announced"), "{run:?}");
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_wrong_kind_of_deployment_is_the_only_finding() {
    let server = RedisServer::start();
    for mode in ["cluster", "sentinel"] {
        let tool = Tool::on(&server).set("redis", "mode", mode).set("redis", "sentinel-master", "main");
        let tool = if mode == "cluster" { Tool::on(&server).set("redis", "mode", mode) } else { tool };
        let examined = tool.doctor().await;
        examined.expect("mode", "error", "runs as standalone");
        assert_eq!(examined.findings.len(), 1, "{examined:#?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_behind_sentinels_are_examined_and_the_master_is_restored() {
    let redis = RedisSentinel::start();
    let tool = Tool::at(&redis.sentinel_urls()[0])
        .set("redis", "mode", "sentinel")
        .set("redis", "sentinel-master", redis.name())
        .set("producer", "publish-margin", "7s");
    let daemon = Daemon::builder(&["--redis-mode", "sentinel", "--redis-url", &redis.sentinel_urls()[0]]);
    let daemon = daemon.set("redis", "sentinel-master", redis.name()).start();
    let group = daemon.api().create_stream("orders", 2).await;
    drop(daemon);
    let examined = tool.doctor().await;
    assert_eq!(complaints(&examined), BTreeSet::new(), "{examined:#?}");
    examined.expect("connection", "ok", "3 servers known");
    examined.expect("replicas", "info", "2 connected");
    examined.expect("shards", "ok", "2 shards");

    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("backup");
    tool.run(&["backup", file.to_str().unwrap()]).await.expect_success();
    let master = redis.server(redis.master());
    let key = Keys::default().metadata(&group);
    master.command::<redis::Value>(&["DEL", &key, &shard_key("orders", 0)]);
    let examined = tool.doctor().await;
    examined.expect("index.missing", "error", &key);
    let run = tool.run(&["restore", file.to_str().unwrap()]).await.expect_success();
    assert!(run.stdout.starts_with("restored "), "{run:?}");
    tool.doctor().await.expect("shard.missing", "error", "orders:0");
    drop(redis);
}
