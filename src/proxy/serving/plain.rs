//! Reads a plain call: the backend's event stream, one token event at a time.
//!
//! Only events that were handed to the session are part of the context. Events that have arrived
//! but were not read yet are dropped when the call is cancelled.

use std::collections::VecDeque;
use std::time::Duration;

use futures_util::future::BoxFuture;
use http_body_util::BodyExt;
use hyper::Response;

use serde_json::Value;

use std::sync::Arc;

use foretell_core::session::{ActionId, Fault};
use foretell_engines::{BrokenEnd, Chunk, Engine, FirstToken, RequestKind};
use foretell_net::fleet::{Answer, BrokenOff};
use foretell_net::http::headers::is_json;
use foretell_wire::openai::event::Data;
use foretell_wire::openai::{Event, sse};

/// Maximum wait for the rest of an answer whose output has ended.
const REST: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub enum PlainEvent {
    /// A token event, and what the dialect reads in it.
    Chunk(Arc<Event>, Box<Chunk>),
    /// Bytes that are no part of the answer: a comment, or an event that a gateway has added.
    Nothing,
    /// The stream is complete (`[DONE]`, or its end).
    End,
    /// It cannot be read here, although it goes on: the cause as text for the operator.
    Unreadable(String),
    /// It broke off: the fault, and the cause as text for the operator.
    Broken(Fault, String),
}

type Opening = BoxFuture<'static, Result<Response<Answer>, (Fault, String)>>;

enum StreamState {
    Opening(Opening),
    Reading(Answer),
    /// The answer is one JSON document, which is read as one event.
    Gathering(Answer, Vec<u8>),
    Closed,
}

/// An event on its way to a client that streams.
pub struct Passing {
    /// Its bytes.
    pub raw: Vec<u8>,
    pub data: Passed,
}

/// The data of an event on its way to the client.
pub enum Passed {
    /// An object.
    Event(Arc<Event>),
    /// The end of the stream.
    Done,
    /// Anything else, which is passed as it is.
    Other,
}

/// The form in which the client gets the answer.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// One JSON answer.
    pub buffered: bool,
    /// With the parts that an output parser finds.
    pub parsed: bool,
    /// Maximum bytes of one event.
    pub longest: usize,
}

/// A plain call in flight. Dropping it closes its connection.
pub struct PlainStream {
    /// The action that it answers.
    pub id: ActionId,
    engine: Arc<Engine>,
    kind: RequestKind,
    state: StreamState,
    decoder: sse::Decoder,
    events: VecDeque<sse::Message>,
    /// Tokens withheld because only the next event shows whether they end the text.
    pending: Option<(Arc<Event>, Box<Chunk>)>,
    tokens_read: usize,
    /// Tokens so far, as the engine counts them; `None` if it does not.
    count: Option<u32>,
    /// An incomplete character at the end of the output is sent as U+FFFD.
    replaces_incomplete: bool,
    /// The events read since they were last taken.
    passing: Vec<Passing>,
    /// The `x-request-id` that was sent, and the one that its events are to name instead.
    renamed: Option<(String, String)>,
    /// Its events name the id that was sent.
    has_sent_id: bool,
}

impl PlainStream {
    /// The first call, whose answer has begun. A client that does not stream must get the
    /// incomplete last character that the engine leaves out of streams only, here unless its
    /// answer is parsed. `renamed`: see
    /// [`Calls::renamed`](crate::serving::calls::Calls::renamed).
    pub fn begun(
        id: ActionId,
        engine: Arc<Engine>,
        body: Answer,
        Form { buffered, parsed, longest }: Form,
        renamed: Option<(String, String)>,
    ) -> Self {
        let replaces_incomplete =
            buffered && !parsed && engine.quirks().answers.broken_end == BrokenEnd::OmittedInStreams;
        let plain_stream = Self::new(id, engine, RequestKind::First, StreamState::Reading(body));
        let decoder = if buffered { sse::Decoder::new(longest) } else { sse::Decoder::storing(longest) };
        Self { decoder, replaces_incomplete, renamed, ..plain_stream }
    }

    /// The first token of a chat, in the events with which its stream would have begun: a client
    /// that streams gets the first of them unchanged. `renamed` as in [`Self::begun`].
    pub fn first_token(
        id: ActionId,
        engine: Arc<Engine>,
        first: &FirstToken,
        buffered: bool,
        renamed: Option<(String, String)>,
    ) -> Self {
        let message = |data: &Value| sse::Message { data: data.to_string(), ..sse::Message::default() };
        let mut role = message(&first.role);
        if !buffered {
            role.raw = sse::encode_json(&first.role);
        }
        let done = sse::Message { data: sse::DONE.to_owned(), ..sse::Message::default() };
        let events = [role, message(&first.usage), message(&first.event), done].into();
        Self { events, renamed, ..Self::new(id, engine, RequestKind::Later, StreamState::Closed) }
    }

