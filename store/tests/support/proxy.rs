//! A TCP proxy before Redis that can lose answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Passes bytes on, until told otherwise.
pub struct Proxy {
    port: u16,
    faults: Arc<Faults>,
}

#[derive(Default)]
struct Faults {
    /// Answers are read and thrown away.
    swallow: AtomicBool,
    /// The first answer ends its connection instead of reaching the client.
    cut: AtomicBool,
    /// Connections with a lower number have their answers thrown away.
    silent_below: AtomicU64,
    accepted: AtomicU64,
}

impl Proxy {
    /// Starts one in front of `port`.
    pub async fn before(port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let own_port = listener.local_addr().unwrap().port();
        let faults = Arc::new(Faults::default());
        let shared = Arc::clone(&faults);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, port, Arc::clone(&shared)));
            }
        });
        Proxy { port: own_port, faults }
    }

    /// `redis://` and its address.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Throws every answer away from now on, or no longer.
    pub fn swallow_answers(&self, on: bool) {
        self.faults.swallow.store(on, Ordering::SeqCst);
    }

    /// Ends a connection when its next answer comes.
    pub fn cut_at_next_answer(&self) {
        self.faults.cut.store(true, Ordering::SeqCst);
    }

    /// Throws away every answer on the connections that there are, and on no later one.
    pub fn silence_present_connections(&self) {
        self.faults.silent_below.store(self.connections(), Ordering::SeqCst);
    }

    /// How many connections were accepted so far.
    pub fn connections(&self) -> u64 {
        self.faults.accepted.load(Ordering::SeqCst)
    }
}

async fn pass(client: TcpStream, port: u16, faults: Arc<Faults>) {
    let number = faults.accepted.fetch_add(1, Ordering::SeqCst);
    let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else {
        return;
    };
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let requests = tokio::spawn(async move {
        let _ = tokio::io::copy(&mut from_client, &mut to_server).await;
    });
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(count) = from_server.read(&mut buffer).await {
        if count == 0 {
            break;
        }
        let cut = faults.cut.swap(false, Ordering::SeqCst);
        if cut {
            break;
        }
        let silent = number < faults.silent_below.load(Ordering::SeqCst);
        if silent || faults.swallow.load(Ordering::SeqCst) {
            continue;
        }
        if to_client.write_all(&buffer[..count]).await.is_err() {
            break;
        }
    }
    requests.abort();
}
