//! Scenarios of `redis.wait-replicas` (protocol 12): what replicas may not have is handed to nobody, and whoever reads goes
//! on reading.

mod support;

use rsc_protocol::Status;
use support::redis_topologies::{RedisSentinel, SentinelSettings};
use support::{Api, Daemon, DaemonBuilder, Member, beat_until_stable, wait_until};

fn daemon(redis: &RedisSentinel) -> DaemonBuilder {
    let urls = redis.sentinel_urls().join(",");
    Daemon::builder(&["--redis-mode", "sentinel"])
        .set("redis", "urls", &urls)
        .set("redis", "sentinel-master", redis.name())
        .long_lease()
        .set("redis", "command-timeout", "900ms")
        .set("redis", "wait-replicas", "1")
}

async fn health(api: &Api) -> serde_json::Value {
    api.get("/coord/v1/monitoring/health").await.success()
}

#[tokio::test]
async fn nobody_starts_a_shard_that_replicas_may_not_know_of() {
    let redis = RedisSentinel::start_with(SentinelSettings {
        replicas: 1,
        // The master stays master, however long the replica is away.
        down_after_ms: 60_000,
        ..Default::default()
    });
    let (one, other) = (daemon(&redis).start(), daemon(&redis).start());
    let group = one.api().create_stream("orders", 6).await;
    let mut members = vec![Member::new(&one.api(), &group, "a")];
    beat_until_stable(&one.api(), &group, &mut members).await;
    assert_eq!(members[0].owned.len(), 6);
    assert_eq!(health(&one.api()).await["status"], "UP");

    redis.cut_replication();
    let mut newcomer = Member::new(&one.api(), &group, "b");
    assert_eq!(newcomer.beat().await.status, Status::Ok);
    let mut old = members.remove(0);
    // It gives three back. Whichever instance is asked: its own shards stay its, and the newcomer gets none.
    for api in [one.api(), other.api(), one.api(), other.api()] {
        old.talk_to(&api);
        newcomer.talk_to(&api);
        assert_eq!(old.beat().await.status, Status::Ok);
        let answer = newcomer.beat().await;
        assert_eq!((answer.status, newcomer.owned.len()), (Status::Ok, 0), "{answer:?}");
    }
    assert_eq!((old.owned.len(), old.draining.len()), (3, 0));
    let answer = newcomer.beat().await;
    assert_eq!(answer.assignment.pending_shards.len(), 3, "{answer:?}");
    assert!(answer.assignment.assigned_shards.is_empty(), "{answer:?}");
    for api in [one.api(), other.api()] {
        let health = health(&api).await;
        assert_eq!(
            (&health["status"], &health["unreplicatedGroups"]),
            (&"DEGRADED".into(), &1.into()),
            "{health}"
        );
        assert!(health["reason"].as_str().unwrap().contains("redis.wait-replicas"), "{health}");
        assert!(api.metric("rsc_replica_shortfall_total").await > 0.0);
    }
    assert!(one.log().contains("replicas do not have the last commit"), "{}", one.log());

    redis.resume(1);
    wait_until("the newcomer has its shards", async || {
        newcomer.beat().await;
        newcomer.owned.len() == 3
    })
    .await;
    for (daemon, member) in [(&one, &mut old), (&other, &mut newcomer)] {
        member.talk_to(&daemon.api());
        assert_eq!(member.beat().await.status, Status::Ok);
        wait_until("the instance has seen that replicas have it", async || {
            // The next commit that is waited behind says so.
            let mut passer_by = Member::new(&daemon.api(), &group, "c");
            passer_by.beat().await;
            passer_by.leave().await;
            health(&daemon.api()).await["unreplicatedGroups"] == 0
        })
        .await;
        assert_eq!(health(&daemon.api()).await["status"], "UP");
    }
}

/// Found by an attacker: waits for a replica that is away held up the lease renewals of all groups.
#[tokio::test]
async fn a_dead_replica_holds_up_no_lease_of_many_groups() {
    let redis = RedisSentinel::start_with(SentinelSettings {
        replicas: 1,
        down_after_ms: 60_000,
        ..Default::default()
    });
    let daemon = daemon(&redis).start();
    let api = daemon.api();
    let mut members = Vec::new();
    for number in 0..24 {
        let group = api.create_stream(&format!("orders{number}"), 4).await;
        let mut one = vec![Member::new(&api, &group, "a")];
        beat_until_stable(&api, &group, &mut one).await;
        members.append(&mut one);
    }
    redis.cut_replication();
    let joining: Vec<Member> = members.iter().map(|member| Member::new(&api, member.group(), "b")).collect();
    let all = members.into_iter().chain(joining);
    let beating = all.map(|mut member| {
        tokio::spawn(async move {
            for _ in 0..4 {
                assert_eq!(member.beat().await.status, Status::Ok);
            }
            (member.id().to_owned(), member.owned.len())
        })
    });
    for beaten in beating.collect::<Vec<_>>() {
        let (id, owned) = beaten.await.unwrap();
        // Who reads gives two back, who joins gets nothing.
        assert_eq!(owned, if id == "a" { 2 } else { 0 });
    }
    // Whoever joins starts with nothing, whatever it claims to read.
    let group = rsc_protocol::GroupKey::new("orders0", "orders0").unwrap();
    let mut claims = support::heartbeat("c");
    claims.owned_shards = (0..4).map(|shard_index| rsc_protocol::ShardRef { shard_index }).collect();
    let answer = api.heartbeat(&group, &claims).await;
    assert!(answer.assignment.assigned_shards.is_empty(), "{answer:?}");
    let body = serde_json::json!({"requestedBy": "test", "reason": "test", "force": true});
    for number in 0..24 {
        let group =
            rsc_protocol::GroupKey::new(format!("orders{number}"), format!("orders{number}")).unwrap();
        api.delete(&support::group_path(&group), &body).await.success();
    }
    assert_eq!(health(&api).await["unreplicatedGroups"], 0, "deleted groups are nobody's trouble");
}
