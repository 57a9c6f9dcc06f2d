//! Scenarios of clients that were written before anything was added to the protocol: `old_client.py` talks to
//! the coordinator beside clients of today.

mod support;

use std::collections::BTreeSet;

use rsc_protocol::GroupKey;
use rsc_protocol::admin::{GroupResponse, GroupState};
use rsc_protocol::keys::Keys;
use support::{Api, Consumer, Crew, Daemon, OldClient, RedisServer, Routes, group_path, wait_until};

const LEASE_MS: u64 = 1_500;
const SHARDS: usize = 12;

fn start(daemon: &Daemon, group: &GroupKey, id: &str) -> OldClient {
    OldClient::start(&daemon.url(), group, id, LEASE_MS as f64 / 1_000.0)
}

/// Waits until the group is `STABLE` with exactly these members and each shard is read by one of them, evenly.
async fn settle(api: &Api, group: &GroupKey, old: &[&OldClient], modern: &[&Consumer]) {
    wait_until("everybody has its share", async || {
        let answer = api.get(&group_path(group)).await;
        if !answer.status.is_success() {
            return false;
        }
        let shown: GroupResponse = answer.read();
        let mut shares: Vec<BTreeSet<u32>> = old.iter().map(|client| client.settled_on()).collect();
        shares.extend(modern.iter().map(|client| client.seen().reading));
        let read: BTreeSet<u32> = shares.iter().flatten().copied().collect();
        let even = SHARDS / shares.len()..=SHARDS.div_ceil(shares.len());
        shown.state == GroupState::Stable
            && shown.live_members == shares.len()
            && modern.iter().all(|client| client.seen().settled)
            && shares.iter().all(|share| even.contains(&share.len()))
            && shares.iter().map(BTreeSet::len).sum::<usize>() == SHARDS
            && read.len() == SHARDS
    })
    .await;
}

#[tokio::test]
async fn old_clients_and_modern_ones_share_a_group_and_never_a_shard() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).lease(LEASE_MS, 3_000).start();
    let api = daemon.api();
    let group = api.create_stream("orders", SHARDS as u32).await;
    let crew = Crew::new(&group, &Routes::to(&[&api]));

    let mut old = ["o0", "o1", "o2"].map(|id| start(&daemon, &group, id));
    let m0 = crew.start("m0");
    let m1 = crew.start("m1");
    settle(&api, &group, &[&old[0], &old[1], &old[2]], &[&m0, &m1]).await;

    old[1].kill();
    settle(&api, &group, &[&old[0], &old[2]], &[&m0, &m1]).await;

    let late = start(&daemon, &group, "o3");
    let m2 = crew.start("m2");
    settle(&api, &group, &[&old[0], &old[2], &late], &[&m0, &m1, &m2]).await;

    assert_eq!(old[0].leave().code(), Some(0));
    settle(&api, &group, &[&old[2], &late], &[&m0, &m1, &m2]).await;

    m0.crash().await;
    // Under the name of the one that was killed.
    let again = start(&daemon, &group, "o1");
    settle(&api, &group, &[&old[2], &late, &again], &[&m1, &m2]).await;

    m1.leave().await;
    m2.leave().await;
    let [o0, o1, o2] = old;
    for mut client in [o2, late, again] {
        assert_eq!(client.leave().code(), Some(0));
        client.note_in(&crew.journal);
    }
    o0.note_in(&crew.journal);
    o1.note_in(&crew.journal);
    crew.journal.expect_one_reader_at_a_time();
    wait_until("the group is empty", async || api.group(&group).await.state == GroupState::Empty).await;
}

#[tokio::test]
async fn record_rolled_back_under_old_clients_heals_and_costs_at_most_one_lease_of_double_reading() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis).lease(LEASE_MS, 3_000).start();
    let api = daemon.api();
    let group = api.create_stream("orders", SHARDS as u32).await;
    let crew = Crew::new(&group, &Routes::to(&[&api]));
    let o0 = start(&daemon, &group, "o0");
    let o1 = start(&daemon, &group, "o1");
    settle(&api, &group, &[&o0, &o1], &[]).await;
    let key = Keys::default().metadata(&group);
    let dump = redis.dump(&key).await.unwrap();
    let o2 = start(&daemon, &group, "o2");
    settle(&api, &group, &[&o0, &o1, &o2], &[]).await;

    // Redis loses everything since: the third member, what was given back for it, and their leases.
    redis.restore(&key, &dump).await;
    settle(&api, &group, &[&o0, &o1, &o2], &[]).await;
    for mut client in [o0, o1, o2] {
        assert_eq!(client.leave().code(), Some(0));
        client.note_in(&crew.journal);
    }
    let too_long = crew.journal.double_readings(LEASE_MS * 1_000);
    assert!(too_long.is_empty(), "{too_long:#?}");
}
