//! Requests for several choices, whose choices are asked for one by one: each is served as a
//! request for one, and the client gets one answer.

use std::iter;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::future::{self, BoxFuture, FutureExt};
use http::header::{ACCEPT_ENCODING, CONTENT_LENGTH, TE, TRAILER};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt;
use serde_json::Value;

use super::{Inbound, Proxy};
use crate::fleet::{HealthState, Replica};
use crate::gateway::translate::ANSWER_BYTES;
use crate::gateway::{Shared, facts, route};
use crate::http::body::{Body, BoxError, full};
use crate::http::gather;
use crate::http::headers::{self, REQUEST_ID};
use crate::http::memory::Memory;
use crate::http::request::RequestBody;
use foretell_core::words::Mode;
use foretell_engines::openai::choices::{Merged, merge};
use foretell_engines::openai::sse::{Decoder, TooLong};
use foretell_engines::openai::{Apart, Route, parsed_bytes};
use foretell_engines::policy::{Admitted, Backend, Subjects, Wish};

/// Extension of a request for one choice: the replica that serves them all, which computes their
/// prompt once.
#[derive(Clone, Debug)]
pub(super) struct ServedBy(pub Arc<Replica>);

/// Extension of a request for several choices that is sent as it is: one of those for each failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct AsOne;

impl Proxy {
    /// The requests of which one for several choices of `model` is made, and their replica; `None`
    /// if it goes on as it is.
    pub(super) fn apart(
        &self,
        (route, head): (Route, Subjects<'_>),
        wish: Wish,
        body: &Bytes,
        model: Option<&str>,
    ) -> Option<(Apart, Arc<Replica>)> {
        let Shared { fleet, modes, memory, sessions, life, .. } = &self.shared;
        let serving = self.serving.as_ref()?;
        let replica = fleet.would_pick(model)?;
        let Backend { name, mode, speculates } = facts::backend(&replica, modes);
        let open = mode == Mode::Auto && speculates && !life.is_draining();
        if !open || replica.health_state() != HealthState::Ready {
            return None;
        }
        let each = body.len() + parsed_bytes(body);
        // Once for all parameters, and once for those of one choice.
        let _read = memory.try_take(2 * each as u64)?;
        let apart = Apart::of(route, body)?;
        let fit = memory.try_take((apart.number * each) as u64).is_some();
        let admitted =
            Admitted { head, request: &apart.request, control: wish.control(), backend: name, mode };
        let taken =
            fit && sessions.available_permits() >= apart.number && serving.takes_apart(&replica, &admitted);
        taken.then_some((apart, replica))
    }

    /// The answer of a request for each choice; the first is this one, and keeps its record. Where
    /// one fails before its answer begins, the client's own request is sent.
    pub(super) fn answer_apart<'a>(
        &'a self,
        inbound: Inbound,
        route: Route,
        own: Bytes,
        apart: Apart,
        replica: &Arc<Replica>,
    ) -> BoxFuture<'a, Response<Body>> {
        let Inbound { parts, peer, record } = inbound;
        let body = Bytes::from(apart.body);
        let head = |index: Option<usize>| {
            let mut parts = parts.clone();
            if let Some(peer) = peer {
                parts.extensions.insert(peer);
            }
            match index {
                Some(index) => {
                    head_of_choice(&mut parts.headers, index);
                    parts.extensions.insert(ServedBy(Arc::clone(replica)));
                }
                None => _ = parts.extensions.insert(AsOne),
            }
            parts
        };
        let one = || RequestBody::resumed(full(body.clone()));
        let first = Inbound { parts: head(Some(0)), peer, record };
        let first = self.completion(first, one(), route).boxed();
        let others =
            (1..apart.number).map(|index| self.begin(Request::from_parts(head(Some(index)), one())).boxed());
        let all: Vec<_> = iter::once(first).chain(others).map(|one| one.map(succeeded).boxed()).collect();
        let whole = Request::from_parts(head(None), RequestBody::resumed(full(own)));
        async move {
            let merged = match future::try_join_all(all).await {
                Ok(answers) => merged(answers, &self.shared.memory).await,
                Err(()) => None,
            };
            match merged {
                Some(answer) => answer,
                None => self.begin(whole).await,
            }
        }
        .boxed()
    }
}

/// A successful answer.
fn succeeded(answer: Response<Body>) -> Result<Response<Body>, ()> {
    if answer.status().is_success() { Ok(answer) } else { Err(()) }
}

/// Makes the head of a request for several choices that of a request for the one with this index.
fn head_of_choice(headers: &mut HeaderMap, index: usize) {
    for name in [CONTENT_LENGTH, TE] {
        headers.remove(name);
    }
    // The answer has to be read.
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    let id = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).filter(|_| index > 0);
    // Engines name their work by it, and refuse a name that is in use. The names of a request's
    // rounds have a dash.
    if let Some(id) = id.and_then(|id| HeaderValue::try_from(format!("{id}.{index}")).ok()) {
        headers.insert(REQUEST_ID, id);
    }
}

