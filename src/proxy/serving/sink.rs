//! The answer to the client: an event stream or one JSON document, in the format of the backend's
//! first chunk.
//!
//! The text comes from the session alone; `id`, `created`, `model` and every other field come from
//! the backend, so that a client (and its logs) cannot distinguish where a token was computed.

mod end;
mod parts;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

pub use self::end::{End, TRAILERS, trailer_fields};
use self::parts::PartWriter;
use crate::learning::answer_traits::AnswerTraits;
use foretell_core::session::{Delta, Finish};
use foretell_engines::Engine;
use foretell_net::http::body::{Body, BoxError};
use foretell_observe::Finished;
use foretell_parsers::parse::{ParsedMessage, Parsers};
use foretell_wire::openai::answer::{Additive, STOPS, Template, fill};
use foretell_wire::openai::event::{self, finish_reason, finishes, is_usage};
use foretell_wire::openai::trim::{self, Trim};
use foretell_wire::openai::usage::Usage;
use foretell_wire::openai::{Request, Route, sse};

/// Member that identifies the server's configuration.
const FINGERPRINT: &str = "system_fingerprint";
/// Frames queued for a slow client, beyond which the backend is not read.
const BACKLOG: usize = 32;

/// Writes the output to the client.
pub struct Sink {
    route: Route,
    form: EventForm,
    trim: Trim,
    /// The final events of a stream that have been passed on from the backend.
    passed: Ends,
    /// The backend's error event.
    error: Option<Vec<u8>>,
    /// Stores the `system_fingerprint` that the server sends at the end of its answers.
    answer_traits: Arc<AnswerTraits>,
    /// Usage so far; `None` unless the client requested usage on every event.
    running: Option<RunningUsage>,
    engine: Arc<Engine>,
    /// Members that the engine sent at the end of the first call; `None` if it has not ended.
    engine_end: Option<EngineEnd>,
    /// The client sent a predicted output.
    prediction: bool,
    /// Only the client's stop tokens end the text, and the engine names all of them.
    ignores_eos: bool,
    /// How reasoning and tool calls are written; `None` in a session without an output parser.
    parts: Option<PartWriter>,
    /// Output that is not sent yet, so that the last piece can carry the finish reason.
    pending: Option<Delta>,
    /// All events come from the backend, see [`Sink::verbatim`].
    verbatim: bool,
    /// A piece of output could not be written, for want of an event to model it after.
    unwritten: bool,
    /// Time to write the last piece of output, without the wait for the client.
    took: Option<Duration>,
    shape: Shape,
}

/// The form of the events that are written here.
struct EventForm {
    /// The event that is the model of those written here: the first one with text, else the first
    /// one.
    seen: Option<Value>,
    /// Made of `seen` when the first event is written.
    template: Option<Template>,
    additive: Additive,
}

impl EventForm {
    /// Makes the template, once an event has to be written here.
    fn make_template(&mut self, route: Route) {
        if self.template.is_none()
            && let Some(seen) = &self.seen
        {
            self.template = Template::from_first_chunk(seen, route, self.additive);
        }
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
    /// See [`foretell_engines::Quirks::time_report`].
    timings: Option<Value>,
}

enum Shape {
    Stream { frames: mpsc::Sender<Result<Frame<Bytes>, BoxError>>, usage: bool, trailers: bool },
    Buffered { text: String, tokens: Vec<u32>, more: Map<String, Value>, message: Option<ParsedMessage> },
}

/// The client has disconnected.
#[derive(Debug)]
pub struct Gone;

impl Sink {
    /// An event stream: the sink, and the body to answer with.
    pub fn stream(
        request: &Request,
        engine: &Arc<Engine>,
        answer_traits: Arc<AnswerTraits>,
        trailers: bool,
    ) -> (Self, Body) {
        let (frames, out) = mpsc::channel(BACKLOG);
        let shape = Shape::Stream { frames, usage: request.include_usage, trailers };
        let body = StreamBody::new(futures_util::stream::unfold(out, |mut out| async move {
            out.recv().await.map(|frame| (frame, out))
        }));
        (Self::new(request, engine, answer_traits, shape), BodyExt::boxed_unsync(body))
    }

    /// One JSON answer, written at the end.
    pub fn buffered(request: &Request, engine: &Arc<Engine>, answer_traits: Arc<AnswerTraits>) -> Self {
        let (text, tokens, more) = (String::new(), Vec::new(), Map::new());
        let shape = Shape::Buffered { text, tokens, more, message: None };
        Self::new(request, engine, answer_traits, shape)
    }

