//! What shows that Redis lost writes, and who begins a round by it (protocol 5, *Evidence*, and what begins
//! a round or lets it begin anew).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use rsc_core::Command;
use rsc_protocol::{HeartbeatRequest, Status};
use support::rounds::*;
use support::*;

fn evidence(bench: &Bench) -> u64 {
    bench.counts.last().unwrap().evidence_of_loss
}

fn with_token(mut request: HeartbeatRequest, token: &str) -> HeartbeatRequest {
    request.metadata_token = Some(token.to_owned());
    request
}

/// Version, token and epochs before and after something that must not move them.
fn numbers(bench: &Bench) -> (u64, String, u64, u64) {
    let group = bench.group();
    (group.metadata_version, group.metadata_token, group.group_epoch, group.assignment_epoch)
}

#[test]
fn rule_5_a_known_member_with_a_higher_version_begins_a_round() {
    let (mut bench, mut p, _) = two_of_four();
    let before = numbers(&bench);
    let ahead = p.version + 1;
    let request = p.request(&mut bench, true).version(ahead);
    let answer = bench.send(request);
    assert_eq!((answer.status, evidence(&bench), rounds_begun(&bench)), (Status::SyncMetadata, 1, 1));
    let round = round(&bench);
    assert_eq!(
        (round.target_metadata_version, round.observed_metadata_version, round.requested_at),
        (before.0, ahead, bench.now)
    );
    assert_eq!(round.acknowledged_members, Vec::<String>::new());
    assert_eq!(numbers(&bench), before, "Redis stays the truth; nothing is bumped");
    assert_eq!((answer.metadata_version, answer.metadata_token), (before.0, before.1));
}

#[test]
fn rule_5_an_absurd_version_of_a_known_member_is_evidence_too() {
    let (mut bench, mut p, _) = two_of_four();
    let request = p.request(&mut bench, true).version(1 << 53);
    assert_eq!((bench.send(request).status, is_round_on(&bench)), (Status::SyncMetadata, true));
}

#[test]
fn rule_5_a_known_member_with_a_higher_epoch_begins_a_round() {
    let (mut bench, mut p, _) = two_of_four();
    let before = numbers(&bench);
    let request = p.request(&mut bench, true).epoch(p.epoch + 1);
    let answer = bench.send(request);
    assert_eq!(answer.status, Status::SyncMetadata, "equal version but higher epoch");
    assert_eq!((answer.member_epoch, evidence(&bench)), (p.epoch, 1));
    assert!(is_round_on(&bench));
    assert_eq!(numbers(&bench), before);
    assert_eq!(bench.group().members["p"].live.confirmed_member_epoch, u64::try_from(p.epoch).unwrap());
}

#[test]
fn rule_5_the_stored_version_with_another_token_begins_a_round() {
    let (mut bench, mut p, _) = two_of_four();
    let other = with_token(p.request(&mut bench, true), "of-another-history");
    let answer = bench.send(other);
    assert_eq!((answer.status, evidence(&bench)), (Status::SyncMetadata, 1));
    assert!(is_round_on(&bench));
}

#[test]
fn rule_5_an_older_version_a_fitting_token_or_none_is_no_evidence() {
    let (mut bench, mut p, _) = two_of_four();
    let (version, token) = (p.version, p.token.clone());
    for (version, token) in [(version, token.as_str()), (version, ""), (version - 1, "of-an-older-version")] {
        let request = with_token(p.request(&mut bench, true).version(version), token);
        assert_eq!((bench.send(request).status, evidence(&bench)), (Status::Ok, 0), "{version} {token}");
    }
    let mut without = p.request(&mut bench, true);
    without.metadata_token = None;
    assert_eq!((bench.send(without).status, evidence(&bench)), (Status::Ok, 0));
    assert!(!is_round_on(&bench));
}

#[test]
fn rule_5_an_unknown_member_with_a_higher_plausible_version_begins_a_round() {
    let (mut bench, _, _) = two_of_four();
    let ahead = bench.group().metadata_version + 5;
    let request = bench.request("stranger").epoch(7).version(ahead).owned(&[2]);
    let answer = bench.send(request);
    assert_eq!((answer.status, evidence(&bench)), (Status::UnknownMemberId, 1), "it does not answer");
    assert_eq!(answer.metadata_version, ahead - 5, "or a simple client would repeat the higher one for ever");
    assert_eq!(round(&bench).observed_metadata_version, ahead);
    assert_eq!(lost_future_holds(&bench, 2).len(), 1);
}

