//! Protocol 6: Redis loses the writes of one group only, each being its own key. Counts agree again, and nothing that
//! was accepted stays unread.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeMap;

use rsc_core::migration::stream::Todo;
use rsc_core::{Command, MigrationStep};
use rsc_protocol::ErrorCode;
use rsc_protocol::resharding::{MigrationState, Retire};
use support::LEASE;
use support::drivers::{Driver, walk};
use support::streams::*;

const GROUPS: [&str; 3] = ["billing", "mail", "search"];

fn begun(from: u32, to: u32, retire: Retire) -> (Stream, String) {
    let mut stream = Stream::new(from, &GROUPS);
    stream.traffic();
    let mut spec = stream.spec(to);
    spec.retire = retire;
    stream.prepare(&spec).unwrap();
    (stream, spec.resharding_id)
}

/// Takes a migration `todos` far, loses `writes` of one group, and sees it through.
fn lose_at(from: u32, to: u32, retire: Retire, todos: usize, victim: usize, writes: usize) -> bool {
    let (mut stream, id) = begun(from, to, retire);
    let is_going_on = walk(&mut stream, &mut Driver::default(), todos);
    stream.lose(victim, writes);
    stream.traffic();
    walk(&mut stream, &mut Driver::twice(), 500);
    let expected = [Some(MigrationState::Deprecated); 3];
    // A group that lost a migration which all others have finished, and had its count anyhow, is left alone.
    if stream.states(&id) != expected {
        assert_eq!(stream.counts(), vec![to; 3], "{from} to {to}, {todos}, {victim}, {writes}");
    }
    stream.assert_settled(to);
    is_going_on
}

#[test]
fn protocol_6_one_group_loses_its_writes_at_any_step_forth() {
    for (from, to, retire) in
        [(2, 4, Retire::Keep), (4, 1, Retire::Keep), (3, 0, Retire::Delete), (3, 2, Retire::Delete)]
    {
        for victim in [0, 2] {
            for writes in [1, 3, 100] {
                let mut todos = 0;
                while lose_at(from, to, retire, todos, victim, writes) {
                    todos += 1;
                }
                assert!(todos > 10);
            }
        }
    }
}

#[test]
fn protocol_6_one_group_loses_its_writes_at_any_step_back() {
    for (from, to) in [(2, 4), (4, 1), (0, 2)] {
        for victim in [0, 2] {
            for writes in [1, 3, 100] {
                for todos in 0..24 {
                    let (mut stream, id) = begun(from, to, Retire::Keep);
                    stream.drive();
                    stream.traffic();
                    stream.roll_back(&id).unwrap();
                    walk(&mut stream, &mut Driver::default(), todos);
                    stream.lose(victim, writes);
                    // If nobody else has heard of the request and it is lost, the stream goes forth.
                    let is_back = |state: &Option<MigrationState>| state.is_some_and(MigrationState::is_back);
                    let goes_back = stream.states(&id).iter().any(is_back);
                    assert!(goes_back || victim == 0);
                    walk(&mut stream, &mut Driver::twice(), 500);
                    stream.assert_settled(if goes_back { from } else { to });
                }
            }
        }
    }
}

#[test]
fn protocol_6_until_the_counts_agree_the_read_set_is_the_union() {
    let (mut stream, _) = begun(4, 2, Retire::Delete);
    walk(&mut stream, &mut Driver::default(), 500);
    stream.assert_settled(2);
    assert!(!stream.shards.contains_key(&2) && !stream.shards.contains_key(&3));
    // Redis loses all that mail has recorded: its producers are told 4 again, and its members read as much.
    stream.lose(1, 100);
    assert_eq!(stream.counts(), [2, 4, 2]);
    let mut driver = Driver::default();
    let first = stream.next(&BTreeMap::new()).todo;
    assert!(
        first.iter().all(|todo| matches!(
            todo,
            Todo::Provision { .. } | Todo::Step { step: MigrationStep::Reopen(_), .. }
        )),
        "before anything else: {first:?}"
    );
    first.iter().for_each(|_| assert!(driver.one(&mut stream).unwrap().is_none()));
    assert_eq!(stream.reads(), vec![vec![0, 1, 2, 3]; 3]);
    stream.traffic();
    assert!(stream.shards.contains_key(&2), "its keys are provisioned again");
    walk(&mut stream, &mut driver, 500);
    stream.assert_settled(2);
}

