//! Scenarios of members that come, go, crash and get fenced while the shard count changes, of no members at all, and of
//! many shards (protocol 4, 6).

mod support;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rand::RngExt;
use rsc_protocol::Status;
use rsc_protocol::resharding::MigrationState;
use serde_json::json;
use support::{
    Consumer, Crew, Daemon, DaemonBuilder, Ledger, Member, Producer, RedisServer, Refresh, Routes, Source,
    Stream, beat_until_stable, monitored_path, settle, wait_until,
};

fn configure(daemon: DaemonBuilder) -> DaemonBuilder {
    daemon.lease(1_000, 2_000).short_caches()
}

#[tokio::test]
async fn members_join_leave_and_crash_through_every_migration_and_nothing_is_lost() {
    let redis = RedisServer::start();
    let daemons = [configure(Daemon::redis(&redis)).start(), configure(Daemon::redis(&redis)).start()];
    let apis = daemons.each_ref().map(Daemon::api);
    let stream = Stream::create(&apis[0], "orders", 6, &["a", "b"]).await;
    let (routes, ledger) = (Routes::to(&[&apis[0], &apis[1]]), Ledger::default());
    let source = Source::new(&redis, &ledger).await;
    let crews: Vec<Crew> = stream.groups.iter().map(|group| Crew::reading(group, &routes, &source)).collect();
    let mut consumers: Vec<Vec<Consumer>> = crews.iter().map(|crew| crew.start_many(3)).collect();
    let mut running = Vec::new();
    for (group, refresh) in stream.groups.iter().zip([Refresh::Early, Refresh::Late]) {
        let producer = Producer::new(&redis, group, &routes, &ledger, refresh).await;
        running.push(producer.run(Duration::from_millis(3)));
    }
    let mut going = Vec::new();
    let mut rng = rand::rng();
    let targets = [
        (9, "KEEP", false),
        (2, "DELETE", false),
        (7, "KEEP", true),
        (3, "KEEP", false),
        (5, "DELETE", false),
    ];
    for (round, (target, retire, back)) in targets.into_iter().enumerate() {
        let id = stream.scale_with(target, &json!({"retire": retire})).await.resharding_id;
        if back {
            stream.roll_back(&id).await;
        }
        let mut change = 0;
        wait_until("the migration is over", async || {
            // One comes and one goes, in both groups, again and again.
            change += 1;
            if change % 20 == 1 && change < 120 {
                for (crew, consumers) in crews.iter().zip(&mut consumers) {
                    consumers.push(crew.start(&format!("n{round}-{change}")));
                    let gone = consumers.swap_remove(rng.random_range(0..consumers.len()));
                    going.push(match change % 40 {
                        1 => tokio::spawn(gone.crash()),
                        _ => tokio::spawn(gone.leave()),
                    });
                }
            }
            let rows = stream.migration(&id).await;
            rows.iter().all(|row| row.state.is_over())
        })
        .await;
    }
    for gone in going {
        gone.await.unwrap_or_default();
    }
    for producer in running {
        let produced = producer.stop().await;
        assert_eq!(produced.unpublished, 0, "{produced:?}");
    }
    stream.expect_settled_at(5).await;
    for ((crew, consumers), group) in crews.iter().zip(&consumers).zip(&stream.groups) {
        settle(&apis[1], group, consumers, 5).await;
        crew.journal.expect_one_reader_at_a_time();
    }
    ledger.expect_all_read(&stream.groups).await;
    assert!(ledger.len() > 500, "{}", ledger.len());
}

