//! `rsc backup` and `rsc restore` without anybody at work: what is in the file, what is put back, what is refused
//! (protocol 3 and 12). With coordinators and members at work: `scenario_restore.rs`.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rsc_protocol::GroupKey;
use rsc_protocol::keys::Keys;
use serde_json::{Value, json};
use support::{Daemon, Member, Proxy, RedisServer, Run, Tool, beat_until_stable, group_path, wait_until};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A Redis with the groups `orders:a` (two members), `orders:b` and the deleted `gone:gone`, which nobody changes; and
/// a place for files.
struct Scene {
    redis: RedisServer,
    directory: TempDir,
    a: GroupKey,
    b: GroupKey,
    gone: GroupKey,
}

type Hash = BTreeMap<String, Vec<u8>>;

impl Scene {
    async fn new() -> Self {
        let redis = RedisServer::start();
        let mut daemon = Daemon::redis(&redis).long_lease().start();
        let api = daemon.api();
        let body = json!({"initialShardCount": 4, "requestedBy": "test", "consumerGroups": ["a", "b"]});
        api.post("/coord/v1/streams/orders", &body).await.success();
        let [a, b] = ["a", "b"].map(|name| GroupKey::new("orders", name).unwrap());
        let mut members = vec![Member::new(&api, &a, "m0"), Member::new(&api, &a, "m1")];
        beat_until_stable(&api, &a, &mut members).await;
        let gone = api.create_stream("gone", 1).await;
        let body = json!({"requestedBy": "test", "reason": "test"});
        api.delete(&group_path(&gone), &body).await.success();
        // Killed in a section it would leave a mutex behind, for longer than anybody here waits.
        daemon.terminate();
        daemon.wait_for_exit();
        Scene { redis, directory: tempfile::tempdir().unwrap(), a, b, gone }
    }

