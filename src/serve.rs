//! `rsc serve`.

use std::process::ExitCode;

use anyhow::bail;

use crate::config::Config;

/// Runs the daemon until it is told to stop.
///
/// # Errors
/// Always, in this version.
pub(crate) fn run(config: Config) -> anyhow::Result<ExitCode> {
    let instance_id = config.server.instance_id_or_random();
    bail!(
        "serve is not built yet (it would listen on {} as {instance_id})",
        config.server.listen
    )
}
