//! What clients have given back goes back to the system too.
//!
//! The allocator purges pages a while after they were freed, and only on the occasion of further ones. A process that is
//! quiet after a burst of large bodies gives it no occasion, and would keep what they took; so it gets one.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::http::memory::Memory;

/// How often the account is looked at. Longer than the allocator waits before it purges.
const EVERY: Duration = Duration::from_secs(2);
/// So much less than at the last high is an ebb, bytes.
const EBB: u64 = 4 << 20;
/// Large enough to have pages of its own, bytes. It is never written to, so it costs no memory.
const OCCASION: usize = 32 << 20;
/// Each occasion purges a part of what is due.
const OCCASIONS: u32 = 4;

/// Follows `memory` until `stop`.
pub async fn follow(memory: Arc<Memory>, stop: CancellationToken) {
    let mut tide = Tide::default();
    loop {
        tokio::select! {
            () = tokio::time::sleep(EVERY) => {}
            () = stop.cancelled() => return,
        }
        if tide.ebbs(memory.used()) {
            drop(black_box(Vec::<u8>::with_capacity(OCCASION)));
        }
    }
}

/// How high the account stood, and for how long its ebb is still to be followed.
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
