//! Returns freed memory to the operating system.
//!
//! The allocator purges pages some time after they were freed, and only on a later allocation. A
//! process that is idle after a burst of large bodies, or of connections, makes none and would not
//! return the memory; so this task makes one.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::http::connections::Connections;
use crate::http::memory::Memory;

/// Interval of the check. Longer than the allocator's delay before it purges.
const EVERY: Duration = Duration::from_secs(2);
/// Minimum decrease since the last maximum that triggers a purge, bytes.
const PURGE: u64 = 4 << 20;
/// Size of the allocation that triggers a purge, bytes: large enough for separate pages. It is
/// never written to, so it uses no memory.
const PURGE_TRIGGER_BYTES: usize = 32 << 20;
/// Number of allocations after a decrease; each purges a part of the freed pages.
const PURGE_COUNT: u32 = 4;

/// Minimum memory of an open connection, bytes.
const CONNECTION: u64 = 4 << 10;

/// Watches the memory account and the number of open connections until `stop` is cancelled.
pub async fn follow(memory: Arc<Memory>, connections: Arc<Connections>, stop: CancellationToken) {
    let mut high_water = HighWater::default();
    loop {
        tokio::select! {
            () = tokio::time::sleep(EVERY) => {}
            () = stop.cancelled() => return,
        }
        let used = memory.used() + connections.open() as u64 * CONNECTION;
        if high_water.has_fallen(used) {
            drop(black_box(Vec::<u8>::with_capacity(PURGE_TRIGGER_BYTES)));
        }
    }
}

/// Last maximum of the memory in use, bytes, and the number of allocations still to make.
#[derive(Debug, Default)]
struct HighWater {
    high: u64,
    remaining: u32,
}

impl HighWater {
    fn has_fallen(&mut self, used: u64) -> bool {
        if used + PURGE <= self.high {
            self.high = used;
            self.remaining = PURGE_COUNT;
        }
        self.high = self.high.max(used);
        let follows = self.remaining > 0;
        self.remaining = self.remaining.saturating_sub(1);
        follows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decrease_triggers_purges_and_an_increase_does_not() {
        let mut high_water = HighWater::default();
        let seen: Vec<bool> =
            [0, 9, 9, 8, 2, 2, 2, 2, 2, 3, 0].map(|mib: u64| high_water.has_fallen(mib << 20)).into();
        let mut wanted = vec![false; 11];
        wanted[4..8].fill(true);
        assert_eq!(seen, wanted);
        assert!(!high_water.has_fallen(0) && !high_water.has_fallen(50 << 20) && high_water.has_fallen(0));
    }
}