    fn new(request: &Request, engine: &Arc<Engine>, answer_traits: Arc<AnswerTraits>, shape: Shape) -> Self {
        let quirks = engine.quirks();
        let additive = engine.additive(request);
        let runs =
            request.stream && request.continuous_usage && (request.include_usage || quirks.usage.runs_alone);
        let additive = Additive { usage: additive.usage && !runs, ..additive };
        Self {
            route: request.route,
            form: EventForm { seen: None, template: None, additive },
            trim: Trim {
                additive,
                include_usage: request.include_usage,
                usage_at_end: quirks.usage.unrequested == Some(request.route),
                at_end: quirks.time_report,
                hollow: quirks.hollow_deltas,
            },
            passed: Ends::default(),
            error: None,
            answer_traits,
            running: runs.then_some(RunningUsage { base: None, tokens: 0 }),
            engine: Arc::clone(engine),
            engine_end: None,
            prediction: request.prediction.is_some(),
            ignores_eos: request.sampling.ignore_eos,
            parts: None,
            pending: None,
            verbatim: false,
            unwritten: false,
            took: None,
            shape,
        }
    }

    /// Writes the reasoning and the tool calls of a session with an output parser too.
    pub fn write_parts(&mut self, parsers: Parsers) {
        self.parts = Some(PartWriter::new(parsers));
    }

    /// Takes the parts of a JSON answer whose output is complete; they replace all that was taken
    /// before.
    pub fn set_message(&mut self, parts: ParsedMessage) {
        if let Shape::Buffered { message, .. } = &mut self.shape {
            *message = Some(parts);
        }
    }

    /// Learns the form of the parts from those of the backend: members of a delta by name.
    pub fn read_parts(&mut self, delta: &Map<String, Value>) {
        if let Some(parts) = &mut self.parts {
            parts.read(delta);
        }
    }

    /// Resolves when the client of a stream has disconnected. The disconnect of a client that does
    /// not stream drops the future of its answer.
    pub async fn gone(&self) {
        match &self.shape {
            Shape::Stream { frames, .. } => frames.closed().await,
            Shape::Buffered { .. } => std::future::pending().await,
        }
    }

    /// As [`Sink::gone`], without borrowing the sink.
    pub fn hung_up(&self) -> impl Future<Output = ()> + Send + 'static {
        let frames = match &self.shape {
            Shape::Stream { frames, .. } => Some(frames.clone()),
            Shape::Buffered { .. } => None,
        };
        async move {
            match frames {
                Some(frames) => frames.closed().await,
                None => std::future::pending().await,
            }
        }
    }

    /// True if the client waits for one JSON answer.
    pub fn is_buffered(&self) -> bool {
        matches!(self.shape, Shape::Buffered { .. })
    }

    /// True if the client gets the usage.
    pub fn shows_usage(&self) -> bool {
        self.is_buffered() || self.sends_usage()
    }

    pub fn route(&self) -> Route {
        self.route
    }

    /// From now on all events come from the backend, until the end of the stream.
    pub fn verbatim(&mut self) {
        self.verbatim = true;
    }

    /// Passes events of the backend on, without what only Foretell requested. Members of a removed
    /// usage event that the client would otherwise have received with the finish reason are moved
    /// to that event.
    pub async fn pass(&mut self, events: Vec<(Vec<u8>, Value)>) -> Result<(), Gone> {
        self.release().await?;
        let mut moved: Vec<(&str, Value)> = Vec::new();
        for (_, event) in events.iter().filter(|(_, event)| self.trim.is_ours(event) && is_usage(event)) {
            let names = [Some(FINGERPRINT), self.engine.quirks().time_report];
            let members =
                names.into_iter().flatten().filter_map(|name| Some((name, event.get(name)?.clone())));
            moved.extend(members.filter(|(_, value)| !value.is_null()));
        }
        for (raw, event) in events {
            self.note(&event);
            let trimmed = if event.is_object() { self.trim.event(&raw, &event) } else { Some(raw) };
            let Some(mut bytes) = trimmed else { continue };
            if finishes(&event) {
                for (name, value) in moved.iter().filter(|(name, _)| event.get(*name).is_none()) {
                    bytes = trim::appended(&bytes, name, value).unwrap_or(bytes);
                }
            }
            self.send(Frame::data(bytes.into())).await?;
        }
        Ok(())
    }

    /// Notes a final event of a stream that is passed on.
    fn note(&mut self, event: &Value) {
        self.passed.done |= event == sse::DONE;
        self.passed.finish |= finishes(event);
        self.passed.usage |= is_usage(event);
        if let Some(running) = &mut self.running {
            running.base = event.get("usage").and_then(Usage::from_backend).or(running.base.take());
        }
    }

