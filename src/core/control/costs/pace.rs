//! The pace of plain decoding: seconds of a plain token in clean steps, in which the engine read
//! nothing and verified nothing.
//!
//! It is (last − first) / (n − 1) over every stretch of plain decoding, so the wait for a first
//! token never counts. A pace that was measured at a bad moment may be too long, and where requests
//! are always speculated on no step is clean that would correct it. But what is no clean step takes
//! no less than one: so the pace is at most the usual time of a plain token concurrent with
//! drafts, and of a verify request.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::concurrency::{ConcurrencyBucket, SIZES};
use crate::control::mean::Mean;
use crate::control::shared::Sum;

/// Steps after which one weighs a third.
const MEMORY: f64 = 50.0;
/// Clean steps that make a pace known: four, of which the first weigh a little less by then.
pub(super) const KNOWN: f64 = 3.8;
/// Weight of a step in which the engine read a prompt of ours: it counts where hardly any is clean.
const READING: f64 = 0.03;
/// Maximum length of a gap that counts, in tokens beyond those that it yielded: bursts are normal,
/// and a stalled network is not the pace of the engine.
const PAUSE_TOKENS: f64 = 24.0;
/// Steps from which on longer gaps are taken for pauses.
const SETTLED: f64 = 8.0;

/// Reasons for which plain tokens take longer than a plain step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Disturbance {
    /// The engine read a prompt, or continued another request after rounds.
    pub reading: bool,
    /// Other requests of ours were speculated on.
    pub shared: bool,
    /// They are the first of a request that resumes after rounds.
    pub resumed: bool,
}

/// Plain tokens at one concurrency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Stretch {
    /// Decayed sums over clean steps: seconds, and steps.
    seconds: f64,
    steps: f64,
    /// The same of others, which fill up the memory that local ones leave free.
    #[serde(skip)]
    lent: Sum,
    /// Seconds of a plain token concurrent with drafts, and of a verify request.
    shared: Mean<16>,
    verify: Mean<16>,
    /// Seconds that resuming after rounds takes beyond a token, and the first verify request beyond
    /// another one.
    resumed: Mean<16>,
    entered: Mean<16>,
}

impl Stretch {
    fn clean(&self) -> Option<f64> {
        let Sum(seconds, steps) = self.lent.within(MEMORY - self.steps);
        let (seconds, steps) = (self.seconds + seconds, self.steps + steps);
        (steps >= KNOWN).then(|| (seconds / steps).max(1e-7))
    }

    fn token(&self) -> Option<f64> {
        let limits = [self.shared.settled(), self.verify.settled()].into_iter().flatten();
        Some(limits.fold(self.clean()?, f64::min).max(1e-7))
    }

    fn note(&mut self, seconds: f64, steps: f64) {
        let keep = (-steps.min(64.0) / MEMORY).exp();
        self.seconds = self.seconds * keep + seconds;
        self.steps = self.steps * keep + steps;
    }
}

/// Seconds of plain tokens, by concurrency.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Pace([Stretch; SIZES]);

impl Pace {
    /// Notes `tokens` plain tokens of one of `ours` requests that came `seconds` after the ones
    /// before: a step yields one for each, so that its tokens together are one measurement.
    pub fn note(&mut self, at: ConcurrencyBucket, seconds: f64, tokens: usize, ours: usize, by: Disturbance) {
        let token = self.token(at);
        let Some(stretch) = self.0.get_mut(at.index()) else { return };
        if tokens == 0 || !seconds.is_finite() {
            return;
        }
        let count = tokens as f64;
        let most = match token {
            Some(token) if stretch.steps >= SETTLED => token * (count + PAUSE_TOKENS),
            _ => f64::MAX,
        };
        let seconds = seconds.min(most);
        let share = if by.reading { READING } else { 1.0 } / ours.max(1) as f64;
        match (by.resumed, by.shared) {
            (true, _) if by.reading => {}
            (true, _) => {
                if let Some(token) = token {
                    stretch.resumed.note((seconds - count * token).max(0.0));
                }
            }
            (false, true) => stretch.shared.note(seconds / count),
            (false, false) => stretch.note(seconds * share, count * share),
        }
    }

    /// Notes that a verify request took `seconds`.
    pub fn verified(&mut self, at: ConcurrencyBucket, seconds: f64) {
        if let Some(stretch) = self.0.get_mut(at.index()) {
            stretch.verify.note(seconds);
        }
    }

    /// The usual seconds of a verify request at this concurrency; `None` before some were measured.
    pub fn usual_verify(&self, at: ConcurrencyBucket) -> Option<f64> {
        self.0.get(at.index())?.verify.settled()
    }

    /// Seconds of a plain token at this concurrency, or at the nearest where it is known, of two
    /// the lower; `None` before four steps were timed at any.
    pub fn token(&self, at: ConcurrencyBucket) -> Option<f64> {
        let known = ConcurrencyBucket::all().zip(&self.0);
        let known = known.filter_map(|(bucket, stretch)| Some((bucket, stretch.token()?)));
        known.min_by_key(|(bucket, _)| bucket.distance(at)).map(|(_, token)| token)
    }

    /// The same at exactly this concurrency.
    pub fn token_of(&self, at: ConcurrencyBucket) -> Option<f64> {
        self.0.get(at.index())?.token()
    }

