//! What time alone does (protocol 4.1 rule 1), and where time comes from (protocol 2).

mod support;

use rsc_core::Command;
use rsc_core::Settings;
use rsc_core::member::Termination;
use rsc_core::settings::told_lease_ms;
use rsc_core::write::WriteKind;
use rsc_protocol::Status;
use rsc_protocol::Timestamp;
use rsc_protocol::admin::MemberState;
use support::*;

/// Two members with two of four shards each.
fn two_settled() -> (Bench, Client, Client) {
    let mut bench = Bench::new(4);
    let (mut p, mut m) = (Client::new("p", "p-1"), Client::new("m", "m-1"));
    settle(&mut bench, &mut [&mut p, &mut m]);
    (bench, p, m)
}

fn lease_end(bench: &Bench, id: &str) -> Timestamp {
    bench.group().members[id].live.member_lease_expires_at
}

/// Lets time pass up to `instant`; `awake` is heard all the while.
fn pass_until(bench: &mut Bench, instant: Timestamp, awake: &mut Client) {
    while bench.now.plus(3_000) < instant {
        bench.pass(3_000);
        awake.beat_draining(bench);
    }
    bench.now = instant;
}

#[test]
fn rule_4_1_1_a_member_expires_when_its_lease_is_over_and_its_shards_are_free_at_once() {
    let (mut bench, p, mut m) = two_settled();
    let end = lease_end(&bench, "p");
    pass_until(&mut bench, end.plus(-1), &mut m);
    bench.tick();
    assert!(bench.group().members["p"].is_live(), "one millisecond before the end");
    bench.pass(1);
    let answer = m.beat(&mut bench);
    let group = bench.group();
    assert_eq!(group.members["p"].state, MemberState::Expired);
    assert_eq!(group.members["p"].termination, Some(Termination::LeaseExpired));
    assert_eq!(group.members["p"].terminated_at, Some(bench.now));
    assert!(group.members["p"].holds_nothing() && group.holds.is_empty());
    assert_eq!(assigned(&answer), [0, 1, 2, 3], "{:?} had {:?}", p.id, p.owned);
    assert_eq!(bench.counts.last().unwrap().leases_expired, 1);
}

#[test]
fn rule_4_1_1_maintenance_comes_before_the_request_is_decided() {
    let (mut bench, mut p, _) = two_settled();
    let end = lease_end(&bench, "p");
    bench.now = end;
    let request = p.request(&mut bench, true);
    assert_eq!(bench.send(request).status, Status::FencedMemberEpoch, "its own lease is over, too");
    assert_eq!(bench.group().members["p"].state, MemberState::Expired);
}

#[test]
fn rule_4_1_1_a_leaver_that_falls_silent_expires() {
    let (mut bench, p, mut m) = two_settled();
    let leave = bench.request("p").epoch(-1).version(p.version).draining(&p.owned).instance("p-1", 9_000);
    bench.send(leave);
    assert_eq!(bench.group().members["p"].state, MemberState::Leaving);
    let end = lease_end(&bench, "p");
    assert!(end < bench.group().members["p"].rebalance_deadline_at.unwrap());
    pass_until(&mut bench, end, &mut m);
    assert_eq!(assigned(&m.beat(&mut bench)), [0, 1, 2, 3], "not blocked until the rebalance timeout");
    assert_eq!(bench.group().members["p"].termination, Some(Termination::LeaseExpired));
}

#[test]
fn rule_4_1_1_a_silent_drainer_whose_lease_is_over_expires_instead_of_being_fenced() {
    let mut bench = Bench::new(2);
    let (mut p, mut m) = (Client::new("p", "p-1"), Client::new("m", "m-1"));
    settle(&mut bench, &mut [&mut p]);
    m.beat(&mut bench);
    p.beat_draining(&mut bench);
    let end = bench.group().members["p"].rebalance_deadline_at.unwrap();
    bench.now = end;
    bench.tick();
    let group = bench.group();
    assert_eq!(group.members["p"].termination, Some(Termination::LeaseExpired));
    assert!(group.holds.is_empty(), "its lease is over: it reads nothing any more");
}

