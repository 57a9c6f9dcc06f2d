//! Every refusal of `checks` and `unbuilt`, at its border.

use super::keys;
use super::layers_tests::{environment, refusal, with};
use super::*;

#[test]
fn lease_of_two_heartbeat_intervals_at_least() {
    with(&[("RSC_COORDINATION__HEARTBEAT_INTERVAL", "7500ms")]);
    assert_eq!(
        refusal(&[("RSC_COORDINATION__HEARTBEAT_INTERVAL", "7501ms")]),
        "coordination.member-lease-ttl (built-in default): 15s is shorter than two heartbeat intervals, with \
         coordination.heartbeat-interval = 7s 501ms (environment variable RSC_COORDINATION__HEARTBEAT_INTERVAL); \
         at least 15s 2ms is allowed"
    );
}

#[test]
fn relations_hold_up_to_their_border() {
    let lease = ("RSC_COORDINATION__MEMBER_LEASE_TTL", "9s");
    for (name, allowed, refused, sentence) in [
        ("RSC_COORDINATION__REBALANCE_TIMEOUT", "9s", "8999ms", "8s 999ms is shorter than the lease"),
        ("RSC_COORDINATION__STALE_MEMBER_RETENTION", "18s", "17999ms", "is shorter than two leases"),
        ("RSC_COORDINATION__TICK_INTERVAL", "4500ms", "4501ms", "is longer than half a lease"),
        ("RSC_COORDINATION__MUTEX_TTL", "4500ms", "4501ms", "is longer than half a lease"),
        ("RSC_COORDINATION__MUTEX_ACQUIRE_TIMEOUT", "4500ms", "4501ms", "is longer than half a lease"),
        ("RSC_REDIS__COMMAND_TIMEOUT", "3s", "3001ms", "is longer than a third of a lease"),
        ("RSC_REDIS__CONNECT_TIMEOUT", "3s", "3001ms", "is longer than a third of a lease"),
    ] {
        let mutex = ("RSC_COORDINATION__MUTEX_TTL", "4s");
        let base: &[_] = if name == mutex.0 { &[lease] } else { &[lease, mutex] };
        with(&[base, &[(name, allowed)]].concat());
        let found = refusal(&[base, &[(name, refused)]].concat());
        assert!(found.contains(sentence), "{found}");
        assert!(found.contains(&format!("(environment variable {name})")), "{found}");
        assert!(found.contains("coordination.member-lease-ttl = 9s"), "{found}");
    }
}

#[test]
fn command_timeout_shorter_than_the_mutex_ttl() {
    let command = ("RSC_REDIS__COMMAND_TIMEOUT", "1500ms");
    with(&[command, ("RSC_COORDINATION__MUTEX_TTL", "1501ms")]);
    let found = refusal(&[command, ("RSC_COORDINATION__MUTEX_TTL", "1500ms")]);
    assert!(found.starts_with("redis.command-timeout (environment variable RSC_REDIS"), "{found}");
    assert!(found.contains("is not shorter than the mutex TTL"), "{found}");
}

#[test]
fn what_nobody_has_set_follows_a_short_lease() {
    let short = with(&[
        ("RSC_COORDINATION__HEARTBEAT_INTERVAL", "200ms"),
        ("RSC_COORDINATION__MEMBER_LEASE_TTL", "1s"),
        ("RSC_COORDINATION__REBALANCE_TIMEOUT", "2s"),
        ("RSC_COORDINATION__MUTEX_TTL", "500ms"),
    ]);
    let millis = std::time::Duration::from_millis;
    assert_eq!(short.redis.command_timeout, millis(250));
    assert_eq!(short.redis.connect_timeout, millis(333));
    assert_eq!(short.coordination.tick_interval, millis(333));
    assert_eq!(short.coordination.mutex_acquire_timeout, millis(333));
    let untouched = with(&[("RSC_COORDINATION__MEMBER_LEASE_TTL", "30s")]);
    assert_eq!(untouched.redis, Config::default().redis);
}

#[test]
fn drain_delay_within_the_shutdown_timeout() {
    with(&[("RSC_SERVER__SHUTDOWN_DRAIN_DELAY", "24s")]);
    let found = refusal(&[("RSC_SERVER__SHUTDOWN_DRAIN_DELAY", "25s")]);
    assert!(found.starts_with("server.shutdown-drain-delay (environment"), "{found}");
}

