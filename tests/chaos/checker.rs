//! Compares what clients were told and did with what lasted.

use std::collections::BTreeMap;

use super::lineage::{Lineage, Loss, Term};
use super::log::{Acknowledged, Notes, Reading, Transition};
use super::plan::LEASE;

/// Redis tells time in whole milliseconds: that much is nobody's fault.
const TOLERATED_US: u64 = 1_000;

/// Two clients on one shard.
#[derive(Clone, Debug)]
pub(crate) struct DoubleReading {
    pub(crate) first: Reading,
    /// Granted later.
    pub(crate) second: Reading,
    pub(crate) overlap_us: u64,
    /// Why it may be (protocol 5, *What remains*); `None`: it may not.
    pub(crate) excuse: Option<Excuse>,
}

/// What the protocol cannot prevent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Excuse {
    /// Redis lost writes, and the shard was granted before the first sign of it.
    GrantedBeforeTheFirstSign,
    /// One of the two grants was written by a master that had been replaced.
    TwoHistories,
}

/// A transition that was acknowledged and lost.
#[derive(Clone, Debug)]
pub(crate) struct LostTransition {
    pub(crate) transition: Transition,
    pub(crate) told: Acknowledged,
    pub(crate) loss: Loss,
    /// How long after the successor's first write a correction round began; `None`: none did in time.
    pub(crate) noticed_after_us: Option<u64>,
    /// Nobody who knew of it has spoken to a coordinator since.
    pub(crate) nobody_left: bool,
}

/// The outcome.
#[derive(Debug)]
pub(crate) struct Verdict {
    pub(crate) lineage: Lineage,
    pub(crate) acknowledged: usize,
    pub(crate) grants: usize,
    pub(crate) lost: Vec<LostTransition>,
    pub(crate) double_readings: Vec<DoubleReading>,
    /// Everything that must not be.
    pub(crate) violations: Vec<String>,
}

/// A killed master may have answered and not shown its last write to the witness any more.
const LAST_WORDS_US: u64 = 1_000_000;

/// Takes what was acknowledged by a master in the moment of its death, and was not seen being written, for lost: if it was not,
/// the numbers of the writes that follow show a gap.
fn complete(lineage: &mut Lineage, notes: &Notes, wall_us: u64, master_kills_us: &[u64]) {
    for (transition, told) in &notes.acknowledged {
        let is_last_word = |killed_us: &&u64| {
            told.first_received_us + LAST_WORDS_US > **killed_us
                && told.first_received_us < **killed_us + LAST_WORDS_US
        };
        let Some(&killed_us) = master_kills_us.iter().find(is_last_word) else { continue };
        let next = lineage.terms.iter().position(|term| term.first_write_us > killed_us + wall_us);
        if let (false, Some(term)) = (lineage.written_us.contains_key(transition), next) {
            lineage.written_us.insert(transition.clone(), 0);
            lineage.lost.insert(transition.clone(), Loss::NotReplicated { term });
            lineage.terms[term].lost += 1;
            lineage.lost_writes += 1;
        }
    }
}

/// `wall_us`: how far the servers' clock is ahead of the monotonic one.
pub(crate) fn check(mut lineage: Lineage, notes: &Notes, wall_us: u64, master_kills_us: &[u64]) -> Verdict {
    complete(&mut lineage, notes, wall_us, master_kills_us);
    let mut violations = lineage.contradictions.clone();
    let mut lost = Vec::new();
    for (transition, told) in &notes.acknowledged {
        let Some(&written_us) = lineage.written_us.get(transition) else {
            violations.push(format!("acknowledged, and never written: {transition:?} to {told:?}"));
            continue;
        };
        if told.first_received_us + wall_us + TOLERATED_US < written_us {
            violations.push(format!(
                "acknowledged before it was written at {written_us}: {transition:?} to {told:?}"
            ));
        }
        if let Some(&loss) = lineage.lost.get(transition) {
            lost.push(lost_transition(&lineage, notes, wall_us, transition, told, loss));
        }
    }
    for lost in lost.iter().filter(|lost| lost.noticed_after_us.is_none() && !lost.nobody_left) {
        violations.push(format!("lost, and no correction round noticed: {lost:?}"));
    }
    let double_readings = double_readings(&lineage, notes, wall_us);
    for double in &double_readings {
        if double.excuse.is_none() {
            violations.push(format!("read by two without an excuse: {double:?}"));
        } else if double.overlap_us > u64::try_from(LEASE.as_micros()).unwrap() {
            violations.push(format!("read by two for longer than a lease: {double:?}"));
        }
    }
    violations.extend(fencing_tokens_that_went_back(notes));
    if lineage.unseen > 0 {
        violations.push(format!("the witness has missed {} writes", lineage.unseen));
    }
    let acknowledged = notes.acknowledged.len();
    let grants = notes.acknowledged.values().map(|told| told.grants).sum();
    Verdict { lineage, acknowledged, grants, lost, double_readings, violations }
}

