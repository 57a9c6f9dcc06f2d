//! Work that is cut short, comes late, or meets what happened meanwhile.

use std::sync::Arc;
use std::time::Duration;

use rsc_protocol::keys::Keys;
use rsc_store::MemoryStore;

use super::faults::{Fault, TestStore};
use super::member::Member;
use super::redis_server::RedisServer;
use super::{
    code, create, delete_request, eventually, group_request, in_system, key, orders, patient, record, start,
};
use crate::Coordinator;

/// A store whose mutexes outlast every test.
fn patient_store() -> (Arc<MemoryStore>, Arc<TestStore>) {
    let memory = Arc::new(MemoryStore::new(Keys::default(), Duration::from_secs(3_600)));
    let store = TestStore::new(memory.clone());
    (memory, store)
}

async fn is_listed(coordinator: &Coordinator) -> bool {
    coordinator.groups().await.unwrap().groups.len() == 1
}

#[test]
fn a_deletion_that_finds_lost_writes_is_refused_and_they_are_recorded_without_further_requests() {
    in_system(async {
        let server = RedisServer::start();
        let coordinator = start(patient("a"), &server.store());
        create(&coordinator, &orders(), 4).await;
        let old: Vec<u8> = server.run(redis::cmd("DUMP").arg(Keys::default().metadata(&orders())));
        let mut member = Member::new("m1");
        member.beat_ok(&coordinator, &orders()).await;
        server.restore_metadata(&orders(), &old);
        // Nobody is in what Redis has: without the rule it is deleted, below what m1 has seen.
        let refused = coordinator.delete_group(&orders(), delete_request(false)).await.unwrap_err();
        assert_eq!(refused.code.as_str(), "METADATA_SYNC_IN_PROGRESS");
        assert!(refused.message.contains("lost writes"), "{}", refused.message);
        eventually("the round is recorded", async || {
            record(&coordinator, &orders()).await.metadata_correction.is_some()
        })
        .await;
    });
}

#[test]
fn a_write_that_comes_late_renews_the_mutex_first() {
    in_system(async {
        let (memory, store) = patient_store();
        let mut settings = patient("a");
        settings.mutex_ttl = Duration::from_millis(30);
        let coordinator = start(settings, &store);
        create(&coordinator, &orders(), 4).await;
        let mut member = Member::new("m1");
        let steal = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (thief, mutex) = (Arc::clone(&steal), Keys::default().mutex(&orders()));
        coordinator.shared().hooks.set_before_decision(move |_| {
            std::thread::sleep(Duration::from_millis(15));
            if thief.swap(false, std::sync::atomic::Ordering::SeqCst) {
                memory.edit(|keyspace| keyspace.remove(&mutex));
            }
        });
        let calls = |call| store.calls(call);
        let (renewals, commits) = (calls("renew"), calls("commit"));
        member.beat_ok(&coordinator, &orders()).await;
        assert_eq!((calls("renew"), calls("commit")), (renewals + 1, commits + 1));

        // Lost meanwhile: nothing is sent under it, and the batch is applied anew.
        steal.store(true, std::sync::atomic::Ordering::SeqCst);
        member.beat_ok(&coordinator, &orders()).await;
        assert_eq!((calls("renew"), calls("commit")), (renewals + 3, commits + 2));
        assert_eq!(coordinator.actor(&orders()).await.unwrap().conflicts, 1);

        store.fail_next("renew", Fault::NotSent);
        assert_eq!(code(member.beat(&coordinator, &orders()).await), "REDIS_UNAVAILABLE");
        assert_eq!(calls("commit"), commits + 2);
        member.beat_ok(&coordinator, &orders()).await;

        store.fail_next("renew", Fault::NotSent);
        let refused = coordinator.delete_group(&orders(), delete_request(true)).await;
        assert_eq!((code(refused), calls("delete")), ("REDIS_UNAVAILABLE", 0));
        coordinator.delete_group(&orders(), delete_request(true)).await.unwrap();
        assert_eq!(calls("delete"), 1);
    });
}

#[test]
fn a_deletion_whose_answer_is_lost_leaves_the_group_alone_that_was_created_since() {
    in_system(async {
        let server = RedisServer::start();
        let store = TestStore::new(server.store());
        let (one, other) = (start(patient("a"), &store), start(patient("b"), &server.store()));
        create(&one, &orders(), 4).await;
        Member::new("m1").beat_ok(&one, &orders()).await;
        let before = record(&one, &orders()).await;
        store.fail_next("delete", Fault::LostAfter);
        store.hold("lost");
        let deletion = {
            let one = one.clone();
            tokio::task::spawn_local(async move { one.delete_group(&orders(), delete_request(true)).await })
        };
        eventually("the group is deleted", || async { store.calls("lost") == 1 }).await;
        create(&other, &orders(), 4).await;
        let mut member = Member::new("m2");
        member.beat_ok(&other, &orders()).await;
        store.let_go("lost");
        assert_eq!(deletion.await.unwrap().unwrap(), before.response());
        let after = record(&one, &orders()).await;
        assert!(after.created_at > before.created_at && after.members.contains_key("m2"));
        assert!(is_listed(&one).await, "nor is it taken out of the index");
        member.beat_ok(&one, &orders()).await;
    });
}

