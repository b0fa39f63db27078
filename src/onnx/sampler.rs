//! From logits to a token: the one sampler of `foretell target` and of the model drafter.
//!
//! The order is vLLM's, so that the same parameters mean the same: grammar, logit bias, repetition
//! penalty, frequency and presence penalty, the end tokens masked before `min_tokens`; then, above
//! temperature 0, temperature → min-p → top-k → top-p. The remaining choice is made by the noise of
//! the position (`noise`), never by a generator with a state, so that the same position gives the
//! same token in whatever order it is computed.
//!
//! Ties go to the lowest id everywhere, also at the edge of top-k and top-p.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;

mod mass;

pub(crate) use self::mass::largest;
use self::mass::sum_exp;
use super::forward::Draws;
use super::grammar::{Allowed, Next};
use super::noise::PositionNoise;
use foretell_core::units::TokenId;
use foretell_wire::openai::Sampling;

/// Log-probability reported for a token that cannot be sampled (JSON has no −∞; vLLM reports the
/// same).
pub const NEVER: f32 = -9999.0;

/// How one choice of one request samples.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    seed: u64,
    choice: u32,
    ends: Vec<TokenId>,
}

/// The state that penalties need of the context, updated as it grows, and what a grammar allows
/// next. Without them it counts nothing and a copy costs nothing.
#[derive(Clone, Debug, Default)]
pub struct History {
    counts: HashMap<TokenId, Count>,
    counting: bool,
    prompt: usize,
    output: usize,
    /// The tokens that a grammar allows next; `None` if all may follow.
    allowed: Option<Arc<Allowed>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    output: u32,
}

impl History {
    /// The history of a sequence.
    pub fn new(sampling: &Sampling, prompt: &[TokenId], output: &[TokenId]) -> Self {
        let repetition = (sampling.repetition_penalty - 1.0).abs() > 0.0;
        let counting = repetition || sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0;
        let mut history = Self { counting, prompt: prompt.len(), ..Self::default() };
        if repetition {
            for &token in prompt {
                history.counts.entry(token).or_default();
            }
        }
        for &token in output {
            history.push(token);
        }
        history
    }

    /// Constrains the next token by a grammar. Where that allows nothing, nothing is ever sampled:
    /// all tokens may follow.
    pub fn bind(&mut self, next: &Next) {
        self.allowed = match next {
            Next::Of(allowed) => Some(Arc::clone(allowed)),
            Next::Any | Next::Nothing => None,
        };
    }

    /// True unless a grammar bars this token next.
    pub fn allows(&self, token: TokenId) -> bool {
        self.allowed.as_ref().is_none_or(|allowed| allowed.has(token))
    }

    /// Adds an output token.
    pub fn push(&mut self, token: TokenId) {
        self.allowed = None;
        self.output += 1;
        if self.counting {
            self.counts.entry(token).or_default().output += 1;
        }
    }

    /// Index of the next token in prompt and output together.
    pub fn position(&self) -> u64 {
        (self.prompt + self.output) as u64
    }
}

impl Sampler {
    /// A sampler whose noise is keyed by `seed` and the index of the choice within its prompt.
    pub fn new(sampling: Sampling, seed: u64, choice: u32) -> Self {
        Self { sampling, seed, choice, ends: Vec::new() }
    }

    /// Sets the tokens that must not be sampled before `min_tokens`; a client may repeat those of
    /// the model.
    #[must_use]
    pub fn with_ends(mut self, mut ends: Vec<TokenId>) -> Self {
        ends.sort_unstable();
        ends.dedup();
        self.ends = ends;
        self
    }

    /// The sampling parameters.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// A history of the context for this sampler's penalties.
    pub fn history(&self, prompt: &[TokenId], output: &[TokenId]) -> History {
        History::new(&self.sampling, prompt, output)
    }

