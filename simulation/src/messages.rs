//! Messages between processes and coordinators, and how they read in a trace.

use std::rc::Rc;

use rsc_core::{Reply, view};
use rsc_protocol::{HeartbeatRequest, HeartbeatResponse, Status};

use crate::coordinator::{Job, Pending};
use crate::world::{Event, World};

impl World {
    /// How long a message of a member takes.
    fn travel(&mut self) -> i64 {
        if !self.is_faulty || !self.plan.faults.network() {
            return self.dice.between(1, 20);
        }
        match self.dice.between(0, 20) {
            0..=13 => self.dice.between(1, 30),
            14..=17 => self.dice.between(1, self.timing.heartbeat),
            _ => self.dice.between(1, 2 * self.timing.lease),
        }
    }

    fn is_lost(&mut self, process: usize) -> bool {
        let cut_off = self.processes[process].cut_off_until > self.at;
        cut_off || (self.is_faulty && self.plan.faults.network() && self.dice.chance(0.08))
    }

    fn copies(&mut self) -> usize {
        if self.is_faulty && self.plan.faults.network() && self.dice.chance(0.06) { 2 } else { 1 }
    }

    /// The coordinator that the load balancer picks: any, or as long as it lives always the first.
    fn balance(&mut self) -> usize {
        let any = self.dice.below(self.coordinators.len());
        if !self.is_sticky {
            return any;
        }
        self.coordinators.iter().position(|coordinator| coordinator.alive).unwrap_or(any)
    }

    /// A process sends a heartbeat to whichever coordinator the load balancer picks.
    pub(crate) fn send(&mut self, process: usize, request: HeartbeatRequest) {
        self.tell(|world| said(world, process, &request));
        if self.is_lost(process) {
            self.tell(|_| format!("         {} is lost", request.request_id));
            return;
        }
        let request = Rc::new(request);
        for _ in 0..self.copies() {
            let coordinator = self.balance();
            let arrives = self.at + self.travel();
            let request = Rc::clone(&request);
            let sent_at = self.at;
            self.schedule(arrives, Event::Request { coordinator, process, request, sent_at });
        }
    }

    /// A heartbeat arrives.
    pub(crate) fn arrive(
        &mut self,
        coordinator: usize,
        process: usize,
        request: Rc<HeartbeatRequest>,
        sent_at: i64,
    ) {
        if !self.coordinators[coordinator].alive {
            self.respond(process, &request.request_id, None, self.at);
            return;
        }
        self.coordinators[coordinator].queue.push_back(Job { request, process, sent_at });
        if self.coordinators[coordinator].turn.is_none() {
            self.begin_turn(coordinator);
        }
    }

    /// An answer leaves for a process.
    pub(crate) fn respond(
        &mut self,
        process: usize,
        request_id: &str,
        response: Option<HeartbeatResponse>,
        decided_at: i64,
    ) {
        if self.is_lost(process) {
            self.tell(|_| format!("         the answer to {request_id} is lost"));
            return;
        }
        for _ in 0..self.copies() {
            let arrives = self.at + self.travel();
            let response = response.clone().map(Box::new);
            let request_id = request_id.to_owned();
            self.schedule(arrives, Event::Answer { process, request_id, response, decided_at });
        }
    }

    pub(crate) fn refuse(&mut self, jobs: Vec<Job>, reason: &str) {
        for job in jobs {
            let response = view::without_group(&job.request, Status::Retry, reason, &self.timing.core);
            self.respond(job.process, &job.request.request_id, Some(response), self.at);
        }
    }

    pub(crate) fn answer_all(&mut self, pending: &Pending) {
        let replies = &pending.decision.replies;
        let beats = replies.iter().skip(replies.len().saturating_sub(pending.jobs.len()));
        for (job, reply) in pending.jobs.iter().zip(beats) {
            self.tell(|_| told(job, reply));
            let response = match reply {
                Reply::Heartbeat(response) => Some((**response).clone()),
                Reply::Refused { .. } | Reply::Done => None,
            };
            self.respond(job.process, &job.request.request_id, response, pending.decided_at);
        }
    }
}

fn shards(list: impl Iterator<Item = u32>) -> String {
    let texts: Vec<String> = list.map(|shard| shard.to_string()).collect();
    format!("[{}]", texts.join(" "))
}

fn said(world: &World, process: usize, request: &HeartbeatRequest) -> String {
    let revoking: Vec<String> = request
        .revoking_shards
        .iter()
        .map(|report| format!("{}:{:?}", report.shard.shard_index, report.state))
        .collect();
    format!(
        "{} ({}) > {} epoch {} v{} {} seq {} owns {} gives back [{}]",
        request.member_id,
        world.processes[process].instance,
        request.request_id,
        request.member_epoch,
        request.metadata_version,
        request.metadata_token.as_deref().unwrap_or("-"),
        request.sequence.map_or("-".to_owned(), |sequence| sequence.to_string()),
        shards(request.owned_shards.iter().map(|shard| shard.shard_index)),
        revoking.join(" "),
    )
}

fn told(job: &Job, reply: &Reply) -> String {
    let Reply::Heartbeat(response) = reply else { return format!("         {reply:?}") };
    format!(
        "         {} < {:?} epoch {} v{} {} assigned {} pending {} {}",
        response.response_to,
        response.status,
        response.member_epoch,
        response.metadata_version,
        response.metadata_token,
        shards(response.assignment.assigned_shards.iter().map(|shard| shard.shard_index)),
        shards(response.assignment.pending_shards.iter().map(|shard| shard.shard_index)),
        if response.reason.is_empty() { &job.request.member_id } else { &response.reason },
    )
}

pub(crate) fn recorded(pending: &Pending) -> String {
    let group = &pending.decision.group;
    let what: Vec<String> = pending.decision.transitions.iter().map(|one| format!("{one:?}")).collect();
    format!("recorded r{} v{} {}", group.store_revision, group.metadata_version, what.join(", "))
}
