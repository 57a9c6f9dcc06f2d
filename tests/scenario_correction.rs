//! Scenarios of Redis that lost writes: each kind of evidence begins a correction round, and the round brings
//! everybody back without a second reader (protocol 5).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rsc_protocol::keys::Keys;
use rsc_protocol::{ErrorCode, GroupKey, HeartbeatResponse, Status};
use serde_json::{Value, json};
use support::{
    Api, Crew, Daemon, Member, RedisServer, Routes, beat_until_stable, encode, group_path, monitored_path,
    settle, wait_until,
};

const LEASE: Duration = Duration::from_secs(3);

/// One group on one coordinator.
struct World {
    redis: RedisServer,
    daemon: Daemon,
    api: Api,
    group: GroupKey,
}

fn daemon(redis: &RedisServer) -> Daemon {
    Daemon::redis(redis).lease(LEASE.as_millis() as u64, 8_000).start()
}

impl World {
    async fn start(shards: u32) -> Self {
        let redis = RedisServer::start();
        let daemon = daemon(&redis);
        let api = daemon.api();
        let group = api.create_stream("orders", shards).await;
        World { redis, daemon, api, group }
    }

    fn key(&self) -> String {
        Keys::default().metadata(&self.group)
    }

    fn member(&self, id: &str) -> Member {
        Member::new(&self.api, &self.group, id)
    }

    async fn dump(&self) -> Vec<u8> {
        self.redis.dump(&self.key()).await.unwrap()
    }

    /// Redis falls back to `dump`, and only a coordinator that knows nothing of what was lost is left: whatever
    /// is noticed is noticed by what members say.
    async fn fall_back_unnoticed(&mut self, dump: &[u8], members: &mut [Member]) {
        self.daemon.kill();
        self.redis.restore(&self.key(), dump).await;
        self.daemon = daemon(&self.redis);
        self.api = self.daemon.api();
        for member in members {
            member.talk_to(&self.api);
        }
    }

    async fn aggregate(&self) -> Value {
        self.redis.aggregate(&self.group).await.unwrap()
    }

    async fn version(&self) -> u64 {
        self.aggregate().await["metadataVersion"].as_u64().unwrap()
    }

    async fn round_is_on(&self) -> bool {
        self.aggregate().await["metadataCorrection"].is_object()
    }

    /// Evidence by members, rounds begun, and what the actor noticed itself.
    async fn counted(&self) -> [f64; 3] {
        [
            self.api.metric("rsc_evidence_of_loss_total").await,
            self.api.metric("rsc_correction_begun_total").await,
            self.api.metric("rsc_metadata_version_regression_total").await,
        ]
    }

    /// The round ends, and everybody has a share that nobody else reads.
    async fn recovers(&self, members: &mut [Member]) {
        wait_until("the round is over", async || {
            beat_until_stable(&self.api, &self.group, members).await;
            !self.round_is_on().await
        })
        .await;
        beat_until_stable(&self.api, &self.group, members).await;
        let owned: usize = members.iter().map(|member| member.owned.len()).sum();
        assert_eq!(Some(owned as u64), self.aggregate().await["shardCount"].as_u64());
        let assignments =
            self.api.get(&format!("{}/assignments", monitored_path(&self.group))).await.success();
        assert_eq!(assignments["invariantViolations"], json!([]), "{assignments}");
    }
}

/// `a` has been told to give two of its four shards to `b`, drains them, and everybody has the newest epoch: what
/// comes now moves the version alone.
async fn hand_over_under_way(world: &World) -> Vec<Member> {
    let (mut a, mut b) = (world.member("a"), world.member("b"));
    a.drains_slowly = true;
    a.beat().await;
    wait_until("the hand-over is under way", async || {
        b.beat().await;
        let answer = a.beat().await;
        a.draining.len() == 2 && a.epoch == b.epoch && a.epoch as u64 == answer.assignment_epoch
    })
    .await;
    vec![a, b]
}

fn assigned(answer: &HeartbeatResponse) -> BTreeSet<u32> {
    answer.assignment.assigned_shards.iter().map(|shard| shard.shard_index).collect()
}

