//! What the simulation found in the core, each with the right value pinned.

mod support;

use rsc_protocol::Status;
use support::rounds::*;
use support::*;

/// A client that reports ever higher versions is fenced and rejoins; it must not begin a round again once
/// per retention, not even by what it says before it has heard that it was fenced.
#[test]
fn a_living_starter_is_not_forgotten_after_the_retention() {
    let mut bench = Bench::new(4);
    let mut broken = Client::new("broken", "broken-1");
    let mut other = Client::new("m", "m-1");
    settle(&mut bench, &mut [&mut broken, &mut other]);
    let mut begun = 0;
    let until = bench.now.plus(2 * RETENTION);
    while bench.now < until {
        let request = broken.request(&mut bench, true);
        let version = request.metadata_version + 1_000;
        let request = if request.member_epoch == 0 { request } else { request.version(version) };
        let answer = bench.send(request);
        begun += bench.last.as_ref().map_or(0, |decision| decision.counts.corrections_begun);
        match answer.status {
            Status::SyncMetadata => broken.owned.retain(|shard| assigned(&answer).contains(shard)),
            _ => broken.apply(&answer),
        }
        other.beat(&mut bench);
        bench.pass(3_000);
    }
    assert_eq!(begun, 1);
    assert_eq!(bench.group().correction_starters.len(), 1);
}

/// After a rollback a dead process's messages happened to carry the epoch of a client without `instanceId`: it
/// was taken for that client, got it fenced with holds in its own name, and lifted those with its next
/// message while the client went on reading.
#[test]
fn a_former_incarnation_with_the_epoch_of_its_successor_without_instance_touches_nothing() {
    let mut bench = Bench::new(4);
    let mut dead = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut dead]);
    bench.pass(LEASE - 1);
    let mut reader = Client::old("p");
    reader.beat(&mut bench);
    bench.pass(LEASE);
    assert_eq!(reader.beat(&mut bench).status, Status::FencedMemberEpoch);
    reader.beat(&mut bench);
    assert_eq!(reader.owned, [0, 1, 2, 3]);
    let ghost = bench.request("p").epoch(reader.epoch).version(1).owned(&[0]).instance("p-1", 9_000);
    assert_eq!(bench.send(ghost).status, Status::FencedMemberEpoch);
    let ghost = bench.request("p").epoch(0).version(1).instance("p-1", 9_001);
    assert_eq!(bench.send(ghost).status, Status::Retry);
    assert!(bench.group().members["p"].is_live());
    let mut newcomer = Client::new("p", "p-3");
    assert!(assigned(&newcomer.beat(&mut bench)).is_empty(), "what the reader reads is on hold");
}

/// A shard that a round had taken over from its owner's claim carried no grant: a heartbeat without `sequence`,
/// late by more than a lease, released it again while it was read.
#[test]
fn a_late_report_does_not_release_what_a_round_took_over() {
    let (mut bench, mut p) = lost_grant();
    let group = bench.group();
    let mut late = bench.request("p").version(group.metadata_version).owned(&[0, 1]);
    late.instance_id = Some("p-1".to_owned());
    assert_eq!(p.beat(&mut bench).status, Status::SyncMetadata);
    assert_eq!(p.beat(&mut bench).status, Status::RevokePending);
    assert_eq!(p.owned, [0, 1, 2, 3]);
    bench.send(late.epoch(p.epoch));
    assert_eq!(bench.group().members["p"].holding(), [0, 1, 2, 3].into(), "it is still read");
}

/// Redis time jumped: the end of a hold that moves with its member's lease had lost its meaning as the lease's
/// had, but the hold was dropped while the member was spared, and not set again: once per round.
#[test]
fn a_jump_of_time_does_not_end_the_hold_of_a_claim_that_is_still_named() {
    let (mut bench, mut p, mut m) = lost_leave();
    p.beat_draining(&mut bench);
    let held = lost_future_holds(&bench, 2).len();
    assert_eq!(held, 1);
    bench.pass(10 * LEASE);
    bench.may_expire = false;
    bench.may_grant = false;
    m.beat(&mut bench);
    assert!(bench.group().members["p"].is_live(), "spared: the instance is out of service");
    assert_eq!(lost_future_holds(&bench, 2).len(), 1, "and so is what it still drains");
    p.beat_draining(&mut bench);
    assert_eq!(lost_future_holds(&bench, 2).len(), 1);
}

/// In one batch a member's claim was taken over and another party's hold was set on the same shard: the stamp of
/// what was taken over is a new one and waits for the hold, the shard stays its reader's.
#[test]
fn a_shard_taken_over_beside_a_new_hold_is_stamped_when_the_hold_is_over() {
    let (mut bench, mut p) = lost_grant();
    let ahead = p.version + 1;
    let taken = p.request(&mut bench, true);
    let stranger = bench.request("stranger").epoch(3).version(ahead).owned(&[2]);
    bench.turn(&[heartbeat(taken), heartbeat(stranger)]);
    let member = &bench.group().members["p"];
    assert_eq!(member.holding(), [0, 1, 2, 3].into());
    assert_eq!([2, 3].map(|shard| member.granted.contains_key(&shard)), [false, true]);
    assert_eq!(lost_future_holds(&bench, 2).len(), 1);
}
