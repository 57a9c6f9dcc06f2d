//! Redis Cluster: finds the node of each key, and follows what the nodes say about it.
//!
//! redis-rs has an async cluster connection; it sends a command again after the connection that it went out on broke, which
//! is the one thing a commit must not have done to it: whether the first was carried out would be lost (ADR 0016). Here
//! only what was certainly not carried out is sent again: what a node refused with `MOVED`, `ASK` or `TRYAGAIN`, and what
//! never left.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use ::redis::Cmd;
use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use rand::seq::SliceRandom;
use tokio::time::{Instant, sleep, timeout_at};

use super::address::{Address, Mappings};
use super::dial::{Dialer, Endpoint};
use super::link::{Answer, Failure, Refusal};
use super::servers::{Lane, Node, fixed};
use super::slots::{Layout, key_slot};
use crate::types::StoreError;

/// How often one command may be sent on at a time.
const MOST_REDIRECTIONS: u32 = 16;
/// How long to wait until a slot that is being moved is asked again.
const PAUSE_WHILE_MOVING: Duration = Duration::from_millis(25);
/// How many nodes are asked for the layout.
const ASKED_FOR_LAYOUT: usize = 7;
/// The layout is not asked for more often.
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// A cluster.
#[derive(Debug)]
pub(super) struct Cluster {
    dialer: Arc<Dialer>,
    seeds: Vec<Address>,
    mappings: Mappings,
    connections: usize,
    table: RwLock<Table>,
    looking: tokio::sync::Mutex<Option<Instant>>,
}

#[derive(Debug, Default)]
struct Table {
    layout: Layout,
    /// What `MOVED` has said since.
    moved: HashMap<u16, Address>,
    nodes: HashMap<Address, Arc<Node>>,
    /// Counts the looks.
    generation: u64,
}

impl Table {
    fn owner(&self, slot: u16) -> Option<Address> {
        self.moved.get(&slot).or_else(|| self.layout.owner(slot)).cloned()
    }
}

/// What to do about an answer.
enum Next {
    /// Send it there; `asking`: with permission to use a slot that is still arriving.
    Go { to: Address, asking: bool },
    /// Send it again in a moment.
    Wait,
    /// Look at the layout; send it again if somebody else has the slot now.
    Look,
    /// That is the answer.
    Keep,
}

impl Cluster {
    /// A cluster that is found through any of `seeds`.
    pub(super) fn new(
        dialer: Arc<Dialer>,
        seeds: Vec<Address>,
        mappings: Mappings,
        connections: usize,
    ) -> Self {
        let (table, looking) = (RwLock::default(), tokio::sync::Mutex::default());
        Cluster { dialer, seeds, mappings, connections, table, looking }
    }

    /// As [`Servers::pipeline`](super::servers::Servers::pipeline).
    pub(super) async fn pipeline(
        self: &Arc<Self>,
        lane: Lane,
        key: &str,
        commands: &[Cmd],
        deadline: Instant,
    ) -> Result<Vec<Answer>, Failure> {
        let slot = key_slot(key);
        let (mut to, mut asking) = (self.owner(slot, deadline).await?, false);
        let mut redirections = 0;
        loop {
            let answer = self.send(&to, asking, lane, key, commands, deadline).await;
            redirections += 1;
            if redirections > MOST_REDIRECTIONS {
                return answer;
            }
            match self.judge(slot, &to, &answer) {
                Next::Keep => return answer,
                Next::Go { to: there, asking: permitted } => (to, asking) = (there, permitted),
                Next::Wait => {
                    // What is asked again needs some time, too.
                    if Instant::now() + 2 * PAUSE_WHILE_MOVING >= deadline {
                        return answer;
                    }
                    sleep(PAUSE_WHILE_MOVING).await;
                    redirections = 0;
                    (to, asking) = (self.owner(slot, deadline).await?, false);
                }
                Next::Look => {
                    let seen = self.table().generation;
                    // It goes on when this request's time is over: the next one profits.
                    let cluster = Arc::clone(self);
                    let look = self.dialer.runtime.spawn(async move { cluster.look(seen).await });
                    let looked = timeout_at(deadline, look).await.map(|joined| joined.unwrap_or(Ok(())));
                    let owner = self.table().owner(slot);
                    match owner {
                        Some(owner) if matches!(looked, Ok(Ok(()))) && owner != to => {
                            (to, asking) = (owner, false);
                        }
                        _ => return answer,
                    }
                }
            }
        }
    }