    /// Stores the error event with which the backend has ended its stream, in case the answer ends
    /// there.
    pub fn store_error(&mut self, events: Vec<(Vec<u8>, Value)>) {
        let errors = |event: &Value| event::error(event).is_some();
        self.error = events.into_iter().rev().find(|(_, event)| errors(event)).map(|(raw, _)| raw);
    }

    /// Passes bytes of an event stream on.
    pub async fn raw(&self, bytes: Bytes) -> Result<(), Gone> {
        self.send(Frame::data(bytes)).await
    }

    /// Ends a stream with an error event. No `[DONE]` follows: the text is not complete.
    pub async fn error(&self, error: &Value) -> Result<(), Gone> {
        self.event(error).await
    }

    /// Sends trailers, if the client can take them.
    pub async fn trailers(&self, record: &Finished) -> Result<(), Gone> {
        match self.shape {
            Shape::Stream { trailers: true, .. } => self.send(Frame::trailers(trailer_fields(record))).await,
            Shape::Stream { trailers: false, .. } | Shape::Buffered { .. } => Ok(()),
        }
    }

    /// Learns the shape of the answer from the backend's first events.
    pub fn first(&mut self, event: &Value) {
        self.read_end(event);
        // The event with the role has another format than those that follow; it is the model of a
        // JSON answer.
        let opens = |event: &Value| event.pointer("/choices/0/delta/role").is_some();
        let better = match &self.form.seen {
            None => true,
            Some(seen) => !self.is_buffered() && opens(seen) && !opens(event),
        };
        if better && event.pointer("/choices/0").is_some_and(Value::is_object) {
            self.form.seen = Some(event.clone());
        }
    }

    /// Stores the stop and the time report of the engine's last events.
    pub fn read_end(&mut self, event: &Value) {
        if let Some(choice) = event.pointer("/choices/0")
            && let Some(reason) = finish_reason(choice)
        {
            let stop = STOPS.into_iter().find_map(|name| choice.get(name)).cloned();
            self.engine_end = Some(EngineEnd { reason: reason.to_owned(), stop, timings: None });
        }
        if let Some(fingerprint) = event.get(FINGERPRINT) {
            self.answer_traits.note_fingerprint(fingerprint);
        }
        let timings = self.engine.quirks().time_report.and_then(|name| event.get(name));
        if let (Some(end), Some(timings)) = (&mut self.engine_end, timings) {
            end.timings = Some(timings.clone());
        }
    }

