//! How to reach Redis, checked before anything is connected.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use ::redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};
use rsc_protocol::keys::Keys;
use thiserror::Error;

use super::address::{Address, Mappings};
use super::dial::Endpoint;
use super::tls::{Tls, TlsSettings};

/// Kind of deployment (protocol 12, `redis.mode`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RedisMode {
    /// One server, possibly with replicas behind it.
    Standalone,
    /// Redis Cluster; the URLs are some of its nodes.
    Cluster,
    /// The URLs are sentinels.
    Sentinel {
        /// The name under which they know the master.
        master: String,
    },
}

/// How [`RedisStore`](super::RedisStore) reaches Redis and what it calls its keys.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisSettings {
    /// Kind of deployment.
    pub mode: RedisMode,
    /// `redis://[user:password@]host[:port][/database]`, `rediss://` for TLS, or `unix:///path`. One; in a cluster some
    /// of its nodes; or the sentinels, whose user and password are for themselves alone.
    pub urls: Vec<String>,
    /// The ACL user; goes before the one in the URL.
    pub username: Option<String>,
    /// The password; goes before the one in the URL.
    pub password: Option<String>,
    /// The database, 0 or more; goes before the one in the URL. A cluster has no other than 0.
    pub database: Option<i64>,
    /// How servers are known, for `rediss://`.
    pub tls: TlsSettings,
    /// Addresses (`host:port`) that cluster nodes and sentinels announce → where they are reached from here.
    pub node_mappings: BTreeMap<String, String>,
    /// Names the coordinator's own keys.
    pub keys: Keys,
    /// This process, as `CLIENT LIST` shows it.
    pub instance_id: String,
    /// How long a mutex lasts unless renewed; at least 1 ms (protocol 10: 5 s).
    pub mutex_ttl: Duration,
    /// How long one call may take, connecting included; more than 0.
    pub command_timeout: Duration,
    /// How long one attempt to connect may take; more than 0. The command timeout cuts it too.
    pub connect_timeout: Duration,
    /// How many replicas [`GroupStore::commit_replicated`](crate::GroupStore::commit_replicated) waits for.
    pub wait_replicas: u32,
    /// How many connections are held, at least 1; all calls for one group go through the same one. What people
    /// read of streams goes through one more, made when it is first needed.
    pub connections: usize,
}

impl RedisSettings {
    /// The defaults for a server at `url`: mutex TTL 5 s, command timeout 2 s, connect timeout 1 s, two
    /// connections.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        RedisSettings {
            mode: RedisMode::Standalone,
            urls: vec![url.into()],
            username: None,
            password: None,
            database: None,
            tls: TlsSettings::default(),
            node_mappings: BTreeMap::new(),
            keys: Keys::default(),
            instance_id: "rsc".to_owned(),
            mutex_ttl: Duration::from_secs(5),
            command_timeout: Duration::from_secs(2),
            connect_timeout: Duration::from_secs(1),
            wait_replicas: 0,
            connections: 2,
        }
    }

    /// Checks everything that needs no server, files included.
    ///
    /// # Errors
    /// What cannot work with any server.
    pub fn check(&self) -> Result<(), SettingsError> {
        self.plan().map(|_| ())
    }

    /// Checks everything that needs no server, and takes it apart.
    pub(super) fn plan(&self) -> Result<Plan, SettingsError> {
        let addresses: Vec<(bool, ConnectionInfo)> =
            self.urls.iter().map(|url| read(url)).collect::<Result<_, _>>()?;
        let Some((is_tls, first)) = addresses.first() else { return Err(SettingsError::NoUrl) };
        if self.mode == RedisMode::Standalone && addresses.len() > 1 {
            return Err(SettingsError::SeveralUrls(addresses.len()));
        }
        if addresses.iter().any(|(other, _)| other != is_tls) {
            return Err(SettingsError::SomeTls);
        }
        let tls = is_tls.then(|| Tls::new(&self.tls)).transpose()?;
        // What a sentinel's URL says is for the sentinel.
        let own = match self.mode {
            RedisMode::Sentinel { .. } => RedisConnectionInfo::default(),
            RedisMode::Standalone | RedisMode::Cluster => first.redis_settings().clone(),
        };
        let login = self.login(own)?;
        self.check_durations()?;
        if self.connections == 0 {
            return Err(SettingsError::NoConnections);
        }
        let mappings = Mappings::read(&self.node_mappings).map_err(SettingsError::Mapping)?;
        let servers = addresses
            .into_iter()
            .map(|(_, info)| Ok((endpoint(&info)?, info.redis_settings().clone())))
            .collect::<Result<_, SettingsError>>()?;
        Ok(Plan { servers, login, tls, mappings })
    }

    fn login(&self, own: RedisConnectionInfo) -> Result<RedisConnectionInfo, SettingsError> {
        let mut login = own;
        if let Some(username) = &self.username {
            login = login.set_username(username);
        }
        if let Some(password) = &self.password {
            login = login.set_password(password);
        }
        if let Some(database) = self.database {
            login = login.set_db(database);
        }
        if login.db() < 0 {
            return Err(SettingsError::Database(login.db()));
        }
        if self.mode == RedisMode::Cluster && login.db() != 0 {
            return Err(SettingsError::ClusterDatabase(login.db()));
        }
        if login.username().is_some() && login.password().is_none() {
            return Err(SettingsError::PasswordMissing);
        }
        Ok(login)
    }

    fn check_durations(&self) -> Result<(), SettingsError> {
        for (name, duration) in [
            ("coordination.mutex-ttl", self.mutex_ttl),
            ("redis.command-timeout", self.command_timeout),
            ("redis.connect-timeout", self.connect_timeout),
        ] {
            if duration.as_millis() == 0 {
                return Err(SettingsError::TooShort(name));
            }
        }
        Ok(())
    }
}

