//! The sections of the configuration with their defaults (protocol 12, defaults of protocol 10).
//!
//! Every doc comment says unit, range and default. Ranges are enforced in `checks`, keys whose subject is
//! not built yet in `unbuilt`. All durations have millisecond resolution and end at one year.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use rsc_protocol::keys::DEFAULT_KEY_PREFIX;
use serde::{Deserialize, Serialize};

use super::values::{RedisUrl, Secret, Unbuilt, byte_size, listen_address};

/// `[server]`: where and how the daemon listens and ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct ServerConfig {
    /// Address and port of the HTTP surface; port 0 takes any free one. Loopback addresses only in this
    /// version. Default `127.0.0.1:8080`.
    #[serde(deserialize_with = "listen_address")]
    pub(crate) listen: SocketAddr,
    /// Names this process in mutex tokens, logs and `/actor`; must differ between running instances. 1 to
    /// 128 bytes, no control characters. Default: host name and a random part, anew at each start.
    pub(crate) instance_id: Option<String>,
    /// Threads of the HTTP server, 1 to 512. Default: one per core.
    pub(crate) workers: Option<u16>,
    /// Largest accepted request body, 1KiB to 64MiB. Default `1MiB`.
    #[serde(with = "byte_size")]
    pub(crate) max_body: ByteSize,
    /// How long reads go on after a stop signal (protocol 9), 0s up to `shutdown-timeout`. Default `0s`.
    #[serde(with = "humantime_serde")]
    pub(crate) shutdown_drain_delay: Duration,
    /// When the process ends at the latest, counted from the stop signal, drain delay included. Default
    /// `25s`, below the 30 s that Kubernetes waits.
    #[serde(with = "humantime_serde")]
    pub(crate) shutdown_timeout: Duration,
    /// Not built yet.
    pub(crate) tls: Option<Unbuilt>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        ServerConfig {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            instance_id: None,
            workers: None,
            max_body: ByteSize::mib(1),
            shutdown_drain_delay: Duration::ZERO,
            shutdown_timeout: Duration::from_secs(25),
            tls: None,
        }
    }
}

impl ServerConfig {
    /// The configured instance id, or one made up from host name and chance. Call it once per start: each
    /// call makes up another one.
    pub(crate) fn instance_id_or_random(&self) -> String {
        self.instance_id.clone().unwrap_or_else(|| {
            let host: String = gethostname::gethostname()
                .to_string_lossy()
                .chars()
                .filter(|character| !character.is_control())
                .take(64)
                .collect();
            format!("{host}-{:08x}", rand::random::<u32>())
        })
    }
}

/// `[store]`: where group metadata is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct StoreConfig {
    /// `redis` or `memory`. Default `redis`.
    #[serde(rename = "type")]
    pub(crate) store_type: StoreType,
    /// Prefix of the coordinator's own keys (protocol 2): not blank, no braces, no control characters, at
    /// most 512 bytes. Default `redis-stream:coord`.
    pub(crate) key_prefix: String,
}

impl Default for StoreConfig {
    fn default() -> Self {
        StoreConfig { store_type: StoreType::Redis, key_prefix: DEFAULT_KEY_PREFIX.to_owned() }
    }
}

/// Where group metadata is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum StoreType {
    /// In Redis, shared by all instances.
    Redis,
    /// In this process, for a first look and for tests: nothing is provisioned, all is lost at the end.
    Memory,
}

/// `[redis]`: how Redis is reached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct RedisConfig {
    /// Kind of deployment. Default `standalone`.
    pub(crate) mode: RedisMode,
    /// `redis://[user:password@]host[:port][/database]`, or `rediss://` for TLS. Exactly one in mode `standalone`, some
    /// nodes in mode `cluster`, the sentinels in mode `sentinel` (user and password there are for the sentinels).
    /// Default `redis://127.0.0.1:6379`.
    pub(crate) urls: Vec<RedisUrl>,
    /// Name under which the sentinels know the master; in mode `sentinel` only.
    pub(crate) sentinel_master: Option<String>,
    /// ACL user. Default: the one in the URL, else Redis's `default` user.
    pub(crate) username: Option<String>,
    /// Password. Default: the one in the URL, else none.
    pub(crate) password: Option<Secret>,
    /// Database number. Default: the one in the URL, else 0.
    pub(crate) database: Option<u32>,
    /// How servers are known, for `rediss://`.
    pub(crate) tls: RedisTlsConfig,
    /// How long opening a connection may take; at most a third of `coordination.member-lease-ttl`. Default
    /// `2s`.
    #[serde(with = "humantime_serde")]
    pub(crate) connect_timeout: Duration,
    /// How long the answer to one command may take; shorter than `coordination.mutex-ttl`, at most a third
    /// of `coordination.member-lease-ttl`; a ninth of it keeps every answer within a third of a lease while
    /// Redis hangs. Default `1500ms`.
    #[serde(with = "humantime_serde")]
    pub(crate) command_timeout: Duration,
    /// Addresses (`host:port`) that cluster nodes and sentinels announce → addresses that can be reached from here.
    pub(crate) node_mappings: BTreeMap<String, String>,
    /// Replicas that must have a commit that changes ownership before what it hands out is used, 0 to 10. Default 0.
    pub(crate) wait_replicas: u32,
}

