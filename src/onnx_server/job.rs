//! What the HTTP side asks of the model's thread, and what it gets back. Tokens only: text, stop strings and
//! JSON stay on the other side.

use tokio::sync::{mpsc, oneshot};

use crate::runtime::sampler::Sampler;
use crate::units::TokenId;

/// One unit of work.
#[derive(Debug)]
pub enum Job {
    /// Continue a sequence.
    Generate(Box<Generate>),
    /// Verify a draft: sample at every place of it.
    Verify(Box<Verify>),
}

/// Continue a sequence until something ends it, or the receiver of its events is dropped.
#[derive(Debug)]
pub struct Generate {
    /// The sequence so far; at least one token.
    pub prompt: Vec<TokenId>,
    /// How many of its last tokens are output already.
    pub generated: usize,
    /// The sampling parameters and the noise.
    pub sampler: Sampler,
    /// What ends the output.
    pub limits: Limits,
    /// Report log-probabilities of the sample and of this many best tokens.
    pub logprobs: Option<usize>,
    /// Report log-probabilities of the prompt itself.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// Where the output goes.
    pub events: mpsc::UnboundedSender<Event>,
}

/// What ends an output.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Most output tokens.
    pub max_tokens: usize,
    /// End-of-text tokens; empty if they are to be ignored.
    pub eos: Vec<TokenId>,
    /// The client's own end tokens.
    pub stop_token_ids: Vec<TokenId>,
}

/// Which prompt positions are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLogprobs {
    /// So many best tokens besides the prompt's own.
    pub top: usize,
    /// The first scored token is the one after this index.
    pub start: usize,
}

/// What happens to a [`Generate`]: `Prompt` once, then tokens; the last one carries its `ending`. `Failed`
/// may come at any time and is the last.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The prompt has been computed.
    Prompt {
        /// Tokens of it that did not have to be.
        cached: usize,
        /// Scores of the prompt's tokens from `start + 1` on, if asked for.
        rows: Vec<PromptRow>,
    },
    /// A new token.
    Token(Token),
    /// A run of the model failed.
    Failed(String),
}

/// One new token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Token id.
    pub id: TokenId,
    /// Log-probabilities, if asked for.
    pub scores: Option<Scores>,
    /// Set on the last one.
    pub ending: Option<Ending>,
}

/// Processed log-probabilities of one place.
#[derive(Clone, Debug, PartialEq)]
pub struct Scores {
    /// Processed log-probability of the sampled token.
    pub logprob: f32,
    /// Of the best tokens, best first.
    pub top: Vec<(TokenId, f32)>,
}

/// Unprocessed log-probabilities of one prompt token.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptRow {
    /// The prompt's own token.
    pub id: TokenId,
    /// Processed log-probability.
    pub logprob: f32,
    /// How many tokens are at least as probable; 1 means that it is the only most probable one.
    pub rank: usize,
    /// The best tokens, best first.
    pub top: Vec<(TokenId, f32)>,
}

/// Why an output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The model's end-of-text token was sampled.
    Eos,
    /// One of the client's end tokens.
    StopToken(TokenId),
    /// The limit of tokens.
    Length,
}

/// Verify a draft: sample at every place of it.
#[derive(Debug)]
pub struct Verify {
    /// The sequence so far; at least one token.
    pub context: Vec<TokenId>,
    /// How many of its last tokens are output already.
    pub generated: usize,
    /// The draft's tokens.
    pub tokens: Vec<TokenId>,
    /// Parent of each; `None` follows the context. Parents stand before their children.
    pub parents: Vec<Option<usize>>,
    /// The sampling parameters and the noise.
    pub sampler: Sampler,
    /// So many best tokens per row.
    pub top: usize,
    /// Where the answer goes.
    pub reply: oneshot::Sender<Result<Verified, String>>,
}

/// What the target sampled at every place of a draft.
#[derive(Clone, Debug, PartialEq)]
pub struct Verified {
    /// Row 0 follows the context, row `i + 1` follows node `i`.
    pub rows: Vec<VerifiedRow>,
    /// The nodes that the samples confirm, from the context on.
    pub accepted: Vec<usize>,
    /// Tokens of the context that did not have to be computed.
    pub cached: usize,
}

/// What the target says at one place.
#[derive(Clone, Debug, PartialEq)]
pub struct VerifiedRow {
    /// The token sampled there.
    pub sample: TokenId,
    /// Processed log-probability of the sample.
    pub logprob: f32,
    /// The best tokens, best first.
    pub top: Vec<(TokenId, f32)>,
    /// Log-probability of the node that this row follows, under its parent's row; `None` for row 0.
    pub draft_logprob: Option<f32>,
}

impl Job {
    /// The sequence that has to be computed.
    pub(super) fn wanted(&self) -> &[TokenId] {
        match self {
            Self::Generate(job) => &job.prompt,
            Self::Verify(job) => &job.context,
        }
    }

    /// Most tokens of it that may come from the cache: at least one row has to be computed.
    pub(super) fn reusable(&self) -> usize {
        let most = self.wanted().len().saturating_sub(1);
        match self {
            Self::Generate(job) => job.prompt_logprobs.map_or(most, |scored| scored.start.min(most)),
            Self::Verify(_) => most,
        }
    }

    /// Nobody waits for it any more.
    pub(super) fn is_gone(&self) -> bool {
        match self {
            Self::Generate(job) => job.events.is_closed(),
            Self::Verify(job) => job.reply.is_closed(),
        }
    }

    /// The model has failed it.
    pub(super) fn fail(self, why: &str) {
        match self {
            Self::Generate(job) => drop(job.events.send(Event::Failed(why.to_owned()))),
            Self::Verify(job) => drop(job.reply.send(Err(why.to_owned()))),
        }
    }
}
