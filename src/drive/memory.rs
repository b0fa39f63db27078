//! The memory over requests at work: one thread that learns, forgets and writes down, and views that sessions read.
//!
//! What a request has said is handed over when it has ended, and sorted away from it. Where more comes than can be
//! sorted, the newest is dropped and counted: memory is a convenience. A session looks things up in what was published
//! when it began.

use std::collections::HashMap;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::RwLock;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::clock::Clock;
use crate::draft;
use crate::draft::memory::{Holdings, Key, Limits, Memory};
use crate::draft::{Scope, View};
use crate::http;
use crate::http::drain::Lifecycle;
use crate::observe::Observer;
use crate::units::{Tick, TokenId};

/// Texts that wait to be learnt.
const WAITING: usize = 256;
/// How often what is too old is looked for.
const SWEPT: Duration = Duration::from_secs(10);
/// How often the texts are written to their snapshot.
const WRITTEN: Duration = Duration::from_mins(5);
/// The version of the snapshot file.
const VERSION: u32 = 1;

/// A handle to the memory; clones share it.
#[derive(Clone)]
pub struct Memories {
    notes: SyncSender<Note>,
    shared: Arc<Shared>,
}

/// What sessions read.
struct Shared {
    shelves: RwLock<HashMap<Key, Shown>>,
    observer: Arc<Observer>,
    clock: Clock,
    /// What ages of a snapshot are counted back from, so that a text may be older than the process.
    ttl: Duration,
}

struct Shown {
    view: View,
    holdings: Holdings,
    /// When a request last read it, microseconds of [`Tick`].
    used: AtomicU64,
}

enum Note {
    Learn(Key, Vec<TokenId>),
    /// Forgets a tenant, or everybody; answers once it is done, with the number of texts.
    Clear(Option<String>, SyncSender<usize>),
    Save(PathBuf, SyncSender<Result<usize, SnapshotError>>),
    Load(PathBuf, SyncSender<Result<usize, SnapshotError>>),
}

