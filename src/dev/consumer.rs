//! A demo consumer: the decisions of the client crate (protocol 11) with a shell around them that sends real
//! heartbeats over HTTP, and reads real records where there are any.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::bail;
use rsc_client::decision::{self, Action, End, Event, Identity, Settings, Work};
use rsc_protocol::heartbeat::EPOCH_JOIN;
use rsc_protocol::{CapacityReport, ErrorBody, HeartbeatRequest, HeartbeatResponse, Status};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant as Timer, sleep, sleep_until};

use super::records::Records;

/// A set of shard indexes.
pub(crate) type Shards = BTreeSet<u32>;

/// How long a demo consumer takes to finish what it has in flight on a shard, so that a hand-over can be
/// watched.
const DRAIN: Duration = Duration::from_millis(1_200);
/// How often records are read between heartbeats.
const READ_EVERY: Duration = Duration::from_millis(200);
/// Workers that a demo consumer claims to have.
const WORKERS: u32 = 4;

/// What happened to a consumer, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// Accepted with this epoch.
    Joined(i64),
    /// These shards are read from now on.
    Started(Shards),
    /// These shards are to be given back: no new reads, finish what is in flight.
    AskedToDrain(Shards),
    /// These shards were reported `REVOKED`, and the coordinator has recorded it.
    GaveBack(Shards),
    /// Everything was stopped at the coordinator's word; the sentence says why.
    Fenced(String),
    /// Everything was stopped because no answer came in time.
    LeaseOver,
    /// Gone with everything given back.
    Left,
    /// The coordinator refuses for good; a person has to look.
    Refused(String),
}

/// What a consumer says about itself after every step.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    /// Which consumer of the demo, 0-based.
    pub(crate) index: usize,
    /// Which of its starts, so that the last words of a crashed one are told from its successor's.
    pub(crate) start: u64,
    /// What just happened.
    pub(crate) news: Vec<News>,
    /// What it reads now.
    pub(crate) reading: Shards,
    /// What it has stopped reading and still has in flight.
    pub(crate) draining: Shards,
    /// When it will have stopped reading unless it hears from the coordinator.
    pub(crate) lease_ends: Option<Instant>,
    /// It has nothing more to say.
    pub(crate) over: bool,
}

/// Everything a consumer needs besides its decisions.
pub(crate) struct Consumer {
    /// Which consumer of the demo, 0-based.
    pub(crate) index: usize,
    /// Which of its starts.
    pub(crate) start: u64,
    /// Its id.
    pub(crate) member_id: &'static str,
    /// Where its heartbeats go.
    pub(crate) url: String,
    /// The client that sends them.
    pub(crate) http: reqwest::Client,
    /// What it reads, where there is something to read.
    pub(crate) records: Option<Records>,
    /// Where its reports go.
    pub(crate) reports: mpsc::UnboundedSender<Report>,
}

/// One run of a consumer.
struct Life {
    began: Instant,
    decisions: decision::Consumer,
    /// Shards that are being drained, and when nothing of them is in flight any more.
    drains: BTreeMap<u32, Duration>,
    /// The heartbeat on its way.
    request: JoinSet<Event>,
    sent_epoch: i64,
}

impl Consumer {
    /// Runs until it is over. `leave` turns true when it shall leave. A crash is the end of this task at any
    /// point: silence.
    pub(crate) async fn run(mut self, settings: Settings, mut leave: watch::Receiver<bool>) {
        let mut life = Life::begin(self.member_id, settings);
        let mut is_leaving = false;
        let mut event = Event::Time;
        loop {
            is_leaving |= matches!(event, Event::Leave);
            let news = life.handle(event, &self.http, &self.url);
            let started = news.iter().find_map(|news| match news {
                News::Started(shards) => Some(shards.clone()),
                _ => None,
            });
            self.report(&life, news);
            if life.decisions.has_ended() {
                return;
            }
            if let Some(started) = started {
                self.take_over(&started).await;
            }
            event = loop {
                match life.next(&mut leave, is_leaving).await {
                    Some(event) => break event,
                    None => self.read(&life).await,
                }
            };
        }
    }

    fn report(&self, life: &Life, news: Vec<News>) {
        let shards = |which: fn(Work) -> bool| life.shards(which);
        // Nobody listens any more when the demo ends.
        let _ = self.reports.send(Report {
            index: self.index,
            start: self.start,
            news,
            reading: shards(|work| work == Work::Reading),
            draining: shards(|work| matches!(work, Work::Draining { .. })),
            lease_ends: life.decisions.lease_until().map(|until| life.began + until),
            over: life.decisions.has_ended(),
        });
    }

    async fn read(&mut self, life: &Life) {
        let Some(records) = &mut self.records else { return };
        if life.decisions.may_read(life.began.elapsed())
            && let Err(error) = records.read(self.member_id, &life.shards(|work| work == Work::Reading)).await
        {
            tracing::debug!(self.member_id, %error, "records could not be read");
        }
    }

    async fn take_over(&mut self, started: &Shards) {
        if let Some(records) = &mut self.records
            && let Err(error) = records.take_over(self.member_id, started).await
        {
            tracing::debug!(self.member_id, %error, "pending records could not be taken over");
        }
    }
}

