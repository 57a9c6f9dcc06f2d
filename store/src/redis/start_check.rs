//! What can be said at the start about the servers: are they there, of the configured kind, and may we do what we have to?

use ::redis::Value;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::time::Instant;

use super::RedisStore;
use super::link::{Failure, Refusal};
use super::reply::{text, unexpected};
use super::scripts::{SCRIPTS, Script};
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
    let result = look(store).await;
    // Whoever comes first after the start is not to be refused for what was so before it.
    store.servers.forget_failures();
    result
}

async fn look(store: &RedisStore) -> Result<(), StoreError> {
    let deadline = Instant::now() + store.connect_timeout + store.command_timeout;
    store.servers.connect(deadline).await?;
    for key in store.probe_keys() {
        let (missing, trouble) = store.rights(&key).await?;
        if !missing.is_empty() {
            return Err(StoreError::Misconfigured(format!(
                "the user may not run {} on keys {}:*: give it these rights (docs/operations.md has the list)",
                missing.join(", "),
                store.keys.prefix()
            )));
        }
        if !trouble.is_empty() {
            let code = trouble.split(' ').next().unwrap_or_default().to_owned();
            return Err(Refusal { code, said: trouble }.into_error());
        }
        store.may_wait(&key, deadline).await?;
    }
    Ok(())
}

/// Whether a server refuses for want of a right. Inside scripts it says so in words only, Redis 6.2 and 7.0 without naming the
/// command; `rights.lua` looks for the same words.
pub(super) fn is_about_rights(refusal: &Refusal) -> bool {
    refusal.code == "NOPERM"
        || ["can't run this command", "ACL failure in script"]
            .iter()
            .any(|words| refusal.said.contains(words))
}

impl RedisStore {
    /// Adds to a refusal of a script which commands the user may not run, as far as the coordinator's own keys tell.
    pub(super) async fn name_missing_rights(&self, refusal: Refusal, script: &Script, key: &str) -> Refusal {
        let code = "NOPERM".to_owned();
        if script.name == SCRIPTS.rights.name {
            return Refusal { code, ..refusal };
        }
        // In the same slot, so that the same server is asked.
        let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map_or(key, |(tag, _)| tag);
        let probe = format!("{}:{{{tag}}}:rights", self.keys.prefix());
        match self.rights(&probe).await {
            Ok((missing, _)) if !missing.is_empty() => Refusal {
                code,
                said: format!("{}: the user may not run {}", refusal.said, missing.join(", ")),
            },
            _ => Refusal { code, ..refusal },
        }
    }

    /// A key of nobody in some slot of every master.
    fn probe_keys(&self) -> Vec<String> {
        let prefix = self.keys.prefix();
        self.servers
            .one_for_each_master((0..MOST_PROBES).map(|number| format!("{prefix}:{{probe:{number}}}:rights")))
    }

    /// Whether the user may wait for replicas, if that is configured.
    async fn may_wait(&self, key: &str, deadline: Instant) -> Result<(), StoreError> {
        if self.wait_replicas == 0 {
            return Ok(());
        }
        let wait = ::redis::cmd("WAIT").arg(0).arg(1).to_owned();
        match self.servers.command(Lane::Durable, key, &wait, deadline).await {
            Err(Failure::Refused(Refusal { code, .. })) if code == "NOPERM" => {
                Err(StoreError::Misconfigured(
                    "the user may not run WAIT, which redis.wait-replicas needs: give it this right"
                        .to_owned(),
                ))
            }
            answer => answer.map(|_| ()).map_err(Failure::into_error),
        }
    }

    /// The commands that the user may not run on `key`, which belongs to nobody; and what keeps the server from writing,
    /// empty when nothing does.
    ///
    /// Boxed: a refusal of any script asks for it, this one's aside.
    fn rights<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<(Vec<String>, String), StoreError>> {
        self.ask_for_rights(key).boxed()
    }

    async fn ask_for_rights(&self, key: &str) -> Result<(Vec<String>, String), StoreError> {
        match self.run_on::<&str>(Lane::Work, &SCRIPTS.rights, &[key], &[]).await {
            Ok(answer) => {
                let parts = answer.into_sequence().map_err(|_| unexpected("rights are no list"))?;
                let [missing, trouble]: [Value; 2] =
                    parts.try_into().map_err(|_| unexpected("rights have not two parts"))?;
                let missing =
                    missing.into_sequence().map_err(|_| unexpected("missing rights are no list"))?;
                Ok((missing.into_iter().map(text).collect::<Result<_, _>>()?, text(trouble)?))
            }
            Err(Failure::Refused(Refusal { code, said })) if code == "NOPERM" => {
                Err(StoreError::Misconfigured(format!(
                    "the user may not run EVALSHA and EVAL on keys {0}:*: {said}: give it ~{0}:* and both commands",
                    self.keys.prefix()
                )))
            }
            Err(failure) => Err(failure.into_error()),
        }
    }
}
