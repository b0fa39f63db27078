//! The tokens that a server's grammar allows at each place of an output.
//!
//! A server binds the output of its own request by a grammar, and no later request can continue it:
//! there a grammar begins anew. So later requests are sent without it, and what they bring is held
//! against the grammar here. At temperature 0 the token under a grammar is the likeliest of those
//! that it allows; above it, where nothing truncates the distribution, it is distributed as a
//! sample without the grammar that is drawn again until the grammar allows it. That is exact only
//! if the grammar here is the server's own: the same library in the same version, which [`Library`]
//! names, and the same rules made of the request.
//!
//! A token is allowed if the bytes that it spells are the beginning of a continuation. The tokens
//! that end a text are another matter: which of them the server takes as an end is known by its
//! answers only. They are allowed where the output may end.
//!
//! Reasoning before an output is bound by no grammar (vLLM 0.32,
//! `v1/structured_output/__init__.py`: `_get_constraint_bounds`): it begins behind the token that
//! ends it, or with the first token of a call that ends it.

mod guidance;

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use serde_json::{Value, json};
use xgrammar::{CompileError, GrammarCompiler, GrammarMatcher, MatcherError, TokenizerInfo, VocabType};

use crate::openai::{Grammar, Language};
use crate::parse::{ReasoningEnds, Unsure};
use crate::text::Tokenizer;
use foretell_core::units::TokenId;
pub use guidance::{Vocabulary, in_words};

/// Maximum size of a grammar, bytes of its JSON.
const MAX_GRAMMAR: usize = 32 << 10;
/// Maximum size of a structural tag, bytes of its JSON: it has the schemas of all tools, with
/// hermes twice, with gpt-oss twelve times.
const MAX_TAG: usize = 128 << 10;
/// Maximum depth of nested values in a schema, as vLLM has it (0.32,
/// `MAX_STRUCTURED_OUTPUT_JSON_NESTING`), and number of groups in a regular expression, also in one
/// of a schema: the library recurses on both.
const MAX_DEPTH: usize = 64;
/// Maximum number of bytes with which a text may go on for its tokens to be counted.
const MAX_BEGINS: usize = 64;
/// Maximum memory of a compiled grammar, bytes.
const MAX_COMPILED: usize = 16 << 20;

/// The library that makes grammars on a server, and how it lays JSON out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// xgrammar 0.2.8.
    Xgrammar(Whitespace),
    /// llguidance 1.7. The version here is another one, which is enough at temperature 0 alone: an
    /// answer shows the likeliest tokens only.
    Guidance(Whitespace),
}

/// Whitespace between the members of JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whitespace {
    /// As much as the model likes.
    Free,
    /// As little as the library can do with (`disable_any_whitespace` in the server's
    /// configuration).
    Fixed,
}

/// Findings about the library that makes a server's grammars.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// Not enough yet.
    Open,
    /// It is this one.
    Library(Library),
    /// It is one that is not known here.
    Other,
}

/// The rules of a grammar.
#[derive(Clone, Debug, PartialEq)]
pub enum Rules {
    /// As the request asks for them.
    Asked(Arc<Grammar>),
    /// A structural tag, as JSON text: what the server has made of forced calls, strict functions
    /// or a limit of one call (xgrammar's `StructuralTag`).
    Tag(Arc<str>),
}

impl Rules {
    /// The parameter of the request that brings them in.
    pub fn parameter(&self) -> &'static str {
        match self {
            Self::Asked(grammar) => grammar.parameter,
            Self::Tag(_) => "tools",
        }
    }

    /// As JSON text.
    pub fn to_json_text(&self) -> String {
        match self {
            Self::Asked(grammar) => grammar.to_json().to_string(),
            Self::Tag(text) => text.to_string(),
        }
    }

    /// The size that they may have, bytes of their JSON.
    const fn most(&self) -> usize {
        match self {
            Self::Asked(_) => MAX_GRAMMAR,
            Self::Tag(_) => MAX_TAG,
        }
    }

    /// The depth to which values are nested in their schemas, or groups in regular expressions.
    fn depth(&self) -> usize {
        match self {
            Self::Asked(grammar) => match &grammar.language {
                Language::Json(schema) => nested(schema),
                Language::Regex(regex) => groups(regex),
                Language::JsonObject | Language::Choice(_) | Language::Lark(_) => 0,
            },
            Self::Tag(text) => serde_json::from_str(text).map_or(usize::MAX, |tag| nested(&tag)),
        }
    }
}

