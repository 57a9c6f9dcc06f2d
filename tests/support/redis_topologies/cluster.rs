//! A Redis Cluster: three masters, each with one replica.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::thread::sleep;
use std::time::{Duration, Instant};

use redis::{FromRedisValue, RedisResult};

use super::doors::Door;
use super::node::{RedisNode, fields};
use super::slot_move::SlotMove;
use super::wait_for;

/// What the nodes tell clients about where they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Announced {
    /// Where they really are.
    #[default]
    Reachable,
    /// Ports of 127.0.0.1 on which nodes reach each other, while everybody else is hung up on at once: as behind an
    /// address translation.
    Ports,
    /// Host names that nobody can resolve, with the real ports (Redis 7 or newer).
    HostNames,
}

/// How to start a cluster.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClusterSettings {
    pub(crate) announced: Announced,
    /// `requirepass` of all nodes.
    pub(crate) password: Option<String>,
    /// More arguments of each node, such as `["--appendonly", "yes"]`. Without that a master that is killed and restarted
    /// before its replica has taken over comes back **empty**.
    pub(crate) arguments: Vec<String>,
}

/// A running cluster. Nodes are named by index, 0 to 5; who of them is a master changes. All are killed when this is dropped.
pub(crate) struct RedisCluster {
    nodes: Vec<RedisNode>,
    /// Where each node says that it is: `host:port`.
    announced: Vec<String>,
    settings: ClusterSettings,
    /// When each node was elected last, as far as was waited for.
    elections: Mutex<BTreeMap<usize, Instant>>,
    _doors: Vec<Door>,
}

const NODES: usize = 6;
const MASTERS: usize = 3;
const SLOTS: usize = 16_384;
const NODE_TIMEOUT: Duration = Duration::from_secs(2);

impl RedisCluster {
    /// Starts a cluster and waits until all nodes agree and every replica has all that its master has.
    pub(crate) fn start() -> Self {
        Self::start_with(ClusterSettings::default())
    }

    /// The same with settings.
    pub(crate) fn start_with(settings: ClusterSettings) -> Self {
        let (mut nodes, mut announced, mut doors) = (Vec::new(), Vec::new(), Vec::new());
        for index in 0..NODES {
            let (door, node) = start_node(index, &settings);
            announced.push(match settings.announced {
                Announced::Reachable => format!("127.0.0.1:{}", node.port()),
                Announced::Ports => format!("127.0.0.1:{}", door.as_ref().unwrap().port()),
                Announced::HostNames => format!("{}:{}", host_name(index), node.port()),
            });
            if let Some(door) = &door {
                door.lead_to(node.port());
            }
            nodes.push(node);
            doors.extend(door);
        }
        let cluster = RedisCluster { nodes, announced, settings, elections: Mutex::default(), _doors: doors };
        cluster.form();
        cluster.wait_until_whole();
        cluster
    }

