//! The command line (protocol 12). Values of flags that stand for a key are read by the configuration, so
//! that a bad one is refused with the same sentence wherever it comes from.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::config::{Flag, Sources};
use crate::dev::DevArguments;
use crate::tools::backup::BackupArguments;
use crate::tools::doctor::DoctorArguments;
use crate::tools::repair::RepairCommand;
use crate::tools::restore::RestoreArguments;

/// Redis Stream Coordinator: decides which consumer may read which shard of a sharded Redis Stream.
#[derive(Debug, Parser)]
#[command(name = "rsc", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the coordinator until it is told to stop
    Serve(ConfigArguments),
    /// Run a coordinator with a demo stream and three consumers, for a first look
    Dev(DevArguments),
    /// Look at the configuration without starting
    Config {
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Look at everything that breaks people, and say what to do about it
    Doctor(DoctorArguments),
    /// Make right what is broken in Redis
    Repair {
        #[command(subcommand)]
        command: RepairCommand,
    },
    /// Write the records of all groups to a file
    Backup(BackupArguments),
    /// Put records of a backup back
    Restore(RestoreArguments),
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Say whether `serve` would start with this configuration
    Check(ConfigArguments),
    /// Print the merged configuration as TOML, secrets masked
    Show(ConfigArguments),
}

/// Flags that decide the configuration; what they do not set comes from `RSC_<SECTION>__<KEY>` environment
/// variables, then from the file, then from the defaults.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ConfigArguments {
    /// Configuration file (TOML)
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Address and port of the HTTP surface, such as 127.0.0.1:8080; port 0 takes any free one
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// Where group metadata is kept: redis or memory
    #[arg(long, value_name = "TYPE")]
    store: Option<String>,
    /// Redis server, such as redis://user:password@host:6379/0; repeat it to name several
    #[arg(long, value_name = "URL")]
    redis_url: Vec<String>,
    /// Kind of Redis deployment: standalone, cluster or sentinel
    #[arg(long, value_name = "MODE")]
    redis_mode: Option<String>,
    /// Serve without authentication, on loopback addresses only
    #[arg(long)]
    insecure: bool,
}

impl ConfigArguments {
    /// These flags together with the environment of this process.
    pub(crate) fn sources(&self) -> Sources {
        let one = |name, key, value: &Option<String>| {
            value.as_ref().map(|value| Flag { name, key, value: value.as_str().into() })
        };
        let urls = (!self.redis_url.is_empty()).then(|| Flag {
            name: "--redis-url",
            key: "redis.urls",
            value: self.redis_url.clone().into(),
        });
        let flags = [
            one("--listen", "server.listen", &self.listen),
            one("--store", "store.type", &self.store),
            urls,
            one("--redis-mode", "redis.mode", &self.redis_mode),
        ];
        Sources {
            file: self.config.clone(),
            environment: std::env::vars_os().collect(),
            flags: flags.into_iter().flatten().collect(),
            insecure: self.insecure,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_stand_for_keys() {
        let cli = Cli::parse_from([
            "rsc",
            "serve",
            "--listen",
            "[::1]:0",
            "--redis-url",
            "redis://a",
            "--redis-url",
            "redis://b",
        ]);
        let Command::Serve(arguments) = cli.command else { panic!("serve was asked for") };
        let sources = arguments.sources();
        let flags: Vec<_> = sources.flags.iter().map(|flag| (flag.name, flag.key)).collect();
        assert_eq!(flags, [("--listen", "server.listen"), ("--redis-url", "redis.urls")]);
        assert!(!sources.insecure);
    }
}
