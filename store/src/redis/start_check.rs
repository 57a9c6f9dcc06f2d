//! What can be said at the start about the servers: are they there, of the configured kind, and may we do what we have to?

use tokio::time::Instant;

use super::RedisStore;
use super::link::{Failure, Refusal};
use super::reply::{text, unexpected};
use super::scripts::SCRIPTS;
use super::servers::Lane;
use crate::types::StoreError;

/// How many names are tried for a probe key in every master's slots.
const MOST_PROBES: u32 = 1_000;

/// Connects to every master and looks whether the user may run what the coordinator's own keys need. What the shards' keys
/// need is only known with a stream.
///
/// Leaves nothing behind: the key it probes with is gone at the end of the script, or after a second for a user who may not
/// delete.
pub(super) async fn check(store: &RedisStore) -> Result<(), StoreError> {
    let deadline = Instant::now() + store.connect_timeout + store.command_timeout;
    store.servers.connect(deadline).await?;
    for key in store.probe_keys() {
        let missing = store.missing_rights(&key).await?;
        if !missing.is_empty() {
            return Err(StoreError::Misconfigured(format!(
                "the user may not run {} on keys {}:*: give it these rights (docs/operations.md has the list)",
                missing.join(", "),
                store.keys.prefix()
            )));
        }
    }
    Ok(())
}

impl RedisStore {
    /// A key of nobody in some slot of every master.
    fn probe_keys(&self) -> Vec<String> {
        let prefix = self.keys.prefix();
        self.servers
            .one_for_each_master((0..MOST_PROBES).map(|number| format!("{prefix}:{{probe:{number}}}:rights")))
    }

    /// The commands that the user may not run on `key`, which belongs to nobody.
    pub(super) async fn missing_rights(&self, key: &str) -> Result<Vec<String>, StoreError> {
        match self.run_on::<&str>(Lane::Work, &SCRIPTS.rights, &[key], &[]).await {
            Ok(missing) => {
                let missing = missing.into_sequence().map_err(|_| unexpected("rights are no list"))?;
                missing.into_iter().map(text).collect()
            }
            Err(Failure::Refused(Refusal { code, said })) if code == "NOPERM" => {
                Err(StoreError::Misconfigured(format!(
                    "the user may not run EVALSHA and EVAL on keys {}:*: {said}",
                    self.keys.prefix()
                )))
            }
            Err(failure) => Err(failure.into_error()),
        }
    }
}
