//! Log-probabilities in completions of vLLM's form, by token ids.

use serde_json::Value;

use crate::openai::Listed;

/// The list of a completion for each of its tokens, by token ids (`return_tokens_as_token_ids`),
/// the token itself first; `None` if it lists texts, or not at every place.
pub fn by_id(logprobs: &Value) -> Option<Vec<Listed>> {
    let entry = |(name, logprob): (&String, &Value)| {
        Some((name.strip_prefix("token_id:")?.parse().ok()?, logprob.as_f64()?))
    };
    let place = |top: &Value| top.as_object()?.iter().map(entry).collect();
    logprobs.get("top_logprobs")?.as_array()?.iter().map(place).collect()
}

/// The lists of the choices of a fan-out, in the order of its prompts, up to the first that has
/// none.
pub fn of_fan_out(body: &[u8]) -> Vec<Listed> {
    let answer: Value = serde_json::from_slice(body).unwrap_or_default();
    let mut choices: Vec<&Value> =
        answer.get("choices").and_then(Value::as_array).into_iter().flatten().collect();
    choices.sort_by_key(|choice| choice.get("index").and_then(Value::as_u64));
    let place = |choice: &Value| by_id(choice.get("logprobs")?)?.into_iter().next();
    choices.into_iter().map_while(place).collect()
}
