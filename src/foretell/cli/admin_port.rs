//! Client of a running proxy's admin API.

use std::fmt::{self, Display};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use http::header::AUTHORIZATION;
use http::uri::InvalidUri;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt, Limited};

use foretell_config::flags::OPEN;
use foretell_config::problem::DOCUMENT;
use foretell_config::{Flags, Problem, Strings, attempt};
use foretell_net::fleet::{Replica, ReplicaSettings, SendError, SendErrorKind};
use foretell_net::http::body::full;

/// Maximum size of an answer that is read, bytes; all are far smaller.
const MAX: usize = 16 << 20;

/// Address of the admin API, and the token that it requires.
pub(super) struct AdminPort {
    /// An address to connect to.
    pub(super) address: SocketAddr,
    token: Option<HeaderValue>,
}

/// Reason that a call got no answer.
pub(super) enum Fault {
    /// No server listens on the address.
    Nobody,
    Other(String),
}

impl Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Nobody => "nobody listens there",
            Self::Other(why) => why,
        })
    }
}

impl From<SendError> for Fault {
    fn from(error: SendError) -> Self {
        if error.kind() == SendErrorKind::Connect { Self::Nobody } else { Self::Other(error.to_string()) }
    }
}

impl AdminPort {
    /// The port of a proxy that listens on `address`. A token file that cannot be read counts as
    /// none: the proxy then reports that it requires one.
    pub(super) fn new(address: SocketAddr, token_file: Option<&Path>) -> Self {
        let text = token_file.and_then(|path| std::fs::read_to_string(path).ok());
        let token = text.and_then(|text| HeaderValue::try_from(format!("Bearer {}", text.trim())).ok());
        Self { address: reachable(address), token }
    }

    /// The port of the proxy with these settings.
    ///
    /// # Errors
    /// The problems because of which its address is not known.
    pub(super) fn of(
        flags: &Flags,
        token_file: Option<PathBuf>,
        environment: &dyn Strings,
    ) -> Result<Self, Vec<Problem>> {
        let mut attempt = attempt(flags, environment);
        // The proxy runs with an earlier content of the files, so other faults do not matter; and
        // it reports which token it requires.
        let matters = |problem: &Problem| {
            let position = problem.path.starts_with("admin") || problem.path == DOCUMENT;
            position && problem.message != OPEN
        };
        attempt.problems.retain(matters);
        if !attempt.problems.is_empty() {
            return Err(attempt.problems);
        }
        let admin = attempt.process.admin;
        Ok(Self::new(admin.address, token_file.or(admin.token_file).as_deref()))
    }

    /// True if an admin token is sent.
    pub(super) const fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Requests `path` and returns status and body of the answer.
    ///
    /// # Errors
    /// There is no answer.
    pub(super) async fn get(&self, path: &str) -> Result<(StatusCode, Vec<u8>), Fault> {
        self.send(Method::GET, path, HeaderMap::new(), Vec::new()).await
    }

    /// Sends a command and returns status and body of the answer.
    ///
    /// # Errors
    /// There is no answer.
    pub(super) async fn post(
        &self,
        path: &str,
        fields: HeaderMap,
        body: Vec<u8>,
    ) -> Result<(StatusCode, Vec<u8>), Fault> {
        self.send(Method::POST, path, fields, body).await
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        fields: HeaderMap,
        body: Vec<u8>,
    ) -> Result<(StatusCode, Vec<u8>), Fault> {
        let other = |error: &dyn Display| Fault::Other(error.to_string());
        let settings = ReplicaSettings::new("admin", format!("http://{}", self.address));
        let admin = Replica::new(settings).map_err(|error| other(&error))?;
        let mut request = Request::new(full(body));
        *request.method_mut() = method;
        *request.uri_mut() = path.parse().map_err(|error: InvalidUri| other(&error))?;
        *request.headers_mut() = fields;
        if let Some(token) = &self.token {
            request.headers_mut().insert(AUTHORIZATION, token.clone());
        }
        let response = admin.send_additional(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX).collect().await;
        Ok((status, body.map_err(|error| other(&error))?.to_bytes().to_vec()))
    }
}

/// An address to connect to, from one to listen on: the unspecified address becomes loopback.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}
