//! The Unix socket, and one thread for each engine that is connected.
//!
//! Threads instead of tasks: an engine waits a millisecond for its drafts, and must not wait behind
//! the work of other requests.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io::{self, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use std::{fs, thread};

use foretell_core::words::PassthroughReason;
use foretell_net::http::memory::Memory;
use parking_lot::Mutex;

use crate::batch::Batch;
use crate::frame::{self, FRAME_BYTES, FrameError, Hello, Incoming, VERSION};
use crate::index::{Indexer, Job};
use crate::joins::{Joined, Joins, Terms, Unjoined};
use crate::row::Lookups;
use crate::totals::Totals;

/// Maximum engines that are connected.
const MAX_CONNECTIONS: usize = 64;
/// Time within which an engine must say hello, and take an answer.
const PEER_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of a connection that are read at once.
const READ_BYTES: usize = 256 << 10;

/// Why the socket cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("{0}: another process answers there; stop it, or choose another path for drafts.listen")]
    InUse(PathBuf),
    #[error("{0}: {1}; choose a path for drafts.listen in a folder that exists and may be written to")]
    Io(PathBuf, io::Error),
}

/// The end of a connection.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("{0}")]
    Frame(#[from] FrameError),
    #[error("{0}")]
    Refused(String),
}

/// Rows that belong to no request of the proxy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unknown {
    /// They get lookups of their text.
    #[default]
    Lookups,
    /// They get no drafts.
    None,
}

/// An engine that is connected.
#[derive(Clone, Debug)]
pub struct Engine {
    pub hello: Hello,
    /// The replica that it serves, by label; `None` until one of its rows has joined a request.
    pub replica: Option<String>,
    pub totals: Totals,
}

/// Sums over all engines since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Engines {
    /// Engines that are connected.
    pub engines: usize,
    pub totals: Totals,
}

struct Connected {
    hello: Hello,
    stream: UnixStream,
    totals: Arc<Mutex<Totals>>,
}

/// Decides on a row that belongs to no request and begins now.
type UnknownNow = Box<dyn Fn() -> Unknown + Send + Sync>;

/// The drafts service.
pub struct Service {
    joins: Arc<Joins>,
    unknown: UnknownNow,
    memory: Arc<Memory>,
    indexer: Indexer,
    engines: Mutex<BTreeMap<u64, Connected>>,
    /// The sum of those that have disconnected.
    gone: Mutex<Totals>,
    numbers: AtomicU64,
    /// The socket's file, removed at the end.
    path: PathBuf,
}

