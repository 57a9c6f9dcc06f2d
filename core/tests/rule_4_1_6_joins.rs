//! Epoch 0 from a live member: the same join again, a restart, a late copy, a second process
//! (protocol 4.1 rule 6).

mod support;

use rsc_core::HoldCause;
use rsc_protocol::admin::MemberState;
use rsc_protocol::{HeartbeatRequest, HeartbeatResponse, Status};
use support::*;

fn settled(mut client: Client) -> (Bench, Client) {
    let mut bench = Bench::new(2);
    settle(&mut bench, &mut [&mut client]);
    bench.pass(1_000);
    (bench, client)
}

fn send_in_vain(bench: &mut Bench, request: HeartbeatRequest) -> HeartbeatResponse {
    let before = bench.fields.clone();
    let answer = bench.send(request);
    assert_eq!(bench.last_write(), None, "{answer:?}");
    assert_eq!(bench.fields, before);
    answer
}

fn without_sequence(mut request: HeartbeatRequest) -> HeartbeatRequest {
    request.sequence = None;
    request
}

/// Moves the target of shard 1 away from `p`, who has not been told yet.
fn another_joins(bench: &mut Bench) -> Client {
    let mut m = Client::new("m", "m-1");
    m.beat(bench);
    m
}

#[test]
fn rule_4_1_6_the_same_join_again_by_instance_moves_no_epoch_and_shrinks_no_grant() {
    let mut bench = Bench::new(2);
    let join = bench.request("p").instance("p-1", 1);
    let first = bench.send(join.clone());
    bench.pass(1_000);
    let before = bench.group();
    // The network repeats it, the client repeats it, a client without sequences repeats it.
    let by_client = bench.request("p").instance("p-1", 2);
    let unordered = without_sequence(bench.request("p").instance("p-1", 0));
    for again in [join.instance("p-1", 1), by_client, unordered] {
        let request_id = again.request_id.clone();
        let mut answer = bench.send(again);
        assert_eq!(std::mem::replace(&mut answer.response_to, first.response_to.clone()), request_id);
        assert_eq!(answer, first, "the same answer");
        assert!(bench.is_lease_only());
    }
    let group = bench.group();
    assert_eq!(group.group_epoch, before.group_epoch);
    assert_eq!(group.members["p"].granted, before.members["p"].granted);
    assert_eq!(group.members["p"].live.member_lease_expires_at, bench.now.plus(LEASE), "as the answer says");
    assert!(group.holds.is_empty());
}

#[test]
fn rule_4_1_6_the_same_join_again_by_request_id_without_an_instance() {
    let mut bench = Bench::new(2);
    let join = bench.request("p");
    let first = bench.send(join.clone());
    bench.pass(1_000);
    assert_eq!(bench.send(join), first);
    assert!(bench.is_lease_only());
}

#[test]
fn rule_4_1_6_the_same_join_again_keeps_what_was_granted_though_the_target_has_moved() {
    for instance in [None, Some("p-1")] {
        let mut bench = Bench::new(2);
        let mut join = bench.request("p");
        join.instance_id = instance.map(str::to_owned);
        bench.send(join.clone());
        let mut m = another_joins(&mut bench);
        let again = bench.send(join);
        assert_eq!((again.status, assigned(&again), awaited(&again)), (Status::Ok, vec![0], vec![1]));
        let granted: Vec<u32> = bench.group().members["p"].granted.keys().copied().collect();
        assert_eq!(granted, [0, 1]);
        assert_eq!(assigned(&m.beat(&mut bench)), [0_u32; 0]);
    }
}

#[test]
fn rule_4_1_6_once_ownership_was_reported_a_join_is_not_the_same_join_again() {
    let (mut bench, p) = settled(Client::new("p", "p-1"));
    let before = bench.group();
    let restart = bench.request("p").version(p.version).instance("p-1", p.sequence + 1);
    let answer = bench.send(restart);
    assert!(bench.group().group_epoch > before.group_epoch);
    assert!(answer.member_epoch > p.epoch);
}

