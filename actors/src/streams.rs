//! What concerns all groups of one stream prefix: its mutex, and its groups (protocol 6).

use std::time::Instant;

use rsc_core::Group;
use rsc_protocol::{ErrorCode, GroupKey};
use rsc_store::{MutexToken, StoreError};

use crate::index::{Listed, candidates, look_up};
use crate::refusal::Refusal;
use crate::section::Pause;
use crate::shared::Shared;

/// Takes the mutex that serialises creation and migrations on one prefix, waiting as long as a turn waits for its own.
pub(crate) async fn lock(shared: &Shared, prefix: &str) -> Result<MutexToken, Refusal> {
    let deadline = Instant::now() + shared.settings.mutex_acquire_timeout;
    let mut pause = Pause::new();
    loop {
        match try_lock(shared, prefix).await? {
            Some(token) => return Ok(token),
            None if pause.before(deadline).await => {}
            None => {
                let message =
                    format!("another creation or migration step on stream {prefix} is under way: try again");
                return Err(Refusal::new(ErrorCode::MutexUnavailable, message));
            }
        }
    }
}

/// Takes the mutex if it is free.
pub(crate) async fn try_lock(shared: &Shared, prefix: &str) -> Result<Option<MutexToken>, Refusal> {
    let token = MutexToken::fresh(&shared.settings.instance_id);
    match shared.store.lock_stream(prefix, &token).await {
        Ok(None) => Ok(Some(token)),
        Ok(Some(_)) => Ok(None),
        Err(error) => Err(Refusal::store_logged(&error, "lock a stream", prefix)),
    }
}

/// Gives the mutex back.
pub(crate) async fn unlock(shared: &Shared, prefix: &str, token: &MutexToken) {
    if let Err(error) = shared.store.unlock_stream(prefix, token).await {
        tracing::debug!(prefix, %error, "the stream's mutex could not be given back; it expires by itself");
    }
}

/// Whether the mutex is still ours, for another TTL.
pub(crate) async fn renew(shared: &Shared, prefix: &str, token: &MutexToken) -> Result<(), Refusal> {
    match shared.store.renew_stream(prefix, token).await {
        Ok(true) => Ok(()),
        Ok(false) => {
            let message = format!("the lock of stream {prefix} was lost: try again");
            Err(Refusal::new(ErrorCode::MutexUnavailable, message))
        }
        Err(error) => Err(Refusal::store_logged(&error, "renew the lock of a stream", prefix)),
    }
}

/// Every key that may be a group of this prefix: those of the index, and those that this process knows though
/// the index may have forgotten them.
pub(crate) async fn keys_of_prefix(shared: &Shared, prefix: &str) -> Result<Vec<Vec<GroupKey>>, StoreError> {
    let of_prefix = |group: &GroupKey| group.stream_prefix() == prefix;
    let entries = shared.store.index().await?;
    let mut keys: Vec<Vec<GroupKey>> = entries
        .iter()
        .map(|entry| candidates(entry))
        .filter(|candidates| candidates.iter().any(of_prefix))
        .collect();
    let known = shared.registry.groups().into_iter().filter(of_prefix);
    let forgotten: Vec<GroupKey> =
        known.filter(|group| !keys.iter().any(|candidates| candidates.contains(group))).collect();
    keys.extend(forgotten.into_iter().map(|group| vec![group]));
    Ok(keys)
}

/// Every group of the prefix as the store has it now, in ascending order; empty when there is none.
///
/// # Errors
/// `GROUP_METADATA_MISSING` or `GROUP_METADATA_CORRUPT` when one of them has no record to go by, `REDIS_UNAVAILABLE`.
pub(crate) async fn groups(shared: &Shared, prefix: &str) -> Result<Vec<Group>, Refusal> {
    let failed = |error: StoreError| Refusal::store_logged(&error, "look at a stream's groups", prefix);
    let mut groups = Vec::new();
    for candidates in keys_of_prefix(shared, prefix).await.map_err(failed)? {
        match look_up(shared, candidates).await.map_err(failed)? {
            Listed::Record { group, loaded } if group.stream_prefix() == prefix => groups.push(loaded.group),
            Listed::Record { .. } | Listed::Deleted { .. } | Listed::NoGroup => {}
            Listed::Missing { candidates } => {
                let group = candidates.into_iter().find(|group| group.stream_prefix() == prefix);
                return Err(group.map_or_else(Refusal::internal, |group| Refusal::missing(&group)));
            }
            Listed::Unreadable { group, what } => return Err(Refusal::corrupt(&group, &what)),
        }
    }
    groups.sort_by(|one, other| one.key.cmp(&other.key));
    Ok(groups)
}
