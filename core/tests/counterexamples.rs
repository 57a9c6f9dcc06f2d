//! How earlier drafts of the rules broke: each row of the design's counterexamples about sections 2 to 4 that
//! the state machine decides, under its name. (`same-number-other-history` and `neighbour-taken-for-a-loss`
//! are the store's and the actor's; rows that need section 5 or 6 come with those sections.)

mod support;

use rsc_core::HoldCause;
use rsc_protocol::Status;
use rsc_protocol::admin::{GroupState, MemberState};
use support::*;

/// Two members at three shards each; `p` has just been told to drain what a third takes.
fn two_settled() -> (Bench, Client, Client) {
    let mut bench = Bench::new(6);
    let (mut p, mut m1) = (Client::new("p", "p-1"), Client::new("m1", "m1-1"));
    settle(&mut bench, &mut [&mut p, &mut m1]);
    (bench, p, m1)
}

#[test]
fn fenced_but_reading() {
    let mut bench = Bench::new(3);
    let (mut p, mut m1) = (Client::new("p", "p-1"), Client::new("m1", "m1-1"));
    settle(&mut bench, &mut [&mut p]);
    assert_eq!(p.owned, [0, 1, 2]);
    m1.beat(&mut bench);
    // p drains shard 2 for ever, heard every few seconds, until the rebalance timeout.
    let deadline = bench.now.plus(REBALANCE);
    while bench.now < deadline {
        let answer = p.beat_draining(&mut bench);
        assert_eq!(answer.status, Status::Ok);
        m1.beat(&mut bench);
        bench.pass(1_000);
    }
    let lease_end = bench.group().members["p"].live.member_lease_expires_at;
    let answer = m1.beat(&mut bench);
    assert_eq!(bench.group().members["p"].state, MemberState::Fenced);
    // Until p's lease ends it may be reading all three.
    assert_eq!((assigned(&answer), pending(&answer)), (vec![], vec![0, 1, 2]));
    while bench.now < lease_end {
        let answer = m1.beat(&mut bench);
        assert!(assigned(&answer).is_empty(), "{} before {lease_end}", bench.now);
        bench.pass(1_000);
    }
    assert_eq!(assigned(&m1.beat(&mut bench)), [0, 1, 2]);
}

#[test]
fn fenced_but_reading_a_newer_target_does_not_restart_the_clock() {
    let mut bench = Bench::new(4);
    let (mut p, mut m1, mut m2) =
        (Client::new("p", "p-1"), Client::new("m1", "m1-1"), Client::new("m2", "m2-1"));
    settle(&mut bench, &mut [&mut p]);
    m1.beat(&mut bench);
    p.beat_draining(&mut bench);
    let deadline = bench.group().members["p"].rebalance_deadline_at.expect("p drains");
    bench.pass(10_000);
    m1.beat(&mut bench);
    m2.beat(&mut bench);
    p.beat_draining(&mut bench);
    assert_eq!(bench.group().members["p"].rebalance_deadline_at, Some(deadline));
}

#[test]
fn join_copied() {
    let mut bench = Bench::new(3);
    let mut p = Client::old("p");
    let join = p.request(&mut bench, true);
    let answer = bench.send(join.clone());
    assert_eq!(assigned(&answer), [0, 1, 2]);
    let mut m1 = Client::old("m1");
    m1.beat(&mut bench);
    // The network delivers p's join again: what p was allowed before still counts.
    let again = bench.send(join);
    assert_eq!((again.status, assigned(&again)), (Status::Ok, vec![0, 1]));
    assert_eq!(again.member_epoch, i64::try_from(bench.group().assignment_epoch).unwrap());
    let answer = m1.beat(&mut bench);
    assert_eq!((assigned(&answer), pending(&answer)), (vec![], vec![2]));
}

