//! What every answer carries (protocol 4), and when epochs, versions and revisions move (protocol 1).

mod support;

use rsc_core::view::without_group;
use rsc_core::write::WriteKind;
use rsc_core::{Command, Group, Reply, Settings};
use rsc_protocol::{HeartbeatRequest, HeartbeatResponse, Status};
use serde_json::{Value, json};
use support::*;

fn settled() -> (Bench, Client) {
    let mut bench = Bench::new(2);
    let mut p = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut p]);
    bench.pass(1_000);
    (bench, p)
}

/// One answer of every status, with its request.
fn every_status() -> Vec<(HeartbeatRequest, HeartbeatResponse, Group)> {
    type Ask = fn(&mut Bench, &mut Client) -> HeartbeatRequest;
    let asks: [(Status, Ask); 8] = [
        (Status::Ok, |bench, p| p.request(bench, true)),
        (Status::SyncMetadata, |bench, p| p.request(bench, true).version(9_999)),
        (Status::RevokePending, |bench, p| {
            bench.turn(&[rsc_core::Command::LostWrites { observed_metadata_version: 9_999 }]);
            p.request(bench, true)
        }),
        (Status::Retry, |bench, p| {
            let sequence = p.sequence - 1;
            p.request(bench, true).instance("p-1", sequence)
        }),
        (Status::UnknownMemberId, |bench, p| bench.request("stranger").epoch(3).version(p.version - 1)),
        (Status::FencedMemberEpoch, |bench, p| p.request(bench, true).instance("p-0", 1)),
        (Status::InvalidRequest, |bench, p| p.request(bench, true).epoch(-2)),
        (Status::UnsupportedProtocol, |bench, p| {
            let mut request = p.request(bench, true);
            request.protocol_version = 2;
            request
        }),
    ];
    asks.into_iter()
        .map(|(status, ask)| {
            let (mut bench, mut p) = settled();
            let request = ask(&mut bench, &mut p);
            let answer = bench.send(request.clone());
            assert_eq!(answer.status, status, "{answer:?}");
            (request, answer, bench.group())
        })
        .collect()
}

#[test]
fn protocol_4_every_answer_carries_every_field() {
    for (_, answer, _) in every_status() {
        let json: Value = serde_json::to_value(&answer).unwrap();
        for field in [
            "responseTo",
            "status",
            "memberId",
            "memberEpoch",
            "heartbeatIntervalMs",
            "rebalanceTimeoutMs",
            "groupEpoch",
            "assignmentEpoch",
            "metadataVersion",
            "assignment",
            "assignmentLeaseMs",
            "metadataToken",
            "maxWaitMs",
            "reason",
        ] {
            assert!(json.get(field).is_some_and(|value| !value.is_null()), "{field} of {:?}", answer.status);
        }
        for field in ["assignedShards", "pendingShards", "revokingShards"] {
            assert!(json["assignment"][field].is_array(), "{field} of {:?}", answer.status);
        }
        assert_eq!(json["assignment"]["metadataVersion"], json["metadataVersion"], "{:?}", answer.status);
    }
}

#[test]
fn protocol_4_every_answer_names_its_request_its_member_and_the_timing() {
    for (request, answer, group) in every_status() {
        assert_eq!((&answer.response_to, &answer.member_id), (&request.request_id, &request.member_id));
        assert_eq!((answer.heartbeat_interval_ms, answer.rebalance_timeout_ms), (3_000, 60_000));
        assert_eq!(
            (answer.group_epoch, answer.assignment_epoch),
            (group.group_epoch, group.assignment_epoch)
        );
        assert_eq!(answer.max_wait_ms, 0, "not supported yet (protocol 4.5)");
    }
}

#[test]
fn protocol_4_every_status_but_ok_gives_a_reason_and_only_three_extend_a_lease() {
    for (_, answer, _) in every_status() {
        let extends = matches!(answer.status, Status::Ok | Status::SyncMetadata | Status::RevokePending);
        assert_eq!(answer.reason.is_empty(), answer.status == Status::Ok, "{answer:?}");
        assert_eq!(answer.assignment_lease_ms > 0, extends, "{answer:?}");
        assert_eq!(!assigned(&answer).is_empty(), extends, "{answer:?}");
        assert!(extends || (pending(&answer).is_empty() && awaited(&answer).is_empty()));
    }
}

#[test]
fn protocol_4_unknown_and_fenced_carry_the_groups_current_version_and_epoch_0() {
    let mut seen = 0;
    for (_, answer, group) in every_status() {
        if matches!(answer.status, Status::UnknownMemberId | Status::FencedMemberEpoch) {
            assert_eq!(
                answer.metadata_version, group.metadata_version,
                "else it repeats a higher one for ever"
            );
            assert_eq!(answer.metadata_token, group.metadata_token);
            assert_eq!(answer.member_epoch, 0, "which is what to send next");
            seen += 1;
        }
    }
    assert_eq!(seen, 2);
}

#[test]
fn protocol_4_retry_leaves_nothing_to_adopt() {
    let (mut bench, mut p) = settled();
    let late = p.sequence - 1;
    let mut request = p.request(&mut bench, true).version(9_999).instance("p-1", late);
    request.metadata_token = Some("mine".to_owned());
    let answer = bench.send(request);
    assert_eq!(answer.status, Status::Retry);
    assert_eq!((answer.member_epoch, answer.metadata_version), (p.epoch, 9_999));
    assert_eq!((answer.assignment.metadata_version, answer.metadata_token.as_str()), (9_999, "mine"));
}