    /// A later plain call, whose answer is still to come.
    pub fn opening(id: ActionId, engine: Arc<Engine>, opening: Opening) -> Self {
        Self::new(id, engine, RequestKind::Later, StreamState::Opening(opening))
    }

    fn new(id: ActionId, engine: Arc<Engine>, kind: RequestKind, state: StreamState) -> Self {
        Self {
            id,
            engine,
            kind,
            state,
            decoder: sse::Decoder::new(sse::EVENT_BYTES),
            events: VecDeque::new(),
            pending: None,
            tokens_read: 0,
            count: None,
            replaces_incomplete: false,
            passing: Vec::new(),
            renamed: None,
            has_sent_id: false,
        }
    }

    /// True if its answer has an id that no other answer of the engine has.
    pub fn has_sent_id(&self) -> bool {
        self.has_sent_id
    }

    /// Reads to the end of the stream, so that the connection can be reused.
    pub fn drain(self) {
        let (StreamState::Reading(mut body) | StreamState::Gathering(mut body, _)) = self.state else {
            return;
        };
        let rest = async move { while let Some(Ok(_)) = body.frame().await {} };
        tokio::spawn(tokio::time::timeout(REST, rest));
    }

    /// The event with the usage at the end of its stream, whose tokens are dropped unread; `None`
    /// if it ends without.
    pub async fn last_event(mut self) -> Option<Arc<Event>> {
        let last = loop {
            match self.next().await {
                PlainEvent::Chunk(event, _) if event.is_usage() => break event,
                PlainEvent::Chunk(..) | PlainEvent::Nothing => {}
                PlainEvent::End | PlainEvent::Unreadable(_) | PlainEvent::Broken(..) => return None,
            }
        };
        self.drain();
        Some(last)
    }

    /// The events read since the last call of this function. Empty if the client does not stream.
    pub fn passing(&mut self) -> Vec<Passing> {
        std::mem::take(&mut self.passing)
    }

    /// As [`Self::next`]; `None` once the stream is over.
    pub async fn next_unless_over(&mut self) -> Option<PlainEvent> {
        let over = self.events.is_empty() && matches!(self.state, StreamState::Closed);
        if over { None } else { Some(self.next().await) }
    }

    /// The next event. Dropping the future loses nothing.
    pub async fn next(&mut self) -> PlainEvent {
        loop {
            if let Some(event) = self.events.pop_front() {
                match self.read(event) {
                    Some(plain_event) => return plain_event,
                    None => continue,
                }
            }
            match &mut self.state {
                StreamState::Opening(opening) => match opening.await {
                    Ok(response) => self.state = reading(response),
                    Err((fault, cause)) => return self.broken(fault, cause),
                },
                StreamState::Reading(body) => match body.frame().await {
                    Some(Ok(frame)) => {
                        let Ok(data) = frame.into_data() else { continue };
                        match self.decoder.push(&data) {
                            Ok(events) => self.events.extend(events),
                            Err(error) => return self.too_long(error),
                        }
                    }
                    Some(Err(error)) => {
                        let fault = self.fault(&error);
                        return self.broken(fault, error.cause());
                    }
                    None => return self.end(),
                },
                StreamState::Gathering(body, gathered) => match body.frame().await {
                    Some(Ok(frame)) => {
                        gathered.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
                        if gathered.len() > sse::EVENT_BYTES {
                            return self.broken(Fault::Plain, "the answer is too long to be read".to_owned());
                        }
                    }
                    Some(Err(error)) => {
                        let fault = self.fault(&error);
                        return self.broken(fault, error.cause());
                    }
                    None => {
                        let data = String::from_utf8_lossy(gathered).into_owned();
                        self.state = StreamState::Closed;
                        self.events.push_back(sse::Message { data, ..sse::Message::default() });
                    }
                },
                StreamState::Closed => return std::future::pending().await,
            }
        }
    }