    /// As [`Servers::commands`](super::servers::Servers::commands).
    pub(super) async fn commands(
        self: &Arc<Self>,
        lane: Lane,
        commands: &[(String, Cmd)],
        deadline: Instant,
    ) -> Result<Vec<Answer>, Failure> {
        let mut by_node: HashMap<Address, Vec<usize>> = HashMap::new();
        for (at, (key, _)) in commands.iter().enumerate() {
            by_node.entry(self.owner(key_slot(key), deadline).await?).or_default().push(at);
        }
        let sent = by_node.into_iter().map(|(node, places)| async move {
            let pipeline: Vec<Cmd> = places.iter().map(|at| commands[*at].1.clone()).collect();
            let key = places.first().map_or("", |at| commands[*at].0.as_str());
            let answers = self.send(&node, false, lane, key, &pipeline, deadline).await;
            (node, places, answers)
        });
        let mut answers: Vec<Option<Answer>> = commands.iter().map(|_| None).collect();
        for (node, places, sent) in join_all(sent).await {
            let sent = match sent {
                Ok(sent) => sent,
                Err(failure) => {
                    self.look_soon(&node);
                    return Err(failure);
                }
            };
            for (at, answer) in places.into_iter().zip(sent) {
                let (key, command) = &commands[at];
                let answer = match answer {
                    Err(refusal) if is_redirection(&refusal) => {
                        let again = self.pipeline(lane, key, std::slice::from_ref(command), deadline).await?;
                        again.into_iter().next()
                    }
                    answer => Some(answer),
                };
                answers[at] = answer;
            }
        }
        answers
            .into_iter()
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| Failure::Unknown(StoreError::Unexpected("fewer answers than commands".to_owned())))
    }

    /// Finds the nodes and connects to every master.
    pub(super) async fn connect(self: &Arc<Self>, deadline: Instant) -> Result<(), StoreError> {
        let seen = self.table().generation;
        match timeout_at(deadline, self.look(seen)).await {
            Ok(looked) => looked?,
            Err(_) => return Err(no_node("no node has told the cluster's layout in time")),
        }
        let masters: Vec<Address> = self
            .nodes()
            .into_iter()
            .filter(|(_, is_master)| *is_master)
            .map(|(address, _)| address)
            .collect();
        let connected = join_all(masters.into_iter().map(|address| async move {
            let connected = self.node(&address).link(Lane::Work, "").connect(deadline).await;
            (address, connected)
        }))
        .await;
        let none_is_reached = connected.iter().all(|(_, result)| result.is_err());
        for (address, result) in connected {
            match result {
                Ok(()) => {}
                Err(StoreError::Unavailable(why)) if !self.seeds.contains(&address) => {
                    let sentence = format!(
                        "the cluster announces a master at {address}, which cannot be reached: {why}: if it is reached \
                         under another address from here, say so in redis.node-mappings"
                    );
                    // Some node was reached, or there would be no layout.
                    return Err(if none_is_reached {
                        StoreError::Misconfigured(sentence)
                    } else {
                        StoreError::Unavailable(sentence)
                    });
                }
                Err(error) => return Err(error),
            }
        }
        let unserved = self.table().layout.unserved();
        if unserved > 0 {
            tracing::warn!(
                unserved,
                "slots of the cluster have no master; groups and shards in them cannot be used"
            );
        }
        Ok(())
    }

    /// Of `keys` one for every master that is known, and that holds it.
    pub(super) fn one_for_each_master(&self, keys: impl Iterator<Item = String>) -> Vec<String> {
        let mut missing: BTreeSet<Address> = self
            .nodes()
            .into_iter()
            .filter(|(_, is_master)| *is_master)
            .map(|(address, _)| address)
            .collect();
        let mut found = Vec::new();
        for key in keys {
            if missing.is_empty() {
                break;
            }
            if self.table().owner(key_slot(&key)).is_some_and(|owner| missing.remove(&owner)) {
                found.push(key);
            }
        }
        found
    }

    /// Learns the layout, if it is not known.
    pub(super) async fn learn(&self, deadline: Instant) -> Result<(), StoreError> {
        let seen = self.table().generation;
        if seen > 0 {
            return Ok(());
        }
        match timeout_at(deadline, self.look(seen)).await {
            Ok(looked) => looked,
            Err(_) => Err(no_node("no node has told the cluster's layout in time")),
        }
    }

    /// Every node that the layout names, and whether it is a master.
    pub(super) fn nodes(&self) -> Vec<(Address, bool)> {
        let table = self.table();
        let ranges = table.layout.ranges();
        let masters: BTreeSet<&Address> = ranges.iter().map(|range| &range.master).collect();
        let replicas: BTreeSet<&Address> = ranges.iter().flat_map(|range| &range.replicas).collect();
        let others = replicas.difference(&masters).map(|address| ((*address).clone(), false));
        masters.iter().map(|address| ((*address).clone(), true)).chain(others).collect()
    }

    /// The node that has a key, as far as is known.
    pub(super) fn known_node(&self, key: &str) -> Option<Arc<Node>> {
        let owner = self.table().owner(key_slot(key))?;
        Some(self.node(&owner))
    }

    /// The connections to a node.
    pub(super) fn node(&self, address: &Address) -> Arc<Node> {
        if let Some(node) = self.table().nodes.get(address) {
            return Arc::clone(node);
        }
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let made = || Arc::new(fixed(&self.dialer, Endpoint::Tcp(address.clone()), self.connections));
        Arc::clone(table.nodes.entry(address.clone()).or_insert_with(made))
    }

    fn table(&self) -> std::sync::RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who has a slot; looks at the layout when nobody is known.
    async fn owner(&self, slot: u16, deadline: Instant) -> Result<Address, Failure> {
        let (known, seen) = {
            let table = self.table();
            (table.owner(slot), table.generation)
        };
        if let Some(owner) = known {
            return Ok(owner);
        }
        match timeout_at(deadline, self.look(seen)).await {
            Ok(looked) => looked.map_err(Failure::NotSent)?,
            Err(_) => return Err(Failure::NotSent(no_node("no node has told the cluster's layout in time"))),
        }
        let found = self.table().owner(slot);
        found.ok_or_else(|| Failure::NotSent(no_node(&format!("slot {slot} of the cluster has no master"))))
    }

    async fn send(
        &self,
        to: &Address,
        asking: bool,
        lane: Lane,
        key: &str,
        commands: &[Cmd],
        deadline: Instant,
    ) -> Result<Vec<Answer>, Failure> {
        let node = self.node(to);
        let link = node.link(lane, key);
        if !asking {
            return link.pipeline(commands, deadline).await;
        }
        let permitted: Vec<Cmd> =
            commands.iter().flat_map(|command| [::redis::cmd("ASKING"), command.clone()]).collect();
        let answers = link.pipeline(&permitted, deadline).await?;
        Ok(answers.into_iter().skip(1).step_by(2).collect())
    }

    fn judge(self: &Arc<Self>, slot: u16, asked: &Address, answer: &Result<Vec<Answer>, Failure>) -> Next {
        let refusal = match answer {
            Ok(answers) => match answers.first() {
                Some(Err(refusal)) => refusal,
                _ => return Next::Keep,
            },
            Err(Failure::Refused(refusal)) => refusal,
            // Another server may have its address by now, with another login, or of another kind.
            Err(Failure::NotSent(_)) => return Next::Look,
            Err(Failure::Unknown(_)) => {
                self.look_soon(asked);
                return Next::Keep;
            }
        };
        match refusal.code.as_str() {
            "MOVED" | "ASK" => {
                let Some(to) = self.redirected(refusal, asked) else { return Next::Keep };
                let asking = refusal.code == "ASK";
                if !asking {
                    self.table.write().unwrap_or_else(PoisonError::into_inner).moved.insert(slot, to.clone());
                    self.look_soon(asked);
                }
                Next::Go { to, asking }
            }
            "TRYAGAIN" => Next::Wait,
            // A former master that starts again refuses for as long as it loads.
            "CLUSTERDOWN" | "MASTERDOWN" | "READONLY" | "LOADING" => Next::Look,
            _ => Next::Keep,
        }
    }

    /// Where a `MOVED` or `ASK` sends us: its third word. Without a host it is the one that was asked.
    fn redirected(&self, refusal: &Refusal, asked: &Address) -> Option<Address> {
        let mut to = refusal.said.split_whitespace().nth(2).and_then(Address::parse)?;
        if to.host.is_empty() {
            to.host.clone_from(&asked.host);
        }
        Some(self.mappings.reachable(to))
    }

    /// Looks at the layout while others go on.
    fn look_soon(self: &Arc<Self>, because_of: &Address) {
        let (cluster, seen) = (Arc::clone(self), self.table().generation);
        tracing::debug!(node = %because_of, "looks at the layout of the cluster");
        self.dialer.runtime.spawn(async move {
            let _ = cluster.look(seen).await;
        });
    }

    /// Learns the layout anew, unless somebody has done so since generation `seen`. Several nodes are asked, and what
    /// more than half of them say is taken as soon as they do; if no more answer, what most of those say that did: a
    /// node that was cut off from the others may tell an old story.
    async fn look(&self, seen: u64) -> Result<(), StoreError> {
        let mut looked_at = self.looking.lock().await;
        if self.table().generation != seen {
            return Ok(());
        }
        if let Some(at) = *looked_at {
            tokio::time::sleep_until(at + BETWEEN_LOOKS).await;
        }
        let result = self.layout().await;
        *looked_at = Some(Instant::now());
        let layout = result?;
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let named: BTreeSet<&Address> =
            layout.ranges().iter().flat_map(|range| range.replicas.iter().chain([&range.master])).collect();
        table.nodes.retain(|address, _| named.contains(address));
        table.layout = layout;
        table.moved.clear();
        table.generation += 1;
        Ok(())
    }

    async fn layout(&self) -> Result<Layout, StoreError> {
        let mut known: Vec<Address> = self.nodes().into_iter().map(|(address, _)| address).collect();
        known.shuffle(&mut rand::rng());
        let seeds = self.seeds.iter().filter(|seed| !known.contains(seed)).cloned();
        let asked: Vec<Address> = known.iter().cloned().chain(seeds.collect::<Vec<_>>()).collect();
        let (mut trouble, mut votes): (Option<StoreError>, Vec<(Layout, usize)>) = (None, Vec::new());
        for some in asked.chunks(ASKED_FOR_LAYOUT) {
            let mut asking: FuturesUnordered<_> =
                some.iter().map(|address| self.ask_for_layout(address)).collect();
            while let Some(answer) = asking.next().await {
                let layout = match answer {
                    Ok(layout) => layout,
                    Err(error) => {
                        if !matches!(trouble, Some(StoreError::Misconfigured(_))) {
                            trouble = Some(error);
                        }
                        continue;
                    }
                };
                let at = votes.iter().position(|(other, _)| *other == layout).unwrap_or_else(|| {
                    votes.push((layout, 0));
                    votes.len() - 1
                });
                votes[at].1 += 1;
                if votes[at].1 * 2 > some.len() {
                    break;
                }
            }
            if let Some(at) = (0..votes.len()).max_by_key(|at| votes[*at].1) {
                return Ok(votes.swap_remove(at).0);
            }
        }
        Err(trouble.unwrap_or_else(|| no_node("redis.urls names no node")))
    }

    async fn ask_for_layout(&self, address: &Address) -> Result<Layout, StoreError> {
        let node = self.node(address);
        let deadline = Instant::now() + self.dialer.connect_timeout / 2;
        let mut command = ::redis::cmd("CLUSTER");
        command.arg("SLOTS");
        let answer = node.link(Lane::Monitoring, "").command(&command, deadline).await;
        let answer = answer.map_err(|failure| match failure {
            Failure::Refused(Refusal { code, said }) if code == "ERR" => {
                StoreError::Misconfigured(format!("redis.mode is cluster, but {address} says: {said}"))
            }
            failure => failure.into_error(),
        })?;
        Layout::read(answer, address, &self.mappings)
            .ok_or_else(|| no_node(&format!("{address} knows no node that serves slots")))
    }
}

fn is_redirection(refusal: &Refusal) -> bool {
    matches!(refusal.code.as_str(), "MOVED" | "ASK" | "TRYAGAIN" | "CLUSTERDOWN" | "MASTERDOWN" | "READONLY")
}

fn no_node(what: &str) -> StoreError {
    StoreError::Unavailable(what.to_owned())
}
