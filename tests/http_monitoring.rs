//! Black-box tests of the monitoring reads and of `/metrics` (protocol 8).

mod support;

use rsc_protocol::keys::Keys;
use rsc_protocol::{ErrorCode, GroupKey, RevokingState};
use serde_json::{Value, json};
use support::{Api, Daemon, Member, RedisServer, beat_until_stable, group_path, monitored_path};

async fn view(api: &Api, group: &GroupKey, what: &str) -> Value {
    api.get(&format!("{}/{what}", monitored_path(group))).await.success()
}

fn shards(indexes: &[u32]) -> Value {
    indexes.iter().map(|index| json!({"shardIndex": index})).collect()
}

#[tokio::test]
async fn members_and_assignments_show_a_hand_over() {
    let daemon = Daemon::memory().start();
    let api = daemon.api();
    let group = api.create_stream("orders", 4).await;

    let empty = view(&api, &group, "assignments").await;
    assert_eq!((&empty["targetAssignment"], &empty["currentAssignments"]), (&json!({}), &json!({})));
    assert_eq!(empty["unownedShards"][3], json!({"shardIndex": 3, "waitsFor": "MEMBER"}));
    assert_eq!(view(&api, &group, "members").await["members"], json!([]));

    let mut first = Member::new(&api, &group, "a");
    first.drains_slowly = true;
    beat_until_stable(&api, &group, std::slice::from_mut(&mut first)).await;
    let stable = view(&api, &group, "assignments").await;
    assert_eq!(stable["state"], "STABLE");
    assert_eq!(stable["targetAssignment"], json!({"a": shards(&[0, 1, 2, 3])}));
    assert_eq!(stable["currentAssignments"], stable["targetAssignment"]);
    assert_eq!(stable["grantedAssignments"], stable["targetAssignment"]);
    for list in ["holds", "revokeProgress", "pendingShards", "unownedShards", "invariantViolations"] {
        assert_eq!(stable[list], json!([]), "{list}");
    }

    // A second member joins; the first has not been told to drain yet.
    let mut second = Member::new(&api, &group, "b");
    second.beat().await;
    let told_nobody = view(&api, &group, "assignments").await;
    let (kept, moved): (Vec<u32>, Vec<u32>) = {
        let target = told_nobody["targetAssignment"]["a"].as_array().unwrap();
        let kept: Vec<u32> =
            target.iter().map(|row| u32::try_from(row["shardIndex"].as_u64().unwrap()).unwrap()).collect();
        let moved = (0..4).filter(|shard| !kept.contains(shard)).collect();
        (kept, moved)
    };
    assert_eq!((kept.len(), moved.len()), (2, 2), "{told_nobody}");
    assert_eq!(told_nobody["state"], "RECONCILING");
    assert_eq!(told_nobody["pendingShards"].as_array().unwrap().len(), 2);
    let pending = &told_nobody["pendingShards"][0];
    assert_eq!(
        (&pending["memberId"], &pending["waitsFor"], &pending["heldBy"], pending["shardIndex"].as_u64()),
        (&json!("b"), &json!("HOLDER"), &json!("a"), Some(moved[0].into()))
    );
    assert_eq!(told_nobody["revokeProgress"][0]["state"], Value::Null, "{told_nobody}");
    assert!(told_nobody["revokeProgress"][0]["deadline"].is_string(), "{told_nobody}");

    // It drains, and says so.
    first.beat().await;
    first.beat().await;
    assert_eq!(
        first.draining.values().collect::<Vec<_>>(),
        [&RevokingState::Draining, &RevokingState::Draining]
    );
    let draining = view(&api, &group, "assignments").await;
    let row = &draining["revokeProgress"][0];
    assert_eq!(
        (&row["memberId"], &row["state"], &row["inFlight"], row["shardIndex"].as_u64()),
        (&json!("a"), &json!("DRAINING"), &json!(1), Some(moved[0].into()))
    );
    let members = view(&api, &group, "members").await["members"].clone();
    let row = &members[0];
    assert_eq!((&row["memberId"], &row["state"]), (&json!("a"), &json!("ACTIVE")), "{row}");
    assert_eq!((&row["assignedShards"], &row["currentShards"]), (&shards(&kept), &shards(&kept)));
    assert_eq!((&row["targetShards"], &row["pendingShards"]), (&shards(&kept), &json!([])));
    assert_eq!(row["revokingShards"][1], json!({"shardIndex": moved[1], "state": "DRAINING", "inFlight": 1}));
    assert_eq!(row["memberEpoch"], row["confirmedMemberEpoch"]);
    assert_eq!((&row["runtimeMaxConcurrency"], &row["activeConsumerWorkers"]), (&json!(4), &json!(0)));
    assert_eq!(row["instanceId"], first.instance_id.clone().unwrap());
    let lease = row["leaseRemainingMs"].as_i64().unwrap();
    assert!((1..=15_000).contains(&lease), "{row}");
    assert!(row["rebalanceDeadlineAt"].is_string() && row["lastHeartbeatAt"].is_string(), "{row}");
    let waiting = &members[1];
    assert_eq!((&waiting["pendingShards"], &waiting["assignedShards"]), (&shards(&moved), &json!([])));

    // It is done; the other gets them with its next heartbeat.
    first.finish_drains();
    first.beat().await;
    let free = view(&api, &group, "assignments").await;
    assert_eq!(free["pendingShards"][0]["waitsFor"], "HEARTBEAT", "{free}");
    let unowned = json!({"shardIndex": moved[0], "targetMemberId": "b", "waitsFor": "HEARTBEAT"});
    assert_eq!(free["unownedShards"][0], unowned);
    let mut both = [first, second];
    beat_until_stable(&api, &group, &mut both).await;
    let [mut first, _] = both;

    // One leaves and stays visible for a while.
    first.leave().await;
    let members = view(&api, &group, "members").await["members"].clone();
    let row = &members[0];
    assert_eq!(
        (&row["state"], &row["termination"], &row["leaseRemainingMs"]),
        (&json!("EXPIRED"), &json!("LEFT"), &json!(0))
    );
    assert!(row["terminatedAt"].is_string(), "{row}");
}

