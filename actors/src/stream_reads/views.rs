//! From a group's record and what the store found to what is shown. Pure.

use std::collections::BTreeMap;

use rsc_core::{Group, Member, ShardSet};
use rsc_protocol::ShardRef;
use rsc_protocol::hash::redis_slot;
use rsc_protocol::keys::shard_key;
use rsc_protocol::monitoring::{
    ConsumerPending, ConsumptionResponse, ConsumptionTotals, GroupOffsets, MemberConsumption,
    OffsetsResponse, ShardConsumption, ShardOffsets,
};
use rsc_store::{ShardView, StreamView, WaitReason, Waiting};

use super::Pending;
use crate::resharding::drain_wait;

/// Every shard that the record names: what consumers read, and what its migrations have removed.
pub(super) fn on_record(group: &Group) -> ShardSet {
    let mut shards = group.read_set().to_set();
    for migration in group.migrations.values() {
        shards.extend(migration.removed().iter());
    }
    shards
}

/// Every shard that somebody reads or is to read.
pub(super) fn consumed(group: &Group) -> ShardSet {
    let mut shards = group.read_set().to_set();
    shards.extend(group.holders().into_keys());
    shards
}

/// A missing group has nothing to read in an empty stream; that is no news about a shard nobody reads.
fn is_unread(wait: &Waiting) -> bool {
    wait.reason != WaitReason::GroupMissing || wait.undelivered > 0
}

/// Whether any shard that producers are not told of has something unread.
pub(super) fn anything_unread(views: &BTreeMap<u32, ShardView>) -> bool {
    let has_unread =
        |view: &ShardView| matches!(view, ShardView::Stream(view) if view.unread.iter().any(is_unread));
    views.values().any(has_unread)
}

/// The answer of `/offsets`. `groups`: those that are coordinated on the stream, as far as it is known.
pub(super) fn offsets(group: &Group, groups: &[Group], views: &BTreeMap<u32, ShardView>) -> OffsetsResponse {
    let (read_set, holders) = (group.read_set(), group.holders());
    let row = |(&shard_index, view): (&u32, &ShardView)| {
        let mut row = empty_row(group, shard_index);
        row.routed = shard_index < group.shard_count;
        row.consumed = read_set.contains(shard_index);
        row.owner = holders.get(&shard_index).map(|owner| (*owner).to_owned());
        match view {
            ShardView::Absent => {}
            ShardView::OtherType { found } => {
                row.exists = true;
                row.key_type = Some(found.clone());
            }
            ShardView::Stream(view) => fill(&mut row, view, groups),
        }
        row
    };
    let shards: Vec<ShardOffsets> = views.iter().map(row).collect();
    let is_unread = |row: &&ShardOffsets| !row.consumed && !row.unread.is_empty();
    let unread = shards.iter().filter(is_unread).map(|row| ShardRef { shard_index: row.shard_index });
    OffsetsResponse {
        stream_prefix: group.key.stream_prefix().to_owned(),
        consumer_group: group.key.consumer_group().to_owned(),
        metadata_version: group.metadata_version,
        shard_count: group.shard_count,
        unread_deprecated_shards: unread.collect(),
        shards,
    }
}

fn empty_row(group: &Group, shard_index: u32) -> ShardOffsets {
    let stream_key = shard_key(group.key.stream_prefix(), shard_index);
    ShardOffsets {
        shard_index,
        redis_slot: redis_slot(&stream_key),
        stream_key,
        routed: false,
        consumed: false,
        owner: None,
        exists: false,
        key_type: None,
        length: None,
        first_id: None,
        last_id: None,
        last_generated_id: None,
        memory_bytes: None,
        cursor: None,
        pending: None,
        lag: None,
        undelivered: None,
        undelivered_is_at_least: false,
        groups: Vec::new(),
        unread: Vec::new(),
    }
}

