//! When the plain pace at one concurrency is remeasured.
//!
//! The pace is measured while no request is speculated on, so it gets old while speculation goes
//! on, and all that is decided compares with it. A measurement is trusted for as long as the last
//! ones agreed: the first steps of a busy engine read prompts, and the next texts are others.

use serde::{Deserialize, Serialize};

use super::pace::{ConcurrencyBucket, SIZES};
use crate::control::shared::Sum;

/// Speculation, in plain tokens of each request, after which the pace of several requests is
/// remeasured that was measured once ...
const TRUST_FIRST: f64 = 150.0;
/// ... and at most: with each measurement that agrees with the one before, it doubles. The pace of
/// one request alone, whose steps read no prompts, is trusted for that long at once.
const TRUST_MAX: f64 = 1200.0;
/// Maximum ratio of two measurements that agree: how many prompts are read meanwhile differs.
const AGREE: f64 = 1.5;
/// Plain steps of a measurement ...
const STEPS: f64 = 4.0;
/// ... of the first one of several requests: the engine has just read their prompts ...
const STEPS_FIRST: f64 = 8.0;
/// ... and of one that does not agree: a few steps may have been disturbed.
const STEPS_DOUBTED: f64 = 16.0;
/// Maximum of a step's time that counts, as a multiple of the pace before.
const OUTLIER: f64 = 4.0;
/// Where the measurement was given up, it is retried after this much speculation, in plain
/// tokens.
const GIVEN_UP: f64 = 100.0;
/// Plain tokens concurrent with verify requests after which it is given up.
const CONCURRENT: f64 = 128.0;
/// Multiple of the age at which a pace is old, at which speculation is interrupted for it.
const OVERDUE: f64 = 4.0;

/// The ages of the paces, by concurrency bucket.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Renewals([Renewal; SIZES]);

impl Default for Renewals {
    fn default() -> Self {
        Self(std::array::from_fn(|bucket| Renewal { alone: bucket == 0, ..Renewal::default() }))
    }
}

impl Renewals {
    /// The age of the pace at this concurrency.
    pub fn of(&mut self, concurrency: ConcurrencyBucket) -> &mut Renewal {
        let [first, others @ ..] = &mut self.0;
        concurrency.index().checked_sub(1).and_then(|other| others.get_mut(other)).unwrap_or(first)
    }

    pub fn get(&self, concurrency: ConcurrencyBucket) -> Renewal {
        self.0.get(concurrency.index()).copied().unwrap_or_default()
    }
}

/// The age of the pace at one concurrency.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Renewal {
    alone: bool,
    /// Speculation since the pace was measured, in plain tokens of each request.
    speculated: f64,
    /// Plain tokens concurrent with verify requests since the pace was found old.
    concurrent: f64,
    /// Seconds and steps of the measurement that goes on.
    fresh: Sum,
    /// The pace before it, seconds; `None` if none was measured.
    before: Option<f64>,
    /// A measurement has been completed.
    #[serde(default)]
    measured: bool,
    /// Measurements in a row that agreed.
    agreed: u32,
    /// Times in a row that the measurement was given up: each doubles the wait.
    #[serde(skip)]
    given_up: u32,
}

/// Meaning of a plain step for the pace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Renewed {
    /// A step like the ones before.
    No,
    /// The first step of a measurement.
    Begun,
    /// The measurement contradicts the pace before: this one replaces it.
    Replaced(Sum),
}

impl Renewal {
    /// Notes speculation, in plain tokens of each request.
    pub fn speculated(&mut self, tokens: f64) {
        self.speculated += tokens;
    }

    /// True if the pace is to be measured with the next plain requests, as it always is until that
    /// was done once: the pace of a lower concurrency would make every round look like a loss, and
    /// that of one disturbed step like a win.
    pub fn is_old(&self, known: bool) -> bool {
        self.speculated >= self.trust(known)
    }

    /// True if a known pace has been measured to the end; that of one request alone is by its first
    /// tokens.
    pub fn is_measured(&self) -> bool {
        self.alone || self.measured
    }

    /// True if that is so overdue that speculation should be interrupted for it.
    pub fn is_overdue(&self, known: bool) -> bool {
        self.speculated >= OVERDUE * self.trust(known).max(GIVEN_UP)
    }

    fn trust(&self, known: bool) -> f64 {
        match known {
            false => 0.0,
            true if self.alone => TRUST_MAX,
            true => (TRUST_FIRST * f64::from(1 << self.agreed.min(8))).min(TRUST_MAX),
        }
    }

