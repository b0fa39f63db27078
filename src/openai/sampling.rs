//! How the target samples: the client's explicit fields plus the server's defaults.

use crate::units::TokenId;

/// Effective sampling of one request. Defaults are OpenAI's.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f64,
    /// Smallest set of tokens whose probability reaches this; 1 keeps all.
    pub top_p: f64,
    /// Most tokens kept; `None` keeps all.
    pub top_k: Option<u32>,
    /// Least probability relative to the most probable token; 0 keeps all.
    pub min_p: f64,
    /// Taken once from the logit of every token of the output so far.
    pub presence_penalty: f64,
    /// Taken per occurrence from the logit of every token of the output so far.
    pub frequency_penalty: f64,
    /// Divides positive and multiplies negative logits of tokens of prompt and output; 1 is none.
    pub repetition_penalty: f64,
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// The client's seed.
    pub seed: Option<u64>,
    /// The end-of-text token may not be sampled before this many output tokens.
    pub min_tokens: u32,
    /// The end-of-text token does not end the output.
    pub ignore_eos: bool,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: None,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: None,
            min_tokens: 0,
            ignore_eos: false,
        }
    }
}

impl Sampling {
    /// Whether a logit depends on the output so far, so that output must not be passed off as prompt.
    pub fn counts_output(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.min_tokens > 0
    }
}
