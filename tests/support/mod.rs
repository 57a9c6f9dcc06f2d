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

mod api;
mod consumer;
mod daemon;
mod journal;
mod member;
mod observer;
mod old_client;
mod proxy;
mod raw;
mod redis_server;
mod wait;

pub(crate) use api::{Answer, Api, encode, group_path, monitored_path};
pub(crate) use consumer::{Consumer, Crew, Routes, Seen, settle};
pub(crate) use daemon::{Daemon, DaemonBuilder};
pub(crate) use journal::{DoubleReading, Journal, Reading, monotonic_us};
pub(crate) use member::{Member, beat_until_stable, heartbeat};
pub(crate) use observer::{Observed, Observer};
pub(crate) use old_client::OldClient;
pub(crate) use proxy::Proxy;
pub(crate) use raw::{RawAnswer, RawConnection, heartbeat_unheard};
pub(crate) use redis_server::RedisServer;
pub(crate) use wait::{DEADLINE, wait_until, wait_until_blocking};
