//! Protocol 6: what one group's record says of a migration, what moves with it, and what is refused.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use rsc_core::migration::stream::creation_time;
use rsc_core::{Command, MigrationSpec, MigrationStep, Transition, lifecycle};
use rsc_protocol::ErrorCode;
use rsc_protocol::resharding::MigrationState;
use support::drivers::Driver;
use support::streams::*;

const GROUPS: [&str; 2] = ["billing", "mail"];

fn prepare(spec: &MigrationSpec, compare: bool) -> MigrationStep {
    MigrationStep::Prepare { spec: Box::new(spec.clone()), compare }
}

/// A migration from 2 to 4, recorded in both groups.
fn prepared() -> (Stream, String) {
    let mut stream = Stream::new(2, &GROUPS);
    let spec = stream.spec(4);
    stream.prepare(&spec).unwrap();
    (stream, spec.resharding_id)
}

#[test]
fn protocol_6_prepared_means_recorded_and_nothing_else() {
    let (stream, id) = prepared();
    for group in stream.loaded() {
        let migration = group.active_migration().unwrap();
        assert_eq!(group.active_resharding_id.as_ref(), Some(&id));
        assert_eq!((migration.from_shard_count, migration.to_shard_count), (2, 4));
        assert_eq!((migration.state, migration.provisioned), (MigrationState::Preparing, false));
        assert_eq!((migration.requested_by.as_str(), migration.reason.as_str()), ("ops", "test"));
        assert_eq!((group.shard_count, group.group_epoch), (2, 1));
        assert_eq!(group.response().active_migration, Some(id.clone()));
    }
}

#[test]
fn protocol_6_one_group_that_refuses_makes_it_none() {
    // The last one already runs another; or is in a correction round; or is not even there yet.
    let mut stream = Stream::new(2, &GROUPS);
    let other = stream.spec(3);
    stream.step_in(1, &other.resharding_id, prepare(&other, false)).unwrap();
    let spec = stream.spec(4);
    assert_eq!(stream.prepare(&spec), Err(ErrorCode::ActiveMigrationExists));
    assert_eq!(stream.loaded()[0].active_resharding_id, None);
    assert_eq!(stream.loaded()[1].active_resharding_id, Some(other.resharding_id));

    let mut stream = Stream::new(2, &GROUPS);
    stream.groups[1].turn(&[Command::LostWrites { observed_metadata_version: 9 }]);
    let spec = stream.spec(4);
    assert_eq!(stream.prepare(&spec), Err(ErrorCode::MetadataSyncInProgress));
    assert!(stream.loaded().iter().all(|group| group.active_resharding_id.is_none()));
    assert!(stream.drive().has_settled());

    let mut stream = Stream::new(2, &GROUPS);
    let key = stream.groups[1].key.clone();
    let creation = lifecycle::create(&key, 2, stream.now, "token", None, &stream.settings);
    let rsc_core::WriteKind::Structural { aggregate, revision } = creation.write.kind else { panic!() };
    stream.groups[1].fields.insert("aggregate".to_owned(), aggregate.into_bytes());
    stream.groups[1].fields.insert("revision".to_owned(), revision.to_string().into_bytes());
    let spec = stream.spec(4);
    assert_eq!(stream.prepare(&spec), Err(ErrorCode::MutexUnavailable));
    assert_eq!(stream.loaded()[0].active_resharding_id, None);
}

#[test]
fn protocol_6_a_second_migration_is_told_which_one_runs() {
    let (mut stream, id) = prepared();
    let spec = stream.spec(8);
    let key = stream.groups[0].key.clone();
    let (code, message) = stream.step(&key, &spec.resharding_id, prepare(&spec, false)).unwrap_err();
    assert_eq!(code, ErrorCode::ActiveMigrationExists);
    assert!(message.contains(&id) && message.contains("2 to 4"), "{message}");
}

