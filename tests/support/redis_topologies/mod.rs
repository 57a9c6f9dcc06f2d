//! Real Redis topologies on loopback: a cluster with replicas, and a master with replicas and sentinels.
//!
//! It depends on nothing else of the tests, so that other crates' tests can include it:
//! `#[path = "../../../tests/support/redis_topologies/mod.rs"] mod redis_topologies;`
//!
//! Every call **blocks** until what it promises is true, at most [`DEADLINE`], and fails the test otherwise. Everything takes
//! `&self`: a test that has something going on beside it puts the topology into an `Arc` and calls it inside
//! `tokio::task::spawn_blocking`.
#![allow(dead_code, unused_imports, reason = "each test binary uses its part of this module")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "the helpers of a test fail like the test"
)]

mod cluster;
mod doors;
mod node;
mod ports;
mod sentinel;
mod slot_move;

use std::thread::sleep;
use std::time::{Duration, Instant};

pub(crate) use cluster::{Announced, ClusterSettings, RedisCluster};
pub(crate) use node::RedisNode;
pub(crate) use sentinel::{RedisSentinel, SentinelSettings};
pub(crate) use slot_move::SlotMove;

/// How long anything may take that is waited for here: much, for slow machines.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Asks again and again until there is something; fails after [`DEADLINE`] with `what` and the last reason why not.
pub(crate) fn wait_for<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let started = Instant::now();
    loop {
        match look() {
            Ok(found) => return found,
            Err(reason) => {
                assert!(started.elapsed() < DEADLINE, "waited {DEADLINE:?} in vain until {what}: {reason}")
            }
        }
        sleep(POLL_INTERVAL);
    }
}
