//! A tap on an answer that is passed on unchanged: it reads the text in the bytes that the client
//! gets.
//!
//! The bytes are sent first; the tap reads its copy of them while the backend has nothing more to
//! send. Its memory is bounded: an answer that is too long, not readable or content-encoded is
//! passed on unread.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap};
use http_body::{Body, Frame, SizeHint};
use serde_json::Value;

use crate::clock::Clock;
use crate::fleet::{Answer, BrokenOff};
use crate::http::headers;
use foretell_core::units::Tick;
use foretell_engines::openai::{Reading, sse};

/// Maximum bytes of an answer waiting to be read.
const BACKLOG: usize = 1 << 20;
/// Maximum bytes of text kept; the rest is only counted.
const TEXT: usize = 256 << 10;

/// Maximum number of events whose arrival time is kept.
const MARKS: usize = 16 << 10;

/// Data that a tap has read from an answer.
#[derive(Debug, Default)]
pub(super) struct TappedText {
    /// The text, at most its first [`TEXT`] bytes.
    pub text: String,
    /// Bytes of all text and reasoning.
    pub bytes: usize,
    /// Arrival time of each event with text, and the length of `text` after it.
    pub marks: Vec<(Tick, usize)>,
    /// Prompt and output tokens, as the server counted them.
    pub usage: Option<(u64, u64)>,
    /// Some output tokens were not text but, for example, reasoning.
    pub other: bool,
    /// The answer has ended.
    pub ended: bool,
    /// The output ended at its limit.
    pub cut: bool,
}

impl TappedText {
    fn read(&mut self, answer: &Value, now: Tick) {
        let reading = Reading::of(answer);
        self.usage = reading.usage.or(self.usage);
        self.other |= reading.other;
        self.cut |= reading.finish == Some("length");
        for piece in [reading.reasoning, reading.text].into_iter().filter(|piece| !piece.is_empty()) {
            self.bytes += piece.len();
            let room = TEXT.saturating_sub(self.text.len());
            self.text.push_str(piece.get(..piece.floor_char_boundary(room)).unwrap_or_default());
            // Events beyond the kept text have no position in it.
            if room > 0 && self.marks.len() < MARKS {
                self.marks.push((now, self.text.len()));
            } else if let Some(last) = self.marks.last_mut() {
                *last = (now, self.text.len());
            }
        }
    }
}

/// How an answer is read.
enum Reader {
    Events(sse::Decoder),
    Document(Vec<u8>),
    /// Not read.
    Deaf,
}

/// The reader of one answer.
pub(super) struct Tap {
    reader: Reader,
    waiting: VecDeque<(Tick, Bytes)>,
    waiting_bytes: usize,
    tapped: TappedText,
    clock: Clock,
}

impl Tap {
    /// On an answer with this head.
    pub fn new(head: &HeaderMap, clock: Clock) -> Self {
        let says = |name, wanted: &[u8]| {
            head.get(name).is_some_and(|value| value.as_bytes().to_ascii_lowercase().starts_with(wanted))
        };
        let reader = if head.contains_key(CONTENT_ENCODING) && !says(CONTENT_ENCODING, b"identity") {
            Reader::Deaf
        } else if says(CONTENT_TYPE, b"text/event-stream") {
            Reader::Events(sse::Decoder::new(sse::EVENT_BYTES))
        } else if says(CONTENT_TYPE, b"application/json") {
            Reader::Document(Vec::new())
        } else {
            Reader::Deaf
        };
        Self { reader, waiting: VecDeque::new(), waiting_bytes: 0, tapped: TappedText::default(), clock }
    }

    /// Copies bytes that are being sent.
    fn copy(&mut self, data: &Bytes) {
        if matches!(self.reader, Reader::Deaf) || data.is_empty() {
            return;
        }
        self.waiting_bytes += data.len();
        if self.waiting_bytes > BACKLOG {
            return self.give_up();
        }
        self.waiting.push_back((self.clock.now(), data.clone()));
    }

