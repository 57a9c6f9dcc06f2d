//! Scenarios of two coordinators on one Redis that know nothing of each other but what is recorded. Many at once, and
//! members that choose at random: `scenario_many_coordinators`.

mod support;

use std::time::Instant;

use reqwest::StatusCode;
use rsc_protocol::keys::Keys;
use rsc_protocol::{GroupKey, Status};
use serde_json::json;
use support::{
    Api, Crew, Daemon, Member, RedisServer, Routes, beat_until_stable, group_path, heartbeat, monitored_path,
    settle, wait_until,
};

/// Whether this coordinator has an actor for the group; `None` when it says that there is no such group.
async fn is_served(api: &Api, group: &GroupKey) -> Option<bool> {
    let answer = api.get(&format!("{}/actor", monitored_path(group))).await;
    (answer.status != StatusCode::NOT_FOUND).then(|| answer.success()["running"] == true)
}

#[tokio::test]
async fn group_created_through_one_is_found_and_deleted_through_one_is_let_go_by_the_other() {
    let redis = RedisServer::start();
    let daemons = [Daemon::redis(&redis).long_lease().start(), Daemon::redis(&redis).long_lease().start()];
    let apis = daemons.each_ref().map(Daemon::api);
    for round in 0..2 {
        let (here, there) = (&apis[round], &apis[1 - round]);
        let group = here.create_stream(&format!("orders{round}"), 2).await;
        wait_until("the other one has found the group", async || {
            is_served(there, &group).await == Some(true)
        })
        .await;
        let body = json!({"requestedBy": "test", "reason": "test"});
        here.delete(&group_path(&group), &body).await.success();
        wait_until("the other one has let go", async || is_served(there, &group).await.is_none()).await;
        let answer = there.heartbeat(&group, &heartbeat("late")).await;
        assert_eq!(answer.status, rsc_protocol::Status::UnknownMemberId);
    }
}

#[tokio::test]
async fn members_of_a_group_whose_only_coordinator_was_killed_are_expired_by_the_other() {
    let redis = RedisServer::start();
    let mut killed = Daemon::redis(&redis).lease(1_500, 3_000).start();
    let other = Daemon::redis(&redis).lease(1_500, 3_000).start();
    let group = killed.api().create_stream("orders", 6).await;
    // The other one knows the group as it was born, without members.
    wait_until("the other one has found the group", async || {
        is_served(&other.api(), &group).await == Some(true)
    })
    .await;
    let crew = Crew::new(&group, &Routes::to(&[&killed.api()]));
    let consumers = crew.start_many(3);
    settle(&killed.api(), &group, &consumers, 6).await;
    killed.kill();
    for consumer in consumers {
        consumer.crash().await;
    }
    // Whoever looks at the group reminds the other one: it had heard of no member and had nothing to wait for.
    let api = other.api();
    wait_until("everybody has expired", async || api.group(&group).await.live_members == 0).await;
    let aggregate = redis.aggregate(&group).await.unwrap();
    for (id, member) in aggregate["members"].as_object().unwrap() {
        assert_eq!(
            (&member["state"], &member["termination"]),
            (&json!("EXPIRED"), &json!("LEASE_EXPIRED")),
            "{id}"
        );
    }
    let successor = Crew::new(&group, &Routes::to(&[&api])).start("successor");
    settle(&api, &group, &[successor], 6).await;
    crew.journal.expect_one_reader_at_a_time();
}

/// Found by an attacker: leases are renewed by lease-only commits, which move no version, so that nobody's report shows
/// that they were lost; and an instance that only watched had nothing of its own to miss.
#[tokio::test]
async fn an_instance_that_only_watched_expires_nobody_after_redis_lost_the_others_renewals() {
    let redis = RedisServer::start();
    let mut serving = Daemon::redis(&redis).lease(3_000, 30_000).start();
    let watching = Daemon::redis(&redis).lease(3_000, 30_000).start();
    let api = serving.api();
    let group = api.create_stream("orders", 4).await;
    let mut members = vec![Member::new(&api, &group, "a"), Member::new(&api, &group, "b")];
    beat_until_stable(&api, &group, &mut members).await;
    let started = Instant::now();
    let key = Keys::default().metadata(&group);
    let mut dump = redis.dump(&key).await.unwrap();
    // Longer than the start of the watching instance forbids it to judge, and longer than a lease after the dump.
    let mut dumped_at = None;
    wait_until("the members were heard for long enough", async || {
        for member in &mut members {
            assert_eq!(member.beat().await.status, Status::Ok);
        }
        if dumped_at.is_none() && started.elapsed().as_millis() > 3_500 {
            dump = redis.dump(&key).await.unwrap();
            dumped_at = Some(Instant::now());
        }
        dumped_at.is_some_and(|at| at.elapsed().as_millis() > 3_500)
    })
    .await;
    serving.kill();
    redis.restore(&key, &dump).await;
    let kept = members[0].owned.clone();
    let (a, b) = members.split_at_mut(1);
    b[0].talk_to(&watching.api());
    let answer = b[0].beat().await;
    // It has seen later states than this one: a correction round is on.
    assert_eq!(answer.status, Status::RevokePending, "an innocent member keeps its place: {answer:?}");
    let assigned = answer.assignment.assigned_shards.iter().map(|shard| shard.shard_index);
    assert!(assigned.into_iter().all(|shard| !kept.contains(&shard)), "a still reads {kept:?}: {answer:?}");
    a[0].talk_to(&watching.api());
    assert_eq!(a[0].beat().await.status, Status::RevokePending);
    assert_eq!(a[0].owned, kept);
    wait_until("the round is over", async || {
        let mut statuses = Vec::new();
        for member in a.iter_mut().chain(b.iter_mut()) {
            statuses.push(member.beat().await.status);
        }
        statuses.iter().all(|status| *status == Status::Ok)
    })
    .await;
    assert_eq!((a[0].owned.len(), b[0].owned.len()), (2, 2));
}
