//! Grammars that constrain an output: the tokens that may follow. The engine is llguidance, which
//! vLLM and SGLang can be started with, too.
//!
//! A grammar applies to the output of a request, and goes on from the output that an earlier
//! request of the same text brought (`generated`): so a draft is verified under the grammar of its
//! position, and a client needs no masks.
//!
//! A client writes the grammar, so it is never worked on by a thread that others wait for, and its
//! size, time, memory and stack are limited (`grammar/limits.rs`).

mod limits;
mod walker;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::api::{GrammarWithLexer, StopReason, TopLevelGrammar};
use llguidance::earley::Parser;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use parking_lot::Mutex;
use serde_json::{Value, json};

use foretell_core::units::TokenId;
use foretell_parsers::text::Tokenizer;
use foretell_wire::openai::{Grammar, Language};

use limits::Turns;
pub use limits::{Stop, TOO_LARGE, run_on_thread};
pub use walker::Constraint;

/// Number of positions that are stored for the next request of the same text.
const STORED_POSITIONS: usize = 32;
/// Maximum size of the lexers of the stored positions, bytes: about eight at the limit of their
/// states, and all positions of usual grammars, which have less than a megabyte each.
const STORED_BYTES: usize = 128 << 20;

/// Whitespace between the tokens of JSON: a space, or a new line with its indentation. Without a
/// limit a small model writes it for ever.
const WHITESPACE: &str = " |\\n {0,32}";

/// Text that is a single token in some vocabularies, and part of the output in all.
const MARKERS: [&[u8]; 2] = [b"<tool_call>", b"</tool_call>"];

/// The grammars of one vocabulary, and positions in the texts of recent requests.
pub struct Grammars {
    factory: Arc<ParserFactory>,
    turns: Arc<Turns>,
    /// The last used first.
    stored: Mutex<Vec<StoredPosition>>,
}

struct StoredPosition {
    grammar: Arc<str>,
    position: GrammarPosition,
}