/// A stream of three shards in which one member holds a removed shard that is empty, and a migration waits for it.
async fn held_by_a_member(
    redis: &RedisServer,
    daemon: &Daemon,
    prefix: &str,
) -> (Stream, String, Vec<Member>) {
    let stream = Stream::create(&daemon.api(), prefix, 3, &["a"]).await;
    let mut members: Vec<Member> =
        ["m0", "m1", "m2"].iter().map(|id| Member::new(&daemon.api(), stream.group(), id)).collect();
    members.iter_mut().for_each(|member| member.drains_slowly = true);
    wait_until("everybody has one shard", async || {
        for member in &mut members {
            member.beat().await;
            member.finish_drains();
        }
        members.iter().all(|member| member.owned.len() == 1 && member.draining.is_empty())
    })
    .await;
    let id = stream.scale_with(2, &json!({"retire": "DELETE"})).await.resharding_id;
    wait_until("one drains the removed shard", async || {
        for member in &mut members {
            member.beat().await;
        }
        members.iter().any(|member| member.draining.contains_key(&2))
    })
    .await;
    wait_until("the migration waits for it", async || {
        for member in &mut members {
            member.beat().await;
        }
        stream.migration(&id).await[0].waits_for == "members still hold shards 2, which are empty"
    })
    .await;
    assert!(stream.shard_keys(redis).await.contains(&2));
    (stream, id, members)
}

#[tokio::test]
async fn a_removed_shard_whose_holder_crashes_leaves_or_is_fenced_is_free_in_the_end() {
    let redis = RedisServer::start();
    let daemon = configure(Daemon::redis(&redis)).start();
    for way in ["crash", "leave", "fenced", "replaced"] {
        let (stream, id, mut members) = held_by_a_member(&redis, &daemon, way).await;
        let at = members.iter().position(|member| member.draining.contains_key(&2)).unwrap_or_default();
        let mut holder = members.swap_remove(at);
        match way {
            "leave" => assert_eq!(holder.leave().await.status, Status::Ok),
            // Another process comes up under its id, and the former one goes on.
            "replaced" => {
                let mut successor = Member::new(&daemon.api(), stream.group(), holder.id());
                successor.beat().await;
                members.push(successor);
            }
            _ => {}
        }
        let mut answers = BTreeSet::new();
        wait_until(&format!("the migration ends although its holder is gone: {way}"), async || {
            for member in &mut members {
                member.beat().await;
                member.finish_drains();
            }
            if way == "fenced" {
                answers.insert(holder.beat().await.status.as_str());
            }
            stream.migration(&id).await[0].state == MigrationState::Deprecated
        })
        .await;
        assert_eq!(answers.contains(Status::FencedMemberEpoch.as_str()), way == "fenced", "{answers:?}");
        stream.expect_settled_at(2).await;
        assert_eq!(stream.shard_keys(&redis).await, BTreeSet::from([0, 1]));
    }
}

#[tokio::test]
async fn a_stream_without_any_member_is_scaled_by_what_redis_shows() {
    let redis = RedisServer::start();
    let daemon = configure(Daemon::redis(&redis)).start();
    let stream = Stream::create(&daemon.api(), "orders", 2, &["a", "b"]).await;
    for (target, retire) in [(6, "KEEP"), (1, "DELETE"), (0, "DELETE"), (3, "KEEP")] {
        let id = stream.scale_with(target, &json!({"retire": retire})).await.resharding_id;
        stream.wait_for(&id, MigrationState::Deprecated).await;
        let count = u32::try_from(target).unwrap_or_default();
        stream.expect_settled_at(count).await;
        assert_eq!(stream.shard_keys(&redis).await, (0..count).collect());
    }
    // Members that come later read from the beginning.
    let ledger = Ledger::default();
    let routes = Routes::to(&[&daemon.api()]);
    let mut producer = Producer::new(&redis, stream.group(), &routes, &ledger, Refresh::Late).await;
    for number in 0..30 {
        assert!(producer.publish(&format!("key{number}")).await.is_ok());
    }
    let source = Source::new(&redis, &ledger).await;
    let crews = stream.groups.iter().map(|group| Crew::reading(group, &routes, &source));
    let consumers: Vec<Consumer> = crews.map(|crew| crew.start("late")).collect();
    ledger.expect_all_read(&stream.groups).await;
    drop(consumers);
}

