//! Scenarios of Redis that is restarted again and again, that hangs, or behind a network that swallows everything: requests
//! are answered in time, the process stays alive, and it goes on by itself when Redis is back.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]
#![expect(clippy::print_stderr, reason = "how long something took is for people")]

mod support;

use std::time::{Duration, Instant};

use reqwest::{Method, StatusCode};
use rsc_protocol::keys::Keys;
use rsc_protocol::{GroupKey, HeartbeatRequest, Status};
use rustix::process::Signal;
use serde_json::json;
use support::{
    Api, Consumer, Crew, Daemon, Member, Proxy, RawConnection, RedisServer, Replay, Routes,
    beat_until_stable, group_path, heartbeat, monitored_path, monotonic_us, seed, settle, wait_until,
};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Waits until every consumer has been told `OK` some times more.
async fn are_heard(consumers: &[Consumer]) {
    let heard: Vec<u64> = consumers.iter().map(|consumer| consumer.answers("OK")).collect();
    wait_until("everybody is heard", async || {
        consumers.iter().zip(&heard).all(|(consumer, heard)| consumer.answers("OK") > heard + 5)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_restarts_of_redis_in_a_row_under_load_cost_nobody_a_shard() {
    const SHARDS: usize = 24;
    let mut redis = RedisServer::start_durable();
    let daemons = [(); 2].map(|()| {
        Daemon::redis(&redis).lease(6_000, 60_000).set("redis", "command-timeout", "600ms").start()
    });
    let apis = daemons.each_ref().map(Daemon::api);
    let [still, moving] =
        [apis[0].create_stream("still", 24).await, apis[0].create_stream("moving", 24).await];
    let routes = Routes::seeded(&[&apis[0], &apis[1]], seed());
    let [mut crew, mut movers] = [Crew::new(&still, &routes), Crew::new(&moving, &routes)];
    (crew.interval, movers.interval) = (Duration::from_millis(20), Duration::from_millis(20));
    let consumers = crew.start_many(6);
    let mut moving_ones = movers.start_many(4);
    settle(&apis[0], &still, &consumers, SHARDS).await;
    let (before, moved_before) = (apis[0].group(&still).await, crew.journal.len());

    let mut figures = Vec::new();
    for round in 0..10 {
        // In the other group there is always something going on.
        moving_ones.push(movers.start(&format!("n{round}")));
        let leaves = tokio::spawn(moving_ones.remove(0).leave());
        // With nothing lost of what was answered, even when it is killed.
        let signal = if round % 2 == 0 { Signal::TERM } else { Signal::KILL };
        tokio::task::block_in_place(|| redis.restart(signal));
        let back_us = monotonic_us();
        are_heard(&consumers).await;
        are_heard(&moving_ones).await;
        leaves.await.unwrap();
        let failed_us = consumers.iter().chain(&moving_ones).map(|consumer| consumer.seen().failed_us).max();
        figures.push(Duration::from_micros(failed_us.unwrap().saturating_sub(back_us)));
    }
    eprintln!("errors ended so long after redis had answered again: {figures:?}");
    // One of them may meet a moment at which this machine does something else.
    figures.sort();
    assert!(figures[4] < Duration::from_secs(2), "{figures:?}");

    settle(&apis[1], &still, &consumers, SHARDS).await;
    settle(&apis[1], &moving, &moving_ones, SHARDS).await;
    let after = apis[1].group(&still).await;
    assert_eq!((after.group_epoch, after.metadata_version), (before.group_epoch, before.metadata_version));
    let replay = Replay::whole(&redis, &moving).await;
    assert_eq!((replay.count("MEMBER_JOINED"), replay.count("MEMBER_GONE LEFT")), (14, 10), "{replay:?}");
    assert!(replay.thrown_out().is_empty(), "{replay:?}");
    let mut refused = 0;
    for consumer in consumers.into_iter().chain(moving_ones) {
        let seen = consumer.crash().await;
        assert!(!seen.answers.contains_key("lease over"), "{seen:?}");
        refused += seen.answers.get("REDIS_UNAVAILABLE").copied().unwrap_or(0);
    }
    assert!(refused > 10, "so often the outages were met: {refused}");
    assert_eq!(crew.journal.len() - moved_before, SHARDS, "each has read what it read without a gap");
    crew.journal.expect_one_reader_at_a_time();
    movers.journal.expect_one_reader_at_a_time();
}

/// A third of it is twice what a commit without an answer and the look after it take here, with the default `command-timeout`.
const LEASE: Duration = Duration::from_secs(20);
/// Shorter than each outage, so that what comes late comes too late.
const MUTEX_TTL: Duration = Duration::from_secs(3);
/// Requests at a time: many times more than the two threads of the HTTP server.
const BURST: usize = 128;

#[tokio::test(flavor = "multi_thread")]
async fn redis_that_hangs_keeps_no_request_waiting_for_more_than_a_third_of_a_lease() {
    requests_are_answered_while(|redis, _| redis.pause(), |redis, _| redis.resume()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_swallows_everything_keeps_no_request_waiting_for_more_than_a_third_of_a_lease() {
    requests_are_answered_while(|_, proxy| proxy.swallow(true), |_, proxy| proxy.swallow(false)).await;
}

async fn requests_are_answered_while(
    begin: impl Fn(&RedisServer, &Proxy),
    end: impl Fn(&RedisServer, &Proxy),
) {
    let redis = RedisServer::start();
    let proxy = Proxy::to(redis.port()).await;
    let url = proxy.redis_url();
    let daemon = tokio::task::block_in_place(|| {
        Daemon::builder(&["--redis-url", &url])
            .lease(20_000, 60_000)
            .set("server", "workers", "2")
            .set("redis", "command-timeout", "1500ms")
            .set("redis", "connect-timeout", "1500ms")
            .set("coordination", "mutex-ttl", "3s")
            .set("coordination", "mutex-acquire-timeout", "1500ms")
            .start()
    });
    let api = daemon.api();
    let group = api.create_stream("orders", 12).await;
    // A group that this instance does not work on yet is looked up first.
    api.create_stream("unheard", 12).await;
    let mut members: Vec<Member> = (0..4).map(|at| Member::new(&api, &group, &format!("m{at}"))).collect();
    beat_until_stable(&api, &group, &mut members).await;
    let before = api.group(&group).await;
    let owned: Vec<_> = members.iter().map(|member| member.owned.clone()).collect();

    // It hangs in the middle of whatever there is: a commit, and what people read.
    let mut commit = proxy.hold_next(&Keys::default().history(&group));
    let reading = proxy.hold_next("XRANGE");
    let mut under_way = JoinSet::new();
    under_way.spawn(ask(api.clone(), 0, 0, heartbeat("late")));
    for at in 0..40 {
        under_way.spawn(read_messages(api.clone(), at));
    }
    commit.reached().await;
    begin(&redis, &proxy);
    let (stop, stopped) = watch::channel(false);
    let alive = tokio::spawn(is_alive_until(daemon.address().to_owned(), stopped));
    let hangs = Instant::now();
    // At once, while connections are open, and when none can be made any more.
    for wave in 0..3 {
        let mut asked = std::mem::take(&mut under_way);
        for at in 0..BURST {
            let whose = at % members.len();
            asked.spawn(ask(api.clone(), wave, at, members[whose].request()));
        }
        let ready = Instant::now();
        assert_eq!(api.get("/readyz").await.status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(ready.elapsed() < LEASE / 3, "{:?}", ready.elapsed());
        let slowest = asked.join_all().await.into_iter().max().unwrap();
        eprintln!("wave {wave}: the slowest answer took {slowest:?}");
        assert!(slowest < LEASE / 3, "{slowest:?}");
    }
    wait_until("its mutex is over", async || hangs.elapsed() > MUTEX_TTL).await;
    let _ = stop.send(true);
    let probes = alive.await.unwrap();
    assert!(probes > 10, "{probes}");

    end(&redis, &proxy);
    // Too late: its mutex is long over.
    commit.let_go();
    reading.let_go();
    wait_until("it is ready again", async || api.get("/readyz").await.status == StatusCode::OK).await;
    for (member, owned) in members.iter_mut().zip(&owned) {
        wait_until("the member is told OK", async || {
            let request = member.request();
            let answer = api.try_heartbeat(&group, &request).await;
            if answer.status != StatusCode::OK {
                return false;
            }
            let response = answer.read();
            member.apply(&request, &response);
            response.status == Status::Ok
        })
        .await;
        assert_eq!(&member.owned, owned);
    }
    let after = api.group(&group).await;
    assert_eq!((after.group_epoch, after.metadata_version), (before.group_epoch, before.metadata_version));
    wait_until("streams can be created", async || {
        let body = json!({"requestedBy": "test"});
        api.post("/coord/v1/streams/afterwards", &body).await.status == StatusCode::CREATED
    })
    .await;
}

/// One of all kinds of requests; returns how long it took. None of them can succeed.
async fn ask(api: Api, wave: usize, at: usize, heartbeat: HeartbeatRequest) -> Duration {
    let orders = GroupKey::new("orders", "orders").unwrap();
    let unheard = GroupKey::new("unheard", "unheard").unwrap();
    let by = json!({"requestedBy": "test", "reason": "test", "targetShardCount": 20});
    let get = |path: String| api.request(Method::GET, &path);
    let post = |path: String, body: &serde_json::Value| api.request(Method::POST, &path).json(body);
    let beat = |group, request| {
        post(format!("{}/members/{}/heartbeat", group_path(group), heartbeat.member_id), request)
    };
    let body = serde_json::to_value(&heartbeat).unwrap();
    let request = match at % 16 {
        0..4 => beat(&orders, &body),
        4 => beat(&unheard, &body),
        5 => get(group_path(&orders)),
        6 => get(format!("{}/producer-routing", group_path(&orders))),
        7 => get(format!("{}/members", monitored_path(&orders))),
        8 => get(format!("{}/offsets", monitored_path(&[orders, unheard][at / 16 % 2]))),
        9 => get(format!("{}/shards/{}/messages", monitored_path(&orders), at / 16 % 12)),
        10 => get(format!("{}/history?limit={}", monitored_path(&orders), at / 16 + 1)),
        11 => get("/coord/v1/monitoring/groups".to_owned()),
        12 => post(format!("/coord/v1/streams/new-{wave}-{at}"), &json!({"requestedBy": "test"})),
        13 => post("/coord/v1/streams/orders/scale".to_owned(), &by),
        14 => api.request(Method::DELETE, &group_path(&unheard)).json(&by),
        _ => get(format!("{}/consumption", monitored_path(&orders))),
    };
    let asked = Instant::now();
    let answer = api.send(request).await;
    let took = asked.elapsed();
    let told = answer.json();
    let is_retry = answer.status == StatusCode::OK && told["status"] == "RETRY";
    assert!(is_retry || answer.status == StatusCode::SERVICE_UNAVAILABLE, "{} {told}", at % 16);
    took
}

/// Asks for records of a shard, each time for others.
async fn read_messages(api: Api, at: usize) -> Duration {
    let orders = GroupKey::new("orders", "orders").unwrap();
    let path = format!("{}/shards/{}/messages?limit={}", monitored_path(&orders), at % 12, at + 1);
    let asked = Instant::now();
    let answer = api.get(&path).await;
    // It may have come before.
    assert!(answer.status == StatusCode::OK || answer.status == StatusCode::SERVICE_UNAVAILABLE);
    asked.elapsed()
}

/// Asks over a new connection each time, whichever thread takes it, whether the process is alive. Returns how often.
async fn is_alive_until(address: String, stopped: watch::Receiver<bool>) -> usize {
    let mut probes = 0;
    while !*stopped.borrow() {
        let asked = Instant::now();
        let answer = RawConnection::open(&address).await.request("GET", "/livez", "").await;
        assert_eq!(answer.status, 200);
        assert!(asked.elapsed() < LEASE / 3, "{:?}", asked.elapsed());
        probes += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    probes
}
