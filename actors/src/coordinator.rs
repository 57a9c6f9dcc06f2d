//! The handle through which everything outside talks to the actors.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rsc_core::{Command, Group};
use rsc_protocol::admin::{
    CreateGroupRequest, CreateStreamRequest, CreateStreamResponse, DeleteGroupRequest, GroupResponse,
};
use rsc_protocol::resharding::{MigrationResponse, MigrationsResponse, RollbackRequest, ScaleRequest};
use rsc_protocol::routing::ProducerRouting;
use rsc_protocol::{GroupKey, HeartbeatRequest, HeartbeatResponse};
use rsc_store::GroupStore;
use tokio::sync::Mutex;

use crate::creation::{self, Plan, check_request};
use crate::gate::Gate;
use crate::inbox::{Answered, Request};
use crate::meter;
use crate::reads::{self, GroupList, Presence};
use crate::refusal::Refusal;
use crate::registry::Registry;
use crate::replication::Unreplicated;
use crate::resharding::{self, Resharding, Scaled};
use crate::settings::CoordinatorSettings;
use crate::shared::Shared;
use crate::status::ActorStatus;
use crate::stream_reads::StreamReads;
use crate::submit::submit;
use crate::supervisor::{Supervisor, SupervisorLink};
use crate::watchdog::Watchdog;
use crate::workers::Workers;
use crate::write_trouble::WriteTrouble;

/// How long the answer of a ping is good for.
const PING_CACHE: Duration = Duration::from_millis(500);

/// The coordinator. Cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct Coordinator {
    shared: Arc<Shared>,
    ping: Arc<Mutex<Option<Ping>>>,
}

/// When the store was last asked whether it is there, and what came of it.
struct Ping {
    at: Instant,
    result: Result<(), Refusal>,
}

impl std::fmt::Debug for Coordinator {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let instance_id = &self.shared.settings.instance_id;
        formatter.debug_struct("Coordinator").field("instance_id", instance_id).finish_non_exhaustive()
    }
}

impl Coordinator {
    /// Starts the supervisor and the threads of the group actors. Must be called inside a running actix
    /// system, which must run on until [`Coordinator::stopped`] has resolved. The store need not be
    /// reachable.
    pub fn start(settings: CoordinatorSettings, store: Arc<dyn GroupStore>) -> Coordinator {
        let settings = settings.bounded();
        let now = Instant::now();
        let watchdog = Arc::new(Watchdog::new(settings.lease(), settings.workers, now));
        let shared = Arc::new(Shared {
            workers: Workers::start(settings.workers, &watchdog),
            settings,
            store,
            gate: Arc::new(Gate::default()),
            registry: Registry::default(),
            watchdog,
            supervisor: SupervisorLink::default(),
            resharding: Resharding::default(),
            stream_reads: StreamReads::default(),
            unreplicated: Unreplicated::default(),
            write_trouble: WriteTrouble::default(),
            started: now,
            #[cfg(test)]
            hooks: crate::tests::Hooks::default(),
        });
        Supervisor::start_on(&shared);
        Coordinator { shared, ping: Arc::default() }
    }

    /// What redis refused the last commit of this process with; `None`: it did not, or nothing was tried for a lease.
    #[must_use]
    pub fn write_trouble(&self) -> Option<String> {
        self.shared.write_trouble.recent(self.shared.lease())
    }

    /// How many groups of this process have commits that too few replicas have (`redis.wait-replicas`).
    #[must_use]
    pub fn unreplicated_groups(&self) -> usize {
        self.shared.unreplicated.count(self.shared.lease())
    }

    /// A member's heartbeat (protocol 4).
    ///
    /// # Errors
    /// Only what is answered with an HTTP error; every status of protocol 4 is a response. A body that breaks
    /// the schema is `INVALID_REQUEST`.
    pub async fn heartbeat(
        &self,
        group: &GroupKey,
        path_member_id: &str,
        request: HeartbeatRequest,
    ) -> Result<HeartbeatResponse, Refusal> {
        request.check().map_err(|error| Refusal::invalid(error.to_string()))?;
        let request = Box::new(request);
        let command = Command::Heartbeat { path_member_id: path_member_id.to_owned(), request };
        match submit(&self.shared, group, Request::Command(command)).await? {
            Answered::Heartbeat(response) => Ok(*response),
            Answered::Deleted(_) | Answered::Done => Err(Refusal::internal()),
        }
    }

