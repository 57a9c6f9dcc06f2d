//! Who should own what (protocol 4.4): balanced, sticky, deterministic, pure.

use std::collections::{BTreeMap, BTreeSet};

use crate::shards::ShardSet;

/// Assigns every shard of `shards` to one of `members` (ids in ascending order, each once).
///
/// The counts of two members differ by at most 1. Measured against `previous`, the number of shards that
/// change their owner among `members` is the least that balance allows; a balanced assignment comes out
/// unchanged. Equal inputs give equal outputs, whatever happened before. No members: no targets.
#[must_use]
pub fn assign(
    previous: &BTreeMap<String, ShardSet>,
    members: &[&str],
    shards: impl Into<ShardSet>,
) -> BTreeMap<String, ShardSet> {
    let shards = shards.into();
    let Some(quota) = (shards.len()).checked_div(members.len()) else {
        return BTreeMap::new();
    };
    let mut with_one_more = shards.len() % members.len();

    // What each member keeps at first: its previous target inside the shard set; a shard that two members
    // are recorded for stays with the first.
    let mut unclaimed: BTreeSet<u32> = shards.iter().collect();
    let mut kept: Vec<(&str, ShardSet)> = members
        .iter()
        .map(|id| {
            let mine = previous.get(*id).into_iter().flat_map(ShardSet::iter);
            (*id, mine.filter(|shard| unclaimed.remove(shard)).collect())
        })
        .collect();

    // The larger share goes to those who already have the most: that moves the fewest shards.
    kept.sort_by(|(one_id, one), (other_id, other)| other.len().cmp(&one.len()).then(one_id.cmp(other_id)));
    let mut targets: Vec<(&str, usize, ShardSet)> = kept
        .into_iter()
        .map(|(id, mut mine)| {
            let share = quota + usize::from(with_one_more > 0);
            with_one_more = with_one_more.saturating_sub(1);
            while mine.len() > share {
                if let Some(shard) = mine.last() {
                    mine.remove(shard);
                    unclaimed.insert(shard);
                }
            }
            (id, share, mine)
        })
        .collect();

    targets.sort_by_key(|(id, _, _)| *id);
    let mut free = unclaimed.into_iter();
    targets
        .into_iter()
        .map(|(id, share, mut mine)| {
            let missing = share - mine.len();
            mine.extend(free.by_ref().take(missing));
            (id.to_owned(), mine)
        })
        .collect()
}
