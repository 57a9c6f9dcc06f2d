//! The producer's decisions, rule by rule (protocol 7, 11). Times are seconds of the process's monotonic clock; the
//! cache lease is 30 s.

#![expect(clippy::expect_used, reason = "a test's helpers may fail the test")]

use std::time::Duration;

use rsc_client::decision::{Producer, ProducerAction, ProducerEvent, ProducerSettings, PublishError};
use rsc_protocol::GroupKey;
use rsc_protocol::routing::ProducerRouting;

fn at(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

fn routing(request: u64, shards: u32, version: u64, token: &str) -> ProducerEvent {
    let group = GroupKey::new("orders", "billing").expect("plain names");
    let routing = ProducerRouting::new(&group, shards, version, token, 30_000);
    ProducerEvent::Routing { request, routing: Box::new(routing), tag: Some(format!("{version}-{token}")) }
}

fn publish(ticket: u64) -> ProducerEvent {
    ProducerEvent::Publish { ticket, key: b"customer-7".to_vec() }
}

fn fetched(actions: &[ProducerAction]) -> Option<u64> {
    actions.iter().find_map(|action| match action {
        ProducerAction::Fetch { request, .. } => Some(*request),
        _ => None,
    })
}

/// Shard and last instant of each record handed out.
fn added(actions: &[ProducerAction]) -> Vec<(u64, u32, Duration)> {
    actions
        .iter()
        .filter_map(|action| match action {
            ProducerAction::Add { ticket, shard, before, .. } => Some((*ticket, *shard, *before)),
            _ => None,
        })
        .collect()
}

fn failed(actions: &[ProducerAction]) -> Vec<(u64, PublishError)> {
    actions
        .iter()
        .filter_map(|action| match action {
            ProducerAction::Fail { ticket, why } => Some((*ticket, *why)),
            _ => None,
        })
        .collect()
}

/// A producer that asked at second 0 and was answered at second 1: version 5 of history `a`, 4 shards.
fn informed() -> Producer {
    let mut producer = Producer::new(ProducerSettings::default());
    let request = fetched(&producer.handle(at(0.0), ProducerEvent::Time)).expect("asks at once");
    assert_eq!(producer.handle(at(1.0), routing(request, 4, 5, "a")), []);
    producer
}

#[test]
fn a_record_goes_to_the_shard_of_its_key() {
    let mut producer = informed();
    let actions = producer.handle(at(2.0), publish(1));
    let shard = rsc_protocol::hash::shard_of(b"customer-7", 4).expect("there are shards");
    assert_eq!(added(&actions), [(1, shard, at(30.0))]);
    let ProducerAction::Add { stream_key, .. } = &actions[0] else { unreachable!("see above") };
    assert_eq!(*stream_key, format!("orders:{shard}"));
    assert_eq!(producer.handle(at(2.1), ProducerEvent::Added { ticket: 1 }), []);
}

/// lease-from-receipt: the answer came a second late, the lease did not.
#[test]
fn the_lease_is_counted_from_sending() {
    let mut producer = informed();
    assert_eq!(producer.routing(at(29.9)).map(|routing| routing.shard_count), Some(4));
    assert_eq!(producer.routing(at(30.0)), None);
    let actions = producer.handle(at(30.0), publish(1));
    assert_eq!(added(&actions), [], "nothing is published after the lease");
}

#[test]
fn a_refresh_is_asked_for_in_time_and_one_at_a_time() {
    let mut producer = informed();
    assert_eq!(producer.wakes_at(), at(15.0));
    assert_eq!(fetched(&producer.handle(at(14.9), ProducerEvent::Time)), None);
    let actions = producer.handle(at(15.0), ProducerEvent::Time);
    let Some(ProducerAction::Fetch { request, tag }) = actions.first() else {
        unreachable!("half of the lease is over")
    };
    assert_eq!(tag.as_deref(), Some("5-a"));
    assert_eq!(fetched(&producer.handle(at(15.5), ProducerEvent::Time)), None, "one in flight");
    assert_eq!(producer.handle(at(16.0), ProducerEvent::Unchanged { request: *request }), []);
    assert!(producer.routing(at(44.9)).is_some() && producer.routing(at(45.0)).is_none());
}

#[test]
fn an_answer_that_was_given_up_changes_nothing() {
    let mut producer = informed();
    let first = fetched(&producer.handle(at(15.0), ProducerEvent::Time)).expect("due");
    // Given up after two seconds; the next one half a second later.
    assert_eq!(fetched(&producer.handle(at(17.0), ProducerEvent::Time)), None);
    let second = fetched(&producer.handle(at(17.5), ProducerEvent::Time)).expect("tries again");
    assert_eq!(producer.handle(at(18.0), routing(first, 9, 9, "a")), []);
    assert_eq!(producer.routing(at(18.0)).map(|routing| routing.shard_count), Some(4));
    assert_eq!(producer.handle(at(18.1), routing(second, 6, 6, "b")), []);
    assert_eq!(producer.routing(at(18.1)).map(|routing| routing.shard_count), Some(6));
}

#[test]
fn on_failure_the_cache_is_kept_while_it_is_valid() {
    let mut producer = informed();
    let request = fetched(&producer.handle(at(15.0), ProducerEvent::Time)).expect("due");
    assert_eq!(producer.handle(at(15.1), ProducerEvent::Failed { request }), []);
    assert_eq!(added(&producer.handle(at(16.0), publish(1))).len(), 1);
    // Nobody answers for the rest of the lease.
    for second in 17_u32..30 {
        assert_eq!(failed(&producer.handle(at(second.into()), ProducerEvent::Time)), []);
    }
    let actions = producer.handle(at(30.0), publish(2));
    assert_eq!(added(&actions), []);
    let mut refused = failed(&actions);
    for tenth in 301_u32..340 {
        refused.extend(failed(&producer.handle(at(f64::from(tenth) / 10.0), ProducerEvent::Time)));
    }
    assert_eq!(refused, [(2, PublishError::RoutingUnavailable)]);
}

#[test]
fn who_knows_nothing_yet_waits_for_the_first_answer() {
    let mut producer = Producer::new(ProducerSettings::default());
    let actions = producer.handle(at(0.0), publish(1));
    assert_eq!(added(&actions), []);
    let request = fetched(&actions).expect("asks at once");
    let actions = producer.handle(at(0.5), routing(request, 4, 5, "a"));
    assert_eq!(added(&actions).len(), 1);
}

#[test]
fn a_lower_version_counts_only_with_another_token() {
    for (token, taken) in [("a", false), ("b", true)] {
        let mut producer = informed();
        let request = fetched(&producer.handle(at(15.0), ProducerEvent::Time)).expect("due");
        assert_eq!(producer.handle(at(16.0), routing(request, 2, 3, token)), []);
        let count = producer.routing(at(16.0)).map(|routing| routing.shard_count);
        assert_eq!(count, Some(if taken { 2 } else { 4 }), "{token}");
        // An old answer extends nothing.
        assert_eq!(producer.routing(at(31.0)).is_some(), taken, "{token}");
    }
}

#[test]
fn a_missing_stream_is_tried_once_more_with_fresh_routing() {
    let mut producer = informed();
    assert_eq!(added(&producer.handle(at(2.0), publish(1))).len(), 1);
    let actions = producer.handle(at(2.1), ProducerEvent::NoStream { ticket: 1 });
    let request = fetched(&actions).expect("the route is stale");
    assert_eq!(added(&actions), [], "not by the routing that has just failed");
    let actions = producer.handle(at(2.2), routing(request, 2, 6, "b"));
    let shard = rsc_protocol::hash::shard_of(b"customer-7", 2).expect("there are shards");
    assert_eq!(added(&actions), [(1, shard, at(32.1))]);
    let actions = producer.handle(at(2.3), ProducerEvent::NoStream { ticket: 1 });
    assert_eq!(failed(&actions), [(1, PublishError::StreamMissing)]);
}

/// A refresh that left before the stream was found missing may say what was known then.
#[test]
fn only_routing_asked_for_afterwards_is_fresh() {
    let mut producer = informed();
    assert_eq!(added(&producer.handle(at(14.9), publish(1))).len(), 1);
    let early = fetched(&producer.handle(at(15.0), ProducerEvent::Time)).expect("due");
    assert_eq!(fetched(&producer.handle(at(15.1), ProducerEvent::NoStream { ticket: 1 })), None);
    let actions = producer.handle(at(15.2), ProducerEvent::Unchanged { request: early });
    assert_eq!(added(&actions), []);
    let late = fetched(&actions).expect("asks again at once");
    assert_eq!(added(&producer.handle(at(15.3), routing(late, 2, 6, "b"))).len(), 1);
}

#[test]
fn what_comes_too_late_is_routed_anew() {
    let mut producer = informed();
    assert_eq!(added(&producer.handle(at(29.9), publish(1))), [(1, 2, at(30.0))]);
    let actions = producer.handle(at(30.1), ProducerEvent::TooLate { ticket: 1 });
    // The refresh of second 15 has been in flight all the while: it is given up, and with it the record.
    assert_eq!(added(&actions), []);
    let mut told = failed(&actions);
    let mut next = fetched(&actions);
    for tenth in 302_u32..330 {
        let actions = producer.handle(at(f64::from(tenth) / 10.0), ProducerEvent::Time);
        told.extend(failed(&actions));
        next = next.or(fetched(&actions));
    }
    assert!(next.is_some());
    assert_eq!(told, [(1, PublishError::RoutingUnavailable)]);
}

#[test]
fn a_stream_without_shards_fails_at_once() {
    let mut producer = informed();
    let request = fetched(&producer.handle(at(15.0), ProducerEvent::Time)).expect("due");
    assert_eq!(producer.handle(at(15.1), routing(request, 0, 6, "b")), []);
    assert_eq!(failed(&producer.handle(at(15.2), publish(1))), [(1, PublishError::NoShards)]);
}

#[test]
fn without_a_told_lease_the_assumed_one_counts() {
    let settings = ProducerSettings { assumed_ttl: at(10.0), ..ProducerSettings::default() };
    let mut producer = Producer::new(settings);
    let request = fetched(&producer.handle(at(0.0), ProducerEvent::Time)).expect("asks at once");
    let ProducerEvent::Routing { mut routing, .. } = routing(request, 4, 5, "") else {
        unreachable!("see above")
    };
    routing.routing_cache_ttl_ms = 0;
    assert_eq!(producer.handle(at(1.0), ProducerEvent::Routing { request, routing, tag: None }), []);
    assert!(producer.routing(at(9.9)).is_some() && producer.routing(at(10.0)).is_none());
}