    /// Samples the token that follows `prompt` and `output`. Recounts every time: for long outputs
    /// reuse a [`History`] and call [`Sampler::next`].
    pub fn pick(&self, logits: &[f32], prompt: &[TokenId], output: &[TokenId]) -> TokenId {
        self.next(logits, &self.history(prompt, output))
    }

    /// Samples the token that follows the context.
    pub fn next(&self, logits: &[f32], context: &History) -> TokenId {
        self.process(logits, context).draw()
    }

    /// The distribution that is sampled from, with its draw.
    pub fn process<'a>(&self, logits: &'a [f32], context: &History) -> Processed<'a> {
        let logits = self.adjust(logits, context);
        let scale = if self.greedy() { 1.0 } else { self.sampling.temperature };
        let best = argmax(&logits);
        let candidates = if self.greedy() { Candidates::All } else { self.truncate(&logits, best.1, scale) };
        let position_noise = PositionNoise::new(self.seed, self.choice, context.position());
        Processed {
            logits,
            best,
            candidates,
            scale,
            position_noise: (!self.greedy()).then_some(position_noise),
        }
    }

    /// How the tokens from this position on will be drawn; `None` where the likeliest are taken.
    pub fn draws(&self, position: u64) -> Option<Draws> {
        let temperature = self.sampling.temperature;
        (!self.greedy()).then_some(Draws { seed: self.seed, choice: self.choice, position, temperature })
    }

    fn greedy(&self) -> bool {
        self.sampling.temperature <= 0.0
    }

    /// Bias, penalties and mask: every change to individual logits.
    fn adjust<'a>(&self, logits: &'a [f32], context: &History) -> Cow<'a, [f32]> {
        let early = context.output < self.sampling.min_tokens as usize && !self.ends.is_empty();
        // A text that its grammar has ended cannot get longer.
        let masked = early && !context.allowed.as_ref().is_some_and(|allowed| allowed.is_within(&self.ends));
        let constrained = context.allowed.is_some();
        if self.sampling.logit_bias.is_empty() && !context.counting && !masked && !constrained {
            return Cow::Borrowed(logits);
        }
        let mut logits = logits.to_vec();
        if let Some(allowed) = &context.allowed {
            allowed.apply(&mut logits);
        }
        for &(token, bias) in &self.sampling.logit_bias {
            change(&mut logits, token, |logit| logit + bias);
        }
        if context.counting {
            for (&token, &count) in &context.counts {
                change(&mut logits, token, |logit| self.penalise(logit, count));
            }
        }
        if masked {
            for &token in &self.ends {
                change(&mut logits, token, |_| f32::NEG_INFINITY);
            }
        }
        Cow::Owned(logits)
    }

    fn penalise(&self, logit: f32, count: Count) -> f32 {
        let repetition = self.sampling.repetition_penalty as f32;
        let logit = if logit > 0.0 { logit / repetition } else { logit * repetition };
        if count.output == 0 {
            return logit;
        }
        let frequency = self.sampling.frequency_penalty as f32 * count.output as f32;
        logit - frequency - self.sampling.presence_penalty as f32
    }

    /// min-p, top-k and top-p, each applied to the result of the one before.
    fn truncate(&self, logits: &[f32], most: f32, scale: f64) -> Candidates {
        let Sampling { top_p, min_p, top_k, .. } = self.sampling;
        let top_k = top_k.map_or(usize::MAX, |k| k as usize).max(1);
        let (counted, few) = (top_k < logits.len(), min_p > 0.0);
        if !few && !counted && top_p >= 1.0 {
            return Candidates::All;
        }
        let weight = |logit: f32| (f64::from(logit - most) / scale).exp();
        // p ≥ min_p · max p, in terms of logits: no exponential needed.
        let mut floor = if few { f64::from(most) + scale * min_p.ln() } else { f64::NEG_INFINITY };
        let mut total = None;
        if !few && !counted {
            let mass = sum_exp(logits, most, (1.0 / scale) as f32);
            // Tokens whose mass together is less than the last 1 − top_p come after the edge: they
            // weigh less than (1 − top_p) / n each. Half of it, against rounding.
            let least = 0.5 * (1.0 - top_p) * mass / logits.len().max(1) as f64;
            floor = f64::from(most) + scale * least.ln();
            total = Some(mass);
        }
        let mut candidates: Vec<(TokenId, f32)> = (0..)
            .zip(logits.iter().copied())
            .filter(|&(_, logit)| logit > f32::NEG_INFINITY && f64::from(logit) >= floor)
            .collect();
        if top_k < candidates.len() {
            candidates.select_nth_unstable_by(top_k - 1, by_logit);
            candidates.truncate(top_k);
        }
        if top_p < 1.0 {
            let total = total.unwrap_or_else(|| candidates.iter().map(|&(_, logit)| weight(logit)).sum());
            truncate_to_nucleus(&mut candidates, top_p * total, weight);
        }
        candidates.sort_unstable_by_key(|&(token, _)| token);
        Candidates::Some(candidates)
    }
}

