//! Who watches a screen does not keep the store busy.

use futures_util::future::join_all;
use rsc_protocol::GroupKey;
use rsc_protocol::monitoring::{RecordId, RecordOrder};

use super::faults::{Fault, TestStore};
use super::{code, create, eventually, in_system, key, memory_store, orders, patient, start};
use crate::{Coordinator, MessagesQuery};

const QUERY: MessagesQuery = MessagesQuery {
    shard_index: 0,
    lowest: RecordId::MIN,
    highest: RecordId::MAX,
    order: RecordOrder::Asc,
    limit: 10,
};

/// Every question about a group, one after the other.
async fn ask_everything(coordinator: &Coordinator, group: &GroupKey) {
    coordinator.offsets(group).await.unwrap();
    coordinator.consumption(group).await.unwrap();
    coordinator.messages(group, &QUERY).await.unwrap();
    coordinator.history(group, None, 10).await.unwrap();
}

const CALLS: [&str; 4] = ["shard_views", "pending_by_consumer", "records", "history"];

#[test]
fn the_same_question_goes_to_the_store_once_in_a_while() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let coordinator = start(patient("a"), &store);
        create(&coordinator, &orders(), 4).await;
        for call in CALLS {
            store.hold(call);
        }
        let group = orders();
        let many = join_all((0..20).map(|_| ask_everything(&coordinator, &group)));
        let release = async {
            for call in CALLS {
                eventually("somebody asks the store", || async { store.calls(call) > 0 }).await;
                store.let_go(call);
            }
        };
        tokio::join!(many, release);
        // Once; a machine that stands still for a second in between makes it more.
        for call in CALLS {
            assert!(store.calls(call) < 5, "{call}: {}", store.calls(call));
        }

        for _ in 0..20 {
            ask_everything(&coordinator, &group).await;
        }
        for call in CALLS {
            assert!(store.calls(call) < 10, "{call}: {}", store.calls(call));
        }

        // Another question is another question.
        let (records, histories) = (store.calls("records"), store.calls("history"));
        coordinator.messages(&group, &MessagesQuery { shard_index: 1, ..QUERY }).await.unwrap();
        coordinator.history(&group, None, 11).await.unwrap();
        assert_eq!((store.calls("records"), store.calls("history")), (records + 1, histories + 1));

        // What was shown is not shown for ever.
        let before = CALLS.map(|call| store.calls(call));
        eventually("the store is asked anew", async || {
            ask_everything(&coordinator, &group).await;
            CALLS.iter().zip(before).all(|(call, before)| store.calls(call) > before)
        })
        .await;
    });
}

#[test]
fn a_few_questions_at_a_time_go_to_the_store_and_the_others_wait() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let coordinator = start(patient("a"), &store);
        let groups: Vec<GroupKey> = (0..9).map(|number| key(&format!("s{number}"), "billing")).collect();
        for group in &groups {
            create(&coordinator, group, 1).await;
        }
        store.hold("pending_by_consumer");
        let questions = join_all(groups.iter().map(|group| coordinator.consumption(group)));
        let release = async {
            eventually("four ask", || async { store.calls("pending_by_consumer") >= 4 }).await;
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            assert_eq!(store.calls("pending_by_consumer"), 4);
            store.let_go("pending_by_consumer");
        };
        let (answers, ()) = tokio::join!(questions, release);
        assert!(answers.iter().all(Result::is_ok));
        assert_eq!(store.calls("pending_by_consumer"), 9);
    });
}

#[test]
fn who_waits_too_long_is_told_so_and_failures_are_not_remembered() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let coordinator = start(patient("a"), &store);
        let groups: Vec<GroupKey> = (0..5).map(|number| key(&format!("s{number}"), "billing")).collect();
        for group in &groups {
            create(&coordinator, group, 1).await;
        }
        store.hold("history");
        let questions = groups[..4].iter().map(|group| coordinator.history(group, None, 10));
        let late = async {
            eventually("four ask", || async { store.calls("history") >= 4 }).await;
            let refused = coordinator.history(&groups[4], None, 10).await;
            assert_eq!(code(refused), "COORDINATOR_OVERLOADED");
            store.let_go("history");
        };
        let (answers, ()) = tokio::join!(join_all(questions), late);
        assert!(answers.iter().all(Result::is_ok));

        store.fail_next("history", Fault::NotSent);
        assert_eq!(code(coordinator.history(&groups[4], None, 10).await), "REDIS_UNAVAILABLE");
        coordinator.history(&groups[4], None, 10).await.unwrap();
    });
}

#[test]
fn looking_beyond_ends() {
    in_system(async {
        let store = TestStore::new(memory_store());
        let mut settings = patient("a");
        settings.max_shard_count = 10_000;
        let coordinator = start(settings, &store);
        create(&coordinator, &orders(), 4).await;
        let offsets = coordinator.offsets(&orders()).await.unwrap();
        assert_eq!(offsets.shards.len(), 4);
        assert_eq!(store.calls("existing_streams"), 1);
    });
}
