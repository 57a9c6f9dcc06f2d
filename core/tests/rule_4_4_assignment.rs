//! Assignment (protocol 4.4): deterministic, balanced, sticky, with the fewest moves that balance allows.
#![expect(clippy::expect_used, reason = "the helpers of a test fail like the test")]

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use rsc_core::ShardSet;
use rsc_core::assignment::assign;

type Targets = BTreeMap<String, ShardSet>;

fn targets(rows: &[(&str, &[u32])]) -> Targets {
    rows.iter().map(|(id, shards)| ((*id).to_owned(), shards.iter().copied().collect())).collect()
}

fn shards_of(targets: &Targets, id: &str) -> Vec<u32> {
    targets[id].iter().collect()
}

/// The least number of shards that must change their owner, found without the algorithm under test: for
/// every number of shards that each member could end up with, what it can keep of its own.
///
/// Members keep min(own, share); shares are q or q + 1 with exactly r of the latter. The best choice of
/// those r is found by dynamic programming over members, not by a greedy order.
fn least_moves(previous: &Targets, members: &[String], shard_count: u32) -> usize {
    let total = shard_count as usize;
    let (quota, remainder) = (total / members.len(), total % members.len());
    let own = |id: &String| previous.get(id).map_or(0, |set| set.iter().filter(|s| *s < shard_count).count());
    // kept[r] = the most shards kept by the members so far, r of whom get quota + 1.
    let mut kept: Vec<Option<usize>> = vec![None; remainder + 1];
    kept[0] = Some(0);
    for id in members {
        let own = own(id);
        for larger in (0..=remainder).rev() {
            let plain = kept[larger].map(|sum| sum + own.min(quota));
            let with_one_more =
                larger.checked_sub(1).and_then(|r| kept[r]).map(|sum| sum + own.min(quota + 1));
            kept[larger] = plain.max(with_one_more);
        }
    }
    total - kept[remainder].expect("r members can get one more")
}

fn owner_of(targets: &Targets) -> BTreeMap<u32, &str> {
    targets.iter().flat_map(|(id, set)| set.iter().map(move |shard| (shard, id.as_str()))).collect()
}

/// How many shards have another owner than before, or their first one.
fn moves(previous: &Targets, now: &Targets) -> usize {
    let (before, after) = (owner_of(previous), owner_of(now));
    after.iter().filter(|(shard, id)| before.get(shard) != Some(id)).count()
}

#[derive(Clone, Debug)]
struct Case {
    previous: Targets,
    members: Vec<String>,
    shard_count: u32,
}

impl Case {
    fn assign(&self) -> Targets {
        let members: Vec<&str> = self.members.iter().map(String::as_str).collect();
        assign(&self.previous, &members, 0..self.shard_count)
    }
}

/// Any previous target, also an unbalanced one, one of another shard count, or one of members that are gone.
fn case() -> impl Strategy<Value = Case> {
    let owners = prop::collection::vec(prop::option::weighted(0.9, 0_u32..9), 0..40);
    let members = prop::collection::btree_set(0_u32..9, 1..9);
    (owners, members, 0_u32..40).prop_map(|(owners, members, shard_count)| {
        let mut previous = Targets::new();
        for (shard, owner) in (0_u32..).zip(owners) {
            if let Some(owner) = owner {
                previous.entry(format!("m{owner}")).or_default().insert(shard);
            }
        }
        let members = members.into_iter().map(|index| format!("m{index}")).collect();
        Case { previous, members, shard_count }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, .. ProptestConfig::default() })]

    #[test]
    fn rule_4_4_every_shard_has_exactly_one_owner_among_the_members(case in case()) {
        let result = case.assign();
        prop_assert_eq!(result.keys().cloned().collect::<Vec<_>>(), case.members, "also who gets nothing");
        let mut all: Vec<u32> = result.values().flat_map(ShardSet::iter).collect();
        all.sort_unstable();
        prop_assert_eq!(all, (0..case.shard_count).collect::<Vec<_>>());
    }

    #[test]
    fn rule_4_4_counts_differ_by_at_most_one(case in case()) {
        let result = case.assign();
        let sizes: BTreeSet<usize> = result.values().map(ShardSet::len).collect();
        prop_assert!(sizes.last().unwrap() - sizes.first().unwrap() <= 1, "{:?}", result);
    }

    #[test]
    fn rule_4_4_no_more_shards_move_than_balance_needs(case in case()) {
        let result = case.assign();
        let least = least_moves(&case.previous, &case.members, case.shard_count);
        prop_assert_eq!(moves(&case.previous, &result), least, "{:?}", result);
    }

    #[test]
    fn rule_4_4_an_owner_that_gives_some_away_gets_none_in_exchange(case in case()) {
        let result = case.assign();
        for (id, after) in &result {
            let before: ShardSet = case.previous.get(id).into_iter().flat_map(ShardSet::iter)
                .filter(|shard| *shard < case.shard_count).collect();
            let (lost, gained) = (before.minus(after), after.minus(&before));
            prop_assert!(lost.is_empty() || gained.is_empty(), "{}: lost {:?}, gained {:?}", id, lost, gained);
        }
    }

    #[test]
    fn rule_4_4_a_balanced_group_comes_out_unchanged(case in case()) {
        let once = case.assign();
        let again = Case { previous: once.clone(), ..case };
        prop_assert_eq!(again.assign(), once);
    }

    #[test]
    fn rule_4_4_the_order_of_members_does_not_matter(
        (case, members) in case().prop_flat_map(|case| (Just(case.clone()), Just(case.members).prop_shuffle())),
    ) {
        let expected = case.assign();
        prop_assert_eq!(Case { members, ..case }.assign(), expected);
    }

    #[test]
    fn rule_4_4_who_joins_and_leaves_again_leaves_no_trace_in_the_counts(case in case()) {
        let before = case.assign();
        let newcomer = Case { previous: before, members: [case.members.clone(), vec!["n".to_owned()]].concat(),
            shard_count: case.shard_count };
        let with = newcomer.assign();
        let without = Case { previous: with.clone(), members: case.members, shard_count: case.shard_count };
        prop_assert_eq!(moves(&with, &without.assign()), with["n"].len(), "only the leaver's shards move");
    }
}

