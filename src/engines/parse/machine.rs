//! The machine that runs a `Grammar`: tokens and text to states, states to parts of the answer.
//!
//! Three layers, as in the server. Tokens that are markers are taken out of the text (and wait for
//! their text if the detokenizer holds it back); a lexer finds the markers that are mere text, and
//! holds back what may become one; steps of the grammar turn both into events, and events into
//! reasoning, content and pieces of calls. Fed without tokens (a whole answer), every marker is
//! found by its text.

mod calls;
mod counter;
mod setup;

pub(super) use counter::Counter;
pub(super) use setup::Setup;

use super::arguments::Arguments;
use super::grammar::{Mark, State, Step, Tells};
use super::growing::NameSearch;
use super::{ToolCall, Unsure};
use super::{python, steps};

use foretell_core::session::parse::Parsed;
use foretell_core::units::TokenId;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// A finding of the machine, which numbers the calls.
#[derive(Clone, Debug)]
enum Event {
    Reasoning(String),
    ReasoningEnd,
    Text(String),
    CallStart,
    Name(String),
    Argument(String),
    CallEnd,
}

/// One call, as far as it was found.
#[derive(Clone, Debug, Default)]
struct Slot {
    id: Option<String>,
    name: String,
    arguments: String,
    is_named: bool,
    /// Its name is no function's, and stays so.
    is_refused: bool,
    /// A name inside the arguments.
    inner_name: NameSearch,
    text_keys: Option<Vec<String>>,
    sent: String,
    /// The last argument is a text that goes on, and no tag begins in it before this byte of
    /// `arguments`: what comes is added to `sent` without converting all of it again.
    open: Option<usize>,
    /// Bytes that converting the arguments has read so far.
    converted: usize,
}

/// JSON arguments: what is withheld of them.
#[derive(Clone, Debug, Default)]
struct Held {
    text: String,
    depth: u32,
    is_text: bool,
    is_escaped: bool,
}

/// State of one output.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    setup: Arc<Setup>,
    state: State,
    /// Calls pass as text: this machine is the reasoning parser of a pair.
    skips_calls: bool,
    /// Markers of reasoning pass as text: there is no reasoning parser.
    skips_reasoning: bool,
    /// Calls are dropped: the request forbids them.
    drops_calls: bool,
    in_skipped_call: bool,
    has_tokens: bool,
    /// Text that may become a marker, and where it and the tokens in it begin: bytes since the
    /// first token.
    lexed: String,
    lexed_from: usize,
    starts: VecDeque<usize>,
    /// Marker tokens whose text has not come, and the text that came instead.
    waiting: VecDeque<(Mark, String)>,
    instead: String,
    held: Held,
    calls: u32,
    slots: Vec<Slot>,
    /// The first call with these arguments, where that matters ([`Arguments::Dsml`]).
    first_with: HashMap<String, usize>,
    /// Content that is withheld, and how many bytes of it are known to be spaces.
    later: String,
    blank: usize,
    later_reasoning: String,
    has_content: bool,
    has_ended: bool,
    reasoning_tokens: u64,
    is_sure: bool,
}

impl Machine {
    fn new(setup: Arc<Setup>, state: State) -> Self {
        let has_reasoning = setup.text_of(Mark::ThinkEnd).is_some() || setup.thinks;
        Self {
            setup,
            state,
            skips_calls: false,
            skips_reasoning: false,
            drops_calls: false,
            in_skipped_call: false,
            has_tokens: false,
            lexed: String::new(),
            lexed_from: 0,
            starts: VecDeque::new(),
            waiting: VecDeque::new(),
            instead: String::new(),
            held: Held::default(),
            calls: 0,
            slots: Vec::new(),
            first_with: HashMap::new(),
            later: String::new(),
            blank: 0,
            later_reasoning: String::new(),
            has_content: false,
            has_ended: !has_reasoning,
            reasoning_tokens: 0,
            is_sure: true,
        }
    }

    /// The reasoning parser of a pair.
    pub fn reasoning(setup: Arc<Setup>) -> Self {
        let state = setup.start();
        Self { skips_calls: true, ..Self::new(setup, state) }
    }

    /// The tool parser of a pair.
    pub fn calls(setup: Arc<Setup>, skips_reasoning: bool, drops_calls: bool) -> Self {
        Self { skips_reasoning, drops_calls, ..Self::new(setup, State::Content) }
    }

    pub const fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// The token that ended reasoning, if it is also the first of what follows.
    pub fn rest(&self, token: TokenId) -> Option<TokenId> {
        self.setup.rest(token)
    }

