//! The producers: the real decisions, and around them the way to the coordinators and to Redis.

use std::time::Duration;

use rsc_client::decision::{Producer, ProducerAction, ProducerEvent, ProducerSettings};
use rsc_protocol::routing::ProducerRouting;

use super::plan::StreamFault;
use super::world::{Asker, Event, Op, Said, StreamWorld};

/// A producer process.
#[derive(Debug)]
pub(crate) struct ProducerProcess {
    machine: Producer,
    /// Whose routing it asks for.
    pub(crate) group: usize,
    /// It was started with this count and never asks (a program without this protocol).
    fixed: Option<u32>,
    /// It does not run until then.
    pub(crate) paused_until: i64,
    /// It reaches no coordinator until then.
    pub(crate) cut_off_until: i64,
    /// How much faster its clock runs, in millionths.
    fast_ppm: i64,
    timer: u64,
    tickets: u64,
}

impl ProducerProcess {
    fn clock(&self, at: i64) -> Duration {
        Duration::from_micros(u64::try_from(at * (1_000_000 + self.fast_ppm) / 1_000).unwrap_or(0))
    }
}

impl StreamWorld {
    pub(crate) fn start_producers(&mut self) {
        let millis = |millis: i64| Duration::from_millis(u64::try_from(millis).unwrap_or(0));
        let settings = ProducerSettings {
            request_timeout: millis(self.shape.producer_timeout),
            retry_pause: millis(self.shape.timing.heartbeat / 4),
            assumed_ttl: millis(self.shape.cache),
        };
        let most = if self.shape.has_forgotten_producer { 3 } else { 2 };
        for producer in 0..most {
            let fixed = (producer == 2).then(|| {
                let record = self.groups[0].redis.stored.as_ref();
                record.map_or(1, |stored| stored.group.shard_count)
            });
            let fast_ppm = if self.dice.chance(0.3) { self.dice.between(0, 2_000) } else { 0 };
            self.producers.push(ProducerProcess {
                machine: Producer::new(settings),
                group: producer % self.shape.groups,
                fixed,
                paused_until: 0,
                cut_off_until: 0,
                fast_ppm,
                timer: 0,
                tickets: 0,
            });
            let at = self.dice.between(1, self.shape.timing.heartbeat);
            self.schedule(at, Event::Publish { producer });
            self.schedule(0, Event::ProducerWakes { producer, timer: 0 });
        }
    }

    pub(crate) fn producer_event(&mut self, event: Event) {
        match event {
            Event::Publish { producer } => self.publish(producer),
            Event::PublishOne { producer } => self.publish_one(producer),
            Event::ProducerWakes { producer, timer } if self.producers[producer].timer == timer => {
                self.tell_producer(producer, ProducerEvent::Time);
            }
            Event::Route { coordinator, producer, request, tag, sent_at } => {
                if self.coordinators[coordinator].alive {
                    self.route(coordinator, producer, request, tag, sent_at);
                } else {
                    self.send_routing(producer, request, None, sent_at);
                }
            }
            Event::Routed { producer, request, routing, sent_at } => {
                let event = match routing {
                    None => ProducerEvent::Failed { request },
                    Some(None) => ProducerEvent::Unchanged { request },
                    Some(Some(mut routing)) => {
                        if self.plan.lacks(StreamFault::ProducerLeaseFromReceipt) {
                            let late = u64::try_from(self.at - sent_at).unwrap_or(0);
                            routing.routing_cache_ttl_ms += late;
                        }
                        let tag = Some(tag_of(&routing));
                        ProducerEvent::Routing { request, routing, tag }
                    }
                };
                self.tell_producer(producer, event);
            }
            Event::Hand { producer, ticket, shard, before } => {
                let now = self.producers[producer].clock(self.at);
                let is_late = i64::try_from(now.as_micros()).unwrap_or(i64::MAX) >= before;
                if is_late && !self.plan.lacks(StreamFault::PublishedAfterLease) {
                    self.tell_producer(producer, ProducerEvent::TooLate { ticket });
                } else {
                    let flight = if self.is_faulty && self.dice.chance(0.5) { self.shape.flight } else { 5 };
                    let arrives = self.at + self.dice.between(0, flight);
                    self.schedule(arrives, Event::Add { producer, ticket, shard });
                }
            }
            Event::Add { producer, ticket, shard } => self.add(producer, ticket, shard),
            Event::Added { producer, ticket, is_taken } => {
                let event = if is_taken {
                    ProducerEvent::Added { ticket }
                } else {
                    ProducerEvent::NoStream { ticket }
                };
                self.tell_producer(producer, event);
            }
            _ => {}
        }
    }

