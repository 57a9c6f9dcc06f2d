//! Scenarios of clocks that are wrong: those of the coordinators, which decide nothing, and that of Redis, by which everything
//! is decided (protocol 2: all deadlines come from Redis `TIME`; back: nobody expires; forward: out of service).
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use reqwest::StatusCode;
use rsc_protocol::keys::Keys;
use rsc_protocol::{GroupKey, Status, Timestamp};
use serde_json::{Value, json};
use support::{
    Api, Clock, Consumer, Crew, Daemon, Member, Observer, Proxy, RedisServer, Routes, Stream, group_path,
    heartbeat_unheard, monitored_path, scale_body, seed, settle, wait_until,
};

const SHARDS: usize = 12;
const LEASE: Duration = Duration::from_secs(3);
const HOUR: i64 = 3_600;

async fn actor(api: &Api, group: &GroupKey) -> Value {
    api.get(&format!("{}/actor", monitored_path(group))).await.success()
}

/// Waits until each of them judges members.
async fn judge(apis: &[Api], group: &GroupKey) {
    for api in apis {
        wait_until("it is in service", async || actor(api, group).await["inService"] == true).await;
    }
}

/// Waits for so many leases.
async fn leases_pass(leases: f64) {
    let started = Instant::now();
    wait_until("leases have passed", async || started.elapsed() > LEASE.mul_f64(leases)).await;
}

/// The history, oldest first: Redis's own time of the entry, and the entry.
async fn history(redis: &RedisServer, group: &GroupKey) -> Vec<(Timestamp, Value)> {
    let key = Keys::default().history(group);
    let entries: Vec<(String, BTreeMap<String, String>)> = redis.command(&["XRANGE", &key, "-", "+"]).await;
    let read = |(id, fields): (String, BTreeMap<String, String>)| {
        let ms = id.split('-').next().unwrap().parse().unwrap();
        (Timestamp::from_millis(ms), serde_json::from_str(&fields["entry"]).unwrap())
    };
    entries.into_iter().map(read).collect()
}

fn instant(text: &Value) -> Timestamp {
    serde_json::from_value(text.clone()).unwrap()
}

/// When this member was expired.
fn expired_at(history: &[(Timestamp, Value)], member: &str) -> Option<Timestamp> {
    let is_it = |transition: &Value| {
        transition["type"] == "MEMBER_GONE"
            && transition["cause"] == "LEASE_EXPIRED"
            && transition["memberId"] == member
    };
    let entry = history.iter().find(|(_, entry)| entry["transitions"].as_array().unwrap().iter().any(is_it));
    entry.map(|(_, entry)| instant(&entry["at"]))
}

/// Until when the record lets this member live.
async fn lease_end(redis: &RedisServer, group: &GroupKey, member: &str) -> Timestamp {
    let live = redis.metadata_field(group, &format!("live:{member}")).await.unwrap();
    instant(&serde_json::from_str::<Value>(&live).unwrap()["memberLeaseExpiresAt"])
}

fn one_goes(consumers: &mut Vec<Consumer>, member: &str) -> Consumer {
    let at = consumers.iter().position(|consumer| consumer.id() == member).unwrap();
    consumers.remove(at)
}

