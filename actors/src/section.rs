//! Entering a group's critical section, and the load checks (protocol 2).

use std::time::{Duration, Instant};

use rand::RngExt;
use rsc_core::{LoadError, RawFields, Stamp, Tombstone, record};
use rsc_protocol::{GroupKey, Timestamp};
use rsc_store::{Conflict, Entered, MutexToken, Outcome};

use crate::memory::Memory;
use crate::meter;
use crate::refusal::Failure;
use crate::service_watch::OutOfService;
use crate::shared::Shared;

/// The first pause while the mutex is busy; doubled up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// A pause that grows, and that two instances do not make in step.
pub(crate) struct Pause(Duration);

impl Pause {
    pub(crate) fn new() -> Self {
        Pause(FIRST_PAUSE)
    }

    /// Pauses; `false` at once if the pause would end after `deadline`.
    pub(crate) async fn before(&mut self, deadline: Instant) -> bool {
        let pause = self.0.mul_f64(rand::rng().random_range(0.5..1.5));
        self.0 = (self.0 * 2).min(LONGEST_PAUSE);
        if Instant::now() + pause >= deadline {
            return false;
        }
        tokio::time::sleep(pause).await;
        true
    }
}

/// A held mutex and what is stored.
#[derive(Debug)]
pub(crate) struct Section {
    /// Holds the mutex; to be committed, deleted or released.
    pub(crate) token: MutexToken,
    /// Redis time.
    pub(crate) now: Timestamp,
    /// What is stored.
    pub(crate) state: Stored,
    /// No later than this the mutex' time began to run.
    pub(crate) since: Instant,
}

/// What a section found.
#[derive(Debug)]
pub(crate) enum Stored {
    /// `memory.known` is the stored state.
    Known {
        /// The key carries a TTL.
        has_ttl: bool,
    },
    /// There is no key.
    Missing {
        /// The tombstone under the group's name, whoever's it is.
        tombstone: Option<Tombstone>,
    },
    /// The record of the pair whose names give the same key.
    Collision,
    /// Something that cannot be read, or is no hash.
    Corrupt {
        /// What is wrong with it.
        what: String,
        /// Its stamp, where that much could be read.
        stamp: Option<Stamp>,
    },
}

/// Enters the critical section of `group` for a turn: waits while the mutex is busy, until `deadline`; takes
/// over what an earlier attempt of this actor may still hold.
pub(crate) async fn enter(
    shared: &Shared,
    group: &GroupKey,
    worker: usize,
    memory: &mut Memory,
    deadline: Instant,
) -> Result<Section, Failure> {
    let mut takeover: Option<MutexToken> = None;
    let mut pause = Pause::new();
    loop {
        let token = MutexToken::fresh(&shared.settings.instance_id);
        let before = Instant::now();
        let entered = shared.store.enter(group, &token, takeover.as_ref(), memory.stamp()).await;
        let after = Instant::now();
        let (now, state) = match entered {
            Ok(Entered::Busy { holder }) => {
                let lost = memory.lost_token(&holder).filter(|lost| takeover.as_ref() != Some(lost));
                if lost.is_some() {
                    takeover = lost;
                    continue;
                }
                tracing::debug!(%group, holder, "the mutex is busy");
                if pause.before(deadline).await {
                    continue;
                }
                return Err(Failure::Busy);
            }
            Ok(Entered::Unchanged { now, has_ttl }) => (now, Stored::Known { has_ttl }),
            Ok(Entered::Loaded { now, fields, has_ttl }) => {
                memory.forget();
                (now, load(shared, group, memory, &fields, has_ttl))
            }
            Ok(Entered::Missing { now, tombstone }) => {
                memory.forget();
                memory.watch.key_missing();
                (now, Stored::Missing { tombstone })
            }
            Ok(Entered::WrongType { now, found }) => {
                memory.forget();
                (now, Stored::Corrupt { what: format!("the key holds a {found}, not a hash"), stamp: None })
            }
            Err(error) => {
                tracing::debug!(%group, %error, "could not enter the critical section");
                memory.lost(token);
                return Err(Failure::Store(error));
            }
        };
        memory.clock = Some((now, after));
        judge_service(shared, group, worker, memory, now, (before, after));
        return Ok(Section { token, now, state, since: before });
    }
}

