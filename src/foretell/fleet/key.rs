//! A key in a file, such as a mounted secret that is replaced while the process runs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use http::HeaderValue;
use parking_lot::Mutex;
use tokio::time::Instant;

/// Minimum time between two checks of the file.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Identifies one content of a file.
type Stamp = (Option<SystemTime>, u64);

/// `Authorization: Bearer` from a file.
#[derive(Debug)]
pub struct KeyFile {
    path: PathBuf,
    kept: Mutex<Kept>,
}

struct Kept {
    value: HeaderValue,
    stamp: Stamp,
    looked: Instant,
}

/// Leaves out the key, which must not be logged.
impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kept").field("stamp", &self.stamp).finish_non_exhaustive()
    }
}

impl KeyFile {
    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be read, is empty, or holds characters that a header cannot carry.
    pub fn open(path: &Path) -> io::Result<Self> {
        let (value, stamp) = read(path)?;
        let kept = Mutex::new(Kept { value, stamp, looked: Instant::now() });
        Ok(Self { path: path.to_owned(), kept })
    }

    /// `Bearer` and the key that the file held at most a second ago. A file that has become
    /// unreadable changes nothing.
    pub fn value(&self) -> HeaderValue {
        let mut kept = self.kept.lock();
        if kept.looked.elapsed() >= LOOK_EVERY {
            kept.looked = Instant::now();
            self.look(&mut kept);
        }
        kept.value.clone()
    }

    fn look(&self, kept: &mut Kept) {
        let read = match fs::metadata(&self.path) {
            Ok(found) if stamp(&found) == kept.stamp => return,
            Ok(_) => read(&self.path),
            Err(error) => Err(error),
        };
        match read {
            Ok((value, stamp)) => (kept.value, kept.stamp) = (value, stamp),
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "the key file cannot be used, the last key stays in use");
            }
        }
    }
}

/// The secret in a file: its content without surrounding whitespace.
///
/// # Errors
/// It cannot be read, holds only whitespace, or has characters other than visible ASCII and space
/// (a byte order mark at its beginning is ignored).
pub fn secret(path: &Path) -> io::Result<String> {
    let text = fs::read_to_string(path)?;
    let key = text.strip_prefix('\u{feff}').unwrap_or(&text).trim();
    let invalid = |what: &'static str| io::Error::new(io::ErrorKind::InvalidData, what);
    if key.is_empty() {
        return Err(invalid("the file is empty"));
    }
    if !key.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ') {
        return Err(invalid("it has characters other than visible ASCII and space"));
    }
    Ok(key.to_owned())
}

/// Compares two secrets in a time that does not depend on where they differ. An empty `wanted`
/// equals none.
pub fn is_same(given: &[u8], wanted: &[u8]) -> bool {
    !wanted.is_empty()
        && given.len() == wanted.len()
        && given.iter().zip(wanted).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

fn stamp(found: &fs::Metadata) -> Stamp {
    (found.modified().ok(), found.len())
}

fn read(path: &Path) -> io::Result<(HeaderValue, Stamp)> {
    let stamp = stamp(&fs::metadata(path)?);
    let key = secret(path)?;
    let value = HeaderValue::try_from(format!("Bearer {key}"));
    let mut value = value.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    value.set_sensitive(true);
    Ok((value, stamp))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_matches_only_completely_and_an_empty_one_never() {
        assert!(is_same(b"abc", b"abc"));
        assert!(!is_same(b"abd", b"abc") && !is_same(b"ab", b"abc") && !is_same(b"", b"abc"));
        assert!(!is_same(b"", b""));
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_key_is_taken_within_a_second_and_an_unreadable_file_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        fs::write(&path, "one\n").unwrap();
        let key = KeyFile::open(&path).unwrap();
        assert_eq!(key.value(), "Bearer one");
        assert!(key.value().is_sensitive());
        fs::write(&path, "second").unwrap();
        assert_eq!(key.value(), "Bearer one", "it was looked at a moment ago");
        tokio::time::advance(LOOK_EVERY).await;
        assert_eq!(key.value(), "Bearer second");
        for broken in [Some(""), Some("a\u{7}b"), None] {
            match broken {
                Some(text) => fs::write(&path, text).unwrap(),
                None => fs::remove_file(&path).unwrap(),
            }
            tokio::time::advance(LOOK_EVERY).await;
            assert_eq!(key.value(), "Bearer second");
        }
        assert!(!format!("{key:?}").contains("second"));
        assert!(KeyFile::open(&path).is_err());
    }
}