fn fill(row: &mut ShardOffsets, view: &StreamView, groups: &[Group]) {
    row.exists = true;
    row.key_type = Some("stream".to_owned());
    row.length = Some(view.length);
    row.first_id = view.first_id;
    row.last_id = view.last_id;
    row.last_generated_id = Some(view.last_generated_id);
    row.memory_bytes = view.memory_bytes;
    // Only of the group that was asked about the undelivered records are counted.
    let own = view.groups.iter().find_map(|own| own.undelivered.map(|undelivered| (own, undelivered)));
    if let Some((own, undelivered)) = own {
        row.cursor = Some(own.cursor);
        row.pending = Some(own.pending);
        row.lag = own.lag;
        row.undelivered = Some(undelivered.count);
        row.undelivered_is_at_least = undelivered.is_at_least;
    }
    let group_row = |group: &rsc_store::GroupView| GroupOffsets {
        consumer_group: group.consumer_group.clone(),
        cursor: group.cursor,
        pending: group.pending,
        lag: group.lag,
        consumers: group.consumers,
    };
    row.groups = view.groups.iter().map(group_row).collect();
    let unread = view.unread.iter().filter(|wait| is_unread(wait));
    row.unread = unread.map(|wait| drain_wait(groups, wait)).collect();
}

/// The answer of `/consumption`.
pub(super) fn consumption(group: &Group, pending: &Pending) -> ConsumptionResponse {
    let mut totals = ConsumptionTotals::default();
    let mut members = Vec::new();
    for (id, member) in group.live_members() {
        let holding = member.holding();
        let shards: Vec<ShardConsumption> =
            holding.iter().map(|shard| shard_row(group, Some(member), shard, pending)).collect();
        let of_member = sums(&shards);
        totals = sum_of(totals, of_member);
        members.push(MemberConsumption {
            member_id: id.clone(),
            member_name: member.member_name.clone(),
            state: member.state,
            last_heartbeat_at: member.live.last_heartbeat_at,
            shards,
            totals: of_member,
        });
    }
    let holders = group.holders();
    let unowned = consumed(group).iter().filter(|shard| !holders.contains_key(shard)).collect::<ShardSet>();
    let unowned_shards: Vec<ShardConsumption> =
        unowned.iter().map(|shard| shard_row(group, None, shard, pending)).collect();
    ConsumptionResponse {
        stream_prefix: group.key.stream_prefix().to_owned(),
        consumer_group: group.key.consumer_group().to_owned(),
        state: group.state,
        metadata_version: group.metadata_version,
        updated_at: group.updated_at,
        members,
        totals: sum_of(totals, sums(&unowned_shards)),
        unowned_shards,
    }
}

fn shard_row(
    group: &Group,
    member: Option<&Member>,
    shard_index: u32,
    pending: &Pending,
) -> ShardConsumption {
    let reported = member.and_then(|member| {
        member.live.shard_progress.iter().find(|row| row.shard.shard_index == shard_index)
    });
    let by_consumer = pending.get(&shard_index).and_then(Option::as_ref);
    let consumer =
        |(name, pending): &(String, u64)| ConsumerPending { consumer: name.clone(), pending: *pending };
    ShardConsumption {
        shard_index,
        stream_key: shard_key(group.key.stream_prefix(), shard_index),
        reading: member.is_some_and(|member| member.current.contains(shard_index)),
        last_delivered_id: reported.and_then(|row| row.last_delivered_id.clone()),
        last_acked_id: reported.and_then(|row| row.last_acked_id.clone()),
        reported_pending: reported.map(|row| row.pending_count),
        reported_at: reported.and_then(|row| row.updated_at),
        redis_pending: by_consumer.map(|consumers| consumers.iter().map(|(_, pending)| pending).sum()),
        redis_consumers: by_consumer.into_iter().flatten().map(consumer).collect(),
    }
}

fn sums(rows: &[ShardConsumption]) -> ConsumptionTotals {
    rows.iter().fold(ConsumptionTotals::default(), |totals, row| {
        let of_row = ConsumptionTotals {
            shards: 1,
            reported_pending: row.reported_pending,
            redis_pending: row.redis_pending,
        };
        sum_of(totals, of_row)
    })
}

fn sum_of(one: ConsumptionTotals, other: ConsumptionTotals) -> ConsumptionTotals {
    // What is unknown adds nothing, and nothing but unknowns is unknown.
    let sum = |one: Option<u64>, other: Option<u64>| match (one, other) {
        (Some(one), Some(other)) => Some(one.saturating_add(other)),
        (one, other) => one.or(other),
    };
    ConsumptionTotals {
        shards: one.shards.saturating_add(other.shards),
        reported_pending: sum(one.reported_pending, other.reported_pending),
        redis_pending: sum(one.redis_pending, other.redis_pending),
    }
}
