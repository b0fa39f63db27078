//! The machine that runs a `Grammar`: tokens and text to states, states to parts of the answer.
//!
//! Three layers, as in the server. Tokens that are markers are taken out of the text (and wait for
//! their text if the detokenizer withholds it); a lexer finds the markers that are mere text, and
//! withholds what may become one; steps of the grammar turn both into events, and events into
//! reasoning, content and pieces of calls. Fed without tokens (an unstreamed answer), every marker
//! is found by its text.

mod calls;
mod counter;
mod setup;

pub(super) use counter::Counter;
pub(super) use setup::Setup;

use super::arguments::Arguments;
use super::grammar::{Emit, GrammarState, Mark, Transition};
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
    /// `arguments`: what comes is added to `sent` without converting all of it.
    open: Option<usize>,
    /// Bytes that converting the arguments has read so far.
    converted: usize,
}

/// JSON arguments: the part that is withheld.
#[derive(Clone, Debug, Default)]
struct WithheldJson {
    text: String,
    depth: u32,
    is_text: bool,
    is_escaped: bool,
}

/// The task of a machine in its pair of parsers.
#[derive(Clone, Copy, Debug, Default)]
struct Role {
    /// Calls pass as text: this machine is the reasoning parser of a pair.
    skips_calls: bool,
    /// Markers of reasoning pass as text: there is no reasoning parser.
    skips_reasoning: bool,
    /// Calls are dropped: the request forbids them.
    drops_calls: bool,
}

/// Text that may become a marker.
#[derive(Clone, Debug, Default)]
struct Lexed {
    text: String,
    /// Where the text begins, bytes since the first token.
    from: usize,
    /// Where the tokens in it begin, bytes since the first token.
    starts: VecDeque<usize>,
}

