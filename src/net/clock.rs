//! The clock of sessions and of all that is learnt: the pure crates receive its [`Tick`]s. And time
//! since 1970, for output and storage.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use foretell_core::units::Tick;

/// Time since 1970 of a moment.
pub fn unix_time(at: SystemTime) -> Duration {
    at.duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Time since 1970 now.
pub fn unix_now() -> Duration {
    unix_time(SystemTime::now())
}

/// Counts microseconds from the moment it was made. Follows tokio's clock, so paused tests pause it
/// too.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
}

impl Clock {
    pub fn start() -> Self {
        Self { origin: Instant::now() }
    }

    /// Microseconds from the clock's start to this moment.
    pub fn now(&self) -> Tick {
        Tick(u64::try_from(self.origin.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    /// The moment `ago` before now; the clock's start if that is later.
    pub fn before(&self, ago: Duration) -> Tick {
        Tick(self.now().0.saturating_sub(u64::try_from(ago.as_micros()).unwrap_or(u64::MAX)))
    }

    /// Time until `tick`; zero if it has passed.
    pub fn until(&self, tick: Tick) -> Duration {
        tick - self.now()
    }
}
