//! What judging has cost an output in drift from the target's law.

/// The drift of one output; zero by the exact rule.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ledger {
    /// Bound of the total-variation distance of the output so far.
    pub tv: f64,
    /// Tokens emitted that the target had not chosen.
    pub substitutions: u32,
}

impl Ledger {
    /// Total variation per output token.
    pub fn rate(&self, output_tokens: u32) -> f64 {
        self.tv / f64::from(output_tokens.max(1))
    }
}
