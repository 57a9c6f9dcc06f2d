//! `rsc doctor` on the index, records, mutexes and shards (protocol 12; docs/doctor.md).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use rsc_protocol::GroupKey;
use rsc_protocol::keys::Keys;
use serde_json::{Value, json};
use support::{
    Daemon, Examined, Member, Proxy, RedisServer, Stream, Tool, beat_until_stable, group_path, wait_until,
};

/// A stream of four shards with the groups `a` and `b`, the first with two members; nobody changes it any more.
struct Scene {
    redis: RedisServer,
    groups: Vec<GroupKey>,
}

impl Scene {
    async fn new() -> Self {
        let redis = RedisServer::start();
        let daemon = Daemon::redis(&redis).long_lease().start();
        let api = daemon.api();
        let stream = Stream::create(&api, "orders", 4, &["a", "b"]).await;
        let group = stream.group();
        let mut members = vec![Member::new(&api, group, "m0"), Member::new(&api, group, "m1")];
        beat_until_stable(&api, group, &mut members).await;
        Scene { redis, groups: stream.groups }
    }

    fn key(&self) -> String {
        Keys::default().metadata(&self.groups[0])
    }

    async fn run(&self, command: &[&str]) {
        self.redis.command::<redis::Value>(command).await;
    }

    /// Replaces one field of the record of `a`.
    async fn set(&self, field: &str, value: &str) {
        self.run(&["HSET", &self.key(), field, value]).await;
    }

    /// Changes its aggregate.
    async fn change(&self, change: impl FnOnce(&mut Value)) {
        let mut aggregate = self.redis.aggregate(&self.groups[0]).await.unwrap();
        change(&mut aggregate);
        self.set("aggregate", &aggregate.to_string()).await;
    }

    async fn doctor(&self) -> Examined {
        Tool::on(&self.redis).set("producer", "publish-margin", "7s").doctor().await
    }

    /// Demands one complaint besides the one about persistence.
    async fn expect(&self, id: &str, level: &str, part: &str) {
        let examined = self.doctor().await;
        examined.expect(id, level, part);
        let others = ["persistence", id];
        let complaints: Vec<&str> =
            examined.complaints().into_iter().filter(|id| !others.contains(id)).collect();
        assert_eq!(complaints, [""; 0], "{examined:#?}");
    }

    /// Puts the record of `a` back as it was.
    async fn with_record(&self, break_it: impl AsyncFnOnce(), look: impl AsyncFnOnce()) {
        let dump = self.redis.dump(&self.key()).await.unwrap();
        break_it().await;
        look().await;
        self.redis.restore(&self.key(), &dump).await;
    }
}

#[tokio::test]
async fn index_and_keys_that_do_not_fit_are_named() {
    let scene = Scene::new().await;
    let (key, index) = (scene.key(), Keys::default().groups());
    scene.run(&["SREM", &index, &key]).await;
    scene.expect("index.unindexed", "warning", "group orders:a").await;
    scene.run(&["SADD", &index, &key, "something else"]).await;
    scene.expect("index.foreign", "warning", "something else").await;
    scene.run(&["SREM", &index, "something else"]).await;

    let dump = scene.redis.dump(&key).await.unwrap();
    scene.run(&["DEL", &key]).await;
    scene.expect("index.missing", "error", &key).await;
    let tombstone = Keys::default().tombstone(&scene.groups[0]);
    let names = ["streamPrefix", "orders", "consumerGroup", "a", "deletedAt", "2026-01-31T12:00:00.000Z"];
    scene.run(&[&["HSET", &tombstone][..], &names].concat()).await;
    let examined = scene.doctor().await;
    examined.expect("index.deleted", "info", "deleted at 2026-01-31T12:00:00.000Z");
    assert_eq!(examined.complaints(), ["persistence"], "nobody has to do anything");

    // The tombstone beside a record that lives again.
    scene.redis.restore(&key, &dump).await;
    scene.expect("record.tombstone", "warning", &key).await;
    scene.run(&["DEL", &tombstone]).await;

    scene.run(&["DEL", &index]).await;
    scene.run(&["SET", &index, "x"]).await;
    scene.expect("index.type", "error", &index).await;
    assert_eq!(scene.doctor().await.level("index"), None, "a broken index is never ok");
}

