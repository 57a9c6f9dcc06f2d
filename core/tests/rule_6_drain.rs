//! Protocol 6: when a removed shard is given up, and what brings it back.
#![expect(clippy::panic, clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeMap;

use rsc_core::migration::stream::{ShardFacts, Todo};
use rsc_core::{Command, MigrationStep, Settings, ShardSet};
use rsc_protocol::ErrorCode;
use rsc_protocol::resharding::{MigrationState, Retire};
use support::drivers::Driver;
use support::streams::*;

const GROUPS: [&str; 2] = ["billing", "mail"];

/// A scale-in from 3 to 1 that drains, the caches being over and nothing in its shards.
fn draining(retire: Retire) -> (Stream, String) {
    let mut stream = Stream::new(3, &GROUPS);
    let mut spec = stream.spec(1);
    spec.retire = retire;
    let id = stream.begin(&spec);
    stream.pass(CACHES);
    (stream, id)
}

/// Does what is next until a step of this name is what comes next.
fn before(stream: &mut Stream, driver: &mut Driver, step: &str) {
    for _ in 0..100 {
        if let Some(Todo::Step { step: next, .. }) = driver.intends()
            && next.name() == step
        {
            return;
        }
        if driver.intends().is_none()
            && let Some(Todo::Step { step: next, .. }) = driver.look(stream).todo.first()
            && next.name() == step
        {
            return;
        }
        assert_eq!(driver.one(stream).unwrap(), None, "before {step}");
    }
    panic!("no {step}");
}

#[test]
fn protocol_6_removed_shards_are_read_until_they_are_proven_empty() {
    let (mut stream, id) = draining(Retire::Keep);
    for shard in [1, 2] {
        stream.publish(shard);
    }
    stream.drive();
    assert_eq!(stream.states(&id), [Some(MigrationState::Draining); 2]);
    assert_eq!(stream.reads(), vec![vec![0, 1, 2]; 2]);
    // One group is through with one of them, the other has not even begun.
    stream.deliver(0, [1, 2]);
    stream.acknowledge(0);
    stream.drive();
    assert_eq!(stream.reads(), vec![vec![0, 1, 2]; 2]);
    stream.deliver(1, [1]);
    assert_eq!(stream.drive().waits_for, "shards 1-2 are not proven empty", "1 is pending");
    stream.acknowledge(1);
    assert_eq!(stream.drive().waits_for, "shards 2 are not proven empty");
    assert_eq!(stream.reads(), vec![vec![0, 2]; 2], "the proven one has left");
    let billing = stream.groups[0].group();
    let migration = billing.migration(&id).unwrap();
    assert_eq!((migration.draining(), &migration.retired), (&[2].into(), &[1].into()));
    assert_eq!(migration.draining_since, Some(stream.now), "since when");
    stream.settle();
    stream.assert_settled(1);
}

#[test]
fn protocol_6_a_group_that_nobody_coordinates_counts_too() {
    let (mut stream, _) = draining(Retire::Keep);
    stream.publish(2);
    stream.add_redis_group(2, "a-script");
    stream.consume();
    assert_eq!(stream.drive().waits_for, "shards 2 are not proven empty");
    stream.destroy_redis_group(2, "a-script");
    stream.settle();
    stream.assert_settled(1);
}

#[test]
fn protocol_6_a_missing_group_is_provisioned_again_and_never_taken_for_done() {
    let (mut stream, _) = draining(Retire::Keep);
    stream.publish(1);
    stream.deliver(0, [1]);
    stream.acknowledge(0);
    stream.destroy_redis_group(1, "mail");
    let mut driver = Driver::default();
    assert_eq!(driver.run(&mut stream).unwrap().waits_for, "shards 1 are not proven empty");
    assert_eq!(stream.unread().len(), 1);
    stream.settle();
    stream.assert_settled(1);
}

