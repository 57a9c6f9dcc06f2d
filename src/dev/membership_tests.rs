use rsc_protocol::{AssignedShard, Assignment};

use super::*;

const LEASE_MS: u64 = 6_000;

struct Bench {
    member: Membership,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        let member = Membership::new("a", "instance", 100, Duration::from_secs(1));
        Bench { member, now: Instant::now() }
    }

    fn pass(&mut self, millis: u64) {
        self.now += Duration::from_millis(millis);
    }

    /// One heartbeat that is answered at once.
    fn beat(&mut self, status: Status, assigned: &[u32]) -> Vec<Event> {
        let request = self.member.request(self.now);
        let response = answer(&request, status, assigned);
        self.member.apply(&request, &response, self.now, self.now)
    }

    fn reads(&self) -> Vec<u32> {
        self.member.reading().iter().copied().collect()
    }
}

fn answer(request: &HeartbeatRequest, status: Status, assigned: &[u32]) -> HeartbeatResponse {
    HeartbeatResponse {
        response_to: request.request_id.clone(),
        status,
        member_id: request.member_id.clone(),
        member_epoch: if request.member_epoch == EPOCH_LEAVE { EPOCH_LEAVE } else { 3 },
        heartbeat_interval_ms: 1_000,
        rebalance_timeout_ms: 10_000,
        group_epoch: 3,
        assignment_epoch: 3,
        metadata_version: 9,
        assignment: Assignment {
            assigned_shards: assigned
                .iter()
                .map(|&shard_index| AssignedShard { shard_index, fencing_token: None })
                .collect(),
            ..Assignment::default()
        },
        assignment_lease_ms: LEASE_MS,
        metadata_token: "token".to_owned(),
        max_wait_ms: 0,
        reason: "because".to_owned(),
    }
}

fn set(shards: &[u32]) -> Shards {
    shards.iter().copied().collect()
}

#[test]
fn an_ok_starts_drains_and_confirms_what_was_given_back() {
    let mut bench = Bench::new();
    assert_eq!(bench.beat(Status::Ok, &[0, 1, 2]), [Event::Joined(3), Event::Started(set(&[0, 1, 2]))]);
    assert_eq!(bench.beat(Status::Ok, &[0]), [Event::AskedToDrain(set(&[1, 2]))]);
    assert_eq!(bench.reads(), [0]);
    let draining = bench.member.request(bench.now);
    assert!(draining.revoking_shards.iter().all(|report| report.in_flight > 0));
    bench.pass(1_200);
    assert_eq!(bench.beat(Status::Ok, &[0]), [Event::GaveBack(set(&[1, 2]))]);
    assert!(bench.member.draining().is_empty());
}

#[test]
fn a_shard_that_is_drained_is_read_again_only_when_an_ok_names_it() {
    let mut bench = Bench::new();
    bench.beat(Status::Ok, &[0, 1]);
    bench.beat(Status::Ok, &[0]);
    for status in [Status::Retry, Status::SyncMetadata, Status::RevokePending] {
        bench.beat(status, &[0, 1]);
        assert_eq!(bench.reads(), [0], "{status:?}");
    }
    assert_eq!(bench.beat(Status::Ok, &[0, 1]), [Event::Started(set(&[1]))]);
    assert!(bench.member.draining().is_empty());
}

#[test]
fn a_correction_starts_nothing_and_keeps_only_what_is_read() {
    for status in [Status::SyncMetadata, Status::RevokePending] {
        let mut bench = Bench::new();
        bench.beat(Status::Ok, &[0, 1]);
        assert_eq!(bench.beat(status, &[1, 2]), [Event::AskedToDrain(set(&[0]))]);
        assert_eq!(bench.reads(), [1]);
    }
}

#[test]
fn the_lease_counts_from_sending_and_a_retry_does_not_extend_it() {
    let mut bench = Bench::new();
    let request = bench.member.request(bench.now);
    let (response, sent) = (answer(&request, Status::Ok, &[0]), bench.now);
    bench.pass(2_000);
    bench.member.apply(&request, &response, sent, bench.now);
    bench.pass(3_900);
    bench.beat(Status::Retry, &[]);
    assert_eq!(bench.member.check_lease(bench.now), None);
    bench.pass(100);
    assert_eq!(bench.member.check_lease(bench.now), Some(Event::LeaseOver));
    assert!(bench.reads().is_empty());
    assert_eq!(bench.member.request(bench.now).member_epoch, EPOCH_JOIN);
}

#[test]
fn an_answer_that_comes_after_the_lease_or_to_another_request_counts_for_nothing() {
    let mut bench = Bench::new();
    bench.beat(Status::Ok, &[0]);
    let late = bench.member.request(bench.now);
    let (response, sent) = (answer(&late, Status::Ok, &[0, 1]), bench.now);
    let newer = bench.member.request(bench.now);
    assert_eq!(bench.member.apply(&newer, &response, sent, bench.now), []);
    bench.pass(LEASE_MS);
    assert_eq!(bench.member.apply(&late, &response, sent, bench.now), [Event::LeaseOver]);
    assert!(bench.reads().is_empty());
}

#[test]
fn fenced_or_unknown_stops_everything_and_joins_anew() {
    for status in [Status::FencedMemberEpoch, Status::UnknownMemberId] {
        let mut bench = Bench::new();
        bench.beat(Status::Ok, &[0, 1]);
        bench.beat(Status::Ok, &[0]);
        assert_eq!(bench.beat(status, &[]), [Event::Fenced("because".to_owned())]);
        let request = bench.member.request(bench.now);
        assert_eq!(request.member_epoch, EPOCH_JOIN);
        assert!(request.owned_shards.is_empty() && request.revoking_shards.is_empty());
        assert!(!bench.member.is_over());
    }
}

#[test]
fn leaving_drains_first_and_ends_when_everything_is_given_back() {
    let mut bench = Bench::new();
    bench.beat(Status::Ok, &[0, 1]);
    bench.member.leave(bench.now);
    assert!(bench.reads().is_empty());
    assert_eq!(bench.beat(Status::Ok, &[]), []);
    assert!(!bench.member.is_over());
    bench.pass(1_200);
    assert_eq!(bench.beat(Status::Ok, &[]), [Event::GaveBack(set(&[0, 1])), Event::Left]);
    assert!(bench.member.is_over());
}

#[test]
fn who_was_never_accepted_leaves_without_a_word() {
    let mut bench = Bench::new();
    bench.member.leave(bench.now);
    assert!(bench.member.is_over());
}

#[test]
fn a_refusal_for_good_ends_the_consumer() {
    let mut bench = Bench::new();
    bench.beat(Status::Ok, &[0]);
    assert_eq!(bench.beat(Status::InvalidRequest, &[]), [Event::Refused("because".to_owned())]);
    assert!(bench.member.is_over());
}

#[test]
fn every_heartbeat_passes_the_protocols_own_check() {
    let mut bench = Bench::new();
    bench.beat(Status::Ok, &[0, 1, 2]);
    bench.beat(Status::Ok, &[0]);
    let first = bench.member.request(bench.now);
    let second = bench.member.request(bench.now);
    assert_eq!(first.check(), Ok(()));
    assert!(second.sequence > first.sequence);
    assert_ne!(second.request_id, first.request_id);
}