#[tokio::test]
async fn group_that_is_just_being_created_is_no_finding() {
    let scene = Scene::new().await;
    let (key, index) = (scene.key(), Keys::default().groups());
    scene.run(&["SREM", &index, &key]).await;
    // It is missing when the doctor reads the index, and there by its second look.
    let proxy = Proxy::to(scene.redis.port()).await;
    let mut scan = proxy.hold_next("SCAN");
    let tool =
        Tool::at(&format!("redis://127.0.0.1:{}", proxy.port())).set("producer", "publish-margin", "7s");
    let add = async {
        scan.reached().await;
        scene.run(&["SADD", &index, &key]).await;
        scan.let_go();
    };
    let (examined, ()) = tokio::join!(tool.doctor(), add);
    assert_eq!(examined.complaints(), ["persistence"], "{examined:#?}");
}

#[tokio::test]
async fn records_that_cannot_be_used_are_named_by_what_is_wrong() {
    let scene = Scene::new().await;
    let key = scene.key();
    scene
        .with_record(
            async || scene.set("aggregate", "{").await,
            async || {
                scene.expect("record.unreadable", "error", &key).await;
            },
        )
        .await;
    scene
        .with_record(
            async || scene.run(&["HDEL", &key, "revision"]).await,
            async || {
                scene.expect("record.unreadable", "error", "revision is absent").await;
            },
        )
        .await;
    scene
        .with_record(
            async || scene.set("schemaVersion", "2").await,
            async || {
                scene.expect("record.schema", "error", "schemaVersion 2").await;
            },
        )
        .await;
    scene
        .with_record(
            async || scene.set("layoutVersion", "3").await,
            async || {
                scene.expect("record.layout", "error", "layoutVersion 3").await;
            },
        )
        .await;
    scene
        .with_record(
            async || scene.run(&["HDEL", &key, "layoutVersion"]).await,
            async || {
                let examined = scene.doctor().await;
                examined.expect("record.layout", "info", "absent");
                assert_eq!(examined.complaints(), ["persistence"]);
            },
        )
        .await;
    scene
        .with_record(
            async || scene.set("revision", "77").await,
            async || {
                scene.expect("record.revision", "error", "revision is 77").await;
            },
        )
        .await;
    scene
        .with_record(
            async || scene.change(|aggregate| aggregate["consumerGroup"] = json!("other")).await,
            async || scene.expect("record.foreign", "error", "(orders, other)").await,
        )
        .await;
    scene
        .with_record(
            async || {
                scene.run(&["DEL", &key]).await;
                scene.run(&["RPUSH", &key, "x"]).await;
            },
            async || scene.expect("record.type", "error", "holds a list").await,
        )
        .await;
    assert_eq!(scene.doctor().await.complaints(), ["persistence"], "the test puts everything back");
}

#[tokio::test]
async fn records_that_break_rules_are_named_by_the_rule() {
    let scene = Scene::new().await;
    let key = scene.key();
    scene.run(&["PEXPIRE", &key, "600000"]).await;
    scene.expect("record.ttl", "error", &key).await;
    scene.run(&["PERSIST", &key]).await;

    scene
        .with_record(
            async || {
                scene
                    .change(|aggregate| {
                        let shards = aggregate["members"]["m0"]["currentAssignment"].clone();
                        aggregate["members"]["m1"]["currentAssignment"] = shards;
                    })
                    .await;
            },
            async || {
                let examined = scene.doctor().await;
                let held = examined.findings.iter().filter(|finding| finding.id == "invariant.one-holder");
                assert_eq!(held.count(), 2, "two shards: {examined:#?}");
                assert!(examined.complaints().iter().all(|id| {
                    ["persistence", "invariant.one-holder", "invariant.drain-clock"].contains(id)
                }));
                assert_eq!(examined.level("records"), None);
            },
        )
        .await;
    scene
        .with_record(
            async || {
                scene.change(|aggregate| aggregate["targetAssignments"]["m0"] = json!([])).await;
            },
            async || {
                let examined = scene.doctor().await;
                examined.expect("invariant.legal-target", "error", "orders:a");
                examined.expect("invariant.balanced-target", "error", "orders:a");
            },
        )
        .await;

    scene
        .with_record(
            async || scene.set("updatedAt", "2099-01-01T00:00:00.000Z").await,
            async || {
                scene.expect("record.clock", "warning", &key).await;
            },
        )
        .await;
    scene
        .with_record(
            async || {
                scene
                    .change(|aggregate| {
                        aggregate["metadataCorrection"] = json!({"requestedAt": "2026-01-31T12:00:00.000Z"});
                    })
                    .await;
            },
            async || {
                let examined = scene.doctor().await;
                examined.expect("record.correction", "info", "since 2026-01-31T12:00:00.000Z");
                assert_eq!(examined.complaints(), ["persistence"]);
            },
        )
        .await;
    // Two groups of a stream that disagree, and nothing on record that would explain it.
    scene
        .with_record(
            async || {
                scene
                    .change(|aggregate| {
                        aggregate["shardCount"] = json!(3);
                        aggregate["members"] = json!({});
                        aggregate["targetAssignments"] = json!({});
                    })
                    .await;
            },
            async || scene.expect("stream.count", "warning", "orders:a: 3, orders:b: 4").await,
        )
        .await;
}

