//! Records as another implementation of the protocol writes them: schema 1, none of our additions
//! (protocol 2). They load, their groups go on, and what is not ours stays.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use rsc_core::Command;
use rsc_core::member::{Grant, Termination};
use rsc_core::write::{RawFields, WriteKind};
use rsc_protocol::admin::{GroupState, MemberState};
use rsc_protocol::{HeartbeatRequest, Status, Timestamp};
use serde_json::{Value, json};
use support::*;

const VERSION: u64 = 41;

fn shard_list(shards: &[u32]) -> Value {
    shards.iter().map(|shard| json!({ "shardIndex": shard })).collect()
}

fn member(id: &str, current: &[u32]) -> Value {
    let heard = Timestamp::from_millis(START);
    json!({
        "memberId": id, "memberName": null, "state": "ACTIVE", "memberEpoch": 12, "metadataVersion": VERSION,
        "runtimeMaxConcurrency": 8, "activeConsumerWorkers": 2, "currentAssignment": shard_list(current),
        "revoking": [], "lastHeartbeatAt": heard, "memberLeaseExpiresAt": heard.plus(LEASE),
        "rebalanceTimeoutMs": 60_000, "rebalanceDeadlineAt": null, "shardProgress": null,
        "zone": "eu-west-1b",
    })
}

/// Two members, a with 0 and 1, b with 2 and 3, converged.
fn aggregate() -> Value {
    json!({
        "streamPrefix": "orders", "consumerGroup": "billing", "schemaVersion": 1, "storeRevision": 7,
        "groupEpoch": 12, "metadataVersion": VERSION, "assignmentEpoch": 12, "state": "STABLE", "shardCount": 4,
        "members": { "a": member("a", &[0, 1]), "b": member("b", &[2, 3]) },
        "targetAssignments": { "a": shard_list(&[0, 1]), "b": shard_list(&[2, 3]) },
        "migrations": {}, "activeReshardingId": null, "metadataCorrection": null,
        "createdAt": "2027-01-15T07:00:00Z", "updatedAt": Timestamp::from_millis(START),
        "labels": { "team": "payments" },
    })
}

fn bench_with(aggregate: &Value) -> Bench {
    let mut bench = Bench::new(1);
    bench.fields = RawFields::from([
        ("aggregate".to_owned(), aggregate.to_string().into_bytes()),
        ("revision".to_owned(), b"7".to_vec()),
        ("schemaVersion".to_owned(), b"1".to_vec()),
        ("layoutVersion".to_owned(), b"1".to_vec()),
        ("updatedAt".to_owned(), aggregate["updatedAt"].as_str().unwrap().as_bytes().to_vec()),
    ]);
    bench.pass(1_000);
    bench
}

/// `edit` on the aggregate, then a bench with it.
fn edited(edit: impl FnOnce(&mut Value)) -> Bench {
    let mut aggregate = aggregate();
    edit(&mut aggregate);
    bench_with(&aggregate)
}

fn steady(bench: &mut Bench, id: &str, owned: &[u32]) -> HeartbeatRequest {
    bench.request(id).epoch(12).version(VERSION).owned(owned)
}

#[test]
fn protocol_2_an_aggregate_without_our_additions_loads_with_their_defaults() {
    let group = bench_with(&aggregate()).group();
    assert_eq!((group.store_revision, group.group_epoch, group.metadata_version), (7, 12, VERSION));
    assert_eq!((group.state, group.metadata_token.as_str()), (GroupState::Stable, ""));
    assert!(group.holds.is_empty() && group.fencing_tokens.is_empty() && !group.provisioning_pending);
    assert_eq!(group.max_routing_cache_ttl_ms, 30_000);
    let a = &group.members["a"];
    assert_eq!(a.live.confirmed_member_epoch, a.live.member_epoch);
    let grant = Grant { metadata_version: VERSION, left_out: false };
    assert_eq!(a.granted.iter().collect::<Vec<_>>(), [(&0, &grant), (&1, &grant)], "as old as the aggregate");
    assert_eq!(a.live.member_lease_expires_at, Timestamp::from_millis(START + LEASE));
    assert!(group.validate().is_empty());
}

