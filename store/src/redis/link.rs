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
use ::redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, Pipeline, RedisError, RedisResult,
    ServerErrorKind, Value,
};
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use rand::RngExt;
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

use super::scripts::SCRIPTS;
use crate::meter;
use crate::types::StoreError;

/// How many requests may wait for the socket. redis-rs' default of 50 is less than the groups that share a
/// connection.
const QUEUED_REQUESTS: usize = 1024;

/// How long a failed attempt to connect stands for the next ones, give or take half of it: a server that is
/// away or refuses must not get a connection for every request, nor all coordinators' at the same moment.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(100);

/// What became of a request that failed.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// It never left: no connection, and none could be made in time.
    NotSent(StoreError),
    /// The server answered with an error. The scripts write nothing before one.
    Refused {
        /// The first word of the server's answer, e.g. `NOSCRIPT`.
        code: String,
        /// The whole answer.
        error: StoreError,
    },
    /// It left, or may have left, and no answer came.
    Unknown(StoreError),
}

impl Failure {
    /// Adds the key to what the server refused; its own words do not name it.
    pub(super) fn about(self, key: &str) -> Self {
        match self {
            Failure::Refused { code, error: StoreError::Refused(text) } => {
                Failure::Refused { code, error: StoreError::Refused(format!("{text} (key {key})")) }
            }
            other => other,
        }
    }

    /// The error without what is known about the request.
    pub(super) fn into_error(self) -> StoreError {
        match self {
            Failure::NotSent(error) | Failure::Refused { error, .. } | Failure::Unknown(error) => error,
        }
    }
}

/// One connection, made when it is first needed and made anew when it broke.
pub(super) struct Link {
    info: ConnectionInfo,
    client_name: String,
    connect_timeout: Duration,
    /// Where connections live, whoever asked for them first.
    runtime: Handle,
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
    number: u64,
}

struct Driver(JoinHandle<()>);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Link").field("address", &self.address()).finish_non_exhaustive()
    }
}

