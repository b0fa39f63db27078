//! Grammars that bind an output: which tokens may follow. The engine is llguidance, which also
//! vLLM and SGLang can be started with.
//!
//! A grammar is bound to the output of a request, and goes on from the output that an earlier
//! request of the same text brought (`generated`): so a draft is verified under the grammar of its
//! place, and a client needs no masks of its own.

use std::sync::Arc;

use llguidance::api::{GrammarWithLexer, StopReason, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use parking_lot::Mutex;
use serde_json::{Value, json};

use foretell_core::units::TokenId;
use foretell_engines::openai::{Grammar, Language};
use foretell_engines::text::Tokenizer;

/// Number of places that are kept for the next request of the same text.
const KEPT: usize = 32;
/// Maximum lexer states of a grammar, 1 to 2 kB each.
const LEXER_STATES: usize = 10_000;

const TOO_LARGE: &str = "the grammar needs too much memory or time";
/// Whitespace between the tokens of JSON: a space, or a new line with its indentation. Without a
/// bound a small model writes it for ever.
const WHITESPACE: &str = " |\\n {0,32}";

/// The grammars of one vocabulary, and places in the texts of recent requests.
pub struct Grammars {
    factory: ParserFactory,
    /// The last used first.
    kept: Mutex<Vec<Kept>>,
}

struct Kept {
    grammar: Arc<str>,
    output: Vec<TokenId>,
    place: Place,
}

impl Grammars {
    /// For a model with `vocabulary` logits, of which `ends` end an output.
    ///
    /// # Errors
    /// llguidance refuses the vocabulary; the reason in words.
    pub fn new(tokenizer: &Tokenizer, vocabulary: usize, ends: &[TokenId]) -> Result<Self, String> {
        let spelled = |id: usize| {
            let id = id as TokenId;
            let bytes = tokenizer.spelling(id).filter(|_| id < tokenizer.end()).unwrap_or_default();
            // A special token is no text, whatever its name.
            if tokenizer.is_special(id) {
                [&[TokTrie::SPECIAL_TOKEN_MARKER], &*bytes].concat()
            } else {
                bytes
            }
        };
        let words: Vec<Vec<u8>> = (0..vocabulary).map(spelled).collect();
        let end = ends.first().ok_or("the model has no token that ends an output")?;
        let trie = TokTrie::from(&TokRxInfo::new(vocabulary as u32, *end), &words).with_eos_tokens(ends);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| error.to_string())?;
        factory.quiet();
        factory.limits_mut().max_lexer_states = LEXER_STATES;
        factory.limits_mut().verbose_errors = false;
        Ok(Self { factory, kept: Mutex::default() })
    }

    /// The place after `output`. Takes milliseconds for a grammar that is new here.
    ///
    /// # Errors
    /// The grammar cannot be used, or does not allow this output; the reason in words.
    pub fn place(&self, grammar: &Grammar, output: &[TokenId]) -> Result<Place, String> {
        let key: Arc<str> = grammar.to_json().to_string().into();
        let nearest = self.nearest(&key, output);
        let is_new = nearest.as_ref().is_none_or(|(at, _)| *at < output.len());
        let (from, mut place) = match nearest {
            Some(nearest) => nearest,
            None => (0, self.start(grammar)?),
        };
        for &token in output.get(from..).unwrap_or_default() {
            place.push(token);
        }
        if place.is_lost() {
            return Err("the grammar does not allow the output so far".to_owned());
        }
        if is_new {
            let mut kept = self.kept.lock();
            kept.insert(0, Kept { grammar: key, output: output.to_vec(), place: place.clone() });
            kept.truncate(KEPT);
        }
        Ok(place)
    }

    /// The kept place with the longest beginning of `output`, and its length.
    fn nearest(&self, grammar: &str, output: &[TokenId]) -> Option<(usize, Place)> {
        let mut kept = self.kept.lock();
        let fits = |kept: &Kept| &*kept.grammar == grammar && output.starts_with(&kept.output);
        let (at, _) = kept
            .iter()
            .enumerate()
            .filter(|(_, kept)| fits(kept))
            .max_by_key(|(_, kept)| kept.output.len())?;
        let found = kept.remove(at);
        let nearest = (found.output.len(), found.place.clone());
        kept.insert(0, found);
        Some(nearest)
    }

    fn start(&self, grammar: &Grammar) -> Result<Place, String> {
        let mut matcher = Matcher::new(self.factory.create_parser(top_level(grammar)));
        match matcher.get_error() {
            Some(error) => Err(error.lines().next().unwrap_or_default().to_owned()),
            None if matcher.compute_mask().is_err() => Err(TOO_LARGE.to_owned()),
            None => Ok(Place::Within(Box::new(matcher))),
        }
    }
}

