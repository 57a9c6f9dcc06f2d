//! Handing a shard over (protocol 4.2), what *granted* means (protocol 1) and fencing tokens (protocol 4).

mod support;

use rsc_core::member::{Grant, Termination};
use rsc_core::{HoldCause, Settings};
use rsc_protocol::admin::{GroupState, MemberState};
use rsc_protocol::{HeartbeatResponse, Status, Timestamp};
use support::*;

/// p reads 0 and 1; m has joined and waits for 1; p has not been answered since.
fn one_waits() -> (Bench, Client, Client) {
    let mut bench = Bench::new(2);
    let (mut p, mut m) = (Client::new("p", "p-1"), Client::new("m", "m-1"));
    settle(&mut bench, &mut [&mut p]);
    bench.pass(1_000);
    m.beat(&mut bench);
    (bench, p, m)
}

fn deadline(bench: &Bench, id: &str) -> Option<Timestamp> {
    bench.group().members[id].rebalance_deadline_at
}

fn tokens(answer: &HeartbeatResponse) -> Vec<(u32, u64)> {
    let row = |shard: &rsc_protocol::AssignedShard| (shard.shard_index, shard.fencing_token.unwrap());
    answer.assignment.assigned_shards.iter().map(row).collect()
}

/// Time passes up to `instant` while everybody is heard and nobody finishes a drain.
fn hear_until(bench: &mut Bench, instant: Timestamp, clients: &mut [&mut Client]) {
    while bench.now.plus(3_000) < instant {
        bench.pass(3_000);
        for client in clients.iter_mut() {
            client.beat_draining(bench);
        }
    }
    bench.now = instant;
}

/// Somebody who holds nothing leaves.
fn leave(bench: &mut Bench, client: &mut Client) {
    let request = client.request(bench, true).epoch(-1).owned(&[]);
    assert_eq!(bench.send(request).status, Status::Ok);
    assert_eq!(bench.group().members[&client.id].termination, Some(Termination::Left));
}

#[test]
fn rule_4_2_what_another_holds_is_pending_and_what_is_free_is_assigned() {
    let (mut bench, mut p, mut m) = one_waits();
    let answer = m.beat(&mut bench);
    assert_eq!((assigned(&answer), pending(&answer), awaited(&answer)), (vec![], vec![1], vec![]));
    let answer = p.beat_draining(&mut bench);
    assert_eq!((assigned(&answer), pending(&answer), awaited(&answer)), (vec![0], vec![], vec![1]));
}

#[test]
fn rule_4_2_a_drain_is_told_again_and_again_until_it_is_done() {
    let (mut bench, mut p, mut m) = one_waits();
    for _ in 0..3 {
        let answer = p.beat_draining(&mut bench);
        assert_eq!((answer.status, assigned(&answer), awaited(&answer)), (Status::Ok, vec![0], vec![1]));
        assert_eq!(pending(&m.beat(&mut bench)), [1]);
    }
    let answer = p.beat(&mut bench);
    assert_eq!((assigned(&answer), awaited(&answer)), (vec![0], vec![]));
    assert_eq!(assigned(&m.beat(&mut bench)), [1]);
}

#[test]
fn rule_4_2_granted_counts_as_held_though_nobody_has_reported_to_read() {
    let mut bench = Bench::new(2);
    let mut p = Client::new("p", "p-1");
    let answer = p.beat(&mut bench);
    assert_eq!(assigned(&answer), [0, 1]);
    assert!(bench.group().members["p"].current.is_empty());
    let mut m = Client::new("m", "m-1");
    let answer = m.beat(&mut bench);
    assert_eq!((assigned(&answer), pending(&answer)), (vec![], vec![1]), "an OK has left the building");
}

#[test]
fn protocol_1_granted_grows_with_each_ok_and_an_ok_without_a_shard_does_not_shrink_it() {
    let (mut bench, mut p, mut m) = one_waits();
    // p is told to drain 1, but that answer may be lost: it goes on reading, and it stays a holder.
    p.owned = vec![0, 1];
    for _ in 0..3 {
        let reading = p.request(&mut bench, true).owned(&[0, 1]);
        assert_eq!(assigned(&bench.send(reading)), [0]);
        let granted: Vec<u32> = bench.group().members["p"].granted.keys().copied().collect();
        assert_eq!(granted, [0, 1]);
        assert_eq!(pending(&m.beat(&mut bench)), [1]);
    }
}

