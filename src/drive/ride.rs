//! Reading a ride: the backend's event stream, one token event at a time.
//!
//! Only what has been handed to the session is the past. Events that have arrived but were not asked for
//! yet go down with the ride when it is cancelled, unseen.

use std::collections::VecDeque;
use std::time::Duration;

use futures_util::future::BoxFuture;
use http_body_util::BodyExt;
use hyper::{Response, header};

use serde_json::Value;

use std::sync::Arc;

use crate::dialect::{Chunk, Engine, RideKind};
use crate::drive::sink::is_usage;
use crate::fleet::{Answer, BrokenOff};
use crate::openai::sse;
use crate::session::{ActionId, Fault};

/// How long the rest of an answer whose output has ended is waited for.
const REST: Duration = Duration::from_secs(1);

/// The next event of a ride.
#[derive(Debug)]
pub enum Heard {
    /// A token event: its JSON, and what the dialect reads in it.
    Chunk(Value, Box<Chunk>),
    /// Bytes that say nothing, such as a comment.
    Nothing,
    /// The stream is complete (`[DONE]`, or its end).
    End,
    /// It broke off, or cannot be read: the fault, and the cause in words for the operator.
    Broken(Fault, String),
}

type Opening = BoxFuture<'static, Result<Response<Answer>, (Fault, String)>>;

enum State {
    Opening(Opening),
    Reading(Answer),
    /// The answer is one JSON document, which is read as one event.
    Gathering(Answer, Vec<u8>),
    Closed,
}

/// A ride under way. Dropping it closes the backend's call.
pub struct Ride {
    /// The action that it answers.
    pub id: ActionId,
    engine: Arc<Engine>,
    kind: RideKind,
    asked: u32,
    state: State,
    decoder: sse::Decoder,
    events: VecDeque<sse::Message>,
    /// Tokens held back because only the next event shows whether they end the text.
    pending: Option<(Value, Box<Chunk>)>,
    /// Tokens read so far.
    brought: usize,
    /// Tokens so far, as the engine counts them; `None` if it does not.
    count: Option<u32>,
    /// An incomplete character at the end of the output must be sent as U+FFFD.
    owed: bool,
    /// The events read since they were last taken, as they came, with their data.
    passing: Vec<(Vec<u8>, Value)>,
    /// The `x-request-id` that was sent, and the one that its events are to name instead.
    renamed: Option<(String, String)>,
    /// Its events name the id that was sent.
    ours: bool,
}

impl Ride {
    /// The first ride, whose answer has begun. `whole`: the client does not stream, so it must get the incomplete
    /// last character that the engine leaves out of streams only.
    /// `renamed`: see [`Calls::renamed`](crate::drive::calls::Calls::renamed).
    pub fn begun(
        id: ActionId,
        engine: Arc<Engine>,
        body: Answer,
        whole: bool,
        renamed: Option<(String, String)>,
    ) -> Self {
        let owed = whole && engine.drops_tail;
        let ride = Self::new(id, engine, RideKind::First, u32::MAX, State::Reading(body));
        let decoder = if whole { ride.decoder.clone() } else { sse::Decoder::keeping(sse::EVENT_BYTES) };
        Self { decoder, owed, renamed, ..ride }
    }

    /// A later ride of at most `asked` tokens, whose call is under way.
    pub fn opening(id: ActionId, engine: Arc<Engine>, asked: u32, opening: Opening) -> Self {
        Self::new(id, engine, RideKind::Later, asked, State::Opening(opening))
    }

    fn new(id: ActionId, engine: Arc<Engine>, kind: RideKind, asked: u32, state: State) -> Self {
        Self {
            id,
            engine,
            kind,
            asked,
            state,
            decoder: sse::Decoder::new(sse::EVENT_BYTES),
            events: VecDeque::new(),
            pending: None,
            brought: 0,
            count: None,
            owed: false,
            passing: Vec::new(),
            renamed: None,
            ours: false,
        }
    }

    /// Whether its answer is known by an id that no other answer of the engine has.
    pub fn is_ours(&self) -> bool {
        self.ours
    }

    /// Reads what follows the end of the output, so that the connection can be used again.
    pub fn leave(self) {
        let (State::Reading(mut body) | State::Gathering(mut body, _)) = self.state else { return };
        let rest = async move { while let Some(Ok(_)) = body.frame().await {} };
        tokio::spawn(tokio::time::timeout(REST, rest));
    }

    /// The event with the usage at the end of its stream, whose tokens are dropped unread; `None` if it ends without.
    pub async fn last_event(mut self) -> Option<Value> {
        let last = loop {
            match self.next().await {
                Heard::Chunk(event, _) if is_usage(&event) => break event,
                Heard::Chunk(..) | Heard::Nothing => {}
                Heard::End | Heard::Broken(..) => return None,
            }
        };
        self.leave();
        Some(last)
    }

    /// The events read since this was last asked: their bytes, and their data. Empty where nobody streams.
    pub fn passing(&mut self) -> Vec<(Vec<u8>, Value)> {
        std::mem::take(&mut self.passing)
    }