#[test]
fn protocol_2_its_group_goes_on_as_if_it_had_always_been_ours() {
    let mut bench = bench_with(&aggregate());
    for (id, owned) in [("a", [0, 1]), ("b", [2, 3])] {
        let request = steady(&mut bench, id, &owned);
        let answer = bench.send(request);
        assert_eq!((answer.status, answer.member_epoch), (Status::Ok, 12));
        assert_eq!((assigned(&answer), answer.metadata_version), (owned.to_vec(), VERSION));
        assert!(bench.is_lease_only());
    }
    let mut c = Client::new("c", "c-1");
    assert_eq!(pending(&c.beat(&mut bench)).len(), 1);
    let request = steady(&mut bench, "b", &[2, 3]);
    let drained = awaited(&bench.send(request));
    assert_eq!(drained.len() + 2, 3);
}

#[test]
fn protocol_2_what_another_implementation_may_have_granted_counts_as_held() {
    // b's target is 2 and 3, it has reported 2 only: an OK with 3 may be on its way.
    let mut bench = edited(|group| group["members"]["b"]["currentAssignment"] = shard_list(&[2]));
    assert!(bench.group().members["b"].holds(3));
    let leave = steady(&mut bench, "b", &[]).epoch(-1);
    let answer = bench.send(leave.version(VERSION - 1).owned(&[2]));
    assert_eq!(awaited(&answer), [2, 3], "who has not seen that version cannot have given 3 back");
    // But what another still drains is not: two would hold it.
    let bench = edited(|group| {
        group["members"]["a"]["revoking"] =
            json!([{ "shard": { "shardIndex": 3 }, "state": "DRAINING", "inFlight": 1 }]);
        group["members"]["a"]["rebalanceDeadlineAt"] = json!(Timestamp::from_millis(START + 5_000));
        group["members"]["b"]["currentAssignment"] = shard_list(&[2]);
    });
    let group = bench.group();
    assert!(!group.members["b"].holds(3) && group.members["a"].holds(3));
    assert_eq!(group.validate(), []);
}

#[test]
fn protocol_2_a_granted_list_without_versions_is_as_old_as_the_aggregate() {
    let bench = edited(|group| group["members"]["b"]["grantedAssignment"] = shard_list(&[3]));
    let b = &bench.group().members["b"];
    let grant = Grant { metadata_version: VERSION, left_out: false };
    assert_eq!(b.granted.iter().collect::<Vec<_>>(), [(&3, &grant)]);
    assert_eq!(b.holding().iter().collect::<Vec<_>>(), [2, 3]);
}

#[test]
fn protocol_2_nulls_and_absent_fields_are_defaults() {
    let nullable = ["metadataToken", "state", "members", "targetAssignments", "holds", "fencingTokens"];
    let nullable = nullable.into_iter().chain(["maxRoutingCacheTtlMs", "migrations", "activeReshardingId"]);
    for field in nullable.chain(["metadataCorrection", "createdAt", "updatedAt", "provisioningPending"]) {
        for null in [true, false] {
            let mut value = aggregate();
            if field == "members" {
                value["targetAssignments"] = Value::Null;
            }
            let object = value.as_object_mut().unwrap();
            object.remove(field);
            if null {
                object.insert(field.to_owned(), Value::Null);
            }
            let mut bench = bench_with(&aggregate());
            bench.fields.insert("aggregate".to_owned(), value.to_string().into_bytes());
            let group = bench.group();
            assert_eq!((group.metadata_version, group.shard_count), (VERSION, 4), "{field} null: {null}");
        }
    }
    let of_member = ["memberName", "confirmedMemberEpoch", "metadataVersion", "runtimeMaxConcurrency"];
    let more =
        ["activeConsumerWorkers", "currentAssignment", "grantedAssignment", "revoking", "shardProgress"];
    let times = ["lastHeartbeatAt", "memberLeaseExpiresAt", "memberLeaseTtlMs", "rebalanceTimeoutMs"];
    let ours = ["rebalanceDeadlineAt", "instanceId", "sequence", "superseded", "joinRequestId", "heard"];
    for field in of_member.into_iter().chain(more).chain(times).chain(ours) {
        let bench = edited(|group| group["members"]["a"][field] = Value::Null);
        assert!(bench.group().members["a"].is_live(), "{field}");
        let bench = edited(|group| {
            group["members"]["a"].as_object_mut().unwrap().remove(field);
        });
        assert!(bench.group().members["a"].is_live(), "{field}");
    }
}

