//! What was learnt, carried over a restart: a file that is written now and then and read at the start.
//!
//! It holds times, counts and names of engines and models; never a text. A file that cannot be read is said and left, and
//! everything is learnt anew: a snapshot is a convenience.

use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Driver;
use crate::config::regular;
use crate::control::Control;
use crate::fleet::identity::Epoch;
use crate::http::drain::Lifecycle;

/// The version of the file: 2 since what is learnt of drafters is learnt of each model apart.
const VERSION: u32 = 2;
/// How often it is written.
const EVERY: Duration = Duration::from_mins(1);

/// Largest file that is read, bytes: that of all epochs is a few megabytes.
const MAX_BYTES: u64 = 64 << 20;

/// The file.
#[derive(Serialize, Deserialize)]
struct Snapshot {
    version: u32,
    /// Unix seconds.
    saved: u64,
    epochs: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    epoch: Epoch,
    learnt: Value,
}

/// Why a snapshot cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The file cannot be read or written.
    #[error("{0}")]
    File(#[from] io::Error),
    /// It is no snapshot.
    #[error("no snapshot: {0}")]
    Unreadable(#[from] serde_json::Error),
    /// It was written by another version.
    #[error("a snapshot of version {found}, this is version {own}")]
    Version {
        /// That of the file.
        found: u32,
        /// That which is read here.
        own: u32,
    },
    /// Something of it was lost or changed.
    #[error("it is damaged: its checksum is not that of its content")]
    Damaged,
    /// What was to write or to read it has ended.
    #[error("the memory has stopped")]
    Stopped,
}

impl Driver {
    /// Writes what has been learnt. The file is whole at every moment. An epoch that has an infinite figure is left out, and
    /// learnt anew.
    ///
    /// # Errors
    /// See [`SnapshotError`].
    pub fn save(&self, file: &Path) -> Result<(), SnapshotError> {
        let now = self.inner.clock.now();
        let known: Vec<(Epoch, Arc<Control>)> = {
            let controls = self.inner.controls.lock();
            controls.iter().map(|(epoch, control)| (epoch.clone(), Arc::clone(control))).collect()
        };
        let entry = |(epoch, control): (Epoch, Arc<Control>)| match control.save(now) {
            Ok(learnt) => Some(Entry { epoch, learnt }),
            Err(error) => {
                tracing::warn!(replica = epoch.replica, model = epoch.model, %error, "what was learnt is dropped");
                control.forget();
                None
            }
        };
        let epochs = known.into_iter().filter_map(entry).collect();
        let snapshot = Snapshot { version: VERSION, saved: unix(), epochs };
        Ok(replace(file, &[&serde_json::to_vec(&snapshot)?])?)
    }

    /// Takes what was written; returns how many epochs that is. None if there is no file. What cannot be read of an epoch is
    /// learnt anew.
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
            return Err(SnapshotError::Version { found: snapshot.version, own: VERSION });
        }
        let rest = Duration::from_secs(unix().saturating_sub(snapshot.saved));
        let entry = |Entry { epoch, learnt }| match Control::restored(learnt, rest) {
            Ok(control) => Some((epoch, Arc::new(control))),
            Err(error) => {
                tracing::warn!(replica = epoch.replica, model = epoch.model, %error, "what was learnt is not read");
                None
            }
        };
        let known: Vec<_> = snapshot.epochs.into_iter().filter_map(entry).collect();
        let mut controls = self.inner.controls.lock();
        let now = self.inner.clock.now();
        for (epoch, control) in &known {
            *controls.get(epoch, now) = Arc::clone(control);
        }
        Ok(known.len())
    }

    /// Takes what was written, before the first request, and says what came of it.
    pub fn recall(&self, file: &Path) {
        let shown = file.display().to_string();
        match self.restore(file) {
            Ok(epochs) => tracing::info!(file = shown, epochs, "what was learnt before has been read"),
            Err(error) => tracing::warn!(file = shown, %error, "what was learnt before is lost"),
        }
    }

    /// Writes the file every minute, and once more when the process drains.
    pub async fn remember(self: Arc<Self>, file: PathBuf, life: Arc<Lifecycle>) {
        let to = file.clone();
        let save = move || self.save(&to);
        keep(save, EVERY, &file, "what was learnt cannot be written", &life).await;
    }
}

/// Saves every so often, and once more when the process drains. What stands in the way is said once, not every time.
pub(super) async fn keep(
    save: impl Fn() -> Result<(), SnapshotError> + Send + Sync + 'static,
    every: Duration,
    file: &Path,
    fault: &'static str,
    life: &Lifecycle,
) {
    let save = Arc::new(save);
    let mut failed = false;
    loop {
        let last = tokio::time::timeout(every, life.draining()).await.is_ok();
        let save = Arc::clone(&save);
        let saved = tokio::task::spawn_blocking(move || save()).await;
        let error = saved.ok().and_then(Result::err);
        if let Some(error) = error.as_ref().filter(|_| !failed) {
            tracing::warn!(file = %file.display(), %error, "{fault}");
        }
        failed = error.is_some();
        if last {
            return;
        }
    }
}

/// Reads a snapshot: a regular file that this process's user or root owns. Never waits for what is something else.
pub(super) fn read(file: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
    let (bytes, metadata) = regular::read(file, max_bytes)?;
    let (owner, own) = (metadata.uid(), rustix::process::geteuid().as_raw());
    if owner == own || owner == 0 {
        return Ok(bytes);
    }
    let message = format!("it belongs to user {owner}, and this process runs as user {own}");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
}

/// Writes a file that only its owner may read, so that it is whole at every moment: beside it first, as a file that was not
/// there before, whatever lies there. A device, FIFO or socket of that name is left alone.
pub(super) fn replace(file: &Path, pieces: &[&[u8]]) -> io::Result<()> {
    std::fs::metadata(file).map_or(Ok(()), |found| regular::check(&found))?;
    let mut beside = file.as_os_str().to_owned();
    beside.push(".new");
    match std::fs::remove_file(&beside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut to = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
    for piece in pieces {
        to.write_all(piece)?;
    }
    to.sync_all()?;
    std::fs::rename(&beside, file)
}

/// Seconds since 1970.
pub(super) fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
