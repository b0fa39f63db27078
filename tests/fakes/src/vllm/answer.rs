//! Parts of vLLM's answers: logprobs in their three shapes, and the rows of a prompt.

use crate::TokenId;
use crate::rng;
use serde_json::{Map, Value, json};

use super::super::sequence::{Piece, Sequence};
use super::super::toy::Row;
use super::{Garbage, Refusal, Runner, Vllm};

impl Vllm {
    /// `logprobs` of a completion's choice. Offsets count characters of the names.
    pub(super) fn completion_logprobs(
        &self,
        pieces: &[Piece],
        top: usize,
        told_before: &mut Told,
        as_ids: bool,
    ) -> Value {
        let (mut offsets, mut own, mut names, mut tops) = (vec![], vec![], vec![], vec![]);
        for piece in pieces {
            let before = told_before.tokens.clone();
            let name =
                |id: TokenId| if as_ids { format!("token_id:{id}") } else { self.told_name(&before, id) };
            offsets.push(told_before.offset);
            own.push(told(piece.raw.logprob(piece.token)));
            names.push(name(piece.token));
            told_before.offset += name(piece.token).chars().count();
            told_before.tokens.push(piece.token);
            let all = with_own(&piece.raw, piece.token, top);
            tops.push(
                all.into_iter().map(|(id, logprob)| (name(id), json!(told(logprob)))).collect::<Map<_, _>>(),
            );
        }
        json!({"text_offset": offsets, "token_logprobs": own, "tokens": names, "top_logprobs": tops})
    }

    /// `logprobs` of a chat's choice: of the sampled token and the likeliest ones the first `top`.
    pub(super) fn chat_logprobs(&self, pieces: &[Piece], top: usize, told_before: &mut Told) -> Value {
        let mut content = vec![];
        for piece in pieces {
            let entry = |(id, logprob): (TokenId, f32)| {
                let name = self.told_name(&told_before.tokens, id);
                json!({"token": name, "logprob": told(logprob), "bytes": name.as_bytes()})
            };
            let all = with_own(&piece.raw, piece.token, top);
            let mut own = entry((piece.token, piece.raw.logprob(piece.token)));
            own["top_logprobs"] = all.into_iter().take(top).map(entry).collect();
            content.push(own);
            told_before.tokens.push(piece.token);
        }
        json!({"content": content})
    }

    /// The name of a token behind those before it: of a character in several tokens the last one
    /// has the text, and the others none (`_correct_decoded_token`).
    fn told_name(&self, before: &[TokenId], id: TokenId) -> String {
        let text = |ids: &[TokenId]| self.house.toy.decode(ids, false);
        let own = text(&[id]);
        if !own.ends_with('\u{fffd}') {
            return own;
        }
        for count in 1..=before.len().min(4) {
            let context = &before[before.len() - count..];
            let full = text(&[context, &[id]].concat());
            if full.ends_with('\u{fffd}') {
                continue;
            }
            let mut clean_end = count;
            while clean_end > 0 && text(&context[clean_end - 1..clean_end]).ends_with('\u{fffd}') {
                clean_end -= 1;
            }
            let prefix = if clean_end > 0 { text(&context[..clean_end]) } else { String::new() };
            return full.strip_prefix(&prefix).expect("decoding is by bytes").to_owned();
        }
        String::new()
    }

    /// `logprobs` of the token endpoint: ids and ranks.
    pub(super) fn token_logprobs(pieces: &[Piece], top: usize) -> Value {
        let content = pieces.iter().map(|piece| {
            let entry = |id: TokenId| json!({"token_id": id, "logprob": told(piece.raw.logprob(id)), "rank": piece.raw.rank(id)});
            let mut own = entry(piece.token);
            let all = with_own(&piece.raw, piece.token, top).into_iter();
            own["top_logprobs"] = all.take(top.max(1)).map(|(id, _)| entry(id)).collect();
            own
        });
        json!({"content": content.collect::<Vec<_>>()})
    }

    /// `prompt_logprobs` of a sequence: a row for each token that was computed in this call.
    pub(super) fn prompt_rows(
        &self,
        sequence: &Sequence,
        top: usize,
        spelled: bool,
    ) -> Result<Value, Refusal> {
        let (prompt, cached) = (sequence.prompt, sequence.cached);
        let true_row = |at: usize| {
            let row = self.house.toy.row(&sequence.context, at);
            self.prompt_row(&row, sequence.context.tokens()[at], top, spelled)
        };
        let computed = (cached + 1..prompt).map(true_row);
        if self.options.runner == Runner::V2 {
            let rows: Vec<Value> = std::iter::once(Value::Null).chain(computed).collect();
            return Ok(if rows.len() > 1 || prompt == 1 { json!(rows) } else { Value::Null });
        }
        if cached > 0 && self.options.garbage == Garbage::NotANumber {
            return Err(Refusal::broken("Out of range float values are not JSON compliant: nan"));
        }
        let poison = (1..=cached.min(prompt - 1)).map(|at| garbage(sequence.context.hash(at)));
        Ok(json!(std::iter::once(Value::Null).chain(poison).chain(computed).collect::<Vec<_>>()))
    }

    /// The prompt's token first, then the best ones; of two equal keys the later wins.
    fn prompt_row(&self, row: &Row, token: TokenId, top: usize, spelled: bool) -> Value {
        let mut entries = Map::new();
        let mut add = |id: TokenId, logprob: f32, rank: usize| {
            let spelling = if spelled { json!(self.house.toy.name(id)) } else { Value::Null };
            let entry = json!({"logprob": told(logprob), "rank": rank, "decoded_token": spelling});
            entries.insert(id.to_string(), entry);
        };
        add(token, row.logprob(token), row.rank(token));
        row.top(top).into_iter().enumerate().for_each(|(rank, (id, logprob))| add(id, logprob, rank + 1));
        Value::Object(entries)
    }
}

/// Tokens of one output with logprobs so far, and the characters of their names.
#[derive(Default)]
pub(super) struct Told {
    tokens: Vec<TokenId>,
    offset: usize,
}

/// A logprob as answers have it: that of a barred token is finite.
fn told(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// The token itself, and the best few behind it.
fn with_own(row: &Row, token: TokenId, top: usize) -> Vec<(TokenId, f32)> {
    let mut all = row.top(top);
    all.retain(|&(id, _)| id != token);
    all.insert(0, (token, row.logprob(token)));
    all
}

/// Uninitialised memory: ids beyond any vocabulary, logprobs above 0, ranks of 0; or, worst, a
/// plausible row.
fn garbage(seed: u64) -> Value {
    let wild = rng::hash(seed, 11, 0, 0);
    if wild.is_multiple_of(3) {
        return json!({"0": {"logprob": 0.0, "rank": 1, "decoded_token": null}});
    }
    let id = (wild >> 8) as i32;
    json!({
        id.to_string(): {"logprob": f32::MAX, "rank": 0, "decoded_token": null},
        ((wild >> 40) as u16).to_string(): {"logprob": 3.08e-41, "rank": 1, "decoded_token": null},
    })
}