#[test]
fn rule_5_an_unknown_member_that_joins_with_a_higher_version_begins_a_round_and_joins() {
    let (mut bench, _, _) = two_of_four();
    let ahead = bench.group().metadata_version + 5;
    let request = bench.request("joiner").version(ahead).owned(&[2]);
    let answer = bench.send(request);
    assert_eq!((answer.status, assigned(&answer), is_round_on(&bench)), (Status::Ok, vec![], true));
    assert_eq!(lost_future_holds(&bench, 2), [], "what a join reports to own is ignored");
}

#[test]
fn rule_5_an_unknown_member_of_the_stored_version_is_no_evidence() {
    let (mut bench, p, _) = two_of_four();
    for version in [0, p.version - 1, p.version] {
        let request = with_token(bench.request("stranger").epoch(3).version(version), "whatever");
        assert_eq!((bench.send(request).status, evidence(&bench)), (Status::UnknownMemberId, 0));
    }
    assert!(!is_round_on(&bench));
}

#[test]
fn rule_5_an_unknown_member_millions_ahead_is_of_another_group_and_only_counted() {
    let (mut bench, _, _) = two_of_four();
    let stored = bench.group().metadata_version;
    let before = bench.fields.clone();
    for (epoch, version) in [(3, stored + 2_000_000), (-1, 1 << 53)] {
        let request = bench.request("stranger").epoch(epoch).version(version).owned(&[1]);
        assert_eq!((bench.send(request).status, evidence(&bench)), (Status::UnknownMemberId, 1));
        assert_eq!(bench.last_write(), None);
    }
    assert_eq!(bench.fields, before);
}

#[test]
fn rule_5_an_implausible_party_sets_no_holds_in_a_running_round_either() {
    let (mut bench, _, _) = round_by_actor();
    let ahead = bench.group().metadata_version + 2_000_000;
    let request = bench.request("stranger").epoch(3).version(ahead).owned(&[1]);
    assert_eq!((bench.send(request).status, evidence(&bench)), (Status::UnknownMemberId, 1));
    assert_eq!(bench.group().holds, []);
}

#[test]
fn rule_5_the_actor_begins_a_round_and_every_notice_is_a_further_loss() {
    let (mut bench, _, _) = two_of_four();
    let before = numbers(&bench);
    bench.turn(&[Command::LostWrites { observed_metadata_version: before.0 + 9 }]);
    let first = round(&bench);
    assert_eq!((first.target_metadata_version, first.observed_metadata_version), (before.0, before.0 + 9));
    bench.pass(4_000);
    bench.turn(&[Command::LostWrites { observed_metadata_version: before.0 }]);
    let second = round(&bench);
    assert_eq!((second.requested_at, second.observed_metadata_version), (bench.now, before.0 + 9));
    assert_eq!(numbers(&bench), before);
}

#[test]
fn rule_5_a_round_that_begins_anew_in_the_same_millisecond_gets_another_name() {
    let (mut bench, mut p, _) = round_by_actor();
    p.beat(&mut bench);
    assert!(has_synchronised(&bench, "p"));
    notice(&mut bench);
    assert!(!has_synchronised(&bench, "p"), "acknowledgements begin anew");
}

#[test]
fn rule_5_evidence_comes_after_the_order_of_messages() {
    let (mut bench, p, _) = two_of_four();
    let ahead = p.version + 5;
    let late = bench.request("p").epoch(p.epoch).version(ahead).instance("p-1", p.sequence - 1);
    assert_eq!((bench.send(late).status, evidence(&bench)), (Status::Retry, 0));
    assert!(!is_round_on(&bench));
}

#[test]
fn rule_5_evidence_begins_a_round_but_identity_answers() {
    let (mut bench, p, mut m) = two_of_four();
    let ahead = p.version + 5;
    // 3a: another incarnation.
    let zombie = bench.request("p").epoch(p.epoch).version(ahead).owned(&[2]).instance("p-0", 1);
    let answer = bench.send(zombie);
    assert_eq!((answer.status, answer.member_epoch), (Status::FencedMemberEpoch, 0));
    assert!(is_round_on(&bench));
    assert_eq!(lost_future_holds(&bench, 2).len(), 1, "what it claims is held");
    // 8: an epoch below the confirmed one.
    let stale = m.request(&mut bench, true).epoch(1).version(ahead);
    assert!(m.epoch > 1);
    assert_eq!(bench.send(stale).status, Status::FencedMemberEpoch);
    assert_eq!(rounds_begun(&bench), 2, "but a further loss it is");
    // 7: leaving.
    let leave = bench.request("p").epoch(-1).version(ahead).instance("p-1", p.sequence + 1);
    assert_eq!((bench.send(leave).status, rounds_begun(&bench)), (Status::Ok, 3));
}