#[test]
fn protocol_2_unknown_fields_stay_through_our_structural_writes() {
    let mut bench = edited(|group| {
        group["migrations"] = json!({ "reshard-1": { "state": "DEPRECATED", "toShardCount": 4 } });
    });
    for id in ["c", "d"] {
        Client::new(id, id).beat(&mut bench);
        assert!(matches!(bench.last_write().unwrap().kind, WriteKind::Structural { .. }));
    }
    // Also of a member that starts over.
    Client::new("a", "a-2").beat(&mut bench);
    let stored: Value = serde_json::from_slice(&bench.fields["aggregate"]).unwrap();
    assert_eq!(stored["labels"], json!({ "team": "payments" }));
    assert_eq!(stored["members"]["b"]["zone"], json!("eu-west-1b"));
    assert_eq!(stored["members"]["a"]["zone"], json!("eu-west-1b"));
    assert_eq!(stored["members"]["c"].get("zone"), None);
    assert_eq!(stored["migrations"]["reshard-1"]["toShardCount"], json!(4));
    assert_eq!(stored["createdAt"], json!("2027-01-15T07:00:00.000Z"));
    assert_eq!(bench.fields["layoutVersion"], b"2");
}

#[test]
fn protocol_2_what_we_write_names_every_field_of_the_shared_format() {
    let mut bench = bench_with(&aggregate());
    Client::new("c", "c-1").beat(&mut bench);
    let stored: Value = serde_json::from_slice(&bench.fields["aggregate"]).unwrap();
    for field in aggregate().as_object().unwrap().keys() {
        assert!(stored.get(field).is_some(), "{field}");
    }
    let written = &stored["members"]["c"];
    let shared = aggregate()["members"]["a"].as_object().unwrap().clone();
    for field in shared.keys().filter(|field| *field != "zone") {
        assert!(written.get(field).is_some(), "{field}");
    }
    assert!(written.get("grantedAssignment").is_some());
    assert_eq!(
        stored["targetAssignments"]["c"][0].as_object().unwrap().keys().collect::<Vec<_>>(),
        ["shardIndex"]
    );
    assert_eq!(stored["schemaVersion"], json!(1));
    assert_eq!(stored["storeRevision"], json!(8));
    let instant = stored["members"]["c"]["memberLeaseExpiresAt"].as_str().unwrap();
    assert!(instant.ends_with('Z') && instant.contains('T'), "ISO-8601 UTC: {instant}");
}

#[test]
fn protocol_3_a_target_that_was_not_computed_yet_is_computed_by_the_next_turn() {
    // Its writer died between the change of membership and the assignment.
    for command in [true, false] {
        let mut bench = edited(|group| {
            group["groupEpoch"] = json!(13);
            group["state"] = json!("ASSIGNING");
        });
        assert_eq!(bench.group().state, GroupState::Assigning);
        if command {
            bench.turn(&[Command::Tick]);
        } else {
            let request = steady(&mut bench, "a", &[0, 1]);
            assert_eq!(bench.send(request).assignment_epoch, 13);
        }
        let group = bench.group();
        assert_eq!((group.assignment_epoch, group.state), (13, GroupState::Stable));
        assert_eq!(group.metadata_version, VERSION + 1);
    }
}