#[test]
fn protocol_6_nobody_activates_before_the_barrier() {
    let (mut stream, id) = prepared();
    let refused = stream.step_in(0, &id, MigrationStep::Activate);
    assert_eq!(refused, Err(ErrorCode::StateVersionConflict));
    let mut driver = Driver::default();
    let is_provisioned =
        |stream: &Stream, group: usize| stream.loaded()[group].migration(&id).unwrap().provisioned;
    while !is_provisioned(&stream, 0) {
        driver.one(&mut stream).unwrap();
    }
    // A recorded barrier, over all groups: while one is not there, nobody is told to.
    stream.provisioning_fails = true;
    assert!(driver.run(&mut stream).is_err() && !is_provisioned(&stream, 1));
    assert_eq!(stream.counts(), [2, 2]);
    stream.provisioning_fails = false;
    while stream.counts() == [2, 2] {
        driver.one(&mut stream).unwrap();
    }
    assert!((2..4).all(|shard| stream.prove(&[shard].into())[&shard].missing_groups.is_empty()));
}

#[test]
fn protocol_6_activate_changes_the_count_and_the_epoch_and_keeps_what_is_read() {
    for (from, to) in [(2, 4), (4, 2), (2, 0), (0, 2)] {
        let mut stream = Stream::new(from, &["billing"]);
        let before = stream.loaded().remove(0);
        let id = stream.scale(to);
        let group = stream.loaded().remove(0);
        assert_eq!((group.shard_count, group.group_epoch), (to, before.group_epoch + 1));
        assert_eq!(group.read_set().iter().collect::<Vec<_>>(), (0..from.max(to)).collect::<Vec<_>>());
        let migration = group.migration(&id).unwrap();
        assert_eq!((migration.state, migration.activated_at), (MigrationState::Active, Some(stream.now)));
        assert_eq!(migration.cache_lease_ms, 30_000);
        let routing = group.routing(30_000);
        assert_eq!((routing.shard_count, routing.metadata_version), (to, group.metadata_version));
    }
}

#[test]
fn protocol_6_every_step_moves_the_version_once_and_is_told() {
    let mut stream = Stream::new(4, &["billing"]);
    let spec = stream.spec(2);
    stream.prepare(&spec).unwrap();
    let mut driver = Driver::twice();
    let mut names = Vec::new();
    loop {
        let version = stream.versions()[0];
        if driver.one(&mut stream).unwrap().is_some() {
            if stream.drive().has_settled() {
                break;
            }
            stream.pass(CACHES);
            continue;
        }
        if let Some(rsc_core::migration::stream::Todo::Step { .. }) = &driver.did {
            // The second time is the bench's last turn; the first one is the one before.
            assert_eq!(stream.versions()[0], version + 1);
            names.push(stream.loaded()[0].migration(&spec.resharding_id).unwrap().state);
        }
    }
    assert_eq!(names.first(), Some(&MigrationState::Preparing));
    assert_eq!(names.last(), Some(&MigrationState::Deprecated));
    let again = stream.spec(3);
    stream.step_in(0, &again.resharding_id, prepare(&again, false)).unwrap();
    let last = stream.groups[0].last.clone().unwrap();
    let told = Transition::MigrationStep {
        resharding_id: again.resharding_id,
        step: "prepare",
        state: MigrationState::Preparing,
        shard_count: 2,
    };
    assert!(last.transitions.contains(&told), "{:?}", last.transitions);
    assert!(last.write.unwrap().history.unwrap().contains("MIGRATION_STEP"));
}

#[test]
fn protocol_6_steps_that_do_not_fit_are_refused_and_change_nothing() {
    let (mut stream, id) = prepared();
    let misfits = [
        MigrationStep::BeginDrain,
        MigrationStep::BeginDelete,
        MigrationStep::Finish,
        MigrationStep::RestoreCount,
        MigrationStep::Reopen([7].into()),
    ];
    let before = stream.loaded();
    for step in misfits {
        let name = step.name();
        assert_eq!(stream.step_in(0, &id, step), Err(ErrorCode::StateVersionConflict), "{name}");
    }
    let unknown = [MigrationStep::Provisioned, MigrationStep::Activate, MigrationStep::Finish];
    for step in unknown {
        assert_eq!(stream.step_in(0, "reshard-0", step), Err(ErrorCode::MigrationNotFound));
    }
    assert_eq!(stream.loaded(), before);
    assert!(stream.groups[0].last_write().is_none());
}

