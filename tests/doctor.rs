//! `rsc doctor` on servers, connections, rights, clocks and configuration; what it says about groups is in
//! `doctor_groups.rs` (protocol 12; docs/doctor.md).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeMap;

use support::{Daemon, Proxy, RedisServer, Tool, wait_until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A server as it should be: append-only file and all.
async fn healthy() -> RedisServer {
    let redis = RedisServer::start();
    redis.command::<()>(&["CONFIG", "SET", "appendonly", "yes"]).await;
    wait_until("the append-only file is written", async || {
        redis.command::<String>(&["INFO", "persistence"]).await.contains("aof_rewrite_in_progress:0")
    })
    .await;
    redis
}

/// A configuration that nothing can be said against.
fn sound(redis: &RedisServer) -> Tool {
    Tool::on(redis).set("producer", "publish-margin", "7s")
}

#[tokio::test]
async fn nothing_is_found_where_everything_is_as_it_should_be() {
    let redis = healthy().await;
    let daemon = Daemon::redis(&redis).start();
    daemon.api().create_stream("orders", 4).await;
    let before = redis.dump_all().await;
    let examined = sound(&redis).doctor().await;
    assert_eq!(examined.complaints(), [""; 0], "{examined:#?}");
    let ok: Vec<&str> = examined
        .findings
        .iter()
        .filter(|finding| finding.level == "ok")
        .map(|finding| finding.id.as_str())
        .collect();
    let areas = "connection nodes mode role commands eviction persistence server-timeouts timeouts clock acl index records mutexes shards";
    assert_eq!(ok, areas.split(' ').collect::<Vec<_>>());
    examined.expect("version", "info", &redis.port().to_string());
    examined.expect("commands.ack", "info", "XACKDEL");
    assert_eq!(redis.dump_all().await, before, "nothing is written, and nothing left behind");

    let document = &examined.document;
    assert_eq!((&document["version"], &document["level"]), (&1.into(), &"info".into()));
    assert_eq!(document["counts"]["ok"], 15, "{}", document["counts"]);
    assert!(document["checkedAt"].as_str().unwrap().ends_with('Z'));
    assert_eq!(
        (&document["mode"], &document["keyPrefix"]),
        (&"standalone".into(), &"redis-stream:coord".into())
    );

    let text = sound(&redis).run(&["doctor"]).await.expect_success().stdout;
    assert_eq!(text.lines().count(), examined.findings.len() + 1, "{text}");
    assert_eq!(text.lines().last(), Some("0 error, 0 warning, 0 unknown, 2 info, 15 ok"));
}

#[tokio::test]
async fn who_is_out_of_reach_or_lets_nobody_in_is_the_only_finding() {
    let mut redis = RedisServer::start();
    redis.command::<()>(&["ACL", "SETUSER", "anna", "on", ">right", "~*", "+@all"]).await;
    let only = async |url: &str, part: &str| {
        let examined = Tool::at(url).set("redis", "command-timeout", "300ms").doctor().await;
        examined.expect("connection", "error", part);
        assert_eq!(examined.findings.len(), 1, "{examined:#?}");
        assert!(examined.document["checkedAt"].is_null());
        examined.findings[0].clone()
    };
    let port = redis.port();
    let wrong = only(&format!("redis://anna:geheim@127.0.0.1:{port}"), "wrong user or password").await;
    assert!(!format!("{wrong:?}").contains("geheim"), "{wrong:?}");
    assert!(wrong.message.contains("redis.password"), "{wrong:?}");
    redis.command::<()>(&["CONFIG", "SET", "requirepass", "secret"]).await;
    assert!(only(&redis.url(), "NOAUTH").await.message.contains("redis.password"));
    redis.pause();
    only(&redis.url(), "did not answer").await;
    redis.resume();
    redis.kill();
    only(&redis.url(), "Connection refused").await;
}

#[tokio::test]
async fn bad_configuration_and_arguments_are_code_2() {
    for (arguments, part) in [
        (&["doctor", "--store", "memory"][..], "store.type"),
        (&["backup", "-", "--store", "memory"][..], "store.type"),
        (&["doctor", "--output", "yaml"][..], "--output"),
        (&["doctor", "--redis-mode", "nothing"][..], "redis.mode"),
        (&["repair", "index", "--scan-count", "0"][..], "--scan-count"),
    ] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_rsc"));
        let output = command.args(arguments).env_clear().output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(text.contains(part), "{arguments:?}: {text}");
    }
}

