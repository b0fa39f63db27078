//! A tap on an answer that is passed on unchanged: it reads the text, or counts the tokens, in the
//! bytes that the client gets.
//!
//! The bytes are sent first; the tap reads its copy of them while the backend has nothing more to
//! send. Its memory is bounded: of an answer that is too long, not readable or content-encoded only
//! the size is known.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::HeaderMap;
use http_body::{Body, Frame, SizeHint};

use foretell_core::units::Tick;
use foretell_net::clock::Clock;
use foretell_net::fleet::{Answer, BrokenOff};
use foretell_net::http::headers;
use foretell_wire::openai::parts::REASONING;
use foretell_wire::openai::{Event, OutputTokens, UsageText, sse};

/// Maximum bytes of an answer waiting to be read.
const BACKLOG: usize = 1 << 20;
/// Maximum bytes of text that are stored; the rest is only counted.
const TEXT: usize = 256 << 10;

/// Maximum number of events whose arrival time is stored.
const MARKS: usize = 16 << 10;

/// Data that a tap collects from an answer.
pub trait Content: Default + Send + Unpin + 'static {
    /// An answer that comes faster than it is read is read before it is passed on. Otherwise the
    /// rest of it is not read.
    const READS_ALL: bool;

    /// Takes an event of a stream, which arrived at `at`.
    fn event(&mut self, event: &sse::Message, at: Tick);
    /// Takes a JSON answer as far as it came.
    fn document(&mut self, json: &[u8], complete: bool, at: Tick);
    /// Notes bytes that are not read, of an answer of this form.
    fn unread(&mut self, bytes: usize, form: Form);
    /// The answer is not read to its end.
    fn given_up(&mut self);
    /// Bytes of memory that it uses.
    fn memory_used(&self) -> usize;
}

/// Text that a tap has read from an answer.
#[derive(Debug, Default)]
pub(super) struct TappedText {
    /// The text, at most its first [`TEXT`] bytes.
    pub text: String,
    pub bytes: usize,
    /// Arrival time of each event with text, and the length of `text` after it.
    pub marks: Vec<(Tick, usize)>,
    /// Prompt and output tokens, as the server counted them.
    pub usage: Option<(u64, u64)>,
    /// Some output tokens were not text but, for example, reasoning.
    pub other: bool,
    pub ended: bool,
    /// The output ended at its limit.
    pub cut: bool,
}

impl TappedText {
    fn read(&mut self, answer: &Event, now: Tick) {
        let usage = answer.usage().map(UsageText::of);
        let counts = usage.and_then(|usage| Some((usage.prompt_tokens()?, usage.completion_tokens()?)));
        self.usage = counts.or(self.usage);
        self.other |= answer.others().any(|(_, text)| !matches!(text, "[]" | "\"\""));
        self.cut |= answer.finish().as_deref() == Some("length");
        let delta = answer.delta();
        let reasoning = REASONING.into_iter().find_map(|name| delta?.read::<String>(name));
        for piece in [reasoning.unwrap_or_default(), answer.text()] {
            if piece.is_empty() {
                continue;
            }
            self.bytes += piece.len();
            let room = TEXT.saturating_sub(self.text.len());
            self.text.push_str(piece.get(..piece.floor_char_boundary(room)).unwrap_or_default());
            // Events beyond the stored text have no position in it.
            if room > 0 && self.marks.len() < MARKS {
                self.marks.push((now, self.text.len()));
            } else if let Some(last) = self.marks.last_mut() {
                *last = (now, self.text.len());
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Stream,
    Document,
    Other,
}

impl Form {
    /// The form of an answer with this head, and true if it is compressed.
    fn of(head: &HeaderMap) -> (Self, bool) {
        let form = if headers::is_event_stream(head) {
            Self::Stream
        } else if headers::is_json(head) {
            Self::Document
        } else {
            Self::Other
        };
        (form, headers::is_encoded(head))
    }
}

/// How an answer is read.
enum Reader {
    Events(sse::Decoder),
    Document(Vec<u8>),
    Unread(Form),
}

pub struct Tap<C> {
    reader: Reader,
    waiting: VecDeque<(Tick, Bytes)>,
    waiting_bytes: usize,
    tapped: C,
    clock: Clock,
}

impl<C: Content> Tap<C> {
    pub fn new(head: &HeaderMap, clock: Clock) -> Self {
        let reader = match Form::of(head) {
            (Form::Stream, false) => Reader::Events(sse::Decoder::new(sse::EVENT_BYTES)),
            (Form::Document, false) => Reader::Document(Vec::new()),
            (form, _) => Reader::Unread(form),
        };
        Self { reader, waiting: VecDeque::new(), waiting_bytes: 0, tapped: C::default(), clock }
    }

    /// Copies bytes that are being sent.
    fn copy(&mut self, data: &Bytes) {
        if data.is_empty() {
            return;
        }
        if let Reader::Unread(form) = self.reader {
            return self.tapped.unread(data.len(), form);
        }
        self.waiting_bytes += data.len();
        self.waiting.push_back((self.clock.now(), data.clone()));
        if self.waiting_bytes > BACKLOG {
            if C::READS_ALL { self.read() } else { self.give_up() }
        }
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
                Reader::Document(gathered) => {
                    gathered.extend_from_slice(&data);
                    return self.give_up();
                }
                Reader::Unread(_) => {}
            }
        }
    }

    /// Stops reading. An event that is too long may contain anything, so it counts as one piece of
    /// output.
    fn give_up(&mut self) {
        self.tapped.given_up();
        let (gathered, form) = match &self.reader {
            Reader::Document(gathered) => (gathered.len(), Form::Document),
            Reader::Events(_) => (0, Form::Stream),
            Reader::Unread(form) => (0, *form),
        };
        self.tapped.unread(gathered + self.waiting_bytes, form);
        self.reader = Reader::Unread(form);
        self.waiting = VecDeque::new();
        self.waiting_bytes = 0;
    }

    fn bytes(&self) -> u64 {
        let gathered = match &self.reader {
            Reader::Document(gathered) => gathered.capacity(),
            Reader::Events(_) | Reader::Unread(_) => 0,
        };
        (self.waiting_bytes + gathered + self.tapped.memory_used()) as u64
    }

    /// The data read, once the answer is over.
    fn end(mut self, complete: bool) -> C {
        self.read();
        let now = self.clock.now();
        if let Reader::Document(gathered) = &self.reader {
            self.tapped.document(gathered, complete, now);
        }
        self.tapped
    }
}

impl Content for TappedText {
    const READS_ALL: bool = false;

