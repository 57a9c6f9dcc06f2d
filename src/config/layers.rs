//! The layers and their order: built-in defaults, file, environment, flags; later wins (protocol 12).
//!
//! Merging and remembering where a value came from is figment's work. Reading the layers is ours, see
//! `docs/decisions/0003-configuration.md` for why its own environment and TOML readers are not used.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use figment::error::{Error as FigmentError, Kind};
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};

use super::error::one_line;
use super::keys::{self, Place};
use super::{Config, ConfigError, checks, unbuilt};

/// Where configuration is read from, besides the built-in defaults.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sources {
    /// The file named by `--config`.
    pub(crate) file: Option<PathBuf>,
    /// Environment variables; all but `RSC_<SECTION>__<KEY>` are passed over.
    pub(crate) environment: Vec<(OsString, OsString)>,
    /// Flags that stand for a key.
    pub(crate) flags: Vec<Flag>,
    /// Whether `--insecure` was given.
    pub(crate) insecure: bool,
}

/// A command line flag that stands for a key.
#[derive(Clone, Debug)]
pub(crate) struct Flag {
    /// As it is typed: `--listen`.
    pub(crate) name: &'static str,
    /// The dotted key it sets.
    pub(crate) key: &'static str,
    /// Its value.
    pub(crate) value: Value,
}

/// A checked configuration and what it was made from.
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    /// Safe to run with.
    pub(crate) config: Config,
    /// The layers that set something, in their order, for people.
    pub(crate) layers: Vec<String>,
}

/// Reads, merges and checks the configuration. Each layer must be readable by itself: a bad value is
/// refused even where a later layer would cover it. Contradictions are looked for in the merged result.
///
/// # Errors
/// The first problem found, as one sentence.
pub(crate) fn load(sources: &Sources) -> Result<Loaded, ConfigError> {
    let defaults = Layer::defaults()?;
    let base = Figment::from(&defaults);
    let mut layers = vec![defaults];
    if let Some(path) = &sources.file {
        layers.push(file_layer(&base, path)?);
    }
    let mut environment = sources.environment.clone();
    // So that of two refusals always the same one is reported.
    environment.sort_unstable();
    for (name, value) in environment {
        layers.extend(environment_layer(&base, name, value)?);
    }
    // The last layer: nothing covers it, so the merged result shows whether it can be read.
    layers.extend(
        sources
            .flags
            .iter()
            .map(|flag| Layer::of_key(format!("flag {}", flag.name), flag.key, flag.value.clone())),
    );

    let merged = layers.iter().skip(1).fold(base, |merged, layer| merged.merge(layer));
    let mut config: Config =
        merged.extract().map_err(|error| ConfigError::from_figment(error, "merged configuration"))?;
    config.insecure = sources.insecure;
    let origin = |key: &str| {
        merged
            .find_metadata(key)
            .map_or_else(|| DEFAULT_ORIGIN.to_owned(), |metadata| metadata.name.to_string())
    };
    unbuilt::check(&config, &origin)?;
    follow_the_lease(&mut config, &origin);
    checks::check(&config, &origin)?;
    Ok(Loaded { config, layers: layers.into_iter().map(|layer| one_line(layer.origin)).collect() })
}

/// Shortens what nobody has set to what the configured lease and mutex TTL allow, so that a short lease alone is
/// no contradiction. What was set is checked as it is.
fn follow_the_lease(config: &mut Config, origin: &dyn Fn(&str) -> String) {
    let part_of = |whole: Duration, parts: u128| {
        let millis = whole.as_millis() / parts;
        Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX).max(1))
    };
    let lease = config.coordination.member_lease_ttl;
    let command = part_of(lease, 3).min(part_of(config.coordination.mutex_ttl, 2));
    let limits = [
        ("redis.connect-timeout", &mut config.redis.connect_timeout, part_of(lease, 3)),
        ("redis.command-timeout", &mut config.redis.command_timeout, command),
        (
            "coordination.mutex-acquire-timeout",
            &mut config.coordination.mutex_acquire_timeout,
            part_of(lease, 3),
        ),
        ("coordination.tick-interval", &mut config.coordination.tick_interval, part_of(lease, 3)),
    ];
    for (key, value, limit) in limits {
        if origin(key) == DEFAULT_ORIGIN {
            *value = (*value).min(limit);
        }
    }
}

/// How messages call the first layer.
const DEFAULT_ORIGIN: &str = "built-in default";

/// One layer: values with one origin.
struct Layer {
    origin: String,
    values: Dict,
}

impl Layer {
    fn defaults() -> Result<Self, ConfigError> {
        let value = Value::serialize(Config::default())
            .map_err(|error| ConfigError::from_figment(error, DEFAULT_ORIGIN))?;
        Ok(Layer { origin: DEFAULT_ORIGIN.to_owned(), values: value.into_dict().unwrap_or_default() })
    }