#[test]
fn protocol_6_provisioning_that_fails_holds_the_drain_up_and_loses_nothing() {
    let (mut stream, id) = draining(Retire::Keep);
    stream.publish(1);
    stream.destroy_redis_group(1, "mail");
    stream.provisioning_fails = true;
    let (code, _) = Driver::default().run(&mut stream).unwrap_err();
    assert_eq!(code, ErrorCode::ProvisioningFailed);
    assert_eq!(stream.reads()[1], [0, 1, 2]);
    stream.provisioning_fails = false;
    stream.settle();
    assert_eq!(stream.states(&id), [Some(MigrationState::Deprecated); 2]);
    stream.assert_settled(1);
}

#[test]
fn protocol_6_provisioning_that_fails_leaves_it_preparing_and_can_be_tried_again() {
    let mut stream = Stream::new(1, &GROUPS);
    let spec = stream.spec(3);
    stream.prepare(&spec).unwrap();
    stream.provisioning_fails = true;
    let (code, _) = Driver::default().run(&mut stream).unwrap_err();
    assert_eq!(code, ErrorCode::ProvisioningFailed);
    assert_eq!(stream.states(&spec.resharding_id), [Some(MigrationState::Preparing); 2]);
    assert_eq!(stream.counts(), [1, 1]);
    stream.provisioning_fails = false;
    stream.settle();
    stream.assert_settled(3);
}

#[test]
fn protocol_6_a_key_that_does_not_exist_is_proven() {
    let (mut stream, _) = draining(Retire::Keep);
    stream.shards.remove(&2);
    assert!(stream.drive().has_settled());
}

#[test]
fn protocol_6_a_record_that_slips_in_puts_its_shard_back_into_the_target() {
    // After one group has given the shard up, after both have, and when only the last step is left.
    for (step, steps) in [("retire", 1), ("retire", 2), ("finish", 0), ("finish", 1)] {
        let (mut stream, id) = draining(Retire::Keep);
        let mut driver = Driver::default();
        before(&mut stream, &mut driver, step);
        for _ in 0..steps {
            assert_eq!(driver.one(&mut stream).unwrap(), None);
        }
        // Somebody who knows no lease.
        stream.publish(2);
        let next = Driver::default().run(&mut stream).unwrap();
        assert_eq!(next.waits_for, "shards 2 are not proven empty", "{step} {steps}");
        assert!(stream.reads().iter().all(|reads| reads.contains(&2)), "{step} {steps}");
        assert_eq!(stream.states(&id), [Some(MigrationState::Draining); 2]);
        stream.settle();
        stream.assert_settled(1);
    }
}

#[test]
fn protocol_6_with_delete_a_late_record_is_seen_or_refused() {
    let (mut stream, id) = draining(Retire::Delete);
    let mut driver = Driver::default();
    loop {
        assert_eq!(driver.one(&mut stream).unwrap(), None);
        if matches!(driver.look(&stream).todo.first(), Some(Todo::Delete(_))) {
            break;
        }
    }
    // Between the proof and the deleting script.
    assert!(stream.publish(2));
    let next = driver.run(&mut stream).unwrap();
    assert_eq!(next.waits_for, "shards 2 are not proven empty");
    assert!(!stream.publish(1), "refused: its key has been deleted");
    assert!(stream.reads().iter().all(|reads| *reads == [0, 2]));
    assert_eq!(stream.roll_back(&id), Err(ErrorCode::RollbackNotAllowed));
    stream.settle();
    stream.assert_settled(1);
    assert_eq!(stream.shards.len(), 1);
}

