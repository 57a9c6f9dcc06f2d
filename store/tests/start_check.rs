//! What is looked at before anything is done: the kind of server, the login, rights, TLS.

// Clippy's own exception reaches test functions only, not the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rsc_store::{GroupStore, RedisMode, RedisSettings, RedisStore, StoreError, TlsSettings};
use support::server::RedisServer;
use support::stores::{settings, store};
use support::{created, group};
use tempfile::TempDir;

async fn misconfigured(settings: &RedisSettings, words: &[&str]) {
    match RedisStore::new(settings).unwrap().check().await {
        Err(StoreError::Misconfigured(text)) => {
            assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
        }
        other => panic!("{words:?}: {other:?}"),
    }
}

#[tokio::test]
async fn another_mode_than_the_configured_one_is_named() {
    let plain = RedisServer::start();
    let node = RedisServer::start_with(&["--cluster-enabled", "yes"]);
    let cluster = |url| RedisSettings { mode: RedisMode::Cluster, ..settings(url) };
    store(plain.url()).check().await.unwrap();
    misconfigured(&settings(node.url()), &["redis.mode is standalone", "a node of a Redis Cluster"]).await;
    misconfigured(&cluster(plain.url()), &["redis.mode is cluster", "a standalone server"]).await;
    let sentinel = RedisMode::Sentinel { master: "m".into() };
    misconfigured(
        &RedisSettings { mode: sentinel, ..settings(plain.url()) },
        &["redis.mode is sentinel", "a standalone server", "redis.urls"],
    )
    .await;
    // A node without slots may get some: that passes.
    let error = RedisStore::new(&cluster(node.url())).unwrap().check().await.unwrap_err();
    assert!(
        matches!(&error, StoreError::Unavailable(text) if text.contains("no node that serves slots")),
        "{error:?}"
    );
    // A replica is no master; that too may pass.
    plain.ok(&["REPLICAOF", "127.0.0.1", "1"]);
    assert!(
        matches!(store(plain.url()).check().await, Err(StoreError::Refused(text)) if text.contains("READONLY"))
    );
}

#[tokio::test]
async fn every_missing_right_is_named() {
    const NEEDED: [&str; 17] = [
        "time",
        "type",
        "get",
        "set",
        "del",
        "pttl",
        "pexpire",
        "persist",
        "hgetall",
        "hmget",
        "hset",
        "hdel",
        "xadd",
        "xrevrange",
        "smembers",
        "sismember",
        "sadd",
    ];
    let server = RedisServer::start();
    for command in NEEDED {
        server.ok(&[
            "ACL",
            "SETUSER",
            "u",
            "reset",
            "on",
            ">geheim",
            "~redis-stream:coord:*",
            "+@all",
            &format!("-{command}"),
        ]);
        let mut settings = settings(server.url());
        settings.username = Some("u".into());
        settings.password = Some("geheim".into());
        misconfigured(
            &settings,
            &[&format!("may not run {}", command.to_uppercase()), "redis-stream:coord:*"],
        )
        .await;
    }
    let mut settings = settings(server.url());
    settings.username = Some("u".into());
    settings.password = Some("geheim".into());
    server.ok(&["ACL", "SETUSER", "u", "-hset", "-hdel"]);
    misconfigured(&settings, &["HDEL", "HSET", "SADD"]).await;
    server.ok(&["ACL", "SETUSER", "u", "+@all", "-evalsha"]);
    misconfigured(&settings, &["EVALSHA", "EVAL"]).await;
    server.ok(&["ACL", "SETUSER", "u", "+@all", "resetkeys", "~other:*"]);
    misconfigured(&settings, &["redis-stream:coord:*"]).await;
    server.ok(&["ACL", "SETUSER", "u", "~redis-stream:coord:*"]);
    RedisStore::new(&settings).unwrap().check().await.unwrap();
    // Nothing of it is left but what a user who may not delete cannot remove: for a second.
    support::eventually("nothing is left", || async { server.run::<u64>(&["DBSIZE"]).unwrap() == 0 }).await;
}

/// A certificate authority, a server's certificate for 127.0.0.1, and a client's.
struct Papers {
    directory: TempDir,
}