#[test]
fn rule_4_1_1_old_terminal_members_are_pruned_with_their_live_field() {
    let (mut bench, _, mut m) = two_settled();
    let end = lease_end(&bench, "p");
    pass_until(&mut bench, end, &mut m);
    m.beat(&mut bench);
    let forgotten = bench.now.plus(RETENTION);
    pass_until(&mut bench, forgotten.plus(-1), &mut m);
    m.beat(&mut bench);
    let before = bench.group();
    assert!(before.members.contains_key("p") && bench.fields.contains_key("live:p"));
    bench.pass(1);
    bench.tick();
    assert!(!bench.group().members.contains_key("p"));
    assert!(!bench.fields.contains_key("live:p"), "a member that goes takes its field along");
    assert_eq!(bench.group().metadata_version, before.metadata_version, "nobody observes that");
    let answer = bench.request("p").epoch(2).version(2).instance("p-1", 9_000);
    assert_eq!(bench.send(answer).status, Status::UnknownMemberId);
}

#[test]
fn rule_4_1_1_a_member_pruned_and_joining_in_one_turn_has_its_live_field_written() {
    let (mut bench, _, mut m) = two_settled();
    let end = lease_end(&bench, "p");
    pass_until(&mut bench, end, &mut m);
    m.beat(&mut bench);
    bench.pass(RETENTION);
    bench.may_expire = false;
    m.beat(&mut bench);
    bench.may_expire = true;
    let join = bench.request("p");
    assert_eq!(bench.send(join).status, Status::Ok);
    let write = bench.last_write().unwrap();
    assert!(write.live.iter().any(|(id, _)| id == "p"), "a join rewrites it (protocol 2)");
    assert!(!write.removed_live.contains(&"p".to_owned()), "{:?}", write.removed_live);
    assert!(bench.fields.contains_key("live:p"));
}

#[test]
fn rule_4_1_1_out_of_service_nobody_expires_leavers_included() {
    let (mut bench, p, mut m) = two_settled();
    let leave = bench.request("p").epoch(-1).version(p.version).draining(&p.owned).instance("p-1", 9_000);
    bench.send(leave);
    bench.may_expire = false;
    bench.pass(LEASE);
    bench.tick();
    assert_eq!(bench.group().live_members().count(), 2);
    bench.pass(10 * LEASE);
    assert_eq!(m.beat(&mut bench).status, Status::Ok);
    assert_eq!(bench.group().members["p"].state, MemberState::Leaving);
    bench.may_expire = true;
    bench.tick();
    assert_eq!(bench.group().members["p"].state, MemberState::Expired);
    assert!(bench.group().members["m"].is_live(), "whose lease was renewed meanwhile");
}

#[test]
fn rule_4_1_1_out_of_service_nobody_is_fenced_for_slowness() {
    let mut bench = Bench::new(2);
    let (mut p, mut m) = (Client::new("p", "p-1"), Client::new("m", "m-1"));
    settle(&mut bench, &mut [&mut p]);
    m.beat(&mut bench);
    p.beat_draining(&mut bench);
    let deadline = bench.group().members["p"].rebalance_deadline_at.unwrap();
    while bench.now < deadline {
        bench.pass(3_000);
        bench.may_expire = bench.now < deadline;
        m.beat(&mut bench);
        assert_eq!(p.beat_draining(&mut bench).status, Status::Ok);
    }
    assert_eq!(bench.group().members["p"].state, MemberState::Active);
    bench.may_expire = true;
    bench.tick();
    assert_eq!(bench.group().members["p"].state, MemberState::Fenced);
}

#[test]
fn rule_4_1_1_out_of_service_nobody_is_pruned() {
    let (mut bench, _, mut m) = two_settled();
    bench.pass(LEASE);
    bench.tick();
    bench.may_expire = false;
    bench.pass(RETENTION);
    m.beat(&mut bench);
    assert!(bench.group().members.contains_key("p"));
}

