//! What kind of server it is and what it can do.

use rsc_store::{NodeRole, RedisNode, StoreError};

use super::facts::{Info, Server, missing_commands, refusal, text};
use super::report::Report;
use super::{addresses, grouped, mode_name};
use crate::config::RedisMode;
use crate::tools::Redis;

/// What the coordinator cannot work without (docs/operations.md).
const NEEDED: [&str; 27] = [
    "EVALSHA",
    "EVAL",
    "SCRIPT",
    "TIME",
    "TYPE",
    "GET",
    "SET",
    "DEL",
    "PTTL",
    "PEXPIRE",
    "PERSIST",
    "HGETALL",
    "HMGET",
    "HSET",
    "HDEL",
    "XADD",
    "XREVRANGE",
    "SMEMBERS",
    "SISMEMBER",
    "SADD",
    "SREM",
    "XGROUP",
    "XINFO",
    "XRANGE",
    "XPENDING",
    "XACK",
    "UNLINK",
];
/// What consumers need besides.
const NEEDED_BY_CONSUMERS: [&str; 2] = ["XREADGROUP", "XAUTOCLAIM"];
/// What consumers use where it is there (protocol 11).
const OF_NEWER_SERVERS: [&str; 2] = ["XACKDEL", "XNACK"];

/// Whether every server is of the configured kind; what cannot be asked is taken to be.
pub(super) fn mode(redis: &Redis, servers: &[Server], report: &mut Report) -> bool {
    let configured = redis.config.redis.mode;
    // Servers behind sentinels are standalone ones.
    let wanted = if configured == RedisMode::Cluster { "cluster" } else { "standalone" };
    let mark = report.mark();
    let mut fits = true;
    for server in servers {
        match &server.info {
            Err(why) => report.unknown("mode", server.address(), format!("INFO: {why}")),
            Ok(info) => match info.mode() {
                None => report.unknown("mode", server.address(), "INFO does not tell it"),
                Some(found) if found == wanted => {}
                Some(found) => {
                    fits = false;
                    report.error(
                        "mode",
                        server.address(),
                        format!("redis.mode is {}, and this server runs as {found}", mode_name(configured)),
                        format!("set redis.mode to {found}, or correct redis.urls"),
                    );
                }
            },
        }
    }
    if report.is_clean_since(mark) {
        report.ok("mode", addresses(servers), format!("{wanted}, as redis.mode wants it"));
    }
    fits
}

/// For when the configured kind of deployment cannot be found at all: which kind the named servers are. Returns whether
/// that explains it.
pub(super) async fn mode_of_named(redis: &Redis, report: &mut Report) -> bool {
    let wanted = mode_name(redis.config.redis.mode);
    let mut explains = false;
    for url in &redis.config.redis.urls {
        let node = RedisNode { address: url.address(), role: NodeRole::Master };
        let Ok(answer) = redis.tools.on(&node, redis::cmd("INFO").arg("server")).await else { continue };
        let info = text(&answer).map(|text| Info::of(&text)).unwrap_or_default();
        if let Some(found) = info.mode().filter(|found| *found != wanted) {
            explains = true;
            report.error(
                "mode",
                &node.address,
                format!("redis.mode is {wanted}, and this server runs as {found}"),
                format!("set redis.mode to {found}, or correct redis.urls"),
            );
        }
    }
    explains
}

/// Whoever is written to takes writes.
pub(super) async fn roles(redis: &Redis, servers: &[Server], report: &mut Report) -> Result<(), StoreError> {
    let mut masters = Vec::new();
    for server in servers.iter().filter(|server| server.node.role == NodeRole::Master) {
        // Who does not let this user ask is only taken for a master.
        match redis.tools.on(&server.node, &redis::cmd("ROLE")).await {
            Ok(_) => masters.push(server.clone()),
            Err(error) if server.info.is_ok() => {
                refusal(error)?;
                masters.push(server.clone());
            }
            Err(error) => report.unknown("role", server.address(), format!("ROLE: {}", refusal(error)?)),
        }
    }
    if redis.config.redis.mode == RedisMode::Standalone {
        for server in servers.iter().filter(|server| server.node.role == NodeRole::Replica) {
            report.error(
                "role",
                server.address(),
                "is a replica: it refuses writes, or loses them",
                "let redis.urls name its master, or use redis.mode sentinel",
            );
        }
    } else if servers.iter().all(|server| server.node.role == NodeRole::Replica) {
        report.error(
            "role",
            addresses(servers),
            "no server is a master: nothing can be written",
            "wait for the failover to end, or bring a master back",
        );
    }
    if !masters.is_empty() {
        report.ok("role", addresses(&masters), "takes writes");
    }
    Ok(())
}

