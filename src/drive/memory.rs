//! The memory over requests at work: one thread that learns, forgets and writes down, and views that sessions read.
//!
//! What a request has said is handed over when it has ended, and sorted away from it. Where more comes than can be
//! sorted, the newest is dropped and counted: memory is a convenience. A session looks things up in what was published
//! when it began.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use parking_lot::RwLock;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::snapshot::{self, SnapshotError, unix};
use crate::clock::Clock;
use crate::draft;
use crate::draft::memory::{Holdings, Key, Limits, Memory, Tables, Text};
use crate::draft::{Scope, Successors, View};
use crate::http;
use crate::http::drain::Lifecycle;
use crate::observe::Observer;
use crate::units::{Tick, TokenId};

/// The version of the file of texts.
const VERSION: u32 = 1;
/// Texts that may wait to be learnt ...
const WAITING: usize = 256;
/// ... and tokens of them.
const WAITING_TOKENS: usize = 4 << 20;
/// How often what is too old is looked for.
const SWEPT: Duration = Duration::from_secs(10);
/// Most bytes of a snapshot for each byte of the texts in memory, where a token takes 4 bytes and more.
const WRITTEN_PER_BYTE: u64 = 4;
/// How often the texts are written to their snapshot.
const WRITTEN: Duration = Duration::from_mins(5);

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
    /// Largest snapshot that is read, bytes.
    snapshot_bytes: u64,
    /// How often anything has been cleared.
    generation: AtomicU64,
    /// Tokens that wait to be learnt.
    waiting: AtomicUsize,
}

struct Shown {
    view: View,
    tables: Tables,
    holdings: Holdings,
    /// When a request last read it, microseconds of [`Tick`].
    used: AtomicU64,
}

/// What is to be learnt of a request: its text, its successors, or both.
struct Said {
    /// The shelves of its text.
    keys: Vec<Key>,
    owner: Option<Arc<str>>,
    /// How often anything had been cleared when its request began.
    generation: u64,
    text: Vec<TokenId>,
    /// Its successors, their shelf and their epoch.
    seen: Option<(Epoch, Successors)>,
}

/// The shelf of successors, and the epoch of the engine that they are learnt of.
type Epoch = (Key, Arc<str>);

impl Said {
    /// Tokens that the worker has to go through.
    fn tokens(&self) -> usize {
        let seen = self.seen.as_ref().map_or(0, |(_, seen)| seen.tokens());
        self.text.len() * self.keys.len() + seen
    }
}

enum Note {
    Learn(Said),
    /// Forgets a tenant, or everybody; answers once it is done, with the number of texts.
    Clear(Option<String>, SyncSender<usize>),
    Save(PathBuf, SyncSender<Result<usize, SnapshotError>>),
    Load(PathBuf, SyncSender<Result<usize, SnapshotError>>),
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
    owner: Option<String>,
    /// How long it was not used, seconds.
    age: u64,
    ids: Vec<TokenId>,
}

