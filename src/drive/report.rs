//! The one record that a driven request leaves, whichever way it ends.
//!
//! A client that waits for a whole answer leaves by dropping the future; so the record is written by the
//! drop, and cannot be forgotten.

use std::sync::Arc;
use std::time::Instant;

use crate::drive::sink::Outcome;
use crate::drive::watcher::Watcher;
use crate::gateway::handover::Slot;
use crate::http::memory::Reservation;
use crate::observe::{Finished, Held, Observer};

/// Writes one [`Finished`] when it is done or dropped.
pub struct Report {
    observer: Arc<Observer>,
    started: Instant,
    finished: Option<Finished>,
    slot: Slot,
    stream: Option<Held>,
}

impl Report {
    /// A record that says so far that the client left.
    pub fn new(observer: Arc<Observer>, started: Instant, finished: Finished, slot: Slot) -> Self {
        Self { observer, started, finished: Some(finished), slot, stream: None }
    }

    /// What is reserved for the session, for whoever follows its size from now on.
    pub fn memory(&mut self) -> Reservation {
        self.slot.memory.split(u64::MAX)
    }

    /// Counts the answer as an open stream until the end.
    pub fn streams(&mut self) {
        self.stream = Some(self.observer.metrics().hold_stream());
    }

    /// The status that the client got.
    pub fn status(&mut self, status: u16) {
        if let Some(finished) = &mut self.finished {
            finished.status = status;
        }
    }

    /// The session is over: takes its account.
    pub fn account(&mut self, outcome: &Outcome, watcher: &Watcher, client_gone: bool) {
        let Some(finished) = &mut self.finished else { return };
        finished.path = outcome.path();
        finished.reason = outcome.reason();
        finished.rounds = watcher.rounds().to_vec();
        finished.output_tokens = outcome.summary.output_tokens;
        finished.first_byte = watcher.first_byte();
        finished.client_gone = client_gone;
    }

    /// Somebody else will say it.
    pub fn forget(mut self) {
        self.finished = None;
    }

    /// Says it.
    pub fn done(mut self) {
        self.write(false);
    }

    fn write(&mut self, dropped: bool) {
        if let Some(mut finished) = self.finished.take() {
            finished.duration = self.started.elapsed();
            finished.client_gone |= dropped;
            self.observer.finish(finished);
            self.stream = None;
        }
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        self.write(true);
    }
}
