//! The producer's state machine: which shard a record goes to, and for how long that may be believed
//! (protocol 7, 11).

use std::collections::VecDeque;
use std::time::Duration;

use rsc_protocol::hash::shard_of;
use rsc_protocol::routing::ProducerRouting;

use super::routes::{Cached, Refresh};

/// Timing of a producer.
#[derive(Clone, Copy, Debug)]
pub struct ProducerSettings {
    /// How long routing is waited for.
    pub request_timeout: Duration,
    /// Before the next try after a failure.
    pub retry_pause: Duration,
    /// The cache lease to assume where a coordinator does not tell `routingCacheTtlMs`; at most what its stream's
    /// records reckon with.
    pub assumed_ttl: Duration,
}

impl Default for ProducerSettings {
    fn default() -> Self {
        ProducerSettings {
            request_timeout: Duration::from_secs(2),
            retry_pause: Duration::from_millis(500),
            assumed_ttl: Duration::from_secs(30),
        }
    }
}

/// What happened.
#[derive(Clone, Debug)]
pub enum ProducerEvent {
    /// Time has passed; due at [`Producer::wakes_at`].
    Time,
    /// The application wants a record published.
    Publish {
        /// The shell's name for it, used once.
        ticket: u64,
        /// The partition key.
        key: Vec<u8>,
    },
    /// Routing arrived (200).
    Routing {
        /// The number of the [`ProducerAction::Fetch`] it answers.
        request: u64,
        /// The body.
        routing: Box<ProducerRouting>,
        /// Its `ETag`, as it came.
        tag: Option<String>,
    },
    /// Routing is still what the named tag stands for (304).
    Unchanged {
        /// The number of the request.
        request: u64,
    },
    /// A request for routing certainly gets no answer, or an error. (A timeout is told by time alone.)
    Failed {
        /// The number of the request.
        request: u64,
    },
    /// Redis took the record.
    Added {
        /// Which.
        ticket: u64,
    },
    /// `NOMKSTREAM` refused it: there is no such stream.
    NoStream {
        /// Which.
        ticket: u64,
    },
    /// It could not be handed to Redis before its time was over, and certainly was not.
    TooLate {
        /// Which.
        ticket: u64,
    },
    /// Redis refused it for another reason, or nobody knows what became of it.
    NotAdded {
        /// Which.
        ticket: u64,
    },
}

/// What the shell has to do, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProducerAction {
    /// Ask for routing.
    Fetch {
        /// Names the request; only its answer counts.
        request: u64,
        /// For `If-None-Match`.
        tag: Option<String>,
    },
    /// `XADD NOMKSTREAM` to this stream.
    Add {
        /// Which record.
        ticket: u64,
        /// The shard.
        shard: u32,
        /// The shard's stream.
        stream_key: String,
        /// What has not been handed to Redis before this instant is not sent: tell [`ProducerEvent::TooLate`].
        before: Duration,
    },
    /// The record is not published. Nothing more happens with the ticket.
    Fail {
        /// Which record.
        ticket: u64,
        /// Why.
        why: PublishError,
    },
}

/// Why a record was not published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PublishError {
    /// Nobody could be asked where it belongs, and what was known of that is too old.
    RoutingUnavailable,
    /// The stream has been scaled to no shards.
    NoShards,
    /// The coordinator routes to a stream that does not exist.
    StreamMissing,
}

/// A record without a place.
#[derive(Clone, Debug)]
struct Waiting {
    ticket: u64,
    key: Vec<u8>,
    /// Only routing that was asked for at this instant or later will do: what was known before has proven stale.
    asked_from: Option<Duration>,
}

/// A record that was handed to the shell.
#[derive(Clone, Debug)]
struct Handed {
    ticket: u64,
    key: Vec<u8>,
    is_second: bool,
}

/// The routing decisions of one producer.
#[derive(Clone, Debug)]
pub struct Producer {
    settings: ProducerSettings,
    cached: Option<Cached>,
    refresh: Refresh,
    waiting: VecDeque<Waiting>,
    handed: Vec<Handed>,
}

impl Producer {
    /// A producer that knows nothing yet; the first [`ProducerEvent::Time`] makes it ask.
    #[must_use]
    pub fn new(settings: ProducerSettings) -> Self {
        Producer {
            settings,
            cached: None,
            refresh: Refresh::default(),
            waiting: VecDeque::new(),
            handed: Vec::new(),
        }
    }

