//! Reading a ride: the backend's event stream, one token event at a time.
//!
//! Only what has been handed to the session is the past. Events that have arrived but were not asked for
//! yet go down with the ride when it is cancelled, unseen.

use std::collections::VecDeque;

use futures_util::future::BoxFuture;
use http_body_util::BodyExt;
use hyper::Response;

use serde_json::Value;

use std::sync::Arc;

use crate::dialect::{Chunk, Engine, RideKind};
use crate::fleet::Answer;
use crate::openai::sse;
use crate::session::{ActionId, Fault};

/// What a ride says next.
#[derive(Debug)]
pub enum Heard {
    /// A token event: as JSON, and read by the dialect.
    Chunk(Value, Box<Chunk>),
    /// The stream is complete (`[DONE]`, or its end).
    End,
    /// It broke off, or cannot be read.
    Broken(Fault),
}

type Opening = BoxFuture<'static, Result<Response<Answer>, Fault>>;

enum State {
    Opening(Opening),
    Reading(Answer),
    Closed,
}

/// A ride under way. Dropping it closes the backend's call.
pub struct Ride {
    /// The action that it answers.
    pub id: ActionId,
    engine: Arc<Engine>,
    kind: RideKind,
    asked: u32,
    brought: u32,
    state: State,
    decoder: sse::Decoder,
    events: VecDeque<sse::Message>,
}

impl Ride {
    /// The first ride, whose answer has begun.
    pub fn begun(id: ActionId, engine: Arc<Engine>, body: Answer) -> Self {
        Self::new(id, engine, RideKind::First, u32::MAX, State::Reading(body))
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
            brought: 0,
            state,
            decoder: sse::Decoder::new(sse::EVENT_BYTES),
            events: VecDeque::new(),
        }
    }

    /// The next thing that the ride says. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Heard {
        loop {
            if let Some(event) = self.events.pop_front() {
                return self.read(&event);
            }
            match &mut self.state {
                State::Opening(opening) => match opening.await {
                    Ok(response) => self.state = State::Reading(response.into_body()),
                    Err(fault) => return self.broken(fault),
                },
                State::Reading(body) => match body.frame().await {
                    Some(Ok(frame)) => {
                        let Ok(data) = frame.into_data() else { continue };
                        match self.decoder.push(&data) {
                            Ok(events) => self.events.extend(events),
                            Err(_) => return self.broken(Fault::Ride),
                        }
                    }
                    Some(Err(_)) => return self.broken(Fault::Ride),
                    None => return self.closed(),
                },
                State::Closed => return std::future::pending().await,
            }
        }
    }

    fn read(&mut self, event: &sse::Message) -> Heard {
        if event.is_done() {
            return self.end();
        }
        let Ok(value) = serde_json::from_str::<Value>(&event.data) else { return self.broken(Fault::Ride) };
        match self.engine.chunk(self.kind, &value) {
            Ok(chunk) => {
                self.brought = self.brought.saturating_add(chunk.tokens.len() as u32);
                Heard::Chunk(value, Box::new(chunk))
            }
            Err(_) => self.broken(Fault::Ride),
        }
    }

    /// The stream is over without a word; for some engines that is the word.
    fn closed(&mut self) -> Heard {
        let whole = self.kind == RideKind::Later && self.decoder.is_between_events();
        let codec = self.engine.dialect.codec();
        let finish = codec.closed(self.brought, self.asked).filter(|_| whole);
        let end = self.end();
        finish.map_or(end, |finish| {
            let last = Chunk { finish: Some(finish.to_owned()), ..Chunk::default() };
            Heard::Chunk(Value::Null, Box::new(last))
        })
    }

    fn end(&mut self) -> Heard {
        self.state = State::Closed;
        Heard::End
    }

    fn broken(&mut self, fault: Fault) -> Heard {
        self.state = State::Closed;
        self.events.clear();
        Heard::Broken(fault)
    }
}
