//! Protocol 6: taking a migration back at each of its stages, or being told that it is too late.
#![expect(clippy::panic, clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeMap;

use rsc_core::MigrationStep;
use rsc_core::migration::stream::Todo;
use rsc_protocol::ErrorCode;
use rsc_protocol::resharding::{MigrationState, Retire};
use support::drivers::{Driver, walk};
use support::streams::*;

const GROUPS: [&str; 2] = ["billing", "mail"];

fn begun(from: u32, to: u32, retire: Retire) -> (Stream, String) {
    let mut stream = Stream::new(from, &GROUPS);
    stream.traffic();
    let mut spec = stream.spec(to);
    spec.retire = retire;
    stream.prepare(&spec).unwrap();
    (stream, spec.resharding_id)
}

/// Walks until a step of this name has been done in this group.
fn until(stream: &mut Stream, step: &str, group: &str) {
    let mut driver = Driver::default();
    for _ in 0..200 {
        walk(stream, &mut driver, 1);
        if let Some(Todo::Step { group: of, step: did, .. }) = &driver.did
            && (did.name(), of.consumer_group()) == (step, group)
        {
            return;
        }
    }
    panic!("no {step} in {group}");
}

fn assert_rolled_back(stream: &mut Stream, id: &str, count: u32) {
    assert!(!walk(stream, &mut Driver::twice(), 500));
    assert_eq!(stream.states(id), [Some(MigrationState::RolledBack); 2]);
    stream.assert_settled(count);
    for group in stream.loaded() {
        let note = group.migration(id).unwrap().rollback.clone().unwrap();
        assert_eq!((note.requested_by.as_str(), note.reason.as_str()), ("ops", "test"));
    }
}

#[test]
fn protocol_6_rolled_back_while_preparing_it_has_never_been() {
    let (mut stream, id) = begun(2, 4, Retire::Keep);
    let versions = stream.versions();
    stream.roll_back(&id).unwrap();
    let next = stream.drive();
    assert!(next.has_settled(), "nobody was told, nothing is waited for: {next:?}");
    assert_eq!(stream.versions(), versions.iter().map(|version| version + 1).collect::<Vec<_>>());
    assert_rolled_back(&mut stream, &id, 2);
    assert!(!stream.shards.contains_key(&2));
    assert!(stream.loaded().iter().all(|group| group.group_epoch == 1));
}

#[test]
fn protocol_6_past_the_barrier_a_rollback_waits_for_producers_that_may_have_been_told() {
    // billing had activated, and Redis has lost that; its producers have not.
    let (mut stream, id) = begun(2, 4, Retire::Keep);
    until(&mut stream, "activate", "billing");
    stream.traffic();
    stream.lose(0, 1);
    assert_eq!(stream.states(&id), [Some(MigrationState::Preparing); 2]);
    stream.roll_back(&id).unwrap();
    let next = stream.drive();
    assert_eq!(next.wake_at, Some(stream.now.plus(CACHES)));
    assert_eq!((stream.counts(), stream.reads()), (vec![2; 2], vec![vec![0, 1, 2, 3]; 2]));
    assert_rolled_back(&mut stream, &id, 2);
}

#[test]
fn protocol_6_scale_out_is_rolled_back_with_the_added_shards_drained_first() {
    for (step, group) in [("activate", "billing"), ("activate", "mail")] {
        let (mut stream, id) = begun(2, 4, Retire::Keep);
        until(&mut stream, step, group);
        stream.traffic();
        stream.roll_back(&id).unwrap();
        stream.drive();
        assert_eq!((stream.counts(), stream.reads()), (vec![2; 2], vec![vec![0, 1, 2, 3]; 2]));
        assert_eq!(stream.states(&id), [Some(MigrationState::RollingBack); 2]);
        stream.pass(CACHES);
        assert_eq!(stream.drive().waits_for, "shards 2-3 are not proven empty");
        assert_rolled_back(&mut stream, &id, 2);
    }
}

#[test]
fn protocol_6_scale_in_is_rolled_back_at_any_stage_before_the_end() {
    let stages =
        [("activate", "billing"), ("activate", "mail"), ("begin-drain", "billing"), ("begin-drain", "mail")];
    for (step, group) in stages.into_iter().chain([("retire", "billing"), ("retire", "mail")]) {
        for retire in [Retire::Keep, Retire::Delete] {
            let (mut stream, id) = begun(4, 1, retire);
            until(&mut stream, step, group);
            stream.roll_back(&id).unwrap();
            // First everybody reads them again, then producers are told.
            let mut driver = Driver::default();
            loop {
                let all_read = stream.reads().iter().all(|reads| reads.len() == 4);
                assert!(all_read || stream.counts().iter().all(|count| *count != 4), "{step} {group}");
                if driver.one(&mut stream).unwrap().is_some() {
                    break;
                }
            }
            assert_eq!(stream.counts(), [4, 4], "at once");
            assert_rolled_back(&mut stream, &id, 4);
        }
    }
}

