//! Grammars as vLLM has them made by llguidance (0.32, `v1/structured_output/backend_guidance.py`).
//! The version here is a later one than the server's, which may be any 1.7; tests compare their
//! masks.
//!
//! Where its grammar leaves one text only, llguidance also leaves one token only: the first of
//! those that the tokenizer makes of that text. So the tokenizer is a part of its grammars. Special
//! tokens, and added ones in angle brackets, are no text.

use std::fmt::Write;
use std::sync::{Arc, OnceLock};

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use super::{MaskError, Whitespace};
use crate::openai::{Grammar, Language};
use crate::text::Tokenizer;
use foretell_core::units::TokenId;

/// Maximum number of states of a grammar's lexer in one output, 1 to 2 kB each.
const LEXER_STATES: usize = 20_000;
/// The member of a schema with options of the library.
const OPTIONS: &str = "x-guidance";
/// Maximum length of a text that a grammar spells out or counts, characters; URLs of pydantic have
/// 2,083.
const MAX_LENGTH: usize = 2_100;

/// A vocabulary as the libraries of grammars read it.
pub struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    /// Made when llguidance needs it; an error in words.
    factory: OnceLock<Result<Arc<ParserFactory>, String>>,
}

impl Vocabulary {
    /// That of this tokenizer.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Arc<Self> {
        Arc::new(Self { tokenizer, factory: OnceLock::new() })
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    fn factory(&self) -> Result<&Arc<ParserFactory>, MaskError> {
        let made = self.factory.get_or_init(|| factory(&self.tokenizer).map(Arc::new));
        made.as_ref().map_err(|error| MaskError::Guidance(error.clone()))
    }
}

/// The tokens of llguidance, as its bindings for Python make them (`toktrie_hf_tokenizers`).
struct Environment {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let encode = |text: &str| {
            let ids = self.tokenizer.encode(text, false);
            ids.unwrap_or_else(|_| self.trie.greedy_tokenize(text.as_bytes()))
        };
        self.trie.tokenize_with_greedy_fallback(bytes, encode)
    }
}

fn factory(tokenizer: &Arc<Tokenizer>) -> Result<ParserFactory, String> {
    if !tokenizer.is_byte_level() {
        return Err("llguidance is followed with vocabularies of bytes alone".to_owned());
    }
    let name = |id: TokenId| tokenizer.token(id).unwrap_or_default();
    let is_mark = |id: TokenId| {
        let name = name(id);
        tokenizer.is_special(id) || (name.starts_with('<') && name.ends_with('>'))
    };
    let added = tokenizer.added();
    if !added.iter().all(|&id| is_mark(id)) {
        return Err("llguidance is not followed with added tokens that are text".to_owned());
    }
    let spelled = |id: TokenId| {
        if tokenizer.is_special(id) || added.binary_search(&id).is_ok() {
            [&[TokTrie::SPECIAL_TOKEN_MARKER], name(id).as_bytes()].concat()
        } else {
            tokenizer.spelling(id).unwrap_or_default()
        }
    };
    let words: Vec<Vec<u8>> = (0..tokenizer.end()).map(spelled).collect();
    // The token that ends a text is not asked for here: the server alone knows it.
    let end = tokenizer.special().first().copied().ok_or("a vocabulary without special tokens")?;
    let trie = TokTrie::from(&TokRxInfo::new(tokenizer.end(), end), &words);
    let environment: TokEnv = Arc::new(Environment { trie, tokenizer: Arc::clone(tokenizer) });
    let slices = SlicedBiasComputer::general_slices();
    let factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices);
    let mut factory = factory.map_err(|error| error.to_string())?;
    factory.quiet();
    let limits = factory.limits_mut();
    (limits.max_lexer_states, limits.verbose_errors) = (LEXER_STATES, false);
    Ok(factory)
}

/// A compiled grammar.
pub(super) struct Compiled(Matcher);

impl Clone for Compiled {
    /// With a lexer of its own, whose states and costs have limits: on a server every request has
    /// one.
    fn clone(&self) -> Self {
        Self(self.0.deep_clone())
    }
}

impl Compiled {
    /// Compiles a grammar as vLLM has it compiled.
    pub fn new(vocabulary: &Vocabulary, grammar: &Grammar, layout: Whitespace) -> Result<Self, MaskError> {
        if has_options(&grammar.language) {
            return Err(MaskError::Guidance("options of llguidance in a schema".to_owned()));
        }
        if longest(&grammar.language) > MAX_LENGTH {
            return Err(MaskError::TooLong(MAX_LENGTH));
        }
        let start = start(top_level(grammar, layout)?, vocabulary.factory()?).map_err(MaskError::Guidance)?;
        Ok(Self(start))
    }

    /// The beginning of an output under it.
    pub fn begin(&self) -> Walk {
        Walk { matcher: self.0.deep_clone(), mask: None }
    }
}

/// True if a schema sets options of llguidance, which versions read otherwise.
fn has_options(language: &Language) -> bool {
    matches!(language, Language::Json(schema) if schema.get(OPTIONS).is_some())
}

/// The longest text that a grammar spells out or counts, characters: each of a counted text needs
/// up to seven states of the lexer, and a text that is spelled out is made into tokens at each of
/// its places.
fn longest(language: &Language) -> usize {
    match language {
        Language::JsonObject | Language::Lark(_) => 0,
        Language::Json(schema) => longest_of(schema),
        Language::Regex(regex) => counted(regex).max(regex.len()),
        Language::Choice(texts) => texts.iter().map(String::len).max().unwrap_or(0),
    }
}

