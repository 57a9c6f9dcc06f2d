//! Opening one connection: socket, TLS, login, and a look at whether the server is of the configured kind.

use std::path::PathBuf;
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::{
    AsyncConnectionConfig, ErrorKind, RedisConnectionInfo, RedisError, RedisResult, ServerErrorKind, Value,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::address::Address;
use super::reply::text;
use super::scripts::SCRIPTS;
use super::tls::{self, Tls};
use crate::types::StoreError;

/// How many requests may wait for the socket. redis-rs' default of 50 is less than the groups that share a
/// connection.
const QUEUED_REQUESTS: usize = 1024;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    /// A TCP port, with TLS or without as the [`Dialer`] says.
    Tcp(Address),
    /// A Unix socket.
    Unix(PathBuf),
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Endpoint::Tcp(address) => address.fmt(formatter),
            Endpoint::Unix(path) => path.display().fmt(formatter),
        }
    }
}

/// What a server has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One that holds data, and no part of a cluster.
    Standalone,
    /// The same, and a master.
    Master,
    /// A node of a cluster.
    ClusterNode,
    /// A sentinel.
    Sentinel,
    /// Whatever it is: somebody wants to look at it.
    Any,
}

/// How connections to servers of one sort are opened.
#[derive(Debug)]
pub(super) struct Dialer {
    /// User, password and database.
    pub(super) login: RedisConnectionInfo,
    /// What `CLIENT LIST` shows.
    pub(super) client_name: String,
    /// `None`: in clear.
    pub(super) tls: Option<Tls>,
    /// How long one attempt may take.
    pub(super) connect_timeout: Duration,
    /// Where connections live, whoever asked for them first.
    pub(super) runtime: Handle,
    /// What the servers have to be.
    pub(super) kind: Kind,
}

/// The task that reads and writes a connection's socket; ends with the last user of the connection.
#[derive(Debug)]
pub(super) struct Driver(JoinHandle<()>);