#[tokio::test]
async fn a_superseded_incarnation_shows_as_a_hold() {
    let daemon = Daemon::memory().start();
    let api = daemon.api();
    let group = api.create_stream("orders", 2).await;
    beat_until_stable(&api, &group, &mut [Member::new(&api, &group, "a")]).await;
    Member::new(&api, &group, "a").beat().await;
    let view = view(&api, &group, "assignments").await;
    let hold = &view["holds"][0];
    assert_eq!(
        (&hold["shardIndex"], &hold["memberId"], &hold["cause"]),
        (&json!(0), &json!("a"), &json!("SUPERSEDED")),
        "{view}"
    );
    let pending = &view["pendingShards"][0];
    assert_eq!((&pending["waitsFor"], &pending["until"]), (&json!("HOLD"), &hold["until"]), "{view}");
    assert_eq!(
        (&view["unownedShards"][1]["waitsFor"], &view["invariantViolations"]),
        (&json!("HOLD"), &json!([]))
    );
}

#[tokio::test]
async fn violated_invariants_are_named() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).start();
    let api = daemon.api();
    let group = api.create_stream("orders", 2).await;
    let mut members = [Member::new(&api, &group, "a"), Member::new(&api, &group, "b")];
    beat_until_stable(&api, &group, &mut members).await;
    assert_eq!(view(&api, &group, "assignments").await["invariantViolations"], json!([]));
    // Somebody writes what no coordinator would: both own everything.
    let mut aggregate = redis.aggregate(&group).await.unwrap();
    for member in ["a", "b"] {
        aggregate["members"][member]["currentAssignment"] = shards(&[0, 1]);
    }
    let key = Keys::default().metadata(&group);
    redis::cmd("HSET")
        .arg(&key)
        .arg("aggregate")
        .arg(aggregate.to_string())
        .exec_async(&mut redis.connection().await)
        .await
        .unwrap();
    let view = view(&api, &group, "assignments").await;
    let violations = view["invariantViolations"].as_array().unwrap();
    assert!(violations.iter().any(|found| found["invariant"] == "one-holder"), "{view}");
    assert!(violations[0]["detail"].is_string(), "{view}");
}

