//! An idle group costs Redis nothing; a tick comes when something is due and not before.

use std::time::Duration;

use super::faults::TestStore;
use super::member::Member;
use super::{create, eventually, in_system, memory_store, orders, patient, record, settings, settled, start};

/// Waits for the supervisor's first look at the index, which is not the group's doing.
async fn supervised(store: &TestStore) {
    eventually("the index was read", || async { store.calls("index") == 1 }).await;
}

/// Lets time pass in small steps; long against the tick interval of 50 ms.
async fn a_while() {
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[test]
fn a_group_without_members_makes_no_store_calls() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let mut settings = settings("a");
        // In service after 200 ms: that a tick does not come must not be owed to the start.
        settings.timing.member_lease_ttl_ms = 200;
        let coordinator = start(settings, &store);
        supervised(&store).await;
        create(&coordinator, &orders(), 4).await;
        let mut stranger = Member::new("stranger");
        stranger.epoch = 7;
        stranger.beat(&coordinator, &orders()).await.unwrap();
        settled(&coordinator, &orders()).await;
        let before = store.all_calls();
        a_while().await;
        assert_eq!(store.all_calls(), before);
    });
}

#[test]
fn a_group_whose_members_are_alive_waits_for_the_earliest_lease_end() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let coordinator = start(patient("a"), &store);
        supervised(&store).await;
        create(&coordinator, &orders(), 4).await;
        Member::new("m1").beat_ok(&coordinator, &orders()).await;
        settled(&coordinator, &orders()).await;
        let before = store.all_calls();
        a_while().await;
        assert_eq!(store.all_calls(), before, "the lease ends in ten minutes");
    });
}

#[test]
fn the_tick_expires_a_silent_member_and_then_the_group_is_idle() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let mut settings = settings("a");
        settings.timing.member_lease_ttl_ms = 400;
        let coordinator = start(settings, &store);
        supervised(&store).await;
        create(&coordinator, &orders(), 4).await;
        Member::new("m1").beat_ok(&coordinator, &orders()).await;
        settled(&coordinator, &orders()).await;
        let entered = store.calls("enter");
        eventually("the silent member is expired", || async {
            coordinator.actor(&orders()).await.unwrap().last_tick_at.is_some()
        })
        .await;
        assert_eq!(record(&coordinator, &orders()).await.live_members().count(), 0);
        assert!(store.calls("enter") - entered <= 2, "one tick, or two if the first came a moment early");
        settled(&coordinator, &orders()).await;
        let before = store.all_calls();
        a_while().await;
        assert_eq!(store.all_calls(), before, "the retention ends in a minute");
    });
}

#[test]
fn names_that_nobody_created_leave_nothing_behind() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let coordinator = start(patient("a"), &store);
        for n in 0..200 {
            let group = super::key("nobody", &format!("g{n}"));
            let answer = Member::new("m1").beat(&coordinator, &group).await.unwrap();
            assert_eq!(answer.status, rsc_protocol::Status::UnknownMemberId);
            assert_eq!(answer.metadata_version, 0);
            assert_eq!(super::code(coordinator.group(&group).await), "GROUP_NOT_FOUND");
            assert_eq!(super::code(coordinator.actor(&group).await), "GROUP_NOT_FOUND");
            let deleted = coordinator.delete_group(&group, super::delete_request(true)).await;
            assert_eq!(super::code(deleted), "GROUP_NOT_FOUND");
        }
        assert!(coordinator.shared().registry.groups().is_empty());
        assert_eq!(store.calls("enter"), 0);
    });
}
