//! Who asks, and when.

use super::source::Scripts;
use crate::units::Dice;

/// A value that changes at some moments: (seconds, value), by rising seconds; before the first it is zero.
#[derive(Clone, Debug, PartialEq)]
pub struct Ramp(pub Vec<(f64, f64)>);

impl Ramp {
    /// The same value at all times.
    pub fn flat(value: f64) -> Self {
        Self(vec![(0.0, value)])
    }

    /// The value at a moment.
    pub fn at(&self, seconds: f64) -> f64 {
        self.0.iter().rev().find(|step| step.0 <= seconds).map_or(0.0, |step| step.1)
    }
}

/// When requests of a stream arrive.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrivals {
    /// So many clients, each of which asks again as soon as it has its answer and has thought for so many seconds.
    Closed {
        /// How many.
        clients: Ramp,
        /// Seconds between an answer and the next question.
        think: f64,
    },
    /// Independent of the answers, so many a second on average.
    Poisson(Ramp),
}

/// Whether Foretell sees a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// It goes through Foretell, unless all goes direct.
    Ours,
    /// It goes to the engine by another way.
    Others,
}

/// One stream of requests.
#[derive(Clone, Debug)]
pub struct Stream {
    /// Whose they are.
    pub whose: Whose,
    /// When they arrive.
    pub arrivals: Arrivals,
    /// What they are, in turn.
    pub scripts: Scripts,
    /// Most requests; `None` if only the time ends it.
    pub requests: Option<usize>,
}

impl Stream {
    /// One client that asks everything once.
    pub fn one_client(scripts: Scripts) -> Self {
        let requests = Some(scripts.len());
        let arrivals = Arrivals::Closed { clients: Ramp::flat(1.0), think: 0.0 };
        Self { whose: Whose::Ours, arrivals, scripts, requests }
    }

    /// The next arrival after `now`, by a Poisson process; `None` for a closed loop, and if none comes any more.
    pub fn next(&self, now: f64, dice: &mut Dice) -> Option<f64> {
        let Arrivals::Poisson(rates) = &self.arrivals else { return None };
        let mut from = now;
        // A stretch of constant rate forgets what was before it, so that the draw can begin anew with each.
        loop {
            let rate = rates.at(from);
            let change = rates.0.iter().map(|step| step.0).find(|&at| at > from);
            let gap = if rate > 0.0 { -(1.0 - dice.unit()).ln() / rate } else { f64::INFINITY };
            match change {
                Some(change) if from + gap > change => from = change,
                None if gap.is_infinite() => return None,
                _ => return Some(from + gap),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_follow_the_rate() {
        let arrivals = Arrivals::Poisson(Ramp(vec![(0.0, 2.0), (100.0, 0.0), (200.0, 20.0)]));
        let scripts: Scripts = Scripts::from([]);
        let stream = Stream { whose: Whose::Others, arrivals, scripts, requests: None };
        let (mut now, mut dice, mut by_hundred) = (0.0, Dice::new(4), [0; 3]);
        while let Some(next) = stream.next(now, &mut dice).filter(|next| *next < 300.0) {
            by_hundred[(next / 100.0) as usize] += 1;
            now = next;
        }
        assert!((150..250).contains(&by_hundred[0]) && by_hundred[1] == 0, "{by_hundred:?}");
        assert!((1_850..2_150).contains(&by_hundred[2]), "{by_hundred:?}");
    }
}
