//! Deleting a group (protocol 3).

use std::time::{Duration, Instant};

use rsc_protocol::Status;
use rsc_protocol::keys::Keys;

use super::faults::{Fault, TestStore};
use super::member::Member;
use super::redis_server::RedisServer;
use super::{
    code, create, delete_request, eventually, in_system, memory_store, orders, patient, record, settings,
    start,
};

#[test]
fn a_group_with_live_members_needs_force_and_comes_back_above_itself() {
    in_system(async {
        let server = RedisServer::start();
        let coordinator = start(patient("a"), &server.store());
        create(&coordinator, &orders(), 4).await;
        let mut member = Member::new("m1");
        member.beat_ok(&coordinator, &orders()).await;
        let refused = coordinator.delete_group(&orders(), delete_request(false)).await;
        assert_eq!(code(refused), "GROUP_HAS_ACTIVE_MEMBERS");
        let before = record(&coordinator, &orders()).await;
        let snapshot = coordinator.delete_group(&orders(), delete_request(true)).await.unwrap();
        assert_eq!(snapshot, before.response());
        let again = coordinator.delete_group(&orders(), delete_request(true)).await;
        assert_eq!(code(again), "GROUP_NOT_FOUND");
        let answer = member.beat(&coordinator, &orders()).await.unwrap();
        assert_eq!(answer.status, Status::UnknownMemberId);
        assert_eq!(code(coordinator.group_summary(&orders()).await), "GROUP_NOT_FOUND");
        assert!(coordinator.groups().await.unwrap().missing.is_empty(), "not in the index any more");
        eventually("the actor lets go", || async { coordinator.shared().registry.groups().is_empty() }).await;
        create(&coordinator, &orders(), 4).await;
        let born_again = record(&coordinator, &orders()).await;
        assert!(born_again.metadata_version > before.metadata_version);
        assert!(born_again.group_epoch > before.group_epoch);
        assert!(born_again.store_revision > before.store_revision);
    });
}

#[test]
fn who_asks_and_why_must_be_said() {
    in_system(async {
        let coordinator = start(patient("a"), &memory_store());
        create(&coordinator, &orders(), 4).await;
        for (who, why) in [("", "x"), (" \t", "x"), ("x", ""), ("x", " ")] {
            let mut request = delete_request(true);
            request.requested_by = who.to_owned();
            request.reason = why.to_owned();
            let refused = coordinator.delete_group(&orders(), request).await;
            assert_eq!(code(refused), "INVALID_REQUEST", "{who:?} {why:?}");
        }
        record(&coordinator, &orders()).await;
    });
}

#[test]
fn members_whose_lease_is_over_do_not_stand_in_the_way() {
    in_system(async {
        let store = memory_store();
        let mut settings = settings("a");
        settings.timing.member_lease_ttl_ms = 1_000;
        // One tick, and then none for an hour: deleting does its own maintenance.
        settings.tick_interval = Duration::from_secs(3_600);
        let coordinator = start(settings, &store);
        create(&coordinator, &orders(), 4).await;
        coordinator.shared().registry.get(&orders()).unwrap().inbox.nudge();
        eventually("the one tick", || async {
            coordinator.actor(&orders()).await.unwrap().last_tick_at.is_some()
        })
        .await;
        Member::new("m1").beat_ok(&coordinator, &orders()).await;
        let heard = Instant::now();
        let refused = coordinator.delete_group(&orders(), delete_request(false)).await;
        assert_eq!(code(refused), "GROUP_HAS_ACTIVE_MEMBERS");
        eventually("the lease is over", || async { heard.elapsed() > Duration::from_millis(1_020) }).await;
        let group = record(&coordinator, &orders()).await;
        assert!(group.members["m1"].is_live(), "nobody has looked");
        // In service, unless the machine stood still meanwhile: then a lease later.
        eventually("it can be deleted", || async {
            coordinator.delete_group(&orders(), delete_request(false)).await.is_ok()
        })
        .await;
    });
}

