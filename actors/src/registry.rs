//! Group → actor. Holds an entry only for groups that exist (or whose key is missing although they do), so
//! that requests for names nobody created cannot make it grow.

use std::sync::Arc;

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use rsc_protocol::GroupKey;

use crate::group_actor::GroupActor;
use crate::inbox::Inbox;
use crate::meter;
use crate::shared::Shared;
use crate::status::StatusCell;

/// What everybody but the actor itself knows of it. Survives a crash of the actor.
#[derive(Clone)]
pub(crate) struct Handle {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) status: Arc<StatusCell>,
    /// Which arbiter the actor lives on.
    worker: usize,
    /// Counts the actors that have worked on this inbox.
    generation: u64,
}

/// The actors of one process.
#[derive(Default)]
pub(crate) struct Registry {
    actors: DashMap<GroupKey, Handle>,
}

impl Registry {
    pub(crate) fn get(&self, group: &GroupKey) -> Option<Handle> {
        self.actors.get(group).map(|entry| entry.value().clone())
    }

    pub(crate) fn contains(&self, group: &GroupKey) -> bool {
        self.actors.contains_key(group)
    }

    /// Whether the group's actor has loaded it before.
    pub(crate) fn is_known_to_exist(&self, group: &GroupKey) -> bool {
        self.actors.get(group).is_some_and(|handle| handle.status.facts().exists)
    }

    /// Every group with an actor.
    pub(crate) fn groups(&self) -> Vec<GroupKey> {
        self.actors.iter().map(|entry| entry.key().clone()).collect()
    }

    /// Whether another group of the same stream prefix has an actor.
    pub(crate) fn has_sibling(&self, group: &GroupKey) -> bool {
        let is_sibling = |other: &GroupKey| other != group && other.stream_prefix() == group.stream_prefix();
        self.actors.iter().any(|entry| is_sibling(entry.key()))
    }

    /// Every actor's handle.
    pub(crate) fn handles(&self) -> Vec<Handle> {
        self.actors.iter().map(|entry| entry.value().clone()).collect()
    }

    /// The actor of a group that is known to exist, started if there is none.
    pub(crate) fn ensure(&self, shared: &Arc<Shared>, group: &GroupKey) -> Handle {
        let handle = match self.actors.entry(group.clone()) {
            Entry::Occupied(entry) if !entry.get().inbox.is_closed() => return entry.get().clone(),
            entry => {
                let handle = Handle {
                    inbox: Arc::new(Inbox::new(shared.settings.mailbox_capacity)),
                    status: Arc::new(StatusCell::default()),
                    worker: shared.workers.next(),
                    generation: 0,
                };
                // Started while the entry is locked: whoever closes the gate and then walks over the entries
                // meets this actor, or the actor meets the closed gate.
                start(shared, group, &handle);
                entry.insert(handle.clone());
                handle
            }
        };
        meter::actors(self.actors.len());
        handle
    }

    /// Puts a fresh actor in the place of one that has ended without closing its inbox. It reloads everything
    /// from the store; what was waiting still waits.
    pub(crate) fn restart_if_crashed(&self, shared: &Arc<Shared>, group: &GroupKey, generation: u64) {
        let Some(mut entry) = self.actors.get_mut(group) else { return };
        if entry.generation != generation || entry.inbox.is_closed() {
            return;
        }
        entry.generation += 1;
        let mut facts = entry.status.facts();
        facts.restarts += 1;
        facts.in_turn = false;
        drop(facts);
        meter::restarted();
        tracing::error!(%group, "the group's actor crashed; a fresh one takes over");
        start(shared, group, &entry);
    }

    /// Forgets an actor that has stopped, unless another one has taken its place.
    pub(crate) fn forget(&self, group: &GroupKey, inbox: &Arc<Inbox>) {
        self.actors.remove_if(group, |_, handle| Arc::ptr_eq(&handle.inbox, inbox));
        meter::actors(self.actors.len());
    }
}

fn start(shared: &Arc<Shared>, group: &GroupKey, handle: &Handle) {
    let actor = GroupActor::start_on(
        Arc::clone(shared),
        group.clone(),
        handle.inbox.clone(),
        handle.status.clone(),
        handle.worker,
        handle.generation,
    );
    handle.inbox.attach(actor);
}