    /// Where the nodes can be reached, whatever they announce; credentials are not part of it.
    pub(crate) fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(RedisNode::url).collect()
    }

    /// For each node what it announces and where it can be reached, both as `host:port`.
    pub(crate) fn mappings(&self) -> BTreeMap<String, String> {
        let real = self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port()));
        self.announced.iter().cloned().zip(real).collect()
    }

    /// One node.
    pub(crate) fn node(&self, index: usize) -> &RedisNode {
        &self.nodes[index]
    }

    /// Indices of all nodes.
    pub(crate) fn indices(&self) -> std::ops::Range<usize> {
        0..self.nodes.len()
    }

    /// One command on one node; redirections are errors.
    pub(crate) fn try_command<T: FromRedisValue>(&self, index: usize, words: &[&str]) -> RedisResult<T> {
        self.nodes[index].try_command(words)
    }

    /// The same, and it has to succeed.
    pub(crate) fn command<T: FromRedisValue>(&self, index: usize, words: &[&str]) -> T {
        self.nodes[index].command(words)
    }

    /// One command on the master of a key.
    pub(crate) fn command_for<T: FromRedisValue>(&self, key: &str, words: &[&str]) -> T {
        self.command(self.master_of(key), words)
    }

    /// The slot of a key.
    pub(crate) fn slot_of(&self, key: &str) -> u16 {
        self.command(self.living(), &["CLUSTER", "KEYSLOT", key])
    }

    /// The master that serves a key, as the living nodes see it; they have to agree.
    pub(crate) fn master_of(&self, key: &str) -> usize {
        self.master_of_slot(self.slot_of(key))
    }

    /// The master that serves a slot.
    pub(crate) fn master_of_slot(&self, slot: u16) -> usize {
        wait_for(&format!("the nodes agree on who serves slot {slot}"), || {
            let mut masters = self.views()?.into_iter().map(|view| view.master_of_slot(slot));
            let first = masters.next().ok_or("no node lives")?.ok_or("nobody serves it")?;
            if masters.all(|other| other.as_ref() == Some(&first)) {
                self.index_of(&first)
            } else {
                Err("they do not".into())
            }
        })
    }

    /// Whoever is a master and lives, in ascending order.
    pub(crate) fn masters(&self) -> Vec<usize> {
        self.indices().filter(|&index| self.nodes[index].is_master()).collect()
    }

    /// A living replica of this master, which may be dead already.
    pub(crate) fn replica_of(&self, master: usize) -> usize {
        let id = self.id(master);
        wait_for(&format!("node {master} has a replica"), || {
            let view = View::of(&self.nodes[self.living()])?;
            let replicas = view.rows.iter().filter(|row| row.master == id);
            let indices = replicas.map(|row| self.index_of(&row.id)).collect::<Result<Vec<_>, _>>()?;
            indices
                .into_iter()
                .find(|&index| self.nodes[index].is_alive())
                .ok_or_else(|| "it has none that lives".into())
        })
    }

    /// `kill -9` of one node.
    pub(crate) fn kill(&self, index: usize) {
        self.let_old_votes_of_successors_expire(index);
        self.nodes[index].kill();
    }

    /// Starts a killed node again; it finds its place by itself. See [`ClusterSettings::arguments`].
    pub(crate) fn restart(&self, index: usize) {
        self.nodes[index].restart(&[]);
        self.elections.lock().unwrap().remove(&index);
    }

    /// `SIGSTOP` of one node.
    pub(crate) fn pause(&self, index: usize) {
        self.let_old_votes_of_successors_expire(index);
        self.nodes[index].pause();
    }

    /// `SIGCONT` of one node.
    pub(crate) fn resume(&self, index: usize) {
        self.nodes[index].resume();
    }

    /// A replica takes its master's place while both live (`CLUSTER FAILOVER`), which loses nothing. Waits until
    /// it is over and the cluster whole.
    pub(crate) fn take_over(&self, replica: usize) {
        let (id, master) = (self.id(replica), self.master_of_replica(replica));
        let slot = self.first_slot_of(master);
        self.let_old_votes_expire(replica);
        // Masters vote for one successor of the same master in two node timeouts; who gets no vote gives up after 5 s.
        let mut asked: Option<Instant> = None;
        wait_for(&format!("node {replica} is a master"), || {
            if self.views()?.iter().all(|view| view.master_of_slot(slot).as_ref() == Some(&id)) {
                return Ok(());
            }
            if !self.nodes[replica].is_master()
                && asked.is_none_or(|at| at.elapsed() > Duration::from_secs(6))
            {
                self.command::<()>(replica, &["CLUSTER", "FAILOVER"]);
                asked = Some(Instant::now());
            }
            Err("not all nodes see it".into())
        });
        self.note_election(replica);
        self.wait_until_whole();
    }

    /// After the death or the pause of a master: waits until another node serves this slot and all slots are served. Returns that
    /// node.
    pub(crate) fn wait_for_failover(&self, slot: u16, from: usize) -> usize {
        let former = self.id(from);
        let successor = wait_for(&format!("another than node {from} serves slot {slot}"), || {
            let views = self.views_but(from)?;
            let master =
                views.first().ok_or("no node lives")?.master_of_slot(slot).ok_or("nobody serves it")?;
            if master == former { Err("it is as before".into()) } else { self.index_of(&master) }
        });
        wait_for("all other nodes see the failover", || self.is_serving(&self.views_but(from)?));
        assert!(self.nodes[successor].is_master());
        self.note_election(successor);
        successor
    }

    /// Waits until all living nodes say `cluster_state:ok` and agree on who serves what.
    pub(crate) fn wait_until_serving(&self) {
        wait_for("the cluster serves all slots", || self.is_serving(&self.views()?));
    }

    /// Waits until all nodes live, agree, and every replica has all that its master has: only then does a failover work.
    pub(crate) fn wait_until_whole(&self) {
        wait_for("the cluster is whole", || {
            let views = self.views()?;
            if views.len() < NODES || views.iter().any(|view| view.rows.len() < NODES) {
                return Err(format!("{} of {NODES} nodes answer and know each other", views.len()));
            }
            if let Some(row) = views.iter().flat_map(|view| &view.rows).find(|row| !row.is_well) {
                return Err(format!("{row:?}"));
            }
            self.is_serving(&views)?;
            let replicas = self.nodes.iter().filter(|node| !node.is_master());
            replicas.map(RedisNode::is_synced_replica).collect::<Result<Vec<_>, _>>().map(drop)
        });
    }

    /// Begins to move a slot to another master: it is `MIGRATING` here and `IMPORTING` there, until
    /// [`SlotMove::finish`]. Nothing but the [`SlotMove`]'s methods moves keys: until then those that are here are served here,
    /// and for all others the answer is `ASK`.
    pub(crate) fn begin_move(&self, slot: u16, to: usize) -> SlotMove<'_> {
        SlotMove::begin(self, slot, to)
    }

    /// The id that a node gave itself.
    pub(super) fn id(&self, index: usize) -> String {
        let port = self.port_for_nodes(index);
        wait_for(&format!("the id of node {index} is known"), || {
            let view = View::of(&self.nodes[self.living()])?;
            let row = view.rows.into_iter().find(|row| row.port == port);
            row.map(|row| row.id).ok_or_else(|| "nobody knows it".into())
        })
    }

    pub(super) fn password(&self) -> Option<&str> {
        self.settings.password.as_deref()
    }

    /// The port of 127.0.0.1 on which other nodes reach this one.
    pub(super) fn port_for_nodes(&self, index: usize) -> String {
        self.announced[index].rsplit_once(':').unwrap().1.to_owned()
    }

    fn note_election(&self, index: usize) {
        self.elections.lock().unwrap().insert(index, Instant::now());
    }

    /// A node that was elected, was replaced, and has to follow again soon after that takes the votes of its former election for
    /// new ones, and claims the slots with an epoch that nobody heeds (redis 7.0: `failover_auth_count` is only reset when a new
    /// election is due, four node timeouts after the one before). So elections of one node are kept apart.
    fn let_old_votes_expire(&self, candidate: usize) {
        let elected = self.elections.lock().unwrap().get(&candidate).copied();
        let wait = elected.map(|at| (NODE_TIMEOUT * 4 + NODE_TIMEOUT / 2).saturating_sub(at.elapsed()));
        sleep(wait.unwrap_or_default());
    }

    /// Before the death of a master. Who its replicas are may just be changing: whoever else was elected lately is waited for.
    fn let_old_votes_of_successors_expire(&self, master: usize) {
        if self.nodes[master].is_master() {
            self.indices()
                .filter(|&index| index != master)
                .for_each(|index| self.let_old_votes_expire(index));
        }
    }

    fn master_of_replica(&self, replica: usize) -> usize {
        wait_for(&format!("node {replica} is a replica"), || {
            let view = View::of(&self.nodes[replica])?;
            let row = view.rows.iter().find(|row| row.is_myself).ok_or("it does not know itself")?;
            self.index_of(&row.master)
        })
    }

    fn first_slot_of(&self, master: usize) -> u16 {
        let id = self.id(master);
        wait_for(&format!("node {master} serves slots"), || {
            let view = View::of(&self.nodes[self.living()])?;
            let row = view.rows.iter().find(|row| row.id == id).ok_or("nobody knows it")?;
            row.slots.first().map(|slots| slots.0).ok_or_else(|| "it serves none".into())
        })
    }

    fn index_of(&self, id: &str) -> Result<usize, String> {
        let view = View::of(&self.nodes[self.living()])?;
        let row =
            view.rows.iter().find(|row| row.id == id).ok_or_else(|| format!("nobody knows node {id}"))?;
        let is_it = |address: &String| address.rsplit_once(':').unwrap().1 == row.port;
        self.announced.iter().position(is_it).ok_or_else(|| format!("{row:?} is none of ours"))
    }

    /// A node that answers.
    fn living(&self) -> usize {
        wait_for("a node answers", || {
            self.indices()
                .find(|&index| {
                    self.nodes[index].is_running() && self.try_command::<String>(index, &["PING"]).is_ok()
                })
                .ok_or_else(|| "none does".into())
        })
    }

    fn views(&self) -> Result<Vec<View>, String> {
        self.nodes.iter().filter(|node| node.is_running()).map(View::of).collect()
    }

    fn views_but(&self, index: usize) -> Result<Vec<View>, String> {
        let others =
            self.nodes.iter().enumerate().filter(|(other, node)| *other != index && node.is_running());
        others.map(|(_, node)| View::of(node)).collect()
    }

    fn is_serving(&self, views: &[View]) -> Result<(), String> {
        let first = views.first().ok_or("no node lives")?;
        for view in views {
            if view.state != "ok" || view.served() != first.served() {
                return Err(format!("{view:?} is not {first:?}"));
            }
        }
        Ok(())
    }

    /// What `redis-cli --cluster create` does, which only works where it can reach what the nodes announce.
    fn form(&self) {
        for (index, node) in self.nodes.iter().enumerate() {
            // All different from the start: else the nodes make them so one by one, which takes its time.
            node.command::<()>(&["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()]);
            if index < MASTERS {
                let first = index * SLOTS / MASTERS;
                let slots: Vec<String> =
                    (first..(index + 1) * SLOTS / MASTERS).map(|slot| slot.to_string()).collect();
                let slots = slots.iter().map(String::as_str);
                node.command::<()>(&["CLUSTER", "ADDSLOTS"].into_iter().chain(slots).collect::<Vec<_>>());
            }
            let bus = (self.nodes[0].port() + 10_000).to_string();
            node.command::<()>(&["CLUSTER", "MEET", "127.0.0.1", &self.port_for_nodes(0), &bus]);
        }
        wait_for("all nodes have met", || {
            let views = self.views()?;
            let is_met = |view: &View| view.rows.len() == NODES && view.rows.iter().all(|row| row.is_well);
            if views.iter().all(is_met) { Ok(()) } else { Err(format!("{views:?}")) }
        });
        for replica in MASTERS..NODES {
            let master = self.id(replica - MASTERS);
            self.command::<()>(replica, &["CLUSTER", "REPLICATE", &master]);
        }
    }
}

fn host_name(index: usize) -> String {
    format!("node-{index}.invalid")
}

/// The address from which nodes connect to each other when doors tell them from clients.
const NODES_COME_FROM: &str = "127.0.0.86";

fn start_node(index: usize, settings: &ClusterSettings) -> (Option<Door>, RedisNode) {
    let door = (settings.announced == Announced::Ports).then(|| Door::open_to(NODES_COME_FROM));
    let node = RedisNode::start(settings.password.as_deref(), |port, _| {
        let mut arguments = words(&["--cluster-enabled yes --repl-diskless-sync-delay 0"]);
        arguments.extend(["--cluster-node-timeout".to_owned(), NODE_TIMEOUT.as_millis().to_string()]);
        arguments.extend(words(&["--cluster-announce-ip 127.0.0.1"]));
        // Replicas that were away for long may take over too: tests kill in quick succession.
        arguments.extend(words(&["--cluster-replica-validity-factor 0"]));
        arguments.extend(["--save".to_owned(), String::new()]);
        arguments.extend(words(&["--appendonly no"]));
        if let Some(password) = &settings.password {
            arguments.extend(words(&[&format!("--requirepass {password} --masterauth {password}")]));
        }
        match &door {
            Some(door) => arguments.extend(words(&[&format!(
                "--cluster-announce-port {} --cluster-announce-bus-port {} --bind-source-addr {NODES_COME_FROM}",
                door.port(),
                port + 10_000
            )])),
            None if settings.announced == Announced::HostNames => arguments.extend(words(&[&format!(
                "--cluster-announce-hostname {} --cluster-preferred-endpoint-type hostname",
                host_name(index)
            )])),
            None => {}
        }
        arguments.extend(settings.arguments.iter().cloned());
        arguments
    });
    (door, node)
}

fn words(lines: &[&str]) -> Vec<String> {
    lines.iter().flat_map(|line| line.split(' ')).map(str::to_owned).collect()
}

/// What one node knows of the cluster.
#[derive(Debug)]
struct View {
    state: String,
    rows: Vec<Row>,
}

/// One line of `CLUSTER NODES`.
#[derive(Debug)]
struct Row {
    id: String,
    port: String,
    is_myself: bool,
    /// Neither failing nor unknown, and its bus is connected.
    is_well: bool,
    /// `-` for masters.
    master: String,
    /// First and last slot of each range.
    slots: Vec<(u16, u16)>,
}

impl View {
    fn of(node: &RedisNode) -> Result<Self, String> {
        let ask = |words: &[&str]| {
            node.try_command::<String>(words).map_err(|error| format!("port {}: {error}", node.port()))
        };
        let state = fields(&ask(&["CLUSTER", "INFO"])?).remove("cluster_state").unwrap_or_default();
        let rows = ask(&["CLUSTER", "NODES"])?.lines().map(Row::read).collect::<Option<_>>();
        Ok(View { state, rows: rows.ok_or("CLUSTER NODES cannot be read")? })
    }

    fn master_of_slot(&self, slot: u16) -> Option<String> {
        let serves = |row: &&Row| row.slots.iter().any(|&(first, last)| (first..=last).contains(&slot));
        self.rows.iter().find(serves).map(|row| row.id.clone())
    }

    /// Who serves what.
    fn served(&self) -> BTreeMap<&str, &[(u16, u16)]> {
        let serving = self.rows.iter().filter(|row| !row.slots.is_empty());
        serving.map(|row| (row.id.as_str(), row.slots.as_slice())).collect()
    }
}

impl Row {
    /// `id ip:port@bus,host flags master ping pong epoch link slot slot-slot …`; `[slot->-id]` is a slot on the move.
    fn read(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split(' ').collect();
        let (id, address, flags, master, link) =
            (words.first()?, words.get(1)?, words.get(2)?, words.get(3)?, words.get(7)?);
        let port = address.split('@').next()?.rsplit_once(':')?.1;
        let slots = words.iter().skip(8).filter(|word| !word.starts_with('['));
        let range = |word: &&str| {
            let (first, last) = word.split_once('-').unwrap_or((word, word));
            Some((first.parse().ok()?, last.parse().ok()?))
        };
        Some(Row {
            id: (*id).to_owned(),
            port: port.to_owned(),
            is_myself: flags.contains("myself"),
            is_well: *link == "connected" && !flags.contains("fail") && !flags.contains("handshake"),
            master: (*master).to_owned(),
            slots: slots.map(range).collect::<Option<_>>()?,
        })
    }
}
