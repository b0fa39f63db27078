//! From logits to a token: the logits processors of the engines, in each engine's order.

use std::collections::HashMap;

use crate::TokenId;
use crate::rng;

use super::toy::{Context, Row};

/// Tokens that a penalty counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// Output of this request.
    Output,
    /// Prompt and output.
    All,
    /// The last tokens of prompt and output, this number of them.
    Last(usize),
}

impl Counts {
    fn of(self, context: &Context, prompt: usize) -> HashMap<TokenId, usize> {
        let all = context.tokens();
        let seen = match self {
            Self::Output => &all[prompt..],
            Self::All => all,
            Self::Last(last) => &all[all.len().saturating_sub(last)..],
        };
        let mut counts = HashMap::new();
        for &token in seen {
            *counts.entry(token).or_default() += 1;
        }
        counts
    }
}

/// Differences between the engines' sampling.
#[derive(Clone, Copy, Debug)]
pub struct Pipeline {
    /// For presence and frequency.
    pub additive: Counts,
    pub repetition: Counts,
    /// Truncation uses the model's own distribution, and temperature is applied after it.
    pub temperature_last: bool,
    /// Logprobs are reported after all processors, not before.
    pub processed_logprobs: bool,
}

impl Pipeline {
    /// vLLM: presence and frequency of the output, repetition of everything.
    pub const VLLM: Self = Self {
        additive: Counts::Output,
        repetition: Counts::All,
        temperature_last: false,
        processed_logprobs: false,
    };
    /// SGLang: everything of the output only.
    pub const SGLANG: Self =
        Self { additive: Counts::Output, repetition: Counts::Output, processed_logprobs: true, ..Self::VLLM };
    /// llama.cpp: everything within the last tokens of prompt and output, 64 by default.
    pub const LLAMA: Self = Self {
        additive: Counts::Last(64),
        repetition: Counts::Last(64),
        temperature_last: true,
        ..Self::VLLM
    };
}

/// Source of randomness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noise {
    /// A function of (seed, absolute position, token): a text that is sent again continues as
    /// before.
    Position(u64),
    /// A generator that restarts with every request: the n-th token of any request has the same
    /// draw.
    Restarting(u64),
}

impl Noise {
    /// Unpredictable noise.
    pub fn fresh() -> Self {
        Self::Restarting(fresh_seed())
    }
}

/// Different at every call.
pub fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

/// The complete parameters of one sequence.
#[derive(Clone, Debug)]
pub struct Sampling {
    pub pipeline: Pipeline,
    pub noise: Noise,
    pub temperature: f64,
    pub top_p: f64,
    /// 0 for no limit.
    pub top_k: usize,
    pub min_p: f64,
    pub presence: f64,
    pub frequency: f64,
    pub repetition: f64,
    pub bias: Vec<(TokenId, f32)>,
    pub allowed: Option<Vec<TokenId>>,
    pub max_tokens: usize,
    pub min_tokens: usize,
    pub stop: Vec<String>,
    pub stop_ids: Vec<TokenId>,
    pub keep_stop: bool,
    pub ignore_eos: bool,
    /// The end of text is never sampled.
    pub ban_eos: bool,
    pub skip_special: bool,
    /// A grammar that allows only this text; empty for no grammar.
    pub only: Vec<TokenId>,
}

impl Sampling {
    pub fn new(pipeline: Pipeline, noise: Noise, max_tokens: usize) -> Self {
        Self {
            pipeline,
            noise,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            presence: 0.0,
            frequency: 0.0,
            repetition: 1.0,
            bias: Vec::new(),
            allowed: None,
            max_tokens,
            min_tokens: 0,
            stop: Vec::new(),
            stop_ids: Vec::new(),
            keep_stop: false,
            ignore_eos: false,
            ban_eos: false,
            skip_special: true,
            only: Vec::new(),
        }
    }

