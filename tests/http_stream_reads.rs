//! Black-box tests of the monitoring reads of Redis streams (protocol 8): the real binary, real Redis.
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use rsc_protocol::hash::redis_slot;
use rsc_protocol::keys::Keys;
use rsc_protocol::monitoring::{
    ConsumptionResponse, ConsumptionTotals, HistoryResponse, MessagesResponse, OffsetsResponse, ShardOffsets,
};
use rsc_protocol::{ErrorCode, GroupKey, ShardProgress, ShardRef};
use serde_json::{Value, json};
use support::{Api, Daemon, Member, RedisServer, beat_until_stable, encode, monitored_path, wait_until};

const INVALID: ErrorCode = ErrorCode::InvalidRequest;

/// A daemon on a Redis, and the group `orders`/`orders` with these shards.
async fn daemon_with(redis: &RedisServer, shards: u32) -> (Daemon, Api, GroupKey) {
    let daemon = Daemon::redis(redis).long_lease().start();
    let api = daemon.api();
    let group = api.create_stream("orders", shards).await;
    (daemon, api, group)
}

async fn run(redis: &RedisServer, command: &str) {
    let _: redis::Value = redis.command(&command.split(' ').collect::<Vec<_>>()).await;
}

async fn add(redis: &RedisServer, shard: u32, ids: std::ops::RangeInclusive<u32>) {
    for id in ids {
        run(redis, &format!("XADD orders:{shard} {id}-0 number {id}")).await;
    }
}

async fn offsets(api: &Api, group: &GroupKey) -> OffsetsResponse {
    let answer = api.get(&format!("{}/offsets", monitored_path(group))).await;
    answer.success();
    answer.read()
}

async fn messages(api: &Api, group: &GroupKey, shard: u32, query: &str) -> MessagesResponse {
    let answer = api.get(&format!("{}/shards/{shard}/messages?{query}", monitored_path(group))).await;
    answer.success();
    answer.read()
}

fn ids(page: &MessagesResponse) -> Vec<u64> {
    page.messages.iter().map(|message| message.id.milliseconds).collect()
}

fn row(offsets: &OffsetsResponse, shard: u32) -> &ShardOffsets {
    offsets.shards.iter().find(|row| row.shard_index == shard).unwrap()
}

#[tokio::test]
async fn offsets_show_every_shard_and_how_far_each_group_has_read() {
    let redis = RedisServer::start();
    let (_daemon, api, group) = daemon_with(&redis, 4).await;
    let audit = GroupKey::new("orders", "audit").unwrap();
    api.create_group(&audit, 4).await;
    let mut members = [Member::new(&api, &group, "a")];
    beat_until_stable(&api, &group, &mut members).await;
    add(&redis, 0, 1..=5).await;
    run(&redis, "XGROUP CREATE orders:0 foreign $").await;
    run(&redis, "XREADGROUP GROUP orders a COUNT 2 STREAMS orders:0 >").await;
    run(&redis, "XACK orders:0 orders 1-0").await;
    run(&redis, "XDEL orders:0 5-0").await;
    run(&redis, "DEL orders:2").await;
    run(&redis, "DEL orders:3").await;
    run(&redis, "RPUSH orders:3 x").await;

    let shown = offsets(&api, &group).await;
    assert_eq!((shown.shard_count, shown.shards.len()), (4, 4));
    assert_eq!(shown.metadata_version, api.group(&group).await.metadata_version);
    let first = row(&shown, 0);
    assert_eq!((first.stream_key.as_str(), first.redis_slot), ("orders:0", redis_slot("orders:0")));
    assert!(first.exists && first.routed && first.consumed, "{first:?}");
    assert_eq!(first.owner.as_deref(), Some("a"));
    let text = |id: Option<rsc_protocol::monitoring::RecordId>| id.map(|id| id.to_string());
    assert_eq!(first.length, Some(4));
    assert_eq!((text(first.first_id), text(first.last_id)), (Some("1-0".into()), Some("4-0".into())));
    assert_eq!(text(first.last_generated_id).as_deref(), Some("5-0"));
    assert!(first.memory_bytes.unwrap() > 100, "{first:?}");
    assert_eq!((text(first.cursor).as_deref(), first.pending), (Some("2-0"), Some(1)));
    assert_eq!((first.undelivered, first.undelivered_is_at_least), (Some(2), false));
    // Redis does not know the lag any more: unknown, not 0.
    assert_eq!(first.lag, None);
    let groups: Vec<_> =
        first.groups.iter().map(|row| (row.consumer_group.as_str(), row.pending, row.lag)).collect();
    assert_eq!(groups, [("audit", 0, None), ("foreign", 0, Some(0)), ("orders", 1, None)]);
    let second = row(&shown, 1);
    assert_eq!((second.length, second.undelivered, second.lag), (Some(0), Some(0), Some(0)));

    let gone = &serde_json::to_value(row(&shown, 2)).unwrap();
    assert_eq!((&gone["exists"], &gone["owner"], &gone["groups"]), (&json!(false), &json!("a"), &json!([])));
    let unknown = [
        "keyType",
        "length",
        "firstId",
        "lastId",
        "lastGeneratedId",
        "memoryBytes",
        "cursor",
        "pending",
        "lag",
        "undelivered",
    ];
    for field in unknown {
        assert_eq!(gone[field], Value::Null, "{field}: {gone}");
    }
    let wrong = row(&shown, 3);
    assert_eq!((wrong.exists, wrong.key_type.as_deref(), wrong.length), (true, Some("list"), None));
    assert!(shown.unread_deprecated_shards.is_empty());
    let of_audit = offsets(&api, &audit).await;
    assert_eq!((row(&of_audit, 0).undelivered, row(&of_audit, 0).owner.as_deref()), (Some(4), None));
}

