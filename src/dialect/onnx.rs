//! The dialect of `foretell target`: vLLM's shapes for completions, chat and token ids, and
//! `POST /v1/verify` for trees.
//!
//! The target's noise is a function of (seed, choice, position, token), so the same sampling fields with the
//! same seed give the same tokens on every route; what has to be kept is the position, which a prompt of
//! token ids does, and the split between prompt and output, which the field `generated` does.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{Call, Chunk, Context, Unreadable};
use crate::draft::Tree;
use crate::openai::{Request, Route, Sampling};
use crate::session::{Plan, Row, Verdict};
use crate::units::TokenId;

const COMPLETIONS: &str = Route::Completions.path();
const VERIFY: &str = "/v1/verify";

/// The client's request with `stream`, `stream_options` (usage on every event, so that the backend's own count
/// of the prompt is known however early the ride is left), `return_token_ids` and, where it matters and the
/// client sent none, `seed`. `prediction` is Foretell's to use and goes no further.
pub fn first_ride(request: &Request, seed: u64) -> Call {
    let mut body = request.body.clone();
    body.shift_remove("prediction");
    body.insert("stream".into(), Value::Bool(true));
    body.insert("stream_options".into(), json!({ "include_usage": true, "continuous_usage_stats": true }));
    body.insert("return_token_ids".into(), Value::Bool(true));
    if request.sampling.temperature > 0.0 && request.sampling.seed.is_none() {
        body.insert("seed".into(), seed.into());
    }
    Call { path: request.route.path(), body: bytes(&body) }
}

/// `POST /v1/completions` with the whole context as ids, streamed.
pub fn ride(context: &Context<'_>, sampling: &Sampling, max_tokens: u32) -> Call {
    let body = Completion {
        model: context.model,
        prompt: vec![whole(context, &[])],
        max_tokens,
        stream: true,
        return_token_ids: true,
        generated: vec![context.output.len()],
        sampling: fields(sampling),
    };
    Call { path: COMPLETIONS, body: bytes(&body) }
}

/// The tree itself, or one prompt per node.
pub fn verify(context: &Context<'_>, draft: &Tree, sampling: &Sampling, plan: Plan) -> Call {
    match plan {
        Plan::Tree => tree(context, draft, sampling),
        Plan::FanOut => fan_out(context, draft, sampling),
    }
}

fn tree(context: &Context<'_>, draft: &Tree, sampling: &Sampling) -> Call {
    let body = Verification {
        model: context.model,
        context: whole(context, &[]),
        generated: context.output.len(),
        tokens: draft.nodes().iter().map(|node| node.token).collect(),
        parents: draft.nodes().iter().map(|node| node.parent.map_or(-1, |parent| parent as i64)).collect(),
        sampling: fields(sampling),
    };
    Call { path: VERIFY, body: bytes(&body) }
}

fn fan_out(context: &Context<'_>, draft: &Tree, sampling: &Sampling) -> Call {
    let nodes = (0..draft.len()).map(|node| draft.path(node));
    let paths: Vec<Vec<TokenId>> = std::iter::once(Vec::new()).chain(nodes).collect();
    // Only what counts output must know how much of each prompt is output.
    let counted = paths.iter().filter(|_| sampling.counts_output());
    let generated = counted.map(|path| context.output.len() + path.len()).collect();
    let body = Completion {
        model: context.model,
        prompt: paths.iter().map(|path| whole(context, path)).collect(),
        max_tokens: 1,
        stream: false,
        return_token_ids: true,
        generated,
        sampling: fields(sampling),
    };
    Call { path: COMPLETIONS, body: bytes(&body) }
}

fn whole(context: &Context<'_>, path: &[TokenId]) -> Vec<TokenId> {
    [context.prompt, context.output, path].concat()
}

#[derive(Serialize)]
struct Completion<'a> {
    model: &'a str,
    prompt: Vec<Vec<TokenId>>,
    max_tokens: u32,
    stream: bool,
    return_token_ids: bool,
    /// One number per prompt: how many of its last ids are output.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    generated: Vec<usize>,
    #[serde(flatten)]
    sampling: Map<String, Value>,
}

#[derive(Serialize)]
struct Verification<'a> {
    model: &'a str,
    context: Vec<TokenId>,
    generated: usize,
    tokens: Vec<TokenId>,
    parents: Vec<i64>,
    #[serde(flatten)]
    sampling: Map<String, Value>,
}

