//! The invariants by name: the list, the document and the checks are the same, and each check can fail.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeSet;

use rsc_core::member::{Grant, Superseded};
use rsc_core::validate::{INVARIANTS, validate_transition};
use rsc_core::{Group, Hold, HoldCause, Migration};
use rsc_protocol::admin::MemberState;
use rsc_protocol::resharding::MigrationState;
use support::streams::Stream;
use support::*;

const DOCUMENT: &str = include_str!("../../docs/invariants.md");

/// Id and last column of each row of the document's table.
fn rows() -> Vec<(&'static str, &'static str)> {
    DOCUMENT
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(id, rest)| {
            let cells: Vec<&str> = rest.split('|').map(str::trim).filter(|cell| !cell.is_empty()).collect();
            assert_eq!(cells.len(), 3, "{id}: sentence, section, checked by");
            (id, cells[2])
        })
        .collect()
}

#[test]
fn the_document_and_the_list_name_the_same_invariants() {
    let rows = rows();
    let ids: BTreeSet<&str> = rows.iter().map(|(id, _)| *id).collect();
    assert_eq!(ids.len(), rows.len(), "each id once");
    let by_the_core: BTreeSet<&str> = rows
        .iter()
        .filter(|(_, by)| matches!(*by, "Group::validate" | "validate_transition"))
        .map(|(id, _)| *id)
        .collect();
    assert_eq!(by_the_core, INVARIANTS.iter().copied().collect());
    for (id, by) in rows.iter().filter(|(id, _)| !INVARIANTS.contains(id)) {
        assert!(
            *by == "property test" || by.starts_with("simulation") || by.starts_with("later: "),
            "{id} is checked by {by}"
        );
    }
}

/// p holds 0, 1 and 2, m waits for 2, which is being removed.
fn healthy() -> Group {
    let mut stream = Stream::new(3, &["billing"]);
    let mut p = Client::new("p", "p-1");
    settle(&mut stream.groups[0], &mut [&mut p]);
    stream.now = stream.groups[0].now;
    stream.scale(2);
    Client::new("m", "m-1").beat(&mut stream.groups[0]);
    stream.groups[0].group()
}

fn running(group: &mut Group) -> &mut Migration {
    let id = group.active_resharding_id.clone().unwrap();
    group.migrations.get_mut(&id).unwrap()
}

type Break = fn(&mut Group);

#[test]
fn every_invariant_is_found_broken_by_the_check_that_the_document_names() {
    let of_a_state: [(&str, Break); 12] = [
        ("one-holder", |group| {
            group.members.get_mut("m").unwrap().current.insert(1);
        }),
        ("legal-target", |group| {
            group.targets.get_mut("m").unwrap().remove(2);
        }),
        ("balanced-target", |group| {
            let moved = group.targets.insert("m".to_owned(), [].into()).unwrap();
            group.targets.get_mut("p").unwrap().extend(moved.iter());
        }),
        ("epoch-order", |group| group.assignment_epoch = group.group_epoch + 1),
        ("grant-not-from-the-future", |group| {
            let grant = Grant { metadata_version: group.metadata_version + 1, left_out: false };
            group.members.get_mut("p").unwrap().granted.insert(0, grant);
        }),
        ("terminal-holds-nothing", |group| {
            group.members.get_mut("p").unwrap().state = MemberState::Expired;
        }),
        ("drain-clock", |group| group.members.get_mut("p").unwrap().rebalance_deadline_at = None),
        ("one-migration", |group| group.active_resharding_id = None),
        ("one-migration", |group| {
            let mut second = group.active_migration().unwrap().clone();
            second.resharding_id = "reshard-second".to_owned();
            group.migrations.insert(second.resharding_id.clone(), second);
        }),
        ("drained-or-read", |group| running(group).retired = [2].into()),
        ("drained-or-read", |group| {
            running(group).state = MigrationState::Deprecated;
            group.active_resharding_id = None;
        }),
        ("accepted-not-superseded", |group| {
            let superseded_at = group.updated_at;
            let former = Superseded { instance_id: "p-1".to_owned(), superseded_at };
            group.members.get_mut("p").unwrap().superseded.push(former);
        }),
    ];
    let of_a_step: [(&str, Break); 6] = [
        ("version-monotonic", |group| group.metadata_version -= 1),
        ("epoch-monotonic", |group| group.members.get_mut("p").unwrap().live.member_epoch -= 1),
        ("lease-monotonic", |group| {
            let live = &mut group.members.get_mut("p").unwrap().live;
            live.member_lease_expires_at = live.member_lease_expires_at.plus(-1);
        }),
        ("fencing-monotonic", |group| {
            group.fencing_tokens.remove(&0).unwrap();
        }),
        ("hold-blocks-grant", |group| {
            let until = group.updated_at.plus(1);
            let (member_id, cause) = ("x".to_owned(), HoldCause::Superseded);
            let (since, moves) = (group.updated_at, false);
            let hold = Hold {
                shard_index: 1,
                member_id,
                instance_id: None,
                sequence: None,
                cause,
                until,
                since,
                moves,
            };
            group.holds.push(hold);
            let grant = Grant { metadata_version: group.metadata_version, left_out: false };
            group.members.get_mut("m").unwrap().granted.insert(1, grant);
        }),
        ("observable-moves-version", |group| {
            group.targets.get_mut("m").unwrap().insert(0);
        }),
    ];
    let healthy = healthy();
    let now = healthy.updated_at;
    assert_eq!(healthy.validate(), []);
    assert_eq!(validate_transition(&healthy, &healthy, now), []);
    let mut found = BTreeSet::new();
    for (id, broken, by) in of_a_state
        .into_iter()
        .map(|(id, broken)| (id, broken, "Group::validate"))
        .chain(of_a_step.into_iter().map(|(id, broken)| (id, broken, "validate_transition")))
    {
        let mut group = healthy.clone();
        broken(&mut group);
        let violations = match by {
            "Group::validate" => group.validate(),
            _ => validate_transition(&healthy, &group, now),
        };
        assert!(violations.iter().any(|violation| violation.invariant == id), "{id}: {violations:?}");
        assert!(violations.iter().all(|violation| INVARIANTS.contains(&violation.invariant)));
        assert!(violations.iter().all(|violation| !violation.detail.is_empty()), "where: {violations:?}");
        assert!(rows().contains(&(id, by)), "{id} is checked by {by}");
        found.insert(id);
    }
    assert_eq!(found, INVARIANTS.iter().copied().collect(), "each of them");
}

#[test]
fn a_shard_on_hold_may_stay_with_its_holder_but_not_be_granted_anew() {
    let mut before = healthy();
    let until = before.updated_at.plus(1_000);
    let (member_id, cause) = ("x".to_owned(), HoldCause::OwnershipViolation);
    let (since, moves) = (before.updated_at, false);
    let hold =
        Hold { shard_index: 1, member_id, instance_id: None, sequence: None, cause, until, since, moves };
    before.holds.push(hold);
    let now = before.updated_at;
    assert_eq!(validate_transition(&before, &before, now), []);
    let mut after = before.clone();
    after.metadata_version += 1;
    after.metadata_token = "next".to_owned();
    let stamp = Grant { metadata_version: after.metadata_version, left_out: false };
    after.members.get_mut("p").unwrap().granted.insert(1, stamp);
    let found = validate_transition(&before, &after, now);
    assert_eq!(found.iter().map(|violation| violation.invariant).collect::<Vec<_>>(), ["hold-blocks-grant"]);
    assert_eq!(validate_transition(&before, &after, until), [], "once it has ended");
}
