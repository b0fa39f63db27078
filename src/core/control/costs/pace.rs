//! The plain pace: seconds per plain token, by the engine's concurrency.
//!
//! It is (last − first) / (n − 1) over every stretch of plain decoding, so the wait for a first
//! token never counts.

use serde::{Deserialize, Serialize};

use std::collections::BTreeMap;

use super::READING;
use crate::control::belief::IDLE_HALF_WEIGHT;
use crate::control::shared::Sum;
use crate::units::Tick;

/// Maximum length of a gap that counts, in tokens beyond those that it yielded: bursts are normal,
/// and a stalled network is not the pace of the engine.
const PAUSE_TOKENS: f64 = 24.0;
/// Tokens after which a stretch weighs a third.
const MEMORY: f64 = 50.0;
/// Plain tokens that make a pace known: four, of which the first weigh a little less by then.
pub const KNOWN: f64 = 3.8;
/// Weight of an old pace when it is measured anew, in plain tokens.
const LOOSE: f64 = 8.0;
/// Plain tokens that make it settled: longer gaps are then taken for pauses.
const SETTLED: f64 = 8.0;

/// Bounds of the concurrency buckets, requests in flight: below the first, and from each one on.
const CONCURRENCIES: [usize; 5] = [2, 3, 5, 9, 17];
const NAMES: [&str; SIZES] = ["1", "2", "3-4", "5-8", "9-16", "17-"];
/// Number of concurrency buckets: 1, 2, 3 to 4, 5 to 8, 9 to 16, and 17 or more requests in flight.
pub const SIZES: usize = CONCURRENCIES.len() + 1;

/// Bucket of the engine's concurrency, by which costs are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct ConcurrencyBucket(usize);

impl ConcurrencyBucket {
    pub fn of(requests: usize) -> Self {
        Self(CONCURRENCIES.iter().filter(|&&edge| requests >= edge).count())
    }

    /// All of them, in rising order.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..SIZES).map(Self)
    }

    /// True if it has no upper limit.
    pub fn is_open(self) -> bool {
        self.0 + 1 == SIZES
    }

    /// Its requests in flight.
    pub fn name(self) -> &'static str {
        NAMES.get(self.0).copied().unwrap_or_default()
    }

    /// Its index, below [`SIZES`].
    pub fn index(self) -> usize {
        self.0
    }

    pub fn distance(self, other: Self) -> usize {
        self.0.abs_diff(other.0)
    }
}

/// Decayed sums over plain tokens.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Stretch {
    seconds: f64,
    tokens: f64,
    at: Tick,
    /// Seconds and tokens of others, which fill up the memory that local ones leave free.
    #[serde(skip)]
    lent: Sum,
}

impl Stretch {
    fn token(&self) -> Option<f64> {
        let Sum(seconds, tokens) = self.lent.within(MEMORY - self.tokens);
        let (seconds, tokens) = (self.seconds + seconds, self.tokens + tokens);
        (tokens >= KNOWN).then(|| (seconds / tokens).max(1e-7))
    }

    /// Factor for the weight after the idle time; the minimum that makes the pace known stays
    /// through any idle time.
    fn idle_since(&self, now: Tick) -> f64 {
        let idle_since = IDLE_HALF_WEIGHT / (IDLE_HALF_WEIGHT + now.seconds_since(self.at));
        idle_since.max((KNOWN / self.tokens.max(1e-9)).min(1.0))
    }

    fn note(&mut self, seconds: f64, tokens: f64, now: Tick) {
        let keep = (-tokens.min(64.0) / MEMORY).exp() * self.idle_since(now);
        self.seconds = self.seconds * keep + seconds;
        self.tokens = self.tokens * keep + tokens;
        self.at = self.at.max(now);
    }
}

/// Seconds per plain token, by concurrency bucket.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Pace {
    stretches: [Stretch; SIZES],
}

impl Pace {
    /// Notes that `tokens` plain tokens came `seconds` after the ones before.
    pub fn note_plain(&mut self, concurrency: ConcurrencyBucket, seconds: f64, tokens: usize, now: Tick) {
        let tokens = tokens as f64;
        let Some(stretch) = self.stretches.get_mut(concurrency.0) else { return };
        let seconds = match stretch.token() {
            Some(mean) if stretch.tokens >= SETTLED => seconds.min(mean * (tokens + PAUSE_TOKENS)),
            _ => seconds,
        };
        stretch.note(seconds, tokens, now);
    }

    /// As [`Self::note_plain`], while the engine read a prompt or began to continue a request.
    pub fn note_reading(&mut self, concurrency: ConcurrencyBucket, seconds: f64, tokens: usize, now: Tick) {
        if let Some(stretch) = self.stretches.get_mut(concurrency.0) {
            stretch.note(seconds * READING, tokens as f64 * READING, now);
        }
    }

