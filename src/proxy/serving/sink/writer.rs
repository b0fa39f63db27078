//! The one writer of the client's events, and of its JSON answer.
//!
//! `id`, `created`, `model` and every other field come from the backend's first chunk, so that a
//! client (and its logs) cannot distinguish where a token was computed.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::End;
use super::end;
use super::parts::{self, PartWriter};
use crate::learning::answer_traits::AnswerTraits;
use crate::serving::plain::{Passed, Passing};
use foretell_core::session::{Delta, Finish};
use foretell_core::units::TokenId;
use foretell_engines::Engine;
use foretell_observe::Finished;
use foretell_parsers::parse::{ParsedMessage, Parsers};
use foretell_wire::openai::answer::{Additive, STOPS, Template, fill};
use foretell_wire::openai::event::finish_reason;
use foretell_wire::openai::trim::{self, Trim};
use foretell_wire::openai::usage::Usage;
use foretell_wire::openai::{Event, Request, Route, UsageText, sse};

/// Member that identifies the server's configuration.
const FINGERPRINT: &str = "system_fingerprint";

pub(super) struct Writer {
    route: Route,
    engine: Arc<Engine>,
    /// Stores the `system_fingerprint` that the server sends at the end of its answers.
    answer_traits: Arc<AnswerTraits>,
    /// The client streams.
    streams: bool,
    form: EventForm,
    trim: Trim,
    /// The final events of a stream that have been passed on from the backend.
    passed: Ends,
    /// Usage so far; `None` unless the client requested usage on every event.
    running: Option<RunningUsage>,
    /// Members that the engine sent at the end of the first call; `None` if it has not ended.
    engine_end: Option<EngineEnd>,
    /// The client sent a predicted output.
    prediction: bool,
    /// Only the client's stop tokens end the text, and the engine names all of them.
    ignores_eos: bool,
    /// How reasoning and tool calls are written; `None` in a session without an output parser.
    parts: Option<PartWriter>,
    /// A piece of output could not be written, for want of an event to model it after.
    unwritten: bool,
}

/// The form of the events that are written here.
struct EventForm {
    /// The event that is the model of those written here: the first one with text, else the first
    /// one.
    seen: Option<Arc<Event>>,
    /// Made of `seen` when the first event is written.
    template: Option<Template>,
    additive: Additive,
}

