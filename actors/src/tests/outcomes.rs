//! The four outcomes of a commit (protocol 2), with faults in front of a real Redis.

use std::time::Duration;

use rsc_core::Group;
use rsc_protocol::Status;

use super::faults::{Fault, TestStore};
use super::member::Member;
use super::redis_server::RedisServer;
use super::{code, create, eventually, in_system, orders, patient, record, start};
use crate::Coordinator;

/// Version, group epoch, revision; and of each member its id, epoch and shards.
type Essence = ([u64; 3], Vec<(String, u64, Vec<u32>)>);

/// What does not depend on the moment or on chance: for comparing what two ways lead to.
fn essence(group: &Group) -> Essence {
    let members = group
        .members
        .iter()
        .map(|(id, member)| (id.clone(), member.live.member_epoch, member.holding().iter().collect()))
        .collect();
    ([group.metadata_version, group.group_epoch, group.store_revision], members)
}

async fn with_one_member(server: &RedisServer) -> (std::sync::Arc<TestStore>, Coordinator, Member) {
    // Whatever keeps a mutex by mistake keeps it longer than a test lasts.
    let store = TestStore::new(server.store_with(Duration::from_secs(3_600)));
    let coordinator = start(patient("a"), &store);
    create(&coordinator, &orders(), 4).await;
    let mut member = Member::new("m1");
    member.beat_ok(&coordinator, &orders()).await;
    member.beat_ok(&coordinator, &orders()).await;
    (store, coordinator, member)
}

#[test]
fn a_join_whose_answer_is_lost_is_applied_exactly_once() {
    in_system(async {
        let server = RedisServer::start();
        let mut expected = None;
        for fault in [None, Some(Fault::LostAfter), Some(Fault::LostBefore)] {
            let (store, coordinator, _) = with_one_member(&server).await;
            let commits = store.calls("commit");
            if let Some(fault) = fault {
                store.fail_next("commit", fault);
            }
            let mut joining = Member::new("m2");
            let response = joining.beat_ok(&coordinator, &orders()).await;
            assert!(store.all_faults_happened());
            let group = record(&coordinator, &orders()).await;
            assert_eq!(response.metadata_version, group.metadata_version, "{fault:?}");
            assert_eq!(response.member_epoch, 2 + 1, "{fault:?}: group epoch 1 at birth, 2 for m1, 3 for m2");
            assert_eq!(&essence(&group), expected.get_or_insert_with(|| essence(&group)), "{fault:?}");
            let made = store.calls("commit") - commits;
            let needed = if fault == Some(Fault::LostBefore) { 2 } else { 1 };
            assert_eq!(made, needed, "{fault:?}");
            let status = coordinator.actor(&orders()).await.unwrap();
            assert_eq!(status.unknown_outcomes, u64::from(fault.is_some()));
            // The actor goes on with what is really stored.
            joining.beat_ok(&coordinator, &orders()).await;
            coordinator.delete_group(&orders(), super::delete_request(true)).await.unwrap();
            let _: () = server.run(redis::cmd("FLUSHALL").arg("SYNC"));
        }
    });
}

#[test]
fn a_release_whose_answer_is_lost_is_applied_exactly_once() {
    in_system(async {
        let server = RedisServer::start();
        let (store, coordinator, mut m1) = with_one_member(&server).await;
        let mut m2 = Member::new("m2");
        m2.beat_ok(&coordinator, &orders()).await;
        m1.beat_ok(&coordinator, &orders()).await;
        assert_eq!(m1.revoked.len(), 2, "m1 is told to drain two of its four shards");
        store.fail_next("commit", Fault::LostAfter);
        m1.beat_ok(&coordinator, &orders()).await;
        assert!(store.all_faults_happened());
        let granted = m2.beat_ok(&coordinator, &orders()).await;
        assert_eq!(granted.assignment.assigned_shards.len(), 2);
        let group = record(&coordinator, &orders()).await;
        assert_eq!(group.holders().len(), 4);
    });
}

