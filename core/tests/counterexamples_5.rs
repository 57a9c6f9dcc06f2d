//! How earlier drafts of the correction round broke: each row of the design's counterexamples about section 5
//! that the state machine decides, under its name.

mod support;

use rsc_core::{HoldCause, RawFields};
use rsc_protocol::Status;
use rsc_protocol::admin::{GroupState, MemberState};
use support::rounds::*;
use support::*;

#[test]
fn sync_for_a_zombie() {
    // Two processes of one id; the record takes the second for the accepted one.
    let (mut bench, mut zombie, mut m) = two_of_four();
    let mut living = Client::full("p", "p-2");
    living.beat(&mut bench);
    living.beat(&mut bench);
    notice(&mut bench);
    for ahead in [0, 5] {
        zombie.version = bench.group().metadata_version + ahead;
        let answer = zombie.beat_in_vain(&mut bench);
        assert_eq!(answer.status, Status::FencedMemberEpoch, "never SYNC_METADATA");
        assert_eq!(answer.member_epoch, 0, "and never its successor's epoch");
        assert_eq!(answer.assignment_lease_ms, 0);
    }
    assert_ne!(status_of(&mut living, &mut bench), Status::FencedMemberEpoch);
    m.beat(&mut bench);
    assert_eq!(bench.group().members["p"].instance_id.as_deref(), Some("p-2"));
}

#[test]
fn round_waits_for_itself() {
    let (mut bench, mut p) = lost_grant();
    // p claims 2 and 3, which are its target and nobody's.
    p.beat(&mut bench);
    assert_eq!(p.owned, [0, 1, 2, 3]);
    assert_eq!(bench.group().holds, [], "held against p, they would keep the round open for ever");
    live_for(&mut bench, LEASE, &mut [&mut p]);
    assert_eq!(status_of(&mut p, &mut bench), Status::Ok);
    assert_eq!(bench.group().state, GroupState::Stable);
}

#[test]
fn everybody_differs_again() {
    // Twelve members; in the round each has one shard to give back, and each release moves the version.
    let mut bench = Bench::new(24);
    let mut clients: Vec<Client> =
        (0..12).map(|i| Client::full(&format!("m{i:02}"), &format!("i-{i}"))).collect();
    settle(&mut bench, &mut clients.iter_mut().collect::<Vec<_>>());
    notice(&mut bench);
    for i in 0..12 {
        let mut joiner = Client::full(&format!("n{i:02}"), &format!("j-{i}"));
        joiner.beat(&mut bench);
    }
    let version = bench.group().metadata_version;
    for client in &mut clients {
        assert_eq!(client.beat_draining(&mut bench).status, Status::SyncMetadata, "others have joined");
        assert_eq!(client.draining.len(), 1);
    }
    assert_eq!(bench.group().metadata_version, version);
    // One heartbeat interval later all of them release: that of the first makes everybody else differ.
    bench.pass(3_000);
    for client in &mut clients {
        assert_eq!(client.beat(&mut bench).status, Status::RevokePending, "{} has synchronised", client.id);
    }
    let group = bench.group();
    assert_eq!(group.metadata_version, version + 12);
    assert!(clients.iter().all(|client| group.members[&client.id].current.len() == 1));
}

