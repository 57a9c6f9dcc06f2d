//! Consumer groups on the streams of shards (protocol 6, *provision*).

use std::time::Duration;

use ::redis::Value;
use rsc_core::ShardSet;
use rsc_protocol::keys::shard_key;
use tokio::time::Instant;

use super::link::Refusal;
use super::reply::text;
use super::servers::{Lane, Servers};
use crate::types::ProvisionError;

/// How many shards go into one round trip, which has the command timeout for itself.
const BATCH: usize = 250;

/// Creates `consumer_group` at the beginning of every shard's stream, and the streams where there are none.
pub(super) async fn provision(
    servers: &Servers,
    stream_prefix: &str,
    consumer_group: &str,
    shards: &ShardSet,
    command_timeout: Duration,
) -> Result<(), ProvisionError> {
    let shards: Vec<u32> = shards.iter().collect();
    for batch in shards.chunks(BATCH) {
        let deadline = Instant::now() + command_timeout;
        let commands: Vec<_> = batch
            .iter()
            .map(|shard| {
                let key = shard_key(stream_prefix, *shard);
                let mut command = ::redis::cmd("XGROUP");
                command.arg("CREATE").arg(&key).arg(consumer_group).arg("0").arg("MKSTREAM");
                (key, command)
            })
            .collect();
        let answers = servers
            .commands(Lane::Work, &commands, deadline)
            .await
            .map_err(|failure| ProvisionError::Store(failure.into_error()))?;
        for ((key, _), answer) in commands.into_iter().zip(answers) {
            let Err(refusal) = answer else { continue };
            if refusal.code != "BUSYGROUP" {
                return Err(explained(servers, key, refusal, deadline).await);
            }
        }
    }
    Ok(())
}

/// Asks what a key holds that is not a stream; the server's own words do not name the key.
async fn explained(servers: &Servers, key: String, refusal: Refusal, deadline: Instant) -> ProvisionError {
    if refusal.code == "WRONGTYPE" {
        let asked = servers.command(Lane::Work, &key, ::redis::cmd("TYPE").arg(&key), deadline).await;
        let found = asked.ok().and_then(|kind: Value| text(kind).ok());
        return ProvisionError::WrongType { key, found: found.unwrap_or_else(|| "value".to_owned()) };
    }
    ProvisionError::Store(refusal.about(&key).into_error())
}