impl Link {
    /// A link that is not connected yet, and whose connections will live on `runtime`.
    pub(super) fn new(
        info: ConnectionInfo,
        client_name: String,
        connect_timeout: Duration,
        runtime: Handle,
    ) -> Self {
        Link { info, client_name, connect_timeout, runtime, slot: Mutex::default() }
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

    /// Sends several commands at once and waits for all answers until `deadline`. An error that the server
    /// gives to one of them is in its place in the list.
    pub(super) async fn commands(
        self: &Arc<Self>,
        pipeline: &mut Pipeline,
        deadline: Instant,
    ) -> Result<Vec<RedisResult<Value>>, Failure> {
        let (live, mut connection) = self.ready(deadline).await?;
        let answer = pipeline.ignore_errors().query_async(&mut connection).await;
        self.judged(&live, answer)
    }

    async fn ready(self: &Arc<Self>, deadline: Instant) -> Result<(Live, MultiplexedConnection), Failure> {
        let live = match timeout_at(deadline, self.live()).await {
            Ok(live) => live.map_err(Failure::NotSent)?,
            Err(_) => {
                return Err(Failure::NotSent(self.unavailable("no connection within the command timeout")));
            }
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
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
        if let Some(code) = server_code(&error) {
            // A master that became a replica: the address may lead to the new one by now. Redis 6.2 wraps
            // what a script's command was refused with into an error of the script.
            let text = server_text(&error);
            if error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly) || text.contains("-READONLY") {
                self.give_up(live);
            }
            return Err(Failure::Refused { code, error: StoreError::Refused(text) });
        }
        self.give_up(live);
        Err(Failure::Unknown(self.unavailable(&error.to_string())))
    }

    /// The connection, made if there is none.
    async fn live(self: &Arc<Self>) -> Result<Live, StoreError> {
        let attempt = {
            let mut slot = self.slot();
            match &slot.state {
                State::Connected(live) if !live.driver.0.is_finished() => return Ok(live.clone()),
                State::Connecting(attempt) => attempt.clone(),
                State::Failed { error, until } if Instant::now() < *until => return Err(error.clone()),
                State::Connected(_) | State::Unconnected | State::Failed { .. } => {
                    let task = self.runtime.spawn(Arc::clone(self).attempt());
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

    async fn attempt(self: Arc<Self>) -> Result<Live, StoreError> {
        let result = match timeout(self.connect_timeout, self.connect()).await {
            Ok(Ok(connected)) => Ok(connected),
            Ok(Err(error)) => Err(self.not_connected(&error)),
            Err(_) => Err(self.unavailable("no connection within the connect timeout")),
        };
        meter::connected(result.is_ok());
        let mut slot = self.slot();
        match result {
            Ok((connection, driver)) => {
                tracing::info!(address = %self.address(), "connected to redis");
                slot.failure_logged = false;
                slot.made += 1;
                let live = Live { connection, driver: Arc::new(driver), number: slot.made };
                slot.state = State::Connected(live.clone());
                Ok(live)
            }
            Err(error) => {
                if !slot.failure_logged {
                    tracing::warn!(address = %self.address(), %error, "cannot connect to redis; requests go on trying");
                }
                slot.failure_logged = true;
                let pause = PAUSE_AFTER_FAILURE.mul_f64(rand::rng().random_range(0.5..1.5));
                slot.state = State::Failed { error: error.clone(), until: Instant::now() + pause };
                Err(error)
            }
        }
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect(&self) -> RedisResult<(MultiplexedConnection, Driver)> {
        // Timeouts are set per request; redis-rs' own default would cut every answer at 500 ms.
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(Some(self.connect_timeout))
            .set_connection_timeout(None)
            .set_pipeline_buffer_size(QUEUED_REQUESTS);
        let login = self.info.redis_settings();
        let (mut connection, driver) = match self.info.addr() {
            ConnectionAddr::Tcp(host, port) => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                stream.set_nodelay(true)?;
                let (connection, driver) =
                    MultiplexedConnection::new_with_config(login, stream, config).await?;
                (connection, Driver(tokio::spawn(driver)))
            }
            ConnectionAddr::Unix(path) => {
                let stream = UnixStream::connect(path).await?;
                let (connection, driver) =
                    MultiplexedConnection::new_with_config(login, stream, config).await?;
                (connection, Driver(tokio::spawn(driver)))
            }
            other => {
                return Err((ErrorKind::InvalidClientConfig, "unsupported address", other.to_string()).into());
            }
        };
        self.prepare(&mut connection).await?;
        Ok((connection, driver))
    }

    /// Gives the connection its name and the server the scripts, so that the first commit after a restart of
    /// either is sent once, as a hash and arguments. What the server refuses here (it may be loading, or
    /// the user not be allowed to) shows again, and clearer, in the first call that needs it.
    async fn prepare(&self, connection: &mut MultiplexedConnection) -> RedisResult<()> {
        let mut pipeline = ::redis::pipe();
        pipeline.cmd("CLIENT").arg("SETNAME").arg(&self.client_name);
        for script in SCRIPTS.all() {
            pipeline.cmd("SCRIPT").arg("LOAD").arg(script.source);
        }
        let _answers: Vec<RedisResult<Value>> = pipeline.ignore_errors().query_async(connection).await?;
        Ok(())
    }

    /// Makes the next request use a new connection; those under way on this one run to their end.
    fn give_up(&self, live: &Live) {
        let mut slot = self.slot();
        if matches!(&slot.state, State::Connected(current) if current.number == live.number) {
            tracing::debug!(address = %self.address(), "gives up a connection");
            slot.state = State::Unconnected;
        }
    }

    fn address(&self) -> String {
        self.info.addr().to_string()
    }

    fn unavailable(&self, what: &str) -> StoreError {
        StoreError::Unavailable(format!("{what} ({})", self.address()))
    }

    fn not_connected(&self, error: &RedisError) -> StoreError {
        let refused = server_code(error).is_some() || error.kind() == ErrorKind::AuthenticationFailed;
        if refused {
            StoreError::Refused(format!("{} ({})", server_text(error), self.address()))
        } else {
            self.unavailable(&format!("cannot connect: {error}"))
        }
    }
}

/// The end of an attempt whose runtime ended under it, with the store.
fn ended(link: &Weak<Link>) -> Result<Live, StoreError> {
    if let Some(link) = link.upgrade() {
        link.slot().state = State::Unconnected;
    }
    Err(StoreError::Unavailable("the store is being closed".to_owned()))
}

/// The first word of a server's error answer; `None` for every error of another origin.
pub(super) fn server_code(error: &RedisError) -> Option<String> {
    match error.kind() {
        ErrorKind::Server(_) | ErrorKind::Extension => Some(error.code().unwrap_or("ERR").to_owned()),
        _ => None,
    }
}

/// A server's error answer as it was sent.
pub(super) fn server_text(error: &RedisError) -> String {
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        _ => error.to_string(),
    }
}