    /// Notes that a first verify request after plain decoding took so many seconds beyond another.
    pub fn entered(&mut self, at: ConcurrencyBucket, seconds: f64) {
        if let Some(stretch) = self.0.get_mut(at.index()) {
            stretch.entered.note(seconds.max(0.0));
        }
    }

    /// Seconds that resuming after rounds takes beyond a token.
    pub fn resumed(&self, at: ConcurrencyBucket) -> Option<f64> {
        self.lower(at, |stretch| stretch.resumed)
    }

    /// Seconds that a first verify request takes beyond another.
    pub fn switch_in(&self, at: ConcurrencyBucket) -> Option<f64> {
        self.lower(at, |stretch| stretch.entered)
    }

    /// A mean at this concurrency or the nearest lower one: the queue of a high concurrency does
    /// not apply to a low one.
    fn lower(&self, at: ConcurrencyBucket, which: impl Fn(&Stretch) -> Mean<16>) -> Option<f64> {
        let lower = self.0.iter().take(at.index() + 1).rev();
        lower.map(which).find_map(Mean::known)
    }

    /// Makes all measurements weigh this share of what they did; a pace that is known stays so.
    pub fn fade(&mut self, share: f64) {
        for stretch in &mut self.0 {
            let share = share.max((KNOWN / stretch.steps.max(1e-9)).min(1.0));
            (stretch.seconds, stretch.steps) = (stretch.seconds * share, stretch.steps * share);
        }
    }

    /// Seconds and steps that were measured here, by concurrency.
    pub fn local(&self) -> BTreeMap<usize, Sum> {
        let measured = self.0.iter().enumerate().filter(|(_, stretch)| stretch.steps > 0.0);
        measured.map(|(at, stretch)| (at, Sum(stretch.seconds, stretch.steps))).collect()
    }

    /// Replaces the measurements of others.
    pub fn lend(&mut self, lent: &BTreeMap<usize, Sum>) {
        for (at, stretch) in self.0.iter_mut().enumerate() {
            stretch.lent = lent.get(&at).copied().unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(requests: usize) -> ConcurrencyBucket {
        ConcurrencyBucket::of(requests)
    }

    fn clean(pace: &mut Pace, requests: usize, seconds: f64, times: usize) {
        (0..times).for_each(|_| pace.note(at(requests), seconds, 1, 1, Disturbance::default()));
    }

    #[test]
    fn tokens_in_bursts_are_timed_by_their_mean() {
        let mut pace = Pace::default();
        for _ in 0..40 {
            pace.note(at(1), 0.040, 1, 1, Disturbance::default());
            pace.note(at(1), 0.0, 3, 1, Disturbance::default());
        }
        let token = pace.token(at(1)).unwrap();
        assert!((token - 0.010).abs() < 0.001, "{token}");
    }

    #[test]
    fn concurrencies_have_their_own_paces_and_lend_to_their_neighbours() {
        let mut pace = Pace::default();
        clean(&mut pace, 1, 0.010, 40);
        assert!((pace.token(at(20)).unwrap() - 0.010).abs() < 1e-9);
        clean(&mut pace, 16, 0.030, 80);
        assert!((pace.token(at(20)).unwrap() - 0.030).abs() < 1e-9);
        assert!((pace.token(at(1)).unwrap() - 0.010).abs() < 1e-9);
        assert_eq!(pace.token_of(at(4)), None);
    }

    #[test]
    fn what_is_no_clean_step_shows_no_pace_and_bounds_it() {
        let mut pace = Pace::default();
        let reading = Disturbance { reading: true, ..Disturbance::default() };
        (0..60).for_each(|_| pace.note(at(16), 0.25, 1, 16, reading));
        assert_eq!(pace.token(at(16)), None, "prompts were read all the time");
        (0..3_000).for_each(|_| pace.note(at(16), 0.25, 1, 16, reading));
        assert!((pace.token(at(16)).unwrap() - 0.25).abs() < 1e-9, "there is no other");
        let shared = Disturbance { shared: true, ..Disturbance::default() };
        (0..40).for_each(|_| pace.note(at(16), 0.06, 1, 16, shared));
        assert!((pace.token(at(16)).unwrap() - 0.06).abs() < 1e-6);
        (0..40).for_each(|_| pace.verified(at(16), 0.05));
        assert!((pace.token(at(16)).unwrap() - 0.05).abs() < 1e-6);
        clean(&mut pace, 16, 0.02, 200);
        assert!((pace.token(at(16)).unwrap() - 0.02).abs() < 0.005);
        pace.note(at(16), 0.05, 1, 16, Disturbance { resumed: true, ..Disturbance::default() });
        assert!((pace.resumed(at(16)).unwrap() - 0.03).abs() < 0.006);
    }

    #[test]
    fn a_pause_is_no_pace_and_a_change_is_followed() {
        let mut pace = Pace::default();
        clean(&mut pace, 1, 0.01, 100);
        clean(&mut pace, 1, 60.0, 1);
        assert!(pace.token(at(1)).unwrap() < 0.02, "{:?}", pace.token(at(1)));
        clean(&mut pace, 1, 0.03, 200);
        assert!((pace.token(at(1)).unwrap() - 0.03).abs() < 0.001);
    }
}
