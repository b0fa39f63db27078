//! Request arrivals.

use std::collections::HashMap;

use serde::Deserialize;

use super::source::Scripts;
use super::values::parse_seconds;
use foretell_core::units::SplitMix64;

/// A piecewise constant value: (seconds, value), by rising seconds; zero before the first.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "Steps")]
pub struct Ramp(pub Vec<(f64, f64)>);

/// A ramp in a file: a number, or numbers by the second from which they apply.
#[derive(Deserialize)]
#[serde(untagged, expecting = "allowed a number, or a map from durations to numbers")]
enum Steps {
    Flat(f64),
    From(HashMap<String, f64>),
}

impl TryFrom<Steps> for Ramp {
    type Error = String;

    fn try_from(steps: Steps) -> Result<Self, String> {
        let step = |(from, value): (String, f64)| Ok((parse_seconds(&from)?, value));
        let mut steps = match steps {
            Steps::Flat(value) => vec![(0.0, value)],
            Steps::From(steps) => steps.into_iter().map(step).collect::<Result<_, String>>()?,
        };
        steps.sort_by(|a, b| a.0.total_cmp(&b.0));
        match steps.iter().find(|(_, value)| !(0.0..=100_000.0).contains(value)) {
            Some((_, value)) => Err(format!("allowed 0..=100000, got {value}")),
            None => Ok(Self(steps)),
        }
    }
}

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

/// Arrival process of a stream.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrivals {
    /// Closed loop: each of `clients` clients sends its next request `think` seconds after its
    /// answer.
    Closed {
        clients: Ramp,
        /// Seconds between an answer and the next request.
        think: f64,
    },
    /// Poisson process, independent of the answers; mean requests per second.
    Poisson(Ramp),
}

/// Owner of a request: decides if it goes through Foretell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Owner {
    /// It goes through Foretell, unless all traffic goes direct.
    Ours,
    /// It goes to the engine without Foretell.
    Others,
}

#[derive(Clone, Debug)]
pub struct Stream {
    pub whose: Owner,
    pub arrivals: Arrivals,
    /// Their texts, in turn.
    pub scripts: Scripts,
    /// Maximum number of requests; `None` if only the time ends the stream.
    pub requests: Option<usize>,
}

impl Stream {
    /// One client that sends every request once.
    pub fn one_client(scripts: Scripts) -> Self {
        let requests = Some(scripts.len());
        let arrivals = Arrivals::Closed { clients: Ramp::flat(1.0), think: 0.0 };
        Self { whose: Owner::Ours, arrivals, scripts, requests }
    }

    /// The next arrival after `now`, by a Poisson process; `None` for a closed loop, and if there
    /// is no further arrival.
    pub fn next(&self, now: f64, rng: &mut SplitMix64) -> Option<f64> {
        let Arrivals::Poisson(rates) = &self.arrivals else { return None };
        let mut from = now;
        // The process is memoryless, so the draw can restart with each stretch of constant rate.
        loop {
            let rate = rates.at(from);
            let change = rates.0.iter().map(|step| step.0).find(|&at| at > from);
            let gap = if rate > 0.0 { -(1.0 - rng.unit()).ln() / rate } else { f64::INFINITY };
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
        let stream = Stream { whose: Owner::Others, arrivals, scripts, requests: None };
        let (mut now, mut rng, mut by_hundred) = (0.0, SplitMix64::new(4), [0; 3]);
        while let Some(next) = stream.next(now, &mut rng).filter(|next| *next < 300.0) {
            by_hundred[(next / 100.0) as usize] += 1;
            now = next;
        }
        assert!((150..250).contains(&by_hundred[0]) && by_hundred[1] == 0, "{by_hundred:?}");
        assert!((1_850..2_150).contains(&by_hundred[2]), "{by_hundred:?}");
    }
}
