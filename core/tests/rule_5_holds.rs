//! Holds for those who speak from a lost future: how long they last, what moves and what lifts them
//! (protocol 5 and 4.3, rules 4.1.9 and 10).

mod support;

use rsc_core::{Hold, HoldCause};
use rsc_protocol::Status;
use rsc_protocol::admin::MemberState;
use support::rounds::*;
use support::*;

/// The single hold of the round on `shard`.
fn hold(bench: &Bench, shard: u32) -> Hold {
    let holds = lost_future_holds(bench, shard);
    assert_eq!(holds.len(), 1, "{holds:?}");
    holds[0].clone()
}

fn hold_end(bench: &Bench, shard: u32) -> rsc_protocol::Timestamp {
    let group = bench.group();
    group.hold_end(&hold(bench, shard))
}

#[test]
fn rule_5_what_a_member_claims_and_redis_does_not_give_it_is_held() {
    let (mut bench, mut p, _) = lost_leave();
    p.beat_in_vain(&mut bench);
    let held = hold(&bench, 2);
    assert_eq!((held.member_id.as_str(), held.instance_id.as_deref()), ("p", Some("p-1")));
    assert_eq!((held.cause, held.sequence), (HoldCause::LostFuture, Some(p.sequence)));
    assert_eq!((held.until, held.since), (lease_end(&bench, "p"), bench.now));
    assert!(lost_future_holds(&bench, 0).is_empty(), "what it holds in Redis is no hold");
}

#[test]
fn rule_5_unfinished_drains_are_claims_too() {
    let (mut bench, mut p, _) = lost_leave();
    p.owned = vec![0, 1];
    p.draining = vec![2, 3];
    p.beat_in_vain(&mut bench);
    assert!(is_on_hold(&bench, 2) && is_on_hold(&bench, 3));
    let request = p.request(&mut bench, true);
    assert_eq!(bench.send(request).status, Status::SyncMetadata);
    assert!(bench.group().holds.is_empty(), "REVOKED with nothing in flight, and newer");
}

#[test]
fn rule_4_3_it_moves_with_the_lease_of_a_live_member_while_its_reports_name_the_shard() {
    let (mut bench, mut p, mut m) = lost_leave();
    p.beat_in_vain(&mut bench);
    for synchronised in [false, true] {
        if synchronised {
            p.beat_draining(&mut bench);
        }
        for _ in 0..4 {
            bench.pass(3_000);
            m.beat(&mut bench);
            if synchronised {
                p.beat_draining(&mut bench)
            } else {
                p.beat_in_vain(&mut bench)
            };
            assert_eq!(hold_end(&bench, 2), bench.now.plus(LEASE), "synchronised: {synchronised}");
        }
    }
    assert!(bench.is_lease_only(), "the end travels in the live field");
}

#[test]
fn rule_4_3_it_ends_with_the_lease_of_a_member_that_falls_silent() {
    let (mut bench, mut p, mut m) = lost_leave();
    p.beat_in_vain(&mut bench);
    bench.pass(3_000);
    p.beat_in_vain(&mut bench);
    let end = lease_end(&bench, "p");
    live_until(&mut bench, end.plus(-1), &mut [&mut m]);
    bench.tick();
    assert!(is_on_hold(&bench, 2));
    bench.now = end;
    bench.tick();
    assert!(bench.group().holds.is_empty());
    assert_eq!(bench.group().members["p"].state, MemberState::Expired);
}

#[test]
fn rule_4_3_at_most_for_the_rebalance_timeout_then_the_member_is_fenced_and_the_hold_keeps_its_end() {
    let (mut bench, mut p, mut m) = lost_leave();
    p.beat(&mut bench);
    assert_eq!(p.draining, [2, 3]);
    let since = hold(&bench, 2).since;
    live_until(&mut bench, since.plus(3_000), &mut [&mut m]);
    while bench.now.plus(3_000) < since.plus(REBALANCE) {
        assert_eq!(p.beat_draining(&mut bench).status, Status::RevokePending);
        m.beat(&mut bench);
        bench.pass(3_000);
        assert!(is_round_on(&bench));
    }
    bench.now = since.plus(REBALANCE - 1);
    bench.tick();
    assert!(bench.group().members["p"].is_live());
    let end = lease_end(&bench, "p");
    assert_eq!(bench.group().next_deadline(&bench.settings), Some(since.plus(REBALANCE)));
    bench.now = since.plus(REBALANCE);
    bench.tick();
    let group = bench.group();
    assert_eq!(group.members["p"].state, MemberState::Fenced);
    assert!(group.holds.iter().all(|hold| hold.until == end), "{:?}", group.holds);
    let held: Vec<u32> = group.holds.iter().map(|hold| hold.shard_index).collect();
    assert_eq!(held.iter().copied().collect::<std::collections::BTreeSet<_>>(), [0, 1, 2, 3].into());
    bench.now = end.plus(-1);
    m.beat(&mut bench);
    assert!(is_on_hold(&bench, 2));
    bench.now = end;
    m.beat(&mut bench);
    assert!(!is_on_hold(&bench, 2) && !is_round_on(&bench));
}

