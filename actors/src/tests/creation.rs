//! Creating streams and groups (protocol 3, 6, 8).

use std::time::Duration;

use futures_util::future::join_all;
use rsc_protocol::Status;
use rsc_protocol::admin::GroupState;
use rsc_protocol::keys::Keys;

use super::faults::{Fault, TestStore};
use super::member::Member;
use super::redis_server::RedisServer;
use super::{
    code, create, delete_request, eventually, group_request, in_system, key, memory_store, orders, patient,
    record, start, stream_request,
};

/// The consumer groups that exist on each shard of `orders`.
fn consumer_groups(server: &RedisServer, shards: u32) -> Vec<Vec<String>> {
    (0..shards)
        .map(|shard| {
            let stream = format!("orders:{shard}");
            if !server.exists(&stream) {
                return Vec::new();
            }
            let groups: Vec<redis::streams::StreamInfoGroup> = server
                .run::<redis::streams::StreamInfoGroupsReply>(redis::cmd("XINFO").arg("GROUPS").arg(&stream))
                .groups;
            let mut names: Vec<String> = groups.into_iter().map(|group| group.name).collect();
            names.sort();
            names
        })
        .collect()
}

/// Nothing of a group is left but perhaps a tombstone.
fn assert_no_trace(server: &RedisServer, group: &rsc_protocol::GroupKey) {
    let keys = Keys::default();
    for name in [keys.metadata(group), keys.mutex(group), keys.history(group)] {
        assert!(!server.exists(&name), "{name} is left");
    }
    let in_index: bool = server.run(redis::cmd("SISMEMBER").arg(keys.groups()).arg(keys.metadata(group)));
    assert!(!in_index, "left in the index");
    assert!(!server.exists(&keys.stream_mutex(group.stream_prefix())), "the stream is still locked");
}

#[test]
fn a_stream_comes_with_its_groups_and_their_consumer_groups_on_every_shard() {
    in_system(async {
        let server = RedisServer::start();
        let coordinator = start(patient("a"), &server.store());
        let created = coordinator
            .create_stream("orders", stream_request(Some(3), &["billing", "audit"]))
            .await
            .unwrap();
        assert_eq!((created.shard_count, created.metadata_version), (3, 1));
        assert_eq!(created.consumer_groups, ["billing", "audit"]);
        assert_eq!(consumer_groups(&server, 3), vec![vec!["audit", "billing"]; 3]);
        for name in ["billing", "audit"] {
            let group = record(&coordinator, &key("orders", name)).await;
            assert!(!group.provisioning_pending);
            assert_eq!((group.shard_count, group.state), (3, GroupState::Empty));
            Member::new("m1").beat_ok(&coordinator, &key("orders", name)).await;
        }
        let again = coordinator.create_stream("orders", stream_request(None, &["third"])).await;
        assert_eq!(code(again), "STREAM_PREFIX_ALREADY_EXISTS");
        assert_eq!(coordinator.groups().await.unwrap().groups.len(), 2);
    });
}

#[test]
fn a_stream_without_further_wishes_has_the_default_count_and_one_group_of_its_name() {
    in_system(async {
        let coordinator = start(patient("a"), &memory_store());
        let mut request = stream_request(None, &[]);
        request.consumer_groups = None;
        let created = coordinator.create_stream("orders", request).await.unwrap();
        assert_eq!((created.shard_count, created.consumer_groups), (12, vec!["orders".to_owned()]));
    });
}

#[test]
fn a_later_group_takes_the_streams_count() {
    in_system(async {
        let server = RedisServer::start();
        let coordinator = start(patient("a"), &server.store());
        create(&coordinator, &orders(), 3).await;
        let mismatch = coordinator.create_group(&key("orders", "audit"), group_request(Some(4))).await;
        assert_eq!(code(mismatch), "SHARD_COUNT_MISMATCH");
        let created = coordinator.create_group(&key("orders", "audit"), group_request(None)).await.unwrap();
        assert_eq!(created.shard_count, 3);
        let again = coordinator.create_group(&key("orders", "audit"), group_request(Some(3))).await;
        assert_eq!(code(again), "GROUP_ALREADY_EXISTS");
        assert_eq!(consumer_groups(&server, 3), vec![vec!["audit", "billing"]; 3]);
        // An index that has forgotten the first group does not change the count.
        let keys = Keys::default();
        let _: i64 = server.run(redis::cmd("DEL").arg(keys.groups()));
        let third = coordinator.create_group(&key("orders", "third"), group_request(None)).await.unwrap();
        assert_eq!(third.shard_count, 3);
    });
}

