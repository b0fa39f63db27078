//! States by their keys, bounded in number and age.
//!
//! Engines restart under new epochs and policies come and go for as long as the process lives: what nobody has
//! asked for in a long time is let go, and what was asked for longest ago makes room where there is none.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use crate::units::Tick;

/// A map from keys to states that are made when they are asked for first.
#[derive(Debug)]
pub struct Shelf<K, V> {
    /// Each with when it was asked for last.
    entries: HashMap<K, (V, Tick)>,
    most: usize,
    oldest: Duration,
}

impl<K: Clone + Eq + Hash, V: Default> Shelf<K, V> {
    /// No more than `most` states (at least one); whatever was not asked for during `oldest` may go.
    pub fn new(most: usize, oldest: Duration) -> Self {
        Self { entries: HashMap::new(), most: most.max(1), oldest }
    }

    /// The state of a key; a new one if there is none.
    pub fn get(&mut self, key: &K, now: Tick) -> &mut V {
        if !self.entries.contains_key(key) {
            self.make_room(now);
        }
        let (value, asked) = self.entries.entry(key.clone()).or_default();
        *asked = now;
        value
    }

    /// The state of a key if there is one. Only looking does not keep it.
    pub fn look(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|(value, _)| value)
    }

    /// Every state with its key, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.entries.iter().map(|(key, (value, _))| (key, value))
    }

    /// How many states are kept.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn make_room(&mut self, now: Tick) {
        self.entries.retain(|_, (_, asked)| now - *asked < self.oldest);
        while self.entries.len() >= self.most {
            let longest = self.entries.iter().min_by_key(|(_, (_, asked))| *asked);
            let Some(key) = longest.map(|(key, _)| key.clone()) else { return };
            self.entries.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_hours(1);

    fn at(minutes: u64) -> Tick {
        Tick(minutes * 60_000_000)
    }

    #[test]
    fn what_was_asked_for_longest_ago_makes_room() {
        let mut shelf: Shelf<u32, u32> = Shelf::new(2, HOUR);
        *shelf.get(&1, at(0)) = 10;
        *shelf.get(&2, at(1)) = 20;
        assert_eq!(*shelf.get(&1, at(2)), 10);
        shelf.get(&3, at(3));
        assert_eq!((shelf.len(), *shelf.get(&1, at(4)), *shelf.get(&2, at(5))), (2, 10, 0));
    }

    #[test]
    fn what_nobody_asks_for_goes_when_something_new_comes() {
        let mut shelf: Shelf<u32, u32> = Shelf::new(100, HOUR);
        (1..=50).for_each(|key| *shelf.get(&key, at(0)) = key);
        *shelf.get(&7, at(59)) += 1;
        shelf.get(&51, at(60));
        assert_eq!((shelf.len(), *shelf.get(&7, at(61))), (2, 8));
        assert_eq!(*shelf.get(&7, at(1_000)), 8, "rest alone forgets nothing");
    }
}
