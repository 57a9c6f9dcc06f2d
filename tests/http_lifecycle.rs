//! Black-box tests of the process: start, probes, stop (protocol 9 and 12).

mod support;

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use reqwest::StatusCode;
use rsc_protocol::{ErrorCode, GroupKey};
use serde_json::json;
use support::{Api, Daemon, DaemonBuilder, RawConnection, RedisServer, group_path, heartbeat, wait_until};

const HEALTH: &str = "/coord/v1/monitoring/health";

async fn wait_until_ready(api: &Api) {
    wait_until("the daemon is ready", async || api.get("/readyz").await.status == StatusCode::OK).await;
}

async fn wait_for_log(daemon: &Daemon, text: &str) {
    wait_until(text, async || daemon.log().contains(text)).await;
}

/// Waits for Redis for 15 s.
fn patient(daemon: DaemonBuilder) -> DaemonBuilder {
    daemon.set("coordination", "member-lease-ttl", "60s").set("coordination", "mutex-ttl", "20s").set(
        "redis",
        "command-timeout",
        "15s",
    )
}

#[tokio::test]
async fn starts_without_redis_and_recovers_by_itself() {
    let port = RedisServer::free_port();
    let daemon = Daemon::builder(&["--redis-url", &format!("redis://127.0.0.1:{port}")]).fast().start();
    let api = daemon.api();
    assert_eq!(api.get("/livez").await.success()["status"], "UP");
    api.get("/readyz").await.expect_error(ErrorCode::RedisUnavailable);
    let health = api.get(HEALTH).await.success();
    assert_eq!((&health["status"], &health["groupCount"]), (&json!("DEGRADED"), &json!(null)), "{health}");
    assert_eq!(health["store"], json!({"kind": "redis", "reachable": false}));
    assert!(health["reason"].is_string(), "{health}");
    let create = api.post("/coord/v1/streams/orders", &json!({"requestedBy": "test"})).await;
    create.expect_error(ErrorCode::RedisUnavailable);
    let group = GroupKey::new("orders", "orders").unwrap();
    api.get(&group_path(&group)).await.expect_error(ErrorCode::RedisUnavailable);

    let mut redis = None;
    wait_until("Redis is there", async || {
        redis = RedisServer::try_start(port);
        redis.is_some()
    })
    .await;
    wait_until_ready(&api).await;
    api.create_stream("orders", 1).await;
}

#[tokio::test]
async fn livez_answers_while_redis_hangs_and_readyz_says_so() {
    let redis = RedisServer::start();
    // Whatever waited for Redis would wait for 15 s.
    let daemon = patient(Daemon::redis(&redis)).set("server", "workers", "1").start();
    let api = daemon.api();
    wait_until_ready(&api).await;
    let group = api.create_stream("orders", 1).await;
    redis.pause();
    let waiting: Vec<_> = (0..100)
        .map(|index| {
            let (api, group) = (api.clone(), group.clone());
            tokio::spawn(async move { api.try_heartbeat(&group, &heartbeat(&format!("m{index}"))).await })
        })
        .collect();
    for _ in 0..20 {
        let asked = Instant::now();
        api.get("/livez").await.success();
        assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
    }
    let asked = Instant::now();
    wait_until("readyz notices", async || api.get("/readyz").await.status != StatusCode::OK).await;
    let message = api.get("/readyz").await.expect_error(ErrorCode::RedisUnavailable);
    assert!(!message.is_empty());
    assert_eq!(api.get(HEALTH).await.success()["status"], "DEGRADED");
    assert!(asked.elapsed() < Duration::from_secs(12), "{:?}", asked.elapsed());
    redis.resume();
    wait_until_ready(&api).await;
    for answer in waiting {
        let answer = answer.await.unwrap();
        assert!(answer.status == 200 || answer.status == 503, "{answer:?}");
    }
    wait_until("heartbeats are taken again", async || {
        let answer = api.try_heartbeat(&group, &heartbeat("late")).await;
        answer.status == 200 && answer.json()["status"] == "OK"
    })
    .await;
}

#[tokio::test]
async fn a_lost_redis_turns_readyz_and_a_new_one_turns_it_back() {
    let mut redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).fast().start();
    let api = daemon.api();
    wait_until_ready(&api).await;
    redis.kill();
    wait_until("readyz notices", async || api.get("/readyz").await.status != StatusCode::OK).await;
    let answer = api.get("/readyz").await;
    answer.expect_error(ErrorCode::RedisUnavailable);
    api.get("/livez").await.success();
    redis.restart_empty();
    wait_until_ready(&api).await;
}

