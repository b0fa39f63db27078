//! The tokens that a server's grammar allows at each place of an output.
//!
//! A server binds the output of its own request by a grammar, and no later request can continue it:
//! there a grammar begins anew. So later requests are sent without it, and what they bring is held
//! against the grammar here. At temperature 0 the token under a grammar is the likeliest of those
//! that it allows. That is exact only if the grammar here is the server's own: the same library in
//! the same version, which [`Library`] names, and the same rules made of the request.
//!
//! A token is allowed if the bytes that it spells are the beginning of a continuation. The tokens
//! that end a text are another matter: which of them the server takes as an end is known by its
//! answers only. They are allowed where the output may end.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::json;
use xgrammar::{CompileError, GrammarCompiler, GrammarMatcher, MatcherError, TokenizerInfo, VocabType};

use crate::openai::{Grammar, Language};
use crate::text::Tokenizer;
use foretell_core::units::TokenId;

/// Maximum size of a grammar, bytes of its JSON.
pub const MAX_GRAMMAR: usize = 64 << 10;
/// Maximum memory of a compiled grammar, bytes.
const MAX_COMPILED: usize = 16 << 20;

/// The library that makes grammars on a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// xgrammar 0.2.8, with as much whitespace between the members of JSON as the model likes.
    Xgrammar,
}

/// A grammar that cannot be followed here; the text says why.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MaskError {
    /// It is a grammar in a notation of its own.
    #[error("a grammar in Lark's or Backus and Naur's notation")]
    Notation,
    /// It is too large.
    #[error("a grammar of more than {MAX_GRAMMAR} bytes")]
    TooLarge,
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
    pub fn new(_: Library, grammar: &Grammar) -> Result<Self, MaskError> {
        if grammar.to_json().to_string().len() > MAX_GRAMMAR {
            return Err(MaskError::TooLarge);
        }
        // Tokens are read by their bytes, so the vocabulary does not matter; one has to be there.
        let ends = Some(vec![0]);
        let vocabulary = TokenizerInfo::new(&[String::new()], VocabType::Raw, None, ends, false);
        let Ok(vocabulary) = vocabulary else { return Err(MaskError::Notation) };
        let compiler = GrammarCompiler::new(vocabulary, 1, false, -1);
        let schema = |schema: &str| compiler.compile_json_schema(schema, true, None, None, true, None);
        let compiled = match &grammar.language {
            Language::JsonObject => schema(&json!({"type": "object"}).to_string()),
            Language::Json(value) => schema(&value.to_string()),
            Language::Regex(regex) => compiler.compile_regex(regex),
            Language::Choice(texts) => compiler.compile_grammar_ebnf(&choice(texts), "root"),
            Language::Lark(_) => return Err(MaskError::Notation),
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

/// The rules that vLLM makes of a choice (0.32, `v1/structured_output/utils.py`).
fn choice(texts: &[String]) -> String {
    let quoted = |text: &String| format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""));
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
        for token in tokens.skip(same) {
            if !self.accepts(token) {
                return false;
            }
            self.tokens.push(token);
        }
        true
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
    /// `most`.
    pub fn allowed(&mut self, most: usize) -> Option<Vec<TokenId>> {
        let mut begins = [false; 256];
        for (byte, begins) in (0..=u8::MAX).zip(&mut begins) {
            *begins = self.matcher.accept_bytes(&[byte]) && self.matcher.rollback(1).is_ok();
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

/// The grammar of one output.
pub struct Mask {
    place: Mutex<Place>,
    /// Tokens that may end the text, in rising order: by their ids it is not known which do.
    ends: Vec<TokenId>,
}

impl std::fmt::Debug for Mask {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Mask").field("ends", &self.ends).finish_non_exhaustive()
    }
}

/// What a grammar says of a token at a place.
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
        Self { place: Mutex::new(compiled.begin(tokenizer)), ends }
    }

    /// What the grammar says of `token` behind this output and these tokens. A place that it does
    /// not allow itself allows nothing.
    pub fn says(&self, output: &[TokenId], path: &[TokenId], token: TokenId) -> Allows {
        let mut place = self.place.lock();
        if !place.go_to(output.iter().chain(path).copied()) {
            return Allows::No;
        }
        match self.ends.binary_search(&token) {
            Ok(_) => Allows::Unknown,
            Err(_) if place.allows(token) => Allows::Yes,
            Err(_) => Allows::No,
        }
    }

    /// True if the output may end here.
    pub fn may_end(&self, output: &[TokenId]) -> bool {
        let mut place = self.place.lock();
        place.go_to(output.iter().copied()) && place.is_complete()
    }

    /// Number of these tokens, from the first on, with which the output may go on. With `ends` the
    /// last of them has ended the output, which is allowed where that may end.
    pub fn follow(&self, output: &[TokenId], tokens: &[TokenId], ends: bool) -> usize {
        let mut place = self.place.lock();
        if !place.go_to(output.iter().copied()) {
            return 0;
        }
        let text = tokens.len() - usize::from(ends && !tokens.is_empty());
        let tokens: Vec<TokenId> = output.iter().chain(tokens).copied().collect();
        for at in 0..text {
            if !place.go_to(tokens.iter().take(output.len() + at + 1).copied()) {
                return at;
            }
        }
        if ends && !place.is_complete() { text } else { tokens.len() - output.len() }
    }

    /// The tokens with which the output may go on or end, in rising order; `None` if there may be
    /// more than `most`, or if the grammar does not allow the output.
    pub fn allowed(&self, output: &[TokenId], most: usize) -> Option<Vec<TokenId>> {
        let mut place = self.place.lock();
        if !place.go_to(output.iter().copied()) {
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
