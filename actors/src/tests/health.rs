//! Records that are missing, unreadable or somebody else's (protocol 2, 3).

use rsc_protocol::Status;
use rsc_protocol::keys::Keys;

use super::member::Member;
use super::redis_server::RedisServer;
use super::{
    code, create, delete_request, eventually, group_request, in_system, key, metrics, orders, patient,
    record, settings, settled, start,
};

#[test]
fn a_deleted_key_fails_closed_and_a_restored_one_goes_on_with_nobody_expired() {
    in_system(async {
        metrics::record();
        let came_back = metrics::counter("rsc_out_of_service_total cause=key_came_back");
        let server = RedisServer::start();
        let mut settings = settings("a");
        // Everything between the key's return and the last line happens within one lease.
        settings.timing.member_lease_ttl_ms = 3_000;
        let lease = std::time::Duration::from_millis(3_000);
        let coordinator = start(settings, &server.store());
        create(&coordinator, &orders(), 4).await;
        let mut member = Member::new("m1");
        member.beat_ok(&coordinator, &orders()).await;
        member.beat_ok(&coordinator, &orders()).await;
        eventually("the instance is in service", async || {
            member.beat_ok(&coordinator, &orders()).await;
            coordinator.actor(&orders()).await.unwrap().in_service
        })
        .await;

        let dump = server.take_metadata(&orders());
        assert_eq!(code(member.beat(&coordinator, &orders()).await), "GROUP_METADATA_MISSING");
        let mut newcomer = Member::new("m2");
        assert_eq!(code(newcomer.beat(&coordinator, &orders()).await), "GROUP_METADATA_MISSING");
        assert_eq!(code(coordinator.routing(&orders()).await), "GROUP_METADATA_MISSING");
        let created = coordinator.create_group(&orders(), group_request(None)).await;
        assert_eq!(code(created), "GROUP_METADATA_MISSING");
        let summary = coordinator.group_summary(&orders()).await.unwrap();
        assert!(!summary.healthy);
        let status = coordinator.actor(&orders()).await.unwrap();
        assert_eq!(status.state, "UNHEALTHY");
        assert_eq!(status.error_code.map(rsc_protocol::ErrorCode::as_str), Some("GROUP_METADATA_MISSING"));
        assert_eq!(coordinator.groups().await.unwrap().missing, [Keys::default().metadata(&orders())]);
        assert!(!server.exists(&Keys::default().metadata(&orders())), "nothing is rebuilt");

        // The lease runs out while the key is gone.
        let lease_end = std::time::Instant::now() + lease;
        eventually("the lease is over", || async { std::time::Instant::now() > lease_end }).await;
        server.restore_metadata(&orders(), &dump);
        let other = Member::new("m3").beat(&coordinator, &orders()).await.unwrap();
        assert_eq!(other.status, Status::Ok);
        let group = record(&coordinator, &orders()).await;
        assert!(group.members["m1"].is_live(), "out of service: nobody is expired");
        assert!(metrics::counter("rsc_out_of_service_total cause=key_came_back") > came_back);
        member.beat_ok(&coordinator, &orders()).await;
        let status = coordinator.actor(&orders()).await.unwrap();
        assert_eq!((status.error_code, status.in_service), (None, false));
    });
}

#[test]
fn everything_gone_at_once_is_missing_for_whoever_knew_the_group() {
    in_system(async {
        let server = RedisServer::start();
        let (knows, knows_not) = (start(patient("a"), &server.store()), start(patient("b"), &server.store()));
        create(&knows, &orders(), 4).await;
        let mut member = Member::new("m1");
        member.beat_ok(&knows, &orders()).await;
        settled(&knows, &orders()).await;
        let _: () = server.run(redis::cmd("FLUSHALL").arg("SYNC"));
        assert_eq!(code(member.clone().beat(&knows, &orders()).await), "GROUP_METADATA_MISSING");
        let created = knows.create_group(&orders(), group_request(None)).await;
        assert_eq!(code(created), "GROUP_METADATA_MISSING");
        // The operator's way out.
        let deleted = knows.delete_group(&orders(), delete_request(false)).await.unwrap();
        assert!(!deleted.healthy);
        assert_eq!(deleted.metadata_version, member.version, "what was last seen of it");
        create(&knows, &orders(), 4).await;
        assert!(record(&knows, &orders()).await.metadata_version > member.version, "it starts above");
        let answer = member.beat(&knows_not, &orders()).await.unwrap();
        assert_eq!(answer.status, Status::UnknownMemberId);
    });
}

