//! Which messages are read at all, and whose they are (protocol 4.1 rules 2, 3 and 3a).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use rsc_core::{Command, Group, Reply};
use rsc_protocol::admin::MemberState;
use rsc_protocol::{HeartbeatRequest, HeartbeatResponse, Status};
use support::*;

/// One member that has been heard.
fn one_settled() -> (Bench, Client) {
    let mut bench = Bench::new(2);
    let mut p = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut p]);
    bench.pass(1_000);
    (bench, p)
}

/// Sends what must change nothing.
fn send_in_vain(bench: &mut Bench, request: HeartbeatRequest) -> HeartbeatResponse {
    let before = bench.fields.clone();
    let answer = bench.send(request);
    assert_eq!(bench.last_write(), None, "{answer:?}");
    assert_eq!(bench.fields, before);
    answer
}

fn evidence(bench: &Bench) -> u64 {
    bench.counts.last().unwrap().evidence_of_loss
}

#[test]
fn rule_4_1_2_another_protocol_version_is_told_so_before_anything_else() {
    let (mut bench, _) = one_settled();
    for version in [0, 2, -1] {
        let mut request = bench.request("p").epoch(-7);
        request.protocol_version = version;
        let command = Command::Heartbeat { path_member_id: "q".to_owned(), request: Box::new(request) };
        let replies = bench.turn(&[command]);
        let Reply::Heartbeat(answer) = &replies[0] else { panic!("{replies:?}") };
        assert_eq!(answer.status, Status::UnsupportedProtocol);
        assert!(answer.reason.contains(&version.to_string()), "{}", answer.reason);
        assert_eq!(bench.last_write(), None);
    }
}

#[test]
fn rule_4_1_2_a_member_id_that_differs_from_the_path_is_an_invalid_request() {
    let (mut bench, mut p) = one_settled();
    for path in ["q", "P", "p "] {
        let request = p.request(&mut bench, true);
        let command = Command::Heartbeat { path_member_id: path.to_owned(), request: Box::new(request) };
        let replies = bench.turn(&[command]);
        let Reply::Heartbeat(answer) = &replies[0] else { panic!("{replies:?}") };
        assert_eq!(answer.status, Status::InvalidRequest);
        assert_eq!(bench.last_write(), None);
    }
}

#[test]
fn rule_4_1_2_an_epoch_below_minus_one_is_an_invalid_request() {
    let (mut bench, p) = one_settled();
    let request = bench.request("p").epoch(-2).version(p.version).instance("p-1", 9_000);
    assert_eq!(send_in_vain(&mut bench, request).status, Status::InvalidRequest);
    let stranger = bench.request("stranger").epoch(-2);
    assert_eq!(send_in_vain(&mut bench, stranger).status, Status::InvalidRequest, "before UNKNOWN_MEMBER_ID");
}

#[test]
fn rule_4_1_2_a_lower_sequence_is_answered_retry_and_nothing_of_it_is_applied() {
    let (mut bench, mut p) = one_settled();
    let sequence = p.sequence;
    p.beat(&mut bench);
    bench.pass(1_000);
    for epoch in [p.epoch, -1, 0] {
        let late = bench.request("p").epoch(epoch).version(p.version).owned(&[0]).instance("p-1", sequence);
        assert_eq!(send_in_vain(&mut bench, late).status, Status::Retry, "epoch {epoch}");
    }
}

#[test]
fn rule_4_1_2_a_lower_sequence_of_a_member_that_is_gone_does_not_bring_it_back() {
    let (mut bench, p) = one_settled();
    bench.pass(2 * LEASE);
    bench.tick();
    let late = bench.request("p").instance("p-1", p.sequence - 1);
    assert_eq!(send_in_vain(&mut bench, late).status, Status::Retry);
}

#[test]
fn rule_4_1_2_an_equal_sequence_gets_the_same_answer_again_and_applies_nothing() {
    let (mut bench, mut p) = one_settled();
    let request = p.request(&mut bench, true);
    let answer = bench.send(request.clone());
    bench.pass(1_000);
    assert_eq!(bench.send(request.clone()), answer);
    // Whatever else it carried: releases, a leave, a join.
    for epoch in [p.epoch, -1, 0] {
        let mut other = request.clone().epoch(epoch).owned(&[]);
        other.runtime_consumer_capacity.runtime_max_concurrency = 77;
        let again = bench.send(other);
        assert_eq!((again.status, assigned(&again)), (Status::Ok, vec![0, 1]), "epoch {epoch}");
        assert!(bench.is_lease_only());
        let member = &bench.group().members["p"];
        assert_eq!(
            (member.state, member.live.runtime_max_concurrency, member.current.len()),
            (MemberState::Active, 4, 2)
        );
    }
}

#[test]
fn rule_4_1_2_an_equal_sequence_extends_the_recorded_lease_because_its_answer_does() {
    let (mut bench, mut p) = one_settled();
    let request = p.request(&mut bench, true);
    bench.send(request.clone());
    bench.pass(5_000);
    assert_eq!(bench.send(request).assignment_lease_ms, 13_500);
    assert_eq!(bench.group().members["p"].live.member_lease_expires_at, bench.now.plus(LEASE));
}

