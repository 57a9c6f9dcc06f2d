//! `rsc dev`.

use std::process::ExitCode;

use anyhow::bail;
use clap::Args;

/// Arguments of `rsc dev`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DevArguments {}

/// Runs everything that a first look needs.
///
/// # Errors
/// Always, in this version.
pub(crate) fn run(_arguments: DevArguments) -> anyhow::Result<ExitCode> {
    bail!("dev is not built yet")
}