    fn event(&mut self, event: &sse::Message, at: Tick) {
        self.ended |= event.is_done();
        if let Some(event) = Event::of(event.data.clone()) {
            self.read(&event, at);
        }
    }

    fn document(&mut self, json: &[u8], complete: bool, at: Tick) {
        if let Some(answer) = String::from_utf8(json.to_vec()).ok().and_then(Event::of) {
            self.read(&answer, at);
            self.ended = complete;
        }
    }

    fn unread(&mut self, _: usize, _: Form) {}

    fn given_up(&mut self) {
        *self = Self { usage: self.usage, ..Self::default() };
    }

    fn memory_used(&self) -> usize {
        self.text.capacity() + self.marks.capacity() * size_of::<(Tick, usize)>()
    }
}

impl Content for OutputTokens {
    const READS_ALL: bool = true;

    fn event(&mut self, event: &sse::Message, _: Tick) {
        self.read(event.data.as_bytes());
    }

    fn document(&mut self, json: &[u8], _: bool, _: Tick) {
        self.read(json);
    }

    fn unread(&mut self, bytes: usize, form: Form) {
        match form {
            Form::Stream => self.skip_event(),
            Form::Document => self.skip_bytes(bytes),
            Form::Other => {}
        }
    }

    fn given_up(&mut self) {}

    fn memory_used(&self) -> usize {
        0
    }
}

/// Receives the progress and the end of an answer, whether it is complete, broke off or lost its
/// client.
pub trait Listener: Send + Unpin + 'static {
    /// Data of the answer that it receives in the end.
    type Content: Content;

    /// The first byte is sent.
    fn begun(&mut self);
    /// The tap uses this much memory, bytes.
    fn memory_used(&mut self, bytes: u64);
    fn over(self, tapped: Self::Content, end: Ending);
}

/// How an answer ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Ending {
    Complete,
    /// The backend broke it off, for this reason.
    Broken(String),
    /// The client disconnected.
    Gone,
}

/// An answer that passes unchanged, with a tap on it.
pub struct Tapped<B, L: Listener> {
    body: B,
    /// `None` once the answer is over.
    tap: Option<(Tap<L::Content>, L)>,
    begun: bool,
    /// Memory of the tap as last reported to the listener, bytes.
    reported: u64,
    /// Trailers to send after the answer, for a client that accepts them.
    trailers: Option<HeaderMap>,
}

/// Minimum change of the tap's memory before it is reported, bytes.
const REPORT_STEP: u64 = 4096;

impl<L: Listener> Tapped<Answer, L> {
    /// Passes `body` on, and reports to `listener`.
    pub fn new(body: Answer, tap: Tap<L::Content>, listener: L, trailers: Option<HeaderMap>) -> Self {
        let mut tapped = Self { body, tap: Some((tap, listener)), begun: false, reported: 0, trailers };
        if tapped.body.is_end_stream() {
            tapped.over(Ending::Complete);
        }
        tapped
    }
}

