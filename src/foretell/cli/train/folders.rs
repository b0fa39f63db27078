//! The folder of a new drafter, and the working folder next to it.

use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use foretell_config::trained::{self, Origin};
use foretell_net::clock::unix_now;

/// Maximum age of an interrupted training that is resumed.
const RESUME_LIMIT: Duration = Duration::from_hours(24);

/// The folders of a drafter that is being trained.
pub struct TrainingFolders {
    /// The drafter's folder, absolute.
    pub out: PathBuf,
    /// Folder with the checkpoint, readable by its owner only.
    pub work: PathBuf,
    /// Requests that ended before this time are trained on, Unix seconds. It stays the same when a
    /// training is resumed.
    pub until: u64,
}

impl TrainingFolders {
    /// Prepares the folders.
    ///
    /// # Errors
    /// The drafter's folder cannot be replaced when it is done, or a folder cannot be made.
    pub fn new(out: &Path) -> io::Result<Self> {
        // Without a slash at its end.
        let out: PathBuf = std::path::absolute(out)?.components().collect();
        let mut work = out.clone().into_os_string();
        work.push(".training");
        let work = PathBuf::from(work);
        replaceable(&out)?;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&work)?;
        let now = unix_now().as_secs();
        let folders = Self { until: now, out, work };
        if !folders.out.exists() && folders.former().exists() {
            fs::rename(folders.former(), &folders.out)?;
        }
        remove(&folders.former())?;
        let file = folders.work.join("until");
        let begun = fs::read_to_string(&file).ok().and_then(|text| text.trim().parse::<u64>().ok());
        let begun = begun.filter(|begun| now.saturating_sub(*begun) < RESUME_LIMIT.as_secs());
        if let Some(until) = begun
            && folders.checkpoint().exists()
        {
            return Ok(Self { until, ..folders });
        }
        remove(&folders.checkpoint())?;
        fs::write(file, now.to_string())?;
        Ok(folders)
    }

    /// The checkpoint of the trainer.
    fn checkpoint(&self) -> PathBuf {
        self.work.join("last.pt")
    }

    /// Folder in which the trainer puts the drafter.
    pub fn drafter(&self) -> PathBuf {
        self.work.join("drafter")
    }

    /// Moves the finished drafter, with its origin, to its folder in one step: no reader finds a
    /// part of it.
    pub fn put(&self, origin: &Origin) -> io::Result<()> {
        trained::write(&self.drafter(), origin)?;
        if self.out.exists() {
            fs::rename(&self.out, self.former())?;
        }
        fs::rename(self.drafter(), &self.out).inspect_err(|_| {
            let _ = fs::rename(self.former(), &self.out);
        })?;
        fs::remove_dir_all(&self.work)
    }

    /// The drafter that is replaced.
    fn former(&self) -> PathBuf {
        self.work.join("former")
    }
}

/// Refuses a folder that cannot be replaced in one step, or that is no drafter of this command.
fn replaceable(out: &Path) -> io::Result<()> {
    let refused = |reason: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    let Some(parent) = out.parent() else { return refused("it has no parent folder") };
    if env::current_dir().is_ok_and(|current| current.starts_with(out)) {
        return refused("it is the current folder, or holds it");
    }
    let Ok(metadata) = fs::metadata(out) else { return Ok(()) };
    if metadata.dev() != fs::metadata(parent)?.dev() {
        return refused("it is a mount point; name a folder in it");
    }
    if fs::read_dir(out)?.next().is_some() && trained::read(out)?.is_none() {
        return refused("it holds something else than a drafter of this command");
    }
    Ok(())
}

/// Removes a file or a folder, if it exists.
fn remove(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
    }
}
