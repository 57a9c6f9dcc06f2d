//! Mutexes: of a group, and of a stream prefix.

use std::time::Duration;

use rsc_store::{Conflict, Entered, Outcome, StoreError};

use crate::support::hands::World;
use crate::support::{applied, created, enter, eventually, group, is_free, lease_only, structural, token};

pub(crate) async fn busy_names_the_holder_and_takes_nothing(world: &World) {
    let group = group("orders");
    created(&*world.store, &group).await;
    let (first, _) = enter(&*world.store, &group, None).await;
    let second = token();
    let entered = world.store.enter(&group, &second, None, None).await.unwrap();
    assert_eq!(entered, Entered::Busy { holder: first.as_str().to_owned() });
    assert!(world.store.renew(&group, &first).await.unwrap());
    assert!(!world.store.renew(&group, &second).await.unwrap());
}

pub(crate) async fn the_same_token_takes_it_again(world: &World) {
    let group = group("orders");
    let stamp = created(&*world.store, &group).await;
    let (token, _) = enter(&*world.store, &group, None).await;
    let again = world.store.enter(&group, &token, None, Some(&stamp)).await.unwrap();
    assert!(matches!(again, Entered::Unchanged { .. }), "{again:?}");
}

pub(crate) async fn a_token_may_be_taken_over_and_no_other(world: &World) {
    let group = group("orders");
    created(&*world.store, &group).await;
    let (earlier, _) = enter(&*world.store, &group, None).await;
    let (stranger, fresh) = (token(), token());
    let entered = world.store.enter(&group, &fresh, Some(&stranger), None).await.unwrap();
    assert!(matches!(entered, Entered::Busy { .. }), "{entered:?}");
    let entered = world.store.enter(&group, &fresh, Some(&earlier), None).await.unwrap();
    assert!(matches!(entered, Entered::Loaded { .. }), "{entered:?}");
    assert!(world.store.renew(&group, &fresh).await.unwrap());
}

pub(crate) async fn the_taken_over_token_can_no_longer_commit(world: &World) {
    let group = group("orders");
    let stamp = created(&*world.store, &group).await;
    let (earlier, _) = enter(&*world.store, &group, None).await;
    let fresh = token();
    world.store.enter(&group, &fresh, Some(&earlier), None).await.unwrap();
    let late = world.store.commit(&group, &earlier, &stamp, &structural("{}", 2)).await;
    assert!(matches!(late, Outcome::Conflict(Conflict::MutexLost)), "{late:?}");
    applied(world.store.commit(&group, &fresh, &stamp, &structural("{}", 2)).await);
}

pub(crate) async fn it_expires_by_itself(world: &World) {
    let group = group("orders");
    let stamp = created(&*world.store, &group).await;
    let (first, _) = enter(&*world.store, &group, None).await;
    let second = token();
    eventually("the mutex expires", || async {
        !matches!(world.store.enter(&group, &second, None, None).await.unwrap(), Entered::Busy { .. })
    })
    .await;
    let late = world.store.commit(&group, &first, &stamp, &structural("{}", 2)).await;
    assert!(matches!(late, Outcome::Conflict(Conflict::MutexLost)), "{late:?}");
}

/// Set by hand, or taken before Redis time went back: nobody would get in for as long.
pub(crate) async fn one_without_an_end_or_with_one_too_far_away_ends_in_time(world: &World) {
    let group = group("orders");
    created(&*world.store, &group).await;
    let (of_group, of_stream) = (world.keys.mutex(&group), world.keys.stream_mutex("orders"));
    let stranger = token();
    let ask = async || {
        let entered = world.store.enter(&group, &stranger, None, None).await.unwrap();
        assert_eq!(entered, Entered::Busy { holder: "other".to_owned() });
        let holder = world.store.lock_stream("orders", &stranger).await.unwrap();
        assert_eq!(holder.as_deref(), Some("other"));
    };
    for key in [&of_group, &of_stream] {
        world.put_text(key, "other");
    }
    ask().await;
    for key in [&of_group, &of_stream] {
        assert!(is_long(world.ttl_ms(key)), "it had no end");
        world.expire_in(key, Duration::from_secs(3_600));
    }
    ask().await;
    for key in [&of_group, &of_stream] {
        assert!(world.ttl_ms(key).is_some_and(|left| left <= 600_000), "it had an hour");
        world.expire_in(key, SHORT);
    }
    ask().await;
    for key in [&of_group, &of_stream] {
        assert!(!is_long(world.ttl_ms(key)), "asking prolongs nothing");
    }
}

