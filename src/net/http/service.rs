//! The service behind a listener, and the limits and the address of its clients.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use foretell_policy::form::{As, Size};
use http::{Request, Response};
use schemars::JsonSchema;
use serde::Deserialize;
use tower::Service;

use crate::http::body::Body;
use crate::http::request::RequestBody;

/// Limits on what a client may send before its request is interpreted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Bounds {
    /// Maximum header fields of a request.
    #[schemars(range(min = 1, max = 10_000))]
    pub headers: usize,
    /// Maximum size of them; above it the answer is 431.
    #[serde(with = "As::<Size<usize>>")]
    pub header_bytes: usize,
    /// Maximum size of its target; above it the answer is 414.
    #[serde(with = "As::<Size<usize>>")]
    pub uri: usize,
    /// Time until a head is complete, from the connection's start or from the head's first byte.
    #[serde(skip)]
    pub header_timeout: Duration,
    /// Longest pause within a request body.
    #[serde(skip)]
    pub body: Duration,
    /// Time that a connection may be idle between two requests.
    #[serde(skip)]
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