#[test]
fn protocol_6_what_comes_late_does_not_undo_what_came_after_it() {
    let mut stream = Stream::new(2, &["billing"]);
    let first = stream.spec(4);
    stream.begin(&first);
    stream.settle();
    let second = stream.scale(3);
    stream.settle();
    // An instance that was stopped for long takes its last step.
    let late = stream.step_in(0, &first.resharding_id, prepare(&first, true));
    assert_eq!(late, Err(ErrorCode::StateVersionConflict));
    assert_eq!(stream.step_in(0, &first.resharding_id, MigrationStep::Activate), Ok(()));
    assert_eq!(stream.step_in(0, &first.resharding_id, MigrationStep::Finish), Ok(()));
    assert_eq!(stream.states(&second), [Some(MigrationState::Deprecated)]);
    stream.assert_settled(3);
}

#[test]
fn protocol_6_the_newest_is_the_newest_also_when_time_ran_backwards() {
    let mut stream = Stream::new(2, &GROUPS);
    let first = stream.scale(4);
    stream.settle();
    let newest = stream.loaded()[0].migration(&first).unwrap().created_at;
    // A failover to a replica whose clock is an hour behind.
    stream.pass(-3_600_000);
    let mut spec = stream.spec(3);
    assert_eq!(spec.created_at, newest.plus(1));
    assert_eq!(creation_time(&stream.loaded(), newest.plus(50)), newest.plus(50));
    assert_eq!(creation_time(&[], stream.now), stream.now);
    // Whoever does not ask for that is refused, and not overruled later by the older one.
    for created_at in [stream.now, newest] {
        let careless = MigrationSpec { created_at, resharding_id: "reshard-0".to_owned(), ..spec.clone() };
        assert_eq!(stream.prepare(&careless), Err(ErrorCode::StateVersionConflict));
    }
    spec.reason = "time ran backwards".to_owned();
    let second = stream.begin(&spec);
    assert_eq!(stream.counts(), [3, 3]);
    stream.lose(1, 4);
    for _ in 0..10 {
        stream.drive();
        stream.consume();
        stream.pass(3_600_000);
    }
    assert_eq!(stream.states(&second), [Some(MigrationState::Deprecated); 2]);
    stream.assert_settled(3);
}

#[test]
fn protocol_6_the_same_id_is_not_used_twice() {
    let mut stream = Stream::new(2, &GROUPS);
    let mut spec = stream.spec(4);
    stream.begin(&spec);
    stream.settle();
    spec.created_at = creation_time(&stream.loaded(), stream.now);
    assert_eq!(stream.prepare(&spec), Err(ErrorCode::StateVersionConflict));
    assert!(stream.drive().has_settled());
}

#[test]
fn protocol_6_a_record_remembers_fifty_migrations_and_never_forgets_the_newest() {
    let mut stream = Stream::new(1, &["billing"]);
    let mut ids = Vec::new();
    for round in 0..60 {
        ids.push(stream.scale(1 + (round + 1) % 2));
        stream.pass(CACHES);
        assert!(stream.drive().has_settled());
    }
    let group = stream.loaded().remove(0);
    let remembered: Vec<&String> =
        group.migrations_by_age().into_iter().map(|migration| &migration.resharding_id).collect();
    // One more was running when the oldest was last forgotten.
    assert_eq!(remembered, ids[9..].iter().collect::<Vec<_>>());
    stream.pass(1_000);
    stream.scale(5);
    assert!(stream.loaded()[0].migration(&ids[9]).is_none());
}

#[test]
fn protocol_6_a_migration_as_it_is_shown() {
    let mut stream = Stream::new(3, &["billing"]);
    let id = stream.scale(1);
    stream.pass(CACHES);
    stream.publish(2);
    stream.drive();
    let group = stream.loaded().remove(0);
    let row = group.migration(&id).unwrap().response(&group.key);
    let indexes = |refs: &[rsc_protocol::ShardRef]| refs.iter().map(|it| it.shard_index).collect::<Vec<_>>();
    assert_eq!((row.stream_prefix.as_str(), row.consumer_group.as_str()), ("orders", "billing"));
    assert_eq!((row.from_shard_count, row.to_shard_count), (3, 1));
    assert_eq!((indexes(&row.draining_shards), indexes(&row.retired_shards)), (vec![2], vec![1]));
    assert_eq!((row.resharding_id, row.state), (id, MigrationState::Draining));
    assert!(row.updated_at >= row.created_at && row.activated_at.is_some());
}
