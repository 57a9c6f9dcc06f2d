//! Protocol 6: members that join, leave, crash and are fenced while a migration runs, and none at all.

mod support;

use std::collections::BTreeSet;

use rsc_protocol::Status;
use rsc_protocol::admin::{GroupState, MemberState};
use rsc_protocol::resharding::MigrationState;
use support::drivers::Driver;
use support::streams::*;
use support::{Client, LEASE, REBALANCE, RequestExt as _, settle};

/// The shards that the clients read, each by one of them.
fn read_by(clients: &[&Client]) -> BTreeSet<u32> {
    let all: Vec<u32> = clients.iter().flat_map(|client| client.owned.iter().copied()).collect();
    let set: BTreeSet<u32> = all.iter().copied().collect();
    assert_eq!(all.len(), set.len(), "two read one shard: {all:?}");
    set
}

/// One group, whose members `a` and `b` read 4 shards.
fn two_members() -> (Stream, Client, Client) {
    let mut stream = Stream::new(4, &["billing"]);
    let (mut a, mut b) = (Client::full("a", "a-1"), Client::full("b", "b-1"));
    meet(&mut stream, &mut [&mut a, &mut b]);
    (stream, a, b)
}

/// Heartbeats until nothing moves.
fn meet(stream: &mut Stream, clients: &mut [&mut Client]) {
    settle(&mut stream.groups[0], clients);
    stream.now = stream.groups[0].now;
}

/// Heartbeats and reading for as long, the migration being driven all the while.
fn live(stream: &mut Stream, millis: i64, clients: &mut [&mut Client]) {
    let end = stream.now.plus(millis);
    while stream.now < end {
        for client in clients.iter_mut() {
            client.beat(&mut stream.groups[0]);
        }
        stream.groups[0].tick();
        stream.drive();
        stream.consume();
        stream.pass(3_000);
    }
}

#[test]
fn protocol_6_new_shards_join_the_target_and_are_read() {
    let (mut stream, mut a, mut b) = two_members();
    stream.scale(6);
    meet(&mut stream, &mut [&mut a, &mut b]);
    assert_eq!(read_by(&[&a, &b]), (0..6).collect());
    live(&mut stream, CACHES + 6_000, &mut [&mut a, &mut b]);
    stream.assert_settled(6);
}

#[test]
fn protocol_6_a_removed_shard_stays_with_its_owner_until_it_is_proven_empty() {
    let (mut stream, mut a, mut b) = two_members();
    let (owned_a, owned_b) = (a.owned.clone(), b.owned.clone());
    let id = stream.scale(2);
    stream.publish(3);
    for _ in 0..20 {
        assert_eq!(a.beat(&mut stream.groups[0]).status, Status::Ok);
        b.beat(&mut stream.groups[0]);
        stream.drive();
        stream.pass(3_000);
        // Shard 2 is empty, and goes when the caches are over; 3 is not, however long it takes.
        assert!(read_by(&[&a, &b]).contains(&3));
    }
    assert_eq!(read_by(&[&a, &b]), [0, 1, 3].into());
    assert_eq!(stream.states(&id), [Some(MigrationState::Draining)]);
    assert!(owned_a.contains(&3) == a.owned.contains(&3) && owned_b.contains(&3) == b.owned.contains(&3));
    live(&mut stream, 15_000, &mut [&mut a, &mut b]);
    assert_eq!(read_by(&[&a, &b]), [0, 1].into());
    stream.assert_settled(2);
}

#[test]
fn protocol_6_it_does_not_end_while_somebody_holds_a_removed_shard() {
    let (mut stream, mut a, mut b) = two_members();
    let id = stream.scale(2);
    let caches_end = stream.now.plus(CACHES);
    while stream.now < caches_end {
        a.beat(&mut stream.groups[0]);
        b.beat(&mut stream.groups[0]);
        stream.pass(3_000);
    }
    stream.drive();
    // Both have been told to drain 2 and 3; b does so for ever.
    a.beat(&mut stream.groups[0]);
    a.beat(&mut stream.groups[0]);
    b.beat_draining(&mut stream.groups[0]);
    let next = stream.drive();
    assert!(next.waits_for.contains("still hold"), "{next:?}");
    assert_eq!(stream.states(&id), [Some(MigrationState::Draining)]);
    let since = stream.now;
    while stream.groups[0].group().members["b"].state != MemberState::Fenced {
        assert!(stream.now < since.plus(REBALANCE + 3_000), "fenced at the rebalance timeout");
        assert!(!stream.drive().has_settled());
        a.beat(&mut stream.groups[0]);
        b.beat_draining(&mut stream.groups[0]);
        stream.pass(3_000);
    }
    // It may still be reading for one lease.
    assert!(stream.drive().waits_for.contains("still hold"));
    live(&mut stream, LEASE + 3_000, &mut [&mut a]);
    assert!(stream.drive().has_settled());
    assert_eq!(a.owned, [0, 1]);
    stream.assert_settled(2);
}

