//! Accepts connections, HTTP/1.1 and h2c on one socket, until stopped.
//!
//! Shared by the proxy, the admin listener and `foretell target`, so that limits, timeouts and
//! shutdown are the same everywhere.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::http::connections::{ConnectionSlot, Connections};
use crate::http::serve::{Serving, accepted};
pub use crate::http::service::{App, Bounds, Peer};
use crate::http::workers::Workers;

/// Minimum time between two log lines about failed accepts.
const LOG_INTERVAL: Duration = Duration::from_mins(1);
/// Pause of a listener after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

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

/// Settings of a listener, besides its socket and its service.
#[derive(Clone, Debug)]
pub struct Listening {
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
        let client = tokio::select! {
            () = stop.accept.cancelled() => break,
            client = next(&listener, &connections) => client,
        };
        let handed = client.and_then(|(stream, address, slot)| {
            let serving = Arc::clone(&serving);
            workers.spawn(stream, &open, move |stream, share| {
                slot.activity().counts_in(share);
                accepted(stream, address, slot, serving)
            })
        });
        // No free descriptors, or the queued peer disconnected: pause, then continue accepting.
        if let Err(error) = handed {
            connections.fail();
            connections.evict();
            failures.log(&error);
            tokio::time::sleep(ACCEPT_PAUSE).await;
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

/// Logs failed accepts: at most one line per [`LOG_INTERVAL`], with their number since then.
#[derive(Default)]
struct Failures {
    logged: Option<Instant>,
    since: u64,
}

impl Failures {
    fn log(&mut self, error: &io::Error) {
        self.since += 1;
        if self.logged.is_none_or(|logged| logged.elapsed() >= LOG_INTERVAL) {
            tracing::warn!(%error, count = self.since, "connections could not be accepted");
            self.logged = Some(Instant::now());
            self.since = 0;
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