    /// Adds the engine's time report, if the first call has ended.
    fn write_time_report(&self, answer: &mut Value) {
        if let Some(end) = &self.engine_end
            && let (Some(timings), Some(name)) = (&end.timings, self.engine.quirks().time_report)
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

    /// Takes a piece of output; it is sent by the next call of [`Sink::release`] or with the end.
    pub async fn emit(&mut self, piece: Delta) -> Result<(), Gone> {
        self.release().await?;
        self.pending = Some(piece);
        Ok(())
    }

    /// Takes members of a chat's delta other than text for a JSON answer: pieces of strings and of
    /// lists are concatenated.
    pub fn other(&mut self, delta: &Map<String, Value>) {
        let Shape::Buffered { more, .. } = &mut self.shape else { return };
        for (name, piece) in delta {
            match (more.get_mut(name), piece) {
                (Some(Value::String(text)), Value::String(piece)) => text.push_str(piece),
                (Some(Value::Array(pieces)), Value::Array(piece)) => pieces.extend_from_slice(piece),
                _ => {
                    more.insert(name.clone(), piece.clone());
                }
            }
        }
    }

    /// Takes a piece of output that a streaming client has received in the backend's event.
    pub async fn passed(&mut self, piece: Delta) -> Result<(), Gone> {
        if self.is_buffered() {
            return self.emit(piece).await;
        }
        self.counted(&piece);
        Ok(())
    }

    fn counted(&mut self, delta: &Delta) {
        if let Some(running) = &mut self.running {
            running.tokens += delta.tokens.len() as u64;
        }
    }

    /// Adds the usage so far to an event, if the client requested that.
    fn write_running_usage(&self, chunk: &mut Value) {
        let Some(RunningUsage { base: Some(base), tokens }) = &self.running else { return };
        if let Some(members) = chunk.as_object_mut() {
            members.insert("usage".to_owned(), base.to_value(*tokens, None));
        }
    }

    /// Sends the piece that [`Sink::emit`] took.
    pub async fn release(&mut self) -> Result<(), Gone> {
        match self.pending.take() {
            Some(piece) => self.write(piece).await,
            None => Ok(()),
        }
    }

    async fn write(&mut self, delta: Delta) -> Result<(), Gone> {
        if let Shape::Buffered { text, tokens, .. } = &mut self.shape {
            text.push_str(&delta.parsed.text);
            tokens.extend(delta.tokens);
            return Ok(());
        }
        let begun = Instant::now();
        self.form.make_template(self.route);
        self.counted(&delta);
        let Some(mut chunk) = self.chunk(&delta, None) else {
            self.unwritten |= self.form.template.is_none() && !delta.parsed.is_empty();
            return Ok(());
        };
        self.write_running_usage(&mut chunk);
        let bytes = sse::encode_json(&chunk);
        self.took = Some(begun.elapsed());
        self.send(Frame::data(bytes.into())).await
    }

    /// The event for a piece of output; `None` before the first event of the backend, and for a
    /// piece of which a parser leaves nothing to show.
    fn chunk(&self, delta: &Delta, finish: Option<Finish>) -> Option<Value> {
        let template = self.form.template.as_ref()?;
        let Some(parts) = &self.parts else {
            return Some(template.chunk(&delta.parsed.text, &delta.tokens, finish));
        };
        let shows = finish.is_some() || template.shows_token_ids() || !delta.parsed.is_empty();
        shows.then(|| template.delta(parts.delta(&delta.parsed), &delta.tokens, finish))
    }

    /// Time to write the last piece of output, without the wait for the client; `None` if it was
    /// returned before.
    pub fn took(&mut self) -> Option<Duration> {
        self.took.take()
    }

    /// Ends the output. Returns the bytes of a buffered answer; a stream ends with usage, `[DONE]`
    /// and trailers, each if it was requested.
    pub async fn finish(mut self, end: &End, record: &Finished) -> Result<Option<Vec<u8>>, Gone> {
        let last = self.pending.take().unwrap_or_default();
        self.form.make_template(self.route);
        if self.is_buffered() {
            self.write(last).await?;
            return Ok(self.buffered_answer(end, record).and_then(|answer| serde_json::to_vec(&answer).ok()));
        }
        let passed = self.passed;
        if !self.verbatim && !passed.finish {
            self.finish_text(last, end, record).await?;
        }
        if self.unwritten || !end.is_complete() {
            match self.error.take() {
                Some(error) => self.send(Frame::data(error.into())).await?,
                None => self.event(&end.broken.body()).await?,
            }
        } else if !self.verbatim {
            if !passed.usage {
                self.finish_usage(end, record).await?;
            }
            if !passed.done {
                self.send(Frame::data(sse::encode_done().into())).await?;
            }
        }
        self.trailers(record).await?;
        Ok(None)
    }

    /// The event that ends the text of a stream.
    async fn finish_text(&mut self, mut last: Delta, end: &End, record: &Finished) -> Result<(), Gone> {
        let bare = self.engine.quirks().bare_end && self.route == Route::Chat;
        if bare && !last.parsed.text.is_empty() {
            self.write(std::mem::take(&mut last)).await?;
        }
        self.counted(&last);
        let Some(mut chunk) = self.chunk(&last, end.finish) else { return self.write(last).await };
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
        self.event(&chunk).await
    }

    /// Sends the event with the usage of a stream, if the client requested it.
    async fn finish_usage(&self, end: &End, record: &Finished) -> Result<(), Gone> {
        let Some(template) = &self.form.template else { return Ok(()) };
        if !self.sends_usage() {
            return Ok(());
        }
        let bare = self.engine.quirks().usage.bare.contains(&self.route);
        let mut chunk = template.usage_chunk(end::shown(self.usage(end, record), bare));
        self.write_time_report(&mut chunk);
        self.write_fingerprint(&mut chunk);
        self.event(&chunk).await
    }

    fn sends_usage(&self) -> bool {
        self.engine.quirks().usage.no_event != Some(self.route) && self.usage_requested()
    }

    /// True if the client requested the usage of its stream.
    fn usage_requested(&self) -> bool {
        matches!(self.shape, Shape::Stream { usage: true, .. })
    }

    fn usage(&self, end: &End, record: &Finished) -> Value {
        end.usage(record, self.prediction)
    }

    fn buffered_answer(&mut self, end: &End, record: &Finished) -> Option<Value> {
        let Shape::Buffered { text, tokens, more, message } = &self.shape else { return None };
        let template = self.form.template.as_ref()?;
        let mut answer = template.unstreamed(text, tokens, end.finish, self.usage(end, record));
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

    async fn event(&self, value: &Value) -> Result<(), Gone> {
        self.send(Frame::data(sse::encode_json(value).into())).await
    }

    async fn send(&self, frame: Frame<Bytes>) -> Result<(), Gone> {
        match &self.shape {
            Shape::Stream { frames, .. } => frames.send(Ok(frame)).await.map_err(|_| Gone),
            Shape::Buffered { .. } => Ok(()),
        }
    }
}
