//! Raw commands on the servers of a deployment, for the operator's tools (protocol 12: `rsc doctor`, `repair`,
//! `backup`, `restore`). The coordinator itself never comes here.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ::redis::{Cmd, Value};
use tokio::time::Instant;

use super::address::Address;
use super::deployment::Deployment;
use super::dial::Endpoint;
use super::link::{Failure, Link, Target};
use super::reply::{text, unexpected};
use super::servers::{Lane, Servers};
use super::settings::{RedisSettings, SettingsError};
use crate::types::StoreError;

/// Whether a server takes writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeRole {
    /// It does.
    Master,
    /// It follows a master.
    Replica,
}

/// One server that holds the data, or a copy of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisNode {
    /// As it is reached, `host:port`.
    pub address: String,
    /// What it says about itself; of one that was not asked, what the others say.
    pub role: NodeRole,
}

/// Raw commands on the servers of a deployment, for the operator's tools. It connects with the first command.
#[derive(Debug)]
pub struct RedisTools {
    deployment: Deployment,
    links: Mutex<HashMap<String, Arc<Link>>>,
    command_timeout: Duration,
}

impl RedisTools {
    /// Connections of its own, made as the settings say.
    ///
    /// # Errors
    /// When the settings cannot work with any server.
    pub fn new(settings: &RedisSettings) -> Result<Self, SettingsError> {
        let deployment = Deployment::new(settings)?;
        Ok(RedisTools { deployment, links: Mutex::default(), command_timeout: settings.command_timeout })
    }

    /// Every server known to hold the data, reachable or not: masters first. A single server that does not let this user
    /// ask for its role is taken for a master.
    ///
    /// # Errors
    /// When nobody tells: the one server, the sentinels, or all nodes cannot be reached or logged in to.
    pub async fn nodes(&self) -> Result<Vec<RedisNode>, StoreError> {
        if let Servers::Cluster(cluster) = &self.deployment.servers {
            cluster.learn(Instant::now() + self.command_timeout).await?;
            let role = |is_master| if is_master { NodeRole::Master } else { NodeRole::Replica };
            let nodes = cluster.nodes().into_iter();
            return Ok(nodes
                .map(|(address, is_master)| RedisNode { address: address.to_string(), role: role(is_master) })
                .collect());
        }
        if let Some(sentinels) = &self.deployment.sentinels {
            let master = sentinels.master().await?.to_string();
            let mut nodes = vec![RedisNode { address: master.clone(), role: NodeRole::Master }];
            // A master that hangs or forbids the question tells of nobody else.
            let replicas = self.send(&master, &::redis::cmd("ROLE")).await.ok().and_then(replicas_of);
            nodes.extend(replicas.into_iter().flatten().map(|address| RedisNode {
                address: sentinels.reachable(address).to_string(),
                role: NodeRole::Replica,
            }));
            return Ok(nodes);
        }
        let Some(endpoint) = self.deployment.named.first() else {
            return Err(unexpected("no server is named"));
        };
        let address = endpoint.to_string();
        let role = match self.send(&address, &::redis::cmd("ROLE")).await {
            Ok(answer) => role_of(answer)?,
            Err(error) if is_forbidden(&error) => self.role_by_info(&address).await?,
            Err(error) => return Err(error),
        };
        Ok(vec![RedisNode { address, role }])
    }

    async fn role_by_info(&self, address: &str) -> Result<NodeRole, StoreError> {
        match self.send(address, ::redis::cmd("INFO").arg("replication")).await {
            Ok(answer) => {
                let is_replica = text(answer)?.lines().any(|line| line.trim_end() == "role:slave");
                Ok(if is_replica { NodeRole::Replica } else { NodeRole::Master })
            }
            Err(error) if is_forbidden(&error) => Ok(NodeRole::Master),
            Err(error) => Err(error),
        }
    }

    /// One command on this very node. It has the command timeout for itself, and is never sent twice.
    ///
    /// # Errors
    /// When the node does not answer, or refuses (the text begins with the server's own code, `NOPERM` for instance).
    pub async fn on(&self, node: &RedisNode, command: &Cmd) -> Result<Value, StoreError> {
        self.send(&node.address, command).await
    }

    /// One command on the master that holds `key`. It has the command timeout for itself, and is sent again only if it
    /// was certainly not carried out.
    ///
    /// # Errors
    /// As [`RedisTools::on`].
    pub async fn by_key(&self, key: &str, command: &Cmd) -> Result<Value, StoreError> {
        let deadline = Instant::now() + self.command_timeout;
        let answer = self.deployment.servers.command(Lane::Work, key, command, deadline).await;
        answer.map_err(Failure::into_error)
    }

    async fn send(&self, address: &str, command: &Cmd) -> Result<Value, StoreError> {
        let link = self.link(address)?;
        link.command(command, Instant::now() + self.command_timeout).await.map_err(Failure::into_error)
    }

    fn link(&self, address: &str) -> Result<Arc<Link>, StoreError> {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(link) = links.get(address) {
            return Ok(Arc::clone(link));
        }
        let named = self.deployment.named.iter().find(|endpoint| endpoint.to_string() == address).cloned();
        let endpoint = named
            .or_else(|| Address::parse(address).map(Endpoint::Tcp))
            .ok_or_else(|| StoreError::Unavailable(format!("{address} is no address")))?;
        let link = Arc::new(Link::new(Arc::clone(&self.deployment.looking), Target::Server(endpoint)));
        links.insert(address.to_owned(), Arc::clone(&link));
        Ok(link)
    }
}

/// Whether the server said that the user may not.
fn is_forbidden(error: &StoreError) -> bool {
    matches!(error, StoreError::Refused(text) if text.starts_with("NOPERM"))
}

/// Reads what `ROLE` answers: a list whose first item says it.
fn role_of(answer: Value) -> Result<NodeRole, StoreError> {
    let mut items = answer.into_sequence().map_err(|_| unexpected("ROLE answers no list"))?;
    if items.is_empty() {
        return Err(unexpected("ROLE answers an empty list"));
    }
    // A sentinel has a role of its own; that it is none of these servers is for `INFO` to say.
    let is_replica = text(items.swap_remove(0))? == "slave";
    Ok(if is_replica { NodeRole::Replica } else { NodeRole::Master })
}

/// The replicas that a master names in its answer to `ROLE`: role, offset, and a list of address, port and offset.
fn replicas_of(answer: Value) -> Option<Vec<Address>> {
    let replicas = answer.into_sequence().ok()?.into_iter().nth(2)?.into_sequence().ok()?;
    Some(
        replicas
            .into_iter()
            .filter_map(|replica| {
                let mut parts = replica.into_sequence().ok()?.into_iter();
                let (host, port) = (text(parts.next()?).ok()?, text(parts.next()?).ok()?);
                Some(Address::new(&host, port.parse().ok()?))
            })
            .collect(),
    )
}