#[test]
fn protocol_1_a_shard_that_stays_assigned_keeps_its_stamp_and_its_token() {
    let mut bench = Bench::new(2);
    let mut p = Client::new("p", "p-1");
    let first = p.beat(&mut bench);
    let granted = bench.group().members["p"].granted.clone();
    let stamp = Grant { metadata_version: first.metadata_version, left_out: false };
    assert_eq!(granted.into_iter().collect::<Vec<_>>(), [(0, stamp), (1, stamp)]);
    for _ in 0..3 {
        bench.pass(3_000);
        assert_eq!(tokens(&p.beat(&mut bench)), tokens(&first));
    }
    // Not even when the version moves for others: somebody comes, waits for nothing and goes.
    let mut m = Client::new("m", "m-1");
    m.beat(&mut bench);
    leave(&mut bench, &mut m);
    let answer = p.beat(&mut bench);
    assert!(answer.metadata_version > first.metadata_version);
    assert_eq!(tokens(&answer), tokens(&first), "no answer has left a shard out");
    assert!(bench.group().members["p"].granted.values().all(|grant| *grant == stamp));
}

#[test]
fn protocol_1_an_answer_that_leaves_a_shard_out_is_marked_once_without_moving_the_version() {
    let (mut bench, mut p, _) = one_waits();
    let before = bench.group();
    p.beat_draining(&mut bench);
    let group = bench.group();
    let grants: Vec<_> = group.members["p"].granted.values().map(|grant| grant.left_out).collect();
    assert_eq!(grants, [false, true]);
    assert_eq!(group.metadata_version, before.metadata_version);
    assert_eq!(group.store_revision, before.store_revision + 1, "recorded before it is answered");
}

#[test]
fn protocol_1_a_shard_that_comes_back_to_the_member_that_drains_it_is_granted_anew() {
    for told in [true, false] {
        let (mut bench, mut p, mut m) = one_waits();
        let old = bench.group().members["p"].granted[&1];
        if told {
            p.beat_draining(&mut bench);
        }
        leave(&mut bench, &mut m);
        let before = bench.group();
        bench.pass(7);
        let answer = p.beat_draining(&mut bench);
        assert_eq!(assigned(&answer), [0, 1], "it does not wait for itself: the next OK names it");
        let group = bench.group();
        let (version, new) = (group.metadata_version, group.members["p"].granted[&1]);
        if told {
            assert_eq!(version, before.metadata_version + 1, "the new stamp is a grant");
            assert_ne!(group.metadata_token, before.metadata_token);
            assert_eq!(new, Grant { metadata_version: version, left_out: false });
            assert!(group.fencing_tokens[&1] > before.fencing_tokens[&1]);
        } else {
            assert_eq!((version, new), (before.metadata_version, old), "never told to drain it");
            assert_eq!(group.fencing_tokens, before.fencing_tokens);
        }
        assert_eq!(group.fencing_tokens[&0], before.fencing_tokens[&0]);
        // Once is enough.
        let again = p.beat(&mut bench);
        assert_eq!((tokens(&again), again.metadata_version), (tokens(&answer), answer.metadata_version));
    }
}

#[test]
fn protocol_4_fencing_tokens_are_the_time_in_ms_and_grow_with_each_grant_of_the_shard() {
    let mut bench = Bench::new(2);
    let mut p = Client::new("p", "p-1");
    let now = u64::try_from(bench.now.as_millis()).unwrap();
    assert_eq!(tokens(&p.beat(&mut bench)), [(0, now), (1, now)]);
    // Restarts within one and the same millisecond.
    for restart in 1..4 {
        let join = bench.request("p").instance("p-1", 8_000 + 2 * restart);
        let answer = bench.send(join);
        let held = bench.request("p").epoch(answer.member_epoch).version(answer.metadata_version);
        bench.send(held.owned(&[0, 1]).instance("p-1", 8_001 + 2 * restart));
        let expected = if restart == 1 { now } else { now + restart - 1 };
        assert_eq!(tokens(&answer), [(0, expected), (1, expected)], "restart {restart}");
    }
    bench.pass(50);
    let join = bench.request("p").instance("p-1", 9_000);
    assert_eq!(tokens(&bench.send(join)), [(0, now + 50), (1, now + 50)]);
}

