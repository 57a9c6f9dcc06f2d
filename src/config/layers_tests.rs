//! Layers: order, origins, types of environment values, round trip.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::time::Duration;

use super::*;
use crate::config::keys;

/// Sources made of environment variables alone.
pub(super) fn environment(pairs: &[(&str, &str)]) -> Sources {
    Sources {
        environment: pairs.iter().map(|(name, value)| (name.into(), value.into())).collect(),
        ..Sources::default()
    }
}

/// The configuration with these environment variables.
pub(super) fn with(pairs: &[(&str, &str)]) -> Config {
    load(&environment(pairs)).unwrap().config
}

/// The sentence that refuses these environment variables.
pub(super) fn refusal(pairs: &[(&str, &str)]) -> String {
    let sentence = load(&environment(pairs)).expect_err("the configuration is refused").to_string();
    assert_eq!(sentence.lines().count(), 1, "{sentence}");
    sentence
}

fn from_file(text: &str) -> Result<Config, ConfigError> {
    from_file_and(text, Sources::default())
}

fn from_file_and(text: &str, sources: Sources) -> Result<Config, ConfigError> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    load(&Sources { file: Some(file.path().to_owned()), ..sources }).map(|loaded| loaded.config)
}

fn sample() -> (String, Config) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/rsc.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    (text, load(&Sources { file: Some(path), ..Sources::default() }).unwrap().config)
}

#[test]
fn nothing_given_means_the_defaults() {
    assert_eq!(load(&Sources::default()).unwrap().config, Config::default());
}

#[test]
fn the_sample_file_is_the_defaults() {
    assert_eq!(sample().1, Config::default());
}

#[test]
fn the_sample_file_has_every_key_and_no_other() {
    // Keys without a default are shown as `# key = value`; uncommented, the file must still be TOML.
    let (text, _) = sample();
    let uncommented: String = text
        .lines()
        .map(|line| {
            match line.strip_prefix("# ").filter(|rest| {
                rest.split_once(" = ").is_some_and(|(name, _)| {
                    name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-')
                })
            }) {
                Some(rest) => format!("{rest}\n"),
                None => format!("{line}\n"),
            }
        })
        .collect();
    let table: toml::Table = toml::from_str(&uncommented).unwrap();
    let mut written = Vec::new();
    collect("", &toml::Value::Table(table), &mut written);
    written.sort_unstable();
    let mut known: Vec<&str> = keys::leaves().collect();
    known.sort_unstable();
    assert_eq!(written, known);
}

fn collect(key: &str, value: &toml::Value, into: &mut Vec<String>) {
    match value {
        toml::Value::Table(entries) if !entries.is_empty() => {
            for (name, value) in entries {
                collect(&if key.is_empty() { name.clone() } else { format!("{key}.{name}") }, value, into);
            }
        }
        _ => into.push(key.to_owned()),
    }
}

#[test]
fn what_is_shown_loads_again() {
    let config = with(&[
        ("RSC_SERVER__INSTANCE_ID", "quote\"d and\\ back"),
        ("RSC_SERVER__WORKERS", "3"),
        ("RSC_SERVER__MAX_BODY", "1048577"),
        ("RSC_COORDINATION__MEMBER_LEASE_TTL", "12345ms"),
        ("RSC_REDIS__URLS", "redis://host:1234/7"),
        ("RSC_REDIS__DATABASE", "7"),
        ("RSC_STREAMS__PROVISIONING_ENABLED", "false"),
        ("RSC_TELEMETRY__LOG_FORMAT", "json"),
    ]);
    assert_eq!(from_file(&config.to_masked_toml().unwrap()).unwrap(), config);
    assert_eq!(from_file(&Config::default().to_masked_toml().unwrap()).unwrap(), Config::default());
}

#[test]
fn no_secret_is_shown() {
    let config = with(&[("RSC_REDIS__URLS", "redis://user:hunter2@h"), ("RSC_REDIS__PASSWORD", "hunter2")]);
    let shown = format!("{}{config:?}", config.to_masked_toml().unwrap());
    assert!(!shown.contains("hunter2"), "{shown}");
    assert!(shown.contains("redis://user:***@h"), "{shown}");
    let again = from_file(&config.to_masked_toml().unwrap()).unwrap();
    assert_eq!(again.redis.password.unwrap().expose(), "***");
}

