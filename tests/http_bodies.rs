//! Black-box tests of the size of bodies and of how they are sent (issue 2, "Bad input").
#![expect(clippy::unwrap_used, reason = "the helpers of a test fail like the test")]

mod support;

use rsc_protocol::ErrorCode;
use serde_json::json;
use support::{Daemon, RawAnswer, RawConnection, wait_until};

const LIMIT: usize = 4096;
const PATH: &str = "/coord/v1/streams/sized";

fn daemon() -> Daemon {
    Daemon::memory().set("server", "max-body", "4KiB").start()
}

/// A good request of exactly so many bytes.
fn body_of(bytes: usize) -> String {
    let empty = json!({"requestedBy": "test", "padding": ""}).to_string().len();
    json!({"requestedBy": "test", "padding": "x".repeat(bytes - empty)}).to_string()
}

/// The same request without an announced size, in many chunks.
fn chunked(body: &str) -> String {
    let mut request = format!("POST {PATH} HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n");
    for at in (0..body.len()).step_by(700) {
        let chunk = &body[at..body.len().min(at + 700)];
        request += &format!("{:x}\r\n{chunk}\r\n", chunk.len());
    }
    request + "0\r\n\r\n"
}

fn expect_too_large(answer: &RawAnswer) {
    assert_eq!(answer.status, 413, "{answer:?}");
    assert_eq!(answer.header("content-type"), "application/json");
    let body = answer.json();
    assert_eq!(
        (&body["status"], &body["errorCode"]),
        (&json!("PAYLOAD_TOO_LARGE"), &json!("PAYLOAD_TOO_LARGE"))
    );
    assert!(body["message"].as_str().unwrap().contains("4096"), "{body}");
}

#[tokio::test]
async fn the_limit_is_exact() {
    let daemon = daemon();
    let api = daemon.api();
    let message = api.post_bytes(PATH, body_of(LIMIT + 1)).await.expect_error(ErrorCode::PayloadTooLarge);
    assert!(message.contains("4096"), "{message}");
    let created = api.post_bytes(PATH, body_of(LIMIT)).await;
    assert_eq!(created.status, 201, "{created:?}");

    for (bytes, status) in [(LIMIT + 1, 413), (LIMIT, 409), (LIMIT + 1, 413)] {
        let mut raw = RawConnection::open(daemon.address()).await;
        raw.send(chunked(&body_of(bytes)).as_bytes()).await;
        let answer = raw.answer(false).await;
        assert_eq!(answer.status, status, "{answer:?}");
    }
}

#[tokio::test]
async fn whoever_sends_too_much_can_read_the_answer() {
    let daemon = daemon();
    // Sends everything before it reads, as simple clients do; 16 MiB do not fit into any buffer in between.
    let (chunk, chunks) = (vec![b'x'; 64 * 1024], 256);
    let mut declared = RawConnection::open(daemon.address()).await;
    let length = chunk.len() * chunks;
    declared
        .send(format!("POST {PATH} HTTP/1.1\r\nhost: test\r\ncontent-length: {length}\r\n\r\n").as_bytes())
        .await;
    for _ in 0..chunks {
        declared.send(&chunk).await;
    }
    let answer = declared.answer(false).await;
    expect_too_large(&answer);
    assert_eq!(answer.header("connection"), "close");

    let mut chunked = RawConnection::open(daemon.address()).await;
    chunked
        .send(format!("POST {PATH} HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n").as_bytes())
        .await;
    for _ in 0..chunks {
        chunked.send(format!("{:x}\r\n", chunk.len()).as_bytes()).await;
        chunked.send(&chunk).await;
        chunked.send(b"\r\n").await;
    }
    chunked.send(b"0\r\n\r\n").await;
    expect_too_large(&chunked.answer(false).await);
    daemon.api().get("/livez").await.success();
}