#[test]
fn rule_4_1_1_a_tick_with_nothing_due_writes_nothing() {
    let (mut bench, _, _) = two_settled();
    bench.pass(1_000);
    bench.tick();
    assert_eq!(bench.last_write(), None);
}

#[test]
fn protocol_2_time_that_runs_backwards_expires_nobody_and_is_clamped_to_the_last_update() {
    let (mut bench, mut p, _) = two_settled();
    bench.pass(2_000);
    p.beat(&mut bench);
    let recorded = bench.group().updated_at;
    assert_eq!(recorded, bench.now);
    bench.pass(-3_600_000);
    assert_eq!(p.beat(&mut bench).status, Status::Ok);
    let group = bench.group();
    assert_eq!(group.live_members().count(), 2);
    assert_eq!(group.updated_at, recorded);
    assert_eq!(group.members["p"].live.last_heartbeat_at, recorded);
    assert_eq!(lease_end(&bench, "p"), recorded.plus(LEASE));
    let mut late = Client::old("late");
    late.beat(&mut bench);
    assert_eq!(lease_end(&bench, "late"), recorded.plus(LEASE), "born alive");
}

#[test]
fn protocol_2_a_lease_end_never_moves_backwards_and_the_ttl_told_is_recorded() {
    let (mut bench, mut p, _) = two_settled();
    let end = lease_end(&bench, "p");
    bench.settings = Settings { member_lease_ttl_ms: 6_000, ..Settings::default() };
    bench.pass(1_000);
    let answer = p.beat(&mut bench);
    assert_eq!(answer.assignment_lease_ms, 5_400);
    assert_eq!(lease_end(&bench, "p"), end);
    let group = bench.group();
    assert_eq!(group.members["p"].live.member_lease_ttl_ms, 6_000);
    assert_eq!(group.members["m"].live.member_lease_ttl_ms, 15_000, "m has not been told otherwise yet");
    // A rejoin does not shorten what the member was promised before either.
    let mut again = Client::new("p", "p-2");
    again.beat(&mut bench);
    assert_eq!(lease_end(&bench, "p"), end);
}

/// A jump of a tenth of a lease goes unnoticed: the record's lease ends so much early, and not before the lease
/// that the member was told.
#[test]
fn protocol_2_an_unnoticed_jump_of_redis_time_makes_no_second_reader() {
    let (mut bench, mut p, mut m) = two_settled();
    let told = i64::try_from(p.beat(&mut bench).assignment_lease_ms).unwrap();
    bench.pass(LEASE / 10);
    let mut waited = 0;
    while waited < told - 1 {
        let step = (told - 1 - waited).min(3_000);
        bench.pass(step);
        waited += step;
        assert_eq!(assigned(&m.beat(&mut bench)), [2, 3], "p reads 0 and 1 for {} ms more", told - waited);
    }
    bench.pass(1);
    assert_eq!(
        assigned(&m.beat(&mut bench)),
        [0, 1, 2, 3],
        "p's recorded lease is over, and the one it was told"
    );
}

#[test]
fn protocol_4_a_member_is_told_nine_tenths_of_its_lease() {
    for (ttl, told) in [(15_000, 13_500), (1_005, 904), (1_000, 900), (999, 899), (10, 9), (9, 8), (0, 0)] {
        assert_eq!(told_lease_ms(ttl), told, "of {ttl} ms");
    }
    assert!(told_lease_ms(u64::MAX) < u64::MAX / 10 * 9 + 10);
}

#[test]
fn protocol_2_an_instance_whose_time_jumped_grants_nothing_new() {
    let mut bench = Bench::new(4);
    let mut p = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut p]);
    bench.may_grant = false;
    let mut m = Client::new("m", "m-1");
    m.beat(&mut bench);
    p.beat(&mut bench);
    p.beat(&mut bench);
    let answer = m.beat(&mut bench);
    assert_eq!(
        (assigned(&answer), pending(&answer)),
        (vec![], vec![2, 3]),
        "free, but nothing new is granted"
    );
    assert_eq!(assigned(&p.beat(&mut bench)), [0, 1], "what is held goes on");
    bench.may_grant = true;
    assert_eq!(assigned(&m.beat(&mut bench)), [2, 3]);
}