#[test]
fn an_emptied_redis_does_not_make_the_overview_green() {
    in_system(async {
        let server = RedisServer::start();
        let coordinator = start(patient("a"), &server.store());
        create(&coordinator, &orders(), 4).await;
        Member::new("m1").beat_ok(&coordinator, &orders()).await;
        let _: String = server.run(&redis::cmd("FLUSHALL"));
        let list = coordinator.groups().await.unwrap();
        assert_eq!(list.groups.len(), 1, "{list:?}");
        assert!(!list.groups[0].healthy);
        assert_eq!(list.groups[0].error_code, Some(rsc_protocol::ErrorCode::GroupMetadataMissing));
    });
}

#[test]
fn an_unreadable_record_is_shown_and_refused_and_never_written_over() {
    in_system(async {
        let server = RedisServer::start();
        let coordinator = start(patient("a"), &server.store());
        create(&coordinator, &orders(), 4).await;
        let mut member = Member::new("m1");
        member.beat_ok(&coordinator, &orders()).await;
        let metadata = Keys::default().metadata(&orders());
        let dump: Vec<u8> = server.run(redis::cmd("DUMP").arg(&metadata));
        let set = |field: &str, value: &str| {
            let _: i64 = server.run(redis::cmd("HSET").arg(&metadata).arg(field).arg(value));
        };
        for (field, value) in
            [("aggregate", "{"), ("schemaVersion", "2"), ("revision", "77"), ("layoutVersion", "9")]
        {
            set(field, value);
            set("writeId", "somebody");
            let before: Vec<u8> = server.run(redis::cmd("DUMP").arg(&metadata));
            let refused = member.beat(&coordinator, &orders()).await.unwrap_err();
            assert_eq!(refused.code.as_str(), "GROUP_METADATA_CORRUPT", "{field}");
            let summary = coordinator.group_summary(&orders()).await.unwrap();
            assert!(!summary.healthy && summary.message.is_some(), "{field}");
            let refused = coordinator.delete_group(&orders(), delete_request(false)).await.unwrap_err();
            assert_eq!(refused.code.as_str(), "GROUP_METADATA_CORRUPT", "{field}");
            assert!(refused.message.contains("force"), "{}", refused.message);
            let list = coordinator.groups().await.unwrap();
            assert!(!list.groups[0].healthy, "{field}");
            assert_eq!(server.run::<Vec<u8>>(redis::cmd("DUMP").arg(&metadata)), before, "{field}");
            server.restore_metadata(&orders(), &dump);
            // From the second time on the restored record is older than this coordinator's last commit.
            let answer = member.beat(&coordinator, &orders()).await.unwrap();
            assert!(matches!(answer.status, Status::Ok | Status::RevokePending), "{field}: {answer:?}");
            let healthy = coordinator.actor(&orders()).await.unwrap();
            assert_eq!(healthy.error_code, None, "a healthy load clears it: {field}");
        }
    });
}

#[test]
fn a_key_of_another_type_is_corrupt_until_it_is_deleted_by_force() {
    in_system(async {
        let server = RedisServer::start();
        let coordinator = start(patient("a"), &server.store());
        create(&coordinator, &orders(), 4).await;
        let mut member = Member::new("m1");
        member.beat_ok(&coordinator, &orders()).await;
        let metadata = Keys::default().metadata(&orders());
        let _: () = server.run(redis::cmd("SET").arg(&metadata).arg("text"));
        assert_eq!(code(member.beat(&coordinator, &orders()).await), "GROUP_METADATA_CORRUPT");
        let refused = coordinator.delete_group(&orders(), delete_request(false)).await;
        assert_eq!(code(refused), "GROUP_METADATA_CORRUPT");
        coordinator.delete_group(&orders(), delete_request(true)).await.unwrap();
        assert!(!server.exists(&metadata));
        create(&coordinator, &orders(), 4).await;
        assert!(record(&coordinator, &orders()).await.metadata_version > member.version);
    });
}

#[test]
fn a_pair_with_the_same_key_is_like_a_group_never_created() {
    in_system(async {
        let server = RedisServer::start();
        let coordinator = start(patient("a"), &server.store());
        let (owner, shadow) = (key("a:b", "c"), key("a", "b:c"));
        create(&coordinator, &owner, 4).await;
        let created = coordinator.create_group(&shadow, group_request(None)).await;
        assert_eq!(code(created), "GROUP_KEY_COLLISION");
        let answer = Member::new("m1").beat(&coordinator, &shadow).await.unwrap();
        assert_eq!(answer.status, Status::UnknownMemberId);
        assert_eq!(code(coordinator.group_summary(&shadow).await), "GROUP_NOT_FOUND");
        assert_eq!(code(coordinator.routing(&shadow).await), "GROUP_NOT_FOUND");
        let deleted = coordinator.delete_group(&shadow, delete_request(true)).await;
        assert_eq!(code(deleted), "GROUP_NOT_FOUND");
        Member::new("m1").beat_ok(&coordinator, &owner).await;
        // Once the owner is deleted the other may have the key, above what the owner had reached.
        let reached = record(&coordinator, &owner).await;
        coordinator.delete_group(&owner, delete_request(true)).await.unwrap();
        create(&coordinator, &shadow, 4).await;
        assert!(record(&coordinator, &shadow).await.metadata_version > reached.metadata_version);
        let answer = Member::new("m1").beat(&coordinator, &owner).await.unwrap();
        assert_eq!(answer.status, Status::UnknownMemberId);
    });
}