#[test]
fn protocol_4_a_new_owner_gets_a_higher_fencing_token() {
    let (mut bench, mut p, mut m) = one_waits();
    let before = bench.group().fencing_tokens;
    p.beat(&mut bench);
    p.beat(&mut bench);
    let answer = m.beat(&mut bench);
    assert!(tokens(&answer)[0].1 > before[&1]);
    assert_eq!(bench.group().fencing_tokens[&0], before[&0], "kept per shard");
}

#[test]
fn rule_4_2_nothing_but_release_expiry_or_the_end_of_a_hold_frees_a_shard() {
    let (mut bench, p, mut m) = one_waits();
    // p is silent: not answered, not told; m asks and asks.
    let lease_end = bench.group().members["p"].live.member_lease_expires_at;
    while bench.now < lease_end {
        assert_eq!(pending(&m.beat(&mut bench)), [1]);
        bench.pass(500);
    }
    assert_eq!(assigned(&m.beat(&mut bench)), [0, 1]);
    assert_eq!(p.owned, [0, 1]);
}

#[test]
fn rule_4_2_a_leavers_shards_are_not_free_before_it_says_so() {
    let (mut bench, mut p, mut m) = one_waits();
    p.beat_draining(&mut bench);
    let request = p.request(&mut bench, false).epoch(-1);
    bench.send(request);
    assert_eq!(pending(&m.beat(&mut bench)), [0, 1]);
}

#[test]
fn rule_4_2_the_clock_starts_when_holding_exceeds_the_target_and_stops_when_it_does_not() {
    let (mut bench, mut p, mut m) = one_waits();
    let started = bench.now;
    assert_eq!(deadline(&bench, "p"), Some(started.plus(REBALANCE)), "though p was not told yet");
    assert_eq!(deadline(&bench, "m"), None, "a member that only waits");
    bench.pass(5_000);
    p.beat_draining(&mut bench);
    assert_eq!(deadline(&bench, "p"), Some(started.plus(REBALANCE)));
    p.beat(&mut bench);
    assert_eq!(deadline(&bench, "p"), None);
    m.beat(&mut bench);
    settle(&mut bench, &mut [&mut p, &mut m]);
    // A later drain has its own time.
    Client::new("a", "a-1").beat(&mut bench);
    let drains = ["p", "m"].map(|id| deadline(&bench, id));
    assert!(drains.iter().flatten().all(|at| *at == bench.now.plus(REBALANCE)), "{drains:?}");
}

#[test]
fn rule_4_2_a_shard_that_comes_back_stops_the_clock() {
    let (mut bench, mut p, mut m) = one_waits();
    p.beat_draining(&mut bench);
    leave(&mut bench, &mut m);
    assert_eq!(deadline(&bench, "p"), None);
}

#[test]
fn rule_4_2_who_drains_too_long_is_fenced_and_all_it_holds_is_held_until_its_lease_would_end() {
    let (mut bench, mut p, mut m) = one_waits();
    let end = deadline(&bench, "p").unwrap();
    hear_until(&mut bench, end.plus(-1), &mut [&mut p, &mut m]);
    bench.tick();
    assert_eq!(bench.group().members["p"].state, MemberState::Active);
    let lease_end = bench.group().members["p"].live.member_lease_expires_at;
    bench.pass(1);
    bench.tick();
    let group = bench.group();
    assert_eq!(group.members["p"].state, MemberState::Fenced);
    assert_eq!(group.members["p"].termination, Some(Termination::RebalanceTimeout));
    assert_eq!(bench.counts.last().unwrap().rebalance_timeouts, 1);
    let held: Vec<_> = group.holds.iter().map(|hold| (hold.shard_index, hold.cause, hold.until)).collect();
    let cause = HoldCause::RebalanceTimeout;
    assert_eq!(held, [(0, cause, lease_end), (1, cause, lease_end)], "also what it was entitled to");
    assert_eq!(p.beat_draining(&mut bench).status, Status::FencedMemberEpoch);
    assert_eq!(pending(&m.beat(&mut bench)), [0, 1]);
    bench.now = lease_end;
    assert_eq!(assigned(&m.beat(&mut bench)), [0, 1]);
}