#[test]
fn rule_5_a_further_party_lets_the_round_begin_anew() {
    let (mut bench, mut p, mut m, mut c) = lost_join();
    p.beat_in_vain(&mut bench);
    let first = round(&bench);
    bench.pass(4_000);
    m.beat_in_vain(&mut bench);
    assert_eq!(round(&bench).requested_at, first.requested_at.plus(4_000));
    bench.pass(4_000);
    assert_eq!(c.beat_in_vain(&mut bench).status, Status::UnknownMemberId);
    assert_eq!(round(&bench).requested_at, first.requested_at.plus(8_000));
    assert_eq!(bench.group().correction_starters.len(), 3);
}

#[test]
fn rule_5_another_instance_of_a_starter_is_another_starter() {
    let (mut bench, mut p, _, _) = lost_join();
    p.beat_in_vain(&mut bench);
    bench.pass(1_000);
    p.instance = Some("p-0".to_owned());
    assert_eq!(p.beat_in_vain(&mut bench).status, Status::FencedMemberEpoch);
    assert_eq!((rounds_begun(&bench), round(&bench).requested_at), (2, bench.now));
}

#[test]
fn rule_5_a_starter_neither_begins_nor_restarts_until_it_has_synchronised() {
    let (mut bench, mut p, _) = two_of_four();
    for lead in 1..5 {
        let request = p.request(&mut bench, true).version(p.version + lead);
        assert_eq!((bench.send(request).status, evidence(&bench)), (Status::SyncMetadata, 1));
        assert_eq!(rounds_begun(&bench), 1, "whatever it reports");
        bench.pass(1_000);
    }
    assert_eq!(bench.group().correction_starters.len(), 1);
    p.beat(&mut bench);
    assert!(has_synchronised(&bench, "p"));
    assert_eq!(bench.group().correction_starters, []);
    let request = p.request(&mut bench, true).version(p.version + 1);
    bench.send(request);
    assert_eq!(rounds_begun(&bench), 2);
    assert!(!has_synchronised(&bench, "p"));
}

#[test]
fn rule_5_a_starter_that_only_rejoins_has_not_shown_that_it_reads_answers() {
    let (mut bench, mut p, _) = two_of_four();
    let request = p.request(&mut bench, true).version(p.version + 1);
    bench.send(request);
    let rejoin = p.request(&mut bench, true).epoch(0).owned(&[]).version(p.version + 1);
    assert_eq!(bench.send(rejoin).status, Status::Ok);
    assert!(has_synchronised(&bench, "p"), "who starts with nothing has nothing to correct");
    assert_eq!(bench.group().correction_starters.len(), 1);
    let request = p.request(&mut bench, true).version(p.version + 7).epoch(p.epoch);
    bench.send(request);
    assert_eq!(rounds_begun(&bench), 1);
}

#[test]
fn rule_5_a_starter_that_speaks_from_the_current_version_after_the_round_may_begin_one_again() {
    let (mut bench, mut p, mut m, mut c) = lost_join();
    c.beat(&mut bench);
    assert_eq!(bench.group().correction_starters.len(), 1);
    // It comes back only when the round is over.
    live_for(&mut bench, 2 * LEASE, &mut [&mut p, &mut m]);
    assert!(!is_round_on(&bench));
    assert_eq!(bench.group().correction_starters.len(), 1);
    settle(&mut bench, &mut [&mut p, &mut m, &mut c]);
    assert_eq!(bench.group().correction_starters, []);
    let begun = rounds_begun(&bench);
    let request = c.request(&mut bench, true).version(c.version + 1);
    assert_eq!(bench.send(request).status, Status::SyncMetadata);
    assert_eq!(rounds_begun(&bench), begun + 1);
}

