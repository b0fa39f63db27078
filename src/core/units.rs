//! Units that every crate uses: a token id, a moment, and seeded random numbers.
//!
//! The pure crates read no clock and draw no random numbers. A moment reaches them as a [`Tick`],
//! so a test can play hours in a microsecond and a replay is the run itself.

use serde::{Deserialize, Serialize};

use std::ops::Sub;
use std::time::Duration;

/// A token id of the target's vocabulary.
pub type TokenId = u32;

/// Microseconds since an origin that only the caller knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Tick(pub u64);

impl Tick {
    /// The moment `duration` later; saturates at the largest tick.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(micros))
    }

    /// Seconds since `earlier`, zero if `earlier` is later.
    #[must_use]
    pub fn seconds_since(self, earlier: Self) -> f64 {
        self.0.saturating_sub(earlier.0) as f64 * 1e-6
    }
}

impl Sub for Tick {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

/// Seeded random numbers: SplitMix64 (Steele, Lea, Flood 2014). The same seed gives the same
/// numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// Increment of the state per draw.
    pub const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

    /// A generator that gives the same numbers for the same seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 random bits.
    pub const fn bits(&mut self) -> u64 {
        let bits = Self::mix(self.0);
        self.0 = self.0.wrapping_add(Self::STEP);
        bits
    }

    /// A number in 0..`end`; 0 if `end` is 0.
    pub const fn below(&mut self, end: u64) -> u64 {
        let bits = self.bits();
        if end == 0 { 0 } else { bits % end }
    }

    /// A uniform number in [0, 1).
    pub const fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// True with probability 1/`n`; always for an `n` of 0.
    pub const fn chance(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// 64 bits that depend on every bit of `value`: one step from the state `value`.
    pub const fn mix(value: u64) -> u64 {
        let z = value.wrapping_add(Self::STEP);
        let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform random number in (0, 1) of one position: a function of the seed and the position
    /// alone, independent of the number of draws made before.
    pub const fn at(seed: u64, position: usize) -> f64 {
        let bits = Self::mix(seed ^ Self::mix(position as u64));
        ((bits >> 12) as f64 + 0.5) / (1_u64 << 52) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_splitmix64() {
        // The published sequence from seed 1234567.
        let mut rng = SplitMix64::new(1_234_567);
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!(expected.map(|_| rng.bits()), expected);
    }

    #[test]
    fn draws_of_positions_are_uniform_and_independent_of_neighbours() {
        let n = 100_000;
        let draws: Vec<f64> = (0..n).map(|position| SplitMix64::at(3, position)).collect();
        assert!(draws.iter().all(|&draw| 0.0 < draw && draw < 1.0));
        let mean = draws.iter().sum::<f64>() / n as f64;
        let pairs = draws.windows(2).map(|pair| (pair[0] - 0.5) * (pair[1] - 0.5)).sum::<f64>() / n as f64;
        assert!((mean - 0.5).abs() < 0.005 && pairs.abs() < 0.002, "{mean} {pairs}");
    }
}
