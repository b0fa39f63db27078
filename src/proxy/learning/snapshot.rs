//! Snapshot of costs and acceptance, which survives a restart: a file that is written every minute
//! and read at the start.
//!
//! It contains times, counts and names of engines and models; never a text. If the file cannot be
//! read, that is logged and everything is learnt anew: a snapshot is best effort.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Learnt;
use foretell_config::regular;
use foretell_core::control::Control;
use foretell_net::clock::unix_now;
use foretell_net::fleet::identity::EngineStart;
use foretell_net::http::drain::Lifecycle;

/// The version of statistics, in files and in the fleet store: they are stored by kind of drafter,
/// in their order.
pub(crate) const VERSION: u32 = 3;
/// Interval between writes.
const EVERY: Duration = Duration::from_mins(1);

/// Maximum size of a file that is read, bytes; one with all engine starts has a few megabytes.
const MAX_BYTES: u64 = 64 << 20;

/// The file.
#[derive(Serialize, Deserialize)]
struct Snapshot {
    version: u32,
    /// Unix seconds.
    saved: u64,
    /// Name of these measurements in the store of a fleet.
    #[serde(default)]
    name: Option<String>,
    engine_starts: Vec<EngineStartEntry>,
}

#[derive(Serialize, Deserialize)]
struct EngineStartEntry {
    engine_start: EngineStart,
    learnt: Value,
}

/// Error of reading or writing a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The file cannot be read or written.
    #[error("{0}")]
    File(#[from] io::Error),
    /// It is no snapshot.
    #[error("no snapshot: {0}")]
    Unreadable(#[from] serde_json::Error),
    /// It was written by another version.
    #[error("a snapshot of version {found}, this is version {supported}")]
    Version { found: u32, supported: u32 },
    /// A part of it was lost or changed.
    #[error("it is damaged: its checksum is not that of its content")]
    Damaged,
    /// The corpus thread has ended.
    #[error("the corpus has stopped")]
    Stopped,
}

impl Learnt {
    /// Writes costs and acceptance of all engine starts. The file is complete at every moment. An
    /// engine start that has an infinite figure is omitted, and learnt anew.
    ///
    /// # Errors
    /// See [`SnapshotError`].
    pub fn save(&self, file: &Path) -> Result<(), SnapshotError> {
        let entry = |(engine_start, control): (EngineStart, Arc<Control>)| match control.save() {
            Ok(learnt) => Some(EngineStartEntry { engine_start, learnt }),
            Err(error) => {
                tracing::warn!(replica = engine_start.replica, model = engine_start.model, %error, "costs and acceptance of this engine are dropped");
                control.forget();
                None
            }
        };
        let engine_starts = self.controls().into_iter().filter_map(entry).collect();
        let name = Some(self.name.clone());
        let snapshot = Snapshot { version: VERSION, saved: unix_now().as_secs(), name, engine_starts };
        Ok(replace(file, &serde_json::to_vec(&snapshot)?)?)
    }

    /// Restores a snapshot; returns the number of engine starts, 0 if there is no file. An engine
    /// start that cannot be read is learnt anew.
    ///
    /// # Errors
    /// See [`SnapshotError`].
    pub fn restore(&self, file: &Path) -> Result<usize, SnapshotError> {
        let bytes = match read(file, MAX_BYTES) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            Err(error) => return Err(error.into()),
        };
        let snapshot: Snapshot = serde_json::from_slice(&bytes)?;
        if snapshot.version != VERSION {
            return Err(SnapshotError::Version { found: snapshot.version, supported: VERSION });
        }
        let rest = Duration::from_secs(unix_now().as_secs().saturating_sub(snapshot.saved));
        let entry = |EngineStartEntry { engine_start, learnt }| match Control::restored(learnt, rest) {
            Ok(control) => Some((engine_start, Arc::new(control))),
            Err(error) => {
                tracing::warn!(replica = engine_start.replica, model = engine_start.model, %error, "costs and acceptance of this engine cannot be read");
                None
            }
        };
        *self.former.lock() = snapshot.name;
        let mut controls = self.controls.lock();
        for (engine_start, control) in snapshot.engine_starts.into_iter().filter_map(entry) {
            controls.put(engine_start, control);
        }
        Ok(controls.len())
    }

    /// Restores the snapshot, before the first request, and logs the outcome.
    pub fn restore_logged(&self, file: &Path) {
        let shown = file.display().to_string();
        match self.restore(file) {
            Ok(0) => tracing::info!(file = shown, "no costs and acceptance of earlier requests"),
            Ok(engine_starts) => {
                tracing::info!(file = shown, engine_starts, "costs and acceptance have been restored");
            }
            Err(error) => tracing::warn!(file = shown, %error, "costs and acceptance cannot be restored"),
        }
    }

    /// Writes the file every minute, and once more when the process drains.
    pub async fn save_until_drained(self: Arc<Self>, file: PathBuf, life: Arc<Lifecycle>) {
        let to = file.clone();
        let save = move || self.save(&to);
        save_until_drained(save, EVERY, &file, "costs and acceptance cannot be written", &life).await;
    }
}

