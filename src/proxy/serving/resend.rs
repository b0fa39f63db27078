//! Resends a stream's request, without a session, after its first call had no usable answer.
//!
//! The client has received the head and no event, so the backend's answer to the client's request
//! can follow unchanged, byte by byte. It counts as passed through, with reason `fault`.

use std::sync::Arc;

use http::header::ACCEPT_ENCODING;
use http::{HeaderValue, Response};
use http_body_util::{BodyExt, Limited};
use serde_json::Value;

use super::exchange::{Shared, Unsent};
use super::failure::Failure;
use super::head;
use super::passthrough::Passthrough;
use super::session_loop::Unanswered;
use super::sink::{Gone, Sink};
use foretell_net::fleet::Answer;
use foretell_net::http::body::full;
use foretell_observe::Record;
use foretell_wire::openai::{OutputTokens, sse};

/// Maximum size of a backend's error body that is passed on within a stream, bytes.
const ERROR_BYTES: usize = 1 << 20;

/// Resends the request and streams the backend's answer to the client unchanged.
pub(super) async fn stream(unanswered: Unanswered) {
    let Unanswered { why, unsent, shared, mut slot, mut sink } = unanswered;
    slot.record.declined(why, None);
    let gone = sink.hung_up();
    let answered = async {
        let sent = send(unsent, &shared, &mut slot.record).await;
        pass_on(sent, &mut sink, &mut slot.record).await?;
        sink.trailers(slot.record.so_far()).await
    };
    let answered = tokio::select! {
        answered = answered => answered,
        () = gone => Err(Gone),
    };
    slot.record.end(answered.is_err());
}

async fn send(unsent: Unsent, shared: &Shared, record: &mut Record) -> Result<Response<Answer>, Failure> {
    let Unsent { mut head, body, replica } = unsent;
    head.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    let fleet = Arc::clone(&shared.fleet);
    let mut passthrough = Passthrough { replica, fleet, limit: None, repeatable: None };
    passthrough.send(record, head, full(body)).await
}

async fn pass_on(
    sent: Result<Response<Answer>, Failure>,
    sink: &mut Sink,
    record: &mut Record,
) -> Result<(), Gone> {
    let response = match sent {
        Ok(response) => response,
        Err(failure) => return refuse(&failure, sink, record).await,
    };
    let (stream, status) = (head::is_stream(&response), response.status());
    let mut body = response.into_body();
    if !stream {
        // The head (200) is sent already, so the backend's error goes out as an event.
        let body = Limited::new(body, ERROR_BYTES).collect().await;
        let error = body.ok().and_then(|body| serde_json::from_slice::<Value>(&body.to_bytes()).ok());
        let Some(error) = error.filter(|error| error.get("error").is_some()) else {
            return refuse(&Failure::BrokeOff, sink, record).await;
        };
        record.failed(format!("sent once more, the backend answered {status}"));
        return sink.error(&error).await;
    }
    let mut events = EventSplitter::default();
    let mut broken = false;
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            broken = true;
            break;
        };
        let Ok(data) = frame.into_data() else { continue };
        let complete = events.push(&data);
        record.counted(&events.tokens);
        if !complete.is_empty() {
            record.emitted();
            sink.raw(complete.into()).await?;
        }
    }
    if broken || !events.is_complete() { refuse(&Failure::BrokeOff, sink, record).await } else { Ok(()) }
}

/// Ends the stream by an error of Foretell.
async fn refuse(failure: &Failure, sink: &mut Sink, record: &mut Record) -> Result<(), Gone> {
    failure.record_in(record);
    sink.error(&failure.body()).await
}

/// Splits a stream at the ends of its events, so that one that breaks off ends behind an event.
struct EventSplitter {
    decoder: sse::Decoder,
    /// Some of it has been passed on.
    begun: bool,
    /// An event exceeded the limit: the bytes that follow are passed on as they come.
    unread: bool,
    tokens: OutputTokens,
}

impl Default for EventSplitter {
    fn default() -> Self {
        let decoder = sse::Decoder::storing(sse::EVENT_BYTES);
        Self { decoder, begun: false, unread: false, tokens: OutputTokens::default() }
    }
}

impl EventSplitter {
    /// Takes the next bytes and returns those of the events that they complete.
    fn push(&mut self, data: &[u8]) -> Vec<u8> {
        if self.unread {
            return data.to_vec();
        }
        let messages = self.decoder.push(data).unwrap_or_else(|sse::TooLong { .. }| {
            self.unread = true;
            Vec::new()
        });
        for message in &messages {
            self.tokens.read(message.data.as_bytes());
        }
        let mut complete: Vec<u8> = messages.into_iter().flat_map(|message| message.raw).collect();
        if self.unread || self.decoder.is_between_events() {
            complete.extend(self.decoder.unfinished());
        }
        self.begun |= !complete.is_empty();
        complete
    }

    /// True if the stream may end here: behind an event.
    fn is_complete(&self) -> bool {
        self.begun && (self.unread || self.decoder.is_between_events())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_events_are_passed_on_however_the_bytes_come() {
        let stream = b"data: {\"a\":1}\n\ndata: {\"b\":2}\r\n\r\n: comment\n\ndata: [DONE]\n\n";
        for size in 1..=stream.len() {
            let mut events = EventSplitter::default();
            let passed: Vec<u8> = stream.chunks(size).flat_map(|data| events.push(data)).collect();
            assert_eq!((passed.as_slice(), events.is_complete()), (&stream[..], true), "{size}");
        }
        for cut in 1..stream.len() - 1 {
            let mut events = EventSplitter::default();
            let passed = events.push(&stream[..cut]);
            let text = String::from_utf8(passed).unwrap();
            assert!(text.is_empty() || text.ends_with(['\n', '\r']), "{cut}: {text:?}");
            assert!(!events.is_complete() || matches!(stream[cut - 1], b'\n' | b'\r'), "{cut}");
            assert!(!text.ends_with("1}\n") && !text.ends_with("2}\r\n"), "{cut}: {text:?}");
        }
    }

    #[test]
    fn an_event_beyond_the_limit_is_passed_on_with_all_that_follows() {
        let stream =
            [b"data: a\n\ndata: ".as_slice(), &vec![b'x'; sse::EVENT_BYTES + 9], b"\n\ndata: b\n\n"].concat();
        let mut events = EventSplitter::default();
        let passed: Vec<u8> = stream.chunks(64 << 10).flat_map(|data| events.push(data)).collect();
        assert!(passed == stream && events.is_complete());
    }
}
