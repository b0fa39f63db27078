//! Connections to one backend, and answers that drive the connection they come over.
//!
//! A connection is polled by whoever reads its answer, in the same task: a chunk goes from the backend's
//! socket to the client's without a second task being woken, and dropping an answer closes its connection
//! on the spot. Between two answers nobody polls it; whether it still lives is asked when it is taken again.

use std::error::Error as StdError;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_rustls::MaybeHttpsStream;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;

use crate::gateway::listen::Body;

type Driver = Pin<Box<dyn Future<Output = Result<(), hyper::Error>> + Send>>;
pub(super) type Stream = MaybeHttpsStream<TokioIo<TcpStream>>;

/// One connection.
pub(super) struct Link {
    sender: SendRequest<Body>,
    /// `None` once the connection has ended.
    driver: Option<Driver>,
}

impl Link {
    pub(super) async fn new(stream: Stream) -> Result<Self, hyper::Error> {
        let (sender, driver) = Builder::new().writev(false).handshake(stream).await?;
        Ok(Self { sender, driver: Some(Box::pin(driver.with_upgrades())) })
    }

    /// Lets the connection read and write.
    fn drive(&mut self, cx: &mut Context<'_>) {
        drive(&mut self.driver, cx);
    }

    /// Itself, if another request can be sent.
    fn freed(mut self) -> Option<Self> {
        self.drive(&mut Context::from_waker(Waker::noop()));
        (self.driver.is_some() && self.sender.is_ready()).then_some(self)
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

fn drive(driver: &mut Option<Driver>, cx: &mut Context<'_>) {
    let Some(running) = driver else { return };
    if let Poll::Ready(ended) = running.as_mut().poll(cx) {
        tracing::trace!(?ended, "connection to a backend ended");
        *driver = None;
    }
}

/// The idle connections of one network thread to one backend.
pub(super) struct Pool {
    idle: Mutex<Idle>,
    keep: Duration,
}

#[derive(Default)]
struct Idle {
    /// Oldest first; the youngest is taken first.
    links: Vec<(Link, Instant)>,
    swept: bool,
}

impl Pool {
    pub(super) fn new(keep: Duration) -> Self {
        Self { idle: Mutex::default(), keep }
    }

    /// The youngest idle connection that is still alive.
    pub(super) fn take(&self) -> Option<Link> {
        loop {
            let (link, since) = self.idle.lock().links.pop()?;
            let link = (since.elapsed() < self.keep).then_some(link).and_then(Link::freed);
            if link.is_some() {
                return link;
            }
        }
    }

    fn put(self: &Arc<Self>, link: Link) {
        let mut idle = self.idle.lock();
        idle.links.push((link, Instant::now()));
        if !idle.swept {
            idle.swept = true;
            tokio::spawn(sweep(Arc::downgrade(self), self.keep));
        }
    }

    /// Closes what has been idle for too long; false if nothing is left.
    fn expire(&self) -> bool {
        let mut idle = self.idle.lock();
        let old = idle.links.partition_point(|(_, since)| since.elapsed() >= self.keep);
        let closed: Vec<_> = idle.links.drain(..old).collect();
        idle.swept = !idle.links.is_empty();
        let left = idle.swept;
        drop(idle);
        drop(closed);
        left
    }
}

/// Runs as long as there are idle connections.
async fn sweep(pool: Weak<Pool>, keep: Duration) {
    loop {
        tokio::time::sleep(keep / 2 + Duration::from_millis(1)).await;
        match pool.upgrade() {
            Some(pool) if pool.expire() => {}
            _ => return,
        }
    }
}

/// The body of a backend's answer. Dropping it before its end closes the connection; at its end the
/// connection can be used again.
pub struct Answer {
    body: Incoming,
    link: Option<Link>,
    pool: Arc<Pool>,
}

impl Answer {
    pub(super) fn response(response: Response<Incoming>, link: Link, pool: &Arc<Pool>) -> Response<Self> {
        let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        response.map(|body| {
            let mut answer = Self { body, link: Some(link), pool: Arc::clone(pool) };
            if switched {
                answer.let_go();
            } else if answer.body.is_end_stream() {
                answer.end();
            }
            answer
        })
    }

    /// After a switch of protocols the connection belongs to whoever holds its other half.
    fn let_go(&mut self) {
        if let Some(driver) = self.link.take().and_then(|link| link.driver) {
            tokio::spawn(driver);
        }
    }

    fn end(&mut self) {
        if let Some(link) = self.link.take().and_then(Link::freed) {
            self.pool.put(link);
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
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        self.drive(cx);
        // Frames come from driving alone, so driving is all that must be woken for.
        let frame = Pin::new(&mut self.body).poll_frame(&mut Context::from_waker(Waker::noop()));
        match &frame {
            Poll::Ready(Some(Ok(_))) if !self.body.is_end_stream() => {}
            Poll::Ready(Some(Ok(_)) | None) => self.end(),
            Poll::Ready(Some(Err(_))) => self.link = None,
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

/// The errors that `error` stems from, itself first.
pub(super) fn chain<'a>(
    error: &'a (dyn StdError + 'static),
) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}
