//! The limits of grammars, which clients write.
//!
//! llguidance counts what it does and stops at its limits; the rest is here: the size of a grammar,
//! the patterns that it compares with each other, the stack and the time of the thread that works
//! on it, and how many are compiled at once.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use llguidance::api::ParserLimits;
use llguidance::{CancellationHandle, Matcher};
use parking_lot::{Condvar, Mutex};
use serde_json::{Map, Value};

use foretell_wire::openai::{Grammar, Language};

/// The error of a grammar that meets a limit on the way.
pub const TOO_LARGE: &str = "the grammar needs too much memory or time";
pub(super) const FAILED: &str = "the grammar engine failed on it";

/// Maximum size of a grammar, bytes of its JSON: it has the schemas of all strict functions.
const SIZE: usize = 128 << 10;
/// Maximum quantifiers and alternatives in the regular expressions and rules of a grammar: the time
/// to compile an expression of optional parts grows with the square of their number, 4,000 take
/// under a tenth of a second.
const QUANTIFIERS: usize = 4_000;
/// Maximum comparisons of patterns in `patternProperties`, each with the others and with the names
/// of the properties of the same object: llguidance makes a regular expression of each pair.
const PATTERN_PAIRS: usize = 500;
/// Maximum depth of nested values in a schema.
const DEPTH: usize = 64;
/// Maximum lexer states of a grammar, 1 to 2 kB each.
const LEXER_STATES: usize = 10_000;
/// Maximum items of the parser at one byte: steps of a very ambiguous grammar get longer with each
/// token. An object of 200 optional properties is below it.
const ROW_ITEMS: usize = 1_000;
/// Maximum nodes of the regular expressions of a grammar, in llguidance's measure.
const LEXER_FUEL: u64 = 500_000;
/// Maximum symbols in the productions of a grammar.
const SYMBOLS: usize = 100_000;

/// Stack of a thread that works on a grammar: the engine recurses on nested expressions.
const STACK: usize = 64 << 20;
/// Maximum time of a request's grammar before its first token, and of each token after that.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of grammars that are compiled at once.
const COMPILING: usize = 8;

/// Sets the limits of llguidance.
pub(super) fn set(limits: &mut ParserLimits) {
    limits.max_lexer_states = LEXER_STATES;
    limits.max_items_in_row = ROW_ITEMS;
    limits.initial_lexer_fuel = LEXER_FUEL;
    limits.max_grammar_size = SYMBOLS;
    // It would run each large expression over the complete vocabulary.
    limits.precompute_large_lexemes = false;
    limits.verbose_errors = false;
}

/// Checks the size of a grammar, which has this JSON.
///
/// # Errors
/// It is too large; the reason in words.
pub(super) fn check(json: &str, grammar: &Grammar) -> Result<(), String> {
    if json.len() > SIZE {
        return Err(format!("the grammar has {} bytes, more than {SIZE}", json.len()));
    }
    let mut size = Size::default();
    match &grammar.language {
        Language::Json(schema) => size.add_schema(schema)?,
        Language::Lark(text) => size.add_rules(text)?,
        Language::Regex(regex) => size.quantifiers = quantifiers(regex),
        Language::JsonObject | Language::Choice(_) => {}
    }
    size.check()
}

/// The parts of a grammar for which compiling takes more than linear time.
#[derive(Default)]
struct Size {
    quantifiers: usize,
    pattern_pairs: usize,
}

