//! Exact enumeration of random choices, and the small target that makes them.

use std::collections::BTreeMap;

use foretell::units::TokenId;

// ---- exact enumeration of random choices -----------------------------------------------------------------

/// Plays one path through all choices; the paths are visited in order.
#[derive(Default)]
pub struct Oracle {
    pub tape: Vec<(usize, usize)>,
    pub at: usize,
    pub weight: f64,
}

impl Oracle {
    pub fn pick(&mut self, weights: &[f64]) -> usize {
        if self.at == self.tape.len() {
            self.tape.push((0, weights.len()));
        }
        let choice = self.tape[self.at].0;
        self.at += 1;
        self.weight *= weights[choice];
        choice
    }
}

pub type Law = BTreeMap<String, f64>;

pub fn law(mut run: impl FnMut(&mut Oracle) -> String) -> Law {
    let mut law = Law::new();
    let mut oracle = Oracle::default();
    loop {
        oracle.at = 0;
        oracle.weight = 1.0;
        let key = run(&mut oracle);
        *law.entry(key).or_default() += oracle.weight;
        oracle.tape.truncate(oracle.at);
        while oracle.tape.last().is_some_and(|&(choice, of)| choice + 1 == of) {
            oracle.tape.pop();
        }
        match oracle.tape.last_mut() {
            Some(last) => last.0 += 1,
            None => return law,
        }
    }
}

pub fn distance(a: &Law, b: &Law) -> f64 {
    let keys: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let of = |law: &Law, key: &String| law.get(key).copied().unwrap_or(0.0);
    keys.into_iter().map(|key| (of(a, key) - of(b, key)).abs()).sum::<f64>() / 2.0
}

// ---- toys ------------------------------------------------------------------------------------------------

/// A target that depends on the last two tokens and on how long the context is.
#[derive(Clone, Copy)]
pub struct Toy {
    pub vocabulary: usize,
    pub salt: u64,
}

impl Toy {
    pub fn weights(self, context: &[TokenId]) -> Vec<f64> {
        let tail = context
            .iter()
            .rev()
            .take(2)
            .fold(self.salt + context.len() as u64, |seed, &token| mix(seed ^ (u64::from(token) + 1)));
        let raw: Vec<f64> =
            (0..self.vocabulary).map(|token| 1.0 + (mix(tail + token as u64 * 77) % 9) as f64).collect();
        let sum: f64 = raw.iter().sum();
        raw.iter().map(|weight| weight / sum).collect()
    }

    pub fn favourite(self, context: &[TokenId], rank: usize) -> TokenId {
        let weights = self.weights(context);
        let mut order: Vec<usize> = (0..self.vocabulary).collect();
        order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
        order[rank % order.len()] as TokenId
    }
}

pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
