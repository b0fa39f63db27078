//! The process file (`foretell.yaml`), validated: what listens where, which backends there are, and bounds.

mod backend;
mod backends;
pub(super) mod file;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use http::Uri;
use indexmap::IndexMap;

use super::values::Network;

pub use backend::{
    Backend, Budget, Connect, Dialect, HostHeader, HttpVersion, Load, Model, PlanName, Plans, Probe,
    ProbeWhen, Replicas, ServedModel, Switchback, TokenizerSource,
};
pub use file::{Parsed, parse, parse_all};

/// What the whole process does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Relay everything.
    Off,
    /// Relay and only shadow-draft.
    Observe,
    /// Leap where it pays.
    #[default]
    Auto,
}

impl Mode {
    /// All, with their names in files and in the admin interface.
    pub const NAMES: &'static [(&'static str, Self)] =
        &[("off", Self::Off), ("observe", Self::Observe), ("auto", Self::Auto)];

    /// The name in files and in the admin interface.
    pub fn name(self) -> &'static str {
        name_of(Self::NAMES, self)
    }
}

/// The name of a value in a list of names.
pub(super) fn name_of<T: PartialEq + Copy>(names: &[(&'static str, T)], value: T) -> &'static str {
    names.iter().find(|(_, named)| *named == value).map_or("", |(name, _)| name)
}

/// The process file.
#[derive(Clone, Debug, PartialEq)]
pub struct Process {
    /// What the whole process does.
    pub mode: Mode,
    /// Where clients are served.
    pub listen: Vec<Listen>,
    /// The admin interface.
    pub admin: Admin,
    /// A listener that serves nothing but `/metrics`.
    pub metrics: Option<SocketAddr>,
    /// Bounds on clients.
    pub limits: Limits,
    /// How long things may take.
    pub timeouts: Timeouts,
    /// How the process ends.
    pub drain: Drain,
    /// Who a request belongs to.
    pub tenant: Tenant,
    /// What `x-foretell` may do.
    pub client: ClientControl,
    /// The backends, in the order of the file.
    pub backends: Vec<Backend>,
    /// Drafter models by name.
    pub drafters: IndexMap<String, DrafterModel>,
    /// What drafters may remember across requests.
    pub memory: Memory,
    /// When the process says that it is ready.
    pub ready: Ready,
    /// The folder of the policies.
    pub policies: PathBuf,
    /// That folder is named, or was there when it was read first: without it nothing is read.
    pub policies_must_exist: bool,
    /// Logs and traces.
    pub observe: Observe,
}

/// A listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// Where.
    pub address: SocketAddr,
    /// With TLS.
    pub tls: Option<ServerTls>,
}

/// Certificates of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerTls {
    /// The certificate chain, PEM.
    pub cert: PathBuf,
    /// The private key, PEM.
    pub key: PathBuf,
    /// Clients must show a certificate of this authority.
    pub client_ca: Option<PathBuf>,
}

/// The admin interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// Where; anything but loopback needs a token.
    pub address: SocketAddr,
    /// The file with the bearer token.
    pub token_file: Option<PathBuf>,
    /// Host names by which it is asked, besides `localhost` and addresses.
    pub hosts: Vec<String>,
}

/// Bounds on clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most header fields.
    pub headers: usize,
    /// Most bytes of all headers.
    pub header_bytes: u64,
    /// Longest URI, bytes.
    pub uri: u64,
    /// Larger bodies are relayed unread, bytes.
    pub speculate_body: u64,
    /// Larger bodies are refused, bytes.
    pub relay_body: Option<u64>,
    /// Most speculated requests at a time; the others are relayed.
    pub sessions: usize,
    /// Most memory for bodies and sessions, bytes; above it completions are relayed unread.
    pub memory: u64,
    /// Most clients connected at once; by default as many as the limit of open descriptors allows.
    pub connections: Option<usize>,
}

/// How long things may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// From connecting, or from its first byte, to the end of a head.
    pub header: Duration,
    /// Silence inside the body of a request.
    pub body: Duration,
    /// A connection without a request.
    pub keep_alive: Duration,
    /// Connecting to a backend.
    pub connect: Duration,
    /// From the request to the backend's first byte.
    pub first_byte: Option<Duration>,
    /// Between two bytes of a backend.
    pub idle: Option<Duration>,
    /// A verify call.
    pub verify: Duration,
    /// A draft of a model drafter; `None` leaves it to each session.
    pub draft: Option<Duration>,
    /// How long an unused connection is kept.
    pub pool_idle: Duration,
}

/// How the process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drain {
    /// Not ready, but still accepting.
    pub delay: Duration,
    /// Nobody has set `delay`: it ends as soon as no client is connected.
    pub early: bool,
    /// Then open requests may end within this.
    pub grace: Duration,
}

/// When the process says that it is ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// `/readyz` waits until a replica of every backend can be reached.
    pub require_backend: bool,
}

/// Who a request belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tenant {
    /// The header that names the tenant.
    pub header: Option<String>,
    /// Peers whose header is believed.
    pub trusted_peers: Vec<Network>,
    /// What names the tenant if no header does.
    pub fallback: TenantFallback,
}

/// What names the tenant if no header does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TenantFallback {
    /// Nothing: the request stands for itself.
    #[default]
    None,
    /// A hash of the authorization header.
    AuthorizationHash,
}

/// What `x-foretell` may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClientControl {
    /// Nothing.
    Off,
    /// Lower what policy and gates allow.
    #[default]
    Bounded,
}

/// A local drafter model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrafterModel {
    /// Its folder.
    pub path: PathBuf,
    /// Its tokenizer, if it is not in the folder.
    pub tokenizer: Option<PathBuf>,
    /// Where it runs.
    pub device: Device,
    /// Most sessions at a time.
    pub slots: u32,
    /// Longest context, tokens.
    pub context: u32,
}

/// Where a model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Device {
    /// CUDA if it is there, else CPU.
    #[default]
    Auto,
    /// CPU.
    Cpu,
    /// CUDA, or an error that says what is missing.
    Cuda,
}

impl Device {
    /// All, with their names in files and flags.
    pub const NAMES: &'static [(&'static str, Self)] =
        &[("auto", Self::Auto), ("cpu", Self::Cpu), ("cuda", Self::Cuda)];
}

/// What drafters may remember across requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Most bytes.
    pub bytes: u64,
    /// For how long.
    pub ttl: Duration,
    /// The file that it is kept in over a restart.
    pub snapshot: Option<PathBuf>,
}

/// Logs and traces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observe {
    /// How a log line is written.
    pub log: LogFormat,
    /// Which lines are written.
    pub level: LogLevel,
    /// Where traces are sent.
    pub otlp: Option<Uri>,
    /// Requests may opt in to having their text logged.
    pub text: bool,
}

/// How a log line is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere.
    #[default]
    Auto,
    /// One JSON object.
    Json,
    /// For people.
    Text,
}

impl LogFormat {
    /// All, with their names in files and flags.
    pub const NAMES: &'static [(&'static str, Self)] =
        &[("auto", Self::Auto), ("json", Self::Json), ("text", Self::Text)];
}

/// Which log lines are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the usual five
pub enum LogLevel {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    /// All, with their names in files.
    pub const NAMES: &'static [(&'static str, Self)] = &[
        ("error", Self::Error),
        ("warn", Self::Warn),
        ("info", Self::Info),
        ("debug", Self::Debug),
        ("trace", Self::Trace),
    ];

    /// The name in files and filters.
    pub fn name(self) -> &'static str {
        name_of(Self::NAMES, self)
    }
}
