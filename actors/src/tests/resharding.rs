//! Who drives a migration: whoever is there (protocol 6).

use std::sync::Arc;
use std::time::Duration;

use rsc_core::Group;
use rsc_protocol::GroupKey;
use rsc_protocol::resharding::{MigrationState, RollbackRequest, ScaleRequest};
use rsc_store::{Found, GroupStore, MemoryStore};

use super::faults::{Fault, TestStore};
use super::member::Member;
use super::{
    code, create, eventually, in_system, key, memory_store, orders, record, settings, settled, start,
    stream_request,
};
use crate::{Coordinator, CoordinatorSettings, Refusal, Scaled};

/// Caches that are over at once, and a look at the index several times a second.
fn quick(instance_id: &str) -> CoordinatorSettings {
    let mut settings = settings(instance_id);
    settings.timing.routing_cache_ttl_ms = 100;
    settings.timing.publish_margin_ms = 100;
    settings.index_refresh_interval = Duration::from_millis(100);
    settings
}

fn scale_to(count: i64) -> ScaleRequest {
    ScaleRequest {
        target_shard_count: count,
        requested_by: "test".into(),
        reason: "a test".into(),
        deprecated_after: None,
        retire: None,
        dry_run: false,
    }
}

async fn scale(coordinator: &Coordinator, count: i64) -> Result<String, Refusal> {
    match coordinator.scale("orders", None, scale_to(count)).await? {
        Scaled::Done(response) => Ok(response.resharding_id),
        Scaled::Planned(plan) => panic!("nobody asked for a plan: {plan:?}"),
    }
}

async fn two_groups(coordinator: &Coordinator, shards: i64) -> [GroupKey; 2] {
    coordinator.create_stream("orders", stream_request(Some(shards), &["a", "b"])).await.unwrap();
    [key("orders", "a"), key("orders", "b")]
}

fn state(group: &Group, id: &str) -> Option<MigrationState> {
    group.migration(id).map(|migration| migration.state)
}

async fn ends(coordinator: &Coordinator, groups: &[GroupKey], id: &str, count: u32, how: MigrationState) {
    for group in groups {
        eventually(&format!("{group} has {count} shards"), || async {
            let found = record(coordinator, group).await;
            state(&found, id) == Some(how)
                && found.shard_count == count
                && found.active_resharding_id.is_none()
        })
        .await;
    }
}

#[test]
fn another_instance_that_nobody_speaks_to_carries_a_migration_on() {
    in_system(async {
        let store = memory_store();
        let one = start(quick("one"), &store);
        let groups = two_groups(&one, 8).await;
        let two = start(quick("two"), &store);
        for group in &groups {
            eventually("the second instance has found the group", || async {
                two.actor(group).await.is_ok_and(|actor| actor.turns > 0)
            })
            .await;
        }
        let id = scale(&one, 3).await.unwrap();
        one.begin_termination();
        one.stopped(Duration::from_secs(10)).await.unwrap();
        for group in &groups {
            assert!(
                record(&two, group).await.active_resharding_id.is_some(),
                "not over before the caches are"
            );
        }
        ends(&two, &groups, &id, 3, MigrationState::Deprecated).await;
    });
}

/// The gap that this closes: an instance which loaded a group when it was empty did not learn of its members.
#[test]
fn members_expire_at_an_instance_that_never_heard_of_them() {
    in_system(async {
        let store = memory_store();
        let mut timing = quick("one");
        timing.timing.member_lease_ttl_ms = 400;
        let one = start(timing.clone(), &store);
        create(&one, &orders(), 2).await;
        timing.instance_id = "two".to_owned();
        let two = start(timing.clone(), &store);
        eventually("the second instance has loaded the group", || async {
            two.actor(&orders()).await.is_ok_and(|actor| actor.turns > 0)
        })
        .await;
        Member::new("m1").beat_ok(&one, &orders()).await;
        one.begin_termination();
        one.stopped(Duration::from_secs(10)).await.unwrap();
        // Not through an instance: a read that shows something overdue wakes the actor.
        eventually("the silent member has expired", || async {
            let Found::Record { fields, .. } = store.read(&orders()).await.unwrap() else { return false };
            let found = rsc_core::load(&orders(), &fields, &timing.timing).unwrap();
            found.group.live_members().next().is_none()
        })
        .await;
    });
}