#[tokio::test]
async fn sigterm_lets_reads_go_on_and_refuses_work() {
    let mut daemon = Daemon::memory()
        .set("server", "shutdown-drain-delay", "20s")
        .set("server", "shutdown-timeout", "25s")
        .start();
    let api = daemon.api();
    let group = api.create_stream("orders", 1).await;
    api.get("/readyz").await.success();
    daemon.terminate();
    wait_for_log(&daemon, "terminating").await;

    api.get("/readyz").await.expect_error(ErrorCode::CoordinatorTerminating);
    let alive = api.get("/livez").await;
    assert_eq!((alive.status, alive.header("connection")), (StatusCode::OK, "close"));
    assert_eq!(api.get(HEALTH).await.success()["status"], "TERMINATING");
    assert_eq!(api.group(&group).await.shard_count, 1);
    let fresh = Api::new(daemon.address());
    fresh.get(&format!("{}/producer-routing", group_path(&group))).await.success();
    let beat = fresh.try_heartbeat(&group, &heartbeat("m1")).await;
    beat.expect_error(ErrorCode::CoordinatorTerminating);
    let body = json!({"requestedBy": "test", "reason": "test"});
    api.post("/coord/v1/streams/late", &body).await.expect_error(ErrorCode::CoordinatorTerminating);
    api.delete(&group_path(&group), &body).await.expect_error(ErrorCode::CoordinatorTerminating);
    let metrics = String::from_utf8(api.get("/metrics").await.body).unwrap();
    assert!(metrics.contains("rsc_terminating 1"), "{metrics}");
    assert!(!daemon.has_ended());

    // Whoever does not want to wait asks again.
    daemon.interrupt();
    assert_eq!(daemon.wait_for_exit().code(), Some(1));
    assert!(daemon.log().contains("ended by a second signal"));
}

#[tokio::test]
async fn the_drain_delay_is_kept_and_ends_with_0() {
    let delay = Duration::from_millis(400);
    let mut daemon = Daemon::memory().set("server", "shutdown-drain-delay", "400ms").start();
    let idle = RawConnection::open(daemon.address()).await;
    let mut kept_alive = RawConnection::open(daemon.address()).await;
    assert_eq!(kept_alive.request("GET", "/livez", "").await.status, 200);
    let asked = Instant::now();
    daemon.interrupt();
    let status = daemon.wait_for_exit();
    assert_eq!(status.code(), Some(0), "{status:?}");
    // Open connections without a request do not hold it up: the timeout is 25 s.
    assert!(asked.elapsed() >= delay && asked.elapsed() < Duration::from_secs(20), "{:?}", asked.elapsed());
    kept_alive.expect_end().await;
    drop(idle);
}

#[tokio::test]
async fn requests_that_run_at_sigterm_are_answered() {
    let mut daemon = Daemon::memory().start();
    let api = daemon.api();
    let group = api.create_stream("orders", 1).await;
    // Half of each request is there before the signal, the rest comes after it.
    let body = serde_json::to_string(&heartbeat("m1")).unwrap();
    let head = format!(
        "POST {}/members/m1/heartbeat HTTP/1.1\r\nhost: test\r\ncontent-length: {}\r\n\r\n",
        group_path(&group),
        body.len()
    );
    let (early, late) = body.split_at(20);
    let mut running = Vec::new();
    for _ in 0..5 {
        let mut raw = RawConnection::open(daemon.address()).await;
        raw.send(format!("{head}{early}").as_bytes()).await;
        running.push(raw);
    }
    wait_until("the requests have begun", async || {
        let metrics = String::from_utf8(api.get("/metrics").await.body).unwrap();
        // This scrape is one of them.
        metrics.contains("rsc_http_requests_in_flight 6")
    })
    .await;
    daemon.terminate();
    wait_for_log(&daemon, "terminating").await;
    assert!(!daemon.has_ended());
    for mut raw in running {
        raw.send(late.as_bytes()).await;
        let answer = raw.answer(false).await;
        assert_eq!((answer.status, &answer.json()["errorCode"]), (503, &json!("COORDINATOR_TERMINATING")));
        assert_eq!((answer.header("retry-after"), answer.header("connection")), ("1", "close"));
        raw.expect_end().await;
    }
    assert_eq!(daemon.wait_for_exit().code(), Some(0));
}

