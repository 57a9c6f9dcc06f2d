//! Who became master when, as the servers themselves say: sentinels also act unasked.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, sleep};
use std::time::Duration;

use redis::Value;

use super::support::monotonic_us;
use super::support::redis_topologies::RedisSentinel;

/// Far shorter than it takes the sentinels to make a promotion known.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A server that became master.
#[derive(Clone, Debug)]
pub(crate) struct Promotion {
    pub(crate) server: usize,
    /// When it was seen as a replica for the last time, by the monotonic clock in microseconds.
    pub(crate) since_us: u64,
}

/// Watches the servers' roles until it is asked what it has seen.
pub(crate) struct Roles {
    over: Arc<AtomicBool>,
    promotions: Arc<Mutex<Vec<Promotion>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Roles {
    pub(crate) fn watch(redis: &Arc<RedisSentinel>) -> Self {
        let (over, promotions) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Vec<Promotion>>>::default());
        let watch = |server| {
            let (redis, over, promotions) = (Arc::clone(redis), Arc::clone(&over), Arc::clone(&promotions));
            thread::spawn(move || watch(&redis, server, &over, &promotions))
        };
        let threads = redis.servers().map(watch).collect();
        Roles { over, promotions, threads }
    }

    /// How many promotions there were so far.
    pub(crate) fn promotions(&self) -> usize {
        self.promotions.lock().unwrap().len()
    }

    /// Ends, and returns them in their order.
    pub(crate) fn finish(mut self) -> Vec<Promotion> {
        self.over.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
        let mut promotions = self.promotions.lock().unwrap().clone();
        promotions.sort_by_key(|promotion| promotion.since_us);
        promotions
    }
}

impl Drop for Roles {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
    }
}

fn watch(redis: &RedisSentinel, server: usize, over: &AtomicBool, promotions: &Mutex<Vec<Promotion>>) {
    let mut connection = None;
    let mut replica_at_us = None;
    while !over.load(Ordering::SeqCst) {
        sleep(LOOK_EVERY);
        if connection.is_none() {
            connection = redis.server(server).connect().ok();
        }
        let Some(open) = &mut connection else { continue };
        let asked_us = monotonic_us();
        match redis::cmd("ROLE").query::<Vec<Value>>(open) {
            Ok(role) if role.first().is_some_and(|role| *role == Value::BulkString(b"master".to_vec())) => {
                if let Some(since_us) = replica_at_us.take() {
                    promotions.lock().unwrap().push(Promotion { server, since_us });
                }
            }
            Ok(_) => replica_at_us = Some(asked_us),
            Err(_) => connection = None,
        }
    }
}