/// Saves in intervals of `every`, when the process drains, and once more when its last request has
/// ended. A lasting error is logged once.
pub(super) async fn save_until_drained(
    save: impl Fn() -> Result<(), SnapshotError> + Send + Sync + 'static,
    every: Duration,
    file: &Path,
    fault: &'static str,
    life: &Lifecycle,
) {
    let save = Arc::new(save);
    let (mut failed, mut draining) = (false, false);
    loop {
        let last = draining;
        if last {
            life.emptied().await;
        } else {
            draining = tokio::time::timeout(every, life.draining()).await.is_ok();
        }
        let save = Arc::clone(&save);
        let saved = tokio::task::spawn_blocking(move || save()).await;
        let error = saved.ok().and_then(Result::err);
        if let Some(error) = &error
            && !failed
        {
            tracing::warn!(file = %file.display(), %error, "{fault}");
        }
        failed = error.is_some();
        if last {
            return;
        }
    }
}

/// Reads a snapshot: a regular file that this process's user or root owns. Never blocks on anything
/// else, such as a FIFO.
pub(super) fn read(file: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let (bytes, metadata) = regular::read(file, max_bytes)?;
    let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
    if owner == user || owner == 0 {
        return Ok(bytes);
    }
    let message = format!("it belongs to user {owner}, and this process runs as user {user}");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
}

/// Writes a file that only its owner may read, complete at every moment: as a new file next to it
/// first, replacing any file there, which is then renamed. Fails if a device, FIFO or socket has
/// that name.
///
/// # Errors
/// It cannot be written, or is not a regular file.
pub fn replace(file: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_with(file, |to| to.write_all(bytes))
}

/// As [`replace`], with the bytes that `write` writes. If that fails, the new file is removed.
///
/// # Errors
/// The file cannot be written, or is not a regular file; or `write` fails.
pub(super) fn replace_with<E: From<io::Error>>(
    file: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<(), E>,
) -> Result<(), E> {
    fs::metadata(file).map_or(Ok(()), |found| regular::check(&found))?;
    let new = unfinished(file);
    absent(fs::remove_file(&new))?;
    let to = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
    let mut to = BufWriter::new(to);
    let written = write(&mut to).and_then(|()| {
        to.flush()?;
        to.get_ref().sync_all()?;
        Ok(fs::rename(&new, file)?)
    });
    written.inspect_err(|_| drop(fs::remove_file(&new)))
}

/// Removes a file, and the unfinished one of an interrupted [`replace`].
///
/// # Errors
/// One of them is still there.
pub(super) fn remove(file: &Path) -> io::Result<()> {
    // Both are tried. A folder of that name stays.
    let remove = |path: &Path| if path.is_dir() { Ok(()) } else { absent(fs::remove_file(path)) };
    remove(file).and(remove(&unfinished(file)))
}

/// The file that [`replace`] writes and then renames.
fn unfinished(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// The outcome of removing a file that may be absent.
fn absent(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