#[test]
fn what_cannot_be_is_refused_and_leaves_nothing() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let coordinator = start(patient("a"), &store);
        let stream = |change: fn(&mut rsc_protocol::admin::CreateStreamRequest)| {
            let mut request = stream_request(Some(3), &["billing"]);
            change(&mut request);
            let coordinator = coordinator.clone();
            async move { code(coordinator.create_stream("orders", request).await) }
        };
        let invalid: [fn(&mut rsc_protocol::admin::CreateStreamRequest); 13] = [
            |request| request.requested_by = String::new(),
            |request| request.requested_by = "  ".to_owned(),
            |request| request.requested_by = "x".repeat(513),
            |request| request.reason = Some("x".repeat(1_025)),
            |request| request.initial_shard_count = Some(0),
            |request| request.initial_shard_count = Some(-1),
            |request| request.initial_shard_count = Some(10_001),
            |request| request.initial_shard_count = Some(i64::MAX),
            |request| request.consumer_groups = Some(Vec::new()),
            |request| request.consumer_groups = Some(vec!["a".into(), "a".into()]),
            |request| request.consumer_groups = Some(vec!["a".into(), "b{c}".into()]),
            |request| request.consumer_groups = Some(vec![" ".into()]),
            |request| request.consumer_groups = Some((0..101).map(|n| n.to_string()).collect()),
        ];
        for (at, change) in invalid.into_iter().enumerate() {
            assert_eq!(stream(change).await, "INVALID_REQUEST", "case {at}");
        }
        for prefix in ["", "a{b}", "a\u{0}b"] {
            let refused = coordinator.create_stream(prefix, stream_request(None, &["g"])).await;
            assert_eq!(code(refused), "INVALID_REQUEST", "{prefix:?}");
        }
        assert_eq!(store.calls("create") + store.calls("lock_stream"), 0);
        let mut longest = stream_request(Some(10_000), &["billing"]);
        longest.requested_by = "x".repeat(512);
        longest.reason = Some("x".repeat(1_024));
        coordinator.create_stream("orders", longest).await.unwrap();
    });
}

#[test]
fn another_group_of_the_prefix_that_is_in_motion_or_unreadable_stands_in_the_way() {
    in_system(async {
        let server = RedisServer::start();
        let coordinator = start(patient("a"), &server.store());
        create(&coordinator, &orders(), 3).await;
        let metadata = Keys::default().metadata(&orders());
        let dump: Vec<u8> = server.run(redis::cmd("DUMP").arg(&metadata));
        let aggregate: String = server.run(redis::cmd("HGET").arg(&metadata).arg("aggregate"));
        let write = |from: &str, to: &str| {
            let changed = aggregate.replace(from, to);
            assert_ne!(changed, aggregate);
            let _: i64 = server.run(redis::cmd("HSET").arg(&metadata).arg("aggregate").arg(changed));
        };
        let audit = || {
            let coordinator = coordinator.clone();
            async move { code(coordinator.create_group(&key("orders", "audit"), group_request(None)).await) }
        };
        write("\"activeReshardingId\":null", "\"activeReshardingId\":\"reshard-1\"");
        assert_eq!(audit().await, "ACTIVE_MIGRATION_EXISTS");
        write("\"metadataCorrection\":null", "\"metadataCorrection\":{\"targetMetadataVersion\":1}");
        assert_eq!(audit().await, "METADATA_SYNC_IN_PROGRESS");
        write("{", "");
        assert_eq!(audit().await, "GROUP_METADATA_CORRUPT");
        let _: i64 = server.run(redis::cmd("DEL").arg(&metadata));
        assert_eq!(audit().await, "GROUP_METADATA_MISSING");
        assert_no_trace(&server, &key("orders", "audit"));
        server.restore_metadata(&orders(), &dump);
        coordinator.create_group(&key("orders", "audit"), group_request(None)).await.unwrap();
    });
}

#[test]
fn of_parallel_creations_of_one_group_exactly_one_succeeds() {
    in_system(async {
        let server = RedisServer::start();
        let instances = [start(patient("a"), &server.store()), start(patient("b"), &server.store())];
        let creations = (0..8).map(|n: usize| {
            let coordinator = instances[n % 2].clone();
            async move { coordinator.create_group(&orders(), group_request(Some(2 + n as i64))).await }
        });
        let results = join_all(creations).await;
        let succeeded: Vec<_> = results.iter().filter_map(|result| result.as_ref().ok()).collect();
        assert_eq!(succeeded.len(), 1);
        for refusal in results.iter().filter_map(|result| result.as_ref().err()) {
            assert!(
                matches!(
                    refusal.code.as_str(),
                    "GROUP_ALREADY_EXISTS" | "COORDINATOR_STATE_MUTEX_UNAVAILABLE"
                ),
                "{refusal:?}"
            );
        }
        assert_eq!(record(&instances[0], &orders()).await.shard_count, succeeded[0].shard_count);
    });
}

