//! The log-probabilities of an answer, in the form of vLLM.
//!
//! An engine's answer lists tokens by their ids; here they become texts. Each token is written with
//! its text, with two exceptions: of a character whose bytes are spread over several tokens the
//! last one has the complete text, and the others none (vLLM 0.32, `v1/engine/logprobs.py`:
//! `_correct_decoded_token`).

use serde_json::{Map, Value, json};

use foretell_core::units::TokenId;
use foretell_wire::openai::Route;

/// Tokens listed at one position of an output with their log-probabilities (natural): the one that
/// was taken there, then the likeliest others, best first.
pub type Listed = Vec<(TokenId, f64)>;

/// The text of tokens, special ones included, with U+FFFD for bytes that are not valid UTF-8.
pub type Decode<'a> = dyn Fn(&[TokenId]) -> String + 'a;

/// Log-probability of tokens that could not be taken, which JSON has no number for.
const NEVER: f64 = -9999.0;
/// Tokens before a token in which its character may begin.
const CHARACTER: usize = 4;

/// Writes the log-probabilities of one output, in the order of its tokens.
#[derive(Clone, Debug)]
pub struct Logprobs {
    route: Route,
    /// Number of the likeliest tokens that the client requested.
    most: usize,
    /// Tokens are written as `token_id:N`.
    as_ids: bool,
    /// The last tokens of the output.
    recent: Vec<TokenId>,
    /// Characters of the texts of all tokens so far.
    offset: usize,
}

impl Logprobs {
    /// Of an output that begins; `as_ids`: tokens are written as `token_id:N`.
    pub fn new(route: Route, most: usize, as_ids: bool) -> Self {
        Self { route, most, as_ids, recent: Vec::new(), offset: 0 }
    }

    /// The member `logprobs` for tokens that follow, each with what is listed at its position;
    /// `None` for the first token of a prompt, which nothing comes before, and where nothing is
    /// known.
    pub fn write(&mut self, tokens: &[(TokenId, Option<Listed>)], decode: &Decode<'_>) -> Value {
        match self.route {
            Route::Chat => {
                let content: Vec<Value> = tokens
                    .iter()
                    .map(|(token, listed)| self.entry(*token, listed.as_ref(), decode))
                    .collect();
                json!({ "content": content })
            }
            Route::Completions => self.lists(tokens, decode),
        }
    }

    /// The text of a token that follows.
    fn advance(&mut self, token: TokenId, decode: &Decode<'_>) -> String {
        let text = text_behind(&self.recent, token, decode);
        self.offset += text.chars().count();
        self.recent.drain(..(self.recent.len() + 1).saturating_sub(CHARACTER));
        self.recent.push(token);
        text
    }

    /// A token at the end of the output so far, by its name.
    fn name(&self, token: TokenId, decode: &Decode<'_>) -> String {
        if self.as_ids { format!("token_id:{token}") } else { text_behind(&self.recent, token, decode) }
    }

    /// The tokens listed at a position by their names, each once.
    fn named(&self, listed: &Listed, decode: &Decode<'_>) -> Vec<(String, f64)> {
        let taken = listed.first().map(|first| first.0);
        let others = listed.iter().skip(1).filter(|entry| Some(entry.0) != taken);
        let name = |&(id, logprob): &(TokenId, f64)| (self.name(id, decode), logprob.max(NEVER));
        listed.first().into_iter().chain(others).map(name).collect()
    }

    fn entry(&mut self, token: TokenId, listed: Option<&Listed>, decode: &Decode<'_>) -> Value {
        let named = listed.map(|listed| self.named(listed, decode)).unwrap_or_default();
        let logprob = named.first().map_or(NEVER, |first| first.1);
        let bytes = |text: &str| text.as_bytes().to_vec();
        let top: Vec<Value> = named
            .into_iter()
            .take(self.most)
            .map(|(text, logprob)| json!({ "token": text, "logprob": logprob, "bytes": bytes(&text) }))
            .collect();
        let name = self.name(token, decode);
        // With `token_id:N` these bytes are those of its text.
        let text = self.advance(token, decode);
        json!({ "token": name, "logprob": logprob, "bytes": bytes(&text), "top_logprobs": top })
    }

    /// The parallel lists of a completion.
    fn lists(&mut self, tokens: &[(TokenId, Option<Listed>)], decode: &Decode<'_>) -> Value {
        let (mut offsets, mut names, mut logprobs, mut tops) = (vec![], vec![], vec![], vec![]);
        for (token, listed) in tokens {
            let named = listed.as_ref().map(|listed| self.named(listed, decode));
            offsets.push(self.offset);
            logprobs.push(named.as_ref().and_then(|named| Some(named.first()?.1)));
            tops.push(named.map(|named| {
                let listed = named.into_iter().take(self.most + 1);
                listed.map(|(name, logprob)| (name, json!(logprob))).collect::<Map<_, _>>()
            }));
            names.push(self.name(*token, decode));
            self.advance(*token, decode);
        }
        json!({ "text_offset": offsets, "token_logprobs": logprobs, "tokens": names, "top_logprobs": tops })
    }
}

/// The text of a token behind the last ones of an output.
fn text_behind(recent: &[TokenId], token: TokenId, decode: &Decode<'_>) -> String {
    let broken = |text: &str| text.ends_with(char::REPLACEMENT_CHARACTER);
    let alone = decode(&[token]);
    if !broken(&alone) {
        return alone;
    }
    for count in 1..=recent.len() {
        let context = recent.get(recent.len() - count..).unwrap_or_default();
        let joined = decode(&[context, &[token]].concat());
        if broken(&joined) {
            continue;
        }
        // The tokens before it that have no text belong to its character.
        let unfinished = context.iter().rev().take_while(|&&id| broken(&decode(&[id]))).count();
        let finished = context.get(..count - unfinished).unwrap_or_default();
        let prefix = if finished.is_empty() { String::new() } else { decode(finished) };
        let same = prefix.chars().zip(joined.chars()).take_while(|(a, b)| a == b).count();
        return joined.chars().skip(same).collect();
    }
    String::new()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde::Deserialize;

    use super::*;
    use foretell_parsers::text::Tokenizer;

    /// Made by vLLM's own classes (tests/engines/logprobs.py).
    const RECORDED: &str = include_str!("../../../tests/goldens/logprobs.jsonl");

    #[derive(Deserialize)]
    struct Output {
        most: usize,
        /// The token that was taken first, then the likeliest ones.
        places: Vec<Listed>,
        chat: Value,
        completions: Value,
    }

    fn tokenizer() -> Tokenizer {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../onnx/models/target");
        Tokenizer::from_file(&root).unwrap()
    }

    #[test]
    fn tokens_are_written_as_by_vllm() {
        let tokenizer = tokenizer();
        let decode = |ids: &[TokenId]| tokenizer.decode(ids, false).unwrap();
        let mut tokens = 0;
        for line in RECORDED.lines() {
            let output: Output = serde_json::from_str(line).unwrap();
            let places: Vec<(TokenId, Option<Listed>)> =
                output.places.into_iter().map(|listed| (listed[0].0, Some(listed))).collect();
            let ids: Vec<TokenId> = places.iter().map(|place| place.0).collect();
            tokens += ids.len();
            for (route, want) in [(Route::Chat, output.chat), (Route::Completions, output.completions)] {
                let new = || Logprobs::new(route, output.most, false);
                assert_eq!(new().write(&places, &decode), want, "{ids:?}");
            }
        }
        assert!(tokens > 500, "{tokens}");
    }
}
