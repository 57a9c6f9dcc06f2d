//! Scenarios of an instance that loses its mutex within its critical section: it stands still there, the mutex is taken away
//! by hand, another instance is in there too. What it commits late is not written, and nothing is lost (protocol 2).
#![expect(clippy::unwrap_used, clippy::panic, reason = "the helpers of a test fail like the test")]

mod support;

use std::time::{Duration, Instant};

use reqwest::StatusCode;
use rsc_protocol::keys::Keys;
use rsc_protocol::{ErrorCode, GroupKey, HeartbeatResponse, Status};
use support::{
    Api, DEADLINE, Daemon, DaemonBuilder, Member, Observer, Proxy, RedisServer, beat_until_stable,
    monitored_path, wait_until,
};
use tokio::task::JoinHandle;

/// Nobody expires, and a mutex is soon over.
fn configure(builder: DaemonBuilder) -> DaemonBuilder {
    builder
        .long_lease()
        .set("coordination", "mutex-ttl", "1s")
        .set("coordination", "mutex-acquire-timeout", "5s")
        .set("redis", "connect-timeout", "900ms")
        .set("redis", "command-timeout", "900ms")
}

/// A group with two members, and two coordinators, each with a proxy before its Redis.
struct Scene {
    redis: RedisServer,
    proxies: [Proxy; 2],
    daemons: [Daemon; 2],
    group: GroupKey,
    members: Vec<Member>,
    observer: Observer,
}

impl Scene {
    async fn new() -> Self {
        let redis = RedisServer::start();
        let proxies = [Proxy::to(redis.port()).await, Proxy::to(redis.port()).await];
        let start = |proxy: &Proxy| configure(Daemon::builder(&["--redis-url", &proxy.redis_url()])).start();
        // The proxies run on this thread, too.
        let daemons = tokio::task::block_in_place(|| [start(&proxies[0]), start(&proxies[1])]);
        let api = daemons[0].api();
        let group = api.create_stream("orders", 12).await;
        let mut members = vec![Member::new(&api, &group, "a"), Member::new(&api, &group, "b")];
        beat_until_stable(&api, &group, &mut members).await;
        // Both know the group, so that what either does next is a section of a heartbeat.
        for member in &mut members {
            member.talk_to(&daemons[1].api());
            assert_eq!(member.beat().await.status, Status::Ok);
        }
        let observer = Observer::start(&redis, &group).await;
        Scene { redis, proxies, daemons, group, members, observer }
    }

    fn keys(&self) -> [String; 3] {
        let keys = Keys::default();
        [keys.metadata(&self.group), keys.history(&self.group), keys.mutex(&self.group)]
    }

