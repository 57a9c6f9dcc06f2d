//! Holds: shards that somebody outside the accepted membership may still be reading (protocol 4.3).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use rsc_core::{Hold, HoldCause};
use rsc_protocol::admin::{GroupState, MemberState};
use rsc_protocol::{HeartbeatRequest, RevokingState, Status};
use support::*;

/// p-1 read 0 and 1 and was superseded by p-2, which waits.
fn superseded() -> (Bench, Client, Client) {
    let mut bench = Bench::new(2);
    let mut old = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut old]);
    bench.pass(1_000);
    let mut new = Client::new("p", "p-2");
    new.beat(&mut bench);
    new.beat(&mut bench);
    (bench, old, new)
}

fn on_hold(bench: &Bench) -> Vec<u32> {
    bench.group().holds.iter().map(|hold| hold.shard_index).collect()
}

fn lifted(bench: &Bench) -> u64 {
    bench.counts.last().unwrap().holds_lifted
}

#[test]
fn rule_4_3_a_hold_names_shard_party_cause_and_the_end_of_the_partys_lease() {
    let (bench, old, _) = superseded();
    let expected = |shard_index| Hold {
        shard_index,
        member_id: "p".to_owned(),
        instance_id: Some("p-1".to_owned()),
        sequence: Some(old.sequence),
        cause: HoldCause::Superseded,
        until: bench.now.plus(LEASE - 1_100),
        since: bench.now,
        moves: false,
    };
    assert_eq!(bench.group().holds, [expected(0), expected(1)]);
}

#[test]
fn rule_4_3_a_hold_blocks_new_grants_to_others_and_to_the_party_itself_until_it_ends() {
    let (mut bench, mut old, mut new) = superseded();
    let until = bench.group().holds[0].until;
    let mut other = Client::new("q", "q-1");
    other.beat(&mut bench);
    while bench.now < until {
        for client in [&mut new, &mut other] {
            let answer = client.beat(&mut bench);
            assert_eq!((assigned(&answer), pending(&answer).len()), (vec![], 1));
        }
        assert_eq!(bench.group().state, GroupState::Reconciling);
        // The superseded process goes on reporting: repeating extends nothing.
        let request = old.request(&mut bench, true);
        assert_eq!(bench.send(request).status, Status::FencedMemberEpoch);
        assert!(bench.group().holds.iter().all(|hold| hold.until == until));
        bench.pass(500);
    }
    assert_eq!(assigned(&new.beat(&mut bench)), [0]);
    assert_eq!(assigned(&other.beat(&mut bench)), [1]);
    assert!(bench.group().holds.is_empty());
}

#[test]
fn rule_4_3_a_hold_is_over_at_its_end_and_not_a_millisecond_before() {
    let (mut bench, _, mut new) = superseded();
    bench.now = bench.group().holds[0].until.plus(-1);
    assert!(assigned(&new.beat(&mut bench)).is_empty());
    bench.pass(1);
    assert_eq!(assigned(&new.beat(&mut bench)), [0, 1]);
    assert!(bench.group().holds.is_empty(), "and forgotten");
}

#[test]
fn rule_4_3_a_hold_never_takes_a_shard_from_a_holder() {
    let mut bench = Bench::new(2);
    let (mut p, mut m) = (Client::new("p", "p-1"), Client::new("m", "m-1"));
    settle(&mut bench, &mut [&mut m]);
    settle(&mut bench, &mut [&mut p, &mut m]);
    // p claims m's shard: it is put on hold, m goes on reading it.
    let claim = p.request(&mut bench, true).owned(&[0, 1]);
    assert_eq!(bench.send(claim).status, Status::FencedMemberEpoch);
    assert_eq!(on_hold(&bench), [0, 1]);
    let before = bench.group();
    let answer = m.beat(&mut bench);
    assert_eq!((assigned(&answer), pending(&answer)), (vec![0], vec![1]));
    assert_eq!(bench.group().members["m"].granted[&0], before.members["m"].granted[&0]);
}

#[test]
fn rule_4_3_a_shard_on_hold_is_not_granted_anew_to_the_member_that_was_told_to_drain_it() {
    let mut bench = Bench::new(2);
    let (mut p, mut m) = (Client::new("p", "p-1"), Client::new("m", "m-1"));
    settle(&mut bench, &mut [&mut m]);
    p.beat(&mut bench);
    let answer = m.beat_draining(&mut bench);
    assert_eq!(awaited(&answer), [1]);
    // p claims it before m has given it back. It may be reading; m has stopped, or is about to.
    let claim = p.request(&mut bench, true).owned(&[1]);
    assert_eq!(bench.send(claim).status, Status::FencedMemberEpoch);
    let until = bench.group().holds[0].until;
    bench.pass(1_000);
    let answer = m.beat_draining(&mut bench);
    assert_eq!((assigned(&answer), pending(&answer)), (vec![0], vec![1]), "the new stamp is a grant");
    bench.now = until;
    assert_eq!(assigned(&m.beat_draining(&mut bench)), [0, 1]);
}

