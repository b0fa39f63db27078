//! Scoring of drafts by the token endpoint.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::minimum;
use crate::body::Body;
use crate::shared::{self, PromptUsage};
use crate::{Call, Engine, Refusal, Round, RowShape, Unreadable, VerifyRequest, score};
use foretell_core::units::TokenId;
use foretell_core::words::{Row, VerifyMethod, VerifyResult};
use foretell_wire::openai::Sampling;

pub(super) const GENERATE: &str = "/inference/v1/generate";
/// The default of `--max-logprobs`.
pub(super) const MAX_LOGPROBS: usize = 20;
/// The engine raises temperatures above zero to this.
const MIN_TEMPERATURE: f64 = 0.01;

/// Number of nodes that can be scored: the chain at the draft's head, up to a token that is no
/// text; and where cached rows are invalid and the server does not report how many there are, no
/// further than the next block, because only full blocks are cached.
pub(super) fn scored_nodes(engine: &Engine, round: &Round<'_>) -> usize {
    let text = shared::text_stem(&engine.tokens.may_end, round.draft);
    if engine.cache.rows == RowShape::Tail || engine.cache.reports_hits {
        return text;
    }
    text.min(uncached_nodes(engine, round.context.len()))
}

/// Maximum number of tokens after a context of which no block ends among them.
pub(super) fn uncached_nodes(engine: &Engine, context: usize) -> usize {
    let block = engine.cache.block.max(1);
    block - 1 - (context + block - 1) % block
}

/// The request that scores a draft. Where the cache covers a part of it (an earlier request had
/// this text), none of its rows can be read. It cannot cover a part of a block that the prompt does
/// not fill.
pub(super) fn score_request(engine: &Engine, round: &Round<'_>) -> Result<VerifyRequest, Refusal> {
    let width = score::width(round.sampling, MAX_LOGPROBS);
    let width = width.ok_or(Refusal::NoVerifyMethod(VerifyMethod::Score.name()))?;
    let nodes = scored_nodes(engine, round);
    let decidable = nodes.min(uncached_nodes(engine, round.context.len()));
    Ok(VerifyRequest { calls: vec![score_call(round, nodes, width)], nodes, decidable })
}

/// The one call that asks for prompt log-probabilities, always with `detokenize: false`.
fn score_call(round: &Round<'_>, nodes: usize, width: usize) -> Call {
    let path = nodes.checked_sub(1).map_or_else(Vec::new, |last| round.draft.path(last));
    let sampling = round.sampling;
    let mut params = json!({
        "max_tokens": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k.unwrap_or(0),
        "min_p": sampling.min_p,
        "detokenize": false,
        "ignore_eos": sampling.ignore_eos,
    });
    if nodes > 0
        && let Some(params) = params.as_object_mut()
    {
        params.insert("prompt_logprobs".into(), width.into());
        params.insert("skip_reading_prefix_cache".into(), false.into());
    }
    // The one token that the engine samples; the rows before it are probabilities by logits alone.
    let least = minimum::behind(sampling, round.context.output.len() + path.len(), 1).min_tokens;
    if least > 0
        && let Some(params) = params.as_object_mut()
    {
        params.insert("min_tokens".into(), least.into());
    }
    let ids = round.context.ids();
    let body = Body::around(&ids, 1)
        .put("model", round.context.model)
        .ids("token_ids", &ids, &path)
        .put("sampling_params", params)
        .put("stream", false);
    Call { path: GENERATE, body: body.end() }
}

#[derive(Deserialize)]
struct Scored {
    choices: Vec<ScoredChoice>,
    #[serde(default)]
    prompt_logprobs: Option<Vec<Option<Map<String, Value>>>>,
    #[serde(default)]
    usage: Option<PromptUsage>,
}

#[derive(Deserialize)]
struct ScoredChoice {
    token_ids: Vec<TokenId>,
    finish_reason: Option<String>,
}

pub(super) fn score_result(
    engine: &Engine,
    round: &Round<'_>,
    nodes: usize,
    body: &[u8],
) -> Result<VerifyResult, Unreadable> {
    let scored: Scored =
        serde_json::from_slice(body).map_err(|_| Unreadable("not an answer of the token endpoint"))?;
    let [choice] = scored.choices.as_slice() else { return Err(Unreadable("not one choice")) };
    let [bonus] = choice.token_ids.as_slice() else { return Err(Unreadable("not one token")) };
    let path = nodes.checked_sub(1).map_or(0, |last| round.draft.path(last).len());
    shared::check_prompt(scored.usage.as_ref(), round.context.len() + path)?;
    let computed = scored.usage.as_ref().and_then(PromptUsage::computed);
    let cached = scored.usage.as_ref().and_then(PromptUsage::cached);
    let context = round.context.len();
    // Rows of cached tokens are invalid or missing; the row of the first node follows token n − 1.
    if cached.is_some_and(|cached| cached as usize > context.saturating_sub(1)) {
        return Ok(VerifyResult { rows: Vec::new(), computed, ..VerifyResult::default() });
    }
    let listed = scored.prompt_logprobs.unwrap_or_default();
    let tail = listed.len().checked_sub(nodes).and_then(|from| listed.get(from..)).unwrap_or_default();
    if tail.len() < nodes {
        return Ok(VerifyResult { rows: Vec::new(), computed, ..VerifyResult::default() });
    }
    let bonus = Row { ends: choice.finish_reason.as_deref() == Some("stop"), ..Row::of(*bonus) };
    let logprobs = tail.iter().map(|row| row.as_ref().map(row_logprobs).unwrap_or_default());
    Ok(VerifyResult {
        rows: score::rows(engine, &raised(round.sampling), MAX_LOGPROBS, logprobs, round.weighs, bonus),
        computed,
        ..VerifyResult::default()
    })
}

/// The sampling with the engine's temperature, which is at least [`MIN_TEMPERATURE`] above zero.
fn raised(sampling: &Sampling) -> Sampling {
    let least = if sampling.temperature > 0.0 { MIN_TEMPERATURE } else { 0.0 };
    Sampling { temperature: sampling.temperature.max(least), ..sampling.clone() }
}

/// The tokens of one row with their log-probabilities.
fn row_logprobs(row: &Map<String, Value>) -> Vec<(TokenId, f64)> {
    let entry = |(id, entry): (&String, &Value)| Some((id.parse().ok()?, entry.get("logprob")?.as_f64()?));
    row.iter().filter_map(entry).collect()
}
