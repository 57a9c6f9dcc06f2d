//! `rsc dev`: a first look with nothing installed. The coordinator of `rsc serve`, a demo stream, and three
//! consumers that come, leave and crash; the terminal shows who owns what.

mod board;
mod cast;
mod consumer;
mod private_redis;
mod records;
mod screen;
mod signals;
mod stage;

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use reqwest::StatusCode;
use rsc_client::decision::Settings;
use rsc_protocol::admin::CreateStreamRequest;
use tokio::time::{Instant, sleep};

use crate::config::{self, Config, CoordinationConfig, Flag, Sources};
use crate::serve::Running;
use crate::{logging, panics, recorder};

use private_redis::PrivateRedis;
use records::Records;
use screen::Screen;
use signals::Signals;
use stage::Stage;

const STREAM: &str = "demo";
const GROUP: &str = "workers";
const SHARDS: u32 = 12;
/// How long the coordinator may take until it can create the demo stream.
const SETUP: Duration = Duration::from_secs(15);

/// Timing that makes a first look lively, checked like anybody's (protocol 10).
const TIMING: [(&str, &str); 4] = [
    ("coordination.heartbeat-interval", "1s"),
    ("coordination.member-lease-ttl", "6s"),
    ("coordination.rebalance-timeout", "10s"),
    ("coordination.mutex-ttl", "3s"),
];

/// Arguments of `rsc dev`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DevArguments {
    /// Loopback address and port of the coordinator; port 0 takes any free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080", value_parser = loopback_address)]
    listen: SocketAddr,
    /// End by itself after so many seconds
    #[arg(long, value_name = "N")]
    seconds: Option<u64>,
    /// Which log lines of the coordinator are written, to standard error (try info 2>rsc.log)
    #[arg(long, value_name = "FILTER", default_value = "error")]
    log_filter: String,
}

fn loopback_address(text: &str) -> Result<SocketAddr, &'static str> {
    let address: SocketAddr = text.parse().map_err(|_| "write it as 127.0.0.1:8080 or [::1]:8080")?;
    if address.ip().is_loopback() {
        return Ok(address);
    }
    Err("there is no authentication yet, so only loopback addresses are served")
}

/// Runs everything that a first look needs, until it is told to stop.
///
/// # Errors
/// When the address is taken, or the coordinator does not start.
pub(crate) fn run(arguments: DevArguments) -> anyhow::Result<ExitCode> {
    refuse_taken_address(arguments.listen)?;
    actix_rt::System::new().block_on(async {
        // First of all, so that a signal during the start leaves nothing behind.
        let mut signals = Signals::listen()?;
        let (mut redis, store) = start_redis().await;
        let shown = show(&arguments, redis.as_mut(), &store, &mut signals).await;
        // Last, so that what the coordinator still has to record can be recorded.
        if let Some(redis) = redis {
            redis.stop().await;
        }
        shown.map(|()| ExitCode::SUCCESS)
    })
}

/// Says so before anything is started. Binding for real happens later, and fails too if somebody is faster.
fn refuse_taken_address(listen: SocketAddr) -> anyhow::Result<()> {
    match TcpListener::bind(listen) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => bail!(
            "{listen} is taken by another process: stop that one, or name another address with --listen \
             (127.0.0.1:0 takes any free port)"
        ),
        _ => Ok(()),
    }
}

/// The private server, if there can be one, and a line that says where metadata is kept.
async fn start_redis() -> (Option<PrivateRedis>, String) {
    let Some(program) = private_redis::find() else {
        let line = "memory, because there is no redis-server on the PATH: no streams are created";
        return (None, line.to_owned());
    };
    match PrivateRedis::start(&program).await {
        Ok(redis) => {
            let port = redis.port();
            let line = format!("redis, a private server that ends with this: redis-cli -p {port}");
            (Some(redis), line)
        }
        Err(error) => (None, format!("memory, because {error:#}")),
    }
}

