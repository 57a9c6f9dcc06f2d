//! Who reads what, as the consumers themselves say: what the screen shows. Pure.

use std::time::Instant;

use super::consumer::{News, Report, Shards};

/// What the screen says about one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cell {
    /// This consumer reads it.
    Read(usize),
    /// This consumer has stopped new reads and finishes what is in flight.
    Drained(usize),
    /// Its reader crashed; nobody else may read before that lease has run out.
    Crashed(usize),
    /// Nobody has it.
    Nobody,
    /// Two consumers have it. The coordinator exists so that this never shows.
    Two,
}

/// How a line about an event is to be read at a glance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// Somebody came.
    Came,
    /// Somebody went.
    Went,
    /// A step of a hand-over.
    HandOver,
    /// Something that nobody announced.
    Trouble,
}

impl Mark {
    /// The mark as it is printed.
    pub(crate) fn symbol(self) -> char {
        match self {
            Mark::Came => '+',
            Mark::Went => '-',
            Mark::HandOver => '>',
            Mark::Trouble => '!',
        }
    }
}

/// One line about one event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    /// Its kind.
    pub(crate) mark: Mark,
    /// Its sentence.
    pub(crate) text: String,
}

impl Line {
    /// A line.
    pub(crate) fn new(mark: Mark, text: impl Into<String>) -> Self {
        Line { mark, text: text.into() }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Presence {
    #[default]
    Away,
    Here,
    Crashed,
}

#[derive(Clone, Debug, Default)]
struct Seat {
    name: String,
    presence: Presence,
    start: u64,
    reading: Shards,
    draining: Shards,
    lease_ends: Option<Instant>,
}

impl Seat {
    fn has(&self, shard: u32) -> bool {
        self.reading.contains(&shard) || self.draining.contains(&shard)
    }

    /// Whether this consumer may be reading `shard`. One that hangs stops by its lease, whatever it last said.
    fn may_read(&self, shard: u32, now: Instant) -> bool {
        self.has(shard) && self.lease_ends.is_some_and(|ends| ends > now)
    }
}

/// The consumers and the shards of the demo.
#[derive(Clone, Debug)]
pub(crate) struct Board {
    seats: Vec<Seat>,
    shards: u32,
    last_reader: Vec<Option<usize>>,
}

impl Board {
    /// A board with nobody there.
    pub(crate) fn new(names: &[&str], shards: u32) -> Self {
        let seat = |name: &&str| Seat { name: (*name).to_owned(), ..Seat::default() };
        Board {
            seats: names.iter().map(seat).collect(),
            shards,
            last_reader: (0..shards).map(|_| None).collect(),
        }
    }

    /// A consumer was started; returns which of its starts this is.
    pub(crate) fn started(&mut self, index: usize) -> u64 {
        let seat = &mut self.seats[index];
        seat.presence = Presence::Here;
        seat.start += 1;
        seat.start
    }

    /// A consumer was killed; what it had stays shown until somebody else reads it.
    pub(crate) fn crashed(&mut self, index: usize, now: Instant) -> Line {
        let seat = &mut self.seats[index];
        seat.presence = Presence::Crashed;
        let left = seat.lease_ends.map(|ends| ends.saturating_duration_since(now).as_secs_f64());
        let text = match left {
            Some(left) => {
                format!("{} crashed without a word: its lease must run out first ({left:.1} s)", seat.name)
            }
            None => format!("{} crashed without a word, and without a lease", seat.name),
        };
        Line::new(Mark::Trouble, text)
    }

    /// Whether nobody is there any more.
    pub(crate) fn is_deserted(&self) -> bool {
        self.seats.iter().all(|seat| seat.presence != Presence::Here)
    }

    /// Takes in what a consumer says; what a dead one had still said is dropped.
    pub(crate) fn apply(&mut self, report: &Report, now: Instant) -> Vec<Line> {
        let seat = &mut self.seats[report.index];
        if seat.start != report.start || seat.presence == Presence::Crashed {
            return Vec::new();
        }
        seat.reading.clone_from(&report.reading);
        seat.draining.clone_from(&report.draining);
        seat.lease_ends = report.lease_ends;
        if report.over {
            seat.presence = Presence::Away;
        }
        report.news.iter().flat_map(|news| self.tell(report.index, news, now)).collect()
    }

    fn tell(&mut self, index: usize, news: &News, now: Instant) -> Vec<Line> {
        let name = self.seats[index].name.clone();
        let line = |mark, text: String| vec![Line::new(mark, text)];
        match news {
            News::Joined(epoch) => line(Mark::Came, format!("{name} joined with epoch {epoch}")),
            News::Started(shards) => self.tell_started(index, shards, now),
            News::AskedToDrain(shards) => {
                line(Mark::HandOver, format!("{name} is asked to drain {}", list(shards)))
            }
            News::GaveBack(shards) => {
                line(Mark::HandOver, format!("{name} has drained and given back {}", list(shards)))
            }
            News::Fenced(why) => line(Mark::Trouble, format!("{name} was fenced and stops: {why}")),
            News::LeaseOver => {
                line(Mark::Trouble, format!("{name} heard nothing for a lease: it stops reading"))
            }
            News::Left => line(Mark::Went, format!("{name} left, with everything given back")),
            News::Refused(why) => line(Mark::Trouble, format!("{name} gives up: {why}")),
        }
    }

    /// One line for each consumer that the shards come from.
    fn tell_started(&mut self, index: usize, shards: &Shards, now: Instant) -> Vec<Line> {
        let mut lines = Vec::new();
        let both: Shards = shards
            .iter()
            .copied()
            .filter(|shard| (0..self.seats.len()).any(|i| i != index && self.seats[i].may_read(*shard, now)))
            .collect();
        if !both.is_empty() {
            lines.push(Line::new(Mark::Trouble, format!("TWO consumers may read {}", list(&both))));
        }
        let name = self.seats[index].name.clone();
        let before = std::iter::once(None).chain((0..self.seats.len()).map(Some));
        for former in before {
            let of: Shards =
                shards.iter().copied().filter(|shard| self.last_reader(*shard) == former).collect();
            if of.is_empty() {
                continue;
            }
            let text = match former {
                None => format!("{name} starts to read {}", list(&of)),
                Some(former) if former == index => format!("{name} reads {} again", list(&of)),
                Some(former) => {
                    format!("{} moved from {} to {name}", list(&of), self.seats[former].name)
                }
            };
            lines.push(Line::new(Mark::HandOver, text));
        }
        for (other, seat) in self.seats.iter_mut().enumerate() {
            if other != index && seat.presence == Presence::Crashed {
                seat.reading.retain(|shard| !shards.contains(shard));
                seat.draining.retain(|shard| !shards.contains(shard));
            }
        }
        for shard in shards {
            if let Some(last) = self.last_reader.get_mut(*shard as usize) {
                *last = Some(index);
            }
        }
        lines
    }

    fn last_reader(&self, shard: u32) -> Option<usize> {
        self.last_reader.get(shard as usize).copied().flatten()
    }

    /// What to show for each shard.
    pub(crate) fn cells(&self, now: Instant) -> Vec<Cell> {
        (0..self.shards).map(|shard| self.cell(shard, now)).collect()
    }

    fn cell(&self, shard: u32, now: Instant) -> Cell {
        let mut readers = (0..self.seats.len()).filter(|index| self.seats[*index].may_read(shard, now));
        let crashed = || {
            let mut all = 0..self.seats.len();
            all.find(|index| {
                self.seats[*index].presence == Presence::Crashed && self.seats[*index].has(shard)
            })
        };
        match (readers.next(), readers.next()) {
            (Some(_), Some(_)) => Cell::Two,
            (Some(index), None) if self.seats[index].presence == Presence::Crashed => Cell::Crashed(index),
            (Some(index), None) if self.seats[index].reading.contains(&shard) => Cell::Read(index),
            (Some(index), None) => Cell::Drained(index),
            (None, _) => crashed().map_or(Cell::Nobody, Cell::Crashed),
        }
    }

    /// How many shards each consumer reads; `None` for one that is not there.
    pub(crate) fn counts(&self) -> Vec<Option<usize>> {
        let count = |seat: &Seat| (seat.presence == Presence::Here).then_some(seat.reading.len());
        self.seats.iter().map(count).collect()
    }
}

fn list(shards: &Shards) -> String {
    let numbers: Vec<String> = shards.iter().map(u32::to_string).collect();
    numbers.join(" ")
}

#[cfg(test)]
#[path = "board_tests.rs"]
mod tests;
