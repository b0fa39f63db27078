//! The externally visible part of a replica's prefix cache: the number of cached prompt tokens.

use std::collections::HashMap;

use super::toy::Context;

/// Whole blocks, keyed by the hash of all tokens up to their end; evicted least recently used
/// first.
pub struct Cache {
    pub block: usize,
    pub capacity: usize,
    /// Time of the last use of each block.
    used: HashMap<u64, u64>,
    clock: u64,
}

impl Cache {
    /// `capacity` blocks of `block` tokens; with a block size of 0 nothing is cached.
    pub fn new(block: usize, capacity: usize) -> Self {
        Self { block, capacity, used: HashMap::new(), clock: 0 }
    }

    /// Number of cached tokens of the first `len`. The last token is always computed.
    pub fn cached(&mut self, context: &Context, len: usize, salt: u64) -> usize {
        if self.block == 0 {
            return 0;
        }
        self.clock += 1;
        let clock = self.clock;
        let mut touch = |n: &usize| {
            self.used.get_mut(&key(context, n * self.block, salt)).map(|used| *used = clock).is_some()
        };
        (1..=len.saturating_sub(1) / self.block).take_while(&mut touch).count() * self.block
    }

    /// Stores the first `len` tokens as computed.
    pub fn store(&mut self, context: &Context, len: usize, salt: u64) {
        if self.block == 0 {
            return;
        }
        self.clock += 1;
        for n in 1..=len / self.block {
            self.used.insert(key(context, n * self.block, salt), self.clock);
        }
        if self.used.len() > self.capacity {
            self.evict();
        }
    }

    fn evict(&mut self) {
        let mut ages: Vec<u64> = self.used.values().copied().collect();
        ages.sort_unstable();
        let oldest = ages[ages.len() - self.capacity];
        self.used.retain(|_, used| *used >= oldest);
    }

    pub fn clear(&mut self) {
        self.used.clear();
    }

    /// Share of used blocks.
    pub fn usage(&self) -> f64 {
        self.used.len() as f64 / self.capacity.max(1) as f64
    }
}

fn key(context: &Context, len: usize, salt: u64) -> u64 {
    context.hash(len) ^ salt.rotate_left(17)
}
