//! Joining, rejoining, leaving (protocol 4.1 rules 4, 5 and 7). Rules 6 and 8 have their own files.

mod support;

use rsc_core::member::Termination;
use rsc_core::{Reply, Settings};
use rsc_protocol::admin::{GroupState, MemberState};
use rsc_protocol::{ErrorCode, HeartbeatRequest, HeartbeatResponse, Status};
use support::*;

fn one_settled(shards: u32) -> (Bench, Client) {
    let mut bench = Bench::new(shards);
    let mut p = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut p]);
    bench.pass(1_000);
    (bench, p)
}

fn two_settled() -> (Bench, Client, Client) {
    let (mut bench, mut p) = one_settled(4);
    let mut m = Client::new("m", "m-1");
    settle(&mut bench, &mut [&mut p, &mut m]);
    (bench, p, m)
}

fn send_in_vain(bench: &mut Bench, request: HeartbeatRequest) -> HeartbeatResponse {
    let before = bench.fields.clone();
    let answer = bench.send(request);
    assert_eq!(bench.last_write(), None, "{answer:?}");
    assert_eq!(bench.fields, before);
    answer
}

fn state(bench: &Bench, id: &str) -> MemberState {
    bench.group().members[id].state
}

/// Makes `p` `FENCED` by a claim that it cannot have.
fn fence(bench: &mut Bench, p: &mut Client) {
    let claim = p.request(bench, true).owned(&[0, 1, 2, 3, 4, 5]);
    assert_eq!(bench.send(claim).status, Status::FencedMemberEpoch);
    assert_eq!(state(bench, "p"), MemberState::Fenced);
}

#[test]
fn rule_4_1_4_an_unknown_member_joins_with_epoch_0_and_what_it_reports_to_own_is_ignored() {
    let mut bench = Bench::new(2);
    let join = bench.request("p").owned(&[0, 7]).draining(&[1]).version(0);
    let answer = bench.send(join);
    assert_eq!((answer.status, assigned(&answer)), (Status::Ok, vec![0, 1]));
    let member = &bench.group().members["p"];
    assert_eq!(member.state, MemberState::Starting);
    assert!(member.current.is_empty() && member.revoking.is_empty());
    assert_eq!(answer.member_epoch, i64::try_from(bench.group().assignment_epoch).unwrap());
    assert_eq!(member.live.confirmed_member_epoch, member.live.member_epoch);
}

#[test]
fn rule_4_1_4_an_unknown_member_with_any_other_epoch_is_told_that_it_is_unknown() {
    let (mut bench, p) = one_settled(2);
    for epoch in [-1, 1, p.epoch] {
        let request = bench.request("stranger").epoch(epoch).version(p.version).owned(&[0]);
        assert_eq!(send_in_vain(&mut bench, request).status, Status::UnknownMemberId);
    }
}

#[test]
fn protocol_3_a_member_is_starting_until_its_first_heartbeat_and_active_from_then_on() {
    let mut bench = Bench::new(2);
    let mut p = Client::new("p", "p-1");
    p.beat(&mut bench);
    assert_eq!(state(&bench, "p"), MemberState::Starting);
    let before = bench.group();
    p.beat(&mut bench);
    assert_eq!(state(&bench, "p"), MemberState::Active);
    assert_eq!(bench.group().group_epoch, before.group_epoch);
    assert_eq!(bench.group().metadata_version, before.metadata_version, "membership did not change");
}

#[test]
fn protocol_12_a_group_takes_no_more_live_members_than_allowed() {
    let settings = Settings { max_members_per_group: 2, ..Settings::default() };
    let mut bench = Bench::with_settings(4, settings);
    let (mut p, mut m) = (Client::new("p", "p-1"), Client::new("m", "m-1"));
    settle(&mut bench, &mut [&mut p, &mut m]);
    let refused = |bench: &mut Bench, request: HeartbeatRequest| {
        let before = bench.fields.clone();
        let replies = bench.turn(&[heartbeat(request)]);
        assert!(
            matches!(&replies[0], Reply::Refused { code: ErrorCode::GroupMaxSizeReached, .. }),
            "{replies:?}"
        );
        assert_eq!(bench.fields, before, "a refusal changes nothing");
    };
    let join = bench.request("one-too-many");
    refused(&mut bench, join);
    // Who is there already may start over and be replaced.
    let rejoin = bench.request("p").instance("p-2", 1);
    assert_eq!(bench.send(rejoin).status, Status::Ok);
    // Only live members count; one that is gone needs a place to come back.
    let leave = bench.request("m").epoch(-1).version(m.version).instance("m-1", 9_000);
    bench.send(leave);
    let join = bench.request("third");
    assert_eq!(bench.send(join).status, Status::Ok);
    let join = bench.request("m").instance("m-2", 1);
    refused(&mut bench, join);
}

