//! HTTP byte by byte, for what a well-behaved client cannot send.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use rsc_protocol::{GroupKey, HeartbeatRequest};

use super::api::{encode, group_path};
use super::wait::DEADLINE;

/// A connection that sends exactly what it is given.
pub(crate) struct RawConnection {
    stream: TcpStream,
    unread: Vec<u8>,
}

/// Sends a heartbeat and hangs up without waiting for the answer: whatever it is, nobody hears it.
pub(crate) async fn heartbeat_unheard(address: &str, group: &GroupKey, request: &HeartbeatRequest) {
    let path = format!("{}/members/{}/heartbeat", group_path(group), encode(&request.member_id));
    let body = serde_json::to_string(request).unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    RawConnection::open(address).await.send(format!("{head}{body}").as_bytes()).await;
}

/// An answer as it came.
#[derive(Debug)]
pub(crate) struct RawAnswer {
    pub(crate) status: u16,
    /// Status line and headers, in lower case.
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl RawAnswer {
    /// A header's value; empty when it is absent.
    pub(crate) fn header(&self, name: &str) -> &str {
        let mut headers = self.head.lines().skip(1).filter_map(|line| line.split_once(':'));
        headers.find(|(found, _)| *found == name).map_or("", |(_, value)| value.trim())
    }

    /// The body as JSON.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

impl RawConnection {
    /// Connects to a daemon.
    pub(crate) async fn open(address: &str) -> Self {
        RawConnection { stream: TcpStream::connect(address).await.unwrap(), unread: Vec::new() }
    }

    /// Sends bytes as they are.
    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    /// Sends bytes; `false` when the other side does not take them any more.
    pub(crate) async fn try_send(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).await.is_ok()
    }

    /// Says that nothing more will be sent; answers can still be read.
    pub(crate) async fn finish_sending(&mut self) {
        self.stream.shutdown().await.unwrap();
    }

    /// Sends a request line and body with the headers that are needed, and reads the answer.
    pub(crate) async fn request(&mut self, method: &str, target: &str, body: &str) -> RawAnswer {
        let mut request = format!("{method} {target} HTTP/1.1\r\nhost: test\r\n");
        if !body.is_empty() {
            request += &format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len());
        }
        self.send(format!("{request}\r\n{body}").as_bytes()).await;
        self.answer(method == "HEAD").await
    }

    /// Reads one answer; `head_only` when it is one to HEAD.
    pub(crate) async fn answer(&mut self, head_only: bool) -> RawAnswer {
        loop {
            let head = loop {
                if let Some(at) = find(&self.unread, b"\r\n\r\n") {
                    let rest = self.unread.split_off(at + 4);
                    break std::mem::replace(&mut self.unread, rest);
                }
                assert!(
                    self.read().await > 0,
                    "the connection ended: {}",
                    String::from_utf8_lossy(&self.unread)
                );
            };
            let head = String::from_utf8(head).unwrap().to_lowercase();
            let status = head.split(' ').nth(1).unwrap().parse().unwrap();
            if status == 100 {
                continue;
            }
            let mut answer = RawAnswer { status, head, body: Vec::new() };
            let length: usize = answer.header("content-length").parse().unwrap_or(0);
            let length = if head_only { 0 } else { length };
            while self.unread.len() < length {
                assert!(self.read().await > 0, "the connection ended within {answer:?}");
            }
            answer.body = self.unread.drain(..length).collect();
            return answer;
        }
    }

    /// Waits until the other side closes; fails when it sends something instead.
    pub(crate) async fn expect_end(&mut self) {
        assert_eq!(self.read().await, 0, "{}", String::from_utf8_lossy(&self.unread));
    }

    async fn read(&mut self) -> usize {
        let reading = self.stream.read_buf(&mut self.unread);
        timeout(DEADLINE, reading).await.unwrap().unwrap_or(0)
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}