/// The sampling fields that differ from the target's defaults. `ignore_eos` goes always: whether the output
/// ends is the session's to decide, but a ride that is told nothing would run past the end.
fn fields(sampling: &Sampling) -> Map<String, Value> {
    let plain = Sampling::default();
    let mut fields = Map::new();
    let mut put = |name: &str, value: Value, is_default: bool| {
        if !is_default {
            fields.insert(name.into(), value);
        }
    };
    #[expect(clippy::float_cmp, reason = "only the very default may be left out")]
    let same = |a: f64, b: f64| a == b;
    put("temperature", sampling.temperature.into(), false);
    put("top_p", sampling.top_p.into(), same(sampling.top_p, plain.top_p));
    put("top_k", sampling.top_k.into(), sampling.top_k.is_none());
    put("min_p", sampling.min_p.into(), same(sampling.min_p, plain.min_p));
    put("presence_penalty", sampling.presence_penalty.into(), sampling.presence_penalty == 0.0);
    put("frequency_penalty", sampling.frequency_penalty.into(), sampling.frequency_penalty == 0.0);
    put(
        "repetition_penalty",
        sampling.repetition_penalty.into(),
        same(sampling.repetition_penalty, plain.repetition_penalty),
    );
    let bias: Map<String, Value> =
        sampling.logit_bias.iter().map(|(token, bias)| (token.to_string(), (*bias).into())).collect();
    put("logit_bias", bias.into(), sampling.logit_bias.is_empty());
    put("seed", sampling.seed.into(), sampling.seed.is_none());
    put("min_tokens", sampling.min_tokens.into(), sampling.min_tokens == 0);
    put("ignore_eos", sampling.ignore_eos.into(), !sampling.ignore_eos);
    fields
}

/// Serialising to memory what is only strings, numbers and maps cannot fail; an empty body would be refused
/// by the backend and end in a ride.
fn bytes(body: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(body).unwrap_or_default()
}

/// One event of a streamed completion or chat completion.
pub fn chunk(event: &Value) -> Result<Chunk, Unreadable> {
    if event.get("error").is_some() {
        return Err(Unreadable("the stream carries an error"));
    }
    let choices = event.get("choices").and_then(Value::as_array).ok_or(Unreadable("no choices"))?;
    let mut chunk =
        Chunk { usage: event.get("usage").filter(|usage| usage.is_object()).cloned(), ..Chunk::default() };
    let Some(choice) = choices.first() else { return Ok(chunk) };
    let delta = choice.get("delta");
    let text = delta.map_or_else(|| choice.get("text"), |delta| delta.get("content"));
    text.and_then(Value::as_str).unwrap_or_default().clone_into(&mut chunk.text);
    chunk.tokens = choice.get("token_ids").and_then(ids).unwrap_or_default();
    chunk.prompt = [choice, event].into_iter().find_map(|place| place.get("prompt_token_ids").and_then(ids));
    chunk.finish = choice.get("finish_reason").and_then(Value::as_str).map(str::to_owned);
    let foreign = delta.and_then(Value::as_object).is_some_and(|delta| {
        delta.iter().any(|(key, value)| !matches!(key.as_str(), "role" | "content") && !value.is_null())
    });
    let unnamed = !chunk.text.is_empty() && choice.get("token_ids").is_none_or(Value::is_null);
    chunk.doubtful = foreign || unnamed || choices.len() > 1;
    Ok(chunk)
}

fn ids(value: &Value) -> Option<Vec<TokenId>> {
    value.as_array()?.iter().map(|id| id.as_u64().and_then(|id| TokenId::try_from(id).ok())).collect()
}

#[derive(Deserialize)]
struct VerifyAnswer {
    rows: Vec<VerifyRow>,
    usage: Option<VerifyUsage>,
}

#[derive(Deserialize)]
struct VerifyRow {
    sample: TokenId,
    logprob: Option<f32>,
}

#[derive(Deserialize)]
struct VerifyUsage {
    prompt_tokens: u32,
    prompt_tokens_details: Option<CachedTokens>,
}

#[derive(Deserialize)]
struct CachedTokens {
    cached_tokens: Option<u32>,
}

impl VerifyUsage {
    fn computed(&self) -> Option<u32> {
        let cached = self.prompt_tokens_details.as_ref()?.cached_tokens?;
        Some(self.prompt_tokens.saturating_sub(cached))
    }
}

#[derive(Deserialize)]
struct FanOutAnswer {
    choices: Vec<FanOutChoice>,
    usage: Option<VerifyUsage>,
}

#[derive(Deserialize)]
struct FanOutChoice {
    index: usize,
    token_ids: Vec<TokenId>,
}

/// The answer to a verify call, checked for one row per node and one for the context.
pub fn verdict(plan: Plan, nodes: usize, body: &[u8]) -> Result<Verdict, Unreadable> {
    let verdict = match plan {
        Plan::Tree => tree_verdict(body)?,
        Plan::FanOut => fan_out_verdict(body)?,
    };
    if verdict.rows.len() != nodes + 1 {
        return Err(Unreadable("not one row for each node and one for the context"));
    }
    Ok(verdict)
}

fn tree_verdict(body: &[u8]) -> Result<Verdict, Unreadable> {
    let answer: VerifyAnswer = serde_json::from_slice(body).map_err(|_| Unreadable("not a verify answer"))?;
    let computed = answer.usage.as_ref().and_then(VerifyUsage::computed);
    let rows = answer.rows.into_iter().map(|row| Row { sample: row.sample, logprob: row.logprob }).collect();
    Ok(Verdict { rows, computed })
}

