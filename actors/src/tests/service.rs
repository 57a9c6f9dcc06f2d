//! Out of service (protocol 4.1 rule 1): a stall, an outage, a rollback or a jump of time costs nobody its
//! place. The rule itself has its unit tests beside it; here it meets the actor.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rsc_protocol::admin::GroupState;
use rsc_protocol::keys::Keys;
use rsc_protocol::{Status, Timestamp};
use rsc_store::MemoryStore;
use rsc_store::memory::{Clock, ManualClock};

use super::faults::TestStore;
use super::member::Member;
use super::redis_server::RedisServer;
use super::{
    code, create, delete_request, eventually, in_system, memory_store, metrics, orders, patient, record,
    settings, start,
};
use crate::{Coordinator, CoordinatorSettings};

fn with_lease(lease_ms: u64) -> CoordinatorSettings {
    let mut settings = settings("a");
    settings.timing.member_lease_ttl_ms = lease_ms;
    settings
}

/// Two members in a group of an instance that is in service; `m1` and `m2` have just been heard.
async fn two_members(coordinator: &Coordinator) -> (Member, Member) {
    create(coordinator, &orders(), 4).await;
    let (mut m1, mut m2) = (Member::new("m1"), Member::new("m2"));
    eventually("the instance is in service", async || {
        tokio::time::sleep(Duration::from_millis(20)).await;
        m1.beat_ok(coordinator, &orders()).await;
        m2.beat_ok(coordinator, &orders()).await;
        coordinator.actor(&orders()).await.unwrap().in_service
    })
    .await;
    (m1, m2)
}

async fn until(instant: Instant) {
    eventually("time passes", || async { Instant::now() > instant }).await;
}

async fn assert_nobody_is_gone(coordinator: &Coordinator) {
    let group = record(coordinator, &orders()).await;
    assert!(group.members["m1"].is_live() && group.members["m2"].is_live(), "{group:?}");
    assert!(!coordinator.actor(&orders()).await.unwrap().in_service);
}

#[test]
fn silent_members_of_an_instance_in_service_do_expire() {
    in_system(async {
        let coordinator = start(with_lease(1_000), &memory_store());
        let (mut m1, _) = two_members(&coordinator).await;
        eventually("m2 is expired and m1 has everything", async || {
            tokio::time::sleep(Duration::from_millis(20)).await;
            m1.beat_ok(&coordinator, &orders()).await;
            m1.owned.len() == 4
        })
        .await;
    });
}

#[test]
fn a_stall_of_the_process_expires_nobody() {
    in_system(async {
        metrics::record();
        let lease = Duration::from_millis(400);
        let coordinator = start(with_lease(400), &memory_store());
        let (mut m1, _) = two_members(&coordinator).await;
        let stalled = metrics::counter("rsc_out_of_service_total cause=stalled");
        for worker in 0..2 {
            let arbiter = coordinator.shared().workers.arbiter(worker);
            arbiter.spawn_fn(move || std::thread::sleep(lease + Duration::from_millis(50)));
        }
        until(Instant::now() + lease).await;
        // Waits for the stalled thread; the first turn after it decides over both members' leases.
        m1.beat_ok(&coordinator, &orders()).await;
        assert_nobody_is_gone(&coordinator).await;
        assert!(metrics::counter("rsc_out_of_service_total cause=stalled") > stalled);
    });
}

#[test]
fn an_outage_of_redis_expires_nobody() {
    in_system(async {
        let lease = Duration::from_millis(600);
        let server = RedisServer::start();
        let store = TestStore::new(server.store());
        let coordinator = start(with_lease(600), &store);
        let (mut m1, _) = two_members(&coordinator).await;
        store.cut_off(true);
        assert_eq!(code(m1.beat(&coordinator, &orders()).await), "REDIS_UNAVAILABLE");
        until(Instant::now() + lease).await;
        assert_eq!(code(m1.beat(&coordinator, &orders()).await), "REDIS_UNAVAILABLE");
        store.cut_off(false);
        m1.beat_ok(&coordinator, &orders()).await;
        assert_nobody_is_gone(&coordinator).await;
    });
}

#[test]
fn a_rollback_of_redis_expires_nobody_and_is_counted() {
    in_system(async {
        metrics::record();
        let lease = Duration::from_millis(1_000);
        let server = RedisServer::start();
        let coordinator = start(with_lease(1_000), &server.store());
        let (mut m1, mut m2) = two_members(&coordinator).await;
        let regressions = metrics::counter("rsc_metadata_version_regression_total");
        let metadata = Keys::default().metadata(&orders());
        let old: Vec<u8> = server.run(redis::cmd("DUMP").arg(&metadata));
        let taken = Instant::now();
        eventually("the old leases are over", async || {
            tokio::time::sleep(Duration::from_millis(20)).await;
            m1.beat_ok(&coordinator, &orders()).await;
            m2.beat_ok(&coordinator, &orders()).await;
            taken.elapsed() > lease + Duration::from_millis(50)
        })
        .await;
        // The lost commits are lease renewals only: without the rule the next turn throws both out.
        server.restore_metadata(&orders(), &old);
        let answer = m1.beat(&coordinator, &orders()).await.unwrap();
        assert_eq!(answer.status, Status::RevokePending, "on Redis's version, and the round is on");
        assert_nobody_is_gone(&coordinator).await;
        assert!(metrics::counter("rsc_metadata_version_regression_total") > regressions);
        assert!(record(&coordinator, &orders()).await.metadata_correction.is_some(), "the round is recorded");
        let refused = coordinator.delete_group(&orders(), delete_request(true)).await;
        assert_eq!(code(refused), "METADATA_SYNC_IN_PROGRESS");
        eventually("the round ends", async || {
            let one = m1.beat(&coordinator, &orders()).await.unwrap().status;
            let other = m2.beat(&coordinator, &orders()).await.unwrap().status;
            one == Status::Ok && other == Status::Ok
        })
        .await;
        let group = record(&coordinator, &orders()).await;
        assert_eq!((group.metadata_correction, group.state), (None, GroupState::Stable));
        assert_nobody_is_gone(&coordinator).await;
    });
}