impl Memories {
    /// Starts the thread of an empty memory; it ends with the last handle. Its bytes are a part of what `account` allows: where
    /// that is short, it lets go of a part. `snapshot`: the file that is written anew when something is to be forgotten.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(
        limits: Limits,
        account: &Arc<http::memory::Memory>,
        observer: Arc<Observer>,
        snapshot: Option<PathBuf>,
    ) -> io::Result<Self> {
        let (notes, inbox) = sync_channel(WAITING);
        let shared = Arc::new(Shared {
            shelves: RwLock::default(),
            observer,
            clock: Clock::start(),
            ttl: limits.ttl,
            snapshot_bytes: (limits.bytes as u64).saturating_mul(WRITTEN_PER_BYTE).saturating_add(1 << 20),
            generation: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
        });
        let worker = Worker {
            memory: Memory::new(limits, super::fresh_seed()),
            shared: Arc::downgrade(&shared),
            account: Arc::clone(account),
            held: account.take(0),
            cleared: HashMap::new(),
            snapshot,
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

    /// The successors that were learnt in an epoch.
    fn successors(&self, (key, epoch): &Epoch) -> Arc<Successors> {
        let shelves = self.shared.shelves.read();
        let Some(shown) = shelves.get(key) else { return Arc::default() };
        shown.used.store(self.shared.now().0, Ordering::Relaxed);
        shown.tables.get(epoch).cloned().unwrap_or_default()
    }

    /// Hands over a text to be learnt. Where too much waits already it is dropped, and counted.
    fn learn(&self, said: Said) {
        let tokens = said.tokens();
        let waiting = self.shared.waiting.fetch_add(tokens, Ordering::Relaxed);
        let fits = waiting <= WAITING_TOKENS;
        let sent = fits && self.notes.try_send(Note::Learn(said)).is_ok();
        if !sent {
            self.shared.waiting.fetch_sub(tokens, Ordering::Relaxed);
            self.shared.observer.metrics().memory.dropped();
        }
    }

    /// Forgets a tenant, or everybody (`None`), in the snapshot as well. Returns how many texts went; `None` if the memory has
    /// stopped. Blocks until it is done: what was handed over before is forgotten, too, and so is what requests say that
    /// are under way.
    pub fn clear(&self, tenant: Option<&str>) -> Option<usize> {
        let (reply, answer) = sync_channel(1);
        self.notes.send(Note::Clear(tenant.map(ToOwned::to_owned), reply)).ok()?;
        answer.recv().ok()
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
        let to = file.clone();
        let save = move || self.save(&to).map(|_| ());
        snapshot::keep(save, WRITTEN, &file, "texts of requests cannot be written", &life).await;
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
    /// Where its successors are, if its policy wants them and it has a tenant.
    epoch: Option<Epoch>,
    owner: Option<Arc<str>>,
    /// How often anything had been cleared when it began.
    generation: u64,
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
        let generation = memories.shared.generation.load(Ordering::SeqCst);
        Self { memories: memories.clone(), keys, epoch: None, owner: tenant.map(Into::into), generation }
    }

    /// It reads and learns the successors of its tenant, in this epoch of its engine; those without a tenant have none.
    #[must_use]
    pub fn recycling(self, key: &Key, epoch: &str) -> Self {
        let tenant = self.owner.as_deref().map(ToOwned::to_owned);
        let epoch = tenant.map(|tenant| (Key { tenant: Some(tenant), ..key.clone() }, epoch.into()));
        Self { epoch, ..self }
    }

    /// Whether its lookups may see texts of other clients than its tenant.
    pub fn reads_others(&self) -> bool {
        let [_, of_all] = &self.keys;
        of_all.is_some()
    }

    /// What its lookups may see.
    pub fn shared(&self) -> draft::Shared {
        let view = |key: &Option<Key>| key.as_ref().map(|key| self.memories.view(key)).unwrap_or_default();
        let [of_tenant, of_all] = self.keys.each_ref().map(view);
        let successors = self.epoch.as_ref().map(|epoch| self.memories.successors(epoch)).unwrap_or_default();
        draft::Shared { of_tenant, of_all, successors, ..draft::Shared::default() }
    }

    /// Learns what the request said, in the tokens of prompt and output, and the successors that it has seen.
    pub fn learn(&self, prompt: &[TokenId], output: &[TokenId], seen: Option<&Successors>) {
        let keys: Vec<Key> = self.keys.iter().flatten().filter(|_| !prompt.is_empty()).cloned().collect();
        let text = if keys.is_empty() { Vec::new() } else { [prompt, output].concat() };
        let seen = self.epoch.clone().zip(seen.filter(|seen| seen.tokens() > 0).cloned());
        if !keys.is_empty() || seen.is_some() {
            let owner = self.owner.clone();
            self.memories.learn(Said { keys, owner, generation: self.generation, text, seen });
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
    held: http::memory::Reservation,
    /// By tenant, or `None` for everybody: how often anything had been cleared when that was.
    cleared: HashMap<Option<Arc<str>>, u64>,
    snapshot: Option<PathBuf>,
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
            Some(Note::Learn(said)) => {
                shared.waiting.fetch_sub(said.tokens(), Ordering::Relaxed);
                let changed = if self.is_cleared(&said) { Vec::new() } else { self.learn(&said, now) };
                self.publish(&changed, shared, now);
            }
            Some(Note::Clear(tenant, reply)) => {
                let before = self.texts();
                let changed = self.memory.clear(tenant.as_deref());
                let gone = before - self.texts();
                let generation = shared.generation.fetch_add(1, Ordering::SeqCst) + 1;
                self.cleared.insert(tenant.map(Into::into), generation);
                self.publish(&changed, shared, now);
                if let Some(file) = self.snapshot.as_ref().filter(|file| file.exists()) {
                    let written = write(file, &self.memory, now);
                    let _ = written.inspect_err(
                        |error| tracing::warn!(%error, "the snapshot still has what was cleared"),
                    );
                }
                // Who asked may have given up waiting.
                let _ = reply.send(gone);
            }
            Some(Note::Save(file, reply)) => {
                let _ = reply.send(write(&file, &self.memory, now));
            }
            Some(Note::Load(file, reply)) => {
                let _ = reply.send(self.load(&file, shared, now));
            }
        }
    }

    /// Whether its tenant, or everybody, was cleared after its request began.
    fn is_cleared(&self, said: &Said) -> bool {
        let of = |tenant: &Option<Arc<str>>| self.cleared.get(tenant).is_some_and(|&at| at > said.generation);
        of(&None) || (said.owner.is_some() && of(&said.owner))
    }

    /// Learns a text on each of its shelves, and successors on theirs; returns the shelves that have changed.
    fn learn(&mut self, said: &Said, now: Tick) -> Vec<Key> {
        let Said { keys, owner, text, seen, .. } = said;
        let texts = keys.iter().filter(|key| self.memory.learn(key, owner.as_ref(), text, now));
        let mut changed: Vec<Key> = texts.cloned().collect();
        if let Some(((key, epoch), seen)) = seen
            && self.memory.recycle(key, epoch, seen, now)
        {
            changed.push(key.clone());
        }
        changed
    }

    fn texts(&self) -> usize {
        self.memory.holdings().map(|(_, held)| held.texts).sum()
    }

    /// Lets go of what has to go, and shows what has changed.
    fn publish(&mut self, changed: &[Key], shared: &Shared, now: Tick) {
        // Where the process is short of memory, texts go before requests have to.
        let short = self.account.level() != http::memory::Level::Enough;
        let most = if short { self.memory.bytes() / 4 * 3 } else { usize::MAX };
        let swept = self.memory.sweep(most, now);
        let held: HashMap<&Key, Holdings> = self.memory.holdings().collect();
        let mut shelves = shared.shelves.write();
        for key in changed.iter().chain(&swept) {
            let Some(&holdings) = held.get(key) else {
                shelves.remove(key);
                continue;
            };
            let (view, tables) = (self.memory.view(key), self.memory.tables(key));
            if let Some(shown) = shelves.get_mut(key) {
                (shown.view, shown.tables, shown.holdings) = (view, tables, holdings);
            } else {
                let used = AtomicU64::new(now.0);
                shelves.insert(key.clone(), Shown { view, tables, holdings, used });
            }
        }
        drop(shelves);
        let sum = |of: fn(&Holdings) -> usize| held.values().map(of).sum::<usize>();
        let [texts, tokens, successors, bytes] = [
            sum(|held| held.texts),
            sum(|held| held.tokens),
            sum(|held| held.successors),
            sum(|held| held.bytes),
        ];
        let told = Holdings { texts, tokens, successors, bytes };
        shared.observer.metrics().memory.holds(told, self.memory.events());
        let new = self.account.take(bytes as u64);
        self.held = new;
    }

    fn load(&mut self, file: &Path, shared: &Shared, now: Tick) -> Result<usize, SnapshotError> {
        let lines = match read(file, shared.snapshot_bytes) {
            Err(SnapshotError::File(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            read => read?,
        };
        let mut changed: Vec<Key> = Vec::new();
        for Line { model, vocabulary, tenant, owner, age, ids } in &lines {
            let key = Key { model: model.clone(), vocabulary: vocabulary.clone(), tenant: tenant.clone() };
            let age = Duration::from_secs(*age);
            if age < shared.ttl {
                let used = Tick(now.0.saturating_sub(u64::try_from(age.as_micros()).unwrap_or(u64::MAX)));
                let owner: Option<Arc<str>> = owner.as_deref().map(Into::into);
                self.memory.learn(&key, owner.as_ref(), ids, used);
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

/// Writes a snapshot.
fn write(file: &Path, memory: &Memory, now: Tick) -> Result<usize, SnapshotError> {
    let texts = memory.texts(now);
    let mut body = Vec::new();
    for Text { key, owner, age, ids } in &texts {
        let Key { model, vocabulary, tenant } = (*key).clone();
        let (owner, age, ids) = (owner.map(ToOwned::to_owned), age.as_secs(), ids.to_vec());
        serde_json::to_writer(&mut body, &Line { model, vocabulary, tenant, owner, age, ids })?;
        body.push(b'\n');
    }
    let mut head = serde_json::to_vec(&Head { version: VERSION, saved: unix(), sha256: digest(&body) })?;
    head.push(b'\n');
    snapshot::replace(file, &[&head, &body])?;
    Ok(texts.len())
}

/// The texts of a snapshot, with their ages as of now.
fn read(file: &Path, max_bytes: u64) -> Result<Vec<Line>, SnapshotError> {
    let bytes = snapshot::read(file, max_bytes)?;
    let end = bytes.iter().position(|&byte| byte == b'\n').ok_or(SnapshotError::Damaged)?;
    let (head, body) = bytes.split_at(end);
    let body = body.get(1..).unwrap_or_default();
    let head: Head = serde_json::from_slice(head)?;
    if head.version != VERSION {
        return Err(SnapshotError::Version { found: head.version, own: VERSION });
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

#[cfg(test)]
mod tests;