/// Settings that can work with some server.
#[derive(Debug)]
pub(super) struct Plan {
    /// What the URLs name, and what each says about the login.
    pub(super) servers: Vec<(Endpoint, RedisConnectionInfo)>,
    /// How to log in where the data is.
    pub(super) login: RedisConnectionInfo,
    pub(super) tls: Option<Tls>,
    pub(super) mappings: Mappings,
}

/// Reads one URL, and whether it asks for TLS.
fn read(url: &str) -> Result<(bool, ConnectionInfo), SettingsError> {
    let plain = ["rediss://", "valkeys://"].iter().find_map(|scheme| url.strip_prefix(scheme));
    let (is_tls, url) = match plain {
        Some(rest) => (true, format!("redis://{rest}")),
        None => (false, url.to_owned()),
    };
    let info = url.as_str().into_connection_info().map_err(|error| SettingsError::Url(error.to_string()))?;
    Ok((is_tls, info))
}

fn endpoint(info: &ConnectionInfo) -> Result<Endpoint, SettingsError> {
    match info.addr() {
        ConnectionAddr::Tcp(host, port) => Ok(Endpoint::Tcp(Address::new(host, *port))),
        ConnectionAddr::Unix(path) => Ok(Endpoint::Unix(path.clone())),
        other => Err(SettingsError::Url(format!("unsupported address {other}"))),
    }
}

/// Secrets masked: neither password nor URL (which may carry one) is shown.
impl fmt::Debug for RedisSettings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("RedisSettings")
            .field("mode", &self.mode)
            .field("username", &self.username)
            .field("database", &self.database)
            .field("keys", &self.keys)
            .field("instance_id", &self.instance_id)
            .field("mutex_ttl", &self.mutex_ttl)
            .field("command_timeout", &self.command_timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("connections", &self.connections)
            .finish_non_exhaustive()
    }
}

