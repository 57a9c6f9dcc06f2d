//! Scenarios of `old_client.py`, which knows none of the additions, while Redis loses writes in every way that
//! protocol 5 names, loses the key, or the group is deleted and created again.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

// The proxies of a test run on while it waits for a process.
mod support;

use std::collections::BTreeSet;

use rsc_protocol::GroupKey;
use rsc_protocol::admin::{GroupResponse, GroupState};
use rsc_protocol::keys::Keys;
use serde_json::json;
use support::{
    Api, Daemon, Journal, Member, OldClient, Proxy, RedisServer, group_path, monitored_path, wait_until,
};

/// Short, where a test waits for its end.
const SHORT_MS: u64 = 2_000;
/// Long, where a test must do something before it ends.
const LONG_MS: u64 = 5_000;
const SHARDS: usize = 6;

/// Old clients that reach whichever coordinator the proxy leads to.
struct World {
    redis: RedisServer,
    daemon: Daemon,
    api: Api,
    front: Proxy,
    group: GroupKey,
    lease_ms: u64,
}

fn daemon(redis_url: &str, lease_ms: u64) -> Daemon {
    Daemon::builder(&["--redis-url", redis_url]).lease(lease_ms, 10_000).start()
}

impl World {
    async fn start(shards: usize, lease_ms: u64) -> Self {
        let redis = RedisServer::start();
        let url = redis.url();
        World::on(redis, &url, shards, lease_ms).await
    }

    /// The same with a coordinator that reaches Redis by `url`.
    async fn on(redis: RedisServer, url: &str, shards: usize, lease_ms: u64) -> Self {
        let daemon = daemon(url, lease_ms);
        let api = daemon.api();
        let group = api.create_stream("orders", shards as u32).await;
        let front = Proxy::to(daemon.port()).await;
        World { redis, daemon, api, front, group, lease_ms }
    }

    fn key(&self) -> String {
        Keys::default().metadata(&self.group)
    }

    /// Its own lease is what ADR 0012 tells such clients: nine tenths of the coordinator's.
    fn client(&self, id: &str) -> OldClient {
        let url = format!("http://127.0.0.1:{}", self.front.port());
        OldClient::start(&url, &self.group, id, self.lease_ms as f64 / 1_000.0 * 0.9)
    }

    async fn dump(&self) -> Vec<u8> {
        self.redis.dump(&self.key()).await.unwrap()
    }

    async fn restore(&self, dump: &[u8]) {
        self.redis.restore(&self.key(), dump).await;
    }

    /// The coordinator is gone, and whatever it knew: Redis falls back to `dump`.
    async fn fall_back_unnoticed(&mut self, dump: &[u8]) {
        self.front.lead_to(None);
        self.daemon.kill();
        self.restore(dump).await;
        self.daemon = daemon(&self.redis.url(), self.lease_ms);
        self.api = self.daemon.api();
    }

    fn let_them_in(&self) {
        self.front.lead_to(Some(self.daemon.port()));
    }

    async fn version(&self) -> u64 {
        self.redis.aggregate(&self.group).await.unwrap()["metadataVersion"].as_u64().unwrap()
    }

    async fn metric(&self, name: &str) -> f64 {
        self.api.metric(name).await
    }

    /// The group is `STABLE`, without a round, and these members read all of it, each shard once.
    async fn settle(&self, clients: &[&OldClient], shards: usize) {
        let path = group_path(&self.group);
        wait_until("everybody has its share and no round is on", async || {
            let answer = self.api.get(&path).await;
            let Some(aggregate) = self.redis.aggregate(&self.group).await else { return false };
            if !answer.status.is_success() || aggregate["metadataCorrection"].is_object() {
                return false;
            }
            let shown: GroupResponse = answer.read();
            let shares: Vec<BTreeSet<u32>> = clients.iter().map(|client| client.settled_on()).collect();
            shown.state == GroupState::Stable
                && shown.live_members == clients.len()
                && shares.iter().map(BTreeSet::len).sum::<usize>() == shards
                && shares.iter().flatten().collect::<BTreeSet<_>>().len() == shards
        })
        .await;
        let shown = self.api.get(&format!("{}/assignments", monitored_path(&self.group))).await.success();
        assert_eq!(shown["invariantViolations"], json!([]), "{shown}");
    }
}

