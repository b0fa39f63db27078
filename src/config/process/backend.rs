//! A backend as the config file describes it.

use foretell_engines::Dialect as Spoken;
use foretell_parsers::parse::Parsers;
use foretell_wire::openai::Api;
use std::path::PathBuf;
use std::time::Duration;

use http::Uri;

use crate::values::Glob;
use foretell_core::words::VerifyMethod;

/// API of a backend's engine (`engine` in the file).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// Detected by requests to the server.
    #[default]
    Auto,
    /// That of this engine.
    Of(Spoken),
}

/// Every dialect with its name in files.
#[allow(clippy::indexing_slicing, reason = "evaluated by the compiler")]
const NAMES: [(&str, Dialect); Spoken::ALL.len() + 1] = {
    let mut names = [("auto", Dialect::Auto); Spoken::ALL.len() + 1];
    let mut at = 0;
    while at < Spoken::ALL.len() {
        names[at + 1] = (Spoken::ALL[at].name(), Dialect::Of(Spoken::ALL[at]));
        at += 1;
    }
    names
};

impl Dialect {
    /// The configured dialect; `None` for `auto`, where it is detected.
    pub const fn spoken(self) -> Option<Spoken> {
        match self {
            Self::Auto => None,
            Self::Of(dialect) => Some(dialect),
        }
    }

    /// Every value with its name in files.
    pub const NAMES: &'static [(&'static str, Self)] = &NAMES;

    /// Name in files, metrics and logs.
    pub fn name(self) -> &'static str {
        super::name_of(Self::NAMES, self)
    }

    /// True if the engine is this one, or not configured.
    pub fn may_be(self, dialect: Spoken) -> bool {
        self.spoken().is_none_or(|spoken| spoken == dialect)
    }
}

/// A backend: a service with one or more replicas, as the config file describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Backend {
    /// Name in policies, metrics and logs; unique.
    pub name: String,
    /// API of its engine.
    pub dialect: Dialect,
    /// Its replicas.
    pub replicas: Replicas,
    /// Data-parallel ranks behind each address, each a replica of its own; 0: the engine does not
    /// use ranks.
    pub ranks: u32,
    /// The server that renders its chat requests and parses outputs.
    pub render: Render,
    /// The APIs whose requests are translated to chats for it.
    pub translates: Vec<Api>,
    /// The models that it serves; empty means every model.
    pub models: Vec<Model>,
    /// How connections to it are made.
    pub connect: Connect,
    /// Path and interval of its load report.
    pub load: Load,
    /// Methods for verifying drafts and their limits.
    pub methods: VerifyLimits,
    /// Limits of the probe.
    pub probe: Probe,
    /// Share of the free sequences, 0 to 1, that verify requests by fan-out may take.
    pub slots: f64,
    /// True if the operator pays per token.
    pub billed: bool,
    /// True if it gets the requests for models that no backend lists; at most one backend does.
    pub default: bool,
}

/// The server that renders a backend's chat requests and parses outputs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Render {
    /// The backend itself, if it can.
    #[default]
    Backend,
    /// None: what has to be rendered is passed through.
    Never,
    /// The one at this URL.
    By(Uri),
}

/// The replicas of a backend; each is one KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replicas {
    /// One replica per base URL.
    Urls(Vec<Uri>),
    /// One replica per address that a host name resolves to.
    Dns {
        /// Host name and port, as `HOST:PORT`.
        name: String,
        /// Time between two look-ups of the name.
        every: Duration,
        /// Use TLS; the certificate must be valid for the host name.
        https: bool,
    },
}

/// A model that a backend serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// The id as clients send it, or a pattern of ids.
    pub id: Glob,
    /// Further names of the same model; a request is forwarded with the name that the client used.
    pub aliases: Vec<String>,
    /// Source of its tokenizer.
    pub tokenizer: TokenizerSource,
    /// The output parsers that its server was started with, where that does not tell them.
    pub parsers: Parsers,
    /// Its `generation_config.json`, or a folder with one, where its server takes the sampling
    /// defaults of chats from that and does not tell them; `None` if none is named.
    pub generation_config: Option<PathBuf>,
}

/// Source of a model's tokenizer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TokenizerSource {
    /// The backend's own, fetched from its `/tokenizer.json`.
    #[default]
    Backend,
    /// A `tokenizer.json` file, or a folder that has one.
    File(PathBuf),
}

/// How connections to a backend are made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connect {
    /// Value of the `Host` header.
    pub host: HostHeader,
    /// Authorities (PEM) that may sign the backend's certificate; `None`: the usual public ones.
    pub ca: Option<PathBuf>,
    /// Client certificate chain and private key (PEM) to show the backend; `None`: no client
    /// certificate.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Pass on the client's `Authorization` header; if false it is removed.
    pub pass_auth: bool,
    /// File with a bearer token that replaces the client's; `None`: `pass_auth` decides.
    pub token_file: Option<PathBuf>,
    /// File with the bearer token of Foretell's own calls (identity, health, load, probe); it is
    /// never used for a client's request. `None`: these calls are signed as set by `token_file`.
    pub own_token_file: Option<PathBuf>,
}

/// Value of the `Host` header that a backend receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostHeader {
    /// The authority of the backend's own URL.
    #[default]
    Backend,
    /// The one that the client sent.
    Client,
}

/// Path and interval of a backend's load report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    /// Path of the load page on each replica; the default `/metrics` means the usual page of its
    /// engine.
    pub url: String,
    /// Time between two readings.
    pub every: Duration,
}

/// Methods for verifying drafts and their limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyLimits {
    /// Allowed methods; their order has no effect.
    pub allow: Vec<VerifyMethod>,
    /// True if `allow` is set in the file. A method that the operator lists is used even where its
    /// first call may crash the engine.
    pub explicit: bool,
    /// Maximum context of a verify request, tokens.
    pub context_max: u32,
    /// Maximum size of a verify request, and of its answer, bytes.
    pub bytes_max: u64,
}

/// When a backend is probed, and the probe's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// When the probe runs.
    pub when: ProbeWhen,
    /// Maximum number of calls of one probe.
    pub calls: u32,
    /// Maximum time for all calls of one probe.
    pub within: Duration,
}

/// When a backend is probed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProbeWhen {
    /// As soon as a replica is ready.
    #[default]
    Ready,
    /// Never automatically; the operator can start it.
    Never,
}
