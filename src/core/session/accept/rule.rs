//! The lossy acceptance rules: the probability of keeping the draft token at a position although
//! the target chose another one.
//!
//! All of them are put in one form. Before anything is read, one child x of the position is chosen.
//! Where the target's sample y is not x, x replaces it with probability (R(x) − p(x)) / (1 − p(x)):
//! so x results with probability R(x), which no rule sets below p(x), and every other token is
//! scaled by (1 − R(x)) / (1 − p(x)). The distribution at that position differs from the target's
//! by R(x) − p(x) in total variation. p is the *processed* distribution (temperature, penalties,
//! truncation).

use crate::words::Dist;

/// EARS rejects tokens with a smaller probability than this, as its authors' patch of vLLM does
/// (`clamp(min=0.01)`).
const MIN_EARS: f64 = 0.01;
/// The acceptance rule for draft tokens. All but `Exact` are lossy. p: the target's probability of
/// the draft token; R: the probability with which the rule emits it; τ: the tolerance, 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Rule {
    /// Sample and match: the text has the target's distribution.
    #[default]
    Exact,
    /// EARS as published (arXiv 2512.13194, one-hot drafts): R = p + τ(1 − max p), where p is at
    /// least 0.01 and at least κ · max p.
    Ears {
        /// κ: minimum probability of the draft token ÷ that of the most probable token; 0 is as
        /// published.
        kappa: f64,
    },
    /// Typical acceptance (Medusa, arXiv 2401.10774): R = 1 where p > min(ε, δ·exp(−H)), with H the
    /// entropy of the distribution. τ is the share of it that is used; 1 is as published.
    Typical {
        /// ε: maximum of the threshold on the token's probability.
        epsilon: f64,
        /// δ: factor of exp(−H) in that threshold.
        delta: f64,
    },
}

impl Rule {
    /// The name in policy files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Ears { .. } => "ears",
            Self::Typical { .. } => "typical",
        }
    }

    /// The probability of replacing the target's sample by the token that `known` describes, (R −
    /// p) / (1 − p), at tolerance `tau`: the minimum over all distributions that the known figures
    /// allow. `None` if too little is known.
    pub fn replacement_probability(self, known: &Known, tau: f64) -> Option<f64> {
        let Known { low, peak, entropy } = *known;
        if low <= 0.0 {
            return Some(0.0);
        }
        let slack = tau * (1.0 - peak).max(0.0);
        let relaxed = match self {
            Self::Exact => low,
            Self::Ears { kappa } if low < MIN_EARS.max(kappa * peak) => low,
            Self::Ears { .. } => low + slack,
            Self::Typical { epsilon, delta } => {
                let typical = low > epsilon.min(delta * (-entropy?).exp());
                if typical { low + tau * (1.0 - low) } else { low }
            }
        };
        // A draft token with probability 1 is never replaced.
        let rest = 1.0 - low;
        Some(if rest <= f64::EPSILON { 0.0 } else { ((relaxed.min(1.0) - low) / rest).clamp(0.0, 1.0) })
    }
}

/// Known figures of the target's distribution at a position for one token, before anything is drawn
/// there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Known {
    /// Minimum probability of the token.
    pub low: f64,
    /// Maximum probability of the most probable token.
    pub peak: f64,
    /// Entropy of the complete distribution, nats; `None` if not known.
    pub entropy: Option<f64>,
}

impl Known {
    /// The figures of a row for `token`, whose probability the backend may have `reported`
    /// separately; `None` if the row does not limit that probability, or lists no token.
    pub fn of(
        dist: &Dist,
        entropy: Option<f64>,
        token: crate::units::TokenId,
        reported: Option<f64>,
    ) -> Option<Self> {
        let listed = || dist.top.iter().find(|entry| entry.0 == token).map(|entry| entry.1);
        let low = reported.or_else(listed).or(dist.complete.then_some(0.0))?;
        let (_, first) = dist.top.first()?;
        let known = dist.slack <= 0.0;
        Some(Self {
            low,
            peak: (first * (1.0 + dist.slack)).max(low).min(1.0),
            entropy: entropy.or_else(|| (dist.complete && known).then(|| entropy_of(&dist.top))),
        })
    }
}

/// −Σ p ln p, nats.
fn entropy_of(dist: &[(crate::units::TokenId, f64)]) -> f64 {
    dist.iter().filter(|entry| entry.1 > 0.0).map(|entry| -entry.1 * entry.1.ln()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(low: f64, peak: f64) -> Known {
        Known { low, peak, entropy: Some(1.0) }
    }

    /// R(x) where p(x) is known.
    fn relaxed(rule: Rule, p: f64, peak: f64, tau: f64) -> f64 {
        p + rule.replacement_probability(&known(p, peak), tau).expect("known") * (1.0 - p)
    }

    #[test]
    fn every_rule_has_its_published_distribution() {
        let (ears, gated) = (Rule::Ears { kappa: 0.0 }, Rule::Ears { kappa: 0.3 });
        let typical = Rule::Typical { epsilon: 0.09, delta: 0.3 };
        for (rule, p, peak, tau, wanted) in [
            (Rule::Exact, 0.2, 0.5, 1.0, 0.2),
            (ears, 0.2, 0.5, 0.4, 0.4),
            (ears, 0.9, 0.9, 1.0, 1.0),
            (ears, 0.009, 0.5, 0.4, 0.009),
            (gated, 0.2, 0.5, 0.4, 0.4),
            (gated, 0.14, 0.5, 0.4, 0.14),
            (typical, 0.091, 0.5, 1.0, 1.0),
            (typical, 0.089, 0.5, 1.0, 0.089),
            (typical, 0.2, 0.5, 0.5, 0.6),
        ] {
            assert!((relaxed(rule, p, peak, tau) - wanted).abs() < 1e-12, "{rule:?} {p} {peak} {tau}");
        }
    }

    #[test]
    fn impossible_tokens_are_never_kept_and_unknown_ones_not_relaxed() {
        for rule in [Rule::Ears { kappa: 0.0 }, Rule::Ears { kappa: 0.3 }] {
            assert_eq!(rule.replacement_probability(&known(0.0, 0.5), 1.0), Some(0.0), "{rule:?}");
        }
        let dark = Known { entropy: None, ..known(0.2, 0.5) };
        assert_eq!(Rule::Typical { epsilon: 0.09, delta: 0.3 }.replacement_probability(&dark, 1.0), None);
    }

    #[test]
    fn between_bounds_the_minimum_is_kept() {
        let rules = [Rule::Ears { kappa: 0.0 }, Rule::Ears { kappa: 0.3 }];
        let dist = Dist { top: vec![(1, 0.4), (2, 0.2)], complete: false, slack: 0.25 };
        for token in [1, 2] {
            let low = Known::of(&dist, None, token, None).expect("listed");
            for rule in rules {
                let least = rule.replacement_probability(&low, 0.5).expect("known");
                // No distribution within these figures has a smaller probability.
                for step in 0..=20 {
                    let scale = 1.0 + 0.25 * f64::from(step) / 20.0;
                    let distribution = Known { low: low.low * scale, peak: 0.4 * scale, ..low };
                    let own = rule.replacement_probability(&distribution, 0.5).expect("known");
                    assert!(own >= least - 1e-12, "{rule:?} {token} {scale}: {own} {least}");
                }
            }
        }
        assert_eq!(Known::of(&dist, None, 3, None), None, "not listed");
    }
}
