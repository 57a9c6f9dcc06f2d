//! Scenarios of two coordinators on one Redis that know nothing of each other but what is recorded.

mod support;

use std::time::{Duration, Instant};

use rand::RngExt;
use reqwest::StatusCode;
use rsc_protocol::GroupKey;
use serde_json::json;
use support::{
    Api, Crew, Daemon, Observer, RedisServer, Routes, group_path, heartbeat, monitored_path, settle,
    wait_until,
};

/// Whether this coordinator has an actor for the group; `None` when it says that there is no such group.
async fn is_served(api: &Api, group: &GroupKey) -> Option<bool> {
    let answer = api.get(&format!("{}/actor", monitored_path(group))).await;
    (answer.status != StatusCode::NOT_FOUND).then(|| answer.success()["running"] == true)
}

#[tokio::test]
async fn twelve_members_that_come_go_and_crash_converge_through_two_coordinators() {
    let redis = RedisServer::start();
    let daemons = [
        Daemon::redis(&redis).lease(1_500, 3_000).start(),
        Daemon::redis(&redis).lease(1_500, 3_000).start(),
    ];
    let apis = daemons.each_ref().map(Daemon::api);
    let group = apis[0].create_stream("orders", 30).await;
    let routes = Routes::to(&[&apis[0], &apis[1]]);
    let crew = Crew::new(&group, &routes);
    let observer = Observer::start(&redis, &group).await;
    let mut consumers = crew.start_many(12);
    settle(&apis[0], &group, &consumers, 30).await;

    let mut rng = rand::rng();
    let mut going = Vec::new();
    let churn = Instant::now();
    let mut started = 12;
    while churn.elapsed() < Duration::from_secs(6) {
        let gone = consumers.swap_remove(rng.random_range(0..consumers.len()));
        let id = gone.id().to_owned();
        match rng.random_range(0..3) {
            0 => going.push(tokio::spawn(gone.leave())),
            1 => going.push(tokio::spawn(gone.crash())),
            // Crashed and at once started again under the same name.
            _ => {
                gone.crash().await;
                consumers.push(crew.start(&id));
            }
        }
        if consumers.len() < 12 && rng.random_bool(0.7) || consumers.len() < 6 {
            consumers.push(crew.start(&format!("m{started}")));
            started += 1;
        }
        for api in &apis {
            let shown = api.get(&format!("{}/assignments", monitored_path(&group))).await;
            assert_eq!(shown.json()["invariantViolations"], json!([]), "{}", shown.json());
        }
        tokio::time::sleep(Duration::from_millis(rng.random_range(20..250))).await;
    }
    for gone in going {
        gone.await.unwrap();
    }
    while consumers.len() < 12 {
        consumers.push(crew.start(&format!("m{started}")));
        started += 1;
    }
    for api in &apis {
        settle(api, &group, &consumers, 30).await;
    }
    for consumer in consumers {
        consumer.leave().await;
    }
    let observed = observer.stop().await;
    assert!(observed.changes > 50, "{observed:?}");
    crew.journal.expect_one_reader_at_a_time();
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
