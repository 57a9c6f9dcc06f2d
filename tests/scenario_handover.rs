//! Scenarios of a hand-over: answers that get lost, coordinators and owners that go away (protocol 4.2; the
//! priority tests of the founding design).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rsc_protocol::admin::GroupState;
use rsc_protocol::{GroupKey, HeartbeatResponse, RevokingState, Status};
use serde_json::{Value, json};
use support::{Api, Daemon, Member, RedisServer, heartbeat_unheard, monitored_path, wait_until};

/// Shards that an answer allows to be read.
fn assigned(response: &HeartbeatResponse) -> BTreeSet<u32> {
    response.assignment.assigned_shards.iter().map(|shard| shard.shard_index).collect()
}

fn pending(response: &HeartbeatResponse) -> BTreeSet<u32> {
    response.assignment.pending_shards.iter().map(|shard| shard.shard_index).collect()
}

fn revoking(response: &HeartbeatResponse) -> BTreeSet<u32> {
    response.assignment.revoking_shards.iter().map(|shard| shard.shard_index).collect()
}

/// `a` reads both shards of a stream, `b` has just joined: one shard is to move.
async fn one_shard_is_to_move(api: &Api) -> (GroupKey, Member, Member) {
    let group = api.create_stream("orders", 2).await;
    let (mut a, mut b) = (Member::new(api, &group, "a"), Member::new(api, &group, "b"));
    a.beat().await;
    a.beat().await;
    assert_eq!(a.owned, BTreeSet::from([0, 1]));
    let joined = b.beat().await;
    assert_eq!((joined.status, assigned(&joined).len(), pending(&joined).len()), (Status::Ok, 0, 1));
    (group, a, b)
}

/// The row of one member in `/members`.
async fn member_row(api: &Api, group: &GroupKey, id: &str) -> Value {
    let members = api.get(&format!("{}/members", monitored_path(group))).await.success();
    let rows = members["members"].as_array().unwrap();
    rows.iter().find(|row| row["memberId"] == id).unwrap().clone()
}

/// What the record says of one member's grants.
async fn recorded_grants(redis: &RedisServer, group: &GroupKey, id: &str) -> Vec<Value> {
    let aggregate = redis.aggregate(group).await.unwrap();
    aggregate["members"][id]["grantedAssignment"].as_array().unwrap().clone()
}

#[tokio::test]
async fn drain_recorded_and_its_answer_lost_is_told_again() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).long_lease().start();
    let api = daemon.api();
    let (group, mut a, mut b) = one_shard_is_to_move(&api).await;
    let before = redis.aggregate(&group).await.unwrap();

    // The record says that `a` was told to drain; `a` never heard it.
    heartbeat_unheard(daemon.address(), &group, &a.request()).await;
    wait_until("the drain is recorded", async || {
        recorded_grants(&redis, &group, "a").await.iter().any(|grant| grant["leftOut"] == true)
    })
    .await;
    assert_eq!(a.owned, BTreeSet::from([0, 1]));
    let recorded = redis.aggregate(&group).await.unwrap();
    assert_eq!(recorded["targetAssignments"], before["targetAssignments"]);

    let again = a.beat_unheard().await;
    assert_eq!(again.status, Status::Ok);
    assert_eq!(again.metadata_version, recorded["metadataVersion"].as_u64().unwrap());
    assert_eq!((assigned(&again).len(), revoking(&again).len()), (1, 1));
    // And again: an answer is a view of the record, not a message that is used up.
    let once_more = a.beat().await;
    let told = |answer: &HeartbeatResponse| {
        (answer.status, answer.member_epoch, answer.metadata_version, answer.assignment.clone())
    };
    assert_eq!(told(&once_more), told(&again));
    assert!(pending(&b.beat().await).len() == 1 && b.owned.is_empty());

    let moved = revoking(&again);
    a.beat().await;
    b.beat().await;
    assert_eq!((&b.owned, a.owned.len()), (&moved, 1));
    b.beat().await;
    assert_eq!(api.group(&group).await.state, GroupState::Stable);
}

