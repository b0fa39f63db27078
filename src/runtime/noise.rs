//! The noise that decides a sample: a public function of (seed, choice, position, token).
//!
//! A target that samples by `argmax(logit / T + gumbel)` with noise that depends on nothing but the place
//! gives the same text however the tokens were computed: plainly, behind a draft, or after a switch. A
//! drafter that knows the seed draws with the same noise, and so agrees far more often than one that is
//! merely greedy (weighted-MinHash coupling, Daliri et al., arXiv 2408.07978).

/// A 64-bit hash of the place and the token, each input fully mixed (SplitMix64 finaliser).
pub fn hash(seed: u64, choice: u32, position: u64, token: u32) -> u64 {
    let place = mix(seed ^ mix(position.wrapping_add(0x9E37_79B9_7F4A_7C15)));
    mix(place ^ mix((u64::from(choice) << 32) | u64::from(token)))
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A uniform number in (0, 1): 52 bits of the hash, centred in their cell so that neither end is reached.
pub fn uniform(hash: u64) -> f64 {
    ((hash >> 12) as f64 + 0.5) * (1.0 / 4_503_599_627_370_496.0)
}

/// Standard Gumbel noise for one token at one place. `libm` and not the system's logarithm, so that every
/// machine draws the same.
pub fn gumbel(seed: u64, choice: u32, position: u64, token: u32) -> f64 {
    let u = uniform(hash(seed, choice, position, token));
    -libm::log(-libm::log(u))
}
