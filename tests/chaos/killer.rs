//! Strikes at random, and mends.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::sleep;

use super::plan::{DOWN_AFTER, LEASE, MUTEX_TTL, Plan};
use super::recovery::Recovery;
use super::roles::Roles;
use super::support::monotonic_us;
use super::support::redis_topologies::RedisSentinel;
use super::world::World;

/// After any fault all has to be well within this time: some leases, a failover, and a slow machine.
const RECOVERS_WITHIN: Duration = Duration::from_secs(60);

/// What is done to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    DaemonKilled,
    AllDaemonsKilled,
    DaemonPaused,
    AllDaemonsPaused,
    ReplicaKilled,
    ReplicaPaused,
    SentinelKilled,
    /// Not for so long that the sentinels would replace it.
    MasterPausedBriefly,
    ClientKilled,
    /// Killed, and started again at once.
    ClientRestarted,
    ClientCutOff,
    ClientLeft,
    ClientStarted,
    MasterKilled,
    /// The replicas get nothing more, clients come and go, and then the master is killed.
    MasterKilledWritesLost,
    /// Until it has been replaced; then it wakes, and takes itself for the master.
    MasterPaused,
    FailoverOrdered,
}

const SMALL: [Fault; 12] = [
    Fault::DaemonKilled,
    Fault::DaemonKilled,
    Fault::AllDaemonsKilled,
    Fault::DaemonPaused,
    Fault::AllDaemonsPaused,
    Fault::ReplicaKilled,
    Fault::ReplicaPaused,
    Fault::SentinelKilled,
    Fault::MasterPausedBriefly,
    Fault::ClientKilled,
    Fault::ClientRestarted,
    Fault::ClientCutOff,
];

/// The first one comes in each run.
const FAILOVERS: [Fault; 7] = [
    Fault::MasterKilledWritesLost,
    Fault::MasterKilledWritesLost,
    Fault::MasterKilledWritesLost,
    Fault::MasterKilled,
    Fault::MasterKilled,
    Fault::MasterPaused,
    Fault::FailoverOrdered,
];

/// A fault and when it struck, by the monotonic clock in microseconds.
#[derive(Clone, Debug)]
pub(crate) struct Strike {
    pub(crate) fault: Fault,
    pub(crate) at_us: u64,
    /// Before that nothing can be well again: a failover that was ordered begins later.
    pub(crate) in_force_us: u64,
}

/// What was done.
#[derive(Clone, Debug, Default)]
pub(crate) struct Deeds {
    pub(crate) strikes: Vec<Strike>,
    /// Processes that got `SIGKILL`.
    pub(crate) kills: usize,
    /// Processes that got `SIGSTOP`.
    pub(crate) pauses: usize,
    /// Clients that were killed; they are tasks.
    pub(crate) client_kills: usize,
    /// When a master was killed, by the monotonic clock in microseconds.
    pub(crate) master_kills_us: Vec<u64>,
}

pub(crate) struct Killer {
    world: Arc<World>,
    recovery: Recovery,
    roles: Roles,
    dice: StdRng,
    deeds: Arc<Mutex<Deeds>>,
    /// Servers and sentinels that come back.
    redis_mends: JoinSet<()>,
    /// Coordinators and clients that do.
    mends: JoinSet<()>,
}

impl Killer {
    pub(crate) fn new(world: &Arc<World>, seed: u64) -> Self {
        Killer {
            world: Arc::clone(world),
            recovery: Recovery::watch(world),
            roles: Roles::watch(&world.redis),
            dice: StdRng::seed_from_u64(seed),
            deeds: Arc::default(),
            redis_mends: JoinSet::new(),
            mends: JoinSet::new(),
        }
    }

