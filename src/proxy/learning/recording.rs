//! Recordings: the tokens of requests on disk, from which `foretell train` makes drafters.
//!
//! Off unless the config file (`corpus.record`) and the request's policy (`corpus.record: true`)
//! both turn it on. One thread writes; a request hands its ids over and never waits. If the thread
//! falls behind or a write fails, requests are not recorded, which is counted.

pub mod segment;

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use foretell_config::process::Record as Settings;
use foretell_core::units::TokenId;
use foretell_net::clock::unix_now;
use foretell_net::random::{self, SharedSplitMix64};
use foretell_observe::Observer;

use super::cipher::{Cipher, KeyError};

/// Maximum number of records waiting to be written.
const WAITING: usize = 1_024;
/// Maximum number of tokens waiting to be written.
const WAITING_TOKENS: usize = 4 << 20;
/// Parts that a recording is divided into; the oldest one is deleted for room.
const SEGMENTS: u64 = 16;
/// Minimum size at which a segment ends, bytes.
const SEGMENT_BYTES: u64 = 64 << 10;
/// Time after a failed write in which nothing is written.
const PAUSE: Duration = Duration::from_mins(1);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// When it ended, Unix seconds.
    pub at: u64,
    /// Backend and model, by the operator's names.
    pub model: String,
    /// Fingerprint of the vocabulary that the ids belong to.
    pub vocabulary: String,
    /// Its tenant, if it had a trusted one.
    pub tenant: Option<String>,
    pub policy: String,
    /// Tokens of the prompt; empty if they are not known.
    pub prompt: Vec<TokenId>,
    pub output: Vec<TokenId>,
}

impl Record {
    fn tokens(&self) -> usize {
        self.prompt.len() + self.output.len()
    }
}

/// A handle to the thread that writes; clones share it.
#[derive(Clone)]
pub struct Recorder {
    notes: SyncSender<Note>,
    shared: Arc<Shared>,
}

enum Note {
    Record(Record),
    /// Replies once all records before it are written.
    Written(SyncSender<()>),
}

struct Shared {
    /// Share of requests that are recorded, 0 to 1.
    sample: f64,
    random: SharedSplitMix64,
    /// Tokens waiting to be written.
    waiting: AtomicUsize,
    observer: Arc<Observer>,
}

#[derive(Debug, thiserror::Error)]
pub enum RecorderError {
    /// The folder cannot be made.
    #[error("corpus.record.dir {0:?}: {1}")]
    Folder(PathBuf, io::Error),
    /// The key cannot be used.
    #[error("corpus.record.key_file {0:?}: {1}")]
    Key(PathBuf, KeyError),
    /// The thread cannot be started.
    #[error("no thread for recordings: {0}")]
    Thread(io::Error),
}

impl Recorder {
    /// Starts the thread, which ends with the last handle.
    ///
    /// # Errors
    /// See [`RecorderError`].
    pub fn start(settings: &Settings, observer: Arc<Observer>) -> Result<Self, RecorderError> {
        let Settings { dir, max_bytes, sample, key_file } = settings;
        let key =
            |path: &PathBuf| Cipher::from_file(path).map_err(|error| RecorderError::Key(path.clone(), error));
        let cipher = key_file.as_ref().map(key).transpose()?;
        let folder = |error| RecorderError::Folder(dir.clone(), error);
        make(dir).map_err(folder)?;
        let writer = Writer { dir: dir.clone(), max_bytes: *max_bytes, cipher, segment: None };
        let random = SharedSplitMix64::seeded(random::fresh_seed());
        let shared = Arc::new(Shared { sample: *sample, random, waiting: AtomicUsize::new(0), observer });
        let (notes, inbox) = sync_channel(WAITING);
        let theirs = Arc::clone(&shared);
        let work = move || writer.run(&inbox, &theirs);
        thread::Builder::new().name("recording".to_owned()).spawn(work).map_err(RecorderError::Thread)?;
        Ok(Self { notes, shared })
    }

    /// True if the next request is one of the recorded share.
    pub fn draws(&self) -> bool {
        self.shared.random.fraction() < self.shared.sample
    }

