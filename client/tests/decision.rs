//! The consumer's decisions, rule by rule (protocol 11). Times are seconds of the process's monotonic clock.

#![expect(clippy::expect_used, reason = "a test's helpers may fail the test")]

use std::time::Duration;

use rsc_client::decision::{Action, Consumer, End, Event, Identity, Settings, Work};
use rsc_protocol::{
    AssignedShard, Assignment, CapacityReport, HeartbeatRequest, HeartbeatResponse, RevokingState, Status,
};

const LEASE_MS: u64 = 15_000;

fn at(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

fn consumer() -> Consumer {
    let identity = Identity {
        member_id: "m".to_owned(),
        member_name: Some("orders-7".to_owned()),
        instance_id: "i".to_owned(),
        first_sequence: 1_000,
    };
    let capacity = CapacityReport { runtime_max_concurrency: 4, available_concurrency: 4 };
    Consumer::new(identity, Settings::default(), capacity)
}

fn sent(actions: &[Action]) -> Option<HeartbeatRequest> {
    actions.iter().find_map(|action| match action {
        Action::Send(request) => Some(*request.clone()),
        _ => None,
    })
}

fn answer(request: &HeartbeatRequest, status: Status, epoch: i64, version: u64, shards: &[u32]) -> Event {
    let assigned = |shard: &u32| AssignedShard { shard_index: *shard, fencing_token: Some(version) };
    Event::Answer(Box::new(HeartbeatResponse {
        response_to: request.request_id.clone(),
        status,
        member_id: "m".to_owned(),
        member_epoch: epoch,
        heartbeat_interval_ms: 3_000,
        rebalance_timeout_ms: 60_000,
        group_epoch: 1,
        assignment_epoch: 1,
        metadata_version: version,
        assignment: Assignment {
            assigned_shards: shards.iter().map(assigned).collect(),
            metadata_version: version,
            ..Assignment::default()
        },
        assignment_lease_ms: LEASE_MS,
        metadata_token: format!("token-{version}"),
        max_wait_ms: 0,
        reason: "because".to_owned(),
    }))
}

/// A member since second 0 that reads `shards`, and the actions of its start.
fn member(shards: &[u32]) -> Consumer {
    let mut consumer = consumer();
    let join = sent(&consumer.handle(at(0.0), Event::Time)).expect("joins at once");
    assert_eq!((join.member_epoch, join.metadata_version), (0, 0));
    let actions = consumer.handle(at(0.1), answer(&join, Status::Ok, 5, 10, shards));
    assert_eq!(started(&actions), shards);
    consumer
}

fn started(actions: &[Action]) -> Vec<u32> {
    actions
        .iter()
        .filter_map(|action| match action {
            Action::Start(shard) => Some(shard.shard_index),
            _ => None,
        })
        .collect()
}

fn drained(actions: &[Action]) -> Vec<u32> {
    actions
        .iter()
        .filter_map(|action| match action {
            Action::Drain(shard) => Some(*shard),
            _ => None,
        })
        .collect()
}

fn abandoned(actions: &[Action]) -> Vec<u32> {
    actions
        .iter()
        .filter_map(|action| match action {
            Action::Abandon(shard) => Some(*shard),
            _ => None,
        })
        .collect()
}

fn owned(request: &HeartbeatRequest) -> Vec<u32> {
    request.owned_shards.iter().map(|shard| shard.shard_index).collect()
}

fn revoking(request: &HeartbeatRequest) -> Vec<(u32, RevokingState, u64)> {
    let row =
        |report: &rsc_protocol::RevokingReport| (report.shard.shard_index, report.state, report.in_flight);
    request.revoking_shards.iter().map(row).collect()
}

/// The heartbeat that is due at `seconds`.
fn beat(consumer: &mut Consumer, seconds: f64) -> HeartbeatRequest {
    sent(&consumer.handle(at(seconds), Event::Time)).expect("a heartbeat is due")
}

#[test]
fn the_first_heartbeat_joins_and_says_who_it_is() {
    let mut consumer = consumer();
    let join = beat(&mut consumer, 0.0);
    join.check().expect("well-formed");
    assert_eq!(join.member_name.as_deref(), Some("orders-7"));
    assert_eq!(join.instance_id.as_deref(), Some("i"));
    assert_eq!(join.metadata_token, None);
    assert!(join.sequence > Some(1_000));
    assert!(!consumer.may_read(at(0.0)));
}

#[test]
fn a_steady_member_reports_what_it_was_told_with_a_growing_sequence() {
    let mut consumer = member(&[1, 2]);
    let one = beat(&mut consumer, 3.0);
    assert_eq!((one.member_epoch, one.metadata_version, owned(&one)), (5, 10, vec![1, 2]));
    assert_eq!(one.metadata_token.as_deref(), Some("token-10"));
    assert_eq!(consumer.handle(at(3.1), answer(&one, Status::Ok, 5, 10, &[1, 2])), []);
    let two = beat(&mut consumer, 6.0);
    assert!(two.sequence > one.sequence && two.request_id != one.request_id);
}

#[test]
fn one_request_is_in_flight() {
    let mut consumer = member(&[1]);
    let request = beat(&mut consumer, 3.0);
    assert_eq!(consumer.handle(at(4.9), Event::Time), []);
    assert_eq!(consumer.wakes_at(), Some(at(5.0)));
    let again = beat(&mut consumer, 5.0);
    assert_ne!(again.request_id, request.request_id);
}

#[test]
fn an_answer_after_the_local_timeout_is_dropped() {
    let mut consumer = member(&[1]);
    let slow = beat(&mut consumer, 3.0);
    let _ = beat(&mut consumer, 5.0);
    assert_eq!(consumer.handle(at(5.1), answer(&slow, Status::Ok, 6, 11, &[1, 2])), []);
    assert!(!consumer.may_read(at(15.0)), "a dropped answer extends nothing");
    let mut consumer = member(&[1]);
    let slow = beat(&mut consumer, 3.0);
    // Nobody woke the consumer between the timeout and the answer: it still counts as the one in flight.
    let actions = consumer.handle(at(5.5), answer(&slow, Status::Ok, 6, 11, &[1, 2]));
    assert_eq!(started(&actions), [2]);
}

#[test]
fn the_same_answer_twice_is_applied_once() {
    let mut consumer = member(&[1]);
    let request = beat(&mut consumer, 3.0);
    let one = answer(&request, Status::Ok, 5, 10, &[1]);
    let _ = consumer.handle(at(3.1), one.clone());
    let next = beat(&mut consumer, 6.0);
    let _ = consumer.handle(at(6.1), answer(&next, Status::Ok, 6, 11, &[]));
    assert_eq!(consumer.handle(at(6.2), one), [], "a copy starts nothing");
}

#[test]
fn the_lease_counts_from_sending() {
    let mut consumer = member(&[1]);
    let request = beat(&mut consumer, 3.0);
    let _ = consumer.handle(at(4.9), answer(&request, Status::Ok, 5, 10, &[1]));
    assert!(consumer.may_read(at(17.99)));
    assert!(!consumer.may_read(at(18.0)));
}

#[test]
fn only_three_statuses_extend_the_lease() {
    for (status, extends) in [
        (Status::Ok, true),
        (Status::SyncMetadata, true),
        (Status::RevokePending, true),
        (Status::Retry, false),
    ] {
        let mut consumer = member(&[1]);
        let request = beat(&mut consumer, 3.0);
        let _ = consumer.handle(at(3.1), answer(&request, status, 5, 10, &[1]));
        assert_eq!(consumer.may_read(at(16.0)), extends, "{status:?}");
    }
}

#[test]
fn a_coordinator_that_tells_no_lease_is_believed_for_the_assumed_one() {
    let mut consumer = consumer();
    let join = beat(&mut consumer, 0.0);
    let Event::Answer(mut response) = answer(&join, Status::Ok, 5, 10, &[1]) else { unreachable!() };
    response.assignment_lease_ms = 0;
    let _ = consumer.handle(at(1.0), Event::Answer(response));
    assert!(consumer.may_read(at(13.4)) && !consumer.may_read(at(13.5)));
}

#[test]
fn when_the_lease_is_over_everything_stops_and_it_rejoins() {
    let mut consumer = member(&[1, 2]);
    let request = beat(&mut consumer, 3.0);
    let actions = consumer.handle(at(3.1), answer(&request, Status::Ok, 6, 11, &[1]));
    assert_eq!(drained(&actions), [2]);
    // Every later answer is lost; the process is asleep when the lease ends at 18.
    let actions = consumer.handle(at(30.0), Event::Time);
    assert_eq!(abandoned(&actions), [1, 2], "what is drained stops as well");
    let join = sent(&actions).expect("rejoins");
    assert_eq!((join.member_epoch, owned(&join), revoking(&join)), (0, vec![], vec![]));
    assert_eq!(join.metadata_version, 11, "the version is what it has seen");
    assert_eq!(consumer.shards().count(), 0);
}

#[test]
fn an_answer_that_finds_the_lease_over_is_dropped() {
    let mut consumer = member(&[1]);
    let request = beat(&mut consumer, 14.0);
    let actions = consumer.handle(at(15.5), answer(&request, Status::Ok, 5, 10, &[1]));
    assert_eq!(abandoned(&actions), [1]);
    assert_eq!(started(&actions), [0_u32; 0]);
    assert_eq!(sent(&actions).expect("rejoins").member_epoch, 0);
}

#[test]
fn ok_drains_what_it_does_not_name_until_told_and_reports_it_until_known() {
    let mut consumer = member(&[1, 2]);
    let request = beat(&mut consumer, 3.0);
    let actions = consumer.handle(at(3.1), answer(&request, Status::Ok, 6, 11, &[1]));
    assert_eq!(drained(&actions), [2]);
    let request = beat(&mut consumer, 6.0);
    assert_eq!((owned(&request), revoking(&request)), (vec![1], vec![(2, RevokingState::Draining, 1)]));
    // The drain ends while the request is on its way: its answer does not make the report superfluous.
    let _ = consumer.handle(at(6.1), Event::Drain { shard: 2, in_flight: 0 });
    let actions = consumer.handle(at(6.2), answer(&request, Status::Ok, 6, 11, &[1]));
    let request = sent(&actions).expect("tells at once");
    assert_eq!(revoking(&request), [(2, RevokingState::Revoked, 0)]);
    // That answer is lost: it is reported again; once answered, it is forgotten.
    let request = beat(&mut consumer, 8.3);
    assert_eq!(revoking(&request), [(2, RevokingState::Revoked, 0)]);
    let _ = consumer.handle(at(8.4), answer(&request, Status::Ok, 6, 12, &[1]));
    assert_eq!(revoking(&beat(&mut consumer, 11.4)), []);
}

#[test]
fn the_end_of_a_drain_is_told_at_once() {
    let mut consumer = member(&[1, 2]);
    let request = beat(&mut consumer, 3.0);
    let _ = consumer.handle(at(3.1), answer(&request, Status::Ok, 6, 11, &[1]));
    assert_eq!(sent(&consumer.handle(at(3.2), Event::Drain { shard: 2, in_flight: 7 })), None);
    let request = sent(&consumer.handle(at(3.3), Event::Drain { shard: 2, in_flight: 0 })).expect("at once");
    assert_eq!(revoking(&request), [(2, RevokingState::Revoked, 0)]);
}

#[test]
fn a_draining_shard_is_read_again_only_after_an_ok_names_it() {
    for status in [Status::SyncMetadata, Status::RevokePending, Status::Retry] {
        let mut consumer = member(&[1, 2]);
        let request = beat(&mut consumer, 3.0);
        let _ = consumer.handle(at(3.1), answer(&request, Status::Ok, 6, 11, &[1]));
        let request = beat(&mut consumer, 6.0);
        let actions = consumer.handle(at(6.1), answer(&request, status, 6, 11, &[1, 2, 3]));
        assert_eq!(started(&actions), [0_u32; 0], "{status:?}");
        assert_eq!(
            consumer.shards().collect::<Vec<_>>(),
            [(1, Work::Reading), (2, Work::Draining { in_flight: 1 })]
        );
        let request = beat(&mut consumer, 9.2);
        let actions = consumer.handle(at(9.3), answer(&request, Status::Ok, 6, 12, &[1, 2]));
        assert_eq!(started(&actions), [2]);
        assert_eq!(
            consumer.handle(at(9.4), Event::Drain { shard: 2, in_flight: 0 }),
            [],
            "an old drain's end"
        );
    }
}

#[test]
fn sync_metadata_keeps_what_is_read_and_assigned_and_goes_back_to_an_older_version() {
    let mut consumer = member(&[1, 2]);
    let request = beat(&mut consumer, 3.0);
    let actions = consumer.handle(at(3.1), answer(&request, Status::SyncMetadata, 4, 7, &[2, 3]));
    assert_eq!((drained(&actions), started(&actions)), (vec![1], vec![]));
    let next = beat(&mut consumer, 6.0);
    assert_eq!((next.member_epoch, next.metadata_version, owned(&next)), (4, 7, vec![2]));
    assert_eq!(next.metadata_token.as_deref(), Some("token-7"));
}

#[test]
fn unknown_or_fenced_stops_everything_and_rejoins_with_0() {
    for status in [Status::UnknownMemberId, Status::FencedMemberEpoch] {
        let mut consumer = member(&[1, 2]);
        let request = beat(&mut consumer, 3.0);
        let actions = consumer.handle(at(3.1), answer(&request, status, 0, 30, &[]));
        assert_eq!(abandoned(&actions), [1, 2]);
        assert!(matches!(actions.last(), Some(Action::Send(_))), "everything has stopped before it rejoins");
        let join = sent(&actions).expect("rejoins at once");
        assert_eq!((join.member_epoch, owned(&join), join.metadata_version), (0, vec![], 30));
        assert!(!consumer.may_read(at(3.2)));
        // A join that is refused is not repeated in a hurry.
        assert_eq!(sent(&consumer.handle(at(3.2), answer(&join, status, 0, 30, &[]))), None);
        assert_eq!(beat(&mut consumer, 6.2).member_epoch, 0);
    }
}

#[test]
fn refused_for_good_stops_and_stays_stopped() {
    for status in [Status::InvalidRequest, Status::UnsupportedProtocol] {
        let mut consumer = member(&[1]);
        let request = beat(&mut consumer, 3.0);
        let actions = consumer.handle(at(3.1), answer(&request, status, 0, 10, &[]));
        let end = End::Refused { status, reason: "because".to_owned() };
        assert_eq!(actions, [Action::Abandon(1), Action::Ended(end)]);
        assert!(consumer.has_ended() && !consumer.may_read(at(3.2)));
        assert_eq!(consumer.wakes_at(), None);
        assert_eq!(consumer.handle(at(90.0), Event::Time), []);
    }
}

#[test]
fn leaving_drains_says_minus_one_until_nothing_is_left_and_starts_nothing() {
    let mut consumer = member(&[1, 2]);
    let actions = consumer.handle(at(1.0), Event::Leave);
    assert_eq!(drained(&actions), [1, 2]);
    let leave = sent(&actions).expect("at once");
    assert_eq!((leave.member_epoch, owned(&leave), leave.revoking_shards.len()), (-1, vec![], 2));
    let _ = consumer.handle(at(1.1), Event::Drain { shard: 1, in_flight: 0 });
    let actions = consumer.handle(at(1.2), answer(&leave, Status::Ok, -1, 11, &[2]));
    assert_eq!(started(&actions), [0_u32; 0]);
    let leave = sent(&actions).expect("shard 1 is told at once");
    assert_eq!(revoking(&leave), [(1, RevokingState::Revoked, 0), (2, RevokingState::Draining, 1)]);
    assert_eq!(consumer.handle(at(1.3), answer(&leave, Status::Ok, -1, 12, &[])), []);
    let actions = consumer.handle(at(1.4), Event::Drain { shard: 2, in_flight: 0 });
    let leave = sent(&actions).expect("the last one");
    let actions = consumer.handle(at(1.5), answer(&leave, Status::Ok, -1, 13, &[]));
    assert_eq!(actions, [Action::Ended(End::Left)]);
}

#[test]
fn leaving_with_a_join_in_flight_gives_back_unread_what_it_brings() {
    let mut consumer = consumer();
    let join = beat(&mut consumer, 0.0);
    assert_eq!(consumer.handle(at(0.1), Event::Leave), []);
    let actions = consumer.handle(at(0.2), answer(&join, Status::Ok, 5, 10, &[1]));
    assert_eq!(started(&actions), [0_u32; 0]);
    assert_eq!(sent(&actions).expect("leaves").member_epoch, -1);
}

#[test]
fn leaving_before_anything_was_said_ends_at_once() {
    assert_eq!(consumer().handle(at(0.0), Event::Leave), [Action::Ended(End::Left)]);
}

#[test]
fn a_leaver_whose_lease_runs_out_or_that_is_unknown_has_left() {
    let mut consumer = member(&[1]);
    let leave = sent(&consumer.handle(at(1.0), Event::Leave)).expect("leaves");
    let actions = consumer.handle(at(1.1), answer(&leave, Status::UnknownMemberId, 0, 10, &[]));
    assert_eq!(actions, [Action::Abandon(1), Action::Ended(End::Left)]);
    let mut consumer = member(&[1]);
    let _ = consumer.handle(at(1.0), Event::Leave);
    assert_eq!(consumer.handle(at(16.0), Event::Time), [Action::Abandon(1), Action::Ended(End::Left)]);
}

#[test]
fn a_failed_request_is_tried_again_after_a_pause_and_costs_no_lease() {
    let mut consumer = member(&[1]);
    let request = beat(&mut consumer, 3.0);
    assert_eq!(consumer.handle(at(3.1), Event::Failed { request_id: request.request_id }), []);
    assert_eq!(consumer.handle(at(3.5), Event::Time), []);
    assert_eq!(owned(&beat(&mut consumer, 3.6)), [1]);
    assert!(consumer.may_read(at(14.9)));
}

#[test]
fn retry_changes_nothing_and_is_tried_again() {
    let mut consumer = member(&[1]);
    let request = beat(&mut consumer, 3.0);
    let actions = consumer.handle(at(3.1), answer(&request, Status::Retry, 99, 99, &[2]));
    assert_eq!(actions, []);
    let again = beat(&mut consumer, 3.6);
    assert_eq!((again.member_epoch, again.metadata_version, owned(&again)), (5, 10, vec![1]));
}

#[test]
fn a_leaver_that_is_no_longer_counted_gets_no_lease_for_what_it_still_drains() {
    let mut consumer = member(&[1]);
    let leave = sent(&consumer.handle(at(1.0), Event::Leave)).expect("leaves");
    let Event::Answer(mut gone) = answer(&leave, Status::Ok, -1, 11, &[]) else { unreachable!() };
    gone.assignment_lease_ms = 0;
    let _ = consumer.handle(at(1.1), Event::Answer(gone));
    assert!(consumer.may_read(at(14.9)) && !consumer.may_read(at(15.0)));
}
