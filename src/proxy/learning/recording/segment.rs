//! The files of a recording: segments of records, encrypted if there is a key.
//!
//! A segment is a first line, with its version and encryption, and records.
//! Each is its length in bytes (32 bits, little endian), the complement of that, and that many
//! bytes: the record as JSON and the first eight bytes of its SHA-256, or 12 random bytes and the
//! record, sealed with them by AES-256-GCM. If the process ended while it wrote, or if the segment
//! is still being written, the last record or the first line is too short; it is skipped. Anything
//! else that does not fit is damage, reported by file and offset.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::Record;
use crate::learning::cipher::Cipher;
use foretell_config::regular;

const PLAIN: &[u8] = b"foretell records 1 plain\n";
const SEALED: &[u8] = b"foretell records 1 aes-256-gcm\n";
const SUFFIX: &str = "records";
/// Bytes of a checksum.
const CHECKED: usize = 8;
/// Maximum size of a record, bytes.
const MAX_RECORD: usize = 64 << 20;
/// Maximum size of a segment, bytes.
pub(super) const MAX_SEGMENT: u64 = 4 << 30;

#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// A file or folder cannot be read.
    #[error("{0}: {1}")]
    File(String, io::Error),
    /// It is no segment of this version.
    #[error("{0}: no recording of this version of Foretell")]
    Foreign(String),
    #[error("{0}: it is encrypted; name the key by --key-file")]
    Sealed(String),
    #[error("{0}: it is not encrypted, and was not written with this key")]
    Plain(String),
    /// A record was lost or changed, or was encrypted with another key.
    #[error("{file}: damaged at byte {offset}: {why}")]
    Damaged {
        file: String,
        /// Where its damaged record begins, bytes.
        offset: usize,
        why: &'static str,
    },
}

impl ReadError {
    pub(super) fn file(path: &Path, error: io::Error) -> Self {
        Self::File(path.display().to_string(), error)
    }
}

/// The records of a segment.
#[derive(Debug)]
pub struct Contents {
    /// Complete records, oldest first.
    pub records: Vec<Record>,
    /// Offset of a last record, or first line, that is incomplete, bytes.
    pub cut: Option<usize>,
}

/// The first line of a segment.
pub(super) fn head(sealed: bool) -> &'static [u8] {
    if sealed { SEALED } else { PLAIN }
}

/// The name of a segment that begins now; names are in order of time.
pub(super) fn name(now: Duration, random: u64) -> String {
    format!("{:013}-{random:014x}.{SUFFIX}", now.as_millis())
}

/// The segments of a recording, oldest first.
///
/// # Errors
/// The folder cannot be read.
pub fn list(dir: &Path) -> io::Result<Vec<PathBuf>> {
    named(dir, &format!(".{SUFFIX}"))
}

/// Files of a purge that was ended.
pub(super) fn leftovers(dir: &Path) -> io::Result<Vec<PathBuf>> {
    named(dir, &format!(".{SUFFIX}.new"))
}

fn named(dir: &Path, suffix: &str) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.to_string_lossy().ends_with(suffix) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// A record's payload as it is written.
pub(super) fn frame(payload: &[u8], cipher: Option<&Cipher>) -> io::Result<Vec<u8>> {
    let body = match cipher {
        Some(cipher) => cipher.seal(payload, SEALED)?,
        None => [payload, &checksum(payload)].concat(),
    };
    let too_large = || io::Error::new(io::ErrorKind::InvalidInput, "a record of more than 64 MiB");
    if body.len() > MAX_RECORD {
        return Err(too_large());
    }
    let len = u32::try_from(body.len()).map_err(|_| too_large())?;
    Ok([&len.to_le_bytes()[..], &(!len).to_le_bytes(), &body].concat())
}

/// The records of a segment.
///
/// # Errors
/// See [`ReadError`].
pub fn read(path: &Path, cipher: Option<&Cipher>) -> Result<Contents, ReadError> {
    let file = || path.display().to_string();
    let (bytes, _) = regular::read(path, MAX_SEGMENT).map_err(|error| ReadError::file(path, error))?;
    let mut rest = match (bytes.strip_prefix(PLAIN), bytes.strip_prefix(SEALED), cipher) {
        (Some(rest), _, None) | (_, Some(rest), Some(_)) => rest,
        (Some(_), ..) => return Err(ReadError::Plain(file())),
        (_, Some(_), _) => return Err(ReadError::Sealed(file())),
        _ if PLAIN.starts_with(&bytes) || SEALED.starts_with(&bytes) => {
            return Ok(Contents { records: Vec::new(), cut: (!bytes.is_empty()).then_some(0) });
        }
        _ => return Err(ReadError::Foreign(file())),
    };
    let (mut records, mut cut) = (Vec::new(), None);
    while !rest.is_empty() {
        let offset = bytes.len() - rest.len();
        let damaged = |why| ReadError::Damaged { file: file(), offset, why };
        let Some((&[a, b, c, d, complement @ ..], behind)) = rest.split_first_chunk::<8>() else {
            cut = Some(offset);
            break;
        };
        let len = u32::from_le_bytes([a, b, c, d]);
        if !len != u32::from_le_bytes(complement) {
            return Err(damaged("no length of a record"));
        }
        let Some((body, behind)) = behind.split_at_checked(len as usize) else {
            cut = Some(offset);
            break;
        };
        let payload = match cipher {
            Some(cipher) => cipher
                .open(body, SEALED)
                .ok_or_else(|| damaged("it does not decrypt: another key, or damage"))?,
            None => checked(body).ok_or_else(|| damaged("its checksum is not that of its content"))?,
        };
        records.push(serde_json::from_slice(&payload).map_err(|_| damaged("no record"))?);
        rest = behind;
    }
    Ok(Contents { records, cut })
}

fn checked(body: &[u8]) -> Option<Vec<u8>> {
    let (payload, sum) = body.split_at_checked(body.len().checked_sub(CHECKED)?)?;
    (checksum(payload) == *sum).then(|| payload.to_vec())
}

fn checksum(payload: &[u8]) -> [u8; CHECKED] {
    Sha256::digest(payload).first_chunk().copied().unwrap_or_default()
}
