//! A master, replicas, and sentinels that watch them.

use std::collections::BTreeMap;
use std::fs;

use redis::RedisResult;

use super::node::RedisNode;
use super::wait_for;

/// What a sentinel says about one server or sentinel.
type Fields = BTreeMap<String, String>;

/// How to start servers and sentinels.
#[derive(Clone, Debug)]
pub(crate) struct SentinelSettings {
    /// The name under which the sentinels know the master.
    pub(crate) name: String,
    /// Servers besides the master.
    pub(crate) replicas: usize,
    pub(crate) sentinels: usize,
    /// How long a server does not answer before a sentinel takes it for dead.
    pub(crate) down_after_ms: u64,
    /// How long the steps of a failover may take; after twice that a sentinel tries again.
    pub(crate) failover_timeout_ms: u64,
    /// `requirepass` of the servers. The sentinels have none.
    pub(crate) password: Option<String>,
    /// More arguments of each server, such as `["--min-replicas-to-write", "1"]`.
    pub(crate) arguments: Vec<String>,
}

impl Default for SentinelSettings {
    fn default() -> Self {
        SentinelSettings {
            name: "primary".to_owned(),
            replicas: 2,
            sentinels: 3,
            down_after_ms: 1_000,
            failover_timeout_ms: 3_000,
            password: None,
            arguments: Vec::new(),
        }
    }
}

/// Running servers and sentinels. Servers are named by index; 0 is the first master. All are killed when this is dropped.
///
/// Servers keep nothing: a master that is killed and restarted before its successor is chosen comes back **empty**, and
/// empties its replicas. Restarted later, as it was started first, the former master 0 takes itself for a master and accepts
/// writes until the sentinels have turned it into a replica, some ten seconds later.
pub(crate) struct RedisSentinel {
    // Sentinels end first: they have nothing to decide then.
    sentinels: Vec<RedisNode>,
    servers: Vec<RedisNode>,
    settings: SentinelSettings,
}

impl RedisSentinel {
    /// Starts a master, two replicas and three sentinels, and waits until all know each other.
    pub(crate) fn start() -> Self {
        Self::start_with(SentinelSettings::default())
    }

    /// The same with settings.
    pub(crate) fn start_with(settings: SentinelSettings) -> Self {
        let mut servers = vec![start_server(&settings, None)];
        for _ in 0..settings.replicas {
            servers.push(start_server(&settings, Some(servers[0].port())));
        }
        // A sentinel learns of the replicas when it first asks the master, and then ten seconds later.
        wait_for("the replicas are in step", || {
            servers[1..].iter().map(RedisNode::is_synced_replica).collect::<Result<Vec<_>, _>>()?;
            let info = servers[0].info("replication").map_err(|error| error.to_string())?;
            let count = info.get("connected_slaves").and_then(|count| count.parse::<usize>().ok());
            if count == Some(settings.replicas) { Ok(()) } else { Err(format!("{info:?}")) }
        });
        let sentinels =
            (0..settings.sentinels).map(|_| start_sentinel(&settings, servers[0].port())).collect();
        let topology = RedisSentinel { sentinels, servers, settings };
        topology.wait_until_whole();
        topology
    }

    /// The name of the master.
    pub(crate) fn name(&self) -> &str {
        &self.settings.name
    }

    /// The password of the servers.
    pub(crate) fn password(&self) -> Option<&str> {
        self.settings.password.as_deref()
    }

    /// Where the sentinels are.
    pub(crate) fn sentinel_urls(&self) -> Vec<String> {
        self.sentinels.iter().map(RedisNode::url).collect()
    }

    /// Where the servers are; credentials are not part of it.
    pub(crate) fn server_urls(&self) -> Vec<String> {
        self.servers.iter().map(RedisNode::url).collect()
    }

    /// One server.
    pub(crate) fn server(&self, index: usize) -> &RedisNode {
        &self.servers[index]
    }