#[test]
fn rule_4_2_a_leaver_that_drains_too_long_is_fenced_too() {
    let (mut bench, mut p, mut m) = one_waits();
    let end = bench.now.plus(REBALANCE);
    while bench.now < end {
        let request = p.request(&mut bench, false).epoch(-1).owned(&[]);
        let request = request.draining(&[0, 1]);
        assert_eq!(bench.send(request).status, Status::Ok);
        m.beat(&mut bench);
        bench.pass(3_000);
    }
    bench.tick();
    assert_eq!(bench.group().members["p"].termination, Some(Termination::RebalanceTimeout));
    assert_eq!(bench.group().holds.len(), 2);
}

#[test]
fn rule_4_2_a_member_that_only_waits_is_never_hit_by_the_rebalance_timeout() {
    let (mut bench, mut p, mut m) = one_waits();
    // p is fenced, comes back, drains slowly again: m goes on waiting the whole time.
    let end = bench.now.plus(REBALANCE);
    hear_until(&mut bench, end.plus(-1), &mut [&mut p, &mut m]);
    assert_eq!(bench.group().members["m"].state, MemberState::Active);
    assert!(m.owned.is_empty());
    bench.now = end;
    m.beat(&mut bench);
    assert_eq!(bench.group().members["m"].state, MemberState::Active);
}

#[test]
fn rule_4_2_the_rebalance_timeout_is_never_shorter_than_the_lease() {
    let settings = Settings { rebalance_timeout_ms: 1_000, ..Settings::default() };
    let mut bench = Bench::with_settings(2, settings);
    let (mut p, mut m) = (Client::new("p", "p-1"), Client::new("m", "m-1"));
    settle(&mut bench, &mut [&mut p]);
    m.beat(&mut bench);
    let answer = p.beat_draining(&mut bench);
    assert_eq!(answer.rebalance_timeout_ms, 15_000);
    assert_eq!(deadline(&bench, "p"), Some(bench.now.plus(LEASE)));
}

#[test]
fn rule_4_2_members_keep_the_rebalance_timeout_they_were_told() {
    let (mut bench, mut p, mut m) = one_waits();
    settle(&mut bench, &mut [&mut p, &mut m]);
    bench.settings.rebalance_timeout_ms = 20_000;
    let mut c = Client::new("a", "a-1");
    assert_eq!(c.beat(&mut bench).rebalance_timeout_ms, 20_000);
    assert_eq!(p.beat(&mut bench).rebalance_timeout_ms, 60_000);
}

#[test]
fn protocol_3_the_state_of_the_group_follows_the_handover() {
    let mut bench = Bench::new(2);
    assert_eq!(bench.group().state, GroupState::Empty);
    let (mut p, mut m) = (Client::new("p", "p-1"), Client::new("m", "m-1"));
    p.beat(&mut bench);
    assert_eq!(bench.group().state, GroupState::Reconciling, "granted, not yet reported");
    p.beat(&mut bench);
    assert_eq!(bench.group().state, GroupState::Stable);
    m.beat(&mut bench);
    assert_eq!(bench.group().state, GroupState::Reconciling);
    p.beat_draining(&mut bench);
    p.beat(&mut bench);
    assert_eq!(bench.group().state, GroupState::Reconciling, "released, not yet granted");
    m.beat(&mut bench);
    assert_eq!(bench.group().state, GroupState::Reconciling, "granted, not yet reported");
    m.beat(&mut bench);
    assert_eq!(bench.group().state, GroupState::Stable);
    // A standby does not disturb.
    let mut standby = Client::new("z", "z-1");
    standby.beat(&mut bench);
    assert_eq!(bench.group().state, GroupState::Stable);
    bench.pass(LEASE);
    bench.tick();
    assert_eq!(bench.group().state, GroupState::Empty);
    assert_eq!(bench.group().response().state, GroupState::Empty);
}