#[test]
fn protocol_6_the_largest_cache_lease_that_was_handed_out_passes_first() {
    let (longer, margin) = (120_000_i64, 5_000);
    let mut stream = Stream::new(3, &GROUPS);
    // mail's producers were told a longer lease once; it is configured no more.
    let long = Settings { routing_cache_ttl_ms: 120_000, ..Settings::default() };
    stream.groups[1].settings = long;
    stream.groups[1].tick();
    stream.groups[1].settings = Settings::default();
    let spec = stream.spec(1);
    let id = stream.begin(&spec);
    let begun = stream.now;
    let end = begun.plus(longer + margin);
    assert_eq!(stream.drive().wake_at, Some(end));
    stream.pass(longer + margin - 1);
    assert_eq!(stream.drive().wake_at, Some(end));
    assert_eq!(stream.states(&id), [Some(MigrationState::Active); 2]);
    stream.pass(1);
    assert!(stream.drive().has_settled());
}

/// Found by a scenario: after an hour's jump draining began at once, while producers held routes they had just been given.
#[test]
fn protocol_6_redis_time_that_jumps_forward_does_not_shorten_the_wait() {
    for jump in [3_600_000, CACHES / 2] {
        let mut stream = Stream::new(3, &GROUPS);
        let id = stream.scale(1);
        stream.pass(1_000);
        stream.pass(jump);
        let jumped = stream.now;
        stream.groups.iter_mut().for_each(|bench| bench.may_grant = false);
        // Whoever drives does not know of it; each group's actor does.
        if jump > CACHES {
            let refused = stream.step_in(0, &id, MigrationStep::BeginDrain);
            assert_eq!(refused, Err(ErrorCode::StateVersionConflict));
        }
        stream.groups.iter_mut().for_each(|bench| bench.tick());
        stream.groups.iter_mut().for_each(|bench| bench.may_grant = true);
        assert_eq!(stream.drive().wake_at, Some(jumped.plus(CACHES)), "after {jump} ms");
        stream.pass(CACHES - 1);
        stream.drive();
        assert_eq!(stream.states(&id), [Some(MigrationState::Active); 2]);
        stream.pass(1);
        assert!(stream.drive().has_settled());
    }
}

#[test]
fn protocol_6_the_wait_begins_when_the_last_group_is_active() {
    let mut stream = Stream::new(3, &GROUPS);
    let spec = stream.spec(1);
    stream.prepare(&spec).unwrap();
    let mut driver = Driver::default();
    before(&mut stream, &mut driver, "activate");
    driver.one(&mut stream).unwrap();
    assert_eq!(stream.counts(), [1, 3]);
    stream.pass(CACHES);
    stream.drive();
    let activated = stream.now;
    assert_eq!(stream.drive().wake_at, Some(activated.plus(CACHES)));
    // And no group takes part of that wait for the whole.
    let refused = stream.step_in(1, &spec.resharding_id, MigrationStep::BeginDrain);
    assert_eq!(refused, Err(ErrorCode::StateVersionConflict));
}

#[test]
fn protocol_6_each_record_watches_over_its_own_wait() {
    let mut stream = Stream::new(3, &GROUPS);
    let id = stream.scale(1);
    stream.pass(CACHES - 1);
    let early = |stream: &mut Stream, step| stream.step_in(0, &id, step);
    let all = ShardSet::from([1, 2]);
    assert_eq!(early(&mut stream, MigrationStep::BeginDrain), Err(ErrorCode::StateVersionConflict));
    assert_eq!(early(&mut stream, MigrationStep::Retire(all.clone())), Err(ErrorCode::StateVersionConflict));
    assert_eq!(early(&mut stream, MigrationStep::BeginDelete), Err(ErrorCode::StateVersionConflict));
    assert_eq!(early(&mut stream, MigrationStep::Finish), Err(ErrorCode::StateVersionConflict));
    stream.pass(1);
    early(&mut stream, MigrationStep::BeginDrain).unwrap();
    assert_eq!(early(&mut stream, MigrationStep::Finish), Err(ErrorCode::StateVersionConflict), "unproven");
    assert_eq!(early(&mut stream, MigrationStep::BeginDelete), Err(ErrorCode::StateVersionConflict));
    early(&mut stream, MigrationStep::Retire([0, 1, 2].into())).unwrap();
    assert_eq!(stream.reads()[0], [0], "a shard that producers route to is never given up");
    early(&mut stream, MigrationStep::Finish).unwrap();
}

