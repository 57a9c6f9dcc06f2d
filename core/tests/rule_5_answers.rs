//! What members are answered in a round (protocol 5, *Answers*).

mod support;

use rsc_core::{Group, Settings};
use rsc_protocol::admin::{GroupState, MemberState};
use rsc_protocol::{HeartbeatResponse, Status};
use support::rounds::*;
use support::*;

fn grants(bench: &Bench) -> u64 {
    bench.counts.iter().map(|counts| counts.grants).sum()
}

/// Status, assigned, pending, awaited.
fn view(answer: &HeartbeatResponse) -> (Status, Vec<u32>, Vec<u32>, Vec<u32>) {
    (answer.status, assigned(answer), pending(answer), awaited(answer))
}

fn holding(group: &Group, id: &str) -> Vec<u32> {
    group.members[id].holding().iter().collect()
}

#[test]
fn rule_5_sync_metadata_carries_redis_truth_and_renews_the_lease() {
    let (mut bench, mut p, _) = lost_leave();
    bench.pass(2_000);
    let group = bench.group();
    let answer = p.beat_in_vain(&mut bench);
    assert_eq!(view(&answer), (Status::SyncMetadata, vec![0, 1], vec![], vec![]));
    assert_eq!(
        (answer.metadata_version, &answer.metadata_token),
        (group.metadata_version, &group.metadata_token)
    );
    assert_eq!(answer.assignment.metadata_version, group.metadata_version);
    assert_eq!(answer.member_epoch, i64::try_from(group.members["p"].live.member_epoch).unwrap());
    assert_eq!((answer.group_epoch, answer.assignment_epoch), (group.group_epoch, group.assignment_epoch));
    assert_eq!(answer.assignment_lease_ms, 13_500);
    assert!(!answer.reason.is_empty());
    assert_eq!(lease_end(&bench, "p"), bench.now.plus(LEASE));
    let tokens: Vec<_> = answer.assignment.assigned_shards.iter().map(|s| s.fencing_token).collect();
    assert_eq!(tokens, [0, 1].map(|shard| group.fencing_tokens.get(&shard).copied()));
}

#[test]
fn rule_5_sync_metadata_is_cut_to_what_the_report_owns_and_the_rest_is_pending() {
    let (mut bench, mut p, _) = round_by_actor();
    bench.counts.clear();
    // The client has stopped reading 1 by itself; in a round nothing is started, also not again.
    p.owned = vec![0];
    p.version -= 1;
    let answer = p.beat_in_vain(&mut bench);
    assert_eq!(view(&answer), (Status::SyncMetadata, vec![0], vec![1], vec![]));
    p.owned = vec![];
    let answer = p.beat_in_vain(&mut bench);
    assert_eq!(view(&answer), (Status::SyncMetadata, vec![], vec![0, 1], vec![]));
    assert_eq!(holding(&bench.group(), "p"), [0, 1], "what is not synchronised releases nothing");
    assert_eq!(bench.counts.iter().map(|counts| counts.releases).sum::<u64>(), 0);
}

#[test]
fn rule_5_a_shard_being_drained_is_not_among_the_assigned_ones() {
    let (mut bench, mut p, _) = round_by_actor();
    p.owned = vec![0];
    p.draining = vec![1];
    p.version -= 1;
    let answer = p.beat_draining(&mut bench);
    assert_eq!(view(&answer), (Status::SyncMetadata, vec![0], vec![1], vec![]));
    let answer = p.beat_draining(&mut bench);
    assert_eq!(view(&answer), (Status::RevokePending, vec![0], vec![1], vec![]));
    assert_eq!(holding(&bench.group(), "p"), [0, 1]);
}

#[test]
fn rule_5_the_same_question_gets_the_same_answer_again_and_again() {
    let (mut bench, mut p, _) = lost_leave();
    let mut first = p.beat_in_vain(&mut bench);
    for _ in 0..3 {
        bench.pass(1_000);
        let mut again = p.beat_in_vain(&mut bench);
        assert_eq!(lease_end(&bench, "p"), bench.now.plus(LEASE));
        again.response_to.clear();
        first.response_to.clear();
        assert_eq!(again, first);
    }
    // The very same message, too.
    let request = p.request(&mut bench, true);
    let answer = bench.send(request.clone());
    assert_eq!(bench.send(request), answer);
}