#[test]
fn rule_4_3_a_synchronised_report_without_the_shard_lifts_it() {
    // An old client: no message of it proves an order.
    let (mut bench, mut p) = old_client_ahead();
    p.beat(&mut bench);
    assert!(is_on_hold(&bench, 2));
    assert_eq!(p.beat_draining(&mut bench).status, Status::RevokePending);
    assert!(is_on_hold(&bench, 2), "it still names it");
    assert_eq!(p.beat(&mut bench).status, Status::RevokePending);
    assert!(!is_on_hold(&bench, 2));
}

/// `p` without our additions reads 0 and 1 by Redis, and 2 besides; `m` reads 2 and 3 by Redis.
fn old_client_ahead() -> (Bench, Client) {
    let mut bench = Bench::new(4);
    let (mut p, mut m) = (Client::old("p"), Client::full("m", "m-1"));
    settle(&mut bench, &mut [&mut p, &mut m]);
    bench.pass(1_000);
    p.version += 4;
    p.owned = vec![0, 1, 2];
    (bench, p)
}

#[test]
fn rule_4_3_an_unsynchronised_report_without_the_shard_lifts_nothing_and_moves_nothing() {
    let (mut bench, mut p) = old_client_ahead();
    p.beat_in_vain(&mut bench);
    // Named again: the end moves.
    bench.pass(10_000);
    p.beat_in_vain(&mut bench);
    let end = bench.now.plus(LEASE);
    assert_eq!(hold_end(&bench, 2), end);
    // A report of before, delayed.
    bench.pass(8_000);
    let delayed = bench.request("p").epoch(p.epoch).version(1).owned(&[0, 1]);
    assert_eq!(bench.send(delayed).status, Status::SyncMetadata);
    assert_eq!(hold_end(&bench, 2), end);
    bench.now = end.plus(-1);
    bench.tick();
    assert!(is_on_hold(&bench, 2));
    bench.pass(1);
    bench.tick();
    assert!(!is_on_hold(&bench, 2));
}

#[test]
fn rule_4_3_a_newer_revoked_of_that_very_incarnation_lifts_it_and_an_older_one_does_not() {
    let (mut bench, mut p, _) = lost_leave();
    p.beat_in_vain(&mut bench);
    let sequence = p.sequence;
    for (instance, sequence, lifted) in
        [("p-1", sequence - 1, false), ("p-0", sequence + 1, false), ("p-1", sequence + 1, true)]
    {
        let request = bench
            .request("p")
            .epoch(p.epoch)
            .version(p.version)
            .owned(&[0, 1, 3])
            .revoked(&[2])
            .instance(instance, sequence);
        bench.send(request);
        assert_eq!(!is_on_hold(&bench, 2), lifted, "{instance} {sequence}");
        assert!(is_on_hold(&bench, 3), "that shard only");
    }
}

#[test]
fn rule_4_3_a_newer_join_of_that_very_incarnation_lifts_it() {
    let (mut bench, mut p, _) = lost_leave();
    p.beat_in_vain(&mut bench);
    p.epoch = 0;
    p.owned.clear();
    assert_eq!(p.beat(&mut bench).status, Status::Ok);
    assert!(bench.group().holds.is_empty());
}

#[test]
fn rule_4_3_a_restart_freezes_it_where_the_former_incarnation_s_lease_ends() {
    for instance in [true, false] {
        let (mut bench, mut p) = old_client_ahead();
        if instance {
            let (other, former, _) = lost_leave();
            (bench, p) = (other, former);
        }
        p.beat_in_vain(&mut bench);
        bench.pass(10_000);
        p.beat_in_vain(&mut bench);
        let end = bench.now.plus(LEASE);
        bench.pass(1_000);
        // A second process takes the place; it reads nothing and says so.
        let mut second = if instance { Client::full("p", "p-2") } else { Client::old("p") };
        assert_eq!(second.beat(&mut bench).status, Status::Ok);
        assert_eq!(hold_end(&bench, 2), end);
        for _ in 0..3 {
            assert_eq!(second.beat(&mut bench).status, Status::RevokePending);
            assert_eq!(hold_end(&bench, 2), end, "not its own (instance: {instance})");
        }
        bench.now = end.plus(-1);
        second.beat(&mut bench);
        assert!(is_on_hold(&bench, 2));
    }
}

