//! Event queue of the simulation, ordered by time; events at the same time stay in their order of
//! insertion.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use foretell_core::units::Tick;

/// Future events.
#[derive(Debug)]
pub struct Agenda<T> {
    heap: BinaryHeap<Reverse<AgendaEntry<T>>>,
    next: u64,
}

#[derive(Debug)]
struct AgendaEntry<T> {
    at: Tick,
    number: u64,
    what: T,
}

impl<T> Default for Agenda<T> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), next: 0 }
    }
}

impl<T> Agenda<T> {
    pub fn put(&mut self, at: Tick, what: T) {
        self.heap.push(Reverse(AgendaEntry { at, number: self.next, what }));
        self.next += 1;
    }

    /// Removes the next event and its time.
    pub fn take(&mut self) -> Option<(Tick, T)> {
        self.heap.pop().map(|Reverse(entry)| (entry.at, entry.what))
    }
}

impl<T> AgendaEntry<T> {
    fn key(&self) -> (Tick, u64) {
        (self.at, self.number)
    }
}

impl<T> PartialEq for AgendaEntry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<T> Eq for AgendaEntry<T> {}

impl<T> PartialOrd for AgendaEntry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for AgendaEntry<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_ordered_by_time_then_insertion() {
        let mut agenda = Agenda::default();
        for (at, what) in [(5, 'c'), (3, 'a'), (5, 'd'), (4, 'b')] {
            agenda.put(Tick(at), what);
        }
        let order: String = std::iter::from_fn(|| agenda.take()).map(|next| next.1).collect();
        assert_eq!(order, "abcd");
    }
}
