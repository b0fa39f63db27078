//! Connections to one backend, and answers that drive the connection they are received on.
//!
//! A connection is polled by the reader of its answer, in the same task: a chunk goes from the
//! backend's socket to the client's without waking a second task, and dropping an answer closes its
//! connection at once. Between two answers nobody polls it; it is checked for being alive when it
//! is taken again.

use std::error::Error as StdError;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, Request, Response, StatusCode, Version};
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_rustls::MaybeHttpsStream;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tracing::Span;

use super::error::SendErrorKind;
use super::health::{Failing, Health, Outcome};
use super::silence::Silence;
use super::tie::Tie;
use crate::http::body::{Body, BoxError};
use crate::http::head::codings;

/// Maximum buffer for an answer, or for a request, on its way through a connection, bytes.
const BUFFER: usize = 16 << 10;
/// Length of an error's text that is read to decide who caused it, bytes.
const JUDGED: usize = 4 << 10;
/// Maximum length of the page that identifies a connection's process, bytes.
const PAGE: usize = 8 << 20;
/// Texts in engines' answers to a prompt that is too long; vLLM sends them with status 500.
const TOO_LONG: [&[u8]; 3] = [b"maximum context length", b"longer than the maximum", b"max_model_len"];

/// A frame of an answer, the reason that it broke off, or `None` at its end.
type AnswerFrame = Option<Result<Frame<Bytes>, BrokenOff>>;
type LinkDriver = Pin<Box<dyn Future<Output = Result<(), hyper::Error>> + Send>>;
pub(super) type Stream = MaybeHttpsStream<TokioIo<TcpStream>>;

/// One connection.
pub(super) struct Link {
    sender: SendRequest<Body>,
    /// `None` once the connection has ended.
    driver: Option<LinkDriver>,
    /// True if it must not carry another request.
    spent: bool,
    /// The process that it was verified to lead to; `None` if it was not verified.
    tie: Option<Arc<Tie>>,
}

impl Link {
    pub(super) async fn new(stream: Stream) -> Result<Self, hyper::Error> {
        let builder = Builder::new().writev(false).max_buf_size(BUFFER).clone();
        let (sender, driver) = builder.handshake(stream).await?;
        Ok(Self { sender, driver: Some(Box::pin(driver.with_upgrades())), spent: false, tie: None })
    }

    /// Polls the connection, so that it reads and writes.
    fn drive(&mut self, cx: &mut Context<'_>) {
        drive(&mut self.driver, cx);
    }

    /// True if it can carry another request: no end of it has been read so far.
    fn is_free(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        self.driver.is_some() && self.sender.is_ready() && !self.spent
    }

    /// True if it was verified to lead to this process.
    pub(super) fn is_tied_to(&self, tie: &Arc<Tie>) -> bool {
        self.tie.as_ref().is_some_and(|own| Arc::ptr_eq(own, tie))
    }

    /// The link, verified to lead to this process; `None` if it cannot carry another request.
    pub(super) fn tie(mut self, tie: &Arc<Tie>) -> Option<Self> {
        self.tie = Some(Arc::clone(tie));
        self.is_free().then_some(self)
    }

    /// Requests a page and reads it.
    ///
    /// # Errors
    /// A description of the response received instead, for the operator.
    pub(super) async fn ask(&mut self, request: Request<Body>) -> Result<Vec<u8>, String> {
        let mut response = self.call(request).await.map_err(|error| root(error.error()))?;
        frame(&mut response, self)?;
        let status = response.status();
        if status != StatusCode::OK {
            return Err(format!("status {status}"));
        }
        let mut body = Source::There(response.into_body());
        let mut page = Vec::new();
        loop {
            let next = poll_fn(|cx| {
                self.drive(cx);
                body.poll_frame(cx)
            });
            match next.await {
                Some(Ok(frame)) => page.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data)),
                Some(Err(error)) => return Err(error.cause()),
                None => return Ok(page),
            }
            if page.len() > PAGE {
                return Err("the page is too long".to_owned());
            }
        }
    }

    /// Sends a request and waits for the head of its answer.
    pub(super) async fn call(
        &mut self,
        request: Request<Body>,
    ) -> Result<Response<Incoming>, TrySendError<Request<Body>>> {
        let mut answer = pin!(self.sender.try_send_request(request));
        let driver = &mut self.driver;
        poll_fn(|cx| {
            drive(driver, cx);
            answer.as_mut().poll(cx)
        })
        .await
    }
}

