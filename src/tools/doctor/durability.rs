//! Whether Redis keeps what it is told: eviction, persistence, replicas.

use rsc_store::NodeRole;

use super::addresses;
use super::facts::{Info, Known, Server};
use super::report::Report;
use crate::tools::Redis;

/// `maxmemory` and what happens there.
pub(super) fn eviction(servers: &[Server], report: &mut Report) {
    let mark = report.mark();
    for server in servers {
        let at = server.address();
        let facts = server.info.as_ref().map_err(|why| format!("INFO: {why}")).and_then(|info| {
            let policy = info.get("maxmemory_policy").ok_or("INFO does not tell maxmemory_policy")?;
            Ok((info, policy.to_owned()))
        });
        match facts {
            Err(why) => report.unknown("eviction", at, why),
            Ok((info, policy)) => judge_memory(at, info, &policy, report),
        }
    }
    if report.is_clean_since(mark) {
        report.ok("eviction", addresses(servers), "maxmemory-policy is noeviction");
    }
}

fn judge_memory(at: &str, info: &Info, policy: &str, report: &mut Report) {
    let (limit, used) = (info.number("maxmemory").unwrap_or(0), info.number("used_memory").unwrap_or(0));
    let remedy =
        "CONFIG SET maxmemory-policy noeviction, and in its configuration file; keep caches elsewhere";
    if policy != "noeviction" {
        let what = format!("maxmemory-policy is {policy}");
        if limit > 0 {
            let message = format!("{what} and maxmemory is set: groups and records will be evicted");
            report.error("eviction", at, message, remedy);
        } else {
            let message = format!("{what}: harmless only as long as nobody sets maxmemory");
            report.warning("eviction", at, message, remedy);
        }
    }
    if limit > 0 && used >= limit / 10 * 9 {
        let message = format!(
            "{used} of {limit} bytes of maxmemory are used: when they are full, every heartbeat that records something is refused"
        );
        report.warning("memory", at, message, "raise maxmemory, or trim streams");
    }
}

/// What a restart leaves.
pub(super) fn persistence(servers: &[Server], report: &mut Report) {
    let mut fine = Vec::new();
    for server in servers {
        let at = server.address();
        match &server.info {
            Err(why) => report.unknown("persistence", at, format!("INFO: {why}")),
            Ok(info) => {
                if judge_persistence(at, info, &server.setting("save"), report) {
                    fine.push(server.clone());
                }
            }
        }
    }
    if !fine.is_empty() {
        report.ok("persistence", addresses(&fine), "append-only file, and its last write succeeded");
    }
}

/// Whether there is nothing to say.
fn judge_persistence(at: &str, info: &Info, save: &Known<Option<&str>>, report: &mut Report) -> bool {
    const ID: &str = "persistence";
    let is_failing = |field: &str| info.get(field).is_some_and(|status| status != "ok");
    let mut failing = false;
    for (field, what) in [
        ("rdb_last_bgsave_status", "the last snapshot (BGSAVE) failed; writes may be refused (MISCONF)"),
        (
            "aof_last_write_status",
            "the last write to the append-only file failed; writes are refused (MISCONF)",
        ),
        ("aof_last_bgrewrite_status", "the last rewrite of the append-only file failed"),
    ] {
        if is_failing(field) {
            failing = true;
            report.error(ID, at, what, "look at the server's log and at its disk: space, rights, directory");
        }
    }
    if failing {
        return false;
    }
    match info.get("aof_enabled") {
        Some("1") => return true,
        Some(_) => {}
        None => {
            report.unknown(ID, at, "INFO does not tell aof_enabled");
            return false;
        }
    }
    match save {
        Err(why) => {
            let why = format!("no append-only file, and whether there are snapshots could not be asked: {why}");
            report.unknown(ID, at, why);
        }
        Ok(None | Some("")) => report.warning(
            ID,
            at,
            "neither append-only file nor snapshots: after a restart every group is GROUP_METADATA_MISSING",
            "CONFIG SET appendonly yes, and in its configuration file",
        ),
        Ok(Some(save)) => report.info(
            ID,
            at,
            format!(
                "snapshots only (save {save}): a restart loses what came after the last one, and begins a correction round"
            ),
        ),
    }
    false
}