    /// Somebody joins through one of the two, and the answer is still to come. Refusals are not the end: the request is
    /// sent again as it was.
    fn join(&self, through: usize, id: &str) -> JoinHandle<Member> {
        let (api, group) = (self.daemons[through].api(), self.group.clone());
        let mut member = Member::new(&api, &group, id);
        let request = member.request();
        tokio::spawn(async move {
            let asked = Instant::now();
            while asked.elapsed() < DEADLINE {
                let answer = api.try_heartbeat(&group, &request).await;
                if answer.status == StatusCode::OK {
                    let response: HeartbeatResponse = answer.read();
                    assert!(matches!(response.status, Status::Ok | Status::Retry), "{response:?}");
                    if response.status == Status::Ok {
                        member.apply(&request, &response);
                        return member;
                    }
                } else {
                    answer.expect_error(ErrorCode::RedisUnavailable);
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            panic!("{} could not join", request.member_id);
        })
    }

    /// Record and history as they are.
    async fn stored(&self) -> [Option<Vec<u8>>; 2] {
        let [metadata, history, _] = self.keys();
        [self.redis.dump(&metadata).await, self.redis.dump(&history).await]
    }

    async fn mutex(&self) -> Option<String> {
        self.redis.command(&["GET", &self.keys()[2]]).await
    }

    /// How many scripts Redis has run.
    async fn scripts_run(&self) -> u64 {
        let stats: String = self.redis.command(&["INFO", "commandstats"]).await;
        let calls = |line: &str| line.strip_prefix("cmdstat_evalsha:calls=")?.split(',').next()?.parse().ok();
        stats.lines().find_map(calls).unwrap_or(0)
    }

    /// Everybody is there, the shards are spread, and the record has come about without a gap.
    async fn expect_settled(mut self, joined: Vec<Member>) {
        let joins = joined.len();
        self.members.extend(joined);
        beat_until_stable(&self.daemons[0].api(), &self.group, &mut self.members).await;
        let live = self.daemons[1].api().group(&self.group).await.live_members;
        assert_eq!(live, self.members.len());
        let observed = self.observer.stop().await;
        assert_eq!(observed.replay.count("MEMBER_JOINED"), joins, "each once: {observed:?}");
        assert!(observed.replay.thrown_out().is_empty(), "{observed:?}");
    }
}

/// How often it has decided on a batch again, since the state had moved or an answer was lost.
async fn decided_anew(api: &Api, group: &GroupKey) -> u64 {
    let actor = api.get(&format!("{}/actor", monitored_path(group))).await.success();
    ["conflicts", "unknownOutcomes"].iter().map(|count| actor[count].as_u64().unwrap()).sum()
}

/// Where in its section an instance stands still.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stands {
    /// It holds the mutex, and has not seen yet what is stored.
    BeforeItDecides,
    /// It has decided, and its commit is on the way.
    WithItsCommitUnderWay,
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_that_stood_still_in_its_section_writes_nothing_over_what_the_other_has_done() {
    let scene = Scene::new().await;
    let [_, history, mutex] = scene.keys();
    let mut joined = Vec::new();
    for (round, at) in [Stands::BeforeItDecides, Stands::WithItsCommitUnderWay].into_iter().enumerate() {
        let (late, quick) = (["late0", "late1"][round], ["quick0", "quick1"][round]);
        let anew_before = decided_anew(&scene.daemons[0].api(), &scene.group).await;
        // A commit is the only one of the two that names the history.
        let needle = if at == Stands::BeforeItDecides { &mutex } else { &history };
        let mut held = scene.proxies[0].hold_next(needle);
        let answer = scene.join(0, late);
        held.reached().await;
        scene.daemons[0].pause();
        let mut in_the_net = Some(held);
        if at == Stands::BeforeItDecides {
            in_the_net.take().into_iter().for_each(support::Held::let_go);
            wait_until("it holds the mutex", async || scene.mutex().await.is_some()).await;
        }
        wait_until("its mutex is over", async || scene.mutex().await.is_none()).await;
        joined.push(scene.join(1, quick).await.unwrap());
        let stored = scene.stored().await;
        if let Some(held) = in_the_net {
            let run_before = scene.scripts_run().await;
            held.let_go();
            wait_until("its commit has come to redis", async || scene.scripts_run().await > run_before).await;
            assert!(scene.stored().await == stored, "a late commit was written");
        }
        assert!(!answer.is_finished());
        scene.daemons[0].resume();
        joined.push(answer.await.unwrap());
        if at == Stands::WithItsCommitUnderWay {
            assert!(decided_anew(&scene.daemons[0].api(), &scene.group).await > anew_before);
        }
    }
    scene.expect_settled(joined).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mutex_that_is_taken_away_between_enter_and_commit_costs_no_transition() {
    let scene = Scene::new().await;
    let [_, history, mutex] = scene.keys();
    // The last one without an end: it gets one.
    let thefts: [&[&str]; 3] =
        [&["DEL", &mutex], &["SET", &mutex, "other:1", "PX", "600"], &["SET", &mutex, "other:2"]];
    let mut joined = Vec::new();
    for (theft, id) in thefts.into_iter().zip(["c", "d", "e"]) {
        let anew_before = decided_anew(&scene.daemons[0].api(), &scene.group).await;
        let mut held = scene.proxies[0].hold_next(&history);
        let answer = scene.join(0, id);
        held.reached().await;
        let stored = scene.stored().await;
        scene.redis.command::<()>(theft).await;
        let run_before = scene.scripts_run().await;
        held.let_go();
        wait_until("its commit has come to redis", async || scene.scripts_run().await > run_before).await;
        let then = scene.stored().await;
        // Somebody works in there, as far as anybody can tell.
        if scene.mutex().await.is_some_and(|holder| holder.starts_with("other")) {
            assert!(then == stored, "written under another's mutex");
        }
        joined.push(answer.await.unwrap());
        assert!(decided_anew(&scene.daemons[0].api(), &scene.group).await > anew_before);
    }
    scene.expect_settled(joined).await;
}

/// The mutex was deleted while one was in the section, so that the other came in: whoever commits first, it is one.
#[tokio::test(flavor = "multi_thread")]
async fn of_two_in_the_section_at_once_one_commits_and_the_other_decides_anew() {
    let scene = Scene::new().await;
    let [_, history, mutex] = scene.keys();
    let mut joined = Vec::new();
    for (round, first) in [0, 1].into_iter().enumerate() {
        let ids = [["one0", "two0"], ["one1", "two1"]][round];
        let mut held = scene.proxies[0].hold_next(&history);
        let mut answers = vec![Some(scene.join(0, ids[0]))];
        held.reached().await;
        scene.redis.command::<()>(&["DEL", &mutex]).await;
        let mut held_too = scene.proxies[1].hold_next(&history);
        answers.push(Some(scene.join(1, ids[1])));
        held_too.reached().await;
        let mut commits = [Some(held), Some(held_too)];
        for turn in [first, 1 - first] {
            let run_before = scene.scripts_run().await;
            commits[turn].take().into_iter().for_each(support::Held::let_go);
            wait_until("the commit has come to redis", async || scene.scripts_run().await > run_before).await;
        }
        for answer in answers.into_iter().flatten() {
            joined.push(answer.await.unwrap());
        }
    }
    scene.expect_settled(joined).await;
}