#[test]
fn broken_client_freezes_the_group() {
    // Every kind: an absurd version, one that is always ahead, a token of its own, an epoch nobody gave it.
    for kind in 0..4 {
        let (mut bench, mut p, mut m) = two_of_four();
        let mut rounds_over = 0;
        let mut was_on = false;
        let end = bench.now.plus(5 * REBALANCE);
        let mut last_round_at = bench.now;
        while bench.now < end {
            let mut request = m.request(&mut bench, true);
            if m.epoch > 0 {
                match kind {
                    0 => request.metadata_version = 1 << 50,
                    1 => request.metadata_version = bench.group().metadata_version + 1,
                    2 => request.metadata_token = Some("of-its-own".to_owned()),
                    _ => request.member_epoch += 7,
                }
                request.metadata_version = request.metadata_version.max(bench.group().metadata_version);
            }
            let answer = bench.send(request);
            m.apply(&answer);
            p.beat(&mut bench);
            let is_on = is_round_on(&bench);
            rounds_over += u32::from(was_on && !is_on);
            if is_on {
                last_round_at = bench.now;
            }
            was_on = is_on;
            bench.pass(3_000);
        }
        assert_eq!(rounds_begun(&bench), 1, "kind {kind}");
        assert_eq!((rounds_over, was_on), (1, false), "kind {kind}");
        assert!(last_round_at.since(end) <= -3 * REBALANCE, "kind {kind}: over soon");
        assert!(bench.group().members["p"].is_live());
    }
}

#[test]
fn second_loss_in_a_round() {
    // The first loss, everybody synchronised, the round nearly a lease old.
    let (mut bench, mut p, mut m) = lost_leave();
    p.beat(&mut bench);
    let old_round = bench.mark();
    let began_at = round(&bench).requested_at;
    live_until(&mut bench, began_at.plus(LEASE - 1_000), &mut [&mut p, &mut m]);
    let second = bench.mark();
    // It ends, m leaves, p reads everything; then Redis comes back with the old round in the record.
    live_until(&mut bench, began_at.plus(LEASE), &mut [&mut p, &mut m]);
    let leave = bench.request("m").epoch(-1).version(m.version).revoked(&m.owned).instance("m-1", 9_000);
    bench.send(leave);
    live_for(&mut bench, LEASE, &mut [&mut p]);
    assert_eq!(p.owned, [0, 1, 2, 3]);
    for mark in [second, old_round + 1] {
        let (mut bench, mut p) = (bench.clone(), p.clone());
        bench.restore(mark);
        bench.may_expire = false;
        assert!(is_round_on(&bench) && bench.now > round(&bench).requested_at.plus(LEASE));
        let mut q = Client::full("q", "q-1");
        p.beat_in_vain(&mut bench);
        assert_eq!(round(&bench).requested_at, bench.now, "its age begins anew");
        assert!(is_on_hold(&bench, 2) && is_on_hold(&bench, 3), "and so does what p holds once per round");
        let end = bench.now.plus(LEASE);
        while bench.now < end {
            assert_eq!(p.beat_in_vain(&mut bench).status, Status::SyncMetadata);
            let answer = q.beat(&mut bench);
            assert!(assigned(&answer).is_empty(), "{:?}", answer.status);
            assert!(!has_synchronised(&bench, "p"));
            bench.pass(1_000);
        }
    }
}

#[test]
fn second_loss_in_a_round_noticed_by_the_actor() {
    let (mut bench, mut p, mut m) = round_by_actor();
    live_for(&mut bench, LEASE - 1_000, &mut [&mut p, &mut m]);
    assert!(has_synchronised(&bench, "p"));
    notice(&mut bench);
    assert_eq!((round(&bench).requested_at, round(&bench).acknowledged_members.len()), (bench.now, 0));
    assert!(!has_synchronised(&bench, "p"));
    bench.pass(LEASE - 1);
    bench.tick();
    assert!(is_round_on(&bench));
    assert_eq!(bench.group().live_members().count(), 2, "young again: nobody expires");
}

#[test]
fn two_holders_in_a_round() {
    let (mut bench, mut p, mut m) = lost_leave();
    p.beat(&mut bench);
    m.beat(&mut bench);
    // p has synchronised and goes on claiming 2 and 3, which are m's.
    for _ in 0..3 {
        p.draining.clear();
        p.owned = vec![0, 1, 2, 3];
        p.beat_in_vain(&mut bench);
        let group = bench.group();
        assert_eq!(group.members["p"].current, [0, 1].into());
        assert_eq!(group.members["m"].holding(), [2, 3].into());
        assert_eq!(group.validate(), []);
        m.beat(&mut bench);
        bench.pass(1_000);
    }
    // m gives 3 up: on hold for p, it is still nobody's to take into current, for neither of them.
    m.owned = vec![2];
    m.beat(&mut bench);
    assert_eq!(p.beat_in_vain(&mut bench).status, Status::RevokePending);
    let group = bench.group();
    assert_eq!(group.members["p"].current, [0, 1].into());
    assert!(!group.holders().contains_key(&3));
}