#[tokio::test]
async fn server_of_another_kind_is_named_and_its_keys_are_left_alone() {
    let redis = RedisServer::start_with(&["--cluster-enabled", "yes"]);
    let examined = sound(&redis).doctor().await;
    let finding = examined.expect("mode", "error", "runs as cluster");
    assert!(finding.remedy.as_ref().unwrap().contains("redis.mode to cluster"), "{finding:?}");
    for id in ["acl", "index", "records", "mutexes", "shards"] {
        examined.expect(id, "unknown", "see mode");
    }
}

#[tokio::test]
async fn server_that_stops_answering_is_named() {
    let redis = healthy().await;
    let proxy = Proxy::to(redis.port()).await;
    let _held = proxy.hold_next("PING");
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    let examined = Tool::at(&url).set("redis", "command-timeout", "500ms").doctor().await;
    let finding = examined.expect("nodes", "error", &proxy.port().to_string());
    assert!(finding.remedy.as_ref().unwrap().contains("redis.node-mappings"), "{finding:?}");
}

#[tokio::test]
async fn replica_configured_as_standalone_and_what_its_master_promises() {
    let (master, replica) = (healthy().await, healthy().await);
    replica.command::<()>(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]).await;
    wait_until("the replica is connected", async || {
        replica.command::<String>(&["INFO", "replication"]).await.contains("master_link_status:up")
    })
    .await;
    let examined = sound(&replica).doctor().await;
    examined.expect("role", "error", "is a replica");
    examined.expect("writes", "error", "READONLY");
    examined.expect("acl", "unknown", "writes are refused");

    let examined = sound(&master).doctor().await;
    assert_eq!(examined.complaints(), [""; 0], "{examined:#?}");
    examined.expect("replicas", "info", "min-replicas-to-write is 0");
    master.command::<()>(&["CONFIG", "SET", "min-replicas-to-write", "1"]).await;
    sound(&master).doctor().await.expect("replicas", "info", "min-replicas-to-write is 1");
    master.command::<()>(&["CONFIG", "SET", "min-replicas-to-write", "2"]).await;
    sound(&master).doctor().await.expect("writes", "error", "NOREPLICAS");
}

#[tokio::test]
async fn missing_commands_are_named() {
    let redis = RedisServer::start_with(&[
        "--rename-command",
        "XPENDING",
        "",
        "--rename-command",
        "UNLINK",
        "other",
        "--rename-command",
        "XAUTOCLAIM",
        "",
    ]);
    let examined = Tool::on(&redis).doctor().await;
    examined.expect("commands", "error", ": XPENDING, UNLINK");
    examined.expect("commands.consumers", "warning", ": XAUTOCLAIM");
    examined.expect("acl", "error", "XPENDING, UNLINK");
}

#[tokio::test]
async fn memory_that_ends_is_an_error_with_eviction_and_a_warning_without() {
    let redis = healthy().await;
    let set = async |name: &str, value: &str| redis.command::<()>(&["CONFIG", "SET", name, value]).await;
    set("maxmemory-policy", "allkeys-lru").await;
    sound(&redis).doctor().await.expect("eviction", "warning", "allkeys-lru");
    set("maxmemory", "1gb").await;
    sound(&redis).doctor().await.expect("eviction", "error", "allkeys-lru");
    set("maxmemory-policy", "noeviction").await;
    let examined = sound(&redis).doctor().await;
    assert_eq!((examined.level("eviction"), examined.level("memory")), (Some("ok"), None));
    set("maxmemory", "1mb").await;
    let examined = sound(&redis).doctor().await;
    examined.expect("memory", "warning", "of 1048576 bytes");
    examined.expect("writes", "error", "OOM");
}

