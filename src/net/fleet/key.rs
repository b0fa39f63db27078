//! A key in a file, such as a mounted secret that is replaced while the process runs.

use std::fs;
use std::io;
use std::path::Path;

use http::HeaderValue;

use super::reread::Reread;

/// `Authorization: Bearer` from a file.
#[derive(Debug)]
pub struct KeyFile(Reread<HeaderValue>);

impl KeyFile {
    /// Reads the file, now and whenever it changes.
    ///
    /// # Errors
    /// It cannot be read, is empty, or has characters that a header cannot carry.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = path.to_owned();
        Reread::open(vec![path.to_owned()], move || read(&file)).map(Self)
    }

    /// `Bearer` and the key in the file about a second ago. A file that has become unreadable
    /// changes nothing.
    pub fn value(&self) -> HeaderValue {
        HeaderValue::clone(&self.0.value())
    }
}

/// The secret in a file: its content without surrounding whitespace.
///
/// # Errors
/// It cannot be read, is only whitespace, or has characters other than visible ASCII and space
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

fn read(path: &Path) -> io::Result<HeaderValue> {
    let value = HeaderValue::try_from(format!("Bearer {}", secret(path)?));
    let mut value = value.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    value.set_sensitive(true);
    Ok(value)
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

    #[test]
    fn a_key_is_read_without_its_white_space_and_never_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        fs::write(&path, "one\n").unwrap();
        let key = KeyFile::open(&path).unwrap();
        assert_eq!(key.value(), "Bearer one");
        assert!(key.value().is_sensitive());
        assert!(!format!("{key:?}").contains("one"));
        for broken in ["", "a\u{7}b"] {
            fs::write(&path, broken).unwrap();
            assert!(KeyFile::open(&path).is_err());
        }
    }
}
