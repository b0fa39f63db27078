//! The coverage report, as the admin API answers it and the command line prints it.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

/// Output tokens since the start of a process, by path and reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CoverageReport {
    /// When the process began, Unix seconds.
    pub since: f64,
    /// Requests for text that have ended.
    pub requests: u64,
    /// Their output tokens.
    pub tokens: u64,
    /// The part of these that is estimated, because an answer did not report its usage.
    pub estimated_tokens: u64,
    /// Share of the tokens of eligible requests: path `speculated`, and `plain`
    /// unless its reason is permanent; `None` without a token.
    pub may_speculate: Option<f64>,
    /// Share of the tokens of requests that were speculated on; `None` without a token.
    pub speculated: Option<f64>,
    /// Projected speedup of the eligible tokens, as a multiple of plain decoding;
    /// `None` while none is projected.
    pub expected_speedup: Option<f64>,
    /// Reasons for which the others were passed through or decoded plainly, by number of tokens.
    pub rest: Vec<IneligibleTokens>,
    /// Every combination of names, by number of tokens; at most 500, then one of all others.
    pub rows: Vec<CoverageRow>,
    /// The report in one sentence.
    pub sentence: String,
}

/// Tokens that are not eligible for one reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IneligibleTokens {
    /// The reason, as in metrics.
    pub reason: String,
    /// The policy that is the reason; empty if none is.
    pub policy: String,
    /// The reason in plain words.
    pub words: String,
    pub tokens: u64,
    /// Their share in all output tokens.
    pub share: f64,
}

/// Tokens of requests that have all these names in common. Names are those of labels of metrics.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CoverageRow {
    /// The policy, without its revision; empty without one.
    pub policy: String,
    /// The backend; empty if none was chosen.
    pub backend: String,
    pub route: String,
    pub path: String,
    /// Reason for which they were not speculated on, or not to the end; empty if there is none.
    pub reason: String,
    /// Number of requests.
    pub requests: u64,
    /// Their output tokens.
    pub tokens: u64,
    /// Share in all output tokens.
    pub share: f64,
}

impl CoverageRow {
    /// Policy, backend, route, path and reason.
    pub fn names(&self) -> [&str; 5] {
        [&self.policy, &self.backend, &self.route, &self.path, &self.reason]
    }
}

impl CoverageReport {
    /// The report in one sentence.
    pub(super) fn summary(&self) -> String {
        let Some(may) = self.may_speculate else {
            let what = if self.requests == 0 {
                "No request for text has ended"
            } else {
                "No output token was counted"
            };
            return format!("{what} yet");
        };
        let mut said = format!("{} of your output tokens are eligible", percent(may));
        if let Some(speedup) = self.expected_speedup {
            let _ = write!(said, "; expected {speedup:.1}×");
        }
        if let Some(IneligibleTokens { reason, policy, share, .. }) = self.rest.first() {
            let policy = if policy.is_empty() { String::new() } else { format!(" {policy}") };
            let _ = write!(said, "; the largest rest: {reason}{policy}, {}", percent(*share));
        }
        said
    }
}

/// A share in percent; one that is neither none nor all is never rounded to that.
pub fn percent(share: f64) -> String {
    let rounded = (100.0 * share).round();
    if share > 0.0 && rounded < 1.0 {
        "under 1 %".to_owned()
    } else if share < 1.0 && rounded > 99.0 {
        "over 99 %".to_owned()
    } else {
        format!("{rounded:.0} %")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_rounded_but_never_to_none_or_all() {
        let told = [0.0, 0.004, 0.624, 0.996, 1.0].map(percent);
        assert_eq!(told, ["0 %", "under 1 %", "62 %", "over 99 %", "100 %"]);
    }

    #[test]
    fn there_is_a_sentence_without_traffic_too() {
        let empty = CoverageReport {
            since: 0.0,
            requests: 0,
            tokens: 0,
            estimated_tokens: 0,
            may_speculate: None,
            speculated: None,
            expected_speedup: Some(1.5),
            rest: Vec::new(),
            rows: Vec::new(),
            sentence: String::new(),
        };
        assert_eq!(empty.summary(), "No request for text has ended yet");
        let failed = CoverageReport { requests: 3, ..empty.clone() };
        assert_eq!(failed.summary(), "No output token was counted yet");
        let all = CoverageReport { may_speculate: Some(1.0), expected_speedup: None, ..empty };
        assert_eq!(all.summary(), "100 % of your output tokens are eligible");
    }
}
