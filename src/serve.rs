//! `rsc serve`: from the first line to the last (protocol 9 and 12).

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use actix_web::dev::{Server, ServerHandle};
use actix_web::http::KeepAlive;
use actix_web::web::Data;
use actix_web::{HttpServer, rt};
use anyhow::{Context, bail};
use metrics_exporter_prometheus::PrometheusHandle;
use rsc_actors::Coordinator;
use rsc_store::StoreError;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;

use crate::config::{Config, ServerConfig};
use crate::http::{self, ServerState};
use crate::{panics, recorder, wiring};

/// How long an idle connection stays open: many heartbeat intervals, so that members keep theirs.
const KEEP_ALIVE: Duration = Duration::from_secs(75);
/// How long a new connection may take to send the head of its first request.
const REQUEST_HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection that is being closed is read from, so that a client that is still sending a body
/// that was refused can read the answer.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// What remains of the shutdown timeout for the groups at the least, once requests have been waited for.
const RESERVED_FOR_GROUPS: Duration = Duration::from_secs(1);

/// Runs the daemon until it is told to stop. The code is 0 when it stopped as asked, 1 when work had to be
/// cut off; a second signal ends the process at once, with 1.
///
/// # Errors
/// When it cannot start, or the server ends without having been asked to.
pub(crate) fn run(config: Config) -> anyhow::Result<ExitCode> {
    check_exposure(&config)?;
    panics::log();
    let metrics = recorder::install()?;
    rt::System::new().block_on(serve(config, metrics))
}

