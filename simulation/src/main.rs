//! `rsc-simulation`: many seeds, one seed again, and the proof that planted faults are found.
#![expect(clippy::print_stdout, reason = "a command line tool")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use rsc_simulation::plan::{FaultMix, Mix, Plan, Planted};
use rsc_simulation::report::{Figures, table};
use rsc_simulation::run::run;
use rsc_simulation::stream::plan::{StreamPlan, StreamPlanted};
use rsc_simulation::stream::report::{StreamFigures, stream_table};
use rsc_simulation::stream::run::run_stream;
use serde::{Deserialize, Serialize};

#[derive(Parser)]
#[command(about = "The coordinator's state machine under one seed that decides everything.")]
struct Cli {
    #[command(subcommand)]
    command: Sub,
}

#[derive(Subcommand)]
enum Sub {
    /// Run many seeds.
    Run(Run),
    /// Run one seed again, with its trace.
    Replay(Replay),
    /// Plant every fault, one at a time, and count the seeds until each is found.
    Faults(Faults),
}

/// What is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum World {
    /// One group: its members and its record.
    Group,
    /// One stream with several groups, whose shard count changes.
    Stream,
}

#[derive(Args)]
struct Run {
    /// What is simulated.
    #[arg(long, value_enum, default_value = "group")]
    world: World,
    /// Seeds, the second one excluded: 0..1000.
    #[arg(long, value_parser = seeds)]
    seeds: (u64, u64),
    #[arg(long, value_enum, default_value = "all")]
    mix: Mix,
    #[arg(long, value_enum, default_value = "all")]
    faults: FaultMix,
    /// A file to note progress in, and to go on from.
    #[arg(long)]
    resume: Option<PathBuf>,
    /// Stop after so many seconds, whatever is left.
    #[arg(long)]
    seconds: Option<u64>,
}

#[derive(Args)]
struct Replay {
    /// What is simulated.
    #[arg(long, value_enum, default_value = "group")]
    world: World,
    #[arg(long)]
    seed: u64,
    #[arg(long, value_enum, default_value = "all")]
    mix: Mix,
    #[arg(long, value_enum, default_value = "all")]
    faults: FaultMix,
    /// The rule that is missing.
    #[arg(long)]
    fault: Option<String>,
}

#[derive(Args)]
struct Faults {
    /// What is simulated.
    #[arg(long, value_enum, default_value = "group")]
    world: World,
    /// Seeds to try at most, for each fault.
    #[arg(long, default_value_t = 20_000)]
    at_most: u64,
    /// Only these.
    #[arg(long)]
    only: Vec<String>,
    #[arg(long, value_enum, default_value = "all")]
    faults: FaultMix,
}

fn seeds(text: &str) -> Result<(u64, u64), String> {
    let (from, to) = text.split_once("..").ok_or("write FROM..TO")?;
    let number = |text: &str| text.replace('_', "").parse::<u64>().map_err(|error| error.to_string());
    Ok((number(from)?, number(to)?))
}

/// What a long run has done so far.
#[derive(Default, Serialize, Deserialize)]
struct Progress {
    next: u64,
    seconds: f64,
    #[serde(default)]
    figures: BTreeMap<String, Figures>,
    #[serde(default)]
    of_streams: BTreeMap<String, StreamFigures>,
    violations: Vec<String>,
}

fn name(value: impl clap::ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Sub::Run(arguments) => run_many(&arguments),
        Sub::Replay(arguments) => replay(&arguments),
        Sub::Faults(arguments) => find_faults(&arguments),
    }
}

/// The fault mixes that `all` stands for when many seeds are run: each seed gets one of them.
fn faults_of(seed: u64, faults: FaultMix) -> FaultMix {
    match (faults, seed % 8) {
        (FaultMix::All, 0) => FaultMix::None,
        (FaultMix::All, 1) => FaultMix::Network,
        (FaultMix::All, 2) => FaultMix::Crash,
        (FaultMix::All, 3 | 4) => FaultMix::Rollback,
        (faults, _) => faults,
    }
}

/// The client mixes that `all` stands for when many seeds are run.
fn mix_of(seed: u64, mix: Mix) -> Mix {
    match (mix, seed / 8 % 3) {
        (Mix::All, 0) => Mix::Modern,
        (Mix::All, 1) => Mix::Old,
        (Mix::All, _) => Mix::Mixed,
        (mix, _) => mix,
    }
}

fn save(path: &Path, progress: &Progress) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(progress)?;
    let new = path.with_extension("new");
    std::fs::write(&new, text).with_context(|| format!("cannot write {}", new.display()))?;
    std::fs::rename(&new, path).with_context(|| format!("cannot write {}", path.display()))
}

