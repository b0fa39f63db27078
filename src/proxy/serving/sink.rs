//! The answer to the client: an event stream or one JSON document.
//!
//! The text comes from the session alone, and [`Writer`] writes it in the form of the backend's
//! events; while the backend's stream is the client's, its events are passed on as they came.

mod end;
mod parts;
mod writer;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use serde_json::{Map, Value};
use tokio::sync::mpsc;

pub use self::end::{End, TRAILERS, trailer_fields};
use self::writer::{Document, Writer};
use super::plain::{Passed, Passing};
use crate::learning::answer_traits::AnswerTraits;
use foretell_core::session::Delta;
use foretell_engines::Engine;
use foretell_net::http::body::{Body, BoxError};
use foretell_observe::Finished;
use foretell_parsers::parse::{ParsedMessage, Parsers};
use foretell_wire::openai::{Event, Request, Route, sse};

/// Frames queued for a slow client, beyond which the backend is not read.
const BACKLOG: usize = 32;

/// Sends the output to the client.
pub struct Sink {
    writer: Writer,
    /// The backend's error event.
    error: Option<Vec<u8>>,
    /// Output that is not sent yet, so that the last piece can carry the finish reason.
    pending: Option<Delta>,
    /// All events come from the backend, see [`Sink::verbatim`].
    verbatim: bool,
    /// Time to write the last piece of output, without the wait for the client.
    took: Option<Duration>,
    shape: Shape,
}

