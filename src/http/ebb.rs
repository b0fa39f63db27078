//! Returns freed memory to the operating system.
//!
//! The allocator purges pages some time after they were freed, and only on a later allocation. A process that is idle
//! after a burst of large bodies, or of connections, makes none and would keep the memory; so this task makes one for it.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::http::connections::Connections;
use crate::http::memory::Memory;

/// Interval of the check. Longer than the allocator's delay before it purges.
const EVERY: Duration = Duration::from_secs(2);
/// A decrease since the last maximum that counts as an ebb, bytes.
const EBB: u64 = 4 << 20;
/// Size of the allocation that triggers a purge, bytes: large enough for pages of its own. It is never written to, so
/// it uses no memory.
const OCCASION: usize = 32 << 20;
/// Allocations after an ebb; each purges a part of what is due.
const OCCASIONS: u32 = 4;

/// What an open connection takes at least, bytes.
const CONNECTION: u64 = 4 << 10;

/// Watches the memory account and the number of open connections until `stop` is cancelled.
pub async fn follow(memory: Arc<Memory>, connections: Arc<Connections>, stop: CancellationToken) {
    let mut tide = Tide::default();
    loop {
        tokio::select! {
            () = tokio::time::sleep(EVERY) => {}
            () = stop.cancelled() => return,
        }
        let used = memory.used() + connections.open() as u64 * CONNECTION;
        if tide.ebbs(used) {
            drop(black_box(Vec::<u8>::with_capacity(OCCASION)));
        }
    }
}

/// Last maximum of the account, bytes, and the allocations still to make.
#[derive(Debug, Default)]
struct Tide {
    high: u64,
    left: u32,
}

impl Tide {
    fn ebbs(&mut self, used: u64) -> bool {
        if used + EBB <= self.high {
            (self.high, self.left) = (used, OCCASIONS);
        }
        self.high = self.high.max(used);
        let follows = self.left > 0;
        self.left = self.left.saturating_sub(1);
        follows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ebb_is_followed_for_a_while_and_a_flood_is_not() {
        let mut tide = Tide::default();
        let seen: Vec<bool> = [0, 9, 9, 8, 2, 2, 2, 2, 2, 3, 0].map(|mib: u64| tide.ebbs(mib << 20)).into();
        let mut wanted = vec![false; 11];
        wanted[4..8].fill(true);
        assert_eq!(seen, wanted);
        assert!(!tide.ebbs(0) && !tide.ebbs(50 << 20) && tide.ebbs(0));
    }
}