impl Default for RedisConfig {
    fn default() -> Self {
        RedisConfig {
            mode: RedisMode::Standalone,
            urls: vec![RedisUrl::local()],
            sentinel_master: None,
            username: None,
            password: None,
            database: None,
            tls: RedisTlsConfig::default(),
            connect_timeout: Duration::from_secs(2),
            command_timeout: Duration::from_millis(1_500),
            node_mappings: BTreeMap::new(),
            wait_replicas: 0,
        }
    }
}

impl RedisConfig {
    /// Who we are to the servers that hold the data; `None`: Redis's `default` user.
    pub(crate) fn user(&self) -> Option<&str> {
        let of_urls = || self.urls.first().and_then(RedisUrl::username);
        // What a sentinel's URL says is for the sentinel.
        let of_urls = if self.mode == RedisMode::Sentinel { None } else { of_urls() };
        self.username.as_deref().or(of_urls)
    }
}

/// `[redis.tls]`: how servers are known, and what is shown to them; PEM files.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct RedisTlsConfig {
    /// Certificates of the authorities that are trusted. Default: those of the operating system.
    pub(crate) ca_file: Option<PathBuf>,
    /// Our own certificate, for servers that ask for one. Needs `key-file`.
    pub(crate) certificate_file: Option<PathBuf>,
    /// Key of that certificate.
    pub(crate) key_file: Option<PathBuf>,
    /// Name that the servers' certificates must have. Default: the host each is reached under.
    pub(crate) server_name: Option<String>,
}

/// Kind of Redis deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RedisMode {
    /// One server, possibly with replicas behind it.
    Standalone,
    /// Redis Cluster.
    Cluster,
    /// A master found through sentinels.
    Sentinel,
}

/// `[coordination]`: timing and limits of groups and their members (protocol 10).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct CoordinationConfig {
    /// How often members are told to report; at most half a lease. Default `3s`.
    #[serde(with = "humantime_serde")]
    pub(crate) heartbeat_interval: Duration,
    /// How long a member lives without a heartbeat; at least two heartbeat intervals. Default `15s`.
    #[serde(with = "humantime_serde")]
    pub(crate) member_lease_ttl: Duration,
    /// How long a member may take to give shards back (protocol 4.2); at least a lease. Default `60s`.
    #[serde(with = "humantime_serde")]
    pub(crate) rebalance_timeout: Duration,
    /// Shortest time between two ticks of a group. Default `1s`.
    #[serde(with = "humantime_serde")]
    pub(crate) tick_interval: Duration,
    /// How long expired, fenced and departed members stay visible; at least two leases. Default `10m`.
    #[serde(with = "humantime_serde")]
    pub(crate) stale_member_retention: Duration,
    /// How long a critical section of a killed instance blocks the group; at most half a lease. Default `5s`.
    #[serde(with = "humantime_serde")]
    pub(crate) mutex_ttl: Duration,
    /// How long to wait for a critical section of another instance; at most half a lease. Default `2s`.
    #[serde(with = "humantime_serde")]
    pub(crate) mutex_acquire_timeout: Duration,
    /// How often the index is read for groups that other instances made or deleted. Default `10s`.
    #[serde(with = "humantime_serde")]
    pub(crate) index_refresh_interval: Duration,
    /// Members of one group, 1 to 100000. Default 10000.
    pub(crate) max_members_per_group: u32,
    /// Requests that may wait for one group, 1 to 1000000; more are answered `COORDINATOR_OVERLOADED`.
    /// Default 10000.
    pub(crate) mailbox_capacity: u32,
}

impl Default for CoordinationConfig {
    fn default() -> Self {
        CoordinationConfig {
            heartbeat_interval: Duration::from_secs(3),
            member_lease_ttl: Duration::from_secs(15),
            rebalance_timeout: Duration::from_secs(60),
            tick_interval: Duration::from_secs(1),
            stale_member_retention: Duration::from_secs(600),
            mutex_ttl: Duration::from_secs(5),
            mutex_acquire_timeout: Duration::from_secs(2),
            index_refresh_interval: Duration::from_secs(10),
            max_members_per_group: 10_000,
            mailbox_capacity: 10_000,
        }
    }
}