    /// Indices of the servers.
    pub(crate) fn servers(&self) -> std::ops::Range<usize> {
        0..self.servers.len()
    }

    /// One sentinel.
    pub(crate) fn sentinel(&self, index: usize) -> &RedisNode {
        &self.sentinels[index]
    }

    /// Indices of the sentinels.
    pub(crate) fn sentinels(&self) -> std::ops::Range<usize> {
        0..self.sentinels.len()
    }

    /// The master that the first sentinel that answers names, whether it lives or not.
    pub(crate) fn master(&self) -> usize {
        wait_for("a sentinel names the master", || {
            let named = self.sentinels.iter().find_map(|sentinel| self.master_by(sentinel).ok());
            named.ok_or_else(|| "none answers".into())
        })
    }

    /// Every server but the master, living or not.
    pub(crate) fn replicas(&self) -> Vec<usize> {
        let master = self.master();
        self.servers().filter(|&index| index != master).collect()
    }

    /// `kill -9` of a server.
    pub(crate) fn kill(&self, index: usize) {
        self.servers[index].kill();
    }

    /// Starts a killed server again as it was started first: see [`RedisSentinel`]. Others than server 0 ask server 0 for its data.
    pub(crate) fn restart(&self, index: usize) {
        self.servers[index].restart(&[]);
    }

    /// Starts a killed server again as a replica of whoever is master now.
    pub(crate) fn restart_as_replica(&self, index: usize) {
        let port = self.servers[self.master()].port().to_string();
        self.servers[index].restart(&["--replicaof", "127.0.0.1", &port]);
    }

    /// `SIGSTOP` of a server.
    pub(crate) fn pause(&self, index: usize) {
        self.servers[index].pause();
    }

    /// `SIGCONT` of a server. A former master takes itself for one until the sentinels have told it.
    pub(crate) fn resume(&self, index: usize) {
        self.servers[index].resume();
    }

    /// From now on no replica gets anything: they are paused, and the master has hung up on them. What is written now is lost if
    /// the master is killed before they are resumed. Sentinels take notice after `down_after_ms`.
    pub(crate) fn cut_replication(&self) {
        let master = self.master();
        for replica in self.replicas() {
            self.pause(replica);
        }
        // What is on its way to a paused one would reach it when it wakes.
        self.servers[master].command::<i64>(&["CLIENT", "KILL", "TYPE", "replica"]);
    }

    /// A failover while all live, as an operator asks for it (`SENTINEL FAILOVER`). What the replica has not yet is lost all the
    /// same. Waits until it is over, and returns the new master.
    pub(crate) fn fail_over(&self) -> usize {
        let from = self.master();
        wait_for("a sentinel begins a failover", || {
            let asked = self.sentinels[0].try_command::<()>(&["SENTINEL", "FAILOVER", self.name()]);
            asked.map_err(|error| error.to_string())
        });
        self.wait_for_promotion(from)
    }

    /// After the death or the pause of a master: waits until all living sentinels name the same other one, and it agrees.
    /// Returns it.
    pub(crate) fn wait_for_promotion(&self, from: usize) -> usize {
        wait_for(&format!("another than server {from} is master"), || {
            let running = self.sentinels.iter().filter(|sentinel| sentinel.is_running());
            let mut named =
                running.map(|sentinel| self.master_by(sentinel)).collect::<Result<Vec<_>, _>>()?;
            named.dedup();
            match named[..] {
                [master] if master == from => Err("it is as before".into()),
                [master] if self.servers[master].is_master() => Ok(master),
                _ => Err(format!("the sentinels name {named:?}")),
            }
        })
    }

