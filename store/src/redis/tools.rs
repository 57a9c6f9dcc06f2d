//! Raw commands on the servers of a deployment, for the operator's tools (protocol 12: `rsc doctor`, `repair`,
//! `backup`, `restore`). The coordinator itself never comes here.

use std::sync::Arc;
use std::time::Duration;

use ::redis::{Cmd, Value};
use tokio::time::Instant;

use super::link::{Failure, Link};
use super::reply::{text, unexpected};
use super::settings::{RedisSettings, SettingsError};
use super::{Home, client_name};
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
    /// What it says about itself.
    pub role: NodeRole,
}

/// Raw commands on the servers of a deployment, for the operator's tools. It connects with the first command.
#[derive(Debug)]
pub struct RedisTools {
    link: Arc<Link>,
    address: String,
    command_timeout: Duration,
    _home: Home,
}

impl RedisTools {
    /// Connections of its own, made as the settings say.
    ///
    /// # Errors
    /// When the settings cannot work with any server.
    pub fn new(settings: &RedisSettings) -> Result<Self, SettingsError> {
        let info = settings.connection_info()?;
        let address = info.addr().to_string();
        let name = client_name(&settings.instance_id);
        let (home, runtime) = Home::start()?;
        let link = Arc::new(Link::new(info, name, settings.connect_timeout, runtime));
        Ok(RedisTools { link, address, command_timeout: settings.command_timeout, _home: home })
    }

    /// Every server known to hold the data: masters first. A server that does not let this user ask for its role
    /// is taken for a master.
    ///
    /// # Errors
    /// When no server can be reached or logged in to.
    pub async fn nodes(&self) -> Result<Vec<RedisNode>, StoreError> {
        let role = match self.send(&::redis::cmd("ROLE")).await {
            Ok(answer) => role_of(answer)?,
            Err(error) if is_forbidden(&error) => self.role_by_info().await?,
            Err(error) => return Err(error),
        };
        Ok(vec![RedisNode { address: self.address.clone(), role }])
    }

    async fn role_by_info(&self) -> Result<NodeRole, StoreError> {
        match self.send(::redis::cmd("INFO").arg("replication")).await {
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
    /// When the node does not answer, refuses (the text begins with the server's own code, `NOPERM` for instance),
    /// or is none of [`RedisTools::nodes`].
    pub async fn on(&self, node: &RedisNode, command: &Cmd) -> Result<Value, StoreError> {
        if node.address != self.address {
            return Err(StoreError::Unavailable(format!("{} is not a known server", node.address)));
        }
        self.send(command).await
    }

    /// One command on the master that holds `key`. It has the command timeout for itself, and is never sent twice.
    ///
    /// # Errors
    /// As [`RedisTools::on`].
    pub async fn by_key(&self, key: &str, command: &Cmd) -> Result<Value, StoreError> {
        let _one_server_holds_every_key = key;
        self.send(command).await
    }

    async fn send(&self, command: &Cmd) -> Result<Value, StoreError> {
        self.link.command(command, Instant::now() + self.command_timeout).await.map_err(Failure::into_error)
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