#[test]
fn protocol_6_a_group_that_is_in_a_round_holds_everybody_up_and_then_goes_on() {
    for lead in 0..16 {
        let (mut stream, id) = begun(4, 2, Retire::Keep);
        walk(&mut stream, &mut Driver::default(), lead);
        stream.lose(1, 1);
        let observed_metadata_version = stream.groups[1].group().metadata_version + 1;
        stream.groups[1].turn(&[Command::LostWrites { observed_metadata_version }]);
        // Without it nothing is decided that needs all of them.
        let mut refusals = 0;
        let ends_at = stream.now.plus(LEASE - 1);
        while stream.now < ends_at {
            stream.traffic();
            if let Err((code, message)) = Driver::default().run(&mut stream) {
                assert_eq!(code, ErrorCode::MetadataSyncInProgress);
                assert!(message.contains("mail") && message.contains(&id), "{message}");
                refusals += 1;
            }
            stream.consume();
            stream.pass(2_500);
        }
        assert!(!stream.states(&id)[1].is_some_and(MigrationState::is_over), "{lead}");
        assert!(refusals > 0, "{lead}");
        stream.pass(LEASE);
        stream.groups[1].tick();
        walk(&mut stream, &mut Driver::default(), 500);
        assert_eq!(stream.states(&id), [Some(MigrationState::Deprecated); 3]);
        stream.assert_settled(2);
    }
}

#[test]
fn protocol_6_a_group_without_the_migration_is_prepared_again() {
    let (mut stream, id) = begun(2, 3, Retire::Keep);
    stream.lose(2, 1);
    assert_eq!(stream.states(&id)[2], None);
    stream.drive();
    assert_eq!((stream.states(&id), stream.counts()), (vec![Some(MigrationState::Active); 3], vec![3; 3]));
    let spec = |group: usize| stream.groups[group].group().migration(&id).unwrap().spec();
    assert_eq!(spec(2), spec(0), "as it was asked for");
}

#[test]
fn protocol_6_a_group_with_an_older_migration_drains_on_what_that_drained() {
    let (mut stream, older) = begun(5, 3, Retire::Keep);
    stream.drive();
    stream.pass(CACHES);
    stream.consume();
    stream.traffic();
    let mut driver = Driver::default();
    // Stopped with search still reading what the others have given up already.
    while stream.reads()[1].len() > 3 {
        driver.one(&mut stream).unwrap();
        stream.consume();
    }
    assert_eq!(stream.reads()[2], [0, 1, 2, 3, 4]);
    let before = stream.groups[2].fields.clone();
    walk(&mut stream, &mut Driver::default(), 500);
    let newer = stream.scale(4);
    stream.groups[2].fields = before;
    assert_eq!((stream.counts(), stream.states(&older)[2]), (vec![4, 4, 3], Some(MigrationState::Draining)));
    let mut driver = Driver::default();
    driver.one(&mut stream).unwrap();
    let search = stream.groups[2].group();
    assert_eq!(search.active_resharding_id.as_ref(), Some(&newer), "the newest wins");
    assert_eq!(stream.states(&older)[2], Some(MigrationState::Deprecated));
    assert_eq!(stream.reads()[2], [0, 1, 2, 3, 4], "nothing that was read is dropped");
    walk(&mut stream, &mut driver, 500);
    stream.assert_settled(4);
    assert_eq!(stream.states(&newer), [Some(MigrationState::Deprecated); 3]);
}

