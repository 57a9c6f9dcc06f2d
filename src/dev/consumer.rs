//! A demo consumer: a real client over HTTP, one heartbeat in flight, the full state in each.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use reqwest::StatusCode;
use rsc_protocol::{ErrorBody, HeartbeatRequest, HeartbeatResponse};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant as Timer, sleep_until};

use super::membership::{Event, Membership, Shards};

/// How long an answer is waited for, unless the lease ends before.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a consumer says about itself after every step.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    /// Which consumer of the demo, 0-based.
    pub(crate) index: usize,
    /// Which of its starts, so that the last words of a crashed one are told from its successor's.
    pub(crate) start: u64,
    /// What just happened.
    pub(crate) events: Vec<Event>,
    /// What it reads now.
    pub(crate) reading: Shards,
    /// What it is giving back now.
    pub(crate) draining: Shards,
    /// When it will have stopped reading unless it hears from the coordinator.
    pub(crate) lease_ends: Option<Instant>,
    /// It has nothing more to say.
    pub(crate) over: bool,
}

/// Everything a consumer needs besides its membership.
pub(crate) struct Consumer {
    /// Which consumer of the demo, 0-based.
    pub(crate) index: usize,
    /// Which of its starts.
    pub(crate) start: u64,
    /// Where its heartbeats go.
    pub(crate) url: String,
    /// The client that sends them.
    pub(crate) http: reqwest::Client,
    /// Where its reports go.
    pub(crate) reports: mpsc::UnboundedSender<Report>,
}

impl Consumer {
    /// Heartbeats until it is over. `leave` turns true when it shall leave. A crash is the end of the task
    /// at any point: silence.
    pub(crate) async fn run(self, member_id: &str, interval: Duration, mut leave: watch::Receiver<bool>) {
        let instance_id = uuid::Uuid::new_v4().to_string();
        let mut membership = Membership::new(member_id, &instance_id, wall_clock_millis(), interval);
        let mut is_leaving = false;
        while !membership.is_over() {
            let events = self.step(&mut membership).await;
            self.report(&membership, events);
            if membership.is_over() {
                break;
            }
            let asked_to_leave = rest(&membership, &mut leave, is_leaving).await;
            if asked_to_leave {
                is_leaving = true;
                membership.leave(Instant::now());
                self.report(&membership, Vec::new());
            }
        }
    }

    /// One heartbeat and what it leads to. No answer, or one that is no heartbeat answer, changes nothing:
    /// the lease bounds it.
    async fn step(&self, membership: &mut Membership) -> Vec<Event> {
        if let Some(over) = membership.check_lease(Instant::now()) {
            self.report(membership, vec![over]);
        }
        let sent = Instant::now();
        let request = membership.request(sent);
        let patience = membership
            .lease_ends()
            .map_or(PATIENCE, |ends| PATIENCE.min(ends.saturating_duration_since(sent)));
        match self.send(&request, patience).await {
            Ok(Some(response)) => membership.apply(&request, &response, sent, Instant::now()),
            Ok(None) => Vec::new(),
            Err(error) => {
                tracing::debug!(member = request.member_id, error = format!("{error:#}"), "heartbeat failed");
                membership.check_lease(Instant::now()).into_iter().collect()
            }
        }
    }

    async fn send(
        &self,
        request: &HeartbeatRequest,
        patience: Duration,
    ) -> anyhow::Result<Option<HeartbeatResponse>> {
        let answer = self.http.post(&self.url).timeout(patience).json(request).send().await?;
        if answer.status() == StatusCode::OK {
            return Ok(Some(answer.json().await.context("a heartbeat answer that cannot be read")?));
        }
        let status = answer.status();
        let refusal: ErrorBody = answer.json().await.context("an error answer that cannot be read")?;
        tracing::debug!(%status, code = refusal.error_code.as_str(), refusal.message, "heartbeat refused");
        Ok(None)
    }

    fn report(&self, membership: &Membership, events: Vec<Event>) {
        // Nobody listens any more when the demo ends.
        let _ = self.reports.send(Report {
            index: self.index,
            start: self.start,
            events,
            reading: membership.reading().clone(),
            draining: membership.draining(),
            lease_ends: membership.lease_ends(),
            over: membership.is_over(),
        });
    }
}

/// Waits until there is something to say: the interval is over, a drain has finished, the lease ends.
/// `true`: it shall leave now.
async fn rest(membership: &Membership, leave: &mut watch::Receiver<bool>, is_leaving: bool) -> bool {
    let now = Instant::now();
    let next = [
        Some(now + membership.interval()),
        membership.next_finished_drain().filter(|at| *at > now),
        membership.lease_ends(),
    ];
    let wake = next.into_iter().flatten().min().unwrap_or(now);
    tokio::select! {
        () = sleep_until(Timer::from_std(wake)) => false,
        // An error means that whoever could ask is gone: a reason to leave as well.
        _ = leave.wait_for(|leave| *leave), if !is_leaving => true,
    }
}

/// Milliseconds since 1970: where a consumer's sequence begins.
fn wall_clock_millis() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(0)
}
