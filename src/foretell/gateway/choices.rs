//! Requests for several choices, whose choices are asked for one by one: each is served as a
//! request for one, and the client gets one answer.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, TE, TRAILER};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt;
use serde_json::Value;

use super::translate::whole;
use crate::fleet::Replica;
use crate::http::answer::error_body;
use crate::http::body::{Body, BoxError, full};
use crate::http::headers::{self, REQUEST_ID};
use crate::http::memory::Memory;
use foretell_engines::openai::choices::{Merged, merge};
use foretell_engines::openai::parsed_bytes;
use foretell_engines::openai::sse::{Decoder, TooLong};

/// Extension of a request for one choice: the replica that serves them all, which computes their
/// prompt once.
#[derive(Clone, Debug)]
pub(super) struct ServedBy(pub Arc<Replica>);

/// Makes the head of a request for several choices that of a request for the choice at `place`.
pub(super) fn fit(headers: &mut HeaderMap, place: usize) {
    for name in [CONTENT_LENGTH, TE] {
        headers.remove(name);
    }
    // The answer has to be read.
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    let id = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).filter(|_| place > 0);
    // Engines name their work by it, and refuse a name that is in use.
    if let Some(id) = id.and_then(|id| HeaderValue::try_from(format!("{id}-{place}")).ok()) {
        headers.insert(REQUEST_ID, id);
    }
}