#[tokio::test]
async fn known_member_with_a_higher_version_is_told_redis_truth_and_admins_wait_until_everybody_is_back() {
    let mut world = World::start(4).await;
    let mut members = hand_over_under_way(&world).await;
    let dump = world.dump().await;
    members[0].finish_drains();
    beat_until_stable(&world.api, &world.group, &mut members).await;
    let epoch = members[0].epoch;
    world.fall_back_unnoticed(&dump, &mut members).await;
    let stored = world.version().await;
    let [a, b] = &mut members[..] else { unreachable!() };
    assert!(a.metadata_version > stored);
    a.drains_slowly = false;
    let reads = a.owned.clone();

    // Its answer is lost, and told again.
    let lost = a.beat_unheard().await;
    let begun = Instant::now();
    let answer = a.beat().await;
    for answer in [&lost, &answer] {
        assert_eq!((answer.status, answer.metadata_version), (Status::SyncMetadata, stored), "{answer:?}");
        assert_eq!(
            (answer.member_epoch, assigned(answer)),
            (epoch, reads.clone()),
            "what it reads is its own"
        );
        assert!(answer.assignment_lease_ms > 0);
    }
    assert_eq!(world.counted().await, [2.0, 1.0, 0.0], "evidence, a round, nothing noticed by itself");
    let round = world.aggregate().await["metadataCorrection"].clone();
    assert_eq!(round["targetMetadataVersion"], json!(stored), "{round}");
    assert!(round["observedMetadataVersion"].as_u64() > Some(stored), "{round}");
    let shown = world.api.get(&format!("{}/assignments", monitored_path(&world.group))).await.success();
    assert_eq!(shown["metadataCorrection"], round);

    // On Redis's version, with the round still on.
    assert_eq!(a.beat().await.status, Status::RevokePending);
    let forced = json!({"requestedBy": "test", "reason": "impatience", "force": true});
    let other = format!("/coord/v1/streams/{}/groups/{}", encode("orders"), encode("another"));
    let create = json!({"requestedBy": "test"});
    world
        .api
        .delete(&group_path(&world.group), &forced)
        .await
        .expect_error(ErrorCode::MetadataSyncInProgress);
    world.api.post(&other, &create).await.expect_error(ErrorCode::MetadataSyncInProgress);
    // Producers go on.
    world.api.get(&format!("{}/producer-routing", group_path(&world.group))).await.success();

    // Somebody who has nothing to do with it may come, and gets nothing new before the round is over.
    let mut d = world.member("d");
    let joined = d.beat().await;
    assert_eq!((joined.status, assigned(&joined)), (Status::Ok, BTreeSet::new()));
    // A further party shows the loss as well: the round's age begins anew.
    let reads = b.owned.clone();
    let answer = b.beat().await;
    assert_eq!(answer.status, Status::SyncMetadata);
    assert!(assigned(&answer).is_subset(&reads), "{answer:?}");
    let begun = begun.max(Instant::now());
    wait_until("something is granted", async || {
        a.beat().await;
        b.beat().await;
        d.beat().await;
        let is_on = world.round_is_on().await;
        assert!(!is_on || d.owned.is_empty(), "granted in a round");
        !d.owned.is_empty()
    })
    .await;
    assert!(begun.elapsed() > LEASE * 9 / 10, "granted {:?} after the last sign of a loss", begun.elapsed());
    members.push(d);
    world.recovers(&mut members).await;
    world.api.post(&other, &create).await.success();
}

#[tokio::test]
async fn shards_that_a_forgotten_member_still_reads_are_on_hold_for_one_lease() {
    let mut world = World::start(4).await;
    let mut members = vec![world.member("a"), world.member("b")];
    beat_until_stable(&world.api, &world.group, &mut members).await;
    let dump = world.dump().await;
    let (mut c, version) = (world.member("c"), world.version().await);
    members.push(c);
    beat_until_stable(&world.api, &world.group, &mut members).await;
    c = members.pop().unwrap();
    world.fall_back_unnoticed(&dump, std::slice::from_mut(&mut c)).await;
    for member in &mut members {
        member.talk_to(&world.api);
    }
    assert_eq!(world.version().await, version);
    let reads = c.owned.clone();
    assert!(!reads.is_empty());

    // Redis does not know c any more. The answer is lost: c reads on.
    let said = Instant::now();
    assert_eq!(c.beat_unheard().await.status, Status::UnknownMemberId);
    assert_eq!(world.counted().await, [1.0, 1.0, 0.0]);
    let path = format!("{}/assignments", monitored_path(&world.group));
    let shown = world.api.get(&path).await.success();
    let held: BTreeSet<u32> = shown["holds"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|hold| hold["memberId"] == "c" && hold["cause"] == "LOST_FUTURE")
        .map(|hold| hold["shardIndex"].as_u64().unwrap() as u32)
        .collect();
    assert_eq!(held, reads, "{shown}");
    wait_until("the shards are granted again", async || {
        let mut granted = false;
        for member in &mut members {
            member.beat().await;
            granted |= !member.owned.is_disjoint(&reads);
        }
        granted
    })
    .await;
    assert!(said.elapsed() >= LEASE, "granted after {:?}", said.elapsed());
    assert_eq!(c.beat().await.status, Status::UnknownMemberId);
    members.push(c);
    world.recovers(&mut members).await;
}

