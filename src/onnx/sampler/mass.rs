//! Sums and maxima over a complete vocabulary: the only code that computes an exponential for every
//! token.
//!
//! Single precision, written so that compilers turn it into vector code, with the same bits on
//! every machine (only additions and multiplications). Accurate to a few parts in ten million.

/// Independent sums, so that additions need not wait for each other.
const LANES: usize = 16;
/// Tokens that are summed in single precision before the sum continues in double precision.
const BLOCK: usize = 4 * LANES;
/// Adding this constant rounds to an integer, which is then in the lowest bits.
const ROUND: f32 = 12_582_912.0;

/// Σ exp((logit − most) · inverse) over all logits, `most` being the largest.
pub(super) fn sum_exp(logits: &[f32], most: f32, inverse: f32) -> f64 {
    let factor = inverse * std::f32::consts::LOG2_E;
    logits
        .chunks(BLOCK)
        .map(|block| {
            let mut lanes = [0.0_f32; LANES];
            for part in block.chunks(LANES) {
                for (lane, &logit) in lanes.iter_mut().zip(part) {
                    *lane += exp2((logit - most) * factor);
                }
            }
            lanes.iter().map(|&lane| f64::from(lane)).sum::<f64>()
        })
        .sum()
}

/// The largest logit; NaN is ignored.
pub(crate) fn largest(logits: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for part in logits.chunks(LANES) {
        for (lane, &logit) in lanes.iter_mut().zip(part) {
            *lane = if logit > *lane { logit } else { *lane };
        }
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// 2 to the power of a number that is not positive; powers below −126 count as −126.
fn exp2(power: f32) -> f32 {
    let power = power.max(-126.0);
    let rounded = power + ROUND;
    let rest = (power - (rounded - ROUND)) * std::f32::consts::LN_2;
    let series = 1.0 / 120.0 + rest * (1.0 / 720.0);
    let series = 0.5 + rest * (1.0 / 6.0 + rest * (1.0 / 24.0 + rest * series));
    let fraction = 1.0 + rest * (1.0 + rest * series);
    f32::from_bits(fraction.to_bits().wrapping_add(rounded.to_bits() << 23))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_are_good_to_a_few_parts_in_ten_million() {
        for step in 0..120_000 {
            let power = -(step as f32) * 0.001;
            let want = f64::from(power).exp2();
            let off = (f64::from(exp2(power)) - want).abs() / want;
            assert!(off < 4e-7, "{power}: {off}");
        }
        assert_eq!(exp2(0.0).to_bits(), 1.0_f32.to_bits());
        assert!(exp2(f32::NEG_INFINITY) < 2e-38);
    }

    #[test]
    fn the_mass_is_that_of_the_definition_whatever_the_length() {
        for length in [1, 15, 16, 17, 63, 64, 65, 8191] {
            let logits: Vec<f32> = (0..length).map(|token| -((token * 37 % 211) as f32) * 0.17).collect();
            let want: f64 = logits.iter().map(|&logit| (f64::from(logit) / 0.7).exp()).sum();
            let got = sum_exp(&logits, 0.0, 1.0 / 0.7);
            assert!((got - want).abs() < 2e-6 * want, "{length}: {got} is not {want}");
        }
    }
}