#[tokio::test]
async fn a_thousand_shards_and_back_with_twenty_members_whose_heartbeats_keep_flowing() {
    let redis = RedisServer::start();
    // Nobody's lease ends, however slow the machine is.
    let daemon = Daemon::redis(&redis).lease(20_000, 40_000).short_caches().start();
    let stream = Stream::create(&daemon.api(), "orders", 12, &["a"]).await;
    let routes = Routes::to(&[&daemon.api()]);
    let crew = Crew::new(stream.group(), &routes);
    let consumers = crew.start_many(20);
    settle(&daemon.api(), stream.group(), &consumers, 12).await;
    let mut figures = Vec::new();
    for (target, retire) in [(1_000, "KEEP"), (12, "DELETE")] {
        let asked = Instant::now();
        let id = stream.scale_with(target, &json!({"retire": retire})).await.resharding_id;
        let answered = asked.elapsed();
        stream.wait_for(&id, MigrationState::Deprecated).await;
        let ended = asked.elapsed();
        settle(&daemon.api(), stream.group(), &consumers, usize::try_from(target).unwrap_or_default()).await;
        figures.push(format!(
            "to {target}: answered after {answered:?}, ended after {ended:?}, settled after {:?}",
            asked.elapsed()
        ));
    }
    let mut slowest = Duration::ZERO;
    let mut answers = 0;
    for consumer in consumers {
        let id = consumer.id().to_owned();
        let seen = consumer.leave().await;
        slowest = slowest.max(seen.slowest);
        answers += seen.answers.values().sum::<u64>();
        // Whoever is busy is told to try again; nobody is put out, and nothing fails.
        let others: Vec<&String> =
            seen.answers.keys().filter(|name| !matches!(name.as_str(), "OK" | "RETRY")).collect();
        assert!(others.is_empty(), "{id}: {:?}", seen.answers);
    }
    crew.journal.expect_one_reader_at_a_time();
    report(&format!("{figures:#?}, the slowest of {answers} heartbeats was answered after {slowest:?}"));
    assert_eq!(stream.shard_keys(&redis).await, (0..12).collect());
    let shown = daemon.api().get(&format!("{}/assignments", monitored_path(stream.group()))).await.success();
    assert_eq!(shown["invariantViolations"], json!([]));
}

/// Figures for whoever runs this test with `--no-capture`.
#[expect(clippy::print_stderr, reason = "figures are what is wanted here")]
fn report(figures: &str) {
    eprintln!("{figures}");
}

#[tokio::test]
async fn a_member_that_joins_while_shards_drain_gets_some_of_them() {
    let redis = RedisServer::start();
    let daemon = configure(Daemon::redis(&redis)).start();
    let stream = Stream::create(&daemon.api(), "orders", 4, &["a"]).await;
    for shard in [2, 3] {
        redis.command::<String>(&["XADD", &stream.key(shard), "*", "k", "v"]).await;
    }
    let mut members = vec![Member::new(&daemon.api(), stream.group(), "m0")];
    beat_until_stable(&daemon.api(), stream.group(), &mut members).await;
    let id = stream.scale(2).await;
    stream.wait_for(&id, MigrationState::Draining).await;
    members.push(Member::new(&daemon.api(), stream.group(), "m1"));
    beat_until_stable(&daemon.api(), stream.group(), &mut members).await;
    assert!(members.iter().all(|member| member.owned.len() == 2), "what drains is shared like the rest");
    for member in &members {
        let owners = stream.migration(&id).await[0].drain.clone();
        for row in owners.iter().filter(|row| member.owned.contains(&row.shard_index)) {
            assert_eq!(row.owner.as_deref(), Some(member.id()));
        }
    }
    for shard in [2, 3] {
        redis.command::<u64>(&["XTRIM", &stream.key(shard), "MAXLEN", "0"]).await;
    }
    wait_until("it is over", async || {
        beat_until_stable(&daemon.api(), stream.group(), &mut members).await;
        stream.migration(&id).await[0].state == MigrationState::Deprecated
    })
    .await;
    assert!(members.iter().all(|member| member.owned.len() == 1));
}
