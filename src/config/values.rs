//! Types of single values: secrets, Redis URLs, addresses, byte sizes.

use std::fmt;
use std::net::SocketAddr;

use redis::IntoConnectionInfo;
use serde::de::{Error, IgnoredAny};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use url::Url;

/// What is shown in place of a secret.
pub(crate) const MASK: &str = "***";

/// A password or key: shown and serialised as `***`. (Hiding it from logs is the aim; it is not wiped from
/// memory, where the layers it came from hold it too.)
#[derive(Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Secret(String);

impl Secret {
    /// The secret itself.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(MASK)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(MASK)
    }
}

/// The value of a key whose shape a later version decides: anything is read, and then refused by
/// `unbuilt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unbuilt;

impl<'de> Deserialize<'de> for Unbuilt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Unbuilt)
    }
}

impl Serialize for Unbuilt {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("set")
    }
}

/// How a Redis URL is written; part of every refusal of one.
const REDIS_URL_FORM: &str = "write redis://[user:password@]host[:port][/database], or rediss:// for TLS";

/// The address of a Redis server, checked when read. Shown and serialised with its password masked; no
/// message ever contains the text it was read from.
#[derive(Clone)]
pub(crate) struct RedisUrl {
    url: Url,
    connection: redis::ConnectionInfo,
}

impl RedisUrl {
    /// `redis://127.0.0.1:6379`.
    #[expect(clippy::expect_used, reason = "a constant; every test that loads the defaults parses it")]
    pub(crate) fn local() -> Self {
        RedisUrl::parse("redis://127.0.0.1:6379").expect("the default URL is a Redis URL")
    }

    /// Reads a URL; the error is the rest of a sentence about it.
    fn parse(text: &str) -> Result<Self, String> {
        let url = Url::parse(text).map_err(|_| format!("is not a URL; {REDIS_URL_FORM}"))?;
        if !matches!(url.scheme(), "redis" | "rediss") {
            return Err(format!("does not begin with redis://; {REDIS_URL_FORM}"));
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(format!("has a part after ? or #, which is not understood; {REDIS_URL_FORM}"));
        }
        let path = url.path().trim_matches('/');
        if !path.is_empty() && path.parse::<u32>().is_err() {
            return Err(format!("has a path that is not a database number; {REDIS_URL_FORM}"));
        }
        // The store adds TLS; what reads URLs here knows none.
        let plain = text.replacen("rediss://", "redis://", 1);
        match plain.as_str().into_connection_info() {
            Ok(connection) => Ok(RedisUrl { url, connection }),
            // `detail` would repeat what was written; the code of a parse failure never does.
            Err(_) => Err(format!(
                "names no reachable host, or its user or password is not UTF-8; {REDIS_URL_FORM}"
            )),
        }
    }

    /// The whole URL, password in clear: never log it.
    pub(crate) fn expose(&self) -> &str {
        self.url.as_str()
    }

    /// `host:port`.
    pub(crate) fn address(&self) -> String {
        self.connection.addr().to_string()
    }

    /// Whether it asks for TLS.
    pub(crate) fn is_tls(&self) -> bool {
        self.url.scheme() == "rediss"
    }

    /// User in the URL.
    pub(crate) fn username(&self) -> Option<&str> {
        self.connection.redis_settings().username()
    }

    /// Password in the URL, in clear.
    pub(crate) fn password(&self) -> Option<&str> {
        self.connection.redis_settings().password()
    }

    /// Database in the URL; `None` when it names none.
    pub(crate) fn database(&self) -> Option<u32> {
        self.url.path().trim_matches('/').parse().ok()
    }
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut masked = self.url.clone();
        if masked.password().is_some() && masked.set_password(Some(MASK)).is_err() {
            return formatter.write_str("redis://***");
        }
        fmt::Display::fmt(&masked, formatter)
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl PartialEq for RedisUrl {
    fn eq(&self, other: &Self) -> bool {
        self.url == other.url
    }
}

impl Serialize for RedisUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RedisUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        RedisUrl::parse(&String::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

/// Reads an IP address with a port. Host names are not looked up: which address is meant must not depend
/// on a resolver.
pub(crate) fn listen_address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.trim().parse().map_err(|_| {
        D::Error::custom(format!(
            "{text:?} is not an IP address with a port; write one such as 127.0.0.1:8080 or [::1]:8080"
        ))
    })
}

/// Byte sizes such as `1MiB`, `512KiB`, `1MB` or a plain number of bytes; written back without loss.
pub(crate) mod byte_size {
    use bytesize::ByteSize;
    use serde::de::{Error, Unexpected, Visitor};
    use serde::{Deserializer, Serializer};
    use std::fmt;