/// Which server it is, for people; nothing is concluded from it.
pub(super) fn version(servers: &[Server], report: &mut Report) {
    let mut told = Vec::new();
    for server in servers {
        match server.info.as_ref().map(Info::version) {
            Err(why) => report.unknown("version", server.address(), format!("INFO: {why}")),
            Ok(None) => report.unknown("version", server.address(), "INFO does not tell it"),
            Ok(Some(version)) => told.push((server, version)),
        }
    }
    for (addresses, version) in grouped(told.into_iter()) {
        report.info("version", addresses, version);
    }
}

/// Which commands there are: asked for one by one, because version numbers do not tell (Valkey).
pub(super) async fn commands(
    redis: &Redis,
    servers: &[Server],
    report: &mut Report,
) -> Result<(), StoreError> {
    let mark = report.mark();
    let mut needed = NEEDED.to_vec();
    if redis.config.redis.mode == RedisMode::Cluster {
        needed.extend(["CLUSTER", "ASKING"]);
    }
    if redis.config.redis.wait_replicas > 0 {
        needed.push("WAIT");
    }
    for server in servers {
        let node = &server.node;
        match missing_commands(redis, node, &needed).await? {
            Err(why) => report.unknown("commands", server.address(), format!("COMMAND INFO: {why}")),
            Ok(missing) if missing.is_empty() => {}
            Ok(missing) => report.error(
                "commands",
                server.address(),
                format!("the coordinator needs what this server does not have: {}", missing.join(", ")),
                "undo its rename-command, or use Redis 6.2, Valkey 7.2 or newer",
            ),
        }
    }
    if report.is_clean_since(mark) {
        report.ok("commands", addresses(servers), "every command that the coordinator uses is there");
    }
    let mut told = Vec::new();
    for server in servers {
        let node = &server.node;
        if let Ok(missing) = missing_commands(redis, node, &NEEDED_BY_CONSUMERS).await?
            && !missing.is_empty()
        {
            report.warning(
                "commands.consumers",
                server.address(),
                format!("consumers need what this server does not have: {}", missing.join(", ")),
                "undo its rename-command, or use Redis 6.2, Valkey 7.2 or newer",
            );
        }
        if let Ok(missing) = missing_commands(redis, node, &OF_NEWER_SERVERS).await? {
            let has = OF_NEWER_SERVERS.map(|command| {
                format!("{command}: {}", if missing.contains(&command) { "no" } else { "yes" })
            });
            told.push((server, has.join(", ")));
        }
    }
    for (addresses, has) in grouped(told.into_iter()) {
        report.info("commands.ack", addresses, has);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Commands of the table of rights in docs/operations.md, without subcommands.
    #[test]
    fn the_needed_commands_are_those_of_the_operations_page() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/operations.md");
        let page = std::fs::read_to_string(page).unwrap();
        let table = page.split("What the Redis user must be allowed:").nth(1).unwrap();
        let table = table.split("\nThe prefix").next().unwrap();
        let listed: BTreeSet<&str> = table
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|word| word.chars().all(|it| it.is_ascii_uppercase() || "|\\".contains(it)))
            .map(|word| word.split(['|', '\\']).next().unwrap())
            .filter(|word| {
                // What is needed by some configurations only, or not at all.
                let others = ["CLIENT", "INFO", "ROLE", "MEMORY", "DELETE", "CLUSTER", "ASKING", "WAIT"];
                !others.contains(word)
            })
            .collect();
        assert_eq!(listed, BTreeSet::from(NEEDED));
    }
}