#[tokio::test]
async fn an_announced_size_is_refused_before_anything_is_sent() {
    let daemon = daemon();
    let mut raw = RawConnection::open(daemon.address()).await;
    raw.send(
        format!("POST {PATH} HTTP/1.1\r\nhost: test\r\ncontent-length: 999999999999\r\n\r\n").as_bytes(),
    )
    .await;
    expect_too_large(&raw.answer(false).await);

    let mut raw = RawConnection::open(daemon.address()).await;
    let head =
        format!("POST {PATH} HTTP/1.1\r\nhost: test\r\nexpect: 100-continue\r\ncontent-length: 5000\r\n\r\n");
    raw.send(head.as_bytes()).await;
    expect_too_large(&raw.answer(false).await);
}

#[tokio::test]
async fn a_body_that_ends_early_is_a_bad_request() {
    let daemon = daemon();
    for head in [
        "content-length: 100\r\n\r\n{\"requestedBy\"",
        "transfer-encoding: chunked\r\n\r\n20\r\n{\"requestedBy\"",
    ] {
        let mut raw = RawConnection::open(daemon.address()).await;
        raw.send(format!("POST {PATH} HTTP/1.1\r\nhost: test\r\n{head}").as_bytes()).await;
        raw.finish_sending().await;
        let answer = raw.answer(false).await;
        assert_eq!((answer.status, &answer.json()["errorCode"]), (400, &json!("INVALID_REQUEST")), "{head}");
    }
    let mut raw = RawConnection::open(daemon.address()).await;
    raw.send(
        format!("POST {PATH} HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n")
            .as_bytes(),
    )
    .await;
    assert_eq!(raw.answer(false).await.status, 400);
    daemon.api().get("/livez").await.success();
}

#[tokio::test]
async fn lengths_that_contradict_each_other_are_refused() {
    let daemon = daemon();
    for headers in
        ["content-length: 5\r\ncontent-length: 6\r\n", "content-length: -1\r\n", "content-length: x\r\n"]
    {
        let mut raw = RawConnection::open(daemon.address()).await;
        raw.send(format!("POST {PATH} HTTP/1.1\r\nhost: test\r\n{headers}\r\n{{}}").as_bytes()).await;
        assert_eq!(raw.answer(false).await.status, 400, "{headers}");
    }
    assert_eq!(daemon.api().get("/coord/v1/monitoring/groups").await.success()["groups"], json!([]));
}

#[tokio::test]
async fn a_client_that_hangs_up_harms_nobody() {
    let daemon = daemon();
    let api = daemon.api();
    let body = body_of(200);
    let mut raw = RawConnection::open(daemon.address()).await;
    raw.send(
        format!("POST {PATH} HTTP/1.1\r\nhost: test\r\ncontent-length: {}\r\n\r\n{body}", body.len())
            .as_bytes(),
    )
    .await;
    drop(raw);
    // Nobody waits for the answer, and it is done all the same: what was handed over runs to its end.
    let path = "/coord/v1/streams/sized/groups/sized";
    wait_until("the stream exists", async || api.get(path).await.status == 200).await;
}

#[tokio::test]
async fn requests_on_one_connection_are_answered_in_order() {
    let daemon = daemon();
    let mut raw = RawConnection::open(daemon.address()).await;
    let body = body_of(LIMIT);
    let post = format!("POST {PATH} HTTP/1.1\r\nhost: test\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let bad = "POST /coord/v1/streams/other HTTP/1.1\r\nhost: test\r\ncontent-length: 2\r\n\r\n{}";
    let get = "GET /coord/v1/monitoring/groups HTTP/1.1\r\nhost: test\r\n\r\n";
    raw.send([post.as_str(), bad, get].concat().as_bytes()).await;
    assert_eq!(raw.answer(false).await.status, 201);
    assert_eq!(raw.answer(false).await.status, 400);
    assert_eq!(raw.answer(false).await.json()["groups"][0]["streamPrefix"], "sized");
}