    /// Strikes until the plan is fulfilled, and mends everything. Fails when that takes longer than the plan allows, and when
    /// something does not recover.
    pub(crate) async fn rage(mut self, plan: &Plan) -> (Deeds, Recovery, Roles) {
        let began = Instant::now();
        self.recover(monotonic_us(), "the start").await;
        loop {
            let (kills, failovers) = self.achieved();
            if kills >= plan.kills && failovers >= plan.failovers {
                break;
            }
            let elapsed = began.elapsed();
            assert!(
                elapsed < plan.at_most,
                "{kills} kills and {failovers} failovers in {elapsed:?}: too slow"
            );
            for _ in 0..self.dice.random_range(1..=3) {
                let fault = *SMALL.choose(&mut self.dice).unwrap();
                self.strike_small(fault).await;
                self.pause_or_recover().await;
            }
            if failovers < plan.failovers {
                let fault =
                    if failovers == 0 { FAILOVERS[0] } else { *FAILOVERS.choose(&mut self.dice).unwrap() };
                self.fail_over(fault).await;
                self.pause_or_recover().await;
            }
        }
        self.mend_all().await;
        let deeds = self.deeds.lock().unwrap().clone();
        self.recovery.stop();
        (deeds, self.recovery, self.roles)
    }

    fn achieved(&self) -> (usize, usize) {
        (self.deeds.lock().unwrap().kills, self.roles.promotions())
    }

    async fn mend_all(&mut self) {
        while let Some(mended) = self.redis_mends.join_next().await {
            mended.unwrap();
        }
        while let Some(mended) = self.mends.join_next().await {
            mended.unwrap();
        }
        for index in self.world.clients.absent() {
            self.world.clients.start(index);
        }
        self.redis(RedisSentinel::wait_until_whole).await;
        self.recover(monotonic_us(), "everything").await;
    }