#[test]
fn members_from_a_lost_future_are_brought_back_by_a_coordinator_that_saw_nothing() {
    in_system(async {
        let server = RedisServer::start();
        let one = start(with_lease(500), &server.store());
        let (mut m1, mut m2) = two_members(&one).await;
        let metadata = Keys::default().metadata(&orders());
        let old: Vec<u8> = server.run(redis::cmd("DUMP").arg(&metadata));
        let mut m3 = Member::new("m3");
        for _ in 0..4 {
            m3.beat(&one, &orders()).await.unwrap();
            m1.beat(&one, &orders()).await.unwrap();
            m2.beat(&one, &orders()).await.unwrap();
        }
        // Redis forgets m3's join; a coordinator that has just started knows nothing of it either.
        server.restore_metadata(&orders(), &old);
        let other = start(with_lease(500), &server.store());
        let answer = m1.beat(&other, &orders()).await.unwrap();
        assert_eq!(answer.status, Status::SyncMetadata);
        assert_eq!(answer.metadata_version, record(&other, &orders()).await.metadata_version);
        assert_eq!(m3.beat(&other, &orders()).await.unwrap().status, Status::UnknownMemberId);
        eventually("three members share the shards again", async || {
            for member in [&mut m1, &mut m2, &mut m3] {
                member.beat(&other, &orders()).await.unwrap();
            }
            let group = record(&other, &orders()).await;
            group.state == GroupState::Stable && group.live_members().count() == 3
        })
        .await;
    });
}

#[test]
fn another_instances_commits_are_no_rollback() {
    in_system(async {
        let server = RedisServer::start();
        let (one, other) = (start(with_lease(1_000), &server.store()), start(patient("b"), &server.store()));
        let (mut m1, mut m2) = two_members(&one).await;
        for _ in 0..10 {
            m1.beat_ok(&other, &orders()).await;
            m2.beat_ok(&one, &orders()).await;
            Member::new("m3").beat_ok(&other, &orders()).await;
        }
        let status = one.actor(&orders()).await.unwrap();
        assert!(status.in_service, "{status:?}");
    });
}

#[test]
fn a_jump_of_redis_time_expires_nobody_and_grants_nothing_for_a_lease() {
    in_system(async {
        let clock = ManualClock::at(Timestamp::from_millis(1_700_000_000_000));
        let store = Arc::new(MemoryStore::with_clock(
            Keys::default(),
            Duration::from_secs(1),
            Clock::Manual(clock.clone()),
        ));
        let coordinator = start(with_lease(1_000), &store);
        let (mut m1, mut m2) = two_members(&coordinator).await;
        for _ in 0..3 {
            m1.beat_ok(&coordinator, &orders()).await;
            m2.beat_ok(&coordinator, &orders()).await;
        }
        assert_eq!((m1.owned.len(), m2.owned.len()), (2, 2));
        // Less than a tenth of a lease is no jump.
        clock.advance(90);
        m1.beat_ok(&coordinator, &orders()).await;
        assert!(coordinator.actor(&orders()).await.unwrap().in_service);
        // Both leases end by the new time.
        clock.advance(5_000);
        m1.beat_ok(&coordinator, &orders()).await;
        let jumped = Instant::now();
        assert_nobody_is_gone(&coordinator).await;
        m2.beat_ok(&coordinator, &orders()).await;
        assert_eq!(m2.owned.len(), 2, "who has something keeps it");
        // A member that leaves frees its shards; for one lease nobody else gets them.
        m2.epoch = -1;
        m2.owned.clear();
        m2.beat_ok(&coordinator, &orders()).await;
        let waiting = m1.beat_ok(&coordinator, &orders()).await;
        assert_eq!((m1.owned.len(), waiting.assignment.pending_shards.len()), (2, 2));
        eventually("they are granted", async || {
            tokio::time::sleep(Duration::from_millis(20)).await;
            m1.beat_ok(&coordinator, &orders()).await;
            m1.owned.len() == 4
        })
        .await;
        assert!(jumped.elapsed() > Duration::from_millis(990));
    });
}

#[test]
fn a_fresh_process_lets_the_members_of_the_last_one_come_back() {
    in_system(async {
        let server = RedisServer::start();
        let first = start(with_lease(400), &server.store());
        let (mut m1, _) = two_members(&first).await;
        first.begin_termination();
        first.stopped(super::PATIENCE).await.unwrap();
        until(Instant::now() + Duration::from_millis(450)).await;
        let second = start(with_lease(400), &server.store());
        let answer = m1.beat(&second, &orders()).await.unwrap();
        assert_eq!(answer.status, Status::Ok);
        assert_nobody_is_gone(&second).await;
    });
}
