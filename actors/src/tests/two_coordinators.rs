//! Two coordinators on one store, requests routed at random: never two readers of one shard, no transition
//! lost.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use futures_util::future::join_all;
use rand::RngExt;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rsc_protocol::Status;
use rsc_protocol::admin::GroupState;
use rsc_protocol::keys::Keys;

use super::faults::{Fault, TestStore};
use super::member::Member;
use super::redis_server::RedisServer;
use super::{create, in_system, orders, patient, record, start};
use crate::Coordinator;

const SHARDS: u32 = 24;

/// Who reads what, as the members themselves see it.
#[derive(Default)]
struct Readers(Mutex<BTreeMap<u32, String>>);

impl Readers {
    fn stop(&self, member: &str, shards: impl IntoIterator<Item = u32>) {
        let mut readers = self.0.lock().unwrap();
        for shard in shards {
            assert_eq!(readers.remove(&shard).as_deref(), Some(member), "shard {shard}");
        }
    }

    fn begin(&self, member: &str, shards: impl IntoIterator<Item = u32>) {
        let mut readers = self.0.lock().unwrap();
        for shard in shards {
            let before = readers.insert(shard, member.to_owned());
            assert_eq!(before, None, "shard {shard} has a reader and was given to {member}");
        }
    }
}

/// A member's life: heartbeats through whichever coordinator; now and then it leaves or starts over.
async fn live(
    coordinators: Vec<Coordinator>,
    readers: Arc<Readers>,
    id: String,
    seed: u64,
    beats: usize,
) -> Member {
    let mut chance = StdRng::seed_from_u64(seed);
    let mut member = Member::new(&id);
    for _ in 0..beats {
        if member.epoch > 0 && chance.random_bool(0.03) {
            // Stops everything and leaves, or starts over as the same process.
            readers.stop(&id, std::mem::take(&mut member.owned));
            member.revoked.clear();
            member.epoch = if chance.random_bool(0.5) { -1 } else { 0 };
        }
        let coordinator = &coordinators[chance.random_range(0..coordinators.len())];
        let before = member.clone();
        let request = member.request();
        let Ok(response) = coordinator.heartbeat(&orders(), &id, request).await else { continue };
        if before.epoch == -1 {
            if response.status == Status::Ok {
                member.epoch = 0;
            }
            continue;
        }
        let new = member.apply(&response);
        readers.stop(&id, before.owned.difference(&member.owned).copied());
        readers.begin(&id, new);
        tokio::task::yield_now().await;
    }
    member
}

fn history_versions(server: &RedisServer) -> Vec<u64> {
    let history = Keys::default().history(&orders());
    let entries: redis::streams::StreamRangeReply =
        server.run(redis::cmd("XRANGE").arg(history).arg("-").arg("+"));
    entries
        .ids
        .iter()
        .map(|entry| {
            let text: String = entry.get("entry").unwrap();
            serde_json::from_str::<serde_json::Value>(&text).unwrap()["metadataVersion"].as_u64().unwrap()
        })
        .collect()
}

/// Lets members live for a while, then looks whether every version was recorded once, in order.
async fn churn(
    server: &RedisServer,
    coordinators: &[Coordinator],
    readers: &Arc<Readers>,
    members: usize,
    beats: usize,
) -> Vec<Member> {
    let lives = (0..members).map(|n| {
        let (coordinators, readers) = (coordinators.to_vec(), readers.clone());
        tokio::task::spawn_local(live(coordinators, readers, format!("m{n:02}"), n as u64, beats))
    });
    let members = join_all(lives).await.into_iter().map(Result::unwrap).collect();
    let versions = history_versions(server);
    let group = record(&coordinators[0], &orders()).await;
    assert_eq!(versions, (1..=group.metadata_version).collect::<Vec<_>>());
    members
}

/// Without further disturbance everybody comes back and the group becomes stable.
async fn heal(coordinators: &[Coordinator], readers: &Readers, mut members: Vec<Member>) {
    for round in 0.. {
        assert!(round < 100, "does not become stable: {:?}", record(&coordinators[0], &orders()).await);
        for (at, member) in members.iter_mut().enumerate() {
            if member.epoch < 0 {
                member.epoch = 0;
            }
            let before = member.owned.clone();
            let coordinator = &coordinators[at % coordinators.len()];
            let response = member.beat(coordinator, &orders()).await.unwrap();
            let stopped: Vec<u32> = before.difference(&member.owned).copied().collect();
            readers.stop(&member.id, stopped);
            if response.status == Status::Ok {
                readers.begin(&member.id, member.owned.difference(&before).copied());
            }
        }
        if record(&coordinators[0], &orders()).await.state == GroupState::Stable {
            break;
        }
    }
    assert_eq!(readers.0.lock().unwrap().len(), SHARDS as usize, "every shard is read");
}

#[test]
fn random_routing_never_makes_two_readers_and_loses_no_transition() {
    in_system(async {
        let server = RedisServer::start();
        let coordinators = [start(patient("a"), &server.store()), start(patient("b"), &server.store())];
        create(&coordinators[0], &orders(), SHARDS).await;
        let readers = Arc::new(Readers::default());
        let members = churn(&server, &coordinators, &readers, 12, 80).await;
        heal(&coordinators, &readers, members).await;
        for coordinator in &coordinators {
            assert!(coordinator.actor(&orders()).await.unwrap().turns > 10, "both had their share");
        }
    });
}

#[test]
fn the_same_with_answers_lost_all_the_time() {
    in_system(async {
        let server = RedisServer::start();
        let stores = [TestStore::new(server.store()), TestStore::new(server.store())];
        let coordinators = [start(patient("a"), &stores[0]), start(patient("b"), &stores[1])];
        create(&coordinators[0], &orders(), SHARDS).await;
        let mut chance = StdRng::seed_from_u64(7);
        for store in &stores {
            for _ in 0..200 {
                let fault = match chance.random_range(0..10) {
                    0 => Fault::LostAfter,
                    1 => Fault::LostBefore,
                    2 => Fault::NotSent,
                    _ => Fault::Pass,
                };
                store.fail_next("commit", fault);
                let fault = match chance.random_range(0..20) {
                    0 => Fault::LostAfter,
                    1 => Fault::LostBefore,
                    _ => Fault::Pass,
                };
                store.fail_next("enter", fault);
            }
        }
        let readers = Arc::new(Readers::default());
        let members = churn(&server, &coordinators, &readers, 8, 60).await;
        for store in &stores {
            store.no_more_faults();
        }
        heal(&coordinators, &readers, members).await;
        let unknown = join_all(
            coordinators
                .iter()
                .map(|coordinator| async { coordinator.actor(&orders()).await.unwrap().unknown_outcomes }),
        )
        .await;
        assert!(unknown.iter().sum::<u64>() > 5, "{unknown:?} lost answers");
    });
}
