//! One connection to Redis that comes back by itself, and says of every failure whether the request can
//! have been carried out.
//!
//! It stands on redis-rs' [`MultiplexedConnection`], not on its `ConnectionManager`, for three reasons
//! (redis 1.8.1): the manager's errors do not tell a failed attempt to connect (certainly not sent) from a
//! failed request (perhaps carried out); an attempt that failed for another reason than I/O, such as a wrong
//! password, is kept and returned for ever; and a connection on which requests time out is kept until TCP
//! gives up on it, a quarter of an hour after a host vanished. Neither of the two sends a request again.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::{Cmd, RedisError, RedisResult, Value};
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use rand::RngExt;
use tokio::time::{Instant, timeout, timeout_at};

use super::dial::{Dialer, Driver, Endpoint, is_read_only, server_code, server_text};
use super::remedy::with_remedy;
use super::sentinel::Sentinels;
use crate::meter;
use crate::types::StoreError;

/// What has less time left is not sent: its answer would come too late, and count as a broken connection for everybody.
const LEAST_TIME: Duration = Duration::from_millis(2);

/// How long a failed attempt to connect stands for the next ones, give or take half of it: a server that is
/// away or refuses must not get a connection for every request, nor all coordinators' at the same moment.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(100);

/// What a server refused a command with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// The first word of its answer, e.g. `NOSCRIPT`.
    pub(super) code: String,
    /// The whole answer.
    pub(super) said: String,
}

impl Refusal {
    /// Adds the key; the server's own words do not name it.
    pub(super) fn about(self, key: &str) -> Self {
        Refusal { said: format!("{} (key {key})", self.said), code: self.code }
    }

    /// As an error, with what to do about it.
    pub(super) fn into_error(self) -> StoreError {
        StoreError::Refused(with_remedy(&self.code, &self.said))
    }
}

/// What a server answered to one of several commands.
pub(super) type Answer = Result<Value, Refusal>;

/// What became of a request that failed.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// It never left: no connection, and none could be made in time.
    NotSent(StoreError),
    /// The server answered with an error. The scripts write nothing before one.
    Refused(Refusal),
    /// It left, or may have left, and no answer came.
    Unknown(StoreError),
}

impl Failure {
    /// Adds the key to what the server refused; its own words do not name it.
    pub(super) fn about(self, key: &str) -> Self {
        match self {
            Failure::Refused(refusal) => Failure::Refused(refusal.about(key)),
            other => other,
        }
    }

    /// The error without what is known about the request.
    pub(super) fn into_error(self) -> StoreError {
        match self {
            Failure::NotSent(error) | Failure::Unknown(error) => error,
            Failure::Refused(refusal) => refusal.into_error(),
        }
    }
}

/// Which server a link leads to.
#[derive(Clone, Debug)]
pub(super) enum Target {
    /// Always this one.
    Server(Endpoint),
    /// Whichever is the master when a connection is made.
    Master(Arc<Sentinels>),
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Server(endpoint) => endpoint.fmt(formatter),
            Target::Master(sentinels) => sentinels.fmt(formatter),
        }
    }
}

/// One connection, made when it is first needed and made anew when it broke.
pub(super) struct Link {
    dialer: Arc<Dialer>,
    target: Target,
    slot: Mutex<Slot>,
}

#[derive(Default)]
struct Slot {
    state: State,
    /// Connections made so far; numbers them.
    made: u64,
    /// The failure to connect has been logged; the next ones are the same news.
    failure_logged: bool,
}

#[derive(Default)]
enum State {
    #[default]
    Unconnected,
    /// The last attempt failed; until then it answers for everybody who comes.
    Failed {
        error: StoreError,
        until: Instant,
    },
    /// One attempt for everybody who waits; it goes on when a caller's time is up.
    Connecting(Attempt),
    Connected(Live),
}

type Attempt = Shared<BoxFuture<'static, Result<Live, StoreError>>>;

#[derive(Clone)]
struct Live {
    connection: MultiplexedConnection,
    /// Shared by the slot and every request under way: a connection that was given up ends with its last
    /// request, also when the server never answers.
    driver: Arc<Driver>,
    /// Where it leads.
    endpoint: Endpoint,
    number: u64,
}

impl fmt::Debug for Link {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Link").field("target", &self.target).finish_non_exhaustive()
    }
}

impl Link {
    /// A link that is not connected yet.
    pub(super) fn new(dialer: Arc<Dialer>, target: Target) -> Self {
        Link { dialer, target, slot: Mutex::default() }
    }

    /// Makes sure that there is a connection, or says why there is none.
    pub(super) async fn connect(self: &Arc<Self>, deadline: Instant) -> Result<(), StoreError> {
        self.ready(deadline).await.map(|_| ()).map_err(Failure::into_error)
    }

    /// A failure to connect no longer stands for the next request.
    pub(super) fn forget_failure(&self) {
        let mut slot = self.slot();
        if matches!(slot.state, State::Failed { .. }) {
            slot.state = State::Unconnected;
        }
    }

    /// Gives up a connection that leads elsewhere than to `endpoint`; `true` if there was one.
    pub(super) fn give_up_unless(&self, endpoint: &Endpoint) -> bool {
        let mut slot = self.slot();
        let elsewhere = matches!(&slot.state, State::Connected(live) if live.endpoint != *endpoint);
        if elsewhere {
            slot.state = State::Unconnected;
        }
        elsewhere
    }

    /// Sends one command and waits for its answer until `deadline`.
    pub(super) async fn command(
        self: &Arc<Self>,
        command: &Cmd,
        deadline: Instant,
    ) -> Result<Value, Failure> {
        let (live, mut connection) = self.ready(deadline).await?;
        let answer = command.query_async::<Value>(&mut connection).await;
        self.judged(&live, answer)
    }