#[test]
fn what_waits_behind_a_deletion_is_answered_as_for_a_deleted_group() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let coordinator = start(patient("a"), &store);
        create(&coordinator, &orders(), 4).await;
        let depth = || async { coordinator.actor(&orders()).await.unwrap().mailbox_depth };
        let send = |id: &str| {
            let (coordinator, mut member) = (coordinator.clone(), Member::new(id));
            tokio::task::spawn_local(async move { member.beat(&coordinator, &orders()).await })
        };
        let delete = || {
            let coordinator = coordinator.clone();
            tokio::task::spawn_local(async move {
                coordinator.delete_group(&orders(), delete_request(true)).await
            })
        };
        store.hold("enter");
        let in_turn = send("in-turn");
        eventually("a turn is under way", || async { store.calls("enter") == 1 }).await;
        let before = send("before");
        eventually("one waits", || async { depth().await == 1 }).await;
        let deleted = delete();
        eventually("two wait", || async { depth().await == 2 }).await;
        let behind = send("behind");
        eventually("three wait", || async { depth().await == 3 }).await;
        let deleted_again = delete();
        eventually("four wait", || async { depth().await == 4 }).await;
        store.let_go("enter");
        assert_eq!(in_turn.await.unwrap().unwrap().status, Status::Ok);
        assert_eq!(before.await.unwrap().unwrap().status, Status::Ok);
        assert_eq!(deleted.await.unwrap().unwrap().live_members, 2);
        assert_eq!(behind.await.unwrap().unwrap().status, Status::UnknownMemberId);
        assert_eq!(code(deleted_again.await.unwrap()), "GROUP_NOT_FOUND");
    });
}

#[test]
fn a_deletion_whose_answer_is_lost_happens_once_and_says_so() {
    in_system(async {
        let server = RedisServer::start();
        for fault in [Fault::LostAfter, Fault::LostBefore] {
            let store = TestStore::new(server.store());
            let coordinator = start(patient("a"), &store);
            create(&coordinator, &orders(), 4).await;
            Member::new("m1").beat_ok(&coordinator, &orders()).await;
            let before = record(&coordinator, &orders()).await;
            store.fail_next("delete", fault);
            let snapshot = coordinator.delete_group(&orders(), delete_request(true)).await.unwrap();
            assert!(store.all_faults_happened());
            assert_eq!(snapshot, before.response(), "{fault:?}");
            let keys = Keys::default();
            assert!(!server.exists(&keys.metadata(&orders())));
            assert!(!server.exists(&keys.mutex(&orders())));
            let version: u64 =
                server.run(redis::cmd("HGET").arg(keys.tombstone(&orders())).arg("metadataVersion"));
            assert_eq!(version, before.metadata_version, "{fault:?}");
        }
    });
}

#[test]
fn a_group_deleted_by_another_instance_is_let_go() {
    in_system(async {
        let server = RedisServer::start();
        let (one, other) = (start(patient("a"), &server.store()), start(patient("b"), &server.store()));
        create(&one, &orders(), 4).await;
        let mut member = Member::new("m1");
        member.beat_ok(&one, &orders()).await;
        other.delete_group(&orders(), delete_request(true)).await.unwrap();
        let answer = member.beat(&one, &orders()).await.unwrap();
        assert_eq!(answer.status, Status::UnknownMemberId);
        eventually("the actor lets go", || async { one.shared().registry.groups().is_empty() }).await;
        // Deleted and created again between two requests is another group to the member.
        create(&one, &orders(), 4).await;
        member.beat_ok(&one, &orders()).await;
        other.delete_group(&orders(), delete_request(true)).await.unwrap();
        create(&other, &orders(), 2).await;
        let answer = member.beat(&one, &orders()).await.unwrap();
        assert_eq!(answer.status, Status::UnknownMemberId);
        assert_eq!(record(&one, &orders()).await.shard_count, 2);
    });
}

#[test]
fn what_is_asked_after_a_deletion_was_answered_is_about_what_comes_then() {
    in_system(async {
        let coordinator = start(patient("a"), &memory_store());
        for _ in 0..200 {
            create(&coordinator, &orders(), 2).await;
            Member::new("m1").beat_ok(&coordinator, &orders()).await;
            coordinator.delete_group(&orders(), delete_request(true)).await.unwrap();
        }
    });
}

#[test]
fn a_missing_record_can_be_deleted_by_an_instance_that_only_knows_the_index() {
    in_system(async {
        let server = RedisServer::start();
        let one = start(patient("a"), &server.store());
        create(&one, &orders(), 4).await;
        server.take_metadata(&orders());
        let other = start(patient("b"), &server.store());
        let mut member = Member::new("m1");
        assert_eq!(code(member.beat(&other, &orders()).await), "GROUP_METADATA_MISSING");
        let snapshot = other.delete_group(&orders(), delete_request(false)).await.unwrap();
        assert_eq!((snapshot.healthy, snapshot.metadata_version), (false, 0));
        assert_eq!(member.beat(&other, &orders()).await.unwrap().status, Status::UnknownMemberId);
        create(&other, &orders(), 4).await;
    });
}