#[test]
fn rule_4_1_5_an_expired_member_is_fenced_until_it_rejoins_with_0() {
    let (mut bench, mut p) = one_settled(2);
    bench.pass(LEASE);
    bench.tick();
    for epoch in [-1, 1, p.epoch] {
        let request = p.request(&mut bench, true).epoch(epoch);
        assert_eq!(send_in_vain(&mut bench, request).status, Status::FencedMemberEpoch, "epoch {epoch}");
    }
    let before = bench.group();
    let rejoin = p.request(&mut bench, true).epoch(0).owned(&[5]);
    let answer = bench.send(rejoin);
    assert_eq!((answer.status, assigned(&answer)), (Status::Ok, vec![0, 1]), "reported ownership is ignored");
    let group = bench.group();
    assert!(group.group_epoch > before.group_epoch);
    assert_eq!(answer.member_epoch, i64::try_from(group.group_epoch).unwrap());
    let member = &group.members["p"];
    assert_eq!((member.state, member.termination, member.terminated_at), (MemberState::Starting, None, None));
    assert!(member.current.is_empty());
}

#[test]
fn rule_4_1_5_a_fenced_member_is_fenced_until_it_rejoins_with_0() {
    let (mut bench, mut p) = one_settled(2);
    fence(&mut bench, &mut p);
    let epoch = i64::try_from(bench.group().members["p"].live.member_epoch).unwrap();
    for epoch in [-1, 1, p.epoch, epoch] {
        let request = p.request(&mut bench, true).epoch(epoch);
        assert_eq!(send_in_vain(&mut bench, request).status, Status::FencedMemberEpoch, "epoch {epoch}");
    }
    let rejoin = p.request(&mut bench, true).epoch(0).owned(&[]);
    let answer = bench.send(rejoin);
    assert_eq!((answer.status, assigned(&answer)), (Status::Ok, vec![0, 1]));
}

#[test]
fn rule_4_1_5_minus_one_from_one_that_had_left_gets_the_same_ok_with_nothing_assigned() {
    let (mut bench, p, _) = two_settled();
    let leave = bench.request("p").epoch(-1).version(p.version).revoked(&p.owned).instance("p-1", 9_000);
    let first = bench.send(leave.clone());
    assert_eq!(bench.group().members["p"].termination, Some(Termination::Left));
    assert_eq!((first.status, first.member_epoch, assigned(&first)), (Status::Ok, -1, vec![]));
    for sequence in [9_000, 9_001] {
        let again = send_in_vain(&mut bench, leave.clone().instance("p-1", sequence));
        assert_eq!((again.status, again.member_epoch, assigned(&again)), (Status::Ok, -1, vec![]));
        assert!(pending(&again).is_empty() && awaited(&again).is_empty());
    }
    let heartbeat = bench.request("p").epoch(p.epoch).version(p.version).instance("p-1", 9_002);
    assert_eq!(send_in_vain(&mut bench, heartbeat).status, Status::FencedMemberEpoch);
}

#[test]
fn rule_4_1_5_rejoining_with_0_works_from_every_state() {
    type Arrange = fn(&mut Bench, &mut Client);
    let states: [(MemberState, Arrange); 5] = [
        (MemberState::Starting, |bench, p| {
            p.beat(bench);
        }),
        (MemberState::Active, |bench, p| settle(bench, &mut [p])),
        (MemberState::Leaving, |bench, p| {
            settle(bench, &mut [p]);
            let leave = p.request(bench, true).epoch(-1);
            bench.send(leave);
        }),
        (MemberState::Expired, |bench, p| {
            p.beat(bench);
            bench.pass(LEASE);
            bench.tick();
        }),
        (MemberState::Fenced, |bench, p| {
            settle(bench, &mut [p]);
            fence(bench, p);
        }),
    ];
    for (expected, arrange) in states {
        let mut bench = Bench::new(2);
        let mut p = Client::new("p", "p-1");
        arrange(&mut bench, &mut p);
        assert_eq!(state(&bench, "p"), expected);
        p.epoch = 0;
        p.owned.clear();
        let answer = p.beat(&mut bench);
        assert_eq!((answer.status, assigned(&answer)), (Status::Ok, vec![0, 1]), "from {expected:?}");
        settle(&mut bench, &mut [&mut p]);
        assert_eq!(state(&bench, "p"), MemberState::Active);
    }
}

