//! A map of states, bounded in number and age.
//!
//! Engines restart and policies come and go for as long as the process lives:
//! states that were not requested for a long time are dropped, and the least recently requested one
//! makes room where there is none.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use crate::units::Tick;

/// A map from keys to states that are created at the first request.
#[derive(Debug)]
pub struct ExpiringMap<K, V> {
    /// Each with the time of its last request.
    entries: HashMap<K, (V, Tick)>,
    most: usize,
    oldest: Duration,
}

impl<K: Clone + Eq + Hash, V: Default> ExpiringMap<K, V> {
    /// At most `most` states (at least one); those not requested during `oldest` may be dropped.
    pub fn new(most: usize, oldest: Duration) -> Self {
        Self { entries: HashMap::new(), most: most.max(1), oldest }
    }

    /// The state of a key. If there is none, a default one is inserted; expired states then make
    /// room, and where that is not enough the least recently requested one.
    pub fn get(&mut self, key: &K, now: Tick) -> &mut V {
        if !self.entries.contains_key(key) {
            self.make_room(now);
        }
        let (value, used) = self.entries.entry(key.clone()).or_default();
        *used = now;
        value
    }

    /// The state of a key; `None` if there is none. Does not count as a request.
    pub fn look(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|(value, _)| value)
    }

    /// Every state with its key, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.entries.iter().map(|(key, (value, _))| (key, value))
    }

    /// Number of states.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there are no states.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn make_room(&mut self, now: Tick) {
        self.entries.retain(|_, (_, used)| now - *used < self.oldest);
        while self.entries.len() >= self.most {
            let longest = self.entries.iter().min_by_key(|(_, (_, used))| *used);
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
    fn the_least_recently_requested_state_makes_room() {
        let mut map: ExpiringMap<u32, u32> = ExpiringMap::new(2, HOUR);
        *map.get(&1, at(0)) = 10;
        *map.get(&2, at(1)) = 20;
        assert_eq!(*map.get(&1, at(2)), 10);
        map.get(&3, at(3));
        assert_eq!((map.len(), *map.get(&1, at(4)), *map.get(&2, at(5))), (2, 10, 0));
    }

    #[test]
    fn unrequested_states_are_dropped_when_a_new_one_comes() {
        let mut map: ExpiringMap<u32, u32> = ExpiringMap::new(100, HOUR);
        (1..=50).for_each(|key| *map.get(&key, at(0)) = key);
        *map.get(&7, at(59)) += 1;
        map.get(&51, at(60));
        assert_eq!((map.len(), *map.get(&7, at(61))), (2, 8));
        assert_eq!(*map.get(&7, at(1_000)), 8, "idle time alone drops nothing");
    }
}
