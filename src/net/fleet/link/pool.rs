//! The idle connections of one network thread to one backend, the youngest taken first.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Link;
use crate::fleet::health::Health;

/// The idle connections of one network thread to one backend.
///
/// It also counts that thread's calls: counters with a single writer cost next to nothing.
pub(in crate::fleet) struct Pool {
    idle: Mutex<Idle>,
    max_idle: Duration,
    pub(super) silence: Option<Duration>,
    in_flight: AtomicUsize,
    calls: AtomicU64,
    pub(super) health: Arc<Health>,
}

/// A call under way; counted until dropped.
pub(in crate::fleet) struct Busy(pub(super) Arc<Pool>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct Idle {
    /// Oldest first; the youngest is taken first.
    links: Vec<(Link, Instant)>,
    /// A sweep of the pool is running.
    swept: bool,
    /// Longest time that a connection was idle and still open; reduced once one was found closed
    /// sooner.
    survived: Duration,
}

impl Idle {
    /// Checks the oldest connection: records how long it has survived, or that the backend has
    /// closed it.
    fn look(&mut self) {
        while let Some((link, since)) = self.links.first_mut() {
            let age = since.elapsed();
            if link.is_free() {
                self.survived = self.survived.max(age);
                return;
            }
            self.closed(age);
            self.links.remove(0);
        }
    }

    /// Records that a connection was found closed after it had been idle for `age`.
    fn closed(&mut self, age: Duration) {
        if age < self.survived {
            self.survived = age / 2;
        }
    }

    /// The youngest connection, if it has not been idle for longer than `max_idle`.
    fn take(&mut self, max_idle: Duration) -> Option<Link> {
        loop {
            let (mut link, since) = self.links.pop_if(|(_, since)| since.elapsed() < max_idle)?;
            if link.is_free() {
                return Some(link);
            }
            self.closed(since.elapsed());
        }
    }
}

impl Pool {
    /// Closes connections that were idle for `max_idle`; an answer may be silent for `silence`,
    /// `None`: no limit.
    pub(in crate::fleet) fn new(max_idle: Duration, silence: Option<Duration>, health: Arc<Health>) -> Self {
        let (in_flight, calls) = (AtomicUsize::new(0), AtomicU64::new(0));
        Self { idle: Mutex::default(), max_idle, silence, in_flight, calls, health }
    }

    pub(in crate::fleet) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub(in crate::fleet) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Counts a call.
    pub(in crate::fleet) fn begin(self: &Arc<Self>) -> Busy {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.calls.fetch_add(1, Ordering::Relaxed);
        Busy(Arc::clone(self))
    }

    /// The youngest idle connection that is still alive.
    pub(in crate::fleet) fn take(&self) -> Option<Link> {
        self.idle.lock().take(self.max_idle)
    }

    /// As [`Self::take`], for a request that is not resent if the backend closes the connection
    /// at that moment: one that has been idle for less than half the time that others have
    /// survived.
    pub(in crate::fleet) async fn take_lasting(&self) -> Option<Link> {
        if self.idle.lock().links.is_empty() {
            return None;
        }
        // Meanwhile the event loop reads what has arrived, such as the end of a connection.
        tokio::task::yield_now().await;
        let mut idle = self.idle.lock();
        idle.look();
        let max_idle = idle.survived / 2;
        idle.take(max_idle)
    }

    pub(super) fn put(self: &Arc<Self>, link: Link) {
        let mut idle = self.idle.lock();
        idle.links.push((link, Instant::now()));
        if !idle.swept {
            idle.swept = true;
            tokio::spawn(sweep(Arc::downgrade(self), self.max_idle));
        }
    }

    /// Closes all idle connections.
    pub(in crate::fleet) fn clear(&self) {
        let idle = std::mem::take(&mut self.idle.lock().links);
        drop(idle);
    }

    /// Closes connections that have been idle for too long; returns false if none remains.
    fn expire(&self) -> bool {
        let mut idle = self.idle.lock();
        idle.look();
        let old = idle.links.partition_point(|(_, since)| since.elapsed() >= self.max_idle);
        let closed: Vec<_> = idle.links.drain(..old).collect();
        idle.swept = !idle.links.is_empty();
        let some_remain = idle.swept;
        drop(idle);
        drop(closed);
        some_remain
    }
}

/// Runs while there are idle connections.
async fn sweep(pool: Weak<Pool>, max_idle: Duration) {
    loop {
        tokio::time::sleep(max_idle / 2 + Duration::from_millis(1)).await;
        match pool.upgrade() {
            Some(pool) if pool.expire() => {}
            _ => return,
        }
    }
}