#[test]
fn rule_4_1_6_same_instance_with_a_higher_sequence_has_stopped_and_its_shards_are_free_at_once() {
    let (mut bench, p) = settled(Client::new("p", "p-1"));
    let mut m = another_joins(&mut bench);
    assert_eq!(m.owned, [0_u32; 0]);
    // Its version does not matter: a process that starts over knows none.
    let restart = bench.request("p").instance("p-1", p.sequence + 1);
    let answer = bench.send(restart);
    assert_eq!((answer.status, assigned(&answer)), (Status::Ok, vec![0]));
    assert!(bench.group().holds.is_empty());
    assert_eq!(assigned(&m.beat(&mut bench)), [1], "no drain to wait for");
    let member = &bench.group().members["p"];
    assert_eq!((member.state, member.superseded.len()), (MemberState::Starting, 0));
}

#[test]
fn rule_4_1_6_a_late_copy_of_an_instances_join_is_answered_retry() {
    let mut bench = Bench::new(2);
    let join = without_sequence(bench.request("p").instance("p-1", 0));
    let answer = bench.send(join.clone());
    let steady = bench.request("p").epoch(answer.member_epoch).version(answer.metadata_version);
    let steady = without_sequence(steady.owned(&[0, 1]).instance("p-1", 0));
    bench.send(steady);
    assert_eq!(send_in_vain(&mut bench, join.clone()).status, Status::Retry);
    // One that knows the accepted join's answer is later than it: a restart that proves no stop.
    let mut later = bench.request("p").version(answer.metadata_version);
    later.instance_id.clone_from(&join.instance_id);
    let answer = bench.send(later);
    assert_eq!((answer.status, pending(&answer)), (Status::Ok, vec![0, 1]));
    assert_eq!(bench.group().holds.len(), 2);
}

#[test]
fn rule_4_1_6_a_late_copy_of_a_join_without_instance_does_not_supersede_its_own_process() {
    let mut bench = Bench::new(2);
    let mut p = Client::old("p");
    let join = p.request(&mut bench, true);
    p.apply(&bench.send(join.clone()));
    p.beat(&mut bench);
    assert_eq!(send_in_vain(&mut bench, join).status, Status::Retry);
    assert_eq!(p.beat(&mut bench).status, Status::Ok);
}

#[test]
fn rule_4_1_6_a_second_process_takes_the_place_and_what_the_former_held_goes_on_hold() {
    let newcomers: [fn(&mut Bench) -> HeartbeatRequest; 2] =
        [|bench| bench.request("p").instance("p-2", 1), |bench| bench.request("p")];
    for former in [Client::new("p", "p-1"), Client::old("p")] {
        for newcomer in newcomers {
            let former = Client { instance: former.instance.clone(), ..Client::old("p") };
            let (mut bench, mut former) = settled(former);
            let before = bench.group();
            let lease_end = before.members["p"].live.member_lease_expires_at;
            let join = newcomer(&mut bench).owned(&[0]);
            let instance = join.instance_id.clone();
            let answer = bench.send(join);
            let group = bench.group();
            assert_eq!((answer.status, assigned(&answer)), (Status::Ok, vec![]));
            assert_eq!(pending(&answer), [0, 1], "its target, on hold");
            assert!(answer.member_epoch > former.epoch && group.group_epoch > before.group_epoch);
            assert_eq!(group.members["p"].instance_id, instance);
            assert!(group.members["p"].holds_nothing());
            let holds: Vec<_> = group.holds.iter().map(|h| (h.shard_index, h.cause, h.until)).collect();
            let superseded = HoldCause::Superseded;
            assert_eq!(holds, [(0, superseded, lease_end), (1, superseded, lease_end)]);
            let heartbeat = former.request(&mut bench, true);
            assert_eq!(send_in_vain(&mut bench, heartbeat).status, Status::FencedMemberEpoch);
        }
    }
}