#[test]
fn rule_4_4_ties_are_decided_by_member_id() {
    let result = assign(&Targets::new(), &["a", "b", "c"], 0..4);
    assert_eq!(result, targets(&[("a", &[0, 1]), ("b", &[2]), ("c", &[3])]));
    // Three with two each, one of five shards too many: the last id has to be content with one.
    let previous = targets(&[("a", &[0, 1]), ("b", &[2, 3]), ("c", &[4, 5])]);
    let result = assign(&previous, &["a", "b", "c"], 0..5);
    assert_eq!(result, targets(&[("a", &[0, 1]), ("b", &[2, 3]), ("c", &[4])]));
    let result = assign(&previous, &["a", "b", "c", "d"], 0..6);
    assert_eq!(result, targets(&[("a", &[0, 1]), ("b", &[2, 3]), ("c", &[4]), ("d", &[5])]));
}

#[test]
fn rule_4_4_the_larger_share_stays_with_who_has_it() {
    let previous = targets(&[("a", &[0]), ("b", &[1, 2])]);
    assert_eq!(assign(&previous, &["a", "b"], 0..3), previous, "though a comes first");
}

#[test]
fn rule_4_4_an_owner_keeps_what_it_has_when_another_goes() {
    let previous = targets(&[("a", &[0, 3]), ("b", &[1, 4]), ("c", &[2, 5])]);
    let result = assign(&previous, &["a", "c"], 0..6);
    assert_eq!(result, targets(&[("a", &[0, 1, 3]), ("c", &[2, 4, 5])]));
}

#[test]
fn rule_4_4_members_without_shards_are_standbys_with_an_empty_target() {
    let result = assign(&targets(&[("b", &[0])]), &["a", "b", "c"], 0..2);
    assert_eq!(result, targets(&[("a", &[1]), ("b", &[0]), ("c", &[])]));
    assert_eq!(assign(&result, &["a"], 0..0), targets(&[("a", &[])]), "no shards at all");
    assert_eq!(assign(&result, &[], 0..2), Targets::new(), "no members");
}

#[test]
fn rule_4_4_a_shard_that_two_are_recorded_for_gets_one_owner() {
    let previous = targets(&[("a", &[0, 1]), ("b", &[1, 2])]);
    let result = assign(&previous, &["a", "b"], 0..3);
    assert_eq!((shards_of(&result, "a"), shards_of(&result, "b")), (vec![0, 1], vec![2]));
}

#[test]
fn rule_4_4_a_thousand_members_and_ten_thousand_shards() {
    let ids: Vec<String> = (0..1_000).map(|index| format!("member-{index:04}")).collect();
    let mut members: Vec<&str> = ids.iter().map(String::as_str).collect();
    let all = assign(&Targets::new(), &members, 0..10_000);
    assert!(all.values().all(|set| set.len() == 10));
    let gone = members.split_off(990);
    let without = assign(&all, &members, 0..10_000);
    assert_eq!(moves(&all, &without), 100, "what {} had", gone.len());
    assert_eq!(without.values().map(ShardSet::len).sum::<usize>(), 10_000);
}
