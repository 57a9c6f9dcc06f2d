//! What a change of the shard count would do, without doing it (protocol 6, `dryRun`).

use std::collections::BTreeMap;

use rsc_protocol::resharding::{GroupPlan, ShardMove};

use crate::assignment::assign;
use crate::group::Group;
use crate::shards::ShardSet;

/// What a change to `target` shards would move in `group`: the assignment that its activation makes, and then the one
/// that is left when every removed shard is given up.
#[must_use]
pub fn of_group(group: &Group, target: u32) -> GroupPlan {
    let assignable = group.members.iter().filter(|(_, member)| member.state.is_assignable());
    let members: Vec<&str> = assignable.map(|(id, _)| id.as_str()).collect();
    let mut during = group.read_set().to_set();
    during.extend(0..target);
    let activated = assign(&group.targets, &members, during.clone());
    let finished = assign(&activated, &members, 0..target);
    let (before, after) = (owners(&group.targets), owners(&finished));
    let moves = during.iter().filter_map(|shard_index| {
        let (from, to) = (before.get(&shard_index), after.get(&shard_index));
        let owner = |id: Option<&&str>| id.map(|id| (*id).to_owned());
        (from != to).then(|| ShardMove { shard_index, from: owner(from), to: owner(to) })
    });
    GroupPlan {
        consumer_group: group.key.consumer_group().to_owned(),
        moves: moves.collect(),
        shards_per_member: finished.iter().map(|(id, shards)| (id.clone(), shards.len())).collect(),
    }
}

fn owners(targets: &BTreeMap<String, ShardSet>) -> BTreeMap<u32, &str> {
    targets.iter().flat_map(|(id, target)| target.iter().map(|shard| (shard, id.as_str()))).collect()
}

/// The share of partition keys whose shard is another one with `to` shards than with `from`: `h mod from` and `h mod to`
/// are the same for `min(from, to)` of every `lcm(from, to)` hashes.
#[must_use]
pub fn share_of_keys_moved(from: u32, to: u32) -> f64 {
    if from == to {
        return 0.0;
    }
    if from == 0 || to == 0 {
        return 1.0;
    }
    // min / lcm = gcd / max
    1.0 - f64::from(gcd(from, to)) / f64::from(from.max(to))
}

fn gcd(one: u32, other: u32) -> u32 {
    if other == 0 { one } else { gcd(other, one % other) }
}
