//! How `rsc serve` meets a Redis that is not what the configuration says (protocol 12): one sentence and exit code 2 at the start;
//! refused mutations and degraded health when it happens later. A Redis that is away is waited for.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::process::{Command, Stdio};

use reqwest::StatusCode;
use rsc_protocol::ErrorCode;
use support::{Api, Daemon, RedisServer, heartbeat, wait_until};

/// Runs `rsc serve`, which must not start; returns what it says last.
fn refused(arguments: &[&str], variables: &[(&str, &str)]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_rsc"))
        .args(["serve", "--insecure", "--listen", "127.0.0.1:0"])
        .args(arguments)
        .env_remove("RSC_REDIS__PASSWORD")
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{said}");
    assert!(!said.contains("geheim"), "{said}");
    errors[0].to_owned()
}

async fn command(redis: &RedisServer, words: &[&str]) {
    redis.command::<redis::Value>(words).await;
}

#[tokio::test]
async fn what_will_not_get_better_ends_the_start_with_one_sentence() {
    let redis = RedisServer::start();
    let url = redis.url();
    for (arguments, variables, words) in [
        (vec!["--redis-mode", "cluster"], vec![], vec!["redis.mode is cluster", "standalone"]),
        (
            vec!["--redis-mode", "sentinel"],
            vec![("RSC_REDIS__SENTINEL_MASTER", "m")],
            vec!["redis.mode is sentinel", "redis.urls"],
        ),
        (
            vec![],
            vec![("RSC_REDIS__USERNAME", "u"), ("RSC_REDIS__PASSWORD", "geheim")],
            vec!["redis.password"],
        ),
        (vec![], vec![("RSC_REDIS__DATABASE", "99")], vec!["redis.database"]),
    ] {
        let arguments = [arguments, vec!["--redis-url", &url]].concat();
        let said = refused(&arguments, &variables);
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    }
    let tls = url.replace("redis://", "rediss://");
    let said = refused(&["--redis-url", &tls], &[("RSC_REDIS__TLS__CA_FILE", "/nowhere/ca.pem")]);
    assert!(said.contains("redis.tls.ca-file") && said.contains("/nowhere/ca.pem"), "{said}");

    command(&redis, &["ACL", "SETUSER", "u", "on", ">geheim", "~*", "+@all", "-hset", "-xadd"]).await;
    let login = [("RSC_REDIS__USERNAME", "u"), ("RSC_REDIS__PASSWORD", "geheim")];
    let said = refused(&["--redis-url", &url], &login);
    assert!(
        said.contains("HSET") && said.contains("XADD") && said.contains("redis-stream:coord:*"),
        "{said}"
    );
}

/// Mutations and heartbeats are refused as temporary, health says why, liveness stays.
async fn expect_degraded(api: &Api, word: &str) {
    let body = serde_json::json!({"initialShardCount": 1, "requestedBy": "test"});
    let answer = api.post("/coord/v1/streams/other", &body).await;
    answer.expect_error(ErrorCode::RedisUnavailable);
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(!answer.header("retry-after").is_empty());
    let health = api.get("/coord/v1/monitoring/health").await.success();
    assert_eq!(health["status"], "DEGRADED", "{health}");
    assert!(health["reason"].as_str().unwrap().contains(word), "{health}");
    api.get("/livez").await.success();
}

#[tokio::test]
async fn what_goes_wrong_later_degrades_and_heals() {
    let redis = RedisServer::start();
    command(&redis, &["ACL", "SETUSER", "u", "on", ">geheim", "~*", "&*", "+@all"]).await;
    let daemon = Daemon::redis(&redis)
        .set("redis", "username", "u")
        .set("redis", "password", "geheim")
        .long_lease()
        .start();
    let api = daemon.api();
    let group = api.create_stream("orders", 2).await;
    let join = heartbeat("m");
    assert_eq!(api.heartbeat(&group, &join).await.status, rsc_protocol::Status::Ok);

    // The password is changed, and who is logged in thrown out.
    command(&redis, &["ACL", "SETUSER", "u", "resetpass", ">anders"]).await;
    command(&redis, &["CLIENT", "KILL", "USER", "u"]).await;
    expect_degraded(&api, "cannot be used as configured").await;
    assert_eq!(api.get("/readyz").await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(daemon.log().contains("wrong user or password"), "{}", daemon.log());
    assert!(!daemon.log().contains("geheim"));
    command(&redis, &["ACL", "SETUSER", "u", "resetpass", ">geheim"]).await;
    wait_until("it works again", async || api.try_heartbeat(&group, &join).await.status.is_success()).await;

    // A right is taken away: the log names it.
    command(&redis, &["ACL", "SETUSER", "u", "-hset"]).await;
    let answer = api.try_heartbeat(&group, &heartbeat("n")).await;
    answer.expect_error(ErrorCode::RedisUnavailable);
    let log = daemon.log().to_lowercase();
    assert!(log.contains("may not run hset"), "{log}");
    command(&redis, &["ACL", "SETUSER", "u", "+hset"]).await;
    assert_eq!(api.heartbeat(&group, &heartbeat("n")).await.status, rsc_protocol::Status::Ok);

    // Full: nothing is written, and it is said.
    command(&redis, &["CONFIG", "SET", "maxmemory", "1"]).await;
    let answer = api.try_heartbeat(&group, &heartbeat("o")).await;
    answer.expect_error(ErrorCode::RedisUnavailable);
    assert!(daemon.log().contains("maxmemory"), "{}", daemon.log());
    let health = api.get("/coord/v1/monitoring/health").await.success();
    assert_eq!(health["status"], "DEGRADED", "{health}");
    assert!(health["reason"].as_str().unwrap().contains("maxmemory"), "{health}");
    command(&redis, &["CONFIG", "SET", "maxmemory", "0"]).await;
    assert_eq!(api.heartbeat(&group, &heartbeat("o")).await.status, rsc_protocol::Status::Ok);
    wait_until("health says so", async || {
        api.get("/coord/v1/monitoring/health").await.success()["status"] == "UP"
    })
    .await;

    // The master becomes a replica of nobody that is there, and a master again.
    command(&redis, &["REPLICAOF", "127.0.0.1", "1"]).await;
    let answer = api.try_heartbeat(&group, &heartbeat("p")).await;
    answer.expect_error(ErrorCode::RedisUnavailable);
    assert!(daemon.log().contains("READONLY"), "{}", daemon.log());
    command(&redis, &["REPLICAOF", "NO", "ONE"]).await;
    wait_until("it works again", async || {
        api.try_heartbeat(&group, &heartbeat("p")).await.status.is_success()
    })
    .await;
    command(&redis, &["SCRIPT", "FLUSH"]).await;
    assert_eq!(api.heartbeat(&group, &heartbeat("q")).await.status, rsc_protocol::Status::Ok);
}

#[tokio::test]
async fn a_redis_that_is_away_at_the_start_is_waited_for() {
    let mut redis = RedisServer::start();
    redis.kill();
    let daemon = Daemon::redis(&redis).fast().start();
    let api = daemon.api();
    assert_eq!(api.get("/readyz").await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(daemon.log().contains("requests are refused until redis can be used"), "{}", daemon.log());
    redis.restart_empty();
    wait_until("it is ready", async || api.get("/readyz").await.status.is_success()).await;
    api.create_stream("orders", 2).await;
}
