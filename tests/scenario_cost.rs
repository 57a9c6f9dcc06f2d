//! Scenarios of what the coordinator costs Redis, and of a Redis that forgets its scripts (protocol 2).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rsc_protocol::admin::GroupState;
use rsc_protocol::keys::Keys;
use rsc_protocol::{GroupKey, Status};
use support::{Api, Daemon, Member, RedisServer, beat_until_stable, monitored_path, wait_until};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// What a server has done since its start.
#[derive(Debug)]
struct Usage {
    /// Calls by command, those from within scripts included.
    calls: BTreeMap<String, u64>,
    bytes_received: u64,
}

impl Usage {
    async fn of(redis: &RedisServer) -> Self {
        let info: String = redis.command(&["INFO", "everything"]).await;
        let mut usage = Usage { calls: BTreeMap::new(), bytes_received: 0 };
        for (name, value) in info.lines().filter_map(|line| line.split_once(':')) {
            if let Some(command) = name.strip_prefix("cmdstat_") {
                let calls = value.strip_prefix("calls=").unwrap().split(',').next().unwrap();
                usage.calls.insert(command.to_owned(), calls.parse().unwrap());
            } else if name == "total_net_input_bytes" {
                usage.bytes_received = value.parse().unwrap();
            }
        }
        usage
    }

    /// Calls since `before`, without those of looking itself.
    fn calls_since(&self, before: &Usage) -> BTreeMap<&str, u64> {
        let since = |(command, calls): (&String, &u64)| calls - before.calls.get(command).unwrap_or(&0);
        self.calls
            .iter()
            .map(|(command, calls)| (command.as_str(), since((command, calls))))
            .filter(|(command, calls)| *calls > 0 && !is_of_looking(command))
            .collect()
    }
}

/// What [`RedisServer::command`] and its connection call besides the command asked for.
fn is_of_looking(command: &str) -> bool {
    command == "info" || command.starts_with("client") || command == "hello" || command == "select"
}

/// What `MONITOR` tells while something happens, a line per command, those from within scripts included.
async fn lines_of_monitor(redis: &RedisServer, happen: impl AsyncFnOnce()) -> Vec<String> {
    let stream = TcpStream::connect(("127.0.0.1", redis.port())).await.unwrap();
    let mut stream = BufReader::new(stream);
    stream.write_all(b"MONITOR\r\n").await.unwrap();
    let mut lines = stream.lines();
    assert_eq!(lines.next_line().await.unwrap().unwrap(), "+OK");
    happen().await;
    redis.command::<String>(&["ECHO", "it has happened"]).await;
    let mut told = Vec::new();
    loop {
        let line = lines.next_line().await.unwrap().unwrap();
        if line.contains("it has happened") {
            return told;
        }
        told.push(line);
    }
}

