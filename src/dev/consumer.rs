//! A demo consumer: a real client over HTTP, one heartbeat in flight, the full state in each.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use reqwest::StatusCode;
use rsc_protocol::{ErrorBody, HeartbeatRequest, HeartbeatResponse};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant as Timer, sleep, sleep_until};

use super::membership::{Event, Membership, Shards};
use super::records::Records;

/// How often records are read between heartbeats.
const READ_EVERY: Duration = Duration::from_millis(200);
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
    /// What it reads, where there is something to read.
    pub(crate) records: Option<Records>,
    /// Where its reports go.
    pub(crate) reports: mpsc::UnboundedSender<Report>,
}

impl Consumer {
    /// Heartbeats until it is over. `leave` turns true when it shall leave. A crash is the end of the task
    /// at any point: silence.
    pub(crate) async fn run(mut self, member_id: &str, interval: Duration, mut leave: watch::Receiver<bool>) {
        let instance_id = uuid::Uuid::new_v4().to_string();
        let mut membership = Membership::new(member_id, &instance_id, wall_clock_millis(), interval);
        let mut is_leaving = false;
        while !membership.is_over() {
            let events = self.step(&mut membership).await;
            self.report(&membership, events.clone());
            if membership.is_over() {
                break;
            }
            self.take_over(member_id, &events).await;
            let asked_to_leave = self.rest(member_id, &membership, &mut leave, is_leaving).await;
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
            if membership.is_over() {
                return Vec::new();
            }
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

    /// Reads records until there is something to say: the interval is over, a drain has finished, the lease
    /// ends. `true`: it shall leave now.
    async fn rest(
        &mut self,
        member_id: &str,
        membership: &Membership,
        leave: &mut watch::Receiver<bool>,
        is_leaving: bool,
    ) -> bool {
        let now = Instant::now();
        let next = [
            Some(now + membership.interval()),
            membership.next_finished_drain().filter(|at| *at > now),
            membership.lease_ends(),
        ];
        let wake = Timer::from_std(next.into_iter().flatten().min().unwrap_or(now));
        loop {
            tokio::select! {
                biased;
                () = sleep_until(wake) => return false,
                // An error means that whoever could ask is gone: a reason to leave as well.
                _ = leave.wait_for(|leave| *leave), if !is_leaving => return true,
                () = sleep(READ_EVERY) => {}
            }
            self.read(member_id, membership.reading()).await;
        }
    }

    async fn read(&mut self, member_id: &str, shards: &Shards) {
        if let Some(records) = &mut self.records
            && let Err(error) = records.read(member_id, shards).await
        {
            tracing::debug!(member_id, %error, "records could not be read");
        }
    }

    async fn take_over(&mut self, member_id: &str, events: &[Event]) {
        let Some(records) = &mut self.records else { return };
        for event in events {
            if let Event::Started(shards) = event
                && let Err(error) = records.take_over(member_id, shards).await
            {
                tracing::debug!(member_id, %error, "pending records could not be taken over");
            }
        }
    }
}

/// Milliseconds since 1970: where a consumer's sequence begins.
fn wall_clock_millis() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(0)
}
