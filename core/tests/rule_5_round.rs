//! How a round is recorded, who has synchronised, and when it ends (protocol 5, *The round*).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use rsc_core::{Command, WriteKind, load};
use rsc_protocol::admin::{GroupState, MemberState};
use rsc_protocol::{ErrorCode, Status};
use serde_json::{Value, json};
use support::rounds::*;
use support::*;

/// The stored aggregate, changed as another implementation might have written it.
fn rewrite(bench: &mut Bench, change: impl FnOnce(&mut Value)) {
    let mut aggregate: Value = serde_json::from_slice(&bench.fields["aggregate"]).unwrap();
    change(&mut aggregate);
    bench.fields.insert("aggregate".to_owned(), aggregate.to_string().into_bytes());
}

#[test]
fn rule_5_the_round_is_recorded_in_the_aggregate_under_the_shared_names() {
    let (mut bench, mut p, _, _) = lost_join();
    p.beat_in_vain(&mut bench);
    let aggregate: Value = serde_json::from_slice(&bench.fields["aggregate"]).unwrap();
    let round = aggregate["metadataCorrection"].as_object().unwrap();
    for name in [
        "targetMetadataVersion",
        "observedMetadataVersion",
        "requestedAt",
        "updatedAt",
        "acknowledgedMembers",
    ] {
        assert!(round.contains_key(name), "{name}: {round:?}");
    }
    assert!(round["requestedAt"].is_string());
    assert_eq!(aggregate["correctionStarters"][0]["memberId"], "p", "outside the round");
}

#[test]
fn rule_5_start_acknowledgements_holds_and_end_move_no_version() {
    let (mut bench, mut p, mut m) = lost_leave();
    let group = bench.group();
    let before = (group.metadata_version, group.metadata_token, group.group_epoch);
    p.beat(&mut bench);
    assert!(is_on_hold(&bench, 2));
    live_for(&mut bench, 2 * LEASE, &mut [&mut p, &mut m]);
    assert!(!is_round_on(&bench));
    let group = bench.group();
    assert_eq!((group.metadata_version, group.metadata_token, group.group_epoch), before);
    assert_eq!(group.state, GroupState::Stable);
}

#[test]
fn rule_5_a_report_that_only_acknowledges_is_a_lease_only_commit() {
    let (mut bench, mut p, mut m) = round_by_actor();
    // Whoever is told that nothing changes for it has its answer recorded in its live field, too.
    for client in [&mut p, &mut m] {
        let request = client.request(&mut bench, true).version(client.version - 1);
        assert_eq!(bench.send(request).status, Status::SyncMetadata);
        assert!(bench.is_lease_only());
    }
    assert_eq!(p.beat(&mut bench).status, Status::RevokePending);
    assert!(bench.is_lease_only());
    assert!(has_synchronised(&bench, "p") && !has_synchronised(&bench, "m"));
    assert_eq!(p.beat(&mut bench).status, Status::RevokePending);
    assert!(bench.is_lease_only());
    // The aggregate's list is for people; it follows with the next structural commit.
    assert_eq!(round(&bench).acknowledged_members, Vec::<String>::new());
    let mut q = Client::full("q", "q-1");
    q.beat(&mut bench);
    assert_eq!(round(&bench).acknowledged_members, ["p", "q"]);
}

#[test]
fn rule_5_synchronised_by_the_current_version_but_not_with_another_token() {
    let (mut bench, mut p, _, _) = lost_join();
    p.beat_in_vain(&mut bench);
    let current = bench.group().metadata_version;
    let epoch = i64::try_from(bench.group().members["p"].live.member_epoch).unwrap();
    let mut other = p.request(&mut bench, true).version(current).epoch(epoch);
    other.metadata_token = Some("of-another-history".to_owned());
    assert_eq!(bench.send(other).status, Status::SyncMetadata);
    assert!(!has_synchronised(&bench, "p"));
    let mut without = p.request(&mut bench, true).version(current).epoch(epoch);
    without.metadata_token = None;
    assert_eq!(bench.send(without).status, Status::RevokePending);
    assert!(has_synchronised(&bench, "p"));
}

