//! The demo as it goes: seconds pass, consumers act, lines are printed, until somebody or something ends it.

use std::future::pending;
use std::time::{Duration, Instant};

use rsc_client::decision::Settings;
use rsc_protocol::admin::GroupResponse;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::SHARDS;
use super::board::{Board, Line, Mark};
use super::cast::{self, Act, Cast, NAMES};
use super::consumer::Report;
use super::private_redis::PrivateRedis;
use super::records::Records;
use super::screen::Screen;
use super::signals::Signals;

/// Everybody gets this long to leave at the end.
const FAREWELL: Duration = Duration::from_secs(4);
/// How often the group's state is asked for.
const ASK: Duration = Duration::from_millis(250);

/// Everything that plays.
pub(crate) struct Stage {
    screen: Screen,
    board: Board,
    cast: Cast,
    reports: mpsc::UnboundedReceiver<Report>,
    group_state: watch::Receiver<String>,
    records: Option<Records>,
    /// What goes on beside: asking for the group's state, publishing. Ends with this.
    _beside: JoinSet<()>,
}

impl Stage {
    /// The demo before its first second. `group_url`: where the group is found over HTTP; `records`: the way
    /// to the streams, where there are any.
    pub(crate) fn new(
        screen: Screen,
        http: reqwest::Client,
        group_url: String,
        settings: Settings,
        records: Option<Records>,
    ) -> Self {
        let (speak, reports) = mpsc::unbounded_channel();
        let (tell, group_state) = watch::channel(String::new());
        let mut beside = JoinSet::new();
        beside.spawn(ask_for_state(http.clone(), group_url.clone(), tell));
        if let Some(records) = records.clone() {
            beside.spawn(records.publish(http.clone(), group_url.clone()));
        }
        Stage {
            screen,
            board: Board::new(&NAMES, SHARDS),
            cast: Cast::new(group_url, http, settings, records.clone(), speak),
            reports,
            group_state,
            records,
            _beside: beside,
        }
    }

    /// Plays until a signal comes, `seconds` are over, or nobody reads standard output any more; then
    /// everybody leaves.
    pub(crate) async fn play(
        &mut self,
        seconds: Option<u64>,
        mut redis: Option<&mut PrivateRedis>,
        signals: &mut Signals,
    ) {
        let mut second = interval(Duration::from_secs(1));
        second.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut passed = 0;
        while !self.screen.is_closed() {
            tokio::select! {
                biased;
                () = signals.next() => break,
                how = death_of(&mut redis) => self.tell_of_death(&how),
                Some(report) = self.reports.recv() => self.hear(&report),
                _ = second.tick() => {
                    if seconds.is_some_and(|seconds| passed >= seconds) {
                        break;
                    }
                    self.pass(passed);
                    passed += 1;
                }
            }
        }
        self.farewell(signals).await;
    }

    /// What happens in second `second`, and its line.
    fn pass(&mut self, second: u64) {
        for (act, index) in cast::script(second) {
            self.act(act, index);
        }
        let state = self.group_state.borrow().clone();
        self.screen.row(&self.board, &state, self.records.as_ref().map(Records::counts));
    }

    fn act(&mut self, act: Act, index: usize) {
        // What was said before it happened is shown before it.
        while let Ok(report) = self.reports.try_recv() {
            self.hear(&report);
        }
        if let Some(line) = self.cast.perform(act, index, &mut self.board) {
            self.screen.event(&line);
        }
    }

    fn hear(&mut self, report: &Report) {
        for line in self.board.apply(report, Instant::now()) {
            self.screen.event(&line);
        }
    }

    fn tell_of_death(&mut self, how: &str) {
        let text = format!("redis-server has died ({how}): nothing can be recorded any more,");
        self.screen.event(&Line::new(Mark::Trouble, text));
        let text = "so nothing is promised: the consumers stop when their leases end";
        self.screen.event(&Line::new(Mark::Trouble, text));
    }

    /// Consumers leave in good order, unless a second signal has no time for that.
    async fn farewell(&mut self, signals: &mut Signals) {
        let text = "the demo ends, everybody leaves first (Ctrl-C: at once)";
        self.screen.event(&Line::new(Mark::Went, text));
        self.cast.leave_all();
        let everybody_leaves = async {
            while !self.board.is_deserted()
                && let Some(report) = self.reports.recv().await
            {
                self.hear(&report);
            }
        };
        tokio::select! {
            () = signals.next() => {}
            _ = timeout(FAREWELL, everybody_leaves) => {}
        }
    }
}

/// Resolves when the private server dies, once; never if there is none.
async fn death_of(redis: &mut Option<&mut PrivateRedis>) -> String {
    let Some(running) = redis else { return pending().await };
    let how = running.died().await;
    *redis = None;
    how
}

/// Keeps `tell` at what the coordinator calls the group's state.
async fn ask_for_state(http: reqwest::Client, group_url: String, tell: watch::Sender<String>) {
    loop {
        let answer = http.get(&group_url).timeout(Duration::from_secs(1)).send().await;
        let state = match answer {
            Err(_) => "NO ANSWER".to_owned(),
            Ok(answer) if answer.status().is_success() => match answer.json::<GroupResponse>().await {
                Ok(group) if group.healthy => state_text(&group),
                _ => "UNHEALTHY".to_owned(),
            },
            Ok(_) => "UNAVAILABLE".to_owned(),
        };
        tell.send_replace(state);
        sleep(ASK).await;
    }
}

/// The state as it stands on the wire.
fn state_text(group: &GroupResponse) -> String {
    let text = serde_json::to_value(group.state).ok();
    text.as_ref().and_then(serde_json::Value::as_str).unwrap_or_default().to_owned()
}
