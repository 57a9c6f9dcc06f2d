//! When a shard is proven empty, and when it is not (protocol 6, *Drain*), on streams as a real server
//! leaves them: deleted, trimmed, claimed, read without acknowledgement, moved by hand.

// Clippy's own exception reaches test functions only, not the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use rsc_core::ShardSet;
use rsc_store::WaitReason::{GroupMissing, Pending, Undelivered, WrongType};
use rsc_store::{GroupStore, RedisStore, ShardProof, StoreError, WaitReason, Waiting};
use support::server::{RedisServer, free_port};
use support::stores::store;

const KEY: &str = "orders:0";

/// A server, a store, and the shard `orders:0`, on which `billing` is the coordinated group.
struct Shard {
    server: RedisServer,
    store: RedisStore,
}

impl Shard {
    async fn provisioned() -> Self {
        let server = RedisServer::start();
        let store = store(server.url());
        store.provision("orders", "billing", &ShardSet::from([0])).await.unwrap();
        Shard { server, store }
    }

    fn ok(&self, command: &str) {
        self.server.ok(&command.split(' ').collect::<Vec<_>>());
    }

    fn add(&self, ids: std::ops::RangeInclusive<u32>) {
        ids.for_each(|id| self.ok(&format!("XADD {KEY} {id}-0 field value")));
    }

    /// Delivers everything to a consumer of the group.
    fn read(&self, group: &str) {
        self.ok(&format!("XREADGROUP GROUP {group} someone STREAMS {KEY} >"));
    }

    fn acknowledge(&self, group: &str, ids: std::ops::RangeInclusive<u32>) {
        ids.for_each(|id| self.ok(&format!("XACK {KEY} {group} {id}-0")));
    }

    fn delete(&self, ids: std::ops::RangeInclusive<u32>) {
        ids.for_each(|id| self.ok(&format!("XDEL {KEY} {id}-0")));
    }

    async fn proof_for(&self, coordinated: &[&str]) -> ShardProof {
        let coordinated: Vec<String> = coordinated.iter().map(|name| (*name).to_owned()).collect();
        let mut proofs = self.store.prove_empty("orders", &ShardSet::from([0]), &coordinated).await.unwrap();
        proofs.remove(&0).unwrap()
    }

    async fn waits(&self) -> Vec<Waiting> {
        match self.proof_for(&["billing"]).await {
            ShardProof::NotEmpty { waits } => waits,
            proof @ ShardProof::Empty { .. } => panic!("{proof:?}"),
        }
    }

    /// The one group that waits.
    async fn wait(&self) -> Waiting {
        let mut waits = self.waits().await;
        assert_eq!(waits.len(), 1, "{waits:?}");
        waits.remove(0)
    }

    async fn proven_with_ghosts(&self, ghosts: u64) {
        let proof = self.proof_for(&["billing"]).await;
        assert_eq!(proof, ShardProof::Empty { key_exists: true, ghosts });
    }

    /// The `lag` of `XINFO GROUPS` for the first group.
    fn lag(&self) -> redis::Value {
        let mut groups: Vec<Vec<redis::Value>> = self.server.run(&["XINFO", "GROUPS", KEY]).unwrap();
        groups.remove(0).pop().unwrap()
    }
}

/// A group that waits, with exact figures.
fn waiting(group: &str, reason: WaitReason, figures: [u64; 3], oldest: Option<&str>) -> Waiting {
    let [undelivered, pending, ghosts] = figures;
    Waiting {
        consumer_group: group.to_owned(),
        reason,
        undelivered,
        undelivered_is_at_least: false,
        pending,
        pending_is_at_most: false,
        ghosts,
        oldest_id: oldest.map(str::to_owned),
    }
}

