//! What clients and operators reach: listeners, and the limits and times of requests.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::forms::{Address, FilePath, HostName};
use foretell_core::session::VERIFY_TIMEOUT;
use foretell_net::http::listen::Bounds;
use foretell_policy::form::{As, Delay, Each, Maybe, Period, Size};

const fn loopback(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)
}

/// A listener.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
pub struct Listen {
    /// IP:PORT, localhost:PORT or :PORT.
    #[serde(with = "As::<Address>")]
    pub address: SocketAddr,
    /// Certificates; null: plain HTTP.
    pub tls: Option<ServerTls>,
}

impl Listen {
    /// The listener of a process without settings.
    pub(super) const fn usual() -> Self {
        Self { address: loopback(8080), tls: None }
    }
}

/// TLS certificates of a listener.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
pub struct ServerTls {
    /// The certificate chain, PEM.
    #[serde(with = "As::<FilePath>")]
    pub cert: PathBuf,
    /// Their key, PEM.
    #[serde(with = "As::<FilePath>")]
    pub key: PathBuf,
    /// Clients need a certificate of these authorities.
    #[serde(default, with = "Maybe::<FilePath>")]
    pub client_ca: Option<PathBuf>,
}

/// Address and access rules of the admin interface.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Admin {
    /// Any other than loopback requires token_file.
    #[serde(with = "As::<Address>")]
    pub address: SocketAddr,
    /// File with the bearer token that it requires.
    #[serde(with = "Maybe::<FilePath>")]
    pub token_file: Option<PathBuf>,
    /// Host names accepted in requests, besides localhost and IP addresses.
    #[serde(with = "Each::<HostName>")]
    pub hosts: Vec<String>,
}

impl Default for Admin {
    fn default() -> Self {
        Self { address: loopback(9464), token_file: None, hosts: Vec::new() }
    }
}

/// A listener that serves only metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Metrics {
    /// Its address; null: none.
    #[serde(with = "Maybe::<Address>")]
    pub address: Option<SocketAddr>,
}

/// Limits on client requests and connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Limits {
    /// Those of a request's head, with the time limits of a client's requests (`timeouts.header`,
    /// `timeouts.body`, `timeouts.keep_alive`).
    #[serde(flatten)]
    pub head: Bounds,
    /// Larger bodies are passed through; unread, unless their model selects the backend.
    #[serde(with = "As::<Size<usize>>")]
    pub speculate_body: usize,
    /// Larger bodies are refused; null: no limit.
    #[serde(with = "Maybe::<Size<u64>>")]
    pub passthrough_body: Option<u64>,
    /// Maximum concurrent speculated requests; further ones are passed through.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub sessions: usize,
    /// Memory of bodies and sessions; above it completions are passed through unread, above twice
    /// that answered with 503.
    #[serde(with = "As::<Size<u64>>")]
    pub memory: u64,
    /// Maximum concurrent clients; null: as many as the limit of open descriptors allows.
    #[schemars(range(min = 1, max = 10_000_000))]
    pub connections: Option<usize>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            head: Bounds::default(),
            speculate_body: 8 << 20,
            passthrough_body: None,
            sessions: 1024,
            memory: 512 << 20,
            connections: None,
        }
    }
}

/// Time limits; those of clients apply by [`Limits::head`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Timeouts {
    /// From connecting, or its first byte, to the end of a request's head.
    #[serde(with = "As::<Period>")]
    pub header: Duration,
    /// Silence within a request's body.
    #[serde(with = "As::<Period>")]
    pub body: Duration,
    /// A connection without a request.
    #[serde(with = "As::<Period>")]
    pub keep_alive: Duration,
    /// To connect to a replica.
    #[serde(with = "As::<Period>")]
    pub connect: Duration,
    /// To the head of an answer.
    #[serde(with = "Maybe::<Period>")]
    pub first_byte: Option<Duration>,
    /// To the next byte of an answer that has begun.
    #[serde(with = "Maybe::<Period>")]
    pub idle: Option<Duration>,
    /// For a verify request.
    #[serde(with = "As::<Period>")]
    pub verify: Duration,
    /// For a draft; null: as long as a draft can pay.
    #[serde(with = "Maybe::<Period>")]
    pub draft: Option<Duration>,
    /// An unused connection to a replica.
    #[serde(with = "As::<Delay>")]
    pub pool_idle: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        let head = Bounds::default();
        Self {
            header: head.header_timeout,
            body: head.body,
            keep_alive: head.keep_alive,
            connect: Duration::from_secs(2),
            first_byte: None,
            idle: None,
            verify: VERIFY_TIMEOUT,
            draft: None,
            pool_idle: Duration::from_secs(3),
        }
    }
}