#[test]
fn rule_4_3_only_a_newer_message_of_that_very_incarnation_lifts_a_hold() {
    let (mut bench, old, _) = superseded();
    let stopped =
        |bench: &mut Bench| bench.request("p").epoch(old.epoch).version(old.version).revoked(&[0, 1]);
    let newest = old.sequence;
    let not_enough: [(&str, Option<&str>, Option<u64>); 5] = [
        ("the last applied message again", Some("p-1"), Some(newest)),
        ("an older one", Some("p-1"), Some(newest - 1)),
        ("one without order", Some("p-1"), None),
        ("another incarnation's", Some("p-0"), Some(newest + 1)),
        ("one of nobody in particular", None, Some(newest + 1)),
    ];
    for (what, instance, sequence) in not_enough {
        let mut request = stopped(&mut bench);
        (request.instance_id, request.sequence) = (instance.map(str::to_owned), sequence);
        assert_eq!(bench.send(request).status, Status::FencedMemberEpoch);
        assert_eq!(on_hold(&bench), [0, 1], "{what}");
    }
    // The same instance under another member id is another party.
    let mut elsewhere = stopped(&mut bench).instance("p-1", newest + 1);
    elsewhere.member_id = "q".to_owned();
    bench.send(elsewhere);
    assert_eq!(on_hold(&bench), [0, 1]);
    let request = stopped(&mut bench).instance("p-1", newest + 1);
    assert_eq!(bench.send(request).status, Status::FencedMemberEpoch);
    assert_eq!((on_hold(&bench), lifted(&bench)), (vec![], 2));
}

#[test]
fn rule_4_3_revoked_with_nothing_in_flight_lifts_that_shards_hold_only() {
    let (mut bench, old, mut new) = superseded();
    let report = |bench: &mut Bench, sequence| {
        let request = bench.request("p").epoch(old.epoch).version(old.version);
        request.instance("p-1", old.sequence + sequence)
    };
    let send = |bench: &mut Bench, request: HeartbeatRequest| {
        bench.send(request);
        on_hold(bench)
    };
    let mut unfinished = report(&mut bench, 1).draining(&[0]);
    unfinished.revoking_shards.push(revoking(1, RevokingState::Revoked, 2));
    assert_eq!(send(&mut bench, unfinished), [0, 1]);
    let silent = report(&mut bench, 2);
    assert_eq!(send(&mut bench, silent), [0, 1], "not naming a shard is no proof outside a round");
    let one = report(&mut bench, 3).revoked(&[1]).draining(&[0]);
    assert_eq!(send(&mut bench, one), [0]);
    assert_eq!(assigned(&new.beat(&mut bench)), [1]);
}

#[test]
fn rule_4_3_a_newer_epoch_0_lifts_all_of_that_partys_holds() {
    let (mut bench, old, mut new) = superseded();
    let join = bench.request("p").instance("p-1", old.sequence + 1);
    assert_eq!(bench.send(join).status, Status::InvalidRequest);
    assert_eq!((on_hold(&bench), lifted(&bench)), (vec![], 2));
    assert_eq!(assigned(&new.beat(&mut bench)), [0, 1]);
}

#[test]
fn rule_4_3_a_leave_proves_nothing_but_what_it_reports_revoked() {
    let (mut bench, old, _) = superseded();
    let leave = bench.request("p").epoch(-1).version(old.version).instance("p-1", old.sequence + 1);
    bench.send(leave.revoked(&[0]));
    assert_eq!(on_hold(&bench), [1]);
}

#[test]
fn rule_4_3_the_message_that_set_a_hold_does_not_lift_it() {
    let mut bench = Bench::new(3);
    let (mut m, mut p) = (Client::new("m", "m-1"), Client::new("p", "p-1"));
    settle(&mut bench, &mut [&mut m]);
    settle(&mut bench, &mut [&mut p, &mut m]);
    assert_eq!((m.owned.as_slice(), p.owned.as_slice()), ([0, 1].as_slice(), [2].as_slice()));
    // It claims m's shard and, in the same breath, gives its own back.
    let claim = p.request(&mut bench, true).owned(&[0]).revoked(&[2]);
    bench.send(claim.clone());
    assert_eq!(on_hold(&bench), [0, 2]);
    bench.send(claim.clone());
    assert_eq!(on_hold(&bench), [0, 2], "the same message again is not newer");
    let older = claim.instance("p-1", p.sequence - 1).owned(&[]);
    bench.send(older);
    assert_eq!(on_hold(&bench), [0, 2]);
    let newer = p.request(&mut bench, true).owned(&[0]).revoked(&[2]);
    bench.send(newer);
    assert_eq!(on_hold(&bench), [0]);
}