#[test]
fn a_claim_whose_outcome_nobody_could_look_up_is_completed_by_the_groups_actor() {
    in_system(async {
        let busy = "COORDINATOR_STATE_MUTEX_UNAVAILABLE";
        for (faults, expected) in [
            (vec![("read", Fault::Pass), ("read", Fault::NotSent)], "REDIS_UNAVAILABLE"),
            (vec![("renew", Fault::NotSent)], busy),
        ] {
            let (_, store) = patient_store();
            let mut settings = patient("a");
            settings.index_refresh_interval = Duration::from_millis(50);
            let coordinator = start(settings, &store);
            store.fail_next("create", Fault::LostAfter);
            for (call, fault) in faults {
                store.fail_next(call, fault);
            }
            let refused = coordinator.create_group(&orders(), group_request(Some(2))).await;
            assert_eq!(code(refused), expected);
            assert!(store.all_faults_happened());
            eventually("the creation is completed", async || {
                !record(&coordinator, &orders()).await.provisioning_pending
            })
            .await;
            eventually("the group is in the index", async || is_listed(&coordinator).await).await;
            Member::new("m1").beat_ok(&coordinator, &orders()).await;
        }
    });
}

#[test]
fn a_claim_that_was_never_made_leaves_no_group_that_went_missing() {
    in_system(async {
        let (_, store) = patient_store();
        let coordinator = start(patient("a"), &store);
        for _ in 0..4 {
            store.fail_next("create", Fault::LostBefore);
        }
        let refused = coordinator.create_group(&orders(), group_request(Some(2))).await;
        assert_eq!(code(refused), "REDIS_UNAVAILABLE");
        assert!(store.all_faults_happened());
        eventually("the actor lets go", || async { coordinator.shared().registry.groups().is_empty() }).await;
        create(&coordinator, &orders(), 2).await;
    });
}

#[test]
fn a_claim_that_could_not_be_undone_is_completed() {
    in_system(async {
        let (_, store) = patient_store();
        let coordinator = start(patient("a"), &store);
        store.fail_next("index_add", Fault::NotSent);
        store.fail_next("delete", Fault::NotSent);
        let refused = coordinator.create_group(&orders(), group_request(Some(2))).await;
        assert_eq!(code(refused), "REDIS_UNAVAILABLE");
        eventually("the creation is completed", async || {
            !record(&coordinator, &orders()).await.provisioning_pending
        })
        .await;
    });
}

#[test]
fn another_pairs_tombstone_does_not_say_that_a_missing_group_was_deleted() {
    in_system(async {
        let server = RedisServer::start();
        let coordinator = start(patient("a"), &server.store());
        let (lost, other) = (key("a:b", "c"), key("a", "b:c"));
        create(&coordinator, &lost, 4).await;
        server.take_metadata(&lost);
        let tombstone = [("streamPrefix", other.stream_prefix()), ("consumerGroup", other.consumer_group())];
        let _: i64 = server.run(redis::cmd("HSET").arg(Keys::default().tombstone(&lost)).arg(&tombstone));
        let refused = coordinator.create_group(&lost, group_request(None)).await;
        assert_eq!(code(refused), "GROUP_METADATA_MISSING");
    });
}

#[test]
fn a_group_is_unhealthy_when_its_mutex_stays_with_somebody_and_not_when_it_was_busy_once() {
    in_system(async {
        let server = RedisServer::start();
        let mut settings = patient("a");
        settings.mutex_acquire_timeout = Duration::from_millis(50);
        let coordinator = start(settings, &server.store());
        create(&coordinator, &orders(), 4).await;
        let mut member = Member::new("m1");
        member.beat_ok(&coordinator, &orders()).await;
        let mutex = Keys::default().mutex(&orders());
        let _: () = server.run(redis::cmd("SET").arg(&mutex).arg("another:token"));
        for expected in ["IDLE", "IDLE", "UNHEALTHY"] {
            member.beat(&coordinator, &orders()).await.unwrap();
            assert_eq!(coordinator.actor(&orders()).await.unwrap().state, expected);
        }
        let _: i64 = server.run(redis::cmd("DEL").arg(&mutex));
        // The acquire timeout of the last turn does not bound this one.
        eventually("it works again", async || {
            member.beat(&coordinator, &orders()).await.unwrap();
            coordinator.actor(&orders()).await.unwrap().state == "IDLE"
        })
        .await;
    });
}