#[tokio::test]
async fn persistence_is_told_as_it_is() {
    let redis = RedisServer::start();
    sound(&redis).doctor().await.expect("persistence", "warning", "neither");
    redis.command::<()>(&["CONFIG", "SET", "save", "3600 1"]).await;
    sound(&redis).doctor().await.expect("persistence", "info", "save 3600 1");
    // Its directory is gone when the snapshot is to be written.
    let directory: BTreeMap<String, String> = redis.command(&["CONFIG", "GET", "dir"]).await;
    std::fs::remove_dir_all(&directory["dir"]).unwrap();
    redis.command::<()>(&["SET", "something", "to save"]).await;
    redis.command::<redis::Value>(&["BGSAVE"]).await;
    wait_until("the snapshot has failed", async || {
        redis.command::<String>(&["INFO", "persistence"]).await.contains("rdb_last_bgsave_status:err")
    })
    .await;
    sound(&redis).doctor().await.expect("persistence", "error", "BGSAVE");
}

#[tokio::test]
async fn settings_of_the_server_that_close_or_refuse_are_named() {
    let redis = healthy().await;
    for (name, value) in [("timeout", "30"), ("tcp-keepalive", "0"), ("lua-time-limit", "100")] {
        let before: BTreeMap<String, String> = redis.command(&["CONFIG", "GET", name]).await;
        redis.command::<()>(&["CONFIG", "SET", name, value]).await;
        let examined = sound(&redis).doctor().await;
        examined.expect("server-timeouts", "warning", name);
        assert_eq!(examined.complaints(), ["server-timeouts"]);
        redis.command::<()>(&["CONFIG", "SET", name, &before[name]]).await;
    }
}

#[tokio::test]
async fn durations_that_do_not_go_together_are_named() {
    let redis = healthy().await;
    let examined = Tool::on(&redis).doctor().await;
    examined.expect("timeouts", "warning", "producer.publish-margin");
    let slow = sound(&redis).set("redis", "command-timeout", "1700ms");
    let finding = slow.doctor().await.expect("timeouts", "warning", "redis.command-timeout").clone();
    assert!(finding.remedy.unwrap().contains("1666ms"));
}

/// The last line of a user's rights as docs/operations.md lists them.
const RIGHTS: &str = "+evalsha +eval +script|load +time +type +get +set +del +pttl +pexpire +persist +hgetall +hmget +hset \
    +hdel +xadd +xrevrange +smembers +sismember +sadd +srem +xgroup|create +xinfo|groups +xinfo|stream +xrange +xpending +xack \
    +unlink";

async fn user(redis: &RedisServer, rules: &str) -> Tool {
    let rules: Vec<&str> = rules.split_whitespace().collect();
    redis.command::<()>(&[&["ACL", "SETUSER", "anna", "reset", "on", ">pw"][..], &rules].concat()).await;
    Tool::at(&format!("redis://anna:pw@127.0.0.1:{}", redis.port())).set("producer", "publish-margin", "7s")
}

#[tokio::test]
async fn what_may_not_be_asked_is_unknown_and_never_ok() {
    let redis = healthy().await;
    let daemon = Daemon::redis(&redis).start();
    daemon.api().create_stream("orders", 2).await;
    let anna = user(&redis, &format!("~redis-stream:coord:* ~orders:* {RIGHTS}")).await;
    let examined = anna.doctor().await;
    assert_eq!(examined.complaints(), [""; 0], "the documented rights are enough: {examined:#?}");
    for id in
        ["mode", "role", "version", "commands", "eviction", "persistence", "replicas", "server-timeouts"]
    {
        examined.expect(id, "unknown", "NOPERM");
        assert_eq!(examined.level(id), Some("unknown"));
    }
    examined.expect("index", "unknown", "SCAN".to_lowercase().as_str());
    examined.expect("acl", "ok", "user anna");
    examined.expect("acl.optional", "info", "CLIENT|SETNAME, MEMORY|USAGE");
    examined.expect("records", "ok", "1 record");
    examined.expect("shards", "ok", "2 shards");
}