impl Service {
    /// Opens the socket with these permissions, and serves engines in separate threads. `unknown`
    /// decides about each row that belongs to no request, when it begins.
    ///
    /// # Errors
    /// The socket cannot be opened, or another process answers there.
    pub fn listen(
        path: &Path,
        mode: u32,
        unknown: impl Fn() -> Unknown + Send + Sync + 'static,
        joins: Arc<Joins>,
        memory: Arc<Memory>,
    ) -> Result<Arc<Self>, ListenError> {
        let failed = |error| ListenError::Io(path.to_owned(), error);
        let listener = opened(path)?;
        fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed)?;
        joins.expect();
        let service = Arc::new(Self {
            joins,
            unknown: Box::new(unknown),
            memory,
            indexer: Indexer::start().map_err(failed)?,
            engines: Mutex::default(),
            gone: Mutex::default(),
            numbers: AtomicU64::new(1),
            path: path.to_owned(),
        });
        let accepting = Arc::downgrade(&service);
        let accept = move || {
            for stream in listener.incoming() {
                let Some(service) = accepting.upgrade() else { return };
                if let Ok(stream) = stream {
                    service.accepted(stream);
                }
            }
        };
        thread::Builder::new().name("drafts-listen".to_owned()).spawn(accept).map_err(failed)?;
        Ok(service)
    }

    /// The engines that are connected.
    pub fn engines(&self) -> Vec<Engine> {
        let of = |(number, engine): (&u64, &Connected)| Engine {
            hello: engine.hello.clone(),
            replica: self.joins.replica_of(*number),
            totals: *engine.totals.lock(),
        };
        self.engines.lock().iter().map(of).collect()
    }

    /// Sums over all engines since the start, those that are gone included.
    pub fn sum(&self) -> Engines {
        let mut totals = *self.gone.lock();
        let engines = self.engines.lock();
        engines.values().for_each(|engine| totals.add(&engine.totals.lock()));
        Engines { engines: engines.len(), totals }
    }

    /// Ends all connections, and removes the socket.
    pub fn stop(&self) {
        let _ = fs::remove_file(&self.path);
        for engine in self.engines.lock().values() {
            let _ = engine.stream.shutdown(Shutdown::Both);
        }
    }

    fn accepted(self: Arc<Self>, stream: UnixStream) {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let serve = move || {
            if let Err(why) = self.serve(&stream, number) {
                tracing::warn!(connection = number, %why, "an engine's connection for drafts was closed");
            }
            if let Some(engine) = self.engines.lock().remove(&number) {
                self.gone.lock().add(&Totals { rows: 0, ..*engine.totals.lock() });
            }
            self.joins.ended(number);
        };
        // Without a thread the connection closes, and the plug-in reconnects later.
        let _ = thread::Builder::new().name("drafts".to_owned()).spawn(serve);
    }

    /// Serves one engine until it disconnects.
    fn serve(&self, stream: &UnixStream, number: u64) -> Result<(), Ended> {
        stream.set_write_timeout(Some(PEER_TIMEOUT))?;
        stream.set_read_timeout(Some(PEER_TIMEOUT))?;
        let mut frames = Frames { reader: BufReader::with_capacity(READ_BYTES, stream), frame: Vec::new() };
        let Some(Incoming::Hello(hello)) = frames.next()? else { return Err(FrameError::Hello.into()) };
        if let Err(why) = self.welcome(&hello) {
            answer(stream, |out| frame::refused(out, &why))?;
            return Err(Ended::Refused(why));
        }
        stream.set_read_timeout(None)?;
        let totals = Arc::new(Mutex::new(Totals::default()));
        let connected =
            Connected { hello: hello.clone(), stream: stream.try_clone()?, totals: Arc::clone(&totals) };
        self.engines.lock().insert(number, connected);
        answer(stream, frame::welcome)?;
        tracing::info!(
            connection = number,
            engine = hello.engine,
            version = hello.engine_version,
            model = hello.model,
            max_draft = hello.max_draft,
            "an engine requests drafts"
        );
        let (done, indexed) = channel();
        let mut connection =
            Connection { service: self, number, batch: Batch::new(&hello), done, indexed, totals };
        while let Some(incoming) = frames.next()? {
            connection.take(incoming, stream)?;
        }
        Ok(())
    }

    /// Why an engine is refused.
    fn welcome(&self, hello: &Hello) -> Result<(), String> {
        if hello.version != VERSION {
            let theirs = hello.version;
            return Err(format!(
                "Foretell speaks version {VERSION} of the drafts protocol, the plug-in version {theirs}; \
                 install the plug-in that comes with this Foretell"
            ));
        }
        if self.engines.lock().len() >= MAX_CONNECTIONS {
            return Err(format!("{MAX_CONNECTIONS} engines are connected already"));
        }
        Ok(())
    }

    /// The request of a row, or the terms of rows that belong to none.
    fn joined(&self, id: &str, number: u64) -> Arc<Joined> {
        self.joins.join(id, number).unwrap_or_else(|unjoined| {
            Joined::new(match (unjoined, (self.unknown)()) {
                (Unjoined::Unknown, Unknown::Lookups) => Terms::unknown(),
                (Unjoined::MayBePlain, _) | (_, Unknown::None) => {
                    Terms::plain("", PassthroughReason::NoPolicy)
                }
            })
        })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A listener at this path. The socket of a process that is gone is replaced.
fn opened(path: &Path) -> Result<UnixListener, ListenError> {
    let failed = |error| ListenError::Io(path.to_owned(), error);
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path).map_err(failed)?;
                UnixListener::bind(path).map_err(failed)
            }
            _ => Err(ListenError::InUse(path.to_owned())),
        },
        other => other.map_err(failed),
    }
}

/// One connected engine.
struct Connection<'a> {
    service: &'a Service,
    number: u64,
    batch: Batch,
    done: Sender<(u32, Lookups)>,
    indexed: Receiver<(u32, Lookups)>,
    totals: Arc<Mutex<Totals>>,
}

impl Connection<'_> {
    fn take(&mut self, incoming: Incoming, stream: &UnixStream) -> Result<(), Ended> {
        match incoming {
            Incoming::Hello(_) => return Err(FrameError::Hello.into()),
            Incoming::Row { row, prompt, temperature, id } => {
                let joined = self.service.joined(&id, self.number);
                self.batch.begin(row, prompt as usize, temperature, joined, &self.service.memory);
            }
            Incoming::Text { row, from, tokens } => {
                if let Some(unindexed) = self.batch.text(row, from as usize, &tokens) {
                    self.service.indexer.index(Job { row, unindexed, done: self.done.clone() });
                }
            }
            Incoming::Gone(rows) => self.batch.end(&rows),
            Incoming::Step(step) => {
                self.indexed.try_iter().for_each(|(row, lookups)| self.batch.indexed(row, lookups));
                let drafts = self.batch.step(&step);
                answer(stream, |out| frame::drafts(out, &drafts))?;
                *self.totals.lock() = self.batch.totals();
                self.batch.tidy();
            }
        }
        Ok(())
    }
}

/// The frames of a connection.
struct Frames<R> {
    reader: R,
    frame: Vec<u8>,
}

impl<R: Read> Frames<R> {
    /// The next frame; `None` at the end of the connection.
    fn next(&mut self) -> Result<Option<Incoming>, Ended> {
        let mut length = [0; 4];
        match self.reader.read_exact(&mut length) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            other => other?,
        }
        let length = u32::from_le_bytes(length) as usize;
        if !(1..=FRAME_BYTES).contains(&length) {
            return Err(FrameError::Length(length).into());
        }
        self.frame.clear();
        // Grows as bytes come: a length alone costs no memory.
        if self.reader.by_ref().take(length as u64).read_to_end(&mut self.frame)? < length {
            return Ok(None);
        }
        Ok(Some(frame::read(&self.frame)?))
    }
}

fn answer(mut stream: &UnixStream, write: impl FnOnce(&mut Vec<u8>)) -> io::Result<()> {
    let mut out = Vec::with_capacity(1024);
    write(&mut out);
    stream.write_all(&out)
}