    fn tool(&self) -> Tool {
        Tool::on(&self.redis).set("coordination", "mutex-ttl", "1s")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    async fn run(&self, command: &[&str]) {
        self.redis.command::<redis::Value>(command).await;
    }

    async fn hash(&self, key: &str) -> Hash {
        self.redis.command(&["HGETALL", key]).await
    }

    async fn record(&self, group: &GroupKey) -> Hash {
        self.hash(&Keys::default().metadata(group)).await
    }

    /// `rsc backup` into the file of that name.
    async fn backup(&self, name: &str, more: &[&str]) -> Run {
        let file = self.file(name);
        self.tool().run(&[&["backup", file.to_str().unwrap()], more].concat()).await
    }

    /// `rsc restore` of the file of that name: for each group the outcome.
    async fn restore(&self, name: &str, more: &[&str]) -> (Run, BTreeMap<String, String>) {
        let file = self.file(name);
        let arguments = [&["restore", file.to_str().unwrap(), "--output", "json"], more].concat();
        let run = self.tool().run(&arguments).await;
        let outcomes = if run.stdout.is_empty() { BTreeMap::new() } else { outcomes(&run.json()) };
        let has_trouble = outcomes.values().any(|outcome| ["refused", "failed"].contains(&outcome.as_str()));
        if !outcomes.is_empty() {
            assert_eq!(run.code, i32::from(has_trouble), "{run:?}");
        }
        (run, outcomes)
    }

    /// The lines of a file.
    fn lines(&self, name: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.file(name)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn write_lines(&self, name: &str, lines: &[Value]) {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(self.file(name), text).unwrap();
    }
}

fn outcomes(document: &Value) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let row = |row: &Value| {
        assert!(!text(&row["message"]).is_empty());
        (format!("{}:{}", text(&row["streamPrefix"]), text(&row["consumerGroup"])), text(&row["outcome"]))
    };
    document["groups"].as_array().unwrap().iter().map(row).collect()
}

fn expected(rows: &[(&str, &str)]) -> BTreeMap<String, String> {
    rows.iter().map(|(group, outcome)| ((*group).to_owned(), (*outcome).to_owned())).collect()
}

fn json_of(hash: &Hash, field: &str) -> Value {
    serde_json::from_slice(&hash[field]).unwrap()
}

#[tokio::test]
async fn what_was_lost_is_put_back_byte_for_byte_and_a_round_begins() {
    let scene = Scene::new().await;
    let keys = Keys::default();
    // What other implementations may have written.
    let mut odd = redis::cmd("HSET");
    odd.arg(keys.metadata(&scene.a)).arg("odd").arg(&[0_u8, 255, 10, 13][..]);
    odd.exec_async(&mut scene.redis.connection().await).await.unwrap();
    let before = scene.record(&scene.a).await;
    let history: redis::Value = scene.redis.command(&["XRANGE", &keys.history(&scene.a), "-", "+"]).await;
    let tombstone = scene.hash(&keys.tombstone(&scene.gone)).await;
    let run = scene.backup("b", &["--history", "--tombstones"]).await.expect_success();
    assert_eq!(run.stdout, format!("2 groups written to {}\n", scene.file("b").display()));
    assert_eq!(run.stderr, "");

    scene.run(&["FLUSHALL"]).await;
    let (_, done) = scene.restore("b", &["--dry-run"]).await;
    let would = [
        ("gone:gone", "would-be-restored"),
        ("orders:a", "would-be-restored"),
        ("orders:b", "would-be-restored"),
    ];
    assert_eq!(done, expected(&would));
    assert_eq!(scene.redis.dump_all().await, BTreeMap::new(), "a dry run writes nothing");
    let (_, done) = scene.restore("b", &[]).await;
    assert_eq!(done, expected(&would.map(|(group, _)| (group, "restored"))));

    let mut now = scene.record(&scene.a).await;
    let index: BTreeSet<String> = scene.redis.command(&["SMEMBERS", &keys.groups()]).await;
    assert_eq!(index, [keys.metadata(&scene.a), keys.metadata(&scene.b)].into());
    assert_eq!(scene.hash(&keys.tombstone(&scene.gone)).await, tombstone);
    let ttl: i64 = scene.redis.command(&["PTTL", &keys.tombstone(&scene.gone)]).await;
    assert!((1..=86_400_000).contains(&ttl), "{ttl}");
    let restored: redis::Value = scene.redis.command(&["XRANGE", &keys.history(&scene.a), "-", "+"]).await;
    let (redis::Value::Array(history), redis::Value::Array(mut restored)) = (history, restored) else {
        panic!()
    };
    assert!(format!("{:?}", restored.pop().unwrap()).contains("RESTORED"));
    assert_eq!(restored, history);

    // The next structural write of its own, by nobody who is known, and a round in it.
    let number = |hash: &Hash, field: &str| -> u64 { String::from_utf8_lossy(&hash[field]).parse().unwrap() };
    for field in ["revision", "liveRevision"] {
        assert_eq!(number(&now, field), number(&before, field) + 1, "{field}");
    }
    assert_ne!(now["writeId"], before["writeId"]);
    let (mut aggregate, mut aggregate_before) = (json_of(&now, "aggregate"), json_of(&before, "aggregate"));
    assert!(aggregate["metadataCorrection"].is_object());
    assert_eq!(aggregate["storeRevision"].as_u64(), Some(number(&now, "revision")));
    // The live fields have been merged into it, as with every structural write.
    for name in ["metadataCorrection", "storeRevision", "updatedAt", "members"] {
        aggregate.as_object_mut().unwrap().remove(name);
        aggregate_before.as_object_mut().unwrap().remove(name);
    }
    assert_eq!(aggregate, aggregate_before);
    let mut rest = before;
    for field in ["aggregate", "revision", "liveRevision", "writeId", "updatedAt"] {
        now.remove(field);
        rest.remove(field);
    }
    assert_eq!(now, rest, "every other field, the members' and the odd one's too");
    assert_eq!(rest["odd"], [0, 255, 10, 13]);
    assert!(rest.contains_key("live:m0") && rest.contains_key("live:m1"));
    assert_eq!(Tool::on(&scene.redis).doctor().await.level("records"), Some("ok"));
}

#[tokio::test]
async fn file_is_whole_or_not_there_and_replaced_only_when_asked() {
    let scene = Scene::new().await;
    scene.backup("b", &[]).await.expect_success();
    let first = std::fs::read(scene.file("b")).unwrap();
    let run = scene.backup("b", &[]).await;
    assert_eq!(run.code, 1);
    assert!(run.stderr.contains("--force"), "{run:?}");
    assert_eq!(std::fs::read(scene.file("b")).unwrap(), first);
    scene.backup("b", &["--force"]).await.expect_success();
    assert_ne!(std::fs::read(scene.file("b")).unwrap(), first, "another instant");

    let run = scene.tool().run(&["backup", "-"]).await.expect_success();
    let lines: Vec<Value> = run.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 4);
    let header = &lines[0];
    assert_eq!(
        (&header["type"], &header["format"], &header["version"]),
        (&json!("header"), &json!("rsc-backup"), &json!(1))
    );
    assert_eq!(header["keyPrefix"], json!("redis-stream:coord"));
    assert!(header["createdAt"].as_str().unwrap().ends_with('Z'));
    assert_eq!(
        lines[1]["fields"]["aggregate"].as_str().unwrap().as_bytes(),
        scene.record(&scene.a).await["aggregate"]
    );
    assert_eq!(lines[3], json!({"type": "end", "groups": 2, "tombstones": 0}));