#[test]
fn protocol_4_ok_carries_lease_version_token_and_a_fencing_token_per_assigned_shard() {
    let (mut bench, mut p) = settled();
    let answer = p.beat(&mut bench);
    let group = bench.group();
    let live = &group.members["p"].live;
    assert_eq!(answer.assignment_lease_ms, 13_500);
    assert!(
        live.member_lease_expires_at >= bench.now.plus(i64::try_from(answer.assignment_lease_ms).unwrap())
    );
    assert_eq!(
        (answer.metadata_version, &answer.metadata_token),
        (group.metadata_version, &group.metadata_token)
    );
    for shard in &answer.assignment.assigned_shards {
        assert_eq!(shard.fencing_token, Some(group.fencing_tokens[&shard.shard_index]));
    }
    assert_eq!(answer.assignment.assigned_shards.len(), 2);
}

#[test]
fn protocol_4_without_a_group_every_field_is_there_and_0_or_empty() {
    let mut bench = Bench::new(1);
    let request = bench.request("p").epoch(7).version(8);
    let answer = without_group(&request, Status::UnknownMemberId, "no such group", &Settings::default());
    let json = serde_json::to_value(&answer).unwrap();
    let expected = json!({
        "responseTo": request.request_id, "status": "UNKNOWN_MEMBER_ID", "memberId": "p", "memberEpoch": 0,
        "heartbeatIntervalMs": 3_000, "rebalanceTimeoutMs": 60_000, "groupEpoch": 0, "assignmentEpoch": 0,
        "metadataVersion": 0, "assignmentLeaseMs": 0, "metadataToken": "", "maxWaitMs": 0,
        "reason": "no such group",
        "assignment": {
            "assignedShards": [], "pendingShards": [], "revokingShards": [], "metadataVersion": 0,
        },
    });
    assert_eq!(json, expected);
    let retry = without_group(&request, Status::Retry, "busy", &Settings::default());
    assert_eq!((retry.member_epoch, retry.metadata_version), (7, 8), "nothing to adopt");
    assert_eq!(retry.assignment.metadata_version, 8);
}

#[test]
fn protocol_1_group_epoch_assignment_epoch_and_version_move_together_when_membership_changes() {
    type Change = fn(&mut Bench, &mut Client);
    let changes: [(&str, Change); 5] = [
        ("join", |bench, _| {
            Client::new("q", "q-1").beat(bench);
        }),
        ("supersession", |bench, _| {
            Client::new("p", "p-2").beat(bench);
        }),
        ("leave", |bench, p| {
            let leave = p.request(bench, true).epoch(-1);
            bench.send(leave);
        }),
        ("expiry", |bench, _| {
            bench.pass(LEASE);
            bench.tick();
        }),
        ("fencing", |bench, p| {
            let claim = p.request(bench, true).owned(&[0, 1, 2]);
            bench.send(claim);
        }),
    ];
    for (what, change) in changes {
        let (mut bench, mut p) = settled();
        let before = bench.group();
        change(&mut bench, &mut p);
        let after = bench.group();
        assert!(after.group_epoch > before.group_epoch, "{what}");
        assert_eq!(after.assignment_epoch, after.group_epoch, "{what}");
        assert_eq!(after.metadata_version, before.metadata_version + 1, "{what}");
        assert_ne!(after.metadata_token, before.metadata_token, "{what}: drawn anew with each version");
        assert_eq!(after.store_revision, before.store_revision + 1, "{what}");
        let write = bench.last_write().unwrap();
        assert!(
            matches!(write.kind, WriteKind::Structural { revision, .. } if revision == after.store_revision)
        );
        assert!(write.history.is_some(), "{what} is observable");
    }
}

#[test]
fn protocol_2_history_gets_one_compact_entry_per_observable_transition() {
    let (mut bench, _) = settled();
    let mut q = Client::new("q", "q-1");
    q.beat(&mut bench);
    let group = bench.group();
    let entry: Value = serde_json::from_str(bench.last_write().unwrap().history.as_ref().unwrap()).unwrap();
    assert_eq!(entry["metadataVersion"], json!(group.metadata_version));
    assert_eq!(entry["groupEpoch"], json!(group.group_epoch));
    let kinds: Vec<&str> =
        entry["transitions"].as_array().unwrap().iter().map(|row| row["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["MEMBER_JOINED", "TARGET_CHANGED"]);
    q.beat(&mut bench);
    assert_eq!(bench.last_write().unwrap().history, None, "STARTING to ACTIVE is no transition of that kind");
}

#[test]
fn protocol_4_replies_come_one_per_command_in_order() {
    let (mut bench, mut p) = settled();
    let ids = [p.request(&mut bench, true), bench.request("q"), bench.request("r").epoch(5)];
    let mut commands: Vec<Command> = ids.iter().cloned().map(heartbeat).collect();
    commands.insert(1, Command::Tick);
    let replies = bench.turn(&commands);
    let named: Vec<Option<&str>> = replies
        .iter()
        .map(|reply| match reply {
            Reply::Heartbeat(answer) => Some(answer.response_to.as_str()),
            _ => None,
        })
        .collect();
    let id = |index: usize| Some(ids[index].request_id.as_str());
    assert_eq!(named, [id(0), None, id(1), id(2)]);
}
