//! The service behind a listener, and the limits and the address of its clients.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use http::{Request, Response};
use tower::Service;

use crate::http::body::Body;
use crate::http::request::RequestBody;

/// Limits on a client before its request is interpreted.
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
