//! How long it takes after each fault until all is well again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use reqwest::{Method, StatusCode};
use rsc_protocol::admin::{GroupResponse, GroupState};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::plan::SHARDS;
use super::support::{group_path, monotonic_us};
use super::world::World;

const LOOK_EVERY: Duration = Duration::from_millis(25);
/// How long a coordinator's answer is waited for; dead and paused ones do not answer.
const PATIENCE: Duration = Duration::from_millis(500);

/// Looks again and again whether all is well: the group is `STABLE`, no correction round is on, each shard is read by one
/// client that runs and can be heard, and nobody drains.
pub(crate) struct Recovery {
    looks: Arc<Mutex<Vec<Look>>>,
    over: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

/// Times are of the monotonic clock, in microseconds.
#[derive(Clone, Copy, Debug)]
struct Look {
    began_us: u64,
    ended_us: u64,
    is_well: bool,
}

impl Recovery {
    pub(crate) fn watch(world: &Arc<World>) -> Self {
        let (looks, over) = (Arc::<Mutex<Vec<Look>>>::default(), Arc::new(AtomicBool::new(false)));
        let (noted, is_over, world) = (Arc::clone(&looks), Arc::clone(&over), Arc::clone(world));
        let task = tokio::spawn(async move {
            while !is_over.load(Ordering::SeqCst) {
                let began_us = monotonic_us();
                let is_well =
                    world.clients.cover(SHARDS) && is_stable(&world).await && world.clients.cover(SHARDS);
                noted.lock().unwrap().push(Look { began_us, ended_us: monotonic_us(), is_well });
                sleep(LOOK_EVERY).await;
            }
        });
        Recovery { looks, over, task }
    }

    /// When all was well for the first time after this instant.
    pub(crate) fn after(&self, at_us: u64) -> Option<u64> {
        let looks = self.looks.lock().unwrap();
        let first = looks.partition_point(|look| look.began_us < at_us);
        looks[first..].iter().find(|look| look.is_well).map(|look| look.ended_us)
    }

    /// Whether all was well right before this instant.
    pub(crate) fn was_well(&self, at_us: u64) -> bool {
        let looks = self.looks.lock().unwrap();
        let next = looks.partition_point(|look| look.ended_us < at_us);
        next > 0 && looks[next - 1].is_well
    }

    /// For how long all was well, of how long in all.
    pub(crate) fn well_share(&self) -> f64 {
        let looks = self.looks.lock().unwrap();
        let (mut well, mut all) = (0, 0);
        for pair in looks.windows(2) {
            let time = pair[1].ended_us - pair[0].ended_us;
            all += time;
            well += if pair[1].is_well { time } else { 0 };
        }
        #[expect(clippy::cast_precision_loss, reason = "microseconds of an hour fit")]
        let share = well as f64 / all.max(1) as f64;
        share
    }

    /// Waits until all is well after this instant; `None` if it does not come to that within `at_most`.
    pub(crate) async fn wait(&self, at_us: u64, at_most: Duration) -> Option<u64> {
        let waiting = async {
            loop {
                assert!(!self.task.is_finished(), "whoever looks after recovery has failed");
                if let Some(well_us) = self.after(at_us) {
                    return well_us;
                }
                sleep(LOOK_EVERY).await;
            }
        };
        timeout(at_most, waiting).await.ok()
    }

    pub(crate) fn stop(&self) {
        self.over.store(true, Ordering::SeqCst);
    }
}

async fn is_stable(world: &World) -> bool {
    let api = world.api();
    let asking = api.try_send(api.request(Method::GET, &group_path(&world.group)));
    let Ok(Ok(answer)) = timeout(PATIENCE, asking).await else { return false };
    if answer.status != StatusCode::OK {
        return false;
    }
    let shown: GroupResponse = answer.read();
    shown.healthy && shown.state == GroupState::Stable && !shown.metadata_sync_in_progress
}