#[test]
fn rule_4_3_an_instance_that_becomes_known_in_a_round_keeps_its_own_holds() {
    let (mut bench, mut p) = old_client_ahead();
    p.beat(&mut bench);
    assert!(is_on_hold(&bench, 2));
    // The record has no instance; the first that comes with the current epoch is taken.
    p.instance = Some("p-1".to_owned());
    assert_eq!(p.beat_draining(&mut bench).status, Status::RevokePending);
    assert_eq!(hold_end(&bench, 2), bench.now.plus(LEASE));
    assert_eq!(p.beat(&mut bench).status, Status::RevokePending);
    assert!(!is_on_hold(&bench, 2));
}

#[test]
fn rule_5_an_unknown_party_s_claims_are_held_for_one_lease_once_per_round() {
    let (mut bench, mut p, mut m, mut c) = lost_join();
    assert_eq!(c.beat_in_vain(&mut bench).status, Status::UnknownMemberId);
    let shard = c.owned[0];
    let until = bench.now.plus(LEASE);
    assert_eq!(hold(&bench, shard).until, until);
    for _ in 0..4 {
        bench.pass(3_000);
        c.beat_in_vain(&mut bench);
        assert_eq!(hold(&bench, shard).until, until, "repeating extends nothing");
    }
    // Another shard of the same party neither.
    c.owned = vec![0, 1, 2, 3];
    c.beat_in_vain(&mut bench);
    assert_eq!(bench.group().holds.len(), 1);
    live_until(&mut bench, until.plus(-1), &mut [&mut p, &mut m]);
    assert!(is_on_hold(&bench, shard));
    bench.now = until;
    bench.tick();
    assert!(!is_on_hold(&bench, shard));
}

#[test]
fn rule_5_a_further_loss_lets_the_once_begin_anew_without_doubling_holds() {
    let (mut bench, mut p, _, mut c) = lost_join();
    c.beat_in_vain(&mut bench);
    p.owned = vec![0, 1, 2];
    p.beat_in_vain(&mut bench);
    let shard = c.owned[0];
    bench.pass(3_000);
    notice(&mut bench);
    c.beat_in_vain(&mut bench);
    assert!(
        bench
            .group()
            .holds
            .iter()
            .any(|hold| hold.shard_index == shard && hold.until == bench.now.plus(LEASE))
    );
    for _ in 0..3 {
        notice(&mut bench);
        p.beat_in_vain(&mut bench);
        c.beat_in_vain(&mut bench);
    }
    let of_p = bench.group().holds.iter().filter(|hold| hold.member_id == "p").count();
    let of_c = bench.group().holds.iter().filter(|hold| hold.member_id == "c").count();
    assert_eq!((of_p, of_c), (1, 1), "{:?}", bench.group().holds);
}

#[test]
fn rule_5_a_drainer_of_an_unknown_party_and_its_leave_are_held_too() {
    let (mut bench, _, _, c) = lost_join();
    let leave = bench.request("c").epoch(-1).version(c.version).draining(&c.owned);
    assert_eq!(bench.send(leave).status, Status::UnknownMemberId);
    assert!(is_on_hold(&bench, c.owned[0]));
}

#[test]
fn rule_5_a_party_at_redis_version_or_behind_sets_no_holds() {
    let (mut bench, p, _) = round_by_actor();
    for version in [0, p.version - 1, p.version] {
        let stranger = bench.request("s").epoch(4).version(version).owned(&[3]);
        assert_eq!(bench.send(stranger).status, Status::UnknownMemberId);
    }
    assert!(bench.group().holds.is_empty());
}

