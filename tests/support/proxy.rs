//! A TCP proxy: before coordinators a load balancer that a test can point elsewhere, before Redis a way to do
//! something between two commands, or a network that swallows everything.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;

use super::wait::DEADLINE;

/// Passes bytes on to a port of this machine. It ends with the test's runtime.
pub(crate) struct Proxy {
    port: u16,
    target: watch::Sender<Option<u16>>,
    black_hole: watch::Sender<bool>,
    traps: Arc<Mutex<Vec<Trap>>>,
}

struct Trap {
    needle: Vec<u8>,
    reached: oneshot::Sender<()>,
    let_go: oneshot::Receiver<()>,
}

/// A message to come that is held back until [`Held::let_go`].
pub(crate) struct Held {
    reached: oneshot::Receiver<()>,
    let_go: oneshot::Sender<()>,
}

impl Held {
    /// Waits until the message is there.
    pub(crate) async fn reached(&mut self) {
        timeout(DEADLINE, &mut self.reached).await.unwrap().unwrap();
    }

    /// It goes on.
    pub(crate) fn let_go(self) {
        let _ = self.let_go.send(());
    }
}

impl Proxy {
    /// One that leads to `port`.
    pub(crate) async fn to(port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let own_port = listener.local_addr().unwrap().port();
        let (target, leads_to) = watch::channel(Some(port));
        let (black_hole, is_black_hole) = watch::channel(false);
        let traps = Arc::<Mutex<Vec<Trap>>>::default();
        let set = Arc::clone(&traps);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, leads_to.clone(), is_black_hole.clone(), Arc::clone(&set)));
            }
        });
        Proxy { port: own_port, target, black_hole, traps }
    }

    /// The port to come to.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// What follows `--redis-url`.
    pub(crate) fn redis_url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Leads to another port from now on, or nowhere; present connections end.
    pub(crate) fn lead_to(&self, port: Option<u16>) {
        self.target.send_replace(port);
    }

    /// From now on every connection is accepted and kept, and nothing comes through; or again as usual, and what was
    /// under way comes late, as with a network that was cut.
    pub(crate) fn swallow(&self, swallows: bool) {
        self.black_hole.send_replace(swallows);
    }

    /// The next message of a client that contains `needle` is held back.
    pub(crate) fn hold_next(&self, needle: &str) -> Held {
        let (reached, is_reached) = oneshot::channel();
        let (let_go, is_let_go) = oneshot::channel();
        let trap = Trap { needle: needle.as_bytes().to_vec(), reached, let_go: is_let_go };
        self.traps.lock().unwrap().push(trap);
        Held { reached: is_reached, let_go }
    }
}

async fn pass(
    client: TcpStream,
    mut leads_to: watch::Receiver<Option<u16>>,
    mut black_hole: watch::Receiver<bool>,
    traps: Arc<Mutex<Vec<Trap>>>,
) {
    let mut answers_hole = black_hole.clone();
    // The proxy itself is gone with the test.
    let Ok(_) = black_hole.wait_for(|swallows| !swallows).await else { return };
    let target = *leads_to.borrow_and_update();
    let Some(port) = target else { return };
    let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else { return };
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let requests = async {
        let mut seen: Vec<u8> = Vec::new();
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(count @ 1..) = from_client.read(&mut buffer).await {
            let trap = sprung(&mut traps.lock().unwrap(), &mut seen, &buffer[..count]);
            if let Some(trap) = trap {
                let _ = trap.reached.send(());
                let _ = trap.let_go.await;
            }
            let Ok(_) = black_hole.wait_for(|swallows| !swallows).await else { return };
            if to_server.write_all(&buffer[..count]).await.is_err() {
                return;
            }
        }
    };
    let answers = async {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(count @ 1..) = from_server.read(&mut buffer).await {
            let Ok(_) = answers_hole.wait_for(|swallows| !swallows).await else { return };
            if to_client.write_all(&buffer[..count]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = requests => {}
        () = answers => {}
        _ = leads_to.changed() => {}
    }
}

/// The trap that waits for what these bytes complete. `seen`: what has come since one was set, as far as it matters.
fn sprung(traps: &mut Vec<Trap>, seen: &mut Vec<u8>, bytes: &[u8]) -> Option<Trap> {
    seen.extend(bytes);
    let is_seen = |trap: &Trap| seen.windows(trap.needle.len()).any(|part| part == trap.needle);
    let trap = traps.iter().position(is_seen).map(|at| traps.remove(at));
    if trap.is_some() || traps.is_empty() {
        seen.clear();
    }
    // A needle may come in two pieces.
    seen.drain(..seen.len().saturating_sub(128));
    trap
}