    const EXPECTED: &str = "a size such as 512KiB or 1MiB";

    pub(crate) fn serialize<S: Serializer>(size: &ByteSize, serializer: S) -> Result<S::Ok, S::Error> {
        let bytes = size.as_u64();
        for (unit, name) in [(bytesize::GIB, "GiB"), (bytesize::MIB, "MiB"), (bytesize::KIB, "KiB")] {
            if bytes > 0 && bytes.is_multiple_of(unit) {
                return serializer.collect_str(&format_args!("{}{name}", bytes / unit));
            }
        }
        serializer.collect_str(&format_args!("{bytes}B"))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ByteSize, D::Error> {
        struct Size;
        impl Visitor<'_> for Size {
            type Value = ByteSize;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(EXPECTED)
            }

            fn visit_u64<E: Error>(self, bytes: u64) -> Result<ByteSize, E> {
                Ok(ByteSize::b(bytes))
            }

            fn visit_i64<E: Error>(self, bytes: i64) -> Result<ByteSize, E> {
                let bytes =
                    u64::try_from(bytes).map_err(|_| E::invalid_value(Unexpected::Signed(bytes), &self))?;
                Ok(ByteSize::b(bytes))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<ByteSize, E> {
                text.trim().parse().map_err(|_| E::invalid_value(Unexpected::Str(text), &self))
            }
        }
        deserializer.deserialize_any(Size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redis_urls_show_no_password() {
        let url = RedisUrl::parse("redis://app:s%40crt@redis.local:6380/3").unwrap();
        assert_eq!(url.to_string(), "redis://app:***@redis.local:6380/3");
        assert_eq!(format!("{url:?}"), url.to_string());
        assert_eq!((url.username(), url.password(), url.database()), (Some("app"), Some("s@crt"), Some(3)));
        let anonymous = RedisUrl::parse("redis://:secret@h").unwrap();
        assert_eq!(anonymous.to_string(), "redis://:***@h");
        assert_eq!(RedisUrl::local().database(), None);
    }

    #[test]
    fn refused_redis_urls_are_not_repeated() {
        for (text, word) in [
            ("hunter2@nowhere", "not a URL"),
            ("http://:hunter2@h", "redis://"),
            ("redis://:hunter2@h?protocol=resp3", "after ? or #"),
            ("redis://:hunter2@h#insecure", "after ? or #"),
            ("redis://:hunter2@h/minus", "database number"),
            ("redis://:hunter2@h/-1", "database number"),
            ("redis:///1", "host"),
            ("redis://hunter2%ff@h", "UTF-8"),
            ("redis://hunter2:pass word@h:x", "not a URL"),
        ] {
            let problem = RedisUrl::parse(text).unwrap_err();
            assert!(problem.contains(word), "{text}: {problem}");
            assert!(!problem.contains("hunter2"), "{text}: {problem}");
        }
    }

    #[test]
    fn secrets_are_masked_wherever_they_are_printed() {
        let secret = Secret("hunter2".to_owned());
        assert_eq!(format!("{secret:?}"), MASK);
        assert_eq!(serde_json::to_string(&secret).unwrap(), "\"***\"");
        assert_eq!(secret.expose(), "hunter2");
    }

    #[derive(Serialize, Deserialize)]
    struct Sized {
        #[serde(with = "byte_size")]
        size: bytesize::ByteSize,
    }

    #[test]
    fn byte_sizes_keep_every_byte() {
        for (text, bytes) in [
            ("\"1MiB\"", 1_048_576),
            ("\"1 MiB\"", 1_048_576),
            ("\"1MB\"", 1_000_000),
            ("\"1.5KiB\"", 1_536),
            ("1048577", 1_048_577),
            ("\"4096\"", 4_096),
            ("\"3GiB\"", 3_221_225_472),
            ("0", 0),
        ] {
            let read: Sized = serde_json::from_str(&format!("{{\"size\":{text}}}")).unwrap();
            assert_eq!(read.size.as_u64(), bytes, "{text}");
            let written = serde_json::to_string(&read).unwrap();
            let again: Sized = serde_json::from_str(&written).unwrap();
            assert_eq!(again.size.as_u64(), bytes, "{written}");
        }
        for text in ["\"1 parsec\"", "\"-1\"", "-1", "\"\"", "true", "1.5"] {
            assert!(serde_json::from_str::<Sized>(&format!("{{\"size\":{text}}}")).is_err(), "{text}");
        }
    }
}
