//! Indexing of new rows, by a separate thread: a step never waits for it.

use std::sync::mpsc::{Receiver, Sender, SyncSender, sync_channel};
use std::{io, thread};

use crate::batch::Unindexed;
use crate::row::Lookups;

/// Maximum rows waiting to be indexed.
const WAITING: usize = 1_024;

/// A row to be indexed, and where its lookups are sent.
pub(crate) struct Job {
    pub(crate) row: u32,
    pub(crate) unindexed: Unindexed,
    pub(crate) done: Sender<(u32, Lookups)>,
}

/// The thread that indexes the rows of all engines; it ends with the last handle.
#[derive(Clone)]
pub(crate) struct Indexer(SyncSender<Job>);

impl Indexer {
    pub(crate) fn start() -> io::Result<Self> {
        let (jobs, inbox) = sync_channel(WAITING);
        thread::Builder::new().name("drafts-index".to_owned()).spawn(move || run(&inbox))?;
        Ok(Self(jobs))
    }

    /// Queues a row. If too many are waiting it is dropped, and never gets a draft.
    pub(crate) fn index(&self, job: Job) {
        let _ = self.0.try_send(job);
    }
}

fn run(inbox: &Receiver<Job>) {
    while let Ok(Job { row, unindexed, done }) = inbox.recv() {
        // The engine may be gone.
        let _ = done.send((row, unindexed.built()));
    }
}