    /// Queues a record. If too much is waiting already it is dropped, and counted.
    pub fn record(&self, record: Record) {
        let tokens = record.tokens();
        let waiting = self.shared.waiting.fetch_add(tokens, Ordering::Relaxed);
        let sent = waiting <= WAITING_TOKENS && self.notes.try_send(Note::Record(record)).is_ok();
        if !sent {
            self.shared.waiting.fetch_sub(tokens, Ordering::Relaxed);
            self.shared.observer.metrics().corpus.recorded("dropped");
        }
    }

    /// Waits until all records that were queued before are written, or have failed. Blocks for as
    /// long as the disk does.
    pub fn finish(&self) {
        let (reply, written) = sync_channel(1);
        let _ = self.notes.send(Note::Written(reply));
        let _ = written.recv();
    }
}

/// State of the thread.
struct Writer {
    dir: PathBuf,
    max_bytes: u64,
    cipher: Option<Cipher>,
    segment: Option<Segment>,
}

struct Segment {
    path: PathBuf,
    file: File,
    /// Length of its complete records, bytes.
    len: u64,
}

impl Writer {
    fn run(mut self, inbox: &Receiver<Note>, shared: &Shared) {
        let mut failed: Option<Instant> = None;
        while let Ok(note) = inbox.recv() {
            let record = match note {
                Note::Record(record) => record,
                Note::Written(reply) => {
                    // The caller may no longer be waiting.
                    let _ = reply.send(());
                    continue;
                }
            };
            shared.waiting.fetch_sub(record.tokens(), Ordering::Relaxed);
            let metrics = &shared.observer.metrics().corpus;
            if failed.is_some_and(|at| at.elapsed() < PAUSE) {
                metrics.recorded("failed");
                continue;
            }
            match self.write(&record) {
                Ok(()) => {
                    if failed.take().is_some() {
                        shared.observer.note_recording(None);
                        tracing::info!(dir = %self.dir.display(), "requests are recorded");
                    }
                    metrics.recorded("written");
                }
                // A record that is too large says nothing about the disk.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => metrics.recorded("failed"),
                Err(error) => {
                    shared.observer.note_recording(Some(format!("{}: {error}", self.dir.display())));
                    if failed.replace(Instant::now()).is_none() {
                        tracing::warn!(dir = %self.dir.display(), %error, "requests are not recorded");
                    }
                    metrics.recorded("failed");
                }
            }
        }
    }

    /// Appends a record. A part of it that was written before an error is truncated.
    fn write(&mut self, record: &Record) -> io::Result<()> {
        let frame = segment::frame(&serde_json::to_vec(record)?, self.cipher.as_ref())?;
        let full = (self.max_bytes / SEGMENTS).clamp(SEGMENT_BYTES, segment::MAX_SEGMENT / 2);
        let segment = match self.segment.take().filter(|segment| segment.len < full && segment.locks()) {
            Some(segment) => segment,
            None => self.open()?,
        };
        let segment = self.segment.insert(segment);
        let written = segment.file.write_all(&frame);
        // If this fails, only a purge has to wait.
        let _ = segment.file.unlock();
        if written.is_ok() {
            segment.len += frame.len() as u64;
        } else if segment.file.set_len(segment.len).is_err() {
            self.segment = None;
        }
        written
    }

    /// Begins a segment, locked, and deletes the oldest ones for room.
    fn open(&self) -> io::Result<Segment> {
        // It may have been removed meanwhile.
        make(&self.dir)?;
        let room = self.max_bytes - self.max_bytes / SEGMENTS;
        // Another process may remove a file at the same time.
        let mut segments: Vec<(u64, PathBuf)> = segment::list(&self.dir)?
            .into_iter()
            .filter_map(|path| Some((path.metadata().ok()?.len(), path)))
            .collect();
        let mut sum: u64 = segments.iter().map(|(len, _)| len).sum();
        segments.reverse();
        while sum > room
            && let Some((len, path)) = segments.pop()
        {
            fs::remove_file(path).or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            })?;
            sum -= len;
        }
        let name = segment::name(unix_now(), random::fresh_seed());
        let path = self.dir.join(name);
        let file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(&path)?;
        lock(&file)?;
        let head = segment::head(self.cipher.is_some());
        let mut segment = Segment { path, file, len: head.len() as u64 };
        if !segment.is_at_path() {
            return Err(io::Error::other("a purge removed the new segment"));
        }
        segment.file.write_all(head)?;
        Ok(segment)
    }
}

