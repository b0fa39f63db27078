//! The two quantities every folder speaks: a token id and a moment.
//!
//! The pure folders read no clock. A moment comes to them as a [`Tick`], so a test can play hours in a
//! microsecond and a replay is the run itself.

use std::ops::Sub;
use std::time::Duration;

/// A token id of the target's vocabulary.
pub type TokenId = u32;

/// Microseconds since an origin that only the caller knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(pub u64);

impl Tick {
    /// The moment `duration` later; stays at the end of time instead of wrapping.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(micros))
    }

    /// Seconds since `earlier`, zero if `earlier` is later.
    #[must_use]
    pub fn seconds_since(self, earlier: Self) -> f64 {
        self.0.saturating_sub(earlier.0) as f64 * 1e-6
    }
}

impl Sub for Tick {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}