impl Grammars {
    /// For a model with `vocabulary` logits, of which `ends` end an output.
    ///
    /// # Errors
    /// llguidance refuses the vocabulary; the reason in words.
    pub fn new(tokenizer: &Tokenizer, vocabulary: usize, ends: &[TokenId]) -> Result<Self, String> {
        let spelled = |id: usize| {
            let id = id as TokenId;
            let bytes = if id < tokenizer.end() { tokenizer.spelling(id) } else { None };
            let bytes = bytes.unwrap_or_default();
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
        limits::set(factory.limits_mut());
        Ok(Self { factory: Arc::new(factory), turns: Arc::default(), stored: Mutex::default() })
    }

    /// The position after `output`, which is lost where the grammar does not allow that. Takes
    /// milliseconds for a usual grammar that is new here, seconds for a hostile one: see
    /// [`run_on_thread`]. `store`: later requests go on from there.
    ///
    /// # Errors
    /// The grammar cannot be used; the reason in words.
    pub fn position_after(
        &self,
        grammar: &Grammar,
        output: &[TokenId],
        store: bool,
        stop: &Stop,
    ) -> Result<GrammarPosition, String> {
        // As text: the order of members counts.
        let key: Arc<str> = grammar.to_json().to_string().into();
        limits::check(&key, grammar)?;
        let nearest = self.nearest(&key, output);
        let is_stored = nearest.as_ref().is_some_and(|position| position.output.len() == output.len());
        let mut position = nearest.map_or_else(|| self.start(grammar, stop), Ok)?;
        let from = position.output.len();
        for &token in output.get(from..).unwrap_or_default() {
            position.push(token, stop);
        }
        if stop.is_set() {
            return Err(TOO_LARGE.to_owned());
        }
        if store && !is_stored && !position.is_lost() {
            let mut stored = self.stored.lock();
            stored.insert(0, StoredPosition { grammar: key, position: position.clone() });
            stored.truncate(STORED_POSITIONS);
            shrink(&mut stored, STORED_BYTES);
        }
        Ok(position)
    }

    /// The beginning of the texts of a grammar.
    fn start(&self, grammar: &Grammar, stop: &Stop) -> Result<GrammarPosition, String> {
        let (factory, turns) = (Arc::clone(&self.factory), Arc::clone(&self.turns));
        let source = Source { grammar: grammar.clone(), factory, turns };
        let state = GrammarState::Within(source.start(stop)?);
        Ok(GrammarPosition { source: Arc::new(source), output: Vec::new(), state })
    }

    /// The stored position with the longest beginning of `output`.
    fn nearest(&self, grammar: &str, output: &[TokenId]) -> Option<GrammarPosition> {
        let mut stored = self.stored.lock();
        let fits = |stored: &StoredPosition| {
            &*stored.grammar == grammar && output.starts_with(&stored.position.output)
        };
        let all = stored.iter().enumerate().filter(|(_, stored)| fits(stored));
        let (at, _) = all.max_by_key(|(_, stored)| stored.position.output.len())?;
        let found = stored.remove(at);
        let position = found.position.clone();
        stored.insert(0, found);
        Some(position)
    }
}

/// Reduces `stored` to the positions that were used last and whose lexers are not larger than
/// `most` together, in bytes.
fn shrink(stored: &mut Vec<StoredPosition>, most: usize) {
    let (mut size, mut counted) = (0_usize, Vec::new());
    let fitting = stored.iter().take_while(|stored| {
        let GrammarState::Within(walk) = &stored.position.state else { return true };
        if !counted.iter().any(|lexer| Arc::ptr_eq(lexer, &walk.lexer)) {
            size = size.saturating_add(size_of_lexer(&walk.lexer));
            counted.push(Arc::clone(&walk.lexer));
        }
        size <= most
    });
    let fitting = fitting.count();
    stored.truncate(fitting);
}

/// Size of a lexer, bytes; one that has failed is too large.
fn size_of_lexer(lexer: &Parser) -> usize {
    let size = llguidance::panic_utils::catch_unwind(AssertUnwindSafe(|| Ok(lexer.lexer_stats().num_bytes)));
    size.unwrap_or(usize::MAX)
}

/// True if a lexer has met its limits.
fn has_failed(lexer: &Parser) -> bool {
    let error = llguidance::panic_utils::catch_unwind(AssertUnwindSafe(|| Ok(lexer.get_error())));
    error.map_or(true, |error| error.is_some())
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
    // A panic comes with the names on its stack.
    if error.starts_with("panic:") {
        return "the grammar engine failed on it".to_owned();
    }
    let words: Vec<&str> = error.trim_end_matches("<non-verbose/>").split_whitespace().collect();
    words.join(" ").chars().take(400).collect()
}

#[derive(Clone)]
pub struct GrammarPosition {
    source: Arc<Source>,
    output: Vec<TokenId>,
    state: GrammarState,
}

struct Source {
    grammar: Grammar,
    factory: Arc<ParserFactory>,
    turns: Arc<Turns>,
}

#[derive(Clone)]
struct Walk {
    matcher: Matcher,
    /// The lexer that it shares with its copies.
    lexer: Arc<Parser>,
}

#[derive(Clone)]
enum GrammarState {
    /// Within the text, or at its end.
    Within(Box<Walk>),
    /// Behind the token that ended the output: nothing is constrained any more.
    Ended,
    /// Behind a token that the grammar does not allow.
    Lost,
}

impl std::fmt::Debug for GrammarPosition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarPosition").field("output", &self.output).finish_non_exhaustive()
    }
}

impl Source {
    /// Compiles the grammar, in its turn.
    fn start(&self, stop: &Stop) -> Result<Box<Walk>, String> {
        let _turn = self.turns.take()?;
        let parser = self.factory.create_parser(top_level(&self.grammar));
        let parser = parser.map_err(|error| in_words(&error.to_string()))?;
        let lexer = Arc::new(parser.parser.clone());
        let mut matcher = Matcher::new(Ok(parser)).into_cancellable();
        stop.reaches(&matcher);
        // The first set of tokens takes longest, and shows a grammar without any text.
        let _ = matcher.compute_mask();
        match matcher.get_error() {
            None => Ok(Box::new(Walk { matcher, lexer })),
            Some(error) => Err(in_words(&error)),
        }
    }

    /// Begins anew. All positions of a grammar share one lexer, whose states have a limit; a new
    /// one has them all.
    fn anew(&self, output: &[TokenId], stop: &Stop) -> Option<Box<Walk>> {
        let mut walk = self.start(stop).ok()?;
        walk.matcher.consume_tokens(output).ok().map(|()| walk)
    }
}

/// The tokens that may follow at a position.
#[derive(Clone, Debug)]
pub enum Next {
    /// Any token: the output has ended.
    Any,
    Of(Arc<Allowed>),
    /// Nothing: the grammar does not allow what comes before.
    Nothing,
}