/// The configuration of the demo. Files and environment have no say: a demo must never find somebody's Redis.
fn configuration(arguments: &DevArguments, redis_port: Option<u16>) -> anyhow::Result<Config> {
    let flag = |key, value| Flag { name: "rsc dev", key, value };
    let mut flags: Vec<Flag> = TIMING.iter().map(|(key, value)| flag(key, (*value).into())).collect();
    flags.push(flag("server.listen", arguments.listen.to_string().into()));
    flags.push(flag("telemetry.log-filter", arguments.log_filter.as_str().into()));
    flags.push(match redis_port {
        Some(port) => flag("redis.urls", vec![format!("redis://127.0.0.1:{port}")].into()),
        None => flag("store.type", "memory".into()),
    });
    let sources = Sources { flags, insecure: true, ..Sources::default() };
    Ok(config::load(&sources)?.config)
}

async fn show(
    arguments: &DevArguments,
    redis: Option<&mut PrivateRedis>,
    store: &str,
    signals: &mut Signals,
) -> anyhow::Result<()> {
    let port = redis.as_ref().map(|redis| redis.port());
    let config = configuration(arguments, port)?;
    logging::init_logging(&config.telemetry)?;
    panics::log();
    let running = Running::start(&config, recorder::install()?).await?;
    let api = format!("http://{}/coord/v1", running.address);
    let http = reqwest::Client::builder().no_proxy().build()?;
    let result = async {
        create_stream(&http, &api).await?;
        let records = match port {
            Some(port) => Some(Records::connect(port).await.context("the private redis-server")?),
            None => None,
        };
        let mut screen = Screen::new();
        screen.say(&introduction(&config.coordination, running.address, store));
        let group_url = format!("{api}/streams/{STREAM}/groups/{GROUP}");
        let settings = Settings {
            heartbeat_interval: config.coordination.heartbeat_interval,
            assumed_lease: config.coordination.member_lease_ttl / 10 * 9,
            ..Settings::default()
        };
        Stage::new(screen, http, group_url, settings, records).play(arguments.seconds, redis, signals).await;
        Ok(())
    }
    .await;
    running.coordinator.begin_termination();
    tokio::select! {
        _ = running.stop(&config.server) => {}
        () = signals.next() => {}
    }
    result
}

/// Creates the demo stream through the API, as an operator would.
async fn create_stream(http: &reqwest::Client, api: &str) -> anyhow::Result<()> {
    let request = CreateStreamRequest {
        initial_shard_count: Some(SHARDS.into()),
        requested_by: "rsc dev".to_owned(),
        reason: Some("first look".to_owned()),
        consumer_groups: Some(vec![GROUP.to_owned()]),
    };
    let deadline = Instant::now() + SETUP;
    loop {
        let answer = http.post(format!("{api}/streams/{STREAM}")).json(&request).send().await?;
        let status = answer.status();
        if status.is_success() {
            return Ok(());
        }
        let message = answer.text().await.context("the answer to the creation of the demo stream")?;
        if status != StatusCode::SERVICE_UNAVAILABLE || Instant::now() > deadline {
            bail!("the demo stream could not be created: {message}");
        }
        sleep(Duration::from_millis(100)).await;
    }
}

fn introduction(timing: &CoordinationConfig, address: SocketAddr, store: &str) -> String {
    let usual = CoordinationConfig::default();
    let text = humantime::format_duration;
    let group = format!("streams/{STREAM}/groups/{GROUP}");
    format!(
        "coordinator  http://{address}, stream {STREAM} with {SHARDS} shards, group {GROUP}\n\
         store        {store}\n\
         timing       heartbeat {}, lease {}; `rsc serve` has {} and {}\n\
         try          curl -s http://{address}/coord/v1/{group}\n\
         {:13}curl -s http://{address}/coord/v1/monitoring/{group}/assignments\n\
         {:13}curl -s http://{address}/coord/v1/{group}/producer-routing\n\
         columns      one per shard: A consumer-a reads it, a consumer-a drains it,\n\
         {:13}x its reader crashed, . nobody, # two readers (never);\n\
         {:13}read/sent, with redis: records of a producer that routes by what it is told\n",
        text(timing.heartbeat_interval),
        text(timing.member_lease_ttl),
        text(usual.heartbeat_interval),
        text(usual.member_lease_ttl),
        "",
        "",
        "",
        "",
    )
}
