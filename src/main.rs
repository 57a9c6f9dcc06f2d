//! `rsc`: the coordinator daemon and its tools. Exit codes: 0 stopped as asked, 2 bad configuration or
//! arguments, 1 anything else.

mod cli;
mod config;
mod dev;
mod http;
mod logging;
mod panics;
mod recorder;
mod serve;
mod tools;
mod wiring;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

use rsc_store::{SettingsError, StoreError};

use cli::{Cli, Command, ConfigArguments, ConfigCommand};

/// Bad configuration; clap ends with the same code for bad arguments.
const BAD_CONFIGURATION: u8 = 2;

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Serve(arguments) => with_configuration(&arguments, |loaded| {
            logging::init_logging(&loaded.config.telemetry)?;
            serve::run(loaded.config)
        }),
        Command::Dev(arguments) => finish(dev::run(arguments)),
        Command::Config { command: ConfigCommand::Check(arguments) } => {
            with_configuration(&arguments, |loaded| {
                wiring::check(&loaded.config)?;
                print(&format!("configuration is valid, from {}\n", loaded.layers.join(", ")))
            })
        }
        Command::Config { command: ConfigCommand::Show(arguments) } => {
            with_configuration(&arguments, |loaded| print(&loaded.config.to_masked_toml()?))
        }
        Command::Doctor(arguments) => {
            with_configuration(&arguments.config, |loaded| tools::doctor::run(loaded, &arguments))
        }
        Command::Repair { command } => {
            with_configuration(command.config(), |loaded| tools::repair::run(loaded, &command))
        }
        Command::Backup(arguments) => {
            with_configuration(&arguments.config, |loaded| tools::backup::run(loaded, &arguments))
        }
        Command::Restore(arguments) => {
            with_configuration(&arguments.config, |loaded| tools::restore::run(loaded, &arguments))
        }
    }
}

/// Loads the configuration and goes on with it.
fn with_configuration(
    arguments: &ConfigArguments,
    run: impl FnOnce(config::Loaded) -> anyhow::Result<ExitCode>,
) -> ExitCode {
    finish(config::load(&arguments.sources()).map_err(anyhow::Error::from).and_then(run))
}

/// Says in one sentence what went wrong, if something did.
fn finish(result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        complain(&format!("{error:#}"));
        // A Redis that cannot be used as configured, and files that the configuration names, count as configuration.
        let is_configuration = error.is::<config::ConfigError>()
            || error.is::<tools::Unusable>()
            || error.is::<SettingsError>()
            || matches!(error.downcast_ref::<StoreError>(), Some(StoreError::Misconfigured(_)));
        if is_configuration { ExitCode::from(BAD_CONFIGURATION) } else { ExitCode::FAILURE }
    })
}

/// Writes to standard output. A reader that has gone away (`rsc config show | head -1`) is no failure.
fn print(text: &str) -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// One line on standard error. When even that cannot be written, the exit code remains.
fn complain(sentence: &str) {
    let _ = writeln!(std::io::stderr(), "error: {sentence}");
}