    /// Creates a stream with its first groups.
    ///
    /// # Errors
    /// See protocol 8; nothing is left behind then, or it is completed by itself.
    pub async fn create_stream(
        &self,
        stream_prefix: &str,
        request: CreateStreamRequest,
    ) -> Result<CreateStreamResponse, Refusal> {
        let plan = Plan::stream(&self.shared, stream_prefix, request)?;
        let groups = creation::create(&self.shared, plan).await?;
        Ok(creation::stream_response(stream_prefix, &groups))
    }

    /// Creates one group; the first of a prefix makes the stream.
    ///
    /// # Errors
    /// See protocol 8; nothing is left behind then, or it is completed by itself.
    pub async fn create_group(
        &self,
        group: &GroupKey,
        request: CreateGroupRequest,
    ) -> Result<GroupResponse, Refusal> {
        let plan = Plan::group(&self.shared, group, request)?;
        let groups = creation::create(&self.shared, plan).await?;
        creation::group_response(&groups)
    }

    /// Deletes a group; returns it as it was.
    ///
    /// # Errors
    /// `GROUP_HAS_ACTIVE_MEMBERS` and `GROUP_METADATA_CORRUPT` unless forced; see protocol 8 for the rest.
    pub async fn delete_group(
        &self,
        group: &GroupKey,
        request: DeleteGroupRequest,
    ) -> Result<GroupResponse, Refusal> {
        check_request(&request.requested_by, Some(&request.reason))?;
        if request.reason.chars().all(char::is_whitespace) {
            return Err(Refusal::invalid("reason is blank: say why the group is deleted"));
        }
        match submit(&self.shared, group, Request::Delete(request)).await? {
            Answered::Deleted(response) => Ok(*response),
            Answered::Heartbeat(_) | Answered::Done => Err(Refusal::internal()),
        }
    }

    /// Changes a stream's shard count in all of its groups (protocol 6). `only_group`: asked for through one group, which
    /// must be the stream's only one.
    ///
    /// # Errors
    /// See protocol 8. `ACTIVE_MIGRATION_EXISTS` names the one that runs; after any 503 the migration may be on
    /// record, and goes on by itself then.
    pub async fn scale(
        &self,
        stream_prefix: &str,
        only_group: Option<&GroupKey>,
        request: ScaleRequest,
    ) -> Result<Scaled, Refusal> {
        resharding::scale(&self.shared, stream_prefix, only_group, request).await
    }

    /// Takes a migration back in all groups of the stream (protocol 6).
    ///
    /// # Errors
    /// `MIGRATION_NOT_FOUND`, `ROLLBACK_NOT_ALLOWED` with the reason; see protocol 8 for the rest.
    pub async fn roll_back(
        &self,
        group: &GroupKey,
        resharding_id: &str,
        request: RollbackRequest,
    ) -> Result<MigrationResponse, Refusal> {
        resharding::roll_back(&self.shared, group, resharding_id, request).await
    }

    /// A group's migrations, and what the running one waits for.
    ///
    /// # Errors
    /// As [`Coordinator::group`].
    pub async fn migrations(&self, group: &GroupKey) -> Result<MigrationsResponse, Refusal> {
        resharding::migrations(&self.shared, group).await
    }

    /// One of a group's migrations, and what it waits for.
    ///
    /// # Errors
    /// As [`Coordinator::group`]; `MIGRATION_NOT_FOUND`.
    pub async fn migration(
        &self,
        group: &GroupKey,
        resharding_id: &str,
    ) -> Result<MigrationResponse, Refusal> {
        resharding::migration(&self.shared, group, resharding_id).await
    }

