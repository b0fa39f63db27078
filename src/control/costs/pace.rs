//! The pace of riding: seconds per ridden token, by how many requests the engine computes at once.
//!
//! It is (last − first) / (n − 1) over every stretch of riding, so the wait for a first token never counts.

use serde::{Deserialize, Serialize};

use crate::units::Tick;

/// A gap counts at most as so many tokens more than it brought: bursts are normal, a stalled network is not the pace
/// of the engine.
const PAUSE_TOKENS: f64 = 24.0;
/// Tokens after which a stretch weighs a third.
const MEMORY: f64 = 50.0;
/// Ridden tokens that make a pace known: four, of which the first weigh a little less by then.
const KNOWN: f64 = 3.8;
/// Ridden tokens that an old pace weighs when it is measured anew.
const LOOSE: f64 = 24.0;
/// Ridden tokens that make it settled: longer gaps are then taken for pauses.
const SETTLED: f64 = 8.0;
/// Seconds of rest after which what was measured weighs half.
const REST: f64 = 120.0;

/// Requests in flight are told apart by these bounds: below the first, and from each one on.
const CROWDS: [usize; 5] = [2, 3, 5, 9, 17];
/// Number of sizes of crowds that are told apart.
pub const SIZES: usize = CROWDS.len() + 1;

/// How many requests an engine computes at once, as far as costs are told apart by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Crowd(usize);

impl Crowd {
    /// The size of so many requests in flight.
    pub fn of(requests: usize) -> Self {
        Self(CROWDS.iter().filter(|&&edge| requests >= edge).count())
    }

    /// Its place among the sizes.
    pub fn index(self) -> usize {
        self.0
    }

    /// How many sizes lie between two.
    pub fn distance(self, other: Self) -> usize {
        self.0.abs_diff(other.0)
    }
}

/// Decayed sums over ridden tokens.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Stretch {
    seconds: f64,
    tokens: f64,
    at: Tick,
}

impl Stretch {
    fn token(&self) -> Option<f64> {
        (self.tokens >= KNOWN).then(|| (self.seconds / self.tokens).max(1e-7))
    }

    /// What rest has left of the weight; as much as makes the pace known is kept through any rest.
    fn rested(&self, now: Tick) -> f64 {
        let rested = REST / (REST + now.seconds_since(self.at));
        rested.max((KNOWN / self.tokens.max(1e-9)).min(1.0))
    }

    fn note(&mut self, seconds: f64, tokens: f64, now: Tick) {
        let keep = (-tokens.min(64.0) / MEMORY).exp() * self.rested(now);
        self.seconds = self.seconds * keep + seconds;
        self.tokens = self.tokens * keep + tokens;
        self.at = self.at.max(now);
    }
}

/// Seconds per ridden token.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Pace {
    stretches: [Stretch; SIZES],
}

impl Pace {
    /// Notes that `tokens` came `seconds` after the ones before.
    pub fn rode(&mut self, crowd: Crowd, seconds: f64, tokens: usize, now: Tick) {
        if tokens == 0 || !seconds.is_finite() {
            return;
        }
        let tokens = tokens as f64;
        let Some(stretch) = self.stretches.get_mut(crowd.0) else { return };
        let seconds = match stretch.token() {
            Some(mean) if stretch.tokens >= SETTLED => seconds.min(mean * (tokens + PAUSE_TOKENS)),
            _ => seconds,
        };
        stretch.note(seconds, tokens, now);
    }

    /// What was measured of this crowd weighs little from now on: it is to be measured anew.
    pub fn loosen(&mut self, crowd: Crowd) {
        if let Some(stretch) = self.stretches.get_mut(crowd.0) {
            let keep = (LOOSE / stretch.tokens.max(1e-9)).min(1.0);
            (stretch.seconds, stretch.tokens) = (stretch.seconds * keep, stretch.tokens * keep);
        }
    }

    /// Makes `now` the origin of time: every pace is as certain as it is now.
    pub fn age(&mut self, now: Tick) {
        for stretch in &mut self.stretches {
            let keep = stretch.rested(now);
            *stretch = Stretch {
                seconds: stretch.seconds * keep,
                tokens: stretch.tokens * keep,
                at: Tick::default(),
            };
        }
    }

    /// Seconds per ridden token in such a crowd, or in the one nearest to it that was measured, of two the smaller.
    pub fn token(&self, crowd: Crowd) -> Option<f64> {
        let known =
            self.stretches.iter().enumerate().filter_map(|(at, stretch)| Some((at, stretch.token()?)));
        known.min_by_key(|&(at, _)| at.abs_diff(crowd.0)).map(|(_, token)| token)
    }

    /// Seconds per ridden token in just such a crowd.
    pub fn token_of(&self, crowd: Crowd) -> Option<f64> {
        self.stretches.get(crowd.0).and_then(Stretch::token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crowds_have_paces_of_their_own_and_lend_to_their_neighbours() {
        let mut pace = Pace::default();
        (0..40).for_each(|_| pace.rode(Crowd::of(1), 0.010, 1, Tick(0)));
        assert!((pace.token(Crowd::of(20)).unwrap() - 0.010).abs() < 1e-9);
        (0..40).for_each(|_| pace.rode(Crowd::of(16), 0.030, 1, Tick(0)));
        assert!((pace.token(Crowd::of(20)).unwrap() - 0.030).abs() < 1e-9);
        assert!((pace.token(Crowd::of(1)).unwrap() - 0.010).abs() < 1e-9);
        assert_eq!(pace.token_of(Crowd::of(4)), None);
    }

    #[test]
    fn bursts_do_not_hide_the_pace_and_rest_does_not_unlearn_it() {
        let mut pace = Pace::default();
        for _ in 0..40 {
            pace.rode(Crowd::default(), 0.040, 1, Tick(0));
            pace.rode(Crowd::default(), 0.0, 3, Tick(0));
        }
        let token = pace.token(Crowd::default()).unwrap();
        assert!((token - 0.010).abs() < 0.001, "{token}");
        let hours = Tick(10_000_000_000);
        (0..4).for_each(|_| pace.rode(Crowd::default(), 0.020, 1, hours));
        let token = pace.token(Crowd::default()).unwrap();
        assert!((0.014..0.020).contains(&token), "after a rest a few tokens count for much: {token}");
    }
}
