//! Failures of a call to a backend before its answer begins.

use std::error::Error as StdError;
use std::io;
use std::time::Duration;

use http::StatusCode;
use rustix::io::Errno;
use rustls::CertificateError;

use crate::http::request::Silent;

/// The `code` of the error body where the client's body stalled.
pub const REQUEST_TIMEOUT: &str = "request_timeout";

/// Error for a certificate as `openssl req -x509` makes it by default.
const CA_AS_SERVER: &str = "TLS refused: the server shows an authority's certificate (CA:TRUE), which no server may \
     show: make it with `-addext basicConstraints=critical,CA:FALSE`, or have that authority sign one for the server";

/// A call to a backend that got no answer.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// No connection: refused, unknown host, TLS.
    #[error("cannot connect to backend `{backend}` at {url}: {detail}")]
    Connect {
        backend: String,
        url: String,
        /// The cause that the system reports.
        detail: String,
    },
    #[error(
        "connecting to backend `{backend}` at {url} took too long (TLS included, where the address is https)"
    )]
    ConnectTimeout { backend: String, url: String },
    /// The process had no free file descriptor for a connection until the connect timeout.
    #[error("no file descriptor is free for a connection to backend `{backend}`")]
    NoDescriptor { backend: String },
    /// No byte of an answer within the configured time.
    #[error("backend `{backend}` sent no answer within {after:?}")]
    FirstByteTimeout { backend: String, after: Duration },
    /// The connection ended before an answer began.
    #[error("backend `{backend}` closed the connection before it answered")]
    Closed {
        backend: String,
        /// True if the connection had answered before: the backend may have closed it as idle while
        /// the request was sent.
        reused: bool,
    },
    #[error(
        "another process answers at the address of backend `{backend}` than the one that the request belongs to"
    )]
    Changed { backend: String },
    /// A new connection does not identify the process that it leads to.
    #[error("a new connection to backend `{backend}` does not identify its process: {detail}")]
    Untied {
        backend: String,
        /// The response received instead of the identifying page.
        detail: String,
    },
    /// The response is not HTTP.
    #[error("backend `{backend}` sent an answer that is not HTTP: {detail}")]
    Protocol {
        backend: String,
        /// The parser's error.
        detail: String,
    },
    /// The client's body broke off.
    #[error("the request body ended early: {detail}")]
    RequestBody { detail: String },
    /// The client's body stalled.
    #[error(transparent)]
    RequestSilent(Silent),
    /// The client's body exceeded a limit.
    #[error("the request body is too large")]
    RequestTooLarge,
    /// The request cannot be expressed in HTTP.
    #[error("the request cannot be sent to backend `{backend}`: {detail}")]
    Unsendable {
        backend: String,
        /// The cause, for the operator.
        detail: String,
    },
}

/// The kinds of [`SendError`], for metrics and for the choice of the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SendErrorKind {
    Connect,
    /// Connecting, or the first byte, took too long.
    Timeout,
    /// The backend closed the connection before it answered.
    Closed,
    /// The answer is not HTTP.
    Protocol,
    /// Another process answers than the one that the request belongs to, or the process is unknown.
    Changed,
    /// Not caused by the backend: the request itself (its body, or a header field), or a limit of
    /// this process.
    Request,
}

impl SendErrorKind {
    pub const fn code(self) -> &'static str {
        match self {
            Self::Connect => "backend_unreachable",
            Self::Timeout => "backend_timeout",
            Self::Closed => "backend_closed",
            Self::Protocol => "backend_protocol",
            Self::Changed => "backend_changed",
            Self::Request => "bad_request_body",
        }
    }
}

impl SendError {
    pub fn kind(&self) -> SendErrorKind {
        match self {
            Self::Connect { .. } => SendErrorKind::Connect,
            Self::ConnectTimeout { .. } | Self::FirstByteTimeout { .. } => SendErrorKind::Timeout,
            Self::Closed { .. } => SendErrorKind::Closed,
            Self::Protocol { .. } => SendErrorKind::Protocol,
            Self::Changed { .. } | Self::Untied { .. } => SendErrorKind::Changed,
            Self::RequestBody { .. }
            | Self::RequestSilent(_)
            | Self::RequestTooLarge
            | Self::NoDescriptor { .. }
            | Self::Unsendable { .. } => SendErrorKind::Request,
        }
    }