    /// Replaces the measurements at this concurrency by one, seconds and tokens.
    pub fn replace(&mut self, concurrency: ConcurrencyBucket, measured: Sum, now: Tick) {
        if let Some(stretch) = self.stretches.get_mut(concurrency.0) {
            (stretch.seconds, stretch.tokens, stretch.at) = (measured.0, measured.1, now);
        }
    }

    /// Reduces the weight of the measurement at this concurrency, which is to be measured anew.
    pub fn loosen(&mut self, concurrency: ConcurrencyBucket) {
        if let Some(stretch) = self.stretches.get_mut(concurrency.0) {
            let keep = (LOOSE / stretch.tokens.max(1e-9)).min(1.0);
            (stretch.seconds, stretch.tokens) = (stretch.seconds * keep, stretch.tokens * keep);
        }
    }

    /// Makes `now` the origin of time, keeping the present certainty of every pace.
    pub fn age(&mut self, now: Tick) {
        for stretch in &mut self.stretches {
            let keep = stretch.idle_since(now);
            *stretch = Stretch {
                seconds: stretch.seconds * keep,
                tokens: stretch.tokens * keep,
                at: Tick::default(),
                ..*stretch
            };
        }
    }

    /// Seconds and tokens that were measured here, by concurrency, with their weight at `now`.
    pub fn shared(&self, now: Tick) -> BTreeMap<usize, Sum> {
        let weighted = |stretch: &Stretch| {
            let keep = stretch.idle_since(now);
            Sum(stretch.seconds * keep, stretch.tokens * keep)
        };
        let measured = self.stretches.iter().enumerate().filter(|(_, stretch)| stretch.tokens > 0.0);
        measured.map(|(at, stretch)| (at, weighted(stretch))).collect()
    }

    /// Replaces the measurements of others.
    pub fn lend(&mut self, lent: &BTreeMap<usize, Sum>) {
        for (at, stretch) in self.stretches.iter_mut().enumerate() {
            stretch.lent = lent.get(&at).copied().unwrap_or_default();
        }
    }

    /// Seconds per plain token at this concurrency, or at the nearest measured one, of two the
    /// lower; `None` before four were timed at any.
    pub fn token(&self, concurrency: ConcurrencyBucket) -> Option<f64> {
        let known =
            self.stretches.iter().enumerate().filter_map(|(at, stretch)| Some((at, stretch.token()?)));
        known.min_by_key(|&(at, _)| at.abs_diff(concurrency.0)).map(|(_, token)| token)
    }

    /// Seconds per plain token at the concurrency where they are fewest; `None` before four were
    /// timed at any.
    pub fn lowest(&self) -> Option<f64> {
        self.stretches.iter().filter_map(Stretch::token).min_by(f64::total_cmp)
    }

    /// True if other sidecars have measured the pace at this concurrency.
    pub fn is_lent(&self, concurrency: ConcurrencyBucket) -> bool {
        self.stretches.get(concurrency.0).is_some_and(|stretch| stretch.lent.1 >= KNOWN)
    }

    /// Seconds per plain token at exactly this concurrency; `None` before four were timed there.
    pub fn token_of(&self, concurrency: ConcurrencyBucket) -> Option<f64> {
        self.stretches.get(concurrency.0).and_then(Stretch::token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concurrencies_have_their_own_paces_and_lend_to_their_neighbours() {
        let mut pace = Pace::default();
        (0..40).for_each(|_| pace.note_plain(ConcurrencyBucket::of(1), 0.010, 1, Tick(0)));
        assert!((pace.token(ConcurrencyBucket::of(20)).unwrap() - 0.010).abs() < 1e-9);
        (0..40).for_each(|_| pace.note_plain(ConcurrencyBucket::of(16), 0.030, 1, Tick(0)));
        assert!((pace.token(ConcurrencyBucket::of(20)).unwrap() - 0.030).abs() < 1e-9);
        assert!((pace.token(ConcurrencyBucket::of(1)).unwrap() - 0.010).abs() < 1e-9);
        assert_eq!(pace.token_of(ConcurrencyBucket::of(4)), None);
    }

    #[test]
    fn bursts_do_not_hide_the_pace_and_idle_time_does_not_forget_it() {
        let mut pace = Pace::default();
        for _ in 0..40 {
            pace.note_plain(ConcurrencyBucket::default(), 0.040, 1, Tick(0));
            pace.note_plain(ConcurrencyBucket::default(), 0.0, 3, Tick(0));
        }
        let token = pace.token(ConcurrencyBucket::default()).unwrap();
        assert!((token - 0.010).abs() < 0.001, "{token}");
        let hours = Tick(10_000_000_000);
        (0..4).for_each(|_| pace.note_plain(ConcurrencyBucket::default(), 0.020, 1, hours));
        let token = pace.token(ConcurrencyBucket::default()).unwrap();
        assert!((0.014..0.020).contains(&token), "after idle time a few tokens weigh much: {token}");
    }
}
