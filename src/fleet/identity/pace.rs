//! How soon a replica is asked again who it is: often while it cannot be reached, seldom once it is known, and ever more
//! seldom where it is nothing that Foretell can help.

use std::time::Duration;

/// How soon a replica that gave no answer is asked again, at first and at most.
const AWAY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));
/// How soon a known replica is asked whether it is still the same.
const KNOWN: Duration = Duration::from_secs(5);
/// How soon one that cannot verify is asked again, at first.
const RELAYED: Duration = Duration::from_secs(5);
/// And at most, where its address or its tokenizer is at fault.
const DOUBTED: Duration = Duration::from_mins(1);
/// And at most, where it is nothing that could verify.
const FOREIGN: Duration = Duration::from_mins(5);

/// What came of asking a replica who it is.
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

/// The pause that was made last, and after what.
#[derive(Debug, Default)]
pub(super) struct Pace(Option<(Settled, Duration)>);

impl Pace {
    /// The pause until it is asked again. The same answer again doubles it, up to what the answer allows.
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

    /// It was away and is back: everything may be different.
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
