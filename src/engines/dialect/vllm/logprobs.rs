//! Log-probabilities of vLLM's token endpoint, and how it writes tokens in them.
//!
//! A row of a scored prompt holds the same numbers as that of an output at temperature 0 without
//! penalties and biases, whatever `--logprobs-mode` is (0.32, `v1/sample/sampler.py`): the token
//! that the prompt has there first, with its rank, then the likeliest ones.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::dialect::shared::bytes;
use crate::dialect::{Call, Engine};
use crate::openai::Listed;
use foretell_core::units::TokenId;

const DETOKENIZE: &str = "/detokenize";

#[derive(Deserialize)]
struct Scored {
    #[serde(default)]
    prompt_logprobs: Option<Vec<Option<Map<String, Value>>>>,
    choices: [Choice; 1],
}

#[derive(Deserialize)]
struct Choice {
    logprobs: Option<Content>,
}

#[derive(Deserialize)]
struct Content {
    content: [Sampled; 1],
}

/// The token that was sampled behind the prompt, and the likeliest ones there.
#[derive(Deserialize)]
struct Sampled {
    token_id: TokenId,
    logprob: f64,
    top_logprobs: Vec<Top>,
}

#[derive(Deserialize)]
struct Top {
    token_id: TokenId,
    logprob: f64,
}

/// The lists of a scored answer: at the places of the last `nodes` tokens of its prompt the `most`
/// likeliest tokens, one at least, and behind it also the token that was sampled there.
pub(super) fn scored(nodes: usize, most: u32, body: &[u8]) -> Option<Vec<Listed>> {
    let Scored { prompt_logprobs, choices: [choice] } = serde_json::from_slice(body).ok()?;
    let rows = prompt_logprobs.unwrap_or_default();
    let tail = rows.get(rows.len().checked_sub(nodes)?..)?;
    let mut places: Vec<Listed> =
        tail.iter().map_while(|row| likeliest(row.as_ref()?, u64::from(most.max(1)))).collect();
    let Content { content: [bonus] } = choice.logprobs?;
    if places.len() == nodes {
        let others = bonus.top_logprobs.iter().filter(|top| top.token_id != bonus.token_id);
        let own = std::iter::once((bonus.token_id, bonus.logprob));
        places.push(own.chain(others.map(|top| (top.token_id, top.logprob))).collect());
    }
    Some(places)
}

/// The tokens of a row up to this rank, the likeliest first.
fn likeliest(row: &Map<String, Value>, most: u64) -> Option<Listed> {
    let entry = |(id, entry): (&String, &Value)| {
        let token: TokenId = id.parse().ok()?;
        Some((entry.get("rank")?.as_u64()?, token, entry.get("logprob")?.as_f64()?))
    };
    let mut entries: Vec<(u64, TokenId, f64)> = row.iter().map(entry).collect::<Option<_>>()?;
    entries.sort_by_key(|entry| entry.0);
    let within = entries.into_iter().filter(|entry| entry.0 <= most);
    Some(within.map(|(_, token, logprob)| (token, logprob)).collect())
}

/// The call for the text of one token.
pub(super) fn text_call(engine: &Engine, token: TokenId) -> Call {
    Call { path: DETOKENIZE, body: bytes(&json!({ "model": engine.model, "tokens": [token] })) }
}

/// Reads the answer to [`text_call`].
pub(super) fn token_text(body: &[u8]) -> Option<String> {
    let answer: Value = serde_json::from_slice(body).ok()?;
    answer.get("prompt")?.as_str().map(ToOwned::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scored_answer_lists_the_likeliest_of_each_place() {
        let body = json!({
            "prompt_logprobs": [null,
                {"9": {"logprob": -7.0, "rank": 30}, "4": {"logprob": -0.1, "rank": 1}, "5": {"logprob": -3.0, "rank": 2}},
                {"5": {"logprob": -2.0, "rank": 2}, "6": {"logprob": -0.5, "rank": 1}}],
            "choices": [{"logprobs": {"content": [
                {"token_id": 8, "logprob": -0.2, "top_logprobs": [
                    {"token_id": 8, "logprob": -0.2}, {"token_id": 3, "logprob": -2.5}]}]}}],
        });
        let listed = |nodes, most| scored(nodes, most, body.to_string().as_bytes());
        let bonus = vec![(8, -0.2), (3, -2.5)];
        assert_eq!(
            listed(2, 2),
            Some(vec![vec![(4, -0.1), (5, -3.0)], vec![(6, -0.5), (5, -2.0)], bonus.clone()])
        );
        assert_eq!(listed(1, 0), Some(vec![vec![(6, -0.5)], bonus]), "the token itself is always listed");
        assert_eq!(
            listed(3, 1).map(|places| places.len()),
            Some(0),
            "the first token of a prompt has no row"
        );
        assert_eq!(scored(0, 1, b"{}"), None);
    }
}
