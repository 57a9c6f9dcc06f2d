//! What cannot be true together, or not at all (protocol 10 and 12).

use std::time::Duration;

use humantime::format_duration;
use rsc_protocol::keys::Keys;
use tracing_subscriber::EnvFilter;

use super::{Config, ConfigError, redis_checks};

/// Longest duration anywhere, the year of humantime (365.25 days): what is longer is a slip of the pen.
const LONGEST: Duration = Duration::from_secs(31_557_600);
/// Longest instance id, bytes: it is part of every mutex token.
const LONGEST_INSTANCE_ID: usize = 128;

/// Refuses what cannot be run with. `origin` tells where the value of a key came from.
pub(super) fn check(config: &Config, origin: &dyn Fn(&str) -> String) -> Result<(), ConfigError> {
    let check = Check { config, origin };
    check.server()?;
    check.store()?;
    redis_checks::check(&check)?;
    check.durations()?;
    check.timing()?;
    check.numbers()?;
    check.telemetry()
}

pub(super) struct Check<'a> {
    pub(super) config: &'a Config,
    pub(super) origin: &'a dyn Fn(&str) -> String,
}

pub(super) type Checked = Result<(), ConfigError>;

impl Check<'_> {
    pub(super) fn refuse(&self, key: &str, problem: impl std::fmt::Display) -> Checked {
        Err(ConfigError::key(key, (self.origin)(key), problem))
    }

    fn server(&self) -> Checked {
        let server = &self.config.server;
        if !server.listen.ip().to_canonical().is_loopback() {
            let address = server.listen;
            return self.refuse(
                "server.listen",
                if self.config.insecure {
                    format!(
                        "{address} is not a loopback address, and --insecure serves without authentication on \
                         loopback addresses only; write one such as 127.0.0.1:{}",
                        address.port()
                    )
                } else {
                    format!(
                        "{address} is not a loopback address, and without authentication, which is not part of \
                         this version yet, the daemon listens on loopback addresses only; write one such as \
                         127.0.0.1:{}",
                        address.port()
                    )
                },
            );
        }
        if let Some(id) = &server.instance_id {
            let key = "server.instance-id";
            if id.trim().is_empty() {
                return self.refuse(key, "is blank; give it a visible character or remove the key");
            }
            if id.len() > LONGEST_INSTANCE_ID {
                let bytes = id.len();
                return self
                    .refuse(key, format!("has {bytes} bytes; at most {LONGEST_INSTANCE_ID} are allowed"));
            }
            if id.contains(char::is_control) {
                return self.refuse(key, "contains a control character; remove it");
            }
        }
        self.within("server.workers", server.workers.map_or(1, u64::from), 1, 512)?;
        let (size, least, most) = (server.max_body, bytesize::KIB, 64 * bytesize::MIB);
        if !(least..=most).contains(&size.as_u64()) {
            let bytes = size.as_u64();
            return self.refuse(
                "server.max-body",
                format!("{bytes} bytes is out of range; 1KiB to 64MiB are allowed"),
            );
        }
        Ok(())
    }

    fn store(&self) -> Checked {
        match Keys::new(self.config.store.key_prefix.as_str()) {
            Ok(_) => Ok(()),
            Err(error) => {
                let problem = error.to_string();
                let problem = problem.strip_prefix("store.key-prefix ").unwrap_or(&problem);
                self.refuse("store.key-prefix", problem)
            }
        }
    }

    fn durations(&self) -> Checked {
        let Config { server, redis, coordination, producer, security, .. } = self.config;
        if server.shutdown_drain_delay != Duration::ZERO {
            self.duration("server.shutdown-drain-delay", server.shutdown_drain_delay)?;
        }
        self.duration("server.shutdown-timeout", server.shutdown_timeout)?;
        self.duration("redis.connect-timeout", redis.connect_timeout)?;
        self.duration("redis.command-timeout", redis.command_timeout)?;
        self.duration("coordination.heartbeat-interval", coordination.heartbeat_interval)?;
        self.duration("coordination.member-lease-ttl", coordination.member_lease_ttl)?;
        self.duration("coordination.rebalance-timeout", coordination.rebalance_timeout)?;
        self.duration("coordination.tick-interval", coordination.tick_interval)?;
        self.duration("coordination.stale-member-retention", coordination.stale_member_retention)?;
        self.duration("coordination.mutex-ttl", coordination.mutex_ttl)?;
        self.duration("coordination.mutex-acquire-timeout", coordination.mutex_acquire_timeout)?;
        self.duration("coordination.index-refresh-interval", coordination.index_refresh_interval)?;
        self.duration("producer.routing-cache-ttl", producer.routing_cache_ttl)?;
        self.duration("producer.publish-margin", producer.publish_margin)?;
        self.duration("security.token-ttl", security.token_ttl)
    }

    fn duration(&self, key: &str, value: Duration) -> Checked {
        let shown = format_duration(value);
        if value.is_zero() {
            return self.refuse(key, "0s is too short; at least 1ms is allowed");
        }
        if !value.subsec_nanos().is_multiple_of(1_000_000) {
            return self
                .refuse(key, format!("{shown} is finer than a millisecond; write whole milliseconds"));
        }
        if value > LONGEST {
            return self.refuse(key, format!("{shown} is longer than a year; at most 1year is allowed"));
        }
        Ok(())
    }

    /// How durations must relate (protocol 10, and the ways a turn can outlast what protects it).
    fn timing(&self) -> Checked {
        let Config { server, redis, coordination, .. } = self.config;
        let heartbeat = ("coordination.heartbeat-interval", coordination.heartbeat_interval);
        let lease = ("coordination.member-lease-ttl", coordination.member_lease_ttl);
        let mutex = ("coordination.mutex-ttl", coordination.mutex_ttl);
        let acquire = ("coordination.mutex-acquire-timeout", coordination.mutex_acquire_timeout);
        let tick = ("coordination.tick-interval", coordination.tick_interval);
        let retention = ("coordination.stale-member-retention", coordination.stale_member_retention);
        let rebalance = ("coordination.rebalance-timeout", coordination.rebalance_timeout);
        let command = ("redis.command-timeout", redis.command_timeout);
        let connect = ("redis.connect-timeout", redis.connect_timeout);
        let stop = ("server.shutdown-timeout", server.shutdown_timeout);
        let drain = ("server.shutdown-drain-delay", server.shutdown_drain_delay);

        self.at_least(lease, "two heartbeat intervals", heartbeat, heartbeat.1 * 2)?;
        self.at_least(rebalance, "the lease", lease, lease.1)?;
        self.at_least(retention, "two leases", lease, lease.1 * 2)?;
        self.at_most(mutex, "half a lease", lease, lease.1 / 2)?;
        self.at_most(acquire, "half a lease", lease, lease.1 / 2)?;
        self.at_most(tick, "half a lease", lease, lease.1 / 2)?;
        self.at_most(command, "a third of a lease", lease, lease.1 / 3)?;
        self.at_most(connect, "a third of a lease", lease, lease.1 / 3)?;
        self.below(command, "the mutex TTL", mutex)?;
        self.below(drain, "the shutdown timeout", stop)
    }

    fn at_least(
        &self,
        this: (&str, Duration),
        name: &str,
        other: (&str, Duration),
        bound: Duration,
    ) -> Checked {
        if this.1 >= bound {
            Ok(())
        } else {
            self.contradiction(this, "shorter", name, other, &format!("at least {}", format_duration(bound)))
        }
    }

    fn at_most(
        &self,
        this: (&str, Duration),
        name: &str,
        other: (&str, Duration),
        bound: Duration,
    ) -> Checked {
        if this.1 <= bound {
            Ok(())
        } else {
            self.contradiction(this, "longer", name, other, &format!("at most {}", format_duration(bound)))
        }
    }

    fn below(&self, this: (&str, Duration), name: &str, other: (&str, Duration)) -> Checked {
        if this.1 < other.1 {
            return Ok(());
        }
        self.contradiction(
            this,
            "not shorter",
            name,
            other,
            &format!("less than {}", format_duration(other.1)),
        )
    }

    fn contradiction(
        &self,
        this: (&str, Duration),
        relation: &str,
        name: &str,
        other: (&str, Duration),
        allowed: &str,
    ) -> Checked {
        let origin = (self.origin)(other.0);
        let (value, bound) = (format_duration(this.1), format_duration(other.1));
        self.refuse(
            this.0,
            format!(
                "{value} is {relation} than {name}, with {} = {bound} ({origin}); {allowed} is allowed",
                other.0
            ),
        )
    }

    fn numbers(&self) -> Checked {
        let Config { coordination, streams, .. } = self.config;
        self.within("coordination.max-members-per-group", coordination.max_members_per_group, 1, 100_000)?;
        self.within("coordination.mailbox-capacity", coordination.mailbox_capacity, 1, 1_000_000)?;
        self.within("streams.max-shard-count", streams.max_shard_count, 1, 100_000)?;
        let (count, most) = (streams.default_shard_count, streams.max_shard_count);
        if !(1..=most).contains(&count) {
            let origin = (self.origin)("streams.max-shard-count");
            return self.refuse(
                "streams.default-shard-count",
                format!(
                    "{count} is out of range; 1 to {most}, the streams.max-shard-count ({origin}), are allowed"
                ),
            );
        }
        Ok(())
    }

    pub(super) fn within(&self, key: &str, value: impl Into<u64>, least: u64, most: u64) -> Checked {
        let value = value.into();
        if (least..=most).contains(&value) {
            return Ok(());
        }
        self.refuse(key, format!("{value} is out of range; {least} to {most} are allowed"))
    }

    fn telemetry(&self) -> Checked {
        let filter = &self.config.telemetry.log_filter;
        let form = "write a level (error, warn, info, debug, trace, off) or target=level, comma-separated";
        if filter.trim().is_empty() {
            return self.refuse("telemetry.log-filter", format!("is blank; {form}"));
        }
        match EnvFilter::try_new(filter) {
            Ok(_) => Ok(()),
            Err(_) => self.refuse("telemetry.log-filter", format!("{filter:?} is not a log filter; {form}")),
        }
    }
}
