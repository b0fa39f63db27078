//! The price of drift: what a unit of total variation has to bring, in tokens of a round.
//!
//! A policy allows so much drift per token. It is spent where it brings most: a position is relaxed
//! only if the tokens that follow its draft token, for each unit that is charged, reach
//! the price. The price rises while more is charged than is allowed and falls while less is. So it
//! is the multiplier of Lagrange of the allowance, by dual ascent.

use serde::{Deserialize, Serialize};

use std::collections::HashMap;

/// Change of the price's logarithm for each token's allowance that is charged or not.
const STEP: f64 = 0.003;
/// Maximum price: no draft is longer.
const MOST: f64 = 64.0;
/// Maximum number of prices.
const PRICES: usize = 512;

/// Prices by the number of the policy and route of requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DriftPrices(#[serde(with = "super::pairs")] HashMap<u64, f64>);

impl DriftPrices {
    /// The tokens that a unit of drift has to bring.
    pub fn of(&self, kind: u64) -> f64 {
        self.0.get(&kind).map_or(1.0, |log| log.exp())
    }

    /// Notes that `charged` was charged for so many tokens, each of which allows `each`.
    pub fn spent(&mut self, kind: u64, charged: f64, tokens: usize, each: f64) {
        let known = self.0.len() < PRICES || self.0.contains_key(&kind);
        if known && each > 0.0 && charged.is_finite() {
            let log = self.0.entry(kind).or_default();
            *log = (*log + STEP * (charged / each - tokens as f64)).clamp(0.0, MOST.ln());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::SplitMix64;

    #[test]
    fn the_allowance_is_spent_where_it_brings_most() {
        let (mut prices, mut rng) = (DriftPrices::default(), SplitMix64::new(1));
        let (mut charged, mut relaxed, mut tokens): (f64, Vec<f64>, f64) = (0.0, Vec::new(), 0.0);
        for position in 0..20_000 {
            // Each position would charge 0.1, and bring 1 to 9 tokens; 0.02 a token is allowed.
            let worth = 1.0 + 8.0 * rng.unit();
            let spends = worth >= prices.of(7);
            prices.spent(7, if spends { 0.1 } else { 0.0 }, 1, 0.02);
            if position >= 5_000 {
                tokens += 1.0;
                charged += if spends { 0.1 } else { 0.0 };
                relaxed.extend(spends.then_some(worth));
            }
        }
        assert!((charged / tokens - 0.02).abs() < 0.001, "{}", charged / tokens);
        // A fifth of the positions: those that bring most.
        let mean = relaxed.iter().sum::<f64>() / relaxed.len() as f64;
        assert!(mean > 7.8, "{mean}");
        assert!((DriftPrices::default().of(7) - 1.0).abs() < 1e-12);
    }
}
