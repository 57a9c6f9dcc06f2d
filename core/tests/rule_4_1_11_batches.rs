//! Many commands in one turn: applied in order, reconciled once, answered from the final state
//! (protocol 4.1 rule 11, and the word *metadataVersion* in 1).

mod support;

use std::collections::BTreeSet;

use rsc_core::member::Termination;
use rsc_core::write::WriteKind;
use rsc_core::{Command, Reply, Settings};
use rsc_protocol::admin::{GroupState, MemberState};
use rsc_protocol::{ErrorCode, HeartbeatRequest, HeartbeatResponse, Status};
use support::*;

fn two_settled() -> (Bench, Client, Client) {
    let mut bench = Bench::new(4);
    let (mut p, mut m) = (Client::new("p", "p-1"), Client::new("m", "m-1"));
    settle(&mut bench, &mut [&mut p]);
    settle(&mut bench, &mut [&mut m, &mut p]);
    bench.pass(1_000);
    (bench, p, m)
}

fn batch(bench: &mut Bench, requests: Vec<HeartbeatRequest>) -> Vec<HeartbeatResponse> {
    let commands: Vec<Command> = requests.into_iter().map(heartbeat).collect();
    let replies = bench.turn(&commands);
    assert_eq!(replies.len(), commands.len());
    replies
        .into_iter()
        .map(|reply| match reply {
            Reply::Heartbeat(response) => *response,
            other => panic!("{other:?}"),
        })
        .collect()
}

fn statuses(answers: &[HeartbeatResponse]) -> Vec<Status> {
    answers.iter().map(|answer| answer.status).collect()
}

#[test]
fn rule_4_1_11_fifty_members_joining_in_one_batch_share_everything_at_once() {
    let mut bench = Bench::new(120);
    let before = bench.group();
    let joins = (0..50).map(|index| bench.request(&format!("m{index:02}"))).collect();
    let answers = batch(&mut bench, joins);
    let group = bench.group();
    let mut seen = BTreeSet::new();
    for answer in &answers {
        assert_eq!(answer.status, Status::Ok);
        let shards = assigned(answer);
        assert!((2..=3).contains(&shards.len()), "{shards:?}");
        assert!(pending(answer).is_empty(), "nobody held anything");
        assert!(shards.into_iter().all(|shard| seen.insert(shard)), "no shard twice");
        assert_eq!(answer.metadata_version, group.metadata_version);
        assert_eq!((answer.group_epoch, answer.assignment_epoch), (group.group_epoch, group.group_epoch));
        assert_eq!(answer.member_epoch, i64::try_from(group.assignment_epoch).unwrap());
    }
    assert_eq!(seen.len(), 120);
    assert_eq!(group.live_members().count(), 50);
    assert!(group.group_epoch > before.group_epoch);
    assert_eq!(group.metadata_version, before.metadata_version + 1, "one write, one version");
    assert_eq!(group.store_revision, before.store_revision + 1);
}

#[test]
fn rule_4_1_11_the_order_of_requests_within_a_batch_does_not_matter_for_the_target() {
    let ids = ["d", "a", "c", "b"];
    let target = |ids: &[&str]| {
        let mut bench = Bench::new(10);
        let joins = ids.iter().map(|id| bench.request(id)).collect();
        batch(&mut bench, joins);
        bench.group().targets
    };
    let one = target(&ids);
    assert_eq!(one, target(&["a", "b", "c", "d"]));
    assert_eq!(one.values().map(rsc_core::ShardSet::len).collect::<Vec<_>>(), [3, 3, 2, 2]);
}

