//! What the supervisor finds, lets go, puts back, and makes expire.

use std::time::Duration;

use rsc_protocol::Status;
use rsc_protocol::keys::Keys;

use super::faults::TestStore;
use super::member::Member;
use super::redis_server::RedisServer;
use super::{code, create, delete_request, eventually, in_system, orders, patient, record, settings, start};
use crate::{Coordinator, CoordinatorSettings};

fn refreshing(mut settings: CoordinatorSettings) -> CoordinatorSettings {
    settings.index_refresh_interval = Duration::from_millis(30);
    settings
}

fn short_lease(instance: &str) -> CoordinatorSettings {
    let mut settings = refreshing(settings(instance));
    settings.timing.member_lease_ttl_ms = 600;
    settings
}

async fn knows(coordinator: &Coordinator) -> bool {
    coordinator.shared().registry.contains(&orders())
}

/// Waits for that many further passes over the index.
async fn passes(store: &TestStore, further: usize) {
    let before = store.calls("index");
    eventually("passes over the index", || async { store.calls("index") >= before + further }).await;
}

fn in_index(server: &RedisServer) -> bool {
    let keys = Keys::default();
    server.run(redis::cmd("SISMEMBER").arg(keys.groups()).arg(keys.metadata(&orders())))
}

#[test]
fn a_group_that_another_instance_created_is_found_and_a_deleted_one_let_go() {
    in_system(async {
        let server = RedisServer::start();
        let (one, other) =
            (start(patient("a"), &server.store()), start(refreshing(patient("b")), &server.store()));
        create(&one, &orders(), 4).await;
        eventually("it is found", || knows(&other)).await;
        one.delete_group(&orders(), delete_request(true)).await.unwrap();
        eventually("it is let go", async || !knows(&other).await).await;
    });
}

#[test]
fn the_members_of_a_group_whose_coordinator_died_expire() {
    in_system(async {
        let server = RedisServer::start();
        let store = TestStore::new(server.store());
        let dying = start(short_lease("a"), &store);
        create(&dying, &orders(), 4).await;
        Member::new("m1").beat_ok(&dying, &orders()).await;
        let survivor = start(short_lease("b"), &server.store());
        eventually("it is found", || knows(&survivor)).await;
        store.cut_off(true);
        // Asks the store directly: nothing reminds the survivor.
        let observer = start(patient("c"), &server.store());
        eventually("the member is expired", || async {
            record(&observer, &orders()).await.live_members().count() == 0
        })
        .await;
        assert_eq!(record(&observer, &orders()).await.members.len(), 1);
    });
}

#[test]
fn a_read_reminds_an_instance_that_knew_the_group_only_without_members() {
    in_system(async {
        let server = RedisServer::start();
        let store = TestStore::new(server.store());
        let dying = start(short_lease("a"), &store);
        create(&dying, &orders(), 4).await;
        let survivor = start(short_lease("b"), &server.store());
        eventually("it has seen the empty group", || async {
            survivor.actor(&orders()).await.unwrap().turns == 1
        })
        .await;
        Member::new("m1").beat_ok(&dying, &orders()).await;
        store.cut_off(true);
        eventually("the member is expired", || async {
            record(&survivor, &orders()).await.live_members().count() == 0
        })
        .await;
    });
}

#[test]
fn phantoms_are_skipped_and_shown() {
    in_system(async {
        let server = RedisServer::start();
        let keys = Keys::default();
        let phantoms = [keys.metadata(&orders()), "nonsense".to_owned(), String::new()];
        for phantom in &phantoms {
            let _: i64 = server.run(redis::cmd("SADD").arg(keys.groups()).arg(phantom));
        }
        let store = TestStore::new(server.store());
        let coordinator = start(refreshing(patient("a")), &store);
        passes(&store, 3).await;
        assert!(!knows(&coordinator).await);
        let list = coordinator.groups().await.unwrap();
        assert!(list.groups.is_empty());
        let mut expected = phantoms.to_vec();
        expected.sort();
        assert_eq!(list.missing, expected);
        // In the index and not there: fail closed until an operator decides.
        let mut member = Member::new("m1");
        assert_eq!(code(member.beat(&coordinator, &orders()).await), "GROUP_METADATA_MISSING");
        coordinator.delete_group(&orders(), delete_request(false)).await.unwrap();
        create(&coordinator, &orders(), 4).await;
        member.beat_ok(&coordinator, &orders()).await;
    });
}