fn run_many(arguments: &Run) -> anyhow::Result<()> {
    let (from, to) = arguments.seeds;
    let mut progress = Progress { next: from, ..Progress::default() };
    if let Some(path) = &arguments.resume
        && path.exists()
    {
        let text = std::fs::read_to_string(path)?;
        progress =
            serde_json::from_str(&text).with_context(|| format!("{} is no progress", path.display()))?;
        println!("going on from seed {}", progress.next);
    }
    let (began, before) = (Instant::now(), progress.seconds);
    let limit = arguments.seconds.map_or(Duration::MAX, Duration::from_secs);
    let mut saved = Instant::now();
    let first = progress.next;
    while progress.next < to && began.elapsed() < limit && progress.violations.len() < 20 {
        let seed = progress.next;
        let (mix, faults) = (mix_of(seed, arguments.mix), faults_of(seed, arguments.faults));
        let (violation, again) = match arguments.world {
            World::Group => {
                let outcome = run(Plan { seed, mix, faults, planted: None }, false);
                if outcome.violation.is_none() {
                    let kind = format!("{}/{}", name(mix), name(faults));
                    progress.figures.entry(kind).or_default().add(&outcome);
                }
                (outcome.violation, format!("--seed {seed} --mix {} --faults {}", name(mix), name(faults)))
            }
            World::Stream => {
                let outcome = run_stream(StreamPlan { seed, faults, planted: None }, false);
                if outcome.violation.is_none() {
                    progress.of_streams.entry(name(faults)).or_default().add(&outcome);
                }
                (outcome.violation, format!("--world stream --seed {seed} --faults {}", name(faults)))
            }
        };
        progress.next += 1;
        progress.seconds = before + began.elapsed().as_secs_f64();
        if let Some(what) = violation {
            let again = format!("cargo run -p rsc-simulation -- replay {again}");
            println!("seed {seed}: {what}\n  {again}");
            progress.violations.push(format!("{what}; {again}"));
        }
        if let Some(path) = &arguments.resume
            && saved.elapsed() > Duration::from_secs(5)
        {
            save(path, &progress)?;
            saved = Instant::now();
        }
    }
    if let Some(path) = &arguments.resume {
        save(path, &progress)?;
    }
    let (runs, took) = (progress.next - first, began.elapsed().as_secs_f64());
    #[expect(clippy::cast_precision_loss, reason = "for people")]
    let rate = runs as f64 / took.max(0.001);
    let figures = match arguments.world {
        World::Group => table(&progress.figures),
        World::Stream => stream_table(&progress.of_streams),
    };
    println!("{runs} runs in {took:.1} s: {rate:.0} runs/s\n\n{figures}");
    if progress.violations.is_empty() {
        return Ok(());
    }
    bail!("{} violations", progress.violations.len())
}

fn replay(arguments: &Replay) -> anyhow::Result<()> {
    let no_such = |name: &String| format!("there is no fault {name} in this world");
    let (seed, faults) = (arguments.seed, arguments.faults);
    let (violation, trace) = match arguments.world {
        World::Group => {
            let planted = arguments.fault.as_ref();
            let planted =
                planted.map(|name| Planted::named(name).with_context(|| no_such(name))).transpose()?;
            let outcome = run(Plan { seed, mix: arguments.mix, faults, planted }, true);
            (outcome.violation, outcome.trace)
        }
        World::Stream => {
            let planted = arguments.fault.as_ref();
            let planted =
                planted.map(|name| StreamPlanted::named(name).with_context(|| no_such(name))).transpose()?;
            let outcome = run_stream(StreamPlan { seed, faults, planted }, true);
            (outcome.violation, outcome.trace)
        }
    };
    for line in &trace {
        println!("{line}");
    }
    match violation {
        None => Ok(()),
        Some(what) => bail!("{what}"),
    }
}

/// A planted fault that was found: by which seed, in which kind of run, as what.
type Found = Option<(u64, String, String)>;

fn find(at_most: u64, violation: impl Fn(u64) -> (Option<String>, String)) -> Found {
    (0..at_most).find_map(|seed| {
        let (violation, kind) = violation(seed);
        Some((seed, kind, violation?.split(':').next().unwrap_or_default().to_owned()))
    })
}

fn find_faults(arguments: &Faults) -> anyhow::Result<()> {
    println!("| fault | seeds until found | clients, faults | found as |\n| --- | ---: | --- | --- |");
    let of_group = |planted: Planted| {
        find(arguments.at_most, |seed| {
            let (mix, faults) = (mix_of(seed, Mix::All), faults_of(seed, arguments.faults));
            let outcome = run(Plan { seed, mix, faults, planted: Some(planted) }, false);
            (outcome.violation, format!("{}, {}", name(mix), name(faults)))
        })
    };
    let of_stream = |planted: StreamPlanted| {
        find(arguments.at_most, |seed| {
            let faults = faults_of(seed, arguments.faults);
            let outcome = run_stream(StreamPlan { seed, faults, planted: Some(planted) }, false);
            (outcome.violation, name(faults))
        })
    };
    let is_wanted = |name: &String| arguments.only.is_empty() || arguments.only.contains(name);
    let mut missed = Vec::new();
    let mut tell = |fault: String, found: Found| match found {
        Some((seed, kind, what)) => println!("| {fault} | {} | {kind} | {what} |", seed + 1),
        None => {
            println!("| {fault} | not in {} | | |", arguments.at_most);
            missed.push(fault);
        }
    };
    match arguments.world {
        World::Group => Planted::all()
            .into_iter()
            .filter(|planted| is_wanted(&planted.name()))
            .for_each(|planted| tell(planted.name(), of_group(planted))),
        World::Stream => StreamPlanted::all()
            .into_iter()
            .filter(|planted| is_wanted(&planted.name()))
            .for_each(|planted| tell(planted.name(), of_stream(planted))),
    }
    if missed.is_empty() { Ok(()) } else { bail!("not found: {}", missed.join(", ")) }
}