#[tokio::test]
async fn unknown_member_from_millions_ahead_is_counted_and_begins_nothing() {
    let world = World::start(4).await;
    let mut members = vec![world.member("a")];
    beat_until_stable(&world.api, &world.group, &mut members).await;
    let mut stranger = world.member("stranger");
    stranger.epoch = 3;
    stranger.metadata_version = world.version().await + 2_000_000;
    stranger.owned = BTreeSet::from([0]);
    assert_eq!(stranger.beat_unheard().await.status, Status::UnknownMemberId);
    assert_eq!(world.counted().await, [1.0, 0.0, 0.0]);
    assert!(!world.round_is_on().await);
    assert_eq!(members[0].beat().await.status, Status::Ok);
    // As far as a loss can reach it is believed.
    stranger.metadata_version = world.version().await + 900_000;
    assert_eq!(stranger.beat_unheard().await.status, Status::UnknownMemberId);
    assert_eq!(world.counted().await, [2.0, 1.0, 0.0]);
    assert!(world.round_is_on().await);
}

#[tokio::test]
async fn known_member_with_a_higher_epoch_at_the_stored_version_begins_a_round() {
    let mut world = World::start(1).await;
    let mut members = vec![world.member("a")];
    beat_until_stable(&world.api, &world.group, &mut members).await;
    // A standby: a's shards do not change, so its new epoch travels with its lease and moves no version.
    members.push(world.member("b"));
    members[1].beat().await;
    let dump = world.dump().await;
    let (epoch, version) = (members[0].epoch, world.version().await);
    members[0].beat().await;
    assert!(members[0].epoch > epoch);
    assert_eq!((members[0].metadata_version, world.version().await), (version, version));

    world.fall_back_unnoticed(&dump, &mut members).await;
    let answer = members[0].beat().await;
    assert_eq!((answer.status, answer.metadata_version), (Status::SyncMetadata, version));
    assert_eq!(answer.member_epoch as u64, answer.assignment_epoch, "handed out anew");
    assert_eq!(assigned(&answer), BTreeSet::from([0]), "what is its own it keeps");
    assert_eq!(world.counted().await, [1.0, 1.0, 0.0]);
    assert_eq!(members[0].beat().await.status, Status::RevokePending);
    world.recovers(&mut members).await;
}

#[tokio::test]
async fn stored_version_with_another_token_is_another_history() {
    let mut world = World::start(4).await;
    let mut members = hand_over_under_way(&world).await;
    let dump = world.dump().await;
    // One history: a gives its shards back.
    let a = &mut members[0];
    a.finish_drains();
    a.beat().await;
    a.drains_slowly = false;
    let version = a.metadata_version;
    assert_eq!((world.version().await, a.owned.len()), (version, 2));

    // The other: c comes instead, and the numbers are the same.
    world.fall_back_unnoticed(&dump, &mut members).await;
    let mut c = world.member("c");
    c.beat().await;
    assert_eq!(world.version().await, version, "the same number");
    assert_eq!(world.counted().await, [0.0, 0.0, 0.0]);
    let answer = members[0].beat().await;
    assert_eq!((answer.status, answer.metadata_version), (Status::SyncMetadata, version), "{answer:?}");
    assert_eq!(world.counted().await, [1.0, 1.0, 0.0]);
    members.push(c);
    world.recovers(&mut members).await;
}

/// How Redis falls back while its coordinator runs.
#[derive(Clone, Copy, Debug)]
enum Loss {
    /// A newcomer and all that came with it.
    Structure,
    /// Nothing but some renewals of leases.
    Renewals,
    /// Nothing that a number shows: a write of the same numbers, but another one.
    SameNumbers,
}

