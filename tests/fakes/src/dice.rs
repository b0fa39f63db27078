//! Dice without memory: numbers that are a function of their place alone.
//!
//! Written here and not taken from Foretell: what a fake says may not depend on what is tested against it.

/// A 64-bit hash of a place (SplitMix64 finaliser over each part).
pub fn hash(seed: u64, table: u32, position: u64, token: u32) -> u64 {
    let place = mix(seed ^ mix(position.wrapping_add(0x9E37_79B9_7F4A_7C15)));
    mix(place ^ mix((u64::from(table) << 32) | u64::from(token)))
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Standard Gumbel noise of a place. `libm` and not the system's logarithm: the same texts on every machine.
pub fn gumbel(seed: u64, table: u32, position: u64, token: u32) -> f64 {
    let uniform = ((hash(seed, table, position, token) >> 12) as f64 + 0.5) / 4_503_599_627_370_496.0;
    -libm::log(-libm::log(uniform))
}