/// A grammar that cannot be followed here; the text says why.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MaskError {
    /// It is a grammar in a notation of its own.
    #[error("a grammar in Lark's or Backus and Naur's notation")]
    Notation,
    /// The server gives it to llguidance in another form.
    #[error("a structural tag for llguidance")]
    Tag,
    /// llguidance does not take it.
    #[error("{0}")]
    Guidance(String),
    /// It spells out or counts a text that is too long to be followed.
    #[error("a grammar with a text of more than {0} characters")]
    TooLong(usize),
    /// It is too large.
    #[error("a grammar of more than {0} bytes")]
    TooLarge(usize),
    /// It is nested too deeply.
    #[error("a grammar that is nested more than {MAX_DEPTH} times")]
    TooDeep,
    /// It takes too much memory.
    #[error("a grammar that takes {0} bytes of memory")]
    TooMuch(usize),
    /// The library does not take it.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The library does not begin with it.
    #[error(transparent)]
    Begin(#[from] MatcherError),
}

/// A compiled grammar.
#[derive(Clone)]
pub struct Compiled {
    start: Start,
    vocabulary: Arc<Vocabulary>,
}

#[derive(Clone)]
enum Start {
    Xgrammar(Box<GrammarMatcher>),
    Guidance(Box<guidance::Compiled>),
}

impl Compiled {
    /// Compiles a grammar as the library does on a server. Takes time and memory: hostile grammars
    /// take seconds.
    ///
    /// # Errors
    /// See [`MaskError`].
    pub fn new(library: Library, rules: &Rules, vocabulary: &Arc<Vocabulary>) -> Result<Self, MaskError> {
        let text = rules.to_json_text();
        if text.len() > rules.most() {
            return Err(MaskError::TooLarge(rules.most()));
        }
        if rules.depth() > MAX_DEPTH {
            return Err(MaskError::TooDeep);
        }
        let start = match (library, rules) {
            (Library::Xgrammar(layout), _) => {
                Start::Xgrammar(Box::new(Self::xgrammar(rules, &text, layout)?))
            }
            (Library::Guidance(layout), Rules::Asked(grammar)) => {
                Start::Guidance(Box::new(guidance::Compiled::new(vocabulary, grammar, layout)?))
            }
            (Library::Guidance(_), Rules::Tag(_)) => return Err(MaskError::Tag),
        };
        Ok(Self { start, vocabulary: Arc::clone(vocabulary) })
    }

    fn xgrammar(rules: &Rules, text: &str, layout: Whitespace) -> Result<GrammarMatcher, MaskError> {
        // Tokens are read by their bytes, so the vocabulary does not matter; one has to be there.
        let ends = Some(vec![0]);
        let vocabulary = TokenizerInfo::new(&[String::new()], VocabType::Raw, None, ends, false);
        let Ok(vocabulary) = vocabulary else { return Err(MaskError::Notation) };
        let compiler = GrammarCompiler::new(vocabulary, 1, false, -1);
        let free = layout == Whitespace::Free;
        let separators = (!free).then_some((",", ":"));
        let schema = |schema: &str| compiler.compile_json_schema(schema, free, None, separators, true, None);
        let compiled = match rules {
            Rules::Asked(grammar) => match &grammar.language {
                Language::JsonObject => schema(&json!({"type": "object"}).to_string()),
                Language::Json(value) => schema(&value.to_string()),
                Language::Regex(regex) => compiler.compile_regex(regex),
                Language::Choice(texts) => compiler.compile_grammar_ebnf(&choice(texts), "root"),
                Language::Lark(_) => return Err(MaskError::Notation),
            },
            Rules::Tag(_) => compiler.compile_structural_tag(text),
        }?;
        match compiled.memory_size_bytes() {
            bytes if bytes > MAX_COMPILED => Err(MaskError::TooMuch(bytes)),
            _ => Ok(GrammarMatcher::with_options(&compiled, None, false, None)?),
        }
    }

    /// The beginning of an output under it.
    pub fn begin(&self) -> Place {
        let walk = match &self.start {
            Start::Xgrammar(matcher) => Walk::Xgrammar(matcher.clone()),
            Start::Guidance(compiled) => Walk::Guidance(Box::new(compiled.begin())),
        };
        Place { walk, tokens: Vec::new(), lost: false, tokenizer: Arc::clone(self.vocabulary.tokenizer()) }
    }
}

