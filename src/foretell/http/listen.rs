//! Accepts connections, HTTP/1.1 and h2c on one socket, until stopped.
//!
//! Shared by the proxy, the admin listener and `foretell target`, so that limits, timeouts and
//! shutdown are the same everywhere.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::Service;

use crate::http::body::Body;
use crate::http::connections::{ConnectionSlot, Connections};
use crate::http::request::RequestBody;
use crate::http::serve::{Serving, accepted};
use crate::http::workers::Workers;

/// Minimum time between two log lines about failed accepts.
const QUIET: Duration = Duration::from_mins(1);
/// Pause of a listener after a failed accept.
const BREATH: Duration = Duration::from_millis(20);

/// Limits on what a client may send before its request is interpreted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Maximum number of header fields.
    pub headers: usize,
    /// Maximum size of all header fields, bytes; above it the answer is 431.
    pub header_bytes: usize,
    /// Maximum size of the request target, bytes; above it the answer is 414.
    pub uri: usize,
    /// Time until a head is complete, from the connection's start or from the head's first byte.
    pub header_timeout: Duration,
    /// Longest pause within a request body.
    pub body: Duration,
    /// Time that a connection may be idle between two requests.
    pub keep_alive: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            headers: 100,
            header_bytes: 32 << 10,
            uri: 8 << 10,
            header_timeout: Duration::from_secs(10),
            body: Duration::from_secs(30),
            keep_alive: Duration::from_secs(75),
        }
    }
}

/// Address and TLS settings of a listener.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Address to bind; port 0 takes a free port.
    pub address: SocketAddr,
    /// TLS settings; `None` serves plain HTTP.
    pub tls: Option<Arc<ServerConfig>>,
}

impl From<SocketAddr> for Endpoint {
    fn from(address: SocketAddr) -> Self {
        Self { address, tls: None }
    }
}

#[derive(Clone, Debug, Default)]
pub struct Stop {
    /// When cancelled: accept no more connections, but finish open requests.
    pub accept: CancellationToken,
    /// When cancelled: close every open connection.
    pub cut: CancellationToken,
}

/// The client's end of the connection; added to the extensions of every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub address: SocketAddr,
    /// True if the connection uses TLS.
    pub secure: bool,
}

/// Service that a listener serves, with its layers: always ready, and never an error.
pub trait App:
    Service<Request<RequestBody>, Response = Response<Body>, Error = Infallible, Future: Send>
    + Clone
    + Send
    + Sync
    + 'static
{
}

impl<S> App for S where
    S: Service<Request<RequestBody>, Response = Response<Body>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static
{
}

/// Settings of a listener, besides its socket and its service.
#[derive(Clone, Debug)]
pub struct Listening {
    /// Limits on what clients may send.
    pub bounds: Bounds,
    /// Limits the number of connections, over all listeners that share it; these stop together.
    pub connections: Arc<Connections>,
    /// TLS settings; `None` serves plain HTTP.
    pub tls: Option<Arc<ServerConfig>>,
    pub stop: Stop,
}

impl Listening {
    /// Settings without TLS.
    #[must_use]
    pub fn new(bounds: Bounds, connections: Arc<Connections>, stop: Stop) -> Self {
        Self { bounds, connections, tls: None, stop }
    }
}

/// Serves `listener` with `app` until stopped, then waits until the open connections have ended or
/// are cut. Returns the number that were cut.
pub async fn serve(listener: TcpListener, app: impl App, listening: Listening) -> usize {
    serve_on(&Workers::none(), listener, app, listening).await
}

/// As [`serve`], with the connections spread over `workers`.
pub async fn serve_on(
    workers: &Workers,
    listener: TcpListener,
    app: impl App,
    listening: Listening,
) -> usize {
    let Listening { bounds, connections, tls, stop } = listening;
    let tls = tls.map(TlsAcceptor::from);
    let serving = Arc::new(Serving { app, bounds, tls });
    let open = TaskTracker::new();
    let mut failures = Failures::default();
    loop {
        let came = tokio::select! {
            () = stop.accept.cancelled() => break,
            came = next(&listener, &connections) => came,
        };
        let handed = came.and_then(|(stream, address, slot)| {
            let serving = Arc::clone(&serving);
            workers.spawn(stream, &open, move |stream, share| {
                slot.activity().counts_in(share);
                accepted(stream, address, slot, serving)
            })
        });
        // Out of descriptors, or the peer left while queued: pause, then continue accepting.
        if let Err(error) = handed {
            connections.fail();
            connections.evict();
            failures.log(&error);
            tokio::time::sleep(BREATH).await;
        }
    }
    drop(listener);
    connections.stop();
    open.close();
    tokio::select! {
        () = open.wait() => 0,
        () = stop.cut.cancelled() => {
            let cut = open.len();
            connections.cut();
            open.wait().await;
            cut
        }
    }
}

/// Accepts the next client and waits for a slot for it. (A slot taken before a client arrives would
/// be missing to the other listeners.)
async fn next(
    listener: &TcpListener,
    connections: &Arc<Connections>,
) -> io::Result<(TcpStream, SocketAddr, ConnectionSlot)> {
    let (stream, address) = listener.accept().await?;
    Ok((stream, address, connections.slot(connections.room().await)))
}

/// Logs failed accepts: at most one line per [`QUIET`], with their number since the last line.
#[derive(Default)]
struct Failures {
    said: Option<Instant>,
    since: u64,
}

impl Failures {
    fn log(&mut self, error: &io::Error) {
        self.since += 1;
        if self.said.is_none_or(|said| said.elapsed() >= QUIET) {
            tracing::warn!(%error, count = self.since, "connections could not be accepted");
            (self.said, self.since) = (Some(Instant::now()), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn failures_are_logged_once_a_minute_with_their_number() {
        let mut failures = Failures::default();
        let error = io::Error::from_raw_os_error(24);
        let mut told = Vec::new();
        for second in 0..150 {
            failures.log(&error);
            if failures.since == 0 {
                told.push(second);
            }
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!(told, [0, 60, 120]);
    }
}
