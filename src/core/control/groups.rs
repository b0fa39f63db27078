//! The control group of a policy: is speculation really faster than plain decoding, for the
//! clients?
//!
//! A random share of the requests is the control group, which is only decoded plainly. Both groups
//! are compared by the logarithm of the seconds per token that their clients saw, so that long and
//! short, fast and slow requests count alike, in blocks of a few requests of each group: changes
//! over the hours affect both. The interval of the difference is valid at every moment, however
//! often it is read (a confidence sequence: Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, arXiv
//! 2103.06476, Theorem 2.2): an ordinary interval that is read after every request sooner or later
//! shows a loss that is not there. Where a loss is shown the gate closes, and is retried after
//! a while: never for good.
//!
//! Requests that were not speculated on yield a projected speedup from the rounds that were
//! simulated for them in the shadow.

use std::time::Duration;

use super::costs::Basis;
use crate::units::{SplitMix64, Tick};

/// Probability that an interval ever misses the true value.
const ALPHA: f64 = 0.05;
/// Sample size at which the interval is narrowest, in blocks or requests.
const TUNED: f64 = 50.0;
/// Minimum blocks, or requests, for a result.
const MIN: f64 = 10.0;
/// Number of blocks, or requests, at which half of them are forgotten.
const MAX: f64 = 1_000.0;
/// Requests of each group that close a block.
const BLOCK: u32 = 1;
/// Half-width of the interval of the logarithm below which the group may have its minimum size.
const NARROW: f64 = 0.05;
/// Most of the speed that the control group may cost: a new user's first requests count, too.
const COST: f64 = 0.024;
/// Speedup that is assumed before any is measured or projected.
const ASSUMED: f64 = 12.0;
/// A gate that recloses at once waits longer every time, up to this multiple.
const LONGEST: u32 = 32;
/// Assumed minimum variance: no real requests are more alike.
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
        if self.n >= MAX {
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

/// A ratio with its 95 % confidence interval, which is valid however often it is read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    pub low: f64,
    /// Best estimate: the geometric mean.
    pub middle: f64,
    pub high: f64,
}

/// A gate that closes on a loss, and reopens to try.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Gate {
    /// Time until which it is closed; `None` while it is open.
    until: Option<Tick>,
    /// Number of times in a row that it has closed.
    times: u32,
}

/// Requests of one group in the present block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Part {
    requests: u32,
    /// Sum of the logarithms of their seconds per token.
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
    speculating: Part,
    control: Part,
    /// Differences of the blocks before it.
    blocks: Sample,
    /// Requests so far: speculated on, and in the control group.
    requests: (u64, u64),
    gate: Gate,
    /// Projected speedups of requests that were not speculated on, and their number.
    projected: Sample,
    projected_of: u64,
    basis: Basis,
}

/// Projected speedup of requests that were not speculated on, as a multiple of plain decoding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProjectedSpeedup {
    /// Confidence interval of the mean over requests.
    pub gain: Interval,
    /// Basis of the costs of verify requests.
    pub basis: Basis,
    pub requests: u64,
}

/// Settings of a policy's `control` gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ControlGate {
    /// It closes where the lower limit of time per token with speculation ÷ that of the control
    /// group exceeds this.
    pub limit: f64,
    /// Time that it stays closed when it closes first; doubled each further time in a row, up to 32
    /// times as long.
    pub reprobe: Duration,
}

impl Groups {
    /// Draws if the next request is in the control group, with a probability of at most `start`
    /// (0 to 1), and of less where the group goes without much speed. It falls to `floor` as the
    /// interval narrows.
    pub fn draws_control_group(&self, start: f64, floor: f64, rng: &mut SplitMix64) -> bool {
        rng.unit() < self.share(start, floor)
    }

    fn share(&self, start: f64, floor: f64) -> f64 {
        let width =
            self.half_width().map_or(1.0, |width| ((width - NARROW) / (4.0 * NARROW)).clamp(0.0, 1.0));
        floor.max((start * width).min(COST / (self.expected_speedup() - 1.0).max(COST)))
    }

    /// The speedup that the control group goes without.
    fn expected_speedup(&self) -> f64 {
        let measured = (self.blocks.n > 0.0).then(|| (-self.blocks.mean).exp());
        let projected = (self.projected.n > 0.0).then(|| self.projected.mean.exp());
        measured.or(projected).unwrap_or(ASSUMED)
    }