#[test]
fn rule_5_a_shard_that_another_live_member_holds_is_held_against_the_claimant_and_granted_to_nobody() {
    let (mut bench, mut p, mut m) = lost_leave();
    p.beat(&mut bench);
    // m gives both up; they are its own target, but p has not stopped yet.
    m.beat(&mut bench);
    m.owned.clear();
    assert_eq!(m.beat(&mut bench).status, Status::RevokePending);
    assert_eq!(bench.group().members["m"].holding().len(), 0);
    for _ in 0..10 {
        p.beat_draining(&mut bench);
        assert_eq!(assigned(&m.beat(&mut bench)), Vec::<u32>::new());
        bench.pass(3_000);
    }
    p.beat(&mut bench);
    p.beat(&mut bench);
    let answer = m.beat(&mut bench);
    assert_eq!((answer.status, assigned(&answer)), (Status::Ok, vec![2, 3]));
}

#[test]
fn rule_4_1_9_the_shards_of_its_own_holds_are_no_violation() {
    let (mut bench, mut p, _) = lost_leave();
    p.beat(&mut bench);
    for _ in 0..3 {
        assert_eq!(p.beat_draining(&mut bench).status, Status::RevokePending);
        bench.pass(1_000);
    }
    // Not even as owned, by a client that does not stop.
    p.draining.clear();
    p.owned = vec![0, 1, 2, 3];
    let answer = p.beat_in_vain(&mut bench);
    assert_eq!((answer.status, assigned(&answer)), (Status::RevokePending, vec![0, 1]));
    assert_eq!(bench.group().members["p"].current, [0, 1].into(), "the rest stays on its hold alone");
}

#[test]
fn rule_4_1_9_a_synchronised_claim_without_a_hold_of_its_own_is_a_violation() {
    let (mut bench, mut p, _) = round_by_actor();
    p.owned.push(2);
    let answer = p.beat_in_vain(&mut bench);
    assert_eq!((answer.status, answer.member_epoch), (Status::FencedMemberEpoch, 0));
    let group = bench.group();
    assert!(group.holds.iter().all(|hold| hold.cause == HoldCause::OwnershipViolation));
    assert_eq!(group.holds.iter().map(|hold| hold.shard_index).collect::<Vec<_>>(), [0, 1, 2]);
    // Another party's hold is none of its own either.
    let (mut bench, mut p, mut m) = lost_leave();
    p.beat(&mut bench);
    m.beat(&mut bench);
    assert_eq!(m.beat(&mut bench).status, Status::RevokePending);
    m.owned = vec![1, 2, 3];
    assert_eq!(m.beat_in_vain(&mut bench).status, Status::FencedMemberEpoch);
}

#[test]
fn rule_4_1_10_a_shard_of_its_own_hold_that_becomes_nobodys_target_is_accepted() {
    let (mut bench, mut p, m) = lost_leave();
    p.beat(&mut bench);
    assert!(is_on_hold(&bench, 2));
    // m, which the lost future had seen off, expires: 2 and 3 are p's target and nobody's but p's.
    drop(m);
    p.draining.clear();
    p.owned = vec![0, 1, 2, 3];
    live_until_expired(&mut bench, &mut p);
    let answer = p.beat_in_vain(&mut bench);
    assert_eq!(assigned(&answer), [0, 1, 2, 3]);
    assert_eq!(bench.group().members["p"].current, [0, 1, 2, 3].into());
    assert!(lost_future_holds(&bench, 2).is_empty(), "a holding needs no hold");
}

/// `p` repeats its report until `m` has expired.
fn live_until_expired(bench: &mut Bench, p: &mut Client) {
    while bench.group().members["m"].is_live() {
        p.beat_in_vain(bench);
        bench.pass(3_000);
    }
}

#[test]
fn rule_5_shards_beyond_the_record_s_count_are_held_like_others() {
    // Redis lost that the stream had grown: p reads shards that the record does not know.
    let (mut bench, mut p, _) = two_of_four();
    p.version += 3;
    p.owned = vec![0, 1, 6];
    assert_eq!(assigned(&p.beat(&mut bench)), [0, 1]);
    assert!(is_on_hold(&bench, 6));
    assert_eq!(p.beat_draining(&mut bench).status, Status::RevokePending, "it drains: no violation");
    assert_eq!(p.beat(&mut bench).status, Status::RevokePending);
    assert!(!is_on_hold(&bench, 6));
}

#[test]
fn rule_5_a_member_that_leaves_keeps_its_hold_until_its_lease_would_have_ended() {
    let (mut bench, p, _) = lost_leave();
    let leave =
        bench.request("p").epoch(-1).version(p.version).draining(&[2]).instance("p-1", p.sequence + 1);
    bench.send(leave);
    assert_eq!(bench.group().members["p"].state, MemberState::Expired, "Redis's own shards it has left");
    assert_eq!(hold(&bench, 2).until, bench.now.plus(LEASE));
}