/// The answer of these, each with one choice; an error of any is the whole answer.
pub(super) async fn merged(answers: Vec<Response<Body>>, memory: &Arc<Memory>) -> Response<Body> {
    let mut answers = answers;
    if let Some(failed) = answers.iter().position(|answer| !answer.status().is_success()) {
        return answers.swap_remove(failed);
    }
    let encoded = answers
        .iter()
        .any(|answer| answer.headers().get(CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity"));
    let streamed = answers.iter().all(|answer| headers::is_event_stream(answer.headers()));
    let mut heads = Vec::new();
    let mut bodies = Vec::new();
    for (head, body) in answers.into_iter().map(Response::into_parts) {
        heads.push(head);
        bodies.push(body);
    }
    let Some(mut head) = heads.into_iter().next() else { return unreadable() };
    for name in [CONTENT_LENGTH, TRAILER] {
        head.headers.remove(name);
    }
    if encoded {
        return unreadable();
    }
    if streamed {
        return Response::from_parts(head, Choices::new(bodies).boxed_unsync());
    }
    let (mut read, mut taken) = (Vec::new(), memory.take(0));
    let mut bytes = 0;
    for body in bodies {
        let Some(answer) = whole(body, &mut memory.take(0)).await else { return unreadable() };
        bytes += answer.len() + parsed_bytes(&answer);
        taken.follow(bytes as u64);
        let Ok(answer) = serde_json::from_slice::<Value>(&answer) else { return unreadable() };
        read.push(answer);
    }
    merge(read).map_or_else(unreadable, |one| Response::from_parts(head, full(one.to_string())))
}

fn unreadable() -> Response<Body> {
    let words = "the backend's answer to a choice is no completion, or is compressed";
    let error = error_body(StatusCode::BAD_GATEWAY, words, None, "backend_answer");
    let mut response = Response::new(full(error.to_string()));
    *response.status_mut() = StatusCode::BAD_GATEWAY;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The streams of all choices, read as one.
struct Choices {
    /// `None` once it has ended.
    streams: Vec<Option<(Body, Decoder)>>,
    merged: Merged,
    /// The choice that is read first in the next turn.
    next: usize,
    ended: bool,
}

/// What a turn over all streams brought.
enum Turn {
    Frame(Result<Frame<Bytes>, BoxError>),
    /// No stream has more for now.
    Waits,
    /// A stream has ended, or brought nothing that is passed on: others may have something.
    Again,
}

impl Choices {
    fn new(bodies: Vec<Body>) -> Self {
        let merged = Merged::new(bodies.len());
        let streams = bodies.into_iter().map(|body| Some((body, Decoder::default()))).collect();
        Self { streams, merged, next: 0, ended: false }
    }

    fn turn(&mut self, cx: &mut Context<'_>) -> Turn {
        let number = self.streams.len();
        let mut waits = true;
        for place in (self.next..number).chain(0..self.next) {
            let first_is_due = !self.merged.is_named() && self.streams.first().is_some_and(Option::is_some);
            if place > 0 && first_is_due {
                continue;
            }
            let Some(Some((body, decoder))) = self.streams.get_mut(place) else { continue };
            let Poll::Ready(frame) = Pin::new(body).poll_frame(cx) else { continue };
            waits = false;
            match frame {
                None => self.leave(place),
                Some(Err(error)) => return self.broken(error),
                Some(Ok(frame)) => match read(place, &frame, decoder, &mut self.merged) {
                    Err(error) => return self.broken(error.into()),
                    Ok(out) if self.merged.has_failed() => {
                        self.streams.iter_mut().enumerate().for_each(|(other, stream)| {
                            stream.take_if(|_| other != place);
                        });
                        return Turn::Frame(Ok(Frame::data(out.into())));
                    }
                    Ok(out) if !out.is_empty() => {
                        self.next = (place + 1) % number;
                        return Turn::Frame(Ok(Frame::data(out.into())));
                    }
                    Ok(_) => {}
                },
            }
        }
        if waits { Turn::Waits } else { Turn::Again }
    }

    fn leave(&mut self, place: usize) {
        if let Some(stream) = self.streams.get_mut(place) {
            *stream = None;
        }
    }

    fn broken(&mut self, error: BoxError) -> Turn {
        self.streams.clear();
        self.ended = true;
        Turn::Frame(Err(error))
    }
}

/// The events for those in a frame of a choice's stream.
fn read(
    place: usize,
    frame: &Frame<Bytes>,
    decoder: &mut Decoder,
    merged: &mut Merged,
) -> Result<Vec<u8>, TooLong> {
    let mut out = Vec::new();
    for message in decoder.push(frame.data_ref().map_or(&[], |data| data.as_ref()))? {
        merged.push(place, &message.data, &mut out);
    }
    Ok(out)
}

impl http_body::Body for Choices {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        while !this.ended {
            if this.streams.iter().all(Option::is_none) {
                this.ended = true;
                let mut out = Vec::new();
                this.merged.end(&mut out);
                return Poll::Ready((!out.is_empty()).then(|| Ok(Frame::data(out.into()))));
            }
            match this.turn(cx) {
                Turn::Frame(frame) => return Poll::Ready(Some(frame)),
                Turn::Waits => return Poll::Pending,
                Turn::Again => {}
            }
        }
        Poll::Ready(None)
    }
}

#[cfg(test)]
mod tests {
    use std::future;

    use futures_util::stream;
    use http_body_util::StreamBody;

    use super::*;

    fn event(text: &str) -> String {
        format!("data: {{\"id\":\"{text}\",\"choices\":[{{\"index\":0,\"text\":\"{text}\"}}]}}\n\n")
    }

    fn body(parts: Vec<Result<String, BoxError>>) -> Body {
        let frames = parts.into_iter().map(|part| part.map(|text| Frame::data(Bytes::from(text))));
        StreamBody::new(stream::iter(frames)).boxed_unsync()
    }

    fn streamed(body: Body) -> Response<Body> {
        Response::builder().header(CONTENT_TYPE, "text/event-stream").body(body).unwrap()
    }

    async fn text(answers: Vec<Response<Body>>) -> String {
        let answer = merged(answers, &Memory::new(1 << 20)).await;
        String::from_utf8(answer.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
    }

    #[tokio::test]
    async fn no_choice_comes_before_the_first_one_and_each_has_its_turn() {
        let done = "data: [DONE]\n\n".to_owned();
        let stream = |name: &str| {
            let parts = [event(name), event(name), done.clone()].map(Ok).into();
            streamed(body(parts))
        };
        let text = text(vec![stream("a"), stream("b")]).await;
        let texts: Vec<&str> = text.split("\"text\":\"").skip(1).map(|rest| &rest[..1]).collect();
        assert_eq!(texts, ["a", "b", "a", "b"], "{text}");
        assert_eq!(text.matches("\"id\":\"a\"").count(), 4, "{text}");
        assert!(text.ends_with("data: [DONE]\n\n") && text.matches("[DONE]").count() == 1, "{text}");
    }

    #[tokio::test]
    async fn a_choice_that_breaks_off_breaks_the_answer() {
        let broken = body(vec![Ok(event("b")), Err("gone".into())]);
        let waits = StreamBody::new(stream::once(future::pending::<Result<Frame<Bytes>, BoxError>>()));
        let first = body(vec![Ok(event("a"))]);
        let never = streamed(waits.boxed_unsync());
        let answer = merged(vec![streamed(first), streamed(broken), never], &Memory::new(0)).await;
        assert_eq!(answer.into_body().collect().await.unwrap_err().to_string(), "gone");
    }

    #[tokio::test]
    async fn an_error_of_one_choice_is_the_answer() {
        let ok = || Response::new(full(r#"{"choices":[{"index":0}]}"#));
        let refused = Response::builder().status(429).body(full("slow down")).unwrap();
        let answer = merged(vec![ok(), refused], &Memory::new(0)).await;
        assert_eq!(answer.status(), 429);
        let answer = merged(vec![ok(), Response::new(full("<html>"))], &Memory::new(0)).await;
        assert_eq!(answer.status(), 502);
        assert_eq!(text(vec![ok(), ok()]).await, r#"{"choices":[{"index":0},{"index":1}]}"#);
    }

    #[test]
    fn a_request_for_one_choice_has_a_name_of_its_own() {
        let mut headers = HeaderMap::new();
        for (name, value) in [(REQUEST_ID, "x"), (CONTENT_LENGTH, "9"), (ACCEPT_ENCODING, "gzip")] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        let mut second = headers.clone();
        fit(&mut headers, 0);
        fit(&mut second, 1);
        assert_eq!(
            (&headers[REQUEST_ID], &second[REQUEST_ID]),
            (&"x".parse().unwrap(), &"x-1".parse().unwrap())
        );
        assert!(second[ACCEPT_ENCODING] == "identity" && !second.contains_key(CONTENT_LENGTH));
    }
}
