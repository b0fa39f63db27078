//! The JSON of answers, in vLLM's format.

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::forward::HeadDraft;
use crate::target::job::{PromptRow, Verified};
use crate::target::logprobs::Listed;
use crate::target::output::Finish;
use crate::target::words::Words;
use foretell_core::session::Parsed;
use foretell_core::units::TokenId;
use foretell_parsers::parse::ParsedMessage;
use foretell_wire::openai::{Route, parts};

/// The member of a chat for reasoning, as in vLLM.
const REASONING: &str = "reasoning";

/// The JSON object of an answer or of one chunk of a stream.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Envelope<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) system_fingerprint: &'a str,
    pub(super) choices: Vec<Choice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Usage>,
    /// Only set for chats, which have one prompt; completions have it in each choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<Vec<TokenId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_logprobs: Option<Value>,
}

/// One choice, or a part of it in a stream.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Choice {
    pub(super) index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) message: Option<MessageContent>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) delta: Option<MessageContent>,
    pub(super) logprobs: Option<Value>,
    pub(super) finish_reason: Option<&'static str>,
    pub(super) stop_reason: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<Vec<TokenId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<Vec<TokenId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) seed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) proposal: Option<Proposed>,
}

/// A draft of the head: for each position the likeliest tokens and their probabilities, best first.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Proposed {
    tokens: Vec<Vec<TokenId>>,
    shares: Vec<Vec<f32>>,
}

impl From<&HeadDraft> for Proposed {
    fn from(draft: &HeadDraft) -> Self {
        let of = |step: &Vec<(TokenId, f32)>| step.iter().copied().unzip();
        let (tokens, shares) = draft.iter().map(of).unzip();
        Self { tokens, shares }
    }
}

impl Choice {
    /// Sets the reasons why the choice is finished.
    pub(super) fn finish(&mut self, finish: &Finish) {
        self.finish_reason = Some(finish.reason());
        self.stop_reason = match finish {
            Finish::Eos | Finish::Length => None,
            Finish::StopToken(id) => Some(json!(id)),
            Finish::StopText(text) => Some(json!(text)),
        };
    }

    /// Puts the text into the field that the route uses.
    pub(super) fn set_text(&mut self, route: Route, stream: bool, role: bool, text: String) {
        let role = role.then_some("assistant");
        match (route, stream) {
            (Route::Completions, _) => self.text = Some(text),
            (Route::Chat, false) => {
                self.message = Some(MessageContent::Text(Message { role: Some("assistant"), content: text }));
            }
            (Route::Chat, true) => self.delta = Some(MessageContent::Text(Message { role, content: text })),
        }
    }

    /// Puts the parts of a parsed piece into the delta of a stream.
    pub(super) fn set_delta(&mut self, role: bool, parsed: &Parsed, id: impl FnMut() -> String) {
        let mut id = id;
        let mut delta = parts::write(parsed, REASONING, |_| id());
        if role {
            delta.insert("role".to_owned(), "assistant".into());
        }
        self.delta = Some(MessageContent::Parts(delta));
    }

    /// Puts the parts of an answer that is not streamed into its message.
    pub(super) fn set_message(&mut self, answer: &ParsedMessage, id: impl FnMut() -> String) {
        self.message = Some(MessageContent::Parts(message(answer, id)));
    }
}

/// The message of an answer with parts that is not streamed.
pub(super) fn message(answer: &ParsedMessage, id: impl FnMut() -> String) -> Map<String, Value> {
    let mut message = Map::from_iter([("role".to_owned(), "assistant".into())]);
    parts::write_message(&mut message, answer, REASONING, id);
    message
}

/// Content of a chat: text alone, or the parts that a parser has found.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(super) enum MessageContent {
    Text(Message),
    Parts(Map<String, Value>),
}

/// A chat message, or a part of it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Message {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'static str>,
    pub(super) content: String,
}

