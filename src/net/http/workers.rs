//! The network threads.
//!
//! Each runs an event loop, and serves a client's connection and the backend connections for it: a
//! chunk passes through without waking a second thread, which would cost more than the rest of it.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::net::TcpStream;
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

thread_local! {
    static LANE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Index of the calling network thread, from 0; `None` on any other thread. Connections to replicas
/// are pooled per index.
pub fn lane() -> Option<usize> {
    LANE.get()
}

/// The threads that serve connections. Without any, connections are served on the runtime that
/// accepts them.
#[derive(Debug)]
pub struct Workers {
    threads: Vec<Thread>,
    turn: AtomicUsize,
    stop: CancellationToken,
}

#[derive(Debug)]
struct Thread {
    runtime: Handle,
    /// Number of its connections with work to do.
    load: Arc<AtomicUsize>,
}

/// One connection's part in the load of its thread: it counts while the connection has work to do.
#[derive(Debug, Default)]
pub struct Share {
    load: Arc<AtomicUsize>,
    counts: bool,
}

impl Share {
    /// Sets whether the connection has work to do.
    pub fn set(&mut self, counts: bool) {
        match (self.counts, counts) {
            (false, true) => drop(self.load.fetch_add(1, Ordering::Relaxed)),
            (true, false) => drop(self.load.fetch_sub(1, Ordering::Relaxed)),
            _ => {}
        }
        self.counts = counts;
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.set(false);
    }
}

impl Workers {
    /// No threads: connections are served on the calling runtime.
    #[must_use]
    pub fn none() -> Self {
        Self { threads: Vec::new(), turn: AtomicUsize::new(0), stop: CancellationToken::new() }
    }

    /// Starts `count` threads.
    ///
    /// # Errors
    /// The system cannot create a thread or an event queue.
    pub fn start(count: usize) -> io::Result<Self> {
        let mut workers = Self::none();
        for lane in 0..count {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            workers.threads.push(Thread { runtime: runtime.handle().clone(), load: Arc::default() });
            let stop = workers.stop.clone();
            std::thread::Builder::new().name(format!("net-{lane}")).spawn(move || {
                LANE.set(Some(lane));
                runtime.block_on(stop.cancelled());
            })?;
        }
        Ok(workers)
    }

    /// The runtimes of the threads; the calling runtime if there are none.
    pub fn runtimes(&self) -> Vec<Handle> {
        if self.threads.is_empty() {
            return Handle::try_current().into_iter().collect();
        }
        self.threads.iter().map(|thread| thread.runtime.clone()).collect()
    }

    /// The thread with the least load; among several, the next in turn.
    fn least(&self) -> Option<&Thread> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % self.threads.len().max(1);
        let (before, after) = self.threads.split_at_checked(turn)?;
        after.iter().chain(before).min_by_key(|thread| thread.load.load(Ordering::Relaxed))
    }

    /// Serves `stream` with `serve` on the thread with the least load; `tasks` counts it. The
    /// connection counts in that load until its [`Share`] is changed.
    pub fn spawn<S, F>(&self, stream: TcpStream, tasks: &TaskTracker, serve: S) -> io::Result<()>
    where
        S: FnOnce(TcpStream, Share) -> F + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let Some(thread) = self.least() else {
            tasks.spawn(serve(stream, Share::default()));
            return Ok(());
        };
        let stream = stream.into_std()?;
        let mut share = Share { load: Arc::clone(&thread.load), counts: false };
        share.set(true);
        let task = async move {
            match TcpStream::from_std(stream) {
                Ok(stream) => serve(stream, share).await,
                Err(error) => tracing::warn!(%error, "connection lost between threads"),
            }
        };
        tasks.spawn_on(task, &thread.runtime);
        Ok(())
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_loaded_thread_gets_the_next_connection_else_they_take_turns() {
        let workers = Workers::start(3).unwrap();
        let share = || {
            let thread = workers.least().unwrap();
            let mut share = Share { load: Arc::clone(&thread.load), counts: false };
            share.set(true);
            share
        };
        let loads = || -> Vec<usize> {
            workers.threads.iter().map(|thread| thread.load.load(Ordering::Relaxed)).collect()
        };
        let mut shares: Vec<Share> = (0..6).map(|_| share()).collect();
        assert_eq!(loads(), [2, 2, 2]);
        // The connections of one thread become idle, twice; one of them ends.
        for index in [1, 4] {
            shares[index].set(false);
            shares[index].set(false);
        }
        assert_eq!(loads(), [2, 0, 2]);
        drop(shares.remove(4));
        shares.extend([share(), share()]);
        assert_eq!(loads(), [2, 2, 2]);
        drop(shares);
        assert_eq!(loads(), [0, 0, 0]);
        assert!(Workers::none().least().is_none());
    }
}