    /// Notes a finished request: `seconds` per token after the first. Invalid times are ignored,
    /// and so is every request while the gate is closed.
    pub fn note(&mut self, in_control_group: bool, seconds: f64, gate: ControlGate, now: Tick) {
        // Requests drawn before the gate closed do not count for the time after it.
        if !(seconds.is_finite() && seconds > 0.0) || self.gate.until.is_some() {
            return;
        }
        let (group, count) = if in_control_group {
            (&mut self.control, &mut self.requests.1)
        } else {
            (&mut self.speculating, &mut self.requests.0)
        };
        (group.requests, group.sum, *count) = (group.requests + 1, group.sum + seconds.ln(), *count + 1);
        if self.speculating.requests < BLOCK || self.control.requests < BLOCK {
            return;
        }
        self.blocks.add(self.speculating.mean() - self.control.mean());
        (self.speculating, self.control) = (Part::default(), Part::default());
        if self.ratio().is_some_and(|ratio| ratio.low > gate.limit) {
            let wait = gate.reprobe.saturating_mul((1 << self.gate.times.min(16)).min(LONGEST));
            *self = Self {
                gate: Gate { until: Some(now.after(wait)), times: self.gate.times + 1 },
                requests: self.requests,
                projected: self.projected,
                projected_of: self.projected_of,
                basis: self.basis,
                ..Self::default()
            };
        } else if self.half_width().is_some_and(|width| width < NARROW) {
            self.gate.times = 0;
        }
    }

    /// True if speculation is closed now because it was slower than plain decoding. A closure that
    /// is over is cleared.
    pub fn is_closed(&mut self, now: Tick) -> bool {
        self.gate.until.take_if(|until| *until <= now);
        self.gate.until.is_some()
    }

    /// As [`Self::is_closed`], without a change of state.
    pub fn looks_closed(&self, now: Tick) -> bool {
        self.gate.until.is_some_and(|until| now < until)
    }

    /// Time per token with speculation ÷ that of the control group; `None` before there are ten
    /// requests of each.
    pub fn ratio(&self) -> Option<Interval> {
        let width = self.half_width()?;
        let middle = self.blocks.mean;
        Some(Interval { low: (middle - width).exp(), middle: middle.exp(), high: (middle + width).exp() })
    }

    /// Notes the projected speedup of a request that was not speculated on (2 is twice as fast;
    /// values that are not positive are ignored), and its basis: only the best basis so far counts.
    pub fn note_projected(&mut self, gain: f64, basis: Basis) {
        if gain.is_finite() && gain > 0.0 {
            if basis > self.basis {
                (self.projected, self.projected_of, self.basis) = (Sample::default(), 0, basis);
            }
            if basis == self.basis {
                self.projected.add(gain.ln());
                self.projected_of += 1;
            }
        }
    }

    /// The projected speedup of requests that were not speculated on; `None` before there are ten
    /// of them.
    pub fn projected(&self) -> Option<ProjectedSpeedup> {
        let Sample { n, mean, .. } = self.projected;
        (n >= MIN).then(|| {
            let width = self.projected.half_width();
            let gain = Interval { low: (mean - width).exp(), middle: mean.exp(), high: (mean + width).exp() };
            ProjectedSpeedup { gain, basis: self.basis, requests: self.projected_of }
        })
    }

    /// Requests speculated on, and requests in the control group, since the process began.
    pub fn requests(&self) -> (u64, u64) {
        self.requests
    }