#[tokio::test(flavor = "multi_thread")]
async fn coordinators_whose_clocks_are_hours_apart_agree_about_every_deadline() {
    let redis = RedisServer::start();
    let clocks = [Clock::off_by(-5 * HOUR), Clock::off_by(7 * HOUR)];
    let daemons =
        clocks.each_ref().map(|clock| Daemon::redis(&redis).lease(3_000, 30_000).clock(clock).start());
    let apis = daemons.each_ref().map(Daemon::api);
    let group = apis[0].create_stream("orders", 12).await;
    let mut crew = Crew::new(&group, &Routes::seeded(&[&apis[0], &apis[1]], seed()));
    let observer = Observer::start(&redis, &group).await;
    crew.versions = Some(observer.versions());
    let mut consumers = crew.start_many(4);
    settle(&apis[0], &group, &consumers, SHARDS).await;
    // The clocks are what this is about.
    let dates = [0, 1].map(|at| apis[at].clone());
    let mut told = Vec::new();
    for api in dates {
        told.push(
            api.get("/livez").await.header("date").split(' ').nth(4).unwrap()[..2].parse::<i32>().unwrap(),
        );
    }
    assert_eq!((told[1] - told[0]).rem_euclid(24), 12, "{told:?}");

    judge(&apis, &group).await;
    leases_pass(1.5).await;
    let at_rest = apis[0].group(&group).await;
    // One falls silent.
    one_goes(&mut consumers, "m2").crash().await;
    let end = lease_end(&redis, &group, "m2").await;
    wait_until("it is expired", async || expired_at(&history(&redis, &group).await, "m2").is_some()).await;
    for api in &apis {
        settle(api, &group, &consumers, SHARDS).await;
    }
    let history = history(&redis, &group).await;
    let expired = expired_at(&history, "m2").unwrap();
    assert!(expired >= end, "expired at {expired}, and its lease was to end at {end}");
    for (at, entry) in &history {
        let apart = at.since(instant(&entry["at"]));
        assert!((0..60_000).contains(&apart), "redis wrote it at {at}: {entry}");
    }
    let observed = observer.stop().await;
    assert_eq!(observed.replay.thrown_out(), BTreeMap::from([("MEMBER_GONE LEASE_EXPIRED", 1)]));
    let after = apis[1].group(&group).await;
    assert_eq!(after.group_epoch, at_rest.group_epoch + 1, "nothing else has happened");
    crew.journal.expect_one_reader_at_a_time();
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_time_that_jumps_back_an_hour_expires_nobody_and_takes_nothing_back() {
    let clock = Clock::off_by(0);
    let redis = RedisServer::start_with_clock(&clock);
    let daemons = [(); 2].map(|()| Daemon::redis(&redis).lease(3_000, 30_000).start());
    let apis = daemons.each_ref().map(Daemon::api);
    let group = apis[0].create_stream("orders", 12).await;
    let mut crew = Crew::new(&group, &Routes::seeded(&[&apis[0], &apis[1]], seed()));
    let observer = Observer::start(&redis, &group).await;
    crew.versions = Some(observer.versions());
    let mut consumers = crew.start_many(4);
    settle(&apis[0], &group, &consumers, SHARDS).await;
    judge(&apis, &group).await;

    clock.set(-HOUR * 1_000);
    // Who is silent now stays: nobody knows how long it has been.
    one_goes(&mut consumers, "m1").crash().await;
    leases_pass(1.5).await;
    for api in &apis {
        let behind = actor(api, &group).await["redisTimeBehindMs"].as_i64();
        assert!(behind.is_some_and(|behind| behind > 3_000_000), "{behind:?}");
        assert_eq!(api.group(&group).await.live_members, 4);
    }
    // Coming and going is possible meanwhile.
    consumers.push(crew.start("late"));
    one_goes(&mut consumers, "m2").leave().await;
    wait_until("the late one reads what those who are there have given back", async || {
        let seen = consumers.iter().find(|consumer| consumer.id() == "late").unwrap().seen();
        seen.settled && !seen.reading.is_empty()
    })
    .await;

    // Back to where it was: a jump forward.
    clock.set(0);
    wait_until("the silent one is expired", async || {
        expired_at(&history(&redis, &group).await, "m1").is_some()
    })
    .await;
    for api in &apis {
        settle(api, &group, &consumers, SHARDS).await;
        assert!(actor(api, &group).await["redisTimeBehindMs"].is_null());
    }
    let observed = observer.stop().await;
    assert_eq!(observed.replay.thrown_out(), BTreeMap::from([("MEMBER_GONE LEASE_EXPIRED", 1)]));
    crew.journal.expect_one_reader_at_a_time();
}

/// The mutex of an instance that was killed in its section was to last for a second; by the clock that went back it lasts for
/// an hour and a second.
#[tokio::test(flavor = "multi_thread")]
async fn a_mutex_left_behind_when_redis_time_jumps_back_keeps_nobody_out_for_long() {
    let clock = Clock::off_by(0);
    let redis = RedisServer::start_with_clock(&clock);
    let proxy = Proxy::to(redis.port()).await;
    let mut killed = tokio::task::block_in_place(|| {
        Daemon::builder(&["--redis-url", &proxy.redis_url()]).lease(3_000, 30_000).start()
    });
    let other = Daemon::redis(&redis).lease(3_000, 30_000).start();
    let group = killed.api().create_stream("orders", 12).await;
    let mut commit = proxy.hold_next(&Keys::default().history(&group));
    let first = Member::new(&killed.api(), &group, "first").request();
    heartbeat_unheard(killed.address(), &group, &first).await;
    commit.reached().await;
    killed.kill();
    clock.set(-HOUR * 1_000);
    let mut second = Member::new(&other.api(), &group, "second");
    wait_until("the group is free again", async || second.beat().await.status == Status::Ok).await;
    drop(commit);
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_time_that_jumps_forward_gives_no_shard_away_that_is_still_read() {
    let clock = Clock::off_by(0);
    let redis = RedisServer::start_with_clock(&clock);
    let daemons = [(); 2].map(|()| Daemon::redis(&redis).lease(3_000, 30_000).start());
    let apis = daemons.each_ref().map(Daemon::api);
    let group = apis[0].create_stream("orders", 12).await;
    let mut crew = Crew::new(&group, &Routes::seeded(&[&apis[0], &apis[1]], seed()));
    let observer = Observer::start(&redis, &group).await;
    crew.versions = Some(observer.versions());
    let mut consumers = crew.start_many(4);
    settle(&apis[0], &group, &consumers, SHARDS).await;
    let lease_ms = i64::try_from(LEASE.as_millis()).unwrap();
    let mut noticed = Vec::new();
    // More than a lease, and half of one: what is left of the leases then is over too early as well.
    for (round, ahead_ms) in [HOUR * 1_000, HOUR * 1_000 + lease_ms / 2].into_iter().enumerate() {
        judge(&apis, &group).await;
        let before = jumps_seen(&apis).await;
        // It goes on reading until its lease is over, and says nothing more.
        one_goes(&mut consumers, &format!("m{round}")).crash().await;
        clock.set(ahead_ms);
        consumers.push(crew.start(&format!("late{round}")));
        for api in &apis {
            settle(api, &group, &consumers, SHARDS).await;
        }
        let after = jumps_seen(&apis).await;
        noticed.push(after.iter().zip(&before).all(|(after, before)| after > before));
    }
    for consumer in consumers {
        consumer.crash().await;
    }
    crew.journal.expect_one_reader_at_a_time();
    let observed = observer.stop().await;
    // The silent ones, and nobody else.
    assert_eq!(observed.replay.thrown_out(), BTreeMap::from([("MEMBER_GONE LEASE_EXPIRED", 2)]));
    assert_eq!(noticed, [true, true], "both instances saw time jump");
    assert_eq!(
        apis[0].get(&format!("{}/assignments", monitored_path(&group))).await.json()["invariantViolations"],
        json!([])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_time_that_jumps_forward_takes_no_shard_from_producers_whose_route_is_still_good() {
    let cache = Duration::from_secs(4);
    let clock = Clock::off_by(0);
    let redis = RedisServer::start_with_clock(&clock);
    let daemons = [(); 2].map(|()| {
        let builder = Daemon::redis(&redis).lease(3_000, 30_000);
        builder.set("producer", "routing-cache-ttl", "4s").set("producer", "publish-margin", "300ms").start()
    });
    let apis = daemons.each_ref().map(Daemon::api);
    let stream = Stream::create(&apis[0], "orders", 4, &["a", "b"]).await;
    let routes = Routes::seeded(&[&apis[0], &apis[1]], seed());
    let crews = [Crew::new(&stream.groups[0], &routes), Crew::new(&stream.groups[1], &routes)];
    let consumers = crews.each_ref().map(|crew| crew.start_many(2));
    for (group, consumers) in stream.groups.iter().zip(&consumers) {
        settle(&apis[0], group, consumers, 4).await;
    }
    let route = apis[1].get(&format!("{}/producer-routing", group_path(stream.group()))).await.success();
    let told = Instant::now();
    assert_eq!(route["routingCacheTtlMs"], 4_000);
    wait_until("the count is changed", async || {
        stream.try_scale(&scale_body(2)).await.status == StatusCode::ACCEPTED
    })
    .await;
    clock.set(HOUR * 1_000);
    wait_until("the removed shards are given up", async || {
        let shown = apis[0].get(&format!("{}/migrations", monitored_path(stream.group()))).await.success();
        let state = shown["migrations"][0]["state"].clone();
        assert!(state == "ACTIVE" || told.elapsed() > cache, "{state} after {:?}", told.elapsed());
        state == "DEPRECATED"
    })
    .await;
}

/// How often each has found that time had jumped.
async fn jumps_seen(apis: &[Api]) -> Vec<usize> {
    let mut seen = Vec::new();
    for api in apis {
        let metrics = String::from_utf8(api.get("/metrics").await.body).unwrap();
        let jumped = metrics.lines().find(|line| line.contains(r#"{cause="time_jumped"}"#));
        seen.push(jumped.map_or(0, |line| line.rsplit_once(' ').unwrap().1.parse().unwrap()));
    }
    seen
}
