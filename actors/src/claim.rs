//! Claiming a group's metadata key, admitting members to it, and undoing the claim.

use std::sync::Arc;
use std::time::Instant;

use rsc_core::{Command, Group, LoadError, Loaded, Stamp, Tombstone, lifecycle, record};
use rsc_protocol::{ErrorCode, GroupKey, Timestamp};
use rsc_store::{Found, MutexToken, Outcome, StoreError};
use tokio::sync::oneshot;

use crate::deciding::{Decided, context, decide_on, tell};
use crate::inbox::{Answered, Closed, NotQueued, Request};
use crate::memory::Memory;
use crate::meter;
use crate::refusal::Refusal;
use crate::section::Pause;
use crate::service_watch::ServiceWatch;
use crate::shared::Shared;
use crate::turn::UNKNOWNS_BORNE;

/// A group whose key is ours and whose mutex is held: nobody enters before its streams exist.
#[derive(Debug)]
pub(crate) struct Claim {
    pub(crate) group: Group,
    pub(crate) token: MutexToken,
    stamp: Stamp,
    /// Redis time at the claim.
    now: Timestamp,
    /// What a deleted group of that name had left.
    tombstone: Option<Tombstone>,
}

/// Attempts at a claim whose answers were lost: each of them may have made it.
#[derive(Default)]
struct Lost {
    tokens: Vec<MutexToken>,
    /// One of them has made it.
    is_ours: bool,
}

/// Claims the key of a group that does not exist.
pub(crate) async fn claim(
    shared: &Arc<Shared>,
    group: &GroupKey,
    shard_count: u32,
) -> Result<Claim, Refusal> {
    let mut lost = Lost::default();
    let result = try_claim(shared, group, shard_count, &mut lost).await;
    if result.is_err() && !lost.tokens.is_empty() {
        for token in &lost.tokens {
            give_up(shared, group, token).await;
        }
        // Only where the record is known to be there: an entry without one would be a group that went missing.
        // Otherwise the group's actor looks, as soon as Redis lets it, and lets go if there is nothing.
        if lost.is_ours
            && let Err(error) = shared.store.index_add(group).await
        {
            tracing::debug!(%group, %error, "the supervisor will put the group into the index");
        }
        hand_over(shared, group);
    }
    result
}

/// Leaves a creation that this task cannot finish to the group's actor.
fn hand_over(shared: &Arc<Shared>, group: &GroupKey) {
    shared.registry.ensure(shared, group).inbox.nudge();
}

async fn try_claim(
    shared: &Arc<Shared>,
    group: &GroupKey,
    shard_count: u32,
    lost: &mut Lost,
) -> Result<Claim, Refusal> {
    let deadline = Instant::now() + shared.settings.mutex_acquire_timeout;
    let metadata_token = Shared::metadata_token();
    let mut pause = Pause::new();
    let mut unknowns = 0;
    let mut tombstone_read = None;
    loop {
        // A fresh one each time: an attempt that arrives late must not pass for its successor.
        let token = MutexToken::fresh(&shared.settings.instance_id);
        let (now, tombstone) = match look_at_key(shared, group, &metadata_token).await? {
            Key::Free { now, tombstone } => (now, tombstone),
            // Our own creation, whose answer was lost. It counts if nobody has entered since.
            Key::Ours { now, loaded } => {
                lost.is_ours = true;
                let Some(token) = still_held(shared, group, &lost.tokens).await else {
                    return Err(Refusal::busy(group));
                };
                let (group, stamp) = (loaded.group, loaded.stamp);
                return index(shared, Claim { group, token, stamp, now, tombstone: tombstone_read }).await;
            }
        };
        tombstone_read.clone_from(&tombstone);
        let timing = &shared.settings.timing;
        let creation =
            lifecycle::create(group, shard_count, now, &metadata_token, tombstone.as_ref(), timing);
        match shared.store.create(group, &token, tombstone.as_ref(), &creation.write).await {
            Outcome::Applied(stamp) => {
                return index(shared, Claim { group: creation.group, token, stamp, now, tombstone }).await;
            }
            // Somebody was faster, or is at work, or the tombstone has just expired: the next look says what
            // is there.
            Outcome::Conflict(conflict) => {
                tracing::debug!(%group, ?conflict, "the key is not free yet");
                if !pause.before(deadline).await {
                    return Err(Refusal::busy(group));
                }
            }
            Outcome::Unknown(error) => {
                unknowns += 1;
                lost.tokens.push(token);
                tracing::warn!(%group, %error, "the answer to a creation was lost; looking what is stored");
                if unknowns > UNKNOWNS_BORNE {
                    return Err(Refusal::store(&error));
                }
            }
            Outcome::NotApplied(error) => return Err(failed(group, &error)),
        }
    }
}