#[test]
fn report_older_than_grant() {
    let mut bench = Bench::new(2);
    let (mut p, mut m1) = (Client::old("p"), Client::old("m1"));
    settle(&mut bench, &mut [&mut p, &mut m1]);
    let (mine, other) = (p.owned[0], m1.owned[0]);
    let delayed = bench.request("p").epoch(p.epoch).version(p.version).owned(&[mine]);
    // m1 leaves, its shard is granted to p, p reads it; then somebody joins who is to get it.
    let leave = bench.request("m1").epoch(-1).version(m1.version).revoked(&[other]);
    bench.send(leave);
    assert_eq!(assigned(&p.beat(&mut bench)).len(), 2);
    let mut m2 = Client::old("m2");
    let answer = m2.beat(&mut bench);
    assert_eq!((assigned(&answer), pending(&answer).len()), (vec![], 1));
    // The report from before the grant arrives: who had not seen the grant cannot have given it back.
    assert_eq!(bench.send(delayed).status, Status::Ok);
    let answer = m2.beat(&mut bench);
    assert_eq!((assigned(&answer), pending(&answer).len()), (vec![], 1), "p is still reading it");
}

#[test]
fn report_older_than_the_grant_of_a_shard_that_came_back() {
    let mut bench = Bench::new(2);
    let (mut p, mut m1) = (Client::old("p"), Client::old("m1"));
    settle(&mut bench, &mut [&mut p]);
    m1.beat(&mut bench);
    let answer = p.beat_draining(&mut bench);
    let moved = awaited(&answer)[0];
    let kept = p.owned[0];
    // p drains the shard and says so, but that message hangs in the network; the shard comes back to p.
    let delayed = bench.request("p").epoch(p.epoch).version(p.version).owned(&[kept]).revoked(&[moved]);
    let leave = bench.request("m1").epoch(-1).version(m1.version);
    bench.send(leave);
    let before = bench.group().fencing_tokens[&moved];
    let answer = p.beat_draining(&mut bench);
    assert_eq!(assigned(&answer), [0, 1], "the next OK names it");
    assert!(bench.group().fencing_tokens[&moved] > before, "a new grant");
    // Somebody else is to get it now, and the old message arrives.
    let mut m2 = Client::old("m2");
    m2.beat(&mut bench);
    bench.send(delayed);
    let answer = m2.beat(&mut bench);
    assert_eq!((assigned(&answer), pending(&answer).len()), (vec![], 1), "p reads it again");
}

#[test]
fn violation_holds_what_the_violator_may_read() {
    let mut bench = Bench::new(4);
    let (mut p, mut m1) = (Client::new("p", "p-1"), Client::new("m1", "m1-1"));
    settle(&mut bench, &mut [&mut p, &mut m1]);
    // A broken release of p claims a shard of m1's, among its own.
    p.owned.push(m1.owned[0]);
    let answer = p.beat(&mut bench);
    assert_eq!(answer.status, Status::FencedMemberEpoch);
    let lease_end = bench.group().members["p"].live.member_lease_expires_at;
    while bench.now < lease_end {
        let answer = m1.beat(&mut bench);
        assert_eq!((answer.status, m1.owned.len()), (Status::Ok, 2), "m1 keeps its own and gets no more");
        bench.pass(1_000);
    }
    m1.beat(&mut bench);
    assert_eq!(m1.owned, [0, 1, 2, 3]);
}

#[test]
fn restart_without_an_order_of_messages_is_no_proof_of_having_stopped() {
    let mut bench = Bench::new(2);
    let mut p = Client::new("p", "p-1");
    let strip = |mut request: rsc_protocol::HeartbeatRequest| {
        request.sequence = None;
        request
    };
    let join = strip(p.request(&mut bench, true));
    p.apply(&bench.send(join));
    let steady = strip(p.request(&mut bench, true));
    p.apply(&bench.send(steady));
    // The same instance joins anew without saying which message is newer: it may be a copy.
    let again = strip(bench.request("p").version(p.version).instance("p-1", 0));
    let answer = bench.send(again);
    assert_eq!((assigned(&answer), pending(&answer)), (vec![], vec![0, 1]));
}