#[test]
fn rule_5_starters_are_forgotten_after_the_retention() {
    let (mut bench, mut p, mut m) = two_of_four();
    let ahead = p.version + 5;
    let stranger = |bench: &mut Bench| {
        let request = bench.request("stranger").epoch(3).version(ahead);
        bench.send(request);
    };
    stranger(&mut bench);
    let begun_at = bench.now;
    live_for(&mut bench, RETENTION - 3_000, &mut [&mut p, &mut m]);
    stranger(&mut bench);
    assert_eq!((bench.group().correction_starters.len(), rounds_begun(&bench)), (1, 1));
    live_until(&mut bench, begun_at.plus(RETENTION - 1), &mut [&mut p, &mut m]);
    bench.tick();
    assert_eq!(bench.group().correction_starters.len(), 1);
    bench.pass(1);
    bench.tick();
    assert_eq!(bench.group().correction_starters, []);
    stranger(&mut bench);
    assert_eq!(rounds_begun(&bench), 2);
}

#[test]
fn rule_5_starters_go_with_their_member() {
    let mut bench = Bench::new(4);
    let (mut p, mut m) = (Client::full("p", "p-1"), Client::full("m", "m-1"));
    settle(&mut bench, &mut [&mut p, &mut m]);
    // p's membership is over; half a retention later its zombie begins a round.
    let leave = bench.request("p").epoch(-1).version(p.version).revoked(&p.owned).instance("p-1", 9_000);
    bench.send(leave);
    let left_at = bench.now;
    live_for(&mut bench, RETENTION / 2, &mut [&mut m]);
    let zombie = bench.request("p").epoch(p.epoch).version(m.version + 5).instance("p-1", 9_001);
    assert_eq!(bench.send(zombie).status, Status::FencedMemberEpoch);
    assert_eq!(bench.group().correction_starters.len(), 1);
    live_until(&mut bench, left_at.plus(RETENTION - 1), &mut [&mut m]);
    assert_eq!(bench.group().correction_starters.len(), 1);
    bench.pass(1);
    bench.tick();
    assert!(!bench.group().members.contains_key("p"));
    assert_eq!(bench.group().correction_starters, []);
}

#[test]
fn rule_5_evidence_of_the_second_of_a_batch_answers_the_first_too() {
    let (mut bench, mut p, mut m, _) = lost_join();
    // m is told nothing new in this history: it speaks from the record's version.
    m.version = bench.group().metadata_version;
    m.token = bench.group().metadata_token;
    m.epoch = i64::try_from(bench.group().members["m"].live.member_epoch).unwrap();
    m.owned = vec![2, 3];
    let commands = [m.request(&mut bench, true), p.request(&mut bench, true)].map(heartbeat);
    for reply in bench.turn(&commands) {
        let rsc_core::Reply::Heartbeat(answer) = reply else { panic!("{reply:?}") };
        assert_eq!(answer.status, Status::SyncMetadata, "computed from the final state");
    }
}

#[test]
fn ever_new_names_begin_a_bounded_number_of_rounds_and_hold_a_bounded_number_of_shards() {
    let mut bench = Bench::new(4);
    let mut p = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut p]);
    let ahead = bench.group().metadata_version + 10;
    let claims: Vec<u32> = (0..2_000).collect();
    let mut begun = 0;
    for stranger in 0..200 {
        let request = bench.request(&format!("stranger-{stranger}")).epoch(5).version(ahead).owned(&claims);
        bench.send(request);
        begun += bench.counts.last().unwrap().corrections_begun;
    }
    assert_eq!(begun, 8);
    let rows = bench.group().holds.len();
    assert!(rows <= 4 * 4 + 4_096, "{rows}");
    // The same from one name with ever new incarnations.
    for incarnation in 0..100 {
        let request = bench.request("p").epoch(1).version(ahead).instance(&format!("p-x{incarnation}"), 1);
        bench.send(request);
        begun += bench.counts.last().unwrap().corrections_begun;
    }
    assert!(begun <= 8 + 17, "{begun}");
    assert!(bench.group().correction_starters.len() <= 8 + 17);
    // The group comes out of it although somebody goes on speaking so.
    let bound = bench.now.plus(2 * LEASE + REBALANCE);
    while bench.group().metadata_correction.is_some() {
        assert!(bench.now < bound, "frozen");
        let request = bench.request("stranger-new").epoch(5).version(ahead).owned(&claims);
        bench.send(request);
        p.beat(&mut bench);
        bench.pass(1_000);
    }
}
