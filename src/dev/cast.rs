//! The three consumers and what happens to them: one leaves and returns, one crashes and returns, then the
//! next two, for ever.

use std::time::Instant;

use rsc_client::decision::Settings;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::board::{Board, Line, Mark};
use super::consumer::{Consumer, Report};
use super::records::Records;

/// The consumers of the demo by name.
pub(crate) const NAMES: [&str; 3] = ["consumer-a", "consumer-b", "consumer-c"];

/// What can happen to a consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// It is started.
    Start,
    /// It is asked to leave, and does so in good order.
    Leave,
    /// It is killed.
    Crash,
}

/// Second, what, to whom: how the consumers come in.
const OPENING: [(u64, Act, usize); 3] = [(0, Act::Start, 0), (2, Act::Start, 1), (4, Act::Start, 2)];
/// When the first round begins, and how long a round is, in seconds. A crash leaves time for the lease to
/// run out before the consumer returns.
const ROUNDS_BEGIN: u64 = 8;
const ROUND: u64 = 24;

/// What happens in second `second` of the demo.
pub(crate) fn script(second: u64) -> Vec<(Act, usize)> {
    let opening = OPENING.iter().filter(|(at, ..)| *at == second).map(|(_, act, who)| (*act, *who));
    let Some(since) = second.checked_sub(ROUNDS_BEGIN) else {
        return opening.collect();
    };
    let round = usize::try_from(since / ROUND).unwrap_or(0);
    let (leaver, crasher) = ((round + 1) % NAMES.len(), (round + 2) % NAMES.len());
    let act = match since % ROUND {
        0 => Some((Act::Leave, leaver)),
        5 => Some((Act::Start, leaver)),
        9 => Some((Act::Crash, crasher)),
        19 => Some((Act::Start, crasher)),
        _ => None,
    };
    opening.chain(act).collect()
}

struct Running {
    leave: watch::Sender<bool>,
    task: JoinHandle<()>,
}

/// The running consumers.
pub(crate) struct Cast {
    group_url: String,
    http: reqwest::Client,
    settings: Settings,
    records: Option<Records>,
    reports: mpsc::UnboundedSender<Report>,
    running: [Option<Running>; NAMES.len()],
}

impl Cast {
    /// Nobody runs yet. `group_url`: where the group is found; `records`: what there is to read, if anything;
    /// `reports`: where consumers speak.
    pub(crate) fn new(
        group_url: String,
        http: reqwest::Client,
        settings: Settings,
        records: Option<Records>,
        reports: mpsc::UnboundedSender<Report>,
    ) -> Self {
        Cast { group_url, http, settings, records, reports, running: [const { None }; NAMES.len()] }
    }

    /// Does `act` to a consumer; what cannot be done to it now is passed over.
    pub(crate) fn perform(&mut self, act: Act, index: usize, board: &mut Board) -> Option<Line> {
        match act {
            Act::Start => self.start(index, board),
            Act::Leave => self.leave(index),
            Act::Crash => self.crash(index, board),
        }
    }

    fn is_running(&self, index: usize) -> bool {
        self.running[index].as_ref().is_some_and(|running| !running.task.is_finished())
    }

    fn start(&mut self, index: usize, board: &mut Board) -> Option<Line> {
        if self.is_running(index) {
            return None;
        }
        let consumer = Consumer {
            index,
            start: board.started(index),
            member_id: NAMES[index],
            url: format!("{}/members/{}/heartbeat", self.group_url, NAMES[index]),
            http: self.http.clone(),
            records: self.records.clone(),
            reports: self.reports.clone(),
        };
        let (leave, asked_to_leave) = watch::channel(false);
        let task = tokio::spawn(consumer.run(self.settings.clone(), asked_to_leave));
        self.running[index] = Some(Running { leave, task });
        None
    }

    fn leave(&mut self, index: usize) -> Option<Line> {
        let running = self.running[index].as_ref().filter(|running| !running.task.is_finished())?;
        running.leave.send_replace(true);
        let text = format!("{} wants to leave: it drains what it reads", NAMES[index]);
        Some(Line::new(Mark::Went, text))
    }

    fn crash(&mut self, index: usize, board: &mut Board) -> Option<Line> {
        let running = self.running[index].take().filter(|running| !running.task.is_finished())?;
        running.task.abort();
        Some(board.crashed(index, Instant::now()))
    }

    /// Asks everybody to leave.
    pub(crate) fn leave_all(&mut self) {
        for running in self.running.iter().flatten() {
            running.leave.send_replace(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_consumer_leaves_crashes_and_returns() {
        let mut here = [false; NAMES.len()];
        let mut seen = std::collections::BTreeSet::new();
        for second in 0..ROUNDS_BEGIN + 3 * ROUND {
            for (act, index) in script(second) {
                assert_eq!(here[index], act != Act::Start, "second {second}: {act:?} {index}");
                here[index] = act == Act::Start;
                seen.insert((format!("{act:?}"), index));
            }
        }
        assert_eq!(seen.len(), 9, "{seen:?}");
        assert!(here.iter().all(|here| *here));
    }
}
