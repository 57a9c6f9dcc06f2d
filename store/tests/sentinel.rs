//! The store on a master that real sentinels name: replaced after its death, its pause, and by order.

// Clippy's own exception reaches test functions only, not the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

#[path = "../../tests/support/redis_topologies/mod.rs"]
mod redis_topologies;
mod support;

use std::time::Duration;

use redis_topologies::{RedisSentinel, SentinelSettings};
use rsc_store::{Entered, GroupStore, Outcome, RedisMode, RedisSettings, RedisStore, StoreError};
use support::stores::{METADATA, settings};
use support::{created, enter, eventually, group, structural, token};

/// Settings for sentinels with timeouts that no slow machine reaches.
fn sentinel_settings(redis: &RedisSentinel) -> RedisSettings {
    RedisSettings {
        mode: RedisMode::Sentinel { master: redis.name().to_owned() },
        urls: redis.sentinel_urls(),
        password: redis.password().map(str::to_owned),
        ..settings(String::new())
    }
}

async fn commit_until_applied(store: &RedisStore, revision: u64) {
    let group = group("orders");
    eventually("a commit is applied", || async {
        let mine = token();
        let Ok(Entered::Loaded { fields, .. }) = store.enter(&group, &mine, None, None).await else {
            return false;
        };
        let stamp = rsc_core::record::stamp(&fields).unwrap();
        let write = structural(&format!("{{\"storeRevision\":{revision}}}"), revision);
        matches!(store.commit(&group, &mine, &stamp, &write).await, Outcome::Applied(_))
    })
    .await;
}

fn stored_revision(redis: &RedisSentinel, server: usize) -> u64 {
    redis.server(server).command(&["HGET", METADATA, "revision"])
}

#[tokio::test]
async fn the_master_is_found_and_found_again() {
    let settings = SentinelSettings { password: Some("geheim".into()), ..Default::default() };
    let redis = RedisSentinel::start_with(settings);
    let mut settings = sentinel_settings(&redis);
    // A master that hangs is given up soon.
    settings.command_timeout = Duration::from_secs(2);
    let store = RedisStore::new(&settings).unwrap();
    store.check().await.unwrap();
    created(&store, &group("orders")).await;
    redis.server(0).write_through(&["SET", "x", "y"], 2);

    redis.kill(0);
    let second = redis.wait_for_promotion(0);
    commit_until_applied(&store, 2).await;
    assert_eq!(stored_revision(&redis, second), 2);
    redis.restart_as_replica(0);
    redis.wait_until_whole();

    // Replaced while it hangs: when it wakes it takes itself for a master until it is told, and takes writes.
    redis.pause(second);
    let third = redis.wait_for_promotion(second);
    redis.resume(second);
    let revision = std::cell::Cell::new(2);
    eventually("commits go to the new master", || async {
        revision.set(revision.get() + 1);
        commit_until_applied(&store, revision.get()).await;
        stored_revision(&redis, third) == revision.get()
    })
    .await;
    redis.wait_until_whole();

    // By order, while everybody lives.
    let fourth = redis.fail_over();
    eventually("commits go to the newest master", || async {
        revision.set(revision.get() + 1);
        commit_until_applied(&store, revision.get()).await;
        stored_revision(&redis, fourth) == revision.get()
    })
    .await;
}

#[tokio::test]
async fn a_sentinel_that_was_cut_off_is_outvoted() {
    let redis = RedisSentinel::start();
    // The first one tells of a former master for ever.
    redis.pause(0);
    redis.sentinel(0).pause();
    let second = redis.wait_for_promotion(0);
    let store = RedisStore::new(&sentinel_settings(&redis)).unwrap();
    redis.resume(0);
    redis.sentinel(0).resume();
    created(&store, &group("orders")).await;
    assert_eq!(stored_revision(&redis, second), 1);
}

#[tokio::test]
async fn what_is_wrong_is_said_and_what_may_pass_is_told_apart() {
    let redis =
        RedisSentinel::start_with(SentinelSettings { password: Some("geheim".into()), ..Default::default() });
    let good = sentinel_settings(&redis);
    let check = async |change: &dyn Fn(&mut RedisSettings)| {
        let mut settings = good.clone();
        change(&mut settings);
        RedisStore::new(&settings).unwrap().check().await
    };
    let misconfigured = |result: Result<(), StoreError>, words: &[&str]| match result {
        Err(StoreError::Misconfigured(text)) => {
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
            assert!(!text.contains("geheim") && !text.contains("falsch"), "{text}");
        }
        other => panic!("{words:?}: {other:?}"),
    };
    check(&|_| {}).await.unwrap();
    let other_name = RedisMode::Sentinel { master: "nobody".into() };
    misconfigured(
        check(&|settings| settings.mode.clone_from(&other_name)).await,
        &["nobody", "redis.sentinel-master"],
    );
    misconfigured(check(&|settings| settings.password = None).await, &["NOAUTH", "redis.password"]);
    misconfigured(
        check(&|settings| settings.password = Some("falsch".into())).await,
        &["wrong user or password", "redis.password"],
    );
    let servers = redis.server_urls();
    misconfigured(check(&|settings| settings.urls.clone_from(&servers)).await, &["NOAUTH"]);
    misconfigured(
        check(&|settings| {
            settings.mode = RedisMode::Standalone;
            settings.urls.truncate(1);
            settings.password = None;
        })
        .await,
        &["is a sentinel", "redis.mode"],
    );
    // One wrong address among good ones does not matter.
    check(&|settings| settings.urls[0] = "redis://127.0.0.1:1".into()).await.unwrap();
    let away = check(&|settings| settings.urls = vec!["redis://127.0.0.1:1".into()]).await;
    assert!(matches!(away, Err(StoreError::Unavailable(_))), "{away:?}");
}

#[tokio::test]
async fn what_was_acknowledged_and_lost_is_another_stamp() {
    let redis = RedisSentinel::start_with(SentinelSettings { replicas: 1, ..Default::default() });
    let store = RedisStore::new(&sentinel_settings(&redis)).unwrap();
    let group = group("orders");
    let stamp = created(&store, &group).await;
    redis.server(0).write_through(&["SET", "x", "y"], 1);
    redis.cut_replication();
    let (holder, _) = enter(&store, &group, Some(&stamp)).await;
    let acknowledged = store.commit(&group, &holder, &stamp, &structural("{\"storeRevision\":2}", 2)).await;
    let Outcome::Applied(lost) = acknowledged else { panic!("{acknowledged:?}") };
    redis.kill(0);
    redis.resume(1);
    redis.wait_for_promotion(0);
    eventually("the new master answers", || async { store.ping().await.is_ok() }).await;
    let (_, entered) = enter(&store, &group, Some(&lost)).await;
    let Entered::Loaded { fields, .. } = entered else { panic!("{entered:?}") };
    assert_eq!(rsc_core::record::stamp(&fields).unwrap(), stamp);
}
