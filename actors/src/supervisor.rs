//! The supervisor: finds groups in the index, lets go of deleted ones, puts forgotten ones back, and replaces
//! actors that crashed.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use actix::{Actor, ActorContext, ActorFutureExt, Addr, AsyncContext, Context, Handler, Message, WrapFuture};
use futures_util::StreamExt;
use rsc_core::{LoadError, is_successor, record};
use rsc_protocol::GroupKey;
use rsc_store::{Found, StoreError};

use crate::gate::Running;
use crate::index::{Listed, candidates, look_up};
use crate::meter;
use crate::service_watch::look_interval;
use crate::shared::Shared;

/// Reads of the store that one pass makes at a time.
const PARALLEL_READS: usize = 8;

/// The way to the supervisor, which starts after what it supervises.
#[derive(Default)]
pub(crate) struct SupervisorLink(OnceLock<Addr<Supervisor>>);

impl SupervisorLink {
    fn send<M>(&self, message: M)
    where
        M: Message + Send + 'static,
        M::Result: Send,
        Supervisor: Handler<M>,
    {
        if let Some(supervisor) = self.0.get() {
            supervisor.do_send(message);
        }
    }

    /// Ends the supervisor.
    pub(crate) fn stop(&self) {
        self.send(Stop);
    }
}

/// Tells the supervisor that an actor has ended. One that had not closed its inbox panicked: an actix actor
/// ends silently then, and actix' own `Supervisor` would go on with the same, broken value.
pub(crate) struct EndNotice {
    shared: Weak<Shared>,
    group: GroupKey,
    generation: u64,
}

impl EndNotice {
    pub(crate) fn new(shared: &Arc<Shared>, group: GroupKey, generation: u64) -> Self {
        EndNotice { shared: Arc::downgrade(shared), group, generation }
    }
}

impl Drop for EndNotice {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            let (group, generation) = (self.group.clone(), self.generation);
            shared.supervisor.send(ActorEnded { group, generation });
        }
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct ActorEnded {
    group: GroupKey,
    generation: u64,
}

#[derive(Message)]
#[rtype(result = "()")]
struct Stop;

/// The supervisor actor.
pub(crate) struct Supervisor {
    shared: Arc<Shared>,
    refreshing: bool,
    _running: Running,
}

impl Supervisor {
    /// Starts the supervisor on an arbiter of the pool.
    pub(crate) fn start_on(shared: &Arc<Shared>) {
        let running = shared.gate.count();
        let mine = Arc::clone(shared);
        let address = Supervisor::start_in_arbiter(&shared.workers.arbiter(0), move |_| Supervisor {
            shared: mine,
            refreshing: false,
            _running: running,
        });
        // Set once: a coordinator has one supervisor.
        let _already = shared.supervisor.0.set(address);
    }

    /// One pass over the index. It runs as a task of its own, so that whatever goes wrong in it is not the
    /// end of the supervisor.
    fn refresh(&mut self, ctx: &mut Context<Self>) {
        if self.refreshing || self.shared.gate.is_terminating() {
            return;
        }
        self.refreshing = true;
        let pass = actix_rt::spawn(refresh(Arc::clone(&self.shared)));
        ctx.spawn(pass.into_actor(self).map(|result, actor, ctx| {
            actor.refreshing = false;
            let succeeded = matches!(result, Ok(Ok(())));
            meter::index_refreshed(succeeded);
            match result {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!(%error, "could not read the index of groups"),
                Err(error) => tracing::error!(%error, "a pass over the index panicked"),
            }
            let interval = actor.shared.settings.index_refresh_interval;
            ctx.run_later(interval, Supervisor::refresh);
        }));
    }

    /// One look at the groups that had members when their actors last looked, as a task of its own too.
    fn look(&mut self, ctx: &mut Context<Self>) {
        if self.shared.gate.is_terminating() {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let pass = actix_rt::spawn(async move {
            let has_members = |group: &GroupKey| {
                shared.registry.get(group).is_some_and(|handle| handle.status.facts().has_members)
            };
            look(&shared, shared.registry.groups().into_iter().filter(has_members)).await;
        });
        ctx.spawn(pass.into_actor(self).map(|result, actor, ctx| {
            if let Err(error) = result {
                tracing::error!(%error, "a look at the groups panicked");
            }
            ctx.run_later(look_interval(actor.shared.lease()), Supervisor::look);
        }));
    }
}

impl Actor for Supervisor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        if self.shared.gate.is_terminating() {
            return ctx.stop();
        }
        self.refresh(ctx);
        ctx.run_later(look_interval(self.shared.lease()), Supervisor::look);
    }
}

impl Handler<ActorEnded> for Supervisor {
    type Result = ();

    fn handle(&mut self, ActorEnded { group, generation }: ActorEnded, _: &mut Self::Context) {
        if !self.shared.gate.is_terminating() {
            self.shared.registry.restart_if_crashed(&self.shared, &group, generation);
        }
    }
}