#[test]
fn protocol_6_deprecated_after_is_the_earliest_end() {
    for (from, to) in [(3, 1), (1, 3)] {
        let mut stream = Stream::new(from, &GROUPS);
        let mut spec = stream.spec(to);
        let at = stream.now.plus(3_600_000);
        spec.deprecated_after = Some(at);
        let id = stream.begin(&spec);
        stream.pass(CACHES);
        let next = stream.drive();
        assert_eq!(next.wake_at, Some(at), "{next:?}");
        assert_eq!(stream.step_in(0, &id, MigrationStep::Finish), Err(ErrorCode::StateVersionConflict));
        if from > to {
            // Whoever looks meanwhile sees what has slipped in, and does not wait for the end with it.
            stream.publish(2);
            stream.drive();
            assert_eq!(stream.reads(), vec![vec![0, 2]; 2]);
            stream.consume();
            stream.drive();
        }
        stream.pass(3_600_000 - CACHES - 1);
        assert!(!stream.drive().has_settled());
        let before = stream.loaded();
        stream.roll_back(&id).unwrap();
        assert_eq!(
            stream.states(&id)[0],
            Some(MigrationState::RollingBack),
            "until then it can be taken back"
        );
        stream.settle();
        stream.assert_settled(from);
        drop(before);
    }
    let mut stream = Stream::new(3, &GROUPS);
    let mut spec = stream.spec(1);
    spec.deprecated_after = Some(stream.now.plus(3_600_000));
    spec.retire = Retire::Delete;
    let id = stream.begin(&spec);
    stream.pass(3_599_999);
    stream.drive();
    assert_eq!(stream.shards.len(), 3);
    stream.pass(1);
    assert!(stream.drive().has_settled());
    assert_eq!(stream.states(&id), [Some(MigrationState::Deprecated); 2]);
    assert_eq!(stream.shards.len(), 1);
}

#[test]
fn protocol_6_a_proof_is_about_the_shards_it_names() {
    let (mut stream, _) = draining(Retire::Keep);
    stream.groups[0].turn(&[Command::Tick]);
    stream.drive();
    let empty = ShardFacts { is_empty: true, exists: true, ..ShardFacts::default() };
    let mut other = draining(Retire::Keep).0;
    other.publish(1);
    let mut driver = Driver::default();
    before(&mut other, &mut driver, "retire");
    let facts = BTreeMap::from([(2, empty)]);
    assert_eq!(other.next(&facts).todo, [Todo::Prove([1].into())], "what is not known is looked up");
}

/// Found by an attacker: the shard was read again and given up again without end, and nobody was told why.
#[test]
fn protocol_6_what_only_deleting_cannot_prove_waits_and_is_not_read_again() {
    let (mut stream, id) = draining(Retire::Delete);
    let mut driver = Driver::default();
    before(&mut stream, &mut driver, "begin-delete");
    let scattered = ShardFacts { is_empty: true, exists: true, is_scattered: true, ..ShardFacts::default() };
    let facts: BTreeMap<u32, ShardFacts> = [1, 2].map(|shard| (shard, scattered.clone())).into();
    for group in &mut stream.groups {
        group.turn(&[Command::Migrate { resharding_id: id.clone(), step: MigrationStep::BeginDelete }]);
    }
    let next = stream.next(&facts);
    assert_eq!(next.todo, [], "nothing is given back to be read");
    assert!(next.waits_for.contains("1-2") && next.waits_for.contains("XACK"), "{}", next.waits_for);
    assert_eq!(next.wake_at, Some(stream.now.plus(10_000)), "the proof is work for redis");
    // One that became provable goes by itself.
    let mut facts = facts;
    facts.insert(2, ShardFacts { is_scattered: false, ..scattered });
    assert_eq!(stream.next(&facts).todo, [Todo::Delete([2].into())]);
}