    /// Sends several commands at once and waits for all answers until `deadline`. One that the server refuses is in
    /// its place in the list.
    pub(super) async fn pipeline(
        self: &Arc<Self>,
        commands: &[Cmd],
        deadline: Instant,
    ) -> Result<Vec<Answer>, Failure> {
        let (live, mut connection) = self.ready(deadline).await?;
        let mut pipeline = ::redis::pipe();
        for command in commands {
            pipeline.add_command(command.clone());
        }
        let answer = pipeline.ignore_errors().query_async::<Vec<RedisResult<Value>>>(&mut connection).await;
        let answers = self.judged(&live, answer)?;
        Ok(answers.into_iter().map(|answer| answer.map_err(|error| self.refused(&live, &error))).collect())
    }

    async fn ready(self: &Arc<Self>, deadline: Instant) -> Result<(Live, MultiplexedConnection), Failure> {
        let live = match timeout_at(deadline, self.live()).await {
            Ok(live) => live.map_err(Failure::NotSent)?,
            Err(_) => {
                return Err(Failure::NotSent(self.unavailable("no connection within the command timeout")));
            }
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left < LEAST_TIME {
            return Err(Failure::NotSent(self.unavailable("no connection within the command timeout")));
        }
        let mut connection = live.connection.clone();
        connection.set_response_timeout(left);
        Ok((live, connection))
    }

    fn judged<T>(&self, live: &Live, answer: RedisResult<T>) -> Result<T, Failure> {
        let error = match answer {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        if server_code(&error).is_some() {
            return Err(Failure::Refused(self.refused(live, &error)));
        }
        self.give_up(live);
        Err(Failure::Unknown(self.unavailable(&error.to_string())))
    }

    fn refused(&self, live: &Live, error: &RedisError) -> Refusal {
        // A master that became a replica: the address may lead to the new one by now.
        if is_read_only(error) {
            self.give_up(live);
        }
        Refusal { code: server_code(error).unwrap_or_else(|| "ERR".to_owned()), said: server_text(error) }
    }

    /// The connection, made if there is none.
    async fn live(self: &Arc<Self>) -> Result<Live, StoreError> {
        let attempt = {
            let mut slot = self.slot();
            match &slot.state {
                State::Connected(live) if !live.driver.is_finished() => return Ok(live.clone()),
                State::Connecting(attempt) => attempt.clone(),
                State::Failed { error, until } if Instant::now() < *until => return Err(error.clone()),
                State::Connected(_) | State::Unconnected | State::Failed { .. } => {
                    let task = self.dialer.runtime.spawn(Arc::clone(self).attempt());
                    let link = Arc::downgrade(self);
                    let attempt = task.map(move |joined| joined.unwrap_or_else(|_| ended(&link)));
                    let attempt = attempt.boxed().shared();
                    slot.state = State::Connecting(attempt.clone());
                    attempt
                }
            }
        };
        attempt.await
    }

    /// Boxed, because sentinels are asked through a link too.
    fn attempt(self: Arc<Self>) -> BoxFuture<'static, Result<Live, StoreError>> {
        async move { self.try_once().await }.boxed()
    }

    async fn try_once(&self) -> Result<Live, StoreError> {
        let result = match timeout(self.dialer.connect_timeout, self.dial()).await {
            Ok(result) => result,
            Err(_) if self.dialer.tls.is_some() => Err(self.unavailable(
                "no connection within the connect timeout: is it there, and does it speak TLS on this port?",
            )),
            Err(_) => Err(self.unavailable("no connection within the connect timeout")),
        };
        meter::connected(result.is_ok());
        let mut slot = self.slot();
        match result {
            Ok((connection, driver, endpoint)) => {
                tracing::info!(address = %endpoint, "connected to redis");
                slot.failure_logged = false;
                slot.made += 1;
                let live = Live { connection, driver: Arc::new(driver), endpoint, number: slot.made };
                slot.state = State::Connected(live.clone());
                Ok(live)
            }
            Err(error) => {
                if !slot.failure_logged {
                    tracing::warn!(address = %self.target, %error, "cannot connect to redis");
                }
                slot.failure_logged = true;
                let pause = PAUSE_AFTER_FAILURE.mul_f64(rand::rng().random_range(0.5..1.5));
                slot.state = State::Failed { error: error.clone(), until: Instant::now() + pause };
                Err(error)
            }
        }
    }

    async fn dial(&self) -> Result<(MultiplexedConnection, Driver, Endpoint), StoreError> {
        let endpoint = match &self.target {
            Target::Server(endpoint) => endpoint.clone(),
            Target::Master(sentinels) => Endpoint::Tcp(sentinels.master().await?),
        };
        let (connection, driver) = self.dialer.dial(&endpoint).await?;
        Ok((connection, driver, endpoint))
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the next request use a new connection; those under way on this one run to their end.
    fn give_up(&self, live: &Live) {
        let mut slot = self.slot();
        if matches!(&slot.state, State::Connected(current) if current.number == live.number) {
            tracing::debug!(address = %live.endpoint, "gives up a connection");
            slot.state = State::Unconnected;
        }
    }

    fn unavailable(&self, what: &str) -> StoreError {
        StoreError::Unavailable(format!("{what} ({})", self.target))
    }
}

/// The end of an attempt whose runtime ended under it, with the store.
fn ended(link: &Weak<Link>) -> Result<Live, StoreError> {
    if let Some(link) = link.upgrade() {
        link.slot().state = State::Unconnected;
    }
    Err(StoreError::Unavailable("the store is being closed".to_owned()))
}
