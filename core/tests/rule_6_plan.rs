//! Protocol 6, `dryRun`: the plan is what comes to pass.

mod support;

use std::collections::BTreeMap;

use rsc_core::migration::plan::{of_group, share_of_keys_moved};
use support::streams::*;
use support::{Client, settle};

fn owners(stream: &Stream) -> BTreeMap<u32, String> {
    let targets = stream.groups[0].group().targets;
    targets
        .iter()
        .flat_map(|(id, set)| set.iter().map(|shard| (shard, id.clone())).collect::<Vec<_>>())
        .collect()
}

#[test]
fn protocol_6_a_plan_names_who_moves_what_and_changes_nothing() {
    for (from, to) in [(4, 7), (7, 4), (5, 0), (0, 3), (6, 6)] {
        let mut stream = Stream::new(from, &["billing"]);
        let mut clients: Vec<Client> = ["a", "b", "c"].iter().map(|id| Client::new(id, id)).collect();
        settle(&mut stream.groups[0], &mut clients.iter_mut().collect::<Vec<_>>());
        stream.now = stream.groups[0].now;
        let group = stream.groups[0].group();
        let plan = of_group(&group, to);
        assert_eq!(stream.groups[0].group(), group);
        assert_eq!(plan.consumer_group, "billing");
        let before = owners(&stream);
        if from != to {
            stream.scale(to);
            let end = stream.now.plus(CACHES + 30_000);
            while stream.now < end {
                for client in &mut clients {
                    client.beat(&mut stream.groups[0]);
                }
                stream.drive();
                stream.pass(3_000);
            }
        }
        stream.assert_settled(to);
        let after = owners(&stream);
        for row in &plan.moves {
            assert_eq!(before.get(&row.shard_index), row.from.as_ref(), "{from} to {to}");
            assert_eq!(after.get(&row.shard_index), row.to.as_ref(), "{from} to {to}");
        }
        let moved = (0..from.max(to)).filter(|shard| before.get(shard) != after.get(shard)).count();
        assert_eq!(plan.moves.len(), moved, "{from} to {to}: each of them, and no other");
        let sizes: BTreeMap<String, usize> =
            stream.groups[0].group().targets.iter().map(|(id, set)| (id.clone(), set.len())).collect();
        assert_eq!(plan.shards_per_member, sizes);
    }
}

#[test]
fn protocol_6_a_plan_without_members_moves_nothing() {
    let stream = Stream::new(3, &["billing"]);
    let plan = of_group(&stream.groups[0].group(), 5);
    assert!(plan.moves.is_empty() && plan.shards_per_member.is_empty());
}

#[test]
fn protocol_6_the_share_of_keys_that_change_their_shard() {
    for (from, to) in [(1, 2), (4, 6), (6, 4), (12, 12), (7, 5), (8, 16)] {
        // Over one whole period of both remainders.
        let period = from * to;
        let moved = (0..period).filter(|hash| hash % from != hash % to).count();
        let expected = moved as f64 / f64::from(period);
        assert!((share_of_keys_moved(from, to) - expected).abs() < 1e-9, "{from} to {to}");
    }
    assert_eq!(
        (share_of_keys_moved(0, 4), share_of_keys_moved(4, 0), share_of_keys_moved(0, 0)),
        (1.0, 1.0, 0.0)
    );
}
