//! The scenarios of a rolling update: a new coordinator starts, the old one is told to stop, or killed, while it serves
//! (protocol 9).

mod support;

use std::time::Duration;

use rsc_protocol::keys::Keys;
use rsc_protocol::{GroupKey, HeartbeatResponse, Status};
use support::{
    Api, Consumer, Crew, Daemon, Member, Observer, Proxy, RedisServer, Routes, beat_until_stable,
    monitored_path, seed, settle, wait_until,
};
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

/// Waits until this coordinator judges members: from now on it would expire whoever it takes for silent.
async fn judges(api: &Api, group: &GroupKey) {
    wait_until("it is in service", async || {
        api.get(&format!("{}/actor", monitored_path(group))).await.success()["inService"] == true
    })
    .await;
}

/// Waits until every consumer has been told `OK` some times more.
async fn are_heard(consumers: &[Consumer]) {
    let heard: Vec<u64> = consumers.iter().map(|consumer| consumer.answers("OK")).collect();
    wait_until("everybody is heard", async || {
        consumers.iter().zip(&heard).all(|(consumer, heard)| consumer.answers("OK") > heard + 5)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rolling_updates_by_signal_and_by_kill_throw_nobody_out_and_move_no_shard() {
    const SHARDS: usize = 24;
    let redis = RedisServer::start();
    let port = redis.port();
    let proxies = [Proxy::to(port).await, Proxy::to(port).await, Proxy::to(port).await];
    let start = |proxy: &Proxy| {
        let builder = Daemon::builder(&["--redis-url", &proxy.redis_url()]).lease(4_000, 40_000);
        tokio::task::block_in_place(|| builder.set("server", "shutdown-drain-delay", "500ms").start())
    };
    let mut running = start(&proxies[0]);
    let group = running.api().create_stream("orders", 24).await;
    let routes = Routes::seeded(&[&running.api()], seed());
    let mut crew = Crew::new(&group, &routes);
    crew.interval = Duration::from_millis(50);
    crew.patience = Duration::from_secs(2);
    let consumers = crew.start_many(6);
    settle(&running.api(), &group, &consumers, SHARDS).await;
    let moved_before = crew.journal.len();
    let before = running.api().group(&group).await;
    let targets = redis.aggregate(&group).await.unwrap()["targetAssignments"].clone();
    let observer = Observer::start(&redis, &group).await;
    judges(&running.api(), &group).await;

    let mut never_sent = None;
    for (is_killed, proxy) in [false, true].into_iter().zip(&proxies[1..]) {
        let next = start(proxy);
        routes.change(&[&running.api(), &next.api()]);
        are_heard(&consumers).await;
        if is_killed {
            // In the middle of a section: its mutex stays until its time is over.
            let mut commit = proxies[1].hold_next(&Keys::default().history(&group));
            commit.reached().await;
            running.kill();
            never_sent = Some(commit);
        } else {
            running.terminate();
            let old = running.api();
            wait_until("the old one says so", async || {
                let ready = old.try_send(old.request(reqwest::Method::GET, "/readyz")).await;
                ready.is_ok_and(|answer| answer.status == 503)
            })
            .await;
        }
        // As a load balancer does it: a moment later.
        are_heard(&consumers).await;
        routes.change(&[&next.api()]);
        if !is_killed {
            assert_eq!(running.wait_for_exit().code(), Some(0), "{}", running.log());
        }
        running = next;
        are_heard(&consumers).await;
        judges(&running.api(), &group).await;
        are_heard(&consumers).await;
    }

    drop(never_sent);
    settle(&running.api(), &group, &consumers, SHARDS).await;
    let after = running.api().group(&group).await;
    assert_eq!((after.group_epoch, after.metadata_version), (before.group_epoch, before.metadata_version));
    assert_eq!(redis.aggregate(&group).await.unwrap()["targetAssignments"], targets);
    let observed = observer.stop().await;
    assert_eq!(observed.replay.counts.len(), 0, "{observed:?}");
    let known = ["OK", "RETRY", TERMINATING, "none"];
    for consumer in consumers {
        // Leaving would give its shards to the others.
        let seen = consumer.crash().await;
        assert!(seen.answers.keys().all(|answer| known.contains(&answer.as_str())), "{seen:?}");
    }
    crew.journal.expect_one_reader_at_a_time();
    // Each has read what it read without a gap.
    assert_eq!(crew.journal.len() - moved_before, SHARDS);
}