#[tokio::test]
async fn work_that_has_begun_is_recorded_and_answered_before_the_end() {
    let redis = RedisServer::start();
    // Time enough to see that the requests have begun, also on a slow machine.
    let mut daemon = patient(Daemon::redis(&redis)).start();
    let api = daemon.api();
    let group = api.create_stream("orders", 1).await;
    api.heartbeat(&group, &heartbeat("m0")).await;
    redis.pause();
    let begun: Vec<_> = (0..10)
        .map(|index| {
            let (api, group) = (api.clone(), group.clone());
            tokio::spawn(async move { api.try_heartbeat(&group, &heartbeat(&format!("m{index}"))).await })
        })
        .collect();
    wait_until("the requests have begun", async || {
        let metrics = String::from_utf8(api.get("/metrics").await.body).unwrap();
        metrics.contains("rsc_http_requests_in_flight 11")
    })
    .await;
    daemon.terminate();
    wait_for_log(&daemon, "terminating").await;
    redis.resume();
    for answer in begun {
        let answer = answer.await.unwrap();
        match answer.status.as_u16() {
            200 => assert_eq!(answer.json()["responseTo"].as_str().unwrap().len(), 36),
            _ => drop(answer.expect_error(ErrorCode::CoordinatorTerminating)),
        }
    }
    assert_eq!(daemon.wait_for_exit().code(), Some(0));
    // Nothing is left behind that another instance would have to wait for.
    let mutex = rsc_protocol::keys::Keys::default().mutex(&group);
    let held: bool =
        redis::cmd("EXISTS").arg(mutex).query_async(&mut redis.connection().await).await.unwrap();
    assert!(!held);
}

#[tokio::test]
async fn a_hanging_redis_does_not_hold_up_the_end() {
    let redis = RedisServer::start();
    let mut daemon = Daemon::redis(&redis).start();
    let api = daemon.api();
    let group = api.create_stream("orders", 1).await;
    redis.pause();
    let waiting = {
        let (api, group) = (api.clone(), group.clone());
        tokio::spawn(async move { api.try_heartbeat(&group, &heartbeat("m1")).await })
    };
    wait_until("the request has begun", async || {
        if waiting.is_finished() {
            return true;
        }
        let metrics = String::from_utf8(api.get("/metrics").await.body).unwrap();
        metrics.contains("rsc_http_requests_in_flight 2")
    })
    .await;
    daemon.terminate();
    assert_eq!(daemon.wait_for_exit().code(), Some(0), "{}", daemon.log());
    let answer = waiting.await.unwrap();
    assert!(answer.status == 200 || answer.status == 503, "{answer:?}");
}

#[tokio::test]
async fn a_body_that_does_not_arrive_delays_no_end() {
    let mut daemon = Daemon::memory().start();
    let mut stalled = RawConnection::open(daemon.address()).await;
    let head = "POST /coord/v1/streams/orders HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n";
    stalled.send(head.as_bytes()).await;
    stalled.send(b"{\"a").await;
    wait_until("the request has begun", async || {
        let metrics = String::from_utf8(daemon.api().get("/metrics").await.body).unwrap();
        metrics.contains("rsc_http_requests_in_flight 2")
    })
    .await;
    daemon.terminate();
    let answer = stalled.answer(false).await;
    assert_eq!((answer.status, answer.json()["errorCode"].as_str()), (503, Some("COORDINATOR_TERMINATING")));
    assert_eq!(daemon.wait_for_exit().code(), Some(0), "{}", daemon.log());
}

#[tokio::test]
async fn an_address_in_use_stops_the_start_with_its_key() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_rsc"))
        .args(["serve", "--insecure", "--store", "memory", "--listen", &address])
        .env_clear()
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains(&format!("server.listen: cannot listen on {address}")), "{text}");
}

#[tokio::test]
async fn serving_without_authentication_is_said_unless_it_was_asked_for() {
    let daemon = Daemon::memory().start();
    assert!(!daemon.log().contains("no authentication"), "{}", daemon.log());
    let mut open = Command::new(env!("CARGO_BIN_EXE_rsc"))
        .args(["serve", "--store", "memory", "--listen", "127.0.0.1:0"])
        .env_clear()
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let stderr = std::io::BufReader::new(open.stderr.take().unwrap());
    let mut lines =
        std::io::BufRead::lines(stderr).map_while(Result::ok).take_while(|line| !line.contains("listening"));
    let warned = lines.any(|line| line.contains("WARN") && line.contains("no authentication"));
    open.kill().unwrap();
    open.wait().unwrap();
    assert!(warned);
}
