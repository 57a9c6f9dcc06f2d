//! `rsc doctor`: looks at everything that breaks people, and says what to do about it. Each line has an id that stays;
//! docs/doctor.md lists them. It writes nothing but a key of its own that ends by itself (`rights`).

mod clock;
mod durability;
mod facts;
mod groups;
mod mutexes;
mod report;
mod rights;
mod server;
mod shards;
mod timeouts;

use std::process::ExitCode;

use clap::Args;
use rsc_store::{GroupStore, RedisNode, StoreError};

use super::{Output, Redis};
use crate::cli::ConfigArguments;
use crate::config::{Loaded, RedisMode};
use facts::Server;
use report::Report;

/// Arguments of `rsc doctor`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DoctorArguments {
    #[command(flatten)]
    pub(crate) config: ConfigArguments,
    /// How the findings are printed
    #[arg(long, value_enum, default_value_t)]
    output: Output,
}

/// Looks at everything. The code is 1 when there is an error among the findings.
///
/// # Errors
/// When the findings cannot be printed; whatever is wrong with Redis is one of them.
pub(crate) fn run(loaded: Loaded, arguments: &DoctorArguments) -> anyhow::Result<ExitCode> {
    super::run(loaded, async |redis| {
        let report = examine(redis).await;
        let text = match arguments.output {
            Output::Text => report.text(),
            Output::Json => {
                let document = report.json(mode_name(redis.config.redis.mode), redis.keys.prefix());
                format!("{document:#}\n")
            }
        };
        crate::print(&text)?;
        Ok(if report.has_errors() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    })
}

/// As the configuration writes it.
fn mode_name(mode: RedisMode) -> &'static str {
    match mode {
        RedisMode::Standalone => "standalone",
        RedisMode::Cluster => "cluster",
        RedisMode::Sentinel => "sentinel",
    }
}

/// Every check, in an order in which what comes first explains what comes later.
async fn examine(redis: &Redis) -> Report {
    let mut report = Report::default();
    let nodes = match redis.tools.nodes().await {
        Ok(nodes) => nodes,
        Err(error) => {
            not_connected(redis, &error, &mut report).await;
            return report;
        }
    };
    report.ok("connection", urls(redis), format!("answers; {} known", count(nodes.len(), "server")));
    report.checked_at = redis.store.ping().await.ok();
    // A connection that breaks in the middle ends the examination: what follows would all say the same.
    if let Err(error) = examine_servers(redis, &nodes, &mut report).await {
        not_connected(redis, &error, &mut report).await;
    }
    report
}

async fn examine_servers(redis: &Redis, nodes: &[RedisNode], report: &mut Report) -> Result<(), StoreError> {
    let servers = announced(redis, nodes, report).await;
    if servers.is_empty() {
        // Nobody is left to ask.
        return Ok(());
    }
    let fits = server::mode(redis, &servers, report);
    server::roles(redis, &servers, report).await?;
    server::version(&servers, report);
    server::commands(redis, &servers, report).await?;
    durability::eviction(&servers, report);
    durability::persistence(&servers, report);
    durability::replicas(redis, &servers, report);
    timeouts::of_servers(&servers, report);
    timeouts::of_configuration(redis, report);
    clock::examine(redis, &servers, report).await?;
    if !fits {
        let why = "not looked at: the server is of another kind than configured, see mode";
        for id in ["acl", "index", "records", "mutexes", "shards"] {
            report.unknown(id, urls(redis), why);
        }
        return Ok(());
    }
    rights::examine(redis, &servers, report).await?;
    let found = groups::examine(redis, report).await?;
    mutexes::examine(redis, &found, report).await?;
    shards::examine(redis, &found, report).await
}

/// Each server that is announced answers where it is announced. Returns those that do, and what they say.
async fn announced(redis: &Redis, nodes: &[RedisNode], report: &mut Report) -> Vec<Server> {
    let mut servers = Vec::new();
    for node in nodes {
        let answers = match redis.tools.on(node, &redis::cmd("PING")).await {
            // Who forbids PING answers too.
            Ok(_) | Err(StoreError::Refused(_)) => Server::ask(redis, node).await,
            Err(error) => Err(error),
        };
        match answers {
            Ok(server) => servers.push(server),
            Err(error) => report.error(
                "nodes",
                &node.address,
                format!("is known as a server of this deployment and does not answer there: {error}"),
                "start it, or say in redis.node-mappings where the announced address can be reached from here",
            ),
        }
    }
    if servers.len() == nodes.len() {
        report.ok("nodes", addresses(&servers), "every server answers where it is announced");
    }
    servers
}

/// No server, or none that lets this user in, or none of the configured kind.
async fn not_connected(redis: &Redis, error: &StoreError, report: &mut Report) {
    if matches!(error, StoreError::Misconfigured(_)) && server::mode_of_named(redis, report).await {
        return;
    }
    let remedy = match error {
        StoreError::Refused(text) => match text.split(' ').next().unwrap_or_default() {
            "NOPERM" => "give the user the rights that docs/operations.md lists",
            "LOADING" => "wait until the server has read its data",
            _ => "look at the server's log",
        },
        StoreError::Misconfigured(text) if text.contains("redis.password") => {
            "correct redis.username and redis.password; the server's side is shown by ACL LIST"
        }
        StoreError::Misconfigured(_) => "correct the configuration; what is said names the key",
        StoreError::Unavailable(_) => {
            "start the server, or correct redis.urls; a firewall that drops packets looks the same"
        }
        StoreError::Unexpected(_) => "make sure that redis.urls leads to a Redis or Valkey server",
    };
    report.error("connection", urls(redis), error.to_string(), remedy);
}

/// The configured URLs, without passwords.
fn urls(redis: &Redis) -> String {
    redis.config.redis.urls.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The addresses of servers.
fn addresses(servers: &[Server]) -> String {
    super::few(&servers.iter().map(|server| server.address().to_owned()).collect::<Vec<_>>())
}

/// What several servers have in common, and which they are.
fn grouped<'s>(rows: impl Iterator<Item = (&'s Server, String)>) -> Vec<(String, String)> {
    let mut groups: std::collections::BTreeMap<String, Vec<Server>> = std::collections::BTreeMap::new();
    for (server, what) in rows {
        groups.entry(what).or_default().push(server.clone());
    }
    groups.into_iter().map(|(what, servers)| (addresses(&servers), what)).collect()
}

/// `1 server`, `2 servers`.
fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}