#[test]
fn rule_5_a_client_that_repeats_the_higher_version_for_ever_is_told_so_until_it_is_fenced() {
    let (mut bench, mut p, mut m) = lost_leave();
    let begun = bench.now;
    while bench.now < begun.plus(REBALANCE) {
        assert_eq!(p.beat_in_vain(&mut bench).status, Status::SyncMetadata);
        m.beat(&mut bench);
        bench.pass(3_000);
    }
    assert_eq!(p.beat_in_vain(&mut bench).status, Status::FencedMemberEpoch);
}

#[test]
fn rule_5_a_claimed_shard_that_is_the_members_target_and_nobodys_is_taken_into_current() {
    let (mut bench, mut p) = lost_grant();
    let granted = grants(&bench);
    let answer = p.beat(&mut bench);
    assert_eq!(view(&answer), (Status::SyncMetadata, vec![0, 1, 2, 3], vec![], vec![]));
    let group = bench.group();
    assert_eq!(group.members["p"].current, [0, 1, 2, 3].into());
    assert_eq!(group.holds, [], "no hold against itself");
    let stamp = group.metadata_version;
    let taken = [2, 3].map(|shard| group.members["p"].granted[&shard].metadata_version);
    assert_eq!((taken, answer.metadata_version), ([stamp; 2], stamp), "stamped, as a grant would be");
    assert_eq!(grants(&bench), granted + 2);
    assert_eq!(view(&p.beat(&mut bench)), (Status::RevokePending, vec![0, 1, 2, 3], vec![], vec![]));
    live_for(&mut bench, LEASE, &mut [&mut p]);
    assert_eq!(p.beat(&mut bench).status, Status::Ok);
    assert_eq!(bench.group().state, GroupState::Stable);
}

#[test]
fn rule_5_nobody_elses_shard_is_taken() {
    let (mut bench, mut p, mut m) = lost_leave();
    assert_eq!(assigned(&p.beat(&mut bench)), [0, 1]);
    let group = bench.group();
    assert_eq!(holding(&group, "p"), [0, 1]);
    assert_eq!(holding(&group, "m"), [2, 3]);
    assert_eq!([2, 3].map(|shard| lost_future_holds(&bench, shard).len()), [1, 1]);
    // A hold never takes a shard from its holder.
    let answer = m.beat(&mut bench);
    assert_eq!(view(&answer), (Status::RevokePending, vec![2, 3], vec![], vec![]));
}

#[test]
fn rule_5_a_target_shard_on_hold_for_another_party_is_not_taken() {
    let (mut bench, mut p) = lost_grant();
    let ahead = p.version;
    let stranger = bench.request("s").epoch(4).version(ahead).owned(&[3]);
    bench.send(stranger);
    let answer = p.beat(&mut bench);
    assert_eq!(view(&answer), (Status::SyncMetadata, vec![0, 1, 2], vec![3], vec![]));
    assert_eq!(holding(&bench.group(), "p"), [0, 1, 2]);
    let parties: Vec<String> = lost_future_holds(&bench, 3).into_iter().map(|hold| hold.member_id).collect();
    assert_eq!(parties, ["s", "p"]);
}

#[test]
fn rule_5_two_members_that_claim_the_same_lost_shard() {
    for owner_first in [true, false] {
        // Shard 3 is nobody's; it becomes the target of m, who joins in the round. Both claim it.
        let (mut bench, mut p) = lost_grant();
        notice(&mut bench);
        let mut owner = Client::full("m", "m-2");
        owner.beat(&mut bench);
        let free = 3;
        assert!(bench.group().target("m").contains(free));
        owner.owned = vec![free];
        owner.version = p.version + 10;
        p.owned = vec![0, 1, free];
        p.version += 10;
        let (first, second) = if owner_first { (&mut owner, &mut p) } else { (&mut p, &mut owner) };
        let kept = [first, second].map(|client| assigned(&client.beat(&mut bench)).contains(&free));
        assert_eq!(kept, [owner_first, false], "held against p first, it is nobody's to take");
        assert!(bench.group().is_on_hold(free, bench.now));
    }
}

