//! What `/members` and `/assignments` make of states that are hard to reach over the network.

use rsc_core::member::{Grant, Live, Revoking};
use rsc_core::{Group, Hold, HoldCause, Member, Settings, ShardSet, lifecycle};
use rsc_protocol::admin::MemberState;
use rsc_protocol::{GroupKey, RevokingState, Timestamp};
use serde_json::{Value, json};

use super::assignments::Assignments;
use super::members::Members;

const NOW: Timestamp = Timestamp::MIN;

/// A group of two shards without members, written at [`NOW`].
fn group() -> Group {
    let key = GroupKey::new("p", "g").unwrap();
    lifecycle::create(&key, 2, NOW, "token", None, &Settings::default()).group
}

/// A live member with this target that holds nothing.
fn join(group: &mut Group, id: &str, target: &[u32]) {
    let member = Member {
        member_name: None,
        state: MemberState::Active,
        instance_id: None,
        superseded: Vec::new(),
        join_request_id: "join".to_owned(),
        join_metadata_version: 1,
        heard: true,
        reported_ownership: true,
        current: ShardSet::new(),
        granted: Default::default(),
        revoking: Default::default(),
        rebalance_timeout_ms: 60_000,
        rebalance_deadline_at: None,
        terminated_at: None,
        termination: None,
        live: Live { member_lease_expires_at: NOW.plus(1_500), ..Live::default() },
        unknown: serde_json::Map::new(),
    };
    group.members.insert(id.to_owned(), member);
    group.targets.insert(id.to_owned(), target.iter().copied().collect());
}

fn member<'a>(group: &'a mut Group, id: &str) -> &'a mut Member {
    group.members.get_mut(id).unwrap()
}

fn hold(shard_index: u32, until: Timestamp) -> Hold {
    Hold {
        shard_index,
        member_id: "gone".to_owned(),
        instance_id: None,
        sequence: None,
        cause: HoldCause::RebalanceTimeout,
        until,
        since: until,
        moves: false,
    }
}

fn assignments(group: &Group) -> Value {
    serde_json::to_value(Assignments::of(group)).unwrap()
}

fn first_member(group: &Group) -> Value {
    serde_json::to_value(Members::of(group)).unwrap()["members"][0].clone()
}

#[test]
fn a_shard_that_comes_back_to_who_drains_it_waits_for_its_next_heartbeat() {
    let mut group = group();
    join(&mut group, "a", &[0, 1]);
    let a = member(&mut group, "a");
    a.current.insert(0);
    a.granted.insert(0, Grant { metadata_version: 1, left_out: false });
    a.granted.insert(1, Grant { metadata_version: 1, left_out: true });
    a.revoking.insert(1, Revoking { state: RevokingState::Draining, in_flight: 3 });

    let row = first_member(&group);
    assert_eq!(
        (&row["assignedShards"], &row["pendingShards"]),
        (&json!([{"shardIndex": 0}]), &json!([{"shardIndex": 1}]))
    );
    assert_eq!(row["grantedShards"][1], json!({"shardIndex": 1, "metadataVersion": 1, "leftOut": true}));
    let view = assignments(&group);
    assert_eq!(view["pendingShards"], json!([{"shardIndex": 1, "memberId": "a", "waitsFor": "HEARTBEAT"}]));
    assert_eq!(view["unownedShards"], json!([]));
    // It is its target again, and still being drained.
    assert_eq!(
        view["revokeProgress"],
        json!([{"memberId": "a", "shardIndex": 1, "state": "DRAINING", "inFlight": 3, "deadline": null}])
    );
}

#[test]
fn what_was_owned_before_grants_were_recorded_is_assigned() {
    let mut group = group();
    join(&mut group, "a", &[0, 1]);
    member(&mut group, "a").current.insert(1);
    assert_eq!(first_member(&group)["assignedShards"], json!([{"shardIndex": 1}]));
}

#[test]
fn the_hold_that_lasts_longest_says_until_when() {
    let mut group = group();
    join(&mut group, "a", &[0, 1]);
    group.holds = vec![hold(0, NOW.plus(5)), hold(0, NOW.plus(9)), hold(0, NOW.plus(7)), hold(1, NOW)];
    let view = assignments(&group);
    let until = NOW.plus(9);
    assert_eq!(
        view["pendingShards"],
        json!([
            {"shardIndex": 0, "memberId": "a", "waitsFor": "HOLD", "heldBy": "gone", "until": until},
            // The hold on this one is over.
            {"shardIndex": 1, "memberId": "a", "waitsFor": "HEARTBEAT"},
        ])
    );
    assert_eq!(
        view["unownedShards"][0],
        json!({"shardIndex": 0, "targetMemberId": "a", "waitsFor": "HOLD", "until": until})
    );
    assert_eq!(view["holds"].as_array().unwrap().len(), 4);
}

#[test]
fn a_shard_that_another_holds_waits_for_it_and_its_deadline() {
    let mut group = group();
    join(&mut group, "a", &[0]);
    join(&mut group, "b", &[1]);
    let a = member(&mut group, "a");
    a.current.extend([0, 1]);
    a.rebalance_deadline_at = Some(NOW.plus(60_000));
    // A hold beside the holder: the holder is what is waited for first.
    group.holds = vec![hold(1, NOW.plus(9))];
    let view = assignments(&group);
    let waits = json!({"shardIndex": 1, "memberId": "b", "waitsFor": "HOLDER", "heldBy": "a", "until": NOW.plus(60_000)});
    assert_eq!(view["pendingShards"], json!([waits]), "{view}");
    assert_eq!(view["unownedShards"], json!([]));
    let drains = json!({"memberId": "a", "shardIndex": 1, "state": null, "inFlight": null, "deadline": NOW.plus(60_000)});
    assert_eq!(view["revokeProgress"], json!([drains]));
}

#[test]
fn leases_count_from_the_last_write_and_only_for_live_members() {
    let mut group = group();
    join(&mut group, "a", &[0, 1]);
    assert_eq!(first_member(&group)["leaseRemainingMs"], 1_500);
    group.updated_at = NOW.plus(2_000);
    assert_eq!(first_member(&group)["leaseRemainingMs"], 0);
    group.updated_at = NOW;
    member(&mut group, "a").state = MemberState::Fenced;
    assert_eq!(first_member(&group)["leaseRemainingMs"], 0);
}