#[test]
fn parallel_creations_of_different_groups_of_one_prefix_agree_on_the_count() {
    in_system(async {
        let server = RedisServer::start();
        let instances = [start(patient("a"), &server.store()), start(patient("b"), &server.store())];
        let creations = (0..6).map(|n: usize| {
            let (coordinator, group) = (instances[n % 2].clone(), key("orders", &format!("g{n}")));
            async move { coordinator.create_group(&group, group_request(Some(2 + n as i64))).await }
        });
        let results = join_all(creations).await;
        assert!(results.iter().any(Result::is_ok));
        let groups = instances[0].groups().await.unwrap().groups;
        assert!(groups.iter().all(|group| group.shard_count == groups[0].shard_count), "{groups:?}");
    });
}

#[test]
fn a_creation_that_cannot_be_provisioned_is_undone_wholly() {
    in_system(async {
        let server = RedisServer::start();
        let coordinator = start(patient("a"), &server.store());
        let _: () = server.run(redis::cmd("SET").arg("orders:1").arg("no stream"));
        let refused =
            coordinator.create_stream("orders", stream_request(Some(3), &["billing", "audit"])).await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.code.as_str(), "REDIS_STREAM_PROVISIONING_FAILED");
        assert!(refused.message.contains("orders:1"), "{}", refused.message);
        for name in ["billing", "audit"] {
            assert_no_trace(&server, &key("orders", name));
            let answer = Member::new("m1").beat(&coordinator, &key("orders", name)).await.unwrap();
            assert_eq!(answer.status, Status::UnknownMemberId);
        }
        let _: i64 = server.run(redis::cmd("DEL").arg("orders:1"));
        coordinator.create_stream("orders", stream_request(Some(3), &["billing", "audit"])).await.unwrap();
    });
}

#[test]
fn an_undone_creation_does_not_forget_what_the_deleted_group_had_reached() {
    in_system(async {
        let server = RedisServer::start();
        let coordinator = start(patient("a"), &server.store());
        create(&coordinator, &orders(), 3).await;
        Member::new("m1").beat_ok(&coordinator, &orders()).await;
        let reached = record(&coordinator, &orders()).await;
        coordinator.delete_group(&orders(), delete_request(true)).await.unwrap();
        let _: i64 = server.run(redis::cmd("DEL").arg("orders:1"));
        let _: () = server.run(redis::cmd("SET").arg("orders:1").arg("no stream"));
        let refused = coordinator.create_group(&orders(), group_request(Some(3))).await;
        assert_eq!(code(refused), "REDIS_STREAM_PROVISIONING_FAILED");
        assert_no_trace(&server, &orders());
        let _: i64 = server.run(redis::cmd("DEL").arg("orders:1"));
        create(&coordinator, &orders(), 3).await;
        let group = record(&coordinator, &orders()).await;
        assert!(group.metadata_version > reached.metadata_version);
        assert!(group.store_revision > reached.store_revision);
    });
}

#[test]
fn a_creation_with_lost_answers_is_complete_or_leaves_nothing() {
    in_system(async {
        let server = RedisServer::start();
        let store = TestStore::new(server.store_with(Duration::from_secs(3_600)));
        let coordinator = start(patient("a"), &store);
        let goes_well = [
            ("create", Fault::LostAfter),
            ("create", Fault::LostBefore),
            ("commit", Fault::LostAfter),
            ("commit", Fault::LostBefore),
            ("unlock_stream", Fault::LostAfter),
        ];
        for (call, fault) in goes_well {
            store.fail_next(call, fault);
            coordinator.create_group(&orders(), group_request(Some(2))).await.unwrap();
            assert!(store.all_faults_happened());
            let group = record(&coordinator, &orders()).await;
            assert!(!group.provisioning_pending, "{call} {fault:?}");
            Member::new("m1").beat_ok(&coordinator, &orders()).await;
            coordinator.delete_group(&orders(), delete_request(true)).await.unwrap();
        }
        let fails = [
            ("lock_stream", Fault::LostBefore, "REDIS_UNAVAILABLE"),
            ("index", Fault::NotSent, "REDIS_UNAVAILABLE"),
            ("read", Fault::NotSent, "REDIS_UNAVAILABLE"),
            ("renew_stream", Fault::NotSent, "REDIS_UNAVAILABLE"),
            ("create", Fault::NotSent, "REDIS_UNAVAILABLE"),
            ("index_add", Fault::LostAfter, "REDIS_UNAVAILABLE"),
            ("index_add", Fault::NotSent, "REDIS_UNAVAILABLE"),
            ("provision", Fault::LostAfter, "REDIS_STREAM_PROVISIONING_FAILED"),
        ];
        for (call, fault, expected) in fails {
            store.fail_next(call, fault);
            let refused = coordinator.create_group(&orders(), group_request(Some(2))).await;
            assert_eq!(code(refused), expected, "{call} {fault:?}");
            assert!(store.all_faults_happened());
            assert_no_trace(&server, &orders());
        }
        // The streams exist and only that could not be recorded: the group is completed by itself.
        store.fail_next("commit", Fault::NotSent);
        let refused = coordinator.create_group(&orders(), group_request(Some(2))).await;
        assert_eq!(code(refused), "REDIS_UNAVAILABLE");
        eventually("the creation is completed", || async {
            !record(&coordinator, &orders()).await.provisioning_pending
        })
        .await;
        Member::new("m1").beat_ok(&coordinator, &orders()).await;
    });
}

