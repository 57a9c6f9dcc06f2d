//! Where a server is reached, and what nodes say about themselves in other words (protocol 12, `node-mappings`).

use std::collections::BTreeMap;
use std::fmt;

/// Host and port of one server.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Address {
    /// Host name or IP address; an IPv6 address without brackets.
    pub(super) host: String,
    /// Port.
    pub(super) port: u16,
}

impl Address {
    /// An address of these parts; brackets around an IPv6 address are dropped.
    pub(super) fn new(host: &str, port: u16) -> Self {
        Address { host: bare(host).to_owned(), port }
    }

    /// Reads `host:port`, as `MOVED` and people write it: an IPv6 address may have brackets or none.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        // Cluster nodes write `host:port@busport` in places.
        let port = port.split('@').next().unwrap_or(port);
        Some(Address::new(host, port.parse().ok().filter(|port| *port != 0)?))
    }
}

fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(formatter, "[{}]:{}", self.host, self.port)
        } else {
            write!(formatter, "{}:{}", self.host, self.port)
        }
    }
}

/// What servers announce, and where they can be reached from here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Mappings(BTreeMap<Address, Address>);

impl Mappings {
    /// Reads pairs of `host:port`; the error is the text that is none.
    pub(super) fn read(pairs: &BTreeMap<String, String>) -> Result<Self, String> {
        let address = |text: &String| {
            Address::parse(text).filter(|address| !address.host.is_empty()).ok_or_else(|| text.clone())
        };
        pairs
            .iter()
            .map(|(from, to)| Ok((address(from)?, address(to)?)))
            .collect::<Result<_, _>>()
            .map(Mappings)
    }

    /// Where a server that announces `announced` is reached: there, unless mapped.
    pub(super) fn reachable(&self, announced: Address) -> Address {
        self.0.get(&announced).cloned().unwrap_or(announced)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for (text, host, port) in [
            ("127.0.0.1:7000", "127.0.0.1", 7000),
            ("[::1]:7000", "::1", 7000),
            ("::1:7000", "::1", 7000),
            ("redis.local:6379@16379", "redis.local", 6379),
            (":7000", "", 7000),
        ] {
            let address = Address::parse(text).unwrap();
            assert_eq!((address.host.as_str(), address.port), (host, port), "{text}");
        }
        for text in ["", "host", "host:", "host:0", "host:65536", "host:x"] {
            assert_eq!(Address::parse(text), None, "{text}");
        }
        assert_eq!(Address::new("[::1]", 1).to_string(), "[::1]:1");
        assert_eq!(Address::new("a", 1).to_string(), "a:1");
    }

    #[test]
    fn what_is_not_mapped_is_reached_where_it_says() {
        let pairs = [("10.0.0.1:6379".to_owned(), "localhost:7001".to_owned())].into();
        let mappings = Mappings::read(&pairs).unwrap();
        let other = Address::new("10.0.0.1", 6380);
        assert_eq!(mappings.reachable(Address::new("10.0.0.1", 6379)), Address::new("localhost", 7001));
        assert_eq!(mappings.reachable(other.clone()), other);
        for (from, to) in [("10.0.0.1", "a:1"), ("a:1", "b"), (":1", "a:1"), ("a:1", ":1")] {
            let pairs = [(from.to_owned(), to.to_owned())].into();
            assert!(Mappings::read(&pairs).is_err(), "{from} {to}");
        }
    }
}
