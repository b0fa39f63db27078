//! Reads a replica's load at an interval, and tracks the cache hits of verify rounds.
//!
//! Each replica has a task that requests the page, waits, and repeats, so a slow page is requested
//! rarely and never twice at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use http::{Request, StatusCode, Uri};
use tokio::time::Instant;

use super::Replica;
use super::load::Load;
use crate::http::body::full;
use crate::http::gather;
use foretell_engines::{self as dialect, Dialect};

/// Largest metrics page that is read, bytes.
const PAGE_BYTES: usize = 8 << 20;
/// Timeout of reading the page; a later answer would be out of date.
const WITHIN: Duration = Duration::from_secs(1);
/// Uncached rounds minus cached ones from which on several engines are assumed to answer.
const UNCACHED: u32 = 8;
/// Contexts of up to this many tokens plus two blocks may find nothing cached on a single engine,
/// too.
const MIN: usize = 64;

/// The verify requests that a replica is computing, and the cache hits of its rounds.
#[derive(Default)]
pub struct RoundsSeen {
    /// Sequences of verify requests under way.
    verifying: AtomicU32,
    /// Uncached rounds minus cached ones, at least 0.
    uncached: AtomicU32,
}

/// Sequences of a verify round under way; counted until dropped.
pub struct Verifying {
    rounds_seen: Arc<RoundsSeen>,
    sequences: u32,
}

impl Drop for Verifying {
    fn drop(&mut self) {
        self.rounds_seen.verifying.fetch_sub(self.sequences, Ordering::Relaxed);
    }
}

impl RoundsSeen {
    /// Counts a round of this many sequences as under way.
    pub fn verifying(self: &Arc<Self>, sequences: usize) -> Verifying {
        let sequences = u32::try_from(sequences).unwrap_or(u32::MAX);
        self.verifying.fetch_add(sequences, Ordering::Relaxed);
        Verifying { rounds_seen: Arc::clone(self), sequences }
    }

    /// Records that a round found `cached` of its `context` tokens cached. Only for rounds that
    /// were alone at the engine, as far as known: where many sessions share a cache, misses are
    /// normal.
    pub fn cached(&self, cached: usize, context: usize, block: usize) {
        if cached == 0 && context <= MIN + 2 * block {
            return;
        }
        // Where several engines take turns, about every second round finds something cached.
        let _ = self.uncached.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |uncached| {
            Some(if cached > 0 { uncached.saturating_sub(1) } else { uncached.saturating_add(1) })
        });
    }

    /// True if rounds mostly found nothing cached.
    pub fn finds_nothing_cached(&self) -> bool {
        self.uncached.load(Ordering::Relaxed) >= UNCACHED
    }

    /// Resets the count of uncached rounds: the replica has been checked since.
    pub fn reset_uncached(&self) {
        self.uncached.store(0, Ordering::Relaxed);
    }

    /// Reads the load once and stores it. Returns true if it could be read.
    pub async fn take(&self, replica: &Replica, dialect: Dialect, path: &str) -> bool {
        let before = (self.verifying.load(Ordering::Relaxed), replica.in_flight());
        let looked = tokio::time::timeout(WITHIN, look(replica, dialect, path)).await;
        let Ok(Some(load)) = looked else { return false };
        let verifying = before.0.max(self.verifying.load(Ordering::Relaxed));
        let calls = u32::try_from(before.1.max(replica.in_flight())).unwrap_or(u32::MAX);
        let dialect::Load { running, waiting, kv_usage, limit, age } = load;
        let Some(at) = Instant::now().checked_sub(age) else { return false };
        replica.set_load(Load { running, waiting, kv_usage, limit, verifying, calls, at });
        true
    }
}

/// Reads the load page at `path`; `None` if it cannot be fetched or parsed.
pub async fn look(replica: &Replica, dialect: Dialect, path: &str) -> Option<dialect::Load> {
    let mut request = Request::new(full(""));
    *request.uri_mut() = path.parse::<Uri>().ok()?;
    let response = replica.send_internal(request).await.ok()?;
    if response.status() != StatusCode::OK {
        return None;
    }
    let body = gather::read_all(response.into_body(), PAGE_BYTES).await.ok()?;
    dialect.codec().load(std::str::from_utf8(&body).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_many_uncached_rounds_raise_doubt() {
        let rounds_seen = RoundsSeen::default();
        (0..7).for_each(|_| rounds_seen.cached(0, 500, 16));
        assert!(!rounds_seen.finds_nothing_cached());
        rounds_seen.cached(400, 500, 16);
        rounds_seen.cached(0, 500, 16);
        assert!(!rounds_seen.finds_nothing_cached());
        (0..20).for_each(|_| rounds_seen.cached(0, 90, 16));
        assert!(!rounds_seen.finds_nothing_cached(), "short contexts have no whole blocks behind them");
        rounds_seen.cached(0, 500, 16);
        assert!(rounds_seen.finds_nothing_cached());
        rounds_seen.reset_uncached();
        assert!(!rounds_seen.finds_nothing_cached());
    }
}
