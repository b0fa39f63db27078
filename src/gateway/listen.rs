//! Accepting connections: http/1.1 and h2c on one socket, until told to stop.
//!
//! Shared by the proxy, the admin listener and `foretell target`, so that header limits, timeouts and the
//! order of shutting down are the same everywhere.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Any error that may cut a body short.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// The body type of every response that Foretell writes.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

/// Bounds on what a client may send before its request is understood.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Most header fields.
    pub headers: usize,
    /// Most bytes of the header section.
    pub header_bytes: usize,
    /// Longest time from connecting to the end of the header section.
    pub header_timeout: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { headers: 100, header_bytes: 32 << 10, header_timeout: Duration::from_secs(10) }
    }
}

/// How a listener is told to stop.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    /// Cancelled: accept no more connections and finish what is being answered.
    pub accept: CancellationToken,
    /// Cancelled: cut what is still open.
    pub cut: CancellationToken,
}

/// Serves `listener` with `app` until `stop.accept` is cancelled, then waits for open connections until they
/// are done or `stop.cut` is cancelled. Returns how many connections were cut.
pub async fn serve<A, F>(listener: TcpListener, app: A, bounds: Bounds, stop: Stop) -> usize
where
    A: Fn(Request<Incoming>) -> F + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let app = Arc::new(app);
    let connections = TaskTracker::new();
    loop {
        tokio::select! {
            () = stop.accept.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection(stream, Arc::clone(&app), bounds, stop.clone()));
                }
                // Out of descriptors, or the peer left while queued: breathe, then go on accepting.
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            },
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

async fn connection<A, F>(stream: TcpStream, app: Arc<A>, bounds: Bounds, stop: Stop)
where
    A: Fn(Request<Incoming>) -> F + Send + Sync + 'static,
    F: Future<Output = Response<Body>> + Send + 'static,
{
    // A token is a small write; waiting to fill a segment would hold it back.
    let _ = stream.set_nodelay(true);
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(bounds.header_timeout)
        .max_headers(bounds.headers)
        .max_buf_size(bounds.header_bytes.max(8 << 10));
    builder.http2().timer(TokioTimer::new()).max_header_list_size(bounds.header_bytes as u32);
    let service = service_fn(move |request| {
        let answer = app(request);
        async move { Ok::<_, Infallible>(answer.await) }
    });
    let served = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    tokio::pin!(served);
    let outcome = tokio::select! {
        outcome = served.as_mut() => outcome,
        () = stop.accept.cancelled() => {
            served.as_mut().graceful_shutdown();
            tokio::select! {
                outcome = served.as_mut() => outcome,
                () = stop.cut.cancelled() => return,
            }
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "connection ended");
    }
}