enum Shape {
    Stream { frames: mpsc::Sender<Result<Frame<Bytes>, BoxError>>, trailers: bool },
    Buffered(Document),
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
        let body = StreamBody::new(futures_util::stream::unfold(out, |mut out| async move {
            out.recv().await.map(|frame| (frame, out))
        }));
        let writer = Writer::new(request, engine, answer_traits);
        (Self::new(writer, Shape::Stream { frames, trailers }), BodyExt::boxed_unsync(body))
    }

    /// One JSON answer, written at the end.
    pub fn buffered(request: &Request, engine: &Arc<Engine>, answer_traits: Arc<AnswerTraits>) -> Self {
        Self::new(Writer::new(request, engine, answer_traits), Shape::Buffered(Document::default()))
    }

    fn new(writer: Writer, shape: Shape) -> Self {
        Self { writer, error: None, pending: None, verbatim: false, took: None, shape }
    }

    /// Writes the reasoning and the tool calls of a session with an output parser too.
    pub fn write_parts(&mut self, parsers: Parsers) {
        self.writer.write_parts(parsers);
    }

    /// Takes the parts of a JSON answer whose output is complete; they replace all that was taken
    /// before.
    pub fn set_message(&mut self, parts: ParsedMessage) {
        if let Shape::Buffered(document) = &mut self.shape {
            document.message = Some(parts);
        }
    }

    /// Resolves when the client of a stream has disconnected. The disconnect of a client that does
    /// not stream drops the future of its answer.
    pub async fn gone(&self) {
        match &self.shape {
            Shape::Stream { frames, .. } => frames.closed().await,
            Shape::Buffered(_) => std::future::pending().await,
        }
    }

    /// As [`Sink::gone`], without borrowing the sink.
    pub fn hung_up(&self) -> impl Future<Output = ()> + Send + 'static {
        let frames = match &self.shape {
            Shape::Stream { frames, .. } => Some(frames.clone()),
            Shape::Buffered(_) => None,
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
        matches!(self.shape, Shape::Buffered(_))
    }

    /// True if the client gets the usage.
    pub fn shows_usage(&self) -> bool {
        self.is_buffered() || self.writer.sends_usage()
    }

    pub fn route(&self) -> Route {
        self.writer.route()
    }

    /// From now on all events come from the backend, until the end of the stream.
    pub fn verbatim(&mut self) {
        self.verbatim = true;
    }

    /// Passes events of the backend on, without what only Foretell requested.
    pub async fn pass(&mut self, events: Vec<Passing>) -> Result<(), Gone> {
        self.release().await?;
        let bytes = self.writer.pass(events);
        self.send_bytes(bytes).await
    }

    /// Stores the error event with which the backend has ended its stream, in case the answer ends
    /// there.
    pub fn store_error(&mut self, events: Vec<Passing>) {
        let is_error = |data: &Passed| matches!(data, Passed::Event(event) if event.error().is_some());
        self.error = events.into_iter().rev().find(|event| is_error(&event.data)).map(|event| event.raw);
    }

    /// Passes bytes of an event stream on.
    pub async fn raw(&self, bytes: Bytes) -> Result<(), Gone> {
        self.send(Frame::data(bytes)).await
    }

    /// Ends a stream with an error event. No `[DONE]` follows: the text is not complete.
    pub async fn error(&self, error: &Value) -> Result<(), Gone> {
        self.send_bytes(sse::encode_json(error)).await
    }

    /// Sends trailers, if the client can take them.
    pub async fn trailers(&self, record: &Finished) -> Result<(), Gone> {
        match self.shape {
            Shape::Stream { trailers: true, .. } => self.send(Frame::trailers(trailer_fields(record))).await,
            Shape::Stream { trailers: false, .. } | Shape::Buffered(_) => Ok(()),
        }
    }

    /// Learns the form of the answer from an event of the backend's first call.
    pub fn first(&mut self, event: &Arc<Event>) {
        self.writer.learn(event);
    }

    /// Learns what the engine reports at the end of its output, if this is one of its last events.
    pub fn read_end(&mut self, event: &Event) {
        self.writer.read_end(event);
    }

    /// Takes a piece of output; it is sent by the next call of [`Sink::release`] or with the end.
    pub async fn emit(&mut self, piece: Delta) -> Result<(), Gone> {
        self.release().await?;
        self.pending = Some(piece);
        Ok(())
    }

    /// Takes members of a chat's delta other than text: those of a JSON answer, and the form of all
    /// that follow.
    pub fn other(&mut self, delta: &Map<String, Value>) {
        self.writer.read_parts(delta);
        if let Shape::Buffered(document) = &mut self.shape {
            document.join(delta);
        }
    }

    /// Takes a piece of output that a streaming client has received in the backend's event.
    pub async fn passed(&mut self, piece: Delta) -> Result<(), Gone> {
        if self.is_buffered() {
            return self.emit(piece).await;
        }
        self.writer.count(&piece);
        Ok(())
    }

    /// Sends the piece that [`Sink::emit`] took.
    pub async fn release(&mut self) -> Result<(), Gone> {
        let Some(piece) = self.pending.take() else { return Ok(()) };
        if let Shape::Buffered(document) = &mut self.shape {
            document.take(piece);
            return Ok(());
        }
        let begun = Instant::now();
        let Some(event) = self.writer.piece(&piece) else { return Ok(()) };
        self.took = Some(begun.elapsed());
        self.send_bytes(event).await
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
        if let Shape::Buffered(document) = &mut self.shape {
            document.take(last);
            let answer = self.writer.document(document, end, record);
            return Ok(answer.and_then(|answer| serde_json::to_vec(&answer).ok()));
        }
        let mut events = if self.verbatim { Vec::new() } else { self.writer.end_text(last, end, record) };
        if self.writer.has_lost() || !end.is_complete() {
            let error = self.error.take();
            events.extend(error.unwrap_or_else(|| sse::encode_json(&end.broken.body())));
        } else if !self.verbatim {
            events.extend(self.writer.end(end, record));
        }
        self.send_bytes(events).await?;
        self.trailers(record).await?;
        Ok(None)
    }

    /// Sends events, if there are any.
    async fn send_bytes(&self, events: Vec<u8>) -> Result<(), Gone> {
        if events.is_empty() { Ok(()) } else { self.send(Frame::data(events.into())).await }
    }

    async fn send(&self, frame: Frame<Bytes>) -> Result<(), Gone> {
        match &self.shape {
            Shape::Stream { frames, .. } => frames.send(Ok(frame)).await.map_err(|_| Gone),
            Shape::Buffered(_) => Ok(()),
        }
    }
}