#[tokio::test]
async fn undelivered_then_pending_then_empty() {
    let shard = Shard::provisioned().await;
    shard.add(1..=3);
    assert_eq!(shard.wait().await, waiting("billing", Undelivered, [3, 0, 0], Some("1-0")));
    shard.read("billing");
    assert_eq!(shard.wait().await, waiting("billing", Pending, [0, 3, 0], Some("1-0")));
    shard.add(4..=4);
    assert_eq!(shard.wait().await, waiting("billing", Undelivered, [1, 3, 0], Some("4-0")));
    shard.read("billing");
    shard.acknowledge("billing", 1..=2);
    assert_eq!(shard.wait().await, waiting("billing", Pending, [0, 2, 0], Some("3-0")));
    shard.acknowledge("billing", 3..=4);
    shard.proven_with_ghosts(0).await;
}

#[tokio::test]
async fn groups_that_nobody_coordinates_count_too() {
    let shard = Shard::provisioned().await;
    shard.ok(&format!("XGROUP CREATE {KEY} audit 0"));
    shard.ok(&format!("XGROUP CREATE {KEY} warehouse 0"));
    shard.add(1..=2);
    shard.read("billing");
    shard.acknowledge("billing", 1..=2);
    shard.read("warehouse");
    let expected = [
        waiting("audit", Undelivered, [2, 0, 0], Some("1-0")),
        waiting("warehouse", Pending, [0, 2, 0], Some("1-0")),
    ];
    assert_eq!(shard.waits().await, expected);
    shard.read("audit");
    shard.acknowledge("audit", 1..=2);
    assert_eq!(shard.wait().await.consumer_group, "warehouse");
    shard.acknowledge("warehouse", 1..=2);
    shard.proven_with_ghosts(0).await;
}

#[tokio::test]
async fn a_coordinated_group_that_is_missing_is_reported_also_on_an_empty_stream() {
    let shard = Shard::provisioned().await;
    let proof = shard.proof_for(&["billing", "audit"]).await;
    let missing = waiting("audit", GroupMissing, [0, 0, 0], None);
    assert_eq!(proof, ShardProof::NotEmpty { waits: vec![missing] });
    shard.add(1..=2);
    shard.read("billing");
    shard.acknowledge("billing", 1..=2);
    let proof = shard.proof_for(&["billing", "audit"]).await;
    let missing = waiting("audit", GroupMissing, [2, 0, 0], Some("1-0"));
    assert_eq!(proof, ShardProof::NotEmpty { waits: vec![missing] });
    shard.ok(&format!("DEL {KEY}"));
    let proof = shard.proof_for(&["billing", "audit"]).await;
    assert_eq!(proof, ShardProof::Empty { key_exists: false, ghosts: 0 });
    // Somebody wrote without groups.
    shard.add(1..=1);
    let waits = shard.waits().await;
    assert_eq!(waits, [waiting("billing", GroupMissing, [1, 0, 0], Some("1-0"))]);
    let proof = shard.proof_for(&[]).await;
    assert_eq!(proof, ShardProof::Empty { key_exists: true, ghosts: 0 });
}

#[tokio::test]
async fn a_cursor_counts_wherever_somebody_set_it() {
    let shard = Shard::provisioned().await;
    shard.add(1..=5);
    shard.ok(&format!("XGROUP SETID {KEY} billing $"));
    shard.proven_with_ghosts(0).await;
    shard.ok(&format!("XGROUP SETID {KEY} billing 2-0"));
    assert_eq!(shard.wait().await, waiting("billing", Undelivered, [3, 0, 0], Some("3-0")));
    shard.ok(&format!("XGROUP SETID {KEY} billing 0"));
    assert_eq!(shard.wait().await, waiting("billing", Undelivered, [5, 0, 0], Some("1-0")));
    shard.ok(&format!("XGROUP SETID {KEY} billing 99-0"));
    shard.proven_with_ghosts(0).await;
}

#[tokio::test]
async fn records_deleted_before_they_were_delivered_are_not_waited_for() {
    let shard = Shard::provisioned().await;
    shard.add(1..=3);
    shard.read("billing");
    shard.acknowledge("billing", 1..=3);
    shard.add(4..=5);
    shard.delete(4..=4);
    assert_eq!(shard.wait().await, waiting("billing", Undelivered, [1, 0, 0], Some("5-0")));
    shard.delete(5..=5);
    // The trap: for people, not for proofs.
    assert_ne!(shard.lag(), redis::Value::Int(0));
    shard.proven_with_ghosts(0).await;
    // Nothing but tombstones.
    shard.delete(1..=3);
    shard.proven_with_ghosts(0).await;
}

