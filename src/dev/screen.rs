//! What is printed: one line a second, never wider than 80 columns, and one for every event.

use std::io::{ErrorKind, IsTerminal, Write};
use std::time::Instant;

use super::board::{Board, Cell, Line, Mark};

/// Rows after which the head of the columns is printed again.
const ROWS_PER_HEAD: u32 = 20;
/// The letter and colour of each consumer.
const LETTERS: [char; 3] = ['A', 'B', 'C'];
const COLOURS: [&str; 3] = ["32", "36", "35"];
const RED: &str = "31";
const DIM: &str = "2";

/// Standard output as the demo uses it.
pub(crate) struct Screen {
    began: Instant,
    colour: bool,
    rows: u32,
    closed: bool,
}

impl Screen {
    /// Standard output, in colour on a terminal unless `NO_COLOR` is set.
    pub(crate) fn new() -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let colour = wanted && std::io::stdout().is_terminal();
        Screen { began: Instant::now(), colour, rows: 0, closed: false }
    }

    /// Whether nobody reads standard output any more (`rsc dev | head`).
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Text as it is.
    pub(crate) fn say(&mut self, text: &str) {
        let mut out = std::io::stdout().lock();
        let written = writeln!(out, "{text}").and_then(|()| out.flush());
        self.closed |= written.is_err_and(|error| error.kind() == ErrorKind::BrokenPipe);
    }

    /// A line about an event.
    pub(crate) fn event(&mut self, line: &Line) {
        let text = format!("{} {} {}", self.time(), line.mark.symbol(), line.text);
        let text = match line.mark {
            Mark::Trouble => self.paint(RED, &text),
            Mark::Came | Mark::Went | Mark::HandOver => text,
        };
        self.say(&text);
    }

    /// The line of this second. `state`: what the coordinator calls the group's state; `records`: how many
    /// were read and sent, where there are any.
    pub(crate) fn row(&mut self, board: &Board, state: &str, records: Option<(u64, u64)>) {
        let cells = board.cells(Instant::now());
        if self.rows.is_multiple_of(ROWS_PER_HEAD) {
            let read = if records.is_some() { "   read/sent" } else { "" };
            let head: String = (0..cells.len()).map(|shard| format!("{shard:>3}")).collect();
            let text = self.paint(DIM, &format!("{:>5} {:<12}{head}  shards each{read}", "time", "group"));
            self.say(&text);
        }
        self.rows += 1;
        let cells: String = cells.into_iter().map(|cell| format!("  {}", self.cell(cell))).collect();
        let counts: String = board
            .counts()
            .into_iter()
            .enumerate()
            .map(|(index, count)| {
                let count = count.map_or_else(|| "-".to_owned(), |count| count.to_string());
                self.paint(COLOURS[index], &format!(" {}{count:>2}", LETTERS[index]))
            })
            .collect();
        let records =
            records.map(|(read, sent)| format!("{:>12}", format!("{read}/{sent}"))).unwrap_or_default();
        self.say(&format!("{} {state:<12}{cells} {counts}{records}", self.time()));
    }

    fn cell(&self, cell: Cell) -> String {
        match cell {
            Cell::Read(index) => self.paint(COLOURS[index], &LETTERS[index].to_string()),
            Cell::Drained(index) => {
                self.paint(COLOURS[index], &LETTERS[index].to_ascii_lowercase().to_string())
            }
            Cell::Crashed(_) => self.paint(RED, "x"),
            Cell::Nobody => self.paint(DIM, "."),
            Cell::Two => self.paint(RED, "#"),
        }
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.colour { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
    }

    fn time(&self) -> String {
        format!("{:>4}s", self.began.elapsed().as_secs())
    }
}