#[test]
fn protocol_6_what_is_drained_on_is_read_on_when_the_newer_one_is_taken_back() {
    let (mut stream, _) = begun(5, 3, Retire::Keep);
    stream.drive();
    stream.pass(CACHES);
    stream.consume();
    let mut driver = Driver::default();
    let drains = |stream: &Stream| stream.loaded()[2].active_migration().unwrap().draining_since.is_some();
    while !drains(&stream) {
        driver.one(&mut stream).unwrap();
    }
    let before = stream.groups[2].fields.clone();
    walk(&mut stream, &mut Driver::default(), 500);
    let newer = stream.spec(4);
    stream.prepare(&newer).unwrap();
    // Redis loses what came after the drain had begun in search, which is prepared again, and taken back at once.
    stream.groups[2].fields = before;
    Driver::default().one(&mut stream).unwrap();
    assert_eq!(stream.states(&newer.resharding_id), [Some(MigrationState::Preparing); 3]);
    assert_eq!(stream.reads()[2], [0, 1, 2, 3, 4]);
    stream.publish(4);
    let step = MigrationStep::Rollback { note: Box::new(stream.note()), whole: false, compare: false };
    for group in 0..3 {
        stream.step_in(group, &newer.resharding_id, step.clone()).unwrap();
    }
    assert_eq!(stream.reads()[2], [0, 1, 2, 3, 4], "until it is proven empty");
    walk(&mut stream, &mut Driver::twice(), 500);
    stream.assert_settled(3);
}

#[test]
fn protocol_6_without_any_migration_the_group_created_first_says_the_count() {
    for (oldest, other) in [(2, 4), (4, 2)] {
        let mut stream = Stream::new(oldest, &["billing"]);
        stream.create("archive", other);
        assert_eq!(stream.counts(), [oldest, other]);
        stream.traffic();
        walk(&mut stream, &mut Driver::twice(), 500);
        stream.assert_settled(oldest);
        let group = stream.groups[1].group();
        let repair = group.migrations_by_age()[0].clone();
        assert!(repair.repairs && repair.resharding_id.starts_with("reshard-repair-"));
        let id = repair.resharding_id.as_str();
        assert_eq!(stream.states(id), [Some(MigrationState::Deprecated); 2], "in all groups by the same id");
        let too_late = stream.roll_back(id);
        assert_eq!(too_late, Err(ErrorCode::RollbackNotAllowed), "nobody has asked for it");
    }
}

#[test]
fn protocol_6_two_instances_that_repair_at_once_agree_on_one_id() {
    let mut stream = Stream::new(2, &["billing"]);
    stream.create("archive", 4);
    let (mut one, mut other) = (Driver::default(), Driver::default());
    one.one(&mut stream).unwrap();
    // The other instance had looked before, and made up an id of its own.
    stream.lose(0, 1);
    stream.spec(1);
    other.one(&mut stream).unwrap();
    for _ in 0..40 {
        for driver in [&mut one, &mut other] {
            driver.one(&mut stream).ok();
        }
        stream.consume();
        stream.pass(3_000);
    }
    walk(&mut stream, &mut Driver::default(), 500);
    stream.assert_settled(2);
}

#[test]
fn protocol_6_what_was_taken_back_before_anybody_was_told_decides_nothing() {
    let (mut stream, first) = begun(4, 2, Retire::Keep);
    stream.drive();
    // Redis loses all of it in mail; the next request finds that out in the middle of preparing.
    stream.lose(1, 100);
    let mut spec = stream.spec(8);
    spec.from_shard_count = 4;
    let prepare = MigrationStep::Prepare { spec: Box::new(spec.clone()), compare: false };
    stream.step_in(1, &spec.resharding_id, prepare.clone()).unwrap();
    let refused = stream.step_in(0, &spec.resharding_id, prepare);
    assert_eq!(refused, Err(ErrorCode::ActiveMigrationExists));
    let step = MigrationStep::Rollback { note: Box::new(stream.note()), whole: false, compare: false };
    stream.step_in(1, &spec.resharding_id, step).unwrap();
    assert_eq!(stream.states(&spec.resharding_id)[1], Some(MigrationState::RolledBack));
    walk(&mut stream, &mut Driver::default(), 500);
    assert_eq!(stream.states(&first), [Some(MigrationState::Deprecated); 3]);
    stream.assert_settled(2);
}

#[test]
fn protocol_6_a_group_that_is_deleted_meanwhile_is_not_waited_for() {
    let (mut stream, _) = begun(4, 2, Retire::Keep);
    stream.drive();
    stream.groups.remove(1);
    stream.pass(CACHES);
    stream.consume();
    let next = stream.drive();
    assert!(!next.has_settled(), "but its Redis group still counts: {next:?}");
    (2..4).for_each(|shard| stream.destroy_redis_group(shard, "mail"));
    walk(&mut stream, &mut Driver::default(), 500);
    stream.assert_settled(2);
}
