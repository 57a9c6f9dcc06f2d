//! Ports that nobody listens on.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::sync::{LazyLock, Mutex};

/// What a cluster node adds to its port for its bus.
const BUS: u16 = 10_000;

/// Below the ports that the system hands out by itself (from 32768 on), bus ports included.
const RANGE: std::ops::Range<u16> = 11_000..22_000;

/// Nobody gets a port twice in one process: a server that is killed keeps its port.
static TAKEN: LazyLock<Mutex<BTreeSet<u16>>> = LazyLock::new(Mutex::default);

/// A port that was free a moment ago, and 10000 above it another one, for the bus of a cluster.
pub(super) fn free_port() -> u16 {
    for _ in 0..1_000 {
        let port = RANGE.start + random(RANGE.end - RANGE.start);
        let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
        if is_free(port) && is_free(port + BUS) && TAKEN.lock().unwrap().insert(port) {
            return port;
        }
    }
    panic!("no free port in {RANGE:?}")
}

/// Below `limit`. The standard library's hash maps are seeded at random.
fn random(limit: u16) -> u16 {
    use std::hash::{BuildHasher, RandomState};
    let drawn = RandomState::new().hash_one(std::process::id());
    u16::try_from(drawn % u64::from(limit)).unwrap()
}