#[test]
fn rule_4_1_11_each_answer_is_computed_from_the_state_after_every_command() {
    let (mut bench, mut p, mut m) = two_settled();
    let mut c = Client::new("c", "c-1");
    // p's heartbeat comes first, but the join after it moves p's target.
    let requests =
        vec![p.request(&mut bench, true), c.request(&mut bench, true), m.request(&mut bench, true)];
    let answers = batch(&mut bench, requests);
    assert_eq!(statuses(&answers), [Status::Ok; 3]);
    let moved: Vec<u32> = answers.iter().flat_map(awaited).collect();
    assert_eq!(moved, pending(&answers[1]), "what is taken from p or m is what c waits for");
    assert_eq!(moved.len(), 1);
    let group = bench.group();
    for answer in &answers {
        assert_eq!(answer.metadata_version, group.metadata_version);
        assert_eq!(answer.assignment.metadata_version, group.metadata_version);
        assert_eq!(answer.metadata_token, group.metadata_token);
        assert_eq!(answer.member_epoch, i64::try_from(group.assignment_epoch).unwrap());
    }
}

#[test]
fn rule_4_1_11_a_release_in_the_batch_is_granted_in_the_same_batch() {
    let mut bench = Bench::new(2);
    let (mut p, mut m) = (Client::new("p", "p-1"), Client::new("m", "m-1"));
    settle(&mut bench, &mut [&mut p]);
    m.beat(&mut bench);
    p.beat_draining(&mut bench);
    let before = bench.group();
    // The one that waits comes before the one that releases.
    let requests = vec![m.request(&mut bench, true), p.request(&mut bench, true)];
    let answers = batch(&mut bench, requests);
    assert_eq!(assigned(&answers[0]), [1]);
    let group = bench.group();
    assert_eq!(group.metadata_version, before.metadata_version + 1);
    assert_eq!(answers[0].metadata_version, group.metadata_version);
    assert_eq!(answers[1].metadata_version, group.metadata_version);
    assert_eq!(group.members["m"].granted[&1].metadata_version, group.metadata_version);
}

#[test]
fn rule_4_1_11_of_two_heartbeats_of_one_member_only_the_newest_gets_the_outcome() {
    let (mut bench, mut p, mut m) = two_settled();
    p.draining = vec![p.owned.pop().unwrap()];
    let requests =
        vec![p.request(&mut bench, false), m.request(&mut bench, true), p.request(&mut bench, true)];
    let echoed = requests[0].clone();
    let answers = batch(&mut bench, requests.clone());
    assert_eq!(statuses(&answers), [Status::Retry, Status::Ok, Status::Ok]);
    assert_eq!((answers[0].assignment_lease_ms, assigned(&answers[0])), (0, vec![]));
    assert_eq!(
        (answers[0].member_epoch, answers[0].metadata_version),
        (echoed.member_epoch, echoed.metadata_version)
    );
    for (request, answer) in requests.iter().zip(&answers) {
        assert_eq!(answer.response_to, request.request_id);
    }
    // Both were applied, in order.
    assert_eq!(bench.counts.last().unwrap().releases, 1);
}

#[test]
fn rule_4_1_11_an_older_heartbeat_is_not_answered_ok_when_a_newer_one_gets_its_member_fenced() {
    let (mut bench, mut p, m) = two_settled();
    let first = p.request(&mut bench, true);
    let mut second = p.request(&mut bench, true);
    second.owned_shards.push(rsc_protocol::ShardRef { shard_index: m.owned[0] });
    let answers = batch(&mut bench, vec![first, second]);
    assert_eq!(statuses(&answers), [Status::Retry, Status::FencedMemberEpoch]);
    assert_eq!(bench.group().members["p"].state, MemberState::Fenced);
}

#[test]
fn rule_4_1_11_a_refused_stranger_does_not_take_the_outcome_from_the_accepted_incarnation() {
    let (mut bench, mut p, _) = two_settled();
    let accepted = p.request(&mut bench, true);
    let other = bench.request("p").epoch(p.epoch).version(p.version).instance("p-0", 1);
    let late = bench.request("p").epoch(p.epoch).version(p.version).instance("p-1", p.sequence - 1);
    let answers = batch(&mut bench, vec![accepted, other, late]);
    assert_eq!(statuses(&answers), [Status::Ok, Status::FencedMemberEpoch, Status::Retry]);
}

