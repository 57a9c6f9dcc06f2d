//! The names of all keys, taken from the defaults so that there is no second list to forget.

use std::sync::LazyLock;

use serde_json::Value;

use super::Config;

/// Every leaf key of the configuration with its default as JSON (`null`: no value), dotted, in order.
static LEAVES: LazyLock<Vec<(String, Value)>> = LazyLock::new(|| {
    let mut leaves = Vec::new();
    if let Ok(defaults) = serde_json::to_value(Config::default()) {
        collect("", &defaults, &mut leaves);
    }
    leaves
});

fn collect(key: &str, value: &Value, leaves: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(entries) if !entries.is_empty() => {
            for (name, value) in entries {
                let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                collect(&key, value, leaves);
            }
        }
        leaf => leaves.push((key.to_owned(), leaf.clone())),
    }
}

/// Every leaf key, dotted.
pub(super) fn leaves() -> impl Iterator<Item = &'static str> {
    LEAVES.iter().map(|(key, _)| key.as_str())
}

/// What a dotted name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// A key that takes a value.
    Leaf,
    /// A table of keys.
    Table,
    /// Nothing.
    Unknown,
}

/// What `key` stands for.
pub(super) fn place(key: &str) -> Place {
    if leaves().any(|leaf| leaf == key) {
        Place::Leaf
    } else if leaves().any(|leaf| leaf.strip_prefix(key).is_some_and(|rest| rest.starts_with('.'))) {
        Place::Table
    } else {
        Place::Unknown
    }
}

/// The environment variable of a key: `coordination.member-lease-ttl` → `RSC_COORDINATION__MEMBER_LEASE_TTL`.
pub(super) fn environment_name(key: &str) -> String {
    format!("RSC_{}", key.replace('.', "__").replace('-', "_").to_uppercase())
}

/// The leaf key of an environment variable.
pub(super) fn of_environment(variable: &str) -> Option<&'static str> {
    leaves().find(|leaf| environment_name(leaf) == variable)
}

/// What an unknown key could have been: the names in the innermost known table around it.
pub(super) fn known_around(key: &str) -> String {
    let mut table = key;
    loop {
        table = table.rsplit_once('.').map_or("", |(parent, _)| parent);
        if table.is_empty() {
            return format!("the sections are {}", names_in(""));
        }
        if place(table) == Place::Table {
            return format!("[{table}] has {}", names_in(table));
        }
    }
}

fn names_in(table: &str) -> String {
    let mut names: Vec<&str> = Vec::new();
    for leaf in leaves() {
        let rest = if table.is_empty() {
            Some(leaf)
        } else {
            leaf.strip_prefix(table).and_then(|rest| rest.strip_prefix('.'))
        };
        let Some(name) = rest.and_then(|rest| rest.split('.').next()) else {
            continue;
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.join(", ")
}

/// Whether the value of `key` may contain a password, so that no message repeats it.
pub(super) fn is_secret(key: &str) -> bool {
    ["redis.password", "redis.urls", "security.token-secret", "security.users"]
        .iter()
        .any(|secret| key.starts_with(secret))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_of_protocol_12_is_there() {
        let expected = "server.listen server.instance-id server.workers server.max-body server.shutdown-drain-delay \
             server.shutdown-timeout server.tls store.type store.key-prefix redis.mode redis.urls \
             redis.sentinel-master redis.username redis.password redis.database redis.tls.ca-file redis.tls.certificate-file redis.tls.key-file \
             redis.tls.server-name redis.connect-timeout \
             redis.command-timeout redis.node-mappings redis.wait-replicas coordination.heartbeat-interval \
             coordination.member-lease-ttl coordination.rebalance-timeout coordination.tick-interval \
             coordination.stale-member-retention coordination.mutex-ttl coordination.mutex-acquire-timeout \
             coordination.index-refresh-interval coordination.max-members-per-group coordination.mailbox-capacity \
             streams.provisioning-enabled streams.default-shard-count streams.max-shard-count \
             producer.routing-cache-ttl producer.publish-margin security.users security.token-secret \
             security.token-ttl security.authenticate-member-api security.rate-limit.failed-logins-per-minute \
             security.rate-limit.mutations-per-minute security.metrics-require-auth audit.sink \
             audit.redis-max-entries telemetry.log-format telemetry.log-filter telemetry.otlp-endpoint \
             telemetry.per-member-metrics";
        let mut expected: Vec<&str> = expected.split_whitespace().collect();
        let mut keys: Vec<&str> = leaves().collect();
        expected.sort_unstable();
        keys.sort_unstable();
        assert_eq!(keys, expected);
    }

    #[test]
    fn names_stand_for_leaves_tables_or_nothing() {
        assert_eq!(place("redis.urls"), Place::Leaf);
        assert_eq!(place("redis.node-mappings"), Place::Leaf);
        assert_eq!(place("security.rate-limit"), Place::Table);
        assert_eq!(place("security"), Place::Table);
        assert_eq!(place("secur"), Place::Unknown);
        assert_eq!(place("redis.urls.0"), Place::Unknown);
    }

    #[test]
    fn environment_names_lead_back_to_their_key() {
        for key in leaves() {
            assert_eq!(of_environment(&environment_name(key)), Some(key));
        }
        assert_eq!(
            of_environment("RSC_SECURITY__RATE_LIMIT__MUTATIONS_PER_MINUTE"),
            Some("security.rate-limit.mutations-per-minute")
        );
        assert_eq!(of_environment("RSC_REDIS__Urls"), None);
    }

    #[test]
    fn an_unknown_key_is_shown_its_neighbours() {
        assert_eq!(known_around("store.kind"), "[store] has key-prefix, type");
        assert_eq!(known_around("store.kind.deep"), "[store] has key-prefix, type");
        assert!(known_around("stores").starts_with("the sections are audit, coordination, producer, redis"));
    }
}