#[test]
fn two_lost_answers() {
    let mut bench = Bench::new(4);
    let mut p = Client::old("p");
    p.beat(&mut bench);
    p.beat(&mut bench);
    let confirmed = p.epoch;
    // Two joins elsewhere, both answers to p are lost.
    for other in ["m1", "m2"] {
        Client::old(other).beat(&mut bench);
        let request = p.request(&mut bench, true);
        bench.send(request);
    }
    assert!(bench.group().members["p"].live.member_epoch >= u64::try_from(confirmed).unwrap() + 2);
    let request = p.request(&mut bench, true);
    assert_eq!(request.member_epoch, confirmed);
    assert_eq!(bench.send(request).status, Status::Ok, "innocent");
}

#[test]
fn previous_epoch_of_the_predecessor() {
    let mut bench = Bench::new(2);
    let mut old = Client::old("p");
    settle(&mut bench, &mut [&mut old]);
    let mut new = Client::old("p");
    let answer = new.beat(&mut bench);
    assert!(answer.member_epoch > old.epoch);
    let answer = old.beat(&mut bench);
    assert_eq!(answer.status, Status::FencedMemberEpoch, "the dead is not revived");
    assert_eq!(answer.member_epoch, 0, "and does not learn its successor's epoch");
    assert_eq!(new.beat(&mut bench).status, Status::Ok);
}

#[test]
fn dying_process_leaves_for_its_successor() {
    let mut bench = Bench::new(2);
    let mut old = Client::new("p", "old");
    settle(&mut bench, &mut [&mut old]);
    let version = old.version;
    let mut new = Client::new("p", "new");
    new.beat(&mut bench);
    bench.pass(1_000);
    let last_words =
        bench.request("p").epoch(-1).version(version).revoked(&[0, 1]).instance("old", old.sequence + 1);
    assert_eq!(bench.send(last_words).status, Status::FencedMemberEpoch);
    let group = bench.group();
    assert!(group.members["p"].is_live());
    assert_eq!(group.members["p"].instance_id.as_deref(), Some("new"));
    // It did prove that the old process stopped: the successor need not wait.
    assert_eq!(assigned(&new.beat(&mut bench)), [0, 1]);
}

#[test]
fn dying_process_without_instance_leaves_for_its_successor() {
    let mut bench = Bench::new(2);
    let mut old = Client::old("p");
    settle(&mut bench, &mut [&mut old]);
    let last_words = bench.request("p").epoch(-1).version(old.version).revoked(&[0, 1]);
    Client::old("p").beat(&mut bench);
    assert_eq!(bench.send(last_words).status, Status::FencedMemberEpoch);
    assert!(bench.group().members["p"].is_live());
}

#[test]
fn late_leave() {
    let mut bench = Bench::new(2);
    let (mut p, mut m1) = (Client::old("p"), Client::old("m1"));
    settle(&mut bench, &mut [&mut p, &mut m1]);
    let mine = p.owned[0];
    let first = bench.request("p").epoch(-1).version(p.version).draining(&[mine]);
    bench.send(first.clone());
    let done = bench.request("p").epoch(-1).version(p.version).revoked(&[mine]);
    bench.send(done);
    assert_eq!(bench.group().members["p"].state, MemberState::Expired);
    assert_eq!(assigned(&m1.beat(&mut bench)), [0, 1]);
    // The first leave again, late: it must not make a holding anew.
    let answer = bench.send(first);
    assert_eq!((answer.status, assigned(&answer)), (Status::Ok, vec![]));
    assert!(bench.group().members["p"].holds_nothing());
    assert_eq!(bench.group().holders()[&mine], "m1");
}

#[test]
fn old_join_lifts_hold() {
    let mut bench = Bench::new(2);
    let mut old = Client::new("p", "old");
    let first_join = old.request(&mut bench, true);
    let answer = bench.send(first_join.clone());
    old.apply(&answer);
    old.beat(&mut bench);
    let mut new = Client::new("p", "new");
    new.beat(&mut bench);
    new.beat(&mut bench);
    assert_eq!(bench.group().holds.len(), 2);
    // The superseded process's first join, delayed: it proves nothing about what that process reads now.
    let answer = bench.send(first_join);
    assert_eq!(answer.status, Status::InvalidRequest);
    assert_eq!(bench.group().holds.len(), 2);
    assert!(assigned(&new.beat(&mut bench)).is_empty());
    // A newer one does.
    old.epoch = 0;
    old.owned.clear();
    let rejoin = old.request(&mut bench, true);
    bench.send(rejoin);
    assert_eq!(assigned(&new.beat(&mut bench)), [0, 1]);
}

