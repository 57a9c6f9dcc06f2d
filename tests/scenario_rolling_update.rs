//! The scenario of a rolling update: a new coordinator starts, the old one is told to stop while it serves
//! (protocol 9).

mod support;

use std::time::Duration;

use rsc_protocol::keys::Keys;
use rsc_protocol::{GroupKey, HeartbeatResponse, Status};
use support::{Api, Daemon, Member, RedisServer, beat_until_stable, wait_until};
use tokio::task::JoinSet;

const TERMINATING: &str = "COORDINATOR_TERMINATING";

/// Heartbeats to the old coordinator until it says that it is terminating, from then on to the new one.
/// Each must be answered. Returns how many answers each coordinator gave.
async fn beat_through_the_update(
    mut member: Member,
    old: Api,
    new: Api,
    group: GroupKey,
) -> (Member, [usize; 2]) {
    let mut answers = [0, 0];
    let mut terminating = false;
    while answers[1] < 20 {
        let api = if terminating { &new } else { &old };
        let request = member.request();
        let answer = api.try_heartbeat(&group, &request).await;
        answers[usize::from(terminating)] += 1;
        if answer.status == 200 {
            let response: HeartbeatResponse = answer.read();
            assert!(matches!(response.status, Status::Ok | Status::Retry), "{response:?}");
            member.apply(&request, &response);
        } else {
            assert_eq!((answer.status.as_u16(), &answer.json()["errorCode"]), (503, &TERMINATING.into()));
            assert!(!terminating, "the new one does not terminate");
            terminating = true;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    (member, answers)
}

#[tokio::test(flavor = "multi_thread")]
async fn rolling_update_under_load_answers_every_request_and_leaves_no_mutex() {
    let redis = RedisServer::start();
    // Long enough for everybody to hear of it, as a load balancer would.
    let start = || Daemon::redis(&redis).long_lease().set("server", "shutdown-drain-delay", "1500ms").start();
    let mut old = start();
    let groups = [old.api().create_stream("orders", 8).await, old.api().create_stream("parcels", 8).await];
    let mut members = Vec::new();
    for group in &groups {
        let mut of_group: Vec<Member> =
            (0..4).map(|index| Member::new(&old.api(), group, &format!("m{index}"))).collect();
        beat_until_stable(&old.api(), group, &mut of_group).await;
        members.extend(of_group.into_iter().map(|member| (member, group.clone())));
    }
    let new = start();
    let mut running = JoinSet::new();
    for (member, group) in members {
        running.spawn(beat_through_the_update(member, old.api(), new.api(), group));
    }
    // Somebody joins while the one goes and the other comes.
    for group in &groups {
        let late = Member::new(&old.api(), group, "late");
        running.spawn(beat_through_the_update(late, old.api(), new.api(), group.clone()));
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    let instance = old.ready_field("instance_id").unwrap();
    old.terminate();
    assert_eq!(old.wait_for_exit().code(), Some(0), "{}", old.log());
    // None of its mutexes is left, though the other one may be at work.
    for group in &groups {
        let holder: Option<String> = redis.command(&["GET", &Keys::default().mutex(group)]).await;
        assert!(!holder.as_ref().is_some_and(|holder| holder.starts_with(&instance)), "{holder:?}");
    }
    let ended = running.join_all().await;
    for (member, answers) in &ended {
        assert!(answers[0] > 0 && answers[1] > 0, "{}: {answers:?}", member.id());
    }
    wait_until("no mutex is held", async || {
        let mutexes: Vec<String> = redis.command(&["KEYS", "*mutex"]).await;
        mutexes.is_empty()
    })
    .await;
    for group in &groups {
        let mut of_group = Vec::new();
        for (member, _) in ended.iter().filter(|(member, _)| member.group() == group) {
            let mut member = member.clone();
            member.talk_to(&new.api());
            of_group.push(member);
        }
        beat_until_stable(&new.api(), group, &mut of_group).await;
    }
}
