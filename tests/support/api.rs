//! A small client of the HTTP surface that keeps what it got: status, headers, body.

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::header::HeaderMap;
use reqwest::{Method, StatusCode};
use rsc_protocol::admin::GroupResponse;
use rsc_protocol::{ErrorBody, ErrorCode, GroupKey, HeartbeatRequest, HeartbeatResponse};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::wait::DEADLINE;

/// A name as one segment of a path. `.` and `..` cannot be sent by this client, which resolves them even
/// when they are encoded: see [`super::RawConnection`].
pub(crate) fn encode(name: &str) -> String {
    utf8_percent_encode(name, NON_ALPHANUMERIC).to_string()
}

/// `/coord/v1/streams/{p}/groups/{g}`.
pub(crate) fn group_path(group: &GroupKey) -> String {
    let (prefix, name) = (encode(group.stream_prefix()), encode(group.consumer_group()));
    format!("/coord/v1/streams/{prefix}/groups/{name}")
}

/// `/coord/v1/monitoring/streams/{p}/groups/{g}`.
pub(crate) fn monitored_path(group: &GroupKey) -> String {
    group_path(group).replace("/coord/v1/", "/coord/v1/monitoring/")
}

/// A client of one daemon.
#[derive(Clone)]
pub(crate) struct Api {
    client: reqwest::Client,
    base: String,
}

/// An answer, read to its end.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    /// The body as JSON.
    pub(crate) fn json(&self) -> Value {
        self.read()
    }

    /// The body as one of the protocol's types.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> T {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| {
            panic!("{error}: {} {}", self.status, String::from_utf8_lossy(&self.body))
        })
    }

    /// A header's value; empty when it is absent.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// The body of a success.
    pub(crate) fn success(&self) -> Value {
        assert!(self.status.is_success(), "{} {}", self.status, String::from_utf8_lossy(&self.body));
        self.json()
    }

    /// Checks everything that protocol 8 says about the answer that carries `code`; returns its message.
    pub(crate) fn expect_error(&self, code: ErrorCode) -> String {
        let body: ErrorBody = self.read();
        assert_eq!(body.error_code, code, "{}", body.message);
        assert_eq!(self.status.as_u16(), code.http_status());
        assert_eq!(body.status, code.status_text());
        assert_eq!(self.header("content-type"), "application/json");
        let retry_after = code.retry_after_seconds().map(|seconds| seconds.to_string());
        assert_eq!(self.header("retry-after"), retry_after.unwrap_or_default());
        assert!(!self.header("x-request-id").is_empty());
        assert!(!body.message.trim().is_empty());
        let fields: Vec<String> = self.json().as_object().unwrap().keys().cloned().collect();
        assert_eq!(fields.len(), 3, "{fields:?}");
        body.message
    }
}

impl Api {
    /// A client of the daemon at `address`, with connections of its own.
    pub(crate) fn new(address: &str) -> Self {
        let client = reqwest::Client::builder().timeout(DEADLINE).no_proxy().build().unwrap();
        Api { client, base: format!("http://{address}") }
    }

    /// Starts a request to a path that is already encoded.
    pub(crate) fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.client.request(method, format!("{}{path}", self.base))
    }

    /// Sends a request; `Err` when no answer came.
    pub(crate) async fn try_send(&self, request: reqwest::RequestBuilder) -> reqwest::Result<Answer> {
        let response = request.send().await?;
        let (status, headers) = (response.status(), response.headers().clone());
        Ok(Answer { status, headers, body: response.bytes().await?.to_vec() })
    }

    /// Sends a request.
    pub(crate) async fn send(&self, request: reqwest::RequestBuilder) -> Answer {
        self.try_send(request).await.unwrap()
    }

    /// GET.
    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(self.request(Method::GET, path)).await
    }

    /// POST of a JSON body.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(self.request(Method::POST, path).json(body)).await
    }

    /// POST of whatever bytes, declared as JSON.
    pub(crate) async fn post_bytes(&self, path: &str, body: impl Into<reqwest::Body>) -> Answer {
        let request = self.request(Method::POST, path).header("content-type", "application/json");
        self.send(request.body(body)).await
    }

    /// DELETE with a JSON body.
    pub(crate) async fn delete(&self, path: &str, body: &Value) -> Answer {
        self.send(self.request(Method::DELETE, path).json(body)).await
    }

    /// Creates a stream with one group of its name, and demands success.
    pub(crate) async fn create_stream(&self, stream_prefix: &str, shards: u32) -> GroupKey {
        let body = json!({"initialShardCount": shards, "requestedBy": "test"});
        let answer = self.post(&format!("/coord/v1/streams/{}", encode(stream_prefix)), &body).await;
        answer.success();
        assert_eq!(answer.status, StatusCode::CREATED);
        GroupKey::new(stream_prefix, stream_prefix).unwrap()
    }

    /// Creates one group, and demands success.
    pub(crate) async fn create_group(&self, group: &GroupKey, shards: u32) -> GroupResponse {
        let body = json!({"initialShardCount": shards, "requestedBy": "test"});
        let answer = self.post(&group_path(group), &body).await;
        answer.success();
        assert_eq!(answer.status, StatusCode::CREATED);
        answer.read()
    }

    /// The group at a glance, as stored now.
    pub(crate) async fn group(&self, group: &GroupKey) -> GroupResponse {
        let answer = self.get(&group_path(group)).await;
        answer.success();
        answer.read()
    }

    /// The sum of a metric's samples; 0 where there is none.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let text = String::from_utf8(self.get("/metrics").await.body).unwrap();
        let samples = text.lines().filter_map(|line| line.rsplit_once(' '));
        let is_of_it = |sample: &str| sample.split('{').next() == Some(name);
        samples.filter(|(sample, _)| is_of_it(sample)).map(|(_, value)| value.parse::<f64>().unwrap()).sum()
    }

    /// Sends a heartbeat and returns whatever came.
    pub(crate) async fn try_heartbeat(&self, group: &GroupKey, request: &HeartbeatRequest) -> Answer {
        let path = format!("{}/members/{}/heartbeat", group_path(group), encode(&request.member_id));
        self.send(self.request(Method::POST, &path).json(request)).await
    }

    /// Sends a heartbeat and demands HTTP 200.
    pub(crate) async fn heartbeat(&self, group: &GroupKey, request: &HeartbeatRequest) -> HeartbeatResponse {
        let answer = self.try_heartbeat(group, request).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", String::from_utf8_lossy(&answer.body));
        answer.read()
    }
}
