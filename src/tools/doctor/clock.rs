//! Clocks. Every deadline is computed from Redis `TIME`, so what matters is that a failover does not change it, and that
//! people and logs mean the same instant.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use redis::Value;
use rsc_store::StoreError;

use super::addresses;
use super::facts::{Known, Server, refusal, text};
use super::report::Report;
use crate::tools::Redis;

/// How far this machine's clock may be from Redis' before it is worth telling, in milliseconds.
const NOTICEABLE_MS: i64 = 1_000;

/// How far a server's clock is ahead of this machine's, in milliseconds: somewhere from the one to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Distance {
    from: i64,
    to: i64,
}

impl Distance {
    /// The server said `redis`; this machine's clock showed `before` when it was asked, and the answer came `took`
    /// later.
    fn of(before: i64, took: i64, redis: i64) -> Self {
        Distance { from: redis - before - took, to: redis - before }
    }

    /// The least distance that explains what was seen; 0 where the clocks may agree.
    fn least(self) -> i64 {
        if self.from > 0 {
            self.from
        } else if self.to < 0 {
            self.to
        } else {
            0
        }
    }

    /// The least distance of two servers from each other.
    fn between(self, other: Distance) -> i64 {
        let apart = Distance { from: self.from - other.to, to: self.to - other.from };
        apart.least().abs()
    }
}

/// Compares the clocks of servers with this machine's and with each other.
pub(super) async fn examine(
    redis: &Redis,
    servers: &[Server],
    report: &mut Report,
) -> Result<(), StoreError> {
    let mark = report.mark();
    let mut distances = Vec::new();
    for server in servers {
        match ask(redis, server).await? {
            Ok(distance) => distances.push((server.address(), distance)),
            Err(why) => report.unknown("clock", server.address(), format!("TIME: {why}")),
        }
    }
    let lease = i64::try_from(redis.config.coordination.member_lease_ttl.as_millis()).unwrap_or(i64::MAX);
    judge(&distances, lease, report);
    if report.is_clean_since(mark) {
        report.ok("clock", addresses(servers), "agrees with this machine's");
    }
    Ok(())
}

async fn ask(redis: &Redis, server: &Server) -> Result<Known<Distance>, StoreError> {
    // The first question may have to connect first.
    let mut best: Option<(i64, Distance)> = None;
    for _ in 0..3 {
        let (before, asked) = (now(), Instant::now());
        let answer = match redis.tools.on(&server.node, &redis::cmd("TIME")).await {
            Ok(answer) => answer,
            Err(error) => return Ok(Err(refusal(error)?)),
        };
        // Rounded up, and a whole millisecond that Redis' own time is cut to.
        let took = i64::try_from(asked.elapsed().as_millis()).unwrap_or(i64::MAX).saturating_add(2);
        let Some(time) = millis_of(answer) else { return Ok(Err("is answered with no time".to_owned())) };
        if best.is_none_or(|(best, _)| took < best) {
            best = Some((took, Distance::of(before, took, time)));
        }
    }
    Ok(best.map(|(_, distance)| distance).ok_or("was not asked for".to_owned()))
}

fn now() -> i64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_1970.as_millis()).unwrap_or(i64::MAX)
}

fn millis_of(answer: Value) -> Option<i64> {
    let [seconds, microseconds]: [Value; 2] = answer.into_sequence().ok()?.try_into().ok()?;
    let number = |value: &Value| text(value)?.parse::<i64>().ok();
    number(&seconds)?.checked_mul(1_000)?.checked_add(number(&microseconds)? / 1_000)
}

fn judge(distances: &[(&str, Distance)], lease_ms: i64, report: &mut Report) {
    let remedy = "let NTP set the clocks of all these machines";
    for (address, distance) in distances {
        let ahead = distance.least();
        if ahead.abs() >= NOTICEABLE_MS {
            let relation = if ahead > 0 { "ahead of" } else { "behind" };
            let by = ahead.abs();
            report.warning(
                "clock",
                *address,
                format!(
                    "is at least {by} ms {relation} this machine's clock: leases are not touched by that, logs and times that people write are"
                ),
                remedy,
            );
        }
    }
    for (at, (address, distance)) in distances.iter().enumerate() {
        for (other, of_other) in &distances[at + 1..] {
            let apart = distance.between(*of_other);
            // A jump of more than a tenth of a lease takes instances out of service (protocol 2).
            if apart > lease_ms / 10 {
                report.warning(
                    "clock.nodes",
                    format!("{address}, {other}"),
                    format!(
                        "their clocks are at least {apart} ms apart, more than a tenth of a lease: a failover from one to the other stops grants or expiry for a while"
                    ),
                    remedy,
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_round_trip_is_not_taken_for_a_distance() {
        // Asked at 1000, answered 50 later.
        assert_eq!(Distance::of(1_000, 50, 1_000).least(), 0);
        assert_eq!(Distance::of(1_000, 50, 1_050).least(), 0);
        assert_eq!(Distance::of(1_000, 50, 1_060).least(), 10);
        assert_eq!(Distance::of(1_000, 50, 990).least(), -10);
        let (one, other) = (Distance::of(0, 10, 100), Distance::of(5_000, 10, 5_000));
        assert_eq!((one.between(other), other.between(one)), (90, 90));
        assert_eq!(one.between(Distance::of(7, 10, 112)), 0);
    }

    #[test]
    fn servers_whose_clocks_differ_by_more_than_a_tenth_of_a_lease_are_named() {
        let judged = |apart: i64| {
            let mut report = Report::default();
            let distances = [("a:1", Distance::of(0, 2, 1)), ("b:2", Distance::of(0, 2, apart))];
            judge(&distances, 5_000, &mut report);
            report.findings.into_iter().map(|finding| (finding.id, finding.subject)).collect::<Vec<_>>()
        };
        assert_eq!(judged(502), []);
        assert_eq!(judged(504), [("clock.nodes".into(), "a:1, b:2".to_owned())]);
        let both = judged(60_000);
        assert_eq!(both[0], ("clock".into(), "b:2".to_owned()));
        assert_eq!(both.len(), 2);
    }
}
