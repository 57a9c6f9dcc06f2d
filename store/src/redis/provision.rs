//! Consumer groups on the streams of shards (protocol 6, *provision*).

use std::sync::Arc;
use std::time::Duration;

use ::redis::{RedisError, Value};
use rsc_core::ShardSet;
use rsc_protocol::keys::shard_key;
use tokio::time::Instant;

use super::link::{Link, server_code, server_text};
use super::reply::text;
use crate::types::{ProvisionError, StoreError};

/// How many shards go into one round trip, which has the command timeout for itself.
const BATCH: usize = 250;

/// Creates `consumer_group` at the beginning of every shard's stream, and the streams where there are none.
pub(super) async fn provision(
    link: &Arc<Link>,
    stream_prefix: &str,
    consumer_group: &str,
    shards: &ShardSet,
    command_timeout: Duration,
) -> Result<(), ProvisionError> {
    let shards: Vec<u32> = shards.iter().collect();
    for batch in shards.chunks(BATCH) {
        let deadline = Instant::now() + command_timeout;
        let mut pipeline = ::redis::pipe();
        for shard in batch {
            pipeline.cmd("XGROUP").arg("CREATE");
            pipeline.arg(shard_key(stream_prefix, *shard)).arg(consumer_group).arg("0").arg("MKSTREAM");
        }
        let answers = link
            .commands(&mut pipeline, deadline)
            .await
            .map_err(|failure| ProvisionError::Store(failure.into_error()))?;
        for (shard, answer) in batch.iter().zip(answers) {
            let Err(error) = answer else { continue };
            if server_code(&error).as_deref() != Some("BUSYGROUP") {
                return Err(explained(link, shard_key(stream_prefix, *shard), &error, deadline).await);
            }
        }
    }
    Ok(())
}

/// Asks what a key holds that is not a stream; the server's own words do not name the key.
async fn explained(link: &Arc<Link>, key: String, error: &RedisError, deadline: Instant) -> ProvisionError {
    if server_code(error).as_deref() == Some("WRONGTYPE") {
        let asked = link.command(::redis::cmd("TYPE").arg(&key), deadline).await;
        let found = asked.ok().and_then(|kind: Value| text(kind).ok());
        return ProvisionError::WrongType { key, found: found.unwrap_or_else(|| "value".to_owned()) };
    }
    ProvisionError::Store(StoreError::Refused(format!("{} (key {key})", server_text(error))))
}
