//! Grammars as llguidance makes them for vLLM: special tokens are no text, and where one text is
//! left its first token is forced.

use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokRxInfo, TokTrie, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::Value;

use super::mask::Spec;
use super::toy::{Row, Toy};
use super::words::Words;
use crate::TokenId;

struct Environment {
    trie: TokTrie,
    words: Words,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| self.words.encode(text))
    }
}

/// The compiler of one vocabulary.
pub struct Guidance {
    factory: ParserFactory,
    any_whitespace: bool,
}

impl Guidance {
    pub fn new(toy: &Toy, any_whitespace: bool) -> Self {
        let words = Words::of(&toy.folder);
        let size = toy.vocabulary() as TokenId;
        let marked = |id| {
            let mark: &[u8] = if words.is_special(id) { &[TokTrie::SPECIAL_TOKEN_MARKER] } else { &[] };
            [mark, &words.bytes(id)].concat()
        };
        let marked: Vec<Vec<u8>> = (0..size).map(marked).collect();
        let trie = TokTrie::from(&TokRxInfo::new(size, toy.eos()), &marked);
        let environment = Arc::new(Environment { trie, words });
        let slices = SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(
            &(environment as Arc<dyn TokenizerEnv + Sync>),
            InferenceCapabilities::default(),
            &slices,
        );
        let mut factory = factory.expect("a vocabulary");
        factory.quiet();
        Self { factory, any_whitespace }
    }

    /// The mask of an output; `stops`: tokens that may end it, where the grammar allows an end.
    pub fn mask(&self, spec: &Spec, stops: &[TokenId]) -> Result<Mask, String> {
        let grammar = match spec {
            Spec::Json(schema) => {
                let mut schema: Value = serde_json::from_str(schema).map_err(|error| error.to_string())?;
                // The schema's own options win.
                let options = &mut schema["x-guidance"];
                if options.get("whitespace_flexible").is_none() {
                    options["whitespace_flexible"] = self.any_whitespace.into();
                }
                TopLevelGrammar::from_json_schema(schema)
            }
            Spec::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Spec::Choice(texts) => {
                let texts: Vec<String> =
                    texts.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
                TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | ")))
            }
            Spec::Lark(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
            Spec::Rules(_) | Spec::Tag(_) => return Err("'triggers'".to_owned()),
        };
        let parser = self.factory.create_parser(grammar).map_err(|error| error.to_string())?;
        Ok(Mask { matcher: Matcher::new(Ok(parser)), stops: stops.to_vec(), ended: false })
    }
}

/// The place of an output in its grammar.
#[derive(Clone)]
pub struct Mask {
    matcher: Matcher,
    stops: Vec<TokenId>,
    ended: bool,
}

impl std::fmt::Debug for Mask {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Mask").field("ended", &self.ended).finish_non_exhaustive()
    }
}

impl Mask {
    /// Bars the tokens that may not follow. Behind a token that could have ended the text, all may.
    pub fn apply(&mut self, row: &mut Row) {
        if self.ended {
            return;
        }
        let mask = self.matcher.compute_mask_or_eos().expect("a mask of the vocabulary");
        let may_end = self.matcher.is_accepting().expect("a place");
        for (token, logit) in row.0.iter_mut().enumerate() {
            let is_stop = self.stops.contains(&(token as TokenId));
            let allowed = if is_stop { may_end } else { mask.get(token) };
            if !allowed {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    /// Goes on by a sampled token; false if the grammar bars it.
    pub fn accept(&mut self, token: TokenId) -> bool {
        self.ended |= self.stops.contains(&token);
        self.ended || self.matcher.consume_token(token).is_ok()
    }
}