    /// The next event. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Heard {
        loop {
            if let Some(event) = self.events.pop_front() {
                match self.read(event) {
                    Some(heard) => return heard,
                    None => continue,
                }
            }
            match &mut self.state {
                State::Opening(opening) => match opening.await {
                    Ok(response) => self.state = reading(response),
                    Err((fault, cause)) => return self.broken(fault, cause),
                },
                State::Reading(body) => match body.frame().await {
                    Some(Ok(frame)) => {
                        let Ok(data) = frame.into_data() else { continue };
                        match self.decoder.push(&data) {
                            Ok(events) => self.events.extend(events),
                            Err(error) => return self.broken(Fault::Ride, error.to_string()),
                        }
                    }
                    Some(Err(error)) => {
                        let fault = self.fault(&error);
                        return self.broken(fault, error.cause());
                    }
                    None => return self.closed(),
                },
                State::Gathering(body, gathered) => match body.frame().await {
                    Some(Ok(frame)) => {
                        gathered.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
                        if gathered.len() > sse::EVENT_BYTES {
                            return self.broken(Fault::Ride, "the answer is too long to be read".to_owned());
                        }
                    }
                    Some(Err(error)) => {
                        let fault = self.fault(&error);
                        return self.broken(fault, error.cause());
                    }
                    None => {
                        let data = String::from_utf8_lossy(gathered).into_owned();
                        self.state = State::Closed;
                        self.events.push_back(sse::Message { data, ..sse::Message::default() });
                    }
                },
                State::Closed => return std::future::pending().await,
            }
        }
    }

    /// Interprets an event; `None` if that takes the next one.
    fn read(&mut self, mut event: sse::Message) -> Option<Heard> {
        self.rename(&mut event);
        if event.is_comment {
            self.passing.push((event.raw, Value::Null));
            return Some(Heard::Nothing);
        }
        if event.is_done() {
            self.pass(event.raw, &Value::Null);
            return Some(self.end());
        }
        let Ok(value) = serde_json::from_str::<Value>(&event.data) else {
            return Some(self.broken(Fault::Ride, "an event of the stream is not JSON".to_owned()));
        };
        self.pass(event.raw, &value);
        match self.engine.chunk(self.kind, &value) {
            Ok(chunk) => self.counted(value, Box::new(chunk)),
            Err(unreadable) => Some(self.broken(Fault::Ride, unreadable.to_string())),
        }
    }

    /// Puts the client's own id where an engine has made its answer's id of the one that was sent.
    fn rename(&mut self, event: &mut sse::Message) {
        let Some((sent, own)) = &self.renamed else { return };
        if event.data.contains(sent.as_str()) {
            self.ours = true;
            event.data = event.data.replace(sent.as_str(), own);
            event.raw = match String::from_utf8(std::mem::take(&mut event.raw)) {
                Ok(raw) => raw.replace(sent.as_str(), own).into_bytes(),
                Err(other) => other.into_bytes(),
            };
        }
    }

    fn pass(&mut self, raw: Vec<u8>, event: &Value) {
        if !raw.is_empty() {
            self.passing.push((raw, event.clone()));
        }
    }

    /// Marks an event doubtful if another number of tokens was read than the engine has counted, and holds tokens
    /// back that only the next event explains.
    fn counted(&mut self, mut event: Value, mut chunk: Box<Chunk>) -> Option<Heard> {
        self.brought += chunk.tokens.len();
        chunk.doubtful |= chunk.count.is_some_and(|count| count as usize != self.brought);
        let more = chunk.count.zip(self.count).is_some_and(|(now, before)| now > before);
        if self.owed && more && chunk.tokens.is_empty() && chunk.finish.as_deref() == Some("length") {
            chunk.text.push(char::REPLACEMENT_CHARACTER);
        }
        self.count = chunk.count.or(self.count);
        if let Some((first, held)) = self.pending.take() {
            chunk.tokens.splice(0..0, held.tokens);
            chunk.prompt = chunk.prompt.or(held.prompt);
            chunk.doubtful |= held.doubtful;
            chunk.after = Some(std::mem::replace(&mut event, first));
        }
        if chunk.pending {
            self.pending = Some((event, chunk));
            return None;
        }
        Some(Heard::Chunk(event, chunk))
    }

    /// The connection closed without a final event; some engines end an answer that way.
    fn closed(&mut self) -> Heard {
        let whole = self.kind == RideKind::Later && self.decoder.is_between_events();
        let codec = self.engine.dialect.codec();
        let finish =
            codec.closed(u32::try_from(self.brought).unwrap_or(u32::MAX), self.asked).filter(|_| whole);
        let end = self.end();
        finish.map_or(end, |finish| {
            let last = Chunk { finish: Some(finish.to_owned()), ..Chunk::default() };
            Heard::Chunk(Value::Null, Box::new(last))
        })
    }

    /// The fault of an answer that broke off. The request can go on if a new connection is known to lead to the same
    /// process.
    fn fault(&self, error: &BrokenOff) -> Fault {
        match error {
            BrokenOff::Silent(_) => Fault::Silence,
            _ if !self.engine.shows_itself() => Fault::Lost,
            BrokenOff::Closed(_) | BrokenOff::Gone(_) => Fault::Ride,
        }
    }

    fn end(&mut self) -> Heard {
        self.state = State::Closed;
        Heard::End
    }

    fn broken(&mut self, fault: Fault, cause: String) -> Heard {
        self.state = State::Closed;
        self.events.clear();
        Heard::Broken(fault, cause)
    }
}

/// Whether the answer is an event stream or one JSON document.
fn reading(response: Response<Answer>) -> State {
    let kind = response.headers().get(header::CONTENT_TYPE);
    let whole = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"));
    let body = response.into_body();
    if whole { State::Gathering(body, Vec::new()) } else { State::Reading(body) }
}
