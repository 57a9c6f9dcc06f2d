//! Scenarios of `rsc restore` with coordinators and members at work (protocol 3, 5; ADR 0018): the group goes on by
//! itself, members of the lost future come back by a correction round, and no shard ever has two readers.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rsc_protocol::admin::GroupState;
use rsc_protocol::keys::Keys;
use rsc_protocol::{ErrorCode, GroupKey, Status};
use serde_json::json;
use support::{
    Api, Crew, Daemon, DaemonBuilder, Member, RedisServer, Routes, Tool, beat_until_stable, group_path,
    monitored_path, settle, wait_until,
};
use tempfile::TempDir;

const LEASE: Duration = Duration::from_secs(2);

fn daemon(redis: &RedisServer) -> DaemonBuilder {
    Daemon::redis(redis).lease(LEASE.as_millis() as u64, 8_000)
}

/// A Redis, and a place for one backup.
struct World {
    redis: RedisServer,
    directory: TempDir,
}

impl World {
    fn new() -> Self {
        World { redis: RedisServer::start(), directory: tempfile::tempdir().unwrap() }
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("backup")
    }

    async fn backup(&self) {
        let file = self.file();
        Tool::on(&self.redis).run(&["backup", file.to_str().unwrap(), "--force"]).await.expect_success();
    }

    async fn restore(&self, force: bool) {
        let file = self.file();
        let mut arguments = vec!["restore", file.to_str().unwrap()];
        if force {
            arguments.push("--force");
        }
        let run = Tool::on(&self.redis).run(&arguments).await.expect_success();
        assert!(run.stdout.starts_with("restored "), "{run:?}");
    }

    async fn round_is_on(&self, group: &GroupKey) -> bool {
        self.redis.aggregate(group).await.unwrap()["metadataCorrection"].is_object()
    }
}

/// The round is over and everybody has what is theirs.
async fn recovers(world: &World, api: &Api, group: &GroupKey, members: &mut [Member]) {
    wait_until("the round is over", async || {
        beat_until_stable(api, group, members).await;
        !world.round_is_on(group).await
    })
    .await;
    beat_until_stable(api, group, members).await;
    let shown = api.get(&format!("{}/assignments", monitored_path(group))).await.success();
    assert_eq!((&shown["invariantViolations"], &shown["holds"]), (&json!([]), &json!([])), "{shown}");
    let owned: usize = members.iter().map(|member| member.owned.len()).sum();
    assert_eq!(shown["shardCount"].as_u64(), Some(owned as u64), "{shown}");
}

#[tokio::test]
async fn record_that_was_lost_is_put_back_and_the_group_goes_on_by_itself() {
    let world = World::new();
    let daemon = daemon(&world.redis).start();
    let api = daemon.api();
    let group = api.create_stream("orders", 4).await;
    let mut members = vec![Member::new(&api, &group, "a"), Member::new(&api, &group, "b")];
    beat_until_stable(&api, &group, &mut members).await;
    world.backup().await;
    for member in &mut members {
        member.beat().await;
    }
    let owned: Vec<_> = members.iter().map(|member| member.owned.clone()).collect();

    world.redis.command::<()>(&["DEL", &Keys::default().metadata(&group)]).await;
    for member in &mut members {
        api.try_heartbeat(&group, &member.request()).await.expect_error(ErrorCode::GroupMetadataMissing);
    }
    world.restore(false).await;
    for (member, owned) in members.iter_mut().zip(&owned) {
        let answer = member.beat().await;
        // Nothing but leases was lost: they speak from the version that is stored, and are synchronised at once.
        assert_eq!((answer.status, &member.owned), (Status::RevokePending, owned), "{answer:?}");
    }
    recovers(&world, &api, &group, &mut members).await;
    let kept: Vec<_> = members.iter().map(|member| member.owned.clone()).collect();
    assert_eq!(kept, owned, "nobody had to move");
}