    /// The sample after a context whose first `prompt` tokens are not output, and the logits after
    /// bias and penalties.
    pub fn draw(&self, row: &Row, context: &Context, prompt: usize, eos: TokenId) -> (TokenId, Row) {
        let adjusted = self.adjust(row, context, prompt, eos);
        if !self.only.is_empty() {
            return (self.only.get(context.len() - prompt).copied().unwrap_or(eos), adjusted);
        }
        if self.temperature <= 0.0 {
            return (adjusted.best(), adjusted);
        }
        let kept = self.keep(&adjusted);
        let (seed, counter) = match self.noise {
            Noise::Position(seed) => (seed, context.len() as u64),
            Noise::Restarting(seed) => (seed, (context.len() - prompt) as u64),
        };
        let mut best = (eos, f64::NEG_INFINITY);
        for (token, logit) in kept {
            let (cool, hash) = (f64::from(logit) / self.temperature, rng::hash(seed, 9, counter, token));
            // Most tokens cannot win with any noise, and noise costs two logarithms.
            if cool + rng::most(hash) >= best.1 {
                let score = cool + rng::noise(hash);
                best = if score >= best.1 { (token, score) } else { best };
            }
        }
        (best.0, adjusted)
    }

    /// The probability of every token that may be sampled.
    pub fn distribution(
        &self,
        row: &Row,
        context: &Context,
        prompt: usize,
        eos: TokenId,
    ) -> Vec<(TokenId, f64)> {
        let kept = self.keep(&self.adjust(row, context, prompt, eos));
        let most = kept.iter().map(|&(_, logit)| logit).fold(f32::MIN, f32::max);
        let weight = |logit: f32| (f64::from(logit - most) / self.temperature).exp();
        let whole: f64 = kept.iter().map(|&(_, logit)| weight(logit)).sum();
        kept.into_iter().map(|(token, logit)| (token, weight(logit) / whole)).collect()
    }

    fn adjust(&self, row: &Row, context: &Context, prompt: usize, eos: TokenId) -> Row {
        let mut logits = row.0.clone();
        if let Some(allowed) = &self.allowed {
            let kept: Vec<(usize, f32)> =
                allowed.iter().map(|&id| (id as usize, logits[id as usize])).collect();
            logits.fill(f32::NEG_INFINITY);
            for (id, logit) in kept {
                logits[id] = logit;
            }
        }
        for &(token, bias) in &self.bias {
            logits[token as usize] += bias;
        }
        let early = context.len() - prompt < self.min_tokens;
        if early {
            self.stop_ids.iter().for_each(|&id| logits[id as usize] = f32::NEG_INFINITY);
        }
        if early || self.ban_eos {
            logits[eos as usize] = f32::NEG_INFINITY;
        }
        self.penalise(&mut logits, context, prompt);
        Row(logits)
    }

    fn penalise(&self, logits: &mut [f32], context: &Context, prompt: usize) {
        let pipeline = self.pipeline;
        if (self.repetition - 1.0).abs() > 0.0 {
            for token in pipeline.repetition.of(context, prompt).into_keys() {
                let logit = &mut logits[token as usize];
                let by = self.repetition as f32;
                *logit = if *logit > 0.0 { *logit / by } else { *logit * by };
            }
        }
        if self.presence != 0.0 || self.frequency != 0.0 {
            for (token, count) in pipeline.additive.of(context, prompt) {
                logits[token as usize] -= (self.frequency * count as f64 + self.presence) as f32;
            }
        }
    }

    /// The tokens that may be sampled.
    fn keep(&self, row: &Row) -> Vec<(TokenId, f32)> {
        let scale = if self.pipeline.temperature_last { 1.0 } else { self.temperature };
        let all = row.0.iter().enumerate().filter(|(_, logit)| logit.is_finite());
        let mut kept: Vec<(TokenId, f32)> = all.map(|(token, &logit)| (token as TokenId, logit)).collect();
        if self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0 {
            return kept;
        }
        let order = |a: &(TokenId, f32), b: &(TokenId, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if (1..kept.len()).contains(&self.top_k) {
            kept.select_nth_unstable_by(self.top_k - 1, order);
            kept.truncate(self.top_k);
        }
        kept.sort_unstable_by(order);
        let most = f64::from(kept[0].1);
        let weight = |logit: f32| ((f64::from(logit) - most) / scale).exp();
        if self.top_p < 1.0 {
            let total: f64 = kept.iter().map(|&(_, logit)| weight(logit)).sum();
            let mut mass = 0.0;
            let cut = kept.iter().position(|&(_, logit)| {
                mass += weight(logit) / total;
                mass >= self.top_p
            });
            kept.truncate(cut.map_or(kept.len(), |cut| cut + 1));
        }
        if self.min_p > 0.0 {
            kept.retain(|&(_, logit)| weight(logit) >= self.min_p);
        }
        kept
    }
}