fn change(logits: &mut [f32], token: TokenId, with: impl Fn(f32) -> f32) {
    if let Some(logit) = logits.get_mut(token as usize) {
        *logit = with(*logit);
    }
}

/// Larger logits first, then lower ids.
#[allow(clippy::trivially_copy_pass_by_ref)] // the shape that sorting wants
fn by_logit(a: &(TokenId, f32), b: &(TokenId, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Reduces `candidates` to the fewest most probable tokens whose mass reaches `wanted`: a token
/// stays iff the mass of those before it has not reached it yet. At least one stays.
fn truncate_to_nucleus(candidates: &mut Vec<(TokenId, f32)>, wanted: f64, weight: impl Fn(f32) -> f64) {
    candidates.sort_unstable_by(by_logit);
    let mut mass = 0.0;
    let reached = candidates.iter().position(|&(_, logit)| {
        mass += weight(logit);
        mass >= wanted
    });
    candidates.truncate(reached.map_or(candidates.len(), |last| last + 1));
}

/// Tokens that can be sampled.
#[derive(Clone, Debug)]
enum Candidates {
    All,
    /// In order of id.
    Some(Vec<(TokenId, f32)>),
}

/// Logits with all parameters of the request applied.
#[derive(Clone, Debug)]
pub struct Processed<'a> {
    logits: Cow<'a, [f32]>,
    /// The most probable token, which is always a candidate.
    best: (TokenId, f32),
    candidates: Candidates,
    scale: f64,
    /// Noise of the position; `None` takes the likeliest token.
    position_noise: Option<PositionNoise>,
}

impl Processed<'_> {
    /// The sample: the largest logit, or the largest sum of scaled logit and noise.
    pub fn draw(&self) -> TokenId {
        let (token, logit) = self.best;
        let Some(position_noise) = self.position_noise else { return token };
        let mut race = Race::new(position_noise, self.scale, token, logit);
        match &self.candidates {
            Candidates::All => {
                for (token, &logit) in (0..).zip(self.logits.iter()) {
                    race.enter(token, logit);
                }
            }
            Candidates::Some(candidates) => {
                for &(token, logit) in candidates {
                    race.enter(token, logit);
                }
            }
        }
        race.token
    }

    /// The most probable token where it is always chosen; `None` where tokens are drawn.
    pub fn likeliest(&self) -> Option<TokenId> {
        self.position_noise.is_none().then_some(self.best.0)
    }

    /// Log-probability of a token in the distribution that is sampled from; [`NEVER`] if it cannot
    /// be sampled.
    pub fn logprob(&self, token: TokenId) -> f32 {
        self.logprobs(&[token]).first().copied().unwrap_or(NEVER)
    }

    /// Log-probabilities of several tokens.
    pub fn logprobs(&self, tokens: &[TokenId]) -> Vec<f32> {
        let normaliser = self.normaliser();
        tokens
            .iter()
            .map(|&token| self.logit(token).map_or(NEVER, |logit| self.log(logit, normaliser)))
            .collect()
    }

    /// Entropy of the distribution, nats.
    pub fn entropy(&self) -> f64 {
        let normaliser = self.normaliser();
        let term = |logit: f32| {
            let log = f64::from(self.log(logit, normaliser));
            if logit > f32::NEG_INFINITY { -log * log.exp() } else { 0.0 }
        };
        match &self.candidates {
            Candidates::All => self.logits.iter().copied().map(term).sum(),
            Candidates::Some(candidates) => candidates.iter().map(|&(_, logit)| term(logit)).sum(),
        }
    }

    /// The `most` most probable tokens with their log-probabilities, best first; fewer if fewer can
    /// be sampled.
    pub fn top(&self, most: usize) -> Vec<(TokenId, f32)> {
        let mut all = match &self.candidates {
            Candidates::All => (0..).zip(self.logits.iter().copied()).collect::<Vec<_>>(),
            Candidates::Some(candidates) => candidates.clone(),
        };
        all.retain(|&(_, logit)| logit > f32::NEG_INFINITY);
        if most == 0 {
            return Vec::new();
        }
        if most < all.len() {
            all.select_nth_unstable_by(most - 1, by_logit);
            all.truncate(most);
        }
        all.sort_unstable_by(by_logit);
        let normaliser = self.normaliser();
        all.into_iter().map(|(token, logit)| (token, self.log(logit, normaliser))).collect()
    }

    fn logit(&self, token: TokenId) -> Option<f32> {
        let logit = match &self.candidates {
            Candidates::All => self.logits.get(token as usize).copied(),
            Candidates::Some(candidates) => {
                let at = candidates.binary_search_by_key(&token, |&(token, _)| token).ok()?;
                candidates.get(at).map(|&(_, logit)| logit)
            }
        };
        logit.filter(|&logit| logit > f32::NEG_INFINITY)
    }

    fn log(&self, logit: f32, normaliser: f64) -> f32 {
        (f64::from(logit) / self.scale - normaliser) as f32
    }

    fn normaliser(&self) -> f64 {
        let most = self.best.1;
        let total = match &self.candidates {
            Candidates::All => sum_exp(&self.logits, most, (1.0 / self.scale) as f32),
            Candidates::Some(candidates) => {
                candidates.iter().map(|&(_, logit)| (f64::from(logit - most) / self.scale).exp()).sum()
            }
        };
        f64::from(most) / self.scale + total.ln()
    }
}