#[test]
fn text_keys_take_environment_values_exactly_as_written() {
    for text in
        ["007", "12345", "1e3", "true", "1.0", " padded ", "[not, a, list]", "{x}", "\"quoted\"", "ünï🦀"]
    {
        let config = with(&[("RSC_REDIS__PASSWORD", text), ("RSC_SERVER__INSTANCE_ID", text)]);
        assert_eq!(config.redis.password.unwrap().expose(), text);
        assert_eq!(config.server.instance_id.as_deref(), Some(text));
    }
}

#[test]
fn other_keys_take_environment_values_as_what_they_say() {
    let config = with(&[
        ("RSC_SERVER__WORKERS", " 8 "),
        ("RSC_SERVER__LISTEN", "[::1]:9"),
        ("RSC_STREAMS__PROVISIONING_ENABLED", "false"),
        ("RSC_COORDINATION__MEMBER_LEASE_TTL", "1m 30s"),
        ("RSC_COORDINATION__REBALANCE_TIMEOUT", "2m"),
        ("RSC_TELEMETRY__LOG_FORMAT", "json"),
        ("RSC_SERVER__MAX_BODY", "2MiB"),
    ]);
    assert_eq!(config.server.workers, Some(8));
    assert_eq!(config.server.listen.to_string(), "[::1]:9");
    assert!(!config.streams.provisioning_enabled);
    assert_eq!(config.coordination.member_lease_ttl, Duration::from_secs(90));
    assert_eq!(config.telemetry.log_format, LogFormat::Json);
    assert_eq!(config.server.max_body.as_u64(), 2 * 1024 * 1024);
}

#[test]
fn lists_are_written_with_commas_or_in_brackets() {
    for text in ["redis://a/1", "[\"redis://a/1\"]", " redis://a/1 ", "[ 'redis://a/1', ]"] {
        assert_eq!(with(&[("RSC_REDIS__URLS", text)]).redis.urls[0].to_string(), "redis://a/1", "{text}");
    }
    for text in ["redis://a, redis://b", "[\"redis://a\",\"redis://b\"]"] {
        assert!(refusal(&[("RSC_REDIS__URLS", text)]).contains("2 URLs"), "{text}");
    }
    let bad = refusal(&[("RSC_REDIS__URLS", "redis://a,hunter2@b")]);
    assert!(bad.starts_with("redis.urls[1] (environment variable RSC_REDIS__URLS): is not a URL;"), "{bad}");
    assert!(!bad.contains("hunter2"), "{bad}");
    assert!(refusal(&[("RSC_REDIS__URLS", "")]).contains("is not a URL"));
    assert!(refusal(&[("RSC_REDIS__URLS", "[]")]).contains("0 URLs"));
}

#[test]
fn variables_that_are_no_configuration_are_passed_over() {
    let config = with(&[
        ("RSC_FOO", "1"),
        ("RSC_SERVER", "x"),
        ("RSC_SERVICE_HOST", "10.0.0.1"),
        ("RSC_PORT_8080_TCP", "tcp://10.0.0.1:8080"),
        ("rsc_server__listen", "0.0.0.0:1"),
        ("XRSC_SERVER__LISTEN", "0.0.0.0:1"),
        ("PATH", "/bin"),
    ]);
    assert_eq!(config, Config::default());
}

#[test]
fn unknown_variables_are_refused() {
    assert_eq!(
        refusal(&[("RSC_STORE__KIND", "memory")]),
        "store.kind (environment variable RSC_STORE__KIND): unknown key; [store] has key-prefix, type"
    );
    assert!(refusal(&[("RSC_STORES__TYPE", "memory")]).contains("the sections are audit, "));
    for name in
        ["RSC_STORE__", "RSC___TYPE", "RSC_STORE__TYPE__X", "RSC_Store__Type", "RSC_SERVER__INSTANCE-ID"]
    {
        assert!(refusal(&[(name, "memory")]).contains("unknown key"), "{name}");
    }
}

#[test]
fn variables_that_are_not_text_are_refused() {
    let bad = OsString::from_vec(vec![b'a', 0xff]);
    let sources =
        Sources { environment: vec![("RSC_SERVER__INSTANCE_ID".into(), bad)], ..Sources::default() };
    let sentence = load(&sources).unwrap_err().to_string();
    assert!(sentence.starts_with("server.instance-id (environment variable"), "{sentence}");
}

