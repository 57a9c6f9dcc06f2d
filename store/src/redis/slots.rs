//! Which node of a cluster holds which slot, as `CLUSTER SLOTS` tells it.

use ::redis::Value;

use super::address::{Address, Mappings};
use super::reply::text;

/// How many slots there are.
const SLOTS: u16 = 16_384;

/// The slot of a key: of what stands between its first `{` and the next `}`, unless that is empty.
pub(super) fn key_slot(key: &str) -> u16 {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag);
    rsc_protocol::hash::redis_slot(tag.filter(|tag| !tag.is_empty()).unwrap_or(key))
}

/// Slots in one piece, and who has them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SlotRange {
    first: u16,
    last: u16,
    /// The node that serves them.
    pub(super) master: Address,
    /// Its replicas.
    pub(super) replicas: Vec<Address>,
}

/// A whole layout.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Layout(Vec<SlotRange>);

impl Layout {
    /// Reads an answer to `CLUSTER SLOTS` by the node at `from`; `None` when it is none. A node that does not know its
    /// own address leaves it out, and means the one it was asked at.
    pub(super) fn read(answer: Value, from: &Address, mappings: &Mappings) -> Option<Self> {
        let mut ranges = Vec::new();
        for range in answer.into_sequence().ok()? {
            let mut parts = range.into_sequence().ok()?.into_iter();
            let (first, last) = (slot(parts.next()?)?, slot(parts.next()?)?);
            if first > last {
                return None;
            }
            // Without an address of its master nobody serves them, whatever its replicas are called.
            let Some(master) = parts.next().and_then(|node| address(node, from)) else { continue };
            let nodes = parts.filter_map(|node| address(node, from));
            let mut replicas: Vec<Address> = nodes.map(|node| mappings.reachable(node)).collect();
            replicas.sort();
            ranges.push(SlotRange { first, last, master: mappings.reachable(master), replicas });
        }
        ranges.sort();
        (!ranges.is_empty()).then_some(Layout(ranges))
    }

    /// Who serves a slot.
    pub(super) fn owner(&self, slot: u16) -> Option<&Address> {
        let at = self.0.partition_point(|range| range.last < slot);
        self.0.get(at).filter(|range| range.first <= slot).map(|range| &range.master)
    }

    /// Every range.
    pub(super) fn ranges(&self) -> &[SlotRange] {
        &self.0
    }

    /// Slots that nobody serves.
    pub(super) fn unserved(&self) -> u32 {
        let served: u32 = self.0.iter().map(|range| u32::from(range.last - range.first) + 1).sum();
        u32::from(SLOTS).saturating_sub(served)
    }
}

fn slot(value: Value) -> Option<u16> {
    match value {
        Value::Int(number) => u16::try_from(number).ok().filter(|slot| *slot < SLOTS),
        _ => None,
    }
}

fn address(node: Value, from: &Address) -> Option<Address> {
    let mut parts = node.into_sequence().ok()?.into_iter();
    let host = match parts.next()? {
        Value::Nil => String::new(),
        host => text(host).ok()?,
    };
    let Value::Int(port) = parts.next()? else { return None };
    let port = u16::try_from(port).ok().filter(|port| *port != 0)?;
    match host.as_str() {
        // "Nobody told me a host name": no address at all.
        "?" => None,
        "" => Some(Address::new(&from.host, port)),
        host => Some(Address::new(host, port)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(host: Value, port: i64) -> Value {
        Value::Array(vec![host, Value::Int(port), Value::BulkString(b"id".to_vec())])
    }

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    #[test]
    fn a_hash_tag_decides_alone() {
        assert_eq!(key_slot("P:{a:b}:metadata"), key_slot("{a:b}"));
        assert_eq!(key_slot("{a:b}"), rsc_protocol::hash::redis_slot("a:b"));
        assert_eq!(key_slot("{}x"), rsc_protocol::hash::redis_slot("{}x"));
        assert_eq!(key_slot("orders:0"), rsc_protocol::hash::redis_slot("orders:0"));
        assert_eq!(key_slot("a}b{c}d{e}"), rsc_protocol::hash::redis_slot("c"));
    }

    #[test]
    fn a_layout_is_read_and_asked() {
        let from = Address::new("localhost", 7000);
        let mappings =
            Mappings::read(&[("10.0.0.2:6379".to_owned(), "localhost:7002".to_owned())].into()).unwrap();
        let range = |first, last, nodes: Vec<Value>| {
            Value::Array([Value::Int(first), Value::Int(last)].into_iter().chain(nodes).collect())
        };
        let answer = Value::Array(vec![
            range(8192, 16_000, vec![node(bulk("10.0.0.2"), 6379), node(bulk(""), 7001)]),
            range(0, 8191, vec![node(Value::Nil, 7000)]),
            range(16_001, 16_001, vec![node(bulk("?"), 7000)]),
        ]);
        let layout = Layout::read(answer, &from, &mappings).unwrap();
        assert_eq!(layout.owner(0), Some(&from));
        assert_eq!(layout.owner(8191), Some(&from));
        assert_eq!(layout.owner(8192), Some(&Address::new("localhost", 7002)));
        assert_eq!(layout.owner(16_000), Some(&Address::new("localhost", 7002)));
        assert_eq!((layout.owner(16_001), layout.unserved()), (None, 383));
        let nameless = range(0, 9, vec![node(bulk("?"), 7000), node(bulk("replica"), 7001)]);
        assert_eq!(Layout::read(Value::Array(vec![nameless]), &from, &mappings), None);
        assert_eq!(layout.ranges()[1].replicas, [Address::new("localhost", 7001)]);
    }

    #[test]
    fn what_is_no_layout_is_none() {
        let from = Address::new("a", 1);
        for answer in [
            Value::Nil,
            Value::Okay,
            Value::Array(vec![]),
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![Value::Array(vec![Value::Int(0), Value::Int(99_999), node(bulk("a"), 1)])]),
            Value::Array(vec![Value::Array(vec![Value::Int(0), Value::Int(1), node(bulk("a"), 0)])]),
            Value::Array(vec![Value::Array(vec![Value::Int(2), Value::Int(1), node(bulk("a"), 1)])]),
        ] {
            assert_eq!(Layout::read(answer.clone(), &from, &Mappings::default()), None, "{answer:?}");
        }
    }
}