    fn half_width(&self) -> Option<f64> {
        (self.blocks.n >= MIN).then(|| self.blocks.half_width())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GATE: ControlGate = ControlGate { limit: 1.02, reprobe: Duration::from_secs(30) };

    /// Seconds per token with a spread of a third, `times` as long.
    fn seconds(rng: &mut SplitMix64, times: f64) -> f64 {
        let normal = (0..12).map(|_| rng.unit()).sum::<f64>() - 6.0;
        0.02 * times * (0.33 * normal).exp()
    }

    fn fed(groups: &mut Groups, rng: &mut SplitMix64, times: f64, requests: usize) -> bool {
        (0..requests).any(|index| {
            let held = groups.draws_control_group(0.2, 0.01, rng);
            let spent = seconds(rng, if held { 1.0 } else { times });
            groups.note(held, spent, GATE, Tick(index as u64));
            groups.gate.until.is_some()
        })
    }

    #[test]
    fn where_speculation_is_no_slower_the_gate_does_not_close_however_often_it_is_read() {
        let closed = (0..100)
            .filter(|&seed| fed(&mut Groups::default(), &mut SplitMix64::new(seed), 1.0, 2_000))
            .count();
        assert!(closed <= 5, "{closed} of 100");
    }

    #[test]
    fn a_loss_closes_it_and_a_gain_narrows_the_group_to_its_floor() {
        assert!(fed(&mut Groups::default(), &mut SplitMix64::new(3), 1.5, 2_000));
        let (mut groups, mut rng) = (Groups::default(), SplitMix64::new(4));
        assert!(!fed(&mut groups, &mut rng, 0.6, 20_000));
        let ratio = groups.ratio().expect("enough requests");
        assert!(ratio.low < 0.6 && 0.6 < ratio.high && ratio.high < 0.7, "{ratio:?}");
        assert!(groups.share(0.2, 0.01) < 0.03, "{}", groups.share(0.2, 0.01));
    }

    #[test]
    fn the_group_is_smaller_where_it_goes_without_more() {
        let share = |gain: f64| {
            let mut groups = Groups::default();
            groups.note_projected(gain, Basis::Measured);
            groups.share(0.2, 0.01)
        };
        assert!((Groups::default().share(0.2, 0.001) - COST / 11.0).abs() < 1e-12, "nothing is known");
        assert!((share(1.0) - 0.2).abs() < 1e-12 && (share(1.25) - COST / 0.25).abs() < 1e-9);
        assert!((share(2.25) - COST / 1.25).abs() < 1e-9 && (share(9.0) - 0.01).abs() < 1e-12);
        let mut slower = Groups::default();
        slower.note_projected(3.0, Basis::Measured);
        slower.note(true, 0.02, GATE, Tick(0));
        slower.note(false, 0.03, GATE, Tick(0));
        assert!((slower.share(0.2, 0.01) - 0.2).abs() < 1e-12, "what is measured counts");
    }

    #[test]
    fn a_closed_gate_opens_to_try_again_and_waits_longer_after_each_failure() {
        let (mut groups, mut rng) = (Groups::default(), SplitMix64::new(5));
        let mut now = Tick(0);
        let (mut waits, mut counted) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            for _ in 0..2_000 {
                let held = groups.draws_control_group(0.2, 0.01, &mut rng);
                groups.note(held, seconds(&mut rng, if held { 1.0 } else { 2.0 }), GATE, now);
                if groups.is_closed(now) {
                    break;
                }
            }
            let until = groups.gate.until.expect("closed");
            waits.push(until.seconds_since(now) as u64);
            assert!(groups.looks_closed(Tick(until.0 - 1)) && groups.is_closed(Tick(until.0 - 1)));
            now = until;
            assert!(!groups.looks_closed(now) && !groups.is_closed(now), "it opens");
            assert!(groups.ratio().is_none(), "it starts from scratch");
            counted.push(groups.requests());
        }
        assert_eq!(waits, [30, 60, 120]);
        assert!(counted.is_sorted() && counted[0] < counted[2], "requests are counted on: {counted:?}");
    }

    #[test]
    fn a_projected_speedup_is_reported_with_its_basis() {
        let (mut groups, mut rng) = (Groups::default(), SplitMix64::new(6));
        (0..9).for_each(|_| groups.note_projected(3.0, Basis::Guess));
        assert_eq!(groups.projected(), None);
        (0..1_500).for_each(|_| groups.note_projected(1.2 + 0.4 * rng.unit(), Basis::Measured));
        let projected = groups.projected().expect("enough requests");
        assert_eq!(
            (projected.basis, projected.requests),
            (Basis::Measured, 1_500),
            "forgotten requests are counted"
        );
        let Interval { low, middle, high } = projected.gain;
        assert!(1.35 < low && low < middle && middle < high && high < 1.43, "{projected:?}");
    }

    #[test]
    fn invalid_times_are_not_counted() {
        let mut groups = Groups::default();
        for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            groups.note(false, seconds, GATE, Tick(0));
        }
        assert_eq!(groups, Groups::default());
    }
}