#[test]
fn provisioning_that_outlasts_the_mutex_keeps_it() {
    in_system(async {
        let server = RedisServer::start();
        let store = TestStore::new(server.store());
        let (creator, other) = (start(patient("a"), &store), start(patient("b"), &server.store()));
        store.hold("provision");
        let creation = {
            let creator = creator.clone();
            tokio::task::spawn_local(
                async move { creator.create_group(&orders(), group_request(Some(2))).await },
            )
        };
        // Renewed each third of the TTL: four times is longer than it.
        eventually("the mutexes were renewed", || async {
            store.calls("renew") >= 4 && store.calls("renew_stream") >= 5
        })
        .await;
        let answer = Member::new("m1").beat(&other, &orders()).await.unwrap();
        assert_eq!(answer.status, Status::Retry, "nobody is admitted before the streams exist");
        assert_eq!(code(other.routing(&orders()).await), "COORDINATOR_STATE_MUTEX_UNAVAILABLE");
        let parallel = other.create_group(&key("orders", "audit"), group_request(None)).await;
        assert_eq!(code(parallel), "COORDINATOR_STATE_MUTEX_UNAVAILABLE");
        store.let_go("provision");
        creation.await.unwrap().unwrap();
        Member::new("m1").beat_ok(&other, &orders()).await;
    });
}

#[test]
fn a_creation_whose_coordinator_was_killed_is_completed_by_another() {
    in_system(async {
        let server = RedisServer::start();
        let store = TestStore::new(server.store());
        let (killed, other) = (start(patient("a"), &store), start(patient("b"), &server.store()));
        store.hold("provision");
        let creation = {
            let killed = killed.clone();
            tokio::task::spawn_local(
                async move { killed.create_group(&orders(), group_request(Some(3))).await },
            )
        };
        eventually("the claim is made", || async { store.calls("provision") == 1 }).await;
        store.cut_off(true);
        assert_eq!(consumer_groups(&server, 3), vec![Vec::<String>::new(); 3]);
        assert!(record(&other, &orders()).await.provisioning_pending);
        let mut member = Member::new("m1");
        eventually("the member is admitted", async || {
            let answer = member.beat(&other, &orders()).await.unwrap();
            assert!(matches!(answer.status, Status::Retry | Status::Ok), "{answer:?}");
            answer.status == Status::Ok
        })
        .await;
        assert_eq!(consumer_groups(&server, 3), vec![vec!["billing"]; 3]);
        assert!(!record(&other, &orders()).await.provisioning_pending);
        store.let_go("provision");
        assert!(creation.await.unwrap().is_err());
        record(&other, &orders()).await;
    });
}

#[test]
fn a_creation_goes_on_when_its_caller_goes_away() {
    in_system(async {
        let server = RedisServer::start();
        let store = TestStore::new(server.store());
        let coordinator = start(patient("a"), &store);
        store.hold("provision");
        let creation = {
            let coordinator = coordinator.clone();
            tokio::task::spawn_local(async move {
                coordinator.create_group(&orders(), group_request(Some(2))).await
            })
        };
        eventually("the claim is made", || async { store.calls("provision") == 1 }).await;
        creation.abort();
        store.let_go("provision");
        eventually("the group is complete", || async {
            !record(&coordinator, &orders()).await.provisioning_pending
        })
        .await;
    });
}

#[test]
fn streams_are_left_alone_where_provisioning_is_off() {
    in_system(async {
        let server = RedisServer::start();
        let mut settings = patient("a");
        settings.provisioning_enabled = false;
        let coordinator = start(settings, &server.store());
        create(&coordinator, &orders(), 2).await;
        Member::new("m1").beat_ok(&coordinator, &orders()).await;
        assert_eq!(consumer_groups(&server, 2), vec![Vec::<String>::new(); 2]);
    });
}