#[test]
fn rule_5_the_first_to_claim_its_target_keeps_it_and_the_other_drains() {
    let (mut bench, mut p) = lost_grant();
    // An incarnation of m comes back that reads 3 as well: it had been given it after p's loss.
    p.beat(&mut bench);
    let zombie = bench.request("m").epoch(9).version(p.version + 5).owned(&[3]).instance("m-9", 1);
    assert_eq!(bench.send(zombie).status, Status::FencedMemberEpoch);
    assert_eq!(lost_future_holds(&bench, 3).len(), 1);
    assert!(assigned(&p.beat(&mut bench)).contains(&3), "a hold never takes a shard from a holder");
}

#[test]
fn rule_5_revoke_pending_until_the_round_is_over_then_ok() {
    let (mut bench, mut p, mut m) = lost_leave();
    let end = bench.now.plus(LEASE);
    p.beat(&mut bench);
    // p has drained what Redis does not give it; m is alive after all.
    while bench.now < end {
        let answer = p.beat(&mut bench);
        assert_eq!(view(&answer), (Status::RevokePending, vec![0, 1], vec![], vec![]));
        assert_eq!((answer.assignment_lease_ms, answer.reason.is_empty()), (13_500, false));
        assert_eq!(m.beat(&mut bench).status, Status::RevokePending);
        bench.pass(1_000);
    }
    assert_eq!(view(&p.beat(&mut bench)), (Status::Ok, vec![0, 1], vec![], vec![]));
    assert_eq!(view(&m.beat(&mut bench)), (Status::Ok, vec![2, 3], vec![], vec![]));
}

#[test]
fn rule_5_nothing_new_is_granted_while_young_nor_to_anybody_until_it_is_over() {
    let (mut bench, mut p) = lost_grant();
    p.owned = vec![0, 1];
    let granted = grants(&bench);
    let end = bench.now.plus(LEASE);
    let mut q = Client::full("q", "q-1");
    // A hold of the round keeps it open beyond its first lease.
    p.beat(&mut bench);
    live_until(&mut bench, end.plus(-1_000), &mut [&mut p, &mut q]);
    let ahead = p.version + 9;
    let beginner = bench.request("s").epoch(4).version(ahead);
    bench.send(beginner.clone());
    let end = bench.now.plus(LEASE);
    live_until(&mut bench, end.plus(-1_000), &mut [&mut p, &mut q]);
    bench.send(beginner.owned(&[3]));
    let over = lost_future_holds(&bench, 3)[0].until;
    assert!(over > end);
    while bench.now < over {
        let answer = p.beat(&mut bench);
        assert_eq!((answer.status, assigned(&answer)), (Status::RevokePending, vec![0, 1]));
        let answer = q.beat(&mut bench);
        assert_eq!((answer.status, assigned(&answer)), (Status::RevokePending, vec![]));
        bench.pass(500);
    }
    assert_eq!(grants(&bench), granted);
    settle(&mut bench, &mut [&mut p, &mut q]);
    assert_eq!((p.owned.len(), q.owned.len()), (2, 2));
}

#[test]
fn rule_5_absence_in_a_synchronised_report_is_a_release() {
    let (mut bench, mut p, mut m) = round_by_actor();
    let version = bench.group().metadata_version;
    p.owned = vec![0];
    let answer = p.beat(&mut bench);
    assert_eq!(view(&answer), (Status::RevokePending, vec![0], vec![1], vec![]));
    assert_eq!(holding(&bench.group(), "p"), [0]);
    assert_eq!(bench.group().metadata_version, version + 1, "a release");
    live_for(&mut bench, LEASE, &mut [&mut p, &mut m]);
    assert_eq!(assigned(&p.beat(&mut bench)), [0, 1], "granted again");
}

