//! Writes log lines without making a caller wait: a bounded queue and one thread that owns standard
//! error.
//!
//! It copes with a full disk, a pipe whose reader has died and a pipe that no one reads: a line
//! that does not fit into the queue, or that cannot be written, is dropped and counted.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder};
use tracing_subscriber::fmt::MakeWriter;

/// Maximum number of lines in the queue: those of one or two seconds under load, about one or two
/// megabytes.
const QUEUE: usize = 4096;
/// Interval at which [`flush`] checks the queue.
const POLL: Duration = Duration::from_millis(2);

/// Counts of lines since the start.
#[derive(Default)]
struct Counts {
    /// Lines handed to the queue.
    logged: AtomicU64,
    /// Lines taken from the queue, written or not.
    handled: AtomicU64,
    /// Lines taken from the queue that could not be written.
    failed: AtomicU64,
}

static COUNTS: Counts =
    Counts { logged: AtomicU64::new(0), handled: AtomicU64::new(0), failed: AtomicU64::new(0) };
/// The queue, with the counter of lines that did not fit into it.
static QUEUED: OnceLock<(NonBlocking, ErrorCounter)> = OnceLock::new();

/// The writer for log lines; there is one queue per process.
pub(super) fn lines() -> Lines {
    let (queue, _) = QUEUED.get_or_init(|| {
        let builder = NonBlockingBuilder::default().lossy(true).buffered_lines_limit(QUEUE);
        let (queue, guard) = builder.thread_name("log").finish(Stderr::open());
        // Dropping the guard prints to standard output if the thread is stuck, and panics if that
        // is closed. `flush` waits for the lines instead.
        std::mem::forget(guard);
        let lost = queue.error_counter();
        (queue, lost)
    });
    Lines(queue.clone())
}

/// Number of lines dropped because the queue was full or they could not be written.
pub fn dropped() -> u64 {
    let unqueued = QUEUED.get().map_or(0, |(_, lost)| lost.dropped_lines() as u64);
    unqueued + COUNTS.failed.load(Ordering::Relaxed)
}

/// Waits until every line logged so far is out of the queue, at most `within`, so that a reader
/// that does not read cannot delay the end of the process.
pub fn flush(within: Duration) {
    let start = Instant::now();
    let wanted = COUNTS.logged.load(Ordering::Acquire);
    let waiting = || {
        let unqueued = QUEUED.get().map_or(0, |(_, lost)| lost.dropped_lines() as u64);
        COUNTS.handled.load(Ordering::Acquire) + unqueued < wanted
    };
    while waiting() && start.elapsed() < within {
        std::thread::sleep(POLL);
    }
}

/// Puts each line into the queue.
#[derive(Clone)]
pub(super) struct Lines(NonBlocking);

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        COUNTS.logged.fetch_add(1, Ordering::AcqRel);
        self.0.write(line)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// Standard error as the log thread uses it. Writing always succeeds: lines that cannot be written
/// are counted.
struct Stderr(Result<File, io::Stderr>);

impl Stderr {
    /// Uses a duplicate of the descriptor: a stuck write would lock [`io::stderr`], and everything
    /// else that prints would wait for it.
    fn open() -> Self {
        let stderr = io::stderr();
        let duplicate = stderr.as_fd().try_clone_to_owned();
        Self(duplicate.map(File::from).map_err(|_| stderr))
    }
}

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.write_all(line).map(|()| line.len())
    }

    fn write_all(&mut self, line: &[u8]) -> io::Result<()> {
        let written = match &mut self.0 {
            Ok(file) => file.write_all(line),
            Err(stderr) => stderr.write_all(line),
        };
        if written.is_err() {
            COUNTS.failed.fetch_add(1, Ordering::Relaxed);
        }
        COUNTS.handled.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