#[tokio::test]
async fn streams_beyond_the_record_are_found_and_what_is_unread_in_them() {
    let redis = RedisServer::start();
    let (_daemon, api, group) = daemon_with(&redis, 2).await;
    // What a lost activation leaves behind, far away too, and what only looks like a shard.
    add(&redis, 2, 1..=3).await;
    run(&redis, "XGROUP CREATE orders:2 orders 0").await;
    run(&redis, "XREADGROUP GROUP orders a COUNT 1 STREAMS orders:2 >").await;
    add(&redis, 7, 1..=1).await;
    run(&redis, "XGROUP CREATE orders:8 orders 0 MKSTREAM").await;
    run(&redis, "XGROUP CREATE orders:9 other 0 MKSTREAM").await;
    add(&redis, 300, 1..=1).await;
    run(&redis, "SET orders:10 x").await;
    run(&redis, "SET orders:x x").await;
    let shown = offsets(&api, &group).await;
    let shards: Vec<u32> = shown.shards.iter().map(|row| row.shard_index).collect();
    assert_eq!(shards, [0, 1, 2, 7, 8, 9, 300]);
    let unread: Vec<u32> = shown.unread_deprecated_shards.iter().map(|shard| shard.shard_index).collect();
    assert_eq!(unread, [2, 7, 300]);
    let left = row(&shown, 2);
    assert!(left.exists && !left.routed && !left.consumed && left.owner.is_none(), "{left:?}");
    let wait = &left.unread[0];
    assert_eq!((wait.consumer_group.as_str(), wait.coordinated), ("orders", true));
    assert_eq!((wait.reason.as_str(), wait.undelivered, wait.pending), ("UNDELIVERED", 2, 1));
    let nobody = &row(&shown, 7).unread[0];
    assert_eq!((nobody.reason.as_str(), nobody.undelivered), ("GROUP_MISSING", 1));
}