    pub const fn reasoning_tokens(&self) -> u64 {
        self.reasoning_tokens
    }

    pub const fn is_sure(&self) -> bool {
        self.is_sure
    }

    pub fn is_outside_calls(&self) -> bool {
        !self.state.is_call() && self.lexed.is_empty() && self.waiting.is_empty()
    }

    /// Adds text, and the token it came with.
    pub fn push(&mut self, token: Option<TokenId>, text: &str) -> Parsed {
        let mut events = Vec::new();
        self.feed(&mut events, token, text);
        let parsed = self.parsed(events, false);
        self.strip_reasoning(parsed)
    }

    /// The parts that are withheld.
    pub fn finish(&mut self) -> Parsed {
        let mut events = Vec::new();
        self.end(&mut events);
        if events.is_empty() && self.later.is_empty() { Parsed::default() } else { self.parsed(events, true) }
    }

    pub fn whole_reasoning(mut self, output: &str) -> (Option<String>, Option<String>) {
        let mut events = Vec::new();
        self.feed(&mut events, None, output);
        self.end(&mut events);
        let (mut reasoning, mut content) = (String::new(), String::new());
        for event in events {
            match event {
                Event::Reasoning(text) => reasoning.push_str(&text),
                Event::Text(text) => content.push_str(&text),
                _ => {}
            }
        }
        if self.setup.grammar.strips_reasoning {
            reasoning.truncate(python::strip_end(&reasoning).len());
        }
        (some(reasoning), some(content))
    }

    /// Content and calls of a whole output without reasoning.
    pub fn whole_calls(mut self, output: &str) -> Result<(Option<String>, Vec<ToolCall>), Unsure> {
        let mut events = Vec::new();
        self.feed(&mut events, None, output);
        self.end(&mut events);
        let content = self.parsed(events, true).text;
        let calls = self.slots.iter().filter_map(|slot| self.call(slot).transpose());
        let calls = calls.collect::<Result<Vec<_>, _>>()?;
        if !self.is_sure {
            return Err(Unsure);
        }
        let content = match calls.is_empty() {
            false if self.setup.grammar.strips_content => python::strip(&content).to_owned(),
            false if python::strip(&content).is_empty() => String::new(),
            _ => content,
        };
        Ok((some(content), calls))
    }

    // Tokens.

    fn feed(&mut self, events: &mut Vec<Event>, token: Option<TokenId>, text: &str) {
        self.has_tokens |= token.is_some();
        let setup = Arc::clone(&self.setup);
        let mark = token.and_then(|token| setup.tokens.get(&token));
        let text = self.resolve(events, text);
        let Some((mark, marker)) = mark else {
            if token.is_some() && !text.is_empty() {
                self.starts.push_back(self.lexed_from + self.lexed.len());
            }
            return self.text(events, &text);
        };
        if let Some(at) = text.find(marker.as_str()) {
            self.text(events, text.get(..at).unwrap_or(""));
            return self.marker(events, *mark, marker);
        }
        if *mark == Mark::Drop {
            self.text(events, &text);
        } else {
            self.instead.push_str(&text);
        }
        self.waiting.push_back((*mark, marker.clone()));
    }

    /// Gives waiting markers their text. Returns what is left of it.
    fn resolve(&mut self, events: &mut Vec<Event>, text: &str) -> String {
        if self.waiting.is_empty() {
            return text.to_owned();
        }
        // What was withheld has no marker, but may end in the beginning of one.
        let mut read = self.instead.len();
        let mut text = std::mem::take(&mut self.instead) + text;
        while let Some((mark, marker)) = self.waiting.pop_front() {
            let from = text.floor_char_boundary((read + 1).saturating_sub(marker.len()));
            steps::read(text.len() - from);
            let Some(at) = text.get(from..).and_then(|new| new.find(&marker)) else {
                self.waiting.push_front((mark, marker));
                self.instead = text;
                return String::new();
            };
            let rest = text.split_off(from + at + marker.len());
            text.truncate(from + at);
            self.text(events, &text);
            self.marker(events, mark, &marker);
            (text, read) = (rest, 0);
        }
        text
    }

    fn end(&mut self, events: &mut Vec<Event>) {
        let text = std::mem::take(&mut self.instead);
        self.text(events, &text);
        for (mark, marker) in std::mem::take(&mut self.waiting) {
            self.marker(events, mark, &marker);
        }
        self.lex(events, true);
        self.flush_held(events);
        match self.state {
            State::Content => {}
            State::Reasoning => events.push(Event::ReasoningEnd),
            _ if self.calls > 0 => events.push(Event::CallEnd),
            _ => {}
        }
        self.state = State::Content;
    }