#[test]
fn rule_5_absence_releases_a_grant_that_the_member_never_heard_of() {
    // The OK that granted 2 and 3 was recorded but lost on its way; then the actor notices a loss.
    let (mut bench, mut p, m) = two_of_four();
    let leave =
        bench.request("m").epoch(-1).version(m.version).revoked(&m.owned).instance("m-1", m.sequence + 1);
    bench.send(leave);
    assert_eq!(assigned(&p.beat_in_vain(&mut bench)), [0, 1, 2, 3]);
    notice(&mut bench);
    assert_eq!(view(&p.beat(&mut bench)), (Status::SyncMetadata, vec![0, 1], vec![2, 3], vec![]));
    assert_eq!(holding(&bench.group(), "p"), [0, 1, 2, 3]);
    assert_eq!(view(&p.beat(&mut bench)), (Status::RevokePending, vec![0, 1], vec![2, 3], vec![]));
    assert_eq!(holding(&bench.group(), "p"), [0, 1]);
    live_for(&mut bench, LEASE, &mut [&mut p]);
    assert_eq!(assigned(&p.beat(&mut bench)), [0, 1, 2, 3]);
}

#[test]
fn rule_5_a_stale_revoked_of_what_redis_never_gave_releases_nothing() {
    let (mut bench, mut p, mut m) = lost_leave();
    p.beat(&mut bench);
    let before = bench.group();
    // p reports REVOKED for 2 and 3, which are m's.
    let answer = p.beat(&mut bench);
    assert_eq!(answer.status, Status::RevokePending);
    let group = bench.group();
    assert_eq!(holding(&group, "m"), [2, 3]);
    assert_eq!(group.members["m"], before.members["m"]);
    assert_eq!(group.metadata_version, before.metadata_version);
    assert_eq!(group.holds, [], "but its own holds");
    assert_eq!(m.beat(&mut bench).status, Status::RevokePending);
}

#[test]
fn rule_5_an_unsynchronised_revoked_of_what_redis_gave_releases_nothing() {
    let (mut bench, mut p, _) = round_by_actor();
    p.owned = vec![0];
    p.draining = vec![1];
    p.version -= 1;
    let request = p.clone().request(&mut bench, true);
    assert_eq!(bench.send(request).status, Status::SyncMetadata);
    assert_eq!(holding(&bench.group(), "p"), [0, 1]);
}

#[test]
fn rule_5_a_drain_goes_on_in_a_round_and_is_released() {
    let (mut bench, mut p, mut m) = round_by_actor();
    p.beat(&mut bench);
    m.beat(&mut bench);
    let mut q = Client::full("q", "q-1");
    assert_eq!(view(&q.beat(&mut bench)).0, Status::Ok);
    let moved: Vec<u32> = bench.group().target("q").iter().collect();
    let answer = p.beat_draining(&mut bench);
    assert_eq!(view(&answer), (Status::RevokePending, vec![0], vec![], moved.clone()));
    p.beat(&mut bench);
    assert_eq!(holding(&bench.group(), "p"), [0]);
    assert_eq!(view(&q.beat(&mut bench)), (Status::RevokePending, vec![], moved.clone(), vec![]));
    live_for(&mut bench, LEASE, &mut [&mut p, &mut m, &mut q]);
    q.beat(&mut bench);
    assert_eq!(q.owned, moved);
}

#[test]
fn rule_5_the_epoch_is_confirmed_and_handed_out_in_a_round_too() {
    let (mut bench, mut p, _) = round_by_actor();
    let before = p.epoch;
    Client::full("q", "q-1").beat(&mut bench);
    assert_eq!(p.beat_draining(&mut bench).status, Status::SyncMetadata, "the version moved before p spoke");
    assert!(p.epoch > before);
    p.beat_draining(&mut bench);
    assert_eq!(bench.group().members["p"].live.confirmed_member_epoch, u64::try_from(p.epoch).unwrap());
    let mut stale = p.request(&mut bench, true).epoch(before);
    stale.sequence = Some(p.sequence);
    assert_eq!(bench.send(stale).status, Status::FencedMemberEpoch, "rule 8 as always");
}

