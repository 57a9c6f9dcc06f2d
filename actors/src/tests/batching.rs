//! One turn decides on everything that waits.

use futures_util::future::join_all;
use rsc_protocol::Status;

use super::faults::TestStore;
use super::member::Member;
use super::redis_server::RedisServer;
use super::{code, create, eventually, in_system, memory_store, orders, patient, record, settled, start};

#[test]
fn a_hundred_heartbeats_at_once_take_a_handful_of_turns() {
    in_system(async {
        let server = RedisServer::start();
        let store = TestStore::new(server.store());
        let coordinator = start(patient("a"), &store);
        create(&coordinator, &orders(), 100).await;
        let mut members: Vec<Member> = (0..100).map(|n| Member::new(&format!("m{n:03}"))).collect();
        for round in 0..4 {
            let commits_before = store.calls("commit");
            let beats = members.iter_mut().map(|member| {
                let (coordinator, group) = (coordinator.clone(), orders());
                async move { member.beat(&coordinator, &group).await.unwrap() }
            });
            let answers = join_all(beats).await;
            assert!(answers.iter().all(|answer| answer.status == Status::Ok));
            let commits = store.calls("commit") - commits_before;
            assert!(commits <= 10, "{commits} commits for 100 heartbeats in round {round}");
        }
        let group = record(&coordinator, &orders()).await;
        assert_eq!(group.live_members().count(), 100);
        assert!(members.iter().all(|member| member.owned.len() == 1), "each has its shard");
        settled(&coordinator, &orders()).await;
        let status = coordinator.actor(&orders()).await.unwrap();
        assert!(status.turns <= 40, "{} turns for 400 heartbeats", status.turns);
    });
}

#[test]
fn of_two_heartbeats_of_one_member_in_a_batch_the_older_gets_retry() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let coordinator = start(patient("a"), &store);
        create(&coordinator, &orders(), 4).await;
        let (mut early, mut twice) = (Member::new("early"), Member::new("twice"));
        twice.beat_ok(&coordinator, &orders()).await;

        store.hold("enter");
        let (older, newer) = (twice.request(), twice.request());
        let entered = store.calls("enter");
        let send = |request| {
            let (coordinator, group) = (coordinator.clone(), orders());
            tokio::task::spawn_local(async move { coordinator.heartbeat(&group, "twice", request).await })
        };
        let first = {
            let (coordinator, group) = (coordinator.clone(), orders());
            tokio::task::spawn_local(async move { early.beat(&coordinator, &group).await })
        };
        eventually("a turn is under way", || async { store.calls("enter") > entered }).await;
        let depth = || async { coordinator.actor(&orders()).await.unwrap().mailbox_depth };
        let older = send(older);
        eventually("the older waits", || async { depth().await == 1 }).await;
        let newer = send(newer);
        eventually("both wait", || async { depth().await == 2 }).await;
        store.let_go("enter");

        assert_eq!(first.await.unwrap().unwrap().status, Status::Ok);
        let older = older.await.unwrap().unwrap();
        assert_eq!(older.status, Status::Retry);
        assert_eq!(older.assignment_lease_ms, 0, "RETRY extends no lease");
        assert_eq!(newer.await.unwrap().unwrap().status, Status::Ok);
        let status = coordinator.actor(&orders()).await.unwrap();
        assert_eq!(status.last_batch_size, Some(2));
    });
}

#[test]
fn a_full_queue_refuses_and_the_next_request_after_it_is_served() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let mut settings = patient("a");
        settings.mailbox_capacity = 3;
        let coordinator = start(settings, &store);
        create(&coordinator, &orders(), 4).await;
        store.hold("enter");
        let beat = |id: &str| {
            let (coordinator, group, mut member) = (coordinator.clone(), orders(), Member::new(id));
            tokio::task::spawn_local(async move { member.beat(&coordinator, &group).await })
        };
        let in_turn = beat("in-turn");
        eventually("a turn is under way", || async { store.calls("enter") == 1 }).await;
        let waiting: Vec<_> = (0..3).map(|n| beat(&format!("waiting-{n}"))).collect();
        let depth = || async { coordinator.actor(&orders()).await.unwrap().mailbox_depth };
        eventually("the queue is full", || async { depth().await == 3 }).await;
        assert_eq!(code(beat("too-many").await.unwrap()), "COORDINATOR_OVERLOADED");
        store.let_go("enter");
        for answer in join_all(waiting.into_iter().chain([in_turn])).await {
            assert_eq!(answer.unwrap().unwrap().status, Status::Ok);
        }
        assert_eq!(beat("too-many").await.unwrap().unwrap().status, Status::Ok);
    });
}

#[test]
fn a_caller_that_goes_away_disturbs_nothing() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let coordinator = start(patient("a"), &store);
        create(&coordinator, &orders(), 4).await;
        for call in ["enter", "commit"] {
            store.hold(call);
            let before = store.calls(call);
            let id = format!("gone-{call}");
            let beat = {
                let (coordinator, group, mut member) = (coordinator.clone(), orders(), Member::new(&id));
                tokio::task::spawn_local(async move { member.beat(&coordinator, &group).await })
            };
            eventually("the turn waits for the store", || async { store.calls(call) > before }).await;
            beat.abort();
            assert!(beat.await.unwrap_err().is_cancelled());
            store.let_go(call);
            eventually("the join is recorded all the same", || async {
                record(&coordinator, &orders()).await.members.contains_key(&id)
            })
            .await;
        }
        let mut next = Member::new("next");
        next.beat_ok(&coordinator, &orders()).await;
    });
}

#[test]
fn a_batch_is_limited() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let mut settings = patient("a");
        settings.timing.max_members_per_group = 10_000;
        let coordinator = start(settings, &store);
        create(&coordinator, &orders(), 4).await;
        store.hold("enter");
        let beat = |id: String| {
            let (coordinator, group, mut member) = (coordinator.clone(), orders(), Member::new(&id));
            tokio::task::spawn_local(async move { member.beat(&coordinator, &group).await })
        };
        let first = beat("first".to_owned());
        eventually("a turn is under way", || async { store.calls("enter") == 1 }).await;
        let beats: Vec<_> = (0..1_500).map(|n| beat(format!("m{n}"))).collect();
        let depth = || async { coordinator.actor(&orders()).await.unwrap().mailbox_depth };
        eventually("all wait", || async { depth().await == 1_500 }).await;
        store.let_go("enter");
        for answer in join_all(beats.into_iter().chain([first])).await {
            assert_eq!(answer.unwrap().unwrap().status, Status::Ok);
        }
        settled(&coordinator, &orders()).await;
        let status = coordinator.actor(&orders()).await.unwrap();
        assert_eq!((status.turns, status.last_batch_size), (3, Some(500)));
    });
}