#[test]
fn rule_4_1_11_a_target_that_no_assignment_could_have_made_is_computed_anew() {
    let illegal: [(&str, Value); 7] = [
        ("a shard twice, another not at all", json!({ "a": shard_list(&[0, 1]), "b": shard_list(&[1, 2]) })),
        ("a shard twice", json!({ "a": shard_list(&[0, 1, 2]), "b": shard_list(&[2, 3]) })),
        ("one outside of the read set", json!({ "a": shard_list(&[0, 1]), "b": shard_list(&[2, 4]) })),
        ("one missing", json!({ "a": shard_list(&[0, 1]), "b": shard_list(&[2]) })),
        ("a member missing", json!({ "a": shard_list(&[0, 1, 2, 3]) })),
        ("one of nobody", json!({ "a": shard_list(&[0, 1]), "b": shard_list(&[2]), "c": shard_list(&[3]) })),
        ("none at all", Value::Null),
    ];
    for (what, targets) in illegal {
        let mut bench = edited(|group| group["targetAssignments"] = targets);
        bench.tick();
        let group = bench.group();
        let named: Vec<u32> = group.targets.values().flat_map(rsc_core::ShardSet::iter).collect();
        assert_eq!(named.len(), 4, "{what}: {named:?}");
        assert!(group.metadata_version > VERSION && group.group_epoch == group.assignment_epoch, "{what}");
    }
}

#[test]
fn rule_4_2_a_drain_without_a_deadline_in_the_record_gets_one_that_does_not_move() {
    let mut bench = edited(|group| {
        group["members"]["a"]["currentAssignment"] = shard_list(&[0, 1, 2]);
        group["members"]["b"]["currentAssignment"] = shard_list(&[3]);
    });
    let recorded = Timestamp::from_millis(START);
    let deadline = recorded.plus(REBALANCE);
    while bench.now < deadline {
        for (id, owned) in [("a", vec![0, 1, 2]), ("b", vec![3])] {
            let request = steady(&mut bench, id, &owned).version(bench.group().metadata_version);
            assert_eq!(bench.send(request).status, Status::Ok);
        }
        assert_eq!(bench.group().members["a"].rebalance_deadline_at, Some(deadline));
        bench.pass(3_000);
    }
    bench.tick();
    assert_eq!(bench.group().members["a"].termination, Some(Termination::RebalanceTimeout));
}

#[test]
fn rule_4_2_a_deadline_in_the_record_of_a_member_that_drains_nothing_hits_nobody() {
    let mut bench = edited(|group| {
        group["members"]["a"]["rebalanceDeadlineAt"] = json!(Timestamp::from_millis(START + 500));
    });
    bench.tick();
    assert_eq!(bench.group().members["a"].state, MemberState::Active);
    assert_eq!(bench.group().members["a"].rebalance_deadline_at, None);
}

#[test]
fn protocol_1_what_a_terminal_member_is_recorded_to_own_is_nobodys() {
    let mut bench = edited(|group| {
        group["members"]["b"]["state"] = json!("EXPIRED");
        group["targetAssignments"] = json!({ "a": shard_list(&[0, 1, 2, 3]) });
    });
    assert!(bench.group().members["b"].holds_nothing());
    assert_eq!(bench.group().validate(), []);
    let request = steady(&mut bench, "a", &[0, 1]);
    assert_eq!(assigned(&bench.send(request)), [0, 1, 2, 3]);
    // How long it has been gone is not recorded: at the latest its lease tells.
    let terminated = bench.group().members["b"].terminated_at;
    assert_eq!(terminated, Some(Timestamp::from_millis(START + LEASE)));
}

#[test]
fn a_drain_that_names_its_shard_directly_is_read() {
    let mut bench = Bench::new(2);
    let mut p = Client::new("p", "p-1");
    settle(&mut bench, &mut [&mut p]);
    let mut aggregate: serde_json::Value = serde_json::from_slice(&bench.fields["aggregate"]).unwrap();
    aggregate["members"]["p"]["revoking"] = serde_json::json!([{"shardIndex": 1}]);
    aggregate["assignmentEpoch"] = serde_json::json!(77);
    bench.fields.insert("aggregate".to_owned(), aggregate.to_string().into_bytes());
    let group = bench.group();
    assert!(group.members["p"].revoking.contains_key(&1));
    assert_eq!(
        (group.group_epoch, group.assignment_epoch),
        (77, 77),
        "no target of a later epoch than the group"
    );
}
