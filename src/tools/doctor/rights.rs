//! What the user may do. `ACL DRYRUN` would tell, but needs rights of its own and Redis 7; so every command is tried, on a
//! key that belongs to nobody (`P:{doctor}:probe`) and ends within a second. It is the only thing that the doctor writes.

use redis::{Cmd, Value};
use rsc_store::StoreError;

use super::facts::text;
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

/// Tries every command that the coordinator uses.
pub(super) async fn examine(redis: &Redis, report: &mut Report) -> Result<(), StoreError> {
    let key = format!("{}:{{doctor}}:probe", redis.keys.prefix());
    let user = redis.config.redis.user().unwrap_or("default").to_owned();
    let mut refused = direct(redis, &key).await?;
    let mut tried = true;
    match redis.tools.by_key(&key, redis::cmd("EVAL").arg(PROBE).arg(1).arg(&key)).await {
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
            &key,
            format!("the server refuses writes: {words}"),
            "see role, memory, persistence and replicas above; until then heartbeats are refused",
        );
        report.unknown("acl", format!("user {user}"), "rights cannot be tried while writes are refused");
        return Ok(());
    }
    tried &= !refused.iter().any(|(command, _)| command == "SET");
    let (optional, needed): (Vec<Refused>, Vec<Refused>) =
        refused.into_iter().partition(|(command, _)| OPTIONAL.contains(&command.as_str()));
    if !needed.is_empty() {
        let names: Vec<&str> = needed.iter().map(|(command, _)| command.as_str()).collect();
        let words = &needed[0].1;
        let rest = if tried { "" } else { "; what else is missing can be tried only when this is there" };
        report.error(
            "acl",
            format!("user {user}"),
            format!("is refused on keys like {key}: {}{rest} (the server says: {words})", names.join(", ")),
            format!(
                "ACL SETUSER {user} {}; all rights are listed in docs/operations.md",
                grants(redis, &names)
            ),
        );
    }
    if needed.is_empty() {
        report.ok("acl", format!("user {user}"), format!("may do everything on {}:*", redis.keys.prefix()));
    }
    if !optional.is_empty() {
        let names: Vec<&str> = optional.iter().map(|(command, _)| command.as_str()).collect();
        report.info(
            "acl.optional",
            format!("user {user}"),
            format!("may not, and need not: {}", names.join(", ")),
        );
    }
    Ok(())
}

/// What would have to be granted.
fn grants(redis: &Redis, commands: &[&str]) -> String {
    let commands: Vec<String> =
        commands.iter().map(|command| format!("+{}", command.to_lowercase())).collect();
    format!("{} ~{}:*", commands.join(" "), redis.keys.prefix())
}

/// What cannot be tried from a script.
async fn direct(redis: &Redis, key: &str) -> Result<Vec<Refused>, StoreError> {
    let nobodys_script = "0".repeat(40);
    let mut evalsha = redis::cmd("EVALSHA");
    evalsha.arg(nobodys_script).arg(1).arg(key);
    let mut load = redis::cmd("SCRIPT");
    load.arg("LOAD").arg("return 0");
    let mut name = redis::cmd("CLIENT");
    name.arg("SETNAME").arg("rsc:doctor");
    let commands: [(&str, Cmd, &str); 4] = [
        ("TIME", redis::cmd("TIME"), ""),
        ("EVALSHA", evalsha, "NOSCRIPT"),
        ("SCRIPT|LOAD", load, ""),
        ("CLIENT|SETNAME", name, ""),
    ];
    let mut refused = Vec::new();
    for (command, call, expected) in commands {
        match redis.tools.by_key(key, &call).await {
            Ok(_) => {}
            Err(StoreError::Refused(words)) if words.split(' ').next() == Some(expected) => {}
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