async fn serve(config: Config, metrics: PrometheusHandle) -> anyhow::Result<ExitCode> {
    // First of all, so that a signal during the start is not lost.
    let mut stop = StopSignals::install()?;
    let mut running = Running::start(&config, metrics).await?;
    let signal = tokio::select! {
        signal = stop.next() => signal,
        ended = &mut running.serving => bail!("the HTTP server ended by itself: {ended:?}"),
    };
    running.coordinator.begin_termination();
    tracing::info!(signal, "terminating");
    rt::spawn(end_at_second(stop));
    let complete = running.stop(&config.server).await;
    Ok(if complete { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A coordinator with its HTTP surface, at work.
pub(crate) struct Running {
    pub(crate) coordinator: Coordinator,
    /// Where it listens: the port that was bound, where port 0 was asked for.
    pub(crate) address: SocketAddr,
    server: ServerHandle,
    serving: JoinHandle<std::io::Result<()>>,
    upkeep: JoinHandle<()>,
}

impl Running {
    /// Starts everything and says on the log where it listens. The store may be away; one that is there and cannot be
    /// used is refused. Must be called inside an actix system.
    pub(crate) async fn start(config: &Config, metrics: PrometheusHandle) -> anyhow::Result<Self> {
        let instance_id = config.server.instance_id_or_random();
        let store = wiring::store(config, &instance_id)?;
        match store.check().await {
            Ok(()) => {}
            Err(error @ StoreError::Misconfigured(_)) => return Err(error.into()),
            Err(error) => tracing::warn!(%error, "requests are refused until redis can be used"),
        }
        let coordinator = Coordinator::start(wiring::coordinator_settings(config, &instance_id), store);
        let state = Data::new(ServerState {
            coordinator: coordinator.clone(),
            instance_id: instance_id.clone(),
            max_body: usize::try_from(config.server.max_body.as_u64()).unwrap_or(usize::MAX),
            started: Instant::now(),
            metrics: metrics.clone(),
        });
        let (server, address) = listen(config, state)?;
        let running = Running {
            coordinator,
            address,
            server: server.handle(),
            serving: rt::spawn(server),
            upkeep: rt::spawn(keep_up(metrics)),
        };
        tracing::info!(
            addr = %address,
            store = running.coordinator.store_kind(),
            instance_id,
            version = env!("CARGO_PKG_VERSION"),
            "listening"
        );
        Ok(running)
    }

    /// Lets what has begun come to its end, once new work is refused (protocol 9): reads go on for the drain
    /// delay, then requests and groups are waited for. `true` when all was over within the shutdown timeout.
    pub(crate) async fn stop(self, config: &ServerConfig) -> bool {
        let begun = Instant::now();
        let deadline = begun + config.shutdown_timeout;
        tokio::time::sleep(config.shutdown_drain_delay).await;
        let reserved = RESERVED_FOR_GROUPS.min(config.shutdown_timeout / 4);
        let for_requests = deadline.saturating_duration_since(Instant::now()).saturating_sub(reserved);
        // Accepts nothing any more, closes idle connections, waits for the others.
        let requests = tokio::time::timeout(for_requests, self.server.stop(true)).await;
        if requests.is_err() {
            tracing::warn!("requests still run at the end of server.shutdown-timeout; they are cut off");
        }
        let for_groups = deadline.saturating_duration_since(Instant::now());
        let groups = self.coordinator.stopped(for_groups).await;
        if let Err(left) = groups {
            tracing::warn!(
                left,
                "groups are still at work at the end of server.shutdown-timeout; they are cut off"
            );
        }
        self.upkeep.abort();
        let complete = requests.is_ok() && groups.is_ok();
        let took_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::info!(took_ms, complete, "stopped");
        complete
    }
}

fn listen(config: &Config, state: Data<ServerState>) -> anyhow::Result<(Server, SocketAddr)> {
    let asked = config.server.listen;
    let server = HttpServer::new(move || http::application(state.clone()))
        .workers(wiring::http_workers(config))
        .keep_alive(KeepAlive::Timeout(KEEP_ALIVE))
        .client_request_timeout(REQUEST_HEAD_TIMEOUT)
        .client_disconnect_timeout(CLOSE_TIMEOUT)
        .tcp_nodelay(true)
        .shutdown_timeout(config.server.shutdown_timeout.as_secs().saturating_add(1))
        .disable_signals()
        .bind(asked)
        .with_context(|| format!("server.listen: cannot listen on {asked}"))?;
    let bound = server.addrs().first().copied().unwrap_or(asked);
    Ok((server.run(), bound))
}

/// Signals that mean "stop".
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    fn install() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("signals cannot be handled");
        Ok(StopSignals {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// Whoever asks twice does not want to wait. Mutexes that are held expire (protocol 9).
async fn end_at_second(mut stop: StopSignals) {
    let signal = stop.next().await;
    tracing::warn!(signal, "ended by a second signal");
    std::process::exit(1);
}

async fn keep_up(metrics: PrometheusHandle) {
    let mut interval = tokio::time::interval(recorder::UPKEEP_INTERVAL);
    loop {
        interval.tick().await;
        metrics.run_upkeep();
    }
}

/// The configuration has refused this already; a daemon without authentication is worth a second look.
fn check_exposure(config: &Config) -> anyhow::Result<()> {
    let address = config.server.listen;
    if !address.ip().to_canonical().is_loopback() {
        bail!("server.listen: {address} is not a loopback address, and this version has no authentication");
    }
    if !config.insecure {
        tracing::warn!(
            addr = %address,
            "this version has no authentication: every process on this machine can do everything; --insecure says \
             that you know"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_than_loopback_addresses_are_refused_again() {
        let mut config = Config::default();
        assert!(check_exposure(&config).is_ok());
        for address in ["0.0.0.0:0", "[::]:0", "10.0.0.1:8080", "[::ffff:10.0.0.1]:80"] {
            config.server.listen = address.parse().unwrap();
            assert!(check_exposure(&config).is_err(), "{address}");
        }
        for address in ["127.0.0.2:0", "[::1]:0"] {
            config.server.listen = address.parse().unwrap();
            assert!(check_exposure(&config).is_ok(), "{address}");
        }
    }
}