impl Life {
    fn begin(member_id: &str, settings: Settings) -> Self {
        let identity = Identity {
            member_id: member_id.to_owned(),
            member_name: None,
            instance_id: uuid::Uuid::new_v4().to_string(),
            first_sequence: wall_clock_millis(),
        };
        let capacity = CapacityReport { runtime_max_concurrency: WORKERS, available_concurrency: WORKERS };
        Life {
            began: Instant::now(),
            decisions: decision::Consumer::new(identity, settings, capacity),
            drains: BTreeMap::new(),
            request: JoinSet::new(),
            sent_epoch: EPOCH_JOIN,
        }
    }

    fn shards(&self, which: fn(Work) -> bool) -> Shards {
        self.decisions.shards().filter(|(_, work)| which(*work)).map(|(shard, _)| shard).collect()
    }

    /// Waits for what happens next; `None`: it is time to read.
    async fn next(&mut self, leave: &mut watch::Receiver<bool>, is_leaving: bool) -> Option<Event> {
        let instant = |at: Duration| Timer::from_std(self.began + at);
        let wake = instant(self.decisions.wakes_at().unwrap_or_default());
        let drained = self.drains.iter().map(|(shard, at)| (*at, *shard)).min();
        tokio::select! {
            biased;
            () = sleep_until(wake) => Some(Event::Time),
            // An error means that whoever could ask is gone: a reason to leave as well.
            _ = leave.wait_for(|leave| *leave), if !is_leaving => Some(Event::Leave),
            Some(Ok(event)) = self.request.join_next() => Some(event),
            () = sleep_until(instant(drained.unwrap_or_default().0)), if drained.is_some() => {
                let shard = drained.map(|(_, shard)| shard)?;
                self.drains.remove(&shard);
                Some(Event::Drain { shard, in_flight: 0 })
            }
            () = sleep(READ_EVERY) => None,
        }
    }

    /// Takes an event in, carries the actions out, and says what happened.
    fn handle(&mut self, event: Event, http: &reqwest::Client, url: &str) -> Vec<News> {
        let now = self.began.elapsed();
        let reported = self.shards(|work| work == Work::Drained);
        let lease_is_over = self.decisions.lease_until().is_some_and(|until| until <= now);
        let is_leave = matches!(event, Event::Leave);
        let mut news = match &event {
            _ if lease_is_over => vec![News::LeaseOver],
            Event::Answer(response) => self.news_of(response),
            _ => Vec::new(),
        };
        let was_stopped = news.iter().any(|news| matches!(news, News::LeaseOver | News::Fenced(_)));
        let (mut to_drain, mut started, mut end) = (Shards::new(), Shards::new(), None);
        for action in self.decisions.handle(now, event) {
            match action {
                Action::Send(request) => self.send(*request, http, url),
                Action::Start(shard) => {
                    self.drains.remove(&shard.shard_index);
                    started.insert(shard.shard_index);
                }
                Action::Drain(shard) => {
                    self.drains.insert(shard, now + DRAIN);
                    to_drain.insert(shard);
                }
                Action::Abandon(shard) => {
                    self.drains.remove(&shard);
                }
                Action::Ended(how) => end = Some(how),
            }
        }
        let still_reported = self.shards(|work| work == Work::Drained);
        let given_back: Shards = reported.difference(&still_reported).copied().collect();
        let told = [
            (!given_back.is_empty() && !was_stopped).then_some(News::GaveBack(given_back)),
            (!to_drain.is_empty() && !is_leave).then_some(News::AskedToDrain(to_drain)),
            (!started.is_empty()).then_some(News::Started(started)),
            end.and_then(|end| match end {
                End::Left => (!was_stopped).then_some(News::Left),
                End::Refused { reason, .. } => Some(News::Refused(reason)),
            }),
        ];
        news.extend(told.into_iter().flatten());
        news
    }

    fn news_of(&self, response: &HeartbeatResponse) -> Vec<News> {
        match response.status {
            Status::Ok if self.sent_epoch == EPOCH_JOIN => vec![News::Joined(response.member_epoch)],
            Status::UnknownMemberId | Status::FencedMemberEpoch => {
                vec![News::Fenced(response.reason.clone())]
            }
            _ => Vec::new(),
        }
    }

    /// Sends a heartbeat; one that is still on its way has been given up.
    fn send(&mut self, request: HeartbeatRequest, http: &reqwest::Client, url: &str) {
        self.sent_epoch = request.member_epoch;
        self.request = JoinSet::new();
        let post = http.post(url).json(&request);
        self.request.spawn(async move {
            match answer_to(post).await {
                Ok(response) => Event::Answer(Box::new(response)),
                Err(error) => {
                    tracing::debug!(member_id = request.member_id, error = format!("{error:#}"), "no answer");
                    Event::Failed { request_id: request.request_id }
                }
            }
        });
    }
}

async fn answer_to(post: reqwest::RequestBuilder) -> anyhow::Result<HeartbeatResponse> {
    let answer = post.send().await?;
    if answer.status().is_success() {
        return Ok(answer.json().await?);
    }
    let refusal: ErrorBody = answer.json().await?;
    bail!("{}: {}", refusal.error_code.as_str(), refusal.message)
}

/// Milliseconds since 1970: where a consumer's sequence begins.
fn wall_clock_millis() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(0)
}
