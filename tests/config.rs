//! Black-box tests of the configuration: the binary with files, environment variables and flags
//! (protocol 12). What each check allows is tested beside the checks; here it is what a person sees.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// Runs `rsc` with these arguments and exactly these environment variables.
fn rsc(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rsc"))
        .args(arguments)
        .env_clear()
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The sentence of a refusal: exit code 2, one line on standard error, nothing on standard output. `serve`
/// and `config show` must say the same as `config check`.
fn refusal(arguments: &[&str], environment: &[(&str, &str)]) -> String {
    let mut sentences = ["serve", "config show", "config check"].map(|command| {
        let arguments: Vec<&str> = command.split(' ').chain(arguments.iter().copied()).collect();
        let output = rsc(&arguments, environment);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        assert!(output.stdout.is_empty(), "{output:?}");
        let sentence = text(&output.stderr);
        assert_eq!(sentence.lines().count(), 1, "{sentence}");
        sentence.strip_prefix("error: ").unwrap().trim_end().to_owned()
    });
    sentences.sort();
    assert_eq!(sentences[0], sentences[2]);
    let [sentence, ..] = sentences;
    sentence
}

/// What `rsc config show` prints.
fn show(arguments: &[&str], environment: &[(&str, &str)]) -> toml::Table {
    let output = rsc(&[&["config", "show"], arguments].concat(), environment);
    assert!(output.status.success(), "{output:?}");
    toml::from_str(&text(&output.stdout)).unwrap()
}

fn value<'a>(table: &'a toml::Table, section: &str, key: &str) -> &'a toml::Value {
    &table[section][key]
}

fn file(directory: &TempDir, content: &str) -> PathBuf {
    let path = directory.path().join("test.toml");
    std::fs::write(&path, content).unwrap();
    path
}

#[test]
fn later_layers_win() {
    let directory = TempDir::new().unwrap();
    let path = file(
        &directory,
        "[server]\nlisten = \"127.0.0.2:1\"\nworkers = 2\n[telemetry]\nlog-filter = \"debug\"\n\
         [store]\ntype = \"memory\"\nkey-prefix = \"from-file\"\n[redis]\nurls = [\"redis://file\"]\n",
    );
    let config = ["--config", path.to_str().unwrap()];
    let environment = [
        ("RSC_SERVER__LISTEN", "127.0.0.3:1"),
        ("RSC_STORE__KEY_PREFIX", "from-environment"),
        ("RSC_REDIS__URLS", "redis://environment"),
    ];

    let defaults = show(&[], &[]);
    assert_eq!(value(&defaults, "server", "listen").as_str(), Some("127.0.0.1:8080"));
    assert_eq!(value(&defaults, "store", "key-prefix").as_str(), Some("redis-stream:coord"));

    let with_file = show(&config, &[]);
    assert_eq!(value(&with_file, "server", "listen").as_str(), Some("127.0.0.2:1"));
    assert_eq!(value(&with_file, "server", "workers").as_integer(), Some(2));
    assert_eq!(value(&with_file, "store", "type").as_str(), Some("memory"));
    assert_eq!(value(&with_file, "coordination", "member-lease-ttl").as_str(), Some("15s"));

    let with_environment = show(&config, &environment);
    assert_eq!(value(&with_environment, "server", "listen").as_str(), Some("127.0.0.3:1"));
    assert_eq!(value(&with_environment, "store", "key-prefix").as_str(), Some("from-environment"));
    assert_eq!(value(&with_environment, "redis", "urls")[0].as_str(), Some("redis://environment"));
    assert_eq!(value(&with_environment, "telemetry", "log-filter").as_str(), Some("debug"));

    let flags = [
        "--listen",
        "[::1]:4",
        "--store",
        "redis",
        "--redis-url",
        "redis://flag",
        "--redis-mode",
        "standalone",
    ];
    let with_flags = show(&[&config[..], &flags[..]].concat(), &environment);
    assert_eq!(value(&with_flags, "server", "listen").as_str(), Some("[::1]:4"));
    assert_eq!(value(&with_flags, "store", "type").as_str(), Some("redis"));
    assert_eq!(value(&with_flags, "redis", "urls")[0].as_str(), Some("redis://flag"));
    assert_eq!(value(&with_flags, "redis", "urls").as_array().unwrap().len(), 1);
    assert_eq!(value(&with_flags, "store", "key-prefix").as_str(), Some("from-environment"));
}