    /// A marker that came as its token.
    fn marker(&mut self, events: &mut Vec<Event>, mark: Mark, text: &str) {
        self.lex(events, true);
        self.apply(events, mark, text, 0);
    }

    /// Takes the tokens that begin in the first `length` bytes of what is lexed.
    fn take_starts(&mut self, length: usize) -> u64 {
        self.lexed_from += length;
        let taken = self.starts.partition_point(|start| *start < self.lexed_from);
        self.starts.drain(..taken).len() as u64
    }

    // Text.

    fn text(&mut self, events: &mut Vec<Event>, text: &str) {
        self.lexed.push_str(text);
        self.lex(events, false);
    }

    /// Takes markers and text out of what was lexed, up to what may become a marker.
    fn lex(&mut self, events: &mut Vec<Event>, is_final: bool) {
        let setup = Arc::clone(&self.setup);
        let lexed = std::mem::take(&mut self.lexed);
        let mut rest = lexed.as_str();
        while !rest.is_empty() {
            let starts = |text: &str| setup.spellings.iter().any(|(_, known)| known.starts_with(text));
            let is_open = |text: &str| {
                setup.spellings.iter().any(|(_, known)| known.len() > text.len() && known.starts_with(text))
            };
            // A vocabulary may have hundreds of special tokens: most text begins like none of them.
            let begins = |text: &str| text.starts_with(setup.begins.as_slice());
            if !is_final && begins(rest) && is_open(rest) {
                break;
            }
            let known = setup.spellings.iter().filter(|_| begins(rest));
            let longest = known.filter(|(_, known)| rest.starts_with(known.as_str()));
            if let Some((mark, text)) = longest.max_by_key(|(_, known)| known.len()) {
                rest = rest.get(text.len()..).unwrap_or("");
                let tokens = self.take_starts(text.len());
                if self.has_tokens && setup.is_by_token(*mark) {
                    self.content(events, text, tokens);
                } else {
                    self.apply(events, *mark, text, tokens);
                }
                continue;
            }
            let may_start = |text: &str| {
                starts(text) || setup.spellings.iter().any(|(_, known)| text.starts_with(known.as_str()))
            };
            let tails = rest.char_indices().skip(1).filter_map(|(at, _)| Some((at, rest.get(at..)?)));
            let end = tails.into_iter().find(|(_, tail)| begins(tail) && may_start(tail));
            let end = end.map_or(rest.len(), |(at, _)| at);
            let (content, tail) = rest.split_at(end);
            steps::read(end);
            let tokens = self.take_starts(end);
            self.content(events, content, tokens);
            rest = tail;
        }
        rest.clone_into(&mut self.lexed);
    }

    /// Text of some tokens, in the present state.
    fn content(&mut self, events: &mut Vec<Event>, text: &str, tokens: u64) {
        match self.state {
            State::Content => events.push(Event::Text(text.to_owned())),
            State::Reasoning => {
                self.reasoning_tokens += tokens;
                events.push(Event::Reasoning(text.to_owned()));
            }
            State::Name => events.push(Event::Name(text.to_owned())),
            State::Arguments if self.setup.grammar.arguments == Arguments::Json => {
                for c in text.chars() {
                    self.hold(events, c);
                }
            }
            State::Arguments => events.push(Event::Argument(text.to_owned())),
            State::Preamble | State::Between => {}
        }
    }

    /// A character of JSON arguments: what closes them waits for the next.
    fn hold(&mut self, events: &mut Vec<Event>, c: char) {
        let held = &mut self.held;
        held.text.push(c);
        match c {
            _ if held.is_escaped => held.is_escaped = false,
            '\\' if held.is_text => held.is_escaped = true,
            '"' => held.is_text = !held.is_text,
            _ if held.is_text => {}
            '{' | '[' => held.depth += 1,
            '}' | ']' => {
                held.depth = held.depth.saturating_sub(1);
                if held.depth == 0 {
                    return;
                }
            }
            _ => {}
        }
        self.flush_held(events);
    }

    fn flush_held(&mut self, events: &mut Vec<Event>) {
        if !self.held.text.is_empty() {
            events.push(Event::Argument(std::mem::take(&mut self.held.text)));
        }
    }

    // Steps.