#[tokio::test]
async fn group_that_was_deleted_is_brought_back_and_grants_nothing_for_a_lease() {
    let world = World::new();
    let daemon = daemon(&world.redis).start();
    let api = daemon.api();
    let group = api.create_stream("orders", 4).await;
    world.backup().await;
    let mut readers = vec![Member::new(&api, &group, "a")];
    beat_until_stable(&api, &group, &mut readers).await;
    let forced = json!({"requestedBy": "test", "reason": "a mistake", "force": true});
    api.delete(&group_path(&group), &forced).await.success();
    let refused = Tool::on(&world.redis).run(&["restore", world.file().to_str().unwrap()]).await;
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stdout.contains("was deleted at"), "{refused:?}");

    world.restore(true).await;
    let restored = Instant::now();
    // `a` reads until its lease is over, and hears nothing of all this.
    let mut newcomer = Member::new(&api, &group, "c");
    wait_until("the running coordinator has found the group", async || {
        let answer = api.try_heartbeat(&group, &newcomer.request()).await;
        answer.status.is_success() && answer.json()["status"] == "OK"
    })
    .await;
    wait_until("the newcomer reads", async || {
        newcomer.beat().await;
        !newcomer.owned.is_empty()
    })
    .await;
    assert!(restored.elapsed() >= LEASE * 9 / 10, "granted after {:?}", restored.elapsed());
    assert_eq!(readers[0].beat().await.status, Status::UnknownMemberId);
    readers.push(newcomer);
    recovers(&world, &api, &group, &mut readers).await;
}

/// The record knows nobody, and neither does the coordinator that starts after the restore: without the round that the
/// restore has recorded, whoever comes first would be given what somebody reads.
#[tokio::test]
async fn coordinator_that_knows_nothing_grants_nothing_of_a_restored_record_for_a_lease() {
    let world = World::new();
    let mut first = daemon(&world.redis).start();
    let group = first.api().create_stream("orders", 4).await;
    world.backup().await;
    let mut reader = vec![Member::new(&first.api(), &group, "reader")];
    beat_until_stable(&first.api(), &group, &mut reader).await;
    assert_eq!(reader[0].owned.len(), 4);
    first.kill();
    world.restore(true).await;
    let restored = Instant::now();
    let second = daemon(&world.redis).start();
    let api = second.api();

    let mut newcomer = Member::new(&api, &group, "newcomer");
    assert_eq!(newcomer.beat().await.status, Status::Ok);
    assert!(newcomer.owned.is_empty(), "the reader reads {:?}", reader[0].owned);
    wait_until("the newcomer reads", async || {
        newcomer.beat().await;
        !newcomer.owned.is_empty()
    })
    .await;
    assert!(restored.elapsed() >= LEASE * 9 / 10, "granted after {:?}", restored.elapsed());
    reader[0].talk_to(&api);
    assert_eq!(reader[0].beat().await.status, Status::UnknownMemberId);
    reader.push(newcomer);
    recovers(&world, &api, &group, &mut reader).await;
}

#[tokio::test]
async fn older_record_over_a_living_one_sends_members_through_sync_metadata() {
    let world = World::new();
    let daemon = daemon(&world.redis).start();
    let api = daemon.api();
    let group = api.create_stream("orders", 6).await;
    let mut members = vec![Member::new(&api, &group, "a"), Member::new(&api, &group, "b")];
    beat_until_stable(&api, &group, &mut members).await;
    world.backup().await;
    members.push(Member::new(&api, &group, "c"));
    beat_until_stable(&api, &group, &mut members).await;
    let reached = api.group(&group).await.metadata_version;

    let file = world.file();
    let refused = Tool::on(&world.redis).run(&["restore", file.to_str().unwrap()]).await;
    assert_eq!(refused.code, 1, "{refused:?}");
    assert_eq!(api.group(&group).await.metadata_version, reached);
    assert_eq!(members[0].beat().await.status, Status::Ok);

    world.restore(true).await;
    let aggregate = world.redis.aggregate(&group).await.unwrap();
    let version = aggregate["metadataVersion"].as_u64().unwrap();
    assert!(version < reached, "no number is raised to match");
    assert_eq!(aggregate["metadataCorrection"]["observedMetadataVersion"].as_u64(), Some(reached));
    let admin =
        api.delete(&group_path(&group), &json!({"requestedBy": "t", "reason": "t", "force": true})).await;
    admin.expect_error(ErrorCode::MetadataSyncInProgress);
    let mut statuses = Vec::new();
    for member in &mut members {
        let answer = member.beat().await;
        statuses.push(answer.status);
        assert!(answer.metadata_version < reached, "{answer:?}");
    }
    assert_eq!(statuses, [Status::SyncMetadata, Status::SyncMetadata, Status::UnknownMemberId]);
    assert_eq!(api.metric("rsc_metadata_version_regression_total").await, 1.0, "the coordinator says so too");
    recovers(&world, &api, &group, &mut members).await;

    // Once more, from the same backup: another write, another round, and nobody takes it for what he remembers.
    let write_id = world.redis.metadata_field(&group, "writeId").await;
    world.restore(true).await;
    assert_ne!(world.redis.metadata_field(&group, "writeId").await, write_id);
    assert_eq!(members[0].beat().await.status, Status::SyncMetadata);
    recovers(&world, &api, &group, &mut members).await;
}