impl GrammarPosition {
    pub fn push(&mut self, token: TokenId, stop: &Stop) {
        self.output.push(token);
        let GrammarState::Within(walk) = &mut self.state else { return };
        let matcher = &mut walk.matcher;
        stop.reaches(matcher);
        // A text that cannot be continued is followed by a token that ends the output.
        if is_complete(matcher) {
            self.state = GrammarState::Ended;
            return;
        }
        match matcher.try_consume_tokens(&[token]) {
            Ok(1) => {}
            // A lexer that has used up its states refuses every token.
            Ok(_) if !has_failed(&walk.lexer) => self.state = GrammarState::Lost,
            _ if stop.is_set() => self.state = GrammarState::Lost,
            _ => {
                self.state =
                    self.source.anew(&self.output, stop).map_or(GrammarState::Lost, GrammarState::Within);
            }
        }
        if let GrammarState::Within(walk) = &self.state
            && walk.matcher.stop_reason() == StopReason::EndOfSentence
        {
            self.state = GrammarState::Ended;
        }
    }

    /// True behind a token that the grammar does not allow.
    pub fn is_lost(&self) -> bool {
        matches!(self.state, GrammarState::Lost)
    }

    /// Goes on by a token that may follow here, and returns the tokens that may follow then.
    ///
    /// # Errors
    /// The grammar needs more than its limits allow.
    pub fn follow(&mut self, token: TokenId, stop: &Stop) -> Result<Next, String> {
        self.push(token, stop);
        if self.is_lost() { Err(TOO_LARGE.to_owned()) } else { self.next(stop) }
    }

    /// The tokens that may follow here.
    ///
    /// # Errors
    /// The grammar needs more than its limits allow.
    pub fn next(&mut self, stop: &Stop) -> Result<Next, String> {
        for is_new in [false, true] {
            let GrammarState::Within(walk) = &mut self.state else { break };
            if is_new {
                let Some(anew) = self.source.anew(&self.output, stop) else { break };
                if stop.is_set() {
                    break;
                }
                *walk = anew;
            }
            let matcher = &mut walk.matcher;
            stop.reaches(matcher);
            let mask = matcher.compute_mask_or_eos();
            if let Ok(mask) = mask
                && (is_complete(matcher) || !matcher.is_stopped())
            {
                return Ok(Next::Of(Arc::new(Allowed(mask))));
            }
            if stop.is_set() {
                break;
            }
        }
        match self.state {
            GrammarState::Ended => Ok(Next::Any),
            GrammarState::Lost => Ok(Next::Nothing),
            GrammarState::Within(_) => Err(TOO_LARGE.to_owned()),
        }
    }
}

/// The tokens that may follow at a position, and behind each node of a draft there; parents come
/// before their children. None may follow a node that the grammar does not allow.
pub fn behind(
    position: GrammarPosition,
    tokens: &[TokenId],
    parents: &[Option<usize>],
    stop: &Stop,
) -> Vec<Result<Next, String>> {
    let mut position = position;
    let mut nexts = vec![if position.is_lost() { Ok(Next::Nothing) } else { position.next(stop) }];
    let mut positions = vec![Some(position)];
    for (node, (&token, parent)) in tokens.iter().zip(parents).enumerate() {
        let before = parent.map_or(0, |parent| parent + 1);
        let may_follow = match nexts.get(before) {
            Some(Ok(Next::Of(allowed))) => allowed.has(token),
            Some(Ok(Next::Any)) => true,
            Some(Ok(Next::Nothing) | Err(_)) | None => false,
        };
        // A copy costs something; the last child needs none.
        let is_last = !parents.iter().skip(node + 1).any(|other| other == parent);
        let position = if may_follow { positions.get_mut(before) } else { None };
        let mut position =
            position.and_then(|position| if is_last { position.take() } else { position.clone() });
        nexts.push(position.as_mut().map_or(Ok(Next::Nothing), |position| position.follow(token, stop)));
        positions.push(position);
    }
    nexts
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

    pub fn has(&self, token: TokenId) -> bool {
        let token = token as usize;
        token < self.0.len() && self.0.get(token)
    }

    /// True if no other tokens than these, each named once, are in it.
    pub fn is_within(&self, tokens: &[TokenId]) -> bool {
        let those = tokens.iter().filter(|&&token| self.0.get(token as usize)).count();
        self.0.num_set() <= those
    }
}

#[cfg(test)]
mod tests;