#[test]
fn rule_5_an_older_version_or_a_later_epoch_does_not_synchronise() {
    let (mut bench, mut p, _) = round_by_actor();
    let older = p.request(&mut bench, true).version(p.version - 1);
    assert_eq!(bench.send(older).status, Status::SyncMetadata);
    let later = p.request(&mut bench, true).epoch(p.epoch + 1);
    assert_eq!(bench.send(later).status, Status::SyncMetadata);
    assert!(!has_synchronised(&bench, "p"));
}

#[test]
fn rule_5_synchronised_by_the_version_that_the_last_answer_carried() {
    let (mut bench, mut p, mut m) = lost_leave();
    p.beat(&mut bench);
    assert_eq!(bench.group().members["p"].live.answered_version, Some(p.version));
    // Somebody else moves the version meanwhile.
    let answered = p.version;
    Client::full("q", "q-1").beat(&mut bench);
    assert!(bench.group().metadata_version > answered);
    let mut other = p.clone().request(&mut bench, true);
    other.metadata_token = Some("of-another-history".to_owned());
    assert_eq!(bench.send(other).status, Status::SyncMetadata, "with the token if it sends one");
    // That answer carried the newer version; what the one before carried no longer counts.
    p.sequence += 1;
    let request = p.request(&mut bench, true);
    assert_eq!(bench.send(request).status, Status::SyncMetadata);
    // m was answered nothing in this round yet.
    assert_eq!(m.beat(&mut bench).status, Status::SyncMetadata);
    let answered = m.version;
    Client::full("r", "r-1").beat(&mut bench);
    assert!(bench.group().metadata_version > answered);
    assert_eq!(m.beat(&mut bench).status, Status::RevokePending);
}

#[test]
fn rule_5_moves_that_others_cause_do_not_undo_it() {
    let (mut bench, mut p, _) = round_by_actor();
    assert_eq!(p.beat(&mut bench).status, Status::RevokePending);
    for other in ["q", "r"] {
        Client::full(other, other).beat(&mut bench);
    }
    assert!(bench.group().metadata_version > p.version + 1);
    // The answers that carried the newer versions were lost.
    assert_eq!(p.beat_in_vain(&mut bench).status, Status::RevokePending);
    assert_eq!(p.beat_in_vain(&mut bench).status, Status::RevokePending);
    assert!(has_synchronised(&bench, "p"));
}

#[test]
fn rule_5_what_an_earlier_round_answered_does_not_synchronise_in_a_later_one() {
    let (mut bench, mut p, mut m) = round_by_actor();
    let request = p.request(&mut bench, true).version(p.version - 1);
    p.apply(&bench.send(request));
    let answered = p.clone();
    live_for(&mut bench, 2 * LEASE, &mut [&mut p, &mut m]);
    assert!(!is_round_on(&bench));
    // The version moves on, p's answers are lost; then Redis forgets again.
    let mut q = Client::full("q", "q-1");
    q.beat(&mut bench);
    notice(&mut bench);
    p = Client { sequence: p.sequence, ..answered };
    assert_eq!(bench.group().members["p"].live.answered_version, Some(p.version));
    assert_eq!(p.beat_draining(&mut bench).status, Status::SyncMetadata);
    assert!(!has_synchronised(&bench, "p"));
    assert_eq!(p.beat_draining(&mut bench).status, Status::RevokePending);
}

#[test]
fn rule_5_joins_and_rejoins_count_as_synchronised() {
    let (mut bench, mut p, _) = round_by_actor();
    let join = bench.request("q").instance("q-1", 1);
    bench.send(join.clone());
    assert!(has_synchronised(&bench, "q"), "a join");
    p.epoch = 0;
    p.owned.clear();
    p.beat(&mut bench);
    assert!(has_synchronised(&bench, "p"), "a rejoin of the same process");
    let restart = bench.request("m").instance("m-2", 1);
    bench.send(restart);
    assert!(has_synchronised(&bench, "m"), "a restart");
    // The same join again, in a round that has begun anew.
    notice(&mut bench);
    assert!(!has_synchronised(&bench, "q"));
    assert_eq!(bench.send(join).status, Status::Ok, "the sequence is the same: the same answer");
    let join = bench.request("q").instance("q-1", 2);
    assert_eq!(bench.send(join).status, Status::Ok);
    assert!(has_synchronised(&bench, "q"));
    // One that had expired.
    bench.pass(2 * LEASE);
    bench.tick();
    assert_eq!(bench.group().members["p"].state, MemberState::Expired);
    notice(&mut bench);
    p.epoch = 0;
    p.owned.clear();
    assert_eq!(p.beat(&mut bench).status, Status::Ok);
    assert!(has_synchronised(&bench, "p"));
}

