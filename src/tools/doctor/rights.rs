//! What the user may do. `ACL DRYRUN` would tell, but needs rights of its own and Redis 7; so every command is tried, on a
//! key that belongs to nobody (`P:{doctor}:probe`) and ends within a second. It is the only thing that the doctor writes.

use std::collections::BTreeSet;

use redis::{Cmd, Value};
use rsc_store::{NodeRole, RedisNode, StoreError};

use super::facts::{Server, text};
use super::report::Report;
use crate::tools::Redis;

const PROBE: &str = include_str!("../scripts/probe.lua");
/// Commands without which things work, and less is shown.
const OPTIONAL: [&str; 2] = ["MEMORY|USAGE", "CLIENT|SETNAME"];

/// Codes with which a server refuses writes of anybody, whatever their rights.
const NO_WRITES: [&str; 7] =
    ["OOM", "READONLY", "MISCONF", "NOREPLICAS", "CLUSTERDOWN", "MASTERDOWN", "BUSY"];

/// A command that was refused, and the server's words.
type Refused = (String, String);

/// The code with which the server refuses everybody's writes, if these words have one. Redis 6.2 and 7.0 put words of
/// their own before what a script's command was refused with.
fn refuses_writes(words: &str) -> bool {
    words.split([' ', '-']).take(4).any(|word| NO_WRITES.contains(&word))
}

/// Names of probe keys that are tried until one of them lies on a given master of a cluster.
const MOST_KEYS: u32 = 1_000;

/// Tries every command that the coordinator uses, on every master.
pub(super) async fn examine(
    redis: &Redis,
    servers: &[Server],
    report: &mut Report,
) -> Result<(), StoreError> {
    let user = redis.config.redis.user().unwrap_or("default").to_owned();
    let has_master = servers.iter().any(|server| server.node.role == NodeRole::Master);
    let mark = report.mark();
    let mut optional = BTreeSet::new();
    for server in servers.iter().filter(|server| server.node.role == NodeRole::Master || !has_master) {
        let Some(key) = key_on(redis, &server.node).await? else {
            report.unknown("acl", server.address(), "no key was found that lies on this master");
            continue;
        };
        optional.extend(examine_one(redis, server, &key, &user, report).await?);
    }
    if report.is_clean_since(mark) {
        report.ok("acl", format!("user {user}"), format!("may do everything on {}:*", redis.keys.prefix()));
    }
    if !optional.is_empty() {
        let names = optional.into_iter().collect::<Vec<_>>().join(", ");
        report.info("acl.optional", format!("user {user}"), format!("may not, and need not: {names}"));
    }
    Ok(())
}