#[test]
fn a_secret_is_not_repeated_when_it_is_refused() {
    for text in [
        "redis.password = 4711",
        "security.token-secret = [4711]",
        "redis.urls = 4711",
        "redis.urls = [4711]",
    ] {
        let sentence = from_file(text).unwrap_err().to_string();
        assert!(sentence.contains("is not allowed here"), "{sentence}");
        assert!(!sentence.contains("4711"), "{sentence}");
    }
}

#[test]
fn files_are_taken_at_their_word() {
    for (text, sentence) in [
        ("server.workers = \"4\"", "server.workers"),
        ("server.workers = -1", "-1 is not allowed here; write a whole number from 0 to 65535"),
        ("server.workers = 70000", "70000 is not allowed here"),
        ("server.workers = 1.5", "1.5 is not allowed here"),
        ("server.instance-id = 7", "7 is not allowed here; write a text in quotes"),
        ("server.instance-id = 2024-01-01", "a date is not allowed here"),
        ("redis.mode = 0", "0 is not allowed here"),
        (
            "redis.mode = \"sentry\"",
            "\"sentry\" is not known; write one of `standalone`, `cluster`, `sentinel`",
        ),
        ("store = \"memory\"", "is a table, not a value; write [store]"),
        ("streams.provisioning-enabled = \"yes\"", "\"yes\" is not allowed here; write true or false"),
        ("coordination.tick-interval = 1", "1 is not allowed here; write a duration such as"),
        ("coordination.tick_interval = \"1s\"", "coordination.tick_interval"),
        ("\"store.type\" = \"memory\"", "unknown key"),
        ("server.max-body = \"1 parsec\"", "\"1 parsec\" is not allowed here; write a size such as"),
        ("server.listen = \"localhost\"", "\"localhost\" is not an IP address with a port"),
        ("insecure = true", "unknown key"),
    ] {
        let found = from_file(text).unwrap_err().to_string();
        assert!(found.contains(sentence), "{text}: {found}");
        assert!(found.contains("(file /"), "{text}: {found}");
        assert_eq!(found.lines().count(), 1, "{found}");
    }
}

#[test]
fn text_that_would_break_the_line_is_escaped() {
    let sentence = from_file("\"a\\nb\\u001b[31m\" = 1").unwrap_err().to_string();
    assert!(sentence.starts_with("a\\nb\\u{1b}[31m (file"), "{sentence}");
}

#[test]
fn each_layer_must_be_readable_by_itself() {
    let mut sources = environment(&[("RSC_COORDINATION__TICK_INTERVAL", "5 parsecs")]);
    sources.flags = vec![Flag { name: "--tick", key: "coordination.tick-interval", value: "1s".into() }];
    assert!(load(&sources).unwrap_err().to_string().contains("RSC_COORDINATION__TICK_INTERVAL"));

    let covering = environment(&[("RSC_SERVER__WORKERS", "2")]);
    let sentence = from_file_and("server.workers = \"two\"", covering).unwrap_err().to_string();
    assert!(sentence.starts_with("server.workers (file /"), "{sentence}");
}

#[test]
fn of_two_refusals_always_the_same_is_reported() {
    let (one, other) = (("RSC_A__B", ""), ("RSC_C__D", ""));
    assert_eq!(refusal(&[one, other]), refusal(&[other, one]));
}

#[test]
fn words_are_not_counted() {
    for key in ["store.type", "redis.mode", "audit.sink", "telemetry.log-format"] {
        let sentence = from_file(&format!("{key} = 0")).unwrap_err().to_string();
        assert!(sentence.contains("0 is not allowed here"), "{sentence}");
    }
}

#[test]
fn the_layers_that_were_used_are_named() {
    let mut sources = environment(&[("RSC_STORE__TYPE", "memory"), ("RSC_FOO", "")]);
    sources.flags = vec![Flag { name: "--store", key: "store.type", value: "redis".into() }];
    let layers = load(&sources).unwrap().layers;
    assert_eq!(layers, ["built-in default", "environment variable RSC_STORE__TYPE", "flag --store"]);
}
