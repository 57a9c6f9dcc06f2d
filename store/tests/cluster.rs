//! The store on a real Redis Cluster: keys of one group in one slot, shards all over, slots that move, masters that die.

// Clippy's own exception reaches test functions only, not the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

#[path = "../../tests/support/redis_topologies/mod.rs"]
mod redis_topologies;
mod support;

use std::time::Duration;

use redis_topologies::{Announced, ClusterSettings, RedisCluster};
use rsc_core::ShardSet;
use rsc_protocol::GroupKey;
use rsc_store::{
    Conflict, Entered, Found, GroupStore, Outcome, RedisMode, RedisSettings, RedisStore, ShardDeletion,
    ShardProof, StoreError, StreamReads,
};
use support::stores::settings;
use support::{applied, created, enter, eventually, group, structural, token};

/// Settings for a cluster with timeouts that no slow machine reaches.
fn cluster_settings(urls: Vec<String>) -> RedisSettings {
    RedisSettings { mode: RedisMode::Cluster, urls, ..settings(String::new()) }
}

fn store(cluster: &RedisCluster) -> RedisStore {
    RedisStore::new(&cluster_settings(cluster.urls())).unwrap()
}

fn key(group: &GroupKey) -> String {
    format!("redis-stream:coord:{{{}:{}}}:metadata", group.stream_prefix(), group.consumer_group())
}

/// Groups that live on every master.
fn groups_everywhere(cluster: &RedisCluster) -> Vec<GroupKey> {
    let mut missing: Vec<usize> = cluster.masters();
    let mut found = Vec::new();
    for number in 0.. {
        let group = group(&format!("orders-{number}"));
        let master = cluster.master_of(&key(&group));
        if missing.contains(&master) {
            missing.retain(|other| *other != master);
            found.push(group);
        }
        if missing.is_empty() {
            break;
        }
    }
    found
}

/// Commits one more revision, asking again while the slot or its master is on the move.
async fn commit_until_applied(store: &RedisStore, group: &GroupKey, revision: u64) {
    eventually("a commit is applied", || async {
        let mine = token();
        let Ok(entered) = store.enter(group, &mine, None, None).await else { return false };
        let Entered::Loaded { fields, .. } = entered else { return false };
        let stamp = rsc_core::record::stamp(&fields).unwrap();
        let write = structural(&format!("{{\"storeRevision\":{revision}}}"), revision);
        matches!(store.commit(group, &mine, &stamp, &write).await, Outcome::Applied(_))
    })
    .await;
}

async fn revision(store: &RedisStore, group: &GroupKey) -> Option<u64> {
    store.stamp(group).await.unwrap().map(|stamp| stamp.revision)
}

#[tokio::test]
async fn groups_and_shards_live_on_every_node() {
    let cluster = RedisCluster::start();
    // Any node is enough to find the others, a replica too.
    let replica = cluster.replica_of(cluster.masters()[0]);
    let store = RedisStore::new(&cluster_settings(vec![cluster.urls()[replica].clone()])).unwrap();
    store.check().await.unwrap();
    for group in groups_everywhere(&cluster) {
        let stamp = created(&store, &group).await;
        store.index_add(&group).await.unwrap();
        let (holder, _) = enter(&store, &group, Some(&stamp)).await;
        let stamp =
            applied(store.commit(&group, &holder, &stamp, &structural("{\"storeRevision\":2}", 2)).await);
        assert_eq!(stamp.revision, 2);
        assert!(matches!(store.read(&group).await.unwrap(), Found::Record { .. }));
        assert_eq!(cluster.command_for::<u64>(&key(&group), &["HGET", &key(&group), "revision"]), 2);
    }
    assert_eq!(store.index().await.unwrap().len(), 3);

    let shards: ShardSet = (0..60).collect();
    store.provision("orders", "billing", &shards).await.unwrap();
    store.provision("orders", "billing", &shards).await.unwrap();
    let mut everywhere: Vec<usize> =
        (0..60).map(|shard| cluster.master_of(&format!("orders:{shard}"))).collect();
    everywhere.sort_unstable();
    everywhere.dedup();
    assert_eq!(everywhere.len(), 3);
    let proofs = store.prove_empty("orders", &shards, &["billing".to_owned()]).await.unwrap();
    assert!(
        proofs.values().all(|proof| matches!(proof, ShardProof::Empty { key_exists: true, .. })),
        "{proofs:?}"
    );
    assert_eq!(store.existing_streams("orders", 0..70).await.unwrap(), shards);
    assert_eq!(store.pending_by_consumer("orders", "billing", &shards).await.unwrap().len(), 60);
    let times = store.shard_times("orders", &shards).await.unwrap();
    let deleted =
        store.delete_shard("orders", 7, &["billing".to_owned()], times[&7].plus(60_000)).await.unwrap();
    assert_eq!(deleted, ShardDeletion::Deleted);
}