impl Papers {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, "authority of a test");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let write = |name: &str, text: String| std::fs::write(directory.path().join(name), text).unwrap();
        write("ca.pem", authority.pem());
        for (name, host) in [("server", "127.0.0.1"), ("client", "client"), ("other", "redis.example.org")] {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
            params.distinguished_name.push(DnType::CommonName, name);
            write(&format!("{name}.pem"), params.signed_by(&key, &authority).unwrap().pem());
            write(&format!("{name}.key"), key.serialize_pem());
        }
        Papers { directory }
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }

    fn server(&self, name: &str, asks_clients: &str) -> RedisServer {
        let (certificate, key) = (self.path(&format!("{name}.pem")), self.path(&format!("{name}.key")));
        // The plain port stays open, for the test's own hands; TLS is on one of its own.
        let port = support::server::free_port().to_string();
        RedisServer::start_with(&[
            "--tls-port",
            &port,
            "--tls-cert-file",
            &certificate,
            "--tls-key-file",
            &key,
            "--tls-ca-cert-file",
            &self.path("ca.pem"),
            "--tls-auth-clients",
            asks_clients,
        ])
    }
}

fn tls_url(server: &RedisServer) -> String {
    let port: Vec<String> = server.run(&["CONFIG", "GET", "tls-port"]).unwrap();
    format!("rediss://127.0.0.1:{}", port[1])
}

#[tokio::test]
async fn tls_works_or_says_what_is_wrong() {
    let papers = Papers::new();
    let server = papers.server("server", "no");
    let trusting = |url: String| {
        let mut settings = settings(url);
        settings.tls.ca_file = Some(papers.path("ca.pem").into());
        settings
    };
    let good = trusting(tls_url(&server));
    let store = RedisStore::new(&good).unwrap();
    store.check().await.unwrap();
    created(&store, &group("orders")).await;

    let stranger = Papers::new();
    let mut other_authority = good.clone();
    other_authority.tls.ca_file = Some(stranger.path("ca.pem").into());
    misconfigured(&other_authority, &["TLS to 127.0.0.1", "certificate", "redis.tls.ca-file"]).await;
    let mut other_name = good.clone();
    other_name.tls.server_name = Some("redis.example.org".into());
    misconfigured(&other_name, &["certificate", "redis.tls.server-name"]).await;
    // Neither side of a misunderstanding says so; who waits is told what it may be.
    let mut mistaken = trusting(server.url().replace("redis://", "rediss://"));
    mistaken.connect_timeout = std::time::Duration::from_millis(500);
    let error = RedisStore::new(&mistaken).unwrap().check().await.unwrap_err();
    assert!(matches!(&error, StoreError::Unavailable(text) if text.contains("speak TLS")), "{error:?}");
    let plain = settings(tls_url(&server).replace("rediss://", "redis://"));
    let error = RedisStore::new(&plain).unwrap().check().await.unwrap_err();
    assert!(matches!(&error, StoreError::Unavailable(text) if text.contains("rediss://")), "{error:?}");

    let named = papers.server("other", "no");
    let mut settings = trusting(tls_url(&named));
    misconfigured(&settings, &["certificate"]).await;
    settings.tls.server_name = Some("redis.example.org".into());
    RedisStore::new(&settings).unwrap().check().await.unwrap();
}

#[tokio::test]
async fn a_server_that_asks_for_our_certificate_gets_it_or_says_so() {
    let papers = Papers::new();
    let server = papers.server("server", "yes");
    let mut settings = settings(tls_url(&server));
    settings.tls = TlsSettings { ca_file: Some(papers.path("ca.pem").into()), ..TlsSettings::default() };
    misconfigured(&settings, &["TLS", "redis.tls.certificate-file"]).await;
    settings.tls.certificate_file = Some(papers.path("client.pem").into());
    settings.tls.key_file = Some(papers.path("client.key").into());
    RedisStore::new(&settings).unwrap().check().await.unwrap();
    settings.tls.key_file = Some(papers.path("other.key").into());
    let error = RedisStore::new(&settings).unwrap_err().to_string();
    assert!(error.starts_with("redis.tls.certificate-file"), "{error}");
    settings.tls.key_file = Some(papers.path("client.pem").into());
    let error = RedisStore::new(&settings).unwrap_err().to_string();
    assert!(error.starts_with("redis.tls.key-file") && error.contains("client.pem"), "{error}");
}
