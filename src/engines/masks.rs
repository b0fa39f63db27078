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

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use serde_json::{Value, json};
use xgrammar::{CompileError, GrammarCompiler, GrammarMatcher, MatcherError, TokenizerInfo, VocabType};

use crate::openai::{Grammar, Language};
use crate::parse::{ReasoningEnds, Unsure};
use crate::text::Tokenizer;
use foretell_core::units::TokenId;

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

/// The library that makes grammars on a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// xgrammar 0.2.8, with as much whitespace between the members of JSON as the model likes.
    Xgrammar,
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
pub struct Compiled(GrammarMatcher);

impl Compiled {
    /// Compiles a grammar as the library does on a server. Takes time and memory: hostile grammars
    /// take seconds.
    ///
    /// # Errors
    /// See [`MaskError`].
    pub fn new(_: Library, rules: &Rules) -> Result<Self, MaskError> {
        let text = rules.to_json_text();
        if text.len() > rules.most() {
            return Err(MaskError::TooLarge(rules.most()));
        }
        if rules.depth() > MAX_DEPTH {
            return Err(MaskError::TooDeep);
        }
        // Tokens are read by their bytes, so the vocabulary does not matter; one has to be there.
        let ends = Some(vec![0]);
        let vocabulary = TokenizerInfo::new(&[String::new()], VocabType::Raw, None, ends, false);
        let Ok(vocabulary) = vocabulary else { return Err(MaskError::Notation) };
        let compiler = GrammarCompiler::new(vocabulary, 1, false, -1);
        let schema = |schema: &str| compiler.compile_json_schema(schema, true, None, None, true, None);
        let compiled = match rules {
            Rules::Asked(grammar) => match &grammar.language {
                Language::JsonObject => schema(&json!({"type": "object"}).to_string()),
                Language::Json(value) => schema(&value.to_string()),
                Language::Regex(regex) => compiler.compile_regex(regex),
                Language::Choice(texts) => compiler.compile_grammar_ebnf(&choice(texts), "root"),
                Language::Lark(_) => return Err(MaskError::Notation),
            },
            Rules::Tag(_) => compiler.compile_structural_tag(&text),
        }?;
        match compiled.memory_size_bytes() {
            bytes if bytes > MAX_COMPILED => Err(MaskError::TooMuch(bytes)),
            _ => Ok(Self(GrammarMatcher::with_options(&compiled, None, false, None)?)),
        }
    }

    /// The beginning of an output under it.
    pub fn begin(&self, tokenizer: Arc<Tokenizer>) -> Place {
        Place { matcher: self.0.clone(), tokens: Vec::new(), tokenizer }
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
    matcher: GrammarMatcher,
    /// The output before it.
    tokens: Vec<TokenId>,
    tokenizer: Arc<Tokenizer>,
}

impl Place {
    /// Goes to the place behind these tokens; false if the grammar does not allow them.
    pub fn go_to(&mut self, tokens: impl Iterator<Item = TokenId> + Clone) -> bool {
        let same = self.tokens.iter().zip(tokens.clone()).take_while(|(a, b)| *a == b).count();
        let back = i32::try_from(self.tokens.len() - same).unwrap_or(i32::MAX);
        if back > 0 && self.matcher.rollback(back).is_err() {
            return false;
        }
        self.tokens.truncate(same);
        tokens.skip(same).all(|token| self.push(token))
    }

    /// Goes on by a token; false if the grammar does not allow it.
    fn push(&mut self, token: TokenId) -> bool {
        let accepted = self.accepts(token);
        if accepted {
            self.tokens.push(token);
        }
        accepted
    }

    /// True if the text may go on with this token.
    pub fn allows(&mut self, token: TokenId) -> bool {
        self.accepts(token) && self.matcher.rollback(1).is_ok()
    }

    /// True if the text may end here.
    pub fn is_complete(&self) -> bool {
        self.matcher.is_completed()
    }

