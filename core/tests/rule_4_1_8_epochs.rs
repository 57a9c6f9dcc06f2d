//! Which epochs are a member's own (protocol 4.1 rule 8), and when they move (protocol 1).

mod support;

use rsc_protocol::admin::MemberState;
use rsc_protocol::{HeartbeatRequest, HeartbeatResponse, Status};
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

/// Epochs handed to p: confirmed `first`, then `second` and `third`, whose answers were lost.
fn lost_epochs() -> (Bench, Client, [i64; 3]) {
    let (mut bench, mut p) = one_settled(6);
    let mut epochs = vec![p.epoch];
    for other in ["m1", "m2"] {
        Client::new(other, other).beat(&mut bench);
        let request = p.request(&mut bench, true);
        epochs.push(bench.send(request).member_epoch);
    }
    let epochs: [i64; 3] = epochs.try_into().unwrap();
    assert!(epochs[0] < epochs[1] && epochs[1] < epochs[2]);
    let live = &bench.group().members["p"].live;
    assert_eq!(i64::try_from(live.confirmed_member_epoch).unwrap(), epochs[0]);
    (bench, p, epochs)
}

#[test]
fn rule_4_1_8_an_epoch_between_confirmed_and_current_is_accepted_and_confirmed() {
    for index in 0..3 {
        let (mut bench, mut p, epochs) = lost_epochs();
        p.epoch = epochs[index];
        let request = p.request(&mut bench, true);
        assert_eq!(bench.send(request).status, Status::Ok, "epoch {index} of {epochs:?}");
        let confirmed = bench.group().members["p"].live.confirmed_member_epoch;
        assert_eq!(i64::try_from(confirmed).unwrap(), epochs[index]);
        for (older, epoch) in epochs.into_iter().enumerate() {
            let request = p.request(&mut bench, true).epoch(epoch);
            let expected = if older < index { Status::FencedMemberEpoch } else { Status::Ok };
            assert_eq!(bench.send(request).status, expected, "{epoch} after {} was confirmed", epochs[index]);
        }
    }
}

#[test]
fn rule_4_1_8_a_lower_epoch_is_fenced_and_the_accepted_incarnation_untouched() {
    let (mut bench, mut p, epochs) = lost_epochs();
    p.epoch = epochs[1];
    let request = p.request(&mut bench, true);
    bench.send(request);
    for epoch in [1, epochs[0]] {
        let request = p.request(&mut bench, true).epoch(epoch).owned(&[]);
        let answer = send_in_vain(&mut bench, request);
        assert_eq!((answer.status, answer.member_epoch), (Status::FencedMemberEpoch, 0));
    }
    assert_eq!(bench.group().members["p"].state, MemberState::Active);
}

#[test]
fn protocol_1_a_member_epoch_moves_only_when_the_member_itself_is_answered() {
    let (mut bench, mut p, m) = two_settled();
    let before = bench.group();
    let epochs = |bench: &Bench, id: &str| {
        let live = &bench.group().members[id].live;
        (live.member_epoch, live.confirmed_member_epoch)
    };
    Client::new("c", "c-1").beat(&mut bench);
    let group = bench.group();
    assert!(group.assignment_epoch > before.assignment_epoch);
    for id in ["p", "m"] {
        assert_eq!(epochs(&bench, id), epochs_of(&before, id), "{id} was not answered");
    }
    let answer = p.beat_draining(&mut bench);
    assert_eq!(answer.member_epoch, i64::try_from(group.assignment_epoch).unwrap());
    assert_eq!(epochs(&bench, "p"), (group.assignment_epoch, before.members["p"].live.member_epoch));
    assert_eq!(epochs(&bench, "m"), epochs_of(&before, "m"), "{} was not answered", m.id);
    p.beat_draining(&mut bench);
    assert_eq!(
        epochs(&bench, "p"),
        (group.assignment_epoch, group.assignment_epoch),
        "reported, so confirmed"
    );
}

fn epochs_of(group: &rsc_core::Group, id: &str) -> (u64, u64) {
    let live = &group.members[id].live;
    (live.member_epoch, live.confirmed_member_epoch)
}
