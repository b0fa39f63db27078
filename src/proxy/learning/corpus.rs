//! The corpus over requests: one thread that adds, evicts and saves texts, and views that sessions
//! read.
//!
//! A request's text is queued when the request has ended, and indexed by the thread. If texts
//! arrive faster than they can be indexed, the newest are dropped and counted: the corpus is best
//! effort. A session looks up texts in the view that was published when it began.

mod access;
mod file;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use super::snapshot::{self, SnapshotError};
pub use access::CorpusAccess;
pub use file::sibling;
use foretell_core::draft::View;
use foretell_core::draft::corpus::{Corpus, Holdings, Key, Limits};
use foretell_core::units::{Tick, TokenId};
use foretell_net::clock::Clock;
use foretell_net::http;
use foretell_net::http::drain::Lifecycle;
use foretell_observe::Observer;
use parking_lot::RwLock;

/// Maximum number of texts waiting to be indexed.
const WAITING: usize = 256;
/// Maximum number of tokens waiting to be indexed.
const WAITING_TOKENS: usize = 4 << 20;
/// Interval between searches for expired texts.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum bytes of a snapshot per byte of the texts in memory, where a token takes at least 4
/// bytes.
const WRITTEN_PER_BYTE: u64 = 4;
/// Interval between snapshots of the texts.
const SAVE_INTERVAL: Duration = Duration::from_mins(5);

/// A handle to the corpus; clones share it.
#[derive(Clone)]
pub struct CorpusHandle {
    notes: SyncSender<Note>,
    shared: Arc<Shared>,
}

/// State read by sessions.
struct Shared {
    entries: RwLock<HashMap<Key, Shown>>,
    observer: Arc<Observer>,
    clock: Clock,
    /// Time to live of a text; the clock starts at this value, so that a text of a snapshot may be
    /// older than the process.
    ttl: Duration,
    /// Maximum size of a snapshot that is read, bytes.
    snapshot_bytes: u64,
    /// Number of clears so far.
    generation: AtomicU64,
    /// Tokens waiting to be indexed.
    waiting: AtomicUsize,
}

struct Shown {
    view: View,
    holdings: Holdings,
    /// When a request last read it, microseconds of [`Tick`].
    used: AtomicU64,
}

/// The text of one request to be added.
struct Contribution {
    /// Keys under which its text is added.
    keys: Vec<Key>,
    owner: Option<Arc<str>>,
    /// Number of clears when its request began.
    generation: u64,
    text: Vec<TokenId>,
}

impl Contribution {
    /// Tokens that the worker has to process.
    fn tokens(&self) -> usize {
        self.text.len() * self.keys.len()
    }
}

enum Note {
    Learn(Contribution),
    /// Removes the texts of a tenant, or of all (`None`); replies with their number once done.
    Clear(Option<String>, SyncSender<Result<usize, SnapshotError>>),
    Save(PathBuf, SyncSender<Result<usize, SnapshotError>>),
    Load(PathBuf, SyncSender<Result<usize, SnapshotError>>),
}

