//! A panic harms nobody but the command that caused it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::join_all;
use rsc_core::Command;
use rsc_protocol::Status;

use super::faults::TestStore;
use super::member::Member;
use super::{code, create, eventually, in_system, memory_store, orders, patient, record, start};
use crate::Coordinator;
use crate::inbox::{Request, Work};

fn is_of(command: &Command, id: &str) -> bool {
    matches!(command, Command::Heartbeat { request, .. } if request.member_id == id)
}

fn beat(
    coordinator: &Coordinator,
    id: &str,
) -> tokio::task::JoinHandle<Result<rsc_protocol::HeartbeatResponse, crate::Refusal>> {
    let (coordinator, mut member) = (coordinator.clone(), Member::new(id));
    tokio::task::spawn_local(async move { member.beat(&coordinator, &orders()).await })
}

/// Four heartbeats wait behind a turn that is under way.
async fn four_in_one_batch(
    coordinator: &Coordinator,
    store: &TestStore,
) -> Vec<tokio::task::JoinHandle<Result<rsc_protocol::HeartbeatResponse, crate::Refusal>>> {
    store.hold("enter");
    let before = store.calls("enter");
    let mut beats = vec![beat(coordinator, "first")];
    eventually("a turn is under way", || async { store.calls("enter") > before }).await;
    for id in ["one", "poison", "two", "three"] {
        beats.push(beat(coordinator, id));
    }
    let depth = || async { coordinator.actor(&orders()).await.unwrap().mailbox_depth };
    eventually("four wait", || async { depth().await == 4 }).await;
    store.let_go("enter");
    beats
}

#[test]
fn a_panic_in_the_state_machine_is_a_500_for_its_command_alone() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let coordinator = start(patient("a"), &store);
        create(&coordinator, &orders(), 8).await;
        coordinator.shared().hooks.set_before_decision(|commands| {
            assert!(!commands.iter().any(|command| is_of(command, "poison")), "on purpose");
        });
        let beats = four_in_one_batch(&coordinator, &store).await;
        let answers: Vec<_> = join_all(beats).await.into_iter().map(Result::unwrap).collect();
        for at in [0, 1, 3, 4] {
            assert_eq!(answers[at].as_ref().unwrap().status, Status::Ok, "answer {at}");
        }
        assert_eq!(code(answers[2].clone()), "INTERNAL_ERROR");
        let group = record(&coordinator, &orders()).await;
        assert_eq!(group.members.keys().collect::<Vec<_>>(), ["first", "one", "three", "two"]);
        assert_eq!(coordinator.actor(&orders()).await.unwrap().restarts, 0, "the actor itself is fine");
    });
}

#[test]
fn an_actor_that_crashes_is_replaced_and_everybody_is_answered() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let coordinator = start(patient("a"), &store);
        create(&coordinator, &orders(), 8).await;
        let crashed = AtomicBool::new(false);
        coordinator.shared().hooks.set_before_turn(move |work| {
            let Work::Batch(batch) = work else { return };
            let poisoned = batch.iter().any(
                |queued| matches!(&queued.request, Request::Command(command) if is_of(command, "poison")),
            );
            assert!(!poisoned || crashed.swap(true, Ordering::SeqCst), "on purpose");
        });
        let beats = four_in_one_batch(&coordinator, &store).await;
        let answers: Vec<_> = join_all(beats).await.into_iter().map(Result::unwrap).collect();
        assert_eq!(answers[0].as_ref().unwrap().status, Status::Ok);
        for answer in &answers[1..] {
            assert_eq!(code(answer.clone()), "INTERNAL_ERROR", "its turn crashed");
        }
        for id in ["one", "poison", "two", "three"] {
            assert_eq!(beat(&coordinator, id).await.unwrap().unwrap().status, Status::Ok);
        }
        let status = coordinator.actor(&orders()).await.unwrap();
        assert_eq!(status.restarts, 1);
        assert_eq!(record(&coordinator, &orders()).await.live_members().count(), 5);
    });
}

#[test]
fn what_waits_behind_a_crash_is_served_by_the_fresh_actor() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let coordinator = start(patient("a"), &store);
        create(&coordinator, &orders(), 8).await;
        let (release, held) = std::sync::mpsc::channel::<()>();
        let held = std::sync::Mutex::new(held);
        let began = Arc::new(AtomicBool::new(false));
        let has_begun = began.clone();
        coordinator.shared().hooks.set_before_turn(move |_| {
            if !began.swap(true, Ordering::SeqCst) {
                // The actor's thread stands here until the others wait.
                let _released = held.lock().unwrap().recv();
                panic!("on purpose");
            }
        });
        let lost = beat(&coordinator, "lost");
        eventually("its turn begins", || async { has_begun.load(Ordering::SeqCst) }).await;
        let depth = || async { coordinator.actor(&orders()).await.unwrap().mailbox_depth };
        let waiting: Vec<_> = ["one", "two"].map(|id| beat(&coordinator, id)).into_iter().collect();
        eventually("two wait", || async { depth().await == 2 }).await;
        release.send(()).unwrap();
        assert_eq!(code(lost.await.unwrap()), "INTERNAL_ERROR");
        for answer in join_all(waiting).await {
            assert_eq!(answer.unwrap().unwrap().status, Status::Ok);
        }
    });
}