#[test]
fn a_migration_is_recorded_in_every_group_or_in_none() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let coordinator = start(quick("one"), &store);
        let groups = two_groups(&coordinator, 4).await;
        settled(&coordinator, &groups[0]).await;
        settled(&coordinator, &groups[1]).await;
        // A member of the second group speaks from a future that redis has lost.
        let mut member = Member::new("m1");
        member.beat_ok(&coordinator, &groups[1]).await;
        member.version += 5;
        member.beat(&coordinator, &groups[1]).await.unwrap();
        assert!(record(&coordinator, &groups[1]).await.metadata_correction.is_some());
        assert_eq!(code(scale(&coordinator, 6).await), "METADATA_SYNC_IN_PROGRESS");
        for group in &groups {
            let found = record(&coordinator, group).await;
            assert_eq!(
                (found.shard_count, found.migrations.len()),
                (4, 0),
                "{group}: asked before any is changed"
            );
        }
    });
}

#[test]
fn what_one_group_could_not_record_is_taken_back_in_the_other() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let coordinator = start(quick("one"), &store);
        let groups = two_groups(&coordinator, 4).await;
        settled(&coordinator, &groups[0]).await;
        settled(&coordinator, &groups[1]).await;
        // The first group's commit passes, the second's does not.
        store.fail_next("commit", Fault::Pass);
        store.fail_next("commit", Fault::NotSent);
        assert_eq!(code(scale(&coordinator, 6).await), "REDIS_UNAVAILABLE");
        assert!(store.all_faults_happened());
        eventually("nothing is under way", || async {
            let mut found = Vec::new();
            for group in &groups {
                found.push(record(&coordinator, group).await);
            }
            found.iter().all(|group| group.active_resharding_id.is_none() && group.shard_count == 4)
                && found[0].migrations.values().all(|migration| migration.state == MigrationState::RolledBack)
                && found[1].migrations.is_empty()
        })
        .await;
        let id = scale(&coordinator, 6).await.unwrap();
        ends(&coordinator, &groups, &id, 6, MigrationState::Deprecated).await;
    });
}

#[test]
fn a_stream_goes_to_zero_and_comes_back_and_a_change_can_be_taken_back() {
    in_system(async {
        let store: Arc<MemoryStore> = memory_store();
        let coordinator = start(quick("one"), &store);
        let groups = two_groups(&coordinator, 4).await;
        let mut member = Member::new("m1");
        member.beat_ok(&coordinator, &groups[0]).await;
        member.beat_ok(&coordinator, &groups[0]).await;
        let id = scale(&coordinator, 0).await.unwrap();
        assert_eq!(scale(&coordinator, 0).await.unwrap(), id, "the same one is carried on");
        assert_eq!(code(scale(&coordinator, 2).await), "ACTIVE_MIGRATION_EXISTS");
        eventually("the member has given everything back", async || {
            member.beat_ok(&coordinator, &groups[0]).await;
            member.owned.is_empty()
        })
        .await;
        ends(&coordinator, &groups, &id, 0, MigrationState::Deprecated).await;
        let rollback = RollbackRequest { requested_by: "test".into(), reason: "a test".into() };
        let refused = coordinator.roll_back(&groups[1], &id, rollback.clone()).await;
        assert_eq!(code(refused), "ROLLBACK_NOT_ALLOWED");
        let id = scale(&coordinator, 5).await.unwrap();
        let row = coordinator.roll_back(&groups[1], &id, rollback.clone()).await.unwrap();
        assert_eq!(row.state, MigrationState::RollingBack);
        ends(&coordinator, &groups, &id, 0, MigrationState::RolledBack).await;
        let again = coordinator.roll_back(&groups[0], &id, rollback.clone()).await.unwrap();
        assert_eq!(again.state, MigrationState::RolledBack, "the answer may have been lost");
        assert_eq!(
            code(coordinator.roll_back(&groups[0], "reshard-x", rollback).await),
            "MIGRATION_NOT_FOUND"
        );
        let id = scale(&coordinator, 4).await.unwrap();
        ends(&coordinator, &groups, &id, 4, MigrationState::Deprecated).await;
        assert_eq!(scale(&coordinator, 4).await.unwrap(), "noop");
    });
}
