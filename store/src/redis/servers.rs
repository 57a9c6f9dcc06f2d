//! The servers behind the store: one, or the nodes of a cluster. Whoever sends a command names its key and nothing else.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ::redis::{Cmd, Value};
use tokio::time::Instant;

use super::cluster::Cluster;
use super::dial::{Dialer, Endpoint};
use super::link::{Answer, Failure, Link, Target};
use crate::types::StoreError;

/// Connections for commits that wait for replicas: each is blocked while one of them waits.
const DURABLE_CONNECTIONS: usize = 8;

/// Which connection of a server a command goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Critical sections and what belongs to them.
    Work,
    /// What people read: a large answer delays no commit.
    Monitoring,
    /// Commits that wait for replicas; a wait blocks its connection.
    Durable,
}

/// The connections to one server.
#[derive(Debug)]
pub(super) struct Node {
    work: Vec<Arc<Link>>,
    monitoring: Arc<Link>,
    durable: Vec<Arc<Link>>,
    /// The last wait for replicas of this server came short: the next ones only look whether they are back.
    replicas_are_short: AtomicBool,
}

impl Node {
    /// Connections that are made when they are first needed.
    pub(super) fn new(dialer: &Arc<Dialer>, target: &Target, connections: usize) -> Self {
        let link = || Arc::new(Link::new(Arc::clone(dialer), target.clone()));
        let some = |count| (0..count).map(|_| link()).collect();
        Node {
            work: some(connections),
            monitoring: link(),
            durable: some(connections.max(DURABLE_CONNECTIONS)),
            replicas_are_short: AtomicBool::new(false),
        }
    }

    /// All calls that concern one key go through one connection of a lane.
    pub(super) fn link(&self, lane: Lane, key: &str) -> &Arc<Link> {
        let links = match lane {
            Lane::Work => &self.work,
            Lane::Durable => &self.durable,
            Lane::Monitoring => return &self.monitoring,
        };
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        let at = usize::try_from(hasher.finish() % links.len() as u64).unwrap_or_default();
        &links[at]
    }

    /// Whether the last wait for its replicas came short.
    pub(super) fn replicas_are_short(&self) -> &AtomicBool {
        &self.replicas_are_short
    }

    /// All of them.
    pub(super) fn links(&self) -> impl Iterator<Item = &Arc<Link>> {
        self.work.iter().chain([&self.monitoring]).chain(&self.durable)
    }
}

/// The servers behind the store.
#[derive(Debug)]
pub(super) enum Servers {
    /// One server, or whichever is the master.
    One(Node),
    /// The nodes of a cluster.
    Cluster(Arc<Cluster>),
}

impl Servers {
    /// Sends commands that concern one key at once, and waits for their answers until `deadline`. One that the server
    /// refuses is in its place in the list.
    pub(super) async fn pipeline(
        &self,
        lane: Lane,
        key: &str,
        commands: &[Cmd],
        deadline: Instant,
    ) -> Result<Vec<Answer>, Failure> {
        match self {
            Servers::One(node) => node.link(lane, key).pipeline(commands, deadline).await,
            Servers::Cluster(cluster) => cluster.pipeline(lane, key, commands, deadline).await,
        }
    }

    /// Sends one command and waits for its answer until `deadline`.
    pub(super) async fn command(
        &self,
        lane: Lane,
        key: &str,
        command: &Cmd,
        deadline: Instant,
    ) -> Result<Value, Failure> {
        match self {
            Servers::One(node) => node.link(lane, key).command(command, deadline).await,
            Servers::Cluster(cluster) => {
                let answers = cluster.pipeline(lane, key, std::slice::from_ref(command), deadline).await?;
                first(answers)
            }
        }
    }

    /// Sends commands that each concern a key of their own, and waits for all answers until `deadline`; in the order
    /// of the commands. One that a server refuses is in its place in the list.
    pub(super) async fn commands(
        &self,
        lane: Lane,
        commands: &[(String, Cmd)],
        deadline: Instant,
    ) -> Result<Vec<Answer>, Failure> {
        match self {
            Servers::One(node) => {
                let Some((key, _)) = commands.first() else { return Ok(Vec::new()) };
                let all: Vec<Cmd> = commands.iter().map(|(_, command)| command.clone()).collect();
                node.link(lane, key).pipeline(&all, deadline).await
            }
            Servers::Cluster(cluster) => cluster.commands(lane, commands, deadline).await,
        }
    }

    /// Of `keys` one for every master that is known, and that holds it; the first one if there is one server.
    pub(super) fn one_for_each_master(&self, keys: impl Iterator<Item = String>) -> Vec<String> {
        match self {
            Servers::One(_) => keys.take(1).collect(),
            Servers::Cluster(cluster) => cluster.one_for_each_master(keys),
        }
    }

    /// Whether the last wait for replicas of a key's server came short.
    pub(super) fn replicas_are_short(&self, key: &str) -> bool {
        match self {
            Servers::One(node) => node.replicas_are_short().load(Ordering::Relaxed),
            Servers::Cluster(cluster) => {
                cluster.known_node(key).is_some_and(|node| node.replicas_are_short().load(Ordering::Relaxed))
            }
        }
    }

    /// Remembers what the last wait for replicas of a key's server has come to.
    pub(super) fn note_replicas(&self, key: &str, are_short: bool) {
        match self {
            Servers::One(node) => node.replicas_are_short().store(are_short, Ordering::Relaxed),
            Servers::Cluster(cluster) => {
                if let Some(node) = cluster.known_node(key) {
                    node.replicas_are_short().store(are_short, Ordering::Relaxed);
                }
            }
        }
    }

    /// Failures to connect no longer stand for the next requests.
    pub(super) fn forget_failures(&self) {
        if let Servers::One(node) = self {
            node.links().for_each(|link| link.forget_failure());
        }
    }

    /// Connects to every master, or says what keeps it from that.
    pub(super) async fn connect(&self, deadline: Instant) -> Result<(), StoreError> {
        match self {
            Servers::One(node) => node.link(Lane::Work, "").connect(deadline).await,
            Servers::Cluster(cluster) => cluster.connect(deadline).await,
        }
    }
}

/// The answer to the only command of a pipeline.
fn first(answers: Vec<Answer>) -> Result<Value, Failure> {
    match answers.into_iter().next() {
        Some(Ok(value)) => Ok(value),
        Some(Err(refusal)) => Err(Failure::Refused(refusal)),
        None => Err(Failure::Unknown(StoreError::Unexpected("fewer answers than commands".to_owned()))),
    }
}

/// The node of a fixed address.
pub(super) fn fixed(dialer: &Arc<Dialer>, endpoint: Endpoint, connections: usize) -> Node {
    Node::new(dialer, &Target::Server(endpoint), connections)
}
