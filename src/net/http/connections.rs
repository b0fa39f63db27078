//! Limits the number of client connections and evicts idle ones when more clients arrive.
//!
//! A connection takes one file descriptor, and its request another one towards a backend, so there
//! are fewer connection slots than descriptors. Clients that arrive when every slot is taken wait
//! in the system's accept queue until one is free, and the connection that has been idle longest is
//! closed. So no accepted client goes unanswered for lack of descriptors.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::http::activity::Activity;
use crate::http::head::Refusal;

/// File descriptors reserved for other uses: listeners, event queues, logs, the admin listener,
/// probes of backends.
const RESERVED: u64 = 64;
/// Minimum number of slots, regardless of limits.
const MIN_SLOTS: usize = 8;
/// A connection that has been idle this long may be evicted.
const IDLE: Duration = Duration::from_millis(500);
/// Interval between two attempts to evict while no slot is free.
const RETRY_EVERY: Duration = Duration::from_millis(50);

/// Raises the process's soft limit of open files to the hard limit, and returns the number of
/// clients that fit below it.
pub fn max_clients() -> usize {
    let limit = getrlimit(Resource::Nofile);
    // If it cannot be raised, the present limit applies.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    getrlimit(Resource::Nofile).current.map_or(Semaphore::MAX_PERMITS, slots)
}

/// Client slots for this many descriptors: each client needs one for itself and one for a backend.
fn slots(descriptors: u64) -> usize {
    let slots = descriptors.saturating_sub(RESERVED) / 2;
    usize::try_from(slots).unwrap_or(usize::MAX).clamp(MIN_SLOTS, Semaphore::MAX_PERMITS)
}

/// The client connections of a set of listeners.
#[derive(Debug)]
pub struct Connections {
    limit: usize,
    free: Arc<Semaphore>,
    /// Limits concurrent requests to the number of connections: each needs a descriptor for its
    /// backend.
    requests: Arc<Semaphore>,
    open: Mutex<Open>,
    evicted: AtomicU64,
    failed: AtomicU64,
    refused: [AtomicU64; Refusal::ALL.len()],
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    stopped: bool,
    connections: HashMap<u64, Arc<Activity>>,
}

impl Connections {
    /// With `limit` slots, at least 1.
    #[must_use]
    pub fn new(limit: usize) -> Arc<Self> {
        let limit = limit.clamp(1, Semaphore::MAX_PERMITS);
        Arc::new(Self {
            limit,
            free: Arc::new(Semaphore::new(limit)),
            requests: Arc::new(Semaphore::new(limit)),
            open: Mutex::default(),
            evicted: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            refused: Default::default(),
        })
    }

    /// Number of slots.
    pub fn limit(&self) -> usize {
        self.limit
    }

    pub fn open(&self) -> usize {
        self.open.lock().connections.len()
    }

    /// Number of idle connections closed so far to free a slot.
    pub fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    /// Number of connections so far that could not be accepted.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Number of requests refused so far because of their head, by reason.
    pub fn refused(&self) -> impl Iterator<Item = (Refusal, u64)> {
        Refusal::ALL.into_iter().zip(self.refused.iter().map(|count| count.load(Ordering::Relaxed)))
    }

