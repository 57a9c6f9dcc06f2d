//! Terminating mode (protocol 9).

use std::time::Duration;

use rsc_protocol::Status;

use super::faults::TestStore;
use super::member::Member;
use super::redis_server::RedisServer;
use super::{
    PATIENCE, code, create, delete_request, eventually, group_request, in_system, key, orders, patient,
    record, start,
};

#[test]
fn a_running_turn_finishes_and_answers_and_what_has_not_begun_is_refused() {
    in_system(async {
        let server = RedisServer::start();
        let store = TestStore::new(server.store());
        let coordinator = start(patient("a"), &store);
        create(&coordinator, &orders(), 4).await;
        let send = |id: &str| {
            let (coordinator, mut member) = (coordinator.clone(), Member::new(id));
            tokio::task::spawn_local(async move { member.beat(&coordinator, &orders()).await })
        };
        let commits = store.calls("commit");
        store.hold("commit");
        let running = send("running");
        eventually("the turn commits", || async { store.calls("commit") > commits }).await;
        let queued = send("queued");
        let depth = || async { coordinator.actor(&orders()).await.unwrap().mailbox_depth };
        eventually("one waits", || async { depth().await == 1 }).await;

        coordinator.begin_termination();
        assert!(coordinator.is_terminating());
        assert_eq!(code(coordinator.ready().await), "COORDINATOR_TERMINATING");
        assert_eq!(code(send("late").await.unwrap()), "COORDINATOR_TERMINATING");
        let created = coordinator.create_group(&key("orders", "audit"), group_request(None)).await;
        assert_eq!(code(created), "COORDINATOR_TERMINATING");
        let deleted = coordinator.delete_group(&orders(), delete_request(true)).await;
        assert_eq!(code(deleted), "COORDINATOR_TERMINATING");
        let left = coordinator.stopped(Duration::from_millis(50)).await.unwrap_err();
        assert_eq!(left, 1, "the actor in its turn");
        store.let_go("commit");

        assert_eq!(running.await.unwrap().unwrap().status, Status::Ok);
        assert_eq!(code(queued.await.unwrap()), "COORDINATOR_TERMINATING");
        coordinator.stopped(PATIENCE).await.unwrap();
        // Reads go on, and the mutex is free for the next instance.
        let group = record(&coordinator, &orders()).await;
        assert_eq!(group.members.keys().collect::<Vec<_>>(), ["running"]);
        let mutex = rsc_protocol::keys::Keys::default().mutex(&orders());
        assert!(!server.exists(&mutex));
        let next = start(patient("b"), &server.store());
        Member::new("late").beat_ok(&next, &orders()).await;
    });
}

#[test]
fn a_creation_that_has_begun_is_waited_for() {
    in_system(async {
        let server = RedisServer::start();
        let store = TestStore::new(server.store());
        let coordinator = start(patient("a"), &store);
        store.hold("provision");
        let creation = {
            let coordinator = coordinator.clone();
            tokio::task::spawn_local(async move {
                coordinator.create_group(&orders(), group_request(Some(2))).await
            })
        };
        eventually("the claim is made", || async { store.calls("provision") == 1 }).await;
        coordinator.begin_termination();
        eventually("only the creation is left", || async {
            coordinator.stopped(Duration::from_millis(5)).await == Err(1)
        })
        .await;
        store.let_go("provision");
        assert_eq!(creation.await.unwrap().unwrap().shard_count, 2);
        coordinator.stopped(PATIENCE).await.unwrap();
        assert!(!record(&coordinator, &orders()).await.provisioning_pending);
    });
}

#[test]
fn idle_actors_stop_at_once_and_ticks_with_them() {
    in_system(async {
        let server = RedisServer::start();
        let store = TestStore::new(server.store());
        let mut settings = super::settings("a");
        settings.timing.member_lease_ttl_ms = 300;
        let coordinator = start(settings, &store);
        for n in 0..20 {
            let group = key("orders", &format!("g{n}"));
            coordinator.create_group(&group, group_request(Some(2))).await.unwrap();
            Member::new("m1").beat_ok(&coordinator, &group).await;
        }
        coordinator.begin_termination();
        coordinator.begin_termination();
        coordinator.stopped(PATIENCE).await.unwrap();
        let calls = store.all_calls();
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(store.all_calls(), calls, "leases have ended and nobody ticks");
    });
}