#[test]
fn same_number_other_history() {
    // p and m were answered a version that Redis lost; another history reaches the same number.
    let (mut bench, mut p, mut m) = two_of_four();
    let mark = bench.mark();
    let leave = bench.request("m").epoch(-1).version(m.version).revoked(&m.owned).instance("m-1", 9_000);
    bench.send(leave);
    p.beat(&mut bench);
    assert_eq!(p.owned, [0, 1, 2, 3]);
    bench.restore(mark);
    bench.may_expire = false;
    // Nobody has noticed: a joiner moves the version to the number that p has seen.
    let mut q = Client::full("q", "q-1");
    while bench.group().metadata_version < p.version {
        q.id = format!("q{}", bench.group().metadata_version);
        q.epoch = 0;
        q.beat(&mut bench);
    }
    assert_eq!(bench.group().metadata_version, p.version);
    assert_ne!(bench.group().metadata_token, p.token);
    // What identifies the two states for the store differs as well (its tests prove that it is compared).
    let answer = p.beat(&mut bench);
    assert_eq!((answer.status, rounds_begun(&bench)), (Status::SyncMetadata, 1));
    assert!(is_on_hold(&bench, 2) && is_on_hold(&bench, 3));
    assert_eq!(bench.group().members["m"].holding(), [2, 3].into());
    m.beat(&mut bench);
}

#[test]
fn same_number_other_history_without_tokens_is_caught_by_the_ownership_check() {
    let mut bench = Bench::new(4);
    let (mut p, mut m) = (Client::old("p"), Client::old("m"));
    settle(&mut bench, &mut [&mut p, &mut m]);
    let mark = bench.mark();
    let leave = bench.request("m").epoch(-1).version(m.version).revoked(&m.owned);
    bench.send(leave);
    p.beat(&mut bench);
    assert_eq!(p.owned, [0, 1, 2, 3]);
    bench.restore(mark);
    for number in 0.. {
        if bench.group().metadata_version >= p.version {
            break;
        }
        Client::old(&format!("q{number}")).beat(&mut bench);
    }
    // The epochs do not help either.
    p.epoch = i64::try_from(bench.group().members["p"].live.member_epoch).unwrap();
    assert_eq!(bench.group().metadata_version, p.version);
    assert_eq!(p.beat(&mut bench).status, Status::FencedMemberEpoch);
    let group = bench.group();
    let held: Vec<u32> = group.holds.iter().map(|hold| hold.shard_index).collect();
    assert_eq!(held, [0, 1, 2, 3]);
    assert!(group.holds.iter().all(|hold| hold.cause == HoldCause::OwnershipViolation));
}

#[test]
fn rollback_expires_everybody() {
    // Lost lease renewals: after the rollback every lease in the record is over.
    let (mut bench, mut p, mut m) = two_of_four();
    let mark = bench.mark();
    live_for(&mut bench, 4 * LEASE, &mut [&mut p, &mut m]);
    bench.restore(mark);
    assert!(lease_end(&bench, "p") < bench.now && lease_end(&bench, "m") < bench.now);
    // The actor finds a record older than its own last commit: it is out of service and begins a round.
    bench.may_expire = false;
    notice(&mut bench);
    bench.may_expire = true;
    live_for(&mut bench, 2 * LEASE, &mut [&mut p, &mut m]);
    assert_eq!(bench.group().state, GroupState::Stable);
    assert_eq!((&p.owned[..], &m.owned[..]), (&[0, 1][..], &[2, 3][..]), "nobody lost its place");
    assert!(bench.counts.iter().all(|counts| counts.leases_expired == 0));
}