#[test]
fn check_says_in_one_line_what_it_looked_at() {
    let output = rsc(&["config", "check", "--store", "memory"], &[("RSC_SERVER__WORKERS", "2")]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(
        text(&output.stdout),
        "configuration is valid, from built-in default, environment variable RSC_SERVER__WORKERS, flag --store\n"
    );
    assert!(output.stderr.is_empty());
}

#[test]
fn what_is_shown_loads_again_without_secrets() {
    let directory = TempDir::new().unwrap();
    let secrets = [("RSC_REDIS__URLS", "redis://app:hunter2@host:7/1"), ("RSC_SERVER__INSTANCE_ID", "007")];
    let shown = rsc(&["config", "show"], &secrets);
    assert!(!text(&shown.stdout).contains("hunter2"));
    assert!(text(&shown.stdout).contains("redis://app:***@host:7/1"));
    assert!(text(&shown.stdout).contains("instance-id = \"007\""));
    let path = file(&directory, &text(&shown.stdout));
    let again = rsc(&["config", "show", "--config", path.to_str().unwrap()], &[]);
    assert_eq!(text(&again.stdout), text(&shown.stdout));
}

#[test]
fn the_shipped_file_shows_the_defaults() {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/rsc.toml");
    assert_eq!(show(&["--config", shipped.to_str().unwrap()], &[]), show(&[], &[]));
}

#[test]
fn unknown_keys_are_named_with_their_origin() {
    let directory = TempDir::new().unwrap();
    let path = file(&directory, "[coordination]\nmember-lease = \"5s\"\n");
    let sentence = refusal(&["--config", path.to_str().unwrap()], &[]);
    assert!(sentence.starts_with("coordination.member-lease (file /"), "{sentence}");
    assert!(
        sentence.contains("test.toml): unknown key; [coordination] has heartbeat-interval, "),
        "{sentence}"
    );

    assert_eq!(
        refusal(&[], &[("RSC_STORE__KIND", "memory")]),
        "store.kind (environment variable RSC_STORE__KIND): unknown key; [store] has key-prefix, type"
    );
    assert!(rsc(&["config", "check"], &[("RSC_FOO", "1"), ("RSC_STORE", "x")]).status.success());
}

#[test]
fn bad_values_are_named_with_their_origin() {
    let directory = TempDir::new().unwrap();
    let path = file(&directory, "server.workers = \"four\"");
    let sentence = refusal(&["--config", path.to_str().unwrap()], &[]);
    assert!(sentence.starts_with("server.workers (file /"), "{sentence}");
    assert!(
        sentence.ends_with("\"four\" is not allowed here; write a whole number from 0 to 65535"),
        "{sentence}"
    );

    for text in ["5", "-3s", "5 parsecs"] {
        assert_eq!(
            refusal(&[], &[("RSC_COORDINATION__TICK_INTERVAL", text)]),
            format!(
                "coordination.tick-interval (environment variable RSC_COORDINATION__TICK_INTERVAL): {text:?} is not \
                 allowed here; write a duration such as 500ms, 3s or 10m"
            )
        );
    }
    for (flag, text, sentence) in [
        (
            "--listen",
            "nowhere",
            "server.listen (flag --listen): \"nowhere\" is not an IP address with a port",
        ),
        ("--store", "disk", "store.type (flag --store): \"disk\" is not known; write `redis` or `memory`"),
        (
            "--redis-mode",
            "ring",
            "redis.mode (flag --redis-mode): \"ring\" is not known; write one of `standalone`",
        ),
        ("--redis-url", "http://h", "redis.urls[0] (flag --redis-url): does not begin with redis://"),
    ] {
        let found = refusal(&[flag, text], &[]);
        assert!(found.starts_with(sentence), "{found}");
    }
}

#[test]
fn contradictions_name_both_sides() {
    let directory = TempDir::new().unwrap();
    let path = file(&directory, "coordination.heartbeat-interval = \"4s\"");
    let sentence =
        refusal(&["--config", path.to_str().unwrap()], &[("RSC_COORDINATION__MEMBER_LEASE_TTL", "7s")]);
    assert!(sentence.starts_with("coordination.member-lease-ttl (environment variable RSC_"), "{sentence}");
    assert!(sentence.contains("coordination.heartbeat-interval = 4s (file /"), "{sentence}");
    assert!(sentence.ends_with("at least 8s is allowed"), "{sentence}");
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let directory = TempDir::new().unwrap();
    let path = file(&directory, "[server]\nworkers = 2\nlisten = \"127.0.0.1:1\n");
    let sentence = refusal(&["--config", path.to_str().unwrap()], &[]);
    assert!(
        sentence.starts_with("configuration file /")
            && sentence.contains("test.toml, line 3: not valid TOML"),
        "{sentence}"
    );

    let path = file(&directory, "[server]\nworkers = 2\nworkers = 3\n");
    let sentence = refusal(&["--config", path.to_str().unwrap()], &[]);
    assert!(sentence.contains("test.toml, line 3: not valid TOML: duplicate key"), "{sentence}");

    let path = file(&directory, "[redis]\n\npassword = \"hunter2");
    let sentence = refusal(&["--config", path.to_str().unwrap()], &[]);
    assert!(sentence.contains("line 3") && !sentence.contains("hunter2"), "{sentence}");

    let sentence = refusal(&["--config", "/nowhere/rsc.toml"], &[]);
    assert!(
        sentence.starts_with("configuration file /nowhere/rsc.toml: cannot be read: No such file"),
        "{sentence}"
    );

    let sentence = refusal(&["--config", directory.path().to_str().unwrap()], &[]);
    assert!(sentence.contains("cannot be read"), "{sentence}");

    let path = directory.path().join("test.toml");
    std::fs::write(&path, b"a = \"\xff\"").unwrap();
    assert!(refusal(&["--config", path.to_str().unwrap()], &[]).ends_with("is not UTF-8 text"));
}

#[test]
fn does_not_start_on_an_address_that_others_can_reach() {
    for arguments in [&["--listen", "0.0.0.0:0"][..], &["--listen", "[::]:0", "--insecure"]] {
        let sentence = refusal(arguments, &[]);
        assert!(sentence.starts_with("server.listen (flag --listen): "), "{sentence}");
        assert!(sentence.contains("loopback addresses only"), "{sentence}");
    }
    let sentence = refusal(&[], &[("RSC_SECURITY__TOKEN_SECRET", "hunter2")]);
    assert!(
        sentence.contains("authentication is not part of this version yet; remove the key"),
        "{sentence}"
    );
    assert!(!sentence.contains("hunter2"), "{sentence}");
}

#[test]
fn bad_arguments_end_with_2_and_version_and_help_with_0() {
    for arguments in [&[][..], &["fly"], &["serve", "--colour", "red"], &["config"], &["serve", "--config"]] {
        assert_eq!(rsc(arguments, &[]).status.code(), Some(2), "{arguments:?}");
    }
    let version = rsc(&["--version"], &[]);
    assert_eq!(version.status.code(), Some(0));
    assert_eq!(text(&version.stdout), format!("rsc {}\n", env!("CARGO_PKG_VERSION")));
    assert!(text(&rsc(&["serve", "--help"], &[]).stdout).contains("--redis-url"));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = Command::new(env!("CARGO_BIN_EXE_rsc"))
        .args(["config", "show"])
        .env_clear()
        .stdout(writer)
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(0));
}