/// The conditions under which a round ends, all met but for what a test adds.
struct Ending {
    bench: Bench,
    p: Client,
    m: Client,
    /// The instant at which the round is one lease old.
    at: rsc_protocol::Timestamp,
}

fn ending() -> Ending {
    let (mut bench, mut p, mut m) = round_by_actor();
    let at = bench.now.plus(LEASE);
    live_until(&mut bench, at.plus(-1), &mut [&mut p, &mut m]);
    Ending { bench, p, m, at }
}

#[test]
fn rule_5_a_round_ends_when_it_is_one_lease_old_and_not_a_millisecond_before() {
    let Ending { mut bench, mut p, mut m, at } = ending();
    assert_eq!(p.beat(&mut bench).status, Status::RevokePending);
    bench.tick();
    assert!(is_round_on(&bench));
    bench.now = at;
    // Maintenance ends it before the request is decided.
    assert_eq!(p.beat(&mut bench).status, Status::Ok);
    assert!(!is_round_on(&bench));
    assert_eq!(m.beat(&mut bench).status, Status::Ok);
}

#[test]
fn rule_5_maintenance_ends_a_round_before_the_request_is_decided() {
    let (mut bench, mut former, mut m) = two_of_four();
    let mut p = Client::full("p", "p-2");
    live_for(&mut bench, 2 * LEASE, &mut [&mut p, &mut m]);
    notice(&mut bench);
    let at = bench.now.plus(LEASE);
    live_until(&mut bench, at, &mut [&mut p, &mut m]);
    assert!(is_round_on(&bench));
    former.epoch = 0;
    former.owned.clear();
    let answer = former.beat(&mut bench);
    assert_eq!(answer.status, Status::InvalidRequest, "in a round it would be RETRY");
    assert!(!is_round_on(&bench));
}

#[test]
fn rule_5_a_tick_ends_a_round() {
    let Ending { mut bench, at, .. } = ending();
    bench.now = at;
    bench.tick();
    assert!(!is_round_on(&bench));
    assert!(matches!(bench.last_write().unwrap().kind, WriteKind::Structural { .. }));
}

#[test]
fn rule_5_a_round_without_members_ends_too_and_has_a_deadline() {
    let mut bench = Bench::new(4);
    notice(&mut bench);
    let end = bench.now.plus(LEASE);
    assert_eq!(bench.group().next_deadline(&bench.settings), Some(end));
    bench.now = end;
    bench.tick();
    assert!(!is_round_on(&bench));
    assert_eq!(bench.group().next_deadline(&bench.settings), None);
}

#[test]
fn rule_5_the_last_to_synchronise_ends_an_old_round_with_its_own_heartbeat() {
    let (mut bench, mut p, mut m) = round_by_actor();
    let in_vain = |bench: &mut Bench, m: &mut Client| {
        let request = m.request(bench, true).version(m.version - 1);
        assert_eq!(bench.send(request).status, Status::SyncMetadata);
    };
    for _ in 0..8 {
        in_vain(&mut bench, &mut m);
        p.beat(&mut bench);
        bench.pass(3_000);
    }
    assert!(is_round_on(&bench), "m has not synchronised");
    assert_eq!(m.beat(&mut bench).status, Status::Ok);
    assert!(!is_round_on(&bench));
}

#[test]
fn rule_5_a_member_that_has_not_synchronised_keeps_the_round_open_until_it_is_fenced() {
    let (mut bench, mut p, mut m) = round_by_actor();
    let begun = bench.now;
    while bench.now.plus(3_000) < begun.plus(REBALANCE) {
        let request = m.request(&mut bench, true).version(m.version - 1);
        bench.send(request);
        p.beat(&mut bench);
        bench.pass(3_000);
        assert!(is_round_on(&bench));
    }
    bench.now = begun.plus(REBALANCE - 1);
    bench.tick();
    assert!(is_round_on(&bench));
    let until = lease_end(&bench, "m");
    bench.now = begun.plus(REBALANCE);
    bench.tick();
    let group = bench.group();
    assert_eq!(group.members["m"].state, MemberState::Fenced);
    assert!(group.holds.iter().all(|hold| hold.member_id == "m" && hold.until == until));
    assert_eq!(group.holds.iter().map(|hold| hold.shard_index).collect::<Vec<_>>(), [2, 3]);
    assert!(!is_round_on(&bench), "those are ordinary holds");
}

