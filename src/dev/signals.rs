//! Ctrl-C, `SIGTERM`, and the terminal that goes away.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// What asks this process to end.
pub(crate) struct Signals([Signal; 3]);

impl Signals {
    /// From now on a signal no longer ends the process by itself.
    ///
    /// # Errors
    /// When signals cannot be listened for.
    pub(crate) fn listen() -> std::io::Result<Self> {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [interrupt, terminate, hangup] = kinds.map(signal);
        Ok(Signals([interrupt?, terminate?, hangup?]))
    }

    /// Resolves when somebody asks.
    pub(crate) async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}
