//! Scenarios of a Redis behind sentinels: the master dies under load, and what it had acknowledged is lost.

mod support;

use support::redis_topologies::{RedisSentinel, SentinelSettings};
use support::{Crew, Daemon, DaemonBuilder, Routes, settle, wait_until};

const LEASE_MS: u64 = 6_000;

fn daemon(redis: &RedisSentinel) -> DaemonBuilder {
    Daemon::builder(&["--redis-mode", "sentinel"])
        .set("redis", "urls", &redis.sentinel_urls().join(","))
        .set("redis", "sentinel-master", redis.name())
        .lease(LEASE_MS, 30_000)
        .set("redis", "command-timeout", "600ms")
        .set("redis", "connect-timeout", "600ms")
}

#[tokio::test]
async fn a_failover_that_loses_nothing_moves_no_shard() {
    let redis = RedisSentinel::start();
    let (one, other) = (daemon(&redis).start(), daemon(&redis).start());
    let group = one.api().create_stream("orders", 6).await;
    let crew = Crew::new(&group, &Routes::to(&[&one.api(), &other.api()]));
    let consumers = crew.start_many(3);
    settle(&one.api(), &group, &consumers, 6).await;
    let before = one.api().group(&group).await;

    let failed_over = tokio::task::spawn_blocking(move || {
        let second = redis.fail_over();
        redis.wait_until_whole();
        (redis, second)
    });
    let (redis, _second) = failed_over.await.unwrap();
    let heard: Vec<u64> = consumers.iter().map(|consumer| consumer.answers("OK")).collect();
    for (consumer, heard) in consumers.iter().zip(heard) {
        wait_until("everybody is answered again", async || consumer.answers("OK") > heard + 2).await;
    }
    settle(&one.api(), &group, &consumers, 6).await;
    let after = one.api().group(&group).await;
    // Only if the failover has lost a write did anything happen; then it was noticed.
    if after.metadata_version == before.metadata_version {
        assert_eq!(after.group_epoch, before.group_epoch);
    }
    crew.journal.expect_one_reader_at_a_time();
    for consumer in consumers {
        consumer.leave().await;
    }
    drop(redis);
}

#[tokio::test]
async fn acknowledged_writes_that_a_failover_loses_begin_a_correction_round() {
    let redis = RedisSentinel::start_with(SentinelSettings { replicas: 1, ..Default::default() });
    let (one, other) = (daemon(&redis).start(), daemon(&redis).start());
    let group = one.api().create_stream("orders", 6).await;
    let crew = Crew::new(&group, &Routes::to(&[&one.api(), &other.api()]));
    let mut consumers = crew.start_many(2);
    settle(&one.api(), &group, &consumers, 6).await;
    let before = one.api().group(&group).await;
    redis.server(0).write_through(&["SET", "x", "y"], 1);

    // From here on the replica gets nothing: a third member joins, gets shards, and reads.
    redis.cut_replication();
    consumers.push(crew.start("late"));
    settle(&one.api(), &group, &consumers, 6).await;
    let lost = one.api().group(&group).await;
    assert!(lost.metadata_version > before.metadata_version);
    redis.kill(0);
    redis.resume(1);
    let redis = tokio::task::spawn_blocking(move || {
        redis.wait_for_promotion(0);
        redis
    })
    .await
    .unwrap();

    wait_until("the loss is noticed", async || {
        let shown = one.api().get(&support::monitored_path(&group)).await;
        shown.status.is_success() && shown.json()["metadataSyncInProgress"] == true
    })
    .await;
    settle(&one.api(), &group, &consumers, 6).await;
    // Protocol 5, what remains: a grant between the loss and its first sign, for at most one lease.
    let double = crew.journal.double_readings(LEASE_MS * 1_000);
    assert!(double.is_empty(), "nobody reads beside another for longer than a lease: {double:?}");
    for consumer in consumers {
        consumer.leave().await;
    }
    drop(redis);
}