pub(crate) async fn taking_it_again_starts_its_ttl_anew(world: &World) {
    let group = group("orders");
    created(&*world.store, &group).await;
    let (first, _) = enter(&*world.store, &group, None).await;
    let key = world.keys.mutex(&group);
    world.expire_in(&key, SHORT);
    world.store.enter(&group, &first, None, None).await.unwrap();
    assert!(is_long(world.ttl_ms(&key)));
    world.expire_in(&key, SHORT);
    world.store.enter(&group, &token(), Some(&first), None).await.unwrap();
    assert!(is_long(world.ttl_ms(&key)));
}

/// Much shorter than the TTL of the cases that do not wait for its end, and longer than any of them.
const SHORT: Duration = Duration::from_secs(200);

fn is_long(ttl_ms: Option<i64>) -> bool {
    ttl_ms.is_some_and(|ttl_ms| ttl_ms > 300_000)
}

pub(crate) async fn a_stranger_releases_nothing(world: &World) {
    let group = group("orders");
    created(&*world.store, &group).await;
    let (token_of_holder, _) = enter(&*world.store, &group, None).await;
    world.store.release(&group, &token()).await.unwrap();
    assert!(!is_free(&*world.store, &group).await);
    world.store.release(&group, &token_of_holder).await.unwrap();
    assert!(is_free(&*world.store, &group).await);
    world.store.release(&group, &token_of_holder).await.unwrap();
}

pub(crate) async fn renew_extends_only_the_holders(world: &World) {
    let group = group("orders");
    created(&*world.store, &group).await;
    assert!(!world.store.renew(&group, &token()).await.unwrap());
    let (holder, _) = enter(&*world.store, &group, None).await;
    let key = world.keys.mutex(&group);
    world.expire_in(&key, SHORT);
    assert!(!world.store.renew(&group, &token()).await.unwrap());
    assert!(!is_long(world.ttl_ms(&key)));
    assert!(world.store.renew(&group, &holder).await.unwrap());
    assert!(is_long(world.ttl_ms(&key)));
    // What has expired is not revived.
    world.remove(&key);
    assert!(!world.store.renew(&group, &holder).await.unwrap());
    assert_eq!(world.kind(&key), "none");
}

pub(crate) async fn a_key_of_another_type_is_refused_by_name(world: &World) {
    let group = group("orders");
    let stamp = created(&*world.store, &group).await;
    let key = world.keys.mutex(&group);
    world.put_hash(&key, &[("a", b"b")]);
    let token = token();
    let named = |error: &StoreError| {
        assert!(matches!(error, StoreError::Refused(_)), "{error:?}");
        assert!(error.to_string().contains(&key), "{error}");
    };
    named(&world.store.enter(&group, &token, None, None).await.unwrap_err());
    named(&world.store.renew(&group, &token).await.unwrap_err());
    named(&world.store.release(&group, &token).await.unwrap_err());
    let writes = [
        world.store.commit(&group, &token, &stamp, &lease_only(&[("m", "{}")])).await,
        world.store.create(&group, &token, None, &structural("{}", 1)).await,
        world.store.delete(&group, &token, None, None).await,
    ];
    for outcome in writes {
        match outcome {
            Outcome::NotApplied(error) => named(&error),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(world.kind(&key), "hash");
    assert_eq!(world.field(&world.keys.metadata(&group), "writeId"), Some(stamp.write_id));
}

pub(crate) async fn the_stream_mutex_is_one_per_prefix(world: &World) {
    let (first, second) = (token(), token());
    assert_eq!(world.store.lock_stream("orders", &first).await.unwrap(), None);
    assert_eq!(world.store.lock_stream("orders", &first).await.unwrap(), None);
    let holder = world.store.lock_stream("orders", &second).await.unwrap();
    assert_eq!(holder.as_deref(), Some(first.as_str()));
    assert_eq!(world.store.lock_stream("orders:2", &second).await.unwrap(), None);
    world.put_hash(&world.keys.stream_mutex("parcels"), &[("a", b"b")]);
    let error = world.store.lock_stream("parcels", &first).await.unwrap_err();
    assert!(error.to_string().contains(&world.keys.stream_mutex("parcels")), "{error}");
}

pub(crate) async fn the_stream_mutex_is_renewed_and_given_back(world: &World) {
    let (first, second) = (token(), token());
    assert_eq!(world.store.lock_stream("orders", &first).await.unwrap(), None);
    let key = world.keys.stream_mutex("orders");
    assert!(!world.store.renew_stream("orders", &second).await.unwrap());
    world.store.unlock_stream("orders", &second).await.unwrap();
    world.expire_in(&key, SHORT);
    assert!(world.store.renew_stream("orders", &first).await.unwrap());
    assert!(is_long(world.ttl_ms(&key)));
    world.store.unlock_stream("orders", &first).await.unwrap();
    assert_eq!(world.store.lock_stream("orders", &second).await.unwrap(), None);
}
