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
        let LostTransition { transition, told, loss, .. } = lost;
        violations.push(format!(
            "lost ({loss:?}), and no correction round noticed: {transition:?}, told to {told:?}"
        ));
    }
    let double_readings = double_readings(&lineage, notes, wall_us);
    for double in &double_readings {
        let DoubleReading { first, second, overlap_us, excuse } = double;
        let what = format!("{overlap_us} µs at once: {first:?} and {second:?}");
        if excuse.is_none() {
            violations.push(format!("read by two without an excuse for {what}"));
        } else if *overlap_us > u64::try_from(LEASE.as_micros()).unwrap() {
            violations.push(format!("read by two for longer than a lease: {what}"));
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::lineage::Round;
    use super::super::log::Grant;
    use super::*;

    const LOST: Loss = Loss::NotReplicated { term: 1 };

    fn transition(version: u64) -> Transition {
        Transition { version, token: format!("token {version}") }
    }

    /// Versions 1 to 9 were written at 1 s to 9 s; 5 is lost: the second master was promoted after 5 s and wrote first at 6 s.
    fn lineage(signs_us: &[u64]) -> Lineage {
        let written = |version| (transition(version), version * 1_000_000);
        Lineage {
            terms: vec![
                Term { since_us: 0, first_write_us: 0, lost: 0 },
                Term { since_us: 5_500_000, first_write_us: 6_000_000, lost: 1 },
            ],
            rounds: signs_us.iter().map(|&at_us| Round { at_us, is_anew: false }).collect(),
            lasting: (1..10).filter(|version| *version != 5).map(transition).collect(),
            lost: [(transition(5), LOST)].into(),
            written_us: (1..10).map(written).collect(),
            ..Lineage::default()
        }
    }

    fn reading(reader: &str, version: u64, from_us: u64, until_us: u64) -> Reading {
        let grant = Grant {
            transition: transition(version),
            fencing_token: version,
            sent_us: from_us - 1_000,
            received_us: from_us,
        };
        Reading { shard: 0, reader: Arc::from(reader), from_us, until_us, grant }
    }

    fn notes(readings: &[Reading]) -> Notes {
        let mut notes = Notes { readings: readings.to_vec(), ..Notes::default() };
        for reading in readings {
            let told = Acknowledged {
                first_received_us: reading.grant.received_us,
                readers: [Arc::clone(&reading.reader)].into(),
                grants: 1,
            };
            notes.acknowledged.insert(reading.grant.transition.clone(), told);
        }
        notes
    }

    fn violations(lineage: Lineage, readings: &[Reading]) -> Vec<String> {
        check(lineage, &notes(readings), 0, &[]).violations
    }

    fn expect_one(found: &[String], about: &str) {
        assert!(found.len() == 1 && found[0].contains(about), "{about}: {found:#?}");
    }

    #[test]
    fn one_after_the_other_is_well() {
        let readings = [reading("a", 1, 1_000_000, 2_000_000), reading("b", 2, 2_000_000, 3_000_000)];
        assert!(violations(lineage(&[]), &readings).is_empty());
    }

    #[test]
    fn two_at_once_need_a_loss_that_nobody_had_noticed_yet() {
        let a = reading("a", 1, 1_000_000, 8_000_000);
        let before_the_loss = [a.clone(), reading("b", 3, 3_000_000, 4_000_000)];
        expect_one(&violations(lineage(&[6_500_000]), &before_the_loss), "without an excuse");
        let before_the_sign = [a.clone(), reading("b", 6, 6_300_000, 8_000_000)];
        assert!(violations(lineage(&[6_500_000]), &before_the_sign).is_empty());
        let after_the_sign = [a.clone(), reading("b", 7, 7_000_000, 8_000_000)];
        expect_one(&violations(lineage(&[6_500_000]), &after_the_sign), "without an excuse");
        let for_too_long = [reading("a", 1, 1_000_000, 20_000_000), reading("b", 6, 6_300_000, 20_000_000)];
        expect_one(&violations(lineage(&[6_500_000]), &for_too_long), "longer than a lease");
        let nothing_was_lost = Lineage {
            terms: vec![Term { since_us: 0, first_write_us: 0, lost: 0 }; 2],
            ..lineage(&[6_500_000])
        };
        expect_one(&violations(nothing_was_lost, &before_the_sign), "without an excuse");
    }

    #[test]
    fn a_loss_that_somebody_could_tell_has_to_be_noticed() {
        let told = [reading("a", 5, 5_000_000, 6_000_000)];
        assert!(violations(lineage(&[6_500_000]), &told).is_empty());
        expect_one(&violations(lineage(&[]), &told), "no correction round noticed");
        expect_one(&violations(lineage(&[5_900_000, 15_000_000]), &told), "no correction round noticed");
        // Who has died before could not tell.
        let mut notes = notes(&told);
        notes.ended.insert(Arc::from("a"), 5_900_000);
        let verdict = check(lineage(&[]), &notes, 0, &[]);
        assert!(verdict.violations.is_empty() && verdict.lost[0].nobody_left, "{verdict:?}");
    }

    #[test]
    fn what_was_never_or_later_written_must_not_be_acknowledged() {
        let unknown = [reading("a", 12, 5_000_000, 6_000_000)];
        expect_one(&violations(lineage(&[]), &unknown), "never written");
        // Unless the master died with it.
        assert!(check(lineage(&[6_500_000]), &notes(&unknown), 0, &[5_000_100]).violations.is_empty());
        let early = [reading("a", 4, 3_900_000, 4_500_000)];
        expect_one(&violations(lineage(&[]), &early), "before it was written");
    }

    #[test]
    fn fencing_tokens_increase() {
        let mut readings = [reading("a", 1, 1_000_000, 2_000_000), reading("b", 2, 2_500_000, 3_000_000)];
        readings[1].grant.fencing_token = 1;
        expect_one(&violations(lineage(&[]), &readings), "went back");
    }
}