/// Why no store was made. None of the texts shows a password.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SettingsError {
    /// The URL could not be read.
    #[error("redis.urls: not a redis URL ({0}); write redis://[user:password@]host[:port][/database]")]
    Url(String),
    /// No URL at all.
    #[error("redis.urls: names no server")]
    NoUrl,
    /// Several URLs for one server.
    #[error("redis.urls: {0} URLs, but redis.mode standalone takes exactly one")]
    SeveralUrls(usize),
    /// Some URLs ask for TLS, some do not.
    #[error("redis.urls: either all or none begin with rediss://")]
    SomeTls,
    /// TLS cannot be set up: the key, and what is wrong with it.
    #[error("{0}: {1}")]
    Tls(&'static str, String),
    /// A cluster's servers have one database.
    #[error("redis.database: {0} cannot be chosen in a cluster; it has database 0 only")]
    ClusterDatabase(i64),
    /// An entry of the mappings is no address.
    #[error("redis.node-mappings: {0:?} is not host:port")]
    Mapping(String),
    /// A negative database number.
    #[error("redis.database: {0} is not a database number; use 0 or more")]
    Database(i64),
    /// A user name alone cannot log in.
    #[error("redis.username: a user name needs redis.password")]
    PasswordMissing,
    /// A duration below one millisecond.
    #[error("{0}: must be at least 1ms")]
    TooShort(&'static str),
    /// No connections at all.
    #[error("at least one connection to redis is needed")]
    NoConnections,
    /// The system gave no thread.
    #[error("no thread for the connections to redis: {0}")]
    Thread(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_and_fields_make_one_login() {
        let mut settings = RedisSettings::new("redis://anna:from-url@127.0.0.1:7000/3");
        let plan = settings.plan().unwrap();
        let info = &plan.login;
        assert_eq!(plan.servers[0].0.to_string(), "127.0.0.1:7000");
        assert_eq!(info.username(), Some("anna"));
        assert_eq!(info.password(), Some("from-url"));
        assert_eq!(info.db(), 3);

        settings.username = Some("bert".into());
        settings.password = Some("from-field".into());
        settings.database = Some(5);
        let info = settings.plan().unwrap().login;
        assert_eq!(info.username(), Some("bert"));
        assert_eq!(info.password(), Some("from-field"));
        assert_eq!(info.db(), 5);
    }

    #[test]
    fn what_cannot_work_is_refused_with_the_key_that_is_wrong() {
        let broken = |change: fn(&mut RedisSettings)| {
            let mut settings = RedisSettings::new("redis://127.0.0.1");
            change(&mut settings);
            settings.plan().unwrap_err().to_string()
        };
        for url in ["", "localhost", "http://localhost", "redis://", "redis://host:notaport", "redis://h/x"] {
            let error = RedisSettings::new(url).plan().unwrap_err();
            assert!(matches!(error, SettingsError::Url(_)), "{url}: {error}");
        }
        for (change, key) in [
            (RedisSettings { urls: vec![], ..RedisSettings::new("") }, "redis.urls"),
            (
                RedisSettings {
                    urls: vec!["redis://a".into(), "redis://b".into()],
                    ..RedisSettings::new("")
                },
                "2 URLs",
            ),
            (
                RedisSettings {
                    mode: RedisMode::Cluster,
                    urls: vec!["redis://a".into(), "rediss://b".into()],
                    ..RedisSettings::new("")
                },
                "rediss://",
            ),
            (
                RedisSettings {
                    mode: RedisMode::Cluster,
                    database: Some(1),
                    ..RedisSettings::new("redis://a")
                },
                "redis.database",
            ),
            (
                RedisSettings {
                    node_mappings: [("a".to_owned(), "b:1".to_owned())].into(),
                    ..RedisSettings::new("redis://a")
                },
                "redis.node-mappings: \"a\"",
            ),
            (
                RedisSettings {
                    tls: TlsSettings { ca_file: Some("/nowhere".into()), ..TlsSettings::default() },
                    ..RedisSettings::new("rediss://a")
                },
                "redis.tls.ca-file: /nowhere",
            ),
        ] {
            let error = change.plan().unwrap_err().to_string();
            assert!(error.contains(key), "{key}: {error}");
        }
        assert!(broken(|settings| settings.database = Some(-1)).contains("redis.database"));
        assert!(broken(|settings| settings.username = Some("u".into())).contains("redis.username"));
        assert!(broken(|settings| settings.mutex_ttl = Duration::ZERO).contains("coordination.mutex-ttl"));
        assert!(
            broken(|settings| settings.command_timeout = Duration::ZERO).contains("redis.command-timeout")
        );
        assert!(
            broken(|settings| settings.connect_timeout = Duration::ZERO).contains("redis.connect-timeout")
        );
        assert!(broken(|settings| settings.connections = 0).contains("connection"));
    }

    #[test]
    fn secrets_stay_out_of_debug_and_errors() {
        let mut settings = RedisSettings::new("redis://u:geheim@host:port");
        settings.password = Some("geheim".into());
        assert!(!format!("{settings:?}").contains("geheim"));
        assert!(!settings.plan().unwrap_err().to_string().contains("geheim"));
    }
}