#[test]
fn durations_are_not_zero_nor_finer_than_a_millisecond_nor_endless() {
    let mut seen = 0;
    for key in keys::leaves() {
        let default = serde_json::to_value(Config::default()).unwrap();
        let default =
            default.pointer(&format!("/{}", key.replace('.', "/"))).and_then(|value| value.as_str());
        if default.is_none_or(|text| humantime::parse_duration(text).is_err())
            || key == "server.shutdown-drain-delay"
        {
            continue;
        }
        seen += 1;
        let name = keys::environment_name(key);
        let is_unbuilt = key == "security.token-ttl";
        for (text, word) in
            [("0s", "0s is too short"), ("1500us", "finer than a millisecond"), ("2years", "a year")]
        {
            let found = refusal(&[(name.as_str(), text)]);
            assert!(found.starts_with(&format!("{key} (environment variable {name}): ")), "{found}");
            assert!(found.contains(if is_unbuilt { "not part of this version" } else { word }), "{found}");
        }
        for text in ["5", "-3s", "5 parsecs", "", "99999999999999999999s"] {
            let found = refusal(&[(name.as_str(), text)]);
            assert!(found.starts_with(&format!("{key} (environment variable {name}): ")), "{found}");
            assert!(found.contains("write a duration such as 500ms, 3s or 10m"), "{found}");
        }
    }
    assert_eq!(seen, 14, "every duration was tried");
}

#[test]
fn numbers_keep_to_their_range() {
    for (key, least, most) in [
        ("server.workers", 1, 512),
        ("coordination.max-members-per-group", 1, 100_000),
        ("coordination.mailbox-capacity", 1, 1_000_000),
        ("streams.default-shard-count", 1, 10_000),
    ] {
        let name = keys::environment_name(key);
        for allowed in [least, most] {
            with(&[(&name, &allowed.to_string())]);
        }
        for refused in [least - 1, most + 1] {
            let found = refusal(&[(&name, &refused.to_string())]);
            assert!(
                found.starts_with(&format!(
                    "{key} (environment variable {name}): {refused} is out of range; 1 to {most}"
                )),
                "{found}"
            );
        }
    }
    let found = refusal(&[("RSC_STREAMS__MAX_SHARD_COUNT", "11")]);
    assert!(
        found.contains("12 is out of range; 1 to 11, the streams.max-shard-count (environment"),
        "{found}"
    );
    assert!(refusal(&[("RSC_STREAMS__MAX_SHARD_COUNT", "100001")]).contains("1 to 100000"));
    for (text, allowed) in
        [("1KiB", true), ("64MiB", true), ("1023", false), ("67108865", false), ("0", false)]
    {
        assert_eq!(load(&environment(&[("RSC_SERVER__MAX_BODY", text)])).is_ok(), allowed, "{text}");
    }
}

#[test]
fn listens_on_loopback_addresses_only() {
    for address in ["127.0.0.1:0", "127.9.9.9:1", "[::1]:8080", "[::ffff:127.0.0.1]:8080"] {
        with(&[("RSC_SERVER__LISTEN", address)]);
    }
    for address in ["0.0.0.0:8080", "[::]:8080", "10.0.0.1:80", "[::ffff:10.0.0.1]:80"] {
        let mut sources = environment(&[("RSC_SERVER__LISTEN", address)]);
        let found = load(&sources).unwrap_err().to_string();
        assert!(found.contains("is not a loopback address") && found.contains("authentication"), "{found}");
        sources.insecure = true;
        let found = load(&sources).unwrap_err().to_string();
        assert!(found.contains("--insecure"), "{found}");
    }
    for address in ["", "8080", "127.0.0.1", "127.0.0.1:70000", "localhost:8080", ":8080"] {
        assert!(
            refusal(&[("RSC_SERVER__LISTEN", address)]).contains("is not an IP address with a port"),
            "{address}"
        );
    }
    assert!(load(&Sources { insecure: true, ..Sources::default() }).unwrap().config.insecure);
}