#[tokio::test]
async fn a_slot_that_moves_is_followed_at_each_step() {
    let cluster = RedisCluster::start();
    let store = store(&cluster);
    let group = group("orders");
    created(&store, &group).await;
    store.provision("orders", "billing", &(0..1).collect()).await.unwrap();
    let (shard_slot, slot) = (cluster.slot_of("orders:0"), cluster.slot_of(&key(&group)));
    let other_than = |slot| {
        let from = cluster.master_of_slot(slot);
        cluster.masters().into_iter().find(|master| *master != from).unwrap()
    };

    // ASK, then MOVED, for a single key.
    let moving = cluster.begin_move(shard_slot, other_than(shard_slot));
    moving.move_key("orders:0");
    let proof = store.prove_empty("orders", &(0..1).collect(), &["billing".to_owned()]).await.unwrap();
    assert!(matches!(proof[&0], ShardProof::Empty { key_exists: true, .. }), "{proof:?}");
    assert!(store.existing_streams("orders", 0..1).await.unwrap().contains(0));
    moving.finish();
    assert!(store.existing_streams("orders", 0..1).await.unwrap().contains(0));

    // A group's keys are several: TRYAGAIN until all have arrived. What is asked meanwhile waits, and succeeds.
    let moving = cluster.begin_move(slot, other_than(slot));
    moving.move_key(&key(&group));
    let mine = token();
    let (entered, ()) = tokio::join!(store.enter(&group, &mine, None, None), async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        moving.finish();
    });
    assert!(matches!(entered, Ok(Entered::Loaded { .. })), "{entered:?}");
    store.release(&group, &mine).await.unwrap();

    // In a hurry: a refusal that says why, and nothing written.
    let impatient = RedisStore::new(&RedisSettings {
        command_timeout: Duration::from_millis(300),
        ..cluster_settings(cluster.urls())
    })
    .unwrap();
    impatient.read(&group).await.unwrap();
    let moving = cluster.begin_move(slot, other_than(slot));
    moving.move_key(&key(&group));
    let refused = impatient.enter(&group, &token(), None, None).await;
    assert!(
        matches!(&refused, Err(StoreError::Refused(text)) if text.starts_with("TRYAGAIN") && text.contains("being moved")),
        "{refused:?}"
    );
    moving.finish();
    commit_until_applied(&store, &group, 2).await;
    assert_eq!(revision(&impatient, &group).await, Some(2));
}

#[tokio::test]
async fn the_master_that_holds_a_group_dies_and_comes_back() {
    let cluster = RedisCluster::start();
    let store = store(&cluster);
    let group = group("orders");
    created(&store, &group).await;
    let (slot, master) = (cluster.slot_of(&key(&group)), cluster.master_of(&key(&group)));
    // What was acknowledged may be lost in a failover; this is not, because the replica has it.
    cluster.node(master).write_through(&["SET", &format!("{{{}}}", "orders:billing"), "x"], 1);
    cluster.kill(master);
    // No node can be reached for it, and nothing leaves: an outcome that says so.
    let failed = store.commit(&group, &token(), &rsc_core::Stamp::default(), &structural("{}", 2)).await;
    assert!(
        matches!(
            failed,
            Outcome::NotApplied(_) | Outcome::Unknown(_) | Outcome::Conflict(Conflict::MutexLost)
        ),
        "{failed:?}"
    );
    cluster.wait_for_failover(slot, master);
    commit_until_applied(&store, &group, 2).await;
    assert_eq!(revision(&store, &group).await, Some(2));
    cluster.restart(master);
    cluster.wait_until_whole();
    // Back to where it was: MOVED, while the former master still answers.
    cluster.take_over(master);
    commit_until_applied(&store, &group, 3).await;
    assert_eq!(cluster.command::<u64>(master, &["HGET", &key(&group), "revision"]), 3);
}

