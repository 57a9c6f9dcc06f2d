//! Shared by the black-box tests: real `redis-server` processes, the real binary, and clients.
//!
//! Every test brings its own servers on ports that the system chose, so tests run in parallel and in any
//! order. Whatever a test starts ends with it, also when it fails.
#![allow(dead_code, reason = "each test binary uses its part of this module")]
#![allow(unused_imports, reason = "each test binary uses its part of this module")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "the helpers of a test fail like the test"
)]

mod ambush;
mod api;
mod chance;
mod clock;
mod consumer;
mod daemon;
mod fleet;
mod journal;
mod member;
mod observer;
mod old_client;
mod producer;
mod proxy;
mod raw;
mod records;
mod redis_server;
pub(crate) mod redis_topologies;
mod replay;
mod scene;
mod stream;
mod tool;
mod wait;

pub(crate) use ambush::{Ambush, AmbushProxy, Moment};
pub(crate) use api::{Answer, Api, encode, group_path, monitored_path};
pub(crate) use chance::seed;
pub(crate) use clock::Clock;
pub(crate) use consumer::{Consumer, Crew, Routes, Seen, settle};
pub(crate) use daemon::{Daemon, DaemonBuilder};
pub(crate) use fleet::Fleet;
pub(crate) use journal::{DoubleReading, Journal, Reading, monotonic_us};
pub(crate) use member::{Member, beat_until_stable, heartbeat};
pub(crate) use observer::{Observed, Observer};
pub(crate) use old_client::OldClient;
pub(crate) use producer::{Produced, Producer, Refresh, Unpublished};
pub(crate) use proxy::{Held, Proxy};
pub(crate) use raw::{RawAnswer, RawConnection, heartbeat_unheard};
pub(crate) use records::{Ledger, Record, Source};
pub(crate) use redis_server::RedisServer;
pub(crate) use replay::{Replay, Versions};
pub(crate) use scene::Scene;
pub(crate) use stream::{Stream, scale_body};
pub(crate) use tool::{Examined, Finding, Run, Tool};
pub(crate) use wait::{DEADLINE, wait_until, wait_until_blocking};
