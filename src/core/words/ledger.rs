//! Drift ledger: how far a relaxed acceptance rule moves an output from the target's distribution.

/// The drift of one output; zero by the exact rule.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ledger {
    /// Sum of the total variations charged at the positions decided by a relaxed rule, whatever
    /// token was chosen there. Its mean over outputs limits the distance of their distribution from
    /// the target's; the sum of one output does not limit that output.
    pub charged: f64,
    /// Tokens emitted that the target had not chosen.
    pub substitutions: u32,
    /// Positions at which the rule was relaxed.
    pub relaxed: u32,
    /// Positions decided by the exact rule because the probabilities there are not known.
    pub unknown: u32,
    /// Positions decided by the exact rule because a limit of drift was reached.
    pub limited: u32,
}

/// Limits of an output's drift.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DriftLimits {
    /// Maximum total variation charged to one output, which limits the distance of its distribution
    /// from the target's; `None` is without limit.
    pub total: Option<f64>,
    /// Maximum total variation charged per output token, on average so far. Alone it does not limit
    /// a complete output.
    pub rate: f64,
}

impl Ledger {
    /// Total variation charged per output token.
    pub fn rate(&self, output_tokens: u32) -> f64 {
        self.charged / f64::from(output_tokens.max(1))
    }

    /// Charges `tv` for the position behind `output` tokens, before it is decided. Returns true if
    /// the limits allow it; otherwise nothing is charged.
    pub fn charge(&mut self, tv: f64, output: usize, limits: DriftLimits) -> bool {
        let sum = self.charged + tv;
        let within = limits.total.is_none_or(|most| sum <= most) && sum <= limits.rate * (output + 1) as f64;
        if within {
            self.charged = sum;
            self.relaxed += 1;
        } else {
            self.limited += 1;
        }
        within
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_charge_beyond_a_limit_is_refused_and_costs_nothing() {
        let mut ledger = Ledger::default();
        let limits = DriftLimits { total: Some(0.5), rate: 0.1 };
        assert!(!ledger.charge(0.2, 0, limits), "a tenth per token");
        assert!(ledger.charge(0.2, 1, limits));
        assert!(ledger.charge(0.3, 9, limits));
        assert!(!ledger.charge(0.01, 99, limits), "half in all");
        assert!((ledger.charged - 0.5).abs() < 1e-12);
        assert_eq!((ledger.relaxed, ledger.limited), (2, 2));
    }
}
