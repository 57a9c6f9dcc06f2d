//! What a member may claim and what accepting its report does (protocol 4.1 rules 9 and 10).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use rsc_core::HoldCause;
use rsc_core::member::{Revoking, Termination};
use rsc_core::write::WriteKind;
use rsc_protocol::admin::MemberState;
use rsc_protocol::{HeartbeatRequest, HeartbeatResponse, RevokingState, ShardProgress, ShardRef, Status};
use support::*;

/// p with 0 and 1, m with 2 and 3.
fn two_settled() -> (Bench, Client, Client) {
    let mut bench = Bench::new(4);
    let (mut p, mut m) = (Client::new("p", "p-1"), Client::new("m", "m-1"));
    settle(&mut bench, &mut [&mut p]);
    settle(&mut bench, &mut [&mut m, &mut p]);
    assert_eq!((p.owned.as_slice(), m.owned.as_slice()), ([0, 1].as_slice(), [2, 3].as_slice()));
    bench.pass(1_000);
    (bench, p, m)
}

fn violations(bench: &Bench) -> u64 {
    bench.counts.last().unwrap().ownership_violations
}

fn expect_fenced(bench: &mut Bench, request: HeartbeatRequest, on_hold: &[u32]) -> HeartbeatResponse {
    let before = bench.group();
    let lease_end = before.members["p"].live.member_lease_expires_at;
    let answer = bench.send(request);
    let group = bench.group();
    let member = &group.members["p"];
    assert_eq!((answer.status, violations(bench)), (Status::FencedMemberEpoch, 1));
    assert_eq!(member.state, MemberState::Fenced);
    assert_eq!(member.termination, Some(Termination::OwnershipViolation));
    assert_eq!(member.terminated_at, Some(bench.now));
    assert!(member.holds_nothing());
    assert!(member.live.member_epoch > before.group_epoch, "a new epoch");
    assert_eq!(group.group_epoch, member.live.member_epoch);
    let held: Vec<_> = group.holds.iter().map(|hold| (hold.shard_index, hold.cause, hold.until)).collect();
    let expected: Vec<_> =
        on_hold.iter().map(|shard| (*shard, HoldCause::OwnershipViolation, lease_end)).collect();
    assert_eq!(held, expected);
    answer
}

#[test]
fn rule_4_1_9_a_claim_of_what_another_holds_fences_and_holds_everything_held_and_claimed() {
    let (mut bench, mut p, mut m) = two_settled();
    // Shard 1 is not even mentioned: it may still be read.
    let claim = p.request(&mut bench, true).owned(&[0, 3]);
    let answer = expect_fenced(&mut bench, claim, &[0, 1, 3]);
    assert!(answer.reason.contains('3'), "which shard: {}", answer.reason);
    let answer = m.beat(&mut bench);
    assert_eq!((assigned(&answer), pending(&answer)), (vec![2, 3], vec![0, 1]), "m keeps what it holds");
}

#[test]
fn rule_4_1_9_an_unfinished_drain_is_a_claim_a_finished_one_is_not() {
    for state in [RevokingState::Revoking, RevokingState::Draining, RevokingState::Revoked] {
        let (mut bench, mut p, _) = two_settled();
        let mut claim = p.request(&mut bench, true);
        claim.revoking_shards.push(revoking(3, state, 1));
        expect_fenced(&mut bench, claim, &[0, 1, 3]);
    }
    let (mut bench, mut p, m) = two_settled();
    let ignored = p.request(&mut bench, true).revoked(&[3, 77]);
    assert_eq!(bench.send(ignored).status, Status::Ok);
    assert_eq!(bench.group().holders()[&3], m.id, "released nothing of anybody else's");
}