#[test]
fn protocol_6_an_owner_that_crashes_is_waited_for_one_lease() {
    let (mut stream, mut a, b) = two_members();
    let id = stream.scale(2);
    stream.publish(3);
    live(&mut stream, CACHES, &mut [&mut a]);
    assert_eq!(stream.groups[0].group().members["b"].state, MemberState::Expired);
    assert!(read_by(&[&a]).is_superset(&[0, 1].into()));
    live(&mut stream, LEASE, &mut [&mut a]);
    assert_eq!(stream.states(&id), [Some(MigrationState::Deprecated)]);
    assert_eq!((read_by(&[&a]), b.owned.len()), ([0, 1].into(), 2));
    stream.assert_settled(2);
}

#[test]
fn protocol_6_members_join_and_leave_meanwhile() {
    for (from, to) in [(4, 2), (4, 7), (4, 0)] {
        for lead in [0, 3, 6, 9] {
            let (mut stream, mut a, mut b) = two_members();
            let spec = stream.spec(to);
            stream.prepare(&spec).unwrap();
            let mut driver = Driver::default();
            for _ in 0..lead {
                if driver.one(&mut stream).unwrap().is_some() {
                    live(&mut stream, CACHES, &mut [&mut a, &mut b]);
                }
            }
            let mut c = Client::full("c", "c-1");
            c.beat(&mut stream.groups[0]);
            let leave = stream.groups[0]
                .request("b")
                .epoch(-1)
                .version(b.version)
                .revoked(&b.owned)
                .instance("b-1", b.sequence + 1);
            stream.groups[0].send(leave);
            live(&mut stream, CACHES + 30_000, &mut [&mut a, &mut c]);
            assert_eq!(read_by(&[&a, &c]), (0..to).collect(), "{from} to {to} after {lead}");
            stream.assert_settled(to);
        }
    }
}

#[test]
fn protocol_6_without_live_members_only_the_proof_counts() {
    let mut stream = Stream::new(3, &["billing", "mail"]);
    stream.publish(2);
    let id = stream.scale(1);
    stream.pass(CACHES);
    assert_eq!(stream.drive().waits_for, "shards 2 are not proven empty");
    stream.pass(3_600_000);
    stream.drive();
    assert_eq!(stream.states(&id), [Some(MigrationState::Draining); 2], "nobody can acknowledge");
    stream.consume();
    assert!(stream.drive().has_settled());
    assert!(stream.loaded().iter().all(|group| group.state == GroupState::Empty));
    stream.assert_settled(1);
}

#[test]
fn protocol_6_at_zero_members_are_healthy_and_read_nothing() {
    let (mut stream, mut a, mut b) = two_members();
    stream.scale(0);
    live(&mut stream, CACHES + 12_000, &mut [&mut a, &mut b]);
    stream.assert_settled(0);
    assert!(a.owned.is_empty() && b.owned.is_empty());
    assert_eq!(stream.groups[0].group().state, GroupState::Stable);
    let mut c = Client::full("c", "c-1");
    assert_eq!(c.beat(&mut stream.groups[0]).status, Status::Ok);
    stream.scale(3);
    live(&mut stream, 9_000, &mut [&mut a, &mut b, &mut c]);
    assert_eq!(read_by(&[&a, &b, &c]), [0, 1, 2].into());
}

#[test]
fn protocol_6_on_the_way_back_shards_that_had_left_return_to_somebody() {
    let (mut stream, mut a, mut b) = two_members();
    let id = stream.scale(2);
    stream.publish(3);
    for _ in 0..14 {
        a.beat(&mut stream.groups[0]);
        b.beat(&mut stream.groups[0]);
        stream.drive();
        stream.pass(3_000);
    }
    assert_eq!(read_by(&[&a, &b]), [0, 1, 3].into());
    stream.roll_back(&id).unwrap();
    live(&mut stream, 12_000, &mut [&mut a, &mut b]);
    assert_eq!(read_by(&[&a, &b]), [0, 1, 2, 3].into());
    assert_eq!(stream.states(&id), [Some(MigrationState::RolledBack)]);
    stream.assert_settled(4);
}