#[tokio::test]
async fn removed_shards_stay_visible_and_late_records_in_them_are_named() {
    let redis = RedisServer::start();
    let daemon = Daemon::redis(&redis)
        .fast()
        .set("producer", "routing-cache-ttl", "100ms")
        .set("producer", "publish-margin", "100ms")
        .start();
    let api = daemon.api();
    let group = api.create_stream("orders", 3).await;
    add(&redis, 2, 1..=1).await;
    let scale = json!({"targetShardCount": 2, "requestedBy": "test", "reason": "smaller"});
    let answer = api.post("/coord/v1/streams/orders/scale", &scale).await;
    assert_eq!(answer.status.as_u16(), 202, "{:?}", answer.json());
    let draining = offsets(&api, &group).await;
    let removed = row(&draining, 2);
    assert!(!removed.routed && removed.consumed, "{removed:?}");
    assert_eq!(removed.unread[0].undelivered, 1);
    // Still read, so not given up.
    assert!(draining.unread_deprecated_shards.is_empty());

    run(&redis, "XREADGROUP GROUP orders a STREAMS orders:2 >").await;
    run(&redis, "XACK orders:2 orders 1-0").await;
    let is_over = async || {
        let list = api.get(&format!("{}/migrations", monitored_path(&group))).await.success();
        list["migrations"][0]["state"] == "DEPRECATED"
    };
    wait_until("the migration is over", is_over).await;
    let shown = async |late: &[u32]| {
        let shown = offsets(&api, &group).await;
        let removed = row(&shown, 2);
        let unread: Vec<u32> = shown.unread_deprecated_shards.iter().map(|row| row.shard_index).collect();
        removed.exists && !removed.consumed && removed.owner.is_none() && unread == late
    };
    wait_until("the removed shard is shown as such", || shown(&[])).await;
    add(&redis, 2, 9..=9).await;
    wait_until("the late record is named", || shown(&[2])).await;
    assert_eq!(ids(&messages(&api, &group, 2, "").await), [1, 9]);

    // A key that was deleted with its shard.
    let scale =
        json!({"targetShardCount": 1, "requestedBy": "test", "reason": "smaller", "retire": "DELETE"});
    api.post("/coord/v1/streams/orders/scale", &scale).await.success();
    wait_until("the shard is deleted, and still on record", async || {
        let shown = offsets(&api, &group).await;
        let removed = row(&shown, 1);
        !removed.exists && !removed.routed && removed.length.is_none()
    })
    .await;
    assert!(messages(&api, &group, 1, "").await.messages.is_empty());
}

#[tokio::test]
async fn consumption_shows_what_members_say_and_what_redis_says() {
    let redis = RedisServer::start();
    let (_daemon, api, group) = daemon_with(&redis, 3).await;
    let path = format!("{}/consumption", monitored_path(&group));
    let nobody: ConsumptionResponse = api.get(&path).await.read();
    assert_eq!((nobody.members.len(), nobody.unowned_shards.len()), (0, 3));
    let totals = ConsumptionTotals { shards: 3, reported_pending: None, redis_pending: Some(0) };
    assert_eq!(nobody.totals, totals);

    let mut members = [Member::new(&api, &group, "a"), Member::new(&api, &group, "b")];
    // Granted, and not yet reported as read.
    members[0].beat().await;
    let granted: ConsumptionResponse = api.get(&path).await.read();
    let readings: Vec<bool> = granted.members[0].shards.iter().map(|row| row.reading).collect();
    assert_eq!(readings, [false; 3]);
    beat_until_stable(&api, &group, &mut members).await;
    let [a, b] = &mut members;
    let (busy, idle) = if a.owned.len() == 2 { (a, b) } else { (b, a) };
    let owned: Vec<u32> = busy.owned.iter().copied().collect();
    let [first, second] = owned[..] else { panic!("{owned:?}") };
    add(&redis, first, 1..=5).await;
    run(&redis, &format!("XREADGROUP GROUP orders one COUNT 2 STREAMS orders:{first} >")).await;
    run(&redis, &format!("XREADGROUP GROUP orders two COUNT 2 STREAMS orders:{first} >")).await;
    run(&redis, &format!("XACK orders:{first} orders 1-0")).await;
    run(&redis, &format!("DEL orders:{second}")).await;
    let mut request = busy.request();
    request.shard_progress = vec![ShardProgress {
        shard: ShardRef { shard_index: first },
        stream_key: format!("orders:{first}"),
        last_delivered_id: Some("4-0".into()),
        last_acked_id: Some("1-0".into()),
        pending_count: 7,
        updated_at: None,
    }];
    let answer = api.heartbeat(&group, &request).await;
    busy.apply(&request, &answer);

    let fresh = async || {
        let shown: ConsumptionResponse = api.get(&path).await.read();
        shown.totals.reported_pending.is_some() && shown.totals.redis_pending == Some(3)
    };
    wait_until("the answer is a fresh one", fresh).await;
    let shown: ConsumptionResponse = api.get(&path).await.read();
    assert!(shown.unowned_shards.is_empty(), "{shown:?}");
    let totals = ConsumptionTotals { shards: 3, reported_pending: Some(7), redis_pending: Some(3) };
    assert_eq!(shown.totals, totals);
    let of = |id: &str| shown.members.iter().find(|member| member.member_id == id).unwrap();
    let of_busy = of(busy.id());
    let totals = ConsumptionTotals { shards: 2, reported_pending: Some(7), redis_pending: Some(3) };
    assert_eq!(of_busy.totals, totals);
    let read = &of_busy.shards[0];
    assert_eq!((read.shard_index, read.reading, read.redis_pending), (first, true, Some(3)));
    assert_eq!(
        (read.last_delivered_id.as_deref(), read.last_acked_id.as_deref()),
        (Some("4-0"), Some("1-0"))
    );
    assert_eq!(read.reported_pending, Some(7));
    let consumers: Vec<_> =
        read.redis_consumers.iter().map(|row| (row.consumer.as_str(), row.pending)).collect();
    assert_eq!(consumers, [("one", 1), ("two", 2)]);
    // No stream, nothing reported: unknown, not 0.
    let gone = &of_busy.shards[1];
    assert_eq!((gone.redis_pending, gone.reported_pending, gone.redis_consumers.len()), (None, None, 0));
    let totals = ConsumptionTotals { shards: 1, reported_pending: None, redis_pending: Some(0) };
    assert_eq!(of(idle.id()).totals, totals);
}