#[test]
fn rule_4_1_9_a_revoked_for_a_shard_already_released_is_ignored() {
    let (mut bench, mut p, mut m) = two_settled();
    let mut c = Client::new("c", "c-1");
    settle(&mut bench, &mut [&mut c, &mut p, &mut m]);
    let given = [0, 1].into_iter().find(|shard| !p.owned.contains(shard));
    let given = given.or([2, 3].into_iter().find(|shard| !m.owned.contains(shard))).unwrap();
    let giver = if given < 2 { &mut p } else { &mut m };
    let before = bench.group();
    let again = giver.request(&mut bench, true).revoked(&[given]);
    assert_eq!(bench.send(again).status, Status::Ok);
    assert_eq!(bench.counts.last().unwrap().releases, 0);
    assert_eq!(bench.group().metadata_version, before.metadata_version);
    assert_eq!(bench.group().holders()[&given], "c");
}

#[test]
fn rule_4_1_9_a_claim_outside_the_read_set_fences_but_there_is_nothing_to_hold() {
    let (mut bench, mut p, _) = two_settled();
    let claim = p.request(&mut bench, true).owned(&[0, 1, 4]);
    expect_fenced(&mut bench, claim, &[0, 1]);
}

#[test]
fn rule_4_1_9_a_claim_of_a_shard_that_is_its_target_but_held_elsewhere_fences() {
    let mut bench = Bench::new(2);
    let (mut m, mut p) = (Client::new("m", "m-1"), Client::new("p", "p-1"));
    settle(&mut bench, &mut [&mut m]);
    let waiting = p.beat(&mut bench);
    assert_eq!(pending(&waiting), [1]);
    let claim = p.request(&mut bench, true).owned(&[1]);
    expect_fenced(&mut bench, claim, &[1]);
}

#[test]
fn rule_4_1_9_what_could_be_granted_now_may_be_claimed() {
    let mut bench = Bench::new(2);
    let (mut m, mut p) = (Client::new("m", "m-1"), Client::new("p", "p-1"));
    settle(&mut bench, &mut [&mut m]);
    p.beat(&mut bench);
    m.beat(&mut bench);
    m.beat(&mut bench);
    assert!(!bench.group().holders().contains_key(&1), "free, and p's target");
    let claim = p.request(&mut bench, true).owned(&[1]);
    let answer = bench.send(claim);
    assert_eq!((answer.status, assigned(&answer)), (Status::Ok, vec![1]));
    assert_eq!(violations(&bench), 0);
}

#[test]
fn rule_4_1_9_what_a_fenced_member_had_sent_before_its_claim_comes_too_late() {
    let (mut bench, mut p, _) = two_settled();
    let join = p.request(&mut bench, true).epoch(0).owned(&[]);
    let claim = p.request(&mut bench, true).owned(&[0, 3]);
    expect_fenced(&mut bench, claim, &[0, 1, 3]);
    let answer = bench.send(join);
    assert_eq!((answer.status, bench.last_write()), (Status::Retry, None), "an older join is no rejoin");
    assert_eq!(bench.group().holds.len(), 3);
}

#[test]
fn rule_4_1_9_what_is_free_but_another_members_target_may_not_be_claimed() {
    let mut bench = Bench::new(2);
    let (mut m, mut p) = (Client::new("m", "m-1"), Client::new("p", "p-1"));
    settle(&mut bench, &mut [&mut p]);
    m.beat(&mut bench);
    p.beat(&mut bench);
    let release = p.request(&mut bench, true);
    assert_eq!(release.owned_shards, [ShardRef { shard_index: 0 }]);
    bench.send(release);
    assert!(!bench.group().holders().contains_key(&1), "free, and m's target");
    let claim = p.request(&mut bench, true).owned(&[0, 1]);
    expect_fenced(&mut bench, claim, &[0, 1]);
    let answer = m.beat(&mut bench);
    assert_eq!((assigned(&answer), pending(&answer)), (vec![], vec![0, 1]));
}

#[test]
fn rule_4_1_9_what_is_on_hold_may_not_be_claimed() {
    let (mut bench, _, _) = two_settled();
    let mut second = Client::new("p", "p-2");
    second.beat(&mut bench);
    assert_eq!(bench.group().holds.len(), 2);
    let claim = second.request(&mut bench, true).owned(&[0]);
    let answer = bench.send(claim);
    assert_eq!((answer.status, violations(&bench)), (Status::FencedMemberEpoch, 1));
}

