//! The noise that decides a sample: a public function of (seed, choice, position, token).
//!
//! A target that samples by `argmax(logit / T + gumbel)` with noise that depends only on the
//! position gives the same text however the tokens were computed: plainly, behind a draft, or after
//! a switch. A drafter that knows the seed draws with the same noise, and so agrees far more often
//! than one that is merely greedy (weighted-MinHash coupling, Daliri et al., arXiv 2408.07978).

use foretell_core::units::SplitMix64;

/// A 64-bit hash of the position and the token, each input fully mixed (SplitMix64 finaliser).
pub fn hash(seed: u64, choice: u32, position: u64, token: u32) -> u64 {
    let position_noise =
        SplitMix64::mix(seed ^ SplitMix64::mix(position.wrapping_add(0x9E37_79B9_7F4A_7C15)));
    SplitMix64::mix(position_noise ^ SplitMix64::mix((u64::from(choice) << 32) | u64::from(token)))
}

/// A uniform number in (0, 1): 52 bits of the hash, centred in their cell so that neither end is
/// reached.
pub fn uniform(hash: u64) -> f64 {
    ((hash >> 12) as f64 + 0.5) * (1.0 / 4_503_599_627_370_496.0)
}

/// Standard Gumbel noise for one token at one position. Uses `libm` and not the system's logarithm,
/// so that every machine draws the same.
pub fn gumbel(seed: u64, choice: u32, position: u64, token: u32) -> f64 {
    let u = uniform(hash(seed, choice, position, token));
    -libm::log(-libm::log(u))
}

/// Hash and noise of one position, for many tokens: the inputs that do not depend on the token are
/// mixed once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PositionNoise {
    mixed: u64,
    choice: u64,
}

impl PositionNoise {
    pub(crate) fn new(seed: u64, choice: u32, position: u64) -> Self {
        let mixed = SplitMix64::mix(seed ^ SplitMix64::mix(position.wrapping_add(0x9E37_79B9_7F4A_7C15)));
        Self { mixed, choice: u64::from(choice) << 32 }
    }

    /// The same number as [`hash`].
    pub(crate) fn hash(self, token: u32) -> u64 {
        SplitMix64::mix(self.mixed ^ SplitMix64::mix(self.choice | u64::from(token)))
    }

    pub(crate) fn noise(hash: u64) -> f64 {
        -libm::log(-libm::log(uniform(hash)))
    }

    /// An upper limit of [`PositionNoise::noise`] without a logarithm: −ln(−ln u) ≤ −ln(1 − u), and
    /// 1 − u is at least half the power of two at its leading bit. The slack covers the rounding of
    /// the two logarithms.
    pub(super) fn ceiling(hash: u64) -> f64 {
        f64::from((!hash).leading_zeros().min(52) + 1) * std::f64::consts::LN_2 + 1e-9
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed from the definition by another implementation (Python integers, `math.log`).
    const GOLDEN: &[(u64, u32, u64, u32, u64, f64)] = &[
        (0, 0, 0, 0, 0x673A_EDCB_0CDF_AEA7, 0.096_272_948_089_269_74),
        (1, 0, 5, 9, 0x7ADB_317C_8E39_C8F5, 0.309_024_633_826_520_6),
        (42, 0, 1_023, 8_191, 0x112B_4EEF_63EC_5846, -0.994_015_157_200_791_6),
        (42, 1, 1_023, 8_191, 0x169C_1A95_703E_02D3, -0.886_571_399_202_983_6),
        (
            18_446_744_073_709_551_615,
            4_294_967_295,
            18_446_744_073_709_551_615,
            4_294_967_295,
            0x86E5_EFA6_C45B_13A1,
            0.445_260_889_948_375_3,
        ),
        (9_007_199_254_740_991, 0, 300, 17, 0xF5CA_CFFB_D967_02F5, 3.201_752_416_468_222_5),
        (12_345_678_901_234_567_890, 3, 2_047, 31_999, 0x5D9F_E625_B661_9AA6, -0.005_866_971_676_913_872),
    ];

    #[test]
    fn hash_and_noise_equal_the_golden_vectors() {
        assert!(!GOLDEN.is_empty());
        for &(seed, choice, position, token, want, noise) in GOLDEN {
            assert_eq!(hash(seed, choice, position, token), want);
            assert_eq!(PositionNoise::new(seed, choice, position).hash(token), want);
            let got = gumbel(seed, choice, position, token);
            assert!((got - noise).abs() <= 1e-12 * noise.abs().max(1.0), "{got} is not {noise}");
            assert_eq!(PositionNoise::noise(want).to_bits(), got.to_bits());
        }
    }

    #[test]
    fn the_bound_is_never_below_the_noise_and_follows_it_closely() {
        let position_noise = PositionNoise::new(7, 0, 3);
        for token in 0..200_000 {
            let hash = position_noise.hash(token);
            let noise = PositionNoise::noise(hash);
            assert!(noise <= PositionNoise::ceiling(hash));
            assert!(noise < 1.0 || PositionNoise::ceiling(hash) - noise < 1.0, "{noise}");
        }
        for hash in [0, u64::MAX, u64::MAX - 1, 1 << 63, (1 << 63) - 1] {
            assert!(
                PositionNoise::noise(hash).is_finite()
                    && PositionNoise::noise(hash) <= PositionNoise::ceiling(hash),
                "{hash:x}"
            );
        }
    }

    #[test]
    fn every_part_of_the_position_changes_the_noise() {
        let base = hash(1, 0, 5, 9);
        for other in [hash(2, 0, 5, 9), hash(1, 1, 5, 9), hash(1, 0, 6, 9), hash(1, 0, 5, 10)] {
            assert!((base ^ other).count_ones() > 12, "{base:x} and {other:x} are too alike");
        }
    }
}