#[tokio::test]
async fn rights_that_are_missing_are_named() {
    let redis = healthy().await;
    let daemon = Daemon::redis(&redis).start();
    daemon.api().create_stream("orders", 2).await;
    let all = "~redis-stream:coord:* ~orders:*";
    let without = |keys: &str, taken: &str| {
        let taken: Vec<&str> = taken.split(' ').collect();
        let left: Vec<&str> = RIGHTS.split_whitespace().filter(|right| !taken.contains(right)).collect();
        assert!(keys != all || left.len() + taken.len() == RIGHTS.split_whitespace().count());
        format!("{keys} {}", left.join(" "))
    };
    for (keys, taken, named) in [
        (all, "+hset +xadd +xinfo|stream", ": HSET, XADD, XINFO|STREAM"),
        (all, "+evalsha +script|load", ": EVALSHA, SCRIPT|LOAD"),
        (all, "+set", ": SET; what else is missing can be tried only"),
        (all, "+eval", ": EVAL; what else is missing can be tried only"),
        (all, "+del +pexpire", ": PEXPIRE, DEL"),
        ("~orders:*", "", ": EVALSHA, EVAL"),
    ] {
        let examined = user(&redis, &without(keys, taken)).await.doctor().await;
        let finding = examined.expect("acl", "error", named);
        assert!(finding.remedy.as_ref().unwrap().contains("ACL SETUSER anna +"), "{finding:?}");
    }
    // Also where the probe may not be deleted it does not stay.
    user(&redis, &without(all, "+del +unlink +pexpire")).await.doctor().await;
    wait_until("the probe is gone", async || {
        redis.command::<Vec<String>>(&["KEYS", "*doctor*"]).await.is_empty()
    })
    .await;
    let examined = user(&redis, &without("~redis-stream:coord:*", "")).await.doctor().await;
    assert_eq!(examined.level("acl"), Some("ok"));
    assert!(examined.findings.iter().any(|finding| finding.id == "shard.rights"), "{examined:#?}");
}

/// Passes everything on to a Redis, whose `TIME` is so many seconds ahead.
async fn shifted(redis: &RedisServer, seconds: i64) -> String {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let port = redis.port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
            tokio::spawn(async move {
                let mut buffer = vec![0; 64 * 1024];
                while let Ok(count @ 1..) = from_server.read(&mut buffer).await {
                    // The answer to TIME: a list of two texts, the first one of ten digits.
                    const HEAD: &[u8] = b"*2\r\n$10\r\n";
                    if buffer[..count].starts_with(HEAD) {
                        let digits = &mut buffer[HEAD.len()..HEAD.len() + 10];
                        let time: i64 = std::str::from_utf8(digits).unwrap().parse().unwrap();
                        digits.copy_from_slice((time + seconds).to_string().as_bytes());
                    }
                    if to_client.write_all(&buffer[..count]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    url
}

#[tokio::test]
async fn clocks_that_disagree_are_named() {
    let redis = healthy().await;
    for (seconds, part) in [(100, "ms ahead of"), (-100, "ms behind")] {
        let url = shifted(&redis, seconds).await;
        let tool = Tool::at(&url).set("producer", "publish-margin", "7s");
        let examined = tool.doctor().await;
        examined.expect("clock", "warning", part);
        assert_eq!(examined.complaints(), ["clock"]);
    }
    let url = shifted(&redis, 0).await;
    assert_eq!(Tool::at(&url).doctor().await.level("clock"), Some("ok"));
}
