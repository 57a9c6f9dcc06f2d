//! Scenarios of two and three coordinators on one Redis, each heartbeat going to any of them: no transition is lost, doubled
//! or overwritten, and nothing that is recorded goes back.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::json;
use support::{Api, Consumer, Crew, Daemon, Observer, RedisServer, Routes, monitored_path, seed, settle};

const SHARDS: u32 = 30;
const MEMBERS: usize = 12;
/// How long members come and go.
const CHURN: Duration = Duration::from_secs(6);

#[tokio::test]
async fn members_that_come_go_and_crash_converge_through_two_coordinators() {
    members_converge_through(2).await;
}

#[tokio::test]
async fn members_that_come_go_and_crash_converge_through_three_coordinators() {
    members_converge_through(3).await;
}

async fn members_converge_through(coordinators: usize) {
    let mut chance = StdRng::seed_from_u64(seed());
    let redis = RedisServer::start();
    let daemons: Vec<Daemon> =
        (0..coordinators).map(|_| Daemon::redis(&redis).lease(1_500, 3_000).start()).collect();
    let apis: Vec<Api> = daemons.iter().map(Daemon::api).collect();
    let group = apis[0].create_stream("orders", SHARDS).await;
    let routes = Routes::seeded(&apis.iter().collect::<Vec<_>>(), chance.random());
    let observer = Observer::start(&redis, &group).await;
    let mut crew = Crew::new(&group, &routes);
    crew.versions = Some(observer.versions());
    let mut consumers = crew.start_many(MEMBERS);
    settle(&apis[0], &group, &consumers, SHARDS as usize).await;

    let (mut going, mut started) = (Vec::new(), MEMBERS);
    let mut start_another = |consumers: &mut Vec<Consumer>| {
        consumers.push(crew.start(&format!("m{started}")));
        started += 1;
    };
    let churn = Instant::now();
    // Each of the three ways to go comes about as often as the others.
    for way in (0..3).cycle() {
        let gone = consumers.swap_remove(chance.random_range(0..consumers.len()));
        let id = gone.id().to_owned();
        match way {
            0 => going.push(tokio::spawn(gone.leave())),
            1 => going.push(tokio::spawn(gone.crash())),
            // Crashed and at once started again under the same name.
            _ => {
                gone.crash().await;
                consumers.push(crew.start(&id));
            }
        }
        if consumers.len() < MEMBERS && chance.random_bool(0.7) || consumers.len() < MEMBERS / 2 {
            start_another(&mut consumers);
        }
        for api in &apis {
            let shown = api.get(&format!("{}/assignments", monitored_path(&group))).await;
            assert_eq!(shown.json()["invariantViolations"], json!([]), "{}", shown.json());
        }
        if churn.elapsed() > CHURN {
            break;
        }
        tokio::time::sleep(Duration::from_millis(chance.random_range(20..250))).await;
    }
    for gone in going {
        gone.await.unwrap();
    }
    while consumers.len() < MEMBERS {
        start_another(&mut consumers);
    }
    for api in &apis {
        settle(api, &group, &consumers, SHARDS as usize).await;
        let actor = api.get(&format!("{}/actor", monitored_path(&group))).await.success();
        assert!(actor["turns"].as_u64().is_some_and(|turns| turns > 50), "each had its share: {actor}");
    }
    for consumer in consumers {
        consumer.leave().await;
    }
    let observed = observer.stop().await;
    assert!(observed.changes > 50, "{observed:?}");
    for way in ["MEMBER_GONE LEFT", "MEMBER_GONE LEASE_EXPIRED", "MEMBER_SUPERSEDED", "RELEASED"] {
        assert!(observed.replay.count(way) > 0, "{way}: {observed:?}");
    }
    crew.journal.expect_one_reader_at_a_time();
}