#[test]
fn rule_5_the_rebalance_timeout_of_a_member_is_the_one_it_was_told() {
    let (mut bench, mut p, mut m) = round_by_actor();
    bench.settings.rebalance_timeout_ms = 20_000;
    for _ in 0..10 {
        let request = m.request(&mut bench, true).version(1);
        assert_eq!(bench.send(request).status, Status::SyncMetadata);
        p.beat(&mut bench);
        bench.pass(3_000);
    }
}

#[test]
fn rule_5_a_silent_member_keeps_a_round_open_only_until_it_expires() {
    let (mut bench, mut p, m) = round_by_actor();
    drop(m);
    live_for(&mut bench, LEASE, &mut [&mut p]);
    bench.tick();
    assert_eq!(bench.group().members["m"].state, MemberState::Expired);
    assert!(!is_round_on(&bench));
}

#[test]
fn rule_5_a_hold_of_the_round_keeps_it_open() {
    let (mut bench, mut p, mut m) = round_by_actor();
    live_for(&mut bench, 6_000, &mut [&mut p, &mut m]);
    // A party that may not restart the round: it has begun one before.
    let stranger = bench.request("s").epoch(9).version(p.version + 5);
    bench.send(stranger.clone());
    let old_enough = round(&bench).requested_at.plus(LEASE);
    live_until(&mut bench, old_enough.plus(-1_000), &mut [&mut p, &mut m]);
    bench.send(stranger.owned(&[3]));
    let until = lost_future_holds(&bench, 3)[0].until;
    live_until(&mut bench, until.plus(-1), &mut [&mut p, &mut m]);
    assert!(bench.now > old_enough);
    bench.tick();
    assert!(is_round_on(&bench));
    bench.now = until;
    bench.tick();
    assert!(!is_round_on(&bench));
}

#[test]
fn rule_5_an_ordinary_hold_does_not_keep_it_open() {
    let Ending { mut bench, mut p, mut m, at } = ending();
    // m is fenced by the ownership check: what it may be reading is on hold for a lease.
    m.owned.push(0);
    assert_eq!(m.beat(&mut bench).status, Status::FencedMemberEpoch);
    bench.now = at;
    let answer = p.beat(&mut bench);
    assert!(!is_round_on(&bench));
    assert_eq!((answer.status, pending(&answer)), (Status::Ok, vec![2, 3]), "they block their own shards");
}

#[test]
fn rule_5_a_revoke_of_its_first_lease_keeps_it_open() {
    let (mut bench, mut p, mut m) = round_by_actor();
    let at = bench.now.plus(LEASE);
    live_for(&mut bench, 6_000, &mut [&mut p, &mut m]);
    let mut q = Client::full("q", "q-1");
    q.beat(&mut bench);
    for _ in 0..10 {
        for client in [&mut p, &mut m, &mut q] {
            client.beat_draining(&mut bench);
        }
        bench.pass(3_000);
    }
    assert!(bench.now > at && is_round_on(&bench));
    p.beat(&mut bench);
    assert_eq!(p.beat(&mut bench).status, Status::Ok);
    assert!(!is_round_on(&bench));
    // m had nothing to give back.
    assert_eq!(bench.group().members["m"].holding(), bench.group().target("m"));
}

#[test]
fn rule_5_a_later_drain_does_not_keep_it_open() {
    let (mut bench, mut p, mut m) = round_by_actor();
    let at = bench.now.plus(LEASE);
    while bench.now <= at {
        let older = m.request(&mut bench, true).version(1);
        assert_eq!(bench.send(older).status, Status::SyncMetadata);
        p.beat(&mut bench);
        bench.pass(3_000);
    }
    let mut q = Client::full("q", "q-1");
    q.beat(&mut bench);
    assert!(is_round_on(&bench));
    p.beat_draining(&mut bench);
    assert!(bench.group().members["p"].rebalance_deadline_at.is_some());
    assert_eq!(m.beat_draining(&mut bench).status, Status::Ok, "p still drains");
    assert!(!is_round_on(&bench));
}

