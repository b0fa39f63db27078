//! The body of a backend's answer: polls its connection, and reports its end to the health of the
//! replica.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Response, StatusCode};
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use tracing::Span;

use super::Link;
use super::pool::Busy;
use crate::fleet::error::{SendErrorKind, root};
use crate::fleet::health::{Failing, Outcome};
use crate::fleet::silence::Silence;

/// Length of an error's text that is read to decide who caused it, bytes.
const JUDGED: usize = 4 << 10;
/// Texts in engines' answers to a prompt that is too long; vLLM sends them with status 500.
const TOO_LONG: [&[u8]; 3] = [b"maximum context length", b"longer than the maximum", b"max_model_len"];

/// A frame of an answer, the reason that it broke off, or `None` at its end.
type AnswerFrame = Option<Result<Frame<Bytes>, BrokenOff>>;

/// Information about a replica in a good answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fleet) enum Proof {
    /// The model works: the request needed it.
    Work,
    /// The server is reachable. The request did not need the model, which may have died.
    Life,
    /// Nothing that counts: the call is an additional call of Foretell.
    Nothing,
}

/// Reason that an answer broke off.
#[derive(Debug, thiserror::Error)]
pub enum BrokenOff {
    /// The connection was closed, or the received data is not HTTP.
    #[error(transparent)]
    Closed(#[from] hyper::Error),
    /// Nothing was received for the configured time.
    #[error("the backend sent nothing for {0:?} in the middle of its answer")]
    Silent(Duration),
}

impl BrokenOff {
    /// The cause, for the operator.
    pub fn cause(&self) -> String {
        match self {
            Self::Closed(error) => format!("the answer broke off: {}", root(error)),
            Self::Silent(_) => self.to_string(),
        }
    }
}

/// The next frame of a connection's answer. It comes only from polling the connection, which
/// registers the waker; the body itself needs none.
pub(super) fn poll_frame(body: &mut Incoming) -> Poll<AnswerFrame> {
    Pin::new(body).poll_frame(&mut Context::from_waker(Waker::noop())).map_err(BrokenOff::Closed)
}

/// The body of a backend's answer. Dropping it before its end abandons the call, which closes its
/// connection; at its end the connection can be reused.
pub struct Answer {
    body: Incoming,
    link: Option<Link>,
    busy: Busy,
    /// True if its end counts in the replica's health.
    counts: bool,
    /// True if its end will show that the model works.
    working: bool,
    /// The status and the beginning of a server error, until its cause is decided.
    judged: Option<(StatusCode, BytesMut)>,
    /// Limits the longest silence; `None`: no limit.
    silence: Option<Silence>,
    /// The span of the request, for log lines about the answer's end.
    span: Span,
}

impl Answer {
    pub(in crate::fleet) fn response(
        response: Response<Incoming>,
        link: Link,
        busy: Busy,
        proof: Proof,
    ) -> Response<Self> {
        busy.0.health.byte_received();
        let status = response.status();
        let switched = status == StatusCode::SWITCHING_PROTOCOLS;
        let failed = status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED;
        let suspect = failed && proof != Proof::Nothing;
        let refused = status.is_client_error() || status.is_server_error();
        match proof {
            Proof::Work if !refused => busy.0.health.ended(Outcome::Answering),
            Proof::Work | Proof::Life if !failed => busy.0.health.ended(Outcome::Reached),
            _ => {}
        }
        response.map(|body| {
            let working = proof == Proof::Work && !refused;
            let judged = suspect.then(|| (status, BytesMut::new()));
            let counts = proof != Proof::Nothing;
            let silence = busy.0.silence.map(Silence::new);
            let span = Span::current();
            let link = Some(link);
            let mut answer = Self { body, link, busy, counts, working, judged, silence, span };
            if switched {
                answer.let_go();
            } else if answer.body.is_end_stream() {
                answer.end();
            }
            answer
        })
    }

    /// After a switch of protocols the connection belongs to the owner of its other half.
    fn let_go(&mut self) {
        if let Some(driver) = self.link.take().and_then(|link| link.driver) {
            tokio::spawn(driver);
        }
    }

    fn end(&mut self) {
        let _within = self.span.clone().entered();
        self.judge();
        if std::mem::take(&mut self.working) {
            self.busy.0.health.ended(Outcome::Good);
        }
        if let Some(link) = self.link.take_if(Link::is_free) {
            self.busy.0.put(link);
        }
    }

    /// Decides who caused a server error: one about the prompt would come from any replica, and
    /// does not count.
    fn judge(&mut self) {
        let Some((status, text)) = self.judged.take() else { return };
        let too_long = TOO_LONG.iter().any(|words| text.windows(words.len()).any(|found| found == *words));
        self.busy.0.health.ended(if too_long {
            Outcome::Undecided
        } else {
            Outcome::Failed(Failing::Status, format!("status {status}"))
        });
    }

    fn read(&mut self, frame: &Frame<Bytes>) {
        self.busy.0.health.byte_received();
        let Some((_, judged)) = &mut self.judged else { return };
        let room = JUDGED.saturating_sub(judged.len());
        judged.extend(frame.data_ref().into_iter().flatten().take(room));
    }

    /// The answer broke off: the backend closed the connection or went silent, unless the request
    /// body broke off.
    fn broke_off(&mut self, error: &BrokenOff) {
        let _within = self.span.clone().entered();
        self.link = None;
        self.judged = None;
        self.working = false;
        let failing = match error {
            BrokenOff::Closed(error) if error.is_user() => None,
            BrokenOff::Closed(_) => Some(Failing::Call(SendErrorKind::Closed)),
            BrokenOff::Silent(_) => Some(Failing::Call(SendErrorKind::Timeout)),
        };
        let health = &self.busy.0.health;
        match failing {
            None if self.counts => health.ended(Outcome::Undecided),
            Some(failing) if self.counts => health.ended(Outcome::Failed(failing, error.cause())),
            Some(failing @ Failing::Call(SendErrorKind::Timeout)) => health.count(failing),
            Some(_) | None => {}
        }
    }

    /// Ends the answer with an error if it has been silent for too long.
    fn limit_silence(&mut self, cx: &mut Context<'_>, polled: Poll<AnswerFrame>) -> Poll<AnswerFrame> {
        let Some(silence) = &mut self.silence else { return polled };
        match polled {
            Poll::Ready(frame) => {
                silence.broken();
                Poll::Ready(frame)
            }
            Poll::Pending => silence.lasts(cx).map(|limit| Some(Err(BrokenOff::Silent(limit)))),
        }
    }

    fn drive(&mut self, cx: &mut Context<'_>) {
        if let Some(link) = &mut self.link {
            link.drive(cx);
        }
    }
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        self.drive(cx);
        let frame = poll_frame(&mut self.body);
        let frame = self.limit_silence(cx, frame);
        if let Poll::Ready(Some(Ok(frame))) = &frame {
            self.read(frame);
        }
        match &frame {
            Poll::Ready(Some(Ok(_))) if !self.body.is_end_stream() => {}
            Poll::Ready(Some(Ok(_)) | None) => self.end(),
            Poll::Ready(Some(Err(error))) => self.broke_off(error),
            Poll::Pending => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A server error that was not read to its end is judged by the part that was read, if any.
impl Drop for Answer {
    fn drop(&mut self) {
        if self.judged.is_none() {
            return;
        }
        let _within = self.span.clone().entered();
        if self.judged.as_ref().is_some_and(|(_, text)| text.is_empty()) {
            self.judged = None;
            self.busy.0.health.ended(Outcome::Undecided);
        }
        self.judge();
    }
}
