//! How soon a replica is asked again who it is: often while it cannot be reached, seldom once it is known, and ever
//! more seldom where it is nothing that Foretell can help.

use std::time::Duration;

/// Pause before a replica that gave no answer is asked again: the first, and the longest.
const AWAY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));
/// Pause before a known replica is asked whether it is still the same.
const KNOWN: Duration = Duration::from_secs(5);
/// First pause before a replica that cannot verify is asked again.
const RELAYED: Duration = Duration::from_secs(5);
/// The longest such pause, where its address or its tokenizer is at fault.
const DOUBTED: Duration = Duration::from_mins(1);
/// The longest such pause, where the server can never verify.
const FOREIGN: Duration = Duration::from_mins(5);

/// The result of asking a replica who it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Settled {
    /// It is known.
    Known,
    /// It may be able to verify, but not as it is reached or configured now.
    Doubted,
    /// It cannot verify.
    Foreign,
    /// It gave no answer.
    Away,
}

/// The result and the pause of the last time; `None` at the start.
#[derive(Debug, Default)]
pub(super) struct Pace(Option<(Settled, Duration)>);

impl Pace {
    /// The pause until it is asked again. The same result again doubles it, up to the longest for that result.
    pub(super) fn after(&mut self, settled: Settled) -> Duration {
        let (first, most) = match settled {
            Settled::Known => (KNOWN, KNOWN),
            Settled::Doubted => (RELAYED, DOUBTED),
            Settled::Foreign => (RELAYED, FOREIGN),
            Settled::Away => AWAY,
        };
        let before = self.0.filter(|(before, _)| *before == settled);
        let pause = before.map_or(first, |(_, pause)| (pause * 2).min(most));
        self.0 = Some((settled, pause));
        pause
    }

    /// Starts over with the first pause: the replica was away and may have changed.
    pub(super) fn restart(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pauses(pace: &mut Pace, settled: Settled, times: usize) -> Vec<u128> {
        (0..times).map(|_| pace.after(settled).as_millis()).collect()
    }

    #[test]
    fn what_cannot_be_helped_is_asked_ever_more_seldom_up_to_five_minutes() {
        let mut pace = Pace::default();
        let seconds: Vec<u128> = pauses(&mut pace, Settled::Foreign, 8).iter().map(|ms| ms / 1000).collect();
        assert_eq!(seconds, [5, 10, 20, 40, 80, 160, 300, 300]);
        pace.restart();
        assert_eq!(pauses(&mut pace, Settled::Foreign, 2), [5_000, 10_000]);
        assert_eq!(pauses(&mut pace, Settled::Doubted, 6).last(), Some(&60_000));
    }

    #[test]
    fn one_that_is_away_is_looked_for_every_few_seconds_and_a_known_one_is_not_forgotten() {
        let mut pace = Pace::default();
        assert_eq!(pauses(&mut pace, Settled::Away, 6), [500, 1_000, 2_000, 4_000, 5_000, 5_000]);
        assert_eq!(pauses(&mut pace, Settled::Known, 3), [5_000; 3]);
        assert_eq!(pauses(&mut pace, Settled::Away, 1), [500]);
    }
}