#[test]
fn rule_5_a_time_jump_ends_no_round() {
    let Ending { mut bench, mut p, at, .. } = ending();
    bench.now = at;
    bench.may_grant = false;
    bench.tick();
    assert!(is_round_on(&bench));
    assert_eq!(p.beat(&mut bench).status, Status::RevokePending);
    bench.may_grant = true;
    bench.tick();
    assert!(!is_round_on(&bench));
}

#[test]
fn rule_5_nobody_expires_and_nobody_is_fenced_for_slowness_while_the_round_is_young() {
    let (mut bench, mut p, m) = two_of_four();
    let mut q = Client::full("q", "q-1");
    q.beat(&mut bench);
    p.beat_draining(&mut bench);
    let deadline = bench.group().members["p"].rebalance_deadline_at.unwrap();
    while bench.now.plus(3_000) < deadline {
        bench.pass(3_000);
        for client in [&mut p, &mut q, &mut m.clone()] {
            client.beat_draining(&mut bench);
        }
    }
    bench.pass(1_000);
    notice(&mut bench);
    bench.now = bench.now.plus(LEASE - 1);
    bench.tick();
    let group = bench.group();
    assert!(group.members.values().all(|member| member.live.member_lease_expires_at < bench.now));
    assert!(bench.now > deadline);
    assert_eq!(group.live_members().count(), 3);
    bench.pass(1);
    bench.tick();
    assert_eq!(bench.group().live_members().count(), 0, "all of them are silent");
}

#[test]
fn rule_5_an_instance_that_finds_a_young_round_expires_nobody_either() {
    let (mut bench, _, _) = round_by_actor();
    // Another instance, in service for long, loads the record.
    bench.may_expire = true;
    bench.pass(LEASE - 1);
    bench.tick();
    assert_eq!(bench.group().live_members().count(), 2);
}

#[test]
fn rule_5_nobody_is_fenced_by_an_instance_out_of_service() {
    let (mut bench, mut p, mut m) = round_by_actor();
    bench.may_expire = false;
    for _ in 0..30 {
        let request = m.request(&mut bench, true).version(1);
        bench.send(request);
        p.beat(&mut bench);
        bench.pass(3_000);
    }
    assert!(bench.group().members["m"].is_live());
    bench.may_expire = true;
    bench.tick();
    assert_eq!(bench.group().members["m"].state, MemberState::Fenced);
}

#[test]
fn rule_5_the_next_deadline_knows_the_end_of_the_first_lease_and_who_is_not_synchronised() {
    let (mut bench, mut p, mut m) = round_by_actor();
    let begun = bench.now;
    let next = |bench: &Bench| bench.group().next_deadline(&bench.settings).unwrap();
    live_for(&mut bench, 6_000, &mut [&mut p, &mut m]);
    assert_eq!(next(&bench), begun.plus(LEASE), "leases end later");
    let (mut bench, mut p, mut m) = round_by_actor();
    let begun = bench.now;
    while bench.now.plus(3_000) < begun.plus(REBALANCE) {
        let request = m.request(&mut bench, true).version(1);
        bench.send(request);
        p.beat(&mut bench);
        bench.pass(3_000);
    }
    assert_eq!(next(&bench), begun.plus(REBALANCE), "m is fenced then, though both are heard");
}

#[test]
fn rule_5_a_group_is_not_deleted_in_a_round() {
    let (bench, _, _) = round_by_actor();
    let group = bench.group();
    for force in [false, true] {
        let (code, message) =
            rsc_core::lifecycle::delete(&group, &rsc_core::Stamp::default(), bench.now, force).unwrap_err();
        assert_eq!(code, ErrorCode::MetadataSyncInProgress, "{message}");
    }
}

