use super::*;

const LEASE: Duration = Duration::from_secs(15);

struct Bench {
    start: Instant,
    watch: ServiceWatch,
}

/// A watch that has been in service for long.
fn in_service() -> Bench {
    let start = Instant::now();
    let mut bench = Bench { start, watch: ServiceWatch::new(LEASE, start) };
    bench.start = start + 10 * LEASE;
    assert!(bench.watch.may_expire(bench.start));
    bench
}

impl Bench {
    fn at(&self, ms: u64) -> Instant {
        self.start + Duration::from_millis(ms)
    }

    /// Out of service from `ms` on for exactly one lease.
    fn assert_out_for_a_lease_from(&self, ms: u64) {
        let back = self.at(ms) + LEASE;
        assert!(!self.watch.may_expire(self.at(ms)));
        assert!(!self.watch.may_expire(back - Duration::from_millis(1)));
        assert!(self.watch.may_expire(back));
        assert_eq!(self.watch.in_service_from(), back);
    }
}

fn stamp(revision: u64, live_revision: u64, write_id: &str) -> Stamp {
    Stamp { revision, live_revision, write_id: write_id.to_owned() }
}

#[test]
fn just_started_is_out_of_service_for_one_lease() {
    let start = Instant::now();
    let watch = ServiceWatch::new(LEASE, start);
    let bench = Bench { start, watch };
    bench.assert_out_for_a_lease_from(0);
    assert!(bench.watch.may_grant(start), "granting needs no waiting after a start");
}

#[test]
fn a_stall_counts_once_from_its_end() {
    let mut bench = in_service();
    assert_eq!(bench.watch.stalled(None), None);
    let ended = bench.at(0);
    assert_eq!(bench.watch.stalled(Some(ended)), Some(OutOfService::Stalled));
    assert_eq!(bench.watch.stalled(Some(ended)), None, "the same stall again");
    bench.assert_out_for_a_lease_from(0);
    let later = bench.at(4_000);
    assert_eq!(bench.watch.stalled(Some(later)), Some(OutOfService::Stalled));
    bench.assert_out_for_a_lease_from(4_000);
}

#[test]
fn an_old_stall_does_not_shorten_what_is_left() {
    let mut bench = in_service();
    bench.watch.turn_began(bench.at(0));
    bench.watch.entered(bench.at(9_000));
    bench.watch.stalled(Some(bench.at(1_000)));
    bench.assert_out_for_a_lease_from(9_000);
}

#[test]
fn an_idle_group_is_no_stall() {
    let mut bench = in_service();
    bench.watch.turn_began(bench.at(0));
    assert_eq!(bench.watch.entered(bench.at(5)), None);
    bench.watch.turn_finished();
    bench.watch.turn_began(bench.at(3_600_000));
    assert_eq!(bench.watch.entered(bench.at(3_600_005)), None);
    assert!(bench.watch.may_expire(bench.at(3_600_005)));
}

#[test]
fn half_a_lease_without_a_finished_turn_is_out_of_service() {
    let mut bench = in_service();
    bench.watch.turn_began(bench.at(0));
    assert_eq!(bench.watch.entered(bench.at(7_499)), None, "less than half a lease");
    bench.watch.turn_finished();

    // Several turns that fail are one attempt to finish one.
    for failed in [10_000, 12_000, 15_000] {
        bench.watch.turn_began(bench.at(failed));
    }
    bench.watch.turn_began(bench.at(17_400));
    assert_eq!(bench.watch.entered(bench.at(17_500)), Some(OutOfService::NoTurn));
    bench.assert_out_for_a_lease_from(17_500);
    // The same turn goes on: its start is not counted again.
    assert_eq!(bench.watch.entered(bench.at(17_600)), None);
    bench.watch.turn_finished();
    bench.watch.turn_began(bench.at(40_000));
    assert_eq!(bench.watch.entered(bench.at(40_001)), None);
    assert!(bench.watch.may_expire(bench.at(40_001)));
}

#[test]
fn a_jump_of_redis_time_stops_expiry_and_grants() {
    let mut bench = in_service();
    let redis = |ms: i64| Timestamp::from_millis(1_700_000_000_000 + ms);
    assert_eq!(bench.watch.redis_time(bench.at(0), bench.at(1), redis(0)), None);
    assert_eq!(bench.watch.redis_time(bench.at(1_000), bench.at(1_001), redis(1_000)), None);
    assert_eq!(
        bench.watch.redis_time(bench.at(2_000), bench.at(2_001), redis(3_600)),
        Some(OutOfService::TimeJumped)
    );
    bench.assert_out_for_a_lease_from(2_001);
    assert!(!bench.watch.may_grant(bench.at(2_001)));
    assert!(!bench.watch.may_grant(bench.at(2_000) + LEASE));
    assert!(bench.watch.may_grant(bench.at(2_001) + LEASE));
}

