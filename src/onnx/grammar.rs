//! Grammars that bind an output: which tokens may follow. The engine is llguidance, which also
//! vLLM and SGLang can be started with.
//!
//! A grammar is bound to the output of a request, and goes on from the output that an earlier
//! request of the same text brought (`generated`): so a draft is verified under the grammar of its
//! place, and a client needs no masks of its own.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::api::{GrammarWithLexer, StopReason, TopLevelGrammar};
use llguidance::earley::Parser;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use parking_lot::Mutex;
use serde_json::{Value, json};

use foretell_core::units::TokenId;
use foretell_engines::openai::{Grammar, Language};
use foretell_engines::text::Tokenizer;

/// Number of places that are kept for the next request of the same text.
const KEPT: usize = 32;
/// Maximum size of the lexers of the kept places, bytes: about eight at the limit of their states,
/// and all places of usual grammars, which have less than a megabyte each.
const KEPT_SIZE: usize = 128 << 20;
/// Maximum lexer states of a grammar, 1 to 2 kB each.
const LEXER_STATES: usize = 10_000;
/// Maximum items of the parser at one byte: steps of a very ambiguous grammar get longer with each
/// token, and all requests wait for them. An object of 200 optional properties is below it.
const ROW_ITEMS: usize = 1_000;

const TOO_LARGE: &str = "the grammar needs too much memory or time";
/// Whitespace between the tokens of JSON: a space, or a new line with its indentation. Without a
/// bound a small model writes it for ever.
const WHITESPACE: &str = " |\\n {0,32}";

/// Text that is a token of its own in some vocabularies, and part of the output in all.
const MARKERS: [&[u8]; 2] = [b"<tool_call>", b"</tool_call>"];

/// The grammars of one vocabulary, and places in the texts of recent requests.
pub struct Grammars {
    factory: Arc<ParserFactory>,
    /// The last used first.
    kept: Mutex<Vec<Kept>>,
}

struct Kept {
    grammar: Arc<str>,
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
            // Other special tokens are no text, whatever their names.
            let is_text = !tokenizer.is_special(id) || MARKERS.contains(&&*bytes);
            if is_text { bytes } else { [&[TokTrie::SPECIAL_TOKEN_MARKER], &*bytes].concat() }
        };
        let words: Vec<Vec<u8>> = (0..vocabulary).map(spelled).collect();
        let end = ends.first().ok_or("the model has no token that ends an output")?;
        let trie = TokTrie::from(&TokRxInfo::new(vocabulary as u32, *end), &words).with_eos_tokens(ends);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| error.to_string())?;
        factory.quiet();
        let limits = factory.limits_mut();
        (limits.max_lexer_states, limits.max_items_in_row) = (LEXER_STATES, ROW_ITEMS);
        limits.verbose_errors = false;
        Ok(Self { factory: Arc::new(factory), kept: Mutex::default() })
    }

    /// The place after `output`, which is lost where the grammar does not allow that. Takes
    /// milliseconds for a grammar that is new here. `keep`: later requests go on from there.
    ///
    /// # Errors
    /// The grammar cannot be used; the reason in words.
    pub fn place(&self, grammar: &Grammar, output: &[TokenId], keep: bool) -> Result<Place, String> {
        // As text: the order of members counts.
        let key: Arc<str> = grammar.to_json().to_string().into();
        let nearest = self.nearest(&key, output);
        let is_kept = nearest.as_ref().is_some_and(|place| place.output.len() == output.len());
        let mut place = nearest.map_or_else(|| Place::start(grammar, &self.factory), Ok)?;
        let from = place.output.len();
        for &token in output.get(from..).unwrap_or_default() {
            place.push(token);
        }
        if keep && !is_kept && !place.is_lost() {
            let mut kept = self.kept.lock();
            kept.insert(0, Kept { grammar: key, place: place.clone() });
            kept.truncate(KEPT);
            shrink(&mut kept, KEPT_SIZE);
        }
        Ok(place)
    }

    /// The kept place with the longest beginning of `output`.
    fn nearest(&self, grammar: &str, output: &[TokenId]) -> Option<Place> {
        let mut kept = self.kept.lock();
        let fits = |kept: &Kept| &*kept.grammar == grammar && output.starts_with(&kept.place.output);
        let all = kept.iter().enumerate().filter(|(_, kept)| fits(kept));
        let (at, _) = all.max_by_key(|(_, kept)| kept.place.output.len())?;
        let found = kept.remove(at);
        let place = found.place.clone();
        kept.insert(0, found);
        Some(place)
    }
}