    fn apply(&mut self, events: &mut Vec<Event>, mark: Mark, text: &str, tokens: u64) {
        let setup = Arc::clone(&self.setup);
        let Some(step) = setup.step(self.state, mark) else {
            if mark != Mark::Drop {
                if self.skips_calls && self.leaves_calls(mark) {
                    self.in_skipped_call = false;
                }
                self.content(events, text, tokens);
            }
            return;
        };
        if self.skips_reasoning && matches!(mark, Mark::ThinkStart | Mark::ThinkEnd) {
            return self.content(events, text, tokens);
        }
        if self.skips_calls && self.skip_call(events, step, text) {
            return;
        }
        let (_, _, to, tells) = step;
        if self.state == State::Arguments && *to != State::Arguments {
            self.flush_held(events);
        }
        self.state = *to;
        for tell in *tells {
            events.push(match tell {
                Tells::ReasoningEnd => Event::ReasoningEnd,
                Tells::CallStart => Event::CallStart,
                Tells::Argument => Event::Argument(text.to_owned()),
                Tells::CallEnd => Event::CallEnd,
            });
            self.calls += u32::from(*tell == Tells::CallStart);
        }
        if self.state == State::Arguments {
            self.held = Held { text: std::mem::take(&mut self.held.text), ..Held::default() };
        }
    }

    fn leaves_calls(&self, mark: Mark) -> bool {
        self.setup.steps().any(|step| step.1 == mark && step.0.is_call() && !step.2.is_call())
    }

    /// The reasoning parser's part of a call: its markers are content, and the first one may end
    /// reasoning. False for a marker that has nothing to do with calls here.
    fn skip_call(&mut self, events: &mut Vec<Event>, step: &Step, text: &str) -> bool {
        let (_, mark, to, tells) = step;
        let is_of_call = self.setup.steps().any(|s| s.1 == *mark && (s.0.is_call() || s.2.is_call()));
        let (opens, leaves) = (to.is_call(), self.leaves_calls(*mark));
        if !is_of_call || (leaves && !opens && !self.in_skipped_call) {
            return false;
        }
        self.in_skipped_call = opens || (self.in_skipped_call && !leaves);
        if tells.contains(&Tells::ReasoningEnd) {
            self.state = State::Content;
            events.push(Event::ReasoningEnd);
        }
        self.content(events, text, 0);
        true
    }

    // Events.

    fn parsed(&mut self, events: Vec<Event>, is_end: bool) -> Parsed {
        let mut parsed = Parsed::default();
        let carried = std::mem::take(&mut self.later);
        let blank = std::mem::take(&mut self.blank);
        let (mut content, mut later) = (String::new(), String::new());
        let mut in_call = false;
        for event in events {
            match event {
                Event::Text(text) if in_call => later.push_str(&text),
                Event::Text(text) => content.push_str(&text),
                Event::Reasoning(text) => parsed.reasoning.push_str(&text),
                Event::ReasoningEnd => self.has_ended = true,
                _ if self.drops_calls => {}
                event => {
                    in_call = true;
                    self.on_call(event, &mut parsed.calls);
                }
            }
        }
        if in_call && !parsed.calls.is_empty() {
            self.later = carried + &later;
            self.blank = blank;
            parsed.text = self.certain(content, 0, is_end);
        } else {
            parsed.text = self.certain(carried + &content + &later, blank, is_end);
        }
        parsed
    }

    /// Content; spaces alone, as its first bytes up to `blank` are, wait for more, and are dropped
    /// before a call.
    fn certain(&mut self, content: String, blank: usize, is_end: bool) -> String {
        if self.has_content || content.is_empty() {
            return content;
        }
        if !python::strip(content.get(blank..).unwrap_or("")).is_empty() {
            self.has_content = true;
            return content;
        }
        if !self.slots.is_empty() {
            return String::new();
        }
        if is_end {
            return content;
        }
        self.blank = content.len();
        self.later = content;
        String::new()
    }

    fn strip_reasoning(&mut self, mut parsed: Parsed) -> Parsed {
        if !self.setup.grammar.strips_reasoning {
            return parsed;
        }
        if !parsed.reasoning.is_empty() {
            let solid = python::strip_end(&parsed.reasoning).len();
            let spaces = parsed.reasoning.split_off(solid);
            if solid > 0 {
                parsed.reasoning.insert_str(0, &std::mem::take(&mut self.later_reasoning));
            }
            self.later_reasoning.push_str(&spaces);
        } else if self.has_ended {
            self.later_reasoning.clear();
        }
        parsed
    }
}

fn some(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}