#[test]
fn everything_but_a_time_jump_leaves_grants_alone() {
    let mut bench = in_service();
    bench.watch.stalled(Some(bench.at(0)));
    bench.watch.turn_began(bench.at(0));
    bench.watch.entered(bench.at(8_000));
    bench.watch.key_missing();
    bench.watch.found(bench.at(8_000), &stamp(1, 1, "a"));
    assert!(!bench.watch.may_expire(bench.at(8_000)));
    assert!(bench.watch.may_grant(bench.at(8_000)));
}

#[test]
fn what_is_older_than_the_own_last_commit_is_a_loss() {
    for (found, older) in [
        (stamp(4, 99, "x"), true),
        (stamp(5, 8, "x"), true),
        (stamp(5, 9, "x"), true),
        (stamp(5, 9, "own"), false),
        (stamp(5, 10, "neighbour"), false),
        (stamp(6, 9, "x"), false),
        (stamp(6, 3, "x"), false),
    ] {
        let mut bench = in_service();
        let now = bench.at(0);
        bench.watch.committed(now, &stamp(5, 9, "own"));
        let expected = older.then_some(OutOfService::OlderRecord);
        assert_eq!(bench.watch.found(now, &found), expected, "{found:?}");
        assert_eq!(bench.watch.may_expire(now), !older, "{found:?}");
        assert_eq!(bench.watch.found(now, &found), None, "counted once: {found:?}");
    }
}

#[test]
fn without_anything_seen_no_record_is_old() {
    let mut bench = in_service();
    assert_eq!(bench.watch.found(bench.at(0), &stamp(1, 0, "")), None);
}

#[test]
fn what_another_has_committed_and_is_gone_again_is_a_loss_too() {
    for sighted in [false, true] {
        let mut bench = in_service();
        let now = bench.at(0);
        bench.watch.committed(now, &stamp(5, 9, "own"));
        // By a turn of this actor, or by the supervisor.
        match sighted {
            true => bench.watch.sighted(now, &stamp(5, 12, "other")),
            false => assert_eq!(bench.watch.found(now, &stamp(5, 12, "other")), None),
        }
        assert!(bench.watch.may_expire(now));
        assert_eq!(bench.watch.found(now, &stamp(5, 9, "own")), Some(OutOfService::OlderRecord));
        assert!(!bench.watch.may_expire(now));
    }
}

#[test]
fn an_old_sighting_says_nothing() {
    let mut bench = in_service();
    let now = bench.at(0);
    bench.watch.committed(now, &stamp(5, 12, "own"));
    bench.watch.sighted(now, &stamp(5, 9, "before"));
    assert_eq!(bench.watch.found(now, &stamp(5, 12, "own")), None);
    assert!(bench.watch.may_expire(now));
}

/// The other's last renewals may be lost, and nothing of that can be seen here.
#[test]
fn who_only_watches_another_serve_judges_nobody_for_a_lease_and_a_look() {
    let mut bench = in_service();
    let look = look_interval(LEASE);
    bench.watch.committed(bench.at(0), &stamp(5, 9, "own"));
    let later = bench.at(0) + LEASE + Duration::from_millis(1);
    bench.watch.sighted(later, &stamp(5, 10, "other"));
    assert!(!bench.watch.may_expire(later + LEASE + look - Duration::from_millis(1)));
    assert!(bench.watch.may_expire(later + LEASE + look));
    // Unchanged since: the wait does not begin anew.
    let later = later + LEASE;
    assert_eq!(bench.watch.found(later, &stamp(5, 10, "other")), None);
    assert!(bench.watch.may_expire(later + look));
}

#[test]
fn who_serves_too_or_alone_judges() {
    let mut bench = in_service();
    let mut at = bench.at(0);
    bench.watch.committed(at, &stamp(5, 9, "own"));
    at += LEASE;
    assert_eq!(bench.watch.found(at, &stamp(5, 10, "other")), None);
    assert!(bench.watch.may_expire(at), "the last own commit is a lease old, and no older");
    at += LEASE;
    bench.watch.committed(at, &stamp(5, 11, "own"));
    at += LEASE * 10;
    assert_eq!(bench.watch.found(at, &stamp(5, 11, "own")), None);
    assert!(bench.watch.may_expire(at), "an idle group is no stall");
}

#[test]
fn a_key_that_comes_back_is_out_of_service_from_then() {
    let mut bench = in_service();
    bench.watch.key_missing();
    assert!(bench.watch.may_expire(bench.at(0)), "nothing to expire while it is gone");
    assert_eq!(bench.watch.found(bench.at(5_000), &stamp(3, 3, "a")), Some(OutOfService::KeyCameBack));
    bench.assert_out_for_a_lease_from(5_000);
    assert_eq!(bench.watch.found(bench.at(5_001), &stamp(3, 3, "a")), None);
}

#[test]
fn what_is_created_after_the_group_was_gone_is_compared_with_nothing() {
    let mut bench = in_service();
    bench.watch.committed(bench.at(0), &stamp(9, 9, "own"));
    bench.watch.key_missing();
    bench.watch.group_gone();
    let now = bench.at(0);
    assert_eq!(bench.watch.found(now, &stamp(1, 0, "new")), None);
    assert!(bench.watch.may_expire(now));
}