/// Makes the folder of a recording, if it does not exist.
fn make(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Waits for the lock of a file, on a filesystem that has locks.
fn lock(file: &File) -> io::Result<()> {
    file.lock().or_else(|error| match error.kind() {
        io::ErrorKind::Unsupported => Ok(()),
        _ => Err(error),
    })
}

impl Segment {
    /// Locks it, unless a purge has: records appended to a segment that it replaces would be lost.
    /// Succeeds on a filesystem without locks.
    fn locks(&self) -> bool {
        !matches!(self.file.try_lock(), Err(TryLockError::WouldBlock)) && self.is_at_path()
    }

    /// True if its path still leads to it.
    fn is_at_path(&self) -> bool {
        let inode = |file: fs::Metadata| (file.dev(), file.ino());
        let found = fs::metadata(&self.path).map(inode);
        found.is_ok_and(|found| self.file.metadata().is_ok_and(|open| inode(open) == found))
    }
}

impl Drop for Segment {
    /// Removes a segment without a record.
    fn drop(&mut self) {
        let is_file = self.file.metadata().is_ok_and(|metadata| metadata.is_file());
        if is_file && self.len <= segment::head(true).len() as u64 && self.is_at_path() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Records to be removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PurgeScope {
    Tenant(String),
    /// Those that ended before this moment, Unix seconds.
    Before(u64),
}

#[derive(Debug, Default)]
pub struct Purge {
    /// Number of removed records.
    pub gone: usize,
    /// Number of remaining records.
    pub remaining: usize,
    /// Segments that cannot be read or replaced, which stay as they are.
    pub failed: Vec<segment::ReadError>,
}

/// Removes records. Each segment is complete at every moment, and none is written to meanwhile.
///
/// # Errors
/// The folder cannot be read.
pub fn purge(dir: &Path, cipher: Option<&Cipher>, which: &PurgeScope) -> io::Result<Purge> {
    let mut purge = Purge::default();
    remove(segment::leftovers(dir)?)?;
    for path in segment::list(dir)? {
        match purge_segment(&path, cipher, which) {
            Ok((gone, remaining)) => {
                purge.gone += gone;
                purge.remaining += remaining;
            }
            // A sidecar that makes room has removed it.
            Err(_) if !path.exists() => {}
            Err(error) => purge.failed.push(error),
        }
    }
    Ok(purge)
}

/// Removes all records, unread.
///
/// # Errors
/// The folder cannot be read, or a file cannot be removed.
pub fn purge_all(dir: &Path) -> io::Result<()> {
    remove(segment::leftovers(dir)?)?;
    remove(segment::list(dir)?)
}

/// Removes all that can be removed; the last error otherwise. A file that is gone is none.
fn remove(files: Vec<PathBuf>) -> io::Result<()> {
    let mut failed = Ok(());
    for file in files {
        match fs::remove_file(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => failed = Err(error),
            _ => {}
        }
    }
    failed
}

/// Removes records of a segment; the number of removed and of remaining ones.
fn purge_segment(
    path: &Path,
    cipher: Option<&Cipher>,
    which: &PurgeScope,
) -> Result<(usize, usize), segment::ReadError> {
    let failed = |error| segment::ReadError::file(path, error);
    // To be written to, because NFS gives no exclusive lock otherwise.
    let locked = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
    lock(&locked).map_err(failed)?;
    let segment::Contents { records, cut } = segment::read(path, cipher)?;
    let goes = |record: &Record| match which {
        PurgeScope::Tenant(tenant) => record.tenant.as_ref() == Some(tenant),
        PurgeScope::Before(at) => record.at < *at,
    };
    let remaining: Vec<&Record> = records.iter().filter(|record| !goes(record)).collect();
    if remaining.is_empty() {
        fs::remove_file(path).map_err(failed)?;
    } else if remaining.len() < records.len() || cut.is_some() {
        let mut bytes = segment::head(cipher.is_some()).to_vec();
        for record in &remaining {
            let payload = serde_json::to_vec(record).map_err(|error| failed(error.into()))?;
            bytes.extend(segment::frame(&payload, cipher).map_err(failed)?);
        }
        super::snapshot::replace(path, &bytes).map_err(failed)?;
    }
    Ok((records.len() - remaining.len(), remaining.len()))
}

#[cfg(test)]
mod tests;