#[tokio::test]
async fn drain_delivered_and_the_coordinator_gone_keeps_the_shard_with_its_owner_until_revoked() {
    let redis = RedisServer::start();
    let mut daemon = Daemon::redis(&redis).long_lease().start();
    let (group, mut a, mut b) = one_shard_is_to_move(&daemon.api()).await;
    a.drains_slowly = true;
    a.beat().await;
    let moving: BTreeSet<u32> = a.draining.keys().copied().collect();
    assert_eq!((a.owned.len(), moving.len()), (1, 1));
    daemon.kill();

    let successor = Daemon::redis(&redis).long_lease().start();
    let api = successor.api();
    a.talk_to(&api);
    b.talk_to(&api);
    for _ in 0..3 {
        let answer = b.beat().await;
        assert_eq!((answer.status, &pending(&answer)), (Status::Ok, &moving));
        assert!(b.owned.is_empty(), "{answer:?}");
        let answer = a.beat().await;
        assert_eq!((answer.status, &revoking(&answer)), (Status::Ok, &moving));
        assert!(!assigned(&answer).iter().any(|shard| moving.contains(shard)), "{answer:?}");
        assert_eq!(a.draining.keys().copied().collect::<BTreeSet<_>>(), moving);
    }
    let row = member_row(&api, &group, "a").await;
    assert_eq!(row["revokingShards"][0]["state"], json!("DRAINING"), "{row}");

    a.finish_drains();
    a.beat().await;
    b.beat().await;
    assert_eq!(b.owned, moving);
    b.beat().await;
    assert_eq!(api.group(&group).await.state, GroupState::Stable);
}

#[tokio::test]
async fn revoked_recorded_and_its_answer_lost_gives_the_shard_to_the_new_owner() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).long_lease().start();
    let api = daemon.api();
    let (group, mut a, mut b) = one_shard_is_to_move(&api).await;
    a.beat().await;
    let moving: BTreeSet<u32> = a.draining.keys().copied().collect();
    assert_eq!(a.draining.values().collect::<Vec<_>>(), [&RevokingState::Revoked]);

    heartbeat_unheard(daemon.address(), &group, &a.request()).await;
    wait_until("the release is recorded", async || recorded_grants(&redis, &group, "a").await.len() == 1)
        .await;
    let answer = b.beat().await;
    assert_eq!((answer.status, &b.owned), (Status::Ok, &moving));

    // `a` heard nothing and says it again: that releases nothing of the new owner's.
    let answer = a.beat().await;
    assert_eq!((answer.status, assigned(&answer).len(), revoking(&answer).len()), (Status::Ok, 1, 0));
    assert!(assigned(&answer).is_disjoint(&moving));
    let answer = b.beat().await;
    assert_eq!((assigned(&answer), answer.status), (moving, Status::Ok));
    assert_eq!(api.group(&group).await.state, GroupState::Stable);
}

#[tokio::test]
async fn owner_that_expires_while_draining_loses_the_shard_after_its_lease_and_not_before() {
    let lease = Duration::from_millis(1_500);
    let redis = RedisServer::start();
    // So long a rebalance timeout that it is not what ends the drain.
    let daemon = Daemon::redis(&redis).lease(1_500, 60_000).start();
    let api = daemon.api();
    let group = api.create_stream("orders", 2).await;
    let (mut a, mut b) = (Member::new(&api, &group, "a"), Member::new(&api, &group, "b"));
    a.drains_slowly = true;
    a.beat().await;
    b.beat().await;
    wait_until("a drains, and this coordinator expires whom it may", async || {
        a.beat().await;
        b.beat().await;
        let actor = api.get(&format!("{}/actor", monitored_path(&group))).await.success();
        a.draining.len() == 1 && actor["inService"] == true
    })
    .await;
    let moving: BTreeSet<u32> = a.draining.keys().copied().collect();
    let last_sent = Instant::now();
    let answer = a.beat().await;
    assert_eq!(revoking(&answer), moving);
    assert_eq!(answer.assignment_lease_ms, 1_350);
    assert!(b.owned.is_empty());

    // Now `a` is silent.
    wait_until("the new owner has everything", async || {
        b.beat().await;
        if !b.owned.is_empty() {
            assert!(last_sent.elapsed() >= lease, "granted after {:?}", last_sent.elapsed());
        }
        b.owned == BTreeSet::from([0, 1])
    })
    .await;
    let row = member_row(&api, &group, "a").await;
    assert_eq!((&row["state"], &row["termination"]), (&json!("EXPIRED"), &json!("LEASE_EXPIRED")), "{row}");

    // Whoever comes back after that has lost its place.
    let answer = a.beat().await;
    assert_eq!((answer.status, assigned(&answer).len()), (Status::FencedMemberEpoch, 0));
    assert!(a.owned.is_empty() && a.draining.is_empty());
}