impl EventForm {
    /// The template, once an event has to be written here; `None` before the first event of the
    /// backend.
    fn template(&mut self, route: Route) -> Option<&Template> {
        if self.template.is_none()
            && let Some(seen) = &self.seen
        {
            self.template = Template::from_first_chunk(&seen.value(), route, self.additive);
        }
        self.template.as_ref()
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Ends {
    finish: bool,
    usage: bool,
    done: bool,
}

/// The usage of a stream so far.
struct RunningUsage {
    base: Option<Usage>,
    tokens: u64,
}

/// Members that the engine sends at the end of its output.
struct EngineEnd {
    /// Finish reason, as the engine names it.
    reason: String,
    /// The stop text or token, if the engine has a member for it.
    stop: Option<Value>,
    /// See [`foretell_engines::AnswerQuirks::time_report`].
    timings: Option<Value>,
}

/// The output of a JSON answer so far.
#[derive(Default)]
pub(super) struct Document {
    text: String,
    tokens: Vec<TokenId>,
    /// Members of the backend's deltas other than text.
    more: Map<String, Value>,
    /// The parts of the complete output.
    pub message: Option<ParsedMessage>,
}

impl Document {
    pub fn take(&mut self, piece: Delta) {
        self.text.push_str(&piece.parsed.text);
        self.tokens.extend(piece.tokens);
    }

    /// Takes members of a delta: pieces of strings and of lists are concatenated.
    pub fn join(&mut self, delta: &Map<String, Value>) {
        for (name, piece) in delta {
            match (self.more.get_mut(name), piece) {
                (Some(Value::String(text)), Value::String(piece)) => text.push_str(piece),
                (Some(Value::Array(pieces)), Value::Array(piece)) => pieces.extend_from_slice(piece),
                _ => {
                    self.more.insert(name.clone(), piece.clone());
                }
            }
        }
    }
}

impl Writer {
    pub fn new(request: &Request, engine: &Arc<Engine>, answer_traits: Arc<AnswerTraits>) -> Self {
        let quirks = engine.quirks();
        let additive = engine.additive(request);
        let runs =
            request.stream && request.continuous_usage && (request.include_usage || quirks.usage.runs_alone);
        let additive = Additive { usage: additive.usage && !runs, ..additive };
        Self {
            route: request.route,
            engine: Arc::clone(engine),
            answer_traits,
            streams: request.stream,
            form: EventForm { seen: None, template: None, additive },
            trim: Trim {
                additive,
                include_usage: request.include_usage,
                usage_at_end: quirks.usage.unrequested == Some(request.route),
                at_end: quirks.answers.time_report,
                hollow: quirks.answers.hollow_deltas,
            },
            passed: Ends::default(),
            running: runs.then_some(RunningUsage { base: None, tokens: 0 }),
            engine_end: None,
            prediction: request.prediction.is_some(),
            ignores_eos: request.sampling.ignore_eos,
            parts: None,
            unwritten: false,
        }
    }

    pub fn route(&self) -> Route {
        self.route
    }

    /// See [`super::Sink::write_parts`].
    pub fn write_parts(&mut self, parsers: Parsers) {
        self.parts = Some(PartWriter::new(parsers));
    }

    /// Learns the form of the parts from those of the backend: members of a delta by name.
    pub fn read_parts(&mut self, delta: &Map<String, Value>) {
        if let Some(parts) = &mut self.parts {
            parts.read(delta);
        }
    }

    /// Learns the form of the answer from an event of the backend.
    pub fn learn(&mut self, event: &Arc<Event>) {
        self.read_end(event);
        // The event with the role has another format than those that follow; it is the model of a
        // JSON answer.
        let opens = |event: &Event| event.delta().is_some_and(|delta| delta.has("role"));
        let better = match &self.form.seen {
            None => true,
            Some(seen) => self.streams && opens(seen) && !opens(event),
        };
        if better && event.choice().is_some() {
            if let Some(fingerprint) = event.top().read(FINGERPRINT) {
                self.answer_traits.note_fingerprint(&fingerprint);
            }
            self.form.seen = Some(Arc::clone(event));
        }
    }

    /// Stores the stop, the fingerprint and the time report of the engine's last events.
    pub fn read_end(&mut self, event: &Event) {
        if event.finish().is_none() && event.choice().is_some() {
            return;
        }
        let event = event.value();
        if let Some(choice) = event.pointer("/choices/0")
            && let Some(reason) = finish_reason(choice)
        {
            let stop = STOPS.into_iter().find_map(|name| choice.get(name)).cloned();
            self.engine_end = Some(EngineEnd { reason: reason.to_owned(), stop, timings: None });
        }
        if let Some(fingerprint) = event.get(FINGERPRINT) {
            self.answer_traits.note_fingerprint(fingerprint);
        }
        let timings = self.engine.quirks().answers.time_report.and_then(|name| event.get(name));
        if let (Some(end), Some(timings)) = (&mut self.engine_end, timings) {
            end.timings = Some(timings.clone());
        }
    }

    /// The bytes of events of the backend, without what only Foretell requested. Members of a
    /// removed usage event that the client would otherwise have received with the finish reason are
    /// moved to that event.
    pub fn pass(&mut self, events: Vec<Passing>) -> Vec<u8> {
        let moved = self.moved(&events);
        let mut passed = Vec::new();
        for Passing { raw, data } in events {
            let event = match data {
                Passed::Event(event) => event,
                Passed::Done => {
                    self.passed.done = true;
                    passed.extend(raw);
                    continue;
                }
                Passed::Other => {
                    passed.extend(raw);
                    continue;
                }
            };
            self.note(&event);
            let Some(mut bytes) = self.trim.event(&raw, &event) else { continue };
            if event.finish().is_some() {
                for (name, value) in moved.iter().filter(|(name, _)| !event.top().has(name)) {
                    bytes = trim::appended(&bytes, name, value).unwrap_or(bytes);
                }
            }
            passed.extend(bytes);
        }
        passed
    }

    fn moved(&self, events: &[Passing]) -> Vec<(&'static str, Value)> {
        let removed = events.iter().filter_map(|passing| match &passing.data {
            Passed::Event(event) if event.is_usage() && self.trim.is_ours(event) => Some(event),
            _ => None,
        });
        let names = [Some(FINGERPRINT), self.engine.quirks().answers.time_report];
        let members = |event: &Arc<Event>| {
            names
                .into_iter()
                .flatten()
                .filter_map(|name| Some((name, event.top().read(name)?)))
                .collect::<Vec<_>>()
        };
        removed.flat_map(members).collect()
    }

    /// Notes a final event of a stream that is passed on.
    fn note(&mut self, event: &Event) {
        self.passed.finish |= event.finish().is_some();
        self.passed.usage |= event.is_usage();
        if let Some(running) = &mut self.running {
            let usage = event.usage().and_then(|usage| UsageText::of(usage).usage());
            running.base = usage.or(running.base.take());
        }
    }

    /// Counts output that the client has received.
    pub fn count(&mut self, delta: &Delta) {
        if let Some(running) = &mut self.running {
            running.tokens += delta.tokens.len() as u64;
        }
    }

    /// The event for a piece of output; `None` if nothing is to be shown, or it cannot be written.
    pub fn piece(&mut self, delta: &Delta) -> Option<Vec<u8>> {
        self.count(delta);
        let Some(mut chunk) = self.chunk(delta, None) else {
            self.unwritten |= self.form.template.is_none() && !delta.parsed.is_empty();
            return None;
        };
        self.write_running_usage(&mut chunk);
        Some(sse::encode_json(&chunk))
    }

    /// True if a piece of output could not be written.
    pub fn has_lost(&self) -> bool {
        self.unwritten
    }

    /// The event for a piece of output; `None` before the first event of the backend, and for a
    /// piece of which a parser leaves nothing to show.
    fn chunk(&mut self, delta: &Delta, finish: Option<Finish>) -> Option<Value> {
        let template = self.form.template(self.route)?;
        let Some(parts) = &self.parts else {
            return Some(template.chunk(&delta.parsed.text, &delta.tokens, finish));
        };
        let shows = finish.is_some() || template.shows_token_ids() || !delta.parsed.is_empty();
        shows.then(|| template.delta(parts.delta(&delta.parsed), &delta.tokens, finish))
    }

    /// The events that end the text of a stream, with the last piece of its output; none if the
    /// backend's have been passed on.
    pub fn end_text(&mut self, mut last: Delta, end: &End, record: &Finished) -> Vec<u8> {
        if self.passed.finish {
            return Vec::new();
        }
        let mut events = Vec::new();
        let bare = self.engine.quirks().answers.bare_end && self.route == Route::Chat;
        if bare && !last.parsed.text.is_empty() {
            events.extend(self.piece(&std::mem::take(&mut last)).unwrap_or_default());
        }
        let Some(mut chunk) = self.chunk(&last, end.finish) else {
            events.extend(self.piece(&last).unwrap_or_default());
            return events;
        };
        self.count(&last);
        let wanted = self.sends_usage();
        if bare && let Some(delta) = chunk.pointer_mut("/choices/0/delta") {
            *delta = self.form.template.as_ref().map_or_else(|| json!({}), Template::empty_delta);
        }
        if self.trim.usage_at_end && !wanted {
            let usage =
                if self.usage_requested() { self.usage(end, record) } else { end.plain_usage(record) };
            fill(&mut chunk, &json!({ "usage": usage }));
        }
        self.write_stop(&mut chunk, end);
        self.write_running_usage(&mut chunk);
        if !wanted {
            self.write_time_report(&mut chunk);
            self.write_fingerprint(&mut chunk);
        }
        events.extend(sse::encode_json(&chunk));
        events
    }

    /// The events behind the text of a stream: the usage, if the client requested it, and `[DONE]`;
    /// without those of the backend that have been passed on.
    pub fn end(&mut self, end: &End, record: &Finished) -> Vec<u8> {
        let mut events = Vec::new();
        if !self.passed.usage && self.sends_usage() {
            events.extend(self.usage_event(end, record).unwrap_or_default());
        }
        if !self.passed.done {
            events.extend(sse::encode_done());
        }
        events
    }

    fn usage_event(&mut self, end: &End, record: &Finished) -> Option<Vec<u8>> {
        let bare = self.engine.quirks().usage.bare.contains(&self.route);
        let usage = end::shown(self.usage(end, record), bare);
        let mut chunk = self.form.template(self.route)?.usage_chunk(usage);
        self.write_time_report(&mut chunk);
        self.write_fingerprint(&mut chunk);
        Some(sse::encode_json(&chunk))
    }

    /// The answer to a client that does not stream; `None` if it cannot be written.
    pub fn document(&mut self, document: &Document, end: &End, record: &Finished) -> Option<Value> {
        let Document { text, tokens, more, message } = document;
        let usage = self.usage(end, record);
        let mut answer = self.form.template(self.route)?.unstreamed(text, tokens, end.finish, usage);
        self.write_fingerprint(&mut answer);
        if let Some(engine_end) = &self.engine_end
            && let Some(choice) = answer.pointer_mut("/choices/0").and_then(Value::as_object_mut)
        {
            choice.insert("finish_reason".to_owned(), json!(engine_end.reason));
        }
        if let (Some(message), Some(writer)) = (message, &self.parts) {
            writer.write_message(&mut answer, message);
        } else {
            parts::write_pieces(&mut answer, text, more, self.parts.is_some())?;
        }
        self.engine.dialect.codec().complete(&self.engine, self.route, &mut answer);
        self.write_stop(&mut answer, end);
        self.write_time_report(&mut answer);
        Some(answer)
    }

    /// True if a stream ends with an event for its usage.
    pub fn sends_usage(&self) -> bool {
        self.engine.quirks().usage.no_event != Some(self.route) && self.usage_requested()
    }

    /// True if the client requested the usage of its stream.
    fn usage_requested(&self) -> bool {
        self.streams && self.trim.include_usage
    }

    fn usage(&self, end: &End, record: &Finished) -> Value {
        end.usage(record, self.prediction)
    }

    /// Adds the usage so far to an event, if the client requested that.
    fn write_running_usage(&self, chunk: &mut Value) {
        let Some(RunningUsage { base: Some(base), tokens }) = &self.running else { return };
        if let Some(members) = chunk.as_object_mut() {
            members.insert("usage".to_owned(), base.to_value(*tokens, None));
        }
    }

    /// Adds the engine's time report, if the first call has ended.
    fn write_time_report(&self, answer: &mut Value) {
        if let Some(end) = &self.engine_end
            && let (Some(timings), Some(name)) = (&end.timings, self.engine.quirks().answers.time_report)
            && let Some(members) = answer.as_object_mut()
        {
            members.insert(name.to_owned(), timings.clone());
        }
    }

    /// Adds the `system_fingerprint` that this server's answers have at their end.
    fn write_fingerprint(&self, answer: &mut Value) {
        if let (Some(fingerprint), Some(members)) = (self.answer_traits.fingerprint(), answer.as_object_mut())
        {
            members.insert(FINGERPRINT.to_owned(), fingerprint);
        }
    }

    /// Names the stop in the answer's choice: in the member for it that the answer has already,
    /// else in the one that the engine has at the end only, if any.
    fn write_stop(&self, answer: &mut Value, end: &End) {
        let quirks = self.engine.quirks();
        let Some(choice) = answer.pointer_mut("/choices/0").and_then(Value::as_object_mut) else { return };
        let named = STOPS.into_iter().find(|name| choice.contains_key(*name));
        if let Some(name) = named.or(quirks.stops.field) {
            let reported = self.engine_end.as_ref().and_then(|end| end.stop.clone());
            let names = |token| if self.ignores_eos { None } else { self.answer_traits.names_end(token) };
            let stop = reported.unwrap_or_else(|| end.stop(names, quirks.stops.field_names_end));
            choice.insert(name.to_owned(), stop);
        }
    }
}
