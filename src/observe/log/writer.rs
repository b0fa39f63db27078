//! Writing lines without ever waiting: a bounded queue before one thread that owns standard error.
//!
//! A disk that is full, a pipe whose reader has died and a pipe that nobody reads all end here: a line that does not
//! fit into the queue is dropped by the thread that logs it, one that cannot be written by the thread that writes it,
//! and both are counted.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder};
use tracing_subscriber::fmt::MakeWriter;

/// Lines that may wait to be written: those of a second or two under load. At a few hundred bytes each they take a
/// megabyte or two.
const QUEUE: usize = 4096;
/// How often [`flush`] looks whether all is written.
const POLL: Duration = Duration::from_millis(2);

/// What became of the lines so far.
#[derive(Default)]
struct Counts {
    /// Lines that were logged.
    logged: AtomicU64,
    /// Lines that left the queue, written or not.
    handled: AtomicU64,
    /// Lines that left the queue and could not be written.
    failed: AtomicU64,
}

static COUNTS: Counts =
    Counts { logged: AtomicU64::new(0), handled: AtomicU64::new(0), failed: AtomicU64::new(0) };
/// The queue, and how many lines did not fit into it.
static QUEUED: OnceLock<(NonBlocking, ErrorCounter)> = OnceLock::new();

/// The writer for the log's lines, one for the process.
pub(super) fn lines() -> Lines {
    let (queue, _) = QUEUED.get_or_init(|| {
        let builder = NonBlockingBuilder::default().lossy(true).buffered_lines_limit(QUEUE);
        let (queue, guard) = builder.thread_name("log").finish(Stderr::open());
        // Dropping it prints to standard output if the thread is stuck, and panics if that is closed. `flush` waits
        // for the lines instead.
        std::mem::forget(guard);
        let lost = queue.error_counter();
        (queue, lost)
    });
    Lines(queue.clone())
}

/// How many lines have been dropped: too many waited, or they could not be written.
pub fn dropped() -> u64 {
    let unqueued = QUEUED.get().map_or(0, |(_, lost)| lost.dropped_lines() as u64);
    unqueued + COUNTS.failed.load(Ordering::Relaxed)
}

/// Waits until every line so far has left the queue, but no longer than `within`: the end of a process does not wait
/// for a reader who does not read.
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

/// Standard error as the writing thread has it. Everything is taken: what cannot be written is counted.
struct Stderr(Result<File, io::Stderr>);

impl Stderr {
    /// By a descriptor of its own: the lock of [`io::stderr`] would be held while a write is stuck, and whoever else
    /// prints would wait for it.
    fn open() -> Self {
        let stderr = io::stderr();
        let own = stderr.as_fd().try_clone_to_owned();
        Self(own.map(File::from).map_err(|_| stderr))
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
