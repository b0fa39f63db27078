//! Searches in arrays that exceed the CPU caches.
//!
//! The cost of a search is the memory latency, about 100 ns per miss, not the comparisons. So an
//! array of digests has coarser levels above it, and at each level only two cache lines are read.
//! And where every entry points to another part of a text, the entries that the next three halvings
//! may reach are prefetched together.

/// Entries of a level for each of the next coarser one: two cache lines.
const FAN: usize = 16;
/// Number of entries that are prefetched at a time, plus one.
const PARTS: usize = 8;
/// Entries of an order per entry of its index. The index costs one byte per token; after a search
/// in it, one cache line of the order is read, and the texts' memory latency is paid once.
pub const STRIDE: usize = 8;

/// Ascending numbers, with levels of every [`FAN`]th number of the level below, up to one of at
/// most [`FAN`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Index {
    keys: Box<[u64]>,
    /// The finest level first.
    coarser: Box<[Box<[u64]>]>,
}

impl Index {
    /// Takes ascending numbers.
    pub fn new(keys: Box<[u64]>) -> Self {
        let mut coarser: Vec<Box<[u64]>> = Vec::new();
        while let Some(finest) = coarser.last().or(Some(&keys)).filter(|level| level.len() > FAN) {
            coarser.push(finest.iter().step_by(FAN).copied().collect());
        }
        Self { keys, coarser: coarser.into_boxed_slice() }
    }

    pub fn keys(&self) -> &[u64] {
        &self.keys
    }

    /// Number of entries less than `key`.
    pub fn below(&self, key: u64) -> usize {
        let levels = self.coarser.iter().rev().chain([&self.keys]);
        let mut below: usize = 1;
        for level in levels {
            let Some(group) = below.checked_sub(1) else { return 0 };
            let rest = level.get(group * FAN..).unwrap_or_default();
            let group_of_level = rest.get(..FAN).unwrap_or(rest);
            below = group * FAN + group_of_level.iter().filter(|&&other| other < key).count();
        }
        below
    }

    pub fn bytes(&self) -> usize {
        let levels: usize = self.coarser.iter().map(|level| size_of_val(level) + size_of_val(&**level)).sum();
        size_of_val(&*self.keys) + levels
    }
}

/// Number of steps, of at most `limit`, that satisfy `predicate` before the first that does not:
/// exponential search, then division of the last stride. With at most [`STRIDE`] steps only the
/// division is done. `touch` reads what `predicate` is going to read.
pub(super) fn leading(limit: usize, touch: impl Fn(usize), predicate: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut step) = (0, if limit > STRIDE { 1 } else { limit + 1 });
    while low + step <= limit && predicate(low + step - 1) {
        low += step;
        step *= PARTS;
    }
    within(low, (low + step - 1).min(limit), touch, predicate)
}

/// The first of the steps from `low` to `high` that does not satisfy `predicate`; `high` if all do.
/// Steps that satisfy it precede those that do not.
pub(super) fn within(
    mut low: usize,
    mut high: usize,
    touch: impl Fn(usize),
    predicate: impl Fn(usize) -> bool,
) -> usize {
    while low < high {
        let (from, len) = (low, high - low);
        let border = |part: usize| from + len * part / PARTS;
        (1..PARTS).for_each(|part| touch(border(part)));
        let (mut least, mut most) = (0, PARTS);
        while most - least > 1 {
            let part = least.midpoint(most);
            if predicate(border(part)) {
                (low, least) = (border(part) + 1, part);
            } else {
                (high, most) = (border(part), part);
            }
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn below_counts_the_smaller_numbers(
            keys in prop::collection::vec(0_u64..40, 0..600),
            wide in prop::collection::vec(any::<u64>(), 0..600),
            key in 0_u64..42,
        ) {
            for (mut keys, key) in [(keys, key), (wide.clone(), wide.first().copied().unwrap_or(key))] {
                keys.sort_unstable();
                let below = keys.partition_point(|&other| other < key);
                prop_assert_eq!(Index::new(keys.into()).below(key), below);
            }
        }

        #[test]
        fn steps_are_counted_up_to_the_first_that_fails(limit in 0_usize..700, first in 0_usize..720) {
            let touch = |step: usize| assert!(step < limit);
            prop_assert_eq!(leading(limit, touch, |step| step < first), first.min(limit));
            prop_assert_eq!(within(0, limit, touch, |step| step < first), first.min(limit));
        }
    }
}
