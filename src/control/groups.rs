//! The control group of a policy: is leaping really faster than riding, for the clients?
//!
//! A share of the requests is held back by lot and only rides. Both groups are compared by the logarithm of the seconds per
//! token that their clients saw, so that long and short, fast and slow requests count alike, in blocks of a few requests of
//! each group: what changes with the hours changes both. The interval of the
//! difference is valid at every moment, however often it is looked at (a confidence sequence: Waudby-Smith, Arbour,
//! Sinha, Kennedy, Ramdas, arXiv 2103.06476, Theorem 2.2): an ordinary interval that is looked at after every request
//! sooner or later shows a loss that is not there. Where a loss is shown the gate closes, and is tried again after a
//! while: never for good.
//!
//! Requests that did not leap say, by the rounds that they played in the shadow, what leaping would have brought them.

use std::time::Duration;

use super::costs::Basis;
use crate::units::{Dice, Tick};

/// How often an interval misses the truth at any time.
const ALPHA: f64 = 0.05;
/// Where the interval is narrowest for its size, in blocks or requests.
const TUNED: f64 = 50.0;
/// Blocks, or requests, before anything is said.
const LEAST: f64 = 10.0;
/// Blocks, or requests, of which the older half is forgotten.
const MOST: f64 = 1_000.0;
/// Requests of each group that close a block.
const BLOCK: u32 = 1;
/// Half-width of the interval of the logarithm below which the group may be as small as it gets.
const NARROW: f64 = 0.05;
/// A gate that closes again at once waits longer every time, up to so many times as long.
const LONGEST: u32 = 32;
/// Variance that is assumed at least: nobody's requests are that much alike.
const VARIANCE: f64 = 1e-4;

/// Mean and variance of a sample (Welford).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sample {
    n: f64,
    mean: f64,
    squares: f64,
}

impl Sample {
    fn add(&mut self, value: f64) {
        if self.n >= MOST {
            (self.n, self.squares) = (self.n / 2.0, self.squares / 2.0);
        }
        self.n += 1.0;
        let off = value - self.mean;
        self.mean += off / self.n;
        self.squares += off * (value - self.mean);
    }

    /// Half of the width of the interval of the mean.
    fn half_width(&self) -> f64 {
        let variance = (self.squares / (self.n - 1.0)).max(VARIANCE);
        // The square of rho that makes it narrowest at [`TUNED`] requests.
        let log = -2.0 * ALPHA.ln();
        let rho_squared = (log + (1.0 + log).ln()) / TUNED;
        let inside = self.n * rho_squared + 1.0;
        (variance * 2.0 * inside / (self.n * self.n * rho_squared) * (inside.sqrt() / ALPHA).ln()).sqrt()
    }
}

/// The ratio of two times per token, and where it surely lies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Lower bound.
    pub low: f64,
    /// Best guess.
    pub middle: f64,
    /// Upper bound.
    pub high: f64,
}

/// A gate that closes on a loss, and opens again to try.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Gate {
    /// Until when it is closed; `None` while it is open.
    until: Option<Tick>,
    /// How many times in a row it has closed.
    times: u32,
}

/// Requests of one group in the present block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Part {
    requests: u32,
    /// Of the logarithms of their seconds per token.
    sum: f64,
}

impl Part {
    fn mean(self) -> f64 {
        self.sum / f64::from(self.requests.max(1))
    }
}

/// Both groups of one policy at one backend.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Groups {
    /// The present block.
    leaping: Part,
    held: Part,
    /// Differences of the blocks before it.
    blocks: Sample,
    /// Requests so far, that leapt and that were held back.
    requests: (u64, u64),
    gate: Gate,
    /// What requests that did not leap would have gained, and how many have said so.
    would: Sample,
    would_of: u64,
    basis: Basis,
}

/// Times as fast as riding that leaping would have been.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WouldGain {
    /// Where the mean over requests surely lies.
    pub gain: Interval,
    /// What the costs of verify calls rest on.
    pub basis: Basis,
    /// Requests that say so.
    pub requests: u64,
}