#[test]
fn rule_4_1_9_granted_and_draining_shards_may_be_claimed_though_the_target_has_moved() {
    let mut bench = Bench::new(2);
    let mut p = Client::new("p", "p-1");
    let answer = p.beat(&mut bench);
    Client::new("m", "m-1").beat(&mut bench);
    let granted_only = bench.request("p").epoch(answer.member_epoch).version(answer.metadata_version);
    assert_eq!(bench.send(granted_only.owned(&[0, 1]).instance("p-1", 8_000)).status, Status::Ok);
    let draining = bench.request("p").epoch(answer.member_epoch).version(answer.metadata_version);
    let draining = draining.owned(&[0]).draining(&[1]).instance("p-1", 8_001);
    assert_eq!(bench.send(draining.clone()).status, Status::Ok);
    // And again, now that it is in revoking.
    assert_eq!(bench.send(draining.instance("p-1", 8_002)).status, Status::Ok);
    assert_eq!(violations(&bench), 0);
}

fn progress(shard: u32) -> ShardProgress {
    ShardProgress {
        shard: ShardRef { shard_index: shard },
        stream_key: format!("orders:{shard}"),
        last_delivered_id: None,
        last_acked_id: None,
        pending_count: 5,
        updated_at: None,
    }
}

#[test]
fn rule_4_1_9_progress_rows_of_other_shards_are_dropped_and_counted_not_punished() {
    let (mut bench, mut p, _) = two_settled();
    let mut request = p.request(&mut bench, true);
    request.shard_progress = vec![progress(0), progress(3), progress(1), progress(99)];
    assert_eq!(bench.send(request).status, Status::Ok);
    assert_eq!(bench.counts.last().unwrap().progress_rows_dropped, 2);
    assert_eq!(bench.group().members["p"].live.shard_progress, [progress(0), progress(1)]);
    assert!(bench.is_lease_only(), "progress travels in the live field");
}

#[test]
fn rule_4_1_10_current_is_what_is_owned_and_revoking_what_is_drained_unfinished() {
    let (mut bench, mut p, _) = two_settled();
    let mut request = p.request(&mut bench, true).owned(&[0]);
    request.revoking_shards.push(revoking(1, RevokingState::Draining, 3));
    bench.send(request);
    let member = &bench.group().members["p"];
    assert_eq!(member.current.iter().collect::<Vec<_>>(), [0]);
    let draining = Revoking { state: RevokingState::Draining, in_flight: 3 };
    assert_eq!(member.revoking.iter().collect::<Vec<_>>(), [(&1, &draining)]);
    // REVOKED with something in flight is unfinished.
    let mut request = p.request(&mut bench, true).owned(&[0]);
    request.revoking_shards.push(revoking(1, RevokingState::Revoked, 3));
    bench.send(request);
    assert_eq!(bench.group().members["p"].revoking[&1].state, RevokingState::Revoked);
    assert!(bench.group().members["p"].holds(1));
}

#[test]
fn rule_4_1_10_a_shard_in_neither_is_released_by_word_or_by_silence() {
    for silent in [true, false] {
        let mut bench = Bench::new(2);
        let (mut p, mut m) = (Client::new("p", "p-1"), Client::new("m", "m-1"));
        settle(&mut bench, &mut [&mut p]);
        m.beat(&mut bench);
        p.beat_draining(&mut bench);
        let before = bench.group();
        let mut release = p.request(&mut bench, true);
        if silent {
            release.revoking_shards.clear();
        }
        bench.send(release);
        let group = bench.group();
        assert_eq!(group.members["p"].holding().iter().collect::<Vec<_>>(), [0]);
        assert_eq!(bench.counts.last().unwrap().releases, 1);
        assert_eq!(group.metadata_version, before.metadata_version + 1, "a release is observable");
        assert_ne!(group.metadata_token, before.metadata_token);
        assert_eq!(group.group_epoch, before.group_epoch);
        assert_eq!(assigned(&m.beat(&mut bench)), [1]);
    }
}