#[test]
fn protocol_6_once_keys_are_deleted_there_is_no_way_back() {
    for group in GROUPS {
        let (mut stream, id) = begun(3, 1, Retire::Delete);
        until(&mut stream, "begin-delete", group);
        let before = stream.loaded();
        assert_eq!(stream.roll_back(&id), Err(ErrorCode::RollbackNotAllowed));
        let step = MigrationStep::Rollback { note: Box::new(stream.note()), whole: true, compare: false };
        let index = GROUPS.iter().position(|name| *name == group).unwrap();
        assert_eq!(stream.step_in(index, &id, step), Err(ErrorCode::RollbackNotAllowed));
        assert_eq!(stream.loaded(), before, "and nothing has changed");
        walk(&mut stream, &mut Driver::default(), 500);
        stream.assert_settled(1);
    }
}

#[test]
fn protocol_6_once_it_is_deprecated_there_is_no_way_back() {
    for (from, to, group) in [(3, 1, "billing"), (3, 1, "mail"), (1, 3, "mail")] {
        let (mut stream, id) = begun(from, to, Retire::Keep);
        until(&mut stream, "finish", group);
        assert_eq!(stream.roll_back(&id), Err(ErrorCode::RollbackNotAllowed));
        let step = MigrationStep::Rollback { note: Box::new(stream.note()), whole: true, compare: false };
        let index = GROUPS.iter().position(|name| *name == group).unwrap();
        assert_eq!(stream.step_in(index, &id, step), Err(ErrorCode::RollbackNotAllowed));
        walk(&mut stream, &mut Driver::default(), 500);
        stream.assert_settled(to);
    }
}

#[test]
fn protocol_6_a_scale_out_can_be_rolled_back_until_the_caches_are_over() {
    let (mut stream, id) = begun(1, 3, Retire::Keep);
    stream.drive();
    stream.pass(CACHES - 1);
    assert!(!stream.drive().has_settled());
    assert_eq!(stream.states(&id), [Some(MigrationState::Active); 2]);
    let mut other = Stream::new(1, &GROUPS);
    let late = other.scale(3);
    stream.roll_back(&id).unwrap();
    assert_rolled_back(&mut stream, &id, 1);
    other.pass(CACHES);
    assert!(other.drive().has_settled());
    assert_eq!(other.roll_back(&late), Err(ErrorCode::RollbackNotAllowed));
}

#[test]
fn protocol_6_who_lags_behind_or_has_run_ahead_goes_back_with_the_others() {
    // mail takes the step of an instance that had not heard of the rollback.
    let late: [(&str, MigrationStep, &str); 3] = [
        ("activate", MigrationStep::Activate, "billing"),
        ("begin-drain", MigrationStep::BeginDrain, "billing"),
        ("finish", MigrationStep::Finish, "billing"),
    ];
    for (step, ahead, first) in late {
        let (mut stream, id) = begun(3, 1, Retire::Keep);
        until(&mut stream, step, first);
        if step == "finish" {
            // Redis has lost that billing is through.
            stream.lose(0, 1);
            stream.roll_back(&id).unwrap();
        } else {
            let note = Box::new(stream.note());
            stream.step_in(0, &id, MigrationStep::Rollback { note, whole: true, compare: false }).unwrap();
        }
        stream.step_in(1, &id, ahead).unwrap();
        assert_rolled_back(&mut stream, &id, 3);
    }
}

#[test]
fn protocol_6_a_rollback_of_nothing_and_one_asked_for_twice() {
    let (mut stream, id) = begun(3, 1, Retire::Keep);
    assert_eq!(stream.roll_back("reshard-unknown"), Err(ErrorCode::MigrationNotFound));
    stream.drive();
    stream.roll_back(&id).unwrap();
    let versions = stream.versions();
    stream.roll_back(&id).unwrap();
    assert_eq!(stream.versions(), versions, "it is on its way already");
    assert_rolled_back(&mut stream, &id, 3);
    stream.roll_back(&id).unwrap();
    assert!(stream.next(&BTreeMap::new()).has_settled());
    // And the stream can be changed again, also to the very count.
    let again = stream.scale(1);
    walk(&mut stream, &mut Driver::default(), 500);
    assert_eq!(stream.states(&again), [Some(MigrationState::Deprecated); 2]);
    stream.assert_settled(1);
}

#[test]
fn protocol_6_with_delete_the_added_shards_go_on_the_way_back() {
    let (mut stream, id) = begun(1, 3, Retire::Delete);
    stream.drive();
    stream.traffic();
    stream.roll_back(&id).unwrap();
    assert_rolled_back(&mut stream, &id, 1);
    assert_eq!(stream.shards.len(), 1);
}
