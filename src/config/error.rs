//! Why a configuration was refused: always one sentence on one line.

use std::fmt;
use std::path::Path;

use figment::error::{Actual, Error as FigmentError, Kind, OneOf};
use thiserror::Error;

use super::keys;

/// Why a configuration was refused. The text is one line and never contains a secret.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum ConfigError {
    /// The file named by `--config` cannot be read.
    #[error("configuration file {path}: {problem}")]
    Unreadable {
        /// The file as it was named.
        path: String,
        /// What the system said.
        problem: String,
    },
    /// The file is not TOML.
    #[error("configuration file {path}, line {line}: not valid TOML: {problem}")]
    Syntax {
        /// The file as it was named.
        path: String,
        /// Line of the first error, from 1.
        line: usize,
        /// What the parser missed.
        problem: String,
    },
    /// A key is unknown, or its value is not allowed.
    #[error("{key} ({origin}): {problem}")]
    Key {
        /// Dotted and kebab-case.
        key: String,
        /// File, environment variable, flag or built-in default.
        origin: String,
        /// What is wrong and what is allowed.
        problem: String,
    },
}

impl ConfigError {
    /// A refusal of the file as a whole.
    pub(super) fn unreadable(path: &Path, problem: impl fmt::Display) -> Self {
        ConfigError::Unreadable { path: one_line(path.display()), problem: one_line(problem) }
    }

    /// A refusal of the file's text.
    pub(super) fn syntax(path: &Path, line: usize, problem: impl fmt::Display) -> Self {
        ConfigError::Syntax { path: one_line(path.display()), line, problem: one_line(problem) }
    }

    /// A refusal of one key.
    pub(super) fn key(key: impl fmt::Display, origin: impl fmt::Display, problem: impl fmt::Display) -> Self {
        ConfigError::Key { key: one_line(key), origin: one_line(origin), problem: one_line(problem) }
    }

    /// Turns the merging library's error into our sentence; `origin` when the library lost it.
    pub(super) fn from_figment(error: FigmentError, origin: &str) -> Self {
        let key = dotted(&error.path);
        let origin = error.metadata.as_ref().map_or(origin, |metadata| metadata.name.as_ref());
        let problem = problem(&error.kind, keys::is_secret(&key));
        ConfigError::key(key, origin, problem)
    }
}

/// Escapes what would break the line.
pub(super) fn one_line(text: impl fmt::Display) -> String {
    let mut line = String::new();
    for character in text.to_string().chars() {
        if character.is_control() { line.extend(character.escape_default()) } else { line.push(character) }
    }
    line
}

/// `["redis", "urls", "0"]` → `redis.urls[0]`.
fn dotted(path: &[String]) -> String {
    let mut key = String::new();
    for part in path {
        if part.bytes().all(|byte| byte.is_ascii_digit()) {
            key.push_str(&format!("[{part}]"));
        } else {
            if !key.is_empty() {
                key.push('.');
            }
            key.push_str(part);
        }
    }
    key
}

fn problem(kind: &Kind, secret: bool) -> String {
    match kind {
        Kind::InvalidType(actual, expected) | Kind::InvalidValue(actual, expected) => {
            let found = if secret { "the value".to_owned() } else { found(actual) };
            format!("{found} is not allowed here; write {}", wanted(expected))
        }
        Kind::InvalidLength(length, expected) => {
            format!("{length} entries are not allowed here; write {}", wanted(expected))
        }
        Kind::UnknownVariant(word, allowed) => format!("{word:?} is not known; write {}", OneOf(allowed)),
        Kind::UnknownField(field, allowed) => {
            format!("{field} is not known; known are {}", allowed.join(", "))
        }
        Kind::MissingField(field) => format!("{field} is missing"),
        other => other.to_string(),
    }
}

/// The value as it was written, as far as it is short.
fn found(actual: &Actual) -> String {
    match actual {
        Actual::Bool(value) => value.to_string(),
        Actual::Unsigned(value) => value.to_string(),
        Actual::Signed(value) => value.to_string(),
        Actual::Float(value) => value.to_string(),
        Actual::Str(value) => format!("{value:?}"),
        Actual::Seq => "a list".to_owned(),
        Actual::Map => "a table".to_owned(),
        other => other.to_string(),
    }
}

/// Says what a type means to somebody who writes a configuration.
fn wanted(expected: &str) -> String {
    match expected {
        "u16" => format!("a whole number from 0 to {}", u16::MAX),
        "u32" => format!("a whole number from 0 to {}", u32::MAX),
        "a duration" => "a duration such as 500ms, 3s or 10m".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a string" => "a text in quotes".to_owned(),
        "a sequence" => "a list such as [\"a\", \"b\"]".to_owned(),
        "a map" => "a table".to_owned(),
        other if other.starts_with("struct ") => "a table".to_owned(),
        other => other.to_owned(),
    }
}
