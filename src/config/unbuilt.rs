//! Keys of protocol 12 whose subject is not part of this version: refused when they are set to anything
//! but their default, so that nobody relies on what is not there.

use serde_json::Value;

use super::{Config, ConfigError};

/// Key, and its subject with the verb of the sentence about it.
const UNBUILT: &[(&str, &str)] = &[
    ("server.tls", "TLS is"),
    ("security.users", "authentication is"),
    ("security.token-secret", "authentication is"),
    ("security.token-ttl", "authentication is"),
    ("security.authenticate-member-api", "authentication is"),
    ("security.rate-limit.failed-logins-per-minute", "authentication is"),
    ("security.rate-limit.mutations-per-minute", "limiting callers is"),
    ("security.metrics-require-auth", "authentication is"),
    ("audit.sink", "an audit log in Redis is"),
    ("audit.redis-max-entries", "an audit log in Redis is"),
    ("telemetry.otlp-endpoint", "sending traces is"),
    ("telemetry.per-member-metrics", "metrics per member are"),
];

/// Refuses values other than the default for keys whose subject is not built.
pub(super) fn check(config: &Config, origin: &dyn Fn(&str) -> String) -> Result<(), ConfigError> {
    let as_json = |config: &Config| {
        serde_json::to_value(config).map_err(|error| ConfigError::key("configuration", "merged", error))
    };
    let (values, defaults) = (as_json(config)?, as_json(&Config::default())?);
    for (key, subject) in UNBUILT {
        if at(&values, key) != at(&defaults, key) {
            let remedy = if subject.starts_with("authentication") {
                "remove the key (the daemon listens on loopback addresses only)"
            } else {
                "remove the key"
            };
            return Err(ConfigError::key(
                key,
                origin(key),
                format!("{subject} not part of this version yet; {remedy}"),
            ));
        }
    }
    Ok(())
}

fn at<'a>(values: &'a Value, key: &str) -> Option<&'a Value> {
    key.split('.').try_fold(values, |value, name| value.get(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::keys;

    #[test]
    fn every_unbuilt_key_exists() {
        for (key, _) in UNBUILT {
            assert!(keys::leaves().any(|leaf| leaf == *key), "{key}");
        }
    }
}
