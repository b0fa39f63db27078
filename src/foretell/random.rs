//! Random seeds for sessions and for all that is learnt; the pure crates receive them.

use std::hash::{BuildHasher, RandomState};

/// A random seed of 53 bits: JSON readers that parse numbers as doubles keep it exactly.
pub fn fresh_seed() -> u64 {
    RandomState::new().hash_one(0_u8) >> 11
}