/// Of the doctor's own keys one that lies on this server.
async fn key_on(redis: &Redis, node: &RedisNode) -> Result<Option<String>, StoreError> {
    for number in 0..MOST_KEYS {
        let tag = if number == 0 { "doctor".to_owned() } else { format!("doctor:{number}") };
        let key = format!("{}:{{{tag}}}:probe", redis.keys.prefix());
        match redis.tools.on(node, &nobodys_script(&key)).await {
            Err(StoreError::Refused(words)) if ["MOVED", "ASK"].contains(&first_word(&words)) => {}
            Ok(_) | Err(StoreError::Refused(_)) => return Ok(Some(key)),
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// A call of a script that no server has.
fn nobodys_script(key: &str) -> Cmd {
    let mut call = redis::cmd("EVALSHA");
    call.arg("0".repeat(40)).arg(1).arg(key);
    call
}

fn first_word(words: &str) -> &str {
    words.split(' ').next().unwrap_or_default()
}

/// What this server refuses. Returns the optional commands among it.
async fn examine_one(
    redis: &Redis,
    server: &Server,
    key: &str,
    user: &str,
    report: &mut Report,
) -> Result<Vec<String>, StoreError> {
    let node = &server.node;
    let subject = format!("user {user} on {}", server.address());
    let mut refused = direct(redis, node, key).await?;
    let mut tried = true;
    match redis.tools.on(node, redis::cmd("EVAL").arg(PROBE).arg(1).arg(key)).await {
        Ok(answer) => refused.extend(rows(answer)?),
        Err(StoreError::Refused(words)) => {
            tried = false;
            refused.push(("EVAL".to_owned(), words));
        }
        Err(error) => return Err(error),
    }
    if let Some((_, words)) = refused.iter().find(|(_, words)| refuses_writes(words)) {
        report.error(
            "writes",
            server.address(),
            format!("the server refuses writes: {words}"),
            "see role, memory, persistence and replicas above; until then heartbeats are refused",
        );
        report.unknown("acl", subject, "rights cannot be tried while writes are refused");
        return Ok(Vec::new());
    }
    tried &= !refused.iter().any(|(command, _)| command == "SET");
    let (optional, needed): (Vec<Refused>, Vec<Refused>) =
        refused.into_iter().partition(|(command, _)| OPTIONAL.contains(&command.as_str()));
    if let Some((_, words)) = needed.first() {
        let names: Vec<&str> = needed.iter().map(|(command, _)| command.as_str()).collect();
        let rest = if tried { "" } else { "; what else is missing can be tried only when this is there" };
        report.error(
            "acl",
            subject,
            format!("is refused on keys like {key}: {}{rest} (the server says: {words})", names.join(", ")),
            format!(
                "ACL SETUSER {user} {}; all rights are listed in docs/operations.md",
                grants(redis, &names)
            ),
        );
    }
    Ok(optional.into_iter().map(|(command, _)| command).collect())
}

/// What would have to be granted.
fn grants(redis: &Redis, commands: &[&str]) -> String {
    let commands: Vec<String> =
        commands.iter().map(|command| format!("+{}", command.to_lowercase())).collect();
    format!("{} ~{}:*", commands.join(" "), redis.keys.prefix())
}

/// What cannot be tried from a script.
async fn direct(redis: &Redis, node: &RedisNode, key: &str) -> Result<Vec<Refused>, StoreError> {
    let mut load = redis::cmd("SCRIPT");
    load.arg("LOAD").arg("return 0");
    let mut name = redis::cmd("CLIENT");
    name.arg("SETNAME").arg("rsc:doctor");
    let mut commands: Vec<(&str, Cmd, &str)> = vec![
        ("TIME", redis::cmd("TIME"), ""),
        ("EVALSHA", nobodys_script(key), "NOSCRIPT"),
        ("SCRIPT|LOAD", load, ""),
        ("CLIENT|SETNAME", name, ""),
    ];
    if redis.config.redis.wait_replicas > 0 {
        let mut wait = redis::cmd("WAIT");
        wait.arg(0).arg(1);
        commands.push(("WAIT", wait, ""));
    }
    let mut refused = Vec::new();
    for (command, call, expected) in commands {
        match redis.tools.on(node, &call).await {
            Ok(_) => {}
            Err(StoreError::Refused(words)) if first_word(&words) == expected => {}
            Err(StoreError::Refused(words)) => refused.push((command.to_owned(), words)),
            Err(error) => return Err(error),
        }
    }
    Ok(refused)
}

fn rows(answer: Value) -> Result<Vec<Refused>, StoreError> {
    let unexpected = || StoreError::Unexpected("the probing script answers no rows".to_owned());
    let row = |row: Value| {
        let [command, words]: [Value; 2] = row.into_sequence().ok()?.try_into().ok()?;
        Some((text(&command)?, text(&words)?))
    };
    let rows = answer.into_sequence().map_err(|_| unexpected())?;
    rows.into_iter().map(row).collect::<Option<_>>().ok_or_else(unexpected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_refuses_everybody_is_told_from_one_that_refuses_this_user() {
        for words in [
            "OOM command not allowed when used memory > 'maxmemory'.",
            "@user_script: 8: -OOM command not allowed when used memory > 'maxmemory'.",
            "NOREPLICAS Not enough good replicas to write.",
            "-READONLY You can't write against a read only replica.",
        ] {
            assert!(refuses_writes(words), "{words}");
        }
        for words in [
            "ERR The user executing the script can't run this command or subcommand",
            "ERR ACL failure in script: User anna has no permissions to run the 'set' command",
            "NOPERM this user has no permissions to run the 'eval' command",
        ] {
            assert!(!refuses_writes(words), "{words}");
        }
    }
}
