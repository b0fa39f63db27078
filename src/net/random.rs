//! Random seeds for sessions and for all that is learnt, which the pure crates receive, and random
//! numbers for the shell.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use foretell_core::units::SplitMix64;

/// A random seed of 53 bits: JSON readers that parse numbers as doubles read it exactly.
pub fn fresh_seed() -> u64 {
    RandomState::new().hash_one(0_u8) >> 11
}

/// SplitMix64 over a shared counter, at the cost of one atomic operation: only to spread load,
/// retries and samples.
#[derive(Debug)]
pub struct SharedSplitMix64(AtomicU64);

impl Default for SharedSplitMix64 {
    fn default() -> Self {
        Self::seeded(fresh_seed())
    }
}

impl SharedSplitMix64 {
    /// Gives the same numbers for the same seed.
    pub const fn seeded(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    /// 64 random bits.
    pub fn next_u64(&self) -> u64 {
        SplitMix64::mix(self.0.fetch_add(SplitMix64::STEP, Ordering::Relaxed))
    }

    /// A number in 0..1.
    pub fn fraction(&self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Two different numbers below `count`, which must be 2 or more.
    pub fn two(&self, count: usize) -> (usize, usize) {
        let bits = self.next_u64();
        let count = count as u64;
        let first = (bits >> 32) % count;
        let step = 1 + (bits & 0xffff_ffff) % (count - 1).max(1);
        (first as usize, ((first + step) % count) as usize)
    }
}