    /// Notes plain steps in `seconds`, while no request is speculated on; `pace` is the one so far.
    pub fn stepped(&mut self, seconds: f64, steps: f64, pace: Option<f64>) -> Renewed {
        let measures = self.fresh.1 > 0.0;
        if !measures && !self.is_old(pace.is_some() && self.is_measured()) {
            return Renewed::No;
        }
        let first = !self.is_measured();
        if !measures {
            self.before = if first { None } else { pace };
        }
        let before = self.before.filter(|before| *before > 0.0);
        let most = before.map_or(f64::MAX, |before| OUTLIER * before * steps);
        self.fresh = Sum(self.fresh.0 + seconds.min(most), self.fresh.1 + steps);
        let ratio = self.fresh.mean().zip(before).map_or(1.0, |(fresh, before)| fresh / before);
        let agrees = (1.0 / AGREE..=AGREE).contains(&ratio);
        let least = match (first, agrees) {
            (true, _) => STEPS_FIRST,
            (false, true) => STEPS,
            (false, false) => STEPS_DOUBTED,
        };
        if self.fresh.1 < least {
            return if measures { Renewed::No } else { Renewed::Begun };
        }
        let agreed = if agrees && before.is_some() { self.agreed.saturating_add(1) } else { 0 };
        let fresh = self.fresh;
        *self = Self { agreed, measured: true, alone: self.alone, ..Self::default() };
        if agrees { Renewed::No } else { Renewed::Replaced(fresh) }
    }

    /// Notes plain tokens concurrent with verify requests of others. They do not show the pace, but
    /// count towards giving up its measurement.
    pub fn concurrent(&mut self, tokens: usize, known: bool) {
        if !self.is_old(known) {
            self.concurrent = 0.0;
            return;
        }
        self.concurrent += tokens as f64;
        if self.concurrent < CONCURRENT {
            return;
        }
        let given_up = if known { 0 } else { (self.given_up + 1).min(10) };
        let speculated = if known { 0.0 } else { -GIVEN_UP * f64::from(1 << given_up) };
        let Self { alone, measured, agreed, .. } = *self;
        *self = Self { alone, speculated, measured, agreed, given_up, ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(renewal: &mut Renewal, seconds: f64, pace: Option<f64>) -> usize {
        let most = 40;
        (1..=most)
            .find(|_| {
                renewal.stepped(seconds, 1.0, pace);
                !renewal.is_old(renewal.is_measured())
            })
            .unwrap_or(most)
    }

    #[test]
    fn a_measurement_that_agrees_is_trusted_for_longer_each_time() {
        let mut renewal = Renewal::default();
        assert!(renewal.is_old(false) && !renewal.is_overdue(false));
        assert_eq!(measured(&mut renewal, 0.05, None), 8);
        let trusted = |renewal: &mut Renewal| {
            let tokens = (0..10_000).position(|_| {
                renewal.speculated(1.0);
                renewal.is_old(true)
            });
            assert_eq!(measured(renewal, 0.05, Some(0.05)), 4);
            tokens.map(|tokens| tokens + 1)
        };
        let times: Vec<_> = (0..6).map_while(|_| trusted(&mut renewal)).collect();
        assert_eq!(times, [150, 300, 600, 1200, 1200, 1200]);
    }

    #[test]
    fn one_that_contradicts_goes_on_for_longer_and_takes_its_place() {
        let mut renewal = Renewal { agreed: 3, measured: true, speculated: 1200.0, ..Renewal::default() };
        assert_eq!(renewal.stepped(0.05, 1.0, Some(0.245)), Renewed::Begun);
        (0..14).for_each(|_| assert_eq!(renewal.stepped(0.05, 1.0, Some(0.1)), Renewed::No));
        let Renewed::Replaced(Sum(seconds, steps)) = renewal.stepped(0.05, 1.0, Some(0.06)) else {
            panic!("16 steps are enough");
        };
        assert!((seconds - 0.8).abs() < 1e-9 && (steps - 16.0).abs() < 1e-9);
        renewal.speculated(TRUST_FIRST);
        assert!(renewal.is_old(true), "it is trusted as a first one");
    }

    #[test]
    fn a_measurement_that_cannot_be_made_is_given_up_for_a_time() {
        let mut renewal = Renewal::default();
        (0..64).for_each(|_| renewal.concurrent(2, false));
        assert!(!renewal.is_old(false));
        renewal.speculated(199.0);
        assert!(!renewal.is_old(false));
        renewal.speculated(1.0);
        assert!(renewal.is_old(false), "twice 100 after the first time");
        (0..64).for_each(|_| renewal.concurrent(2, false));
        renewal.speculated(399.0);
        assert!(!renewal.is_old(false), "twice as long after the next");
    }
}
