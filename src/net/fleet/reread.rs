//! Content of files that are replaced while the process runs: a mounted key, certificates that
//! expire.
//!
//! A task looks at the files once a second and reads them on a thread of the blocking pool: a
//! network file system that hangs blocks no event loop, which takes the last good value without
//! waiting.

use std::fmt;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::runtime::Handle;

/// Time between two looks at the files: a secret is in use about as soon as it is written, and a
/// look costs microseconds.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Identifies one content of the files: modification time and size of each, as far as they can be
/// read.
type Stamp = Vec<Option<(SystemTime, u64)>>;

/// The last good value that was read from some files.
pub(super) struct Reread<T>(Arc<Inner<T>>);

struct Inner<T> {
    files: Vec<PathBuf>,
    read: Box<dyn Fn() -> io::Result<T> + Send + Sync>,
    value: ArcSwap<T>,
    /// Used by the looking thread alone.
    looked: Mutex<Looked>,
}

/// Result of the last look.
struct Looked {
    /// The files whose value is in use.
    stamp: Stamp,
    /// The fault that was logged for the files as they are, if they cannot be used.
    fault: Option<String>,
}

impl<T: Send + Sync + 'static> Reread<T> {
    /// Reads the files, and repeats that whenever they change as long as this value and the runtime
    /// exist. Without a runtime (`check`) they are read once.
    ///
    /// # Errors
    /// That of `read`.
    pub(super) fn open<E: Into<io::Error>>(
        files: Vec<PathBuf>,
        read: impl Fn() -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Self, E> {
        let stamp = stamp(&files);
        let value = ArcSwap::from_pointee(read()?);
        let read = Box::new(move || read().map_err(Into::into));
        let inner = Arc::new(Inner { files, read, value, looked: Mutex::new(Looked { stamp, fault: None }) });
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(look_loop(Arc::downgrade(&inner)));
        }
        Ok(Self(inner))
    }

    /// The value of the files about a second ago at most. Files that cannot be used, such as a
    /// certificate whose key is not there yet, change nothing.
    pub(super) fn value(&self) -> Arc<T> {
        self.0.value.load_full()
    }
}

/// Names the files alone: their content must not be logged.
impl<T> fmt::Debug for Reread<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reread").field(&self.0.files).finish()
    }
}

async fn look_loop<T: Send + Sync + 'static>(inner: Weak<Inner<T>>) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let Some(inner) = inner.upgrade() else { return };
        if tokio::task::spawn_blocking(move || inner.look()).await.is_err() {
            return;
        }
    }
}

impl<T> Inner<T> {
    /// Reads the files if they have changed, or could not be used at the last look. A lasting fault
    /// is logged once.
    fn look(&self) {
        let mut looked = self.looked.lock();
        let stamp = stamp(&self.files);
        if stamp == looked.stamp {
            return;
        }
        let file = self.files.first().map(|file| file.display().to_string());
        match (self.read)() {
            Ok(value) => {
                self.value.store(Arc::new(value));
                *looked = Looked { stamp, fault: None };
                tracing::info!(file, "reloaded");
            }
            Err(error) => {
                let fault = Some(error.to_string());
                if looked.fault != fault {
                    tracing::warn!(file, %error, "it cannot be used, what was read last stays in use");
                }
                looked.fault = fault;
            }
        }
    }
}

fn stamp(files: &[PathBuf]) -> Stamp {
    let one = |file| fs::metadata(file).ok().and_then(|found| Some((found.modified().ok()?, found.len())));
    files.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A file's text, which is never "bad".
    fn text(file: &std::path::Path) -> io::Result<String> {
        let text = fs::read_to_string(file)?;
        if text == "bad" { Err(io::Error::other("it is bad")) } else { Ok(text) }
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_is_taken_and_what_cannot_be_used_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "one").unwrap();
        let file = path.clone();
        let kept = Reread::open(vec![path.clone()], move || text(&file)).unwrap();
        assert_eq!(*kept.value(), "one");
        let comes = async |wanted: &str| {
            for _ in 0..100 {
                tokio::time::sleep(LOOK_EVERY).await;
                if *kept.value() == wanted {
                    return;
                }
            }
            panic!("{} is not {wanted}", kept.value());
        };
        fs::write(&path, "second").unwrap();
        comes("second").await;
        fs::write(&path, "bad").unwrap();
        tokio::time::sleep(LOOK_EVERY * 3).await;
        assert_eq!(*kept.value(), "second");
        fs::remove_file(&path).unwrap();
        tokio::time::sleep(LOOK_EVERY * 3).await;
        assert_eq!(*kept.value(), "second");
        fs::write(&path, "third").unwrap();
        comes("third").await;
    }

    #[tokio::test]
    async fn files_that_hang_hold_up_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "one").unwrap();
        let (hanging, let_go) = mpsc::channel::<()>();
        let (first, let_go) = (Mutex::new(true), Mutex::new(let_go));
        let read = move || {
            if !std::mem::replace(&mut *first.lock(), false) {
                let _ = let_go.lock().recv();
            }
            Ok::<_, io::Error>("read")
        };
        let kept = Reread::open(vec![path.clone()], read).unwrap();
        fs::write(&path, "changed").unwrap();
        let (inner, looks) = (Arc::clone(&kept.0), Arc::clone(&kept.0));
        let look = tokio::task::spawn_blocking(move || inner.look());
        while looks.looked.try_lock().is_some() {
            tokio::task::yield_now().await;
        }
        assert_eq!(*kept.value(), "read");
        drop(hanging);
        look.await.unwrap();
    }

    #[test]
    fn without_a_runtime_it_is_read_once() {
        let kept = Reread::open(Vec::new(), || Ok::<_, io::Error>(7)).unwrap();
        assert_eq!(*kept.value(), 7);
        assert!(!format!("{kept:?}").contains('7'));
    }
}