    fn publish(&mut self, producer: usize) {
        let is_forgotten = self.producers[producer].fixed.is_some();
        let timing = &self.shape.timing;
        // Who is forgotten writes seldom enough for a drain to come to its end.
        let longest = if is_forgotten { 3 * timing.lease } else { timing.heartbeat * 2 / 3 };
        let pause = self.dice.between(10, longest);
        self.schedule(self.at + pause, Event::Publish { producer });
        self.publish_one(producer);
    }

    /// One record of any key.
    fn publish_one(&mut self, producer: usize) {
        let process = &mut self.producers[producer];
        process.tickets += 1;
        let ticket = process.tickets;
        match process.fixed {
            None => {
                let key = format!("key-{}", self.dice.below(64)).into_bytes();
                self.tell_producer(producer, ProducerEvent::Publish { ticket, key });
            }
            Some(0) => {}
            Some(count) => {
                let shard = u32::try_from(self.dice.between(0, i64::from(count))).unwrap_or(0);
                self.schedule(self.at, Event::Add { producer, ticket, shard });
            }
        }
    }

    fn tell_producer(&mut self, producer: usize, event: ProducerEvent) {
        if self.producers[producer].fixed.is_some() {
            return;
        }
        let now = self.producers[producer].clock(self.at);
        for action in self.producers[producer].machine.handle(now, event) {
            match action {
                ProducerAction::Fetch { request, tag } => {
                    if self.producers[producer].cut_off_until <= self.at && !self.is_lost() {
                        let coordinator = self.dice.below(self.coordinators.len());
                        let (sent_at, arrives) = (self.at, self.at + self.travel());
                        self.schedule(arrives, Event::Route { coordinator, producer, request, tag, sent_at });
                    }
                }
                ProducerAction::Add { ticket, shard, before, .. } => {
                    let before = i64::try_from(before.as_micros()).unwrap_or(i64::MAX);
                    // A record may wait for its connection.
                    let waits = self.is_faulty && self.dice.chance(0.2);
                    let takes = self.dice.between(0, if waits { self.shape.timing.lease } else { 3 });
                    self.schedule(self.at + takes, Event::Hand { producer, ticket, shard, before });
                    self.publish_at_the_last_moment(producer, before);
                }
                ProducerAction::Fail { .. } => self.counts.not_published += 1,
            }
        }
        let process = &mut self.producers[producer];
        process.timer += 1;
        let timer = process.timer;
        let micros = i64::try_from(process.machine.wakes_at().as_micros()).unwrap_or(i64::MAX / 2_000);
        let at = micros * 1_000 / (1_000_000 + process.fast_ppm) + 1;
        self.schedule(at.max(self.at + 1), Event::ProducerWakes { producer, timer });
    }

    /// Who hears no more often has something to publish just before its lease ends.
    fn publish_at_the_last_moment(&mut self, producer: usize, before: i64) {
        let process = &self.producers[producer];
        let ends_at = before * 1_000 / (1_000_000 + process.fast_ppm);
        if process.cut_off_until > ends_at && self.dice.chance(0.1) {
            let at = ends_at - self.dice.between(0, self.shape.flight / 4);
            self.schedule(at, Event::PublishOne { producer });
        }
    }

