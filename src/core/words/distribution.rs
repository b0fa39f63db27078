//! A complete distribution over tokens, for operations that need all of it: drawing, ratios,
//! residuals.

use crate::units::TokenId;
use crate::words::Dist;

/// A complete distribution: the tokens with a probability above zero, in ascending order of their
/// ids, and their probabilities, which sum to 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution(Vec<(TokenId, f64)>);

impl Distribution {
    /// The distribution in proportion to `weights`; the weights of a token that is listed twice are
    /// added. `None` if a weight is negative or not a number, or none is above 0.
    pub fn new(mut weights: Vec<(TokenId, f64)>) -> Option<Self> {
        let sum: f64 = weights.iter().map(|entry| entry.1).sum();
        if !(sum > 0.0 && sum.is_finite()) || weights.iter().any(|entry| entry.1 < 0.0) {
            return None;
        }
        weights.retain(|entry| entry.1 > 0.0);
        weights.sort_unstable_by_key(|entry| entry.0);
        weights.dedup_by(|twin, first| {
            let same = twin.0 == first.0;
            first.1 += if same { twin.1 } else { 0.0 };
            same
        });
        for entry in &mut weights {
            entry.1 /= sum;
        }
        Some(Self(weights))
    }

    /// The distribution that an engine reported; `None` if it did not report all of it exactly.
    pub fn told(dist: &Dist) -> Option<Self> {
        (dist.complete && dist.slack <= 0.0).then(|| Self::new(dist.top.clone()))?
    }

    /// The tokens with a probability above zero, in ascending order, with their probabilities.
    pub fn entries(&self) -> &[(TokenId, f64)] {
        &self.0
    }

    /// The probability of a token; 0 if it is not listed.
    pub fn of(&self, token: TokenId) -> f64 {
        let at = self.0.binary_search_by_key(&token, |entry| entry.0);
        at.ok().and_then(|at| self.0.get(at)).map_or(0.0, |entry| entry.1)
    }

    /// The token at the quantile `uniform`, in (0, 1).
    pub fn draw(&self, uniform: f64) -> TokenId {
        let mut left = uniform;
        let fallen = self.0.iter().find(|entry| {
            left -= entry.1;
            left <= 0.0
        });
        fallen.or(self.0.last()).map_or(0, |entry| entry.0)
    }

    /// Entropy, −Σ p ln p, nats.
    pub fn entropy(&self) -> f64 {
        self.0.iter().map(|entry| -entry.1 * entry.1.ln()).sum()
    }

    /// The excess of `scale` times this distribution over `other`, at every token where it is
    /// positive: max(0, scale · p − q), not normalised, in ascending order of the ids.
    pub fn excess(&self, scale: f64, other: &Self) -> Vec<(TokenId, f64)> {
        let mut rest = other.0.as_slice();
        let beyond = self.0.iter().map(|&(token, p)| {
            let skipped = rest.iter().take_while(|entry| entry.0 < token).count();
            rest = rest.get(skipped..).unwrap_or_default();
            let q = rest.first().filter(|entry| entry.0 == token).map_or(0.0, |entry| entry.1);
            (token, scale * p - q)
        });
        beyond.filter(|entry| entry.1 > 0.0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn distribution(weights: &[(TokenId, f64)]) -> Distribution {
        Distribution::new(weights.to_vec()).expect("a distribution")
    }

    #[test]
    fn weights_become_a_distribution_in_order_of_ids() {
        let distribution = distribution(&[(7, 1.0), (2, 2.0), (9, 0.0), (7, 1.0)]);
        assert_eq!(distribution.entries(), [(2, 0.5), (7, 0.5)]);
        assert_eq!((distribution.of(2), distribution.of(3), distribution.of(9)), (0.5, 0.0, 0.0));
        assert!((distribution.entropy() - 2.0_f64.ln()).abs() < 1e-15);
        for wrong in [vec![], vec![(1, 0.0)], vec![(1, 2.0), (2, -1.0)], vec![(1, f64::NAN)]] {
            assert_eq!(Distribution::new(wrong), None);
        }
    }

    #[test]
    fn only_a_complete_report_is_a_distribution() {
        let whole = Dist { top: vec![(4, 0.75), (1, 0.25)], complete: true, slack: 0.0 };
        assert_eq!(Distribution::told(&whole).expect("whole").entries(), [(1, 0.25), (4, 0.75)]);
        assert_eq!(Distribution::told(&Dist { complete: false, ..whole.clone() }), None);
        assert_eq!(Distribution::told(&Dist { slack: 0.1, ..whole }), None);
    }

    #[test]
    fn a_draw_returns_each_token_with_its_probability() {
        let distribution = distribution(&[(1, 0.2), (5, 0.3), (6, 0.5)]);
        let drawn = |uniform| distribution.draw(uniform);
        assert_eq!([0.1, 0.3, 0.49, 0.51, 0.999].map(drawn), [1, 5, 5, 6, 6]);
        assert_eq!(drawn(1.0 + 1e-9), 6, "rounding does not fall off the end");
    }

    #[test]
    fn the_excess_is_where_one_distribution_lies_above_the_other() {
        let (p, q) = (
            distribution(&[(1, 0.5), (3, 0.25), (4, 0.25)]),
            distribution(&[(0, 0.5), (3, 0.125), (4, 0.375)]),
        );
        assert_eq!(p.excess(1.0, &q), [(1, 0.5), (3, 0.125)]);
        assert_eq!(p.excess(0.5, &q), [(1, 0.25)]);
        assert_eq!(p.excess(1.0, &p), []);
    }
}