/// If an answer has both chunks and a `Content-Length`, the chunks count, and the connection is not
/// used again: its two ends may disagree on the start of the next answer (RFC 9112, 6.3).
///
/// The client's side has a version and a `Content-Length` of its own: one number, even if it was
/// repeated.
///
/// # Errors
/// Several lengths, or a transfer coding other than a single `chunked`: none was requested, and it
/// would not be passed on.
pub(super) fn frame(response: &mut Response<Incoming>, link: &mut Link) -> Result<(), String> {
    *response.version_mut() = Version::HTTP_11;
    one_length(response.headers_mut())?;
    let mut codings = codings(response.headers());
    let Some(first) = codings.next() else { return Ok(()) };
    let plain = first.eq_ignore_ascii_case("chunked") && codings.next().is_none();
    drop(codings);
    if !plain && !response.body().is_end_stream() {
        return Err("an answer has no transfer coding but chunked, once".to_owned());
    }
    link.spent = response.headers_mut().remove(CONTENT_LENGTH).is_some();
    Ok(())
}

/// Leaves one `Content-Length` of one number (RFC 9110, 8.6).
fn one_length(fields: &mut HeaderMap) -> Result<(), String> {
    let mut lengths = fields.get_all(CONTENT_LENGTH).iter();
    let Some(first) = lengths.next() else { return Ok(()) };
    let plain = lengths.next().is_none() && first.as_bytes().iter().all(u8::is_ascii_digit);
    if plain && !first.is_empty() {
        return Ok(());
    }
    let said = fields.get_all(CONTENT_LENGTH).iter().map(|value| value.to_str().unwrap_or("?"));
    let mut said = said.flat_map(|value| value.split(',')).map(length);
    let first = said.next().flatten();
    let Some(length) = first.filter(|_| said.all(|other| other == first)) else {
        return Err("an answer has no Content-Length but one number".to_owned());
    };
    fields.insert(CONTENT_LENGTH, length.into());
    Ok(())
}

fn length(said: &str) -> Option<u64> {
    let digits = said.trim_matches([' ', '\t']);
    digits.parse().ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit()))
}

fn drive(driver: &mut Option<LinkDriver>, cx: &mut Context<'_>) {
    let Some(running) = driver else { return };
    if let Poll::Ready(ended) = running.as_mut().poll(cx) {
        tracing::trace!(?ended, "connection to a backend ended");
        *driver = None;
    }
}

/// The idle connections of one network thread to one backend.
///
/// It also counts that thread's calls: counters with a single writer cost next to nothing.
pub(super) struct Pool {
    idle: Mutex<Idle>,
    keep: Duration,
    silence: Option<Duration>,
    in_flight: AtomicUsize,
    calls: AtomicU64,
    health: Arc<Health>,
}

/// Information about a replica in a good answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Proof {
    /// The model works: the request needed it.
    Work,
    /// The server is reachable. The request did not need the model, which may have died.
    Life,
    /// Nothing that counts: the call is one of Foretell's additional calls.
    Nothing,
}

