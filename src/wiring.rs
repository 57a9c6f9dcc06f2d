//! From configuration to the parts that do the work.

use std::num::NonZero;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

use anyhow::Context;
use rsc_actors::CoordinatorSettings;
use rsc_protocol::keys::Keys;
use rsc_store::{GroupStore, MemoryStore, RedisSettings, RedisStore, TlsSettings};

use crate::config::{Config, RedisMode, StoreType};

/// The configured store. Nothing is connected yet, and Redis may be away.
///
/// # Errors
/// When the settings cannot work with any server; a checked configuration has none such.
pub(crate) fn store(config: &Config, instance_id: &str) -> anyhow::Result<Arc<dyn GroupStore>> {
    let keys = Keys::new(config.store.key_prefix.as_str()).context("store.key-prefix")?;
    match config.store.store_type {
        StoreType::Memory => Ok(Arc::new(MemoryStore::new(keys, config.coordination.mutex_ttl))),
        StoreType::Redis => Ok(Arc::new(RedisStore::new(&redis_settings(config, keys, instance_id))?)),
    }
}

/// Says what keeps the configured store from being made, files that the configuration names included.
///
/// # Errors
/// When the settings cannot work with any server.
pub(crate) fn check(config: &Config) -> anyhow::Result<()> {
    let keys = Keys::new(config.store.key_prefix.as_str()).context("store.key-prefix")?;
    match config.store.store_type {
        StoreType::Memory => Ok(()),
        StoreType::Redis => Ok(redis_settings(config, keys, "check").check()?),
    }
}

/// How the store reaches Redis.
pub(crate) fn redis_settings(config: &Config, keys: Keys, instance_id: &str) -> RedisSettings {
    let redis = &config.redis;
    RedisSettings {
        mode: match redis.mode {
            RedisMode::Standalone => rsc_store::RedisMode::Standalone,
            RedisMode::Cluster => rsc_store::RedisMode::Cluster,
            RedisMode::Sentinel => {
                rsc_store::RedisMode::Sentinel { master: redis.sentinel_master.clone().unwrap_or_default() }
            }
        },
        urls: redis.urls.iter().map(|url| url.expose().to_owned()).collect(),
        username: redis.username.clone(),
        password: redis.password.as_ref().map(|password| password.expose().to_owned()),
        database: redis.database.map(i64::from),
        tls: TlsSettings {
            ca_file: redis.tls.ca_file.clone(),
            certificate_file: redis.tls.certificate_file.clone(),
            key_file: redis.tls.key_file.clone(),
            server_name: redis.tls.server_name.clone(),
        },
        node_mappings: redis.node_mappings.clone(),
        keys,
        instance_id: instance_id.to_owned(),
        mutex_ttl: config.coordination.mutex_ttl,
        command_timeout: redis.command_timeout,
        connect_timeout: redis.connect_timeout,
        wait_replicas: redis.wait_replicas,
        ..RedisSettings::new("")
    }
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
        waits_for_replicas: config.store.store_type == StoreType::Redis && config.redis.wait_replicas > 0,
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
        let read = |toml: &str| redis_settings(&config(toml), Keys::default(), "i");
        let settings = read("[redis]\nurls = ['redis://anna:pw@[::1]:7000/3']\ncommand-timeout = '1s'");
        assert_eq!(settings.urls, ["redis://anna:pw@[::1]:7000/3"]);
        assert_eq!(settings.command_timeout, Duration::from_secs(1));
        let settings = read("[redis]\nurls = ['redis://redis.local']\npassword = 'p w'\ndatabase = 9");
        assert_eq!((settings.username, settings.password.as_deref()), (None, Some("p w")));
        assert_eq!(settings.database, Some(9));
        let settings =
            read("[redis]\nmode = 'sentinel'\nurls = ['redis://a', 'redis://b']\nsentinel-master = 'm'");
        assert_eq!(settings.mode, rsc_store::RedisMode::Sentinel { master: "m".into() });
        assert_eq!(settings.urls.len(), 2);
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