#[test]
fn rule_5_a_higher_epoch_at_the_record_s_version_is_told_the_record_s() {
    let (mut bench, mut p, _) = round_by_actor();
    p.beat(&mut bench);
    assert!(has_synchronised(&bench, "p"));
    let epoch = p.epoch;
    let request = p.request(&mut bench, true).epoch(epoch + 3);
    let answer = bench.send(request);
    assert_eq!((answer.status, answer.member_epoch), (Status::SyncMetadata, epoch));
    assert_eq!(rounds_begun(&bench), 2, "and a further loss");
}

#[test]
fn rule_5_a_starter_that_speaks_from_a_lost_future_after_its_join_is_not_believed() {
    let (mut bench, mut p, _) = two_of_four();
    let request = p.request(&mut bench, true).version(p.version + 1);
    bench.send(request);
    let rejoin = p.request(&mut bench, true).epoch(0).owned(&[]).version(p.version + 1);
    p.apply(&bench.send(rejoin));
    // What it claims from there is not its word in this history: no fence, no release, a hold.
    let epoch = p.epoch;
    let request = p.request(&mut bench, true).version(p.version + 7).epoch(epoch + 2).owned(&[2]);
    let answer = bench.send(request);
    assert_eq!((answer.status, assigned(&answer)), (Status::SyncMetadata, vec![]));
    assert_eq!(lost_future_holds(&bench, 2).len(), 1);
    assert!(bench.group().members["p"].is_live());
    assert_eq!(rounds_begun(&bench), 1);
}

#[test]
fn rule_5_joins_in_a_round_are_ok_with_nothing_assigned() {
    let (mut bench, mut p, _) = round_by_actor();
    let mut q = Client::full("q", "q-1");
    let answer = q.beat(&mut bench);
    assert_eq!((answer.status, assigned(&answer), pending(&answer).len()), (Status::Ok, vec![], 1));
    // A rejoin, a restart.
    p.epoch = 0;
    p.owned.clear();
    assert_eq!((p.beat(&mut bench).status, p.owned.len()), (Status::Ok, 0));
    let mut m = Client::full("m", "m-2");
    assert_eq!((m.beat(&mut bench).status, m.owned.len()), (Status::Ok, 0));
    for client in [&mut p, &mut m, &mut q] {
        assert_eq!(client.beat(&mut bench).status, Status::RevokePending);
    }
    live_for(&mut bench, 2 * LEASE, &mut [&mut p, &mut m, &mut q]);
    assert_eq!(p.owned.len() + m.owned.len() + q.owned.len(), 4);
}

#[test]
fn rule_5_a_repeated_join_is_ok_with_nothing_assigned_and_granted_does_not_shrink() {
    for old in [false, true] {
        let mut bench = Bench::new(4);
        let mut p = if old { Client::old("p") } else { Client::full("p", "p-1") };
        let join = p.request(&mut bench, true);
        assert_eq!(assigned(&bench.send(join.clone())), [0, 1, 2, 3]);
        notice(&mut bench);
        let answer = bench.send(join);
        assert_eq!(view(&answer), (Status::Ok, vec![], vec![0, 1, 2, 3], vec![]));
        assert_eq!(holding(&bench.group(), "p"), [0, 1, 2, 3]);
        // The first answer had arrived before: p reads all of them and may keep them.
        p.epoch = answer.member_epoch;
        p.version = answer.metadata_version;
        p.owned = vec![0, 1, 2, 3];
        let kept = p.beat(&mut bench);
        assert_eq!(assigned(&kept), [0, 1, 2, 3], "{:?}", kept.status);
    }
}

#[test]
fn rule_5_leaving_in_a_round_is_as_always() {
    let (mut bench, mut p, mut m) = round_by_actor();
    let leave =
        bench.request("p").epoch(-1).version(p.version).owned(&[0]).revoked(&[1]).instance("p-1", 900);
    let answer = bench.send(leave);
    assert_eq!((answer.status, answer.member_epoch, assigned(&answer)), (Status::Ok, -1, vec![]));
    assert_eq!(awaited(&answer), [0]);
    assert_eq!(bench.group().members["p"].state, MemberState::Leaving);
    let leave = bench.request("p").epoch(-1).version(p.version).revoked(&[0]).instance("p-1", 901);
    assert_eq!(bench.send(leave.clone()).status, Status::Ok);
    assert_eq!(bench.group().members["p"].state, MemberState::Expired);
    assert_eq!(bench.send(leave).status, Status::Ok);
    p.epoch = 0;
    live_for(&mut bench, 2 * LEASE, &mut [&mut m]);
    assert_eq!(m.owned, [0, 1, 2, 3]);
}

