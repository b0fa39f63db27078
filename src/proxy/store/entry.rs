//! The measurements of one sidecar as they are in the store: JSON, of an age that its reader takes
//! into account. The store is not trusted: impossible measurements are omitted from the sums.

use serde::{Deserialize, Serialize};

use crate::learning::shared::Statistics;
use crate::learning::snapshot::VERSION;

#[derive(Serialize, Deserialize)]
struct StoreEntry {
    version: u32,
    /// Unix seconds.
    saved: u64,
    learnt: Statistics,
}

/// Measurements up to `now`, Unix seconds; `None` if nothing was measured.
///
/// # Errors
/// They cannot be written as JSON.
pub fn encode(learnt: Statistics, now: u64) -> serde_json::Result<Option<Vec<u8>>> {
    if learnt.is_empty() {
        return Ok(None);
    }
    serde_json::to_vec(&StoreEntry { version: VERSION, saved: now, learnt }).map(Some)
}

/// Maximum bytes of an entry: anyone who writes to the store decides how long one is, and parsed
/// it takes ten times as much memory.
const MAX_BYTES: usize = 256 << 10;

/// The measurements of an entry, with their weights at `now`, Unix seconds; `None` if it is no
/// entry of this version, or longer than one can be.
pub fn decode(entry: &[u8], now: u64) -> Option<Statistics> {
    if entry.len() > MAX_BYTES {
        return None;
    }
    let StoreEntry { version, saved, mut learnt } = serde_json::from_slice(entry).ok()?;
    if version != VERSION {
        return None;
    }
    learnt.age(now.saturating_sub(saved) as f64);
    Some(learnt)
}
