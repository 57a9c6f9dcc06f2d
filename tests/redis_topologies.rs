//! The Redis topologies that other tests stand on: they do what they say.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

#[path = "support/redis_topologies/mod.rs"]
mod redis_topologies;

use redis::RedisResult;
use redis_topologies::{Announced, ClusterSettings, RedisCluster, RedisSentinel, SentinelSettings};

/// The code of an error: `MOVED`, `ASK` …
fn code<T: std::fmt::Debug>(answer: RedisResult<T>) -> String {
    answer.unwrap_err().code().unwrap().to_owned()
}

/// What the client makes of a redirection: `host:port`.
fn redirected_to<T: std::fmt::Debug>(answer: RedisResult<T>) -> String {
    let error = answer.unwrap_err();
    error.redirect_node().unwrap().0.to_owned()
}

#[test]
fn a_cluster_redirects_and_survives_the_death_of_a_master() {
    let cluster = RedisCluster::start();
    assert_eq!((cluster.urls().len(), cluster.masters().len()), (6, 3));
    let (slot, master) = (cluster.slot_of("orders"), cluster.master_of("orders"));
    let replica = cluster.replica_of(master);
    cluster.node(master).write_through(&["SET", "orders", "12"], 1);
    for other in cluster.indices().filter(|&other| other != master) {
        let answer = cluster.try_command::<String>(other, &["GET", "orders"]);
        assert_eq!(redirected_to(answer), format!("127.0.0.1:{}", cluster.node(master).port()));
    }

    cluster.kill(master);
    assert_eq!(cluster.wait_for_failover(slot, master), replica);
    assert_eq!(cluster.command_for::<String>("orders", &["GET", "orders"]), "12");
    cluster.restart(master);
    cluster.wait_until_whole();
    assert_eq!((cluster.master_of("orders"), cluster.replica_of(replica)), (replica, master));

    // A hung one is replaced as well, and goes back into the second row when it wakes.
    cluster.pause(replica);
    assert_eq!(cluster.wait_for_failover(slot, replica), master);
    cluster.resume(replica);
    cluster.wait_until_whole();
    // And by order.
    cluster.take_over(replica);
    assert_eq!(cluster.master_of("orders"), replica);
}

#[test]
fn a_slot_can_be_held_on_its_way() {
    let cluster = RedisCluster::start();
    let (slot, from) = (cluster.slot_of("{orders}"), cluster.master_of("{orders}"));
    let to = cluster.masters().into_iter().find(|&master| master != from).unwrap();
    for key in ["{orders}a", "{orders}b"] {
        cluster.command::<()>(from, &["SET", key, key]);
    }
    let moving = cluster.begin_move(slot, to);
    assert_eq!((moving.from(), moving.to(), moving.keys().len()), (from, to, 2));
    let get = |node: usize, key: &str| cluster.try_command::<String>(node, &["GET", key]);
    let both = || cluster.try_command::<Vec<String>>(from, &["MGET", "{orders}a", "{orders}b"]);
    assert_eq!(get(from, "{orders}a").unwrap(), "{orders}a");
    assert_eq!(code(get(from, "{orders}new")), "ASK");
    moving.move_key("{orders}a");
    assert_eq!(code(get(from, "{orders}a")), "ASK");
    assert_eq!(redirected_to(get(from, "{orders}a")), format!("127.0.0.1:{}", cluster.node(to).port()));
    assert_eq!(code(both()), "TRYAGAIN");
    assert_eq!(code(get(to, "{orders}a")), "MOVED");
    let mut connection = cluster.node(to).connect().unwrap();
    let asked: (String, String) =
        redis::pipe().cmd("ASKING").cmd("GET").arg("{orders}a").query(&mut connection).unwrap();
    assert_eq!(asked.1, "{orders}a");

    moving.finish();
    assert_eq!(code(both()), "MOVED");
    assert_eq!((cluster.master_of("{orders}"), get(to, "{orders}b").unwrap()), (to, "{orders}b".to_owned()));
}

/// Every address that a node names to clients is one of `mappings`, and a client cannot get there.
fn expect_unreachable_but_whole(cluster: &RedisCluster, reach: impl Fn(&str) -> RedisResult<()>) {
    let mappings = cluster.mappings();
    assert_eq!(mappings.len(), 6);
    for (announced, real) in &mappings {
        reach(announced).unwrap_err();
        reach(real).unwrap();
    }
    let (slot, master) = (cluster.slot_of("orders"), cluster.master_of("orders"));
    let other = cluster.masters().into_iter().find(|&other| other != master).unwrap();
    cluster.node(master).write_through(&["SET", "orders", "12"], 1);
    let named = redirected_to(cluster.try_command::<String>(other, &["GET", "orders"]));
    assert_eq!(mappings[&named], format!("127.0.0.1:{}", cluster.node(master).port()));
    // Among themselves they can.
    cluster.kill(master);
    cluster.wait_for_failover(slot, master);
    assert_eq!(cluster.command_for::<String>("orders", &["GET", "orders"]), "12");
    cluster.restart(master);
    cluster.wait_until_whole();
}