/// The `usage` object: token counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Usage {
    pub(super) prompt_tokens: usize,
    pub(super) completion_tokens: usize,
    pub(super) total_tokens: usize,
    pub(super) prompt_tokens_details: PromptDetails,
    /// Only with a reasoning parser.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) completion_tokens_details: Option<OutputDetails>,
}

/// Kinds of output tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct OutputDetails {
    pub(super) reasoning_tokens: u64,
}

/// Origin of the prompt tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct PromptDetails {
    pub(super) cached_tokens: usize,
}

impl Usage {
    pub(super) fn new(prompt: usize, cached: usize, output: usize) -> Self {
        let prompt_tokens_details = PromptDetails { cached_tokens: cached };
        Self {
            prompt_tokens: prompt,
            completion_tokens: output,
            total_tokens: prompt + output,
            prompt_tokens_details,
            completion_tokens_details: None,
        }
    }
}

/// The list at the position of a token: its score, and those of the likeliest tokens.
pub(super) fn listed(token: TokenId, logprob: f32, top: &[(TokenId, f32)]) -> Listed {
    let others = top.iter().filter(|entry| entry.0 != token).copied();
    std::iter::once((token, logprob)).chain(others).map(|(id, logprob)| (id, short(logprob))).collect()
}

/// Writes the tokens of prompts with their scores.
#[derive(Clone, Copy)]
pub(super) struct Speller<'a> {
    pub(super) words: &'a dyn Words,
}

impl Speller<'_> {
    /// `prompt_logprobs`: one entry per prompt token, `null` if it was not scored.
    pub(super) fn prompt(&self, prompt: usize, rows: &[PromptRow]) -> Value {
        let missing = prompt.saturating_sub(rows.len());
        let nulls = std::iter::repeat_n(Value::Null, missing);
        Value::Array(nulls.chain(rows.iter().map(|row| self.prompt_row(row))).collect())
    }

    fn prompt_row(&self, row: &PromptRow) -> Value {
        let mut map = Map::new();
        let mut add = |id: TokenId, logprob: f32, rank: usize| {
            let token = self.words.decode(&[id], true);
            map.insert(
                id.to_string(),
                json!({"logprob": short(logprob), "rank": rank, "decoded_token": token}),
            );
        };
        add(row.id, row.logprob, row.rank);
        for (rank, &(id, logprob)) in (1..).zip(&row.top) {
            if id != row.id {
                add(id, logprob, rank);
            }
        }
        Value::Object(map)
    }
}

/// The `f64` that prints with as few digits as the `f32`.
fn short(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}

/// The JSON answer of `POST /v1/verify`.
#[derive(Serialize)]
pub(super) struct VerifyReply<'a> {
    model: &'a str,
    system_fingerprint: &'a str,
    seed: u64,
    usage: Usage,
    rows: Vec<VerifyRow<'a>>,
    accepted: &'a [usize],
    #[serde(skip_serializing_if = "Option::is_none")]
    proposal: Option<Proposed>,
}

#[derive(Serialize)]
struct VerifyRow<'a> {
    sample: Option<TokenId>,
    logprob: Option<f32>,
    top: &'a [(TokenId, f32)],
    #[serde(skip_serializing_if = "Option::is_none")]
    entropy: Option<f64>,
    draft_logprob: Option<f32>,
}

impl<'a> VerifyReply<'a> {
    /// `context` is the number of context tokens. The accepted nodes and the token after them count
    /// as output.
    pub(super) fn new(
        (model, system_fingerprint): (&'a str, &'a str),
        seed: u64,
        context: usize,
        verified: &'a Verified,
    ) -> Self {
        let rows = verified.rows.iter().map(|row| VerifyRow {
            sample: row.sample,
            logprob: row.logprob,
            top: &row.top,
            entropy: row.entropy,
            draft_logprob: row.draft_logprob,
        });
        let usage = Usage::new(context, verified.cached, verified.accepted.len() + 1);
        let proposal = verified.proposal.as_ref().map(Proposed::from);
        let accepted = &verified.accepted;
        Self { model, system_fingerprint, seed, usage, rows: rows.collect(), accepted, proposal }
    }
}
