//! Proving shards empty and deleting them, as far as it is the same without streams.

use rsc_core::ShardSet;
use rsc_store::{ShardDeletion, ShardProof};

use crate::support::hands::World;

fn coordinated() -> [String; 1] {
    ["billing".to_owned()]
}

pub(crate) async fn what_does_not_exist_is_proven_and_absent(world: &World) {
    let shards = ShardSet::from([2, 5, 700]);
    let proofs = world.store.prove_empty("orders", &shards, &coordinated()).await.unwrap();
    assert_eq!(proofs.keys().copied().collect::<ShardSet>(), shards);
    for proof in proofs.values() {
        assert_eq!(*proof, ShardProof::Empty { key_exists: false, ghosts: 0 });
    }
    let none = world.store.prove_empty("orders", &ShardSet::new(), &coordinated()).await.unwrap();
    assert!(none.is_empty());
    let deletion = world
        .store
        .delete_shard("orders", 5, &coordinated(), rsc_protocol::Timestamp::from_millis(i64::MAX / 2))
        .await
        .unwrap();
    assert_eq!(deletion, ShardDeletion::Absent);
}

pub(crate) async fn what_was_only_provisioned_is_proven_and_deleted(world: &World) {
    let shards = ShardSet::from([0, 3]);
    world.store.provision("orders", "billing", &shards).await.unwrap();
    let exists = world.server().is_some();
    for proof in world.store.prove_empty("orders", &shards, &coordinated()).await.unwrap().values() {
        assert_eq!(*proof, ShardProof::Empty { key_exists: exists, ghosts: 0 });
    }
    // A call that was held up for too long on its way looks at nothing and deletes nothing.
    let past = rsc_protocol::Timestamp::from_millis(1);
    let late = world.store.delete_shard("orders", 3, &coordinated(), past).await.unwrap();
    let expected = if exists { ShardDeletion::TooLate } else { ShardDeletion::Absent };
    assert_eq!(late, expected);
    assert_eq!(world.kind("orders:3"), if exists { "stream" } else { "none" });
    let deletion = world
        .store
        .delete_shard("orders", 3, &coordinated(), rsc_protocol::Timestamp::from_millis(i64::MAX / 2))
        .await
        .unwrap();
    let expected = if exists { ShardDeletion::Deleted } else { ShardDeletion::Absent };
    assert_eq!(deletion, expected);
    assert_eq!(world.kind("orders:3"), "none");
    let again = world
        .store
        .delete_shard("orders", 3, &coordinated(), rsc_protocol::Timestamp::from_millis(i64::MAX / 2))
        .await
        .unwrap();
    assert_eq!(again, ShardDeletion::Absent);
}