/// Which of the tokens holds the mutex; renewed for another TTL.
async fn still_held(shared: &Shared, group: &GroupKey, tokens: &[MutexToken]) -> Option<MutexToken> {
    for token in tokens.iter().rev() {
        if matches!(shared.store.renew(group, token).await, Ok(true)) {
            return Some(token.clone());
        }
    }
    None
}

fn failed(group: &GroupKey, error: &StoreError) -> Refusal {
    Refusal::store_logged(error, "create a group", &group.joined())
}

/// What is under the key of a group to be created.
enum Key {
    /// Nothing.
    Free { now: Timestamp, tombstone: Option<Tombstone> },
    /// What this very creation has written.
    Ours { now: Timestamp, loaded: Box<Loaded> },
}

async fn look_at_key(shared: &Shared, group: &GroupKey, own_token: &str) -> Result<Key, Refusal> {
    match shared.store.read(group).await.map_err(|error| failed(group, &error))? {
        Found::Missing { now, tombstone } => {
            let was_deleted = tombstone.as_ref().is_some_and(|tombstone| tombstone.is_of(group));
            if !was_deleted && is_expected(shared, group).await? {
                return Err(Refusal::missing(group));
            }
            Ok(Key::Free { now, tombstone })
        }
        Found::WrongType { found, .. } => {
            Err(Refusal::corrupt(group, &format!("the key holds a {found}, not a hash")))
        }
        Found::Record { now, fields, .. } => match record::load(group, &fields, &shared.settings.timing) {
            Ok(loaded) if loaded.group.metadata_token == own_token && loaded.group.provisioning_pending => {
                Ok(Key::Ours { now, loaded: Box::new(loaded) })
            }
            Ok(_) => {
                Err(Refusal::new(ErrorCode::GroupAlreadyExists, format!("group {group} exists already")))
            }
            Err(LoadError::Collision { stream_prefix, consumer_group }) => {
                let message = format!(
                    "group {group} would have the same redis key as group {consumer_group} of stream {stream_prefix}: choose another name"
                );
                Err(Refusal::new(ErrorCode::GroupKeyCollision, message))
            }
            Err(error) => Err(Refusal::corrupt(group, &error.to_string())),
        },
    }
}

/// Whether a key that is missing without a tombstone of this group should be there (protocol 3).
async fn is_expected(shared: &Shared, group: &GroupKey) -> Result<bool, Refusal> {
    if shared.registry.is_known_to_exist(group) {
        return Ok(true);
    }
    shared.store.index_contains(group).await.map_err(|error| failed(group, &error))
}

async fn stored(shared: &Shared, group: &GroupKey) -> Result<Option<Loaded>, Refusal> {
    match shared.store.read(group).await.map_err(|error| failed(group, &error))? {
        Found::Record { fields, .. } => Ok(record::load(group, &fields, &shared.settings.timing).ok()),
        Found::Missing { .. } | Found::WrongType { .. } => Ok(None),
    }
}

async fn index(shared: &Arc<Shared>, claim: Claim) -> Result<Claim, Refusal> {
    match shared.store.index_add(&claim.group.key).await {
        Ok(()) => Ok(claim),
        Err(error) => {
            let refusal = failed(&claim.group.key, &error);
            undo(shared, vec![claim]).await;
            Err(refusal)
        }
    }
}