#[test]
fn rule_4_1_2_an_equal_sequence_of_a_membership_that_is_over_is_fenced() {
    let (mut bench, mut p) = one_settled();
    let request = p.request(&mut bench, true);
    bench.send(request.clone());
    bench.pass(2 * LEASE);
    bench.tick();
    assert_eq!(send_in_vain(&mut bench, request.clone()).status, Status::FencedMemberEpoch);
    // A copy of a join proves nothing about a later one either.
    let copy = request.epoch(0).owned(&[]);
    assert_eq!(send_in_vain(&mut bench, copy).status, Status::FencedMemberEpoch);
}

#[test]
fn rule_4_1_2_a_sequence_counts_only_with_an_instance() {
    let mut bench = Bench::new(2);
    let mut p = Client::old("p");
    settle(&mut bench, &mut [&mut p]);
    for sequence in [50, 40, 40] {
        let mut request = p.request(&mut bench, true);
        request.sequence = Some(sequence);
        request.runtime_consumer_capacity.available_concurrency = 1;
        assert_eq!(bench.send(request).status, Status::Ok);
        assert_eq!(bench.group().members["p"].live.sequence, None);
    }
    assert_eq!(bench.group().members["p"].live.active_consumer_workers, 3, "applied");
}

#[test]
fn rule_4_1_2_sequences_of_two_incarnations_are_not_compared() {
    let (mut bench, p) = one_settled();
    let join = bench.request("p").instance("p-2", p.sequence - 50);
    assert_eq!(bench.send(join).status, Status::Ok);
    assert_eq!(bench.group().members["p"].live.sequence, Some(p.sequence - 50));
}

/// Whether a round is on.
fn in_round(bench: &Bench) -> bool {
    bench.group().metadata_correction.is_some()
}

#[test]
fn rule_4_1_3_a_higher_version_is_evidence_counted_begins_a_round_and_is_not_applied() {
    let (mut bench, mut p) = one_settled();
    let before = bench.group();
    let stored = before.metadata_version;
    let request = p.request(&mut bench, true).version(stored + 1).owned(&[]);
    let answer = bench.send(request);
    assert_eq!((answer.status, evidence(&bench), in_round(&bench)), (Status::SyncMetadata, 1, true));
    assert_eq!((answer.member_epoch, answer.metadata_version), (p.epoch, stored), "Redis stays the truth");
    let after = bench.group();
    assert_eq!(after.members["p"].current, before.members["p"].current, "absence there is no release");
    assert_eq!(after.metadata_version, stored);
    let request = p.request(&mut bench, true).version(stored);
    assert_eq!((bench.send(request).status, evidence(&bench)), (Status::RevokePending, 0));
}

#[test]
fn rule_4_1_3_a_higher_epoch_is_evidence() {
    let (mut bench, mut p) = one_settled();
    let request = p.request(&mut bench, true).epoch(p.epoch + 1);
    let answer = bench.send(request);
    assert_eq!((answer.status, answer.member_epoch, evidence(&bench)), (Status::SyncMetadata, p.epoch, 1));
    assert!(in_round(&bench));
}

#[test]
fn rule_4_1_8_a_higher_epoch_for_which_no_round_may_begin_is_fenced_and_touches_nobody() {
    let (mut bench, mut p) = one_settled();
    let ahead = |bench: &mut Bench, p: &mut Client| {
        let request = p.request(bench, true).epoch(p.epoch + 1);
        bench.send(request)
    };
    ahead(&mut bench, &mut p);
    // It joins, the round goes by, and it goes on as before: it has begun a round and not synchronised since.
    p.epoch = 0;
    p.owned.clear();
    p.beat(&mut bench);
    bench.pass(LEASE);
    bench.may_expire = false;
    bench.tick();
    assert!(!in_round(&bench));
    let before = bench.group();
    let answer = ahead(&mut bench, &mut p);
    assert_eq!((answer.status, answer.member_epoch), (Status::FencedMemberEpoch, 0));
    assert_eq!((evidence(&bench), in_round(&bench)), (1, false));
    untouched(&before, &bench.group());
}

#[test]
fn rule_4_1_3_the_stored_version_with_another_token_is_evidence_an_older_one_is_not() {
    let with_token = |mut request: HeartbeatRequest, token: &str| {
        request.metadata_token = Some(token.to_owned());
        request
    };
    let (mut bench, mut p) = one_settled();
    let (version, token) = (p.version, bench.group().metadata_token);
    for (version, token) in [(version, token.as_str()), (version - 1, "of-an-older-version"), (version, "")] {
        let request = with_token(p.request(&mut bench, true).version(version), token);
        assert_eq!((bench.send(request).status, evidence(&bench)), (Status::Ok, 0), "{version} {token}");
    }
    let other = with_token(p.request(&mut bench, true), "of-another-history");
    assert_eq!((bench.send(other).status, evidence(&bench)), (Status::SyncMetadata, 1));
    assert!(in_round(&bench));
}