#[test]
fn queued_join_of_the_dead() {
    let mut bench = Bench::new(2);
    let mut first = Client::new("p", "first");
    settle(&mut bench, &mut [&mut first]);
    // The dead process had sent a join that hangs in a stalled coordinator; its successor joins.
    let mut living = Client::new("p", "living");
    living.beat(&mut bench);
    first.epoch = 0;
    first.owned.clear();
    let queued = first.request(&mut bench, true);
    let answer = bench.send(queued.clone());
    assert_eq!(answer.status, Status::Retry, "the successor has sent nothing but its join");
    assert_eq!(living.beat(&mut bench).status, Status::Ok);
    assert_eq!(bench.group().members["p"].instance_id.as_deref(), Some("living"));
    // Heard: from now on a superseded incarnation that joins is a duplicate identity.
    first.sequence += 1;
    let again = first.request(&mut bench, true);
    let answer = bench.send(again);
    assert_eq!(answer.status, Status::InvalidRequest);
    assert!(answer.reason.contains("memberId p"), "{}", answer.reason);
    assert_eq!(living.beat(&mut bench).status, Status::Ok);
}

#[test]
fn rollback_expires_everybody() {
    let (mut bench, mut p, mut m1) = two_settled();
    // The record's leases are long over when an instance finds it, but that instance was out of service.
    bench.pass(10 * LEASE);
    bench.may_expire = false;
    assert_eq!(p.beat(&mut bench).status, Status::Ok);
    assert_eq!(bench.group().live_members().count(), 2, "m1 keeps its place too");
    assert_eq!(m1.beat(&mut bench).status, Status::Ok);
    assert_eq!((p.owned.len(), m1.owned.len()), (3, 3));
}

#[test]
fn late_renewal() {
    let mut bench = Bench::new(2);
    let mut p = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut p]);
    let late = p.request(&mut bench, true);
    p.beat(&mut bench);
    let lease = bench.group().members["p"].live.member_lease_expires_at;
    bench.pass(2_000);
    let answer = bench.send(late);
    assert_eq!(answer.status, Status::Retry, "an OK would let the client extend a lease nobody knows");
    assert_eq!(answer.assignment_lease_ms, 0);
    assert_eq!(bench.group().members["p"].live.member_lease_expires_at, lease);
    // Whoever is answered OK has its lease recorded: the same message again, and the same join again.
    let newest = p.request(&mut bench, true);
    bench.send(newest.clone());
    bench.pass(2_000);
    assert_eq!(bench.send(newest).status, Status::Ok);
    let lease = bench.group().members["p"].live.member_lease_expires_at;
    assert_eq!(lease, bench.now.plus(LEASE));
}

#[test]
fn one_id_for_two() {
    let mut bench = Bench::new(4);
    let first = bench.request("p");
    let first_answer = bench.send(first.clone());
    let second = bench.request("p");
    let second_answer = bench.send(second);
    assert_ne!(first_answer.member_epoch, second_answer.member_epoch, "not the same join again");
    // The first one's own join repeated would be a second process now, but its heartbeat is fenced.
    let heartbeat = bench
        .request("p")
        .epoch(first_answer.member_epoch)
        .version(first_answer.metadata_version)
        .owned(&[0, 1, 2, 3]);
    assert_eq!(bench.send(heartbeat).status, Status::FencedMemberEpoch);
    // And what the first may be reading is on hold.
    let group = bench.group();
    assert_eq!(group.holds.len(), 4);
    assert!(group.holds.iter().all(|hold| hold.cause == HoldCause::Superseded));
    assert_eq!(group.state, GroupState::Reconciling);
}