#[test]
fn rule_5_leaving_from_a_lost_future_holds_what_redis_does_not_give() {
    let (mut bench, p, mut m) = lost_leave();
    let leave = |bench: &mut Bench, draining: &[u32], sequence| {
        let request = bench.request("p").epoch(-1).version(p.version).draining(draining);
        let request = request.instance("p-1", p.sequence + sequence);
        bench.send(request)
    };
    let answer = leave(&mut bench, &[0, 1, 2, 3], 1);
    assert_eq!((answer.status, assigned(&answer), awaited(&answer)), (Status::Ok, vec![], vec![0, 1]));
    assert!(is_on_hold(&bench, 2) && is_on_hold(&bench, 3));
    let end = round(&bench).requested_at.plus(LEASE);
    let mut sequence = 1;
    while bench.now < end {
        m.beat(&mut bench);
        bench.pass(3_000);
        sequence += 1;
        leave(&mut bench, &[3], sequence);
    }
    // Redis's own part is long drained; p has gone, as far as the group is concerned.
    assert!(!bench.group().members["p"].is_live());
}

#[test]
fn rule_5_a_leaver_seen_without_a_lost_shard_lifts_its_hold() {
    // Without instanceId no message proves its order, but a live member's synchronised report does.
    let mut bench = Bench::new(4);
    let mut p = Client::old("p");
    let mut m = Client::full("m", "m-1");
    settle(&mut bench, &mut [&mut p, &mut m]);
    let leave = |bench: &mut Bench, draining: &[u32]| {
        let version = bench.group().metadata_version + 4;
        let request = bench.request("p").epoch(-1).version(version).draining(draining);
        bench.send(request)
    };
    leave(&mut bench, &[0, 1, 2]);
    assert!(is_on_hold(&bench, 2));
    leave(&mut bench, &[0, 1]);
    assert!(!is_on_hold(&bench, 2));
    assert_eq!(bench.group().members["p"].state, MemberState::Leaving);
}

#[test]
fn rule_5_a_superseded_incarnation_that_joins_in_a_round_is_answered_retry() {
    let (mut bench, mut p, _) = two_of_four();
    let mut successor = Client::full("p", "p-2");
    successor.beat(&mut bench);
    successor.beat(&mut bench);
    p.epoch = 0;
    p.owned.clear();
    let join = p.request(&mut bench, true);
    assert_eq!(bench.send(join).status, Status::InvalidRequest, "heard: two processes with one id");
    notice(&mut bench);
    p.sequence += 1;
    let join = p.request(&mut bench, true);
    let answer = bench.send(join);
    assert_eq!((answer.status, answer.assignment_lease_ms), (Status::Retry, 0));
    assert_eq!(successor.beat(&mut bench).status, Status::RevokePending);
    assert_eq!(bench.group().members["p"].instance_id.as_deref(), Some("p-2"));
}

#[test]
fn rule_4_1_3a_a_zombie_is_fenced_without_an_epoch_and_its_claims_are_held_if_it_is_ahead() {
    let (mut bench, mut p, mut m) = two_of_four();
    Client::full("p", "p-2").beat(&mut bench);
    notice(&mut bench);
    m.beat(&mut bench);
    let current = bench.group().metadata_version;
    let holds = bench.group().holds.len();
    for (version, held) in [(p.version, 0), (current, 0), (current + 1, 1)] {
        p.version = version;
        p.token = bench.group().metadata_token;
        p.owned = vec![3];
        let answer = p.beat_in_vain(&mut bench);
        assert_eq!((answer.status, answer.member_epoch), (Status::FencedMemberEpoch, 0));
        assert_eq!((answer.assignment_lease_ms, answer.metadata_version), (0, current));
        assert_eq!(lost_future_holds(&bench, 3).len(), held, "version {version}");
    }
    assert_eq!(bench.group().holds.len(), holds + 1);
}

