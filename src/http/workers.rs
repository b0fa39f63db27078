//! The network threads.
//!
//! Each runs an event loop of its own and keeps a client's connection and the backend connections that serve
//! it together: a chunk passes through without waking a second thread, which is most of what a relay costs.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::net::TcpStream;
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

thread_local! {
    static LANE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Index of the network thread that calls this, from 0; `None` on any other thread. Connections to replicas are pooled
/// per index.
pub fn lane() -> Option<usize> {
    LANE.get()
}

/// The threads that serve connections. Without any, connections are served on the runtime that accepts them.
#[derive(Debug)]
pub struct Workers {
    threads: Vec<Handle>,
    turn: AtomicUsize,
    stop: CancellationToken,
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
            workers.threads.push(runtime.handle().clone());
            let stop = workers.stop.clone();
            std::thread::Builder::new().name(format!("net-{lane}")).spawn(move || {
                LANE.set(Some(lane));
                runtime.block_on(stop.cancelled());
            })?;
        }
        Ok(workers)
    }

    /// Serves `stream` with `serve` on the next thread in turn; `tasks` counts it.
    pub fn spawn<S, F>(&self, stream: TcpStream, tasks: &TaskTracker, serve: S) -> io::Result<()>
    where
        S: FnOnce(TcpStream) -> F + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % self.threads.len().max(1);
        let Some(thread) = self.threads.get(turn) else {
            tasks.spawn(serve(stream));
            return Ok(());
        };
        let stream = stream.into_std()?;
        let task = async move {
            match TcpStream::from_std(stream) {
                Ok(stream) => serve(stream).await,
                Err(error) => tracing::warn!(%error, "connection lost between threads"),
            }
        };
        tasks.spawn_on(task, thread);
        Ok(())
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
