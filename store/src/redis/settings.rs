//! How to reach Redis, checked before anything is connected.

use std::fmt;
use std::time::Duration;

use ::redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo};
use rsc_protocol::keys::Keys;
use thiserror::Error;

/// How [`RedisStore`](super::RedisStore) reaches Redis and what it calls its keys.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisSettings {
    /// `redis://[user:password@]host[:port][/database]`, or `unix:///path`.
    pub url: String,
    /// The ACL user; goes before the one in the URL.
    pub username: Option<String>,
    /// The password; goes before the one in the URL.
    pub password: Option<String>,
    /// The database, 0 or more; goes before the one in the URL.
    pub database: Option<i64>,
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
            url: url.into(),
            username: None,
            password: None,
            database: None,
            keys: Keys::default(),
            instance_id: "rsc".to_owned(),
            mutex_ttl: Duration::from_secs(5),
            command_timeout: Duration::from_secs(2),
            connect_timeout: Duration::from_secs(1),
            connections: 2,
        }
    }

    /// Checks everything that needs no server.
    pub(super) fn connection_info(&self) -> Result<ConnectionInfo, SettingsError> {
        if self.url.starts_with("rediss:") || self.url.starts_with("valkeys:") {
            return Err(SettingsError::Tls);
        }
        let info = self
            .url
            .as_str()
            .into_connection_info()
            .map_err(|error| SettingsError::Url(error.to_string()))?;
        if matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
            return Err(SettingsError::Tls);
        }
        let mut login = info.redis_settings().clone();
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
        if login.username().is_some() && login.password().is_none() {
            return Err(SettingsError::PasswordMissing);
        }
        for (name, duration) in [
            ("coordination.mutex-ttl", self.mutex_ttl),
            ("redis.command-timeout", self.command_timeout),
            ("redis.connect-timeout", self.connect_timeout),
        ] {
            if duration.as_millis() == 0 {
                return Err(SettingsError::TooShort(name));
            }
        }
        if self.connections == 0 {
            return Err(SettingsError::NoConnections);
        }
        Ok(info.set_redis_settings(login))
    }
}

/// Secrets masked: neither password nor URL (which may carry one) is shown.
impl fmt::Debug for RedisSettings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("RedisSettings")
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
    /// `rediss://` or `valkeys://`.
    #[error("redis.urls: TLS (rediss://) is not in this version; use redis://, or a TLS tunnel on this host")]
    Tls,
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
        let info = settings.connection_info().unwrap();
        assert_eq!(info.addr().to_string(), "127.0.0.1:7000");
        assert_eq!(info.redis_settings().username(), Some("anna"));
        assert_eq!(info.redis_settings().password(), Some("from-url"));
        assert_eq!(info.redis_settings().db(), 3);

        settings.username = Some("bert".into());
        settings.password = Some("from-field".into());
        settings.database = Some(5);
        let info = settings.connection_info().unwrap();
        assert_eq!(info.redis_settings().username(), Some("bert"));
        assert_eq!(info.redis_settings().password(), Some("from-field"));
        assert_eq!(info.redis_settings().db(), 5);
    }

    #[test]
    fn what_cannot_work_is_refused_with_the_key_that_is_wrong() {
        let broken = |change: fn(&mut RedisSettings)| {
            let mut settings = RedisSettings::new("redis://127.0.0.1");
            change(&mut settings);
            settings.connection_info().unwrap_err().to_string()
        };
        for url in ["", "localhost", "http://localhost", "redis://", "redis://host:notaport", "redis://h/x"] {
            let error = RedisSettings::new(url).connection_info().unwrap_err();
            assert!(matches!(error, SettingsError::Url(_)), "{url}: {error}");
        }
        for url in ["rediss://host", "rediss://host:6379/#insecure", "valkeys://host"] {
            assert_eq!(RedisSettings::new(url).connection_info().unwrap_err(), SettingsError::Tls, "{url}");
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
        assert!(!settings.connection_info().unwrap_err().to_string().contains("geheim"));
    }
}