/// The answer of these, each with one choice and successful; `None` if one is no completion.
async fn merged(answers: Vec<Response<Body>>, memory: &Arc<Memory>) -> Option<Response<Body>> {
    let is_readable = |answer: &Response<Body>| !route::is_encoded(answer.headers());
    let streamed = answers.iter().all(|answer| headers::is_event_stream(answer.headers()));
    if !answers.iter().all(is_readable) {
        return None;
    }
    let (heads, bodies): (Vec<_>, Vec<_>) = answers.into_iter().map(Response::into_parts).unzip();
    let mut head = heads.into_iter().next()?;
    for name in [CONTENT_LENGTH, TRAILER] {
        head.headers.remove(name);
    }
    if streamed {
        return Some(Response::from_parts(head, MergedBody::new(bodies).boxed_unsync()));
    }
    let (mut read, mut taken, mut bytes) = (Vec::new(), memory.take(0), 0);
    for body in bodies {
        let answer = gather::counted(body, ANSWER_BYTES, &mut memory.take(0)).await.ok()?;
        bytes += answer.len() + parsed_bytes(&answer);
        taken.follow(bytes as u64);
        read.push(serde_json::from_slice::<Value>(&answer).ok()?);
    }
    let one = merge(read)?.to_string();
    Some(Response::from_parts(head, full(memory.take(one.len() as u64).over(Bytes::from(one)))))
}

/// The streams of all choices, read as one.
struct MergedBody {
    /// `None` once it has ended.
    streams: Vec<Option<(Body, Decoder)>>,
    merged: Merged,
    /// The choice that is read first in the next turn.
    next: usize,
    ended: bool,
}

/// Result of a turn over all streams.
enum Turn {
    Frame(Result<Frame<Bytes>, BoxError>),
    /// No stream has more for now.
    Waits,
    /// A stream has ended, or brought nothing that is passed on: others may have something.
    Again,
}

impl MergedBody {
    fn new(bodies: Vec<Body>) -> Self {
        let merged = Merged::new(bodies.len());
        let streams = bodies.into_iter().map(|body| Some((body, Decoder::default()))).collect();
        Self { streams, merged, next: 0, ended: false }
    }

    fn turn(&mut self, cx: &mut Context<'_>) -> Turn {
        let number = self.streams.len();
        let mut waits = true;
        for index in (self.next..number).chain(0..self.next) {
            let first_is_due = !self.merged.is_named() && self.streams.first().is_some_and(Option::is_some);
            if index > 0 && first_is_due {
                continue;
            }
            let Some(Some((body, decoder))) = self.streams.get_mut(index) else { continue };
            let Poll::Ready(frame) = Pin::new(body).poll_frame(cx) else { continue };
            waits = false;
            match frame {
                None => self.leave(index),
                Some(Err(error)) => return self.broken(error),
                Some(Ok(frame)) => match read(index, &frame, decoder, &mut self.merged) {
                    Err(error) => return self.broken(error.into()),
                    Ok(out) if self.merged.has_failed() => {
                        self.streams.iter_mut().enumerate().for_each(|(other, stream)| {
                            stream.take_if(|_| other != index);
                        });
                        return Turn::Frame(Ok(Frame::data(out.into())));
                    }
                    Ok(out) if !out.is_empty() => {
                        self.next = (index + 1) % number;
                        return Turn::Frame(Ok(Frame::data(out.into())));
                    }
                    Ok(_) => {}
                },
            }
        }
        if waits { Turn::Waits } else { Turn::Again }
    }

    fn leave(&mut self, index: usize) {
        if let Some(stream) = self.streams.get_mut(index) {
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
    index: usize,
    frame: &Frame<Bytes>,
    decoder: &mut Decoder,
    merged: &mut Merged,
) -> Result<Vec<u8>, TooLong> {
    let mut out = Vec::new();
    for message in decoder.push(frame.data_ref().map_or(&[], |data| data.as_ref()))? {
        merged.push(index, &message.data, &mut out);
    }
    Ok(out)
}

impl http_body::Body for MergedBody {
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
    use http::header::CONTENT_TYPE;
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
        let answer = merged(answers, &Memory::new(1 << 20)).await.unwrap();
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
        let answer = merged(vec![streamed(first), streamed(broken), never], &Memory::new(0)).await.unwrap();
        assert_eq!(answer.into_body().collect().await.unwrap_err().to_string(), "gone");
    }

    #[tokio::test]
    async fn what_is_no_completion_is_not_merged() {
        let ok = || Response::new(full(r#"{"choices":[{"index":0}]}"#));
        let gzip = Response::builder().header("content-encoding", "GZIP").body(full("?")).unwrap();
        for other in [Response::new(full("<html>")), gzip] {
            assert!(merged(vec![ok(), other], &Memory::new(0)).await.is_none());
        }
        assert_eq!(text(vec![ok(), ok()]).await, r#"{"choices":[{"index":0},{"index":1}]}"#);
    }

    #[test]
    fn a_request_for_one_choice_has_a_name_of_its_own() {
        let mut headers = HeaderMap::new();
        for (name, value) in [(REQUEST_ID, "x"), (CONTENT_LENGTH, "9"), (ACCEPT_ENCODING, "gzip")] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        let mut second = headers.clone();
        head_of_choice(&mut headers, 0);
        head_of_choice(&mut second, 1);
        assert_eq!(
            (&headers[REQUEST_ID], &second[REQUEST_ID]),
            (&"x".parse().unwrap(), &"x.1".parse().unwrap())
        );
        assert!(second[ACCEPT_ENCODING] == "identity" && !second.contains_key(CONTENT_LENGTH));
    }
}