#[test]
fn protocol_2_an_instance_whose_time_jumped_does_not_give_back_what_is_drained() {
    let mut bench = Bench::new(2);
    let (mut p, mut m) = (Client::new("p", "p-1"), Client::new("m", "m-1"));
    settle(&mut bench, &mut [&mut p]);
    m.beat(&mut bench);
    assert_eq!(assigned(&p.beat_draining(&mut bench)), [0]);
    let leave = bench.request("m").epoch(-1).version(m.version).instance("m-1", 9_000);
    bench.send(leave);
    bench.may_grant = false;
    let answer = p.beat_draining(&mut bench);
    assert_eq!((assigned(&answer), pending(&answer)), (vec![0], vec![1]), "a new stamp is a grant");
    bench.may_grant = true;
    assert_eq!(assigned(&p.beat_draining(&mut bench)), [0, 1]);
}

#[test]
fn protocol_2_the_next_deadline_is_the_earliest_of_lease_drain_hold_and_retention() {
    let (mut bench, mut p, mut m) = two_settled();
    let next = |bench: &Bench| bench.group().next_deadline(&bench.settings);
    assert_eq!(next(&bench), Some(lease_end(&bench, "p")), "p was heard before m");
    // A drain that ends earlier than every lease: the timeout is over while p goes on being heard.
    let mut c = Client::new("c", "c-1");
    c.beat(&mut bench);
    p.beat_draining(&mut bench);
    let deadline = bench.group().members["p"].rebalance_deadline_at.unwrap();
    while bench.now.plus(3_000) < deadline {
        bench.pass(3_000);
        for client in [&mut p, &mut m, &mut c] {
            client.beat_draining(&mut bench);
        }
    }
    assert_eq!(next(&bench), Some(deadline));
    bench.now = deadline;
    bench.tick();
    m.beat(&mut bench);
    c.beat(&mut bench);
    let until = bench.group().holds.iter().map(|hold| hold.until).min().unwrap();
    assert!(until < lease_end(&bench, "m") && until < lease_end(&bench, "c"));
    assert_eq!(next(&bench), Some(until), "p is fenced, its hold ends before the others' leases");
    // Nobody is left but terminal members.
    bench.pass(2 * LEASE);
    bench.tick();
    let fenced_at = bench.group().members["p"].terminated_at.unwrap();
    assert_eq!(next(&bench), Some(fenced_at.plus(RETENTION)));
    bench.pass(2 * RETENTION);
    bench.tick();
    assert_eq!(next(&bench), None);
}

#[test]
fn protocol_7_a_longer_routing_lease_is_recorded_before_it_is_used_and_lowered_only_once_run_out() {
    let (mut bench, _, _) = two_settled();
    assert_eq!(bench.group().max_routing_cache_ttl_ms, 30_000);
    assert_eq!(bench.group().routing(90_000).routing_cache_ttl_ms, 30_000, "cut to what is recorded");
    bench.settings.routing_cache_ttl_ms = 90_000;
    bench.turn(&[Command::Tick]);
    assert!(matches!(bench.last_write().unwrap().kind, WriteKind::Structural { .. }));
    assert_eq!(bench.group().routing(90_000).routing_cache_ttl_ms, 90_000);
    // Another instance, with 10 s, has been there for long; the one with 90 s may be there too.
    bench.settings.routing_cache_ttl_ms = 10_000;
    bench.routing_ttl_age_ms = 10_000_000;
    bench.tick();
    assert_eq!(bench.group().routing(90_000).routing_cache_ttl_ms, 90_000, "it was raised just now");
    bench.pass(90_001);
    bench.tick();
    let group = bench.group();
    assert_eq!(group.routing(90_000).routing_cache_ttl_ms, 10_000, "nobody hands out more from now on");
    assert_eq!(group.max_routing_cache_ttl_ms, 90_000, "one of 90 s may have been handed out a moment ago");
    assert_eq!(group.next_deadline(&bench.settings), Some(bench.now.plus(90_000)), "{:?}", group.routing_cap);
    bench.pass(89_999);
    bench.tick();
    assert_eq!(bench.group().max_routing_cache_ttl_ms, 90_000);
    bench.pass(1);
    bench.tick();
    assert_eq!(bench.group().max_routing_cache_ttl_ms, 10_000);
    // Raised again meanwhile, it is in force at once.
    bench.settings.routing_cache_ttl_ms = 20_000;
    bench.tick();
    let group = bench.group();
    assert_eq!(
        (group.max_routing_cache_ttl_ms, group.routing(90_000).routing_cache_ttl_ms),
        (20_000, 20_000)
    );
}