/// They leave in good order; what they have read when.
fn journal_of(clients: Vec<OldClient>) -> Journal {
    let journal = Journal::default();
    for mut client in clients {
        assert_eq!(client.leave().code(), Some(0));
        client.note_in(&journal);
    }
    journal
}

fn heard(client: &OldClient, event: &str) -> usize {
    client.lines().iter().filter(|line| line.event == event).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_join_and_higher_versions_are_noticed_by_a_coordinator_that_saw_nothing() {
    let mut world = World::start(SHARDS, LONG_MS).await;
    let (o0, o1) = (world.client("o0"), world.client("o1"));
    world.settle(&[&o0, &o1], SHARDS).await;
    let dump = world.dump().await;
    let o2 = world.client("o2");
    world.settle(&[&o0, &o1, &o2], SHARDS).await;
    world.fall_back_unnoticed(&dump).await;
    world.let_them_in();
    world.settle(&[&o0, &o1, &o2], SHARDS).await;
    assert!(world.metric("rsc_evidence_of_loss_total").await >= 2.0, "of the known ones and the unknown one");
    assert!(world.metric("rsc_correction_begun_total").await >= 1.0);
    assert_eq!(world.metric("rsc_metadata_version_regression_total").await, 0.0);
    assert!(heard(&o2, "UNKNOWN_MEMBER_ID") >= 1);
    assert!(heard(&o0, "SYNC_METADATA") + heard(&o1, "SYNC_METADATA") >= 1);
    // What o0 reads in the record, o2 reads in the lost future: granted to nobody in the young round.
    journal_of(vec![o0, o1, o2]).expect_one_reader_at_a_time();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn higher_epoch_at_the_stored_version_brings_an_old_client_back_without_a_break() {
    let mut world = World::start(1, LONG_MS).await;
    let o0 = world.client("o0");
    world.settle(&[&o0], 1).await;
    let epoch_of = |aggregate: &str| -> u64 {
        let live: serde_json::Value = serde_json::from_str(aggregate).unwrap();
        live["memberEpoch"].as_u64().unwrap()
    };
    let epoch = async || {
        let live = world.redis.metadata_field(&world.group, "live:o0").await.unwrap();
        epoch_of(&live)
    };
    // A standby joins; o0's new epoch is recorded with its next lease, and moves no version. That lease is lost.
    let mut standbys = 0;
    let (before, old, version) = loop {
        let old = epoch().await;
        standbys += 1;
        Member::simple(&world.api, &world.group, &format!("standby-{standbys}")).beat().await;
        let (dump, version) = (world.dump().await, world.version().await);
        if epoch().await == old {
            break (dump, old, version);
        }
    };
    wait_until("o0 has its new epoch", async || epoch().await > old && heard(&o0, "OK") > 0).await;
    assert_eq!(world.version().await, version);
    world.fall_back_unnoticed(&before).await;
    world.let_them_in();
    wait_until("the loss is noticed", async || world.metric("rsc_evidence_of_loss_total").await > 0.0).await;
    assert_eq!(world.version().await, version);
    assert!(heard(&o0, "SYNC_METADATA") >= 1);
    // Who stood by says nothing more and expires.
    world.settle(&[&o0], 1).await;
    assert_eq!(heard(&o0, "lease over"), 0);
    assert_eq!(heard(&o0, "FENCED_MEMBER_EPOCH"), 0);
    journal_of(vec![o0]).expect_one_reader_at_a_time();
}

/// Redis forgets that `o0` was given half of the shards, which it reads; it has no newer epoch for that. The
/// coordinator is another one. Also returned: the version that was reached.
async fn grant_is_lost() -> (World, OldClient, u64) {
    let mut world = World::start(SHARDS, LONG_MS).await;
    let mut giver = Member::new(&world.api, &world.group, "giver");
    giver.drains_slowly = true;
    giver.beat().await;
    let o0 = world.client("o0");
    wait_until("o0 waits for half of the shards, and has the epoch that they come with", async || {
        giver.beat().await;
        giver.draining.len() == SHARDS / 2 && heard(&o0, "OK") >= 2
    })
    .await;
    let dump = world.dump().await;
    giver.finish_drains();
    giver.beat().await;
    wait_until("o0 reads", async || o0.settled_on().len() == SHARDS / 2).await;
    let version = world.version().await;
    world.fall_back_unnoticed(&dump).await;
    assert!(world.version().await < version);
    (world, o0, version)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn higher_version_alone_brings_an_old_client_back_to_what_redis_has() {
    let (world, o0, _) = grant_is_lost().await;
    world.let_them_in();
    wait_until("o0 is told Redis's truth", async || heard(&o0, "SYNC_METADATA") >= 1).await;
    assert_eq!(world.metric("rsc_correction_begun_total").await, 1.0);
    assert_eq!(world.metric("rsc_metadata_version_regression_total").await, 0.0);
    let told = o0.lines().into_iter().find(|line| line.event == "SYNC_METADATA").unwrap();
    assert!(told.reading.is_empty(), "the giver has it all in the record: {told:?}");
    // The giver is silent and expires; then everything is o0's.
    world.settle(&[&o0], SHARDS).await;
    assert_eq!(heard(&o0, "FENCED_MEMBER_EPOCH"), 0);
    journal_of(vec![o0]).expect_one_reader_at_a_time();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_history_of_the_same_version_is_seen_by_what_an_old_client_claims() {
    let (world, o0, version) = grant_is_lost().await;
    // As many transitions as were lost, but others. Without a token the numbers say nothing.
    let mut newcomers = Vec::new();
    while world.version().await < version {
        newcomers.push(Member::new(&world.api, &world.group, &format!("n{}", newcomers.len())));
        newcomers.last_mut().unwrap().beat().await;
    }
    assert_eq!(world.version().await, version);
    assert!(!newcomers.is_empty());
    world.let_them_in();
    wait_until("o0 is fenced for what it cannot have", async || heard(&o0, "FENCED_MEMBER_EPOCH") >= 1).await;
    assert_eq!(world.metric("rsc_ownership_violation_total").await, 1.0);
    assert_eq!(world.metric("rsc_correction_begun_total").await, 0.0, "nothing else shows it");
    for newcomer in &mut newcomers {
        newcomer.leave().await;
    }
    // The giver is in the record again, and expires.
    world.settle(&[&o0], SHARDS).await;
    journal_of(vec![o0]).expect_one_reader_at_a_time();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn losses_that_the_running_actor_notices_cost_an_old_client_nothing() {
    let world = World::start(SHARDS, LONG_MS).await;
    let (o0, o1) = (world.client("o0"), world.client("o1"));
    world.settle(&[&o0, &o1], SHARDS).await;
    let read = [o0.settled_on(), o1.settled_on()];
    // Some renewals are lost; then everything is the same but the history.
    let dump = world.dump().await;
    let beats = heard(&o0, "OK");
    wait_until("o0 has renewed its lease", async || heard(&o0, "OK") > beats).await;
    world.restore(&dump).await;
    wait_until("the actor has noticed", async || {
        world.metric("rsc_metadata_version_regression_total").await == 1.0
    })
    .await;
    world.settle(&[&o0, &o1], SHARDS).await;
    world.redis.command::<()>(&["HSET", &world.key(), "writeId", "another history"]).await;
    wait_until("the actor has noticed", async || {
        world.metric("rsc_metadata_version_regression_total").await == 2.0
    })
    .await;
    world.settle(&[&o0, &o1], SHARDS).await;
    for (client, read) in [&o0, &o1].into_iter().zip(&read) {
        assert_eq!(&client.settled_on(), read);
        assert!(heard(client, "REVOKE_PENDING") >= 1);
        let interrupted: Vec<_> =
            client.lines().into_iter().skip_while(|line| line.reading != *read).collect();
        assert!(interrupted.iter().all(|line| line.reading == *read), "{interrupted:?}");
    }
    journal_of(vec![o0, o1]).expect_one_reader_at_a_time();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn older_dumps_put_back_again_and_again_under_one_coordinator_make_no_second_reader() {
    let world = World::start(SHARDS, SHORT_MS).await;
    let empty = world.dump().await;
    let mut clients = vec![world.client("o0"), world.client("o1")];
    world.settle(&clients.iter().collect::<Vec<_>>(), SHARDS).await;
    let two = world.dump().await;
    clients.push(world.client("o2"));
    world.settle(&clients.iter().collect::<Vec<_>>(), SHARDS).await;
    // A record of two of them, one of none, and one of the two again, older than what has happened since.
    for (number, dump) in [&two, &empty, &two].into_iter().enumerate() {
        world.restore(dump).await;
        wait_until("the actor has noticed", async || {
            world.metric("rsc_metadata_version_regression_total").await > number as f64
        })
        .await;
        world.settle(&clients.iter().collect::<Vec<_>>(), SHARDS).await;
    }
    journal_of(clients).expect_one_reader_at_a_time();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn group_deleted_and_created_again_takes_its_old_clients_in_as_newcomers() {
    let world = World::start(SHARDS, SHORT_MS).await;
    let (o0, o1) = (world.client("o0"), world.client("o1"));
    world.settle(&[&o0, &o1], SHARDS).await;
    let api = world.api.clone();
    let forced = json!({"requestedBy": "test", "reason": "to begin again", "force": true});
    // o1 hears of it, o0 does not: it reads on for its lease, and nobody is granted anything meanwhile.
    world.front.lead_to(None);
    api.delete(&group_path(&world.group), &forced).await.success();
    api.create_group(&world.group, SHARDS as u32).await;
    let mut newcomer = Member::new(&api, &world.group, "newcomer");
    let granted_at = async {
        wait_until("the newcomer is granted something", async || {
            newcomer.beat().await;
            !newcomer.owned.is_empty()
        })
        .await;
        support::monotonic_us()
    }
    .await;
    newcomer.leave().await;
    world.let_them_in();
    world.settle(&[&o0, &o1], SHARDS).await;
    assert_eq!(world.metric("rsc_correction_begun_total").await, 0.0);
    let journal = Journal::default();
    journal.note(support::Reading {
        shard: 0,
        reader: "newcomer".to_owned(),
        from_us: granted_at,
        until_us: granted_at + 2,
    });
    let lease_over = [&o0, &o1].iter().all(|client| heard(client, "lease over") == 1);
    assert!(lease_over, "both read until their leases were over");
    for mut client in [o0, o1] {
        assert_eq!(client.leave().code(), Some(0));
        client.note_in(&journal);
    }
    assert!(journal.double_readings(0).is_empty(), "{:?}", journal.double_readings(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn key_that_is_lost_for_longer_than_a_lease_stops_old_clients_until_it_is_back() {
    let world = World::start(SHARDS, SHORT_MS).await;
    let (o0, o1) = (world.client("o0"), world.client("o1"));
    world.settle(&[&o0, &o1], SHARDS).await;
    let dump = world.dump().await;
    world.redis.command::<()>(&["DEL", &world.key()]).await;
    wait_until("both have stopped", async || {
        [&o0, &o1].iter().all(|client| heard(client, "lease over") == 1 && heard(client, "refused") > 3)
    })
    .await;
    assert!(world.redis.dump(&world.key()).await.is_none(), "their joins create nothing");
    world.restore(&dump).await;
    world.settle(&[&o0, &o1], SHARDS).await;
    journal_of(vec![o0, o1]).expect_one_reader_at_a_time();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn key_that_vanishes_between_enter_and_commit_and_comes_back_costs_an_old_client_nothing() {
    let redis = RedisServer::start();
    let proxy = Proxy::to(redis.port()).await;
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    let world = World::on(redis, &url, SHARDS, LONG_MS).await;
    let o0 = world.client("o0");
    world.settle(&[&o0], SHARDS).await;
    for turn in 1..=3 {
        let mut commit = proxy.hold_next("memberLeaseExpiresAt");
        commit.reached().await;
        let dump = world.dump().await;
        world.redis.command::<()>(&["DEL", &world.key()]).await;
        commit.let_go();
        wait_until("the client is refused", async || heard(&o0, "refused") >= turn).await;
        assert!(world.redis.dump(&world.key()).await.is_none());
        world.restore(&dump).await;
        world.settle(&[&o0], SHARDS).await;
    }
    assert_eq!(heard(&o0, "lease over"), 0);
    assert_eq!(heard(&o0, "OK"), o0.lines().len() - 1 - heard(&o0, "refused"), "{:?}", o0.lines());
    journal_of(vec![o0]).expect_one_reader_at_a_time();
}
