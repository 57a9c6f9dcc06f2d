//! A stream whose shard count a test changes, in all of its groups.

use std::collections::BTreeSet;

use reqwest::StatusCode;
use rsc_protocol::keys::shard_key;
use rsc_protocol::resharding::{
    MigrationResponse, MigrationState, MigrationsResponse, ScalePlan, ScaleResponse,
};
use rsc_protocol::{ErrorCode, GroupKey};
use serde_json::{Value, json};

use super::api::{Answer, Api, encode, group_path, monitored_path};
use super::redis_server::RedisServer;
use super::wait::wait_until;

/// The body of a scale request.
pub(crate) fn scale_body(target: i64) -> Value {
    json!({"targetShardCount": target, "requestedBy": "test", "reason": "load has changed"})
}

/// One stream, and the coordinator that is asked about it.
#[derive(Clone)]
pub(crate) struct Stream {
    pub(crate) api: Api,
    pub(crate) prefix: String,
    /// In ascending order.
    pub(crate) groups: Vec<GroupKey>,
}

impl Stream {
    /// Creates a stream with these groups.
    pub(crate) async fn create(api: &Api, prefix: &str, shards: u32, groups: &[&str]) -> Self {
        let body = json!({"initialShardCount": shards, "requestedBy": "test", "consumerGroups": groups});
        api.post(&format!("/coord/v1/streams/{}", encode(prefix)), &body).await.success();
        let names: BTreeSet<&str> = groups.iter().copied().collect();
        let groups = names.into_iter().map(|name| GroupKey::new(prefix, name).unwrap()).collect();
        Stream { api: api.clone(), prefix: prefix.to_owned(), groups }
    }

    /// Asks another coordinator from now on.
    pub(crate) fn talk_to(&mut self, api: &Api) {
        self.api = api.clone();
    }

    /// The first of its groups.
    pub(crate) fn group(&self) -> &GroupKey {
        &self.groups[0]
    }

    /// `POST …/scale` with this body.
    pub(crate) async fn try_scale(&self, body: &Value) -> Answer {
        self.api.post(&format!("/coord/v1/streams/{}/scale", encode(&self.prefix)), body).await
    }

    /// Changes the count, and demands that the change is under way; `more` goes into the request's body.
    pub(crate) async fn scale_with(&self, target: i64, more: &Value) -> ScaleResponse {
        let mut body = scale_body(target);
        for (field, value) in more.as_object().unwrap() {
            body[field] = value.clone();
        }
        let answer = self.try_scale(&body).await;
        assert_eq!(answer.status, StatusCode::ACCEPTED, "{}", String::from_utf8_lossy(&answer.body));
        answer.read()
    }

    /// Changes the count, and returns the migration's id.
    pub(crate) async fn scale(&self, target: i64) -> String {
        self.scale_with(target, &json!({})).await.resharding_id
    }

    /// What a change would do.
    pub(crate) async fn plan(&self, target: i64) -> ScalePlan {
        let mut body = scale_body(target);
        body["dryRun"] = json!(true);
        let answer = self.try_scale(&body).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", String::from_utf8_lossy(&answer.body));
        answer.read()
    }

    /// `POST …/rollback`.
    pub(crate) async fn try_roll_back(&self, id: &str) -> Answer {
        let path = format!("{}/migrations/{}/rollback", group_path(self.group()), encode(id));
        self.api.post(&path, &json!({"requestedBy": "test", "reason": "thought better of it"})).await
    }

    /// Takes a migration back, and demands that the count before is in force.
    pub(crate) async fn roll_back(&self, id: &str) -> MigrationResponse {
        let answer = self.try_roll_back(id).await;
        assert_eq!(answer.status, StatusCode::ACCEPTED, "{}", String::from_utf8_lossy(&answer.body));
        answer.read()
    }

    /// Every migration as this group records it.
    pub(crate) async fn migrations_of(&self, group: &GroupKey) -> MigrationsResponse {
        let answer = self.api.get(&format!("{}/migrations", monitored_path(group))).await;
        answer.success();
        answer.read()
    }

    /// One migration as each group records it; groups that do not are left out.
    pub(crate) async fn migration(&self, id: &str) -> Vec<MigrationResponse> {
        let mut rows = Vec::new();
        for group in &self.groups {
            let answer = self.api.get(&format!("{}/migrations/{}", group_path(group), encode(id))).await;
            if answer.status != StatusCode::NOT_FOUND {
                answer.success();
                rows.push(answer.read());
            }
        }
        rows
    }

    /// Waits until every group records the migration in this state.
    pub(crate) async fn wait_for(&self, id: &str, state: MigrationState) {
        self.wait_until(&format!("{id} is {state:?}"), id, |row| row.state == state).await;
    }

    /// Waits until `condition` holds of the migration in every group.
    pub(crate) async fn wait_until(
        &self,
        what: &str,
        id: &str,
        condition: impl Fn(&MigrationResponse) -> bool,
    ) {
        let mut last = Vec::new();
        let shown = async || {
            last = self.migration(id).await;
            last.len() == self.groups.len() && last.iter().all(&condition)
        };
        wait_until(what, shown).await;
    }

    /// What every group's record says about the count and the running migration.
    pub(crate) async fn counts(&self) -> Vec<(u32, Option<String>)> {
        let mut counts = Vec::new();
        for group in &self.groups {
            let shown = self.api.group(group).await;
            counts.push((shown.shard_count, shown.active_migration));
        }
        counts
    }

    /// Demands that every group has this count and no migration runs.
    pub(crate) async fn expect_settled_at(&self, count: u32) {
        for (group, (shown, running)) in self.groups.iter().zip(self.counts().await) {
            assert_eq!((shown, running), (count, None), "{group}");
        }
    }

    /// Waits until every group has this count and no migration runs.
    pub(crate) async fn settle_at(&self, count: u32) {
        wait_until("the stream has settled", async || {
            self.counts().await.iter().all(|shown| *shown == (count, None))
        })
        .await;
    }

    /// The indices of the shard keys that exist.
    pub(crate) async fn shard_keys(&self, redis: &RedisServer) -> BTreeSet<u32> {
        let keys: Vec<String> = redis.command(&["KEYS", &format!("{}:*", self.prefix)]).await;
        keys.iter().map(|key| key[self.prefix.len() + 1..].parse().unwrap()).collect()
    }

    /// The key of a shard.
    pub(crate) fn key(&self, shard: u32) -> String {
        shard_key(&self.prefix, shard)
    }

    /// Demands that a second change is refused and names the running one.
    pub(crate) async fn expect_other_runs(&self, target: i64, id: &str) {
        let message =
            self.try_scale(&scale_body(target)).await.expect_error(ErrorCode::ActiveMigrationExists);
        assert!(message.contains(id), "{message}");
    }
}