#[test]
fn rule_4_1_7_a_leavers_shards_go_pending_for_others_until_it_reports_them_released() {
    let (mut bench, mut p, mut m) = two_settled();
    let before = bench.group();
    let theirs = p.owned.clone();
    let leave = p.request(&mut bench, true).epoch(-1);
    let answer = bench.send(leave);
    let group = bench.group();
    assert_eq!(state(&bench, "p"), MemberState::Leaving);
    assert!(group.group_epoch > before.group_epoch && group.metadata_version > before.metadata_version);
    assert_eq!((answer.status, answer.member_epoch, awaited(&answer)), (Status::Ok, -1, theirs.clone()));
    assert!(assigned(&answer).is_empty() && pending(&answer).is_empty());
    let waiting = m.beat(&mut bench);
    assert_eq!(pending(&waiting), theirs);
    // One is drained, the other is not: only that one is free.
    let half = bench.request("p").epoch(-1).version(answer.metadata_version).instance("p-1", 9_000);
    bench.send(half.draining(&theirs[1..]).revoked(&theirs[..1]));
    let waiting = m.beat(&mut bench);
    assert_eq!(pending(&waiting), theirs[1..]);
    assert_eq!(state(&bench, "p"), MemberState::Leaving);
    let done = bench.request("p").epoch(-1).version(answer.metadata_version).instance("p-1", 9_001);
    bench.send(done.revoked(&theirs[1..]));
    let group = bench.group();
    assert_eq!(state(&bench, "p"), MemberState::Expired);
    assert_eq!(group.members["p"].termination, Some(Termination::Left));
    assert_eq!(assigned(&m.beat(&mut bench)), [0, 1, 2, 3]);
}

#[test]
fn rule_4_1_7_who_leaves_with_nothing_left_is_gone_at_once() {
    let (mut bench, mut p) = one_settled(2);
    let leave = p.request(&mut bench, true).epoch(-1).owned(&[]).revoked(&[0, 1]);
    bench.send(leave);
    let group = bench.group();
    assert_eq!(group.members["p"].termination, Some(Termination::Left));
    assert_eq!((group.state, group.targets.len()), (GroupState::Empty, 0));
}

#[test]
fn rule_4_1_7_a_leavers_reports_are_cut_to_what_it_holds() {
    let (mut bench, mut p, m) = two_settled();
    let all = [p.owned.clone(), m.owned.clone(), vec![17]].concat();
    let leave = p.request(&mut bench, true).epoch(-1).owned(&[]).draining(&all);
    assert_eq!(bench.send(leave).status, Status::Ok, "not fenced");
    let group = bench.group();
    assert_eq!(group.members["p"].holding().iter().collect::<Vec<_>>(), p.owned);
    assert!(group.holds.is_empty());
}

#[test]
fn rule_4_1_7_without_an_instance_a_leave_older_than_the_accepted_join_is_fenced() {
    let mut bench = Bench::new(2);
    let mut old = Client::old("p");
    settle(&mut bench, &mut [&mut old]);
    let mut new = Client::old("p");
    new.beat(&mut bench);
    let joined_at = bench.group().metadata_version;
    let older = bench.request("p").epoch(-1).version(joined_at - 1);
    assert_eq!(send_in_vain(&mut bench, older).status, Status::FencedMemberEpoch);
    let own = bench.request("p").epoch(-1).version(joined_at);
    assert_eq!(bench.send(own).status, Status::Ok);
    assert_eq!(bench.group().members["p"].termination, Some(Termination::Left));
}

#[test]
fn rule_4_1_7_a_leaver_that_heard_nothing_may_leave_with_version_0_when_its_messages_are_ordered() {
    let mut bench = Bench::new(2);
    let join = bench.request("p").instance("p-1", 1);
    bench.send(join);
    // The answer was lost; what it granted counts until the leaver has seen that it has to give it back.
    let leave = bench.request("p").epoch(-1).instance("p-1", 2);
    let answer = bench.send(leave);
    assert_eq!((answer.status, awaited(&answer)), (Status::Ok, vec![0, 1]));
    let done = bench.request("p").epoch(-1).version(answer.metadata_version).instance("p-1", 3);
    bench.send(done);
    assert_eq!(bench.group().members["p"].termination, Some(Termination::Left));
}

#[test]
fn rule_4_1_7_leaving_stays_so_until_a_rejoin() {
    let (mut bench, mut p, _) = two_settled();
    let leave = p.request(&mut bench, true).epoch(-1);
    bench.send(leave);
    let epoch = bench.group().group_epoch;
    // A heartbeat that was still under way, and more of the leave.
    for epoch in [p.epoch, -1] {
        let request = p.request(&mut bench, true).epoch(epoch);
        let answer = bench.send(request);
        assert_eq!((answer.status, assigned(&answer)), (Status::Ok, vec![]));
        assert_eq!(state(&bench, "p"), MemberState::Leaving);
    }
    assert_eq!(bench.group().group_epoch, epoch, "repeating a leave changes no membership");
    assert!(!bench.group().targets.contains_key("p"));
    let release = p.request(&mut bench, true).owned(&[]);
    bench.send(release);
    assert_eq!(bench.group().members["p"].termination, Some(Termination::Left));
}