#[tokio::test]
async fn mutexes_that_nobody_gives_back_are_named() {
    let scene = Scene::new().await;
    let keys = Keys::default();
    let forgotten = GroupKey::new("nobody", "nowhere").unwrap();
    for mutex in [keys.mutex(&scene.groups[1]), keys.stream_mutex("orders"), keys.mutex(&forgotten)] {
        scene.run(&["SET", &mutex, "i:token", "PX", "600000"]).await;
        assert_eq!(scene.doctor().await.complaints(), ["persistence"], "somebody works under it");
        scene.run(&["SET", &mutex, "i:token"]).await;
        scene.expect("mutex.ttl", "error", &mutex).await;
        scene.run(&["DEL", &mutex]).await;
        scene.run(&["SADD", &mutex, "x"]).await;
        scene.expect("mutex.type", "error", &mutex).await;
        scene.run(&["DEL", &mutex]).await;
    }
}

#[tokio::test]
async fn shards_that_cannot_be_read_are_named() {
    let scene = Scene::new().await;
    scene.run(&["XGROUP", "DESTROY", "orders:1", "a"]).await;
    scene.run(&["XGROUP", "DESTROY", "orders:2", "a"]).await;
    scene.expect("shard.group", "error", "consumer group a does not exist on orders:1, orders:2").await;
    scene.run(&["XGROUP", "CREATE", "orders:1", "a", "0"]).await;
    scene.run(&["XGROUP", "CREATE", "orders:2", "a", "0"]).await;
    scene.run(&["DEL", "orders:0", "orders:3"]).await;
    scene.expect("shard.missing", "error", "orders:0, orders:3").await;
    for group in ["a", "b"] {
        scene.run(&["XGROUP", "CREATE", "orders:0", group, "0", "MKSTREAM"]).await;
    }
    scene.run(&["SET", "orders:3", "x"]).await;
    scene.expect("shard.type", "error", "orders:3 (a string)").await;
}

#[tokio::test]
async fn records_that_nobody_will_read_are_named() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).lease(2_000, 4_000).short_caches().start();
    let api = daemon.api();
    let stream = Stream::create(&api, "orders", 4, &["a", "b"]).await;
    stream.scale_with(2, &json!({})).await;
    wait_until("the shards are given up", async || {
        let migrations =
            format!("{}/migrations", group_path(stream.group()).replace("/v1/", "/v1/monitoring/"));
        api.get(&migrations).await.success()["migrations"][0]["state"] == "DEPRECATED"
    })
    .await;
    let tool = Tool::on(&redis).set("producer", "publish-margin", "7s");
    assert_eq!(tool.doctor().await.complaints(), ["persistence"], "an empty deprecated shard is no news");
    let run = async |command: &str| {
        redis.command::<redis::Value>(&command.split(' ').collect::<Vec<_>>()).await;
    };
    // A producer with an old route; and one shard beyond everything on record, of an activation that was lost.
    run("XADD orders:3 7-0 k v").await;
    run("XADD orders:9 8-0 k v").await;
    let examined = tool.doctor().await;
    examined.expect("shard.unread", "warning", "orders:3");
    let finding = examined.expect("shard.unread", "warning", "orders:9");
    assert!(finding.message.contains("group a: 1 undelivered"), "{finding:?}");
    assert!(finding.message.contains("group b: 1 undelivered"), "{finding:?}");
    // Delivered and not acknowledged is unread too, as long as the record is there.
    run("DEL orders:9").await;
    run("XGROUP SETID orders:3 b 7-0").await;
    run("XREADGROUP GROUP a m STREAMS orders:3 >").await;
    let finding = tool.doctor().await.expect("shard.unread", "warning", "orders:3").clone();
    assert!(finding.message.contains("PENDING for group a: 0 undelivered, 1 pending"), "{finding:?}");
    assert!(!finding.message.contains("group b"), "{finding:?}");
    run("XACK orders:3 a 7-0").await;
    assert_eq!(tool.doctor().await.complaints(), ["persistence"]);
}