#[test]
fn rule_4_3_a_fenced_member_that_rejoins_gets_at_once_what_its_own_newer_join_frees() {
    let mut bench = Bench::new(2);
    let (mut p, mut m) = (Client::new("p", "p-1"), Client::new("m", "m-1"));
    settle(&mut bench, &mut [&mut m]);
    settle(&mut bench, &mut [&mut p, &mut m]);
    let claim = p.request(&mut bench, true).owned(&[0, 1]);
    bench.send(claim);
    p.epoch = 0;
    p.owned.clear();
    let answer = p.beat(&mut bench);
    assert_eq!((answer.status, on_hold(&bench)), (Status::Ok, vec![]));
    assert_eq!(assigned(&answer), [1], "m holds only 0");
}

#[test]
fn rule_4_3_a_fenced_member_without_order_waits_for_its_own_hold() {
    let mut bench = Bench::new(2);
    let mut p = Client::old("p");
    settle(&mut bench, &mut [&mut p]);
    let claim = p.request(&mut bench, true).owned(&[0, 1, 2]);
    p.apply(&bench.send(claim));
    let until = bench.group().holds[0].until;
    let answer = p.beat(&mut bench);
    assert_eq!((answer.status, assigned(&answer), pending(&answer)), (Status::Ok, vec![], vec![0, 1]));
    while bench.now < until {
        assert!(assigned(&p.beat(&mut bench)).is_empty());
        bench.pass(1_000);
    }
    assert_eq!(assigned(&p.beat(&mut bench)), [0, 1]);
}

#[test]
fn rule_4_3_an_ended_lease_needs_no_hold() {
    let mut bench = Bench::new(2);
    let mut old = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut old]);
    bench.pass(LEASE);
    let mut new = Client::new("p", "p-2");
    assert_eq!(assigned(&new.beat(&mut bench)), [0, 1]);
    assert!(bench.group().holds.is_empty());
    assert_eq!(bench.group().members["p"].state, MemberState::Starting);
}

#[test]
fn rule_4_3_a_hold_is_at_most_one_lease_away_and_successive_ones_do_not_add_up() {
    let (mut bench, _, _) = superseded();
    let until = bench.group().holds[0].until;
    for restart in 3..8 {
        bench.pass(1_000);
        let mut next = Client::new("p", &format!("p-{restart}"));
        next.beat(&mut bench);
        next.beat(&mut bench);
        assert!(bench.group().holds.iter().all(|hold| hold.until == until), "newcomers held nothing");
        assert_eq!(on_hold(&bench), [0, 1]);
    }
}

#[test]
fn rule_4_3_a_party_that_is_fenced_over_and_over_has_one_hold_per_shard() {
    let mut bench = Bench::new(4);
    let mut m = Client::new("m", "m-1");
    let mut p = Client::old("p");
    settle(&mut bench, &mut [&mut m]);
    settle(&mut bench, &mut [&mut p, &mut m]);
    let mut last_lease_end = None;
    for _ in 0..5 {
        bench.pass(100);
        let claim = p.request(&mut bench, true).owned(&[0, 1, 2, 3]);
        last_lease_end = Some(bench.group().members["p"].live.member_lease_expires_at);
        p.apply(&bench.send(claim));
        assert_eq!(on_hold(&bench), [0, 1, 2, 3]);
        assert_eq!(p.beat(&mut bench).status, Status::Ok);
    }
    // It ends with the last lease that it was given.
    assert!(bench.group().holds.iter().all(|hold| Some(hold.until) == last_lease_end));
    assert_eq!(assigned(&m.beat(&mut bench)), [0, 1], "the holder goes on");
}

#[test]
fn rule_4_3_a_hold_set_again_is_lifted_only_by_what_is_newer_than_the_last_claim() {
    let mut bench = Bench::new(2);
    let mut p = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut p]);
    let first = p.request(&mut bench, true).owned(&[0, 1, 2]);
    p.apply(&bench.send(first));
    // It rejoins without saying when, so that its hold stays, and claims what is on hold.
    let mut join = p.request(&mut bench, true);
    join.sequence = None;
    p.apply(&bench.send(join));
    let late = p.request(&mut bench, true).owned(&[]).revoked(&[0, 1]);
    let second = p.request(&mut bench, true).owned(&[0, 1]);
    p.apply(&bench.send(second));
    assert_eq!(on_hold(&bench), [0, 1]);
    bench.send(late.clone());
    assert_eq!(on_hold(&bench), [0, 1], "newer than the first claim, older than the second");
    bench.send(late.instance("p-1", p.sequence + 1));
    assert_eq!(on_hold(&bench), [0_u32; 0]);
}

#[test]
fn rule_4_3_a_lease_that_the_record_may_have_lost_still_holds() {
    let mut bench = Bench::new(2);
    let mut p = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut p]);
    // The record's lease is over, but this instance has not been in service for a lease: renewals may be lost.
    bench.pass(2 * LEASE);
    bench.may_expire = false;
    let mut successor = Client::new("p", "p-2");
    let answer = successor.beat(&mut bench);
    assert!(assigned(&answer).is_empty(), "p-1 may still be reading");
    assert!(bench.group().holds.iter().all(|hold| hold.until == bench.now.plus(LEASE)));
    assert_eq!(bench.group().holds.len(), 2);
}
