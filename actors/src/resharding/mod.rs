//! Migrations (protocol 6): who drives them. Every instance that serves a group of a stream watches that stream
//! while a migration is on record; the stream's mutex lets one of them work at a time, and all they know is in the
//! records. So it does not matter which instance began, nor how many die on the way.

mod pass;
mod reads;
mod requests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use tokio::sync::{Notify, Semaphore};

use crate::refusal::Refusal;
use crate::shared::Shared;
use crate::streams;
use pass::Progress;

pub(crate) use reads::{Proofs, drain_wait, migration, migrations};
pub use requests::Scaled;
pub(crate) use requests::{roll_back, scale};

/// Streams that one process works on at a time.
const STREAMS_AT_A_TIME: usize = 4;
/// The longest pause between two looks at a stream that only members or records can move on.
const LONGEST_POLL: Duration = Duration::from_secs(2);
/// The shortest.
const SHORTEST_POLL: Duration = Duration::from_millis(50);
/// The longest pause after failures.
const LONGEST_RETRY: Duration = Duration::from_secs(30);
/// The streams that this process watches.
pub(crate) struct Resharding {
    watched: DashMap<String, Arc<Watch>>,
    permits: Semaphore,
    pub(crate) proofs: Proofs,
}

impl Default for Resharding {
    fn default() -> Self {
        let permits = Semaphore::new(STREAMS_AT_A_TIME);
        Resharding { watched: DashMap::new(), permits, proofs: Proofs::default() }
    }
}

#[derive(Default)]
struct Watch {
    /// Somebody has asked for a look since the last one began.
    asked: AtomicBool,
    wake: Notify,
    /// What the last look came to.
    told: Mutex<String>,
}

impl Resharding {
    /// Watches a stream until its groups agree and no migration runs. `now`: look at once, also if it is watched.
    pub(crate) fn watch(&self, shared: &Arc<Shared>, prefix: &str, now: bool) {
        if !now && self.watched.contains_key(prefix) {
            return;
        }
        match self.watched.entry(prefix.to_owned()) {
            Entry::Occupied(entry) => {
                entry.get().asked.store(true, Ordering::SeqCst);
                if now {
                    entry.get().wake.notify_one();
                }
            }
            Entry::Vacant(entry) => {
                let watch = Arc::new(Watch::default());
                entry.insert(Arc::clone(&watch));
                let (shared_by_task, prefix) = (Arc::clone(shared), prefix.to_owned());
                shared.workers.spawn(async move {
                    watching(&shared_by_task, &prefix, &watch).await;
                });
            }
        }
    }

    /// What this process was last held up by on the stream; empty when it was not, or does not watch it.
    pub(crate) fn held_up_by(&self, prefix: &str) -> String {
        let watch = self.watched.get(prefix).map(|entry| Arc::clone(entry.value()));
        watch
            .map(|watch| watch.told.lock().unwrap_or_else(PoisonError::into_inner).clone())
            .unwrap_or_default()
    }

    /// Wakes every watcher: the gate has closed.
    pub(crate) fn stop(&self) {
        for watch in &self.watched {
            watch.wake.notify_one();
        }
    }
}

async fn watching(shared: &Arc<Shared>, prefix: &str, watch: &Watch) {
    let mut failures = 0;
    loop {
        watch.asked.store(false, Ordering::SeqCst);
        let Some(running) = shared.gate.enter() else { break };
        let result = one_pass(shared, prefix).await;
        drop(running);
        let pause = match result {
            Ok(Some(progress)) if progress.next.has_settled() => {
                // Asked meanwhile: look again. Under the entry's lock, so that nobody's question is lost.
                let ended = |_: &String, watch: &Arc<Watch>| !watch.asked.load(Ordering::SeqCst);
                if shared.resharding.watched.remove_if(prefix, ended).is_some() {
                    return;
                }
                SHORTEST_POLL
            }
            Ok(Some(progress)) => {
                failures = 0;
                tell(prefix, watch, &progress.next.waits_for);
                pause_until(shared, &progress)
            }
            // Another instance works on it.
            Ok(None) => poll(shared),
            Err(refusal) => {
                failures += 1;
                tell(prefix, watch, &refusal.message);
                (poll(shared) * 2_u32.saturating_pow(failures.min(10))).min(LONGEST_RETRY)
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = watch.wake.notified() => {}
        }
    }
    shared.resharding.watched.remove(prefix);
}

/// The same news once.
fn tell(prefix: &str, watch: &Watch, news: &str) {
    let mut told = watch.told.lock().unwrap_or_else(PoisonError::into_inner);
    if *told != news {
        tracing::info!(prefix, waits_for = news, "a migration waits");
        news.clone_into(&mut told);
    }
}

fn poll(shared: &Shared) -> Duration {
    shared.settings.tick_interval.clamp(SHORTEST_POLL, LONGEST_POLL)
}

/// Until an instant that is known, but no longer than it takes at most to notice what other instances do: they may have
/// been asked to take the migration back, and died.
fn pause_until(shared: &Shared, progress: &Progress) -> Duration {
    let Some(wake_at) = progress.next.wake_at else { return poll(shared) };
    let left = u64::try_from(wake_at.since(progress.now)).unwrap_or(0);
    let longest = shared.settings.index_refresh_interval.max(SHORTEST_POLL);
    Duration::from_millis(left).clamp(SHORTEST_POLL, longest)
}

/// One look at a stream, and everything that can be done now; `None` while somebody else does it.
async fn one_pass(shared: &Arc<Shared>, prefix: &str) -> Result<Option<Progress>, Refusal> {
    let Ok(_permit) = shared.resharding.permits.acquire().await else { return Ok(None) };
    let Some(token) = streams::try_lock(shared, prefix).await? else { return Ok(None) };
    let result = pass::drive(shared, prefix, &token).await;
    streams::unlock(shared, prefix, &token).await;
    result.map(Some)
}
