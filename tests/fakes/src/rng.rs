//! Stateless random numbers: a pure function of their position.
//!
//! Implemented here and not taken from Foretell: a fake must not depend on the code that is tested
//! against it.

/// A 64-bit hash of a position (SplitMix64 finaliser over each part).
pub fn hash(seed: u64, table: u32, position: u64, token: u32) -> u64 {
    let mixed = mix(seed ^ mix(position.wrapping_add(0x9E37_79B9_7F4A_7C15)));
    mix(mixed ^ mix((u64::from(table) << 32) | u64::from(token)))
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Standard Gumbel noise of a position. Uses `libm` instead of the system's logarithm, for the same
/// texts on every machine.
pub fn gumbel(seed: u64, table: u32, position: u64, token: u32) -> f64 {
    noise(hash(seed, table, position, token))
}

/// The Gumbel noise of a hash.
pub fn noise(hash: u64) -> f64 {
    let uniform = ((hash >> 12) as f64 + 0.5) / 4_503_599_627_370_496.0;
    -libm::log(-libm::log(uniform))
}

/// Upper bound of the [`noise`] of a hash, without a logarithm: −ln(−ln u) ≤ −ln(1 − u) ≤ ln 2 for
/// every leading one of u, and one more.
pub fn most(hash: u64) -> f64 {
    f64::from(hash.leading_ones().min(52) + 1) * std::f64::consts::LN_2 + 1e-9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_noise_is_more_than_the_most() {
        let hashes = (0..100_000).map(|draw| hash(1, 2, 3, draw)).chain([0, 1 << 63, u64::MAX - 1, u64::MAX]);
        for hash in hashes {
            assert!(noise(hash) <= most(hash), "{hash:x}");
        }
    }
}