/// Two restores of one backup give the same numbers: only the `writeId` tells the second from what a coordinator may
/// remember of the first.
#[tokio::test]
async fn second_restore_of_a_backup_is_not_the_first() {
    let world = World::new();
    let coordinator = daemon(&world.redis).start();
    let group = coordinator.api().create_stream("orders", 4).await;
    drop(coordinator);
    world.backup().await;
    let mut restored = Vec::new();
    for _ in 0..2 {
        world.redis.command::<()>(&["DEL", &Keys::default().metadata(&group)]).await;
        world.restore(false).await;
        let mut stamp = Vec::new();
        for field in ["revision", "liveRevision", "writeId"] {
            stamp.push(world.redis.metadata_field(&group, field).await.unwrap());
        }
        let round = world.redis.aggregate(&group).await.unwrap()["metadataCorrection"]["requestedAt"].clone();
        restored.push((stamp, round));
    }
    let [(first, first_round), (second, second_round)] = &restored[..] else { panic!() };
    assert_eq!(first[..2], second[..2]);
    assert_ne!(first[2], second[2]);
    assert_ne!(first_round, second_round);
}

/// Two coordinators, consumers that live by themselves, and records of former times put back again and again.
#[tokio::test]
async fn restores_under_load_never_make_two_readers() {
    let world = World::new();
    let (one, other) = (daemon(&world.redis).start(), daemon(&world.redis).start());
    let (api, routes) = (one.api(), Routes::to(&[&one.api(), &other.api()]));
    let group = api.create_stream("orders", 8).await;
    let crew = Crew::new(&group, &routes);
    let mut consumers = crew.start_many(3);
    settle(&api, &group, &consumers, 8).await;
    for round in 0..3 {
        world.backup().await;
        // Meanwhile one comes, and one goes, properly or not.
        consumers.push(crew.start(&format!("later{round}")));
        let goes = consumers.remove(0);
        if round == 1 {
            goes.crash().await;
        } else {
            goes.leave().await;
        }
        settle(&api, &group, &consumers, 8).await;
        let told = |name: &str| consumers.iter().map(|consumer| consumer.answers(name)).sum::<u64>();
        let before = told("SYNC_METADATA");
        if round == 2 {
            // Lost altogether for a while.
            world.redis.command::<()>(&["DEL", &Keys::default().metadata(&group)]).await;
            wait_until("somebody is refused", async || told("GROUP_METADATA_MISSING") > 0).await;
        }
        world.restore(round != 2).await;
        wait_until("somebody is told Redis' truth", async || told("SYNC_METADATA") > before).await;
        settle(&api, &group, &consumers, 8).await;
        assert_eq!(api.group(&group).await.state, GroupState::Stable);
        assert!(!world.round_is_on(&group).await);
        crew.journal.expect_one_reader_at_a_time();
    }
    for consumer in consumers {
        consumer.leave().await;
    }
    crew.journal.expect_one_reader_at_a_time();
    assert!(crew.journal.len() > 8, "somebody has read something");
}