impl Handler<Stop> for Supervisor {
    type Result = ();

    fn handle(&mut self, _: Stop, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

async fn refresh(shared: Arc<Shared>) -> Result<(), StoreError> {
    let entries = shared.store.index().await?;
    let indexed: std::collections::BTreeSet<GroupKey> =
        entries.iter().flat_map(|entry| candidates(entry)).collect();
    let new =
        entries.iter().filter(|entry| !candidates(entry).iter().any(|group| shared.registry.contains(group)));
    futures_util::stream::iter(new)
        .for_each_concurrent(PARALLEL_READS, |entry| discover(&shared, entry))
        .await;
    let forgotten = shared.registry.groups().into_iter().filter(|group| !indexed.contains(group));
    futures_util::stream::iter(forgotten)
        .for_each_concurrent(PARALLEL_READS, |group| {
            let shared = Arc::clone(&shared);
            async move { recall(&shared, &group).await }
        })
        .await;
    look(&shared, shared.registry.groups().into_iter().filter(|group| indexed.contains(group))).await;
    Ok(())
}

/// Looks at what others have recorded in these groups since this instance last did.
async fn look(shared: &Arc<Shared>, groups: impl Iterator<Item = GroupKey>) {
    futures_util::stream::iter(groups)
        .for_each_concurrent(PARALLEL_READS, |group| {
            let shared = Arc::clone(shared);
            async move { look_at(&shared, &group).await }
        })
        .await;
}

/// If the instance that serves a group dies and nobody speaks, this one must know what time alone has to do, that a
/// migration is under way, and what Redis had before it lost writes. A structural change wakes the actor; that
/// leases were renewed is only remembered.
async fn look_at(shared: &Arc<Shared>, group: &GroupKey) {
    let Some(handle) = shared.registry.get(group) else { return };
    if handle.status.facts().in_turn {
        return;
    }
    let at = Instant::now();
    let stored = match shared.store.stamp(group).await {
        Ok(Some(stored)) => stored,
        // What is missing or cannot be read is found out by who asks.
        Ok(None) => return,
        Err(error) => return tracing::debug!(%group, %error, "could not look whether a group has moved"),
    };
    let mut facts = handle.status.facts();
    let Some(remembered) = facts.sighted.as_ref().map(|(_, stamp)| stamp).or(facts.stamp.as_ref()) else {
        // It has never looked itself: there is nothing yet that a change could be told by.
        drop(facts);
        return handle.inbox.nudge();
    };
    if *remembered == stored {
        return;
    }
    let is_later = is_successor(&stored, remembered);
    let wakes = !is_later || stored.revision != facts.stamp.as_ref().map_or(0, |stamp| stamp.revision);
    if is_later {
        facts.sighted = Some((at, stored));
    }
    drop(facts);
    if wakes {
        handle.inbox.nudge();
    }
}

/// An entry of the index without an actor: a group that another instance created, or a phantom.
async fn discover(shared: &Arc<Shared>, entry: &str) {
    if shared.gate.is_terminating() {
        return;
    }
    match look_up(shared, candidates(entry)).await {
        Ok(Listed::Record { group, .. }) => {
            tracing::info!(%group, "found a group in the index");
            // Loaded once, so that its members expire here too if the instance they talk to has died.
            shared.registry.ensure(shared, &group).inbox.nudge();
        }
        Ok(Listed::Deleted { group }) => {
            tracing::info!(%group, "removing a deleted group from the index");
            if let Err(error) = shared.store.index_remove(&group).await {
                tracing::warn!(%group, %error, "could not remove it");
            }
        }
        Ok(Listed::Unreadable { .. } | Listed::Missing { .. } | Listed::NoGroup) => {}
        Err(error) => tracing::warn!(entry, %error, "could not look up an entry of the index"),
    }
}

/// A group with an actor that the index does not name: deleted by another instance, or the index forgot it.
async fn recall(shared: &Arc<Shared>, group: &GroupKey) {
    let nudge = || {
        if let Some(handle) = shared.registry.get(group) {
            handle.inbox.nudge();
        }
    };
    match shared.store.read(group).await {
        Ok(Found::Record { fields, .. }) => match record::load(group, &fields, &shared.settings.timing) {
            Ok(_) => match shared.store.index_add(group).await {
                Ok(()) => tracing::info!(%group, "put a group back into the index"),
                Err(error) => tracing::warn!(%group, %error, "could not put a group back into the index"),
            },
            // Its turn finds out that it is gone.
            Err(LoadError::Collision { .. }) => nudge(),
            Err(_) => {}
        },
        Ok(Found::Missing { tombstone: Some(tombstone), .. }) if tombstone.is_of(group) => nudge(),
        // Without a tombstone nobody deleted it: the actor stays and fails closed (protocol 3).
        Ok(Found::Missing { .. } | Found::WrongType { .. }) => {}
        Err(error) => tracing::warn!(%group, %error, "could not look up a group"),
    }
}