impl<B, L: Listener> Tapped<B, L> {
    fn over(&mut self, end: Ending) {
        if let Some((tap, listener)) = self.tap.take() {
            listener.over(tap.end(end == Ending::Complete), end);
        }
    }

    /// Reads the bytes sent so far, while there is nothing to pass on.
    fn idle(&mut self) {
        let Some((tap, listener)) = &mut self.tap else { return };
        tap.read();
        let bytes = tap.bytes();
        if bytes.abs_diff(self.reported) >= REPORT_STEP {
            self.reported = bytes;
            listener.memory_used(bytes);
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
                    headers::strip_foretell(trailers);
                    trailers.extend(this.trailers.take().unwrap_or_default());
                }
                if let (Some((tap, listener)), Some(data)) = (&mut this.tap, frame.data_ref()) {
                    if !std::mem::replace(&mut this.begun, true) {
                        listener.begun();
                    }
                    tap.copy(data);
                }
                if this.body.is_end_stream() {
                    this.over(Ending::Complete);
                }
            }
            Some(Err(error)) => {
                let cause = error.cause();
                this.over(Ending::Broken(cause));
            }
            None => {
                this.over(Ending::Complete);
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
    use http::header::{CONTENT_ENCODING, CONTENT_TYPE};

    use super::*;

    fn tapped(fields: &[(http::HeaderName, &str)], parts: &[&[u8]]) -> TappedText {
        let head = fields.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
        let mut tap = Tap::<TappedText>::new(&head, Clock::start());
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
    fn content_other_than_text_is_recognised() {
        let read = |delta: &str| {
            let event = format!("data: {{\"choices\":[{{\"delta\":{delta}}}]}}\n\n");
            let read = tapped(&[EVENTS], &[event.as_bytes()]);
            (read.text, read.other)
        };
        assert_eq!(read(r#"{"reasoning":"hm","content":null}"#), ("hm".to_owned(), true));
        let nothing = r#"{"role":"assistant","content":"a","tool_calls":[],"reasoning":null,"refusal":""}"#;
        assert_eq!(read(nothing), ("a".to_owned(), false));
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
        let mut tap = Tap::<TappedText>::new(&head, Clock::start());
        let event = format!("data: {{\"choices\":[{{\"text\":\"{}\"}}]}}\n\n", "x".repeat(100 << 10));
        for _ in 0..5 {
            tap.copy(&Bytes::from(event.clone()));
            tap.read();
        }
        assert_eq!((tap.tapped.text.len(), tap.tapped.bytes), (TEXT, 500 << 10));
        for _ in 0..20 {
            tap.copy(&Bytes::from(event.clone()));
        }
        assert!(matches!(tap.reader, Reader::Unread(_)) && tap.bytes() < 1024);
    }

    fn counted(fields: &[(http::HeaderName, &str)], part: &[u8], times: usize) -> (u64, u64) {
        let head = fields.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
        let mut tap = Tap::<OutputTokens>::new(&head, Clock::start());
        let part = Bytes::copy_from_slice(part);
        (0..times).for_each(|_| tap.copy(&part));
        let held = tap.bytes();
        (tap.end(true).count(), held)
    }

    #[test]
    fn tokens_are_counted_in_bounded_memory_however_fast_they_come() {
        let event =
            format!("data: {{\"choices\":[{{\"text\":\"x\"}}],\"more\":\"{}\"}}\n\n", "y".repeat(32 << 10));
        let (tokens, held) = counted(&[EVENTS], event.as_bytes(), 100);
        assert_eq!(tokens, 100);
        assert!(held <= BACKLOG as u64);
    }

    #[test]
    fn tokens_of_answers_that_cannot_be_read_are_estimated() {
        let json = (CONTENT_TYPE, "application/json");
        let zipped = (CONTENT_ENCODING, "gzip");
        assert_eq!(
            counted(&[json.clone(), zipped.clone()], &[0x1f; 40], 2),
            (20, 0),
            "a quarter of the bytes"
        );
        assert_eq!(counted(&[EVENTS, zipped], &[0x1f; 40], 2), (2, 0), "the pieces of a stream");
        let (tokens, held) = counted(&[json], &vec![b'x'; 1 << 20], 4);
        assert_eq!((tokens, held), (4 << 18, 0), "too long to be kept");
        assert_eq!(counted(&[(CONTENT_TYPE, "text/plain")], b"hello", 2), (0, 0), "no form of an answer");
    }
}