#[test]
fn time_jumps_forward_in_a_round() {
    let (mut bench, mut p, mut m) = lost_leave();
    p.beat(&mut bench);
    m.beat(&mut bench);
    // Redis time jumps by an hour: holds and leases end in the record, not in the world.
    bench.pass(3_600_000);
    bench.may_grant = false;
    bench.may_expire = false;
    let mut q = Client::full("q", "q-1");
    for _ in 0..5 {
        assert!(assigned(&q.beat(&mut bench)).is_empty());
        p.beat_draining(&mut bench);
        m.beat(&mut bench);
        assert!(is_round_on(&bench), "it ends no round");
        bench.pass(3_000);
    }
    bench.may_grant = true;
    bench.may_expire = true;
    settle(&mut bench, &mut [&mut p, &mut m, &mut q]);
    assert!(!is_round_on(&bench));
}

#[test]
fn a_dump_with_other_members_is_put_back() {
    // x and y are in the dump, dead for long; p and m have worked since.
    let mut bench = Bench::new(4);
    let (mut x, mut y) = (Client::full("x", "x-1"), Client::full("y", "y-1"));
    settle(&mut bench, &mut [&mut x, &mut y]);
    let dump: RawFields = bench.fields.clone();
    bench.pass(2 * LEASE);
    let (mut p, mut m) = (Client::full("p", "p-1"), Client::full("m", "m-1"));
    settle(&mut bench, &mut [&mut p, &mut m]);
    assert_eq!(p.owned.len() + m.owned.len(), 4);
    bench.fields = dump;
    bench.may_expire = false;
    // An instance that just started; the first sign comes from a member that nobody knows.
    let (reading, since) = (p.owned.clone(), bench.now);
    assert_eq!(p.beat(&mut bench).status, Status::UnknownMemberId);
    assert_eq!(m.beat_in_vain(&mut bench).status, Status::UnknownMemberId, "its answer is lost: it reads on");
    assert!((0..4).all(|shard| is_on_hold(&bench, shard)), "{reading:?}");
    while bench.now.since(since) < LEASE {
        let answer = p.beat(&mut bench);
        assert!(assigned(&answer).is_empty(), "while m may be reading");
        bench.pass(3_000);
    }
    bench.may_expire = true;
    live_for(&mut bench, LEASE, &mut [&mut p]);
    assert_eq!(bench.group().members["x"].state, MemberState::Expired);
    m.notice_time(bench.now.plus(LEASE));
    settle(&mut bench, &mut [&mut p, &mut m]);
    assert_eq!((p.owned.len(), m.owned.len()), (2, 2));
}

#[test]
fn a_zombie_without_instance_is_not_covered_by_what_its_successor_reports() {
    // p reads 2 from a lost future; a second process without instanceId takes its place and reads nothing.
    let mut bench = Bench::new(4);
    let (mut p, mut m) = (Client::old("p"), Client::old("m"));
    settle(&mut bench, &mut [&mut p, &mut m]);
    let mark = bench.mark();
    let leave = bench.request("m").epoch(-1).version(m.version).revoked(&m.owned);
    bench.send(leave);
    settle(&mut bench, &mut [&mut p]);
    bench.restore(mark);
    // The round is old; p has just been heard for the last time.
    let begun = bench.now;
    while bench.now < begun.plus(2 * LEASE) {
        p.beat_in_vain(&mut bench);
        m.beat(&mut bench);
        bench.pass(3_000);
    }
    let reads_until = lease_end(&bench, "p");
    let mut second = Client::old("p");
    second.beat(&mut bench);
    m.owned.clear();
    while bench.now < reads_until {
        for client in [&mut second, &mut m] {
            let answer = client.beat(&mut bench);
            assert!(assigned(&answer).iter().all(|shard| ![2, 3].contains(shard)), "p may be reading it");
        }
        bench.pass(1_000);
    }
    settle(&mut bench, &mut [&mut second, &mut m]);
}