#[tokio::test]
async fn records_trimmed_before_they_were_delivered_are_not_waited_for() {
    let shard = Shard::provisioned().await;
    shard.add(1..=20);
    shard.ok(&format!("XREADGROUP GROUP billing someone COUNT 5 STREAMS {KEY} >"));
    shard.acknowledge("billing", 1..=5);
    shard.ok(&format!("XTRIM {KEY} MAXLEN 4"));
    assert_eq!(shard.wait().await, waiting("billing", Undelivered, [4, 0, 0], Some("17-0")));
    shard.ok(&format!("XTRIM {KEY} MAXLEN 0"));
    shard.proven_with_ghosts(0).await;
}

#[tokio::test]
async fn ghosts_are_counted_and_not_in_the_way() {
    let shard = Shard::provisioned().await;
    shard.add(1..=9);
    shard.read("billing");
    shard.delete(1..=2);
    shard.delete(5..=5);
    shard.delete(8..=9);
    assert_eq!(shard.wait().await, waiting("billing", Pending, [0, 4, 5], Some("3-0")));
    shard.acknowledge("billing", 3..=6);
    assert_eq!(shard.wait().await, waiting("billing", Pending, [0, 1, 4], Some("7-0")));
    shard.delete(7..=7);
    shard.proven_with_ghosts(5).await;
    // A record behind all ghosts, acknowledged; then one that is pending.
    shard.add(10..=11);
    shard.read("billing");
    shard.acknowledge("billing", 10..=10);
    assert_eq!(shard.wait().await, waiting("billing", Pending, [0, 1, 5], Some("11-0")));
    shard.ok(&format!("XTRIM {KEY} MAXLEN 0"));
    shard.proven_with_ghosts(6).await;
}

#[tokio::test]
async fn consumers_make_no_difference() {
    let shard = Shard::provisioned().await;
    shard.add(1..=4);
    shard.ok(&format!("XREADGROUP GROUP billing one COUNT 1 STREAMS {KEY} >"));
    shard.ok(&format!("XREADGROUP GROUP billing two COUNT 1 STREAMS {KEY} >"));
    shard.ok(&format!("XREADGROUP GROUP billing three NOACK STREAMS {KEY} >"));
    assert_eq!(shard.wait().await, waiting("billing", Pending, [0, 2, 0], Some("1-0")));
    // Removing a consumer forgets what it had not acknowledged.
    shard.ok(&format!("XGROUP DELCONSUMER {KEY} billing one"));
    assert_eq!(shard.wait().await, waiting("billing", Pending, [0, 1, 0], Some("2-0")));
    shard.ok(&format!("XGROUP DELCONSUMER {KEY} billing two"));
    shard.proven_with_ghosts(0).await;
}

#[tokio::test]
async fn an_entry_claimed_by_force_counts_behind_no_cursor() {
    let shard = Shard::provisioned().await;
    shard.add(1..=2);
    shard.read("billing");
    shard.acknowledge("billing", 1..=2);
    shard.ok(&format!("XCLAIM {KEY} billing someone 0 1-0 FORCE"));
    assert_eq!(shard.wait().await, waiting("billing", Pending, [0, 1, 0], Some("1-0")));
}

#[tokio::test]
async fn the_last_id_there_can_be() {
    let shard = Shard::provisioned().await;
    let last = "18446744073709551615-18446744073709551615";
    shard.ok(&format!("XADD {KEY} {last} field value"));
    assert_eq!(shard.wait().await, waiting("billing", Undelivered, [1, 0, 0], Some(last)));
    shard.read("billing");
    assert_eq!(shard.wait().await, waiting("billing", Pending, [0, 1, 0], Some(last)));
    shard.ok(&format!("XDEL {KEY} {last}"));
    shard.proven_with_ghosts(1).await;
    shard.ok(&format!("XACK {KEY} billing {last}"));
    shard.proven_with_ghosts(0).await;
}