    pub fn code(&self) -> &'static str {
        match self {
            Self::RequestSilent(_) => REQUEST_TIMEOUT,
            Self::NoDescriptor { .. } => "no_descriptor",
            error => error.kind().code(),
        }
    }

    pub fn status(&self) -> StatusCode {
        match self.kind() {
            SendErrorKind::Request if matches!(self, Self::RequestSilent(_)) => StatusCode::REQUEST_TIMEOUT,
            SendErrorKind::Request if matches!(self, Self::NoDescriptor { .. }) => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            SendErrorKind::Connect
            | SendErrorKind::Closed
            | SendErrorKind::Protocol
            | SendErrorKind::Changed => StatusCode::BAD_GATEWAY,
            SendErrorKind::Timeout => StatusCode::GATEWAY_TIMEOUT,
            SendErrorKind::Request => StatusCode::BAD_REQUEST,
        }
    }

    /// True if the request's body exceeded its limit.
    pub fn is_limit(&self) -> bool {
        matches!(self, Self::RequestTooLarge)
    }

    pub(super) fn of_connecting(backend: &str, url: &str, error: &(dyn StdError + 'static)) -> Self {
        let (backend, url) = (backend.to_owned(), url.to_owned());
        let late = find::<io::Error>(error).is_some_and(|io| io.kind() == io::ErrorKind::TimedOut);
        if late {
            return Self::ConnectTimeout { backend, url };
        }
        let detail = refused_tls(error).unwrap_or_else(|| root(error));
        Self::Connect { backend, url, detail }
    }

    /// The error for a request whose body failed.
    pub(super) fn of_body(error: &(dyn StdError + 'static)) -> Self {
        match find::<Silent>(error) {
            Some(silent) => Self::RequestSilent(*silent),
            None if is_limit(error) => Self::RequestTooLarge,
            None => Self::RequestBody { detail: root(error) },
        }
    }

    /// True if a connection that had answered before was closed without a byte of an answer.
    pub fn is_race(&self) -> bool {
        matches!(self, Self::Closed { reused: true, .. })
    }

    pub(super) fn of_call(backend: &str, error: &hyper::Error, reused: bool) -> Self {
        let backend = backend.to_owned();
        if error.is_user() || is_limit(error) || find::<Silent>(error).is_some() {
            Self::of_body(error)
        } else if error.is_parse() {
            Self::Protocol { backend, detail: root(error) }
        } else {
            Self::Closed { backend, reused }
        }
    }
}

/// True if the process, or the system, has no free file descriptor.
pub(super) fn is_out_of_descriptors(error: &(dyn StdError + 'static)) -> bool {
    let code = find::<std::io::Error>(error).and_then(std::io::Error::raw_os_error);
    code.is_some_and(|code| [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error).contains(&code))
}

fn is_limit(error: &(dyn StdError + 'static)) -> bool {
    find::<http_body_util::LengthLimitError>(error).is_some()
}

fn find<'a, E: StdError + 'static>(error: &'a (dyn StdError + 'static)) -> Option<&'a E> {
    chain(error).find_map(|error| error.downcast_ref::<E>())
}

/// The text of the innermost source of an error.
pub(super) fn root(error: &(dyn StdError + 'static)) -> String {
    chain(error).last().map(ToString::to_string).unwrap_or_default()
}

/// The errors that `error` stems from, itself first.
pub(super) fn chain<'a>(
    error: &'a (dyn StdError + 'static),
) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}

/// The TLS error that `error` is or wraps; the content of an I/O error is not among its sources.
fn tls_error<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a rustls::Error> {
    match error.downcast_ref::<io::Error>() {
        Some(io) => tls_error(io.get_ref()?),
        None => error.downcast_ref::<rustls::Error>(),
    }
}

/// Reason that the TLS handshake failed, with a hint how to fix it; `None` if something else
/// failed.
pub fn refused_tls(error: &(dyn StdError + 'static)) -> Option<String> {
    let refused = chain(error).find_map(tls_error)?;
    let hint = match refused {
        rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
            ": name the authority that has signed it as connect.tls.ca, or by --ca"
        }
        rustls::Error::InvalidCertificate(CertificateError::Other(other))
            if format!("{other:?}").contains("CaUsedAsEndEntity") =>
        {
            return Some(CA_AS_SERVER.to_owned());
        }
        rustls::Error::InvalidMessage(_) => ": it seems to speak plain http",
        _ => "",
    };
    Some(format!("TLS refused: {refused}{hint}"))
}