fn ping(address: &str, password: &str) -> RedisResult<()> {
    let client = redis::Client::open(format!("redis://{password}{address}"))?;
    redis::cmd("PING").query(&mut client.get_connection()?)
}

#[test]
fn nodes_may_announce_ports_that_only_they_can_reach() {
    let settings = ClusterSettings {
        announced: Announced::Ports,
        password: Some("secret".into()),
        ..Default::default()
    };
    let cluster = RedisCluster::start_with(settings);
    expect_unreachable_but_whole(&cluster, |address| ping(address, ":secret@"));
    assert_eq!(code(ping(&cluster.mappings().into_values().next().unwrap(), "")), "NOAUTH");
    let (slot, from) = (cluster.slot_of("orders"), cluster.master_of("orders"));
    let to = cluster.masters().into_iter().find(|&master| master != from).unwrap();
    cluster.begin_move(slot, to).finish();
    assert_eq!(cluster.command::<String>(to, &["GET", "orders"]), "12");
}

#[test]
fn nodes_may_announce_names_that_nobody_resolves() {
    let settings = ClusterSettings { announced: Announced::HostNames, ..Default::default() };
    expect_unreachable_but_whole(&RedisCluster::start_with(settings), |address| ping(address, ""));
}

#[test]
fn sentinels_replace_a_dead_and_a_hung_master() {
    let settings = SentinelSettings { password: Some("secret".into()), ..Default::default() };
    let redis = RedisSentinel::start_with(settings);
    assert_eq!((redis.master(), redis.replicas(), redis.sentinel_urls().len()), (0, vec![1, 2], 3));
    assert_eq!(code(ping(redis.server_urls()[0].strip_prefix("redis://").unwrap(), "")), "NOAUTH");
    redis.server(0).write_through(&["SET", "orders", "12"], 2);
    redis.kill(0);
    let second = redis.wait_for_promotion(0);
    assert_eq!(redis.server(second).command::<String>(&["GET", "orders"]), "12");
    assert_eq!(redis.master(), second);
    redis.restart_as_replica(0);
    redis.wait_until_whole();

    redis.pause(second);
    let third = redis.wait_for_promotion(second);
    assert_ne!(third, second);
    redis.resume(second);
    // It still takes itself for a master, until it is told.
    assert!(redis.server(second).is_master());
    redis.wait_until_whole();
    assert_eq!(code(redis.server(second).try_command::<()>(&["SET", "orders", "13"])), "READONLY");
}

#[test]
fn two_of_three_sentinels_are_enough() {
    let redis = RedisSentinel::start();
    redis.sentinel(0).kill();
    redis.kill(0);
    let second = redis.wait_for_promotion(0);
    redis.sentinel(0).restart(&[]);
    redis.restart_as_replica(0);
    redis.wait_until_whole();
    assert_eq!(redis.master(), second);
    let third = redis.fail_over();
    assert_ne!(third, second);
    assert_eq!(redis.master(), third);
}

#[test]
fn asynchronous_replication_loses_what_was_acknowledged() {
    let redis = RedisSentinel::start_with(SentinelSettings { replicas: 1, ..Default::default() });
    redis.server(0).write_through(&["SET", "orders", "12"], 1);
    redis.cut_replication();
    redis.server(0).command::<()>(&["SET", "orders", "13"]);
    redis.kill(0);
    redis.resume(1);
    assert_eq!(redis.wait_for_promotion(0), 1);
    assert_eq!(redis.server(1).command::<String>(&["GET", "orders"]), "12");
}

#[test]
fn everything_ends_with_its_value() {
    let redis = RedisSentinel::start_with(SentinelSettings { replicas: 1, ..Default::default() });
    let mut pids: Vec<u32> = redis.servers().map(|index| redis.server(index).pid()).collect();
    pids.extend(redis.sentinels().map(|index| redis.sentinel(index).pid()));
    // A paused one as well.
    redis.pause(1);
    let alive = |pid: &u32| std::path::Path::new(&format!("/proc/{pid}")).exists();
    assert!(pids.iter().all(alive));
    drop(redis);
    assert!(!pids.iter().any(alive));
}