#[tokio::test]
async fn messages_are_paged_both_ways_and_found_by_id() {
    let redis = RedisServer::start();
    let (_daemon, api, group) = daemon_with(&redis, 1).await;
    add(&redis, 0, 1..=250).await;
    for (order, bound, limit) in
        [("asc", "from", 100), ("desc", "to", 100), ("asc", "from", 1000), ("desc", "to", 83)]
    {
        let (mut seen, mut next) = (Vec::new(), String::new());
        loop {
            let page = messages(&api, &group, 0, &format!("order={order}&limit={limit}{next}")).await;
            assert!(page.messages.len() <= limit && page.exists, "{page:?}");
            seen.extend(ids(&page));
            let Some(cursor) = page.next else { break };
            assert_eq!(page.messages.len(), limit);
            next = format!("&{bound}={}", encode(&cursor));
        }
        let mut expected: Vec<u64> = (1..=250).collect();
        if order == "desc" {
            expected.reverse();
        }
        assert_eq!(seen, expected, "{order} {limit}");
    }
    let page = messages(&api, &group, 0, "").await;
    assert_eq!((page.messages.len(), page.next.as_deref()), (100, Some("(100-0")));
    assert_eq!(ids(&messages(&api, &group, 0, "from=(3-0&to=6-0").await), [4, 5, 6]);
    assert_eq!(ids(&messages(&api, &group, 0, "from=3&to=(6-0&order=desc").await), [5, 4, 3]);
    let exactly = messages(&api, &group, 0, "from=246&limit=5").await;
    assert_eq!((ids(&exactly), exactly.next), (vec![246, 247, 248, 249, 250], None));
    for nothing in ["from=251", "to=(1-0", "to=(0-0", "from=9&to=8", "id=251-0", "id=17-1"] {
        let page = messages(&api, &group, 0, nothing).await;
        assert!(page.messages.is_empty() && page.next.is_none() && page.exists, "{nothing}: {page:?}");
    }
    let found = messages(&api, &group, 0, "id=17-0").await;
    assert_eq!((ids(&found), found.next), (vec![17], None));
}

