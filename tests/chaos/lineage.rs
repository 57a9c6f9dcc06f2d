//! Which of the writes that masters acknowledged are part of the history that lasts, and which were lost.

use std::collections::{BTreeMap, BTreeSet};

use super::log::Transition;
use super::witness::Commit;

/// A master's time. Instants are of the servers' clock, in microseconds since 1970.
#[derive(Clone, Debug)]
pub(crate) struct Term {
    /// When it was still a replica.
    pub(crate) since_us: u64,
    /// Its first write.
    pub(crate) first_write_us: u64,
    /// Writes of its predecessors that it does not have.
    pub(crate) lost: usize,
}

/// A correction round that was begun, or begun anew.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    pub(crate) at_us: u64,
    /// Another one was on.
    pub(crate) is_anew: bool,
}

/// How a write was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// The master of this term never had it.
    NotReplicated { term: usize },
    /// It was written to a master after its successor had begun to write.
    ByReplacedMaster,
}

/// All writes, sorted out.
#[derive(Debug, Default)]
pub(crate) struct Lineage {
    pub(crate) writes: usize,
    /// Only terms in which something was written, the first one included.
    pub(crate) terms: Vec<Term>,
    pub(crate) rounds: Vec<Round>,
    /// When a round ended, and how long it had lasted.
    pub(crate) round_lengths_us: Vec<u64>,
    pub(crate) lost_writes: usize,
    /// Transitions that are in the history that lasts.
    pub(crate) lasting: BTreeSet<Transition>,
    pub(crate) lost: BTreeMap<Transition, Loss>,
    /// When each transition was written for the first time.
    pub(crate) written_us: BTreeMap<Transition, u64>,
    /// Writes that the witness has not seen, told from the numbers.
    pub(crate) unseen: u64,
    /// What cannot be.
    pub(crate) contradictions: Vec<String>,
}

impl Lineage {
    /// `promotions`: server and instant (as in [`Term::since_us`]) of each term, the first one included, in order.
    pub(crate) fn of(commits: Vec<Commit>, promotions: &[(usize, u64)]) -> Self {
        let mut lineage = Lineage { writes: commits.len(), ..Lineage::default() };
        let mut history: Vec<Commit> = Vec::new();
        let mut current = None;
        for commit in commits {
            if let Some(structure) = &commit.structure {
                lineage.written_us.entry(structure.transition.clone()).or_insert(commit.at_us);
            }
            let is_of =
                |(server, since_us): &(usize, u64)| *server == commit.server && *since_us <= commit.at_us;
            let Some(term) = promotions.iter().rposition(is_of) else {
                lineage
                    .contradictions
                    .push(format!("server {} wrote and was no master: {commit:?}", commit.server));
                continue;
            };
            if current.is_some_and(|current| term < current) {
                lineage.lose(&commit, Loss::ByReplacedMaster);
                continue;
            }
            if current.is_none_or(|current| term > current) {
                current = Some(term);
                let kept = history.partition_point(|before| before.live_revision < commit.live_revision);
                let lost = history.split_off(kept);
                let index = lineage.terms.len();
                lost.iter().for_each(|commit| lineage.lose(commit, Loss::NotReplicated { term: index }));
                let since_us = promotions[term].1;
                lineage.terms.push(Term { since_us, first_write_us: commit.at_us, lost: lost.len() });
            }
            if let Some(last) = history.last() {
                lineage.compare(&history, last, &commit);
            }
            lineage.note_round(&history, &commit);
            history.push(commit);
        }
        let lasting = history.into_iter().filter_map(|commit| commit.structure);
        lineage.lasting = lasting.map(|structure| structure.transition).collect();
        lineage.lost.retain(|transition, _| !lineage.lasting.contains(transition));
        lineage
    }

    fn lose(&mut self, commit: &Commit, loss: Loss) {
        self.lost_writes += 1;
        if let Some(structure) = &commit.structure {
            // What was written again with the same transition counts by its first loss; see the end of `of`.
            self.lost.entry(structure.transition.clone()).or_insert(loss);
        }
    }

