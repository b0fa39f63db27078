//! Lines by key: one that has no measurements begins as the nearest one that has.

use std::collections::BTreeMap;

use foretell_control::line::{Line, Moments};
use serde::{Deserialize, Serialize};

/// The key of a line.
pub(super) trait Key: Ord + Copy {
    /// Distance to another key; `None` if nothing can be concluded from one to the other.
    fn distance(self, other: Self) -> Option<usize>;
}

/// Lines by key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<(K, Line)>", into = "Vec<(K, Line)>")]
pub(super) struct Lines<K: Ord + Clone>(BTreeMap<K, Line>);

impl<K: Ord + Clone> From<Vec<(K, Line)>> for Lines<K> {
    fn from(lines: Vec<(K, Line)>) -> Self {
        Self(lines.into_iter().collect())
    }
}

impl<K: Ord + Clone> From<Lines<K>> for Vec<(K, Line)> {
    fn from(Lines(lines): Lines<K>) -> Self {
        lines.into_iter().collect()
    }
}

impl<K: Ord + Clone> Default for Lines<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Key> Lines<K> {
    /// The line of exactly this key.
    pub fn get(&self, key: K) -> Option<&Line> {
        self.0.get(&key)
    }

    /// The line of this key or of the nearest one (of two, the lower) that `counts`.
    pub fn nearest(&self, key: K, counts: impl Fn(&Line) -> bool) -> Option<(K, &Line)> {
        let known = self.0.iter().filter(|(_, line)| counts(line));
        let near = known.filter_map(|(&other, line)| Some((key.distance(other)?, other, line)));
        near.min_by_key(|(distance, ..)| *distance).map(|(_, other, line)| (other, line))
    }

    /// The line of this key, to be measured; begun by `begin` where there is none.
    pub fn of(&mut self, key: K, begin: impl FnOnce(&Self) -> Line) -> &mut Line {
        let line = self.0.remove(&key).unwrap_or_else(|| begin(self));
        self.0.entry(key).or_insert(line)
    }

    /// All lines.
    pub fn iter(&self) -> impl Iterator<Item = (K, &Line)> {
        self.0.iter().map(|(key, line)| (*key, line))
    }

    /// Makes the measurements of every line weigh this share of what they did.
    pub fn fade(&mut self, share: f64) {
        self.0.values_mut().for_each(|line| line.fade(share));
    }

    /// The local measurements, by key.
    pub fn local(&self) -> BTreeMap<K, Moments> {
        let measured = self.iter().filter(|(_, line)| line.local().weight > 1e-3);
        measured.map(|(key, line)| (key, *line.local())).collect()
    }

    /// Replaces the measurements of others; `begin`: the line of a key that has none.
    pub fn lend(&mut self, lent: &BTreeMap<K, Moments>, begin: impl Fn(K) -> Line) {
        for (&key, moments) in lent {
            self.of(key, |_| begin(key)).lend(*moments);
        }
        let gone = self.0.iter_mut().filter(|(key, _)| !lent.contains_key(key));
        gone.for_each(|(_, line)| line.lend(Moments::default()));
    }
}