/// `[streams]`: streams and their shards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct StreamsConfig {
    /// Whether creating a group also creates its consumer group on every shard key. Default true.
    pub(crate) provisioning_enabled: bool,
    /// Shards of a stream whose creator names no number, 1 to `max-shard-count`. Default 12.
    pub(crate) default_shard_count: u32,
    /// Largest number of shards a request may ask for, 1 to 100000. Default 10000.
    pub(crate) max_shard_count: u32,
}

impl Default for StreamsConfig {
    fn default() -> Self {
        StreamsConfig { provisioning_enabled: true, default_shard_count: 12, max_shard_count: 10_000 }
    }
}

/// `[producer]`: what producers are told (protocol 7).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct ProducerConfig {
    /// How long a producer may go on with a routing answer. Default `30s`.
    #[serde(with = "humantime_serde")]
    pub(crate) routing_cache_ttl: Duration,
    /// Extra wait for publishes in flight when shards are removed (protocol 6). Not built yet. Default `5s`.
    #[serde(with = "humantime_serde")]
    pub(crate) publish_margin: Duration,
}

impl Default for ProducerConfig {
    fn default() -> Self {
        ProducerConfig { routing_cache_ttl: Duration::from_secs(30), publish_margin: Duration::from_secs(5) }
    }
}

/// `[security]`: authentication and limits on callers (protocol 8). Not built yet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct SecurityConfig {
    /// Who may call. Default: nobody is named.
    pub(crate) users: Vec<UserConfig>,
    /// Signs bearer tokens so that they survive a restart. Default: made up at start.
    pub(crate) token_secret: Option<Secret>,
    /// How long a bearer token is good. Default `7d`.
    #[serde(with = "humantime_serde")]
    pub(crate) token_ttl: Duration,
    /// Whether heartbeats and producer routing need a role. Default false.
    pub(crate) authenticate_member_api: bool,
    /// Limits per caller.
    pub(crate) rate_limit: RateLimitConfig,
    /// Whether `/metrics` needs the role READ. Default false.
    pub(crate) metrics_require_auth: bool,
}

impl Default for SecurityConfig {
    fn default() -> Self {
        SecurityConfig {
            users: Vec::new(),
            token_secret: None,
            token_ttl: Duration::from_secs(7 * 24 * 3600),
            authenticate_member_api: false,
            rate_limit: RateLimitConfig::default(),
            metrics_require_auth: false,
        }
    }
}

/// One entry of `security.users`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct UserConfig {
    /// Login name.
    pub(crate) username: String,
    /// Password or its argon2 hash.
    pub(crate) password: Secret,
    /// Names of roles.
    pub(crate) roles: Vec<String>,
}

/// `[security.rate-limit]`: limits per caller.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct RateLimitConfig {
    /// Failed logins per minute and address. Default 10.
    pub(crate) failed_logins_per_minute: u32,
    /// Mutations per minute and caller. Default 600.
    pub(crate) mutations_per_minute: u32,
}

impl Default for RateLimitConfig {
    fn default() -> Self {
        RateLimitConfig { failed_logins_per_minute: 10, mutations_per_minute: 600 }
    }
}

/// `[audit]`: the log of who changed what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct AuditConfig {
    /// `log` or `redis`. Only `log` is built. Default `log`.
    pub(crate) sink: AuditSink,
    /// Entries kept in Redis. Not built yet. Default 10000.
    pub(crate) redis_max_entries: u32,
}

impl Default for AuditConfig {
    fn default() -> Self {
        AuditConfig { sink: AuditSink::Log, redis_max_entries: 10_000 }
    }
}

/// Where audit entries go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AuditSink {
    /// To the daemon's log.
    Log,
    /// To a capped stream in Redis. Not built yet.
    Redis,
}

/// What is logged unless configured: `info`, without what the HTTP server says about itself and about requests
/// that no HTTP parser can read.
pub(crate) const DEFAULT_LOG_FILTER: &str = "info,actix_http::h1::dispatcher=off,actix_server=warn";

/// `[telemetry]`: logs, metrics, traces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct TelemetryConfig {
    /// `text` or `json`, on standard error. Default `text`.
    pub(crate) log_format: LogFormat,
    /// Which log lines are written, as `level` or `target=level`, comma-separated. Default:
    /// [`DEFAULT_LOG_FILTER`].
    pub(crate) log_filter: String,
    /// Where traces go. Not built yet.
    pub(crate) otlp_endpoint: Option<String>,
    /// One set of metrics per member besides the ones per group. Not built yet. Default false.
    pub(crate) per_member_metrics: bool,
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        TelemetryConfig {
            log_format: LogFormat::Text,
            log_filter: DEFAULT_LOG_FILTER.to_owned(),
            otlp_endpoint: None,
            per_member_metrics: false,
        }
    }
}

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}