impl CorpusHandle {
    /// Starts the thread of an empty corpus; it ends with the last handle. Its bytes are reserved
    /// in `process_memory`; when that is short, texts are evicted. `snapshot`: the file that is
    /// rewritten when texts are cleared.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        limits: Limits,
        process_memory: &Arc<http::memory::Memory>,
        observer: Arc<Observer>,
        snapshot: Option<PathBuf>,
    ) -> io::Result<Self> {
        let (notes, inbox) = sync_channel(WAITING);
        let shared = Arc::new(Shared {
            entries: RwLock::default(),
            observer,
            clock: Clock::start(),
            ttl: limits.ttl,
            snapshot_bytes: (limits.bytes as u64).saturating_mul(WRITTEN_PER_BYTE).saturating_add(1 << 20),
            generation: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
        });
        let worker = Worker {
            memory: Corpus::new(limits, foretell_net::random::fresh_seed()),
            shared: Arc::downgrade(&shared),
            process_memory: Arc::clone(process_memory),
            reserved: process_memory.take(0),
            cleared: HashMap::new(),
            snapshot,
        };
        thread::Builder::new().name("memory".to_owned()).spawn(move || worker.run(&inbox))?;
        Ok(Self { notes, shared })
    }

    /// The texts learnt under a key.
    pub fn view(&self, key: &Key) -> View {
        let entries = self.shared.entries.read();
        let Some(shown) = entries.get(key) else { return View::default() };
        shown.used.store(self.shared.now().0, Ordering::Relaxed);
        Arc::clone(&shown.view)
    }

    /// Queues a text to be indexed. If too much is waiting already it is dropped, and counted.
    fn learn(&self, contribution: Contribution) {
        let tokens = contribution.tokens();
        if !self.queue(Note::Learn(contribution), tokens) {
            self.shared.observer.metrics().corpus.dropped();
        }
    }

    /// Queues tokens to be indexed; false if too many are waiting.
    fn queue(&self, note: Note, tokens: usize) -> bool {
        let waiting = self.shared.waiting.fetch_add(tokens, Ordering::Relaxed);
        let sent = waiting <= WAITING_TOKENS && self.notes.try_send(note).is_ok();
        if !sent {
            self.shared.waiting.fetch_sub(tokens, Ordering::Relaxed);
        }
        sent
    }

    /// Removes the texts of a tenant, or of all (`None`), from the snapshot as well. Returns the
    /// number of texts removed. Blocks until done. Texts queued before are removed too, and those
    /// of requests in flight are not added.
    ///
    /// # Errors
    /// [`SnapshotError::Stopped`], or [`SnapshotError::File`]: the snapshot may still have them.
    pub fn clear(&self, tenant: Option<&str>) -> Result<usize, SnapshotError> {
        self.request(|reply| Note::Clear(tenant.map(ToOwned::to_owned), reply))
    }

    /// Holdings of every key.
    pub fn holdings(&self) -> Vec<(Key, Holdings)> {
        let entries = self.shared.entries.read();
        let mut all: Vec<_> = entries.iter().map(|(key, shown)| (key.clone(), shown.holdings)).collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    /// Writes every text to a file that only its owner may read; returns the number of texts.
    /// Blocks.
    ///
    /// # Errors
    /// See [`SnapshotError`].
    pub fn save(&self, file: &Path) -> Result<usize, SnapshotError> {
        self.request(|reply| Note::Save(file.to_owned(), reply))
    }

    /// Reads a snapshot; returns the number of texts, 0 if there is no file. Blocks.
    ///
    /// # Errors
    /// See [`SnapshotError`]; nothing is added then.
    pub fn load(&self, file: &Path) -> Result<usize, SnapshotError> {
        self.request(|reply| Note::Load(file.to_owned(), reply))
    }

    /// Reads the snapshot, before the first request, and logs the outcome.
    pub fn restore(&self, file: &Path) {
        let shown = file.display().to_string();
        match self.load(file) {
            Ok(0) => tracing::info!(file = shown, "no texts of earlier requests"),
            Ok(texts) => tracing::info!(file = shown, texts, "texts of earlier requests have been read"),
            Err(error) => tracing::warn!(file = shown, %error, "texts of earlier requests are lost"),
        }
    }

    /// Writes the snapshot every 5 minutes, and once more when the process drains.
    pub async fn save_until_drained(self, file: PathBuf, life: Arc<Lifecycle>) {
        let to = file.clone();
        let save = move || self.save(&to).map(|_| ());
        snapshot::save_until_drained(
            save,
            SAVE_INTERVAL,
            &file,
            "texts of requests cannot be written",
            &life,
        )
        .await;
    }

    /// Sends a note and waits for the reply.
    fn request(
        &self,
        note: impl FnOnce(SyncSender<Result<usize, SnapshotError>>) -> Note,
    ) -> Result<usize, SnapshotError> {
        let (reply, answer) = sync_channel(1);
        self.notes.send(note(reply)).map_err(|_| SnapshotError::Stopped)?;
        answer.recv().map_err(|_| SnapshotError::Stopped)?
    }
}

impl Shared {
    fn now(&self) -> Tick {
        self.clock.now().after(self.ttl)
    }
}

/// State of the corpus thread.
struct Worker {
    memory: Corpus,
    shared: Weak<Shared>,
    process_memory: Arc<http::memory::Memory>,
    /// The bytes of the corpus in the process's memory budget.
    reserved: http::memory::Reservation,
    /// Number of clears at the last clear of each tenant; `None` is the last clear of all.
    cleared: HashMap<Option<Arc<str>>, u64>,
    snapshot: Option<PathBuf>,
}