    /// One write after the other (protocol 1 and 2).
    fn compare(&mut self, history: &[Commit], last: &Commit, next: &Commit) {
        let expected = last.live_revision + 1;
        if next.live_revision < expected {
            self.contradictions.push(format!("{next:?} follows {last:?}"));
        }
        self.unseen += next.live_revision.saturating_sub(expected);
        let Some(structure) = &next.structure else { return };
        let Some(before) = history.iter().rev().find_map(|commit| commit.structure.as_ref()) else { return };
        let (old, new) = (&before.transition, &structure.transition);
        if new.version < old.version || (new.version == old.version) != (new.token == old.token) {
            self.contradictions.push(format!("{structure:?} follows {before:?}"));
        }
        if structure.revision != before.revision + 1 && next.live_revision == expected {
            self.contradictions.push(format!("revision of {structure:?} after {before:?}"));
        }
    }

    fn note_round(&mut self, history: &[Commit], commit: &Commit) {
        let Some(structure) = &commit.structure else { return };
        let before = history.iter().rev().find_map(|commit| Some((commit.at_us, commit.structure.as_ref()?)));
        let was_on = before.and_then(|(_, structure)| structure.round.as_ref());
        match &structure.round {
            Some(round) if was_on != Some(round) => {
                self.rounds.push(Round { at_us: commit.at_us, is_anew: was_on.is_some() });
            }
            None if was_on.is_some() => {
                if let Some(begun) = self.rounds.iter().rev().find(|round| !round.is_anew) {
                    self.round_lengths_us.push(commit.at_us - begun.at_us);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::witness::Structure;
    use super::*;

    fn commit(server: usize, at_us: u64, live_revision: u64, version: u64, token: &str) -> Commit {
        let transition = Transition { version, token: token.to_owned() };
        let structure = Some(Structure { revision: live_revision, transition, round: None });
        Commit { server, at_us, live_revision, structure }
    }

    #[test]
    fn a_successor_that_lacks_writes_loses_them_and_a_replaced_master_writes_in_vain() {
        let commits = vec![
            commit(0, 10, 1, 1, "a"),
            commit(0, 20, 2, 2, "b"),
            commit(0, 30, 3, 3, "c"),
            // It has only the first one.
            commit(1, 40, 2, 2, "d"),
            commit(0, 45, 4, 4, "e"),
            commit(1, 50, 3, 3, "f"),
        ];
        let lineage = Lineage::of(commits, &[(0, 0), (1, 25)]);
        assert!(lineage.contradictions.is_empty(), "{:?}", lineage.contradictions);
        assert_eq!((lineage.lost_writes, lineage.unseen, lineage.terms.len()), (3, 0, 2));
        let tokens = |transition: &Transition| transition.token.clone();
        assert_eq!(lineage.lasting.iter().map(tokens).collect::<Vec<_>>(), ["a", "d", "f"]);
        let losses: Vec<_> =
            lineage.lost.iter().map(|(transition, loss)| (tokens(transition), *loss)).collect();
        let not_replicated = Loss::NotReplicated { term: 1 };
        let expected = [("b", not_replicated), ("c", not_replicated), ("e", Loss::ByReplacedMaster)];
        assert_eq!(losses, expected.map(|(token, loss)| (token.to_owned(), loss)));
    }

    #[test]
    fn what_cannot_follow_is_named() {
        let reused = vec![commit(0, 10, 1, 1, "a"), commit(0, 20, 2, 1, "b")];
        assert_eq!(Lineage::of(reused, &[(0, 0)]).contradictions.len(), 1);
        let back = vec![commit(0, 10, 5, 5, "a"), commit(0, 20, 5, 6, "b")];
        assert!(!Lineage::of(back, &[(0, 0)]).contradictions.is_empty());
        let stranger = vec![commit(2, 10, 1, 1, "a")];
        assert_eq!(Lineage::of(stranger, &[(0, 0)]).contradictions.len(), 1);
        let gap = vec![commit(0, 10, 1, 1, "a"), commit(0, 20, 4, 4, "b")];
        assert_eq!(Lineage::of(gap, &[(0, 0)]).unseen, 2);
    }
}