#[tokio::test]
async fn a_key_of_another_type_is_never_proven() {
    let shard = Shard::provisioned().await;
    for command in ["RPUSH orders:0 x", "SET orders:0 x", "HSET orders:0 f x"] {
        shard.ok(&format!("DEL {KEY}"));
        shard.ok(command);
        assert_eq!(shard.wait().await, waiting("", WrongType, [0, 0, 0], None));
    }
}

#[tokio::test]
async fn many_are_counted_up_to_a_limit() {
    let shard = Shard::provisioned().await;
    shard.add(1..=99);
    assert_eq!(shard.wait().await, waiting("billing", Undelivered, [99, 0, 0], Some("1-0")));
    shard.add(100..=150);
    let wait = shard.wait().await;
    assert_eq!((wait.undelivered, wait.undelivered_is_at_least), (100, true));
    shard.read("billing");
    let wait = shard.wait().await;
    assert_eq!((wait.pending, wait.pending_is_at_most, wait.ghosts), (150, true, 0));
    shard.acknowledge("billing", 1..=51);
    assert_eq!(shard.wait().await, waiting("billing", Pending, [0, 99, 0], Some("52-0")));
}

#[tokio::test]
async fn big_records_are_not_fetched_for_the_sake_of_a_count() {
    let shard = Shard::provisioned().await;
    let big = "x".repeat(100_000);
    for id in 1..=60 {
        shard.server.ok(&["XADD", KEY, &format!("{id}-0"), "field", &big]);
    }
    let wait = shard.wait().await;
    assert!(wait.undelivered_is_at_least && (3..=15).contains(&wait.undelivered), "{wait:?}");
}

#[tokio::test]
async fn a_name_that_is_no_utf_8_is_shown_with_replacements() {
    let shard = Shard::provisioned().await;
    shard.add(1..=1);
    shard.read("billing");
    shard.acknowledge("billing", 1..=1);
    let name: &[u8] = b"au\xffdit";
    let mut command = redis::cmd("XGROUP");
    command.arg("CREATE").arg(KEY).arg(name).arg("0");
    let () = command.query(&mut shard.server.connection()).unwrap();
    assert_eq!(shard.wait().await, waiting("au\u{fffd}dit", Undelivered, [1, 0, 0], Some("1-0")));
}

#[tokio::test]
async fn a_thousand_shards_in_one_question() {
    let server = RedisServer::start();
    let store = store(server.url());
    let shards = ShardSet::from(0..1000);
    for group in ["billing", "audit"] {
        store.provision("orders", group, &shards).await.unwrap();
    }
    server.ok(&["XADD", "orders:17", "1-0", "a", "b"]);
    server.ok(&["DEL", "orders:400"]);
    server.ok(&["SET", "orders:999", "x"]);
    server.ok(&["CONFIG", "RESETSTAT"]);
    let coordinated = ["billing".to_owned(), "audit".to_owned()];
    let proofs = store.prove_empty("orders", &shards, &coordinated).await.unwrap();
    assert_eq!(proofs.keys().copied().collect::<ShardSet>(), shards);
    assert_eq!(server.calls("evalsha"), 1000);
    let not_empty = proofs.iter().filter(|(_, proof)| matches!(proof, ShardProof::NotEmpty { .. }));
    assert_eq!(not_empty.map(|(shard, _)| *shard).collect::<Vec<_>>(), [17, 999]);
    assert_eq!(proofs[&400], ShardProof::Empty { key_exists: false, ghosts: 0 });
}

#[tokio::test]
async fn without_an_answer_there_is_no_proof() {
    let mut shard = Shard::provisioned().await;
    let shards = ShardSet::from(0..40);
    shard.server.ok(&["REPLICAOF", "127.0.0.1", &free_port().to_string()]);
    let error = shard.store.prove_empty("orders", &shards, &[]).await.unwrap_err();
    // What a replica has not got yet is not nothing.
    assert!(matches!(&error, StoreError::Refused(text) if text.contains("READONLY")), "{error:?}");
    shard.server.kill();
    let error = shard.store.prove_empty("orders", &shards, &[]).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
}
