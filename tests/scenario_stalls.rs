//! Scenarios of something that stands still and goes on: a coordinator, Redis (protocol 4.1 rule 1).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use reqwest::StatusCode;
use rsc_protocol::{ErrorCode, GroupKey, Status};
use serde_json::Value;
use support::{
    Api, Crew, Daemon, Member, RedisServer, Routes, beat_until_stable, monitored_path, settle, wait_until,
};
use tokio::task::JoinSet;

async fn more_than_a_lease_passes(lease: Duration) {
    let started = Instant::now();
    wait_until("more than a lease has passed", async || started.elapsed() > lease.mul_f64(1.3)).await;
}

/// Waits until the coordinator judges members again, which is when it would expire them wrongly.
async fn is_in_service_again(api: &Api, group: &GroupKey) -> bool {
    let actor = api.get(&format!("{}/actor", monitored_path(group))).await.success();
    actor["inService"] == true
}

fn states(aggregate: &Value) -> BTreeSet<&str> {
    aggregate["members"]
        .as_object()
        .unwrap()
        .values()
        .map(|member| member["state"].as_str().unwrap())
        .collect()
}

#[tokio::test]
async fn coordinator_that_stood_still_longer_than_a_lease_expires_nobody_who_comes_back_at_once() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).lease(2_000, 30_000).start();
    let api = daemon.api();
    let group = api.create_stream("orders", 6).await;
    let mut members: Vec<Member> =
        ["a", "b", "c"].map(|id| Member::new(&api, &group, id)).into_iter().collect();
    beat_until_stable(&api, &group, &mut members).await;
    let beat_all = async |members: &mut [Member]| {
        for member in members {
            let owned = member.owned.clone();
            let answer = member.beat().await;
            assert_eq!((answer.status, &member.owned), (Status::Ok, &owned), "{answer:?}");
        }
    };
    // It judges: without what this is about it would expire them.
    wait_until("it is in service", async || {
        beat_all(&mut members).await;
        is_in_service_again(&api, &group).await
    })
    .await;
    let before = api.group(&group).await;

    daemon.pause();
    more_than_a_lease_passes(Duration::from_secs(2)).await;
    daemon.resume();
    wait_until("it is in service again", async || {
        beat_all(&mut members).await;
        is_in_service_again(&api, &group).await
    })
    .await;
    beat_all(&mut members).await;
    let after = api.group(&group).await;
    assert_eq!((after.group_epoch, after.metadata_version), (before.group_epoch, before.metadata_version));
    let metrics = String::from_utf8(api.get("/metrics").await.body).unwrap();
    assert!(metrics.contains(r#"rsc_out_of_service_total{cause="stalled"}"#), "{metrics}");
}

#[tokio::test]
async fn coordinator_that_stood_still_expires_nobody_who_went_on_with_another_one() {
    let redis = RedisServer::start();
    let stalled = Daemon::redis(&redis).lease(2_000, 30_000).start();
    let other = Daemon::redis(&redis).lease(2_000, 30_000).start();
    let group = stalled.api().create_stream("orders", 6).await;
    let routes = Routes::to(&[&stalled.api()]);
    let crew = Crew::new(&group, &routes);
    let consumers = crew.start_many(3);
    settle(&stalled.api(), &group, &consumers, 6).await;
    let before = other.api().group(&group).await;

    routes.change(&[&other.api()]);
    // Nobody is in the middle of a conversation with the one that will stand still.
    for consumer in &consumers {
        let heard = consumer.answers("OK");
        wait_until("the other one has answered", async || consumer.answers("OK") > heard + 1).await;
    }
    let turns = async || {
        let shown = stalled.api().get(&format!("{}/actor", monitored_path(&group))).await.success();
        shown["turns"].as_u64().unwrap()
    };
    let turns_before = turns().await;
    stalled.pause();
    more_than_a_lease_passes(Duration::from_secs(2)).await;
    stalled.resume();
    // By what it knew the members' leases are over. It does not judge them: it stood still, and another one serves.
    wait_until("it has looked at the group again", async || {
        // A read reminds it of what is overdue, if anything seems to be.
        stalled.api().group(&group).await;
        turns().await > turns_before
    })
    .await;
    routes.change(&[&stalled.api(), &other.api()]);
    settle(&stalled.api(), &group, &consumers, 6).await;
    let after = stalled.api().group(&group).await;
    assert_eq!((after.group_epoch, after.metadata_version), (before.group_epoch, before.metadata_version));
    for consumer in consumers {
        let seen = consumer.leave().await;
        assert_eq!(seen.answers.keys().map(String::as_str).collect::<Vec<_>>(), ["OK"], "{seen:?}");
    }
    crew.journal.expect_one_reader_at_a_time();
}

#[tokio::test]
async fn redis_that_stands_still_gets_quick_refusals_and_costs_nobody_its_membership() {
    let redis = RedisServer::start();
    let lease = Duration::from_secs(3);
    let daemon = Daemon::redis(&redis).lease(3_000, 30_000).set("redis", "command-timeout", "200ms").start();
    let api = daemon.api();
    let group = api.create_stream("orders", 6).await;
    let mut members: Vec<Member> =
        (0..6).map(|index| Member::new(&api, &group, &format!("m{index}"))).collect();
    beat_until_stable(&api, &group, &mut members).await;
    wait_until("it is in service", async || {
        for member in &mut members {
            member.beat().await;
        }
        is_in_service_again(&api, &group).await
    })
    .await;
    let before = redis.aggregate(&group).await.unwrap();

    redis.pause();
    let paused = Instant::now();
    let mut saw_unready = false;
    wait_until("more than a lease has passed", async || {
        let mut asking = JoinSet::new();
        for member in &mut members {
            let (api, group, request) = (api.clone(), group.clone(), member.request());
            asking.spawn(async move {
                let asked = Instant::now();
                let answer = api.try_heartbeat(&group, &request).await;
                (answer, asked.elapsed())
            });
        }
        api.get("/livez").await.success();
        for (answer, took) in asking.join_all().await {
            assert!(took < lease / 3, "{took:?}: {answer:?}");
            match answer.status {
                StatusCode::OK => assert_eq!(answer.json()["status"], "RETRY"),
                _ => drop(answer.expect_error(ErrorCode::RedisUnavailable)),
            }
        }
        saw_unready |= api.get("/readyz").await.status == StatusCode::SERVICE_UNAVAILABLE;
        paused.elapsed() > lease.mul_f64(1.3)
    })
    .await;
    assert!(saw_unready);
    redis.resume();
    wait_until("it is in service again", async || {
        for member in &mut members {
            let request = member.request();
            let answer = api.try_heartbeat(&group, &request).await;
            if answer.status == StatusCode::OK {
                let response = answer.read();
                member.apply(&request, &response);
                assert!(matches!(response.status, Status::Ok | Status::Retry), "{response:?}");
            }
        }
        api.get("/readyz").await.status == StatusCode::OK && is_in_service_again(&api, &group).await
    })
    .await;
    let after = redis.aggregate(&group).await.unwrap();
    assert_eq!(states(&after), BTreeSet::from(["ACTIVE"]));
    for field in ["groupEpoch", "metadataVersion", "targetAssignments"] {
        assert_eq!(after[field], before[field], "{field}");
    }
}
