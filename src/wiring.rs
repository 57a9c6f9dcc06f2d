//! From configuration to the parts that do the work.

use std::num::NonZero;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

use anyhow::{Context, bail};
use redis::ConnectionAddr;
use rsc_actors::CoordinatorSettings;
use rsc_protocol::keys::Keys;
use rsc_store::{GroupStore, MemoryStore, RedisSettings, RedisStore};

use crate::config::{Config, StoreType};

/// The configured store. Nothing is connected yet, and Redis may be away.
///
/// # Errors
/// When the settings cannot work with any server; a checked configuration has none such.
pub(crate) fn store(config: &Config, instance_id: &str) -> anyhow::Result<Arc<dyn GroupStore>> {
    let keys = Keys::new(config.store.key_prefix.as_str()).context("store.key-prefix")?;
    match config.store.store_type {
        StoreType::Memory => Ok(Arc::new(MemoryStore::new(keys, config.coordination.mutex_ttl))),
        StoreType::Redis => Ok(Arc::new(RedisStore::new(&redis_settings(config, keys, instance_id)?)?)),
    }
}

/// How the configured Redis is reached.
///
/// # Errors
/// When the configuration names no server that can be; a checked one has none such.
pub(crate) fn redis_settings(
    config: &Config,
    keys: Keys,
    instance_id: &str,
) -> anyhow::Result<RedisSettings> {
    let servers = config.redis.connection_infos();
    let Some(server) = servers.first() else { bail!("redis.urls names no server") };
    let ConnectionAddr::Tcp(host, port) = server.addr() else { bail!("redis.urls names no TCP address") };
    let login = server.redis_settings();
    // An IPv6 address is written in brackets inside a URL.
    let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.clone() };
    Ok(RedisSettings {
        username: login.username().map(str::to_owned),
        password: login.password().map(str::to_owned),
        database: Some(login.db()),
        keys,
        instance_id: instance_id.to_owned(),
        mutex_ttl: config.coordination.mutex_ttl,
        command_timeout: config.redis.command_timeout,
        connect_timeout: config.redis.connect_timeout,
        ..RedisSettings::new(format!("redis://{host}:{port}"))
    })
}

/// What the coordinator works with.
pub(crate) fn coordinator_settings(config: &Config, instance_id: &str) -> CoordinatorSettings {
    let coordination = &config.coordination;
    CoordinatorSettings {
        instance_id: instance_id.to_owned(),
        timing: rsc_core::Settings {
            heartbeat_interval_ms: millis(coordination.heartbeat_interval),
            member_lease_ttl_ms: millis(coordination.member_lease_ttl),
            rebalance_timeout_ms: millis(coordination.rebalance_timeout),
            stale_member_retention_ms: millis(coordination.stale_member_retention),
            max_members_per_group: count(coordination.max_members_per_group),
            routing_cache_ttl_ms: millis(config.producer.routing_cache_ttl),
            publish_margin_ms: millis(config.producer.publish_margin),
        },
        tick_interval: coordination.tick_interval,
        mutex_ttl: coordination.mutex_ttl,
        mutex_acquire_timeout: coordination.mutex_acquire_timeout,
        index_refresh_interval: coordination.index_refresh_interval,
        mailbox_capacity: count(coordination.mailbox_capacity),
        workers: cores(),
        provisioning_enabled: config.streams.provisioning_enabled,
        default_shard_count: config.streams.default_shard_count,
        max_shard_count: config.streams.max_shard_count,
    }
}

/// Threads of the HTTP server: as configured, else one per core.
pub(crate) fn http_workers(config: &Config) -> usize {
    config.server.workers.map_or_else(cores, usize::from)
}

fn cores() -> usize {
    available_parallelism().map_or(1, NonZero::get)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn count(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(toml: &str) -> Config {
        toml::from_str(toml).unwrap()
    }

    #[test]
    fn the_redis_url_and_its_own_keys_reach_the_store() {
        let read = |toml: &str| redis_settings(&config(toml), Keys::default(), "i").unwrap();
        let settings = read("[redis]\nurls = ['redis://anna:pw@[::1]:7000/3']\ncommand-timeout = '1s'");
        assert_eq!(settings.url, "redis://[::1]:7000");
        assert_eq!(settings.username.as_deref(), Some("anna"));
        assert_eq!(settings.password.as_deref(), Some("pw"));
        assert_eq!(settings.database, Some(3));
        assert_eq!(settings.command_timeout, Duration::from_secs(1));
        let settings = read("[redis]\nurls = ['redis://redis.local']\npassword = 'p w'\ndatabase = 9");
        assert_eq!(settings.url, "redis://redis.local:6379");
        assert_eq!((settings.username, settings.password.as_deref()), (None, Some("p w")));
        assert_eq!(settings.database, Some(9));
        assert!(RedisStore::new(&read("[redis]\nurls = ['redis://[::1]']")).is_ok());
    }

    #[test]
    fn protocol_10_is_the_default_timing() {
        let settings = coordinator_settings(&Config::default(), "i");
        assert_eq!(settings.timing, rsc_core::Settings::default());
        assert_eq!((settings.default_shard_count, settings.max_shard_count), (12, 10_000));
    }

    #[test]
    fn the_kind_of_store_is_the_configured_one() {
        assert_eq!(store(&Config::default(), "i").unwrap().kind(), "redis");
        assert_eq!(store(&config("[store]\ntype = 'memory'"), "i").unwrap().kind(), "memory");
    }
}