async fn noticed_by_the_running_actor(loss: Loss) {
    let world = World::start(4).await;
    let mut members = vec![world.member("a"), world.member("b")];
    beat_until_stable(&world.api, &world.group, &mut members).await;
    for member in &mut members {
        member.beat().await;
    }
    let field = async |name: &str| world.redis.metadata_field(&world.group, name).await.unwrap();
    let (dump, numbers) = (world.dump().await, [field("revision").await, field("liveRevision").await]);
    match loss {
        Loss::Structure => drop(world.member("c").beat().await),
        Loss::Renewals => {
            members[0].beat().await;
            assert_eq!(field("revision").await, numbers[0], "a renewal only");
        }
        Loss::SameNumbers => {}
    }
    let owned: Vec<BTreeSet<u32>> = members.iter().map(|member| member.owned.clone()).collect();
    match loss {
        Loss::Structure | Loss::Renewals => world.redis.restore(&world.key(), &dump).await,
        Loss::SameNumbers => {
            world.redis.command::<()>(&["HSET", &world.key(), "writeId", "another history"]).await;
        }
    }
    assert_eq!([field("revision").await, field("liveRevision").await], numbers);

    // Nobody says anything: the actor looks when the leases in the record end.
    wait_until("the actor has noticed", async || world.counted().await == [0.0, 1.0, 1.0]).await;
    assert!(world.round_is_on().await);
    assert!(world.daemon.log().contains("redis lost writes"));
    let actor = world.api.get(&format!("{}/actor", monitored_path(&world.group))).await.success();
    assert_eq!(actor["inService"], json!(false), "{actor}");
    let delete = json!({"requestedBy": "test", "reason": "impatience", "force": true});
    world
        .api
        .delete(&group_path(&world.group), &delete)
        .await
        .expect_error(ErrorCode::MetadataSyncInProgress);
    // Their leases are over in the record, and it is not theirs to pay for.
    for member in &mut members {
        assert_eq!(member.beat().await.status, Status::RevokePending, "on Redis's version already");
    }
    world.recovers(&mut members).await;
    let now: Vec<BTreeSet<u32>> = members.iter().map(|member| member.owned.clone()).collect();
    assert_eq!(now, owned, "nothing has moved");
    assert_eq!(world.counted().await, [0.0, 1.0, 1.0], "one loss, one round");
}

#[tokio::test]
async fn running_actor_notices_an_older_revision_by_itself() {
    noticed_by_the_running_actor(Loss::Structure).await;
}

#[tokio::test]
async fn running_actor_notices_lost_renewals_by_itself() {
    noticed_by_the_running_actor(Loss::Renewals).await;
}

#[tokio::test]
async fn running_actor_notices_another_history_of_the_same_numbers_by_itself() {
    noticed_by_the_running_actor(Loss::SameNumbers).await;
}

#[tokio::test]
async fn lease_only_commits_of_another_instance_are_no_loss() {
    let world = World::start(4).await;
    let neighbour = daemon(&world.redis);
    let apis = [world.api.clone(), neighbour.api()];
    let mut members = vec![world.member("a"), world.member("b")];
    beat_until_stable(&world.api, &world.group, &mut members).await;
    let started = Instant::now();
    let mut turn = 0;
    wait_until("some leases have passed", async || {
        for member in &mut members {
            turn += 1;
            member.talk_to(&apis[turn / 3 % 2]);
            assert_eq!(member.beat().await.status, Status::Ok);
        }
        started.elapsed() > LEASE * 2
    })
    .await;
    for api in &apis {
        assert_eq!(api.metric("rsc_metadata_version_regression_total").await, 0.0);
        assert_eq!(api.metric("rsc_correction_begun_total").await, 0.0);
    }
}

/// The one coordinator that runs looks before it decides: there is no moment between a loss and its first sign.
#[tokio::test]
async fn losses_under_a_running_coordinator_make_no_second_reader() {
    let world = World::start(8).await;
    let crew = Crew::new(&world.group, &Routes::to(&[&world.api]));
    let mut consumers = crew.start_many(3);
    settle(&world.api, &world.group, &consumers, 8).await;
    let mut dumps = vec![world.dump().await];
    for (number, id) in ["x", "y", "z"].into_iter().enumerate() {
        if number == 1 {
            consumers.remove(0).crash().await;
        }
        consumers.push(crew.start(id));
        wait_until("the newcomer reads", async || !consumers.last().unwrap().seen().reading.is_empty()).await;
        dumps.push(world.dump().await);
        world.redis.restore(&world.key(), &dumps[number]).await;
        wait_until("the loss is noticed", async || world.counted().await[2] > number as f64).await;
        settle(&world.api, &world.group, &consumers, 8).await;
    }
    for consumer in consumers {
        consumer.leave().await;
    }
    crew.journal.expect_one_reader_at_a_time();
    // Every shard was read, and what the newcomers got was read anew.
    assert!(crew.journal.len() > 8);
}
