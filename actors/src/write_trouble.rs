//! A Redis that answers and takes no writes: reads show nothing of it, so that it has to be remembered for people.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rsc_store::StoreError;

/// What the last commit was refused with, and when.
#[derive(Debug, Default)]
pub(crate) struct WriteTrouble(Mutex<Option<(Instant, String)>>);

impl WriteTrouble {
    /// A commit was not applied. Only what Redis itself said counts: that it is away shows elsewhere.
    pub(crate) fn note(&self, error: &StoreError) {
        if matches!(error, StoreError::Refused(_) | StoreError::Misconfigured(_)) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) =
                Some((Instant::now(), error.to_string()));
        }
    }

    /// A commit was applied.
    pub(crate) fn clear(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The last refusal, if it is no older than `age`.
    pub(crate) fn recent(&self, age: Duration) -> Option<String> {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().filter(|(at, _)| at.elapsed() <= age).map(|(_, said)| said.clone())
    }
}