#[test]
fn names_are_fit_to_be_names() {
    for (text, word) in
        [("", "blank"), (" \t", "blank"), ("a\u{7}b", "control"), (&"x".repeat(129), "129 bytes")]
    {
        assert!(refusal(&[("RSC_SERVER__INSTANCE_ID", text)]).contains(word), "{word}");
    }
    with(&[("RSC_SERVER__INSTANCE_ID", &"x".repeat(128))]);
    for (text, word) in
        [("", "is blank"), ("a{b}", "brace"), ("a\nb", "U+000A"), (&"x".repeat(513), "513 bytes")]
    {
        let found = refusal(&[("RSC_STORE__KEY_PREFIX", text)]);
        assert!(
            found.starts_with("store.key-prefix (environment variable RSC_STORE__KEY_PREFIX): "),
            "{found}"
        );
        assert!(found.contains(word), "{found}");
        assert_eq!(found.matches("store.key-prefix").count(), 1, "{found}");
    }
}

#[test]
fn instance_ids_are_made_up_when_none_is_given() {
    let config = Config::default();
    assert_ne!(config.server.instance_id_or_random(), config.server.instance_id_or_random());
    assert!(config.server.instance_id_or_random().len() <= 4 * 64 + 9);
    assert_eq!(with(&[("RSC_SERVER__INSTANCE_ID", "one")]).server.instance_id_or_random(), "one");
}

#[test]
fn redis_is_told_once_who_we_are() {
    let url = ("RSC_REDIS__URLS", "redis://app:hunter2@h/2");
    for (name, same, other) in [
        ("RSC_REDIS__USERNAME", "app", "ops"),
        ("RSC_REDIS__PASSWORD", "hunter2", "hunter3"),
        ("RSC_REDIS__DATABASE", "2", "0"),
    ] {
        with(&[url, (name, same)]);
        let found = refusal(&[url, (name, other)]);
        assert!(
            found.contains("differs from the one in redis.urls (environment variable RSC_REDIS__URLS)"),
            "{found}"
        );
        assert!(!found.contains("hunter"), "{found}");
    }
}

#[test]
fn redis_gets_no_half_credentials() {
    assert!(refusal(&[("RSC_REDIS__USERNAME", "app")]).starts_with("redis.username (environment"));
    assert!(refusal(&[("RSC_REDIS__URLS", "redis://app@h")]).starts_with("redis.urls (environment"));
    assert!(refusal(&[("RSC_REDIS__PASSWORD", "")]).contains("is empty"));
    with(&[("RSC_REDIS__PASSWORD", "alone")]);
}

#[test]
fn a_redis_flag_with_the_memory_store_is_a_contradiction() {
    let flag = |name, key, value: figment::value::Value| Flag { name, key, value };
    let urls = flag("--redis-url", "redis.urls", vec!["redis://h".to_owned()].into());
    let mut sources = environment(&[("RSC_STORE__TYPE", "memory"), ("RSC_REDIS__URLS", "redis://h")]);
    assert!(load(&sources).is_ok(), "the environment may keep what this start does not need");
    sources.flags = vec![urls];
    let found = load(&sources).unwrap_err().to_string();
    assert!(found.starts_with("redis.urls (flag --redis-url): no Redis is used"), "{found}");
}

#[test]
fn log_filters_can_be_read() {
    for filter in ["debug", "info,rsc_store=trace", "off", "rsc[turn{group=a}]=debug"] {
        with(&[("RSC_TELEMETRY__LOG_FILTER", filter)]);
    }
    for filter in ["", "rsc=loud", "a=b=c"] {
        assert!(
            refusal(&[("RSC_TELEMETRY__LOG_FILTER", filter)]).starts_with("telemetry.log-filter (env"),
            "{filter}"
        );
    }
}