#[test]
fn a_ttl_on_the_key_is_removed_by_a_turn_that_has_nothing_else_to_write() {
    in_system(async {
        let server = RedisServer::start();
        let coordinator = start(patient("a"), &server.store());
        create(&coordinator, &orders(), 4).await;
        let metadata = Keys::default().metadata(&orders());
        let ttl = || server.run::<i64>(redis::cmd("PTTL").arg(&metadata));
        let _: i64 = server.run(redis::cmd("EXPIRE").arg(&metadata).arg(1_000));
        assert!(ttl() > 0);
        let mut stranger = Member::new("nobody");
        stranger.epoch = 9;
        let answer = stranger.beat(&coordinator, &orders()).await.unwrap();
        assert_eq!(answer.status, Status::UnknownMemberId);
        assert_eq!(ttl(), -1);
        record(&coordinator, &orders()).await;
        Member::new("m1").beat_ok(&coordinator, &orders()).await;
        let _: i64 = server.run(redis::cmd("EXPIRE").arg(&metadata).arg(1_000));
        Member::new("m2").beat_ok(&coordinator, &orders()).await;
        assert_eq!(ttl(), -1);
    });
}

#[test]
fn reads_never_take_the_mutex_and_never_write() {
    in_system(async {
        let server = RedisServer::start();
        let store = super::faults::TestStore::new(server.store());
        let coordinator = start(patient("a"), &store);
        create(&coordinator, &orders(), 4).await;
        Member::new("m1").beat_ok(&coordinator, &orders()).await;
        settled(&coordinator, &orders()).await;
        let metadata = Keys::default().metadata(&orders());
        let mutex = Keys::default().mutex(&orders());
        let _: () = server.run(redis::cmd("SET").arg(&mutex).arg("another:token"));
        let before: Vec<u8> = server.run(redis::cmd("DUMP").arg(&metadata));
        let (entered, committed) = (store.calls("enter"), store.calls("commit"));
        coordinator.group(&orders()).await.unwrap();
        coordinator.group_summary(&orders()).await.unwrap();
        let routing = coordinator.routing(&orders()).await.unwrap();
        assert_eq!((routing.shard_count, routing.routing_cache_ttl_ms), (4, 30_000));
        assert_eq!(coordinator.groups().await.unwrap().groups.len(), 1);
        coordinator.actor(&orders()).await.unwrap();
        assert_eq!((store.calls("enter"), store.calls("commit")), (entered, committed));
        assert_eq!(server.run::<Vec<u8>>(redis::cmd("DUMP").arg(&metadata)), before);
    });
}

#[test]
fn an_invariant_that_does_not_hold_is_counted_and_stops_nothing() {
    in_system(async {
        metrics::record();
        let violations = || metrics::counter("rsc_invariant_violation_total invariant=one-holder");
        let before = violations();
        let server = RedisServer::start();
        let coordinator = start(patient("a"), &server.store());
        create(&coordinator, &orders(), 4).await;
        for id in ["m1", "m2"] {
            Member::new(id).beat_ok(&coordinator, &orders()).await;
        }
        assert_eq!(violations(), before);
        let metadata = Keys::default().metadata(&orders());
        let text: String = server.run(redis::cmd("HGET").arg(&metadata).arg("aggregate"));
        let mut aggregate: serde_json::Value = serde_json::from_str(&text).unwrap();
        for id in ["m1", "m2"] {
            aggregate["members"][id]["currentAssignment"] = serde_json::json!([{"shardIndex": 0}]);
        }
        let change = [("aggregate", aggregate.to_string()), ("writeId", "a repair gone wrong".to_owned())];
        let _: i64 = server.run(redis::cmd("HSET").arg(&metadata).arg(&change));
        Member::new("m3").beat_ok(&coordinator, &orders()).await;
        assert!(violations() > before);
        assert_eq!(coordinator.group(&orders()).await.unwrap().live_members().count(), 3);
    });
}