#[test]
fn rule_4_1_6_a_superseded_instance_is_told_retry_until_its_successor_is_heard() {
    let (mut bench, mut old) = settled(Client::new("p", "p-1"));
    let mut new = Client::new("p", "p-2");
    let join = new.request(&mut bench, true);
    new.apply(&bench.send(join.clone()));
    old.epoch = 0;
    old.owned.clear();
    let mut comes_back = |bench: &mut Bench| {
        let request = old.request(bench, true);
        bench.send(request)
    };
    assert_eq!(comes_back(&mut bench).status, Status::Retry);
    bench.send(join);
    assert_eq!(comes_back(&mut bench).status, Status::Retry, "a join repeated is nothing but a join");
    new.beat(&mut bench);
    let answer = comes_back(&mut bench);
    assert_eq!((answer.status, answer.member_epoch), (Status::InvalidRequest, 0));
    assert!(answer.reason.contains("memberId p "), "the reason names the id: {}", answer.reason);
    assert_eq!(bench.group().members["p"].instance_id.as_deref(), Some("p-2"));
    // Only while its successor lives.
    bench.pass(LEASE);
    assert_eq!(comes_back(&mut bench).status, Status::Ok);
    assert_eq!(bench.group().members["p"].instance_id.as_deref(), Some("p-1"));
    let superseded: Vec<_> =
        bench.group().members["p"].superseded.iter().map(|former| former.instance_id.clone()).collect();
    assert_eq!(superseded, ["p-2"], "the accepted one is never on that list");
}

#[test]
fn rule_4_1_6_a_superseded_instance_that_may_not_join_may_not_become_accepted_by_leaving_either() {
    let (mut bench, old) = settled(Client::new("p", "p-1"));
    Client::new("p", "p-2").beat(&mut bench);
    for epoch in [-1, old.epoch] {
        let request = bench.request("p").epoch(epoch).version(old.version).instance("p-1", 9_000);
        assert_eq!(send_in_vain(&mut bench, request).status, Status::FencedMemberEpoch);
    }
}

fn restarts(bench: &mut Bench, numbers: std::ops::Range<usize>, apart: i64) {
    for index in numbers {
        bench.pass(apart);
        let mut next = Client::new("p", &format!("restart-{index}"));
        assert_eq!(next.beat(bench).status, Status::Ok);
        assert_eq!(next.beat(bench).status, Status::Ok);
    }
}

fn remembers(bench: &mut Bench, instance: &str) -> bool {
    let group = bench.group();
    group.members["p"].superseded.iter().any(|former| former.instance_id == instance)
}

#[test]
fn rule_4_1_6_the_last_eight_superseded_instances_are_remembered_however_long_ago() {
    let (mut bench, _) = settled(Client::new("p", "p-1"));
    restarts(&mut bench, 0..8, LEASE - 1);
    assert_eq!(bench.group().members["p"].superseded.len(), 8);
    assert!(remembers(&mut bench, "p-1"));
    restarts(&mut bench, 8..9, LEASE - 1);
    assert!(!remembers(&mut bench, "p-1"), "the ninth, older than a lease");
    assert!(remembers(&mut bench, "restart-0"));
}

#[test]
fn rule_4_1_6_superseded_instances_are_remembered_at_least_one_lease_long() {
    let (mut bench, _) = settled(Client::new("p", "p-1"));
    restarts(&mut bench, 0..12, 100);
    assert!(remembers(&mut bench, "p-1"), "a crash loop must not let a dead process back in");
    restarts(&mut bench, 12..21, LEASE - 1);
    assert_eq!(bench.group().members["p"].superseded.len(), 8);
}

#[test]
fn rule_4_1_6_an_instance_that_joins_where_another_had_expired_is_its_successor() {
    let (mut bench, mut old) = settled(Client::new("p", "p-1"));
    bench.pass(LEASE);
    let mut new = Client::new("p", "p-2");
    new.beat(&mut bench);
    new.beat(&mut bench);
    old.epoch = 0;
    old.owned.clear();
    let request = old.request(&mut bench, true);
    assert_eq!(send_in_vain(&mut bench, request).status, Status::InvalidRequest, "two processes, one id");
}