/// What the gate of a policy asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencyGate {
    /// It closes where leaping surely takes more than so many times the control group's time per token.
    pub limit: f64,
    /// How long it is closed for the first time.
    pub reprobe: Duration,
}

impl Groups {
    /// Draws whether the next request is held back: a share that begins at `start` and falls to `floor` as the interval
    /// narrows.
    pub fn holds_back(&self, start: f64, floor: f64, dice: &mut Dice) -> bool {
        dice.unit() < self.share(start, floor)
    }

    fn share(&self, start: f64, floor: f64) -> f64 {
        let width =
            self.half_width().map_or(1.0, |width| ((width - NARROW) / (4.0 * NARROW)).clamp(0.0, 1.0));
        floor.max(start * width)
    }

    /// Notes a finished request: `seconds` per token after the first. What is no time is ignored.
    pub fn note(&mut self, held_back: bool, seconds: f64, gate: LatencyGate, now: Tick) {
        // What was drawn before the gate closed says nothing of what comes after it.
        if !(seconds.is_finite() && seconds > 0.0) || self.gate.until.is_some() {
            return;
        }
        let (group, count) = if held_back {
            (&mut self.held, &mut self.requests.1)
        } else {
            (&mut self.leaping, &mut self.requests.0)
        };
        (group.requests, group.sum, *count) = (group.requests + 1, group.sum + seconds.ln(), *count + 1);
        if self.leaping.requests < BLOCK || self.held.requests < BLOCK {
            return;
        }
        self.blocks.add(self.leaping.mean() - self.held.mean());
        (self.leaping, self.held) = (Part::default(), Part::default());
        if self.ratio().is_some_and(|ratio| ratio.low > gate.limit) {
            let wait = gate.reprobe.saturating_mul((1 << self.gate.times.min(16)).min(LONGEST));
            *self = Self {
                gate: Gate { until: Some(now.after(wait)), times: self.gate.times + 1 },
                requests: self.requests,
                would: self.would,
                would_of: self.would_of,
                basis: self.basis,
                ..Self::default()
            };
        } else if self.half_width().is_some_and(|width| width < NARROW) {
            self.gate.times = 0;
        }
    }

    /// Whether leaping is closed now because it was slower than riding. What is over is forgotten.
    pub fn is_closed(&mut self, now: Tick) -> bool {
        self.gate.until.take_if(|until| *until <= now);
        self.gate.until.is_some()
    }

    /// As [`Self::is_closed`], for those who only look.
    pub fn looks_closed(&self, now: Tick) -> bool {
        self.gate.until.is_some_and(|until| now < until)
    }

    /// Time per token of leaping ÷ that of the control group; `None` before there are enough requests of both.
    pub fn ratio(&self) -> Option<Interval> {
        let width = self.half_width()?;
        let middle = self.blocks.mean;
        Some(Interval { low: (middle - width).exp(), middle: middle.exp(), high: (middle + width).exp() })
    }

    /// Notes by how many times a request that did not leap would have been faster, and what that rests on: the best of what
    /// was seen counts.
    pub fn note_would(&mut self, gain: f64, basis: Basis) {
        if gain.is_finite() && gain > 0.0 {
            if basis > self.basis {
                (self.would, self.would_of, self.basis) = (Sample::default(), 0, basis);
            }
            if basis == self.basis {
                self.would.add(gain.ln());
                self.would_of += 1;
            }
        }
    }

    /// What requests that did not leap would have gained; `None` before there are enough of them.
    pub fn would(&self) -> Option<WouldGain> {
        let Sample { n, mean, .. } = self.would;
        (n >= LEAST).then(|| {
            let width = self.would.half_width();
            let gain = Interval { low: (mean - width).exp(), middle: mean.exp(), high: (mean + width).exp() };
            WouldGain { gain, basis: self.basis, requests: self.would_of }
        })
    }

    /// Requests in the group that leaps, and in the control group, since the process began.
    pub fn requests(&self) -> (u64, u64) {
        self.requests
    }