impl Worker {
    fn run(mut self, inbox: &Receiver<Note>) {
        loop {
            let note = match inbox.recv_timeout(SWEEP_INTERVAL) {
                Ok(note) => Some(note),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let Some(shared) = self.shared.upgrade() else { return };
            self.take(note, &shared);
        }
    }

    fn take(&mut self, note: Option<Note>, shared: &Shared) {
        let now = shared.now();
        for (key, shown) in shared.entries.read().iter() {
            self.memory.touch(key, Tick(shown.used.load(Ordering::Relaxed)));
        }
        match note {
            None => self.publish(&[], shared, now),
            Some(Note::Learn(contribution)) => {
                shared.waiting.fetch_sub(contribution.tokens(), Ordering::Relaxed);
                let cleared = self.is_cleared(contribution.owner.as_ref(), contribution.generation);
                let changed = if cleared { Vec::new() } else { self.learn(&contribution, now) };
                self.publish(&changed, shared, now);
            }
            Some(Note::Clear(tenant, reply)) => {
                let before = self.texts();
                let generation = shared.generation.fetch_add(1, Ordering::SeqCst) + 1;
                let changed = self.memory.clear(tenant.as_deref());
                self.cleared.insert(tenant.map(Into::into), generation);
                let gone = before - self.texts();
                self.publish(&changed, shared, now);
                let forgotten =
                    self.snapshot.as_ref().map_or(Ok(()), |file| file::forget(file, &self.memory, now));
                // The caller may no longer be waiting.
                let _ = reply.send(forgotten.map(|()| gone));
            }
            Some(Note::Save(file, reply)) => {
                let _ = reply.send(file::write(&file, &self.memory, now));
            }
            Some(Note::Load(file, reply)) => {
                let _ = reply.send(self.load(&file, shared, now));
            }
        }
    }

    /// True if this tenant, or all tenants, were cleared since the number of clears was
    /// `generation`.
    fn is_cleared(&self, owner: Option<&Arc<str>>, generation: u64) -> bool {
        let of =
            |tenant: Option<&Arc<str>>| self.cleared.get(&tenant.cloned()).is_some_and(|&at| at > generation);
        of(None) || (owner.is_some() && of(owner))
    }

    /// Adds a text under each of its keys; returns those that have changed.
    fn learn(&mut self, contribution: &Contribution, now: Tick) -> Vec<Key> {
        let Contribution { keys, owner, text, .. } = contribution;
        let mut changed: Vec<Key> = Vec::new();
        for key in keys {
            if self.memory.learn(key, owner.as_ref(), text, now) {
                changed.push(key.clone());
            }
        }
        changed
    }

    fn texts(&self) -> usize {
        self.memory.holdings().map(|(_, size)| size.texts).sum()
    }

    /// Evicts texts that are expired or over the limit, and publishes the keys that have changed.
    fn publish(&mut self, changed: &[Key], shared: &Shared, now: Tick) {
        // When the process is short of memory, texts are evicted before requests are refused.
        let short = self.process_memory.level() != http::memory::Level::Enough;
        let most = if short { self.memory.bytes() / 4 * 3 } else { usize::MAX };
        let swept = self.memory.sweep(most, now);
        let sizes: HashMap<&Key, Holdings> = self.memory.holdings().collect();
        let mut entries = shared.entries.write();
        for key in changed.iter().chain(&swept) {
            let Some(&holdings) = sizes.get(key) else {
                entries.remove(key);
                continue;
            };
            let view = self.memory.view(key);
            if let Some(shown) = entries.get_mut(key) {
                shown.view = view;
                shown.holdings = holdings;
            } else {
                let used = AtomicU64::new(now.0);
                entries.insert(key.clone(), Shown { view, holdings, used });
            }
        }
        drop(entries);
        let sum = |of: fn(&Holdings) -> usize| sizes.values().map(of).sum::<usize>();
        let [texts, tokens, bytes] =
            [sum(|size| size.texts), sum(|size| size.tokens), sum(|size| size.bytes)];
        shared.observer.metrics().corpus.set(Holdings { texts, tokens, bytes }, self.memory.events());
        self.reserved = self.process_memory.take(bytes as u64);
    }

    fn load(&mut self, file: &Path, shared: &Shared, now: Tick) -> Result<usize, SnapshotError> {
        let lines = match file::read(file, shared.snapshot_bytes) {
            Err(SnapshotError::File(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            read => read?,
        };
        let mut changed: Vec<Key> = Vec::new();
        for file::Line { model, vocabulary, tenant, owner, age, ids } in &lines {
            let key = Key { model: model.clone(), vocabulary: vocabulary.clone(), tenant: tenant.clone() };
            let age = Duration::from_secs(*age);
            if age < shared.ttl {
                let owner: Option<Arc<str>> = owner.as_deref().map(Into::into);
                self.memory.learn(&key, owner.as_ref(), ids, before(now, age));
                changed.push(key);
            }
        }
        self.publish(&changed, shared, now);
        Ok(changed.len())
    }
}

/// The moment `age` before `now`.
fn before(now: Tick, age: Duration) -> Tick {
    Tick(now.0.saturating_sub(u64::try_from(age.as_micros()).unwrap_or(u64::MAX)))
}

#[cfg(test)]
mod tests;
