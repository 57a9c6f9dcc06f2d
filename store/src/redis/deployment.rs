//! From settings to connections: what is dialled how, and on which thread connections live.

use std::sync::Arc;

use ::redis::RedisConnectionInfo;
use tokio::runtime::{Handle, Runtime};

use super::address::Address;
use super::cluster::Cluster;
use super::dial::{Dialer, Endpoint, Kind};
use super::link::{Link, Target};
use super::sentinel::Sentinels;
use super::servers::{Node, Servers, fixed};
use super::settings::{Plan, RedisMode, RedisSettings, SettingsError};
use super::tls::Tls;

/// The thread on which all connections live. Were they on the runtime of whoever called first, they would
/// end with it (an HTTP worker that is stopped at shutdown, say) while an actor elsewhere waits for its
/// commit, and answers would wait while that caller computes.
#[derive(Debug)]
pub(super) struct Home(Option<Runtime>);

impl Home {
    fn start() -> Result<(Self, Handle), SettingsError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("rsc-redis")
            .enable_all()
            .build()
            .map_err(|error| SettingsError::Thread(error.to_string()))?;
        let handle = runtime.handle().clone();
        Ok((Home(Some(runtime)), handle))
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // Waiting for the thread is forbidden where other tasks run.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Servers, and the thread of their connections.
#[derive(Debug)]
pub(super) struct Deployment {
    pub(super) servers: Servers,
    /// Who knows the master, in mode `sentinel`.
    pub(super) sentinels: Option<Arc<Sentinels>>,
    /// For a look at any server, whatever it is.
    pub(super) looking: Arc<Dialer>,
    /// What the URLs name.
    pub(super) named: Vec<Endpoint>,
    pub(super) home: Home,
}

impl Deployment {
    /// Nothing is connected yet.
    pub(super) fn new(settings: &RedisSettings) -> Result<Self, SettingsError> {
        let Plan { servers: named, login, tls, mappings } = settings.plan()?;
        let (home, runtime) = Home::start()?;
        let dialer = |login: RedisConnectionInfo, kind: Kind, tls: Option<Tls>| {
            Arc::new(Dialer {
                login,
                client_name: client_name(&settings.instance_id),
                tls,
                connect_timeout: settings.connect_timeout,
                runtime: runtime.clone(),
                kind,
            })
        };
        let connections = settings.connections;
        let looking = dialer(login.clone(), Kind::Any, tls.clone());
        let endpoints = named.iter().map(|(endpoint, _)| endpoint.clone()).collect();
        let mut found_by = None;
        let servers = match &settings.mode {
            RedisMode::Standalone => {
                let Some((endpoint, _)) = named.into_iter().next() else { return Err(SettingsError::NoUrl) };
                Servers::One(fixed(&dialer(login, Kind::Standalone, tls), endpoint, connections))
            }
            RedisMode::Cluster => {
                let seeds = named.into_iter().map(|(endpoint, _)| tcp(endpoint)).collect::<Result<_, _>>()?;
                let dialer = dialer(login, Kind::ClusterNode, tls);
                Servers::Cluster(Arc::new(Cluster::new(dialer, seeds, mappings, connections)))
            }
            RedisMode::Sentinel { master } => {
                let links = named
                    .into_iter()
                    .map(|(endpoint, login)| {
                        let target = Target::Server(Endpoint::Tcp(tcp(endpoint)?));
                        Ok(Arc::new(Link::new(dialer(login, Kind::Sentinel, tls.clone()), target)))
                    })
                    .collect::<Result<_, SettingsError>>()?;
                let patience = settings.connect_timeout / 2;
                let sentinels = Arc::new(Sentinels::new(links, master.clone(), mappings, patience));
                let target = Target::Master(Arc::clone(&sentinels));
                found_by = Some(Arc::clone(&sentinels));
                let node = Node::new(&dialer(login, Kind::Master, tls), &target, connections);
                let watched = node.links().map(Arc::downgrade).collect();
                runtime.spawn(Sentinels::watch(Arc::downgrade(&sentinels), watched));
                Servers::One(node)
            }
        };
        Ok(Deployment { servers, sentinels: found_by, looking, named: endpoints, home })
    }
}

/// Nodes of a cluster and sentinels tell of each other by address.
fn tcp(endpoint: Endpoint) -> Result<Address, SettingsError> {
    match endpoint {
        Endpoint::Tcp(address) => Ok(address),
        Endpoint::Unix(path) => {
            Err(SettingsError::Url(format!("{} is a socket of one server", path.display())))
        }
    }
}

/// A name that `CLIENT SETNAME` takes: printable ASCII without spaces.
fn client_name(instance_id: &str) -> String {
    let printable = |letter: char| if letter.is_ascii_graphic() { letter } else { '-' };
    format!("rsc:{}", instance_id.chars().map(printable).collect::<String>())
}
