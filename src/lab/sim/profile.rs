//! Engines of the simulation: step times ([`foretell_onnx::pace`]), sizes, and disturbances.

use serde::Deserialize;

use super::values::number;
use foretell_core::units::{SplitMix64, Tick};
use foretell_onnx::pace::curve::Curve;
use foretell_onnx::pace::profile::Profile;

/// Random variation of step times.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Jitter {
    /// Every step is within this share of its time.
    #[serde(deserialize_with = "number::<_, 0, 1>")]
    pub spread: f64,
    /// Probability that a step is disturbed.
    #[serde(deserialize_with = "number::<_, 0, 1>")]
    pub rare: f64,
    /// Minimum factor of a disturbed step; the factor has a Pareto tail of index 2, cut at 20.
    #[serde(deserialize_with = "number::<_, 1, 20>")]
    pub tail: f64,
}

impl Default for Jitter {
    fn default() -> Self {
        Self::NONE
    }
}

impl Jitter {
    /// Every step takes exactly its time.
    pub const NONE: Self = Self { spread: 0.0, rare: 0.0, tail: 1.0 };
    /// Plus or minus 5 %, and 1 step in 100 disturbed.
    pub const USUAL: Self = Self { spread: 0.05, rare: 0.01, tail: 2.0 };

    /// Seconds for which one draw is used.
    const DRAW_SECONDS: f64 = 0.01;

    /// The factor of a step that begins at `now`. It depends only on the seed and the moment, as
    /// disturbances from outside do: two runs with the same seed are disturbed at the same times,
    /// so that they can be compared.
    pub fn factor(&self, seed: u64, now: Tick) -> f64 {
        if self.spread == 0.0 && self.rare == 0.0 {
            return 1.0;
        }
        let mut rng = SplitMix64::new(SplitMix64::mix(
            seed ^ SplitMix64::mix((now.seconds_since(Tick(0)) / Self::DRAW_SECONDS) as u64),
        ));
        let even = 1.0 + self.spread * (2.0 * rng.unit() - 1.0);
        if rng.unit() >= self.rare {
            return even;
        }
        even * (self.tail / (1.0 - rng.unit()).sqrt()).min(20.0)
    }
}

/// Pace and limits of an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    pub pace: Curve,
    /// Maximum number of sequences in a step.
    pub sequences: usize,
    /// Capacity of its KV memory, tokens.
    pub kv: usize,
    /// Maximum number of tokens in a step.
    pub chunk: usize,
    /// Tokens of a block of the prefix cache; tokens after the last complete block are recomputed.
    pub block: usize,
}

impl Shape {
    /// The usual sizes of a profile: KV memory is a device's memory without a tenth and the
    /// weights.
    pub const fn of(profile: Profile) -> Self {
        match profile {
            Profile::L4With7b => gpu(profile, 15_000),
            Profile::L4With8b => gpu(profile, 42_000),
            Profile::H100With8b => gpu(profile, 420_000),
            Profile::H100With70b => gpu(profile, 430_000),
            Profile::B200With70b => gpu(profile, 550_000),
            Profile::VllmCpu => cpu(profile, 32),
            Profile::LlamaCpu | Profile::Onnx | Profile::OnnxInflated => cpu(profile, 1),
        }
    }
}

const fn gpu(profile: Profile, kv: usize) -> Shape {
    Shape { pace: profile.curve(), sequences: 256, kv, chunk: profile.step_tokens(), block: 16 }
}

const fn cpu(profile: Profile, block: usize) -> Shape {
    Shape { pace: profile.curve(), sequences: 9, kv: 16_384, chunk: profile.step_tokens(), block }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_has_a_tail_and_no_jitter_has_none() {
        let at = |jitter: Jitter, number: u64| jitter.factor(7, Tick(number * 10_000));
        assert!((0..100).all(|number| (at(Jitter::NONE, number) - 1.0).abs() < 1e-12));
        let drawn: Vec<f64> = (0..10_000).map(|number| at(Jitter::USUAL, number)).collect();
        let late = drawn.iter().filter(|factor| **factor > 1.5).count();
        assert!((60..150).contains(&late), "{late}");
        assert!(drawn.iter().all(|factor| (0.95..=21.0).contains(factor)));
    }
}
