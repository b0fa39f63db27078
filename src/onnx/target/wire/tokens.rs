//! Parses the requests of `/v1/verify`, `/tokenize` and `/detokenize`.

use serde_json::{Map, Value};

use crate::target::errors::Refusal;
use crate::target::fields::{Fields, invalid};
use crate::target::wire::prompt::{message, opening};
use crate::target::wire::sampling::sampling;
use crate::target::wire::{LOGPROBS_MAX, Prompt, Served};
use foretell_core::units::TokenId;
use foretell_wire::openai::Sampling;

/// Maximum number of nodes of a draft: a row of logits of the complete vocabulary is computed for
/// each, in a run that all streams wait for. Foretell drafts at most an eighth of it.
const NODES_MAX: usize = 256;

/// A parsed `/v1/verify` request: a draft to verify.
#[derive(Clone, Debug)]
pub(in crate::target) struct VerifyRequest {
    pub(in crate::target) context: Vec<TokenId>,
    pub(in crate::target) generated: usize,
    pub(in crate::target) tokens: Vec<TokenId>,
    pub(in crate::target) parents: Vec<Option<usize>>,
    /// Likeliest tokens of each row; `None` without log-probabilities.
    pub(in crate::target) listed: Option<usize>,
    pub(in crate::target) sampling: Sampling,
    pub(in crate::target) stop_token_ids: Vec<TokenId>,
    /// Tokens that the head is to draft; 0: none.
    pub(in crate::target) propose: usize,
}

impl VerifyRequest {
    /// The tokens of the context that are output of an earlier request.
    pub(in crate::target) fn output(&self) -> &[TokenId] {
        self.context.split_at(self.context.len().saturating_sub(self.generated)).1
    }
}

/// Parses the body of `POST /v1/verify`.
pub(in crate::target) fn verify(body: &[u8], served: Served<'_>) -> Result<VerifyRequest, Refusal> {
    let mut fields = Fields::read(body)?;
    served.check_model(&mut fields)?;
    let context: Vec<TokenId> = fields.take("context")?.ok_or(Refusal::Missing("context"))?;
    if context.is_empty() {
        return Err(invalid("context", "must not be empty"));
    }
    served.check_ids("context", &context)?;
    let generated = fields.size("generated", context.len())?.unwrap_or(0);
    let tokens: Vec<TokenId> = fields.take("tokens")?.ok_or(Refusal::Missing("tokens"))?;
    served.check_ids("tokens", &tokens)?;
    if tokens.len() > NODES_MAX {
        return Err(invalid("tokens", format!("at most {NODES_MAX} nodes, got {}", tokens.len())));
    }
    let parents = parents(fields.take("parents")?, tokens.len())?;
    let top = fields.size("top_logprobs", LOGPROBS_MAX)?;
    let listed = fields.flag("logprobs", true)?.then_some(top.unwrap_or(0));
    if listed.is_none() && top.is_some() {
        return Err(invalid("top_logprobs", "needs logprobs"));
    }
    let sampling = sampling(&mut fields, served)?;
    let stop_token_ids: Vec<TokenId> = fields.take("stop_token_ids")?.unwrap_or_default();
    served.check_ids("stop_token_ids", &stop_token_ids)?;
    let propose = served.propose(&mut fields)?;
    fields.finish()?;
    Ok(VerifyRequest { context, generated, tokens, parents, listed, sampling, stop_token_ids, propose })
}

/// Checks `parents`: −1 means that a node follows the context; if missing, the draft is a chain.
fn parents(parents: Option<Vec<i64>>, nodes: usize) -> Result<Vec<Option<usize>>, Refusal> {
    let Some(parents) = parents else {
        return Ok((0..nodes).map(|node: usize| node.checked_sub(1)).collect());
    };
    if parents.len() != nodes {
        return Err(invalid("parents", format!("{} parents for {nodes} tokens", parents.len())));
    }
    let read = |(node, &parent): (usize, &i64)| match usize::try_from(parent) {
        Ok(parent) if parent < node => Ok(Some(parent)),
        Err(_) if parent == -1 => Ok(None),
        _ => Err(invalid("parents", format!("node {node} must follow -1 or an earlier node, got {parent}"))),
    };
    parents.iter().enumerate().map(read).collect()
}

/// A parsed `/tokenize` request.
pub(in crate::target) struct TokenizeRequest {
    pub(in crate::target) prompt: Prompt,
    pub(in crate::target) opening: bool,
    pub(in crate::target) add_special_tokens: bool,
    pub(in crate::target) token_strings: bool,
}

/// Parses the body of `POST /tokenize`, which has a `prompt` or `messages`.
pub(in crate::target) fn tokenize(body: &[u8], served: Served<'_>) -> Result<TokenizeRequest, Refusal> {
    let mut fields = Fields::read(body)?;
    served.check_model(&mut fields)?;
    let token_strings = fields.flag("return_token_strs", false)?;
    let messages: Option<Vec<Map<String, Value>>> = fields.take("messages")?;
    let text: Option<String> = fields.take("prompt")?;
    let special = fields.take("add_special_tokens")?;
    let opening = opening(&mut fields)?;
    let request = match (text, messages) {
        (Some(text), None) => {
            let add_special_tokens = special.unwrap_or(true);
            TokenizeRequest { prompt: Prompt::Text(text), opening, add_special_tokens, token_strings }
        }
        (None, Some(messages)) => {
            let prompt = Prompt::Messages(messages.into_iter().map(message).collect::<Result<_, _>>()?);
            TokenizeRequest { prompt, opening, add_special_tokens: special.unwrap_or(false), token_strings }
        }
        (Some(_), Some(_)) => return Err(invalid("prompt", "either prompt or messages, not both")),
        (None, None) => return Err(Refusal::Missing("prompt")),
    };
    fields.finish()?;
    Ok(request)
}

/// Parses the body of `POST /detokenize`.
pub(in crate::target) fn detokenize(body: &[u8], served: Served<'_>) -> Result<Vec<TokenId>, Refusal> {
    let mut fields = Fields::read(body)?;
    served.check_model(&mut fields)?;
    let tokens: Vec<TokenId> = fields.take("tokens")?.ok_or(Refusal::Missing("tokens"))?;
    served.check_ids("tokens", &tokens)?;
    fields.finish()?;
    Ok(tokens)
}