/// State of one output.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    setup: Arc<Setup>,
    state: GrammarState,
    role: Role,
    in_skipped_call: bool,
    has_tokens: bool,
    lexed: Lexed,
    /// Marker tokens whose text has not come, and the text that came instead.
    waiting: VecDeque<(Mark, String)>,
    instead: String,
    withheld: WithheldJson,
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
    fn new(setup: Arc<Setup>, state: GrammarState) -> Self {
        let has_reasoning = setup.text_of(Mark::ThinkEnd).is_some() || setup.thinks;
        Self {
            setup,
            state,
            role: Role::default(),
            in_skipped_call: false,
            has_tokens: false,
            lexed: Lexed::default(),
            waiting: VecDeque::new(),
            instead: String::new(),
            withheld: WithheldJson::default(),
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
        Self { role: Role { skips_calls: true, ..Role::default() }, ..Self::new(setup, state) }
    }

    /// The tool parser of a pair.
    pub fn calls(setup: Arc<Setup>, skips_reasoning: bool, drops_calls: bool) -> Self {
        let role = Role { skips_calls: false, skips_reasoning, drops_calls };
        Self { role, ..Self::new(setup, GrammarState::Content) }
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
        !self.state.is_call() && self.lexed.text.is_empty() && self.waiting.is_empty()
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

    pub fn unstreamed_reasoning(mut self, output: &str) -> (Option<String>, Option<String>) {
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

    /// Content and calls of a complete output without reasoning.
    pub fn unstreamed_calls(mut self, output: &str) -> Result<(Option<String>, Vec<ToolCall>), Unsure> {
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
                self.lexed.starts.push_back(self.lexed.from + self.lexed.text.len());
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

    /// Gives waiting markers their text. Returns the rest.
    fn resolve(&mut self, events: &mut Vec<Event>, text: &str) -> String {
        if self.waiting.is_empty() {
            return text.to_owned();
        }
        // The withheld text has no marker, but may end in the beginning of one.
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
            text = rest;
            read = 0;
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
        self.flush_withheld(events);
        match self.state {
            GrammarState::Content => {}
            GrammarState::Reasoning => events.push(Event::ReasoningEnd),
            _ if self.calls > 0 => events.push(Event::CallEnd),
            _ => {}
        }
        self.state = GrammarState::Content;
    }

    /// A marker that came as its token.
    fn marker(&mut self, events: &mut Vec<Event>, mark: Mark, text: &str) {
        self.lex(events, true);
        self.apply(events, mark, text, 0);
    }

    /// Takes the tokens that begin in the first `length` bytes of what is lexed.
    fn take_starts(&mut self, length: usize) -> u64 {
        let Lexed { from, starts, .. } = &mut self.lexed;
        *from += length;
        let taken = starts.partition_point(|start| start < from);
        starts.drain(..taken).len() as u64
    }

    // Text.

    fn text(&mut self, events: &mut Vec<Event>, text: &str) {
        self.lexed.text.push_str(text);
        self.lex(events, false);
    }

    /// Takes markers and text out of what was lexed, up to what may become a marker.
    fn lex(&mut self, events: &mut Vec<Event>, is_final: bool) {
        let setup = Arc::clone(&self.setup);
        let lexed = std::mem::take(&mut self.lexed.text);
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
            let spellings = if begins(rest) { setup.spellings.as_slice() } else { &[] };
            let longest = spellings.iter().filter(|(_, known)| rest.starts_with(known.as_str()));
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
        rest.clone_into(&mut self.lexed.text);
    }

    /// Text of some tokens, in the present state.
    fn content(&mut self, events: &mut Vec<Event>, text: &str, tokens: u64) {
        match self.state {
            GrammarState::Content => events.push(Event::Text(text.to_owned())),
            GrammarState::Reasoning => {
                self.reasoning_tokens += tokens;
                events.push(Event::Reasoning(text.to_owned()));
            }
            GrammarState::Name => events.push(Event::Name(text.to_owned())),
            GrammarState::Arguments if self.setup.grammar.arguments == Arguments::Json => {
                for c in text.chars() {
                    self.withhold(events, c);
                }
            }
            GrammarState::Arguments => events.push(Event::Argument(text.to_owned())),
            GrammarState::Preamble | GrammarState::Between => {}
        }
    }

    /// A character of JSON arguments: what closes them waits for the next.
    fn withhold(&mut self, events: &mut Vec<Event>, c: char) {
        let withheld = &mut self.withheld;
        withheld.text.push(c);
        match c {
            _ if withheld.is_escaped => withheld.is_escaped = false,
            '\\' if withheld.is_text => withheld.is_escaped = true,
            '"' => withheld.is_text = !withheld.is_text,
            _ if withheld.is_text => {}
            '{' | '[' => withheld.depth += 1,
            '}' | ']' => {
                withheld.depth = withheld.depth.saturating_sub(1);
                if withheld.depth == 0 {
                    return;
                }
            }
            _ => {}
        }
        self.flush_withheld(events);
    }

    fn flush_withheld(&mut self, events: &mut Vec<Event>) {
        if !self.withheld.text.is_empty() {
            events.push(Event::Argument(std::mem::take(&mut self.withheld.text)));
        }
    }

    // Steps.

    fn apply(&mut self, events: &mut Vec<Event>, mark: Mark, text: &str, tokens: u64) {
        let setup = Arc::clone(&self.setup);
        let Some(step) = setup.step(self.state, mark) else {
            if mark != Mark::Drop {
                if self.role.skips_calls && self.leaves_calls(mark) {
                    self.in_skipped_call = false;
                }
                self.content(events, text, tokens);
            }
            return;
        };
        if self.role.skips_reasoning && matches!(mark, Mark::ThinkStart | Mark::ThinkEnd) {
            return self.content(events, text, tokens);
        }
        if self.role.skips_calls && self.skip_call(events, step, text) {
            return;
        }
        let (_, _, to, emits) = step;
        if self.state == GrammarState::Arguments && *to != GrammarState::Arguments {
            self.flush_withheld(events);
        }
        self.state = *to;
        for emit in *emits {
            events.push(match emit {
                Emit::ReasoningEnd => Event::ReasoningEnd,
                Emit::CallStart => Event::CallStart,
                Emit::Argument => Event::Argument(text.to_owned()),
                Emit::CallEnd => Event::CallEnd,
            });
            self.calls += u32::from(*emit == Emit::CallStart);
        }
        if self.state == GrammarState::Arguments {
            self.withheld =
                WithheldJson { text: std::mem::take(&mut self.withheld.text), ..WithheldJson::default() };
        }
    }

    fn leaves_calls(&self, mark: Mark) -> bool {
        self.setup.steps().any(|step| step.1 == mark && step.0.is_call() && !step.2.is_call())
    }

    /// The reasoning parser's part of a call: its markers are content, and the first one may end
    /// reasoning. False for a marker that has nothing to do with calls here.
    fn skip_call(&mut self, events: &mut Vec<Event>, step: &Transition, text: &str) -> bool {
        let (_, mark, to, emits) = step;
        let is_of_call = self.setup.steps().any(|s| s.1 == *mark && (s.0.is_call() || s.2.is_call()));
        let (opens, leaves) = (to.is_call(), self.leaves_calls(*mark));
        if !is_of_call || (leaves && !opens && !self.in_skipped_call) {
            return false;
        }
        self.in_skipped_call = opens || (self.in_skipped_call && !leaves);
        if emits.contains(&Emit::ReasoningEnd) {
            self.state = GrammarState::Content;
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
                _ if self.role.drops_calls => {}
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
