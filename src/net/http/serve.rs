//! Serves one client connection, HTTP/1.1 or HTTP/2, until it ends, is overdue, or is stopped.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, HOST};
use http::{HeaderValue, Request, Response, StatusCode, Version};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

use crate::http::activity::{Activity, Overdue, UnderWay};
use crate::http::body::{Body, BoxError};
use crate::http::connections::{ConnectionSlot, Connections};
use crate::http::head;
use crate::http::opening::Protocol;
use crate::http::request::RequestBody;
use crate::http::service::{App, Bounds, Peer};
use crate::http::socket::Socket;

/// Maximum buffer of hyper for an HTTP/2 stream that is not read, in each direction, bytes.
const STREAM_WINDOW: u32 = 64 << 10;
/// As [`STREAM_WINDOW`], for all streams of a connection together.
const CONNECTION_WINDOW: u32 = 256 << 10;
/// Longest request target that hyper accepts, bytes.
const TARGET: usize = 64 << 10;

/// State shared by all connections of a listener.
pub struct Serving<A> {
    /// Service that answers requests.
    pub app: A,
    /// Limits on what clients may send.
    pub bounds: Bounds,
    /// Accepts TLS connections; `None`: plain HTTP.
    pub tls: Option<TlsAcceptor>,
}

/// Maximum number of concurrent requests on one HTTP/2 connection.
const STREAMS: usize = 100;
/// Interval of HTTP/2 pings, and of TCP keep-alives, on a silent connection; they detect a client
/// that has vanished.
const PING: Duration = Duration::from_mins(1);
/// Time limit of the answer to a ping.
const PONG: Duration = Duration::from_secs(20);

/// Maximum size of a head that hyper gets at once, bytes; it refuses longer ones itself.
fn head_bytes(bounds: &Bounds) -> usize {
    bounds.header_bytes.saturating_add(bounds.uri.min(TARGET)).max(8 << 10)
}

fn http1_builder(bounds: &Bounds) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(None)
        .max_headers(bounds.headers)
        // Answers are mostly small chunks: copying one into a single write is cheaper than
        // gathering it.
        .writev(false)
        .max_buf_size(head_bytes(bounds));
    builder
}

fn http2_builder(bounds: &Bounds, streams: usize) -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(STREAM_WINDOW as usize)
        .max_concurrent_streams(streams as u32)
        .keep_alive_interval(PING)
        .keep_alive_timeout(PONG)
        .max_header_list_size(bounds.header_bytes as u32);
    builder
}

/// Serves an accepted connection, after a TLS handshake if TLS is set.
pub async fn accepted(
    stream: TcpStream,
    address: std::net::SocketAddr,
    slot: ConnectionSlot,
    serving: Arc<Serving<impl App>>,
) {
    // Tokens are small writes; Nagle's algorithm would delay them.
    let _ = stream.set_nodelay(true);
    let _ = sockopt::set_socket_keepalive(&stream, true);
    let _ = sockopt::set_tcp_keepidle(&stream, PING);
    let _ = sockopt::set_tcp_keepintvl(&stream, PONG);
    let peer = Peer { address, secure: serving.tls.is_some() };
    let Some(tls) = &serving.tls else { return connection(stream, peer, slot, serving).await };
    let sleep = tokio::time::sleep(serving.bounds.header_timeout);
    tokio::pin!(sleep);
    let shaken = tokio::select! {
        shaken = Box::pin(tls.accept(stream)) => shaken,
        _ = poll_fn(|cx| slot.activity().poll_overdue(cx, &serving.bounds, sleep.as_mut())) => {
            return tracing::debug!("no TLS handshake in time, or it stops");
        }
    };
    match shaken {
        // Boxed, so that a connection without TLS does not reserve room for one with it.
        Ok(stream) => Box::pin(connection(stream, peer, slot, serving)).await,
        Err(error) => tracing::debug!(%error, "no TLS handshake"),
    }
}

async fn connection<S>(stream: S, peer: Peer, slot: ConnectionSlot, serving: Arc<Serving<impl App>>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let bounds = serving.bounds;
    let activity = Arc::clone(slot.activity());
    let connections = Arc::clone(slot.connections());
    let sleep = tokio::time::sleep(bounds.header_timeout);
    tokio::pin!(sleep);
    let mut socket = Socket::new(stream, slot, bounds.uri);
    let mut until = Deadlines { activity: &activity, bounds: &bounds, sleep, peer };
    let Some(protocol) = until.open(&mut socket).await else { return };
    let streams = STREAMS.min(connections.limit().div_ceil(4));
    let service = {
        let activity = Arc::clone(&activity);
        service_fn(move |request| answer(&serving, &activity, &connections, peer, request))
    };
    // Only one of them is needed, and both are large.
    let socket = TokioIo::new(socket);
    match protocol {
        Protocol::Http1 => {
            let served = http1_builder(&bounds).serve_connection(socket, service).with_upgrades();
            until.end(Box::pin(served), http1::UpgradeableConnection::graceful_shutdown).await;
        }
        Protocol::Http2 => {
            let served = http2_builder(&bounds, streams).serve_connection(socket, service);
            until.end(Box::pin(served), http2::Connection::graceful_shutdown).await;
        }
    }
}

/// Time limits of a connection.
struct Deadlines<'a> {
    activity: &'a Activity,
    bounds: &'a Bounds,
    sleep: Pin<&'a mut Sleep>,
    peer: Peer,
}