    // A Redis that stops answering in the middle leaves no file, under whatever name.
    let proxy = Proxy::to(scene.redis.port()).await;
    let _held = proxy.hold_next(&Keys::default().metadata(&scene.b));
    let tool =
        Tool::at(&format!("redis://127.0.0.1:{}", proxy.port())).set("redis", "command-timeout", "300ms");
    let file = scene.file("half");
    let run = tool.run(&["backup", file.to_str().unwrap()]).await;
    assert_eq!(run.code, 1, "{run:?}");
    let names: Vec<_> =
        std::fs::read_dir(scene.directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["b"]);
}

#[tokio::test]
async fn backup_has_what_the_index_has_lost_and_says_what_is_missing() {
    let scene = Scene::new().await;
    let keys = Keys::default();
    scene.run(&["DEL", &keys.groups()]).await;
    scene.backup("without-index", &[]).await.expect_success();
    let groups = |name: &str| -> Vec<String> {
        let lines = scene.lines(name);
        let groups = lines.iter().filter(|line| line["type"] == "group");
        groups.map(|line| line["consumerGroup"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(groups("without-index"), ["a", "b"]);
    scene.run(&["SADD", &keys.groups(), &keys.metadata(&scene.a), &keys.metadata(&scene.b)]).await;

    scene.backup("only-b", &["--consumer-group", "b"]).await.expect_success();
    assert_eq!(groups("only-b"), ["b"]);
    scene.backup("none", &["--stream-prefix", "other"]).await.expect_success();
    assert_eq!(groups("none"), [""; 0]);

    scene.run(&["HSET", &keys.metadata(&scene.a), "revision", "x"]).await;
    scene.run(&["DEL", &keys.metadata(&scene.b)]).await;
    let run = scene.backup("gaps", &[]).await;
    assert_eq!(run.code, 1, "what should be there is not: {run:?}");
    assert!(
        run.stderr.contains("GROUP_METADATA_MISSING") && run.stderr.contains("cannot be restored"),
        "{run:?}"
    );
    assert_eq!(groups("gaps"), ["a"], "what could be read is there");
    let (_, done) = scene.restore("gaps", &["--force"]).await;
    assert_eq!(done, expected(&[("orders:a", "refused")]), "even with --force");
    scene.backup("not-concerned", &["--stream-prefix", "other"]).await.expect_success();
}

#[tokio::test]
async fn what_is_not_older_is_refused_unless_forced_and_the_rest_is_restored() {
    let scene = Scene::new().await;
    let keys = Keys::default();
    scene.backup("b", &[]).await.expect_success();
    let (_, done) = scene.restore("b", &["--force"]).await;
    assert_eq!(done, expected(&[("orders:a", "unchanged"), ("orders:b", "unchanged")]));

    // Written since, if only one lease; and the other group is gone.
    scene.run(&["HSET", &keys.metadata(&scene.a), "liveRevision", "1000", "writeId", "other"]).await;
    scene.run(&["DEL", &keys.metadata(&scene.b)]).await;
    let before = scene.redis.dump(&keys.metadata(&scene.a)).await;
    for dry_run in [&["--dry-run"][..], &[]] {
        let (run, done) = scene.restore("b", dry_run).await;
        let outcome = if dry_run.is_empty() { "restored" } else { "would-be-restored" };
        assert_eq!(done, expected(&[("orders:a", "refused"), ("orders:b", outcome)]));
        assert!(run.stdout.contains("--force"), "{run:?}");
        assert_eq!(scene.redis.dump(&keys.metadata(&scene.a)).await, before);
        let mutex: bool = scene.redis.command(&["EXISTS", &keys.mutex(&scene.a)]).await;
        assert!(!mutex, "the mutex is given back");
    }
    scene.run(&["HSET", &keys.metadata(&scene.a), "live:later", "{}", "left", "over"]).await;
    let (_, done) = scene.restore("b", &["--force", "--consumer-group", "a"]).await;
    assert_eq!(done, expected(&[("orders:a", "restored")]));
    let now = scene.record(&scene.a).await;
    assert!(
        !now.contains_key("live:later") && !now.contains_key("left"),
        "nothing of what it replaces stays"
    );
    let text = scene.tool().run(&["restore", scene.file("b").to_str().unwrap()]).await;
    assert_eq!(text.code, 1);
    assert!(text.stdout.lines().all(|line| line.starts_with("refused       orders:")), "{text:?}");

    // Redis has lost writes: what is stored is older in every respect.
    let aged = scene.lines("b");
    scene.run(&["DEL", &keys.metadata(&scene.a)]).await;
    let mut older: Value = serde_json::from_str(aged[1]["fields"]["aggregate"].as_str().unwrap()).unwrap();
    (older["storeRevision"], older["metadataVersion"]) = (json!(1), json!(1));
    scene.run(&["HSET", &keys.metadata(&scene.a), "aggregate", &older.to_string(), "revision", "1"]).await;
    let (_, done) = scene.restore("b", &["--consumer-group", "a"]).await;
    assert_eq!(done, expected(&[("orders:a", "restored")]));
}

#[tokio::test]
async fn deleted_unreadable_and_foreign_things_are_replaced_only_by_force() {
    let scene = Scene::new().await;
    let keys = Keys::default();
    let (key, tombstone) = (keys.metadata(&scene.b), keys.tombstone(&scene.b));
    scene.backup("b", &["--consumer-group", "b"]).await.expect_success();
    let (refused, restored) = (expected(&[("orders:b", "refused")]), expected(&[("orders:b", "restored")]));
    for broken in ["deleted", "list", "unreadable", "newer"] {
        scene.run(&["DEL", &key, &tombstone]).await;
        match broken {
            "deleted" => {
                let names = ["streamPrefix", "orders", "consumerGroup", "b", "metadataVersion", "70"];
                scene.run(&[&["HSET", &tombstone][..], &names].concat()).await;
            }
            "list" => scene.run(&["RPUSH", &key, "x"]).await,
            "unreadable" => scene.run(&["HSET", &key, "aggregate", "{", "live:x", "{"]).await,
            _ => scene.run(&["HSET", &key, "schemaVersion", "9", "left", "over"]).await,
        }
        let before = scene.redis.dump(&key).await;
        assert_eq!(scene.restore("b", &[]).await.1, refused, "{broken}");
        assert_eq!(scene.restore("b", &["--dry-run"]).await.1, refused, "{broken}");
        assert_eq!(scene.redis.dump(&key).await, before, "{broken}");
        assert_eq!(scene.restore("b", &["--force"]).await.1, restored, "{broken}");
        let record = scene.record(&scene.b).await;
        assert!(!record.contains_key("left") && !record.contains_key("live:x"), "{broken}");
        let observed = json_of(&record, "aggregate")["metadataCorrection"]["observedMetadataVersion"].clone();
        assert_eq!(observed, json!(if broken == "deleted" { 70 } else { 1 }), "{broken}");
        let exists: bool = scene.redis.command(&["EXISTS", &tombstone]).await;
        assert!(!exists, "a tombstone beside a living record");
    }
    // The pair whose names give the same key is another group, and healthy.
    scene.run(&["DEL", &key]).await;
    let daemon = Daemon::redis(&scene.redis).start();
    let (one, other) = (GroupKey::new("x:y", "z").unwrap(), GroupKey::new("x", "y:z").unwrap());
    daemon.api().create_group(&one, 1).await;
    drop(daemon);
    scene.backup("one", &["--stream-prefix", "x:y"]).await.expect_success();
    scene.run(&["FLUSHALL"]).await;
    let daemon = Daemon::redis(&scene.redis).start();
    daemon.api().create_group(&other, 1).await;
    drop(daemon);
    let (run, done) = scene.restore("one", &["--force"]).await;
    assert_eq!(done, expected(&[("x:y:z", "refused")]), "{run:?}");
    assert!(run.stdout.contains("x:y:z, whose names"), "{run:?}");
}

#[tokio::test]
async fn files_that_are_not_right_are_refused() {
    let scene = Scene::new().await;
    scene.backup("b", &[]).await.expect_success();
    let good = scene.lines("b");
    scene.run(&["FLUSHALL"]).await;
    let refused_whole = async |name: &str, code: i32, part: &str| {
        let (run, done) = scene.restore(name, &["--force"]).await;
        assert_eq!((run.code, done.len()), (code, 0), "{name}: {run:?}");
        assert!(run.stderr.contains(part), "{name}: {run:?}");
        assert_eq!(scene.redis.dump_all().await.len(), 0, "{name}");
    };
    scene.write_lines("cut", &good[..3]);
    refused_whole("cut", 1, "not whole").await;
    scene.write_lines("less", &[&good[..1], &good[2..]].concat());
    refused_whole("less", 1, "not whole").await;
    std::fs::write(scene.file("other"), "{\"a\": 1}\n").unwrap();
    refused_whole("other", 1, "not a file of rsc backup").await;
    refused_whole("absent", 1, "cannot read").await;
    let mut changed = good.clone();
    changed[0]["keyPrefix"] = json!("elsewhere");
    scene.write_lines("prefix", &changed);
    refused_whole("prefix", 2, "store.key-prefix").await;
    changed[0]["keyPrefix"] = good[0]["keyPrefix"].clone();
    changed[0]["version"] = json!(2);
    scene.write_lines("later", &changed);
    refused_whole("later", 1, "format version 2").await;

    // A single record that is not right is refused, the others are restored.
    for (field, value) in
        [("aggregate", json!("{")), ("revision", json!("77")), ("schemaVersion", json!("2"))]
    {
        let mut changed = good.clone();
        changed[1]["fields"][field] = value;
        scene.write_lines("corrupt", &changed);
        let (_, done) = scene.restore("corrupt", &["--force"]).await;
        assert_eq!(done, expected(&[("orders:a", "refused"), ("orders:b", "restored")]), "{field}");
        scene.run(&["FLUSHALL"]).await;
    }
    let mut foreign = good.clone();
    foreign[1]["consumerGroup"] = json!("somebody");
    scene.write_lines("foreign", &foreign);
    let (run, done) = scene.restore("foreign", &["--force"]).await;
    assert_eq!(done, expected(&[("orders:somebody", "refused"), ("orders:b", "restored")]), "{run:?}");
    let keys: Vec<String> = scene.redis.command(&["KEYS", "*:metadata"]).await;
    assert_eq!(keys, [Keys::default().metadata(&scene.b)]);
}

#[tokio::test]
async fn mutex_of_somebody_else_is_waited_for_and_not_broken() {
    let scene = Scene::new().await;
    let keys = Keys::default();
    scene.backup("b", &["--consumer-group", "b"]).await.expect_success();
    scene.run(&["DEL", &keys.metadata(&scene.b)]).await;
    scene.run(&["SET", &keys.mutex(&scene.b), "other:token", "PX", "1500"]).await;
    let began = Instant::now();
    let (_, done) = scene.restore("b", &[]).await;
    assert_eq!(done, expected(&[("orders:b", "restored")]));
    assert!(began.elapsed() > Duration::from_millis(800), "{:?}", began.elapsed());

    // One without an end lasts as long as the tool itself may hold one.
    scene.run(&["DEL", &keys.metadata(&scene.b)]).await;
    scene.run(&["SET", &keys.mutex(&scene.b), "other:token"]).await;
    let began = Instant::now();
    let (_, done) = scene.restore("b", &[]).await;
    assert_eq!(done, expected(&[("orders:b", "restored")]));
    assert!(began.elapsed() > Duration::from_millis(800), "{:?}", began.elapsed());

    // A holder that lives renews it; then the tool gives up.
    scene.run(&["DEL", &keys.metadata(&scene.b)]).await;
    let mutex = keys.mutex(&scene.b);
    let mut connection = scene.redis.connection().await;
    let holding = tokio::spawn(async move {
        loop {
            let mut set = redis::cmd("SET");
            set.arg(&mutex).arg("other:token").arg("PX").arg(900);
            set.exec_async(&mut connection).await.unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    wait_until("it is held", async || {
        scene.redis.command::<u64>(&["EXISTS", &keys.mutex(&scene.b)]).await == 1
    })
    .await;
    let (run, done) = scene.restore("b", &[]).await;
    holding.abort();
    assert_eq!(done, expected(&[("orders:b", "failed")]));
    assert!(run.stdout.contains("other:token"), "{run:?}");
    assert_eq!(scene.redis.dump(&keys.metadata(&scene.b)).await, None);
}

/// Passes everything on to a Redis, but for answers to requests that contain `needle`: they are swallowed, and the
/// connection ends.
async fn without_answers(redis: &RedisServer, needle: &'static str) -> String {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let port = redis.port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            tokio::spawn(async move {
                let (mut asked, mut answered) = (vec![0; 256 * 1024], vec![0; 256 * 1024]);
                let mut swallows = false;
                loop {
                    tokio::select! {
                        read = client.read(&mut asked) => match read {
                            Ok(count @ 1..) => {
                                swallows |= String::from_utf8_lossy(&asked[..count]).contains(needle);
                                server.write_all(&asked[..count]).await.unwrap();
                            }
                            _ => return,
                        },
                        read = server.read(&mut answered) => match read {
                            Ok(1..) if swallows => return,
                            Ok(count @ 1..) if client.write_all(&answered[..count]).await.is_ok() => {}
                            _ => return,
                        },
                    }
                }
            });
        }
    });
    url
}

/// How many scripts were sent with their text.
async fn evals(redis: &RedisServer) -> u64 {
    let stats: String = redis.command(&["INFO", "commandstats"]).await;
    let line = stats.lines().find(|line| line.starts_with("cmdstat_eval:calls="));
    line.map_or(0, |line| line.split(['=', ',']).nth(1).unwrap().parse().unwrap())
}

#[tokio::test]
async fn restore_whose_answer_is_lost_is_done_once() {
    let scene = Scene::new().await;
    let keys = Keys::default();
    scene.backup("b", &["--consumer-group", "b"]).await.expect_success();
    scene.run(&["DEL", &keys.metadata(&scene.b)]).await;
    // The script arrives, its answer does not.
    let url = without_answers(&scene.redis, "'restored'").await;
    let tool = Tool::at(&url).set("redis", "command-timeout", "500ms").set("coordination", "mutex-ttl", "5s");
    let file = scene.file("b");
    let run = tool.run(&["restore", file.to_str().unwrap(), "--output", "json"]).await;
    assert_eq!(outcomes(&run.json()), expected(&[("orders:b", "restored")]), "{run:?}");
    assert!(run.stdout.contains("its answer was lost"), "{run:?}");
    let before: u64 = scene.lines("b")[1]["fields"]["revision"].as_str().unwrap().parse().unwrap();
    let record = scene.record(&scene.b).await;
    assert_eq!(String::from_utf8_lossy(&record["revision"]), (before + 1).to_string(), "once");

    // The script is held up on its way, and arrives when somebody else has done the work.
    scene.run(&["DEL", &keys.metadata(&scene.b)]).await;
    let proxy = Proxy::to(scene.redis.port()).await;
    let mut held = proxy.hold_next("'restored'");
    let tool = Tool::at(&format!("redis://127.0.0.1:{}", proxy.port()));
    let tool = tool.set("redis", "command-timeout", "500ms").set("coordination", "mutex-ttl", "5s");
    let arguments = ["restore", file.to_str().unwrap(), "--output", "json"];
    let late = async {
        held.reached().await;
        wait_until("it was done by a second attempt", async || {
            scene.redis.dump(&keys.metadata(&scene.b)).await.is_some()
        })
        .await;
        let done = scene.redis.dump(&keys.metadata(&scene.b)).await;
        let before = evals(&scene.redis).await;
        held.let_go();
        wait_until("the late script has run", async || evals(&scene.redis).await > before).await;
        done
    };
    let (run, done) = tokio::join!(tool.run(&arguments), late);
    assert_eq!(outcomes(&run.json()), expected(&[("orders:b", "restored")]), "{run:?}");
    assert_eq!(scene.redis.dump(&keys.metadata(&scene.b)).await, done, "the late script changes nothing");
}

#[tokio::test]
async fn server_that_refuses_the_write_is_left_as_it_was() {
    let scene = Scene::new().await;
    let keys = Keys::default();
    scene.backup("b", &[]).await.expect_success();
    scene.run(&["HSET", &keys.metadata(&scene.a), "liveRevision", "1000"]).await;
    scene.run(&["DEL", &keys.metadata(&scene.b)]).await;
    let before = scene.redis.dump_all().await;
    // The mutex can be taken, the record not be written.
    scene.run(&["ACL", "SETUSER", "anna", "on", ">pw", "~*", "+@all", "-hset"]).await;
    let tool = Tool::at(&format!("redis://anna:pw@127.0.0.1:{}", scene.redis.port()));
    let file = scene.file("b");
    let run = tool.run(&["restore", file.to_str().unwrap(), "--force", "--output", "json"]).await;
    assert_eq!(outcomes(&run.json()), expected(&[("orders:a", "failed"), ("orders:b", "failed")]), "{run:?}");
    assert_eq!(scene.redis.dump_all().await, before);
}