/// Takes claims back, the newest first. What cannot be undone now stays as a group whose creation was cut
/// short, and is completed by whoever loads it.
pub(crate) async fn undo(shared: &Arc<Shared>, claims: Vec<Claim>) {
    for claim in claims.into_iter().rev() {
        let group = &claim.group.key;
        // Where there was a tombstone there is one again, and it says at least what this group had reached.
        let tombstone = claim
            .tombstone
            .as_ref()
            .and_then(|_| lifecycle::delete(&claim.group, &claim.stamp, claim.now, true).ok());
        let store = &shared.store;
        match store.delete(group, &claim.token, Some(&claim.stamp), tombstone.as_ref()).await {
            Outcome::Applied(_) => {
                meter::lifecycle("create", "undone");
                if let Err(error) = store.index_remove(group).await {
                    tracing::warn!(%group, %error, "an undone creation stays in the index");
                }
            }
            Outcome::Conflict(conflict) => {
                tracing::warn!(%group, ?conflict, "a creation could not be undone; it will be completed");
                hand_over(shared, group);
            }
            Outcome::Unknown(error) | Outcome::NotApplied(error) => {
                tracing::warn!(%group, %error, "a creation could not be undone; it will be completed");
                give_up(shared, group, &claim.token).await;
                hand_over(shared, group);
            }
        }
    }
}

/// Records that the group's streams exist, frees its mutex and starts its actor.
pub(crate) async fn admit(shared: &Arc<Shared>, claim: Claim) -> Result<Group, Refusal> {
    let Claim { group, token, stamp, now, .. } = claim;
    let key = group.key.clone();
    let loaded = Loaded { group, stamp, stray_live: Vec::new() };
    // Nobody is in the group yet, so nothing can be judged or granted: a blank memory will do.
    let memory = Memory::new(ServiceWatch::new(shared.lease(), Instant::now()));
    let context = context(shared, &memory, now);
    let decision =
        decide_on(shared, &loaded, &[Command::Provisioned], &context).map_err(|_| Refusal::internal())?;
    let Some(write) = decision.write.clone() else { return Err(Refusal::internal()) };
    match shared.store.commit(&key, &token, &loaded.stamp, &write).await {
        Outcome::Applied(_) => {
            shared.registry.ensure(shared, &key);
            let (group, decided) = Decided::of(decision);
            tell(&key, &decided);
            Ok(group)
        }
        // The mutex ran out on the way, or nobody knows: the group's own turn sees to it.
        Outcome::Conflict(conflict) => {
            tracing::debug!(group = %key, ?conflict, "the creation is completed by the group's actor");
            admit_by_turn(shared, &key).await
        }
        Outcome::Unknown(error) => {
            tracing::warn!(group = %key, %error, "the answer to a commit was lost; the group's actor looks");
            give_up(shared, &key, &token).await;
            admit_by_turn(shared, &key).await
        }
        Outcome::NotApplied(error) => {
            give_up(shared, &key, &token).await;
            hand_over(shared, &key);
            Err(failed(&key, &error))
        }
    }
}

/// Gives the mutex back, so that a commit that is still under way can no longer pass.
async fn give_up(shared: &Shared, group: &GroupKey, token: &MutexToken) {
    if let Err(error) = shared.store.release(group, token).await {
        tracing::debug!(%group, %error, "could not give the mutex back; it expires by itself");
    }
}

async fn admit_by_turn(shared: &Arc<Shared>, group: &GroupKey) -> Result<Group, Refusal> {
    let (reply, answer) = oneshot::channel();
    let handle = shared.registry.ensure(shared, group);
    match handle.inbox.push(Request::Command(Command::Provisioned), reply) {
        Ok(()) => {}
        Err(NotQueued::Full) => return Err(Refusal::overloaded(group, shared.settings.mailbox_capacity)),
        Err(NotQueued::Closed(Closed::Terminating, ..)) => return Err(Refusal::terminating()),
        // Its actor has just found that there is no such group: somebody was faster in deleting it.
        Err(NotQueued::Closed(Closed::Gone, ..)) => return Err(Refusal::not_found(group)),
    }
    match answer.await {
        Ok(Ok(Answered::Done)) => {}
        Ok(Ok(_)) | Err(_) => return Err(Refusal::internal()),
        Ok(Err(refusal)) => return Err(refusal),
    }
    match stored(shared, group).await? {
        Some(loaded) => Ok(loaded.group),
        None => Err(Refusal::missing(group)),
    }
}