/// Leaves the places that were used last and whose lexers are not larger than `most` together, in
/// bytes.
fn shrink(kept: &mut Vec<Kept>, most: usize) {
    let (mut size, mut counted) = (0_usize, Vec::new());
    let fitting = kept.iter().take_while(|kept| {
        let State::Within(walk) = &kept.place.state else { return true };
        if !counted.iter().any(|lexer| Arc::ptr_eq(lexer, &walk.lexer)) {
            size = size.saturating_add(size_of_lexer(&walk.lexer));
            counted.push(Arc::clone(&walk.lexer));
        }
        size <= most
    });
    let fitting = fitting.count();
    kept.truncate(fitting);
}

/// Size of a lexer, bytes; one that has failed is too large.
fn size_of_lexer(lexer: &Parser) -> usize {
    let told = llguidance::panic_utils::catch_unwind(AssertUnwindSafe(|| Ok(lexer.lexer_stats().num_bytes)));
    told.unwrap_or(usize::MAX)
}

/// A grammar in llguidance's form.
fn top_level(grammar: &Grammar) -> TopLevelGrammar {
    let layout = if grammar.any_whitespace {
        json!({ "whitespace_pattern": WHITESPACE, "coerce_one_of": true })
    } else {
        json!({ "whitespace_flexible": false, "coerce_one_of": true })
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
            // Lark takes no control character in a text, and JSON does not escape this one.
            let quoted = |text: &String| json!(text).to_string().replace('\u{7f}', "\\u007f");
            let texts: Vec<String> = texts.iter().map(quoted).collect();
            // As one terminal: ten thousand rules would be more than its limits.
            TopLevelGrammar::from_lark(format!("start: TEXT\nTEXT: {}", texts.join(" | ")))
        }
    }
}

/// An error of llguidance in one line.
fn in_words(error: &str) -> String {
    let words: Vec<&str> = error.trim_end_matches("<non-verbose/>").split_whitespace().collect();
    words.join(" ").chars().take(400).collect()
}

/// A place in a text of a grammar.
#[derive(Clone)]
pub struct Place {
    source: Arc<Source>,
    /// The tokens before it.
    output: Vec<TokenId>,
    state: State,
}

struct Source {
    grammar: Grammar,
    factory: Arc<ParserFactory>,
}

#[derive(Clone)]
struct Walk {
    matcher: Matcher,
    /// The lexer that it shares with its copies.
    lexer: Arc<Parser>,
}

#[derive(Clone)]
enum State {
    /// Within the text, or at its end.
    Within(Box<Walk>),
    /// Behind the token that ended the output: nothing is bound any more.
    Ended,
    /// Behind a token that the grammar does not allow.
    Lost,
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Place").field("output", &self.output).finish_non_exhaustive()
    }
}

impl Source {
    fn start(&self) -> Result<Box<Walk>, String> {
        let parser = self.factory.create_parser(top_level(&self.grammar));
        let parser = parser.map_err(|error| in_words(&error.to_string()))?;
        let lexer = Arc::new(parser.parser.clone());
        let mut matcher = Matcher::new(Ok(parser));
        // The first set of tokens takes longest, and shows a grammar without any text.
        let _ = matcher.compute_mask();
        match matcher.get_error() {
            None => Ok(Box::new(Walk { matcher, lexer })),
            Some(error) => Err(in_words(&error)),
        }
    }

    /// Begins anew. All places of a grammar share one lexer, whose states have a limit; a new one
    /// has them all.
    fn anew(&self, output: &[TokenId]) -> Option<Box<Walk>> {
        let mut walk = self.start().ok()?;
        walk.matcher.consume_tokens(output).ok().map(|()| walk)
    }
}