fn longest_of(schema: &Value) -> usize {
    match schema {
        Value::String(text) => counted(text),
        Value::Array(items) => items.iter().map(longest_of).max().unwrap_or(0),
        Value::Object(members) => {
            let member = |(name, value): (&String, &Value)| match (name.as_str(), value) {
                ("minLength" | "maxLength", length) => length.as_f64().map_or(0, |length| length as usize),
                ("const", Value::String(text)) => text.len(),
                ("enum", Value::Array(texts)) => {
                    texts.iter().filter_map(Value::as_str).map(str::len).max().unwrap_or(0)
                }
                ("description" | "title", Value::String(_)) => 0,
                (_, value) => counted(name).max(longest_of(value)),
            };
            members.iter().map(member).max().unwrap_or(0)
        }
        _ => 0,
    }
}

/// The number of characters that a regular expression counts: the numbers in its braces, multiplied
/// behind a group.
fn counted(regex: &str) -> usize {
    let mut parts = regex.split('{');
    let mut is_group = parts.next().is_some_and(|part| part.ends_with(')'));
    let mut sum = 0_usize;
    for part in parts {
        let counts = part.split_once('}').map_or("", |(counts, _)| counts);
        let count = counts.split(',').filter_map(|count| count.trim().parse::<usize>().ok()).max();
        let count = count.unwrap_or(0);
        sum = if is_group { sum.max(1).saturating_mul(count.max(1)) } else { sum.saturating_add(count) };
        is_group = part.ends_with(')');
    }
    sum
}

fn top_level(grammar: &Grammar, layout: Whitespace) -> Result<TopLevelGrammar, MaskError> {
    let laid_out = |mut schema: Value| match (layout, schema.as_object_mut()) {
        (Whitespace::Free, _) => Ok(TopLevelGrammar::from_json_schema(schema)),
        (Whitespace::Fixed, Some(members)) => {
            members.insert(OPTIONS.to_owned(), json!({"whitespace_flexible": false}));
            Ok(TopLevelGrammar::from_json_schema(schema))
        }
        (Whitespace::Fixed, None) => Err(MaskError::Guidance("a schema that is no object".to_owned())),
    };
    Ok(match &grammar.language {
        Language::JsonObject => laid_out(json!({"type": "object"}))?,
        Language::Json(schema) => laid_out(schema.clone())?,
        Language::Regex(regex) => TopLevelGrammar::from_regex(regex),
        Language::Choice(texts) => {
            let quoted: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
            TopLevelGrammar::from_lark(format!("start: {}", quoted.join(" | ")))
        }
        Language::Lark(_) => return Err(MaskError::Notation),
    })
}

/// A text as JSON without control characters, which Lark does not take, as Python writes it.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            ' '..='~' => quoted.push(character),
            _ => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    let _ = write!(quoted, "\\u{unit:04x}");
                }
            }
        }
    }
    quoted + "\""
}

fn start(grammar: TopLevelGrammar, factory: &ParserFactory) -> Result<Matcher, String> {
    let parser = factory.create_parser(grammar).map_err(|error| in_words(&error.to_string()))?;
    let mut matcher = Matcher::new(Ok(parser));
    // The first set of tokens takes longest, and shows a grammar without any text.
    let _ = matcher.compute_mask();
    match matcher.get_error() {
        None => Ok(matcher),
        Some(error) => Err(in_words(&error)),
    }
}

/// An error of llguidance in one line.
pub fn in_words(error: &str) -> String {
    let words: Vec<&str> = error.trim_end_matches("<non-verbose/>").split_whitespace().collect();
    words.join(" ").chars().take(400).collect()
}

/// A place in an output. Its set of tokens is made at every place, as on the server: that has costs
/// with limits.
pub(super) struct Walk {
    matcher: Matcher,
    /// The tokens that may follow, once they are needed.
    mask: Option<SimpleVob>,
}

impl Walk {
    /// True if llguidance has failed, as of a grammar that needs more than its limits: then nothing
    /// is known.
    pub fn is_lost(&self) -> bool {
        self.matcher.is_error()
    }

    /// Goes on by a token; false if it is not allowed.
    pub fn push(&mut self, token: TokenId) -> bool {
        let allowed = self.allows(token) && self.matcher.consume_token(token).is_ok();
        if allowed {
            self.mask = None;
        }
        allowed
    }

    /// Goes back by a number of tokens; false if that fails.
    pub fn rollback(&mut self, tokens: usize) -> bool {
        self.mask = None;
        let done = self.matcher.rollback(tokens).is_ok();
        // It is kept by the length of the output.
        self.matcher.invalidate_bias_cache();
        done
    }

    /// True if the text may go on with this token.
    pub fn allows(&mut self, token: TokenId) -> bool {
        let token = token as usize;
        !self.matcher.is_stopped() && self.mask().is_some_and(|mask| token < mask.len() && mask.get(token))
    }

    /// True if the text may end here.
    pub fn is_complete(&mut self) -> bool {
        self.matcher.is_accepting().unwrap_or(false)
    }

    /// The tokens that the text may go on with, in rising order; `None` if there are more than
    /// `most`.
    pub fn allowed(&mut self, most: usize) -> Option<Vec<TokenId>> {
        if self.matcher.is_stopped() {
            return (!self.is_lost()).then(Vec::new);
        }
        let allowed: Vec<TokenId> = self.mask()?.iter().take(most + 1).collect();
        (allowed.len() <= most).then_some(allowed)
    }

    fn mask(&mut self) -> Option<&SimpleVob> {
        if self.mask.is_none() {
            self.mask = self.matcher.compute_mask().ok();
        }
        self.mask.as_ref()
    }
}