/// The largest logit and its lowest id.
fn argmax(logits: &[f32]) -> (TokenId, f32) {
    let most = largest(logits);
    let token = logits.iter().position(|&logit| logit >= most).unwrap_or(0);
    (token as TokenId, most)
}

/// The search for the largest score. It begins with the most probable token, so that most others
/// are ruled out by the ceiling of their noise and cost a hash at most, never a logarithm.
struct Race {
    position_noise: PositionNoise,
    scale: f64,
    token: TokenId,
    score: f64,
    /// Below this scaled logit no noise is large enough.
    hopeless: f64,
}

impl Race {
    fn new(position_noise: PositionNoise, scale: f64, token: TokenId, logit: f32) -> Self {
        let score = f64::from(logit) / scale + PositionNoise::noise(position_noise.hash(token));
        Self { position_noise, scale, token, score, hopeless: score - PositionNoise::ceiling(u64::MAX) }
    }

    fn enter(&mut self, token: TokenId, logit: f32) {
        let scaled = f64::from(logit) / self.scale;
        if scaled < self.hopeless {
            return;
        }
        let hash = self.position_noise.hash(token);
        if scaled + PositionNoise::ceiling(hash) < self.score {
            return;
        }
        let score = scaled + PositionNoise::noise(hash);
        if score.total_cmp(&self.score).then(self.token.cmp(&token)).is_gt() {
            self.token = token;
            self.score = score;
            self.hopeless = score - PositionNoise::ceiling(u64::MAX);
        }
    }
}

#[cfg(test)]
mod tests;