#[tokio::test]
async fn steady_heartbeat_costs_two_scripts_and_little_writing_and_moves_nothing() {
    const HEARTBEATS: u64 = 50;
    let redis = RedisServer::start();
    let daemon =
        Daemon::redis(&redis).long_lease().set("coordination", "index-refresh-interval", "1h").start();
    let api = daemon.api();
    // A group whose whole record is much more than what a heartbeat may write.
    let group = api.create_stream("orders", 200).await;
    let mut members: Vec<Member> =
        (0..20).map(|index| Member::new(&api, &group, &format!("m{index}"))).collect();
    beat_until_stable(&api, &group, &mut members).await;
    for member in &mut members {
        member.beat().await;
    }
    let key = Keys::default().metadata(&group);
    let record: i64 = redis.command(&["HSTRLEN", &key, "aggregate"]).await;
    assert!(record > 10_000, "{record}");
    let aggregate = redis.aggregate(&group).await.unwrap();

    let before = Usage::of(&redis).await;
    for index in 0..HEARTBEATS {
        let member = &mut members[index as usize % 20];
        let owned = member.owned.clone();
        let answer = member.beat().await;
        assert_eq!((answer.status, &member.owned), (Status::Ok, &owned));
    }
    let after = Usage::of(&redis).await;
    let calls = after.calls_since(&before);
    let scripts = calls.get("evalsha").unwrap_or(&0) + calls.get("eval").unwrap_or(&0);
    assert!(scripts <= HEARTBEATS * 2, "{scripts} scripts for {HEARTBEATS} heartbeats: {calls:?}");
    assert_eq!(calls.get("hset"), Some(&HEARTBEATS), "each renews a lease: {calls:?}");
    assert_eq!((calls.get("hgetall"), calls.get("xadd")), (None, None), "{calls:?}");
    // Both scripts with their keys, tokens and framing.
    let bytes = (after.bytes_received - before.bytes_received) / HEARTBEATS;
    assert!(bytes < 2_048, "a heartbeat sent {bytes} bytes to redis");

    let written = lines_of_monitor(&redis, async || {
        members[7].beat().await;
    })
    .await;
    let written: Vec<String> = written.into_iter().filter(|line| line.contains(r#" lua] "HSET" "#)).collect();
    assert_eq!(written.len(), 1, "{written:?}");
    assert!(written[0].len() < 1_024, "{written:?}");
    // Not a byte of the record itself has changed.
    assert_eq!(redis.aggregate(&group).await.unwrap(), aggregate);
}

#[tokio::test]
async fn idle_groups_cost_redis_nothing_but_looks_at_the_index() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).long_lease().start();
    let api = daemon.api();
    let empty = api.create_stream("orders", 8).await;
    let left = api.create_stream("parcels", 8).await;
    let mut member = Member::new(&api, &left, "a");
    member.beat().await;
    member.beat().await;
    member.leave().await;
    for group in [&empty, &left] {
        assert_eq!(api.group(group).await.state, GroupState::Empty);
        // A group that nobody has spoken to is looked at once.
        wait_until("the group's actor has looked at it", async || {
            let shown = api.get(&format!("{}/actor", monitored_path(group))).await.success();
            shown["turns"].as_u64().is_some_and(|turns| turns > 0) && shown["state"] == "IDLE"
        })
        .await;
    }
    let before = Usage::of(&redis).await;
    wait_until("the index was looked at ten times", async || {
        let now = Usage::of(&redis).await;
        let calls = now.calls_since(&before);
        // With each look at the index one at each group's stamp.
        let (looks, stamps) = (calls.get("smembers").unwrap_or(&0), calls.get("hmget").unwrap_or(&0));
        let others: Vec<_> =
            calls.keys().filter(|command| !["smembers", "hmget"].contains(command)).collect();
        assert!(others.is_empty() && *stamps <= 2 * (looks + 1), "{calls:?}");
        *looks >= 10
    })
    .await;
}

#[tokio::test]
async fn scripts_flushed_again_and_again_cost_nobody_a_heartbeat() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).long_lease().start();
    let api = daemon.api();
    let groups = [api.create_stream("orders", 8).await, api.create_stream("parcels", 8).await];
    let (done, flushed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let flushing = {
        let (mut connection, done, flushed) = (redis.connection().await, done.clone(), flushed.clone());
        tokio::spawn(async move {
            while !done.load(Ordering::SeqCst) {
                redis::cmd("SCRIPT").arg("FLUSH").exec_async(&mut connection).await.unwrap();
                flushed.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(std::time::Duration::from_micros(500)).await;
            }
        })
    };
    let mut running = JoinSet::new();
    for index in 0..8 {
        let (api, group, flushed) = (api.clone(), groups[index % 2].clone(), flushed.clone());
        running.spawn(heartbeats_until_flushed(api, group, format!("m{index}"), flushed));
    }
    running.join_all().await;
    // Creating and deleting have scripts of their own.
    api.create_stream("invoices", 2).await;
    let body = serde_json::json!({"requestedBy": "test", "reason": "test"});
    api.delete("/coord/v1/streams/invoices/groups/invoices", &body).await.success();
    done.store(true, Ordering::SeqCst);
    flushing.await.unwrap();
    let flushes = flushed.load(Ordering::SeqCst);
    assert!(flushes > 100, "{flushes}");
    let after = Usage::of(&redis).await;
    assert!(after.calls["eval"] > 50, "hardly a script was missing: {after:?}");
}

/// At least sixty, and as many as it takes until the scripts have been flushed often enough, however fast either
/// goes on this machine.
async fn heartbeats_until_flushed(api: Api, group: GroupKey, id: String, flushed: Arc<AtomicU32>) {
    let mut member = Member::new(&api, &group, &id);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let mut sent = 0;
    while sent < 60 || flushed.load(Ordering::SeqCst) <= 200 {
        assert!(std::time::Instant::now() < deadline, "waited in vain for 200 flushes");
        sent += 1;
        let answer = member.beat().await;
        assert_eq!(answer.status, Status::Ok, "{answer:?}");
    }
}