    /// Reads the bytes sent so far.
    fn read(&mut self) {
        while let Some((at, data)) = self.waiting.pop_front() {
            self.waiting_bytes -= data.len().min(self.waiting_bytes);
            match &mut self.reader {
                Reader::Events(decoder) => match decoder.push(&data) {
                    Ok(events) => events.iter().for_each(|event| self.tapped.event(event, at)),
                    Err(_) => return self.give_up(),
                },
                Reader::Document(gathered) if gathered.len() + data.len() <= sse::EVENT_BYTES => {
                    gathered.extend_from_slice(&data);
                }
                Reader::Document(_) => return self.give_up(),
                Reader::Deaf => {}
            }
        }
    }

    fn give_up(&mut self) {
        (self.reader, self.waiting, self.waiting_bytes) = (Reader::Deaf, VecDeque::new(), 0);
        self.tapped = TappedText { usage: self.tapped.usage, ..TappedText::default() };
    }

    /// Bytes that it holds.
    fn bytes(&self) -> u64 {
        let gathered = match &self.reader {
            Reader::Document(gathered) => gathered.capacity(),
            Reader::Events(_) | Reader::Deaf => 0,
        };
        let marks = self.tapped.marks.capacity() * size_of::<(Tick, usize)>();
        (self.waiting_bytes + gathered + self.tapped.text.capacity() + marks) as u64
    }

    /// The data read, once the answer is over. `whole`: it is complete.
    fn end(mut self, whole: bool) -> TappedText {
        self.read();
        let now = self.clock.now();
        if let Reader::Document(gathered) = &self.reader
            && let Ok(answer) = serde_json::from_slice::<Value>(gathered)
        {
            self.tapped.read(&answer, now);
            self.tapped.ended = whole;
        }
        self.tapped
    }
}

impl TappedText {
    fn event(&mut self, event: &sse::Message, at: Tick) {
        self.ended |= event.is_done();
        if let Ok(event) = serde_json::from_str::<Value>(&event.data) {
            self.read(&event, at);
        }
    }
}

/// Receives the progress and the end of an answer, whether it is complete, broke off or lost its
/// client.
pub(super) trait Listener: Send + Unpin + 'static {
    /// The first byte is sent.
    fn begun(&mut self);
    /// The tap holds this many bytes.
    fn holds(&mut self, bytes: u64);
    /// The answer is over.
    fn over(self, tapped: TappedText, end: Ending);
}

/// How an answer ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// It is complete.
    Whole,
    /// The backend broke it off, for this reason.
    Broken(String),
    /// The client left.
    Gone,
}

/// An answer that passes unchanged, with a tap on it.
pub(super) struct Tapped<B, L: Listener> {
    body: B,
    /// `None` once the answer is over.
    under: Option<(Tap, L)>,
    begun: bool,
    /// Bytes held by the tap, as last reported to the listener.
    told: u64,
    /// Trailers to send after the answer, for a client that accepts them.
    trailers: Option<HeaderMap>,
}

/// Minimum change of the bytes held by the tap before it is reported.
const TOLD_BY: u64 = 4096;

impl<L: Listener> Tapped<Answer, L> {
    /// Passes `body` on, and reports to `listener`.
    pub fn new(body: Answer, tap: Tap, listener: L, trailers: Option<HeaderMap>) -> Self {
        let mut tapped = Self { body, under: Some((tap, listener)), begun: false, told: 0, trailers };
        if tapped.body.is_end_stream() {
            tapped.over(Ending::Whole);
        }
        tapped
    }
}

impl<B, L: Listener> Tapped<B, L> {
    fn over(&mut self, end: Ending) {
        if let Some((tap, listener)) = self.under.take() {
            listener.over(tap.end(end == Ending::Whole), end);
        }
    }