#[test]
fn rule_5_terminal_members_are_answered_as_always_and_their_claims_held_if_ahead() {
    let (mut bench, mut p, mut m) = two_of_four();
    live_for(&mut bench, LEASE, &mut [&mut m]);
    bench.tick();
    assert_eq!(bench.group().members["p"].state, MemberState::Expired);
    p.version = bench.group().metadata_version + 3;
    let answer = p.beat_in_vain(&mut bench);
    assert_eq!((answer.status, answer.member_epoch), (Status::FencedMemberEpoch, 0));
    assert_eq!([0, 1].map(|shard| lost_future_holds(&bench, shard).len()), [1, 1]);
    p.epoch = 0;
    p.owned.clear();
    let answer = p.beat(&mut bench);
    assert_eq!((answer.status, assigned(&answer)), (Status::Ok, vec![]));
}

#[test]
fn rule_5_without_granting_and_with_short_leases_a_member_keeps_what_it_reads() {
    let settings =
        Settings { member_lease_ttl_ms: 6_000, rebalance_timeout_ms: 6_000, ..Settings::default() };
    let mut bench = Bench::with_settings(2, settings);
    let mut p = Client::full("p", "p-1");
    settle(&mut bench, &mut [&mut p]);
    notice(&mut bench);
    bench.may_grant = false;
    for _ in 0..10 {
        assert_eq!(p.beat(&mut bench).status, Status::RevokePending);
        bench.pass(1_000);
    }
    assert_eq!(p.owned, [0, 1]);
    bench.may_grant = true;
    assert_eq!(p.beat(&mut bench).status, Status::Ok);
    assert_eq!(p.owned, [0, 1]);
}

#[test]
fn rule_5_a_target_shard_that_another_still_holds_is_not_taken() {
    // Redis lost that m had given back what p was then granted.
    let mut bench = Bench::new(4);
    let (mut p, mut m) = (Client::full("p", "p-1"), Client::full("m", "m-1"));
    settle(&mut bench, &mut [&mut m]);
    p.beat(&mut bench);
    let mark = bench.mark();
    settle(&mut bench, &mut [&mut m, &mut p]);
    assert_eq!(p.owned.len(), 2);
    bench.restore(mark);
    assert_eq!(bench.group().members["m"].holding().len(), 4);
    let claimed = p.owned.clone();
    let answer = p.beat(&mut bench);
    assert_eq!(view(&answer), (Status::SyncMetadata, vec![], claimed.clone(), vec![]));
    assert!(claimed.iter().all(|shard| is_on_hold(&bench, *shard)));
    assert_eq!(status_of(&mut p, &mut bench), Status::RevokePending);
    // m is told what Redis still waits for; it has drained that long ago.
    assert_eq!(view(&m.beat(&mut bench)).0, Status::SyncMetadata);
    m.beat(&mut bench);
    live_for(&mut bench, LEASE + 3_000, &mut [&mut p, &mut m]);
    assert_eq!((status_of(&mut p, &mut bench), p.owned), (Status::Ok, claimed));
}

#[test]
fn rule_5_an_old_round_gives_nothing_back_either() {
    let (mut bench, mut p, mut m) = round_by_actor();
    p.beat(&mut bench);
    // p stops 1 by itself; m keeps the round open.
    p.owned = vec![0];
    p.draining = vec![1];
    let begun = bench.now;
    let granted = grants(&bench);
    while bench.now < begun.plus(2 * LEASE) {
        let request = m.request(&mut bench, true).version(1);
        bench.send(request);
        assert_eq!(view(&p.beat_draining(&mut bench)), (Status::RevokePending, vec![0], vec![1], vec![]));
        bench.pass(3_000);
    }
    assert_eq!(grants(&bench), granted);
    m.beat(&mut bench);
    assert_eq!(view(&p.beat_draining(&mut bench)), (Status::Ok, vec![0, 1], vec![], vec![]));
}