    /// Interprets an event; `None` if that needs the next one.
    fn read(&mut self, mut event: sse::Message) -> Option<PlainEvent> {
        self.rename(&mut event);
        if event.is_comment {
            self.pass(event.raw, Passed::Other);
            return Some(PlainEvent::Nothing);
        }
        if event.is_done() {
            self.pass(event.raw, Passed::Done);
            return Some(self.end());
        }
        match self.data_of(event.data) {
            // A document that is no answer: nothing follows it.
            Data::Foreign(_)
                if self.kind == RequestKind::Later && matches!(self.state, StreamState::Closed) =>
            {
                Some(self.broken(Fault::Plain, "the answer cannot be read".to_owned()))
            }
            Data::Foreign(foreign) => {
                let passed = foreign.map_or(Passed::Other, |event| Passed::Event(Arc::new(event)));
                self.pass(event.raw, passed);
                Some(PlainEvent::Nothing)
            }
            Data::Damaged => {
                self.pass(event.raw, Passed::Other);
                Some(self.unreadable("an event of the stream is not JSON".to_owned()))
            }
            Data::Answer(answer) => {
                let answer = Arc::new(answer);
                self.pass(event.raw, Passed::Event(Arc::clone(&answer)));
                match self.engine.chunk(self.kind, &answer) {
                    Ok(chunk) => self.counted(answer, Box::new(chunk)),
                    Err(unreadable) => Some(self.unreadable(unreadable.to_string())),
                }
            }
        }
    }

    /// The data of an event. Later calls may use an engine-specific route with another form.
    fn data_of(&self, data: String) -> Data {
        match (Data::of(data), self.kind) {
            (Data::Foreign(Some(event)), RequestKind::Later) => Data::Answer(event),
            (data, _) => data,
        }
    }

    /// Replaces the id that was sent by the client's, where the engine has derived its answer's id
    /// from it.
    fn rename(&mut self, event: &mut sse::Message) {
        let Some((sent, clients)) = &self.renamed else { return };
        if event.data.contains(sent.as_str()) {
            self.has_sent_id = true;
            event.data = event.data.replace(sent.as_str(), clients);
            event.raw = match String::from_utf8(std::mem::take(&mut event.raw)) {
                Ok(raw) => raw.replace(sent.as_str(), clients).into_bytes(),
                Err(other) => other.into_bytes(),
            };
        }
    }

    fn pass(&mut self, raw: Vec<u8>, data: Passed) {
        if !raw.is_empty() {
            self.passing.push(Passing { raw, data });
        }
    }

    /// Marks an event doubtful if the number of tokens read differs from the engine's count, and
    /// withholds tokens whose meaning depends on the next event.
    fn counted(&mut self, mut event: Arc<Event>, mut chunk: Box<Chunk>) -> Option<PlainEvent> {
        self.tokens_read += chunk.tokens.len();
        chunk.doubtful |= chunk.count.is_some_and(|count| count as usize != self.tokens_read);
        let more = chunk.count.zip(self.count).is_some_and(|(now, before)| now > before);
        if self.replaces_incomplete
            && more
            && chunk.tokens.is_empty()
            && chunk.finish.as_deref() == Some("length")
        {
            chunk.text.push(char::REPLACEMENT_CHARACTER);
        }
        self.count = chunk.count.or(self.count);
        if let Some((first, withheld)) = self.pending.take() {
            chunk.tokens.splice(0..0, withheld.tokens);
            chunk.prompt = chunk.prompt.or(withheld.prompt);
            chunk.doubtful |= withheld.doubtful;
            chunk.after = Some(std::mem::replace(&mut event, first));
        }
        if chunk.pending {
            self.pending = Some((event, chunk));
            return None;
        }
        Some(PlainEvent::Chunk(event, chunk))
    }

    /// The fault of an answer that broke off. The request can go on if a new connection is known to
    /// lead to the same process.
    fn fault(&self, error: &BrokenOff) -> Fault {
        match error {
            BrokenOff::Silent(_) => Fault::Silence,
            _ if !self.engine.shows_itself() => Fault::Lost,
            BrokenOff::Closed(_) => Fault::Plain,
        }
    }

    fn end(&mut self) -> PlainEvent {
        self.state = StreamState::Closed;
        PlainEvent::End
    }

    /// The bytes of an event beyond the limit are passed on unread; those that follow it are read.
    fn too_long(&mut self, error: sse::TooLong) -> PlainEvent {
        let begun = self.decoder.unfinished();
        self.pass(begun, Passed::Other);
        self.decoder = sse::Decoder::storing(error.limit);
        self.unreadable(error.to_string())
    }

    /// The first call goes on, and what follows can still be passed on.
    fn unreadable(&mut self, cause: String) -> PlainEvent {
        match self.kind {
            RequestKind::First => PlainEvent::Unreadable(cause),
            RequestKind::Later => self.broken(Fault::Plain, cause),
        }
    }

    fn broken(&mut self, fault: Fault, cause: String) -> PlainEvent {
        self.state = StreamState::Closed;
        self.events.clear();
        PlainEvent::Broken(fault, cause)
    }
}

/// The state for an answer, which is an event stream or one JSON document.
fn reading(response: Response<Answer>) -> StreamState {
    let buffered = is_json(response.headers());
    let body = response.into_body();
    if buffered { StreamState::Gathering(body, Vec::new()) } else { StreamState::Reading(body) }
}
