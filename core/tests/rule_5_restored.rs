//! A record of former times that an operator has put back (protocol 3 and 5; ADR 0018).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use rsc_core::write::WriteKind;
use rsc_core::{RawFields, lifecycle, load};
use rsc_protocol::Status;
use rsc_protocol::admin::GroupState;
use serde_json::{Value, json};
use support::rounds::two_of_four;
use support::*;

/// Puts `fields` back as `rsc restore` does.
fn restore(bench: &mut Bench, fields: &RawFields, observed: u64) -> rsc_core::Write {
    let loaded = load(&bench.key, fields, &bench.settings).unwrap();
    let restoration = lifecycle::restore(loaded, bench.now, observed);
    bench.fields = fields.clone();
    bench.store(&restoration.write);
    assert_eq!(bench.group(), restoration.group, "what is stored is what was decided");
    assert_eq!(bench.group().validate(), []);
    restoration.write
}

#[test]
fn protocol_3_a_restored_record_is_the_former_one_and_a_round() {
    let (mut bench, ..) = two_of_four();
    bench.fields.insert("live:nobody".to_owned(), b"{}".to_vec());
    let (backup, before) = (bench.fields.clone(), bench.group());
    bench.pass(3_600_000);
    let write = restore(&mut bench, &backup, 77);
    let WriteKind::Structural { revision, .. } = write.kind else { panic!("{write:?}") };
    assert_eq!(revision, before.store_revision + 1);
    let group = bench.group();
    assert_eq!(group.updated_at, bench.now);
    let round = group.metadata_correction.clone().unwrap();
    assert_eq!(round.requested_at, bench.now);
    assert_eq!(
        (round.target_metadata_version, round.observed_metadata_version),
        (before.metadata_version, 77)
    );
    let mut as_before = group;
    as_before.metadata_correction = None;
    as_before.store_revision = before.store_revision;
    as_before.updated_at = before.updated_at;
    assert_eq!(as_before, before, "nothing else: no version, no target, no lease");
    assert_eq!(write.removed_live, ["nobody"], "a live field without its member");
    let history: Value = serde_json::from_str(&write.history.unwrap()).unwrap();
    assert_eq!(history["transitions"][0], json!({"type": "RESTORED"}));
    assert_eq!(history["transitions"][1]["type"], json!("CORRECTION_BEGUN"));
}

/// The record knows nobody, a coordinator that has just started neither, and `q` reads everything.
#[test]
fn protocol_5_nothing_is_granted_after_a_restore_before_a_lease_has_passed() {
    let mut bench = Bench::new(4);
    let backup = bench.fields.clone();
    let mut q = Client::full("q", "q-1");
    settle(&mut bench, &mut [&mut q]);
    assert_eq!(q.owned, [0, 1, 2, 3]);
    let observed = bench.group().metadata_version;
    restore(&mut bench, &backup, observed);

    let mut c = Client::full("c", "c-1");
    let began = bench.now;
    while bench.now.since(began) < LEASE {
        let request = c.request(&mut bench, true);
        let answer = bench.send(request);
        assert_eq!(assigned(&answer), [0_u32; 0], "{} ms after the restore", bench.now.since(began));
        c.apply(&answer);
        bench.pass(1_000);
    }
    settle(&mut bench, &mut [&mut c]);
    assert_eq!(c.owned, [0, 1, 2, 3], "q has said nothing, and its lease is over");
}

#[test]
fn protocol_5_members_of_the_lost_future_come_back_by_way_of_sync_metadata() {
    let (mut bench, mut p, mut m) = two_of_four();
    let backup = bench.fields.clone();
    let mut c = Client::full("c", "c-1");
    settle(&mut bench, &mut [&mut p, &mut m, &mut c]);
    assert_eq!(c.owned.len(), 1);
    let observed = bench.group().metadata_version;
    restore(&mut bench, &backup, observed);

    for client in [&mut p, &mut m] {
        let request = client.request(&mut bench, false);
        let answer = bench.send(request);
        assert_eq!(answer.status, Status::SyncMetadata, "{answer:?}");
        client.apply(&answer);
    }
    let request = c.request(&mut bench, false);
    let answer = bench.send(request);
    assert_eq!(answer.status, Status::UnknownMemberId);
    c.apply(&answer);
    for _ in 0..40 {
        for client in [&mut p, &mut m, &mut c] {
            client.beat(&mut bench);
        }
        bench.pass(1_000);
    }
    assert_eq!(bench.group().metadata_correction, None);
    assert_eq!(bench.group().state, GroupState::Stable);
    let mut owned = [&p.owned[..], &m.owned, &c.owned].concat();
    owned.sort_unstable();
    assert_eq!(owned, [0, 1, 2, 3]);
}
