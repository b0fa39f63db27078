//! The config file (`foretell.yaml`), validated: listeners, backends and limits.

mod backend;
mod backends;
pub(super) mod file;
mod store;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use http::Uri;
use indexmap::IndexMap;

use super::values::Network;
use foretell_core::words::Mode;
use foretell_net::http::drain::DrainTimes;
use foretell_net::http::listen::Bounds;
use foretell_onnx::open::DeviceChoice;

pub(super) use backends::SLOTS;

pub use backend::{
    Backend, Connect, Dialect, HostHeader, Load, Model, Probe, ProbeWhen, Render, Replicas, TokenizerSource,
    VerifyLimits,
};
pub(super) use file::{MODE_HINTS, MODES};
pub use file::{Parsed, parse, parse_all, schema};
pub use store::{Fleet, StoreUrl};

/// The name listed for `value`; empty if it is not in the list.
pub(super) fn name_of<T: PartialEq + Copy>(names: &[(&'static str, T)], value: T) -> &'static str {
    names.iter().find(|(_, named)| *named == value).map_or("", |(name, _)| name)
}

/// The validated config file, with flags and environment variables applied.
#[derive(Clone, Debug, PartialEq)]
pub struct Process {
    /// Operating mode of the whole process; the admin API can change it at run time.
    pub mode: Mode,
    /// The flag or variable that sets the mode, which an edit of the file then does not change;
    /// `None`: the file or the default does.
    pub mode_source: Option<String>,
    /// Listeners for clients; at least one.
    pub listen: Vec<Listen>,
    /// Listener and access rules of the admin interface.
    pub admin: Admin,
    /// Address of a listener that serves only `/metrics`; `None`: metrics are served by the admin
    /// interface alone.
    pub metrics: Option<SocketAddr>,
    /// Limits on client requests and connections.
    pub limits: Limits,
    /// Time limits for backends and drafters.
    pub timeouts: Timeouts,
    /// Durations of an orderly shutdown.
    pub drain: DrainTimes,
    /// How the tenant of a request is determined.
    pub tenant: Tenant,
    /// Permissions of the client header `x-foretell`.
    pub client: ClientControl,
    /// The backends, in the order of the file.
    pub backends: Vec<Backend>,
    /// Drafter models, by the name under which policies refer to them.
    pub drafters: IndexMap<String, DrafterModel>,
    /// Limits of the corpus, the texts that drafters keep across requests.
    pub corpus: Corpus,
    /// The store over which sidecars share what they measure.
    pub fleet: Fleet,
    /// Conditions of `/readyz`.
    pub ready: Ready,
    /// Folder of the policy files.
    pub policies: PathBuf,
    /// If true, a missing policy folder is an error: it was named explicitly, or it existed at the
    /// first reading.
    pub policies_must_exist: bool,
    /// Logging and tracing.
    pub observe: Observe,
    /// The config file as it was read; `None` without one.
    pub file: Option<ProcessFile>,
    /// The [`fingerprint`](super::load::fingerprint) of the policy files as they were read with
    /// these settings; `None` if the policies do not come from files, so that there is nothing to
    /// watch.
    pub policies_read: Option<u64>,
}

/// A config file and its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessFile {
    /// Its path.
    pub path: PathBuf,
    /// Its text.
    pub text: String,
}

/// A listener for clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// Address and port that it binds.
    pub address: SocketAddr,
    /// TLS certificates; `None` serves plain HTTP.
    pub tls: Option<ServerTls>,
}

/// TLS certificates of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerTls {
    /// The certificate chain, PEM.
    pub cert: PathBuf,
    /// The private key, PEM.
    pub key: PathBuf,
    /// Authorities (PEM) that must have signed every client's certificate; `None`: no client
    /// certificate is required.
    pub client_ca: Option<PathBuf>,
}

/// Address and access rules of the admin interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// Address that it binds; any other than loopback requires `token_file`.
    pub address: SocketAddr,
    /// File with the bearer token that callers must send; `None`: no token is required.
    pub token_file: Option<PathBuf>,
    /// Host names accepted in the `Host` header, besides `localhost` and IP addresses.
    pub hosts: Vec<String>,
}

/// Limits on client requests and connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Limits of a request's head, with the time limits of a client's requests (`timeouts.header`,
    /// `timeouts.body`, `timeouts.keep_alive`).
    pub head: Bounds,
    /// Maximum size of a request body considered for speculation, bytes; larger ones are passed
    /// through without being read.
    pub speculate_body: usize,
    /// Maximum size of a request body, bytes; larger ones are refused. `None`: no limit.
    pub passthrough_body: Option<u64>,
    /// Maximum number of concurrent speculated requests; further ones are passed through. 0: all.
    pub sessions: usize,
    /// Maximum memory for bodies and sessions together, bytes; above it completions are passed
    /// through without being read.
    pub memory: u64,
    /// Maximum number of concurrent client connections; `None`: as many as the limit of open file
    /// descriptors allows.
    pub connections: Option<usize>,
}

