use std::time::Duration;

use super::*;

struct Bench {
    board: Board,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        let mut board = Board::new(&["a", "b"], 2);
        board.started(0);
        board.started(1);
        Bench { board, now: Instant::now() }
    }

    fn says(&mut self, index: usize, reading: &[u32], draining: &[u32], news: &[News]) -> Vec<String> {
        let report = Report {
            index,
            start: 1,
            news: news.to_vec(),
            reading: reading.iter().copied().collect(),
            draining: draining.iter().copied().collect(),
            lease_ends: Some(self.now + Duration::from_secs(6)),
            over: false,
        };
        self.board.apply(&report, self.now).into_iter().map(|line| line.text).collect()
    }

    fn starts(&mut self, index: usize, shards: &[u32]) -> Vec<String> {
        self.says(index, shards, &[], &[News::Started(shards.iter().copied().collect())])
    }

    fn cells(&self) -> Vec<Cell> {
        self.board.cells(self.now)
    }
}

#[test]
fn a_hand_over_shows_who_drains_and_then_who_reads() {
    let mut bench = Bench::new();
    assert_eq!(bench.cells(), [Cell::Nobody, Cell::Nobody]);
    assert_eq!(bench.starts(0, &[0, 1]), ["a starts to read 0 1"]);
    bench.says(0, &[0], &[1], &[]);
    assert_eq!(bench.cells(), [Cell::Read(0), Cell::Drained(0)]);
    bench.says(0, &[0], &[], &[]);
    assert_eq!(bench.cells(), [Cell::Read(0), Cell::Nobody]);
    assert_eq!(bench.starts(1, &[1]), ["1 moved from a to b"]);
    assert_eq!(bench.cells(), [Cell::Read(0), Cell::Read(1)]);
    assert_eq!(bench.board.counts(), [Some(1), Some(1)]);
}

#[test]
fn what_a_crashed_consumer_had_is_shown_until_somebody_else_reads_it() {
    let mut bench = Bench::new();
    bench.starts(0, &[0, 1]);
    let line = bench.board.crashed(0, bench.now).text;
    assert!(line.contains("its lease must run out first (6.0 s)"), "{line}");
    assert_eq!(bench.says(0, &[], &[], &[News::Left]), [""; 0], "its last words are dropped");
    bench.now += Duration::from_secs(6);
    assert_eq!(bench.cells(), [Cell::Crashed(0), Cell::Crashed(0)]);
    assert_eq!(bench.starts(1, &[0]), ["0 moved from a to b"]);
    assert_eq!(bench.cells(), [Cell::Read(1), Cell::Crashed(0)]);
    assert_eq!(bench.board.counts(), [None, Some(1)]);
}

#[test]
fn two_readers_show_even_if_one_of_them_crashed() {
    let mut bench = Bench::new();
    bench.starts(0, &[0]);
    assert_eq!(bench.starts(1, &[0])[0], "TWO consumers may read 0");
    assert_eq!(bench.cells()[0], Cell::Two);
    let mut bench = Bench::new();
    bench.starts(0, &[0]);
    bench.board.crashed(0, bench.now);
    assert_eq!(bench.starts(1, &[0])[0], "TWO consumers may read 0");
}

#[test]
fn a_consumer_that_hangs_stops_by_its_lease() {
    let mut bench = Bench::new();
    bench.starts(0, &[0]);
    bench.now += Duration::from_secs(6);
    assert_eq!(bench.cells()[0], Cell::Nobody);
}