    /// Counts a request refused because of its head.
    pub fn refuse(&self, refusal: Refusal) {
        if let Some(count) = self.refused.get(refusal as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a connection that could not be accepted.
    pub fn fail(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    /// Stops every connection, also those to come: their listeners have stopped.
    pub fn stop(&self) {
        let mut open = self.open.lock();
        open.stopped = true;
        open.connections.values().for_each(|activity| activity.stop());
    }

    /// Cuts every connection.
    pub fn cut(&self) {
        self.open.lock().connections.values().for_each(|activity| activity.cut());
    }

    /// Waits until no client is connected.
    pub async fn none(&self) {
        while self.open() > 0 {
            tokio::time::sleep(RETRY_EVERY).await;
        }
    }

    /// Waits until one more request may be served; `None` is never returned while the listeners
    /// live.
    pub fn request(&self) -> impl Future<Output = Option<OwnedSemaphorePermit>> + Send + use<> {
        let requests = Arc::clone(&self.requests);
        async move { requests.acquire_owned().await.ok() }
    }

    /// Waits for a free slot; while none is free, idle connections are evicted.
    pub async fn room(&self) -> OwnedSemaphorePermit {
        loop {
            if let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() {
                return permit;
            }
            self.evict();
            let free = Arc::clone(&self.free).acquire_owned();
            if let Ok(Ok(permit)) = tokio::time::timeout(RETRY_EVERY, free).await {
                return permit;
            }
        }
    }

    /// Requests the end of the connection that has been idle longest, if it has been idle for at
    /// least `IDLE`.
    pub fn evict(&self) {
        let open = self.open.lock();
        let idle = open.connections.values().filter_map(|activity| Some((activity.idle_since()?, activity)));
        if let Some((since, activity)) = idle.min_by_key(|(since, _)| *since)
            && since.elapsed() >= IDLE
        {
            self.evicted.fetch_add(1, Ordering::Relaxed);
            activity.want_slot();
        }
    }

    /// Registers a new connection in the slot of `permit`.
    pub fn slot(self: &Arc<Self>, permit: OwnedSemaphorePermit) -> ConnectionSlot {
        let activity = Activity::begin();
        let mut open = self.open.lock();
        let number = open.next;
        open.next += 1;
        if open.stopped {
            activity.stop();
        }
        open.connections.insert(number, Arc::clone(&activity));
        drop(open);
        ConnectionSlot { connections: Arc::clone(self), number, activity, _permit: permit }
    }
}

/// The slot of one connection; freed when dropped.
#[derive(Debug)]
pub struct ConnectionSlot {
    connections: Arc<Connections>,
    number: u64,
    activity: Arc<Activity>,
    _permit: OwnedSemaphorePermit,
}

impl ConnectionSlot {
    pub fn activity(&self) -> &Arc<Activity> {
        &self.activity
    }

    /// The set of connections that it belongs to.
    pub fn connections(&self) -> &Arc<Connections> {
        &self.connections
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.connections.open.lock().connections.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use http::Version;

    use super::*;
    use tokio::time::Instant;

    #[test]
    fn each_client_has_two_descriptors_and_some_are_kept_back() {
        assert_eq!([0, 64, 256, 1024].map(slots), [MIN_SLOTS, MIN_SLOTS, 96, 480]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_idle_connection_is_evicted_and_busy_ones_stay() {
        let connections = Connections::new(3);
        let mut slots = Vec::new();
        for _ in 0..3 {
            slots.push(connections.slot(connections.room().await));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let busy = slots[0].activity().request(Version::HTTP_11);
        let waiting = tokio::spawn({
            let connections = Arc::clone(&connections);
            async move { connections.room().await }
        });
        tokio::time::sleep(RETRY_EVERY * 3).await;
        assert!(!waiting.is_finished());
        // The first is busy; the second has been idle for longer than the third.
        let bounds = crate::http::listen::Bounds::default();
        let sleep = tokio::time::sleep(Duration::ZERO);
        tokio::pin!(sleep);
        let why =
            std::future::poll_fn(|cx| slots[1].activity().poll_overdue(cx, &bounds, sleep.as_mut())).await;
        assert_eq!(why, crate::http::activity::Overdue::Idle);
        drop(slots.remove(1));
        drop(waiting.await.unwrap());
        assert_eq!((connections.open(), connections.limit()), (2, 3));
        drop((busy, slots));
        assert!(connections.evicted() >= 1 && connections.open() == 0);
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_ends_when_nobody_is_connected() {
        let connections = Connections::new(3);
        connections.none().await;
        let slot = connections.slot(connections.room().await);
        let begun = Instant::now();
        let leaving = async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            drop(slot);
        };
        tokio::join!(connections.none(), leaving);
        assert!(begun.elapsed() >= Duration::from_secs(5));
    }
}