/// What a failover leaves: how many replicas there are, and how many a write must have reached.
pub(super) fn replicas(redis: &Redis, servers: &[Server], report: &mut Report) {
    let awaited = u64::from(redis.config.redis.wait_replicas);
    for server in servers.iter().filter(|server| server.node.role == NodeRole::Master) {
        let at = server.address();
        let info = match &server.info {
            Ok(info) => info,
            Err(why) => {
                report.unknown("replicas", at, format!("INFO: {why}"));
                continue;
            }
        };
        let replicas = info.number("connected_slaves").unwrap_or(0);
        if replicas < awaited {
            report.error(
                "replicas",
                at,
                format!(
                    "redis.wait-replicas is {awaited}, and {replicas} are connected: nobody is handed a shard"
                ),
                "bring the replicas back, or lower redis.wait-replicas",
            );
        }
        if replicas == 0 {
            continue;
        }
        match server.setting("min-replicas-to-write") {
            Err(why) => report.unknown("replicas", at, format!("min-replicas-to-write: {why}")),
            Ok(Some("0") | None) => report.info(
                "replicas",
                at,
                format!(
                    "{replicas} connected, min-replicas-to-write is 0: a master that is cut off goes on taking writes, \
                     which are lost when it comes back; 1 closes that"
                ),
            ),
            Ok(Some(least)) => {
                report.info("replicas", at, format!("{replicas} connected, min-replicas-to-write is {least}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::Level;
    use super::*;

    fn levels(report: &Report) -> Vec<(&str, Level)> {
        report.findings.iter().map(|finding| (finding.id.as_ref(), finding.level)).collect()
    }

    #[test]
    fn persistence_is_judged_by_what_fails_then_by_what_is_switched_on() {
        let judged = |info: &str, save: Known<Option<&str>>| {
            let mut report = Report::default();
            let is_fine = judge_persistence("a:1", &Info::of(info), &save, &mut report);
            assert_eq!(is_fine, report.findings.is_empty());
            levels(&report).into_iter().map(|(_, level)| level).collect::<Vec<_>>()
        };
        let off = "aof_enabled:0\nrdb_last_bgsave_status:ok\naof_last_write_status:ok\n";
        assert_eq!(judged(off, Ok(Some(""))), [Level::Warning]);
        assert_eq!(judged(off, Ok(Some("3600 1"))), [Level::Info]);
        assert_eq!(judged(off, Err("NOPERM".into())), [Level::Unknown]);
        assert_eq!(judged("aof_enabled:1\naof_last_write_status:ok\n", Err("NOPERM".into())), []);
        assert_eq!(judged("aof_enabled:1\naof_last_write_status:err\n", Ok(None)), [Level::Error]);
        assert_eq!(judged("aof_enabled:0\nrdb_last_bgsave_status:err\n", Ok(Some("60 1"))), [Level::Error]);
        assert_eq!(judged("", Ok(None)), [Level::Unknown]);
    }

    #[test]
    fn memory_that_is_nearly_full_is_a_warning_of_its_own() {
        let judged = |info: &str, policy: &str| {
            let mut report = Report::default();
            judge_memory("a:1", &Info::of(info), policy, &mut report);
            levels(&report).into_iter().map(|(id, level)| (id.to_owned(), level)).collect::<Vec<_>>()
        };
        assert_eq!(judged("maxmemory:1000\nused_memory:899\n", "noeviction"), []);
        let full = judged("maxmemory:1000\nused_memory:900\n", "noeviction");
        assert_eq!(full, [("memory".to_owned(), Level::Warning)]);
        assert_eq!(judged("maxmemory:0\nused_memory:900\n", "noeviction"), []);
    }
}
