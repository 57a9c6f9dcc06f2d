//! Creating the streams and consumer groups of a group's shards (protocol 6, *Provision*), and keeping mutexes
//! alive meanwhile.

use std::time::Duration;

use rsc_core::ShardSet;
use rsc_protocol::{ErrorCode, GroupKey};
use rsc_store::{MutexToken, ProvisionError};

use crate::meter;
use crate::refusal::Refusal;
use crate::shared::Shared;

/// Creates what is not there yet; safe to repeat. Does nothing where nothing is provisioned.
pub(crate) async fn provision(shared: &Shared, group: &GroupKey, shards: &ShardSet) -> Result<(), Refusal> {
    if !shared.settings.provisioning_enabled || shared.store.kind() == "memory" || shards.is_empty() {
        return Ok(());
    }

    let result = shared.store.provision(group.stream_prefix(), group.consumer_group(), shards).await;
    meter::provisioned(1, result.is_ok());
    result.map_err(|error| {
        tracing::warn!(%group, %error, "could not create the streams of the group's shards");
        let message = match &error {
            // Names the key and what to do about it.
            ProvisionError::WrongType { .. } => format!("group {group}: {error}"),
            ProvisionError::Store(error) => {
                let what = Refusal::store(error).message;
                format!("the streams of group {group} could not all be created: {what}")
            }
        };
        Refusal::new(ErrorCode::ProvisioningFailed, message)
    })
}

/// Mutexes that are held over a long piece of work.
pub(crate) struct HeldMutexes<'m> {
    /// The stream prefix whose mutex is held, and its token.
    pub(crate) stream: (&'m str, &'m MutexToken),
    /// Groups whose mutexes are held, and their tokens.
    pub(crate) groups: Vec<(GroupKey, MutexToken)>,
}

impl HeldMutexes<'_> {
    /// Runs `work` and renews every mutex each third of its TTL until it ends. A mutex that could not be
    /// renewed shows when something is committed under it.
    pub(crate) async fn while_running<T>(&self, shared: &Shared, work: impl Future<Output = T>) -> T {
        let every = (shared.settings.mutex_ttl / 3).max(Duration::from_millis(1));
        tokio::pin!(work);
        loop {
            match tokio::time::timeout(every, &mut work).await {
                Ok(result) => return result,
                Err(_) => {
                    // Both at once: the work must not wait for an answer about a mutex.
                    tokio::select! {
                        biased;
                        result = &mut work => return result,
                        () = self.renew(shared) => {}
                    }
                }
            }
        }
    }

    async fn renew(&self, shared: &Shared) {
        let (prefix, token) = self.stream;
        if !matches!(shared.store.renew_stream(prefix, token).await, Ok(true)) {
            tracing::debug!(prefix, "the stream's mutex could not be renewed");
        }
        for (group, token) in &self.groups {
            if !matches!(shared.store.renew(group, token).await, Ok(true)) {
                tracing::debug!(%group, "the group's mutex could not be renewed");
            }
        }
    }
}