#[test]
fn an_older_report_is_not_applied_over_the_newer_one_of_the_same_lost_batch() {
    in_system(async {
        let server = RedisServer::start();
        let (store, coordinator, mut m1) = with_one_member(&server).await;
        let neighbour = start(patient("b"), &server.store());
        let mut m2 = Member::new("m2");
        m2.beat_ok(&coordinator, &orders()).await;
        // Without sequence numbers only the order of arrival tells m1's two reports apart: it reads all four
        // shards, and then it has given two of them back.
        let mut still_reading = m1.request();
        m1.beat_ok(&coordinator, &orders()).await;
        let mut given_back = m1.request();
        assert_eq!((still_reading.owned_shards.len(), given_back.owned_shards.len()), (4, 2));
        for request in [&mut still_reading, &mut given_back] {
            request.sequence = None;
        }
        let send = |id: &'static str, request| {
            let (coordinator, group) = (coordinator.clone(), orders());
            tokio::task::spawn_local(async move { coordinator.heartbeat(&group, id, request).await })
        };
        let depth = || async { coordinator.actor(&orders()).await.unwrap().mailbox_depth };
        let entered = store.calls("enter");
        store.hold("enter");
        let first = send("m2", m2.request());
        eventually("a turn is under way", || async { store.calls("enter") > entered }).await;
        let older = send("m1", still_reading);
        eventually("the older waits", || async { depth().await == 1 }).await;
        let newer = send("m1", given_back);
        eventually("both wait", || async { depth().await == 2 }).await;

        // m2's own turn goes well; the answer to the commit of the two is lost, and noticed only after the
        // neighbour has given the freed shards to m2.
        store.fail_next("commit", Fault::Pass);
        store.fail_next("commit", Fault::LostAfter);
        store.hold("lost");
        store.let_go("enter");
        first.await.unwrap().unwrap();
        eventually("the commit is made", || async { store.calls("lost") == 1 }).await;
        let granted = m2.beat_ok(&neighbour, &orders()).await;
        assert_eq!(granted.assignment.assigned_shards.len(), 2);
        store.let_go("lost");

        assert_eq!(older.await.unwrap().unwrap().status, Status::Retry);
        assert_eq!(newer.await.unwrap().unwrap().status, Status::Ok);
        assert!(store.all_faults_happened());
        assert!(record(&coordinator, &orders()).await.members["m1"].is_live());
    });
}

#[test]
fn what_was_certainly_not_written_is_a_retryable_refusal_and_the_memory_stays() {
    in_system(async {
        let server = RedisServer::start();
        let (store, coordinator, mut m1) = with_one_member(&server).await;
        let before = record(&coordinator, &orders()).await;
        store.fail_next("commit", Fault::NotSent);
        assert_eq!(code(m1.beat(&coordinator, &orders()).await), "REDIS_UNAVAILABLE");
        assert_eq!(record(&coordinator, &orders()).await, before);
        m1.beat_ok(&coordinator, &orders()).await;
        let status = coordinator.actor(&orders()).await.unwrap();
        assert_eq!((status.state.as_str(), status.error_code), ("IDLE", None));
    });
}

#[test]
fn a_server_that_refuses_to_write_is_a_retryable_refusal() {
    in_system(async {
        let server = RedisServer::start();
        let (_, coordinator, mut m1) = with_one_member(&server).await;
        let full = |bytes: &str| {
            let _: () = server.run(redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(bytes));
        };
        full("1");
        assert_eq!(code(m1.beat(&coordinator, &orders()).await), "REDIS_UNAVAILABLE");
        full("0");
        m1.beat_ok(&coordinator, &orders()).await;
    });
}

#[test]
fn a_lost_answer_that_cannot_be_looked_up_is_no_success() {
    in_system(async {
        let server = RedisServer::start();
        let (store, coordinator, _) = with_one_member(&server).await;
        store.fail_next("commit", Fault::LostAfter);
        // Entering goes well for the turn itself, and fails when the outcome is looked up.
        store.hold("commit");
        let mut joining = Member::new("m2");
        let request = joining.request();
        let again = request.clone();
        let beat = {
            let (coordinator, group) = (coordinator.clone(), orders());
            tokio::task::spawn_local(async move { coordinator.heartbeat(&group, "m2", request).await })
        };
        let commits = store.calls("commit");
        eventually("the turn commits", || async { store.calls("commit") > commits }).await;
        store.fail_next("enter", Fault::NotSent);
        store.let_go("commit");
        assert_eq!(code(beat.await.unwrap()), "REDIS_UNAVAILABLE");
        // The write had happened; the same join again gets the answer that was lost.
        let version = record(&coordinator, &orders()).await.metadata_version;
        let response = coordinator.heartbeat(&orders(), "m2", again).await.unwrap();
        assert_eq!(response.status, Status::Ok);
        assert_eq!((response.member_epoch, response.metadata_version), (3, version));
    });
}

