//! The supervisor: finds groups in the index, lets go of deleted ones, puts forgotten ones back, and replaces
//! actors that crashed.

use std::sync::{Arc, OnceLock, Weak};

use actix::{Actor, ActorContext, ActorFutureExt, Addr, AsyncContext, Context, Handler, Message, WrapFuture};
use futures_util::StreamExt;
use rsc_core::{LoadError, record};
use rsc_protocol::GroupKey;
use rsc_store::{Found, StoreError};

use crate::gate::Running;
use crate::index::{Listed, candidates, look_up};
use crate::meter;
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
}

impl Actor for Supervisor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        if self.shared.gate.is_terminating() {
            return ctx.stop();
        }
        self.refresh(ctx);
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
    let idle = shared.registry.groups().into_iter().filter(|group| indexed.contains(group));
    futures_util::stream::iter(idle)
        .for_each_concurrent(PARALLEL_READS, |group| {
            let shared = Arc::clone(&shared);
            async move { look_whether_it_moved(&shared, &group).await }
        })
        .await;
    Ok(())
}

/// What another instance has recorded since this one last looked: if that instance dies and nobody speaks, this one must
/// know what time alone has to do, and that a migration is under way.
async fn look_whether_it_moved(shared: &Arc<Shared>, group: &GroupKey) {
    let Some(handle) = shared.registry.get(group) else { return };
    let remembered = {
        let facts = handle.status.facts();
        if facts.in_turn || facts.stamp.is_none() {
            return;
        }
        facts.stamp.clone()
    };
    match shared.store.stamp(group).await {
        Ok(stored) if stored.is_some() && stored != remembered => handle.inbox.nudge(),
        // What is missing or cannot be read is found out by who asks.
        Ok(_) => {}
        Err(error) => tracing::debug!(%group, %error, "could not look whether a group has moved"),
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