/// A grammar in llguidance's form.
fn top_level(grammar: &Grammar) -> TopLevelGrammar {
    let layout = if grammar.any_whitespace {
        json!({ "whitespace_pattern": WHITESPACE })
    } else {
        json!({ "whitespace_flexible": false })
    };
    let schema = |mut schema: Value| {
        if let Some(members) = schema.as_object_mut() {
            members.insert("x-guidance".to_owned(), layout);
        }
        TopLevelGrammar::from_json_schema(schema)
    };
    match &grammar.language {
        Language::JsonObject => schema(json!({"type": "object"})),
        Language::Json(given) => schema(given.clone()),
        Language::Regex(regex) => TopLevelGrammar::from_regex(regex),
        Language::Lark(grammar) => {
            TopLevelGrammar::from_grammar(GrammarWithLexer::from_lark(grammar.clone()))
        }
        Language::Choice(texts) => {
            let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
            // As one terminal: ten thousand rules would be more than its limits.
            TopLevelGrammar::from_lark(format!("start: TEXT\nTEXT: {}", texts.join(" | ")))
        }
    }
}

/// A place in a text of a grammar.
#[derive(Clone)]
pub enum Place {
    /// Within it, or at its end.
    Within(Box<Matcher>),
    /// Behind the token that ended the output: nothing is bound any more.
    Ended,
    /// Behind a token that the grammar does not allow, which is never sampled.
    Lost,
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Within(_) => "Within",
            Self::Ended => "Ended",
            Self::Lost => "Lost",
        })
    }
}

impl Place {
    /// Goes on by a token.
    pub fn push(&mut self, token: TokenId) {
        let Self::Within(matcher) = self else { return };
        // A text that cannot be continued is followed by a token that ends the output.
        if matcher.is_stopped() {
            *self = Self::Ended;
        } else if matcher.consume_token(token).is_err() {
            *self = Self::Lost;
        } else if matcher.stop_reason() == StopReason::EndOfSentence {
            *self = Self::Ended;
        }
    }

    /// True behind a token that the grammar does not allow.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost)
    }

    /// The tokens that may follow; `None` if all may.
    ///
    /// # Errors
    /// The grammar needs more than its limits allow, or the place is lost.
    pub fn allowed(&mut self) -> Result<Option<Allowed>, String> {
        let matcher = match self {
            Self::Within(matcher) => matcher,
            Self::Ended => return Ok(None),
            Self::Lost => return Err(TOO_LARGE.to_owned()),
        };
        let mask = matcher.compute_mask_or_eos();
        let failed = [StopReason::InternalError, StopReason::LexerTooComplex, StopReason::ParserTooComplex];
        let mask = mask.ok().filter(|_| !failed.contains(&matcher.stop_reason()));
        mask.map(|mask| Some(Allowed(mask))).ok_or_else(|| TOO_LARGE.to_owned())
    }
}

/// A set of tokens.
#[derive(Clone, Debug)]
pub struct Allowed(SimpleVob);

impl Allowed {
    /// Leaves only these tokens.
    pub fn apply(&self, logits: &mut [f32]) {
        self.0.iter_unset_entries(|token| {
            if let Some(logit) = logits.get_mut(token) {
                *logit = f32::NEG_INFINITY;
            }
        });
    }

