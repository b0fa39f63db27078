//! Messages between the HTTP side and the model's thread. They carry tokens only: text, stop
//! strings and JSON stay on the HTTP side.

use tokio::sync::{mpsc, oneshot};

use crate::forward::HeadDraft;
use crate::grammar::{Constraint, Next};
use crate::sampler::Sampler;
use foretell_core::units::TokenId;

/// A job for the model's thread.
#[derive(Debug)]
pub enum Job {
    /// Continue a sequence.
    Generate(Box<Generate>),
    /// Sample at every position of a draft.
    Verify(Box<Verify>),
}

/// Continue a sequence until a limit ends it or the receiver of its events is dropped.
#[derive(Debug)]
pub struct Generate {
    /// The sequence so far; at least one token.
    pub prompt: Vec<TokenId>,
    /// Number of its last tokens that are output of an earlier request.
    pub generated: usize,
    /// Sampling parameters and random noise.
    pub sampler: Sampler,
    /// The grammar that constrains the output; `None` if there is none. Behind a draft that it does
    /// not allow any token is sampled.
    pub constraint: Option<Constraint>,
    /// Limits of the output.
    pub limits: Limits,
    /// Report log-probabilities of the sample and of this many best tokens; `None`: report none.
    pub logprobs: Option<usize>,
    /// Report log-probabilities of the prompt's tokens from the second one on, and of this many
    /// best tokens besides; `None`: report none.
    pub prompt_logprobs: Option<usize>,
    /// Tokens that the head drafts behind some of the tokens; 0: none.
    pub propose: usize,
    /// Receives the output.
    pub events: mpsc::UnboundedSender<Event>,
}

/// Conditions that end an output.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Maximum number of output tokens.
    pub max_tokens: usize,
    /// End-of-text tokens of the model; empty if they are ignored.
    pub eos: Vec<TokenId>,
    /// Further end tokens given by the client.
    pub stop_token_ids: Vec<TokenId>,
}

/// Events of a [`Generate`] job: `Prompt` once, then tokens, the last of which has an `ending`.
/// `Failed` may come at any time and is the last event.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The prompt has been computed.
    Prompt {
        /// Number of prompt tokens that were in the cache.
        cached: usize,
        /// Scores of the prompt tokens from the second one on, if requested.
        rows: Vec<PromptRow>,
    },
    Token(Token),
    Failed(Failure),
}

/// Reason that a job failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A run of the model failed.
    Run(String),
    /// The grammar of the request needs more than its limits allow.
    Grammar(String),
}

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self::Run(why)
    }
}

impl From<&str> for Failure {
    fn from(why: &str) -> Self {
        Self::Run(why.to_owned())
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    pub id: TokenId,
    /// Log-probabilities, if requested.
    pub scores: Option<Scores>,
    /// Reason that the output ends with this token; `None` if it continues.
    pub ending: Option<Ending>,
    /// The head's draft behind this token; `None` if none was requested.
    pub proposal: Option<HeadDraft>,
}

/// Log-probabilities at one position, after temperature and other processing.
#[derive(Clone, Debug, PartialEq)]
pub struct Scores {
    /// Log-probability of the sampled token.
    pub logprob: f32,
    /// The best tokens with their log-probabilities, best first.
    pub top: Vec<(TokenId, f32)>,
}

/// Log-probabilities of one prompt token, without temperature or other processing.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptRow {
    /// The token of the prompt.
    pub id: TokenId,
    /// Log-probability of the token.
    pub logprob: f32,
    /// Number of tokens that are at least as probable; 1 for the most probable one.
    pub rank: usize,
    /// The best tokens with their log-probabilities, best first.
    pub top: Vec<(TokenId, f32)>,
}

/// Reason that an output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The model's end-of-text token was sampled.
    Eos,
    /// One of the client's end tokens was sampled.
    StopToken(TokenId),
    /// The token limit was reached.
    Length,
}

/// Sample at every position of a draft.
#[derive(Debug)]
pub struct Verify {
    /// The sequence before the draft; at least one token.
    pub context: Vec<TokenId>,
    /// Number of its last tokens that are output of an earlier request.
    pub generated: usize,
    /// Tokens of the draft's nodes.
    pub tokens: Vec<TokenId>,
    /// Parent of each node; `None`: it follows the context. Parents come before their children.
    pub parents: Vec<Option<usize>>,
    /// Sampling parameters and random noise.
    pub sampler: Sampler,
    /// The tokens that the grammar allows behind the context and behind each node; `None` if none
    /// constrains the output.
    pub allowed: Option<Vec<Result<Next, String>>>,
    /// Number of best tokens to report per row, with the log-probabilities; `None`: no figures, and
    /// no rows but those that the samples reach.
    pub listed: Option<usize>,
    /// Tokens that the head drafts behind the accepted nodes and the token after them; 0: none.
    pub propose: usize,
    /// Receives the answer, or the reason that there is none.
    pub reply: oneshot::Sender<Result<Verified, Failure>>,
}

/// Result of verifying a draft.
#[derive(Clone, Debug, PartialEq)]
pub struct Verified {
    /// One row per position: row 0 follows the context, row `i + 1` follows node `i`.
    pub rows: Vec<VerifiedRow>,
    /// Accepted nodes, from the context on.
    pub accepted: Vec<usize>,
    /// Number of context tokens that were in the cache.
    pub cached: usize,
    /// The head's draft of what follows; `None` if none was requested.
    pub proposal: Option<HeadDraft>,
}

/// The target's result at one position of a draft.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VerifiedRow {
    /// Entropy of the processed distribution, nats; `None` unless likely tokens were requested.
    pub entropy: Option<f64>,
    /// The decided token; `None` where none was drawn: after nodes that the samples before them do
    /// not accept.
    pub sample: Option<TokenId>,
    /// Log-probability of that token, after temperature and other processing; `None` unless figures
    /// were requested.
    pub logprob: Option<f32>,
    /// The best tokens with their log-probabilities, best first.
    pub top: Vec<(TokenId, f32)>,
    /// Log-probability of this row's node, in its parent's row; `None` for row 0, and unless
    /// figures were requested.
    pub draft_logprob: Option<f32>,
}

impl Job {
    /// The sequence that must be in the lane.
    pub(super) fn wanted(&self) -> &[TokenId] {
        match self {
            Self::Generate(job) => &job.prompt,
            Self::Verify(job) => &job.context,
        }
    }

    /// Maximum number of its tokens that may come from the cache; at least one must be computed to
    /// get a row of logits.
    pub(super) fn reusable(&self) -> usize {
        let most = self.wanted().len().saturating_sub(1);
        match self {
            // Every row of the prompt is wanted.
            Self::Generate(job) if job.prompt_logprobs.is_some() => 0,
            Self::Generate(_) | Self::Verify(_) => most,
        }
    }

    /// True if the receiver was dropped, so that the result is not needed.
    pub(super) fn is_gone(&self) -> bool {
        match self {
            Self::Generate(job) => job.events.is_closed(),
            Self::Verify(job) => job.reply.is_closed(),
        }
    }

    /// Reports that the job failed.
    pub(super) fn fail(self, why: Failure) {
        match self {
            Self::Generate(job) => drop(job.events.send(Event::Failed(why))),
            Self::Verify(job) => drop(job.reply.send(Err(why))),
        }
    }
}