/// When a correction round has to have begun: a member reports every half second at the latest; the rest is for a slow machine
/// and for a coordinator that comes back only now.
fn notice_bound_us() -> u64 {
    u64::try_from((LEASE * 2).as_micros()).unwrap()
}

fn first_sign_us(lineage: &Lineage, after_us: u64) -> Option<u64> {
    lineage.rounds.iter().map(|round| round.at_us).find(|&at_us| at_us >= after_us)
}

fn lost_transition(
    lineage: &Lineage,
    notes: &Notes,
    wall_us: u64,
    transition: &Transition,
    told: &Acknowledged,
    loss: Loss,
) -> LostTransition {
    let from_us = match loss {
        Loss::NotReplicated { term } => lineage.terms[term].first_write_us,
        Loss::ByReplacedMaster => lineage.written_us[transition],
    };
    let noticed_after_us = first_sign_us(lineage, from_us)
        .map(|sign_us| sign_us - from_us)
        .filter(|after_us| *after_us <= notice_bound_us());
    let spoke_since = |reader| notes.ended.get(reader).is_none_or(|ended_us| ended_us + wall_us > from_us);
    LostTransition {
        transition: transition.clone(),
        told: told.clone(),
        loss,
        noticed_after_us,
        nobody_left: !told.readers.iter().any(spoke_since),
    }
}

fn double_readings(lineage: &Lineage, notes: &Notes, wall_us: u64) -> Vec<DoubleReading> {
    let mut by_shard: BTreeMap<u32, Vec<&Reading>> = BTreeMap::new();
    for reading in &notes.readings {
        by_shard.entry(reading.shard).or_default().push(reading);
    }
    let mut found = Vec::new();
    for readings in by_shard.values_mut() {
        readings.sort_by_key(|reading| (reading.from_us, reading.until_us));
        for (index, &one) in readings.iter().enumerate() {
            let others = readings[index + 1..].iter().take_while(|other| other.from_us < one.until_us);
            for &other in others.filter(|other| other.reader != one.reader) {
                let overlap_us = one.until_us.min(other.until_us) - other.from_us;
                if overlap_us <= TOLERATED_US {
                    continue;
                }
                let is_later = one.grant.sent_us > other.grant.sent_us;
                let (first, second) = if is_later { (other, one) } else { (one, other) };
                let excuse = excuse(lineage, wall_us, first, second);
                found.push(DoubleReading {
                    first: first.clone(),
                    second: second.clone(),
                    overlap_us,
                    excuse,
                });
            }
        }
    }
    found
}

fn excuse(lineage: &Lineage, wall_us: u64, first: &Reading, second: &Reading) -> Option<Excuse> {
    let vain =
        |reading: &Reading| lineage.lost.get(&reading.grant.transition) == Some(&Loss::ByReplacedMaster);
    if vain(first) || vain(second) {
        return Some(Excuse::TwoHistories);
    }
    // The first term has no predecessor.
    let is_in_window = |term: &Term| {
        // Without a sign within a lease nobody was there any more who could have given one.
        let lease_us = u64::try_from(LEASE.as_micros()).unwrap();
        let until_us = first_sign_us(lineage, term.first_write_us)
            .unwrap_or(u64::MAX)
            .min(term.first_write_us + lease_us);
        let (sent_us, received_us) = (second.grant.sent_us + wall_us, second.grant.received_us + wall_us);
        term.lost > 0 && sent_us <= until_us && received_us >= term.since_us
    };
    lineage.terms.iter().skip(1).any(is_in_window).then_some(Excuse::GrantedBeforeTheFirstSign)
}

/// Fencing tokens of one shard increase from grant to grant, also when the last ones were lost (protocol 4: Redis time).
fn fencing_tokens_that_went_back(notes: &Notes) -> Vec<String> {
    let mut by_shard: BTreeMap<u32, Vec<&Reading>> = BTreeMap::new();
    for reading in &notes.readings {
        by_shard.entry(reading.shard).or_default().push(reading);
    }
    let mut violations = Vec::new();
    for readings in by_shard.values_mut() {
        readings.sort_by_key(|reading| reading.grant.received_us);
        for pair in readings.windows(2) {
            let (before, after) = (&pair[0].grant, &pair[1].grant);
            let is_other = pair[0].reader != pair[1].reader;
            // Of answers that were on their way at the same time either may have been decided first.
            let is_later = after.sent_us > before.received_us;
            let goes_back = after.fencing_token < before.fencing_token
                || (is_other && after.fencing_token == before.fencing_token);
            if is_later && goes_back {
                violations.push(format!("a fencing token went back: {:?}, then {:?}", pair[0], pair[1]));
            }
        }
    }
    violations
}