    /// The tokens that the text may go on with, in rising order; `None` if there may be more than
    /// `most`. Inside a string there are, which is not counted.
    fn allowed(&mut self, most: usize) -> Option<Vec<TokenId>> {
        let mut begins = [false; 256];
        for (byte, begins) in (0..=u8::MAX).zip(&mut begins) {
            *begins = self.matcher.accept_bytes(&[byte]) && self.matcher.rollback(1).is_ok();
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

    fn accepts(&mut self, token: TokenId) -> bool {
        let spelled = self.tokenizer.spelling(token).filter(|bytes| !bytes.is_empty());
        spelled.is_some_and(|bytes| self.matcher.accept_bytes(&bytes))
    }
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
    pub fn new(compiled: &Compiled, tokenizer: Arc<Tokenizer>, ends: Vec<TokenId>) -> Self {
        Self { place: Mutex::new(compiled.begin(tokenizer)), ends, reasoning: None }
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
mod tests {
    use std::path::Path;

    use serde::Deserialize;
    use sha2::{Digest, Sha256};

    use super::*;

    fn root() -> &'static Path {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
    }

    fn target() -> Arc<Tokenizer> {
        Arc::new(Tokenizer::from_file(&root().join("onnx/models/target/tokenizer.json")).unwrap())
    }

    fn asked(language: Language) -> Rules {
        Rules::Asked(Arc::new(Grammar { parameter: "response_format", language, any_whitespace: true }))
    }

    fn begin(tokenizer: &Arc<Tokenizer>, language: Language) -> Mask {
        let compiled = Compiled::new(Library::Xgrammar, &asked(language)).unwrap();
        Mask::new(&compiled, Arc::clone(tokenizer), tokenizer.may_end())
    }

    fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<TokenId> {
        tokenizer.encode(text, false).unwrap()
    }

    /// A grammar as `tests/engines/masks.py` has recorded it.
    #[derive(Deserialize)]
    struct Recorded {
        json: Option<String>,
        regex: Option<String>,
        choice: Option<Vec<String>>,
        tag: Option<String>,
        #[serde(default)]
        refused: bool,
        #[serde(default)]
        tokens: Vec<TokenId>,
        #[serde(default)]
        places: Vec<(usize, usize, String, bool)>,
    }

    impl Recorded {
        /// `None` for a schema with a number or a text that no request can have here.
        fn rules(&self) -> Option<Rules> {
            match (&self.tag, &self.json, &self.regex) {
                (Some(tag), ..) => Some(Rules::Tag(tag.as_str().into())),
                (_, Some(schema), _) => Some(asked(Language::Json(serde_json::from_str(schema).ok()?))),
                (_, _, Some(regex)) => Some(asked(Language::Regex(regex.clone()))),
                _ => self.choice.clone().map(Language::Choice).map(asked),
            }
        }
    }

    #[test]
    fn every_place_allows_what_the_library_itself_allows_there() {
        let recorded = std::fs::read_to_string(root().join("tests/goldens/xgrammar.jsonl")).unwrap();
        let recorded: Vec<Recorded> =
            recorded.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let tokenizer = target();
        let ends = tokenizer.may_end();
        let (mut followed, mut places) = (0, 0);
        for (line, recorded) in (1..).zip(&recorded) {
            let Some(rules) = recorded.rules().filter(|_| !recorded.refused) else { continue };
            let compiled = Compiled::new(Library::Xgrammar, &rules);
            let compiled = compiled.unwrap_or_else(|error| panic!("line {line}: {error}"));
            let mut place = compiled.begin(Arc::clone(&tokenizer));
            for &(step, count, ref digest, complete) in &recorded.places {
                assert!(place.go_to(recorded.tokens[..step].iter().copied()), "line {line}, step {step}");
                let some = (0..tokenizer.end()).filter(|token| *token as usize % 16 == step % 16);
                let text = some.filter(|token| !ends.contains(token) && place.allows(*token));
                let text: Vec<TokenId> = text.collect();
                assert_eq!((text.len(), place.is_complete()), (count, complete), "line {line}, step {step}");
                let bytes: Vec<u8> = text.iter().flat_map(|token| token.to_le_bytes()).collect();
                let first = Sha256::digest(&bytes).first_chunk().copied().map(u128::from_be_bytes);
                assert_eq!(format!("{:032x}", first.unwrap()), *digest, "line {line}, step {step}");
                places += 1;
            }
            followed += 1;
        }
        assert!(followed > 200 && places > 1_000, "{followed} grammars, {places} places");
    }

    #[test]
    fn reasoning_is_bound_by_nothing_and_ends_at_a_token() {
        let tokenizer = target();
        let [yes, no] = ["yes", "no"].map(|text| ids(&tokenizer, text));
        let (marker, free, call, other) = (300, 301, yes[0], 302);
        let find = move |prompt: &[TokenId]| {
            Ok(prompt.is_empty().then(|| ReasoningEnds { marker, first: vec![call, other] }))
        };
        let mask = begin(&tokenizer, Language::Choice(vec!["yes".to_owned()]))
            .behind_reasoning(Box::new(find), Some(true));
        let [end] = tokenizer.may_end()[..1] else { panic!("an end") };
        // Behind this prompt there is no reasoning.
        assert_eq!(
            (mask.follow(&[7], &[], &[free], false), mask.allowed(&[7], &[], 99).is_some()),
            (0, true)
        );
        let mask = begin(&tokenizer, Language::Choice(vec!["yes".to_owned()]))
            .behind_reasoning(Box::new(find), Some(true));
        assert_eq!(mask.follow(&[], &[free], &no, false), no.len());
        assert_eq!((mask.follow(&[], &[free], &[end], true), mask.may_end(&[], &[free])), (1, true));
        assert_eq!(mask.says(&[], &[free], &[], free), Allows::Yes);
        assert_eq!(
            mask.says(&[], &[free], &[], call),
            Allows::Unknown,
            "the first of the output, or of reasoning"
        );
        assert_eq!(mask.says(&[], &[free], &[marker], free), Allows::No);
        assert_eq!(mask.says(&[], &[free, marker], &[], call), Allows::Yes);
        let whole = [&[free, marker], &yes[..]].concat();
        assert_eq!(mask.follow(&[], &[], &[&whole[..], &[end]].concat(), true), whole.len() + 1);
        assert_eq!(mask.follow(&[], &[free], &[marker, free], false), 1);
        assert_eq!(
            mask.follow(&[], &[free], &[&yes[..], &[free]].concat(), false),
            yes.len(),
            "without the marker"
        );
        assert_eq!(
            (mask.allowed(&[], &[free], 9_000), mask.allowed(&[], &whole, 99).is_some()),
            (None, true)
        );
        // One that may end reasoning, but does not begin what is allowed: with the server's own
        // sample the request fails, behind the marker it is barred.
        assert_eq!(mask.follow(&[], &[free], &[other, yes[0]], false), 1);
        assert!(!mask.allows(&[], &[free, other]) && mask.allows(&[], &[free, marker]));
        assert_eq!(mask.follow(&[], &[free], &[marker, other], false), 1);
        assert_eq!(mask.follow(&[], &[free, marker], &[other], false), 0);
        assert_eq!(mask.follow(&[], &[free, other], &[free], false), 0);
    }

    #[test]
    fn places_are_reached_in_any_order() {
        let tokenizer = target();
        let compiled = Compiled::new(Library::Xgrammar, &asked(Language::JsonObject)).unwrap();
        let tokens = ids(&tokenizer, "{\"a\": [1, 2, {\"b\": \"c\"}]}");
        let fresh = |end: usize| {
            let mut place = compiled.begin(Arc::clone(&tokenizer));
            assert!(place.go_to(tokens[..end].iter().copied()));
            (place.allowed(9_000), place.is_complete())
        };
        let mut place = compiled.begin(Arc::clone(&tokenizer));
        for end in (0..=tokens.len()).rev().chain(0..=tokens.len()).step_by(2) {
            assert!(place.go_to(tokens[..end].iter().copied()));
            assert_eq!((place.allowed(9_000), place.is_complete()), fresh(end), "{end}");
        }
        let wrong = ids(&tokenizer, "{]");
        assert!(!place.go_to(wrong.into_iter()) && place.go_to(tokens.iter().copied()));
    }

    #[test]
    fn an_output_is_followed_up_to_the_first_token_that_is_barred() {
        let tokenizer = target();
        let mask = begin(&tokenizer, Language::Choice(vec!["yes".to_owned(), "no".to_owned()]));
        let end = tokenizer.id("<|end|>").unwrap();
        let [yes, no] = ["yes", "no"].map(|text| ids(&tokenizer, text));
        let longer = [&yes[..], &no].concat();
        assert_eq!(mask.follow(&[], &[], &longer, false), yes.len());
        assert_eq!(mask.follow(&[], &[], &[&yes[..], &[end]].concat(), true), yes.len() + 1);
        assert_eq!(mask.follow(&[], &yes, &[end], true), 1);
        assert_eq!(mask.follow(&[], &[], &[end], true), 0, "it may not end here");
        assert_eq!(mask.follow(&[], &yes, &[end], false), 0, "nor go on with the text of an end");
        assert_eq!(mask.follow(&[], &longer, &yes, false), 0, "a wrong output allows nothing");
        assert!(mask.may_end(&[], &yes) && !mask.may_end(&[], &[]));
        assert_eq!(mask.says(&[], &[], &yes, end), Allows::Unknown);
        assert_eq!(
            (mask.says(&[], &[], &[], yes[0]), mask.says(&[], &yes, &[], no[0])),
            (Allows::Yes, Allows::No)
        );
        assert_eq!(mask.allowed(&[], &yes, 100).unwrap(), tokenizer.may_end());
        assert_eq!((mask.allowed(&[], &[], 1), mask.allowed(&[], &longer, 100)), (None, None));
    }

    /// As xgrammar has it: a special token that does not end the text is its letters.
    #[test]
    fn special_tokens_are_text_inside_a_string() {
        let tokenizer = target();
        let mask = begin(&tokenizer, Language::Json(json!({"type": "string"})));
        let (user, quote) = (tokenizer.id("<|user|>").unwrap(), ids(&tokenizer, "\""));
        assert_eq!(mask.follow(&[], &quote, &[user, user], false), 2);
        assert_eq!(mask.follow(&[], &quote, &[user], true), 0);
        assert_eq!(mask.follow(&[], &[&quote[..], &[user]].concat(), &quote, false), 1);
    }

    /// The library has no limits of its own: what is not refused has to end, soon.
    #[test]
    fn a_hostile_grammar_is_refused_or_cheap() {
        let texts = |count: usize| (0..count).map(|number| format!("a{number}")).collect::<Vec<_>>();
        let nested =
            |depth: usize| (0..depth).fold(json!({}), |inner, _| json!({"type": "array", "items": inner}));
        let properties = |count: usize, more: Value| {
            let mut schema = json!({"type": "object", "properties": {}});
            for name in texts(count) {
                schema["properties"][name] = json!({"type": "string"});
            }
            schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            schema
        };
        let recursive = json!({"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"});
        let refused = ["too deep", "large", "enum", "choice", "items", "parentheses"];
        for (name, language) in [
            ("recursive", Language::Json(recursive)),
            ("loop", Language::Json(json!({"$ref": "#"}))),
            ("deep", Language::Json(nested(60))),
            ("too deep", Language::Json(nested(100))),
            ("large", Language::Json(json!({"type": "string", "description": "x".repeat(1 << 20)}))),
            ("enum", Language::Json(json!({"enum": texts(10_000)}))),
            ("short enum", Language::Json(json!({"enum": texts(500)}))),
            ("choice", Language::Choice(texts(10_000))),
            ("optional", Language::Json(properties(1_000, json!({})))),
            ("counted", Language::Json(properties(60, json!({"minProperties": 10, "maxProperties": 50})))),
            ("length", Language::Json(json!({"type": "string", "maxLength": 1_000_000_000}))),
            ("items", Language::Json(json!({"type": "array", "minItems": 1_000_000}))),
            ("alternatives", Language::Regex("(a|a)*b".to_owned())),
            ("powers", Language::Regex("(a|b)*a(a|b){200}".to_owned())),
            ("repeated", Language::Regex("(a{1,1000}){1,1000}".to_owned())),
            ("letters", Language::Regex(".{0,100000}x".to_owned())),
            ("words", Language::Regex(r"(\w{1,50}\s){1,50}\w+".to_owned())),
            ("parentheses", Language::Regex("(".repeat(20_000) + &")".repeat(20_000))),
        ] {
            let compiled = Compiled::new(Library::Xgrammar, &asked(language));
            assert_eq!(compiled.is_err(), refused.contains(&name), "{name}");
        }
    }

    #[test]
    fn a_hostile_tag_is_refused_or_cheap() {
        let tag = |begin: &str, schema: &Value| {
            json!({"type": "tag", "begin": begin, "end": ")",
            "content": {"type": "json_schema", "json_schema": schema}})
        };
        let text = |format: &Value| json!({"type": "structural_tag", "format": format}).to_string();
        let triggered =
            |tags: &[Value]| text(&json!({"type": "triggered_tags", "triggers": ["("], "tags": tags}));
        let many: Vec<Value> =
            (0..500).map(|at| tag(&format!("(f{at}"), &json!({"type": "object"}))).collect();
        let deep = (0..80).fold(json!({}), |inner, _| json!({"type": "array", "items": inner}));
        let long = json!({"description": "x".repeat(MAX_TAG)});
        let refused = ["no JSON", "no tag", "deep", "long", "groups", "a token"];
        for (name, tag) in [
            ("no JSON", "{".to_owned()),
            ("no tag", "{}".to_owned()),
            ("many", triggered(&many)),
            ("deep", triggered(&[tag("(f", &deep)])),
            ("long", triggered(&[tag("(f", &long)])),
            (
                "groups",
                triggered(&[tag(
                    "(f",
                    &json!({"type": "string", "pattern": format!("{}a{}", "(".repeat(9_000), ")".repeat(9_000))}),
                )]),
            ),
            ("a token", text(&json!({"type": "token", "token": "<|end|>"}))),
        ] {
            let compiled = Compiled::new(Library::Xgrammar, &Rules::Tag(tag.into()));
            assert_eq!(compiled.is_err(), refused.contains(&name), "{name}");
        }
    }
}