/// Takes in what this round trip says about the instance's right to judge members (protocol 4.1.1).
fn judge_service(
    shared: &Shared,
    group: &GroupKey,
    worker: usize,
    memory: &mut Memory,
    now: Timestamp,
    (before, after): (Instant, Instant),
) {
    // Asked after the answer: a stall while it was under way must be seen.
    let stall = shared.watchdog.last_stall(worker, Instant::now());
    let stamp = memory.stamp().cloned();
    let watch = &mut memory.watch;
    let causes = [
        watch.stalled(stall),
        watch.entered(after),
        watch.redis_time(before, after, now),
        stamp.and_then(|stamp| watch.found(after, &stamp)),
    ];
    if causes.contains(&Some(OutOfService::OlderRecord)) {
        let reached = memory.last_seen_version();
        memory.lost_writes = memory.lost_writes.max(Some(reached));
    }
    for cause in causes.into_iter().flatten() {
        report(group, cause);
    }
    judge_clock(group, memory, now);
}

/// Redis time that runs behind the record expires nobody (protocol 2), and while it lasts nothing else ends either:
/// people must be told.
fn judge_clock(group: &GroupKey, memory: &mut Memory, now: Timestamp) {
    let recorded = memory.known.as_ref().map(|known| known.group.updated_at);
    let behind = recorded.map(|at| at.since(now)).filter(|behind| *behind >= WORTH_TELLING_MS);
    if let Some(behind_ms) = behind.filter(|_| memory.redis_is_behind.is_none()) {
        meter::redis_time_behind();
        tracing::warn!(%group, behind_ms, "redis time is behind what was recorded: no lease, hold or round ends until it has caught up; compare the clocks of the redis servers");
    }
    memory.redis_is_behind = behind;
}

/// How far Redis time may be behind a record without anybody being told, in milliseconds.
const WORTH_TELLING_MS: i64 = 1_000;

pub(crate) fn report(group: &GroupKey, cause: OutOfService) {
    meter::out_of_service(cause);
    let cause_label = cause.label();
    if cause == OutOfService::OlderRecord {
        tracing::error!(%group, cause = cause_label, "redis lost writes: the record is older than what this instance has committed or seen; nobody is expired for one lease");
    } else {
        tracing::warn!(%group, cause = cause_label, "out of service: nobody is expired for one lease");
    }
}

fn load(shared: &Shared, group: &GroupKey, memory: &mut Memory, fields: &RawFields, has_ttl: bool) -> Stored {
    match record::load(group, fields, &shared.settings.timing) {
        Ok(loaded) => {
            memory.known = Some(loaded);
            memory.exists = true;
            memory.maybe_unreplicated = true;
            Stored::Known { has_ttl }
        }
        Err(LoadError::Collision { .. }) => Stored::Collision,
        Err(error) => Stored::Corrupt { what: error.to_string(), stamp: record::stamp(fields).ok() },
    }
}

/// Renews a mutex before a write that comes late, so that it does not run out under it (protocol 2). `Some`:
/// nothing must be sent any more, and this is what became of the write.
pub(crate) async fn renew_if_late(
    shared: &Shared,
    group: &GroupKey,
    token: &MutexToken,
    since: Instant,
) -> Option<Outcome> {
    if since.elapsed() <= shared.settings.mutex_ttl / 3 {
        return None;
    }
    match shared.store.renew(group, token).await {
        Ok(true) => None,
        Ok(false) => Some(Outcome::Conflict(Conflict::MutexLost)),
        Err(error) => Some(Outcome::NotApplied(error)),
    }
}

/// Gives the mutex back. What goes wrong here costs at most a mutex TTL, and not this actor: it takes the lost
/// token over.
pub(crate) async fn leave(shared: &Shared, group: &GroupKey, memory: &mut Memory, token: MutexToken) {
    if let Err(error) = shared.store.release(group, &token).await {
        tracing::debug!(%group, %error, "could not give the mutex back; it expires by itself");
        memory.lost(token);
    }
}

/// Whether a key that is missing without a tombstone of this group should be there: the actor has loaded it
/// before, or the index names it. The index is asked each time, it may be rebuilt or corrected.
pub(crate) async fn should_exist(
    shared: &Shared,
    group: &GroupKey,
    memory: &Memory,
) -> Result<bool, Failure> {
    if memory.exists {
        return Ok(true);
    }
    shared.store.index_contains(group).await.map_err(Failure::Store)
}
