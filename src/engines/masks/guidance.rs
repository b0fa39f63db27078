//! Grammars as vLLM has them made by llguidance (0.32, `v1/structured_output/backend_guidance.py`).
//!
//! Where its grammar leaves one text only, llguidance also leaves one token only: the first of
//! those that the tokenizer makes of that text. So the tokenizer is a part of its grammars. Special
//! tokens, and added ones in angle brackets, are no text.

use std::sync::{Arc, OnceLock};

use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::json;

use super::MaskError;
use crate::openai::{Grammar, Language};
use crate::text::Tokenizer;
use foretell_core::units::TokenId;

/// Maximum number of states of a grammar's lexer, 1 to 2 kB each.
const LEXER_STATES: usize = 10_000;

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
    let added = tokenizer.added();
    let spelled = |id: TokenId| {
        let Some(name) = tokenizer.token(id) else { return Vec::new() };
        let bracketed = || name.starts_with('<') && name.ends_with('>');
        if tokenizer.is_special(id) || (added.binary_search(&id).is_ok() && bracketed()) {
            return [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat();
        }
        tokenizer.spelling(id).unwrap_or_default()
    };
    let words: Vec<Vec<u8>> = (0..tokenizer.end()).map(spelled).collect();
    // The token that ends a text is not asked for here: the server alone knows it.
    let end = tokenizer.may_end().first().copied().ok_or("a vocabulary without special tokens")?;
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
#[derive(Clone)]
pub(super) struct Compiled {
    source: Arc<(TopLevelGrammar, Arc<Vocabulary>)>,
    start: Matcher,
}

impl Compiled {
    /// Compiles a grammar as vLLM has it compiled.
    pub fn new(vocabulary: &Arc<Vocabulary>, grammar: &Grammar) -> Result<Self, MaskError> {
        let source = (top_level(grammar)?, Arc::clone(vocabulary));
        let start = start(&source.0, vocabulary.factory()?).map_err(MaskError::Guidance)?;
        Ok(Self { source: Arc::new(source), start })
    }

    /// The beginning of an output under it.
    pub fn begin(&self) -> Walk {
        Walk { compiled: self.clone(), matcher: self.start.clone(), tokens: Vec::new() }
    }
}

fn top_level(grammar: &Grammar) -> Result<TopLevelGrammar, MaskError> {
    Ok(match &grammar.language {
        Language::JsonObject => TopLevelGrammar::from_json_schema(json!({"type": "object"})),
        Language::Json(schema) => TopLevelGrammar::from_json_schema(schema.clone()),
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
    let escaped = |character: char| match character {
        '"' | '\\' => format!("\\{character}"),
        ' '..='~' => character.to_string(),
        _ => character.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect(),
    };
    format!("\"{}\"", text.chars().map(escaped).collect::<String>())
}

fn start(grammar: &TopLevelGrammar, factory: &ParserFactory) -> Result<Matcher, String> {
    let parser = factory.create_parser(grammar.clone()).map_err(|error| in_words(&error.to_string()))?;
    let mut matcher = Matcher::new(Ok(parser));
    // The first set of tokens takes longest, and shows a grammar without any text.
    let _ = matcher.compute_mask();
    match matcher.get_error() {
        None => Ok(matcher),
        Some(error) => Err(in_words(&error)),
    }
}

/// An error of llguidance in one line.
fn in_words(error: &str) -> String {
    let words: Vec<&str> = error.trim_end_matches("<non-verbose/>").split_whitespace().collect();
    words.join(" ").chars().take(400).collect()
}

/// A place in an output.
pub(super) struct Walk {
    compiled: Compiled,
    matcher: Matcher,
    /// The tokens before it.
    tokens: Vec<TokenId>,
}

impl Walk {
    /// Goes on by a token; false if it is not allowed.
    pub fn push(&mut self, token: TokenId) -> bool {
        let allowed = self.allows(token) && self.matcher.consume_token(token).is_ok();
        if allowed {
            self.tokens.push(token);
        }
        allowed
    }

    /// Goes back by a number of tokens; false if that fails.
    pub fn rollback(&mut self, tokens: usize) -> bool {
        self.tokens.truncate(self.tokens.len().saturating_sub(tokens));
        self.matcher.rollback(tokens).is_ok() || self.anew()
    }

    /// True if the text may go on with this token.
    pub fn allows(&mut self, token: TokenId) -> bool {
        if self.matcher.is_error() && !self.anew() {
            return false;
        }
        if self.matcher.is_stopped() {
            return false;
        }
        match self.matcher.compute_ff_tokens().first() {
            Some(&forced) => forced == token,
            None => self.matcher.validate_tokens(&[token]).is_ok_and(|valid| valid == 1),
        }
    }

    /// True if the text may end here.
    pub fn is_complete(&mut self) -> bool {
        self.matcher.is_accepting().unwrap_or(false)
    }

    /// The tokens that the text may go on with, in rising order, without special ones; `None` if
    /// there are more than `most`.
    pub fn allowed(&mut self, most: usize) -> Option<Vec<TokenId>> {
        if self.matcher.is_stopped() {
            return (!self.matcher.is_error()).then(Vec::new);
        }
        let tokenizer = Arc::clone(self.compiled.source.1.tokenizer());
        let mask = self.matcher.compute_mask().ok()?;
        let mut allowed = Vec::new();
        for token in mask.iter().filter(|&token| !tokenizer.is_special(token)) {
            if allowed.len() == most {
                return None;
            }
            allowed.push(token);
        }
        Some(allowed)
    }

    /// Begins anew where the lexer, which all places of a grammar share, has no room for another
    /// state: a new one has. False if that does not help.
    fn anew(&mut self) -> bool {
        let (grammar, vocabulary) = &*self.compiled.source;
        let started = vocabulary.factory().ok().and_then(|factory| start(grammar, factory).ok());
        let Some(mut matcher) = started else { return false };
        let reached = matcher.consume_tokens(&self.tokens).is_ok();
        self.matcher = matcher;
        reached
    }
}