    /// A request for routing is answered from what is stored after it has arrived (protocol 7).
    fn route(
        &mut self,
        coordinator: usize,
        producer: usize,
        request: u64,
        tag: Option<String>,
        sent_at: i64,
    ) {
        let group = self.producers[producer].group;
        if self.plan.lacks(StreamFault::RoutingFromMemory)
            && let Some(known) = &self.coordinators[coordinator].actors[group].known
        {
            let routing = Box::new(known.group.routing(self.shape.timing.core.routing_cache_ttl_ms));
            self.send_routing(producer, request, Some(Some(routing)), sent_at);
            return;
        }
        let asker = Asker::Routing { producer, request, tag, sent_at };
        self.ask(coordinator, asker, Op::Read { group });
    }

    pub(crate) fn answer_routing(
        &mut self,
        producer: usize,
        request: u64,
        tag: Option<&str>,
        sent_at: i64,
        said: Said,
    ) {
        let ttl = self.shape.timing.core.routing_cache_ttl_ms;
        let routing = match said {
            Said::Read(Some(stored)) if !stored.group.provisioning_pending => {
                let routing = stored.group.routing(ttl);
                let is_known = tag == Some(tag_of(&routing).as_str());
                Some((!is_known).then(|| Box::new(routing)))
            }
            _ => None,
        };
        self.send_routing(producer, request, routing, sent_at);
    }

    fn send_routing(
        &mut self,
        producer: usize,
        request: u64,
        routing: Option<Option<Box<ProducerRouting>>>,
        sent_at: i64,
    ) {
        if self.producers[producer].cut_off_until <= self.at && !self.is_lost() {
            let is_slow = self.is_faulty && self.plan.faults.network() && self.dice.chance(0.3);
            let takes = self.travel();
            let takes = if is_slow { self.dice.between(0, self.shape.producer_timeout) } else { takes };
            let arrives = self.at + takes;
            self.schedule(arrives, Event::Routed { producer, request, routing, sent_at });
        }
    }

    /// `XADD NOMKSTREAM` arrives.
    fn add(&mut self, producer: usize, ticket: u64, shard: u32) {
        let id = self.streams.add(shard);
        if let Some(id) = id {
            self.ledger.added(id, shard, producer, self.at);
            self.tell(|_| format!("producer {producer} adds record {id} to shard {shard}"));
            self.check_in_time(producer, shard);
        }
        if !self.is_lost() {
            let arrives = self.at + self.dice.between(0, 5);
            self.schedule(arrives, Event::Added { producer, ticket, is_taken: id.is_some() });
        }
    }

    /// A shard was just found empty: now and then somebody who does not know of that writes into it.
    pub(crate) fn write_behind_the_proof(&mut self, shard: u32) {
        let writer =
            self.producers.iter().position(|producer| producer.fixed.is_some_and(|count| shard < count));
        if let Some(producer) = writer
            && self.is_faulty
            && self.dice.chance(0.2)
        {
            let at = self.at + self.dice.between(0, 4 * self.shape.latency);
            self.schedule(at, Event::Add { producer, ticket: 0, shard });
        }
    }

    /// Once the drain has begun in any group nobody publishes into a shard that goes away (protocol 6).
    fn check_in_time(&mut self, producer: usize, shard: u32) {
        if self.losses > 0 || self.producers[producer].fixed.is_some() {
            return;
        }
        let late = self.stored().iter().find_map(|stored| {
            let running = stored.group.active_migration()?;
            let drains = running.draining_since.is_some() && !running.state.is_back();
            let is_removed = shard >= stored.group.shard_count;
            let is_late = is_removed && (drains || running.retired.contains(shard));
            is_late.then(|| running.resharding_id.clone())
        });
        if let Some(id) = late {
            self.violate(format!(
                "published-in-time: producer {producer} adds to shard {shard}, which {id} drains"
            ));
        }
    }
}

fn tag_of(routing: &ProducerRouting) -> String {
    let (version, count, ttl) = (routing.metadata_version, routing.shard_count, routing.routing_cache_ttl_ms);
    format!("{version}-{count}-{ttl}-{}", routing.metadata_token)
}
