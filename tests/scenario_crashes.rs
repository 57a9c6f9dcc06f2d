//! Scenarios of a coordinator that is killed with `kill -9`: the next one continues from the record alone
//! (protocol 9).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeSet;
use std::time::Duration;

use rand::RngExt;
use rsc_protocol::Status;
use rsc_protocol::admin::GroupState;
use serde_json::Value;
use support::{Crew, Daemon, Member, RedisServer, Routes, settle};

/// Numbers that never go back, from the record.
fn numbers(aggregate: &Value) -> [u64; 4] {
    ["metadataVersion", "groupEpoch", "assignmentEpoch", "storeRevision"]
        .map(|field| aggregate[field].as_u64().unwrap())
}

fn is_one_reader_per_shard(members: &[Member]) -> bool {
    let mut read = BTreeSet::new();
    members
        .iter()
        .flat_map(|member| member.owned.iter().chain(member.draining.keys()))
        .all(|s| read.insert(s))
}

#[tokio::test]
async fn rebalance_goes_on_from_the_record_when_every_heartbeat_meets_a_new_process() {
    let redis = RedisServer::start();
    let mut daemon = Daemon::redis(&redis).long_lease().start();
    let group = daemon.api().create_stream("orders", 6).await;
    let mut members: Vec<Member> =
        ["a", "b", "c"].map(|id| Member::new(&daemon.api(), &group, id)).into_iter().collect();
    let mut target = None;
    let mut before = redis.aggregate(&group).await.unwrap();
    for round in 0..5 {
        for index in 0..members.len() {
            let answer = members[index].beat().await;
            assert_eq!(answer.status, Status::Ok, "{answer:?}");
            daemon.kill();
            assert!(is_one_reader_per_shard(&members), "round {round}");
            let now = redis.aggregate(&group).await.unwrap();
            for (was, is) in numbers(&before).into_iter().zip(numbers(&now)) {
                assert!(is >= was, "{before} then {now}");
            }
            // Decided once, when the last one has joined.
            if round > 0 {
                assert_eq!(target.get_or_insert(now["targetAssignments"].clone()), &now["targetAssignments"]);
            }
            before = now;
            daemon = Daemon::redis(&redis).long_lease().start();
            members.iter_mut().for_each(|member| member.talk_to(&daemon.api()));
        }
    }
    assert_eq!(daemon.api().group(&group).await.state, GroupState::Stable);
    assert!(members.iter().all(|member| member.owned.len() == 2 && member.draining.is_empty()));
}

#[tokio::test]
async fn kills_at_random_moments_under_load_never_give_a_shard_to_two() {
    let redis = RedisServer::start();
    let start = || Daemon::redis(&redis).lease(1_500, 3_000).start();
    let mut daemon = start();
    let group = daemon.api().create_stream("orders", 24).await;
    let routes = Routes::to(&[&daemon.api()]);
    let mut crew = Crew::new(&group, &routes);
    // Many more heartbeats than usual, so that most kills hit a critical section.
    crew.interval = Duration::from_millis(20);
    crew.patience = Duration::from_millis(500);
    let mut consumers = crew.start_many(6);
    settle(&daemon.api(), &group, &consumers, 24).await;

    let mut rng = rand::rng();
    let mut going = Vec::new();
    for kill in 0..10 {
        // Something to rebalance: one comes, one goes.
        consumers.push(crew.start(&format!("n{kill}")));
        let gone = consumers.swap_remove(rng.random_range(0..consumers.len()));
        match kill % 3 {
            0 => going.push(tokio::spawn(gone.leave())),
            1 => going.push(tokio::spawn(gone.crash())),
            // Crashed and at once started again under the same name.
            _ => {
                let id = gone.id().to_owned();
                gone.crash().await;
                consumers.push(crew.start(&id));
            }
        }
        tokio::time::sleep(Duration::from_millis(rng.random_range(1..300))).await;
        daemon.kill();
        daemon = start();
        routes.change(&[&daemon.api()]);
        // Now and then long enough for a new process to expire who has crashed.
        if kill % 5 == 4 {
            settle(&daemon.api(), &group, &consumers, 24).await;
        }
    }
    for gone in going {
        gone.await.unwrap();
    }
    settle(&daemon.api(), &group, &consumers, 24).await;
    for consumer in consumers {
        consumer.leave().await;
    }
    crew.journal.expect_one_reader_at_a_time();
    assert!(crew.journal.len() > 24, "{}", crew.journal.len());
}