#[test]
fn rule_4_1_3_a_version_that_moves_within_the_batch_is_no_evidence() {
    let (mut bench, mut p) = one_settled();
    let mut m = Client::new("m", "m-1");
    let commands = [m.request(&mut bench, true), p.request(&mut bench, true)].map(heartbeat);
    let replies = bench.turn(&commands);
    assert_eq!(evidence(&bench), 0);
    let statuses: Vec<Status> = replies
        .iter()
        .map(|reply| match reply {
            Reply::Heartbeat(answer) => answer.status,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(statuses, [Status::Ok, Status::Ok]);
}

#[test]
fn rule_4_1_3_identity_comes_before_evidence() {
    let (mut bench, mut p) = one_settled();
    let ahead = bench.group().metadata_version + 100;
    let before = bench.group();
    // 3a: another incarnation.
    let request = bench.request("p").epoch(p.epoch).version(ahead).instance("p-0", 1);
    assert_eq!((bench.send(request).status, evidence(&bench)), (Status::FencedMemberEpoch, 1));
    assert!(in_round(&bench), "it begins a round but does not answer");
    untouched(&before, &bench.group());
    // 4: unknown.
    let request = bench.request("stranger").epoch(3).version(ahead);
    assert_eq!((bench.send(request).status, evidence(&bench)), (Status::UnknownMemberId, 1));
    let request = bench.request("joiner").version(ahead);
    assert_eq!((bench.send(request).status, evidence(&bench)), (Status::Ok, 1));
    // 6: a rejoin.
    p.epoch = 0;
    let request = p.request(&mut bench, true).owned(&[]).version(ahead);
    assert_eq!((bench.send(request).status, evidence(&bench)), (Status::Ok, 1));
    // 7: a leave.
    let request = bench.request("joiner").epoch(-1).version(ahead);
    assert_eq!((bench.send(request).status, evidence(&bench)), (Status::Ok, 1));
    // 5: expired.
    bench.pass(2 * LEASE);
    let request = bench.request("p").epoch(1).version(ahead).instance("p-1", 9_000);
    assert_eq!((bench.send(request).status, evidence(&bench)), (Status::FencedMemberEpoch, 1));
}

fn untouched(before: &Group, after: &Group) {
    assert_eq!(before.members, after.members);
}

#[test]
fn rule_4_1_3a_another_incarnation_never_touches_the_accepted_one() {
    let (mut bench, p) = one_settled();
    let before = bench.group();
    for (epoch, owned) in [(p.epoch, vec![0, 1]), (p.epoch, vec![]), (-1, vec![]), (1, vec![0, 7])] {
        let other = bench.request("p").epoch(epoch).version(p.version).owned(&owned);
        for request in [other.clone().instance("p-0", 9_000), other] {
            let answer = send_in_vain(&mut bench, request);
            assert_eq!((answer.status, answer.member_epoch), (Status::FencedMemberEpoch, 0));
        }
    }
    untouched(&before, &bench.group());
}

#[test]
fn rule_4_1_3a_a_record_without_an_instance_takes_the_first_that_comes_with_the_current_epoch() {
    let mut bench = Bench::new(4);
    let mut p = Client::old("p");
    settle(&mut bench, &mut [&mut p]);
    let confirmed = p.epoch;
    Client::old("m").beat(&mut bench);
    p.beat_draining(&mut bench);
    assert!(p.epoch > confirmed);
    // The epoch before is accepted from the same incarnation (rule 8), but makes nobody known.
    for epoch in [confirmed, -1, p.epoch - 1] {
        let stranger = bench.request("p").epoch(epoch).version(p.version).instance("first", 1);
        assert_eq!(send_in_vain(&mut bench, stranger).status, Status::FencedMemberEpoch, "epoch {epoch}");
    }
    p.instance = Some("first".to_owned());
    assert_eq!(p.beat_draining(&mut bench).status, Status::Ok);
    assert_eq!(bench.group().members["p"].instance_id.as_deref(), Some("first"));
    p.instance = Some("second".to_owned());
    let second = p.request(&mut bench, true);
    assert_eq!(send_in_vain(&mut bench, second).status, Status::FencedMemberEpoch);
    p.instance = None;
    let without = p.request(&mut bench, true);
    assert_eq!(
        send_in_vain(&mut bench, without).status,
        Status::FencedMemberEpoch,
        "absent differs from recorded"
    );
}

#[test]
fn rule_4_1_6_a_superseded_instance_is_not_taken_for_a_record_without_one() {
    let (mut bench, _) = one_settled();
    let mut p = Client::old("p");
    p.beat(&mut bench);
    assert_eq!(bench.group().members["p"].superseded.len(), 1);
    p.instance = Some("p-1".to_owned());
    let dead = p.request(&mut bench, true);
    assert_eq!(send_in_vain(&mut bench, dead).status, Status::FencedMemberEpoch);
    assert_eq!(bench.group().members["p"].instance_id, None);
    p.instance = Some("p-2".to_owned());
    assert_eq!(p.beat(&mut bench).status, Status::Ok, "one that was never replaced is taken");
}