    /// Reads the bytes sent so far, while there is nothing to pass on.
    fn idle(&mut self) {
        let Some((tap, listener)) = &mut self.under else { return };
        tap.read();
        let bytes = tap.bytes();
        if bytes.abs_diff(self.told) >= TOLD_BY {
            self.told = bytes;
            listener.holds(bytes);
        }
    }
}

impl<L: Listener> Body for Tapped<Answer, L> {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        let this = &mut *self;
        let polled = Pin::new(&mut this.body).poll_frame(context);
        if polled.is_pending() {
            this.idle();
        }
        let mut frame = ready!(polled);
        match &mut frame {
            Some(Ok(frame)) => {
                if let Some(trailers) = frame.trailers_mut() {
                    headers::strip_own(trailers);
                    trailers.extend(this.trailers.take().unwrap_or_default());
                }
                if let (Some((tap, listener)), Some(data)) = (&mut this.under, frame.data_ref()) {
                    if !std::mem::replace(&mut this.begun, true) {
                        listener.begun();
                    }
                    tap.copy(data);
                }
                if this.body.is_end_stream() {
                    this.over(Ending::Whole);
                }
            }
            Some(Err(error)) => {
                let cause = error.cause();
                this.over(Ending::Broken(cause));
            }
            None => {
                this.over(Ending::Whole);
                if let Some(trailers) = this.trailers.take() {
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream() && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<B, L: Listener> Drop for Tapped<B, L> {
    fn drop(&mut self) {
        self.over(Ending::Gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tapped(fields: &[(http::HeaderName, &str)], parts: &[&[u8]]) -> TappedText {
        let head = fields.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
        let mut tap = Tap::new(&head, Clock::start());
        for part in parts {
            tap.copy(&Bytes::copy_from_slice(part));
            tap.read();
        }
        tap.end(true)
    }

    const EVENTS: (http::HeaderName, &str) = (CONTENT_TYPE, "text/event-stream; charset=utf-8");

    #[test]
    fn the_text_of_a_stream_is_read_from_any_partition_of_its_bytes() {
        let stream = b"data: {\"choices\":[{\"text\":\"a\xC3\xA9\"}]}\n\ndata: {\"choices\":[{\"text\":\"b\",\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n";
        for size in [1, 7, stream.len()] {
            let parts: Vec<&[u8]> = stream.chunks(size).collect();
            let tapped = tapped(&[EVENTS], &parts);
            assert_eq!((tapped.text.as_str(), tapped.bytes, tapped.marks.len()), ("aéb", 4, 2));
            assert!(tapped.ended && tapped.cut && !tapped.other);
        }
    }

    #[test]
    fn a_document_is_read_at_its_end_and_an_encoded_answer_never() {
        let answer = br#"{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":3,"completion_tokens":1}}"#;
        let json = (CONTENT_TYPE, "application/json");
        let read = tapped(std::slice::from_ref(&json), &[answer]);
        assert_eq!((read.text.as_str(), read.usage, read.ended), ("hi", Some((3, 1)), true));
        let unread = tapped(&[json, (CONTENT_ENCODING, "gzip")], &[answer]);
        assert_eq!((unread.text.as_str(), unread.usage, unread.ended), ("", None, false));
    }

    #[test]
    fn backlog_and_kept_text_are_bounded() {
        let head = [(CONTENT_TYPE, "text/event-stream".parse().unwrap())].into_iter().collect();
        let mut tap = Tap::new(&head, Clock::start());
        let event = format!("data: {{\"choices\":[{{\"text\":\"{}\"}}]}}\n\n", "x".repeat(100 << 10));
        for _ in 0..5 {
            tap.copy(&Bytes::from(event.clone()));
            tap.read();
        }
        assert_eq!((tap.tapped.text.len(), tap.tapped.bytes), (TEXT, 500 << 10));
        for _ in 0..20 {
            tap.copy(&Bytes::from(event.clone()));
        }
        assert!(matches!(tap.reader, Reader::Deaf) && tap.bytes() < 1024);
    }
}