#[test]
fn rule_5_the_round_of_another_implementation_goes_on() {
    let (mut bench, mut p, mut m) = two_of_four();
    let requested_at = bench.now.plus(-5_000);
    let version = bench.group().metadata_version;
    rewrite(&mut bench, |aggregate| {
        aggregate["metadataCorrection"] = json!({
            "targetMetadataVersion": version,
            "observedMetadataVersion": version + 4,
            "requestedAt": requested_at,
            "updatedAt": requested_at,
            "acknowledgedMembers": ["p"],
        });
    });
    let round = round(&bench);
    assert_eq!((round.observed_metadata_version, round.requested_at), (version + 4, requested_at));
    assert!(has_synchronised(&bench, "p"), "acknowledged there");
    assert!(!has_synchronised(&bench, "m"));
    let older = m.request(&mut bench, true).version(version - 1);
    assert_eq!(bench.send(older).status, Status::SyncMetadata);
    assert_eq!(m.beat(&mut bench).status, Status::RevokePending);
    assert_eq!(p.beat(&mut bench).status, Status::RevokePending);
    live_until(&mut bench, requested_at.plus(LEASE), &mut [&mut p, &mut m]);
    assert_eq!(p.beat(&mut bench).status, Status::Ok);
    assert!(!is_round_on(&bench));
}

#[test]
fn rule_5_an_acknowledgement_in_the_aggregate_is_not_undone_by_a_live_field_without_it() {
    let (mut bench, mut p, _) = round_by_actor();
    p.beat(&mut bench);
    rewrite(&mut bench, |aggregate| {
        aggregate["metadataCorrection"]["acknowledgedMembers"] = json!(["m", "gone"]);
    });
    assert!(has_synchronised(&bench, "p") && has_synchronised(&bench, "m"));
}

#[test]
fn rule_5_an_odd_correction_value_does_not_make_the_group_unreadable() {
    let (mut bench, mut p, mut m) = two_of_four();
    bench.may_expire = true;
    let unchanged = bench.fields.clone();
    rewrite(&mut bench, |aggregate| aggregate["metadataCorrection"] = json!(null));
    assert!(!is_round_on(&bench));
    // A round of which nothing is known but that it is on: it began with the last write at the latest.
    for odd in [
        json!({}),
        json!({"requestedAt": null, "acknowledgedMembers": null, "updatedAt": null,
            "targetMetadataVersion": null, "observedMetadataVersion": null}),
        json!({"holdSetters": null, "reason": "of another implementation"}),
    ] {
        bench.fields.clone_from(&unchanged);
        rewrite(&mut bench, |aggregate| aggregate["metadataCorrection"] = odd.clone());
        let aggregate: Value = serde_json::from_slice(&bench.fields["aggregate"]).unwrap();
        assert_eq!(json!(round(&bench).requested_at), aggregate["updatedAt"], "{odd}");
        bench.tick();
        assert_eq!(bench.group().live_members().count(), 2, "nobody is fenced for it");
        assert_eq!(p.beat(&mut bench).status, Status::RevokePending);
    }
    live_for(&mut bench, 2 * LEASE, &mut [&mut p, &mut m]);
    assert!(!is_round_on(&bench));
}

#[test]
fn rule_5_a_correction_value_that_is_no_object_is_not_understood() {
    let (mut bench, _, _) = two_of_four();
    for odd in [json!("on"), json!([1]), json!(true), json!({"requestedAt": "yesterday"})] {
        rewrite(&mut bench, |aggregate| aggregate["metadataCorrection"] = odd);
        let refused = load(&bench.key, &bench.fields, &bench.settings).unwrap_err();
        assert!(matches!(refused, rsc_core::LoadError::Aggregate(_)), "{refused}");
    }
}

#[test]
fn rule_5_a_round_begun_in_a_batch_is_over_for_none_of_its_answers() {
    let (mut bench, mut p, mut m) = two_of_four();
    let commands = [
        heartbeat(p.request(&mut bench, true)),
        Command::LostWrites { observed_metadata_version: 0 },
        heartbeat(m.request(&mut bench, true)),
    ];
    let statuses: Vec<Status> = bench
        .turn(&commands)
        .into_iter()
        .filter_map(|reply| match reply {
            rsc_core::Reply::Heartbeat(answer) => Some(answer.status),
            _ => None,
        })
        .collect();
    assert_eq!(statuses, [Status::SyncMetadata, Status::RevokePending]);
}