#[tokio::test]
async fn fields_are_pairs_in_order_and_bytes_are_not_lost() {
    let redis = RedisServer::start();
    let (_daemon, api, group) = daemon_with(&redis, 1).await;
    let mut command = redis::cmd("XADD");
    command
        .arg("orders:0")
        .arg("1-0")
        .arg("같은")
        .arg("🚚")
        .arg("같은")
        .arg("")
        .arg(b"\xff\x00")
        .arg(b"\xfe");
    command.exec_async(&mut redis.connection().await).await.unwrap();
    let page = api.get(&format!("{}/shards/0/messages", monitored_path(&group))).await.success();
    let expected = json!([{"id": "1-0", "fields": [
        ["같은", "🚚"], ["같은", ""], [{"base64": "/wA="}, {"base64": "/g=="}],
    ]}]);
    assert_eq!(page["messages"], expected);
    assert_eq!((&page["streamKey"], &page["keyType"]), (&json!("orders:0"), &json!("stream")));
}

#[tokio::test]
async fn shards_that_do_not_exist_are_not_found_and_missing_keys_are_empty() {
    let redis = RedisServer::start();
    let (_daemon, api, group) = daemon_with(&redis, 2).await;
    run(&redis, "DEL orders:1").await;
    add(&redis, 5, 1..=1).await;
    run(&redis, "SET orders:6 x").await;
    let gone = messages(&api, &group, 1, "").await;
    assert_eq!((gone.exists, gone.key_type, gone.messages.len()), (false, None, 0));
    assert_eq!(ids(&messages(&api, &group, 5, "").await), [1]);
    for shard in [2, 6, i32::MAX] {
        let answer = api.get(&format!("{}/shards/{shard}/messages", monitored_path(&group))).await;
        let message = answer.expect_error(ErrorCode::NotFound);
        assert!(message.contains(&format!("no shard {shard}")) && message.contains("2 shards"), "{message}");
    }
    run(&redis, "RPUSH orders:1 x").await;
    let wrong = async || messages(&api, &group, 1, "").await.key_type.as_deref() == Some("list");
    wait_until("a key of another type is named", wrong).await;
}

#[tokio::test]
async fn queries_are_read_strictly() {
    let daemon = Daemon::memory().start();
    let api = daemon.api();
    let group = api.create_stream("orders", 2).await;
    for (path, expected) in [
        ("offsets?x=1", "unknown query parameter \"x\": this route takes none"),
        ("consumption?limit=1", "unknown query parameter"),
        ("history?limit=0", "limit is \"0\": it has to be a whole number from 1 to 1000"),
        ("history?limit=1001", "from 1 to 1000"),
        ("history?before=5", "before is \"5\": it has to be a record id"),
        ("history?before=1-0&before=1-0", "twice"),
        ("history?after=1-0", "this route takes limit, before"),
        ("shards/0/messages?limit=1001", "limit is \"1001\""),
        ("shards/0/messages?limit=-1", "limit"),
        ("shards/0/messages?limit=", "limit"),
        ("shards/0/messages?order=up", "order is \"up\": it has to be asc or desc"),
        ("shards/0/messages?order=ASC", "order"),
        ("shards/0/messages?from=-", "from is \"-\""),
        ("shards/0/messages?to=%2B", "to is \"+\""),
        ("shards/0/messages?from=1-2-3", "from"),
        ("shards/0/messages?id=17", "id is \"17\": it has to be a record id"),
        ("shards/0/messages?id=(1-0", "id"),
        ("shards/0/messages?id=1-0&limit=5", "id names one record, limit a range"),
        ("shards/0/messages?count=5", "this route takes from, to, limit, order, id"),
        ("shards//messages", "shardIndex in the path is \"\""),
        ("shards/-1/messages", "shardIndex"),
        ("shards/01/messages", "shardIndex"),
        ("shards/x/messages", "shardIndex"),
        ("shards/2147483648/messages", "from 0 to 2147483647"),
    ] {
        let answer = api.get(&format!("{}/{path}", monitored_path(&group))).await;
        let message = answer.expect_error(INVALID);
        assert!(message.contains(expected), "{path}: {message}");
    }
}

