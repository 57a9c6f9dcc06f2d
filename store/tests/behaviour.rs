//! One behaviour, two stores: every case runs on a redis-server of its own and in memory.

// Clippy's own exception reaches test functions only, not the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod suite;
mod support;

macro_rules! behaviour {
    ($($room:ident { $($case:ident $(with $mutex_ttl_ms:literal)?),* $(,)? })*) => {
        mod memory {
            $(mod $room {$(
                #[tokio::test]
                async fn $case() {
                    let ttl = std::time::Duration::from_millis(0 $(+ $mutex_ttl_ms)?);
                    let world = crate::support::hands::World::memory(crate::or_long(ttl));
                    crate::suite::$room::$case(&world).await;
                }
            )*})*
        }
        mod redis {
            $(mod $room {$(
                #[tokio::test]
                async fn $case() {
                    let ttl = std::time::Duration::from_millis(0 $(+ $mutex_ttl_ms)?);
                    let world = crate::support::hands::World::redis(crate::or_long(ttl));
                    crate::suite::$room::$case(&world).await;
                }
            )*})*
        }
    };
}

/// A mutex TTL that no test outlives, unless the case wants a short one.
fn or_long(mutex_ttl: std::time::Duration) -> std::time::Duration {
    if mutex_ttl.is_zero() { std::time::Duration::from_secs(600) } else { mutex_ttl }
}

behaviour! {
    mutex {
        busy_names_the_holder_and_takes_nothing,
        the_same_token_takes_it_again,
        a_token_may_be_taken_over_and_no_other,
        the_taken_over_token_can_no_longer_commit,
        it_expires_by_itself with 60,
        one_without_an_end_or_with_one_too_far_away_ends_in_time,
        taking_it_again_starts_its_ttl_anew,
        a_stranger_releases_nothing,
        renew_extends_only_the_holders,
        a_key_of_another_type_is_refused_by_name,
        the_stream_mutex_is_one_per_prefix,
        the_stream_mutex_is_renewed_and_given_back,
    }
    commit {
        unchanged_only_if_all_three_match,
        absent_live_revision_and_write_id_count,
        the_same_revision_with_another_write_id_does_not_pass,
        structural_writes_every_field_and_frees_the_mutex,
        lease_only_leaves_aggregate_and_revision_alone,
        a_lost_mutex_writes_nothing,
        a_vanished_key_is_never_created_again,
        a_key_of_another_type_is_never_touched,
        a_ttl_is_reported_and_removed,
        ten_thousand_live_fields_in_one_commit,
        numbers_keep_every_digit,
        bytes_survive,
        history_grows_and_is_capped,
        a_history_of_another_type_fails_nothing,
    }
    lifecycle {
        create_keeps_the_mutex,
        create_refuses_what_is_there_already,
        create_refuses_a_mutex_of_another,
        create_wants_the_tombstone_that_was_read,
        create_removes_the_tombstone_and_goes_on_above_it,
        create_by_a_lease_only_write_is_refused,
        a_damaged_or_foreign_tombstone_stops_nobody,
        a_commit_to_a_restored_group_removes_its_tombstone,
        delete_leaves_a_tombstone_for_a_day_and_frees_the_mutex,
        delete_with_a_stale_stamp_is_refused,
        delete_without_a_stamp_takes_whatever_is_there,
        delete_without_a_tombstone_leaves_none,
        delete_needs_the_mutex,
    }
    around {
        read_takes_no_mutex,
        the_index_is_a_set,
        an_index_of_another_type_is_an_error,
        names_of_every_kind,
        provisioning_again_is_fine,
        ping_tells_the_time,
    }
    drain {
        what_does_not_exist_is_proven_and_absent,
        what_was_only_provisioned_is_proven_and_deleted,
    }
    reads {
        what_does_not_exist_is_shown_as_absent,
        a_history_is_paged_downwards,
    }
}