    async fn redis<T: Send + 'static>(&self, call: impl FnOnce(&RedisSentinel) -> T + Send + 'static) -> T {
        let redis = Arc::clone(&self.world.redis);
        spawn_blocking(move || call(&redis)).await.unwrap()
    }

    fn ms(&mut self, range: std::ops::Range<u64>) -> Duration {
        Duration::from_millis(self.dice.random_range(range))
    }

    fn note(&self, fault: Fault) -> u64 {
        note(&self.deeds, fault)
    }

    fn count(&self, kills: usize, pauses: usize) {
        let mut deeds = self.deeds.lock().unwrap();
        deeds.kills += kills;
        deeds.pauses += pauses;
    }

    /// Mostly the next one strikes when all is well, sometimes right into the middle.
    async fn pause_or_recover(&mut self) {
        if self.dice.random_bool(0.3) {
            sleep(self.ms(0..1_500)).await;
            return;
        }
        self.recover(monotonic_us(), "the last fault").await;
    }

    async fn recover(&self, at_us: u64, what: &str) {
        if self.recovery.wait(at_us, RECOVERS_WITHIN).await.is_none() {
            let last: Vec<Strike> =
                self.deeds.lock().unwrap().strikes.iter().rev().take(5).cloned().collect();
            let shown = self.world.describe().await;
            panic!("not well {RECOVERS_WITHIN:?} after {what}; before that, newest first, {last:?}; {shown}");
        }
    }

    async fn strike_small(&mut self, fault: Fault) {
        match fault {
            Fault::DaemonKilled => self.kill_daemons(1, fault),
            Fault::AllDaemonsKilled => self.kill_daemons(usize::MAX, fault),
            Fault::DaemonPaused => self.pause_daemons(1, fault),
            Fault::AllDaemonsPaused => self.pause_daemons(usize::MAX, fault),
            Fault::ReplicaKilled | Fault::ReplicaPaused => self.strike_replica(fault).await,
            Fault::SentinelKilled => self.kill_sentinel().await,
            Fault::MasterPausedBriefly => {
                self.redis_is_whole().await;
                self.note(fault);
                self.count(0, 1);
                let time = self.ms(100..u64::try_from(DOWN_AFTER.as_millis()).unwrap() / 2);
                let master = self.redis(RedisSentinel::master).await;
                self.world.redis.pause(master);
                sleep(time).await;
                self.world.redis.resume(master);
            }
            Fault::ClientKilled | Fault::ClientRestarted => self.kill_client(fault),
            Fault::ClientCutOff => self.cut_off_client(),
            _ => unreachable!("{fault:?} is not a small one"),
        }
    }

    fn kill_daemons(&mut self, most: usize, fault: Fault) {
        let victims = self.some_daemons(most);
        if victims.is_empty() {
            return;
        }
        self.note(fault);
        for index in victims {
            self.count(1, 0);
            self.world.kill_daemon(index);
            let (world, delay) = (Arc::clone(&self.world), self.ms(0..2_500));
            self.mends.spawn(async move {
                sleep(delay).await;
                world.replace_daemon(index).await;
            });
        }
    }

    /// For a moment, for longer than the mutex lasts, or for longer than a lease.
    fn pause_daemons(&mut self, most: usize, fault: Fault) {
        let victims = self.some_daemons(most);
        if victims.is_empty() {
            return;
        }
        self.note(fault);
        let longest = *[MUTEX_TTL / 2, MUTEX_TTL * 2, LEASE * 3 / 2].choose(&mut self.dice).unwrap();
        for index in victims {
            self.count(0, 1);
            self.world.pause_daemon(index);
            let (world, time) =
                (Arc::clone(&self.world), self.ms(50..u64::try_from(longest.as_millis()).unwrap()));
            self.mends.spawn(async move {
                sleep(time).await;
                world.resume_daemon(index);
            });
        }
    }

    fn some_daemons(&mut self, most: usize) -> Vec<usize> {
        let serving = self.world.serving();
        serving.sample(&mut self.dice, most.min(serving.len())).copied().collect()
    }

    async fn strike_replica(&mut self, fault: Fault) {
        self.redis_is_whole().await;
        let replicas = self.redis(RedisSentinel::replicas).await;
        let index = *replicas.choose(&mut self.dice).unwrap();
        self.note(fault);
        let (world, delay) = (Arc::clone(&self.world), self.ms(0..2_000));
        if fault == Fault::ReplicaKilled {
            self.count(1, 0);
            self.world.redis.kill(index);
            self.redis_mends.spawn_blocking(move || {
                std::thread::sleep(delay);
                world.redis.restart_as_replica(index);
            });
        } else {
            self.count(0, 1);
            self.world.redis.pause(index);
            self.redis_mends.spawn_blocking(move || {
                std::thread::sleep(delay);
                world.redis.resume(index);
            });
        }
    }

    async fn kill_sentinel(&mut self) {
        self.redis_is_whole().await;
        self.note(Fault::SentinelKilled);
        self.count(1, 0);
        let index = self.dice.random_range(self.world.redis.sentinels());
        self.world.redis.sentinel(index).kill();
        let (world, delay) = (Arc::clone(&self.world), self.ms(0..2_000));
        self.redis_mends.spawn_blocking(move || {
            std::thread::sleep(delay);
            world.redis.sentinel(index).restart(&[]);
        });
    }

    fn kill_client(&mut self, fault: Fault) {
        let Some(&index) = self.world.clients.connected().choose(&mut self.dice) else { return };
        self.note(fault);
        self.deeds.lock().unwrap().client_kills += 1;
        self.world.clients.die(index);
        let delay = if fault == Fault::ClientKilled { self.ms(500..8_000) } else { Duration::ZERO };
        self.start_client_after(index, delay, fault == Fault::ClientKilled);
    }

    fn start_client_after(&mut self, index: usize, delay: Duration, is_news: bool) {
        let (world, deeds) = (Arc::clone(&self.world), Arc::clone(&self.deeds));
        self.mends.spawn(async move {
            sleep(delay).await;
            if is_news {
                note(&deeds, Fault::ClientStarted);
            }
            world.clients.start(index);
        });
    }

    fn cut_off_client(&mut self) {
        let Some(&index) = self.world.clients.connected().choose(&mut self.dice) else { return };
        self.note(Fault::ClientCutOff);
        self.world.clients.cut_off(index);
        let (world, time) = (Arc::clone(&self.world), self.ms(200..6_000));
        self.mends.spawn(async move {
            sleep(time).await;
            world.clients.reconnect(index);
        });
    }

    /// Waits until servers and sentinels are all there: only then a failover can follow.
    async fn redis_is_whole(&mut self) {
        while let Some(mended) = self.redis_mends.join_next().await {
            mended.unwrap();
        }
        self.redis(RedisSentinel::wait_until_whole).await;
    }

    async fn fail_over(&mut self, fault: Fault) {
        self.redis_is_whole().await;
        let master = self.redis(RedisSentinel::master).await;
        if fault == Fault::MasterKilledWritesLost {
            self.somebody_is_away().await;
        }
        if fault == Fault::MasterKilledWritesLost {
            // Whoever comes now is written down by a master that nobody hears any more.
            self.count(0, 2);
            self.redis(RedisSentinel::cut_replication).await;
            for index in self.world.clients.absent() {
                self.start_client_after(index, Duration::ZERO, false);
            }
            if self.dice.random_bool(0.5) {
                self.kill_client(Fault::ClientRestarted);
            }
            self.something_is_acknowledged().await;
            // Long enough for shards to be handed over.
            let time = self.ms(0..2_500);
            sleep(time).await;
        }
        self.note(fault);
        match fault {
            Fault::MasterKilled | Fault::MasterKilledWritesLost => {
                self.count(1, 0);
                self.world.redis.kill(master);
                self.deeds.lock().unwrap().master_kills_us.push(monotonic_us());
                for index in self.world.redis.servers().filter(|index| *index != master) {
                    self.world.redis.resume(index);
                }
            }
            Fault::MasterPaused => {
                self.count(0, 1);
                self.world.redis.pause(master);
            }
            _ => {}
        }
        // Meanwhile others may be struck as well.
        match self.dice.random_range(0..10) {
            0 | 1 => self.kill_daemons(1, Fault::DaemonKilled),
            2 | 3 => self.kill_daemons(usize::MAX, Fault::AllDaemonsKilled),
            4 => self.pause_daemons(1, Fault::DaemonPaused),
            5 => self.kill_client(Fault::ClientKilled),
            6 => self.cut_off_client(),
            _ => {}
        }
        if fault == Fault::FailoverOrdered {
            self.redis(RedisSentinel::fail_over).await;
            let mut deeds = self.deeds.lock().unwrap();
            let ordered = deeds.strikes.iter_mut().rev().find(|strike| strike.fault == fault);
            ordered.unwrap().in_force_us = monotonic_us();
        } else {
            self.redis(move |redis| redis.wait_for_promotion(master)).await;
        }
        let (world, delay) = (Arc::clone(&self.world), self.ms(0..1_500));
        self.redis_mends.spawn_blocking(move || {
            std::thread::sleep(delay);
            match fault {
                Fault::MasterKilled | Fault::MasterKilledWritesLost => world.redis.restart_as_replica(master),
                Fault::MasterPaused => world.redis.resume(master),
                _ => {}
            }
        });
    }

    /// Waits until clients have been told of two more transitions: the newcomer's, and what follows from it.
    async fn something_is_acknowledged(&self) {
        let acknowledged = || self.world.log.notes().acknowledged.len();
        let (before, asked) = (acknowledged(), Instant::now());
        while acknowledged() < before + 2 && asked.elapsed() < LEASE {
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// So that somebody can come while nothing is replicated.
    async fn somebody_is_away(&mut self) {
        if !self.world.clients.absent().is_empty() {
            return;
        }
        let Some(&index) = self.world.clients.connected().choose(&mut self.dice) else { return };
        let at_us = self.note(Fault::ClientLeft);
        self.world.clients.leave(index);
        self.recover(at_us, "a client has left").await;
    }
}

fn note(deeds: &Mutex<Deeds>, fault: Fault) -> u64 {
    let at_us = monotonic_us();
    deeds.lock().unwrap().strikes.push(Strike { fault, at_us, in_force_us: at_us });
    at_us
}
