//! Durations that can all be configured and do not go together.

use std::time::Duration;

use humantime::format_duration;

use super::addresses;
use super::facts::{Known, Server};
use super::report::Report;
use crate::config::Config;
use crate::tools::Redis;

/// Scripts of the coordinator may take that long, and half of it to be sure.
const SHORTEST_SCRIPT_LIMIT_MS: u64 = 200;

/// Settings of the servers.
pub(super) fn of_servers(servers: &[Server], report: &mut Report) {
    let mark = report.mark();
    for server in servers {
        if let Err(why) = judge_server(server, report) {
            report.unknown("server-timeouts", server.address(), format!("CONFIG GET: {why}"));
        }
    }
    if report.is_clean_since(mark) {
        report.ok(
            "server-timeouts",
            addresses(servers),
            "idle connections stay, scripts may take their time",
        );
    }
}

fn judge_server(server: &Server, report: &mut Report) -> Known<()> {
    const ID: &str = "server-timeouts";
    let at = server.address();
    let number = |name| server.setting(name).map(|value| value.and_then(|value| value.parse::<u64>().ok()));
    if let Some(seconds) = number("timeout")?.filter(|seconds| *seconds > 0) {
        report.warning(
            ID,
            at,
            format!(
                "timeout is {seconds}: connections idle for so many seconds are closed, and what is sent at that moment fails"
            ),
            "CONFIG SET timeout 0, and in its configuration file",
        );
    }
    if number("tcp-keepalive")? == Some(0) {
        report.warning(
            ID,
            at,
            "tcp-keepalive is 0: connections of hosts that vanished are never closed",
            "CONFIG SET tcp-keepalive 60, and in its configuration file",
        );
    }
    // Redis before 7 knows only the other name; 0 or less: no limit.
    let limit = match number("busy-reply-threshold")? {
        None => number("lua-time-limit")?,
        limit => limit,
    };
    if let Some(limit) = limit.filter(|limit| (1..SHORTEST_SCRIPT_LIMIT_MS).contains(limit)) {
        report.warning(
            ID,
            at,
            format!("busy-reply-threshold (lua-time-limit) is {limit} ms: while a script of the coordinator looks at a long shard, others are refused (BUSY)"),
            "CONFIG SET busy-reply-threshold 5000, the default (lua-time-limit before Redis 7)",
        );
    }
    Ok(())
}

/// What would start, and still does not go together. What must not be is refused at the start already.
pub(super) fn of_configuration(redis: &Redis, report: &mut Report) {
    let mark = report.mark();
    for (key, message, remedy) in contradictions(&redis.config) {
        report.warning("timeouts", key, message, remedy);
    }
    if report.is_clean_since(mark) {
        report.ok("timeouts", "configuration", "the durations go together");
    }
}

fn contradictions(config: &Config) -> Vec<(&'static str, String, String)> {
    let (redis, coordination, producer) = (&config.redis, &config.coordination, &config.producer);
    let mut found = Vec::new();
    let shown = |duration: Duration| format_duration(duration).to_string();
    let ninth = coordination.member_lease_ttl / 9;
    if redis.command_timeout > ninth {
        found.push((
            "redis.command-timeout",
            format!(
                "{} is longer than a ninth of coordination.member-lease-ttl ({}): while Redis hangs, answers take longer than a third of a lease",
                shown(redis.command_timeout),
                shown(coordination.member_lease_ttl)
            ),
            format!("at most {}ms, or a longer lease", ninth.as_millis()),
        ));
    }
    let commit = coordination.mutex_ttl + redis.command_timeout;
    if producer.publish_margin < commit {
        found.push((
            "producer.publish-margin",
            format!(
                "{} is shorter than coordination.mutex-ttl ({}) and redis.command-timeout ({}) together: a removed shard \
                 that is kept (retire KEEP) may get a record after nobody reads it any more",
                shown(producer.publish_margin),
                shown(coordination.mutex_ttl),
                shown(redis.command_timeout)
            ),
            format!("at least {} and what a publish takes, or scale in with retire DELETE", shown(commit)),
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_starts_and_does_not_go_together_is_named() {
        let keys = |toml: &str| {
            let config: Config = toml::from_str(toml).unwrap();
            contradictions(&config).into_iter().map(|(key, ..)| key).collect::<Vec<_>>()
        };
        assert_eq!(keys("[producer]\npublish-margin = '7s'"), [""; 0]);
        assert_eq!(keys("[producer]\npublish-margin = '6499ms'"), ["producer.publish-margin"]);
        let both = "[producer]\npublish-margin = '7s'\n[redis]\ncommand-timeout = '1667ms'";
        assert_eq!(keys(both), ["redis.command-timeout"]);
    }
}