    /// True if no other tokens than these are in it.
    pub fn is_within(&self, tokens: &[TokenId]) -> bool {
        let those = tokens.iter().filter(|&&token| self.0.get(token as usize)).count();
        self.0.num_set() <= those
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_engines::text::Tokenizer;

    const END: TokenId = 256;

    /// One token per byte, `END`, and two tokens that no model of this vocabulary has a text for.
    fn grammars() -> Grammars {
        Grammars::new(&bytes(), 259, &[END]).unwrap()
    }

    fn bytes() -> Tokenizer {
        let mut vocabulary = serde_json::Map::new();
        for (id, letter) in byte_letters().into_iter().enumerate() {
            vocabulary.insert(letter.to_string(), id.into());
        }
        let file = json!({
            "version": "1.0",
            "added_tokens": [{"id": END, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        });
        Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap()
    }

    /// The letters that byte-level vocabularies write bytes with, by byte.
    fn byte_letters() -> Vec<char> {
        let plain = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let mut next = 256;
        let letter = |byte: u32| {
            let code = if plain(byte) {
                byte
            } else {
                next += 1;
                next - 1
            };
            char::from_u32(code).unwrap()
        };
        (0..256).map(letter).collect()
    }

    fn grammar(value: &Value) -> Grammar {
        Grammar::of_structured_outputs(value).unwrap()
    }

    fn ids(text: &str) -> Vec<TokenId> {
        text.bytes().map(TokenId::from).collect()
    }

    /// The tokens that may follow a text.
    fn after(grammars: &Grammars, grammar: &Grammar, text: &str) -> Result<Vec<TokenId>, String> {
        let allowed = grammars.place(grammar, &ids(text))?.allowed()?.expect("something is bound");
        let mut logits = vec![0.0; 259];
        allowed.apply(&mut logits);
        Ok((0..).zip(logits).filter(|&(_, logit): &(TokenId, f32)| logit == 0.0).map(|(id, _)| id).collect())
    }

    #[test]
    fn only_the_tokens_that_a_grammar_allows_may_follow() {
        let grammars = grammars();
        let choice = grammar(&json!({"choice": ["take", "tak", "\"ü\"\n"]}));
        assert_eq!(after(&grammars, &choice, "").unwrap(), ids("\"t"));
        assert_eq!(after(&grammars, &choice, "tak").unwrap(), [TokenId::from(b'e'), END]);
        assert_eq!(after(&grammars, &choice, "take").unwrap(), [END]);
        assert_eq!(after(&grammars, &choice, "\"").unwrap(), [0xC3]);
        let regex = grammar(&json!({"regex": "[ab]+c"}));
        assert_eq!(after(&grammars, &regex, "ab").unwrap(), ids("abc"));
        let lark = grammar(&json!({"grammar": "start: \"x\" (\"y\" | \"z\")"}));
        assert_eq!(after(&grammars, &lark, "x").unwrap(), ids("yz"));
    }

    #[test]
    fn json_has_the_layout_that_was_asked_for() {
        let grammars = grammars();
        let schema = json!({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]});
        let fixed = grammar(&json!({"json": schema, "disable_any_whitespace": true}));
        assert_eq!(after(&grammars, &fixed, "{").unwrap(), ids("\""));
        let free = grammar(&json!({"json": schema}));
        assert_eq!(after(&grammars, &free, "{").unwrap(), ids("\n \""));
        assert_eq!(after(&grammars, &free, "{ ").unwrap(), ids("\""), "not for ever");
        assert_eq!(after(&grammars, &free, "{\n").unwrap(), ids(" \""));
        let any = grammar(&json!({"json_object": true}));
        assert_eq!(after(&grammars, &any, "").unwrap(), ids("{"));
    }

    #[test]
    fn a_place_is_the_same_whether_its_beginning_was_kept_or_not() {
        let regex = grammar(&json!({"regex": "(ab|ac)*"}));
        let kept = grammars();
        for len in 0..40 {
            let text = "abac".repeat(10)[..len].to_owned();
            assert_eq!(after(&kept, &regex, &text), after(&grammars(), &regex, &text), "{text}");
        }
        assert_eq!(kept.kept.lock().len(), KEPT);
        assert_eq!(after(&kept, &regex, "aba").unwrap(), ids("bc"), "an earlier place, too");
    }

    #[test]
    fn what_cannot_be_followed_is_an_error_in_words() {
        let grammars = grammars();
        let choice = grammar(&json!({"choice": ["a"]}));
        assert!(after(&grammars, &choice, "b").unwrap_err().contains("does not allow"));
        for wrong in [
            json!({"regex": "("}),
            json!({"grammar": "start: unknown"}),
            json!({"json": {"type": "nothing"}}),
        ] {
            let error = after(&grammars, &grammar(&wrong), "").unwrap_err();
            assert!(!error.is_empty() && !error.contains('\n'), "{wrong}: {error}");
        }
    }

    #[test]
    fn after_the_end_nothing_is_bound() {
        let grammars = grammars();
        let mut place = grammars.place(&grammar(&json!({"choice": ["a"]})), &ids("a")).unwrap();
        assert!(place.allowed().unwrap().unwrap().is_within(&[END]));
        place.push(END);
        assert!(place.allowed().unwrap().is_none());
        let mut lost = grammars.place(&grammar(&json!({"choice": ["a"]})), &[]).unwrap();
        lost.push(7);
        assert!(lost.is_lost() && lost.allowed().is_err());
    }
}
