//! Requests in flight, in buckets: costs are learnt for each power of two of them.

use serde::{Deserialize, Serialize};

const NAMES: [&str; SIZES] = ["1", "2-3", "4-7", "8-15", "16-31", "32-63", "64-"];
/// Number of buckets.
pub const SIZES: usize = 7;

/// Bucket of the engine's requests in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ConcurrencyBucket(usize);

impl ConcurrencyBucket {
    /// The bucket of so many requests.
    pub fn of(requests: usize) -> Self {
        Self((requests.max(1).ilog2() as usize).min(SIZES - 1))
    }

    /// All of them, in rising order.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..SIZES).map(Self)
    }

    /// Its requests in flight.
    pub fn name(self) -> &'static str {
        NAMES.get(self.0).copied().unwrap_or_default()
    }

    /// Its index, below [`SIZES`].
    pub const fn index(self) -> usize {
        self.0
    }

    /// Buckets between this and another.
    pub const fn distance(self, other: Self) -> usize {
        self.0.abs_diff(other.0)
    }

    /// True if it is a bucket: those of others come from outside.
    pub const fn is_valid(self) -> bool {
        self.0 < SIZES
    }
}
