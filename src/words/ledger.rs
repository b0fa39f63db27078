//! What judging has cost an output in drift from the target's law.

/// The drift of one output; zero by the exact rule.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ledger {
    /// The sum of the total variations charged for the places decided by a relaxed rule, whatever came of it there. Its
    /// mean over outputs bounds how far their distribution is from the target's; one output's own sum bounds nothing.
    pub charged: f64,
    /// Tokens emitted that the target had not chosen.
    pub substitutions: u32,
    /// Places at which the rule was relaxed.
    pub relaxed: u32,
    /// Places at which it was not, because the probabilities there are not known.
    pub unknown: u32,
    /// Places at which it was not, because a limit of drift was reached.
    pub limited: u32,
}

/// How much an output may drift.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DriftLimits {
    /// Most that may be charged to the whole output, so that no distribution of outputs is further from the target's;
    /// `None` is without bound.
    pub whole: Option<f64>,
    /// Most that may be charged per output token, on average so far. Alone it leaves the whole output unbounded.
    pub rate: f64,
}

impl Ledger {
    /// Charged per output token.
    pub fn rate(&self, output_tokens: u32) -> f64 {
        self.charged / f64::from(output_tokens.max(1))
    }

    /// Charges `tv` for the place behind `output` tokens, before it is decided. Returns whether the limits allow that;
    /// nothing is charged where they do not.
    pub fn charge(&mut self, tv: f64, output: usize, limits: DriftLimits) -> bool {
        let sum = self.charged + tv;
        let within = limits.whole.is_none_or(|most| sum <= most) && sum <= limits.rate * (output + 1) as f64;
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
        let limits = DriftLimits { whole: Some(0.5), rate: 0.1 };
        assert!(!ledger.charge(0.2, 0, limits), "a tenth per token");
        assert!(ledger.charge(0.2, 1, limits));
        assert!(ledger.charge(0.3, 9, limits));
        assert!(!ledger.charge(0.01, 99, limits), "half in all");
        assert!((ledger.charged - 0.5).abs() < 1e-12);
        assert_eq!((ledger.relaxed, ledger.limited), (2, 2));
    }
}