/// The number of groups in a regular expression, escaped parentheses included.
fn groups(regex: &str) -> usize {
    regex.matches('(').count()
}

/// The depth to which values are nested, or the most groups in a regular expression among them.
fn nested(value: &Value) -> usize {
    let (mut deepest, mut open) = (0, vec![(value, 1)]);
    while let Some((value, depth)) = open.pop() {
        deepest = deepest.max(depth);
        match value {
            Value::Array(items) => open.extend(items.iter().map(|item| (item, depth + 1))),
            Value::Object(members) => {
                // Any key may be a regular expression, that of `patternProperties` is one.
                let pattern = members.get("pattern").and_then(Value::as_str);
                let regexes = members.keys().map(String::as_str).chain(pattern);
                deepest = deepest.max(regexes.map(groups).max().unwrap_or(0));
                open.extend(members.values().map(|item| (item, depth + 1)));
            }
            _ => {}
        }
    }
    deepest
}

/// The rules that vLLM makes of a choice (0.32, `v1/structured_output/utils.py`).
fn choice(texts: &[String]) -> String {
    let escaped = |character: char| match character {
        '\\' => "\\\\".to_owned(),
        '"' => "\\\"".to_owned(),
        '\n' => "\\n".to_owned(),
        '\r' => "\\r".to_owned(),
        '\t' => "\\t".to_owned(),
        '\0'..'\x20' | '\x7f' => format!("\\u{:04x}", u32::from(character)),
        _ => character.to_string(),
    };
    let quoted = |text: &String| format!("\"{}\"", text.chars().map(escaped).collect::<String>());
    format!("root ::= {}", texts.iter().map(quoted).collect::<Vec<_>>().join(" | "))
}

/// A place in an output under a grammar.
pub struct Place {
    walk: Walk,
    /// The output before it.
    tokens: Vec<TokenId>,
    /// The library could not go back.
    lost: bool,
    tokenizer: Arc<Tokenizer>,
}

enum Walk {
    /// By the bytes of tokens.
    Xgrammar(Box<GrammarMatcher>),
    Guidance(Box<guidance::Walk>),
}

impl Place {
    /// Goes to the place behind these tokens; false if the grammar does not allow them.
    pub fn go_to(&mut self, tokens: impl Iterator<Item = TokenId> + Clone) -> bool {
        let same = self.tokens.iter().zip(tokens.clone()).take_while(|(a, b)| *a == b).count();
        let back = self.tokens.len() - same;
        self.lost |= back > 0 && !self.go_back(back);
        if self.is_lost() {
            return false;
        }
        self.tokens.truncate(same);
        tokens.skip(same).all(|token| self.push(token))
    }

    /// True if the library has failed: then nothing is allowed, and no token is barred by that.
    fn is_lost(&self) -> bool {
        self.lost || matches!(&self.walk, Walk::Guidance(walk) if walk.is_lost())
    }

    fn go_back(&mut self, tokens: usize) -> bool {
        match &mut self.walk {
            Walk::Xgrammar(matcher) => matcher.rollback(i32::try_from(tokens).unwrap_or(i32::MAX)).is_ok(),
            Walk::Guidance(walk) => walk.rollback(tokens),
        }
    }

    /// Goes on by a token; false if the grammar does not allow it.
    fn push(&mut self, token: TokenId) -> bool {
        let accepted = match &mut self.walk {
            Walk::Xgrammar(matcher) => accepts(matcher, &self.tokenizer, token),
            Walk::Guidance(walk) => walk.push(token),
        };
        if accepted {
            self.tokens.push(token);
        }
        accepted
    }

    /// True if the text may go on with this token.
    pub fn allows(&mut self, token: TokenId) -> bool {
        match &mut self.walk {
            Walk::Xgrammar(matcher) => {
                accepts(matcher, &self.tokenizer, token) && matcher.rollback(1).is_ok()
            }
            Walk::Guidance(walk) => walk.allows(token),
        }
    }

    /// True if the text may end here.
    pub fn is_complete(&mut self) -> bool {
        match &mut self.walk {
            Walk::Xgrammar(matcher) => matcher.is_completed(),
            Walk::Guidance(walk) => walk.is_complete(),
        }
    }

