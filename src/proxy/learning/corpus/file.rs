//! The file of texts: a snapshot of the corpus, which survives a restart.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::learning::cipher::hexadecimal;
use crate::learning::snapshot::{self, SnapshotError};
use foretell_core::draft::corpus::{Corpus, Key, Text};
use foretell_core::units::{Tick, TokenId};
use foretell_net::clock::unix_now;

const VERSION: u32 = 1;

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
pub(super) struct Line {
    pub model: String,
    pub vocabulary: String,
    pub tenant: Option<String>,
    pub owner: Option<String>,
    /// Time since its last use, seconds.
    pub age: u64,
    pub ids: Vec<TokenId>,
}

/// The snapshot of texts, next to the snapshot of costs and acceptance.
pub fn sibling(snapshot: &Path) -> PathBuf {
    let mut name = snapshot.as_os_str().to_owned();
    name.push(".texts");
    name.into()
}

/// Removes cleared texts from a snapshot, if there is one. If it cannot be rewritten (as on a full
/// disk) it is deleted: the next one has the texts that were not cleared.
pub(super) fn forget(file: &Path, memory: &Corpus, now: Tick) -> Result<(), SnapshotError> {
    if file.exists() {
        let Err(error) = write(file, memory, now) else { return Ok(()) };
        tracing::warn!(file = %file.display(), %error, "the snapshot of texts is removed: it cannot be written anew");
    }
    Ok(snapshot::remove(file).inspect_err(|error| {
        tracing::error!(file = %file.display(), %error, "cleared texts are still in the snapshot");
    })?)
}

/// Writes a snapshot. Its lines are made twice, for the checksum and for the file: together they
/// may take several times the memory of the texts.
pub(super) fn write(file: &Path, memory: &Corpus, now: Tick) -> Result<usize, SnapshotError> {
    let texts = memory.texts(now);
    let mut hash = Sha256::new();
    each_line(&texts, |line| {
        hash.update(line);
        Ok(())
    })?;
    let head = Head { version: VERSION, saved: unix_now().as_secs(), sha256: hexadecimal(&hash.finalize()) };
    snapshot::replace_with(file, |to| {
        serde_json::to_writer(&mut *to, &head)?;
        to.write_all(b"\n")?;
        each_line(&texts, |line| to.write_all(line))
    })?;
    Ok(texts.len())
}

/// Hands the lines of a snapshot over, one at a time.
fn each_line(texts: &[Text<'_>], mut take: impl FnMut(&[u8]) -> io::Result<()>) -> Result<(), SnapshotError> {
    for Text { key, owner, age, ids } in texts {
        let Key { model, vocabulary, tenant } = (*key).clone();
        let (owner, age, ids) = (owner.map(ToOwned::to_owned), age.as_secs(), ids.to_vec());
        let mut line = serde_json::to_vec(&Line { model, vocabulary, tenant, owner, age, ids })?;
        line.push(b'\n');
        take(&line)?;
    }
    Ok(())
}

/// The texts of a snapshot, with their ages as of now.
pub(super) fn read(file: &Path, max_bytes: u64) -> Result<Vec<Line>, SnapshotError> {
    let bytes = snapshot::read(file, max_bytes)?;
    let end = bytes.iter().position(|&byte| byte == b'\n').ok_or(SnapshotError::Damaged)?;
    let (head, body) = bytes.split_at(end);
    let body = body.get(1..).unwrap_or_default();
    let head: Head = serde_json::from_slice(head)?;
    if head.version != VERSION {
        return Err(SnapshotError::Version { found: head.version, supported: VERSION });
    }
    if hexadecimal(&Sha256::digest(body)) != head.sha256 {
        return Err(SnapshotError::Damaged);
    }
    let since = unix_now().as_secs().saturating_sub(head.saved);
    let lines = body.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    let aged = |line: &[u8]| {
        let mut line: Line = serde_json::from_slice(line)?;
        line.age = line.age.saturating_add(since);
        Ok(line)
    };
    lines.map(aged).collect()
}
