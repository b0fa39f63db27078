//! Accepting connections: http/1.1 and h2c on one socket, until told to stop.
//!
//! Shared by the proxy, the admin listener and `foretell target`, so that header limits, timeouts and the
//! order of shutting down are the same everywhere.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::http::body::Body;
use crate::http::workers::Workers;

/// Bounds on what a client may send before its request is understood.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Most header fields.
    pub headers: usize,
    /// Most bytes of the header section; more gets 431.
    pub header_bytes: usize,
    /// Most bytes of the request target; more gets 414.
    pub uri: usize,
    /// Longest time from connecting to the end of the header section.
    pub header_timeout: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { headers: 100, header_bytes: 32 << 10, uri: 8 << 10, header_timeout: Duration::from_secs(10) }
    }
}

/// Where clients connect.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Port 0 takes a free one.
    pub address: SocketAddr,
    /// The certificate that clients see; without it, plain text.
    pub tls: Option<Arc<ServerConfig>>,
}

impl From<SocketAddr> for Endpoint {
    fn from(address: SocketAddr) -> Self {
        Self { address, tls: None }
    }
}

/// How a listener is told to stop.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    /// Cancelled: accept no more connections and finish what is being answered.
    pub accept: CancellationToken,
    /// Cancelled: cut what is still open.
    pub cut: CancellationToken,
    /// The connections that are open.
    pub connections: Connections,
}

/// Counts open connections.
#[derive(Clone, Debug)]
pub struct Connections(watch::Sender<usize>);

impl Default for Connections {
    fn default() -> Self {
        Self(watch::Sender::new(0))
    }
}

/// A connection that is counted until this is dropped.
#[derive(Debug)]
pub struct Counted(watch::Sender<usize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open = open.saturating_sub(1));
    }
}

impl Connections {
    /// One more is open.
    #[must_use]
    pub fn count(&self) -> Counted {
        self.0.send_modify(|open| *open += 1);
        Counted(self.0.clone())
    }

    /// Waits until none is open.
    pub async fn none(&self) {
        let _ = self.0.subscribe().wait_for(|open| *open == 0).await;
    }
}

/// The other end, in the extensions of every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its address.
    pub address: SocketAddr,
    /// It came by TLS.
    pub secure: bool,
}

/// Serves `listener` with `app` until `stop.accept` is cancelled, then waits for open connections until they
/// are done or `stop.cut` is cancelled. Returns how many connections were cut.
pub async fn serve<A, F>(listener: TcpListener, app: A, bounds: Bounds, stop: Stop) -> usize
where
    A: Fn(Request<Incoming>) -> F + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    serve_on(&Workers::none(), listener, None, app, bounds, stop).await
}

/// As [`serve`], with the connections on `workers`, and by TLS if `tls` says how.
pub async fn serve_on<A, F>(
    workers: &Workers,
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
    app: A,
    bounds: Bounds,
    stop: Stop,
) -> usize
where
    A: Fn(Request<Incoming>) -> F + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let app = Arc::new(app);
    let tls = tls.map(TlsAcceptor::from);
    let connections = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            () = stop.accept.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let handed = accepted.and_then(|(stream, peer)| {
            let (app, stop, tls) = (Arc::clone(&app), stop.clone(), tls.clone());
            let peer = Peer { address: peer, secure: tls.is_some() };
            workers
                .spawn(stream, &connections, move |stream| accepted_by(stream, tls, peer, app, bounds, stop))
        });
        // Out of descriptors, or the peer left while queued: breathe, then go on accepting.
        if let Err(error) = handed {
            tracing::warn!(%error, "accept failed");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    drop(listener);
    connections.close();
    tokio::select! {
        () = connections.wait() => 0,
        () = stop.cut.cancelled() => {
            let open = connections.len();
            connections.wait().await;
            open
        }
    }
}

fn builder(bounds: Bounds) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(bounds.header_timeout)
        .max_headers(bounds.headers)
        // Answers are mostly small chunks: copying one into a single write is cheaper than gathering it.
        .writev(false)
        .max_buf_size(bounds.header_bytes.max(8 << 10));
    builder.http2().timer(TokioTimer::new()).max_header_list_size(bounds.header_bytes as u32);
    builder
}

async fn accepted_by<A, F>(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    peer: Peer,
    app: Arc<A>,
    bounds: Bounds,
    stop: Stop,
) where
    A: Fn(Request<Incoming>) -> F + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let _counted = stop.connections.count();
    // A token is a small write; waiting to fill a segment would hold it back.
    let _ = stream.set_nodelay(true);
    let Some(tls) = tls else { return connection(stream, peer, app, bounds, stop).await };
    let shaken = tokio::select! {
        shaken = tokio::time::timeout(bounds.header_timeout, tls.accept(stream)) => shaken,
        () = stop.accept.cancelled() => return,
    };
    match shaken {
        Ok(Ok(stream)) => connection(stream, peer, app, bounds, stop).await,
        Ok(Err(error)) => tracing::debug!(%error, "no TLS handshake"),
        Err(_) => tracing::debug!("no TLS handshake in time"),
    }
}

async fn connection<S, A, F>(stream: S, peer: Peer, app: Arc<A>, bounds: Bounds, stop: Stop)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    A: Fn(Request<Incoming>) -> F + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let asked = Arc::new(AtomicBool::new(false));
    let service = {
        let asked = Arc::clone(&asked);
        service_fn(move |mut request: Request<Incoming>| {
            asked.store(true, Ordering::Relaxed);
            let too_long =
                request.uri().path_and_query().is_some_and(|path| path.as_str().len() > bounds.uri);
            request.extensions_mut().insert(peer);
            let answer = (!too_long).then(|| app(request));
            async move {
                Ok::<_, Infallible>(match answer {
                    Some(answer) => answer.await,
                    None => uri_too_long(),
                })
            }
        })
    };
    let builder = builder(bounds);
    let served = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    tokio::pin!(served);
    let (mut stopping, mut waiting) = (false, true);
    let deadline = tokio::time::sleep(bounds.header_timeout);
    tokio::pin!(deadline);
    loop {
        tokio::select! {
            biased;
            outcome = served.as_mut() => {
                if let Err(error) = outcome {
                    tracing::debug!(%error, "connection ended");
                }
                return;
            }
            () = stop.accept.cancelled(), if !stopping => {
                stopping = true;
                served.as_mut().graceful_shutdown();
            }
            () = stop.cut.cancelled(), if stopping => return,
            // hyper's own timer starts only once it knows the protocol, which a silent client never tells.
            () = deadline.as_mut(), if waiting => {
                waiting = false;
                if !asked.load(Ordering::Relaxed) {
                    return;
                }
            }
        }
    }
}

fn uri_too_long() -> Response<Body> {
    super::answer::error_response(
        StatusCode::URI_TOO_LONG,
        "the request target is too long",
        None,
        "uri_too_long",
    )
}