#[tokio::test]
async fn a_history_is_paged_newest_first_on_redis_and_in_memory() {
    let redis = RedisServer::start();
    for builder in [Daemon::redis(&redis), Daemon::memory()] {
        let daemon = builder.long_lease().start();
        let api = daemon.api();
        let group = api.create_stream("orders", 2).await;
        let mut members = [Member::new(&api, &group, "a"), Member::new(&api, &group, "b")];
        beat_until_stable(&api, &group, &mut members).await;
        let version = api.group(&group).await.metadata_version;
        let path = format!("{}/history", monitored_path(&group));
        let whole: HistoryResponse = api.get(&path).await.read();
        assert_eq!(whole.next, None);
        assert_eq!(whole.entries[0].entry["metadataVersion"], version);
        assert_eq!(whole.entries.last().unwrap().entry["metadataVersion"], 1);
        assert!(whole.entries[0].entry["transitions"].is_array(), "{whole:?}");
        let (mut seen, mut before) = (Vec::new(), String::new());
        loop {
            let page: HistoryResponse = api.get(&format!("{path}?limit=2{before}")).await.read();
            assert!(page.entries.len() <= 2, "{page:?}");
            seen.extend(page.entries);
            let Some(next) = page.next else { break };
            before = format!("&before={next}");
        }
        assert_eq!(seen, whole.entries);
    }
}

#[tokio::test]
async fn a_history_can_be_read_when_the_record_cannot() {
    let redis = RedisServer::start();
    let (_daemon, api, group) = daemon_with(&redis, 1).await;
    run(&redis, &format!("HSET {} aggregate {{", Keys::default().metadata(&group))).await;
    run(&redis, &format!("XADD {} * entry no-json", Keys::default().history(&group))).await;
    let history: HistoryResponse = api.get(&format!("{}/history", monitored_path(&group))).await.read();
    assert_eq!((history.entries.len(), &history.entries[0].entry), (2, &json!("no-json")));
    for path in ["offsets", "consumption", "shards/0/messages"] {
        let answer = api.get(&format!("{}/{path}", monitored_path(&group))).await;
        answer.expect_error(ErrorCode::GroupMetadataCorrupt);
    }
}

#[tokio::test]
async fn without_streams_nothing_is_made_up() {
    let daemon = Daemon::memory().start();
    let api = daemon.api();
    let group = api.create_stream("orders", 2).await;
    let shown = offsets(&api, &group).await;
    assert_eq!((shown.shards.len(), shown.shards[1].exists, shown.shards[1].length), (2, false, None));
    assert!(shown.shards[1].routed && shown.shards[1].consumed);
    let consumption: ConsumptionResponse =
        api.get(&format!("{}/consumption", monitored_path(&group))).await.read();
    assert_eq!(consumption.totals, ConsumptionTotals { shards: 2, ..ConsumptionTotals::default() });
    let page = messages(&api, &group, 1, "").await;
    assert_eq!((page.exists, page.messages.len(), page.next), (false, 0, None));
    let answer = api.get(&format!("{}/shards/2/messages", monitored_path(&group))).await;
    answer.expect_error(ErrorCode::NotFound);
}

#[tokio::test]
async fn reading_takes_no_mutex_and_writes_nothing() {
    let mut redis = RedisServer::start();
    let (_daemon, api, group) = daemon_with(&redis, 2).await;
    add(&redis, 0, 1..=3).await;
    let keys = Keys::default();
    for mutex in [keys.mutex(&group), keys.stream_mutex("orders")] {
        run(&redis, &format!("SET {mutex} somebody-else")).await;
    }
    let changes = async || {
        let info: String = redis.command(&["INFO", "persistence"]).await;
        info.lines().find_map(|line| line.strip_prefix("rdb_changes_since_last_save:")).unwrap().to_owned()
    };
    let before = changes().await;
    let paths = ["offsets", "consumption", "shards/0/messages", "shards/0/messages?id=2-0", "history"];
    for path in paths {
        api.get(&format!("{}/{path}", monitored_path(&group))).await.success();
    }
    assert_eq!(changes().await, before);
    redis.kill();
    for path in paths {
        let answer = api.get(&format!("{}/{path}", monitored_path(&group))).await;
        answer.expect_error(ErrorCode::RedisUnavailable);
    }
}