    fn half_width(&self) -> Option<f64> {
        (self.blocks.n >= LEAST).then(|| self.blocks.half_width())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GATE: LatencyGate = LatencyGate { limit: 1.02, reprobe: Duration::from_secs(30) };

    /// Seconds per token with a spread of a third, `times` as long.
    fn seconds(dice: &mut Dice, times: f64) -> f64 {
        let normal = (0..12).map(|_| dice.unit()).sum::<f64>() - 6.0;
        0.02 * times * (0.33 * normal).exp()
    }

    fn fed(groups: &mut Groups, dice: &mut Dice, times: f64, requests: usize) -> bool {
        (0..requests).any(|index| {
            let held = groups.holds_back(0.2, 0.01, dice);
            let spent = seconds(dice, if held { 1.0 } else { times });
            groups.note(held, spent, GATE, Tick(index as u64));
            groups.gate.until.is_some()
        })
    }

    #[test]
    fn where_leaping_is_no_slower_the_gate_does_not_close_however_often_it_is_looked_at() {
        let closed =
            (0..100).filter(|&seed| fed(&mut Groups::default(), &mut Dice::new(seed), 1.0, 2_000)).count();
        assert!(closed <= 5, "{closed} of 100");
    }

    #[test]
    fn a_loss_closes_it_and_a_gain_narrows_the_group_to_its_floor() {
        assert!(fed(&mut Groups::default(), &mut Dice::new(3), 1.5, 2_000));
        let (mut groups, mut dice) = (Groups::default(), Dice::new(4));
        assert!(!fed(&mut groups, &mut dice, 0.6, 20_000));
        let ratio = groups.ratio().expect("enough requests");
        assert!(ratio.low < 0.6 && 0.6 < ratio.high && ratio.high < 0.7, "{ratio:?}");
        assert!(groups.share(0.2, 0.01) < 0.03, "{}", groups.share(0.2, 0.01));
        assert!((Groups::default().share(0.2, 0.01) - 0.2).abs() < 1e-12);
    }

    #[test]
    fn a_closed_gate_opens_to_try_again_and_waits_longer_each_time_that_it_fails() {
        let (mut groups, mut dice) = (Groups::default(), Dice::new(5));
        let mut now = Tick(0);
        let (mut waits, mut counted) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            for _ in 0..2_000 {
                let held = groups.holds_back(0.2, 0.01, &mut dice);
                groups.note(held, seconds(&mut dice, if held { 1.0 } else { 2.0 }), GATE, now);
                if groups.is_closed(now) {
                    break;
                }
            }
            let until = groups.gate.until.expect("closed");
            waits.push(until.seconds_since(now) as u64);
            assert!(groups.looks_closed(Tick(until.0 - 1)) && groups.is_closed(Tick(until.0 - 1)));
            now = until;
            assert!(!groups.looks_closed(now) && !groups.is_closed(now), "it opens");
            assert!(groups.ratio().is_none(), "it begins anew");
            counted.push(groups.requests());
        }
        assert_eq!(waits, [30, 60, 120]);
        assert!(counted.is_sorted() && counted[0] < counted[2], "requests are counted on: {counted:?}");
    }

    #[test]
    fn what_would_have_been_gained_is_said_with_what_it_rests_on() {
        let (mut groups, mut dice) = (Groups::default(), Dice::new(6));
        (0..9).for_each(|_| groups.note_would(3.0, Basis::Guess));
        assert_eq!(groups.would(), None);
        (0..1_500).for_each(|_| groups.note_would(1.2 + 0.4 * dice.unit(), Basis::Measured));
        let would = groups.would().expect("enough requests");
        assert_eq!(
            (would.basis, would.requests),
            (Basis::Measured, 1_500),
            "what is half forgotten is counted"
        );
        let Interval { low, middle, high } = would.gain;
        assert!(1.35 < low && low < middle && middle < high && high < 1.43, "{would:?}");
    }

    #[test]
    fn what_is_no_time_is_not_counted() {
        let mut groups = Groups::default();
        for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            groups.note(false, seconds, GATE, Tick(0));
        }
        assert_eq!(groups, Groups::default());
    }
}