fn fan_out_verdict(body: &[u8]) -> Result<Verdict, Unreadable> {
    let mut answer: FanOutAnswer =
        serde_json::from_slice(body).map_err(|_| Unreadable("not a completion with token ids"))?;
    answer.choices.sort_by_key(|choice| choice.index);
    let computed = answer.usage.as_ref().and_then(VerifyUsage::computed);
    let rows = answer
        .choices
        .iter()
        .enumerate()
        .map(|(place, choice)| match choice.token_ids.as_slice() {
            [sample] if choice.index == place => Ok(Row { sample: *sample, logprob: None }),
            _ => Err(Unreadable("not one token per prompt")),
        })
        .collect::<Result<_, _>>()?;
    Ok(Verdict { rows, computed })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::{Features, Source};

    const CONTEXT: Context<'_> = Context { model: "m", prompt: &[1, 2], output: &[3] };

    fn text(call: &Call) -> &str {
        std::str::from_utf8(&call.body).unwrap()
    }

    #[test]
    fn a_tree_goes_out_whole() {
        let mut draft = Tree::chain(&[4, 5], Source::Model, Features::default());
        draft.push(crate::draft::Node {
            token: 6,
            parent: Some(0),
            source: Source::PromptLookup,
            features: Features::default(),
        });
        let sampling = Sampling { temperature: 0.5, seed: Some(9), ..Sampling::default() };
        let call = verify(&CONTEXT, &draft, &sampling, Plan::Tree);
        assert_eq!(call.path, "/v1/verify");
        assert_eq!(
            text(&call),
            r#"{"model":"m","context":[1,2,3],"generated":1,"tokens":[4,5,6],"parents":[-1,0,0],"temperature":0.5,"seed":9}"#
        );
    }

    #[test]
    fn a_fan_out_is_one_prompt_per_node() {
        let draft = Tree::chain(&[4, 5], Source::Model, Features::default());
        let call = verify(&CONTEXT, &draft, &Sampling::default(), Plan::FanOut);
        assert_eq!(call.path, "/v1/completions");
        assert_eq!(
            text(&call),
            r#"{"model":"m","prompt":[[1,2,3],[1,2,3,4],[1,2,3,4,5]],"max_tokens":1,"stream":false,"return_token_ids":true,"temperature":1.0}"#
        );
    }

    #[test]
    fn a_fan_out_with_penalties_says_what_is_output() {
        let sampling = Sampling { presence_penalty: 0.5, ..Sampling::default() };
        let draft = Tree::chain(&[4], Source::Model, Features::default());
        let call = verify(&CONTEXT, &draft, &sampling, Plan::FanOut);
        assert!(text(&call).contains(r#""generated":[1,2]"#), "{}", text(&call));
    }

    #[test]
    fn a_ride_by_ids_says_what_is_output() {
        let call = ride(&CONTEXT, &Sampling { temperature: 0.0, ..Sampling::default() }, 7);
        assert_eq!(
            text(&call),
            r#"{"model":"m","prompt":[[1,2,3]],"max_tokens":7,"stream":true,"return_token_ids":true,"generated":[1],"temperature":0.0}"#
        );
    }

    #[test]
    fn completion_and_chat_events_read_alike() {
        let completion = json!({"choices":[{"index":0,"text":"a","token_ids":[7],"prompt_token_ids":[1],"finish_reason":null}]});
        let chat = json!({"prompt_token_ids":[1],"choices":[{"index":0,"delta":{"role":"assistant","content":"a"},"token_ids":[7],"finish_reason":null}]});
        let expected = Chunk { prompt: Some(vec![1]), tokens: vec![7], text: "a".into(), ..Chunk::default() };
        assert_eq!(chunk(&completion).unwrap(), expected);
        assert_eq!(chunk(&chat).unwrap(), expected);
    }

    #[test]
    fn text_without_ids_and_tool_calls_are_doubtful() {
        let no_ids = json!({"choices":[{"text":"a","finish_reason":null}]});
        assert!(chunk(&no_ids).unwrap().doubtful);
        let tool = json!({"choices":[{"delta":{"tool_calls":[]},"token_ids":[1]}]});
        assert!(chunk(&tool).unwrap().doubtful);
        assert!(chunk(&json!({"error":{"message":"x"}})).is_err());
    }

    #[test]
    fn a_verdict_with_a_row_missing_is_unreadable() {
        let body = br#"{"rows":[{"sample":4,"logprob":-0.1,"top":[],"draft_logprob":null}]}"#;
        assert!(verdict(Plan::Tree, 0, body).is_ok());
        assert!(verdict(Plan::Tree, 1, body).is_err());
        let fan = br#"{"choices":[{"index":1,"token_ids":[5]},{"index":0,"token_ids":[4]}]}"#;
        let rows: Vec<_> = verdict(Plan::FanOut, 1, fan).unwrap().rows.iter().map(|row| row.sample).collect();
        assert_eq!(rows, [4, 5]);
    }
}
