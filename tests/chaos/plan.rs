//! How long, how much, and how fast.

use std::env;
use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

/// What a run is to achieve.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Decides who is struck with what and when; what comes of it is up to the machine.
    pub(crate) seed: u64,
    /// The run goes on until it has struck so often, and fails if that takes longer than `at_most`.
    pub(crate) kills: usize,
    pub(crate) failovers: usize,
    pub(crate) at_most: Duration,
    /// Replicas that must have what changes ownership before it is answered. With 0 each loss is one of acknowledged writes.
    pub(crate) wait_replicas: usize,
}

/// The members' lease; everything else follows from it.
pub(crate) const LEASE: Duration = Duration::from_millis(3_000);
pub(crate) const HEARTBEAT: Duration = Duration::from_millis(500);
pub(crate) const MUTEX_TTL: Duration = Duration::from_millis(1_200);
/// After so long without an answer a sentinel takes a server for dead.
pub(crate) const DOWN_AFTER: Duration = Duration::from_millis(1_000);
pub(crate) const CLIENTS: usize = 10;
pub(crate) const SHARDS: u32 = 24;

impl Plan {
    /// A short run: half a minute.
    pub(crate) fn short() -> Self {
        let plan =
            Plan { seed: 0, kills: 4, failovers: 1, at_most: Duration::from_secs(150), wait_replicas: 0 };
        Plan { seed: variable("CHAOS_SEED").unwrap_or_else(rand::random), ..plan }
    }

    /// The long run; `CHAOS_SEED`, `CHAOS_KILLS`, `CHAOS_FAILOVERS`, `CHAOS_SECONDS` (how long it may take at most) and
    /// `CHAOS_WAIT_REPLICAS` change it.
    pub(crate) fn long() -> Self {
        let plan = Plan::short();
        Plan {
            kills: variable("CHAOS_KILLS").unwrap_or(100),
            failovers: variable("CHAOS_FAILOVERS").unwrap_or(50),
            at_most: Duration::from_secs(variable("CHAOS_SECONDS").unwrap_or(2_400)),
            wait_replicas: variable("CHAOS_WAIT_REPLICAS").unwrap_or(0),
            ..plan
        }
    }
}

fn variable<T: FromStr<Err: Display>>(name: &str) -> Option<T> {
    let text = env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|error| panic!("{name}={text}: {error}")))
}