    /// The tokens that the text may go on with, in rising order; `None` if there may be more than
    /// `most`. Inside a string there are, which is not counted.
    fn allowed(&mut self, most: usize) -> Option<Vec<TokenId>> {
        let matcher = match &mut self.walk {
            Walk::Xgrammar(matcher) => matcher,
            Walk::Guidance(walk) => return walk.allowed(most),
        };
        let mut begins = [false; 256];
        for (byte, begins) in (0..=u8::MAX).zip(&mut begins) {
            *begins = matcher.accept_bytes(&[byte]) && matcher.rollback(1).is_ok();
        }
        match begins.iter().filter(|begins| **begins).count() {
            0 => return Some(Vec::new()),
            count if count > MAX_BEGINS => return None,
            _ => {}
        }
        let mut allowed = Vec::new();
        for token in 0..self.tokenizer.end() {
            let spelled = self.tokenizer.spelling(token);
            let first = spelled.as_deref().and_then(<[u8]>::first).copied();
            if first.is_some_and(|first| begins.get(usize::from(first)) == Some(&true)) && self.allows(token)
            {
                if allowed.len() == most {
                    return None;
                }
                allowed.push(token);
            }
        }
        Some(allowed)
    }
}

/// Goes on by the bytes of a token; false if the grammar does not allow them.
fn accepts(matcher: &mut GrammarMatcher, tokenizer: &Tokenizer, token: TokenId) -> bool {
    let spelled = tokenizer.spelling(token).filter(|bytes| !bytes.is_empty());
    spelled.is_some_and(|bytes| matcher.accept_bytes(&bytes))
}

/// Finds the tokens that end the reasoning of an output behind a prompt; `None` if it begins
/// without.
pub type FindEnds = Box<dyn Fn(&[TokenId]) -> Result<Option<ReasoningEnds>, Unsure> + Send + Sync>;

/// The reasoning before an output.
struct Reasoning {
    find: FindEnds,
    /// Found by the prompt, which is always the same.
    ends: OnceLock<Result<Option<ReasoningEnds>, Unsure>>,
    /// The answer that has proved the grammar began with reasoning; `None` if it has to prove it.
    proven: Option<bool>,
}

/// The grammar of one output.
pub struct Mask {
    place: Mutex<Place>,
    /// Tokens that may end the text, in rising order: by their ids it is not known which do.
    ends: Vec<TokenId>,
    /// `None` where no output begins with reasoning.
    reasoning: Option<Reasoning>,
}

impl std::fmt::Debug for Mask {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Mask").field("ends", &self.ends).finish_non_exhaustive()
    }
}

/// The answer of a grammar about a token at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allows {
    /// The text may go on with it.
    Yes,
    /// Neither may the text go on with it nor the output end.
    No,
    /// It may end the text, which the server knows alone.
    Unknown,
}

impl Mask {
    /// The mask of an output that begins; `ends`: the tokens that may end it, in rising order.
    pub fn new(compiled: &Compiled, ends: Vec<TokenId>) -> Self {
        Self { place: Mutex::new(compiled.begin()), ends, reasoning: None }
    }

    /// The same of an output that may begin with reasoning. `proven`: the answer that has proved
    /// the grammar did; `None` if it has to prove it.
    #[must_use]
    pub fn behind_reasoning(self, find: FindEnds, proven: Option<bool>) -> Self {
        Self { reasoning: Some(Reasoning { find, ends: OnceLock::new(), proven }), ..self }
    }

    /// The tokens that end the reasoning behind this prompt; `None` if there is none.
    fn reasoning_ends(&self, prompt: &[TokenId]) -> Result<Option<&ReasoningEnds>, Unsure> {
        let Some(Reasoning { find, ends, .. }) = &self.reasoning else { return Ok(None) };
        ends.get_or_init(|| find(prompt)).as_ref().map(Option::as_ref).map_err(|unsure| *unsure)
    }

    /// True if an output behind this prompt begins with reasoning.
    ///
    /// # Errors
    /// It is not known where its reasoning ends.
    pub fn reasons(&self, prompt: &[TokenId]) -> Result<bool, Unsure> {
        self.reasoning_ends(prompt).map(|ends| ends.is_some())
    }

    /// True if an output behind this prompt begins, with reasoning or not, as the answer that has
    /// proved the grammar: only then is it known from where on the server applies it.
    pub fn fits(&self, prompt: &[TokenId]) -> bool {
        let proven = self.reasoning.as_ref().and_then(|reasoning| reasoning.proven);
        self.reasons(prompt).is_ok_and(|reasons| proven.is_none_or(|proven| proven == reasons))
    }

