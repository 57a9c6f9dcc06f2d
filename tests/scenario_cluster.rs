//! Scenarios of a Redis Cluster: a group's master dies, slots move, and a stream is resharded over all nodes.

mod support;

use rsc_protocol::keys::Keys;
use rsc_protocol::resharding::MigrationState;
use serde_json::json;
use support::redis_topologies::RedisCluster;
use support::{Crew, Daemon, DaemonBuilder, Routes, Stream, settle, wait_until};

const LEASE_MS: u64 = 6_000;

fn daemon(cluster: &RedisCluster) -> DaemonBuilder {
    Daemon::builder(&["--redis-mode", "cluster"])
        // Two of them are enough to find the others.
        .set("redis", "urls", &cluster.urls()[..2].join(","))
        .lease(LEASE_MS, 30_000)
        .short_caches()
        .set("redis", "command-timeout", "600ms")
        .set("redis", "connect-timeout", "600ms")
}

#[tokio::test]
async fn the_death_of_a_groups_master_is_survived() {
    let cluster = RedisCluster::start();
    let (one, other) = (daemon(&cluster).start(), daemon(&cluster).start());
    let group = one.api().create_stream("orders", 6).await;
    let crew = Crew::new(&group, &Routes::to(&[&one.api(), &other.api()]));
    let consumers = crew.start_many(3);
    settle(&one.api(), &group, &consumers, 6).await;
    let key = Keys::default().metadata(&group);
    let (slot, master) = (cluster.slot_of(&key), cluster.master_of(&key));
    cluster.kill(master);
    let cluster = tokio::task::spawn_blocking(move || {
        cluster.wait_for_failover(slot, master);
        cluster
    })
    .await
    .unwrap();
    let heard: Vec<u64> = consumers.iter().map(|consumer| consumer.answers("OK")).collect();
    for (consumer, heard) in consumers.iter().zip(heard) {
        wait_until("everybody is answered again", async || consumer.answers("OK") > heard + 2).await;
    }
    settle(&one.api(), &group, &consumers, 6).await;
    let double = crew.journal.double_readings(LEASE_MS * 1_000);
    assert!(double.is_empty(), "{double:?}");
    for consumer in consumers {
        consumer.leave().await;
    }
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_resharded_over_all_nodes_while_slots_move() {
    let cluster = RedisCluster::start();
    let (one, other) = (daemon(&cluster).start(), daemon(&cluster).start());
    let stream = Stream::create(&one.api(), "orders", 6, &["billing", "audit"]).await;
    let crews: Vec<_> = stream
        .groups
        .iter()
        .map(|group| Crew::new(group, &Routes::to(&[&one.api(), &other.api()])))
        .collect();
    let consumers: Vec<_> = crews.iter().map(|crew| crew.start_many(2)).collect();
    let settled = async |shards: usize| {
        for (crew, consumers) in crews.iter().zip(&consumers) {
            settle(&one.api(), &crew.group, consumers, shards).await;
        }
    };
    settled(6).await;
    for (number, (target, retire)) in [(20, "KEEP"), (4, "DELETE"), (9, "KEEP")].into_iter().enumerate() {
        // The slots of the group's record, of the index and of a shard, one after the other.
        let moved = [Keys::default().metadata(stream.group()), Keys::default().groups(), stream.key(3)];
        let slot = cluster.slot_of(&moved[number]);
        let from = cluster.master_of_slot(slot);
        let to = cluster.masters().into_iter().find(|master| *master != from).unwrap();
        let moving = cluster.begin_move(slot, to);
        let body = json!({
            "targetShardCount": target, "requestedBy": "test", "reason": "test", "retire": retire
        });
        let scaling = stream.try_scale(&body);
        let finishing = async {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            tokio::task::block_in_place(|| moving.finish());
        };
        let (answer, ()) = tokio::join!(scaling, finishing);
        // In the middle of a move it may be refused; asking again carries it on.
        let id = if answer.status.is_success() {
            answer.json()["migrations"][0]["reshardingId"].as_str().unwrap().to_owned()
        } else {
            stream.scale_with(target, &json!({"retire": retire})).await.resharding_id
        };
        stream.wait_for(&id, MigrationState::Deprecated).await;
        settled(usize::try_from(target).unwrap()).await;
    }
    let left: Vec<u32> = (0..25)
        .filter(|shard| {
            cluster.command_for::<u64>(&stream.key(*shard), &["EXISTS", &stream.key(*shard)]) == 1
        })
        .collect();
    assert_eq!(left, (0..9).collect::<Vec<_>>());
    for crew in &crews {
        crew.journal.expect_one_reader_at_a_time();
    }
    for consumer in consumers.into_iter().flatten() {
        consumer.leave().await;
    }
}