#[test]
fn rule_4_1_11_a_heartbeat_and_the_join_that_supersedes_it_in_one_batch() {
    let (mut bench, mut p, _) = two_settled();
    let requests = vec![p.request(&mut bench, true), bench.request("p").instance("p-2", 1)];
    let answers = batch(&mut bench, requests);
    assert_eq!(statuses(&answers), [Status::Retry, Status::Ok], "the former one's view is gone");
    assert_eq!((assigned(&answers[1]), pending(&answers[1])), (vec![], vec![0, 1]));
}

#[test]
fn rule_4_1_11_leave_and_rejoin_in_one_batch() {
    let (mut bench, mut p, _) = two_settled();
    let leave = p.request(&mut bench, true).epoch(-1).owned(&[]);
    let rejoin = p.request(&mut bench, true).epoch(0).owned(&[]);
    let answers = batch(&mut bench, vec![leave, rejoin]);
    assert_eq!(statuses(&answers), [Status::Retry, Status::Ok]);
    assert_eq!(assigned(&answers[1]), [0, 1]);
    assert_eq!(bench.group().members["p"].state, MemberState::Starting);
}

#[test]
fn rule_4_1_11_a_join_and_a_leave_of_the_last_members_leave_an_empty_group() {
    let (mut bench, mut p, mut m) = two_settled();
    let leaves =
        [&mut p, &mut m].map(|client| client.request(&mut bench, true).epoch(-1).owned(&[])).to_vec();
    let answers = batch(&mut bench, leaves);
    assert_eq!(statuses(&answers), [Status::Ok; 2]);
    let group = bench.group();
    assert_eq!((group.state, group.live_members().count()), (GroupState::Empty, 0));
    assert!(group.members.values().all(|member| member.termination == Some(Termination::Left)));
}

#[test]
fn rule_4_1_11_the_limit_of_members_counts_within_a_batch() {
    let settings = Settings { max_members_per_group: 3, ..Settings::default() };
    let mut bench = Bench::with_settings(4, settings);
    let commands: Vec<Command> = (0..5).map(|index| heartbeat(bench.request(&format!("m{index}")))).collect();
    let replies = bench.turn(&commands);
    let is_refused =
        |reply: &Reply| matches!(reply, Reply::Refused { code: ErrorCode::GroupMaxSizeReached, .. });
    assert_eq!(replies.iter().map(is_refused).collect::<Vec<_>>(), [false, false, false, true, true]);
    assert_eq!(bench.group().live_members().count(), 3);
}

#[test]
fn rule_4_1_11_heartbeats_and_ticks_of_a_steady_group_are_one_lease_only_write() {
    let (mut bench, mut p, mut m) = two_settled();
    let commands = [
        heartbeat(p.request(&mut bench, true)),
        Command::Tick,
        heartbeat(m.request(&mut bench, true)),
        Command::Tick,
    ];
    let replies = bench.turn(&commands);
    assert_eq!((&replies[1], &replies[3]), (&Reply::Done, &Reply::Done));
    let write = bench.last_write().unwrap();
    assert_eq!(write.kind, WriteKind::LeaseOnly);
    assert_eq!(write.live.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>(), ["m", "p"]);
}

#[test]
fn rule_4_1_11_answers_that_move_nothing_for_others_in_the_same_batch_carry_the_final_version() {
    let (mut bench, mut p, _) = two_settled();
    let unknown = bench.request("stranger").epoch(4);
    let join = bench.request("c");
    let requests = vec![unknown, p.request(&mut bench, true), join];
    let before = bench.group().metadata_version;
    let answers = batch(&mut bench, requests);
    assert_eq!(answers[0].status, Status::UnknownMemberId);
    assert_eq!(answers[0].metadata_version, before + 1);
    assert_eq!(bench.group().metadata_version, before + 1);
}