#[tokio::test]
async fn a_hung_master_gives_an_unknown_outcome_and_never_a_second_write() {
    let cluster = RedisCluster::start();
    let settings =
        RedisSettings { command_timeout: Duration::from_millis(500), ..cluster_settings(cluster.urls()) };
    let store = RedisStore::new(&settings).unwrap();
    let group = group("orders");
    eventually("the group is created", || async {
        let mine = token();
        let made = store.create(&group, &mine, None, &structural("{\"storeRevision\":1}", 1)).await;
        store.release(&group, &mine).await.is_ok()
            && matches!(made, Outcome::Applied(_) | Outcome::Conflict(Conflict::Exists))
    })
    .await;
    let (holder, entered) = enter(&store, &group, None).await;
    let Entered::Loaded { fields, .. } = entered else { panic!("{entered:?}") };
    let stamp = rsc_core::record::stamp(&fields).unwrap();
    let (slot, master) = (cluster.slot_of(&key(&group)), cluster.master_of(&key(&group)));
    cluster.node(master).write_through(&["SET", "{orders:billing}", "x"], 1);
    cluster.pause(master);
    let outcome = store.commit(&group, &holder, &stamp, &structural("{\"storeRevision\":2}", 2)).await;
    assert!(matches!(outcome, Outcome::Unknown(StoreError::Unavailable(_))), "{outcome:?}");
    cluster.wait_for_failover(slot, master);
    cluster.resume(master);
    cluster.wait_until_whole();
    // It was carried out by a master that had lost its place, or not at all: the record that counts is one of the two.
    let found = revision(&store, &group).await;
    assert!(matches!(found, Some(1 | 2)), "{found:?}");
}

#[tokio::test]
async fn announced_addresses_are_mapped_or_named() {
    for announced in [Announced::Ports, Announced::HostNames] {
        let cluster = RedisCluster::start_with(ClusterSettings { announced, ..Default::default() });
        let mut settings = cluster_settings(cluster.urls());
        settings.connect_timeout = Duration::from_secs(2);
        let error = RedisStore::new(&settings).unwrap().check().await.unwrap_err();
        let StoreError::Misconfigured(text) = &error else { panic!("{error:?}") };
        assert!(text.contains("redis.node-mappings"), "{text}");
        let named = cluster.mappings().into_keys().any(|address| text.contains(&address));
        assert!(named, "{text} names none of {:?}", cluster.mappings());

        settings.node_mappings = cluster.mappings();
        let store = RedisStore::new(&settings).unwrap();
        store.check().await.unwrap();
        for group in groups_everywhere(&cluster) {
            created(&store, &group).await;
        }
        let slot = cluster.slot_of("orders:0");
        store.provision("orders", "billing", &(0..1).collect()).await.unwrap();
        let to =
            cluster.masters().into_iter().find(|master| *master != cluster.master_of("orders:0")).unwrap();
        // Redirections name announced addresses too.
        cluster.begin_move(slot, to).finish();
        store.provision("orders", "other", &(0..1).collect()).await.unwrap();
    }
}

#[tokio::test]
async fn slots_that_nobody_serves_are_refused_and_the_others_work() {
    let cluster = RedisCluster::start_with(ClusterSettings {
        arguments: vec!["--cluster-require-full-coverage".into(), "no".into()],
        ..Default::default()
    });
    let store = store(&cluster);
    let groups = groups_everywhere(&cluster);
    for group in &groups {
        created(&store, group).await;
    }
    let (lost, master) = (&groups[0], cluster.master_of(&key(&groups[0])));
    cluster.kill(cluster.replica_of(master));
    cluster.kill(master);
    let error = store.read(lost).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable(_) | StoreError::Refused(_)), "{error:?}");
    for group in &groups[1..] {
        commit_until_applied(&store, group, 2).await;
    }
    cluster.restart(master);
    cluster.wait_until_serving();
    // It kept nothing (no append-only file): the key is missing, and that is told as what it is.
    eventually("its slots are served again", || async {
        matches!(store.read(lost).await, Ok(Found::Missing { .. }))
    })
    .await;
}