impl Place {
    fn start(grammar: &Grammar, factory: &Arc<ParserFactory>) -> Result<Self, String> {
        let source = Source { grammar: grammar.clone(), factory: Arc::clone(factory) };
        let state = State::Within(source.start()?);
        Ok(Self { source: Arc::new(source), output: Vec::new(), state })
    }

    /// Goes on by a token.
    pub fn push(&mut self, token: TokenId) {
        self.output.push(token);
        let State::Within(walk) = &mut self.state else { return };
        let matcher = &mut walk.matcher;
        // A text that cannot be continued is followed by a token that ends the output.
        if is_complete(matcher) {
            self.state = State::Ended;
            return;
        }
        match matcher.try_consume_tokens(&[token]) {
            Ok(1) => {}
            Ok(_) => self.state = State::Lost,
            Err(_) => self.state = self.source.anew(&self.output).map_or(State::Lost, State::Within),
        }
        if let State::Within(walk) = &self.state
            && walk.matcher.stop_reason() == StopReason::EndOfSentence
        {
            self.state = State::Ended;
        }
    }

    /// True behind a token that the grammar does not allow.
    pub fn is_lost(&self) -> bool {
        matches!(self.state, State::Lost)
    }

    /// The tokens that may follow; `None` if all may.
    ///
    /// # Errors
    /// The grammar needs more than its limits allow, or the place is lost.
    pub fn allowed(&mut self) -> Result<Option<Allowed>, String> {
        for is_new in [false, true] {
            let State::Within(walk) = &mut self.state else { break };
            if is_new {
                let Some(anew) = self.source.anew(&self.output) else { break };
                *walk = anew;
            }
            let matcher = &mut walk.matcher;
            let mask = matcher.compute_mask_or_eos();
            if let Ok(mask) = mask
                && (is_complete(matcher) || !matcher.is_stopped())
            {
                return Ok(Some(Allowed(mask)));
            }
        }
        if matches!(self.state, State::Ended) { Ok(None) } else { Err(TOO_LARGE.to_owned()) }
    }
}

