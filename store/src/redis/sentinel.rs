//! Finding the master through sentinels (protocol 12, `redis.mode = sentinel`).

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use ::redis::Value;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::Instant;

use super::address::{Address, Mappings};
use super::dial::Endpoint;
use super::link::{Failure, Link, Refusal};
use super::reply::text;
use crate::types::StoreError;

/// How often a connected store asks whether its master is still the master: a server that was replaced while nobody
/// could reach it goes on taking writes until it hears of it.
const WATCH_INTERVAL: Duration = Duration::from_millis(250);

/// The sentinels of one master.
pub(super) struct Sentinels {
    links: Vec<Arc<Link>>,
    master: String,
    mappings: Mappings,
    /// How long one sentinel's answer is waited for.
    patience: Duration,
    /// The master that was named last, for people.
    known: Mutex<Option<Address>>,
}

/// What one sentinel says.
enum Said {
    Master(Address),
    Unknown,
    Nothing(StoreError),
}

impl fmt::Debug for Sentinels {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Sentinels").field("master", &self.master).finish_non_exhaustive()
    }
}

impl fmt::Display for Sentinels {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        match &*known {
            Some(address) => write!(formatter, "master {}, last at {address}", self.master),
            None => write!(formatter, "master {}", self.master),
        }
    }
}

impl Sentinels {
    /// Sentinels that are asked through `links` for the master of this name.
    pub(super) fn new(links: Vec<Arc<Link>>, master: String, mappings: Mappings, patience: Duration) -> Self {
        Sentinels { links, master, mappings, patience, known: Mutex::default() }
    }

    /// Where the master is reached. All sentinels are asked at once, and the address that more than half of them name is
    /// taken as soon as they do: one that was cut off with a replaced master must not lead us there. If no more
    /// answer, what most of those name that did.
    pub(super) async fn master(&self) -> Result<Address, StoreError> {
        let mut asking: FuturesUnordered<_> = self.links.iter().map(|link| self.ask(link)).collect();
        let (mut votes, mut unknown, mut trouble): (Vec<(Address, usize)>, _, _) = (Vec::new(), 0, None);
        while let Some(said) = asking.next().await {
            match said {
                Said::Master(address) => {
                    let at = votes.iter().position(|(named, _)| *named == address).unwrap_or_else(|| {
                        votes.push((address, 0));
                        votes.len() - 1
                    });
                    votes[at].1 += 1;
                    if votes[at].1 * 2 > self.links.len() {
                        break;
                    }
                }
                Said::Unknown => unknown += 1,
                Said::Nothing(error) => trouble = worse(trouble, error),
            }
        }
        // The first one of several with the same number of votes.
        let named = votes.into_iter().rev().max_by_key(|(_, count)| *count).map(|(address, _)| address);
        match (named, trouble) {
            (Some(address), _) => {
                let address = self.mappings.reachable(address);
                *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Some(address.clone());
                Ok(address)
            }
            (None, _) if unknown > 0 => Err(StoreError::Misconfigured(format!(
                "no sentinel that answers knows a master {:?}: see redis.sentinel-master",
                self.master
            ))),
            (None, Some(error)) => Err(error),
            (None, None) => Err(StoreError::Unavailable("no sentinel has answered".to_owned())),
        }
    }

    /// Where a server that a replica's master knows by this address is reached from here.
    pub(super) fn reachable(&self, announced: Address) -> Address {
        self.mappings.reachable(announced)
    }

    async fn ask(&self, link: &Arc<Link>) -> Said {
        let mut command = ::redis::cmd("SENTINEL");
        command.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.master);
        match link.command(&command, Instant::now() + self.patience).await {
            Ok(Value::Nil) => Said::Unknown,
            Ok(Value::Array(parts)) => {
                let parts: Option<Vec<String>> = parts.into_iter().map(|part| text(part).ok()).collect();
                let address = match parts.as_deref() {
                    Some([host, port]) => port.parse().ok().map(|port| Address::new(host, port)),
                    _ => None,
                };
                address.map_or_else(|| Said::Nothing(not_understood()), Said::Master)
            }
            Ok(_) => Said::Nothing(not_understood()),
            Err(Failure::Refused(Refusal { code, said })) if code == "ERR" => {
                Said::Nothing(StoreError::Misconfigured(format!(
                    "{said}: redis.mode is sentinel, redis.urls must name sentinels"
                )))
            }
            Err(failure) => Said::Nothing(failure.into_error()),
        }
    }

    /// Looks from time to time whether the master has changed, and gives up connections to the former one. Ends
    /// when the links are gone.
    pub(super) async fn watch(sentinels: Weak<Self>, links: Vec<Weak<Link>>) {
        loop {
            tokio::time::sleep(WATCH_INTERVAL).await;
            let Some(sentinels) = sentinels.upgrade() else { return };
            if links.iter().all(|link| link.strong_count() == 0) {
                return;
            }
            let Ok(master) = sentinels.master().await else { continue };
            let master = Endpoint::Tcp(master);
            let moved =
                links.iter().filter_map(Weak::upgrade).filter(|link| link.give_up_unless(&master)).count();
            if moved > 0 {
                tracing::info!(address = %master, "redis has another master");
            }
        }
    }
}

fn not_understood() -> StoreError {
    StoreError::Unexpected("a sentinel's answer was not understood".to_owned())
}

/// Of two errors the one that somebody has to do something about.
fn worse(known: Option<StoreError>, other: StoreError) -> Option<StoreError> {
    match known {
        Some(known @ StoreError::Misconfigured(_)) => Some(known),
        _ => Some(other),
    }
}
