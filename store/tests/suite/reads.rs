//! What people are shown of streams, as far as it is the same without any.

use rsc_core::ShardSet;
use rsc_protocol::monitoring::RecordId;
use rsc_store::{RecordPage, RecordRange, ShardView};

use crate::support::hands::World;
use crate::support::{applied, created, enter, group, structural};

pub(crate) async fn what_does_not_exist_is_shown_as_absent(world: &World) {
    let shards = ShardSet::from([1, 700]);
    let views = world.store.shard_views("orders", "billing", &shards, &shards).await.unwrap();
    assert_eq!(views.into_iter().collect::<Vec<_>>(), [(1, ShardView::Absent), (700, ShardView::Absent)]);
    let pending = world.store.pending_by_consumer("orders", "billing", &shards).await.unwrap();
    assert_eq!(pending.into_iter().collect::<Vec<_>>(), [(1, None), (700, None)]);
    assert!(world.store.existing_streams("orders", 0..1000).await.unwrap().is_empty());
    let everything =
        RecordRange { lowest: RecordId::MIN, highest: RecordId::MAX, newest_first: false, limit: 5 };
    assert_eq!(world.store.records("orders", 1, &everything).await.unwrap(), RecordPage::default());
}

pub(crate) async fn a_history_is_paged_downwards(world: &World) {
    let group = group("orders");
    assert!(world.store.history(&group, None, 10).await.unwrap().entries.is_empty());
    let mut stamp = created(&*world.store, &group).await;
    for revision in 2..=8 {
        let (token, _) = enter(&*world.store, &group, None).await;
        let mut write = structural("{}", revision);
        write.history = Some(format!("{{\"revision\":{revision}}}"));
        stamp = applied(world.store.commit(&group, &token, &stamp, &write).await);
    }
    let mut before = None;
    let mut pages = Vec::new();
    loop {
        let page = world.store.history(&group, before, 3).await.unwrap();
        let ids: Vec<RecordId> = page.entries.iter().map(|(id, _)| *id).collect();
        assert!(ids.is_sorted_by(|one, other| one > other), "{ids:?}");
        before = ids.last().copied();
        pages.push(page.entries.into_iter().map(|(_, text)| text).collect::<Vec<_>>());
        if !page.more {
            break;
        }
    }
    let expected = [&[8, 7, 6][..], &[5, 4, 3], &[2]];
    let texts = expected
        .map(|page| page.iter().map(|revision| format!("{{\"revision\":{revision}}}")).collect::<Vec<_>>());
    assert_eq!(pages, texts);
    let exactly = world.store.history(&group, None, 7).await.unwrap();
    assert_eq!((exactly.entries.len(), exactly.more), (7, false));
    assert!(world.store.history(&group, Some(RecordId::MIN), 7).await.unwrap().entries.is_empty());
    world.put_text(&world.keys.history(&group), "no stream");
    assert!(world.store.history(&group, None, 7).await.unwrap().entries.is_empty());
}