#[test]
fn a_lost_answer_that_cannot_be_looked_up_because_the_mutex_is_busy_is_no_retry() {
    in_system(async {
        let server = RedisServer::start();
        let (store, coordinator, _) = with_one_member(&server).await;
        store.hold("lost");
        store.fail_next("commit", Fault::LostAfter);
        let beat = {
            let (coordinator, mut joining) = (coordinator.clone(), Member::new("m2"));
            tokio::task::spawn_local(async move { joining.beat(&coordinator, &orders()).await })
        };
        eventually("the commit is made", || async { store.calls("lost") == 1 }).await;
        let mutex = rsc_protocol::keys::Keys::default().mutex(&orders());
        let _: () = server.run(redis::cmd("SET").arg(&mutex).arg("another:token"));
        store.let_go("lost");
        assert_eq!(
            code(beat.await.unwrap()),
            "REDIS_UNAVAILABLE",
            "RETRY would say that nothing was applied"
        );
    });
}

#[test]
fn an_enter_whose_answer_is_lost_does_not_lock_the_group_out() {
    in_system(async {
        let server = RedisServer::start();
        let (store, coordinator, mut m1) = with_one_member(&server).await;
        store.fail_next("enter", Fault::LostAfter);
        assert_eq!(code(m1.beat(&coordinator, &orders()).await), "REDIS_UNAVAILABLE");
        m1.beat_ok(&coordinator, &orders()).await;
    });
}

#[test]
fn a_mutex_held_by_another_instance_is_retry_for_heartbeats_and_503_for_the_rest() {
    in_system(async {
        let server = RedisServer::start();
        let (_, coordinator, mut m1) = with_one_member(&server).await;
        let mutex = rsc_protocol::keys::Keys::default().mutex(&orders());
        let _: () = server.run(redis::cmd("SET").arg(&mutex).arg("another:token"));
        let request = m1.request();
        let (coordinator_1, group) = (coordinator.clone(), orders());
        let beat =
            tokio::task::spawn_local(async move { coordinator_1.heartbeat(&group, "m1", request).await });
        let deleted = coordinator.delete_group(&orders(), super::delete_request(true)).await;
        assert_eq!(code(deleted), "COORDINATOR_STATE_MUTEX_UNAVAILABLE");
        let response = beat.await.unwrap().unwrap();
        assert_eq!(response.status, Status::Retry);
        assert_eq!(response.member_epoch, m1.epoch, "RETRY repeats what the member said");
        let _: i64 = server.run(redis::cmd("DEL").arg(&mutex));
        m1.beat_ok(&coordinator, &orders()).await;
    });
}

#[test]
fn a_state_that_moves_before_every_commit_is_a_conflict_after_some_attempts() {
    in_system(async {
        let server = RedisServer::start();
        let (_, coordinator, mut m1) = with_one_member(&server).await;
        let metadata = rsc_protocol::keys::Keys::default().metadata(&orders());
        let disturb = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        // Somebody without manners writes between enter and commit, as often as `disturb` says.
        let (mine, url) = (disturb.clone(), server.port());
        coordinator.shared().hooks.set_before_decision(move |_| {
            use std::sync::atomic::Ordering::SeqCst;
            if mine.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok() {
                let client = redis::Client::open(format!("redis://127.0.0.1:{url}")).unwrap();
                let mut connection = client.get_connection().unwrap();
                // As a neighbour's lease-only commit does.
                let id = uuid::Uuid::new_v4().to_string();
                let mut write = redis::pipe();
                write.cmd("HINCRBY").arg(&metadata).arg("liveRevision").arg(1);
                write.cmd("HSET").arg(&metadata).arg("writeId").arg(id);
                let _: (i64, i64) = write.query(&mut connection).unwrap();
            }
        });
        disturb.store(5, std::sync::atomic::Ordering::SeqCst);
        m1.beat_ok(&coordinator, &orders()).await;
        assert_eq!(coordinator.actor(&orders()).await.unwrap().conflicts, 5);
        disturb.store(6, std::sync::atomic::Ordering::SeqCst);
        let response = m1.beat(&coordinator, &orders()).await.unwrap();
        assert_eq!(response.status, Status::Retry);
        m1.beat_ok(&coordinator, &orders()).await;
    });
}