/// Time limits for backends and drafters; `None` means no limit unless the field says otherwise.
/// Those for clients are in [`Limits::head`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// For connecting to a backend.
    pub connect: Duration,
    /// From sending a request to the first byte of the backend's answer.
    pub first_byte: Option<Duration>,
    /// Longest pause between two pieces of a backend's answer.
    pub idle: Option<Duration>,
    /// For one verify request.
    pub verify: Duration,
    /// For one draft of a model drafter; `None`: each session chooses its own limit.
    pub draft: Option<Duration>,
    /// Time that an unused connection to a backend is kept open.
    pub pool_idle: Duration,
}

/// Conditions of `/readyz`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// True if `/readyz` waits until a replica of every backend can be reached.
    pub require_backend: bool,
}

/// How the tenant of a request is determined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tenant {
    /// Request header that names the tenant; `None`: no header does.
    pub header: Option<String>,
    /// Peers (addresses or networks) from which that header is trusted; from any other it is
    /// ignored.
    pub trusted_peers: Vec<Network>,
    /// Tenant of a request that no trusted header names.
    pub fallback: TenantFallback,
}

/// Tenant of a request that no trusted header names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TenantFallback {
    /// No tenant: the request shares nothing with any other.
    #[default]
    None,
    /// A hash of the `Authorization` header.
    AuthorizationHash,
}

/// Permissions of the client header `x-foretell`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClientControl {
    /// Nothing: the header is ignored.
    Off,
    /// It may reduce the limits of policy and gates, never extend them.
    #[default]
    Bounded,
}

/// A drafter model that runs in this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrafterModel {
    /// Folder of the model.
    pub path: PathBuf,
    /// Its tokenizer file or folder; `None`: the tokenizer is in the model's folder.
    pub tokenizer: Option<PathBuf>,
    /// Device that it runs on.
    pub device: DeviceChoice,
    /// Maximum number of sessions that it drafts for at a time.
    pub slots: u32,
    /// Longest context, tokens.
    pub context: u32,
}

/// Limits of the corpus, the texts that drafters keep across requests.
#[derive(Clone, Debug, PartialEq)]
pub struct Corpus {
    /// Maximum size of the corpus, including its indexes, bytes.
    pub bytes: u64,
    /// Time that an unused text is kept.
    pub ttl: Duration,
    /// File that preserves learnt costs and acceptance over a restart, and beside it `FILE.texts`,
    /// which preserves the corpus; `None`: both are lost.
    pub snapshot: Option<PathBuf>,
    /// Where the requests of policies with `corpus.record` are written; `None`: nowhere.
    pub record: Option<Record>,
}

/// Where requests are recorded for `foretell train`.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Folder of the recording.
    pub dir: PathBuf,
    /// Maximum size, bytes; the oldest texts are deleted for room.
    pub max_bytes: u64,
    /// Share of the requests that are recorded, 0 to 1.
    pub sample: f64,
    /// File with the key that encrypts it, 64 hexadecimal digits; `None`: it is not encrypted.
    pub key_file: Option<PathBuf>,
}

/// Logging and tracing.
#[derive(Clone, Debug, PartialEq)]
pub struct Observe {
    /// Format of log lines.
    pub log: LogFormat,
    /// Lowest level that is logged.
    pub level: LogLevel,
    /// Base URL of the OTLP collector for traces, to which `/v1/traces` is added; `None`: no
    /// traces.
    pub otlp: Option<Uri>,
    /// Share of the requests that have a line in the log, and spans unless the client has decided
    /// that, 0 to 1. Failed requests always have a line, and requests in a sampled trace of the
    /// client have both.
    pub share: f64,
}

impl Default for Observe {
    fn default() -> Self {
        Self { log: LogFormat::default(), level: LogLevel::default(), otlp: None, share: 1.0 }
    }
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere.
    #[default]
    Auto,
    /// One JSON object per line.
    Json,
    /// Plain text for reading on a terminal.
    Text,
}

impl LogFormat {
    /// Every value with its name in files and flags.
    pub const NAMES: &'static [(&'static str, Self)] =
        &[("auto", Self::Auto), ("json", Self::Json), ("text", Self::Text)];
}

/// Lowest level that is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogLevel {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    /// Every value with its name in files.
    pub const NAMES: &'static [(&'static str, Self)] = &[
        ("error", Self::Error),
        ("warn", Self::Warn),
        ("info", Self::Info),
        ("debug", Self::Debug),
        ("trace", Self::Trace),
    ];

    /// Name in files and log filters.
    pub fn name(self) -> &'static str {
        name_of(Self::NAMES, self)
    }
}
