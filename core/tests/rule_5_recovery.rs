//! Redis loses its last writes at every moment of a life with joins, leaves, restarts and crashes: whatever
//! it lost, the group becomes `STABLE` again within a lease and a rebalance timeout, and no shard is read
//! twice beyond what the protocol says remains (protocol 5).
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use std::collections::BTreeMap;

use rsc_protocol::admin::GroupState;
use rsc_protocol::{Status, Timestamp};
use support::rounds::*;
use support::*;

const SHARDS: u32 = 6;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Full,
    Old,
    Legacy,
}

fn client(kind: Kind, id: &str, run: u32) -> Client {
    match kind {
        Kind::Full => Client::full(id, &format!("{id}-{run}")),
        Kind::Old => Client::old(id),
        Kind::Legacy => Client::legacy(id),
    }
}

/// The processes that run, and when each was allowed what it reads.
#[derive(Clone)]
struct World {
    bench: Bench,
    kind: Kind,
    processes: Vec<Process>,
}

#[derive(Clone)]
struct Process {
    client: Client,
    started: BTreeMap<u32, Timestamp>,
    beats: u32,
}

impl World {
    fn start(&mut self, id: &str, run: u32) {
        let client = client(self.kind, id, run);
        self.processes.push(Process { client, started: BTreeMap::new(), beats: 0 });
    }

    /// A process that is gone without a word.
    fn crash(&mut self, id: &str) {
        self.processes.retain(|process| process.client.id != id);
    }

    fn beat(&mut self, index: usize) -> Status {
        let Process { client, started, beats } = &mut self.processes[index];
        client.notice_time(self.bench.now);
        *beats += 1;
        // A client with drains takes three heartbeats for one.
        let finish = *beats % 3 == 0 || self.kind == Kind::Legacy;
        let answer =
            if finish { client.beat(&mut self.bench) } else { client.beat_draining(&mut self.bench) };
        started.retain(|shard, _| client.owned.contains(shard) || client.draining.contains(shard));
        for shard in &client.owned {
            started.entry(*shard).or_insert(self.bench.now);
        }
        assert_ne!(answer.status, Status::InvalidRequest, "{answer:?}");
        answer.status
    }

    fn leave(&mut self, id: &str) {
        let Some(index) = self.processes.iter().position(|process| process.client.id == id) else { return };
        let mut leaver = self.processes.remove(index).client;
        leaver.draining.append(&mut leaver.owned);
        let request = leaver.request(&mut self.bench, true).epoch(-1);
        self.bench.send(request);
    }

    fn is_stable(&self) -> bool {
        let group = self.bench.group();
        let reading: usize = self.processes.iter().map(|process| process.client.owned.len()).sum();
        group.state == GroupState::Stable
            && group.metadata_correction.is_none()
            && reading == usize::try_from(SHARDS).unwrap()
    }

    /// Two readers of a shard, if there are: when the younger of their grants was given.
    fn read_twice(&self) -> Option<(u32, Timestamp)> {
        let mut readers: BTreeMap<u32, Timestamp> = BTreeMap::new();
        for process in &self.processes {
            for shard in process.client.touches(self.bench.now) {
                let started = process.started[&shard];
                if let Some(other) = readers.insert(shard, started) {
                    return Some((shard, started.max(other)));
                }
            }
        }
        None
    }
}

/// A life of the group, and how the world was after each heartbeat of it.
fn life(kind: Kind) -> Vec<World> {
    let mut world = World { bench: Bench::new(SHARDS), kind, processes: Vec::new() };
    let mut moments = Vec::new();
    let mut go_on = |world: &mut World, rounds: u32| {
        for _ in 0..rounds {
            for index in 0..world.processes.len() {
                world.beat(index);
                assert_eq!(world.read_twice(), None);
                world.bench.pass(400);
                moments.push(world.clone());
            }
            world.bench.pass(1_800);
        }
    };
    world.start("a", 1);
    go_on(&mut world, 2);
    world.start("b", 1);
    go_on(&mut world, 4);
    world.start("c", 1);
    go_on(&mut world, 4);
    world.leave("b");
    go_on(&mut world, 2);
    world.start("b", 2);
    go_on(&mut world, 5);
    world.crash("a");
    world.start("a", 2);
    go_on(&mut world, 6);
    world.crash("c");
    go_on(&mut world, 10);
    assert!(world.is_stable());
    moments
}

/// What follows after Redis has lost `writes` writes; the time until everybody is stable again.
fn recover(mut world: World, writes: usize, noticed: bool) -> i64 {
    let lost_at = world.bench.now;
    let mark = world.bench.mark().saturating_sub(writes);
    world.bench.restore(mark);
    let mut sign = None;
    // The instance that finds this record has just started, or is behind its own last commit.
    world.bench.may_expire = false;
    if noticed {
        notice(&mut world.bench);
    }
    let before = rounds_begun(&world.bench) - u64::from(noticed);
    loop {
        let now = world.bench.now;
        world.bench.may_expire = now.since(lost_at) >= LEASE;
        for index in 0..world.processes.len() {
            world.beat(index);
            if sign.is_none() && rounds_begun(&world.bench) > before {
                sign = Some(now);
            }
            if let Some((shard, granted_at)) = world.read_twice() {
                let unaware = granted_at >= lost_at && sign.is_none_or(|sign| granted_at <= sign);
                assert!(
                    unaware && now.since(lost_at) < LEASE,
                    "shard {shard} is read twice {} ms after the loss of {writes} writes",
                    now.since(lost_at)
                );
            }
        }
        if world.is_stable() {
            return now.since(lost_at);
        }
        assert!(
            now.since(lost_at) <= LEASE + REBALANCE,
            "not stable after the loss of {writes} writes: {:#?}",
            world.bench.group()
        );
        world.bench.pass(3_000);
    }
}

fn recovers_from_every_loss(kind: Kind) {
    let moments = life(kind);
    let last = moments.last().unwrap();
    for writes in 1..=last.bench.mark() {
        recover(last.clone(), writes, writes % 2 == 0);
    }
    for (number, moment) in moments.iter().enumerate() {
        // A third of these for each moment, another one each time.
        for (_, writes) in [1, 2, 3, 5, 8, 13].into_iter().enumerate().filter(|(i, _)| (i + number) % 3 == 0)
        {
            let mut world = moment.clone();
            // Who speaks first is another one each time.
            let processes = world.processes.len();
            world.processes.rotate_left(number % processes);
            if writes <= world.bench.mark() {
                recover(world, writes, (number + writes) % 4 == 0);
            }
        }
    }
}

#[test]
fn rule_5_recovers_from_every_loss_with_all_additions() {
    recovers_from_every_loss(Kind::Full);
}

#[test]
fn rule_5_recovers_from_every_loss_without_additions() {
    recovers_from_every_loss(Kind::Old);
}

#[test]
fn rule_5_recovers_from_every_loss_with_clients_that_know_no_drains() {
    recovers_from_every_loss(Kind::Legacy);
}