#[test]
fn rule_4_1_10_a_grant_newer_than_the_report_is_kept() {
    let mut bench = Bench::new(2);
    let join = bench.request("p").instance("p-1", 1);
    let granted = bench.send(join);
    let report = |bench: &mut Bench, sequence, version| {
        let request = bench.request("p").epoch(granted.member_epoch).version(version);
        bench.send(request.instance("p-1", sequence))
    };
    // It has not seen the answer that granted: it cannot have given anything back.
    let answer = report(&mut bench, 2, granted.metadata_version - 1);
    assert_eq!(assigned(&answer), [0, 1]);
    assert_eq!(bench.counts.last().unwrap().releases, 0);
    // It has seen it and does not own them: released, and granted anew.
    let tokens = bench.group().fencing_tokens;
    report(&mut bench, 3, granted.metadata_version);
    assert_eq!(bench.counts.last().unwrap().releases, 2);
    assert!(bench.group().fencing_tokens[&0] > tokens[&0]);
}

#[test]
fn rule_4_1_10_an_accepted_report_renews_the_lease_and_records_what_it_says() {
    let (mut bench, mut p, _) = two_settled();
    let mut request = p.request(&mut bench, true);
    request.runtime_consumer_capacity.runtime_max_concurrency = 9;
    request.runtime_consumer_capacity.available_concurrency = 2;
    let answer = bench.send(request.clone());
    let live = &bench.group().members["p"].live;
    assert_eq!(live.last_heartbeat_at, bench.now);
    assert_eq!(live.member_lease_expires_at, bench.now.plus(LEASE));
    assert_eq!((answer.assignment_lease_ms, live.member_lease_ttl_ms), (13_500, 15_000));
    assert_eq!((live.runtime_max_concurrency, live.active_consumer_workers), (9, 7));
    assert_eq!((live.sequence, live.metadata_version), (request.sequence, request.metadata_version));
}

#[test]
fn rule_4_1_a_steady_heartbeat_writes_leases_only_and_moves_nothing_else() {
    let (mut bench, mut p, mut m) = two_settled();
    let before = bench.group();
    let aggregate = bench.fields["aggregate"].clone();
    for _ in 0..20 {
        bench.pass(3_000);
        for client in [&mut p, &mut m] {
            let answer = client.beat(&mut bench);
            assert_eq!((answer.status, answer.metadata_version), (Status::Ok, before.metadata_version));
            let write = bench.last_write().unwrap();
            assert_eq!(write.kind, WriteKind::LeaseOnly);
            assert_eq!(write.live.iter().map(|(id, _)| id).collect::<Vec<_>>(), [&client.id]);
            assert_eq!((&write.history, write.updated_at), (&None, bench.now));
            assert!(write.removed_live.is_empty());
        }
    }
    let mut after = bench.group();
    assert_eq!(bench.fields["aggregate"], aggregate);
    assert_eq!(after.store_revision, before.store_revision);
    // Nothing but the live fields and the hash's time has moved.
    after.updated_at = before.updated_at;
    for (id, member) in &mut after.members {
        assert_eq!(member.live.last_heartbeat_at, bench.now);
        member.live = before.members[id].live.clone();
    }
    assert_eq!(after, before);
}

#[test]
fn rule_4_1_the_same_heartbeat_sent_twice_gets_an_equivalent_answer() {
    let mut bench = Bench::new(4);
    let (mut p, mut m) = (Client::old("p"), Client::old("m"));
    settle(&mut bench, &mut [&mut p]);
    m.beat(&mut bench);
    // p is told to drain two, reports one of them done; that message comes twice.
    p.beat_draining(&mut bench);
    let mut report = p.request(&mut bench, false).owned(&[0, 1]);
    report.revoking_shards =
        vec![revoking(2, RevokingState::Revoked, 0), revoking(3, RevokingState::Draining, 1)];
    let first = bench.send(report.clone());
    assert_eq!((assigned(&first), awaited(&first)), (vec![0, 1], vec![3]));
    assert_eq!(bench.send(report), first);
}