#[test]
fn rule_4_1_1_members_that_come_and_go_under_new_names_do_not_fill_the_record() {
    let mut bench = Bench::new(2);
    // In a few batches: a thousand turns of a growing record would take a minute here.
    for first in [0, 10] {
        let numbers = if first == 0 { 0..10 } else { 10..1_010 };
        let ids: Vec<String> = numbers.map(|number| format!("passer-by-{number:04}")).collect();
        let joins: Vec<Command> = ids.iter().map(|id| heartbeat(bench.request(id))).collect();
        bench.turn(&joins);
        let version = bench.group().metadata_version;
        let leave = |id| heartbeat(bench.request(id).epoch(-1).version(version));
        let leaves: Vec<Command> = ids.iter().map(|id| id.as_str()).map(leave).collect();
        bench.turn(&leaves);
        bench.pass(1);
    }
    bench.tick();
    let group = bench.group();
    assert_eq!(group.members.len(), 1_000);
    assert!(!group.members.contains_key("passer-by-0009"), "the oldest go first");
    assert!(group.members.contains_key("passer-by-1009"));
    assert!(!bench.fields.contains_key("live:passer-by-0009"));
}

#[test]
fn protocol_2_a_drainer_is_not_fenced_by_an_instant_that_the_record_alone_has_seen() {
    let mut bench = Bench::new(2);
    let (mut p, mut m) = (Client::new("p", "p-1"), Client::new("m", "m-1"));
    settle(&mut bench, &mut [&mut p]);
    m.beat(&mut bench);
    p.beat_draining(&mut bench);
    assert!(bench.group().members["p"].rebalance_deadline_at.is_some());
    // A commit made while Redis' clock was hours ahead; the clock is right again.
    let ahead = bench.now.plus(7 * 3_600_000);
    bench.fields.insert("updatedAt".to_owned(), ahead.to_string().into_bytes());
    for _ in 0..10 {
        bench.pass(1_000);
        assert_eq!(p.beat_draining(&mut bench).status, Status::Ok);
        assert_eq!(m.beat(&mut bench).status, Status::Ok);
    }
    assert_eq!(bench.group().live_members().count(), 2);
}

#[test]
fn protocol_4_1_1_who_brings_the_evidence_of_a_rollback_does_not_find_everybody_expired() {
    let (mut bench, mut p, mut m) = two_settled();
    let mark = bench.mark();
    // For two leases everybody is heard, and somebody joins; then redis loses all of it.
    let mut x = Client::new("x", "x-1");
    for _ in 0..10 {
        bench.pass(3_000);
        for client in [&mut p, &mut m, &mut x] {
            client.beat(&mut bench);
        }
    }
    bench.restore(mark);
    assert!(lease_end(&bench, "m") < bench.now, "by what is left, all leases are long over");
    // This instance has served no turn meanwhile, so that only the message itself tells of the loss.
    let answer = p.beat(&mut bench);
    assert_eq!(answer.status, Status::SyncMetadata, "{answer:?}");
    let group = bench.group();
    assert!(group.metadata_correction.is_some());
    assert_eq!(group.live_members().count(), 2, "nobody is judged in the turn that learns of the loss");
    let last = bench.counts.last().unwrap();
    assert_eq!((last.leases_expired, last.rebalance_timeouts), (0, 0));
}