    /// Waits until everything lives, all sentinels know each other and all replicas, and every replica has all that the master
    /// has: only then does a failover work.
    pub(crate) fn wait_until_whole(&self) {
        wait_for("servers and sentinels agree", || {
            let master = self.master();
            for sentinel in &self.sentinels {
                self.knows_all(sentinel, master)?;
            }
            for (index, server) in self.servers.iter().enumerate() {
                if index == master {
                    let info = server.info("replication").map_err(|error| error.to_string())?;
                    let count = info.get("connected_slaves").and_then(|count| count.parse::<usize>().ok());
                    if !server.is_master() || count != Some(self.settings.replicas) {
                        return Err(format!("{info:?}"));
                    }
                } else {
                    server.is_synced_replica()?;
                }
            }
            Ok(())
        });
    }

    /// The server that a sentinel names.
    fn master_by(&self, sentinel: &RedisNode) -> Result<usize, String> {
        let named: RedisResult<(String, u16)> =
            sentinel.try_command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name()]);
        let (_, port) = named.map_err(|error| format!("sentinel on port {}: {error}", sentinel.port()))?;
        let server = self.servers.iter().position(|server| server.port() == port);
        server.ok_or_else(|| format!("port {port} is none of ours"))
    }

    fn knows_all(&self, sentinel: &RedisNode, master: usize) -> Result<(), String> {
        let say = |error: redis::RedisError| format!("sentinel on port {}: {error}", sentinel.port());
        if self.master_by(sentinel)? != master {
            return Err(format!("the sentinel on port {} names another master", sentinel.port()));
        }
        let rows = |what: &str| {
            let rows: RedisResult<Vec<Fields>> = sentinel.try_command(&["SENTINEL", what, self.name()]);
            rows.map_err(say)
        };
        let (replicas, sentinels) = (rows("REPLICAS")?, rows("SENTINELS")?);
        let well = |rows: &[Fields], flags: &str| {
            rows.iter().filter(|row| row.get("flags").is_some_and(|found| found == flags)).count()
        };
        let expected = (self.settings.replicas, self.settings.sentinels - 1);
        if (well(&replicas, "slave"), well(&sentinels, "sentinel")) != expected {
            return Err(format!(
                "the sentinel on port {} knows {replicas:?} and {sentinels:?}",
                sentinel.port()
            ));
        }
        let watched: Fields = sentinel.try_command(&["SENTINEL", "MASTER", self.name()]).map_err(say)?;
        if watched.get("flags").is_some_and(|flags| flags == "master") {
            Ok(())
        } else {
            Err(format!("{watched:?}"))
        }
    }
}

fn start_server(settings: &SentinelSettings, replica_of: Option<u16>) -> RedisNode {
    RedisNode::start(settings.password.as_deref(), |_, _| {
        let mut arguments: Vec<String> =
            ["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"].map(str::to_owned).into();
        if let Some(password) = &settings.password {
            arguments.extend(["--requirepass", password, "--masterauth", password].map(str::to_owned));
        }
        if let Some(port) = replica_of {
            arguments.extend(["--replicaof", "127.0.0.1", &port.to_string()].map(str::to_owned));
        }
        arguments.extend(settings.arguments.iter().cloned());
        arguments
    })
}

fn start_sentinel(settings: &SentinelSettings, master: u16) -> RedisNode {
    let (name, quorum) = (&settings.name, settings.sentinels / 2 + 1);
    RedisNode::start(None, |_, directory| {
        let file = directory.path().join("sentinel.conf");
        let mut text = format!(
            "sentinel monitor {name} 127.0.0.1 {master} {quorum}\n\
             sentinel down-after-milliseconds {name} {}\n\
             sentinel failover-timeout {name} {}\n\
             sentinel parallel-syncs {name} {}\n",
            settings.down_after_ms,
            settings.failover_timeout_ms,
            settings.replicas.max(1)
        );
        if let Some(password) = &settings.password {
            text.push_str(&format!("sentinel auth-pass {name} {password}\n"));
        }
        // The sentinel writes into its file what it learns; started again, it goes on from there.
        fs::write(&file, text).unwrap();
        vec![file.to_str().unwrap().to_owned(), "--sentinel".to_owned()]
    })
}