/// A snapshot that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The file cannot be read or written.
    #[error("{0}")]
    File(#[from] io::Error),
    /// It is no snapshot.
    #[error("no snapshot: {0}")]
    Unreadable(#[from] serde_json::Error),
    /// It was written by another version.
    #[error("a snapshot of version {0}, this is version {VERSION}")]
    Version(u32),
    /// Something of it was lost or changed.
    #[error("it is damaged: its checksum is not that of its content")]
    Damaged,
    /// The thread of the memory has ended.
    #[error("the memory has stopped")]
    Stopped,
}

/// The first line of a snapshot; a line for each text follows.
#[derive(Serialize, Deserialize)]
struct Head {
    version: u32,
    /// Unix seconds.
    saved: u64,
    /// SHA-256 of all that follows the first line, hexadecimal.
    sha256: String,
}

/// A text of a snapshot.
#[derive(Serialize, Deserialize)]
struct Line {
    model: String,
    vocabulary: String,
    tenant: Option<String>,
    /// How long it was not used, seconds.
    age: u64,
    ids: Vec<TokenId>,
}

impl Memories {
    /// Starts the thread of an empty memory; it ends with the last handle. Its bytes are a part of what `account` allows.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(
        limits: Limits,
        account: &Arc<http::memory::Memory>,
        observer: Arc<Observer>,
    ) -> io::Result<Self> {
        let (notes, inbox) = sync_channel(WAITING);
        let shared =
            Arc::new(Shared { shelves: RwLock::default(), observer, clock: Clock::start(), ttl: limits.ttl });
        let worker = Worker {
            memory: Memory::new(limits),
            shared: Arc::downgrade(&shared),
            account: Arc::clone(account),
            held: None,
        };
        thread::Builder::new().name("memory".to_owned()).spawn(move || worker.run(&inbox))?;
        Ok(Self { notes, shared })
    }

    /// What was learnt under a key.
    pub fn view(&self, key: &Key) -> View {
        let shelves = self.shared.shelves.read();
        let Some(shown) = shelves.get(key) else { return View::default() };
        shown.used.store(self.shared.now().0, Ordering::Relaxed);
        Arc::clone(&shown.view)
    }

    /// Hands over a text to be learnt under each of `keys`.
    pub fn learn(&self, keys: &[Key], text: &[TokenId]) {
        for key in keys {
            if let Err(TrySendError::Full(_)) = self.notes.try_send(Note::Learn(key.clone(), text.to_vec())) {
                self.shared.observer.metrics().memory.dropped();
            }
        }
    }

    /// Forgets a tenant, or everybody (`None`). Returns how many texts went. Blocks until it is done: what was handed over
    /// before is forgotten, too.
    pub fn clear(&self, tenant: Option<&str>) -> usize {
        let (reply, answer) = sync_channel(1);
        let sent = self.notes.send(Note::Clear(tenant.map(ToOwned::to_owned), reply));
        sent.ok().and_then(|()| answer.recv().ok()).unwrap_or(0)
    }

    /// What every shelf holds.
    pub fn holdings(&self) -> Vec<(Key, Holdings)> {
        let shelves = self.shared.shelves.read();
        let mut all: Vec<_> = shelves.iter().map(|(key, shown)| (key.clone(), shown.holdings)).collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    /// Writes every text to a file that only its owner may read; returns how many. Blocks.
    ///
    /// # Errors
    /// See [`SnapshotError`].
    pub fn save(&self, file: &Path) -> Result<usize, SnapshotError> {
        self.ask(|reply| Note::Save(file.to_owned(), reply))
    }

    /// Reads what was written; returns how many texts that is, 0 if there is no file. Blocks.
    ///
    /// # Errors
    /// See [`SnapshotError`]; then nothing was taken.
    pub fn load(&self, file: &Path) -> Result<usize, SnapshotError> {
        self.ask(|reply| Note::Load(file.to_owned(), reply))
    }

    /// Reads what was written, before the first request, and says what came of it.
    pub fn recall(&self, file: &Path) {
        let shown = file.display().to_string();
        match self.load(file) {
            Ok(texts) => tracing::info!(file = shown, texts, "texts of earlier requests have been read"),
            Err(error) => tracing::warn!(file = shown, %error, "texts of earlier requests are lost"),
        }
    }

    /// Writes every text now and then, and once more when the process drains.
    pub async fn remember(self, file: PathBuf, life: Arc<Lifecycle>) {
        let mut failed = false;
        loop {
            let last = tokio::time::timeout(WRITTEN, life.draining()).await.is_ok();
            let (memories, to) = (self.clone(), file.clone());
            let saved = tokio::task::spawn_blocking(move || memories.save(&to)).await;
            let error = saved.ok().and_then(Result::err);
            // Said once, not every time.
            if let Some(error) = error.as_ref().filter(|_| !failed) {
                tracing::warn!(file = %file.display(), %error, "texts of requests cannot be written");
            }
            failed = error.is_some();
            if last {
                return;
            }
        }
    }

    fn ask(
        &self,
        note: impl FnOnce(SyncSender<Result<usize, SnapshotError>>) -> Note,
    ) -> Result<usize, SnapshotError> {
        let (reply, answer) = sync_channel(1);
        self.notes.send(note(reply)).map_err(|_| SnapshotError::Stopped)?;
        answer.recv().map_err(|_| SnapshotError::Stopped)?
    }
}

/// What one request has to do with the memory.
pub struct Remembering {
    memories: Memories,
    /// Its tenant's shelf, if its policy looks there and it has one; that of all, if its policy looks there.
    keys: [Option<Key>; 2],
}

impl Remembering {
    /// A request looks into the shelves of these scopes and is learnt there. Without a tenant that is trusted, a tenant's
    /// scope is the request alone.
    pub fn new(
        memories: &Memories,
        key: &Key,
        tenant: Option<&str>,
        scopes: impl Iterator<Item = Scope>,
    ) -> Self {
        let mut keys = [None, None];
        for scope in scopes {
            match scope {
                Scope::Request => {}
                Scope::Tenant => {
                    keys[0] = tenant.map(|tenant| Key { tenant: Some(tenant.to_owned()), ..key.clone() });
                }
                Scope::Global => keys[1] = Some(key.clone()),
            }
        }
        Self { memories: memories.clone(), keys }
    }

    /// What its lookups may see.
    pub fn shared(&self) -> draft::Shared {
        let [of_tenant, of_all] = self
            .keys
            .each_ref()
            .map(|key| key.as_ref().map(|key| self.memories.view(key)).unwrap_or_default());
        draft::Shared { of_tenant, of_all, ..draft::Shared::default() }
    }

    /// Learns what the request said, in the tokens of prompt and output.
    pub fn learn(&self, prompt: &[TokenId], output: &[TokenId]) {
        let keys: Vec<Key> = self.keys.iter().flatten().cloned().collect();
        if !keys.is_empty() && !prompt.is_empty() {
            self.memories.learn(&keys, &[prompt, output].concat());
        }
    }
}

impl Shared {
    fn now(&self) -> Tick {
        self.clock.now().after(self.ttl)
    }
}

/// The thread's side.
struct Worker {
    memory: Memory,
    shared: Weak<Shared>,
    account: Arc<http::memory::Memory>,
    /// The bytes of the memory, as the process accounts for them.
    held: Option<http::memory::Reservation>,
}

impl Worker {
    fn run(mut self, inbox: &Receiver<Note>) {
        loop {
            let note = match inbox.recv_timeout(SWEPT) {
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
        for (key, shown) in shared.shelves.read().iter() {
            self.memory.touch(key, Tick(shown.used.load(Ordering::Relaxed)));
        }
        match note {
            None => self.publish(&[], shared, now),
            Some(Note::Learn(key, text)) => {
                let changed = self.memory.learn(&key, &text, now);
                self.publish(if changed { std::slice::from_ref(&key) } else { &[] }, shared, now);
            }
            Some(Note::Clear(tenant, reply)) => {
                let before = self.texts();
                let gone = self.memory.clear(tenant.as_deref());
                self.publish(&gone, shared, now);
                // Who asked may have given up waiting.
                let _ = reply.send(before - self.texts());
            }
            Some(Note::Save(file, reply)) => {
                let _ = reply.send(write(&file, &self.memory, now));
            }
            Some(Note::Load(file, reply)) => {
                let _ = reply.send(self.load(&file, shared, now));
            }
        }
    }

    fn texts(&self) -> usize {
        self.memory.holdings().map(|(_, held)| held.texts).sum()
    }

    /// Lets go of what has to go, and shows what has changed.
    fn publish(&mut self, changed: &[Key], shared: &Shared, now: Tick) {
        let swept = self.memory.sweep(now);
        let held: HashMap<&Key, Holdings> = self.memory.holdings().collect();
        let mut shelves = shared.shelves.write();
        for key in changed.iter().chain(&swept) {
            let Some(&holdings) = held.get(key) else {
                shelves.remove(key);
                continue;
            };
            let view = self.memory.view(key);
            match shelves.get_mut(key) {
                Some(shown) => (shown.view, shown.holdings) = (view, holdings),
                None => {
                    let used = AtomicU64::new(now.0);
                    shelves.insert(key.clone(), Shown { view, holdings, used });
                }
            }
        }
        drop(shelves);
        let sum = |of: fn(&Holdings) -> usize| held.values().map(of).sum::<usize>();
        let bytes = sum(|held| held.bytes);
        let told = (bytes, sum(|held| held.tokens), sum(|held| held.texts));
        shared.observer.metrics().memory.holds(told, self.memory.events());
        // What is held is held, whatever else the process holds: the account then says that memory is short.
        self.held = None;
        self.held = Some(self.account.take(bytes as u64));
    }

    fn load(&mut self, file: &Path, shared: &Shared, now: Tick) -> Result<usize, SnapshotError> {
        let lines = match read(file) {
            Err(SnapshotError::File(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            read => read?,
        };
        let mut changed: Vec<Key> = Vec::new();
        for Line { model, vocabulary, tenant, age, ids } in &lines {
            let key = Key { model: model.clone(), vocabulary: vocabulary.clone(), tenant: tenant.clone() };
            let age = Duration::from_secs(*age);
            if age < shared.ttl {
                let used = Tick(now.0.saturating_sub(u64::try_from(age.as_micros()).unwrap_or(u64::MAX)));
                self.memory.learn(&key, ids, used);
                changed.push(key);
            }
        }
        self.publish(&changed, shared, now);
        Ok(changed.len())
    }
}

/// The file of the texts, beside the one of what was learnt of costs and acceptance.
pub fn beside(snapshot: &Path) -> PathBuf {
    let mut name = snapshot.as_os_str().to_owned();
    name.push(".texts");
    name.into()
}

/// Writes a snapshot beside the file and renames it, so that the file is whole at every moment.
fn write(file: &Path, memory: &Memory, now: Tick) -> Result<usize, SnapshotError> {
    let texts = memory.texts(now);
    let mut body = Vec::new();
    for (key, age, ids) in &texts {
        let Key { model, vocabulary, tenant } = (*key).clone();
        serde_json::to_writer(
            &mut body,
            &Line { model, vocabulary, tenant, age: age.as_secs(), ids: ids.to_vec() },
        )?;
        body.push(b'\n');
    }
    let head = Head { version: VERSION, saved: unix(), sha256: digest(&body) };
    let beside = file.with_extension("new");
    let mut open = std::fs::OpenOptions::new();
    let mut to = open.write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
    serde_json::to_writer(&mut to, &head)?;
    to.write_all(b"\n")?;
    to.write_all(&body)?;
    to.sync_all()?;
    std::fs::rename(&beside, file)?;
    Ok(texts.len())
}

/// The texts of a snapshot, with their ages as of now.
fn read(file: &Path) -> Result<Vec<Line>, SnapshotError> {
    let bytes = std::fs::read(file)?;
    let end = bytes.iter().position(|&byte| byte == b'\n').ok_or(SnapshotError::Damaged)?;
    let (head, body) = bytes.split_at(end);
    let body = body.get(1..).unwrap_or_default();
    let head: Head = serde_json::from_slice(head)?;
    if head.version != VERSION {
        return Err(SnapshotError::Version(head.version));
    }
    if digest(body) != head.sha256 {
        return Err(SnapshotError::Damaged);
    }
    let since = unix().saturating_sub(head.saved);
    let lines = body.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    let aged = |line: &[u8]| {
        let mut line: Line = serde_json::from_slice(line)?;
        line.age = line.age.saturating_add(since);
        Ok(line)
    };
    lines.map(aged).collect()
}

fn digest(bytes: &[u8]) -> String {
    use std::fmt::Write;
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests;
