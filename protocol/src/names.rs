//! Names people choose: stream prefix, consumer group, member id, key prefix (protocol 1).

use std::fmt;

use thiserror::Error;

/// The longest name, in bytes of UTF-8 (protocol 1).
pub const MAX_NAME_BYTES: usize = 512;

/// Why a name was refused. The text names the field and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NameError {
    /// Empty, or white space only.
    #[error("{field} is blank: give it at least one visible character")]
    Blank {
        /// The JSON or path name of the field.
        field: &'static str,
    },
    /// More than [`MAX_NAME_BYTES`].
    #[error("{field} has {bytes} bytes: at most {MAX_NAME_BYTES} bytes of UTF-8 are allowed")]
    TooLong {
        /// The JSON or path name of the field.
        field: &'static str,
        /// Its length in bytes.
        bytes: usize,
    },
    /// A control character, NUL included.
    #[error("{field} contains the control character U+{code:04X}: remove it")]
    Control {
        /// The JSON or path name of the field.
        field: &'static str,
        /// The character's code point.
        code: u32,
    },
    /// `{` or `}`, which would change the cluster slot of a key.
    #[error(
        "{field} contains a brace: {{ and }} mark the hash tag of Redis keys and cannot be part of a name"
    )]
    Brace {
        /// The JSON or path name of the field.
        field: &'static str,
    },
}

fn check(field: &'static str, name: &str, braces_allowed: bool) -> Result<(), NameError> {
    if name.len() > MAX_NAME_BYTES {
        return Err(NameError::TooLong { field, bytes: name.len() });
    }
    if let Some(control) = name.chars().find(|character| character.is_control()) {
        return Err(NameError::Control { field, code: control.into() });
    }
    if name.chars().all(char::is_whitespace) {
        return Err(NameError::Blank { field });
    }
    if !braces_allowed && name.contains(['{', '}']) {
        return Err(NameError::Brace { field });
    }
    Ok(())
}

/// Checks a stream prefix: not blank, no braces, no control characters, at most 512 bytes.
///
/// # Errors
/// The first rule that the name breaks.
pub fn check_stream_prefix(name: &str) -> Result<(), NameError> {
    check("streamPrefix", name, false)
}

/// Checks a consumer group: same rules as a stream prefix.
///
/// # Errors
/// The first rule that the name breaks.
pub fn check_consumer_group(name: &str) -> Result<(), NameError> {
    check("consumerGroup", name, false)
}

/// Checks a member id: not blank, no control characters, at most 512 bytes; braces are allowed.
///
/// # Errors
/// The first rule that the name breaks.
pub fn check_member_id(name: &str) -> Result<(), NameError> {
    check("memberId", name, true)
}

/// Checks the configured prefix of the coordinator's own keys: same rules as a stream prefix.
///
/// # Errors
/// The first rule that the name breaks.
pub fn check_key_prefix(name: &str) -> Result<(), NameError> {
    check("store.key-prefix", name, false)
}

/// One (stream prefix, consumer group) pair: the name of a group. Only valid pairs exist.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupKey {
    stream_prefix: String,
    consumer_group: String,
}

impl GroupKey {
    /// Makes a group's name.
    ///
    /// # Errors
    /// When one of the two names breaks a rule of protocol 1.
    pub fn new(
        stream_prefix: impl Into<String>,
        consumer_group: impl Into<String>,
    ) -> Result<Self, NameError> {
        let (stream_prefix, consumer_group) = (stream_prefix.into(), consumer_group.into());
        check_stream_prefix(&stream_prefix)?;
        check_consumer_group(&consumer_group)?;
        Ok(GroupKey { stream_prefix, consumer_group })
    }

    /// The stream prefix, e.g. `orders`.
    #[must_use]
    pub fn stream_prefix(&self) -> &str {
        &self.stream_prefix
    }

    /// The consumer group, e.g. `billing`.
    #[must_use]
    pub fn consumer_group(&self) -> &str {
        &self.consumer_group
    }

    /// `streamPrefix:consumerGroup`, what stands between the braces of this group's keys. Two pairs can
    /// give the same text (`a:b`+`c`, `a`+`b:c`): they collide (protocol 2).
    #[must_use]
    pub fn joined(&self) -> String {
        format!("{}:{}", self.stream_prefix, self.consumer_group)
    }
}

impl fmt::Display for GroupKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.stream_prefix, self.consumer_group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_names_people_use() {
        for name in ["orders", "a:b", "주문", "🚚", "a/b#c?d%e", " spaced ", &"x".repeat(512)] {
            assert_eq!(check_stream_prefix(name), Ok(()), "{name}");
        }
        assert_eq!(check_member_id("pod-{1}"), Ok(()));
    }

    #[test]
    fn refuses_each_broken_rule_by_name() {
        let field = "streamPrefix";
        assert_eq!(check_stream_prefix(""), Err(NameError::Blank { field }));
        assert_eq!(check_stream_prefix(" \u{3000}"), Err(NameError::Blank { field }));
        assert_eq!(check_stream_prefix("a{b"), Err(NameError::Brace { field }));
        assert_eq!(check_stream_prefix("a}b"), Err(NameError::Brace { field }));
        assert_eq!(check_stream_prefix("a\0b"), Err(NameError::Control { field, code: 0 }));
        assert_eq!(check_stream_prefix("a\u{85}"), Err(NameError::Control { field, code: 0x85 }));
        assert_eq!(check_stream_prefix("\n"), Err(NameError::Control { field, code: 10 }));
        assert_eq!(check_stream_prefix(&"é".repeat(257)), Err(NameError::TooLong { field, bytes: 514 }));
    }

    #[test]
    fn pairs_that_collide_have_one_joined_name() {
        let one = GroupKey::new("a:b", "c").unwrap();
        let other = GroupKey::new("a", "b:c").unwrap();
        assert_ne!(one, other);
        assert_eq!(one.joined(), other.joined());
    }
}
