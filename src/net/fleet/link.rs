//! Connections to one backend, and answers that drive the connection they are received on.
//!
//! A connection is polled by the reader of its answer, in the same task: a chunk goes from the
//! backend's socket to the client's without waking a second task, and dropping an answer closes its
//! connection at once. Between two answers nobody polls it; it is checked for being alive before it
//! is reused.

mod answer;
mod pool;

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use http::header::CONTENT_LENGTH;
use http::{HeaderMap, Request, Response, StatusCode, Version};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_rustls::MaybeHttpsStream;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

pub(super) use self::answer::Proof;
pub use self::answer::{Answer, BrokenOff};
pub(super) use self::pool::Pool;
use super::error::root;
use super::tie::Tie;
use crate::http::body::Body;
use crate::http::head::codings;

/// Maximum buffer for an answer, or for a request, on its way through a connection, bytes.
const BUFFER: usize = 16 << 10;
/// Maximum length of the page that identifies a connection's process, bytes.
const PAGE: usize = 8 << 20;
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
        self.tie.as_ref().is_some_and(|verified| Arc::ptr_eq(verified, tie))
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
    pub(super) async fn page(&mut self, request: Request<Body>) -> Result<Vec<u8>, String> {
        let mut response = self.call(request).await.map_err(|error| root(error.error()))?;
        frame(&mut response, self)?;
        let status = response.status();
        if status != StatusCode::OK {
            return Err(format!("status {status}"));
        }
        let mut body = response.into_body();
        let mut page = Vec::new();
        loop {
            let next = poll_fn(|cx| {
                self.drive(cx);
                answer::poll_frame(&mut body)
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
/// reused: its two ends may disagree on the start of the next answer (RFC 9112, 6.3).
///
/// Sets the version to HTTP/1.1 and a repeated `Content-Length` to one number, for the client.
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

/// Reduces a repeated `Content-Length` to one number (RFC 9110, 8.6).
fn one_length(fields: &mut HeaderMap) -> Result<(), String> {
    let mut lengths = fields.get_all(CONTENT_LENGTH).iter();
    let Some(first) = lengths.next() else { return Ok(()) };
    let plain = lengths.next().is_none() && first.as_bytes().iter().all(u8::is_ascii_digit);
    if plain && !first.is_empty() {
        return Ok(());
    }
    let values = fields.get_all(CONTENT_LENGTH).iter().map(|value| value.to_str().unwrap_or("?"));
    let mut lengths = values.flat_map(|value| value.split(',')).map(length);
    let first = lengths.next().flatten();
    match first {
        Some(length) if lengths.all(|other| other == first) => {
            fields.insert(CONTENT_LENGTH, length.into());
            Ok(())
        }
        _ => Err("an answer has no Content-Length but one number".to_owned()),
    }
}

fn length(value: &str) -> Option<u64> {
    let digits = value.trim_matches([' ', '\t']);
    if digits.bytes().all(|byte| byte.is_ascii_digit()) { digits.parse().ok() } else { None }
}

fn drive(driver: &mut Option<LinkDriver>, cx: &mut Context<'_>) {
    let Some(running) = driver else { return };
    if let Poll::Ready(ended) = running.as_mut().poll(cx) {
        tracing::trace!(?ended, "connection to a backend ended");
        *driver = None;
    }
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