    fn of_key(origin: String, key: &str, value: Value) -> Self {
        Layer { origin, values: figment::util::nest(key, value).into_dict().unwrap_or_default() }
    }

    /// Whether the layer can be read on top of `base`.
    fn read_on(&self, base: &Figment) -> Result<(), ConfigError> {
        match self.try_on(base) {
            Ok(_) => Ok(()),
            Err(error) => Err(ConfigError::from_figment(*error, &self.origin)),
        }
    }

    fn try_on(&self, base: &Figment) -> Result<Config, Box<FigmentError>> {
        base.clone().merge(self).extract().map_err(Box::new)
    }
}

impl Provider for &Layer {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.origin.clone())
    }

    fn data(&self) -> Result<Map<Profile, Dict>, FigmentError> {
        Ok(Map::from([(Profile::Default, self.values.clone())]))
    }
}

fn file_layer(base: &Figment, path: &Path) -> Result<Layer, ConfigError> {
    let bytes = std::fs::read(path)
        .map_err(|error| ConfigError::unreadable(path, format!("cannot be read: {error}")))?;
    let text = String::from_utf8(bytes).map_err(|_| ConfigError::unreadable(path, "is not UTF-8 text"))?;
    let table: toml::Table = toml::from_str(&text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        ConfigError::syntax(path, before.matches('\n').count() + 1, error.message())
    })?;
    let origin = format!("file {}", path.display());
    check_names(&table, "", &origin)?;
    let value = Value::serialize(&table).map_err(|error| ConfigError::from_figment(error, &origin))?;
    let layer = Layer { origin, values: value.into_dict().unwrap_or_default() };
    layer.read_on(base)?;
    Ok(layer)
}

/// Refuses names that stand for nothing.
fn check_names(table: &toml::Table, around: &str, origin: &str) -> Result<(), ConfigError> {
    for (name, value) in table {
        let key = if around.is_empty() { name.clone() } else { format!("{around}.{name}") };
        let place = if name.contains('.') { Place::Unknown } else { keys::place(&key) };
        match (place, value) {
            (Place::Unknown, _) => return Err(unknown(&key, origin)),
            (Place::Table, toml::Value::Table(inner)) => check_names(inner, &key, origin)?,
            (Place::Table, _) => {
                return Err(ConfigError::key(
                    &key,
                    origin,
                    format!("is a table, not a value; write [{key}]"),
                ));
            }
            (Place::Leaf, toml::Value::Datetime(_)) => {
                return Err(ConfigError::key(
                    &key,
                    origin,
                    "a date is not allowed here; write text in quotes",
                ));
            }
            (Place::Leaf, _) => {}
        }
    }
    Ok(())
}

fn unknown(key: &str, origin: &str) -> ConfigError {
    ConfigError::key(key, origin, format!("unknown key; {}", keys::known_around(key)))
}

/// The layer of one environment variable, `None` for one that is no configuration.
fn environment_layer(base: &Figment, name: OsString, value: OsString) -> Result<Option<Layer>, ConfigError> {
    let name = name.to_string_lossy().into_owned();
    let Some(path) = name.strip_prefix("RSC_").filter(|path| path.contains("__")) else {
        return Ok(None);
    };
    let origin = format!("environment variable {name}");
    let Some(key) = keys::of_environment(&name) else {
        return Err(unknown(&path.replace("__", ".").replace('_', "-").to_lowercase(), &origin));
    };
    let Ok(text) = value.into_string() else {
        return Err(ConfigError::key(key, origin, "the value is not UTF-8 text"));
    };
    read_text(base, key, &origin, &text).map(Some)
}

/// Gives the text of an environment variable the type that its key takes: the text itself where text is
/// taken (`007` stays `007`), else what it says as TOML (`8`, `true`, `["a", "b"]`), else a list of its
/// comma-separated parts.
fn read_text(base: &Figment, key: &str, origin: &str, text: &str) -> Result<Layer, ConfigError> {
    let as_text = Some(Value::from(text));
    let as_toml = || text.trim().parse::<toml::Value>().ok().and_then(|value| Value::serialize(value).ok());
    let as_list =
        || Some(Value::from(text.split(',').map(|part| part.trim().to_owned()).collect::<Vec<_>>()));
    let mut problem: Option<Box<FigmentError>> = None;
    for candidate in [as_text, as_toml(), as_list()].into_iter().flatten() {
        let layer = Layer::of_key(origin.to_owned(), key, candidate);
        match layer.try_on(base) {
            Ok(_) => return Ok(layer),
            // A value of the right type that is not allowed says more than one of the wrong type.
            Err(error) if !matches!(error.kind, Kind::InvalidType(..)) => {
                return Err(ConfigError::from_figment(*error, origin));
            }
            Err(error) => problem = problem.or(Some(error)),
        }
    }
    Err(problem.map_or_else(
        || ConfigError::key(key, origin, "cannot be read"),
        |error| ConfigError::from_figment(*error, origin),
    ))
}
