//! Intervals of recognising a replica: short while it is unreachable, longer once it is known, and
//! growing where Foretell cannot speculate; and of its probes.

use std::time::Duration;

use tokio::time::Instant;

use crate::fleet::identity::EngineStart;

/// Pause before a replica that did not answer is retried: the first, and the longest.
const AWAY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));
/// Pause before a known replica is checked for being the same.
const KNOWN: Duration = Duration::from_secs(5);
/// First pause before a replica that cannot verify is retried.
const PASSTHROUGH: Duration = Duration::from_secs(5);
/// The longest such pause, where its address or its tokenizer is at fault.
const DOUBTED: Duration = Duration::from_mins(1);
/// The longest such pause, where the server can never verify.
const FOREIGN: Duration = Duration::from_mins(5);

/// Pause before a server at which no verification method paid is reprobed: the first, and the
/// longest.
pub(super) const REPROBE: (Duration, Duration) = (Duration::from_mins(5), Duration::from_hours(1));

/// The result of recognising a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Settled {
    Known,
    /// It may be able to verify, but not with its current address or configuration.
    Doubted,
    /// It cannot verify.
    Foreign,
    /// It did not answer.
    Away,
}

/// The last result and pause; `None` at the start.
#[derive(Debug, Default)]
pub(super) struct Pace(Option<(Settled, Duration)>);

impl Pace {
    /// The pause until the next attempt. A repeated result doubles it, up to the longest for that
    /// result.
    pub(super) fn after(&mut self, settled: Settled) -> Duration {
        let (first, longest) = match settled {
            Settled::Known => (KNOWN, KNOWN),
            Settled::Doubted => (PASSTHROUGH, DOUBTED),
            Settled::Foreign => (PASSTHROUGH, FOREIGN),
            Settled::Away => AWAY,
        };
        let pause = match self.0 {
            Some((before, pause)) if before == settled => (pause * 2).min(longest),
            _ => first,
        };
        self.0 = Some((settled, pause));
        pause
    }

    /// Restarts with the first pause: the replica was away and may have changed.
    pub(super) fn restart(&mut self) {
        self.0 = None;
    }
}

/// The last probe of a replica, and when the next is due.
#[derive(Default)]
pub(super) struct LastProbe {
    engine_start: Option<EngineStart>,
    at: Option<Instant>,
    /// Pause before the next probe, where no verification method paid; `None` elsewhere.
    pause: Option<Duration>,
}

impl LastProbe {
    pub(super) fn is_older(&self, than: Duration) -> bool {
        self.at.is_none_or(|at| at.elapsed() >= than)
    }

    pub(super) fn is_due(&self, engine_start: &EngineStart) -> bool {
        self.engine_start.as_ref() != Some(engine_start)
            || self.pause.is_some_and(|pause| self.is_older(pause))
    }

    pub(super) fn done(&mut self, engine_start: &EngineStart, nothing_pays: bool) {
        self.pause = match self.pause {
            _ if !nothing_pays => None,
            Some(pause) if self.engine_start.as_ref() == Some(engine_start) => {
                Some((pause * 2).min(REPROBE.1))
            }
            _ => Some(REPROBE.0),
        };
        self.engine_start = Some(engine_start.clone());
        self.at = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pauses(pace: &mut Pace, settled: Settled, times: usize) -> Vec<u128> {
        (0..times).map(|_| pace.after(settled).as_millis()).collect()
    }

    #[test]
    fn a_foreign_server_is_tried_at_growing_intervals_up_to_five_minutes() {
        let mut pace = Pace::default();
        let seconds: Vec<u128> = pauses(&mut pace, Settled::Foreign, 8).iter().map(|ms| ms / 1000).collect();
        assert_eq!(seconds, [5, 10, 20, 40, 80, 160, 300, 300]);
        pace.restart();
        assert_eq!(pauses(&mut pace, Settled::Foreign, 2), [5_000, 10_000]);
        assert_eq!(pauses(&mut pace, Settled::Doubted, 6).last(), Some(&60_000));
    }

    #[test]
    fn an_absent_replica_and_a_known_one_are_tried_every_few_seconds() {
        let mut pace = Pace::default();
        assert_eq!(pauses(&mut pace, Settled::Away, 6), [500, 1_000, 2_000, 4_000, 5_000, 5_000]);
        assert_eq!(pauses(&mut pace, Settled::Known, 3), [5_000; 3]);
        assert_eq!(pauses(&mut pace, Settled::Away, 1), [500]);
    }
}