impl Deadlines<'_> {
    /// Waits for the connection's first head; `None` if it has ended, or is to end.
    async fn open<S: AsyncRead + Unpin>(&mut self, socket: &mut Socket<S>) -> Option<Protocol> {
        let max_bytes = head_bytes(self.bounds);
        loop {
            tokio::select! {
                biased;
                opened = poll_fn(|cx| socket.poll_open(cx, max_bytes)) => {
                    return opened
                        .inspect_err(|error| tracing::debug!(%error, "connection ended"))
                        .ok()
                        .flatten();
                }
                why = poll_fn(|cx| self.activity.poll_overdue(cx, self.bounds, self.sleep.as_mut())) => {
                    // A head that has begun is waited for, as hyper does.
                    let may_finish = matches!(why, Overdue::Idle | Overdue::Stopped);
                    if !may_finish || socket.is_unused() {
                        return None;
                    }
                    self.activity.leave();
                }
            }
        }
    }

    /// Serves the connection until it has ended, or is overdue. `stop` begins its graceful end.
    async fn end<C>(&mut self, mut served: Pin<Box<C>>, stop: impl Fn(Pin<&mut C>))
    where
        C: Future<Output = hyper::Result<()>>,
    {
        if self.activity.is_leaving() {
            stop(served.as_mut());
        }
        loop {
            tokio::select! {
                biased;
                outcome = served.as_mut() => {
                    if let Err(error) = outcome {
                        tracing::debug!(%error, "connection ended");
                    }
                    return;
                }
                why = poll_fn(|cx| self.activity.poll_overdue(cx, self.bounds, self.sleep.as_mut())) => match why {
                    Overdue::Idle | Overdue::Stopped => {
                        self.activity.leave();
                        stop(served.as_mut());
                    }
                    Overdue::Head | Overdue::Lingering | Overdue::Cut => return,
                    Overdue::Blocked => {
                        return tracing::info!(peer = %self.peer.address, "cut: the client does not read");
                    }
                },
            }
        }
    }
}

/// Answers one request, or refuses it because of its head.
///
/// hyper moves the returned future and reserves room for it on every connection. So it contains the
/// request, and the much larger future of its answer is created when it is polled.
fn answer<A: App>(
    serving: &Arc<Serving<A>>,
    activity: &Arc<Activity>,
    connections: &Connections,
    peer: Peer,
    request: Request<Incoming>,
) -> impl Future<Output = Result<Response<Answered>, Infallible>> + Send + use<A> {
    let mut under_way = activity.request(request.version());
    let (serving, activity) = (Arc::clone(serving), Arc::clone(activity));
    let is_http1 = request.version() <= Version::HTTP_11;
    let (mut head, body) = request.into_parts();
    let request = if let Some(refusal) = head::refusal(&head, &serving.bounds) {
        connections.refuse(refusal);
        tracing::debug!(peer = %peer.address, code = refusal.code(), "request refused");
        Err(refusal)
    } else {
        name_host(&mut head, is_http1);
        head.extensions.insert(peer);
        Ok(Request::from_parts(head, RequestBody::new(body, serving.bounds.body)))
    };
    let room = connections.request();
    async move {
        // A request needs a descriptor for its backend, and HTTP/2 has many requests on one
        // connection.
        let room = room.await;
        let refused = request.is_err();
        let mut response = match request {
            Ok(request) => Box::pin(serving.app.clone().oneshot(request)).await?,
            Err(refusal) => refusal.response(),
        };
        // The request was not read to its end, so the connection will close, which the header
        // announces.
        let unread = refused || response.status() == StatusCode::REQUEST_TIMEOUT;
        if is_http1 && unread {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            activity.switch();
        }
        under_way.window_shut(!is_http1);
        Ok(response.map(|body| Answered { body, failed: None, under_way, is_http1, _room: room }))
    }
}

/// Sets `Host` from a target in absolute form, which takes precedence (RFC 9112, 3.2.2).
fn name_host(head: &mut http::request::Parts, is_http1: bool) {
    if is_http1
        && let Some(authority) = head.uri.authority()
        && let Ok(host) = HeaderValue::from_str(authority.as_str())
    {
        head.headers.insert(HOST, host);
    }
}

/// An answer body; its request counts as being served until the body is dropped.
struct Answered {
    body: Body,
    /// An error of the body, to be returned next.
    failed: Option<BoxError>,
    under_way: UnderWay,
    /// True for HTTP/1.1, where the socket detects that the client does not read.
    is_http1: bool,
    _room: Option<OwnedSemaphorePermit>,
}

impl http_body::Body for Answered {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(error) = self.failed.take() {
            return Poll::Ready(Some(Err(error)));
        }
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if !self.is_http1 {
            self.under_way.window_shut(polled.is_ready());
        }
        match polled {
            // When a body fails, hyper drops the bytes not yet written, even the head. It writes
            // when a body pauses.
            Poll::Ready(Some(Err(error))) => {
                self.failed = Some(error);
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            polled => polled,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use http_body_util::{BodyExt, StreamBody};

    use super::*;

    #[test]
    fn a_failing_body_pauses_first_so_that_its_bytes_are_written() {
        let frames: [Result<Frame<Bytes>, BoxError>; 2] =
            [Ok(Frame::data(Bytes::from_static(b"a"))), Err("it broke off".into())];
        let mut answered = Answered {
            body: StreamBody::new(futures_util::stream::iter(frames)).boxed_unsync(),
            failed: None,
            under_way: Activity::begin().request(Version::HTTP_11),
            is_http1: true,
            _room: None,
        };
        let mut polled = || {
            let mut cx = Context::from_waker(Waker::noop());
            http_body::Body::poll_frame(Pin::new(&mut answered), &mut cx)
        };
        assert!(matches!(polled(), Poll::Ready(Some(Ok(_)))));
        assert!(polled().is_pending());
        assert!(matches!(polled(), Poll::Ready(Some(Err(_)))));
    }
}