#[test]
fn a_group_missing_from_the_index_is_served_and_put_back() {
    in_system(async {
        let server = RedisServer::start();
        let one = start(patient("a"), &server.store());
        create(&one, &orders(), 4).await;
        let _: i64 = server.run(redis::cmd("DEL").arg(Keys::default().groups()));
        let other = start(refreshing(patient("b")), &server.store());
        Member::new("m1").beat_ok(&other, &orders()).await;
        eventually("it is in the index again", || async { in_index(&server) }).await;
    });
}

#[test]
fn a_deleted_group_that_stayed_in_the_index_is_taken_out() {
    in_system(async {
        let server = RedisServer::start();
        let store = TestStore::new(server.store());
        let one = start(patient("a"), &store);
        create(&one, &orders(), 4).await;
        store.fail_next("index_remove", super::faults::Fault::NotSent);
        one.delete_group(&orders(), delete_request(false)).await.unwrap();
        assert!(in_index(&server));
        let answer = Member::new("m1").beat(&one, &orders()).await.unwrap();
        assert_eq!(answer.status, Status::UnknownMemberId, "the tombstone says what happened");
        let _other = start(refreshing(patient("b")), &server.store());
        eventually("it is taken out", || async { !in_index(&server) }).await;
    });
}

#[test]
fn a_group_whose_everything_is_gone_is_not_let_go() {
    in_system(async {
        let server = RedisServer::start();
        let store = TestStore::new(server.store());
        let coordinator = start(refreshing(patient("a")), &store);
        create(&coordinator, &orders(), 4).await;
        let mut member = Member::new("m1");
        member.beat_ok(&coordinator, &orders()).await;
        let _: () = server.run(redis::cmd("FLUSHALL").arg("SYNC"));
        passes(&store, 3).await;
        assert_eq!(code(member.beat(&coordinator, &orders()).await), "GROUP_METADATA_MISSING");
        passes(&store, 3).await;
        assert_eq!(code(member.beat(&coordinator, &orders()).await), "GROUP_METADATA_MISSING");
    });
}

#[test]
fn a_coordinator_starts_while_redis_is_away() {
    in_system(async {
        let server = RedisServer::start();
        let one = start(patient("a"), &server.store());
        create(&one, &orders(), 4).await;
        let store = TestStore::new(server.store());
        store.cut_off(true);
        let coordinator = start(refreshing(patient("b")), &store);
        assert_eq!(code(coordinator.ready().await), "REDIS_UNAVAILABLE");
        assert_eq!(code(Member::new("m1").beat(&coordinator, &orders()).await), "REDIS_UNAVAILABLE");
        assert_eq!(code(coordinator.groups().await), "REDIS_UNAVAILABLE");
        passes(&store, 2).await;
        store.cut_off(false);
        eventually("it is ready", || async { coordinator.ready().await.is_ok() }).await;
        eventually("the group is found", || knows(&coordinator)).await;
        Member::new("m1").beat_ok(&coordinator, &orders()).await;
    });
}

#[test]
fn readiness_asks_the_store_at_most_twice_a_second() {
    in_system(async {
        let server = RedisServer::start();
        let store = TestStore::new(server.store());
        let coordinator = start(patient("a"), &store);
        let began = std::time::Instant::now();
        for _ in 0..50 {
            coordinator.ready().await.unwrap();
        }
        let allowed = 1 + usize::try_from(began.elapsed().as_millis() / 500).unwrap();
        assert!(store.calls("ping") <= allowed);
    });
}