    /// A group's record, read from the store after the call; never takes the mutex, never writes.
    ///
    /// # Errors
    /// `GROUP_NOT_FOUND`, `GROUP_METADATA_MISSING`, `GROUP_METADATA_CORRUPT`, `REDIS_UNAVAILABLE`.
    pub async fn group(&self, group: &GroupKey) -> Result<Group, Refusal> {
        reads::group(&self.shared, group).await
    }

    /// As [`Coordinator::group`], at a glance; a missing or unreadable record is shown as unhealthy.
    ///
    /// # Errors
    /// `GROUP_NOT_FOUND`, `REDIS_UNAVAILABLE`.
    pub async fn group_summary(&self, group: &GroupKey) -> Result<GroupResponse, Refusal> {
        reads::group_summary(&self.shared, group).await
    }

    /// Every group of the index.
    ///
    /// # Errors
    /// `REDIS_UNAVAILABLE`.
    pub async fn groups(&self) -> Result<GroupList, Refusal> {
        reads::groups(&self.shared).await
    }

    /// What a group's producers are told (protocol 7), read from the store after the call.
    ///
    /// # Errors
    /// As [`Coordinator::group`]; `COORDINATOR_STATE_MUTEX_UNAVAILABLE` while the group is being created.
    pub async fn routing(&self, group: &GroupKey) -> Result<ProducerRouting, Refusal> {
        reads::routing(&self.shared, group).await
    }

    /// What the group's actor in this process is doing.
    ///
    /// # Errors
    /// As [`Coordinator::group`] when there is no actor and no such group.
    pub async fn actor(&self, group: &GroupKey) -> Result<ActorStatus, Refusal> {
        let instance_id = &self.shared.settings.instance_id;
        if let Some(handle) = self.shared.registry.get(group) {
            return Ok(handle.status.status(group, instance_id, handle.inbox.depth()));
        }
        match reads::presence(&self.shared, group).await? {
            Presence::Healthy(_) => Ok(ActorStatus::not_running(group, instance_id)),
            Presence::Unhealthy(refusal) => Ok(ActorStatus {
                error_code: Some(refusal.code),
                message: Some(refusal.message),
                ..ActorStatus::not_running(group, instance_id)
            }),
            Presence::NoGroup(_) => Err(Refusal::not_found(group)),
        }
    }

    /// Whether termination has begun.
    #[must_use]
    pub fn is_terminating(&self) -> bool {
        self.shared.gate.is_terminating()
    }

    /// `Ok` when work can be taken: not terminating, and the store answered a ping at most 500 ms ago.
    ///
    /// # Errors
    /// `COORDINATOR_TERMINATING`, `REDIS_UNAVAILABLE`.
    pub async fn ready(&self) -> Result<(), Refusal> {
        if self.is_terminating() {
            return Err(Refusal::terminating());
        }
        let mut cached = self.ping.lock().await;
        if let Some(ping) = &*cached
            && ping.at.elapsed() < PING_CACHE
        {
            return ping.result.clone();
        }
        let result = self.shared.store.ping().await.map(|_| ()).map_err(|error| {
            tracing::debug!(%error, "the store does not answer a ping");
            Refusal::store(&error)
        });
        *cached = Some(Ping { at: Instant::now(), result: result.clone() });
        result
    }

    /// Enters terminating mode at once (protocol 9): new mutations and heartbeats are refused, so are queued
    /// ones that have not begun; running turns go on to their end; ticks stop.
    pub fn begin_termination(&self) {
        if !self.shared.gate.close() {
            return;
        }
        meter::terminating();
        tracing::info!("terminating: running turns finish, nothing new begins");
        self.shared.supervisor.stop();
        self.shared.resharding.stop();
        for handle in self.shared.registry.handles() {
            handle.inbox.nudge();
        }
    }

    /// Resolves when every actor has finished its running turn and stopped, and every creation under way has
    /// ended.
    ///
    /// # Errors
    /// The number that has not stopped within `timeout`.
    pub async fn stopped(&self, timeout: Duration) -> Result<(), usize> {
        self.shared.gate.stopped(timeout).await
    }

    /// `redis` or `memory`.
    #[must_use]
    pub fn store_kind(&self) -> &'static str {
        self.shared.store.kind()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}
