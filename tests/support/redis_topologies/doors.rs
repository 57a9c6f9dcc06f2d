//! A port that lets some in and hangs up on all others.

use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::thread;

/// Passes connections that come from one address on to another port. It ends with this value.
pub(super) struct Door {
    port: u16,
    state: Arc<State>,
}

struct State {
    leads_to: AtomicU16,
    closed: AtomicBool,
}

impl Door {
    /// A door for whoever comes from `address`, which leads nowhere yet.
    pub(super) fn open_to(address: &'static str) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State { leads_to: AtomicU16::new(0), closed: AtomicBool::new(false) });
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for visitor in listener.incoming().map_while(Result::ok) {
                if shared.closed.load(Ordering::SeqCst) {
                    return;
                }
                let may_enter = visitor.peer_addr().is_ok_and(|peer| peer.ip().to_string() == address);
                if may_enter
                    && let Ok(server) =
                        TcpStream::connect(("127.0.0.1", shared.leads_to.load(Ordering::SeqCst)))
                {
                    pass(&visitor, &server);
                    pass(&server, &visitor);
                }
            }
        });
        Door { port, state }
    }

    /// The port of the door.
    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Where it leads.
    pub(super) fn lead_to(&self, port: u16) {
        self.state.leads_to.store(port, Ordering::SeqCst);
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.state.closed.store(true, Ordering::SeqCst);
        // Wakes the thread that waits for visitors.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn pass(from: &TcpStream, to: &TcpStream) {
    let (Ok(mut from), Ok(mut to)) = (from.try_clone(), to.try_clone()) else { return };
    thread::spawn(move || {
        let _ = io::copy(&mut from, &mut to);
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    });
}