/// A call under way; counted until dropped.
pub(super) struct Busy(Arc<Pool>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct Idle {
    /// Oldest first; the youngest is taken first.
    links: Vec<(Link, Instant)>,
    /// A sweep of the pool is running.
    swept: bool,
    /// Longest time that a connection was idle and still open; reduced once one was found closed
    /// sooner.
    survived: Duration,
}

impl Idle {
    /// Checks the oldest connection: records how long it has survived, or that the backend has
    /// closed it.
    fn look(&mut self) {
        while let Some((link, since)) = self.links.first_mut() {
            let age = since.elapsed();
            if link.is_free() {
                self.survived = self.survived.max(age);
                return;
            }
            self.closed(age);
            self.links.remove(0);
        }
    }

    /// Records that a connection was found closed after it had been idle for `age`.
    fn closed(&mut self, age: Duration) {
        if age < self.survived {
            self.survived = age / 2;
        }
    }

    /// The youngest connection, if it has not been idle for longer than `most`.
    fn take(&mut self, most: Duration) -> Option<Link> {
        loop {
            let (mut link, since) = self.links.pop_if(|(_, since)| since.elapsed() < most)?;
            if link.is_free() {
                return Some(link);
            }
            self.closed(since.elapsed());
        }
    }
}

impl Pool {
    /// Connections are kept idle for `keep`; an answer may be silent for `silence`, `None`: no
    /// limit.
    pub(super) fn new(keep: Duration, silence: Option<Duration>, health: Arc<Health>) -> Self {
        let (in_flight, calls) = (AtomicUsize::new(0), AtomicU64::new(0));
        Self { idle: Mutex::default(), keep, silence, in_flight, calls, health }
    }

    /// Calls under way.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Calls so far.
    pub(super) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Counts a call.
    pub(super) fn begin(self: &Arc<Self>) -> Busy {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.calls.fetch_add(1, Ordering::Relaxed);
        Busy(Arc::clone(self))
    }

    /// The youngest idle connection that is still alive.
    pub(super) fn take(&self) -> Option<Link> {
        self.idle.lock().take(self.keep)
    }

    /// As [`Self::take`], for a request that is not sent again if the backend closes the connection
    /// at that moment: one that has been idle for less than half the time that others have
    /// survived.
    pub(super) async fn take_lasting(&self) -> Option<Link> {
        if self.idle.lock().links.is_empty() {
            return None;
        }
        // Meanwhile the event loop reads what has arrived, such as the end of a connection.
        tokio::task::yield_now().await;
        let mut idle = self.idle.lock();
        idle.look();
        let most = idle.survived / 2;
        idle.take(most)
    }

    fn put(self: &Arc<Self>, link: Link) {
        let mut idle = self.idle.lock();
        idle.links.push((link, Instant::now()));
        if !idle.swept {
            idle.swept = true;
            tokio::spawn(sweep(Arc::downgrade(self), self.keep));
        }
    }

    /// Closes all idle connections.
    pub(super) fn clear(&self) {
        let idle = std::mem::take(&mut self.idle.lock().links);
        drop(idle);
    }

    /// Closes connections that have been idle for too long; returns false if none is left.
    fn expire(&self) -> bool {
        let mut idle = self.idle.lock();
        idle.look();
        let old = idle.links.partition_point(|(_, since)| since.elapsed() >= self.keep);
        let closed: Vec<_> = idle.links.drain(..old).collect();
        idle.swept = !idle.links.is_empty();
        let left = idle.swept;
        drop(idle);
        drop(closed);
        left
    }
}

/// Runs while there are idle connections.
async fn sweep(pool: Weak<Pool>, keep: Duration) {
    loop {
        tokio::time::sleep(keep / 2 + Duration::from_millis(1)).await;
        match pool.upgrade() {
            Some(pool) if pool.expire() => {}
            _ => return,
        }
    }
}

/// Reason that an answer broke off.
#[derive(Debug, thiserror::Error)]
pub enum BrokenOff {
    /// The connection was closed, or the received data is not HTTP.
    #[error(transparent)]
    Closed(#[from] hyper::Error),
    /// A server in this process reported an error.
    #[error(transparent)]
    Gone(BoxError),
    /// Nothing was received for the configured time.
    #[error("the backend sent nothing for {0:?} in the middle of its answer")]
    Silent(Duration),
}

impl BrokenOff {
    /// The cause, for the operator.
    pub fn cause(&self) -> String {
        match self {
            Self::Closed(error) => format!("the answer broke off: {}", root(error)),
            Self::Gone(error) => format!("the answer broke off: {error}"),
            Self::Silent(_) => self.to_string(),
        }
    }
}

/// Source of a backend's answer.
pub(super) enum Source {
    /// A connection, which must be polled.
    There(Incoming),
    /// A server in this process.
    Here(Body),
}

impl Source {
    /// A connection's frames come only from polling it, which registers the waker; the body itself
    /// needs none.
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<AnswerFrame> {
        match self {
            Self::There(body) => {
                Pin::new(body).poll_frame(&mut Context::from_waker(Waker::noop())).map_err(BrokenOff::Closed)
            }
            Self::Here(body) => Pin::new(body).poll_frame(cx).map_err(BrokenOff::Gone),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::There(body) => body.is_end_stream(),
            Self::Here(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::There(body) => body.size_hint(),
            Self::Here(body) => body.size_hint(),
        }
    }
}

/// The body of a backend's answer. Dropping it before its end abandons the call, which closes its
/// connection; at its end the connection can be used again.
pub struct Answer {
    body: Source,
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
    pub(super) fn response(
        response: Response<Source>,
        link: Option<Link>,
        busy: Busy,
        proof: Proof,
    ) -> Response<Self> {
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
            let mut answer = Self { body, link, busy, counts, working, judged, silence, span };
            if switched {
                answer.let_go();
            } else if answer.body.is_end_stream() {
                answer.end();
            }
            answer
        })
    }

    /// After a switch of protocols the connection belongs to the holder of its other half.
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
        let Some((_, judged)) = &mut self.judged else { return };
        let room = JUDGED.saturating_sub(judged.len());
        judged.extend(frame.data_ref().into_iter().flatten().take(room));
    }

    /// The answer broke off: the backend closed the connection or went silent, unless the request's
    /// own body broke off.
    fn broke_off(&mut self, error: &BrokenOff) {
        let _within = self.span.clone().entered();
        self.link = None;
        self.judged = None;
        self.working = false;
        let failing = match error {
            BrokenOff::Closed(error) if error.is_user() => None,
            BrokenOff::Closed(_) | BrokenOff::Gone(_) => Some(Failing::Call(SendErrorKind::Closed)),
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
    fn listen(&mut self, cx: &mut Context<'_>, heard: Poll<AnswerFrame>) -> Poll<AnswerFrame> {
        let Some(silence) = &mut self.silence else { return heard };
        match heard {
            Poll::Ready(heard) => {
                silence.broken();
                Poll::Ready(heard)
            }
            Poll::Pending => silence.lasts(cx).map(|most| Some(Err(BrokenOff::Silent(most)))),
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
        let frame = self.body.poll_frame(cx);
        let frame = self.listen(cx, frame);
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

/// The text of the innermost source of an error.
pub(super) fn root(error: &(dyn StdError + 'static)) -> String {
    chain(error).last().map(ToString::to_string).unwrap_or_default()
}

/// The errors that `error` stems from, itself first.
pub(super) fn chain<'a>(
    error: &'a (dyn StdError + 'static),
) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case(&[], Ok(None))]
    #[case(&["3"], Ok(Some("3")))]
    #[case(&["3, 3"], Ok(Some("3")))]
    #[case(&["3,3", "3"], Ok(Some("3")))]
    #[case(&["3", "3"], Ok(Some("3")))]
    #[case(&["3, 4"], Err(()))]
    #[case(&["3", "4"], Err(()))]
    #[case(&["3,"], Err(()))]
    #[case(&[""], Err(()))]
    #[case(&["+3"], Err(()))]
    #[case(&["0x3"], Err(()))]
    #[case(&["3 3"], Err(()))]
    #[case(&["99999999999999999999, 99999999999999999999"], Err(()))]
    fn a_length_is_one_number(#[case] lines: &[&str], #[case] wanted: Result<Option<&str>, ()>) {
        let mut fields = HeaderMap::new();
        for line in lines {
            fields.append(CONTENT_LENGTH, line.parse().unwrap());
        }
        let left = one_length(&mut fields).map(|()| fields.get(CONTENT_LENGTH)).map_err(drop);
        assert_eq!(left.map(|left| left.map(|value| value.to_str().unwrap())), wanted);
    }
}