impl Size {
    fn add_schema(&mut self, schema: &Value) -> Result<(), String> {
        let mut open = vec![(schema, 1)];
        while let Some((value, depth)) = open.pop() {
            if depth > DEPTH {
                return Err(format!("a schema is nested more than {DEPTH} times"));
            }
            match value {
                Value::Array(items) => open.extend(items.iter().map(|item| (item, depth + 1))),
                Value::Object(members) => {
                    self.add_members(members);
                    open.extend(members.values().map(|item| (item, depth + 1)));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn add_members(&mut self, members: &Map<String, Value>) {
        let object = |name: &str| members.get(name).and_then(Value::as_object);
        let patterns = object("patternProperties").map_or(0, Map::len);
        let names = patterns + object("properties").map_or(0, Map::len);
        self.pattern_pairs = self.pattern_pairs.saturating_add(patterns.saturating_mul(names));
        let keys = object("patternProperties").into_iter().flat_map(Map::keys).map(String::as_str);
        let pattern = members.get("pattern").and_then(Value::as_str);
        self.quantifiers += keys.chain(pattern).map(quantifiers).sum::<usize>();
    }

    /// Rules in Lark's notation, with the schemas in them.
    fn add_rules(&mut self, text: &str) -> Result<(), String> {
        let mut parts = text.split("%json");
        self.quantifiers += parts.next().map_or(0, quantifiers);
        for part in parts {
            let mut values = serde_json::Deserializer::from_str(part).into_iter::<Value>();
            let schema = values.next().and_then(Result::ok);
            let rest = if schema.is_some() { values.byte_offset() } else { 0 };
            self.quantifiers += part.get(rest..).map_or(0, quantifiers);
            schema.iter().try_for_each(|schema| self.add_schema(schema))?;
        }
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        let Self { quantifiers, pattern_pairs } = self;
        if *quantifiers > QUANTIFIERS {
            return Err(format!(
                "the grammar has {quantifiers} quantifiers and alternatives, more than {QUANTIFIERS}"
            ));
        }
        if *pattern_pairs > PATTERN_PAIRS {
            return Err(format!(
                "patternProperties need {pattern_pairs} comparisons, more than {PATTERN_PAIRS}"
            ));
        }
        Ok(())
    }
}

/// The number of characters that repeat, omit or choose.
fn quantifiers(text: &str) -> usize {
    text.bytes().filter(|byte| b"?*+{~|".contains(byte)).count()
}

/// Stops work on a grammar from another thread.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<Mutex<(bool, Option<CancellationHandle>)>>);

impl Stop {
    pub fn set(&self) {
        let mut state = self.0.lock();
        state.0 = true;
        if let Some(work) = &state.1 {
            work.cancel();
        }
    }

    /// True if it has been stopped.
    pub fn is_set(&self) -> bool {
        self.0.lock().0
    }

    /// The work is this matcher's now.
    pub(super) fn reaches(&self, matcher: &Matcher) {
        let mut state = self.0.lock();
        state.1 = matcher.cancellation_handle();
        if let (true, Some(work)) = &*state {
            work.cancel();
        }
    }
}

/// Starts a thread that may work on a grammar.
///
/// # Errors
/// The system cannot create it; the reason in words.
pub(super) fn spawn(act: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let thread = thread::Builder::new().name("grammar".to_owned()).stack_size(STACK);
    thread.spawn(act).map(drop).map_err(|error| error.to_string())
}

/// Does work on a grammar on a separate thread, and waits for it within a limit. A compilation
/// cannot be stopped: it goes on to the limits of llguidance, and nothing waits for it.
///
/// # Errors
/// The work has failed, or takes too long; the reason in words.
pub fn run_on_thread<T: Send + 'static>(
    act: impl FnOnce(&Stop) -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let (stop, (done, result)) = (Stop::default(), sync_channel(1));
    let theirs = stop.clone();
    spawn(move || drop(done.send(act(&theirs))))?;
    result.recv_timeout(TIMEOUT).unwrap_or_else(|why| {
        stop.set();
        Err(match why {
            RecvTimeoutError::Timeout => TOO_LARGE,
            RecvTimeoutError::Disconnected => FAILED,
        }
        .to_owned())
    })
}

/// The right to compile a grammar.
#[derive(Default)]
pub(super) struct Turns {
    taken: Mutex<usize>,
    given: Condvar,
}

impl Turns {
    /// Waits for a turn.
    ///
    /// # Errors
    /// There was none in time.
    pub fn take(self: &Arc<Self>) -> Result<Turn, String> {
        let mut taken = self.taken.lock();
        let late = self.given.wait_while_for(&mut taken, |taken| *taken >= COMPILING, TIMEOUT);
        if late.timed_out() && *taken >= COMPILING {
            return Err("other grammars are being compiled".to_owned());
        }
        *taken += 1;
        Ok(Turn(Arc::clone(self)))
    }
}

/// A turn, given back when it is dropped.
pub(super) struct Turn(Arc<Turns>);

impl Drop for Turn {
    fn drop(&mut self) {
        *self.0.taken.lock() -= 1;
        self.0.given.notify_one();
    }
}
