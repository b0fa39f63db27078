//! Searches in arrays that no cache of the processor holds.
//!
//! What a search costs is what it waits for memory, some 100 ns a time, not what it compares. So an array of digests has
//! coarser copies of itself on top, each small enough to be read as a whole where it is read. And where every
//! entry lies somewhere else in a text, the places that the next three halvings may come to are asked for all at once.

use super::order::STRIDE;

/// Entries of a level for each of the next coarser one: two cache lines.
const FAN: usize = 16;
/// Places that are asked for at a time, and one.
const PARTS: usize = 8;

/// Numbers that never fall, and every [`FAN`]th of them, and every [`FAN`]th of those, until they are few.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Index {
    /// The numbers.
    keys: Box<[u64]>,
    /// The finest level first.
    coarser: Box<[Box<[u64]>]>,
}

impl Index {
    /// Takes numbers in order.
    pub fn new(keys: Box<[u64]>) -> Self {
        let mut coarser: Vec<Box<[u64]>> = Vec::new();
        while let Some(finest) = coarser.last().or(Some(&keys)).filter(|level| level.len() > FAN) {
            coarser.push(finest.iter().step_by(FAN).copied().collect());
        }
        Self { keys, coarser: coarser.into_boxed_slice() }
    }

    /// The numbers.
    pub fn keys(&self) -> &[u64] {
        &self.keys
    }

    /// How many numbers are less than `key`.
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

    /// Bytes on the heap.
    pub fn bytes(&self) -> usize {
        let levels: usize = self.coarser.iter().map(|level| size_of_val(level) + size_of_val(&**level)).sum();
        size_of_val(&*self.keys) + levels
    }
}

/// Number of steps, of at most `limit`, that hold before the first that does not: growing steps, then parts of the last. The
/// few that an index leaves open are divided at once. `touch` reads what `holds` is going to read.
pub(super) fn leading(limit: usize, touch: impl Fn(usize), holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut step) = (0, if limit > STRIDE { 1 } else { limit + 1 });
    while low + step <= limit && holds(low + step - 1) {
        low += step;
        step *= PARTS;
    }
    within(low, (low + step - 1).min(limit), touch, holds)
}

/// The first of the steps from `low` to `high` that does not hold; `high` if all do. Those that hold come first.
pub(super) fn within(
    mut low: usize,
    mut high: usize,
    touch: impl Fn(usize),
    holds: impl Fn(usize) -> bool,
) -> usize {
    while low < high {
        let (from, len) = (low, high - low);
        let border = |part: usize| from + len * part / PARTS;
        (1..PARTS).for_each(|part| touch(border(part)));
        let (mut least, mut most) = (0, PARTS);
        while most - least > 1 {
            let part = least.midpoint(most);
            if holds(border(part)) {
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
        fn as_many_are_below_as_one_counts(
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
        fn steps_are_counted_up_to_the_first_that_does_not_hold(limit in 0_usize..700, first in 0_usize..720) {
            let touch = |step: usize| assert!(step < limit);
            prop_assert_eq!(leading(limit, touch, |step| step < first), first.min(limit));
            prop_assert_eq!(within(0, limit, touch, |step| step < first), first.min(limit));
        }
    }
}
