//! Protocol 6: whole procedures, step by step over all groups of a stream: in which order, repeated, interrupted.
#![expect(clippy::panic, clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use rsc_core::migration::stream::Todo;
use rsc_protocol::resharding::{MigrationState, Retire};
use support::drivers::{Driver, walk};
use support::streams::*;

const GROUPS: [&str; 2] = ["billing", "mail"];

/// A stream with records in every shard, and a migration recorded in all groups.
fn begun(from: u32, to: u32, retire: Retire) -> (Stream, String) {
    let mut stream = Stream::new(from, &GROUPS);
    stream.traffic();
    let mut spec = stream.spec(to);
    spec.retire = retire;
    stream.prepare(&spec).unwrap();
    (stream, spec.resharding_id)
}

fn name(todo: &Todo) -> String {
    match todo {
        Todo::Prove(_) => "prove".to_owned(),
        Todo::Delete(_) => "delete".to_owned(),
        Todo::Provision { group, .. } => format!("provision {}", group.consumer_group()),
        Todo::Step { group, step, .. } => format!("{} {}", step.name(), group.consumer_group()),
    }
}

/// Everything that is done until it has settled, in its order.
fn all_todos(stream: &mut Stream) -> Vec<String> {
    let (mut driver, mut names) = (Driver::twice(), Vec::new());
    for _ in 0..200 {
        if let Some(next) = driver.one(stream).unwrap() {
            if next.has_settled() {
                return names;
            }
            stream.consume();
            stream.pass(10_000);
        } else {
            names.push(name(&driver.did.clone().unwrap()));
        }
    }
    panic!("it does not end: {names:?}");
}

#[test]
fn protocol_6_scale_out_prepares_provisions_activates_and_ends() {
    let (mut stream, id) = begun(2, 4, Retire::Keep);
    assert_eq!(stream.states(&id), [Some(MigrationState::Preparing); 2]);
    assert_eq!((stream.counts(), stream.reads()), (vec![2; 2], vec![vec![0, 1]; 2]));
    let expected = [
        "provision billing",
        "provisioned billing",
        "provision mail",
        "provisioned mail",
        "activate billing",
        "activate mail",
        "finish billing",
        "finish mail",
    ];
    assert_eq!(all_todos(&mut stream), expected);
    assert_eq!(stream.states(&id), [Some(MigrationState::Deprecated); 2]);
    stream.assert_settled(4);
}

#[test]
fn protocol_6_scale_in_drains_before_anything_is_given_up() {
    let (mut stream, id) = begun(4, 1, Retire::Keep);
    let todos = all_todos(&mut stream);
    let expected = [
        "provision billing",
        "provisioned billing",
        "provision mail",
        "provisioned mail",
        "activate billing",
        "activate mail",
        "begin-drain billing",
        "begin-drain mail",
        "prove",
        "retire billing",
        "retire mail",
        "prove",
        "finish billing",
        "finish mail",
    ];
    assert_eq!(todos, expected);
    assert_eq!(stream.states(&id), [Some(MigrationState::Deprecated); 2]);
    stream.assert_settled(1);
    assert_eq!(stream.shards.len(), 4, "the default keeps the keys");
}

#[test]
fn protocol_6_delete_is_recorded_everywhere_before_the_first_key_goes() {
    let (mut stream, _) = begun(3, 2, Retire::Delete);
    let todos = all_todos(&mut stream);
    let at = |what: &str| todos.iter().position(|todo| todo == what).unwrap();
    assert!(at("begin-delete billing").max(at("begin-delete mail")) < at("delete"));
    assert!(at("delete") < at("finish billing").min(at("finish mail")));
    stream.assert_settled(2);
    assert!(!stream.shards.contains_key(&2));
}

#[test]
fn protocol_6_down_to_zero_and_back() {
    for retire in [Retire::Keep, Retire::Delete] {
        let (mut stream, _) = begun(3, 0, retire);
        assert!(!walk(&mut stream, &mut Driver::default(), 500));
        stream.assert_settled(0);
        assert_eq!(stream.shards.is_empty(), retire == Retire::Delete);
        stream.scale(2);
        stream.traffic();
        stream.settle();
        stream.assert_settled(2);
    }
}

#[test]
fn protocol_6_whoever_carries_on_needs_nothing_but_the_records() {
    for (from, to) in [(2, 4), (4, 1), (3, 0), (0, 3)] {
        for retire in [Retire::Keep, Retire::Delete] {
            let mut todos = 0;
            loop {
                let (mut stream, id) = begun(from, to, retire);
                let is_going_on = walk(&mut stream, &mut Driver::default(), todos);
                // The process dies here; another one finds the records.
                walk(&mut stream, &mut Driver::twice(), 500);
                assert_eq!(stream.states(&id), [Some(MigrationState::Deprecated); 2], "after {todos}");
                stream.assert_settled(to);
                if !is_going_on {
                    break;
                }
                todos += 1;
            }
            assert!(todos >= 7, "{from} to {to} has more than {todos} points to die at");
        }
    }
}

#[test]
fn protocol_6_two_instances_at_once_do_no_harm() {
    for (from, to) in [(2, 4), (4, 1), (3, 0)] {
        for lead in 1..14 {
            let (mut stream, id) = begun(from, to, Retire::Keep);
            let (mut one, mut other) = (Driver::default(), Driver::default());
            walk(&mut stream, &mut one, lead);
            // From here on in turns, each with what it has decided from an older look.
            for _ in 0..60 {
                stream.traffic();
                for driver in [&mut other, &mut one] {
                    if let Ok(Some(_)) = driver.one(&mut stream) {
                        stream.consume();
                        stream.pass(3_000);
                    }
                }
            }
            walk(&mut stream, &mut Driver::default(), 500);
            assert_eq!(stream.states(&id), [Some(MigrationState::Deprecated); 2]);
            stream.assert_settled(to);
        }
    }
}

#[test]
fn protocol_6_a_settled_stream_has_nothing_to_do() {
    let mut stream = Stream::new(3, &GROUPS);
    let versions = stream.versions();
    assert!(stream.drive().has_settled());
    assert!(Stream::new(3, &[]).drive().has_settled());
    let id = stream.scale(2);
    stream.settle();
    let versions_after = stream.versions();
    assert!(versions_after > versions);
    for _ in 0..3 {
        stream.pass(100_000);
        assert!(stream.drive().has_settled());
    }
    assert_eq!(stream.versions(), versions_after);
    assert_eq!(stream.states(&id), [Some(MigrationState::Deprecated); 2]);
}

#[test]
fn protocol_6_what_it_waits_for_is_said() {
    let (mut stream, _) = begun(3, 2, Retire::Keep);
    let next = stream.drive();
    assert_eq!(next.wake_at, Some(stream.now.plus(CACHES)));
    assert!(next.waits_for.contains("former count"), "{}", next.waits_for);
    stream.pass(CACHES);
    let next = stream.drive();
    assert_eq!((next.waits_for.as_str(), next.wake_at), ("shards 2 are not proven empty", None));
    assert!(!next.has_settled());
    stream.consume();
    assert!(stream.drive().has_settled());
}
