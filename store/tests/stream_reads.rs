//! What people are shown of the streams of shards, on a real server.

// Clippy's own exception reaches test functions only, not the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use rsc_core::ShardSet;
use rsc_protocol::monitoring::RecordId;
use rsc_store::{
    GroupStore, RecordPage, RecordRange, RedisStore, ShardView, StoreError, StreamReads, StreamView,
    Undelivered, WaitReason,
};
use support::server::RedisServer;
use support::stores::store;

const KEY: &str = "orders:0";

fn id(text: &str) -> RecordId {
    text.parse().unwrap()
}

fn run(server: &RedisServer, command: &str) {
    server.ok(&command.split(' ').collect::<Vec<_>>());
}

async fn view(store: &RedisStore, judged: bool) -> ShardView {
    let shards = ShardSet::from([0]);
    let judged = if judged { shards.clone() } else { ShardSet::new() };
    store.shard_views("orders", "billing", &shards, &judged).await.unwrap().remove(&0).unwrap()
}

async fn stream(store: &RedisStore, judged: bool) -> StreamView {
    match view(store, judged).await {
        ShardView::Stream(view) => *view,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_stream_and_its_groups_are_shown() {
    let server = RedisServer::start();
    let store = store(server.url());
    store.provision("orders", "billing", &ShardSet::from([0])).await.unwrap();
    let empty = stream(&store, true).await;
    assert_eq!((empty.length, empty.first_id, empty.last_id), (0, None, None));
    assert_eq!((empty.last_generated_id, &empty.unread), (RecordId::MIN, &vec![]));

    for record in 1..=5 {
        run(&server, &format!("XADD {KEY} {record}-0 f v"));
    }
    run(&server, &format!("XGROUP CREATE {KEY} audit $"));
    run(&server, &format!("XREADGROUP GROUP billing me COUNT 2 STREAMS {KEY} >"));
    run(&server, &format!("XDEL {KEY} 1-0"));
    let shown = stream(&store, false).await;
    assert_eq!((shown.length, shown.first_id, shown.last_id), (4, Some(id("2-0")), Some(id("5-0"))));
    assert_eq!(shown.last_generated_id, id("5-0"));
    assert!(shown.memory_bytes.unwrap() > 100);
    assert!(shown.unread.is_empty());
    let [audit, billing] = &shown.groups[..] else { panic!("{shown:?}") };
    assert_eq!((audit.consumer_group.as_str(), audit.cursor, audit.pending), ("audit", id("5-0"), 0));
    assert_eq!((audit.undelivered, audit.consumers), (None, 0));
    assert_eq!((billing.cursor, billing.pending, billing.consumers), (id("2-0"), 2, 1));
    assert_eq!(billing.undelivered, Some(Undelivered { count: 3, is_at_least: false }));
    assert_eq!(billing.lag, Some(3));
    let judged = stream(&store, true).await;
    let [wait] = &judged.unread[..] else { panic!("{judged:?}") };
    assert_eq!(
        (wait.reason, wait.undelivered, wait.pending, wait.ghosts),
        (WaitReason::Undelivered, 3, 1, 1)
    );

    // Redis does not know any more, and says so.
    run(&server, &format!("XDEL {KEY} 5-0"));
    let shown = stream(&store, false).await;
    assert_eq!(shown.groups[1].lag, None);
    assert_eq!((shown.last_id, shown.last_generated_id), (Some(id("4-0")), id("5-0")));
}

#[tokio::test]
async fn what_is_no_stream_is_named_and_what_may_not_be_asked_is_unknown() {
    let server = RedisServer::start();
    let store = store(server.url());
    run(&server, "SET orders:0 x");
    assert_eq!(view(&store, true).await, ShardView::OtherType { found: "string".into() });
    let everything =
        RecordRange { lowest: RecordId::MIN, highest: RecordId::MAX, newest_first: false, limit: 5 };
    let page = store.records("orders", 0, &everything).await.unwrap();
    let expected = RecordPage { key_type: Some("string".into()), ..RecordPage::default() };
    assert_eq!(page, expected);
    let shards = ShardSet::from([0]);
    assert_eq!(store.pending_by_consumer("orders", "billing", &shards).await.unwrap()[&0], None);
    assert!(store.existing_streams("orders", 0..3).await.unwrap().is_empty());

    run(&server, "DEL orders:0");
    run(&server, "XADD orders:0 1-0 f v");
    run(&server, "ACL SETUSER default -memory");
    assert_eq!(stream(&store, true).await.memory_bytes, None);
    run(&server, "ACL SETUSER default -xinfo -xpending -xrange -type");
    let errors = [
        store.shard_views("orders", "billing", &shards, &shards).await.unwrap_err(),
        store.pending_by_consumer("orders", "billing", &shards).await.unwrap_err(),
        store.records("orders", 0, &everything).await.unwrap_err(),
        store.existing_streams("orders", 0..3).await.unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(&error, StoreError::Refused(text) if text.contains("orders:0")), "{error:?}");
    }
}

#[tokio::test]
async fn a_group_that_is_missing_where_shards_are_judged_has_read_nothing() {
    let server = RedisServer::start();
    let store = store(server.url());
    run(&server, &format!("XADD {KEY} 1-0 f v"));
    let shown = stream(&store, true).await;
    assert_eq!((shown.groups.len(), shown.unread.len()), (0, 1));
    assert_eq!((shown.unread[0].reason, shown.unread[0].undelivered), (WaitReason::GroupMissing, 1));
}

#[tokio::test]
async fn nothing_is_written_by_looking() {
    let server = RedisServer::start();
    let store = store(server.url());
    store.provision("orders", "billing", &ShardSet::from([0])).await.unwrap();
    run(&server, &format!("XADD {KEY} 1-0 f v"));
    // A replica takes no writes; what it has can be shown.
    run(&server, "REPLICAOF 127.0.0.1 1");
    stream(&store, true).await;
    store.pending_by_consumer("orders", "billing", &ShardSet::from([0])).await.unwrap();
    assert_eq!(store.existing_streams("orders", 0..3).await.unwrap(), ShardSet::from([0]));
}

#[tokio::test]
async fn pending_entries_by_consumer() {
    let server = RedisServer::start();
    let store = store(server.url());
    store.provision("orders", "billing", &ShardSet::from([0, 1])).await.unwrap();
    for record in 1..=5 {
        run(&server, &format!("XADD {KEY} {record}-0 f v"));
    }
    run(&server, &format!("XREADGROUP GROUP billing one COUNT 2 STREAMS {KEY} >"));
    run(&server, &format!("XREADGROUP GROUP billing two COUNT 9 STREAMS {KEY} >"));
    let shards = ShardSet::from(0..600);
    let pending = store.pending_by_consumer("orders", "billing", &shards).await.unwrap();
    assert_eq!(pending.len(), 600);
    assert_eq!(pending[&0], Some(vec![("one".to_owned(), 2), ("two".to_owned(), 3)]));
    assert_eq!((&pending[&1], &pending[&2]), (&Some(vec![]), &None));
    assert_eq!(store.pending_by_consumer("orders", "audit", &shards).await.unwrap()[&0], None);
    assert_eq!(store.existing_streams("orders", 0..600).await.unwrap(), ShardSet::from([0, 1]));
    assert_eq!(store.existing_streams("orders", 1..600).await.unwrap(), ShardSet::from([1]));
}

#[tokio::test]
async fn records_are_paged_both_ways() {
    let server = RedisServer::start();
    let store = store(server.url());
    for record in 1..=500 {
        run(&server, &format!("XADD {KEY} {record}-0 f {record}"));
    }
    for (newest_first, limit) in
        [(false, 1), (false, 100), (true, 7), (true, 499), (false, 500), (true, 1000)]
    {
        let mut range = RecordRange { lowest: id("2-0"), highest: id("499-0"), newest_first, limit };
        let mut seen: Vec<u64> = Vec::new();
        loop {
            let page = store.records("orders", 0, &range).await.unwrap();
            let ids: Vec<u64> = page.records.iter().map(|record| record.id.milliseconds).collect();
            assert!(ids.len() <= limit && (!page.more || ids.len() == limit), "{limit}: {ids:?}");
            seen.extend(&ids);
            if !page.more {
                break;
            }
            let last = page.records.last().unwrap().id;
            match newest_first {
                true => range.highest = last.previous().unwrap(),
                false => range.lowest = last.next().unwrap(),
            }
        }
        let mut expected: Vec<u64> = (2..=499).collect();
        if newest_first {
            expected.reverse();
        }
        assert_eq!(seen, expected, "{newest_first} {limit}");
    }
}

#[tokio::test]
async fn a_page_of_big_records_ends_early_and_says_so() {
    let server = RedisServer::start();
    let store = store(server.url());
    let big = "x".repeat(400_000);
    for record in 1..=60 {
        server.ok(&["XADD", KEY, &format!("{record}-0"), "f", &big]);
    }
    let range =
        RecordRange { lowest: RecordId::MIN, highest: RecordId::MAX, newest_first: false, limit: 1000 };
    let page = store.records("orders", 0, &range).await.unwrap();
    assert!(page.more && (5..40).contains(&page.records.len()), "{}", page.records.len());
    let last = page.records.last().unwrap().id;
    let rest = RecordRange { lowest: last.next().unwrap(), ..range };
    let next = store.records("orders", 0, &rest).await.unwrap();
    assert_eq!(next.records[0].id.milliseconds, last.milliseconds + 1);
}

#[tokio::test]
async fn fields_are_bytes_and_ids_go_to_the_end() {
    let server = RedisServer::start();
    let store = store(server.url());
    let last = RecordId::MAX.to_string();
    for record in ["1-0", &last] {
        let mut command = redis::cmd("XADD");
        command.arg(KEY).arg(record).arg(b"\xff").arg(b"\x00\xfe").arg("twice").arg("a").arg("twice").arg("");
        let () = command.query(&mut server.connection()).unwrap();
    }
    for newest_first in [false, true] {
        let range = RecordRange { lowest: RecordId::MIN, highest: RecordId::MAX, newest_first, limit: 2 };
        let page = store.records("orders", 0, &range).await.unwrap();
        assert_eq!((page.records.len(), page.more), (2, false));
        let fields: [(&[u8], &[u8]); 3] = [(b"\xff", b"\x00\xfe"), (b"twice", b"a"), (b"twice", b"")];
        let shown = page.records[1].fields.iter().map(|(name, value)| (&name[..], &value[..]));
        assert!(shown.eq(fields), "{page:?}");
    }
}

#[tokio::test]
async fn reading_goes_through_a_connection_of_its_own() {
    let server = RedisServer::start();
    let store = store(server.url());
    store.ping().await.unwrap();
    let connections = || server.run::<String>(&["CLIENT", "LIST"]).unwrap().matches("name=rsc:").count();
    assert_eq!(connections(), 1);
    view(&store, false).await;
    view(&store, false).await;
    assert_eq!(connections(), 2);
    let other = support::stores::store(server.url());
    other.ping().await.unwrap();
    other.existing_streams("orders", 0..3).await.unwrap();
    assert_eq!(connections(), 4);
}