#[test]
fn what_is_not_built_is_refused() {
    for (key, value, subject) in [
        ("server.tls", "{ certificate = \"x\" }", "TLS is"),
        ("security.users", "[{username=\"a\",password=\"hunter2\",roles=[\"ADMIN\"]}]", "authentication is"),
        ("security.token-secret", "hunter2", "authentication is"),
        ("security.token-ttl", "1d", "authentication is"),
        ("security.authenticate-member-api", "true", "authentication is"),
        ("security.rate-limit.failed-logins-per-minute", "11", "authentication is"),
        ("security.rate-limit.mutations-per-minute", "601", "limiting callers is"),
        ("security.metrics-require-auth", "true", "authentication is"),
        ("audit.sink", "redis", "an audit log in Redis is"),
        ("audit.redis-max-entries", "1", "an audit log in Redis is"),
        ("telemetry.otlp-endpoint", "http://127.0.0.1:4317", "sending traces is"),
        ("telemetry.per-member-metrics", "true", "metrics per member are"),
    ] {
        let name = keys::environment_name(key);
        let found = refusal(&[(&name, value)]);
        let start = format!(
            "{key} (environment variable {name}): {subject} not part of this version yet; remove the key"
        );
        assert!(found.starts_with(&start), "{found}");
        assert!(!found.contains("hunter2"), "{found}");
    }
}

#[test]
fn unbuilt_keys_may_say_their_default() {
    with(&[
        ("RSC_PRODUCER__PUBLISH_MARGIN", "5000ms"),
        ("RSC_SECURITY__USERS", "[]"),
        ("RSC_SECURITY__AUTHENTICATE_MEMBER_API", "false"),
        ("RSC_AUDIT__SINK", "log"),
    ]);
}

#[test]
fn what_cannot_be_true_about_redis_is_refused() {
    let sentinel = [("RSC_REDIS__MODE", "sentinel"), ("RSC_REDIS__SENTINEL_MASTER", "m")];
    let cluster = [("RSC_REDIS__MODE", "cluster")];
    type Variables<'a> = &'a [(&'a str, &'a str)];
    let cases: [(Variables<'_>, Variables<'_>, &str); 14] = [
        (&[("RSC_REDIS__MODE", "sentinel")], &[], "redis.sentinel-master"),
        (&cluster, &[("RSC_REDIS__SENTINEL_MASTER", "m")], "redis.sentinel-master"),
        (&cluster, &[("RSC_REDIS__DATABASE", "1")], "redis.database"),
        (&cluster, &[("RSC_REDIS__URLS", "redis://a/1")], "redis.urls"),
        (&cluster, &[("RSC_REDIS__URLS", "[]")], "redis.urls"),
        (&cluster, &[("RSC_REDIS__URLS", "redis://a,rediss://b")], "redis.urls"),
        (&cluster, &[("RSC_REDIS__URLS", "redis://:hunter2@a,redis://b")], "redis.urls"),
        (&cluster, &[("RSC_REDIS__NODE_MAPPINGS", "{ \"a\" = \"b:1\" }")], "redis.node-mappings"),
        (&sentinel, &[("RSC_REDIS__URLS", "redis://a/0")], "redis.urls"),
        (&sentinel, &[("RSC_REDIS__USERNAME", "u")], "redis.username"),
        (&[], &[("RSC_REDIS__NODE_MAPPINGS", "{ \"a:1\" = \"b:1\" }")], "redis.node-mappings"),
        (&[], &[("RSC_REDIS__TLS__CA_FILE", "x")], "redis.tls.ca-file"),
        (&[("RSC_REDIS__URLS", "rediss://a")], &[("RSC_REDIS__TLS__KEY_FILE", "x")], "redis.tls.key-file"),
        (&[], &[("RSC_REDIS__WAIT_REPLICAS", "11")], "redis.wait-replicas"),
    ];
    for (one, other, key) in cases {
        let found = refusal(&[one, other].concat());
        assert!(found.starts_with(key), "{one:?} {other:?}: {found}");
        assert!(!found.contains("hunter2"), "{found}");
    }
    for good in [
        [("RSC_REDIS__MODE", "cluster"), ("RSC_REDIS__URLS", "redis://a,redis://b/0")].as_slice(),
        &[&cluster[..], &[("RSC_REDIS__NODE_MAPPINGS", "{ \"a:1\" = \"[::1]:1\" }")]].concat(),
        &[
            &sentinel[..],
            &[("RSC_REDIS__URLS", "rediss://u:hunter2@a,rediss://b"), ("RSC_REDIS__DATABASE", "3")],
        ]
        .concat(),
        &[&sentinel[..], &[("RSC_REDIS__URLS", "redis://u:x@a"), ("RSC_REDIS__PASSWORD", "y")]].concat(),
    ] {
        with(good);
    }
}