impl Driver {
    /// Whether the connection is over.
    pub(super) fn is_finished(&self) -> bool {
        self.0.is_finished()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Dialer {
    /// Opens a connection. The caller bounds the time.
    pub(super) async fn dial(&self, to: &Endpoint) -> Result<(MultiplexedConnection, Driver), StoreError> {
        let opened = match (to, &self.tls) {
            (Endpoint::Tcp(address), None) => match self.socket(address).await {
                Ok(socket) => self.log_in(socket).await,
                Err(error) => Err(error),
            },
            (Endpoint::Tcp(address), Some(tls)) => {
                let socket =
                    self.socket(address).await.map_err(|error| not_connected(&error, to, self.kind))?;
                self.log_in(tls.wrap(&address.host, socket, to).await?).await
            }
            (Endpoint::Unix(path), _) => match UnixStream::connect(path).await {
                Ok(socket) => self.log_in(socket).await,
                Err(error) => Err(error.into()),
            },
        };
        let (mut connection, driver) = opened.map_err(|error| not_connected(&error, to, self.kind))?;
        self.prepare(&mut connection, to).await?;
        Ok((connection, driver))
    }

    async fn socket(&self, address: &Address) -> RedisResult<TcpStream> {
        let socket = TcpStream::connect((address.host.as_str(), address.port)).await?;
        socket.set_nodelay(true)?;
        Ok(socket)
    }

    async fn log_in<S>(&self, socket: S) -> RedisResult<(MultiplexedConnection, Driver)>
    where
        S: Unpin + AsyncRead + AsyncWrite + Send + 'static,
    {
        // Timeouts are set per request; redis-rs' own default would cut every answer at 500 ms.
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(Some(self.connect_timeout))
            .set_connection_timeout(None)
            .set_pipeline_buffer_size(QUEUED_REQUESTS);
        let (connection, driver) =
            MultiplexedConnection::new_with_config(&self.login, socket, config).await?;
        Ok((connection, Driver(tokio::spawn(driver))))
    }

    /// Gives the connection its name and the server the scripts, so that the first commit after a restart of
    /// either is sent once, as a hash and arguments; and looks whether the server is what it has to be. What the
    /// server refuses here (it may be loading, or the user not be allowed to) shows again, and clearer, in the
    /// first call that needs it.
    async fn prepare(&self, connection: &mut MultiplexedConnection, to: &Endpoint) -> Result<(), StoreError> {
        let mut pipeline = ::redis::pipe();
        pipeline.cmd("CLIENT").arg("SETNAME").arg(&self.client_name);
        pipeline.cmd("INFO").arg("server");
        if self.kind == Kind::Master {
            pipeline.cmd("ROLE");
        }
        if !matches!(self.kind, Kind::Sentinel | Kind::Any) {
            for script in SCRIPTS.all() {
                pipeline.cmd("SCRIPT").arg("LOAD").arg(script.source);
            }
        }
        let answers: Vec<RedisResult<Value>> = pipeline
            .ignore_errors()
            .query_async(connection)
            .await
            .map_err(|error| not_connected(&error, to, self.kind))?;
        let mut answers = answers.into_iter().skip(1);
        match answers.next() {
            Some(Ok(info)) => self.check_mode(&text(info).unwrap_or_default(), to)?,
            Some(Err(error)) if server_code(&error).as_deref() == Some("NOAUTH") => {
                return Err(not_connected(&error, to, self.kind));
            }
            Some(Err(_)) | None => {}
        }
        if self.kind == Kind::Master
            && let Some(Ok(Value::Array(role))) = answers.next()
            && let Some(role) = role.into_iter().next().and_then(|role| text(role).ok())
            && role != "master"
        {
            let what = format!("the sentinels name {to} as master, but it is a {role}");
            return Err(StoreError::Unavailable(what));
        }
        Ok(())
    }

    /// Refuses a server of another kind than the configuration says.
    fn check_mode(&self, info: &str, to: &Endpoint) -> Result<(), StoreError> {
        let field = |name: &str| {
            info.lines().find_map(|line| line.strip_prefix(name)).and_then(|rest| rest.strip_prefix(':'))
        };
        let Some(found) = field("redis_mode").or_else(|| field("server_mode")).map(str::trim) else {
            return Ok(());
        };
        let (configured, wanted) = match self.kind {
            Kind::Any => return Ok(()),
            Kind::Standalone => ("standalone", "standalone"),
            Kind::ClusterNode => ("cluster", "cluster"),
            Kind::Master => ("sentinel", "standalone"),
            Kind::Sentinel => ("sentinel", "sentinel"),
        };
        if found == wanted || !matches!(found, "standalone" | "cluster" | "sentinel") {
            return Ok(());
        }
        let is = match found {
            "cluster" => "a node of a Redis Cluster",
            "sentinel" => "a sentinel",
            _ => "a standalone server",
        };
        let remedy = match (self.kind, found) {
            (Kind::Master, _) => "the master that the sentinels name must be a standalone server".to_owned(),
            (Kind::Sentinel, "standalone") => {
                "redis.urls must name the sentinels, or redis.mode be standalone".to_owned()
            }
            (_, "sentinel") => "set redis.mode = \"sentinel\" and redis.sentinel-master".to_owned(),
            (_, found) => format!("set redis.mode = \"{found}\""),
        };
        Err(StoreError::Misconfigured(format!("redis.mode is {configured}, but {to} is {is}: {remedy}")))
    }
}

/// Why no connection came about.
fn not_connected(error: &RedisError, to: &Endpoint, kind: Kind) -> StoreError {
    let code = server_code(error);
    if code.is_none() && error.kind() != ErrorKind::AuthenticationFailed {
        if let Some(refused) = tls::behind(error, to) {
            return refused;
        }
        let hint = if error.is_connection_dropped() && !error.is_connection_refusal() {
            ": it hung up; if it wants TLS, the URL begins with rediss://; or it has reached maxclients"
        } else {
            ""
        };
        return StoreError::Unavailable(format!("cannot connect: {error} ({to}){hint}"));
    }
    // redis-rs keeps the server's own words to itself here.
    let said = if code.is_some() { server_text(error) } else { "wrong user or password".to_owned() };
    match code.as_deref() {
        Some("LOADING" | "BUSY" | "MASTERDOWN" | "TRYAGAIN" | "CLUSTERDOWN") => {
            StoreError::Refused(format!("{said} ({to})"))
        }
        Some("ERR") if said.contains("max number of clients") => {
            StoreError::Refused(format!("{said} ({to})"))
        }
        _ => StoreError::Misconfigured(format!(
            "{to} refuses the login: {said}: {}",
            login_remedy(&said, kind)
        )),
    }
}

/// What to do about a login that is refused.
fn login_remedy(said: &str, kind: Kind) -> &'static str {
    if kind == Kind::Sentinel {
        "write the sentinels' user and password into redis.urls; redis.password is for the servers they name"
    } else if said.contains("DB index") {
        "see redis.database and the server's \"databases\""
    } else if said.starts_with("NOAUTH") {
        "set redis.password, and redis.username where ACLs are used"
    } else {
        "see redis.username and redis.password"
    }
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

/// Whether a server says that it takes no writes; Redis 6.2 wraps what a script's command was refused with into an
/// error of the script.
pub(super) fn is_read_only(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly) || server_text(error).contains("-READONLY")
}
