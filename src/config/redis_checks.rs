//! What cannot be true about how Redis is reached (protocol 12, section `redis`).

use super::checks::{Check, Checked};
use super::{RedisConfig, RedisMode, StoreType};

/// Most replicas that a commit can wait for.
const MOST_REPLICAS: u64 = 10;

/// Refuses what cannot be run with.
pub(super) fn check(check: &Check<'_>) -> Checked {
    let redis = &check.config.redis;
    store(check)?;
    addresses(check, redis)?;
    mode(check, redis)?;
    tls(check, redis)?;
    login(check, redis)?;
    check.within("redis.wait-replicas", redis.wait_replicas, 0, MOST_REPLICAS)
}

fn store(check: &Check<'_>) -> Checked {
    let urls = (check.origin)("redis.urls");
    if check.config.store.store_type == StoreType::Memory && urls.starts_with("flag") {
        let store = (check.origin)("store.type");
        return check.refuse(
            "redis.urls",
            format!("no Redis is used with store.type memory ({store}); remove one of them"),
        );
    }
    Ok(())
}

fn addresses(check: &Check<'_>, redis: &RedisConfig) -> Checked {
    let count = redis.urls.len();
    if redis.mode == RedisMode::Standalone && count != 1 {
        return check
            .refuse("redis.urls", format!("{count} URLs, but redis.mode standalone takes exactly one"));
    }
    if count == 0 {
        let what =
            if redis.mode == RedisMode::Cluster { "some nodes of the cluster" } else { "the sentinels" };
        return check.refuse("redis.urls", format!("names no server; name {what}"));
    }
    for (announced, reached) in &redis.node_mappings {
        for text in [announced, reached] {
            let parts = text.rsplit_once(':');
            if !parts.is_some_and(|(host, port)| {
                !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0)
            }) {
                return check.refuse(
                    "redis.node-mappings",
                    format!(
                        "{text:?} is not an address; write \"announced-host:port\" = \"reachable-host:port\""
                    ),
                );
            }
        }
    }
    if redis.mode == RedisMode::Standalone && !redis.node_mappings.is_empty() {
        return check.refuse(
            "redis.node-mappings",
            "nobody announces addresses in redis.mode standalone; remove the key, or set redis.mode",
        );
    }
    Ok(())
}

fn mode(check: &Check<'_>, redis: &RedisConfig) -> Checked {
    match (redis.mode, redis.sentinel_master.as_deref()) {
        (RedisMode::Sentinel, None | Some("")) => check.refuse(
            "redis.sentinel-master",
            "is needed with redis.mode sentinel: the name the sentinels know",
        ),
        (RedisMode::Standalone | RedisMode::Cluster, Some(_)) => check.refuse(
            "redis.sentinel-master",
            "is only for redis.mode sentinel; remove the key, or set the mode",
        ),
        (RedisMode::Cluster, None) => {
            let named =
                redis.database.or_else(|| redis.urls.iter().find_map(super::values::RedisUrl::database));
            match named {
                Some(database) if database != 0 => {
                    let key = if redis.database.is_some() { "redis.database" } else { "redis.urls" };
                    check.refuse(key, format!("database {database}, but a cluster has database 0 only"))
                }
                _ => Ok(()),
            }
        }
        (RedisMode::Sentinel, Some(_)) => {
            if redis.urls.iter().any(|url| url.database().is_some()) {
                return check
                    .refuse("redis.urls", "a sentinel has no databases; write redis.database instead");
            }
            Ok(())
        }
        (RedisMode::Standalone, None) => Ok(()),
    }
}

fn tls(check: &Check<'_>, redis: &RedisConfig) -> Checked {
    let with_tls = redis.urls.iter().filter(|url| url.is_tls()).count();
    if with_tls != 0 && with_tls != redis.urls.len() {
        return check
            .refuse("redis.urls", "some ask for TLS (rediss://) and some do not; write all in one way");
    }
    let tls = &redis.tls;
    for (key, is_set) in [
        ("redis.tls.ca-file", tls.ca_file.is_some()),
        ("redis.tls.certificate-file", tls.certificate_file.is_some()),
        ("redis.tls.key-file", tls.key_file.is_some()),
        ("redis.tls.server-name", tls.server_name.is_some()),
    ] {
        if is_set && with_tls == 0 {
            return check
                .refuse(key, "is not used without TLS; write rediss:// in redis.urls, or remove the key");
        }
    }
    match (&tls.certificate_file, &tls.key_file) {
        (Some(_), None) => check.refuse("redis.tls.certificate-file", "needs redis.tls.key-file"),
        (None, Some(_)) => check.refuse("redis.tls.key-file", "needs redis.tls.certificate-file"),
        _ => Ok(()),
    }
}

fn login(check: &Check<'_>, redis: &RedisConfig) -> Checked {
    for (key, value) in [
        ("redis.username", redis.username.as_deref()),
        ("redis.password", redis.password.as_ref().map(|password| password.expose())),
    ] {
        if value.is_some_and(str::is_empty) {
            return check.refuse(key, "is empty; write it or remove the key");
        }
    }
    // What a sentinel's URL says is for the sentinel alone.
    let is_shared = redis.mode != RedisMode::Sentinel;
    if is_shared {
        said_twice(check, redis)?;
    }
    let half = "a user without a password; add redis.password or remove the user";
    let own_user = redis.username.is_some() && redis.password.is_none();
    let url_password = is_shared && redis.urls.first().is_some_and(|url| url.password().is_some());
    if own_user && !url_password {
        return check.refuse("redis.username", half);
    }
    let is_half = |url: &super::values::RedisUrl| url.username().is_some() && url.password().is_none();
    if redis.urls.iter().any(is_half) && !(is_shared && redis.password.is_some()) {
        return check.refuse("redis.urls", half);
    }
    Ok(())
}

/// A user, password or database that both the URL and its own key give, or two URLs, and differently.
fn said_twice(check: &Check<'_>, redis: &RedisConfig) -> Checked {
    let urls = (check.origin)("redis.urls");
    for url in &redis.urls {
        let password = redis.password.as_ref().map(|password| password.expose());
        let twice = [
            ("redis.username", differ(redis.username.as_deref(), url.username())),
            ("redis.password", differ(password, url.password())),
            ("redis.database", differ(redis.database, url.database())),
        ];
        for (key, differs) in twice {
            if differs {
                return check
                    .refuse(key, format!("differs from the one in redis.urls ({urls}); write it once"));
            }
        }
    }
    let login = |url: &super::values::RedisUrl| {
        (url.username().map(str::to_owned), url.password().map(str::to_owned))
    };
    if redis.urls.windows(2).any(|pair| login(&pair[0]) != login(&pair[1])) {
        return check.refuse(
            "redis.urls",
            "the URLs name different users or passwords; write redis.username and redis.password once",
        );
    }
    Ok(())
}

/// Whether both are given and not the same.
fn differ<T: PartialEq>(one: Option<T>, other: Option<T>) -> bool {
    matches!((one, other), (Some(one), Some(other)) if one != other)
}
