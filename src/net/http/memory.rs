//! One limit on the memory that clients can make the process use.
//!
//! Bodies being read, copies for a retry, sessions and their output: each reserves its bytes here
//! before using them and returns them when dropped. This module only reports that memory is short;
//! the caller decides the consequence.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;

/// Granularity with which a reservation follows a changing size, bytes.
const STEP: u64 = 16 << 10;

/// Bytes in use, and the limit (`limits.memory`).
#[derive(Debug)]
pub struct Memory {
    limit: u64,
    used: AtomicU64,
}

/// Share of the limit in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Less than the limit.
    Enough,
    /// At least the limit: every request that can be passed through without being read is.
    Short,
    /// At least twice the limit.
    Exhausted,
}

impl Memory {
    /// A limit of `limit` bytes with nothing in use.
    #[must_use]
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicU64::new(0) })
    }

    /// The limit, bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The share of the limit in use.
    pub fn level(&self) -> Level {
        match self.used() {
            used if used < self.limit => Level::Enough,
            used if used < self.limit.saturating_mul(2) => Level::Short,
            _ => Level::Exhausted,
        }
    }

    /// Reserves `bytes` even above the limit: for memory that is already used or cannot be avoided.
    #[must_use]
    pub fn take(self: &Arc<Self>, bytes: u64) -> Reservation {
        self.used.fetch_add(bytes, Ordering::Relaxed);
        Reservation { memory: Arc::clone(self), bytes }
    }

    /// Reserves `bytes` if they fit below the limit.
    pub fn try_take(self: &Arc<Self>, bytes: u64) -> Option<Reservation> {
        let mut reservation = self.take(0);
        reservation.try_grow(bytes).then_some(reservation)
    }
}

/// Reserved bytes; returned when dropped.
#[derive(Debug)]
pub struct Reservation {
    memory: Arc<Memory>,
    bytes: u64,
}

impl Reservation {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reserves `bytes` more if they fit below the limit; returns true if it did.
    #[must_use]
    pub fn try_grow(&mut self, bytes: u64) -> bool {
        let fits = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.memory.limit);
        let grown = self.memory.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok();
        self.bytes += if grown { bytes } else { 0 };
        grown
    }

    /// Changes the reservation to `bytes`, even above the limit. A change of less than 16 KiB is
    /// ignored.
    pub fn follow(&mut self, bytes: u64) {
        if bytes.abs_diff(self.bytes) >= STEP {
            self.memory.used.fetch_add(bytes, Ordering::Relaxed);
            self.memory.used.fetch_sub(self.bytes, Ordering::Relaxed);
            self.bytes = bytes;
        }
    }

    /// Moves `bytes` of it, or all if it has fewer, to a new reservation.
    #[must_use]
    pub fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self { memory: Arc::clone(&self.memory), bytes }
    }

    /// Ties the reservation to `bytes`: it is returned when their last copy is dropped.
    pub fn over(self, bytes: impl AsRef<[u8]> + Send + 'static) -> Bytes {
        Bytes::from_owner(Reserved { bytes, _reservation: self })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.memory.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

struct Reserved<B> {
    bytes: B,
    _reservation: Reservation,
}

impl<B: AsRef<[u8]>> AsRef<[u8]> for Reserved<B> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_bytes_are_returned_with_the_last_copy() {
        let memory = Memory::new(100);
        let mut reservation = memory.try_take(60).unwrap();
        assert!(memory.try_take(41).is_none() && !reservation.try_grow(41));
        assert_eq!(memory.used(), 60);
        let bytes = reservation.split(20).over(vec![1_u8; 20]);
        assert_eq!((reservation.bytes(), memory.used()), (40, 60));
        drop(reservation);
        let (copy, part) = (bytes.clone(), bytes.slice(3..5));
        drop((bytes, copy));
        assert_eq!((memory.used(), &part[..]), (20, &[1, 1][..]));
        drop(part);
        assert_eq!(memory.used(), 0);
    }

    #[test]
    fn there_are_three_levels_and_unavoidable_memory_is_reserved_at_each() {
        let memory = Memory::new(100 << 10);
        let mut held = memory.take(99 << 10);
        assert_eq!(memory.level(), Level::Enough);
        // A change of less than a step is ignored.
        held.follow(101 << 10);
        assert_eq!(memory.level(), Level::Enough);
        held.follow(180 << 10);
        assert_eq!((memory.level(), memory.try_take(1).is_none()), (Level::Short, true));
        held.follow(200 << 10);
        assert_eq!(memory.level(), Level::Exhausted);
        held.follow(0);
        assert_eq!((memory.level(), memory.used()), (Level::Enough, 0));
    }
}