#[tokio::test]
async fn health_and_groups_show_what_needs_a_person() {
    let redis = RedisServer::start();
    let mut daemon = Daemon::redis(&redis).fast().set("server", "instance-id", "named").start();
    let api = daemon.api();
    let health = async || api.get("/coord/v1/monitoring/health").await.success();
    let up = health().await;
    assert_eq!((&up["status"], &up["groupCount"]), (&json!("UP"), &json!(0)), "{up}");
    assert_eq!(up["store"], json!({"kind": "redis", "reachable": true}));
    assert_eq!((&up["instanceId"], &up["version"]), (&json!("named"), &json!(env!("CARGO_PKG_VERSION"))));
    assert!(up["uptimeMs"].is_u64(), "{up}");
    assert_eq!(daemon.ready_field("instance_id").as_deref(), Some("named"));
    assert_eq!(daemon.ready_field("store").as_deref(), Some("redis"));

    let broken = api.create_stream("broken", 1).await;
    let gone = api.create_stream("gone", 1).await;
    let fine = api.create_stream("fine", 1).await;
    let mut connection = redis.connection().await;
    let keys = Keys::default();
    let damage = redis::cmd("HSET").arg(keys.metadata(&broken)).arg("aggregate").arg("{").to_owned();
    damage.exec_async(&mut connection).await.unwrap();
    redis::cmd("DEL").arg(keys.metadata(&gone)).exec_async(&mut connection).await.unwrap();

    let list = api.get("/coord/v1/monitoring/groups").await.success();
    assert_eq!(list["missing"], json!([keys.metadata(&gone)]), "{list}");
    let groups = list["groups"].as_array().unwrap();
    let find = |name: &str| groups.iter().find(|group| group["streamPrefix"] == name).unwrap();
    assert_eq!((&find("fine")["healthy"], &find("fine")["state"]), (&json!(true), &json!("EMPTY")));
    assert_eq!(
        (&find("broken")["healthy"], &find("broken")["errorCode"]),
        (&json!(false), &json!("GROUP_METADATA_CORRUPT"))
    );

    let degraded = health().await;
    assert_eq!(degraded["status"], "DEGRADED", "{degraded}");
    assert_eq!(degraded["unhealthyGroups"][0]["streamPrefix"], "broken", "{degraded}");
    assert_eq!(degraded["missing"], list["missing"]);

    // Reads still show what cannot be worked on; the group's own views need a record.
    let summary = api.get(&monitored_path(&broken)).await.success();
    assert_eq!(
        (&summary["healthy"], &summary["errorCode"]),
        (&json!(false), &json!("GROUP_METADATA_CORRUPT"))
    );
    let members = api.get(&format!("{}/members", monitored_path(&broken))).await;
    members.expect_error(ErrorCode::GroupMetadataCorrupt);
    let actor = view(&api, &fine, "actor").await;
    assert_eq!((&actor["streamPrefix"], &actor["instanceId"]), (&json!("fine"), &json!("named")), "{actor}");
    assert!(
        actor["state"].is_string() && actor["mailboxDepth"].is_u64() && actor["restarts"].is_u64(),
        "{actor}"
    );
    assert_eq!(api.get(&monitored_path(&fine)).await.json(), api.get(&group_path(&fine)).await.json());
}

#[tokio::test]
async fn metrics_are_prometheus_text_without_names_from_clients() {
    let daemon = Daemon::memory().start();
    let api = daemon.api();
    let group = api.create_stream("orders", 1).await;
    Member::new(&api, &group, "a-member").beat().await;
    api.get("/coord/v1/made/up").await.expect_error(ErrorCode::NotFound);
    let answer = api.get("/metrics").await;
    assert_eq!(answer.header("content-type"), "text/plain; version=0.0.4; charset=utf-8");
    let text = String::from_utf8(answer.body).unwrap();
    for series in [
        "rsc_http_requests_total{route=\"heartbeat\",method=\"POST\",status=\"200\",error_code=\"\"} 1",
        "rsc_http_requests_total{route=\"unknown\",method=\"GET\",status=\"404\",error_code=\"NOT_FOUND\"} 1",
        "rsc_http_request_seconds_bucket{route=\"heartbeat\",le=\"+Inf\"} 1",
        "rsc_terminating 0",
        concat!("rsc_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
    ] {
        assert!(text.lines().any(|line| line == series), "{series}\n{text}");
    }
    assert!(!text.contains("made/up") && !text.contains("a-member"), "{text}");
}