/// True if nothing can follow but the end of the output.
fn is_complete(matcher: &Matcher) -> bool {
    use StopReason::{EndOfSentence, NoExtension, NoExtensionBias};
    matches!(matcher.stop_reason(), EndOfSentence | NoExtension | NoExtensionBias)
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

    /// True if no other tokens than these, each named once, are in it.
    pub fn is_within(&self, tokens: &[TokenId]) -> bool {
        let those = tokens.iter().filter(|&&token| self.0.get(token as usize)).count();
        self.0.num_set() <= those
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::Sampler;
    use foretell_engines::openai::Sampling;
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
        let place = grammars.place(grammar, &ids(text), true)?;
        let allowed = place.clone().allowed()?.expect("something is bound");
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
        assert!(grammars.place(&choice, &ids("b"), true).unwrap().is_lost());
        for wrong in [
            json!({"regex": "("}),
            json!({"grammar": "start: unknown"}),
            json!({"json": {"type": "nothing"}}),
            json!({"json": {"$ref": "#"}}),
            json!({"regex": "[^\\s\\S]"}),
        ] {
            let error = after(&grammars, &grammar(&wrong), "").unwrap_err();
            assert!(!error.is_empty() && !error.contains('\n'), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_lexer_that_has_no_states_left_is_replaced() {
        let grammars = grammars();
        let regex = grammar(&json!({"regex": "(a|b)*a(a|b){18}c"}));
        let mut random = foretell_core::units::SplitMix64::new(7);
        for _ in 0..60 {
            let text: String = (0..200).map(|_| if random.unit() < 0.5 { 'a' } else { 'b' }).collect();
            let mut place = grammars.place(&regex, &[], true).unwrap();
            for token in ids(&text) {
                assert!(place.allowed().unwrap().is_some());
                place.push(token);
            }
            assert!(!place.is_lost());
        }
    }

    #[test]
    fn an_object_may_have_many_optional_properties() {
        let properties: serde_json::Map<String, Value> =
            (0..200).map(|at| (format!("p{at}"), json!({"type": "integer"}))).collect();
        let schema = json!({"type": "object", "properties": properties, "additionalProperties": false});
        let any = grammar(&json!({"json": schema}));
        assert_eq!(after(&grammars(), &any, "{\"p199\": 1").unwrap(), ids("\n 0123456789}"));
    }

    #[test]
    fn a_very_ambiguous_grammar_ends_in_an_error() {
        let grammars = grammars();
        let lark = "start: a\na: a a a | a a | \"a\" | \"b\" | a b a\nb: \"\" | \"a\" b";
        let mut place = grammars.place(&grammar(&json!({"grammar": lark})), &[], true).unwrap();
        let failed = (0..2_000).any(|_| {
            place.push(TokenId::from(b'a'));
            place.is_lost() || place.allowed().is_err()
        });
        assert!(failed);
    }

    #[test]
    fn after_the_end_nothing_is_bound() {
        let grammars = grammars();
        let mut place = grammars.place(&grammar(&json!({"choice": ["a"]})), &ids("a"), true).unwrap();
        assert!(place.allowed().unwrap().unwrap().is_within(&[END]));
        place.push(END);
        assert!(place.allowed().unwrap().is_none());
        let mut lost = grammars.place(&grammar(&json!({"choice": ["a"]})), &[], true).unwrap();
        lost.push(7);
        assert!(lost.is_lost() && lost.allowed().is_err());
    }

    /// As by `stop_token_ids` that repeat the model's own end.
    #[test]
    fn an_end_that_is_named_twice_is_masked_until_min_tokens() {
        let grammars = grammars();
        let choice = grammar(&json!({"choice": ["take", "tak"]}));
        let place = grammars.place(&choice, &ids("tak"), true).unwrap();
        let sampling = Sampling { temperature: 0.0, min_tokens: 4, ..Sampling::default() };
        let sampler = Sampler::new(sampling, 0, 0).with_ends(vec![END, END]);
        let mut history = sampler.history(&[], &ids("tak")).bound(Some(place));
        history.look().unwrap();
        let mut logits = vec![0.0; 259];
        logits[END as usize] = 9.0;
        assert_eq!(sampler.next(&logits, &history), TokenId::from(b'e'));
    }

    #[test]
    fn kept_places_have_a_limited_size_and_share_the_lexer_of_their_grammar() {
        let grammars = grammars();
        let [large, small] = ["(a|b)*a(a|b){8}c", "[ab]+"].map(|regex| grammar(&json!({"regex": regex})));
        for text in ["abab", "ababbbabaabab"] {
            after(&grammars, &large, text).unwrap();
        }
        after(&grammars, &small, "a").unwrap();
        let mut kept = grammars.kept.lock();
        let size = |kept: &Kept| match &kept.place.state {
            State::Within(walk) => size_of_lexer(&walk.lexer),
            State::Ended | State::Lost => 0,
        };
        let sizes: Vec<usize> = kept.iter().map(size).collect();
        assert!(sizes.len() == 3 && sizes[0] > 1_000 && sizes[1] == sizes[2], "{sizes:?}");
        shrink(&mut kept, sizes[0] + sizes[1]);
        assert_eq!(kept.len(), 3);
        shrink(&mut kept, sizes[0] + sizes[1] - 1);
        assert_eq!(kept.len(), 1);
        assert_eq!(kept[0].place.output, ids("a"));
    }

    #[test]
    fn a_usual_grammar_is_below_a_megabyte() {
        let grammars = grammars();
        let properties: serde_json::Map<String, Value> =
            (0..50).map(|at| (format!("p{at}"), json!({"type": "string"}))).collect();
        let schema = grammar(&json!({"json": {"type": "object", "properties": properties}}));
        after(&grammars, &schema, "{\"p7\": \"a text\", \"p9\": \"").unwrap();
        let kept = grammars.kept.lock();
        let State::Within(walk) = &kept[0].place.state else { panic!("it goes on") };
        let size = size_of_lexer(&walk.lexer);
        assert!(size < 1 << 20, "{size}");
    }
}
