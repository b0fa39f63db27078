//! The machine that runs a `Grammar`: tokens and text to states, states to parts of the answer.
//!
//! Three layers, as in the server. Tokens that are markers are taken out of the text (and wait for
//! their text if the detokenizer holds it back); a lexer finds the markers that are mere text, and
//! holds back what may become one; steps of the grammar turn both into events, and events into
//! reasoning, content and pieces of calls. Fed without tokens (a whole answer), every marker is
//! found by its text.

mod counter;
mod setup;

pub(super) use counter::Counter;
pub(super) use setup::Setup;

use super::arguments::{self, Arguments};
use super::grammar::{Mark, Names, State, Step, Tells};
use super::python::{self, Unread, Value};
use super::{Call, Unsure};

use foretell_core::session::parse::{CallDelta, Parsed};
use foretell_core::units::TokenId;

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
    text_keys: Option<Vec<String>>,
    /// JSON that was sent.
    sent: String,
}

/// JSON arguments: what is held back of them.
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
    /// Text that may become a marker, and where the tokens in it begin.
    lexed: String,
    starts: Vec<usize>,
    /// Marker tokens whose text has not come, and the text that came instead.
    waiting: Vec<(Mark, String)>,
    instead: String,
    held: Held,
    calls: u32,
    slots: Vec<Slot>,
    later: String,
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
            starts: Vec::new(),
            waiting: Vec::new(),
            instead: String::new(),
            held: Held::default(),
            calls: 0,
            slots: Vec::new(),
            later: String::new(),
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

    /// The parts that are held back.
    pub fn finish(&mut self) -> Parsed {
        let mut events = Vec::new();
        self.end(&mut events);
        if events.is_empty() && self.later.is_empty() { Parsed::default() } else { self.parsed(events, true) }
    }

    /// Reasoning and content of a whole output.
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
    pub fn whole_calls(mut self, output: &str) -> Result<(Option<String>, Vec<Call>), Unsure> {
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

    /// A whole call; `None` if the server drops it.
    fn call(&self, slot: &Slot) -> Result<Option<Call>, Unsure> {
        let name = python::strip(&slot.name).to_owned();
        let is_mistral = self.setup.grammar.names == Names::Mistral;
        if is_mistral && slot.name.is_empty() && slot.arguments.is_empty() {
            return Ok(None);
        }
        if name.is_empty() && !is_mistral {
            return inner_call(slot);
        }
        let raw = python::strip(&slot.arguments);
        let arguments = match self.setup.grammar.arguments {
            _ if raw.is_empty() => "{}".to_owned(),
            Arguments::Json if is_mistral => first_value(raw)?.to_owned(),
            Arguments::Json => raw.to_owned(),
            _ => self.convert(&slot.arguments, false).map_err(|_| Unsure)?,
        };
        if !self.accepts(&name) {
            return Ok(None);
        }
        let properties = arguments::properties(&self.setup.tools, &name);
        let arguments = arguments::fix_types(arguments, properties).map_err(|_| Unsure)?;
        Ok(Some(Call { id: slot.id.clone(), name, arguments }))
    }

    // Tokens.

    fn feed(&mut self, events: &mut Vec<Event>, token: Option<TokenId>, text: &str) {
        self.has_tokens |= token.is_some();
        let setup = Arc::clone(&self.setup);
        let mark = token.and_then(|token| setup.tokens.get(&token));
        let text = self.resolve(events, text);
        let Some((mark, marker)) = mark else {
            if token.is_some() && !text.is_empty() {
                self.starts.push(self.lexed.len());
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
        self.waiting.push((*mark, marker.clone()));
    }

    /// Gives waiting markers their text. Returns what is left of it.
    fn resolve(&mut self, events: &mut Vec<Event>, text: &str) -> String {
        if self.waiting.is_empty() {
            return text.to_owned();
        }
        let mut text = std::mem::take(&mut self.instead) + text;
        for (mark, marker) in std::mem::take(&mut self.waiting) {
            if let Some(at) = text.find(&marker) {
                let rest = text.split_off(at + marker.len());
                text.truncate(at);
                self.text(events, &text);
                self.marker(events, mark, &marker);
                text = rest;
            } else {
                self.instead.push_str(&text);
                text.clear();
                self.waiting.push((mark, marker));
            }
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
        let all = self.starts.len();
        self.starts.retain(|start| *start >= length);
        self.starts.iter_mut().for_each(|start| *start -= length);
        (all - self.starts.len()) as u64
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
            if !is_final && is_open(rest) {
                break;
            }
            let longest = setup.spellings.iter().filter(|(_, known)| rest.starts_with(known.as_str()));
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
            let end = tails.into_iter().find(|(_, tail)| may_start(tail)).map_or(rest.len(), |(at, _)| at);
            let (content, tail) = rest.split_at(end);
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
        } else {
            content = carried + &content + &later;
        }
        parsed.text = self.certain(content, is_end);
        parsed
    }

    /// Content; spaces alone wait for more, and are dropped before a call.
    fn certain(&mut self, content: String, is_end: bool) -> String {
        if self.has_content || content.is_empty() {
            return content;
        }
        if !python::strip(&content).is_empty() {
            self.has_content = true;
            return content;
        }
        if !self.slots.is_empty() {
            return String::new();
        }
        if is_end {
            return content;
        }
        self.later = content;
        String::new()
    }

    fn strip_reasoning(&mut self, mut parsed: Parsed) -> Parsed {
        if !self.setup.grammar.strips_reasoning {
            return parsed;
        }
        if !parsed.reasoning.is_empty() {
            let mut all = std::mem::take(&mut self.later_reasoning) + &parsed.reasoning;
            self.later_reasoning = all.split_off(python::strip_end(&all).len());
            parsed.reasoning = all;
        } else if self.has_ended {
            self.later_reasoning.clear();
        }
        parsed
    }

    fn on_call(&mut self, event: Event, calls: &mut Vec<CallDelta>) {
        match event {
            Event::CallStart => self.slots.push(Slot::default()),
            Event::Name(text) => self.slot(|slot| slot.name.push_str(&text)),
            Event::Argument(text) => self.on_argument(&text, calls),
            Event::CallEnd => self.on_end(calls),
            _ => {}
        }
    }

    fn slot(&mut self, change: impl FnOnce(&mut Slot)) {
        if let Some(slot) = self.slots.last_mut() {
            change(slot);
        }
    }

    fn on_argument(&mut self, text: &str, calls: &mut Vec<CallDelta>) {
        self.slot(|slot| slot.arguments.push_str(text));
        let Some(slot) = self.slots.last() else { return };
        if slot.is_named {
            if let Some(piece) = self.argument_piece(text) {
                self.piece(calls, None, piece);
            }
            return;
        }
        let names = self.setup.grammar.names;
        let is_inside = slot.name.is_empty() && names != Names::Mistral;
        let header = if is_inside { inner_name(&slot.arguments) } else { Some(slot.name.clone()) };
        let Some(header) = header else { return };
        let is_kimi = names == Names::Kimi;
        let (id, name) = match self.read_name(&header) {
            Some(read) => read,
            None if is_kimi => return self.slot(|slot| slot.name.clear()),
            None => return,
        };
        if self.accepts(&name) {
            self.name(id, &name);
            let has_piece = matches!(names, Names::Kimi | Names::Mistral);
            let piece = if has_piece { text.to_owned() } else { String::new() };
            self.piece(calls, Some(name), piece);
        }
    }

    fn on_end(&mut self, calls: &mut Vec<CallDelta>) {
        if self.setup.grammar.names == Names::Stripped {
            self.slot(|slot| slot.name = python::strip(&slot.name).to_owned());
        }
        let rest = self.last_piece();
        let Some(slot) = self.slots.last().filter(|slot| !slot.is_named) else {
            if !rest.is_empty() {
                self.piece(calls, None, rest);
            }
            return;
        };
        // A header that cannot be read is the name.
        let (id, name) = self.read_name(&slot.name).unwrap_or((None, slot.name.clone()));
        let is_final = self.setup.grammar.names == Names::Mistral;
        let name = if is_final { Some(name) } else { some(name).or_else(|| inner_name(&slot.arguments)) };
        if let Some(name) = name.filter(|name| self.accepts(name)) {
            self.name(id, &name);
            self.piece(calls, Some(name), rest);
        }
    }

    fn piece(&self, calls: &mut Vec<CallDelta>, name: Option<String>, arguments: String) {
        let index = self.slots.len().saturating_sub(1) as u32;
        let id = name.as_ref().and_then(|_| self.slots.last()?.id.clone());
        calls.push(CallDelta { index, id, name, arguments });
    }

    fn name(&mut self, id: Option<String>, name: &str) {
        let text_keys = arguments::text_keys(arguments::properties(&self.setup.tools, name));
        self.slot(|slot| {
            slot.id = id;
            name.clone_into(&mut slot.name);
            slot.is_named = true;
            slot.text_keys = text_keys;
        });
    }

    /// Id and name in the text of a name.
    fn read_name(&self, header: &str) -> Option<(Option<String>, String)> {
        match self.setup.grammar.names {
            Names::Plain | Names::Mistral => Some((None, header.to_owned())),
            Names::Stripped => Some((None, python::strip(header).to_owned())),
            Names::Kimi => kimi_name(python::strip(header)),
        }
    }

    fn accepts(&self, name: &str) -> bool {
        let tools = &self.setup.tools;
        let is_known =
            !self.setup.grammar.checks_names || tools.is_empty() || arguments::has_function(tools, name);
        is_known && (!name.is_empty() || self.setup.grammar.names == Names::Mistral)
    }

    // Arguments.

    fn convert(&self, raw: &str, is_partial: bool) -> Result<String, Unread> {
        let json = self.setup.grammar.arguments.convert(raw, is_partial)?;
        if self.setup.grammar.arguments != Arguments::Dsml || self.setup.tools.is_empty() {
            return Ok(json);
        }
        let name = self.slots.iter().find(|slot| slot.arguments == raw).map(|slot| slot.name.as_str());
        let properties = name.and_then(|name| arguments::properties(&self.setup.tools, name));
        arguments::unwrap(json, properties)
    }

    /// JSON of the newest call's arguments so far.
    fn fixed(&self, is_partial: bool) -> Result<String, Unread> {
        let Some(slot) = self.slots.last() else { return Ok(String::new()) };
        let json = self.convert(&slot.arguments, is_partial)?;
        if slot.name.is_empty() {
            return Ok(json);
        }
        arguments::fix_types(json, arguments::properties(&self.setup.tools, &slot.name))
    }

    /// The arguments' JSON that became certain with a piece of their text.
    fn argument_piece(&mut self, text: &str) -> Option<String> {
        let grammar = self.setup.grammar;
        if grammar.arguments == Arguments::Json {
            return some(text.to_owned());
        }
        if grammar.converts_at.is_some_and(|c| !text.contains(c)) {
            return None;
        }
        let json = self.fixed(true).map_err(|_| self.is_sure = false).ok()?;
        let slot = self.slots.last_mut()?;
        let safe = arguments::safe_prefix(&json, slot.text_keys.as_deref());
        let piece = some(safe.strip_prefix(slot.sent.as_str())?.to_owned())?;
        safe.clone_into(&mut slot.sent);
        Some(piece)
    }

    /// The rest of the arguments, at the end of a call.
    fn last_piece(&mut self) -> String {
        if self.setup.grammar.arguments == Arguments::Json || self.slots.is_empty() {
            return String::new();
        }
        let Ok(json) = self.fixed(false) else {
            self.is_sure = false;
            return String::new();
        };
        let Some(slot) = self.slots.last_mut() else { return String::new() };
        let Some(piece) = json.strip_prefix(slot.sent.as_str()).map(str::to_owned) else {
            return String::new();
        };
        slot.sent = json;
        piece
    }
}

fn some(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

/// The first value in a text of JSON, and all of another text.
fn first_value(text: &str) -> Result<&str, Unsure> {
    match python::load_first(text) {
        Ok(first) => Ok(text.strip_suffix(first.rest).unwrap_or(text)),
        Err(Unread::Invalid) => Ok(text),
        Err(_) => Err(Unsure),
    }
}

/// A call without a name: an object of JSON may have it, with the arguments.
fn inner_call(slot: &Slot) -> Result<Option<Call>, Unsure> {
    let fields = match python::load(python::strip(&slot.arguments)) {
        Ok(Value::Object(fields)) => fields,
        Ok(_) | Err(Unread::Invalid) => return Ok(None),
        Err(_) => return Err(Unsure),
    };
    match fields.iter().find(|(key, _)| key == "name") {
        None => Ok(None),
        Some((_, Value::Text(name))) if name.is_empty() => Ok(None),
        // No grammar here writes calls so; what the server makes of it is not recorded.
        Some(_) => Err(Unsure),
    }
}

/// A name inside arguments: `"name": "…"`.
fn inner_name(arguments: &str) -> Option<String> {
    super::hermes::find_name(arguments, true).filter(|name| !name.is_empty()).map(str::to_owned)
}

/// `functions.NAME:INDEX` at the start of a header.
fn kimi_name(header: &str) -> Option<(Option<String>, String)> {
    let line = header.split('\n').next()?;
    let colon = line.rmatch_indices(':').map(|(at, _)| at).find(|&at| {
        at > 0 && line.get(at + 1..).is_some_and(|rest| rest.starts_with(|c: char| c.is_numeric()))
    })?;
    let digits =
        line.get(colon + 1..)?.chars().take_while(|c| c.is_numeric()).map(char::len_utf8).sum::<usize>();
    let id = python::strip(line.get(..colon + 1 + digits)?);
    let name = id.split(':').next()?;
    let name = name.strip_prefix("functions.").unwrap_or(name);
    (!name.is_empty()).then(|| (Some(id.to_owned()), name.to_owned()))
}