    /// Takes in an event at the instant `now`; never call it with an instant before the last one.
    #[must_use = "the actions are the decision"]
    pub fn handle(&mut self, now: Duration, event: ProducerEvent) -> Vec<ProducerAction> {
        let mut actions = Vec::new();
        match event {
            ProducerEvent::Time => {}
            ProducerEvent::Publish { ticket, key } => {
                if !self.route(now, ticket, &key, false, &mut actions) {
                    self.waiting.push_back(Waiting { ticket, key, asked_from: None });
                    self.refresh.hasten(now);
                }
            }
            ProducerEvent::Routing { request, routing, tag } => {
                if let Some(sent_at) = self.refresh.answered(request) {
                    self.take_in(sent_at, *routing, tag);
                    self.learned(now, sent_at, &mut actions);
                }
            }
            ProducerEvent::Unchanged { request } => {
                if let Some(sent_at) = self.refresh.answered(request) {
                    if let Some(cached) = &mut self.cached {
                        cached.extend(sent_at);
                    }
                    self.learned(now, sent_at, &mut actions);
                }
            }
            ProducerEvent::Failed { request } => {
                if self.refresh.answered(request).is_some() {
                    self.failed(now, &mut actions);
                }
            }
            ProducerEvent::Added { ticket } | ProducerEvent::NotAdded { ticket } => {
                self.handed.retain(|handed| handed.ticket != ticket);
            }
            ProducerEvent::NoStream { ticket } => {
                self.again(now, ticket, PublishError::StreamMissing, &mut actions);
            }
            ProducerEvent::TooLate { ticket } => {
                self.again(now, ticket, PublishError::RoutingUnavailable, &mut actions);
            }
        }
        if self.refresh.give_up_after(self.settings.request_timeout, now) {
            self.failed(now, &mut actions);
        }
        if self.refresh.is_due(now) {
            let request = self.refresh.send(now);
            let tag = self.cached.as_ref().and_then(|cached| cached.tag.clone());
            actions.push(ProducerAction::Fetch { request, tag });
        }
        actions
    }

    /// When [`ProducerEvent::Time`] is due at the latest.
    #[must_use]
    pub fn wakes_at(&self) -> Duration {
        self.refresh.wakes_at(self.settings.request_timeout)
    }

    /// What records are routed by at `now`, if anything still may be.
    #[must_use]
    pub fn routing(&self, now: Duration) -> Option<&ProducerRouting> {
        self.cached.as_ref().filter(|cached| now < cached.until).map(|cached| &cached.routing)
    }

    /// Hands a record to the shell, or fails it for good; `false`: nobody knows where it belongs.
    fn route(
        &mut self,
        now: Duration,
        ticket: u64,
        key: &[u8],
        is_second: bool,
        actions: &mut Vec<ProducerAction>,
    ) -> bool {
        let Some(cached) = self.cached.as_ref().filter(|cached| now < cached.until) else { return false };
        let place = shard_of(key, cached.routing.shard_count).and_then(|shard| {
            let routed = cached.routing.shards.iter().find(|routed| routed.shard_index == shard)?;
            Some((shard, routed.stream_key.clone()))
        });
        let Some((shard, stream_key)) = place else {
            actions.push(ProducerAction::Fail { ticket, why: PublishError::NoShards });
            return true;
        };
        actions.push(ProducerAction::Add { ticket, shard, stream_key, before: cached.until });
        self.handed.push(Handed { ticket, key: key.to_vec(), is_second });
        true
    }

    /// Takes an answer in, unless it is an older one of the same history: of a coordinator that tells no tokens,
    /// or of a cache in between.
    fn take_in(&mut self, sent_at: Duration, routing: ProducerRouting, tag: Option<String>) {
        let is_old = self.cached.as_ref().is_some_and(|cached| {
            routing.metadata_version < cached.routing.metadata_version
                && routing.metadata_token == cached.routing.metadata_token
        });
        if is_old {
            return;
        }
        let told = Duration::from_millis(routing.routing_cache_ttl_ms);
        let ttl = if told.is_zero() { self.settings.assumed_ttl } else { told };
        self.cached = Some(Cached { routing, tag, ttl, sent_at, until: sent_at.saturating_add(ttl) });
    }

    /// An answer was taken in: whoever waited for it is routed, and the next one is asked for before this one's lease
    /// ends.
    fn learned(&mut self, now: Duration, sent_at: Duration, actions: &mut Vec<ProducerAction>) {
        let next = self.cached.as_ref().map_or(now, Cached::refresh_at);
        self.refresh.schedule(next.max(now + self.settings.retry_pause));
        for waiting in std::mem::take(&mut self.waiting) {
            let is_second = waiting.asked_from.is_some();
            if waiting.asked_from.is_some_and(|from| sent_at < from) {
                self.refresh.hasten(now);
                self.waiting.push_back(waiting);
            } else if !self.route(now, waiting.ticket, &waiting.key, is_second, actions) {
                // It came after its own lease was over.
                let why = PublishError::RoutingUnavailable;
                actions.push(ProducerAction::Fail { ticket: waiting.ticket, why });
            }
        }
    }

    /// No routing this time: the cache is kept while it is valid; who waits for better is failed.
    fn failed(&mut self, now: Duration, actions: &mut Vec<ProducerAction>) {
        self.refresh.schedule(now + self.settings.retry_pause);
        let why = PublishError::RoutingUnavailable;
        let failed = std::mem::take(&mut self.waiting);
        actions.extend(failed.into_iter().map(|one| ProducerAction::Fail { ticket: one.ticket, why }));
    }

    /// A record came back although it was routed: once more with fresh routing, and not a third time.
    fn again(&mut self, now: Duration, ticket: u64, why: PublishError, actions: &mut Vec<ProducerAction>) {
        let Some(at) = self.handed.iter().position(|handed| handed.ticket == ticket) else { return };
        let handed = self.handed.swap_remove(at);
        if handed.is_second {
            actions.push(ProducerAction::Fail { ticket, why });
            return;
        }
        self.waiting.push_back(Waiting { ticket, key: handed.key, asked_from: Some(now) });
        self.refresh.hasten(now);
    }
}
