//! Scenes in which Redis has lost writes (protocol 5).

use rsc_core::{Command, Correction, Hold, HoldCause};
use rsc_protocol::Status;

use super::*;

/// Four shards, `p` reads 0 and 1, `m` reads 2 and 3, both with all additions, nothing lost yet.
pub fn two_of_four() -> (Bench, Client, Client) {
    let mut bench = Bench::new(4);
    let (mut p, mut m) = (Client::full("p", "p-1"), Client::full("m", "m-1"));
    settle(&mut bench, &mut [&mut p, &mut m]);
    assert_eq!((&p.owned[..], &m.owned[..]), (&[0, 1][..], &[2, 3][..]));
    bench.pass(1_000);
    (bench, p, m)
}

/// Redis lost that `m` had left and that `p` reads everything: `p` speaks from a lost future, in which it
/// was given what the record says `m` reads. Nobody has noticed yet; the process of `m` is gone.
pub fn lost_leave() -> (Bench, Client, Client) {
    let (mut bench, mut p, m) = two_of_four();
    let mark = bench.mark();
    let leave =
        bench.request("m").epoch(-1).version(m.version).revoked(&m.owned).instance("m-1", m.sequence + 1);
    bench.send(leave);
    settle(&mut bench, &mut [&mut p]);
    assert_eq!(p.owned, [0, 1, 2, 3]);
    bench.restore(mark);
    (bench, p, m)
}

/// Redis lost the grant of 2 and 3 to `p`, but not that `m` has left: they are the target of `p`, and
/// nobody's.
pub fn lost_grant() -> (Bench, Client) {
    let (mut bench, mut p, m) = two_of_four();
    let leave =
        bench.request("m").epoch(-1).version(m.version).revoked(&m.owned).instance("m-1", m.sequence + 1);
    bench.send(leave);
    let mark = bench.mark();
    settle(&mut bench, &mut [&mut p]);
    bench.restore(mark);
    assert_eq!(bench.group().target("p"), [0, 1, 2, 3].into());
    assert_eq!(bench.group().members["p"].holding(), [0, 1].into());
    (bench, p)
}

/// Redis lost that `c` had joined: it is unknown, and `p` and `m` speak from a lost future.
pub fn lost_join() -> (Bench, Client, Client, Client) {
    let (mut bench, mut p, mut m) = two_of_four();
    let mark = bench.mark();
    let mut c = Client::full("c", "c-1");
    settle(&mut bench, &mut [&mut p, &mut m, &mut c]);
    assert_eq!(c.owned.len(), 1);
    bench.restore(mark);
    (bench, p, m, c)
}

/// `p`, `m` and a round that the actor began; both are on the record's version and not synchronised.
pub fn round_by_actor() -> (Bench, Client, Client) {
    let (mut bench, p, m) = two_of_four();
    notice(&mut bench);
    (bench, p, m)
}

/// The running actor finds that Redis is behind its own last commit.
pub fn notice(bench: &mut Bench) {
    let observed_metadata_version = bench.group().metadata_version + 3;
    bench.turn(&[Command::LostWrites { observed_metadata_version }]);
}

pub fn round(bench: &Bench) -> Correction {
    bench.group().metadata_correction.expect("a round is on")
}

pub fn is_round_on(bench: &Bench) -> bool {
    bench.group().metadata_correction.is_some()
}

pub fn rounds_begun(bench: &Bench) -> u64 {
    bench.counts.iter().map(|counts| counts.corrections_begun).sum()
}

/// Whether the member's live field says that it has synchronised in the running round.
pub fn has_synchronised(bench: &Bench, id: &str) -> bool {
    bench.group().members[id].live.synchronised_at_round == Some(round(bench).requested_at)
}

/// Heartbeats of everybody every three seconds for `millis`, drains finished at once.
pub fn live_for(bench: &mut Bench, millis: i64, clients: &mut [&mut Client]) {
    live_until(bench, bench.now.plus(millis), clients);
}

/// The same until `end`.
pub fn live_until(bench: &mut Bench, end: Timestamp, clients: &mut [&mut Client]) {
    while bench.now < end {
        clients.iter_mut().for_each(|client| drop(client.beat(bench)));
        bench.pass(3_000.min(end.since(bench.now)));
    }
}

/// The holds of the round on `shard`.
pub fn lost_future_holds(bench: &Bench, shard: u32) -> Vec<Hold> {
    let of_round = |hold: &Hold| hold.cause == HoldCause::LostFuture && hold.shard_index == shard;
    bench.group().holds.into_iter().filter(of_round).collect()
}

pub fn is_on_hold(bench: &Bench, shard: u32) -> bool {
    bench.group().is_on_hold(shard, bench.now)
}

/// Sends a heartbeat and looks at its status only.
pub fn status_of(client: &mut Client, bench: &mut Bench) -> Status {
    client.beat(bench).status
}

/// Until when a member that has just been heard expires.
pub fn lease_end(bench: &Bench, id: &str) -> Timestamp {
    bench.group().members[id].live.member_lease_expires_at
}