    /// Number of these tokens behind the prompt after which the grammar begins; `None` if they are
    /// reasoning that goes on.
    fn begin(&self, prompt: &[TokenId], tokens: impl Iterator<Item = TokenId>) -> Option<usize> {
        match self.reasoning_ends(prompt) {
            Ok(Some(ends)) => ends.content(tokens),
            Ok(None) | Err(Unsure) => Some(0),
        }
    }

    /// The grammar's answer about `token` behind this prompt, this output and these tokens. A place
    /// that it does not allow itself allows nothing. Of reasoning it is not known which token ends
    /// the text or is the first of the output.
    pub fn says(&self, prompt: &[TokenId], output: &[TokenId], path: &[TokenId], token: TokenId) -> Allows {
        let before = output.iter().chain(path).copied();
        let may_end = self.ends.binary_search(&token).is_ok();
        let Some(begin) = self.begin(prompt, before.clone()) else {
            let is_first = self.is_first(prompt, token, None);
            return if may_end || is_first { Allows::Unknown } else { Allows::Yes };
        };
        let mut place = self.place.lock();
        if !place.go_to(before.skip(begin)) {
            return Allows::No;
        }
        match may_end {
            true => Allows::Unknown,
            false if place.allows(token) => Allows::Yes,
            false => Allows::No,
        }
    }

    /// True if this token ends reasoning as the first of the output; `before`: the token before it,
    /// which may have ended the reasoning already.
    fn is_first(&self, prompt: &[TokenId], token: TokenId, before: Option<TokenId>) -> bool {
        let Ok(Some(ends)) = self.reasoning_ends(prompt) else { return false };
        before != Some(ends.marker) && ends.first.contains(&token)
    }

    /// True if the grammar allows this output.
    pub fn allows(&self, prompt: &[TokenId], output: &[TokenId]) -> bool {
        let tokens = output.iter().copied();
        let Some(begin) = self.begin(prompt, tokens.clone()) else { return true };
        self.place.lock().go_to(tokens.skip(begin))
    }

    /// True if the output may end here.
    pub fn may_end(&self, prompt: &[TokenId], output: &[TokenId]) -> bool {
        let tokens = output.iter().copied();
        let Some(begin) = self.begin(prompt, tokens.clone()) else { return true };
        let mut place = self.place.lock();
        place.go_to(tokens.skip(begin)) && place.is_complete()
    }

    /// Number of these tokens, from the first on, with which the output may go on. With `ends` the
    /// last of them has ended the output, which is allowed where that may end. A token that ends
    /// reasoning as the first of the output is sampled freely: one that the grammar does not begin
    /// with is allowed, and nothing behind it (vLLM fails such a request).
    pub fn follow(&self, prompt: &[TokenId], output: &[TokenId], tokens: &[TokenId], ends: bool) -> usize {
        let before = output.iter().copied();
        let Some(begin) = self.begin(prompt, before.clone().chain(tokens.iter().copied())) else {
            return tokens.len();
        };
        let mut place = self.place.lock();
        if !place.go_to(before.skip(begin)) {
            return 0;
        }
        let text = tokens.len() - usize::from(ends && !tokens.is_empty());
        let mut free = begin.saturating_sub(output.len()).min(text);
        let marker = begin.checked_sub(1).and_then(|at| output.iter().chain(tokens).nth(at));
        let first = tokens.get(free).filter(|first| {
            free < text && begin >= output.len() && self.is_first(prompt, **first, marker.copied())
        });
        if let Some(&first) = first {
            free += 1;
            if !place.push(first) {
                return free;
            }
        }
        let bound = tokens.iter().take(text).skip(free);
        let followed = free + bound.take_while(|&&token| place.push(token)).count();
        let whole = followed == text && (!ends || place.is_complete());
        if whole { tokens.len() } else { followed }
    }

    /// The tokens with which the output may go on or end, in rising order; `None` if there may be
    /// more than `most`, or if the grammar does not allow the output.
    pub fn allowed(&self, prompt: &[TokenId], output: &[TokenId], most: usize) -> Option<Vec<TokenId>> {
        let tokens = output.iter().copied();
        let begin = self.begin(prompt, tokens.clone())?;
        let mut place = self.place.lock();
        if !place.go_to(tokens.skip(begin)) {
            return None;
        }
        let mut allowed = place.allowed(most)?;
        if place.is_complete() {
            allowed.extend(&self.ends);
            allowed.sort_unstable();
            allowed.dedup();
        }
        (allowed.len() <= most).then_some(allowed)
    }
}

#[cfg(test)]
mod tests;
